//go:build unix

package call

import (
	"cmp"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A-error-signaling-f, E-error-propagation-via-dag-a: whoever is called and fails is not rolled back by
// default, and people are asked: level 2, which holds nothing, once for the workflow and cause until they
// have decided, and linked to the error. What was refused, was not executed, or belongs to no workflow
// asks nobody.
func TestProcessFailedCallsAreEscalated(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = "\n breaker off" + harness.SagaActions
	gateway := site.Start(t)
	g := site.Gateway(t)
	s := g.Saga(a)
	quiet := g.Saga(a)
	for _, status := range []int{http.StatusUnprocessableEntity, http.StatusTooManyRequests} {
		lab.On("POST /charges", 1, harness.RestSays(status, `{}`))
		if got := quiet.Try(harness.Charge(1)); got.Status != status {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	lab.On("POST /charges", 1, harness.RestLoses)
	quiet.Try(harness.Charge(1)).Reply.Problem(t, http.StatusConflict, "in-doubt")
	lab.On("POST /charges", 3, harness.RestSays(http.StatusInternalServerError, `{}`))
	g.Call(harness.Request{Path: "/charges", Body: `{"amount":1}`, Id: uuid.NewString()})
	g.Call(harness.Request{Path: "/charges", Body: `{"amount":1}`, Id: uuid.NewString(), Header: map[string]string{
		"Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	}})
	g.Call(harness.With(a.Issue(ect.Claims{}), harness.Charge(1)))

	lab.On("POST /charges", -1, harness.RestSays(http.StatusInternalServerError, `{}`))
	failed, failure := s.Fails(harness.Charge(1))
	got := site.Asked(t, 1)[0]
	want := harness.Asked{ID: got.ID, Token: got.Token, Status: "pending", Cause: "call_failed", Level: 2, Workflow: s.Wid, Caller: "issuer:" + a.Issuer.Identity()}
	want.Links.Error, want.Links.Checkpoint = failure, failed.Checkpoint
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	for range 40 { // an agent that tries again and again
		s.Fails(harness.Charge(1))
	}
	lab.On("POST /mail", -1, harness.RestSays(http.StatusInternalServerError, `{}`))
	mail, _ := s.Fails(harness.Request{Path: "/mail"}) // this one cannot be undone
	s.Do(harness.Put("/docs/x", "1"))                  // they hold nothing
	if got = site.Asked(t, 2)[0]; got.Cause != "irreversible_rollback" || got.Level != 2 || got.Links.Checkpoint != mail.Checkpoint {
		t.Errorf("%+v", got)
	}
	s.Fails(harness.Request{Path: "/mail"})
	gateway.Kill()
	site.Start(t)
	before, _ := s.Fails(harness.Charge(1))
	linked := 0
	site.Exported(t, func(token *ect.Unverified) {
		if token.Action() == "escalation" && slices.Contains(token.Parents(), failure) {
			linked++
		}
	})
	if linked != 1 {
		t.Errorf("%d escalations follow from the error", linked)
	}
	// That of the call that cannot be undone has taken the place of the first. Once people have seen to it, the next
	// failure is another question.
	if all := site.Asked(t, 2); all[0].Status != "pending" || all[1].Status != "withdrawn" {
		t.Errorf("one failure is several questions: %+v", all)
	}
	site.Decides(t, "approve", site.Asked(t, 2)[0].ID)
	again, _ := s.Fails(harness.Charge(1))
	more, _ := s.Fails(harness.Charge(1))
	later := []string{before.Checkpoint, again.Checkpoint, more.Checkpoint} // several are looked at at once
	if got = site.Asked(t, 3)[0]; got.Cause != "call_failed" || got.Status != "pending" || !slices.Contains(later, got.Links.Checkpoint) {
		t.Errorf("%+v, of one of %s", got, later)
	}
	// An agent whose calls fail in workflow after workflow does not flood anybody.
	for range 20 {
		g.Saga(a).Fails(harness.Charge(1))
	}
	site.Asked(t, 16+2)
	other := g.Saga(a)
	other.Fails(harness.Charge(1))
	if all := site.Asked(t, 16+2); slices.ContainsFunc(all, func(e harness.Asked) bool { return e.Workflow == other.Wid || e.Held }) {
		t.Errorf("%+v", all)
	}
}

// A-error-signaling-f: an error in the answer of whoever was called counts, whatever its status.
func TestProcessErrorsInAnswersAreEscalated(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a, b)
	site.Guard = "\n breaker off" + harness.SagaActions
	site.Start(t)
	s := site.Gateway(t).Saga(a)
	var sent string
	for i, severity := range []string{"warning", "error", "critical"} {
		lab.On("POST /charges", 1, func(c *harness.RestCall) {
			token := b.Issue(ect.Claims{
				Workflow: s.Wid, Action: "error", Parents: []string{c.Header.Get("Execution-Parent")},
				Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed"),
			})
			sent = token.ID()
			c.Act()
			c.Say(harness.RestAnswer{Status: http.StatusCreated, Header: http.Header{ect.FieldName: {token.Raw()}}, Body: `{"id":"ch_9"}`})
		})
		done := s.Do(harness.Charge(1))
		if i == 0 {
			continue
		}
		got := site.Asked(t, i)[0]
		if want := []string{"", "call_failed", "critical_error"}[i]; got.Cause != want || got.Level != 2 || got.Links.Error != sent || got.Links.Checkpoint != done.Checkpoint {
			t.Errorf("%s: %+v, want %s because of %s", severity, got, want, sent)
		}
	}
}

// ATD, "HITL Escalation on Error": the rules of a deployment are for errors in answers, too, in the place
// of what would be asked without them.
func TestProcessRulesForErrorsInAnswers(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	site := harness.ProcNewSite(t, lab.Addr)
	rules := site.Path("rules.json")
	if err := os.WriteFile(rules, []byte(`[{"id":"r1","trigger":{"kind":"keyword_match","op":"eq","value":"warning","input_ref":"atd.severity"},"action":"escalate"},
		{"id":"r2","trigger":{"kind":"keyword_match","op":"eq","value":"critical","input_ref":"ext.atd.severity"},"action":"pause","allow_override":true,"override_action":"continue"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	site.App = harness.Trusting(t, a, b) + "\n hitl {\n rules " + rules + "\n }"
	site.Guard = "\n breaker off" + harness.SagaActions
	gateway := site.Start(t)
	s := site.Gateway(t).Saga(a)
	answers := func(severity string) {
		lab.On("POST /charges", 1, func(c *harness.RestCall) {
			token := b.Issue(ect.Claims{
				Workflow: s.Wid, Action: "error", Parents: []string{c.Header.Get("Execution-Parent")},
				Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed"),
			})
			c.Act()
			c.Say(harness.RestAnswer{Status: http.StatusCreated, Header: http.Header{ect.FieldName: {token.Raw()}}, Body: `{"id":"ch_9"}`})
		})
	}
	for i, severity := range []string{"warning", "warning", "critical"} {
		answers(severity)
		done := s.Do(harness.Charge(1))
		got := site.Asked(t, []int{1, 1, 2}[i])[0]
		want := harness.Asked{ID: got.ID, Token: got.Token, Status: "pending", Cause: "critical_error", Level: []int{2, 2, 1}[i], Held: i == 2, Workflow: s.Wid, Links: got.Links}
		if i != 1 { // one for an agent and a workflow
			want.Links.Checkpoint = done.Checkpoint
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", severity, got, want)
		}
	}
	gateway.Kill()
	site.Start(t)
	s.G = site.Gateway(t)
	s.Try(harness.Charge(1)).Reply.Retryable(t, http.StatusConflict, "workflow-paused")
	site.Asked(t, 2)
}

// P5: SIGKILL as soon as the caller has its answer: people are asked all the same, once.
func TestCrashFailedCall(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = "\n breaker off" + harness.SagaActions
	gateway := site.Start(t)
	lab.On("POST /charges", -1, harness.RestSays(http.StatusInternalServerError, `{}`))
	for round := range min(harness.CrashRounds(t, 5), 16) { // as many as one caller may cause
		s := site.Gateway(t).Saga(a)
		failed, _ := s.Fails(harness.Charge(1))
		gateway.Kill()
		gateway = site.Start(t)
		if got := site.Asked(t, round+1)[0]; got.Workflow != s.Wid || got.Links.Checkpoint != failed.Checkpoint {
			t.Errorf("%+v", got)
		}
	}
}

// C-3.4.3-d: a rollback about calls of more than three agents is carried out as it was asked for, and the
// workflow is paused with its end until people have looked; so it is where an error has reached so many.
func TestProcessManyAgents(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := harness.NewRestLab(t)
	var agents []*harness.Agent
	for i := range 4 {
		agents = append(agents, harness.NewAgent(t, fmt.Sprint("a", i)))
	}
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, agents...)
	site.Guard = harness.SagaActions + `
	action agent {
		match path /agents/*
		compensate POST /agents/undo/rollback {
			json call {request.path.1}
		}
	}`
	gateway := site.Start(t)
	g := site.Gateway(t)
	// called is a workflow in which so many agents make a call, each after the one before.
	called := func(agents []*harness.Agent) (s *harness.Saga, first string) {
		t.Helper()
		s = g.Saga(agents[0])
		last := ""
		for _, a := range agents {
			by := *s
			by.A = a
			after := []string{}
			if last != "" {
				after = append(after, last)
			}
			step := by.Do(harness.Charge(1), after...)
			first, last = cmp.Or(first, step.Checkpoint), step.Checkpoint
		}
		return s, first
	}
	s, first := called(agents[:3])
	s.Back(harness.RollbackBody{Checkpoint: first, Scope: "sub_dag", Reason: "a test"}).Want(t, "completed")
	s.Do(harness.Put("/docs/three", "1"))
	s, first = called(agents)
	asking := harness.RollbackBody{ID: uuid.NewString(), Checkpoint: first, Scope: "sub_dag", Reason: "a test"}
	doc := s.Back(asking)
	doc.Want(t, "completed")
	if len(doc.Steps) != 4 || len(doc.Escalations) != 1 {
		t.Fatalf("%+v", doc)
	}
	gateway.Kill()
	site.Start(t)
	if again := s.Finished(doc.ID); !slices.Equal(again.Escalations, doc.Escalations) {
		t.Errorf("%+v", again)
	}
	got := s.Try(harness.Put("/docs/late", "1"))
	got.Reply.Problem(t, http.StatusConflict, "workflow-paused")
	shown := site.Asked(t, 1)[0]
	if held := got.Escalation(t); held != doc.Escalations[0] || shown.ID != held || shown.Cause != "many_agents" || shown.Level != 1 || !strings.HasSuffix(doc.ID, shown.Links.Rollback) {
		t.Errorf("held by %s, want %v: %+v", held, doc.Escalations, shown)
	}
	site.Decides(t, "approve", shown.ID)
	s.Do(harness.Put("/docs/late", "1"))

	// Of an error: what the called agent had others do follows from the call that then fails.
	s = g.Saga(agents[0])
	lab.On("POST /agents/x", 1, func(c *harness.RestCall) {
		last := c.Header.Get("Execution-Parent")
		for _, a := range agents[1:] {
			by := *s
			by.A = a
			got := by.Try(harness.Put("/docs/"+a.Issuer.Identity(), "1"), last)
			last = got.Checkpoint
		}
		c.Say(harness.RestAnswer{Status: http.StatusInternalServerError, Body: `{}`})
	})
	failed, _ := s.Fails(harness.Request{Path: "/agents/x"})
	var reach harness.Asked
	for _, e := range site.Asked(t, 2) { // no other one about the failed call
		if e.Cause == "many_agents" && e.Workflow == s.Wid {
			reach = e
		}
	}
	if reach.Links.Checkpoint != failed.Checkpoint || !reach.Held || reach.Level != 1 {
		t.Fatalf("%+v", reach)
	}
	s.Try(harness.Put("/docs/late", "1")).Reply.Problem(t, http.StatusConflict, "workflow-paused")
	site.Decides(t, "approve", reach.ID)
	s.Do(harness.Put("/docs/last", "1"))
}

// C-3.3.2-b: an error that comes with a call and names something of another workflow is refused with the
// call, as if that were unknown (P3), and the people of that workflow are asked, as for one at the errors
// endpoint: once for its reporter, also where the process dies right after the answer.
func TestProcessErrorsInCallsOfOtherWorkflows(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a, b)
	site.Guard = harness.SagaActions
	gateway := site.Start(t)
	g := site.Gateway(t)
	elsewhere := g.Saga(b)
	elsewhere.Do(harness.Charge(8))
	carry := func(r harness.Request, act string, named ...string) harness.Reply {
		t.Helper()
		return g.Call(harness.With(b.Issue(ect.Claims{
			Workflow: elsewhere.Wid, Action: act, Parents: named,
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberDescription, "wrong"),
		}), r))
	}
	for i, r := range []harness.Request{harness.Charge(1), {Method: "GET", Path: "/docs/x"}} {
		s := g.Saga(a)
		first := s.Do(harness.Charge(7))
		unknown := carry(r, "error", uuid.NewString())
		unknown.RefusedFor(t, http.StatusForbidden, "parent-unknown")
		carry(r, "charge_card", first.Checkpoint).RefusedFor(t, http.StatusForbidden, "parent-unknown") // no error
		crossing := carry(r, "error", first.Checkpoint)
		gateway.Kill()
		gateway = site.Start(t)
		if crossing.Status != unknown.Status || crossing.Body != unknown.Body || len(crossing.Header) != len(unknown.Header) {
			t.Errorf("P3: %d %s, and of an unknown id %d %s", crossing.Status, crossing.Body, unknown.Status, unknown.Body)
		}
		got := site.Asked(t, i+1)[0]
		if got.Cause != "workflow_boundary" || got.Level != 2 || got.Workflow != s.Wid || got.Caller != "issuer:"+b.Issuer.Identity() || got.Links.Checkpoint != first.Checkpoint {
			t.Errorf("%+v", got)
		}
		carry(r, "error", first.Checkpoint)
		s.Do(harness.Charge(9)) // it holds nothing
		site.Asked(t, i+1)
	}
	lab.Arrived("POST /charges", 5)
}
