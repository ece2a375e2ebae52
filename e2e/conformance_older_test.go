package e2e

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// eventOf is a token of an event with all members that its draft asks for, but those of without.
func eventOf(action string, v ect.Vocabulary, wid string, parents []string, without ...ect.Member) ect.Claims {
	members := map[ect.Member]string{}
	event, _ := ect.ParseEvent(action)
	for m, value := range map[ect.Event]map[ect.Member]string{
		ect.EventCheckpoint:       {ect.MemberReversible: "true", ect.MemberRollbackURI: `"https://a.example/rollback"`, ect.MemberTTL: "3600"},
		ect.EventError:            {ect.MemberSeverity: `"error"`, ect.MemberErrorType: `"timeout"`, ect.MemberCheckpointID: `""`},
		ect.EventCircuitOpen:      {ect.MemberDownstreamAgent: `"spiffe://example.com/b"`, ect.MemberErrorRate: "0.75", ect.MemberWindow: "60"},
		ect.EventCircuitHalfOpen:  {ect.MemberDownstreamAgent: `"spiffe://example.com/b"`},
		ect.EventCircuitClose:     {ect.MemberDownstreamAgent: `"spiffe://example.com/b"`, ect.MemberTotalCooldown: "90"},
		ect.EventRollbackRequest:  {ect.MemberReason: `"why"`, ect.MemberCascade: "false"},
		ect.EventRollbackComplete: {ect.MemberStatus: `"completed"`},
		ect.EventWorkflowStart:    {ect.MemberWorkflowName: `"the flow"`, ect.MemberDescription: `"what it does"`},
		ect.EventWorkflowComplete: {ect.MemberWorkflowName: `"the flow"`, ect.MemberTerminalStatus: `"success"`},
	}[event] {
		if !slices.Contains(without, m) {
			members[m] = value
		}
	}
	ext := new(ect.ExtBuilder)
	for m, value := range members {
		ext.JSON(m, value)
	}
	c := ect.Claims{Workflow: wid, Action: action, Vocabulary: v, Parents: parents, Ext: ext}
	if event == ect.EventCheckpoint {
		c.Output = ect.Sum([]byte("a state"))
	}
	return c
}

// ATD "Exec Act Table", cascade 4.2.1-f, AERR "Checkpoint as ECT": a token of an event that
// lacks a member which its draft asks for is refused, and nothing is forwarded.
func TestATDMembersOfEvents(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr})
	wid := uuid.NewString()
	began := a.issue(ect.Claims{Workflow: wid})
	g.call(with(began, request{path: "/begin"})).want(t, 201, "arrival 1", "executed")
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
			got := g.call(with(a.issue(eventOf(action, v, wid, []string{began.ID()}, m)), request{path: "/x"}))
			got.refusedFor(t, http.StatusForbidden, "ext")
			if name := v.Member(m); !strings.Contains(got.body, "; "+name+" is missing") && !strings.Contains(got.body, "; "+string(m)+" is missing") {
				t.Errorf("%s without %s: %s", action, name, got.body)
			}
		}
		whole := g.call(with(a.issue(eventOf(action, v, wid, []string{began.ID()})), request{path: "/whole"}))
		if strings.Contains(whole.body, " is missing") {
			t.Errorf("%s with all: %d %s", action, whole.status, whole.body)
		}
	}
	u.arrived("/x", 0)
	// On the path for rollbacks too.
	asked := eventOf("atd:rollback_request", ect.ATD, wid, []string{began.ID()}, ect.MemberCascade)
	g.call(with(a.issue(asked), request{path: "/.well-known/atd/rollback", body: "{}"})).refusedFor(t, http.StatusForbidden, "ext")
}

// Cascade 1 and Table 1, ATD and AERR "IANA Considerations": the events of the older drafts
// are read as what they are in cascade's.
func TestOlderNamesAreRead(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr})
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
			began := a.issue(ect.Claims{Workflow: wid})
			first := g.call(with(began, request{path: "/begin"}))
			sent := a.issue(eventOf(action, v, wid, []string{began.ID()}))
			if sent.Action() != action {
				t.Fatalf("issued as %s", sent.Action())
			}
			next := with(a.issue(ect.Claims{Workflow: wid, Parents: []string{began.ID()}}), request{path: "/next"})
			next.header[ect.FieldName] = sent.Raw() + ", " + next.header[ect.FieldName]
			if got := g.call(next); got.status != http.StatusCreated {
				t.Fatalf("%d %s", got.status, got.body)
			}
			view := g.settledView(a, wid, 7)
			for _, n := range view.Nodes {
				if n.JTI != sent.ID() {
					continue
				}
				if n.Event != want || n.ExecAct != action {
					t.Errorf("%s is read as %s", n.ExecAct, n.Event)
				}
			}
			if !slices.ContainsFunc(view.Nodes, func(n workflowNode) bool { return n.JTI == sent.ID() }) {
				t.Errorf("it is not recorded: %+v", view)
			}
			if want == "error" && view.state(began.ID()) != "failed" {
				t.Errorf("A-node-states-e: what failed is %s", view.state(began.ID()))
			}
			_ = first
		})
	}
}

// ATD "Workflow Boundary ECTs": an agent's start is recorded and read; a rollback of the whole
// workflow ends it with a token that follows from the start and says how and after how long.
func TestWorkflowBoundaries(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	start := a.issue(eventOf("atd:workflow_start", ect.ATD, s.wid, nil))
	first := with(a.issue(ect.Claims{Workflow: s.wid}), charge(1))
	first.header[ect.FieldName] = start.Raw() + ", " + first.header[ect.FieldName]
	got := g.call(first)
	if got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	doc := s.back(rollbackBody{Checkpoint: got.header.Get("Execution-Checkpoint"), Scope: "full_workflow"})
	doc.want(t, "completed")
	lab.wantCharge("ch_1", "refunded")
	// Two tokens, checkpoint and node; the request, start, step and result; the end.
	ends := s.events(9, ect.EventWorkflowComplete)
	if len(ends) != 1 {
		t.Fatalf("%d ends", len(ends))
	}
	follows(t, ends[0], start.ID(), doc.Tokens.Complete)
	says(t, ends[0], map[ect.Member]string{ect.MemberWorkflowName: quoted("the flow"), ect.MemberTerminalStatus: quoted("rolled_back")})
	if elapsed, ok := ends[0].Ext().Number(ect.MemberElapsed); !ok || elapsed < 0 || ends[0].Issuer() != gatewayIdentity {
		t.Errorf("%s", ends[0].Payload())
	}
}

// ATD "Basic Rollback", AERR "Rollback Response": the result's token follows from the request
// and says what came of it, in the words of the draft that was asked in.
func TestOlderResultTokens(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, g := launchParts(t, sagaActions, a, b)
	for name, c := range map[string]struct {
		vocabulary ect.Vocabulary
		below      request // what another agent did because of it
		escalated  bool
		action     string
		status     string
		cascaded   string
	}{
		"ATD":                  {ect.ATD, charge(1), false, "atd:rollback_result", "completed", "completed"},
		"ATD, in part":         {ect.ATD, request{path: "/mail"}, false, "atd:rollback_result", "partial", "escalated"},
		"AERR":                 {ect.AERR, charge(1), false, "aerr:rollback_complete", "completed", "completed"},
		"AERR, in part":        {ect.AERR, request{path: "/mail"}, false, "aerr:rollback_complete", "partial", "escalated"},
		"ATD, a person's word": {ect.ATD, request{}, true, "atd:rollback_result", "escalated", ""},
		"AERR, a person's":     {ect.AERR, request{}, true, "aerr:rollback_escalated", "escalated", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := g.saga(a).in(t)
			lab.write("/docs/x", `{"n":1}`)
			var root sagaStep
			if c.escalated {
				root = s.do(request{path: "/mail"})
			} else {
				root = s.do(put("/docs/x", `{"n":2}`))
				(&saga{t, g, b, s.wid}).do(c.below, root.checkpoint)
			}
			path, claims := "/.well-known/atd/rollback", ect.Claims{Workflow: s.wid, Action: "rollback_request", Vocabulary: c.vocabulary, Parents: []string{root.checkpoint},
				Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "why").Bool(ect.MemberCascade, true)}
			body, id := "", uuid.NewString()
			if c.vocabulary == ect.AERR {
				cause := s.reports(root.checkpoint)
				path, claims.Parents, claims.Ext = "/aerr/rollback", []string{cause}, nil
				body = `{"rollback_id":"urn:uuid:` + id + `","checkpoint_id":"` + root.checkpoint + `","reason":"why","cascade":true}`
			}
			asking := a.issue(claims)
			got := g.call(with(asking, request{path: path, body: body}))
			doc := document[struct{ ECT string }](t, got)
			token, err := ect.ParseInsecure(doc.ECT)
			if err != nil || got.header.Get("Execution-Context") != doc.ECT {
				t.Fatalf("%v: %s", err, got.body)
			}
			follows(t, token, asking.ID())
			if token.Action() != c.action || token.Workflow() != s.wid || token.Issuer() != gatewayIdentity || token.Level() != ect.L2 {
				t.Errorf("%s", token.Payload())
			}
			says(t, token, map[ect.Member]string{ect.MemberStatus: quoted(c.status)})
			if c.vocabulary == ect.ATD {
				says(t, token, map[ect.Member]string{ect.MemberCheckpointID: quoted(root.checkpoint)}, ect.MemberStateAfter)
			} else {
				says(t, token, map[ect.Member]string{ect.MemberRollbackID: quoted("urn:uuid:" + id)})
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
			if !slices.Equal(cascaded, []ect.Outcome{{Agent: b.issuer.Identity(), Status: c.cascaded}}) {
				t.Errorf("cascaded: %s", token.Payload())
			}
			after, hashed := token.Ext().Text(ect.MemberStateAfter)
			if c.vocabulary == ect.AERR && (!hashed || token.OutputHash().Prefixed() != after) || token.OutputHash().IsZero() {
				t.Errorf("E-rollback-response-b: %s", token.Payload())
			}
		})
	}
}

// reports tells of an error at a checkpoint, in AERR's words, and returns its id.
func (s *saga) reports(checkpoint string) string {
	s.t.Helper()
	token := s.a.issue(eventOf("aerr:error", ect.AERR, s.wid, []string{checkpoint}))
	if got := s.g.call(with(token, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status != http.StatusCreated {
		s.t.Fatalf("%d %s", got.status, got.body)
	}
	return token.ID()
}

// AERR "Rollback Protocol", "Idempotency": the request names its error, cascade takes the
// consequences along, and one id has one result.
func TestAERRRequests(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	ask := func(s *saga, id, checkpoint, more string, parents ...string) reply {
		t.Helper()
		token := a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: parents})
		return g.call(with(token, request{path: "/aerr/rollback", body: `{"rollback_id":"urn:uuid:` + id + `","checkpoint_id":"` + checkpoint + `","keep_dependants":true` + more + `}`}))
	}
	for more, both := range map[string]bool{`,"cascade":true`: true, `,"cascade":false`: false, ``: false} {
		s := g.saga(a)
		root := s.do(charge(1))
		next := s.do(charge(2), root.checkpoint)
		last := s.do(charge(3), next.checkpoint)
		cause, id := s.reports(root.checkpoint), uuid.NewString()
		first := ask(s, id, root.checkpoint, more+`,"reason":"why"`, cause)
		if first.status != http.StatusOK {
			t.Fatalf("%s: %d %s", more, first.status, first.body)
		}
		want := map[bool]string{true: "refunded", false: "open"}
		lab.wantCharge(root.id(t), "refunded")
		lab.wantCharge(next.id(t), want[both])
		lab.wantCharge(last.id(t), want[both])
		refunds := len(lab.all("POST /refunds", ""))
		// E-idempotency-a: once more, under another token.
		again := ask(s, id, root.checkpoint, more+`,"reason":"why"`, cause)
		if again.status != http.StatusOK || verdict(t, again) != verdict(t, first) {
			t.Errorf("%s: again %s, first %s", more, again.body, first.body)
		}
		ask(s, id, root.checkpoint, more+`,"reason":"another"`, cause).problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")
		if got := len(lab.all("POST /refunds", "")); got != refunds {
			t.Errorf("%s: %d refunds, before %d", more, got, refunds)
		}
	}

	// E-rollback-request-b: without the token, without the error, or with another one.
	s := g.saga(a)
	step := s.do(charge(1))
	body := `{"rollback_id":"` + rollbackID(1) + `","checkpoint_id":"` + step.checkpoint + `","cascade":true}`
	if got := g.call(request{path: "/aerr/rollback", body: body}); got.status != http.StatusUnauthorized {
		t.Errorf("without a token: %d %s", got.status, got.body)
	}
	ask(s, uuid.NewString(), step.checkpoint, "", step.checkpoint).refusedFor(t, http.StatusForbidden, "par")
	if got := ask(s, uuid.NewString(), step.checkpoint, ""); got.status != http.StatusForbidden {
		t.Errorf("without an error: %d %s", got.status, got.body)
	}
	if got := ask(s, uuid.NewString(), step.checkpoint, "", uuid.NewString()); got.status != http.StatusForbidden {
		t.Errorf("with an error that nobody knows: %d %s", got.status, got.body)
	}
	other := a.issue(ect.Claims{Workflow: s.wid, Action: "do", Parents: []string{step.checkpoint}})
	if got := g.call(with(other, request{path: "/aerr/rollback", body: body})); got.status != http.StatusForbidden {
		t.Errorf("with another token: %d %s", got.status, got.body)
	}
	lab.wantCharge(step.id(t), "open")
}

// verdict is what a result's token says, whoever it is for.
func verdict(t *testing.T, r reply) string {
	t.Helper()
	doc := document[struct {
		Action string          `json:"exec_act"`
		Ext    json.RawMessage `json:"ext"`
	}](t, r)
	return doc.Action + " " + string(doc.Ext)
}

// AERR "Security Considerations": an error names a checkpoint of its own workflow, or is
// refused, and then no rollback follows from it.
func TestAERRErrorsNameTheirCheckpoints(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s, elsewhere := g.saga(a), g.saga(a)
	step, foreign := s.do(charge(1)), elsewhere.do(charge(2))
	for name, c := range map[string]struct {
		parent, checkpoint string
		status             int
	}{
		"its own":              {step.checkpoint, step.checkpoint, http.StatusCreated},
		"of another workflow":  {step.checkpoint, foreign.checkpoint, http.StatusForbidden},
		"nobody's":             {step.checkpoint, uuid.NewString(), http.StatusForbidden},
		"a parent of another":  {foreign.checkpoint, step.checkpoint, http.StatusForbidden},
		"a parent of nobody's": {uuid.NewString(), step.checkpoint, http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			claims := eventOf("aerr:error", ect.AERR, s.wid, []string{c.parent}, ect.MemberCheckpointID)
			claims.Ext.Text(ect.MemberCheckpointID, c.checkpoint)
			token := a.issue(claims)
			if got := g.call(with(token, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status != c.status {
				t.Errorf("%d %s", got.status, got.body)
			}
			if c.status == http.StatusCreated {
				return
			}
			asking := a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: []string{token.ID()}})
			body := `{"rollback_id":"urn:uuid:` + uuid.NewString() + `","checkpoint_id":"` + step.checkpoint + `"}`
			if got := g.call(with(asking, request{path: "/aerr/rollback", body: body})); got.status != http.StatusForbidden {
				t.Errorf("a rollback because of it: %d %s", got.status, got.body)
			}
		})
	}
	lab.arrived("POST /refunds", 0)
}

// ATD "Error Signaling": the four severities and no other; any word for the type; a node shows
// its worst.
func TestATDSeverities(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr})
	wid := uuid.NewString()
	token := a.issue(ect.Claims{Workflow: wid})
	g.call(with(token, request{path: "/pay"}))
	post := func(severity, kind string) reply {
		claims := eventOf("atd:error", ect.ATD, wid, []string{token.ID()}, ect.MemberSeverity, ect.MemberErrorType)
		claims.Ext.Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, kind)
		return g.call(with(a.issue(claims), request{path: "/.well-known/cascade/errors", reader: nothing{}}))
	}
	kinds := []string{"action_failed", "timeout", "constraint_violation", "resource_exhausted", "upstream_cascade", "unknown", "circuit_open", "a_word_of_mine"}
	for i, kind := range kinds {
		if got := post([]string{"info", "warning", "error", "critical"}[i%4], kind); got.status != http.StatusCreated {
			t.Errorf("%s: %d %s", kind, got.status, got.body)
		}
	}
	for _, severity := range []string{"fatal", "Critical", "", "4"} {
		post(severity, "timeout").refusedFor(t, http.StatusForbidden, "ext")
	}
	g.settledView(a, wid, 3+len(kinds))
	view := document[struct {
		Nodes []struct {
			JTI   string
			Worst string `json:"worst_severity"`
		}
	}](t, g.get(a, "workflows/"+wid))
	for _, n := range view.Nodes {
		if n.JTI == token.ID() && n.Worst != "critical" {
			t.Errorf("the worst is %q", n.Worst)
		}
	}
}

// ATD "Error Signaling", AERR "IANA Considerations": which type of error the gateway writes of
// what came of a call.
func TestATDErrorTypesOnTheWire(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	hold := newGate(t)
	defer hold.open()
	u.on("/refused", status(http.StatusUnprocessableEntity, ""))
	u.on("/busy", status(http.StatusTooManyRequests, ""))
	u.on("/forbidden", status(http.StatusForbidden, ""))
	u.on("/lost", reset)
	u.on("/slow", func(http.ResponseWriter, *arrival) { hold.pass() })
	u.on("/cascade", func(w http.ResponseWriter, in *arrival) {
		led, err := ect.ParseInsecure(in.Header.Get(ect.FieldName))
		if err != nil {
			t.Error(err)
			return
		}
		claims := eventOf("error", ect.Cascade, led.Workflow(), []string{led.ID()})
		w.Header().Set(ect.FieldName, a.issue(claims).Raw())
		w.WriteHeader(http.StatusInternalServerError)
	})
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + u.addr + " {\n identity " + a.issuer.Identity() + "\n action slow {\n match path /slow\n deadline 5s\n }\n }"})
	for path, want := range map[string][2]string{
		"/refused": {"warning", "action_failed"}, "/busy": {"warning", "resource_exhausted"}, "/forbidden": {"warning", "constraint_violation"},
		"/lost": {"critical", "unknown"}, "/slow": {"critical", "timeout"}, "/cascade": {"error", "upstream_cascade"},
	} {
		wid := uuid.NewString()
		g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: path}))
		found := false
		for _, n := range g.settledView(a, wid, 4).Nodes {
			if token := g.entry(a, wid, n.JTI); token.Event() == ect.EventError && token.Issuer() == gatewayIdentity {
				says(t, token, map[ect.Member]string{ect.MemberSeverity: quoted(want[0]), ect.MemberErrorType: quoted(want[1])})
				found = true
			}
		}
		if !found {
			t.Errorf("%s has no error", path)
		}
	}
}
