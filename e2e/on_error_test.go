//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// onErrorActions roll a call to an agent back where it fails.
const onErrorActions = sagaActions + `
	action agent {
		match path /agents/*
		compensate POST /agents/undo/rollback {
			json call {request.path.1}
		}
		on_error rollback
	}`

// onErrorSite is a gateway in a process before a restLab.
func onErrorSite(t *testing.T, agents ...*agent) (*restLab, *procSite, *procGateway) {
	t.Helper()
	lab := newRestLab(t)
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, agents...)
	site.guard = onErrorActions
	return lab, site, site.start(t)
}

// rollbacks waits until so many rollbacks are finished, and lists all, the newest first.
func (s *procSite) rollbacks(t *testing.T, finished int) []*rollback.Rollback {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		all := procDocument[admin.RollbackPage](t, s.operate(t, "rollbacks", "list", "--limit", "1000", "-o", "json").says(t)).Rollbacks
		n := 0
		for _, doc := range all {
			if doc.State == rollback.Finished {
				n++
			}
		}
		if n >= finished {
			return all
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d rollbacks are finished", n, finished)
		}
	}
}

// A-error-signaling-f, E-error-propagation-via-dag-a: an agent that was called makes calls of its
// own, and then fails. Both are undone, the last one first, in the gateway's own name and behind
// the error; its caller gets the answer of the agent.
func TestOnErrorRollsBackWhatFollowed(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, site, _ := onErrorSite(t, a, b)
	g := site.gateway(t)
	s := g.saga(a)
	before := s.do(put("/docs/before", "1"))
	token := a.issue(ect.Claims{Workflow: s.wid, Parents: []string{before.checkpoint}})
	nested := make(chan reply, 1)
	lab.on("POST /agents/x", 1, func(c *restCall) {
		c.act()
		nested <- g.call(with(b.issue(ect.Claims{Workflow: s.wid, Parents: []string{token.ID()}}), put("/docs/nested", "1")))
		c.say(restAnswer{status: http.StatusInternalServerError, body: `{"failed":true}`})
	})
	got := g.call(with(token, request{path: "/agents/x"}))
	if one := <-nested; one.status != http.StatusCreated {
		t.Fatalf("%d %s", one.status, one.body)
	}
	failure, err := ect.ParseInsecure(got.header.Get("Execution-Context"))
	if err != nil || got.status != http.StatusInternalServerError || got.body != `{"failed":true}` || got.header.Get("Execution-Status") != "executed" {
		t.Fatalf("%v: %d %v %s", err, got.status, got.header, got.body)
	}
	found := site.rollbacks(t, 1)[0]
	doc := s.finished(found.ID)
	doc.want(t, "completed")
	if len(doc.Steps) != 2 || doc.Checkpoint != got.header.Get("Execution-Checkpoint") || doc.Scope != "sub_dag" || found.Requester != gatewayIdentity {
		t.Errorf("%+v, asked for by %s", doc, found.Requester)
	}
	if v := s.view(); !v.follows(doc.Tokens.Start, failure.ID()) {
		t.Errorf("the rollback does not follow from the error: %+v", v.Edges)
	}
	lab.wantEffects("created /docs/before", "asked /agents/x", "created /docs/nested", "deleted /docs/nested", "undone /agents/undo")
	g.call(with(token, request{path: "/agents/x"})).problem(t, http.StatusConflict, "rolled-back")
	lab.arrived("POST /agents/x", 1)

	// What was refused, and what is in doubt, is not rolled back by itself; the next failure is.
	lab.on("POST /agents/refuses", 1, restSays(http.StatusUnprocessableEntity, `{}`))
	lab.on("POST /agents/lost", 1, restLoses)
	lab.on("POST /agents/last", 1, restDoes(http.StatusInternalServerError, `{}`))
	refused := with(a.issue(ect.Claims{Workflow: s.wid}), request{path: "/agents/refuses"})
	if got := g.call(refused); got.status != http.StatusUnprocessableEntity {
		t.Fatalf("%d %s", got.status, got.body)
	}
	lost := with(a.issue(ect.Claims{Workflow: s.wid}), request{path: "/agents/lost"})
	g.call(lost).problem(t, http.StatusConflict, "in-doubt")
	last := s.try(request{path: "/agents/last"})
	all := site.rollbacks(t, 2)
	if len(all) != 2 || all[0].Checkpoint != last.checkpoint || all[1].ID != found.ID {
		t.Errorf("%d rollbacks, %+v", len(all), all[0])
	}
	if got := g.call(refused); got.status != http.StatusUnprocessableEntity || got.header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("%d %v", got.status, got.header)
	}
	g.call(lost).problem(t, http.StatusConflict, "in-doubt")
}

// P3: the error of an agent rolls back only what that agent could have asked for, or was called
// with; the answer does not show it.
func TestOnErrorOfAgents(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, site, _ := onErrorSite(t, a, b)
	g := site.gateway(t)
	s := g.saga(a)
	token := a.issue(ect.Claims{Workflow: s.wid})
	called := g.call(with(token, request{path: "/agents/x"}))
	checkpoint := called.header.Get("Execution-Checkpoint")
	other := s.do(put("/docs/other", "1")) // its action says nothing of errors
	later := b.issue(ect.Claims{Workflow: s.wid, Parents: []string{token.ID()}})
	if got := g.call(with(later, put("/docs/later", "1"))); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	report := func(by *agent, severity, checkpoint string, parents ...string) (*ect.Token, reply) {
		t.Helper()
		token := by.issue(ect.Claims{Workflow: s.wid, Action: "error", Parents: parents, Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, severity).Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, checkpoint)})
		got := g.call(with(token, request{path: "/.well-known/cascade/errors", reader: nothing{}}))
		if got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return token, got
	}
	report(b, "error", checkpoint, later.ID())                // it comes after, and may not ask
	report(a, "warning", checkpoint, token.ID())              // no more than a warning
	report(a, "critical", other.checkpoint, other.checkpoint) // not on_error rollback
	failure, _ := report(a, "error", checkpoint, token.ID())  // this one counts
	doc := s.finished(site.rollbacks(t, 1)[0].ID)
	doc.want(t, "completed")
	report(a, "critical", checkpoint, token.ID()) // this one comes too late
	found := site.rollbacks(t, 1)
	v := s.view()
	if len(found) != 1 || doc.Checkpoint != checkpoint || !v.follows(doc.Tokens.Start, failure.ID()) {
		t.Errorf("%d rollbacks, %+v", len(found), doc)
	}
	lab.wantEffects("asked /agents/x", "created /docs/other", "created /docs/later", "deleted /docs/later", "undone /agents/undo")
}

// An undo that fails starts no rollback of itself, also where it comes back to the gateway: that
// would go on for ever. It is left to a person.
func TestOnErrorOfAnUndo(t *testing.T) {
	t.Parallel() // its gateways are processes
	lab, a := newRestLab(t), newAgent(t, "a")
	site := procNewSite(t, lab.addr)
	site.app = trusting(t, a)
	site.guard = `
	on_unknown block
	action charge {
		match path /charges
		compensate POST http://` + site.addr + `/refunds {
			json charge {response.json./id}
		}
		on_lost escalate
		on_error rollback
	}
	action refund {
		match path /refunds
		compensate POST http://` + site.addr + `/charges {
			json amount 1
		}
		on_error rollback
	}`
	site.start(t)
	s := site.gateway(t).saga(a)
	lab.on("POST /refunds", -1, restSays(http.StatusInternalServerError, `{}`))
	lab.on("POST /charges", 1, restDoes(http.StatusInternalServerError, `{"id":"ch_1"}`))
	failed := s.try(charge(1))
	if failed.status != http.StatusInternalServerError {
		t.Fatalf("%d %s", failed.status, failed.body)
	}
	found := site.rollbacks(t, 1)
	if len(found) != 1 || found[0].Checkpoint != failed.checkpoint || found[0].Status == rollback.Completed {
		t.Errorf("%d rollbacks, %+v", len(found), found[0])
	}
	deadline := time.Now().Add(patience)
	for list := ""; !strings.Contains(list, "an undo is not undone"); {
		if list = site.operate(t, "escalations", "list", "-o", "json").says(t); time.Now().After(deadline) {
			t.Fatalf("nobody is told:\n%s", list)
		}
	}
	if len(site.rollbacks(t, 1)) != 1 {
		t.Error("the undo was rolled back")
	}
	lab.arrived("POST /charges", 1)
}

// P5: SIGKILL as soon as the caller has its answer: the rollback is asked for all the same, once.
func TestCrashOnError(t *testing.T) {
	t.Parallel() // its gateways are processes
	a := newAgent(t, "a")
	lab, site, gateway := onErrorSite(t, a)
	lab.on("POST /agents/x", -1, restDoes(http.StatusInternalServerError, `{}`))
	rounds := crashRounds(t, 5)
	checkpoints := map[string]bool{}
	for round := range rounds {
		got := site.gateway(t).saga(a).try(request{path: "/agents/x"})
		if got.status != http.StatusInternalServerError {
			t.Fatalf("%d %s", got.status, got.body)
		}
		gateway.kill()
		gateway = site.start(t)
		checkpoints[got.checkpoint] = true
		for _, doc := range site.rollbacks(t, round+1) {
			if !checkpoints[doc.Checkpoint] || doc.Status != rollback.Completed {
				t.Errorf("%+v", doc)
			}
		}
	}
	effects := map[string]int{}
	for _, e := range lab.ledgerEffects() {
		effects[e.What+" "+e.Of]++
	}
	if want := map[string]int{"asked /agents/x": rounds, "undone /agents/undo": rounds}; fmt.Sprint(effects) != fmt.Sprint(want) {
		t.Errorf("the service has seen %v, want %v", effects, want)
	}
}
