package e2e

import (
	"errors"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

var errBroken = errors.New("the disk is full")

// P4: nothing is forwarded that could not be recorded. What changes nothing goes on,
// and so does all of the site once the store is back.
func TestClaimFails(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	r := request{path: "/x", id: "k"}
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "executed")
	for name, broken := range map[string]func(){
		"commit": func() { g.store.failCommits(errBroken) },
		"closed": func() { g.store.failCommits(store.ErrUnhealthy) },
		"get":    func() { g.store.onGet(func([]byte) error { return errBroken }) },
	} {
		broken()
		for range 3 {
			doc := g.call(r).retryable(t, 503, "store-unavailable")
			if doc.State != "" || doc.ExecutionID != "k" {
				t.Errorf("%s: %+v", name, doc)
			}
		}
		if got := g.call(request{method: http.MethodGet, path: "/read"}); got.status != 201 {
			t.Errorf("%s: a read got %d", name, got.status)
		}
		g.store.onCommit(nil)
		g.store.onGet(nil)
	}
	u.arrived("/x", 0)
	g.call(r).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "replayed")
}

// Trap 4: an outcome that could not be recorded is in doubt, and said to be, to the
// caller, to those that follow, and to every retry. The end of the answer does not leave.
func TestSettleFails(t *testing.T) {
	for _, row := range endings {
		t.Run(row.name, func(t *testing.T) {
			u, hold := newUpstream(t), newGate(t)
			g := start(t, "header X-Outer o\nagent_proxy %s {\n consequential {\n  method HEAD\n }\n}", u.addr)
			u.on("/x", func(w http.ResponseWriter, a *arrival) {
				hold.pass()
				w.Header().Set("X-Upstream", "u")
				g.store.failCommits(errBroken)
				row.answer(w, a)
			})
			r := request{method: row.method, path: "/x", id: "k"}
			owner := g.begin(r)
			wait(t, hold.arrived, "the call")
			follower := g.begin(r)
			followers(t, 1)
			hold.open()
			for name, p := range map[string]*pending{"owner": owner, "follower": follower} {
				wait(t, p.done, "the "+name)
				switch {
				case p.err != nil: // aborted before the header had left
				case p.got.status == 409 && row.method == http.MethodHead:
				case p.got.status == 409:
					p.got.terminal(t, 409, "in-doubt")
					if p.got.header.Get("X-Upstream") != "" || p.got.header.Get("Execution-Status") != "in_doubt" || p.got.header.Get("X-Outer") != "o" {
						t.Errorf("%s: %v", name, p.got.header)
					}
				case !p.got.cut:
					t.Errorf("the %s saw the end: %d %q %v", name, p.got.status, p.got.body, p.got.header)
				}
			}
			for range 2 {
				if got := g.call(r); row.method != http.MethodHead {
					got.terminal(t, 409, "in-doubt")
				} else if got.status != 409 {
					t.Errorf("retry: %d", got.status)
				}
			}
			g.store.onCommit(nil)
			if got := g.call(r); got.status != 409 {
				t.Errorf("once the store is back: %d", got.status)
			}
			u.arrived("/x", 1)
			g.call(request{path: "/other", id: "k"}).want(t, 201, "arrival 1", "executed")
		})
	}
}
