package rollback

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// C-6.1-d, P3: who has no part in a workflow cannot use up the rollbacks that may be asked
// for in it.
func TestCascade61StrangersUseUpNoRollbacks(t *testing.T) {
	lab, a, m := harness.NewRestLab(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "m")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, m) + "\nrollback {\n rate 2\n }", Site: lab.Site(), Badger: true})
	f := g.Workflow()
	_, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	for range 2 {
		f.Asks(m, uuid.NewString(), checkpoint, "").Is(t, 403, "not-in-workflow")
	}
	f.Asks(m, uuid.NewString(), checkpoint, "").Is(t, 429, "quota-exceeded") // its own bound
	f.Asks(a, uuid.NewString(), checkpoint, "").Undone(t, rollback.Completed)
}

// P4: without room in the store no rollback begins, and what is said is that, and not that
// something is wrong with the token. With room again the same request goes on.
func TestP4RollbackWithoutRoom(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: lab.Site()})
	f := g.Workflow()
	_, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	asking, id := a.Issue(f.Request(checkpoint, "")), uuid.NewString()
	g.SettledView(a, f.Wid, 3)
	g.Store.FailCommits(fmt.Errorf("badger: %w", store.ErrFull))
	got := f.AsksWith(asking, id, checkpoint, "")
	got.Is(t, http.StatusServiceUnavailable, "store-unavailable")
	if got.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	lab.WantDoc("/docs/a", "1")
	g.Store.OnCommit(nil)
	f.AsksWith(asking, id, checkpoint, "").Undone(t, rollback.Completed)
}

// Cascade 6.1: an upstream gets the tokens of requests that change nothing, too. It cannot
// ask for a rollback with them, also not after a restart, which forgets that they were used.
func TestCascade61TokenOfAReadAsksForNothing(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	setting := harness.Setup{App: harness.Trusting(t, a), Site: lab.Site()}
	g := harness.Launch(t, setting)
	f := g.Workflow()
	_, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	token := a.Issue(ect.Claims{Workflow: f.Wid, Action: "look", Parents: []string{checkpoint}})
	asking := a.Issue(f.Request(checkpoint, ""))
	read := func(shown *ect.Token) harness.Reply {
		return f.Call(harness.With(shown, harness.Request{Method: "GET", Path: "/docs/a"}))
	}
	for _, shown := range []*ect.Token{token, asking} {
		if got := read(shown); got.Status != 200 || lab.Last("/docs/a").Header.Get("Execution-Context") == "" {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	f.AsksWith(asking, uuid.NewString(), checkpoint, "").RefusedFor(t, 403, "replayed")
	f.AsksWith(token, uuid.NewString(), checkpoint, "").RefusedFor(t, 403, "exec_act")
	if got := read(token); got.Status != 200 {
		t.Errorf("the read itself cannot be tried again: %d %s", got.Status, got.Body)
	}
	harness.Stop(t)
	setting.Store = g.Store
	f.Gateway = harness.Launch(t, setting)
	f.AsksWith(token, uuid.NewString(), checkpoint, "").RefusedFor(t, 403, "exec_act")
	lab.WantDoc("/docs/a", "1")
}

// P1: a guard inside another one reads what stands there by requests of its own. They are
// no second sending of the call.
func TestP1ImagesBehindAnotherGuard(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	lab.Write("/docs/a", "before")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: `route {
		agent_guard {
			name outer
		}
		` + lab.Site() + `
	}`})
	got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), harness.Request{Method: "PUT", Path: "/docs/a", Body: "after"}))
	if got.Status != 200 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	lab.WantDoc("/docs/a", "after")
}
