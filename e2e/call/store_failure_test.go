package call

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// P4: nothing is forwarded that could not be recorded. What changes nothing goes on,
// and so does all of the site once the store is back.
func TestClaimFails(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	r := harness.Request{Path: "/x", Id: "k"}
	g.Call(harness.Request{Path: "/known", Id: "k"}).Want(t, 201, "arrival 1", "executed")
	for name, broken := range map[string]func(){
		"commit": func() { g.Store.FailCommits(harness.ErrBroken) },
		"closed": func() { g.Store.FailCommits(store.ErrUnhealthy) },
		"get":    func() { g.Store.OnGet(func([]byte) error { return harness.ErrBroken }) },
	} {
		broken()
		for range 3 {
			doc := g.Call(r).Retryable(t, 503, "store-unavailable")
			if doc.State != "" || doc.ExecutionID != "k" {
				t.Errorf("%s: %+v", name, doc)
			}
		}
		if got := g.Call(harness.Request{Method: http.MethodGet, Path: "/read"}); got.Status != 201 {
			t.Errorf("%s: a read got %d", name, got.Status)
		}
		g.Store.OnCommit(nil)
		g.Store.OnGet(nil)
	}
	u.Arrived("/x", 0)
	g.Call(r).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.Request{Path: "/known", Id: "k"}).Want(t, 201, "arrival 1", "replayed")
}

// Trap 4: an outcome that could not be recorded is in doubt, and said to be, to the
// caller, to those that follow, and to every retry. The end of the answer does not leave.
func TestSettleFails(t *testing.T) {
	for _, row := range harness.Endings {
		t.Run(row.Name, func(t *testing.T) {
			u, hold := harness.NewUpstream(t), harness.NewGate(t)
			g := harness.Start(t, "header X-Outer o\nagent_proxy %s {\n consequential {\n  method HEAD\n }\n}", u.Addr)
			u.On("/x", func(w http.ResponseWriter, a *harness.Arrival) {
				hold.Pass()
				w.Header().Set("X-Upstream", "u")
				g.Store.FailCommits(harness.ErrBroken)
				row.Answer(w, a)
			})
			r := harness.Request{Method: row.Method, Path: "/x", Id: "k"}
			owner := g.Begin(r)
			harness.Wait(t, hold.Arrived, "the call")
			follower := g.Begin(r)
			harness.Followers(t, 1)
			hold.Open()
			for name, p := range map[string]*harness.Pending{"owner": owner, "follower": follower} {
				harness.Wait(t, p.Done, "the "+name)
				switch {
				case p.Err != nil: // aborted before the header had left
				case p.Got.Status == 409 && row.Method == http.MethodHead:
				case p.Got.Status == 409:
					p.Got.Terminal(t, 409, "in-doubt")
					if p.Got.Header.Get("X-Upstream") != "" || p.Got.Header.Get("Execution-Status") != "in_doubt" || p.Got.Header.Get("X-Outer") != "o" {
						t.Errorf("%s: %v", name, p.Got.Header)
					}
				case !p.Got.Cut:
					t.Errorf("the %s saw the end: %d %q %v", name, p.Got.Status, p.Got.Body, p.Got.Header)
				}
			}
			for range 2 {
				if got := g.Call(r); row.Method != http.MethodHead {
					got.Terminal(t, 409, "in-doubt")
				} else if got.Status != 409 {
					t.Errorf("retry: %d", got.Status)
				}
			}
			g.Store.OnCommit(nil)
			if got := g.Call(r); got.Status != 409 {
				t.Errorf("once the store is back: %d", got.Status)
			}
			u.Arrived("/x", 1)
			g.Call(harness.Request{Path: "/other", Id: "k"}).Want(t, 201, "arrival 1", "executed")
		})
	}
}
