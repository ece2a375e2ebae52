package conformance

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Exec Act Table", cascade 4.2.1-f, AERR "Checkpoint as ECT": a token of an event that
// lacks a member which its draft asks for is refused, and nothing is forwarded.
func TestATDMembersOfEvents(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr})
	wid := uuid.NewString()
	began := a.Issue(ect.Claims{Workflow: wid})
	g.Call(harness.With(began, harness.Request{Path: "/begin"})).Want(t, 201, "arrival 1", "executed")
	for action, needs := range map[string][]ect.Member{
		"atd:checkpoint": {ect.MemberReversible, ect.MemberRollbackURI, ect.MemberTTL}, "checkpoint": {ect.MemberReversible, ect.MemberRollbackURI, ect.MemberTTL},
		"aerr:checkpoint": {ect.MemberReversible, ect.MemberRollbackURI, ect.MemberTTL},
		"atd:error":       {ect.MemberSeverity, ect.MemberErrorType}, "aerr:error": {ect.MemberSeverity, ect.MemberErrorType},
		"atd:circuit_open":      {ect.MemberDownstreamAgent, ect.MemberErrorRate, ect.MemberWindow},
		"atd:circuit_close":     {ect.MemberDownstreamAgent, ect.MemberTotalCooldown},
		"atd:rollback_request":  {ect.MemberReason, ect.MemberCascade},
		"atd:rollback_result":   {ect.MemberStatus},
		"atd:workflow_start":    {ect.MemberWorkflowName, ect.MemberDescription},
		"atd:workflow_complete": {ect.MemberWorkflowName, ect.MemberTerminalStatus},
	} {
		v := ect.Cascade
		if draft, _, is := strings.Cut(action, ":"); is {
			v = map[string]ect.Vocabulary{"atd": ect.ATD, "aerr": ect.AERR}[draft]
		}
		for _, m := range needs {
			got := g.Call(harness.With(a.Issue(harness.EventOf(action, v, wid, []string{began.ID()}, m)), harness.Request{Path: "/x"}))
			got.RefusedFor(t, http.StatusForbidden, "ext")
			if name := v.Member(m); !strings.Contains(got.Body, "; "+name+" is missing") && !strings.Contains(got.Body, "; "+string(m)+" is missing") {
				t.Errorf("%s without %s: %s", action, name, got.Body)
			}
		}
		whole := g.Call(harness.With(a.Issue(harness.EventOf(action, v, wid, []string{began.ID()})), harness.Request{Path: "/whole"}))
		if strings.Contains(whole.Body, " is missing") {
			t.Errorf("%s with all: %d %s", action, whole.Status, whole.Body)
		}
	}
	u.Arrived("/x", 0)
	// On the path for rollbacks too.
	asked := harness.EventOf("atd:rollback_request", ect.ATD, wid, []string{began.ID()}, ect.MemberCascade)
	g.Call(harness.With(a.Issue(asked), harness.Request{Path: "/.well-known/atd/rollback", Body: "{}"})).RefusedFor(t, http.StatusForbidden, "ext")
}

// Cascade 1 and Table 1, ATD and AERR "IANA Considerations": the events of the older drafts
// are read as what they are in cascade's.
func TestOlderNamesAreRead(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr})
	for action, want := range map[string]string{
		"checkpoint": "checkpoint", "atd:checkpoint": "checkpoint", "aerr:checkpoint": "checkpoint",
		"atd:error": "error", "aerr:error": "error",
		"atd:circuit_open": "circuit_breaker_open", "aerr:circuit_open": "circuit_breaker_open",
		"aerr:circuit_half_open": "circuit_breaker_half_open",
		"atd:circuit_close":      "circuit_breaker_close", "aerr:circuit_closed": "circuit_breaker_close",
		"atd:rollback_request": "rollback_request", "aerr:rollback_request": "rollback_request",
		"atd:rollback_result": "rollback_complete", "aerr:rollback_complete": "rollback_complete", "aerr:rollback_escalated": "rollback_complete",
		"atd:workflow_start": "workflow_start", "atd:workflow_complete": "workflow_complete",
	} {
		t.Run(action, func(t *testing.T) {
			v := ect.Cascade
			if draft, _, is := strings.Cut(action, ":"); is {
				v = map[string]ect.Vocabulary{"atd": ect.ATD, "aerr": ect.AERR}[draft]
			}
			wid := uuid.NewString()
			began := a.Issue(ect.Claims{Workflow: wid})
			first := g.Call(harness.With(began, harness.Request{Path: "/begin"}))
			sent := a.Issue(harness.EventOf(action, v, wid, []string{began.ID()}))
			if sent.Action() != action {
				t.Fatalf("issued as %s", sent.Action())
			}
			next := harness.With(a.Issue(ect.Claims{Workflow: wid, Parents: []string{began.ID()}}), harness.Request{Path: "/next"})
			next.Header[ect.FieldName] = sent.Raw() + ", " + next.Header[ect.FieldName]
			if got := g.Call(next); got.Status != http.StatusCreated {
				t.Fatalf("%d %s", got.Status, got.Body)
			}
			view := g.SettledView(a, wid, 7)
			for _, n := range view.Nodes {
				if n.JTI != sent.ID() {
					continue
				}
				if n.Event != want || n.ExecAct != action {
					t.Errorf("%s is read as %s", n.ExecAct, n.Event)
				}
			}
			if !slices.ContainsFunc(view.Nodes, func(n harness.WorkflowNode) bool { return n.JTI == sent.ID() }) {
				t.Errorf("it is not recorded: %+v", view)
			}
			if want == "error" && view.State(began.ID()) != "failed" {
				t.Errorf("A-node-states-e: what failed is %s", view.State(began.ID()))
			}
			_ = first
		})
	}
}

// ATD "Workflow Boundary ECTs": an agent's start is recorded and read; a rollback of the whole
// workflow ends it with a token that follows from the start and says how and after how long.
func TestWorkflowBoundaries(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	start := a.Issue(harness.EventOf("atd:workflow_start", ect.ATD, s.Wid, nil))
	first := harness.With(a.Issue(ect.Claims{Workflow: s.Wid}), harness.Charge(1))
	first.Header[ect.FieldName] = start.Raw() + ", " + first.Header[ect.FieldName]
	got := g.Call(first)
	if got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	doc := s.Back(harness.RollbackBody{Checkpoint: got.Header.Get("Execution-Checkpoint"), Scope: "full_workflow"})
	doc.Want(t, "completed")
	lab.WantCharge("ch_1", "refunded")
	// Two tokens, checkpoint and node; the request, start, step and result; the end.
	ends := s.Events(9, ect.EventWorkflowComplete)
	if len(ends) != 1 {
		t.Fatalf("%d ends", len(ends))
	}
	harness.Follows(t, ends[0], start.ID(), doc.Tokens.Complete)
	harness.Says(t, ends[0], map[ect.Member]string{ect.MemberWorkflowName: harness.Quoted("the flow"), ect.MemberTerminalStatus: harness.Quoted("rolled_back")})
	if elapsed, ok := ends[0].Ext().Number(ect.MemberElapsed); !ok || elapsed < 0 || ends[0].Issuer() != harness.GatewayIdentity {
		t.Errorf("%s", ends[0].Payload())
	}
}

// ATD "Basic Rollback", AERR "Rollback Response": the result's token follows from the request
// and says what came of it, in the words of the draft that was asked in.
func TestOlderResultTokens(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, g := harness.LaunchParts(t, harness.SagaActions, a, b)
	for name, c := range map[string]struct {
		vocabulary ect.Vocabulary
		below      harness.Request // what another agent did because of it
		escalated  bool
		action     string
		status     string
		cascaded   string
	}{
		"ATD":                  {ect.ATD, harness.Charge(1), false, "atd:rollback_result", "completed", "completed"},
		"ATD, in part":         {ect.ATD, harness.Request{Path: "/mail"}, false, "atd:rollback_result", "partial", "escalated"},
		"AERR":                 {ect.AERR, harness.Charge(1), false, "aerr:rollback_complete", "completed", "completed"},
		"AERR, in part":        {ect.AERR, harness.Request{Path: "/mail"}, false, "aerr:rollback_complete", "partial", "escalated"},
		"ATD, a person's word": {ect.ATD, harness.Request{}, true, "atd:rollback_result", "escalated", ""},
		"AERR, a person's":     {ect.AERR, harness.Request{}, true, "aerr:rollback_escalated", "escalated", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := g.Saga(a).In(t)
			lab.Write("/docs/x", `{"n":1}`)
			var root harness.SagaStep
			if c.escalated {
				root = s.Do(harness.Request{Path: "/mail"})
			} else {
				root = s.Do(harness.Put("/docs/x", `{"n":2}`))
				(&harness.Saga{T: t, G: g, A: b, Wid: s.Wid}).Do(c.below, root.Checkpoint)
			}
			path, claims := "/.well-known/atd/rollback", ect.Claims{Workflow: s.Wid, Action: "rollback_request", Vocabulary: c.vocabulary, Parents: []string{root.Checkpoint},
				Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, true)}
			body, id := "", uuid.NewString()
			if c.vocabulary == ect.AERR {
				cause := s.Reports(root.Checkpoint)
				path, claims.Parents, claims.Ext = "/aerr/rollback", []string{cause}, nil
				body = `{"rollback_id":"urn:uuid:` + id + `","checkpoint_id":"` + root.Checkpoint + `","reason":"why","cascade":true}`
			}
			asking := a.Issue(claims)
			got := g.Call(harness.With(asking, harness.Request{Path: path, Body: body}))
			doc := harness.Document[struct{ ECT string }](t, got)
			token, err := ect.ParseInsecure(doc.ECT)
			if err != nil || got.Header.Get("Execution-Context") != doc.ECT {
				t.Fatalf("%v: %s", err, got.Body)
			}
			harness.Follows(t, token, asking.ID())
			if token.Action() != c.action || token.Workflow() != s.Wid || token.Issuer() != harness.GatewayIdentity || token.Level() != ect.L2 {
				t.Errorf("%s", token.Payload())
			}
			harness.Says(t, token, map[ect.Member]string{ect.MemberStatus: harness.Quoted(c.status)})
			if c.vocabulary == ect.ATD {
				harness.Says(t, token, map[ect.Member]string{ect.MemberCheckpointID: harness.Quoted(root.Checkpoint)}, ect.MemberStateAfter)
			} else {
				harness.Says(t, token, map[ect.Member]string{ect.MemberRollbackID: harness.Quoted("urn:uuid:" + id)})
			}
			if !strings.Contains(token.Payload(), `"`+c.vocabulary.Member(ect.MemberStatus)+`"`) {
				t.Errorf("not in its words: %s", token.Payload())
			}
			cascaded, there := token.Ext().Outcomes(ect.MemberCascaded)
			if c.cascaded == "" {
				if !there || len(cascaded) != 0 {
					t.Errorf("cascaded: %s", token.Payload())
				}
				return
			}
			if !slices.Equal(cascaded, []ect.Outcome{{Agent: b.Issuer.Identity(), Status: c.cascaded}}) {
				t.Errorf("cascaded: %s", token.Payload())
			}
			after, hashed := token.Ext().Text(ect.MemberStateAfter)
			if c.vocabulary == ect.AERR && (!hashed || token.OutputHash().Prefixed() != after) || token.OutputHash().IsZero() {
				t.Errorf("E-rollback-response-b: %s", token.Payload())
			}
		})
	}
}

// AERR "Rollback Protocol", "Idempotency": the request names its error, cascade takes the
// consequences along, and one id has one result.
func TestAERRRequests(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	ask := func(s *harness.Saga, id, checkpoint, more string, parents ...string) harness.Reply {
		t.Helper()
		token := a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: parents})
		return g.Call(harness.With(token, harness.Request{Path: "/aerr/rollback", Body: `{"rollback_id":"urn:uuid:` + id + `","checkpoint_id":"` + checkpoint + `","keep_dependants":true` + more + `}`}))
	}
	for more, both := range map[string]bool{`,"cascade":true`: true, `,"cascade":false`: false, ``: false} {
		s := g.Saga(a)
		root := s.Do(harness.Charge(1))
		next := s.Do(harness.Charge(2), root.Checkpoint)
		last := s.Do(harness.Charge(3), next.Checkpoint)
		cause, id := s.Reports(root.Checkpoint), uuid.NewString()
		first := ask(s, id, root.Checkpoint, more+`,"reason":"why"`, cause)
		if first.Status != http.StatusOK {
			t.Fatalf("%s: %d %s", more, first.Status, first.Body)
		}
		want := map[bool]string{true: "refunded", false: "open"}
		lab.WantCharge(root.Id(t), "refunded")
		lab.WantCharge(next.Id(t), want[both])
		lab.WantCharge(last.Id(t), want[both])
		refunds := len(lab.All("POST /refunds", ""))
		// E-idempotency-a: once more, under another token.
		again := ask(s, id, root.Checkpoint, more+`,"reason":"why"`, cause)
		if again.Status != http.StatusOK || verdict(t, again) != verdict(t, first) {
			t.Errorf("%s: again %s, first %s", more, again.Body, first.Body)
		}
		ask(s, id, root.Checkpoint, more+`,"reason":"another"`, cause).Problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")
		if got := len(lab.All("POST /refunds", "")); got != refunds {
			t.Errorf("%s: %d refunds, before %d", more, got, refunds)
		}
	}

	// E-rollback-request-b: without the token, without the error, or with another one.
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	body := `{"rollback_id":"` + harness.RollbackID(1) + `","checkpoint_id":"` + step.Checkpoint + `","cascade":true}`
	if got := g.Call(harness.Request{Path: "/aerr/rollback", Body: body}); got.Status != http.StatusUnauthorized {
		t.Errorf("without a token: %d %s", got.Status, got.Body)
	}
	ask(s, uuid.NewString(), step.Checkpoint, "", step.Checkpoint).RefusedFor(t, http.StatusForbidden, "par")
	if got := ask(s, uuid.NewString(), step.Checkpoint, ""); got.Status != http.StatusForbidden {
		t.Errorf("without an error: %d %s", got.Status, got.Body)
	}
	if got := ask(s, uuid.NewString(), step.Checkpoint, "", uuid.NewString()); got.Status != http.StatusForbidden {
		t.Errorf("with an error that nobody knows: %d %s", got.Status, got.Body)
	}
	other := a.Issue(ect.Claims{Workflow: s.Wid, Action: "do", Parents: []string{step.Checkpoint}})
	if got := g.Call(harness.With(other, harness.Request{Path: "/aerr/rollback", Body: body})); got.Status != http.StatusForbidden {
		t.Errorf("with another token: %d %s", got.Status, got.Body)
	}
	lab.WantCharge(step.Id(t), "open")
}

// verdict is what a result's token says, whoever it is for.
func verdict(t *testing.T, r harness.Reply) string {
	t.Helper()
	doc := harness.Document[struct {
		Action string          `json:"exec_act"`
		Ext    json.RawMessage `json:"ext"`
	}](t, r)
	return doc.Action + " " + string(doc.Ext)
}

// AERR "Security Considerations": an error names a checkpoint of its own workflow, or is
// refused, and then no rollback follows from it.
func TestAERRErrorsNameTheirCheckpoints(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s, elsewhere := g.Saga(a), g.Saga(a)
	step, foreign := s.Do(harness.Charge(1)), elsewhere.Do(harness.Charge(2))
	for name, c := range map[string]struct {
		parent, checkpoint string
		status             int
	}{
		"its own":              {step.Checkpoint, step.Checkpoint, http.StatusCreated},
		"of another workflow":  {step.Checkpoint, foreign.Checkpoint, http.StatusForbidden},
		"nobody's":             {step.Checkpoint, uuid.NewString(), http.StatusForbidden},
		"a parent of another":  {foreign.Checkpoint, step.Checkpoint, http.StatusForbidden},
		"a parent of nobody's": {uuid.NewString(), step.Checkpoint, http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			claims := harness.EventOf("aerr:error", ect.AERR, s.Wid, []string{c.parent}, ect.MemberCheckpointID)
			claims.Ext.Text(ect.MemberCheckpointID, c.checkpoint)
			token := a.Issue(claims)
			if got := g.Call(harness.With(token, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status != c.status {
				t.Errorf("%d %s", got.Status, got.Body)
			}
			if c.status == http.StatusCreated {
				return
			}
			asking := a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: []string{token.ID()}})
			body := `{"rollback_id":"urn:uuid:` + uuid.NewString() + `","checkpoint_id":"` + step.Checkpoint + `"}`
			if got := g.Call(harness.With(asking, harness.Request{Path: "/aerr/rollback", Body: body})); got.Status != http.StatusForbidden {
				t.Errorf("a rollback because of it: %d %s", got.Status, got.Body)
			}
		})
	}
	lab.Arrived("POST /refunds", 0)
}

// ATD "Error Signaling": the four severities and no other; any word for the type; a node shows
// its worst.
func TestATDSeverities(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr})
	wid := uuid.NewString()
	token := a.Issue(ect.Claims{Workflow: wid})
	g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	post := func(severity, kind string) harness.Reply {
		claims := harness.EventOf("atd:error", ect.ATD, wid, []string{token.ID()}, ect.MemberSeverity, ect.MemberErrorType)
		claims.Ext.Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, kind)
		return g.Call(harness.With(a.Issue(claims), harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}}))
	}
	kinds := []string{"action_failed", "timeout", "constraint_violation", "resource_exhausted", "upstream_cascade", "unknown", "circuit_open", "a_word_of_mine"}
	for i, kind := range kinds {
		if got := post([]string{"info", "warning", "error", "critical"}[i%4], kind); got.Status != http.StatusCreated {
			t.Errorf("%s: %d %s", kind, got.Status, got.Body)
		}
	}
	for _, severity := range []string{"fatal", "Critical", "", "4"} {
		post(severity, "timeout").RefusedFor(t, http.StatusForbidden, "ext")
	}
	g.SettledView(a, wid, 3+len(kinds))
	view := harness.Document[struct {
		Nodes []struct {
			JTI   string
			Worst string `json:"worst_severity"`
		}
	}](t, g.Get(a, "workflows/"+wid))
	for _, n := range view.Nodes {
		if n.JTI == token.ID() && n.Worst != "critical" {
			t.Errorf("the worst is %q", n.Worst)
		}
	}
}

// ATD "Error Signaling", AERR "IANA Considerations": which type of error the gateway writes of
// what came of a call.
func TestATDErrorTypesOnTheWire(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	hold := harness.NewGate(t)
	defer hold.Open()
	u.On("/refused", harness.Status(http.StatusUnprocessableEntity, ""))
	u.On("/busy", harness.Status(http.StatusTooManyRequests, ""))
	u.On("/forbidden", harness.Status(http.StatusForbidden, ""))
	u.On("/lost", harness.Reset)
	u.On("/slow", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
	u.On("/cascade", func(w http.ResponseWriter, in *harness.Arrival) {
		led, err := ect.ParseInsecure(in.Header.Get(ect.FieldName))
		if err != nil {
			t.Error(err)
			return
		}
		claims := harness.EventOf("error", ect.Cascade, led.Workflow(), []string{led.ID()})
		w.Header().Set(ect.FieldName, a.Issue(claims).Raw())
		w.WriteHeader(http.StatusInternalServerError)
	})
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + u.Addr + " {\n identity " + a.Issuer.Identity() + "\n action slow {\n match path /slow\n deadline 5s\n }\n }"})
	for path, want := range map[string][2]string{
		"/refused": {"warning", "action_failed"}, "/busy": {"warning", "resource_exhausted"}, "/forbidden": {"warning", "constraint_violation"},
		"/lost": {"critical", "unknown"}, "/slow": {"critical", "timeout"}, "/cascade": {"error", "upstream_cascade"},
	} {
		wid := uuid.NewString()
		g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: path}))
		found := false
		for _, n := range g.SettledView(a, wid, 4).Nodes {
			if token := g.Entry(a, wid, n.JTI); token.Event() == ect.EventError && token.Issuer() == harness.GatewayIdentity {
				harness.Says(t, token, map[ect.Member]string{ect.MemberSeverity: harness.Quoted(want[0]), ect.MemberErrorType: harness.Quoted(want[1])})
				found = true
			}
		}
		if !found {
			t.Errorf("%s has no error", path)
		}
	}
}
