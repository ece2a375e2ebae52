//go:build unix

package e2e

import (
	"cmp"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// asked is an escalation, as operators list it.
type asked struct {
	ID, Status, Cause, Workflow, Caller, Token string
	Level                                      int
	Held                                       bool
	Links                                      struct{ Error, Checkpoint, Rollback string }
}

// asked lists the escalations once there are so many, the newest first.
func (s *procSite) asked(t *testing.T, n int) (all []asked) {
	t.Helper()
	eventuallyWithin(t, procBound, fmt.Sprint(n, " escalations"), func() bool {
		all = procDocument[struct{ Escalations []asked }](t, s.operate(t, "escalations", "list", "--all", "-o", "json").says(t)).Escalations
		return len(all) >= n
	})
	if len(all) != n {
		t.Fatalf("%d escalations, want %d: %+v", len(all), n, all)
	}
	return all
}

// fails makes a call that fails, and returns the id of the error that its caller gets.
func (s *saga) fails(r request, after ...string) (sagaStep, string) {
	s.t.Helper()
	got := s.try(r, after...)
	failure, err := ect.ParseInsecure(got.header.Get("Execution-Context"))
	if err != nil || got.status != http.StatusInternalServerError {
		s.t.Fatalf("%v: %d %v %s", err, got.status, got.header, got.body)
	}
	return got, failure.ID()
}

// A-error-signaling-f, E-error-propagation-via-dag-a: whoever is called and fails is not rolled back by
// default, and people are asked: level 2, which holds nothing, once for the workflow and cause until they
// have decided, and linked to the error. What was refused, was not executed, or belongs to no workflow
// asks nobody.
func TestProcessFailedCallsAreEscalated(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = "\n breaker off" + sagaActions
	gateway := site.start(t)
	g := site.gateway(t)
	s := g.saga(a)
	quiet := g.saga(a)
	for _, status := range []int{http.StatusUnprocessableEntity, http.StatusTooManyRequests} {
		lab.on("POST /charges", 1, restSays(status, `{}`))
		if got := quiet.try(charge(1)); got.status != status {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	lab.on("POST /charges", 1, restLoses)
	quiet.try(charge(1)).reply.problem(t, http.StatusConflict, "in-doubt")
	lab.on("POST /charges", 3, restSays(http.StatusInternalServerError, `{}`))
	g.call(request{path: "/charges", body: `{"amount":1}`, id: uuid.NewString()})
	g.call(request{path: "/charges", body: `{"amount":1}`, id: uuid.NewString(), header: map[string]string{
		"Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	}})
	g.call(with(a.issue(ect.Claims{}), charge(1)))

	lab.on("POST /charges", -1, restSays(http.StatusInternalServerError, `{}`))
	failed, failure := s.fails(charge(1))
	got := site.asked(t, 1)[0]
	want := asked{ID: got.ID, Token: got.Token, Status: "pending", Cause: "call_failed", Level: 2, Workflow: s.wid, Caller: "issuer:" + a.issuer.Identity()}
	want.Links.Error, want.Links.Checkpoint = failure, failed.checkpoint
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	for range 40 { // an agent that tries again and again
		s.fails(charge(1))
	}
	lab.on("POST /mail", -1, restSays(http.StatusInternalServerError, `{}`))
	mail, _ := s.fails(request{path: "/mail"}) // this one cannot be undone
	s.do(put("/docs/x", "1"))                  // they hold nothing
	if got = site.asked(t, 2)[0]; got.Cause != "irreversible_rollback" || got.Level != 2 || got.Links.Checkpoint != mail.checkpoint {
		t.Errorf("%+v", got)
	}
	s.fails(request{path: "/mail"})
	gateway.kill()
	site.start(t)
	before, _ := s.fails(charge(1))
	linked := 0
	site.exported(t, func(token *ect.Unverified) {
		if token.Action() == "escalation" && slices.Contains(token.Parents(), failure) {
			linked++
		}
	})
	if linked != 1 {
		t.Errorf("%d escalations follow from the error", linked)
	}
	// That of the call that cannot be undone has taken the place of the first. Once people have seen to it, the next
	// failure is another question.
	if all := site.asked(t, 2); all[0].Status != "pending" || all[1].Status != "withdrawn" {
		t.Errorf("one failure is several questions: %+v", all)
	}
	site.decides(t, "approve", site.asked(t, 2)[0].ID)
	again, _ := s.fails(charge(1))
	more, _ := s.fails(charge(1))
	later := []string{before.checkpoint, again.checkpoint, more.checkpoint} // several are looked at at once
	if got = site.asked(t, 3)[0]; got.Cause != "call_failed" || got.Status != "pending" || !slices.Contains(later, got.Links.Checkpoint) {
		t.Errorf("%+v, of one of %s", got, later)
	}
	// An agent whose calls fail in workflow after workflow does not flood anybody.
	for range 20 {
		g.saga(a).fails(charge(1))
	}
	site.asked(t, 16+2)
	other := g.saga(a)
	other.fails(charge(1))
	if all := site.asked(t, 16+2); slices.ContainsFunc(all, func(e asked) bool { return e.Workflow == other.wid || e.Held }) {
		t.Errorf("%+v", all)
	}
}

// A-error-signaling-f: an error in the answer of whoever was called counts, whatever its status.
func TestProcessErrorsInAnswersAreEscalated(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := newRestLab(t), newAgent(t, "a"), newAgent(t, "b")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a, b)
	site.guard = "\n breaker off" + sagaActions
	site.start(t)
	s := site.gateway(t).saga(a)
	var sent string
	for i, severity := range []string{"warning", "error", "critical"} {
		lab.on("POST /charges", 1, func(c *restCall) {
			token := b.issue(ect.Claims{
				Workflow: s.wid, Action: "error", Parents: []string{c.header.Get("Execution-Parent")},
				Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed"),
			})
			sent = token.ID()
			c.act()
			c.say(restAnswer{http.StatusCreated, http.Header{ect.FieldName: {token.Raw()}}, `{"id":"ch_9"}`})
		})
		done := s.do(charge(1))
		if i == 0 {
			continue
		}
		got := site.asked(t, i)[0]
		if want := []string{"", "call_failed", "critical_error"}[i]; got.Cause != want || got.Level != 2 || got.Links.Error != sent || got.Links.Checkpoint != done.checkpoint {
			t.Errorf("%s: %+v, want %s because of %s", severity, got, want, sent)
		}
	}
}

// ATD, "HITL Escalation on Error": the rules of a deployment are for errors in answers, too, in the place
// of what would be asked without them.
func TestProcessRulesForErrorsInAnswers(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := newRestLab(t), newAgent(t, "a"), newAgent(t, "b")
	site := procNewSite(t, lab.addr)
	rules := site.path("rules.json")
	if err := os.WriteFile(rules, []byte(`[{"id":"r1","trigger":{"kind":"keyword_match","op":"eq","value":"warning","input_ref":"atd.severity"},"action":"escalate"},
		{"id":"r2","trigger":{"kind":"keyword_match","op":"eq","value":"critical","input_ref":"ext.atd.severity"},"action":"pause","allow_override":true,"override_action":"continue"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	site.app = trusting(t, a, b) + "\n hitl {\n rules " + rules + "\n }"
	site.guard = "\n breaker off" + sagaActions
	gateway := site.start(t)
	s := site.gateway(t).saga(a)
	answers := func(severity string) {
		lab.on("POST /charges", 1, func(c *restCall) {
			token := b.issue(ect.Claims{
				Workflow: s.wid, Action: "error", Parents: []string{c.header.Get("Execution-Parent")},
				Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed"),
			})
			c.act()
			c.say(restAnswer{http.StatusCreated, http.Header{ect.FieldName: {token.Raw()}}, `{"id":"ch_9"}`})
		})
	}
	for i, severity := range []string{"warning", "warning", "critical"} {
		answers(severity)
		done := s.do(charge(1))
		got := site.asked(t, []int{1, 1, 2}[i])[0]
		want := asked{ID: got.ID, Token: got.Token, Status: "pending", Cause: "critical_error", Level: []int{2, 2, 1}[i], Held: i == 2, Workflow: s.wid, Links: got.Links}
		if i != 1 { // one for an agent and a workflow
			want.Links.Checkpoint = done.checkpoint
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", severity, got, want)
		}
	}
	gateway.kill()
	site.start(t)
	s.g = site.gateway(t)
	s.try(charge(1)).reply.retryable(t, http.StatusConflict, "workflow-paused")
	site.asked(t, 2)
}

// P5: SIGKILL as soon as the caller has its answer: people are asked all the same, once.
func TestCrashFailedCall(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = "\n breaker off" + sagaActions
	gateway := site.start(t)
	lab.on("POST /charges", -1, restSays(http.StatusInternalServerError, `{}`))
	for round := range min(crashRounds(t, 5), 16) { // as many as one caller may cause
		s := site.gateway(t).saga(a)
		failed, _ := s.fails(charge(1))
		gateway.kill()
		gateway = site.start(t)
		if got := site.asked(t, round+1)[0]; got.Workflow != s.wid || got.Links.Checkpoint != failed.checkpoint {
			t.Errorf("%+v", got)
		}
	}
}

// C-3.4.3-d: a rollback about calls of more than three agents is carried out as it was asked for, and the
// workflow is paused with its end until people have looked; so it is where an error has reached so many.
func TestProcessManyAgents(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab := newRestLab(t)
	var agents []*agent
	for i := range 4 {
		agents = append(agents, newAgent(t, fmt.Sprint("a", i)))
	}
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, agents...)
	site.guard = sagaActions + `
	action agent {
		match path /agents/*
		compensate POST /agents/undo/rollback {
			json call {request.path.1}
		}
	}`
	gateway := site.start(t)
	g := site.gateway(t)
	// called is a workflow in which so many agents make a call, each after the one before.
	called := func(agents []*agent) (s *saga, first string) {
		t.Helper()
		s = g.saga(agents[0])
		last := ""
		for _, a := range agents {
			by := *s
			by.a = a
			after := []string{}
			if last != "" {
				after = append(after, last)
			}
			step := by.do(charge(1), after...)
			first, last = cmp.Or(first, step.checkpoint), step.checkpoint
		}
		return s, first
	}
	s, first := called(agents[:3])
	s.back(rollbackBody{Checkpoint: first, Scope: "sub_dag", Reason: "a test"}).want(t, "completed")
	s.do(put("/docs/three", "1"))
	s, first = called(agents)
	asking := rollbackBody{ID: uuid.NewString(), Checkpoint: first, Scope: "sub_dag", Reason: "a test"}
	doc := s.back(asking)
	doc.want(t, "completed")
	if len(doc.Steps) != 4 || len(doc.Escalations) != 1 {
		t.Fatalf("%+v", doc)
	}
	gateway.kill()
	site.start(t)
	if again := s.finished(doc.ID); !slices.Equal(again.Escalations, doc.Escalations) {
		t.Errorf("%+v", again)
	}
	got := s.try(put("/docs/late", "1"))
	got.reply.problem(t, http.StatusConflict, "workflow-paused")
	shown := site.asked(t, 1)[0]
	if held := got.escalation(t); held != doc.Escalations[0] || shown.ID != held || shown.Cause != "many_agents" || shown.Level != 1 || !strings.HasSuffix(doc.ID, shown.Links.Rollback) {
		t.Errorf("held by %s, want %v: %+v", held, doc.Escalations, shown)
	}
	site.decides(t, "approve", shown.ID)
	s.do(put("/docs/late", "1"))

	// Of an error: what the called agent had others do follows from the call that then fails.
	s = g.saga(agents[0])
	lab.on("POST /agents/x", 1, func(c *restCall) {
		last := c.header.Get("Execution-Parent")
		for _, a := range agents[1:] {
			by := *s
			by.a = a
			got := by.try(put("/docs/"+a.issuer.Identity(), "1"), last)
			last = got.checkpoint
		}
		c.say(restAnswer{status: http.StatusInternalServerError, body: `{}`})
	})
	failed, _ := s.fails(request{path: "/agents/x"})
	var reach asked
	for _, e := range site.asked(t, 2) { // no other one about the failed call
		if e.Cause == "many_agents" && e.Workflow == s.wid {
			reach = e
		}
	}
	if reach.Links.Checkpoint != failed.checkpoint || !reach.Held || reach.Level != 1 {
		t.Fatalf("%+v", reach)
	}
	s.try(put("/docs/late", "1")).reply.problem(t, http.StatusConflict, "workflow-paused")
	site.decides(t, "approve", reach.ID)
	s.do(put("/docs/last", "1"))
}

// C-3.3.2-b: an error that comes with a call and names something of another workflow is refused with the
// call, as if that were unknown (P3), and the people of that workflow are asked, as for one at the errors
// endpoint: once for its reporter, also where the process dies right after the answer.
func TestProcessErrorsInCallsOfOtherWorkflows(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a, b := newRestLab(t), newAgent(t, "a"), newAgent(t, "b")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a, b)
	site.guard = sagaActions
	gateway := site.start(t)
	g := site.gateway(t)
	elsewhere := g.saga(b)
	elsewhere.do(charge(8))
	carry := func(r request, act string, named ...string) reply {
		t.Helper()
		return g.call(with(b.issue(ect.Claims{
			Workflow: elsewhere.wid, Action: act, Parents: named,
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberDescription, "wrong"),
		}), r))
	}
	for i, r := range []request{charge(1), {method: "GET", path: "/docs/x"}} {
		s := g.saga(a)
		first := s.do(charge(7))
		unknown := carry(r, "error", uuid.NewString())
		unknown.refusedFor(t, http.StatusForbidden, "parent-unknown")
		carry(r, "charge_card", first.checkpoint).refusedFor(t, http.StatusForbidden, "parent-unknown") // no error
		crossing := carry(r, "error", first.checkpoint)
		gateway.kill()
		gateway = site.start(t)
		if crossing.status != unknown.status || crossing.body != unknown.body || len(crossing.header) != len(unknown.header) {
			t.Errorf("P3: %d %s, and of an unknown id %d %s", crossing.status, crossing.body, unknown.status, unknown.body)
		}
		got := site.asked(t, i+1)[0]
		if got.Cause != "workflow_boundary" || got.Level != 2 || got.Workflow != s.wid || got.Caller != "issuer:"+b.issuer.Identity() || got.Links.Checkpoint != first.checkpoint {
			t.Errorf("%+v", got)
		}
		carry(r, "error", first.checkpoint)
		s.do(charge(9)) // it holds nothing
		site.asked(t, i+1)
	}
	lab.arrived("POST /charges", 5)
}
