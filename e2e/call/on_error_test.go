//go:build unix

package call

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// onErrorActions roll a call to an agent back where it fails.
const onErrorActions = harness.SagaActions + `
	action agent {
		match path /agents/*
		compensate POST /agents/undo/rollback {
			json call {request.path.1}
		}
		on_error rollback
	}`

// onErrorSite is a gateway in a process before a RestLab.
func onErrorSite(t *testing.T, agents ...*harness.Agent) (*harness.RestLab, *harness.ProcSite, *harness.ProcGateway) {
	t.Helper()
	lab := harness.NewRestLab(t)
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, agents...)
	site.Guard = onErrorActions
	return lab, site, site.Start(t)
}

// A-error-signaling-f, E-error-propagation-via-dag-a: an agent that was called makes calls of its
// own, and then fails. Both are undone, the last one first, in the gateway's own name and behind
// the error; its caller gets the answer of the agent.
func TestOnErrorRollsBackWhatFollowed(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, site, _ := onErrorSite(t, a, b)
	g := site.Gateway(t)
	s := g.Saga(a)
	before := s.Do(harness.Put("/docs/before", "1"))
	token := a.Issue(ect.Claims{Workflow: s.Wid, Parents: []string{before.Checkpoint}})
	nested := make(chan harness.Reply, 1)
	lab.On("POST /agents/x", 1, func(c *harness.RestCall) {
		c.Act()
		nested <- g.Call(harness.With(b.Issue(ect.Claims{Workflow: s.Wid, Parents: []string{token.ID()}}), harness.Put("/docs/nested", "1")))
		c.Say(harness.RestAnswer{Status: http.StatusInternalServerError, Body: `{"failed":true}`})
	})
	got := g.Call(harness.With(token, harness.Request{Path: "/agents/x"}))
	if one := <-nested; one.Status != http.StatusCreated {
		t.Fatalf("%d %s", one.Status, one.Body)
	}
	failure, err := ect.ParseInsecure(got.Header.Get("Execution-Context"))
	if err != nil || got.Status != http.StatusInternalServerError || got.Body != `{"failed":true}` || got.Header.Get("Execution-Status") != "executed" {
		t.Fatalf("%v: %d %v %s", err, got.Status, got.Header, got.Body)
	}
	found := site.Rollbacks(t, 1)[0]
	doc := s.Finished(found.ID)
	doc.Want(t, "completed")
	if len(doc.Steps) != 2 || doc.Checkpoint != got.Header.Get("Execution-Checkpoint") || doc.Scope != "sub_dag" || found.Requester != harness.GatewayIdentity {
		t.Errorf("%+v, asked for by %s", doc, found.Requester)
	}
	if v := s.View(); !v.Follows(doc.Tokens.Start, failure.ID()) {
		t.Errorf("the rollback does not follow from the error: %+v", v.Edges)
	}
	lab.WantEffects("created /docs/before", "asked /agents/x", "created /docs/nested", "deleted /docs/nested", "undone /agents/undo")
	g.Call(harness.With(token, harness.Request{Path: "/agents/x"})).Problem(t, http.StatusConflict, "rolled-back")
	lab.Arrived("POST /agents/x", 1)

	// What was refused, and what is in doubt, is not rolled back by itself; the next failure is.
	lab.On("POST /agents/refuses", 1, harness.RestSays(http.StatusUnprocessableEntity, `{}`))
	lab.On("POST /agents/lost", 1, harness.RestLoses)
	lab.On("POST /agents/last", 1, harness.RestDoes(http.StatusInternalServerError, `{}`))
	refused := harness.With(a.Issue(ect.Claims{Workflow: s.Wid}), harness.Request{Path: "/agents/refuses"})
	if got := g.Call(refused); got.Status != http.StatusUnprocessableEntity {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	lost := harness.With(a.Issue(ect.Claims{Workflow: s.Wid}), harness.Request{Path: "/agents/lost"})
	g.Call(lost).Problem(t, http.StatusConflict, "in-doubt")
	last := s.Try(harness.Request{Path: "/agents/last"})
	all := site.Rollbacks(t, 2)
	if len(all) != 2 || all[0].Checkpoint != last.Checkpoint || all[1].ID != found.ID {
		t.Errorf("%d rollbacks, %+v", len(all), all[0])
	}
	if got := g.Call(refused); got.Status != http.StatusUnprocessableEntity || got.Header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("%d %v", got.Status, got.Header)
	}
	g.Call(lost).Problem(t, http.StatusConflict, "in-doubt")
}

// P3: the error of an agent rolls back only what that agent could have asked for, or was called
// with; the answer does not show it.
func TestOnErrorOfAgents(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, site, _ := onErrorSite(t, a, b)
	g := site.Gateway(t)
	s := g.Saga(a)
	token := a.Issue(ect.Claims{Workflow: s.Wid})
	called := g.Call(harness.With(token, harness.Request{Path: "/agents/x"}))
	checkpoint := called.Header.Get("Execution-Checkpoint")
	other := s.Do(harness.Put("/docs/other", "1")) // its action says nothing of errors
	later := b.Issue(ect.Claims{Workflow: s.Wid, Parents: []string{token.ID()}})
	if got := g.Call(harness.With(later, harness.Put("/docs/later", "1"))); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	report := func(by *harness.Agent, severity, checkpoint string, parents ...string) (*ect.Token, harness.Reply) {
		t.Helper()
		token := by.Issue(ect.Claims{Workflow: s.Wid, Action: "error", Parents: parents, Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, checkpoint)})
		got := g.Call(harness.With(token, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}}))
		if got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		return token, got
	}
	report(b, "error", checkpoint, later.ID())                // it comes after, and may not ask
	report(a, "warning", checkpoint, token.ID())              // no more than a warning
	report(a, "critical", other.Checkpoint, other.Checkpoint) // not on_error rollback
	failure, _ := report(a, "error", checkpoint, token.ID())  // this one counts
	doc := s.Finished(site.Rollbacks(t, 1)[0].ID)
	doc.Want(t, "completed")
	report(a, "critical", checkpoint, token.ID()) // this one comes too late
	found := site.Rollbacks(t, 1)
	v := s.View()
	if len(found) != 1 || doc.Checkpoint != checkpoint || !v.Follows(doc.Tokens.Start, failure.ID()) {
		t.Errorf("%d rollbacks, %+v", len(found), doc)
	}
	lab.WantEffects("asked /agents/x", "created /docs/other", "created /docs/later", "deleted /docs/later", "undone /agents/undo")
}

// An undo that fails starts no rollback of itself, also where it comes back to the gateway: that
// would go on for ever. It is left to a person.
func TestOnErrorOfAnUndo(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	site := harness.ProcNewSite(t, lab.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = `
	on_unknown block
	action charge {
		match path /charges
		compensate POST http://` + site.Addr + `/refunds {
			json charge {response.json./id}
		}
		on_lost escalate
		on_error rollback
	}
	action refund {
		match path /refunds
		compensate POST http://` + site.Addr + `/charges {
			json amount 1
		}
		on_error rollback
	}`
	site.Start(t)
	s := site.Gateway(t).Saga(a)
	lab.On("POST /refunds", -1, harness.RestSays(http.StatusInternalServerError, `{}`))
	lab.On("POST /charges", 1, harness.RestDoes(http.StatusInternalServerError, `{"id":"ch_1"}`))
	failed := s.Try(harness.Charge(1))
	if failed.Status != http.StatusInternalServerError {
		t.Fatalf("%d %s", failed.Status, failed.Body)
	}
	found := site.Rollbacks(t, 1)
	if len(found) != 1 || found[0].Checkpoint != failed.Checkpoint || found[0].Status == rollback.Completed {
		t.Errorf("%d rollbacks, %+v", len(found), found[0])
	}
	deadline := time.Now().Add(harness.Patience)
	for list := ""; !strings.Contains(list, "an undo is not undone"); {
		if list = site.Operate(t, "escalations", "list", "-o", "json").Says(t); time.Now().After(deadline) {
			t.Fatalf("nobody is told:\n%s", list)
		}
	}
	if len(site.Rollbacks(t, 1)) != 1 {
		t.Error("the undo was rolled back")
	}
	lab.Arrived("POST /charges", 1)
}

// P5: SIGKILL as soon as the caller has its answer: the rollback is asked for all the same, once.
func TestCrashOnError(t *testing.T) {
	t.Parallel() // its gateways are processes
	a := harness.NewAgent(t, "a")
	lab, site, gateway := onErrorSite(t, a)
	lab.On("POST /agents/x", -1, harness.RestDoes(http.StatusInternalServerError, `{}`))
	rounds := harness.CrashRounds(t, 5)
	checkpoints := map[string]bool{}
	for round := range rounds {
		got := site.Gateway(t).Saga(a).Try(harness.Request{Path: "/agents/x"})
		if got.Status != http.StatusInternalServerError {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		gateway.Kill()
		gateway = site.Start(t)
		checkpoints[got.Checkpoint] = true
		for _, doc := range site.Rollbacks(t, round+1) {
			if !checkpoints[doc.Checkpoint] || doc.Status != rollback.Completed {
				t.Errorf("%+v", doc)
			}
		}
	}
	effects := map[string]int{}
	for _, e := range lab.LedgerEffects() {
		effects[e.What+" "+e.Of]++
	}
	if want := map[string]int{"asked /agents/x": rounds, "undone /agents/undo": rounds}; fmt.Sprint(effects) != fmt.Sprint(want) {
		t.Errorf("the service has seen %v, want %v", effects, want)
	}
}
