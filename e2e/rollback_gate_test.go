package e2e

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// C-6.1-d, P3: who has no part in a workflow cannot use up the rollbacks that may be asked
// for in it.
func TestCascade61StrangersUseUpNoRollbacks(t *testing.T) {
	lab, a, m := newRestLab(t), newAgent(t, "a"), newAgent(t, "m")
	g := launch(t, setup{app: trusting(t, a, m) + "\nrollback {\n rate 2\n }", site: lab.site(), badger: true})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	for range 2 {
		f.asks(m, uuid.NewString(), checkpoint, "").is(t, 403, "not-in-workflow")
	}
	f.asks(m, uuid.NewString(), checkpoint, "").is(t, 429, "quota-exceeded") // its own bound
	f.asks(a, uuid.NewString(), checkpoint, "").undone(t, rollback.Completed)
}

// P4: without room in the store no rollback begins, and what is said is that, and not that
// something is wrong with the token. With room again the same request goes on.
func TestP4RollbackWithoutRoom(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: lab.site()})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	asking, id := a.issue(f.request(checkpoint, "")), uuid.NewString()
	g.settledView(a, f.wid, 3)
	g.store.failCommits(fmt.Errorf("badger: %w", store.ErrFull))
	got := f.asksWith(asking, id, checkpoint, "")
	got.is(t, http.StatusServiceUnavailable, "store-unavailable")
	if got.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	lab.wantDoc("/docs/a", "1")
	g.store.onCommit(nil)
	f.asksWith(asking, id, checkpoint, "").undone(t, rollback.Completed)
}

// Cascade 6.1: an upstream gets the tokens of requests that change nothing, too. It cannot
// ask for a rollback with them, also not after a restart, which forgets that they were used.
func TestCascade61TokenOfAReadAsksForNothing(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	setting := setup{app: trusting(t, a), site: lab.site()}
	g := launch(t, setting)
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	token := a.issue(ect.Claims{Workflow: f.wid, Action: "look", Parents: []string{checkpoint}})
	asking := a.issue(f.request(checkpoint, ""))
	read := func(shown *ect.Token) reply { return f.call(with(shown, request{method: "GET", path: "/docs/a"})) }
	for _, shown := range []*ect.Token{token, asking} {
		if got := read(shown); got.status != 200 || lab.last("/docs/a").header.Get("Execution-Context") == "" {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	f.asksWith(asking, uuid.NewString(), checkpoint, "").refusedFor(t, 403, "replayed")
	f.asksWith(token, uuid.NewString(), checkpoint, "").refusedFor(t, 403, "exec_act")
	if got := read(token); got.status != 200 {
		t.Errorf("the read itself cannot be tried again: %d %s", got.status, got.body)
	}
	stop(t)
	setting.store = g.store
	f.gateway = launch(t, setting)
	f.asksWith(token, uuid.NewString(), checkpoint, "").refusedFor(t, 403, "exec_act")
	lab.wantDoc("/docs/a", "1")
}

// P1: a guard inside another one reads what stands there by requests of its own. They are
// no second sending of the call.
func TestP1ImagesBehindAnotherGuard(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	lab.write("/docs/a", "before")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: `route {
		agent_guard {
			name outer
		}
		` + lab.site() + `
	}`})
	got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: "PUT", path: "/docs/a", body: "after"}))
	if got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	lab.wantDoc("/docs/a", "after")
}
