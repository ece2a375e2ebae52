package call

import (
	"fmt"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const failOpen = "agent_proxy %s {\n fail_open\n}"

// P4: where a route says fail_open and nothing can be recorded, calls are forwarded
// unguarded, marked and counted. Without the option they are refused (TestClaimFails).
func TestFailOpen(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Global: harness.EveryEvent, Site: fmt.Sprintf("e2e_observe\nhandle /metrics {\n metrics\n}\nhandle {\n"+failOpen+"\n}", u.Addr)})
	g.Call(harness.Request{Path: "/known", Id: "k"}).Want(t, 201, "arrival 1", "executed")
	arrivals := 0
	for name, broken := range map[string]func(){
		"claim":   func() { g.Store.FailCommits(harness.ErrBroken) },
		"closed":  func() { g.Store.FailCommits(store.ErrUnhealthy) },
		"look-up": func() { g.Store.OnGet(func([]byte) error { return harness.ErrBroken }) },
		"everything": func() {
			g.Store.FailCommits(harness.ErrBroken)
			g.Store.OnGet(func([]byte) error { return harness.ErrBroken })
		},
	} {
		broken()
		for range 2 {
			arrivals++
			body := strings.Repeat("x", arrivals)
			got := g.Call(harness.Request{Path: "/x", Id: "k", Body: body, Header: map[string]string{"Expect": "100-continue"}})
			if got.Status != 201 || got.Body != fmt.Sprint("arrival ", arrivals) {
				t.Errorf("%s: %d %q", name, got.Status, got.Body)
			}
			if s := got.Header.Values("Execution-Status"); len(s) != 1 || s[0] != "unguarded" {
				t.Errorf("%s: Execution-Status %q", name, s)
			}
			if got.Header.Get("Execution-Id") != "" || got.Header.Get("Idempotent-Replayed") != "" {
				t.Errorf("%s: %v", name, got.Header)
			}
			u.Mu.Lock()
			last := u.Seen["/x"][arrivals-1]
			if last.Body != body || last.Header.Get("Idempotency-Key") != "k" || last.ContentLength != int64(len(body)) {
				t.Errorf("%s: the upstream got %q, %v", name, last.Body, last.Header)
			}
			u.Mu.Unlock()
		}
		g.Store.OnCommit(nil)
		g.Store.OnGet(nil)
	}
	noted := o.Request(1)
	if noted["status"] != "unguarded" || noted["problem"] != "store-unavailable" {
		t.Errorf("%v", noted)
	}
	if e := o.Event(); e.Name() != "agent_guard.fail_open" || fmt.Sprint(e.Data["calls"]) != "1" {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
	if got := g.Samples("/metrics")[`agent_guard_fail_open_total{action="default",guard="default"}`]; got != fmt.Sprint(arrivals) {
		t.Errorf("%s calls are counted, want %d", got, arrivals)
	}
	policy := g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/policy"}).Body
	if !strings.Contains(policy, `"fail_open": true`) || !strings.Contains(policy, "forwarded unguarded") {
		t.Errorf("the published policy promises too much: %s", policy)
	}
	// Guarded again as soon as the store is back.
	g.Call(harness.Request{Path: "/y", Id: "k"}).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.Request{Path: "/y", Id: "k"}).Want(t, 201, "arrival 1", "replayed")
	g.Call(harness.Request{Path: "/known", Id: "k"}).Want(t, 201, "arrival 1", "replayed")
}
