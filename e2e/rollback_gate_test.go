package e2e

import (
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// P6: what stands there when a doubtful call is run again may be its own work. A rollback
// goes back to what stood there before it was sent first.
func TestP6RollbackOfARetriedDoubt(t *testing.T) {
	th, a := newThings(t), newAgent(t, "a")
	th.at["/things/a"] = "before"
	lost, refused := 2, 1
	th.on("/things/a", func(w http.ResponseWriter, in *arrival) {
		if in.Method == http.MethodPut && in.body == "after" && lost > 0 {
			lost--
			th.mu.Lock()
			th.at["/things/a"] = in.body
			th.mu.Unlock()
			panic(http.ErrAbortHandler)
		}
		if in.Method == http.MethodPut && in.body == "after" && refused > 0 {
			refused--
			w.WriteHeader(http.StatusTooManyRequests) // of this attempt: it says nothing of the others
			return
		}
		th.serve(w, in)
	})
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + th.addr + ` {
		on_unknown retry
		default_undo restore
	}`})
	f := g.workflow()
	put := func(status int) reply {
		token := a.issue(ect.Claims{Workflow: f.wid, Action: "do"})
		got := f.call(with(token, request{
			method: "PUT", path: "/things/a", id: "k", body: "after", header: headers{"Content-Type": "text/plain"},
		}))
		if got.status != status {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return got
	}
	put(409)
	put(409)
	if v := g.checkpointOf(a, put(429)); v.Execution.State != "in_doubt" || v.Verification.Snapshot != "matches" {
		t.Errorf("%+v", v)
	}
	got := put(200)
	f.asks(a, uuid.NewString(), got.header.Get("Execution-Checkpoint"), "").undone(t, rollback.Completed)
	th.stands("/things/a", "before")
}

// C-6.1-d, P3: who has no part in a workflow cannot use up the rollbacks that may be asked
// for in it.
func TestCascade61StrangersUseUpNoRollbacks(t *testing.T) {
	th, a, m := newThings(t), newAgent(t, "a"), newAgent(t, "m")
	g := launch(t, setup{app: trusting(t, a, m) + "\nrollback {\n rate 2\n }", site: th.site(), badger: true})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/things/a", "1")
	for range 2 {
		f.asks(m, uuid.NewString(), checkpoint, "").is(t, 403, "not-in-workflow")
	}
	f.asks(m, uuid.NewString(), checkpoint, "").is(t, 429, "quota-exceeded") // its own bound
	f.asks(a, uuid.NewString(), checkpoint, "").undone(t, rollback.Completed)
}

// P4: without room in the store no rollback begins, and what is said is that, and not that
// something is wrong with the token. With room again the same request goes on.
func TestP4RollbackWithoutRoom(t *testing.T) {
	th, a := newThings(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: th.site()})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/things/a", "1")
	asking, id := a.issue(f.request(checkpoint, "")), uuid.NewString()
	g.settledView(a, f.wid, 3)
	g.store.failCommits(fmt.Errorf("badger: %w", store.ErrFull))
	got := f.asksWith(asking, id, checkpoint, "")
	got.is(t, http.StatusServiceUnavailable, "store-unavailable")
	if got.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	th.stands("/things/a", "1")
	g.store.onCommit(nil)
	f.asksWith(asking, id, checkpoint, "").undone(t, rollback.Completed)
}

// Cascade 6.1: an upstream gets the tokens of requests that change nothing, too. It cannot
// ask for a rollback with them, also not after a restart, which forgets that they were used.
func TestCascade61TokenOfAReadAsksForNothing(t *testing.T) {
	th, a := newThings(t), newAgent(t, "a")
	setting := setup{app: trusting(t, a), site: th.site()}
	g := launch(t, setting)
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/things/a", "1")
	token := a.issue(ect.Claims{Workflow: f.wid, Action: "look", Parents: []string{checkpoint}})
	asking := a.issue(f.request(checkpoint, ""))
	read := func(shown *ect.Token) reply { return f.call(with(shown, request{method: "GET", path: "/things/a"})) }
	for _, shown := range []*ect.Token{token, asking} {
		if got := read(shown); got.status != 200 || th.last("/things/a").Header.Get("Execution-Context") == "" {
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
	th.stands("/things/a", "1")
}

// P1: a guard inside another one reads what stands there by requests of its own. They are
// no second sending of the call.
func TestP1ImagesBehindAnotherGuard(t *testing.T) {
	th, a := newThings(t), newAgent(t, "a")
	th.at["/things/a"] = "before"
	g := launch(t, setup{app: trusting(t, a), badger: true, site: `route {
		agent_guard {
			name outer
		}
		` + th.site() + `
	}`})
	got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), request{method: "PUT", path: "/things/a", body: "after"}))
	if got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	th.stands("/things/a", "after")
}

// P6: what an upstream has only accepted is not there yet. A rollback that finds the old
// state has undone nothing.
func TestP6RollbackOfWhatWasOnlyAccepted(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	u.on("/slow", func(w http.ResponseWriter, in *arrival) {
		if in.Method != http.MethodGet {
			w.WriteHeader(http.StatusAccepted)
			return
		}
		_, _ = io.WriteString(w, "before")
	})
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n default_undo restore\n}"})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/slow", "after")
	f.asks(a, uuid.NewString(), checkpoint, "").undone(t, rollback.Escalated)
}

// P6: an upstream that says it has deleted what it has never shown hides it from the
// gateway, so that nobody knows what there was.
func TestP6RollbackOfADeleteOfWhatWasHidden(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	u.on("/hidden", func(w http.ResponseWriter, in *arrival) {
		if in.Method == http.MethodGet {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n default_undo restore\n}"})
	f := g.workflow()
	_, checkpoint := f.does(a, "DELETE", "/hidden", "")
	f.asks(a, uuid.NewString(), checkpoint, "").undone(t, rollback.Escalated)
}

// What came after a call is not taken for its work, also
// where its answer does not wait for its record.
func TestSettleAsyncTakesTheStateFirst(t *testing.T) {
	th, a := newThings(t), newAgent(t, "a")
	th.at["/things/a"] = "before"
	looks, slow := 0, make(chan struct{})
	th.on("/things/a", func(w http.ResponseWriter, in *arrival) {
		if in.Method == http.MethodGet {
			if looks++; looks == 2 {
				select { // the state after the first call
				case <-slow:
				case <-time.After(2 * time.Second):
				}
			}
		}
		th.serve(w, in)
	})
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + th.addr + ` {
		settle async
		action thing {
			match path /things/*
			restore
		}
	}`})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/things/a", "first")
	th.mu.Lock()
	th.at["/things/a"] = "another's" // who has seen the end of the answer
	th.mu.Unlock()
	close(slow)
	f.asks(a, uuid.NewString(), checkpoint, "").undone(t, rollback.Escalated)
	th.stands("/things/a", "another's")
}

// P6: a doubtful call that runs again and is refused by the gateway itself is still in
// doubt, and no new id is safe for it.
func TestP6RefusalOfADoubtfulCall(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	there := "old"
	s := &shelf{state: &there}
	g := launch(t, setup{app: trusting(t, a) + "\nquota {\n checkpoint_rate 1\n}", badger: true, site: "agent_proxy " + u.addr + " {\n on_unknown retry\n default_undo restore\n}"})
	wid := uuid.NewString()
	put := func() reply {
		return g.call(with(a.issue(ect.Claims{Workflow: wid}), request{method: "PUT", path: "/x", id: "k", body: "new"}))
	}
	u.on("/x", func(w http.ResponseWriter, in *arrival) {
		if in.Method == http.MethodPut {
			panic(http.ErrAbortHandler)
		}
		s.serve(w, in)
	})
	put().retryable(t, 409, "in-doubt")
	if doc := put().retryable(t, 429, "quota-exceeded"); *doc.SafeNewKey || doc.State != "in_doubt" {
		t.Errorf("%+v", doc)
	}
}
