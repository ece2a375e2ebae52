package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const failOpen = "agent_proxy %s {\n fail_open\n}"

// P4: where a route says fail_open and nothing can be recorded, calls are forwarded
// unguarded, marked and counted. Without the option they are refused (TestClaimFails).
func TestFailOpen(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := launch(t, setup{global: everyEvent, site: fmt.Sprintf("e2e_observe\nhandle /metrics {\n metrics\n}\nhandle {\n"+failOpen+"\n}", u.addr)})
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "executed")
	arrivals := 0
	for name, broken := range map[string]func(){
		"claim":      func() { g.store.failCommits(errBroken) },
		"closed":     func() { g.store.failCommits(store.ErrUnhealthy) },
		"look-up":    func() { g.store.onGet(func([]byte) error { return errBroken }) },
		"everything": func() { g.store.failCommits(errBroken); g.store.onGet(func([]byte) error { return errBroken }) },
	} {
		broken()
		for range 2 {
			arrivals++
			body := strings.Repeat("x", arrivals)
			got := g.call(request{path: "/x", id: "k", body: body, header: map[string]string{"Expect": "100-continue"}})
			if got.status != 201 || got.body != fmt.Sprint("arrival ", arrivals) {
				t.Errorf("%s: %d %q", name, got.status, got.body)
			}
			if s := got.header.Values("Execution-Status"); len(s) != 1 || s[0] != "unguarded" {
				t.Errorf("%s: Execution-Status %q", name, s)
			}
			if got.header.Get("Execution-Id") != "" || got.header.Get("Idempotent-Replayed") != "" {
				t.Errorf("%s: %v", name, got.header)
			}
			u.mu.Lock()
			last := u.seen["/x"][arrivals-1]
			if last.body != body || last.Header.Get("Idempotency-Key") != "k" || last.ContentLength != int64(len(body)) {
				t.Errorf("%s: the upstream got %q, %v", name, last.body, last.Header)
			}
			u.mu.Unlock()
		}
		g.store.onCommit(nil)
		g.store.onGet(nil)
	}
	noted := o.request(1)
	if noted["status"] != "unguarded" || noted["problem"] != "store-unavailable" {
		t.Errorf("%v", noted)
	}
	if e := o.event(); e.Name() != "agent_guard.fail_open" || fmt.Sprint(e.Data["calls"]) != "1" {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
	if got := g.samples("/metrics")[`agent_guard_fail_open_total{action="default",guard="default"}`]; got != fmt.Sprint(arrivals) {
		t.Errorf("%s calls are counted, want %d", got, arrivals)
	}
	policy := g.call(request{method: "GET", path: "/.well-known/cascade/policy"}).body
	if !strings.Contains(policy, `"fail_open": true`) || !strings.Contains(policy, "forwarded unguarded") {
		t.Errorf("the published policy promises too much: %s", policy)
	}
	// Guarded again as soon as the store is back.
	g.call(request{path: "/y", id: "k"}).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/y", id: "k"}).want(t, 201, "arrival 1", "replayed")
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "replayed")
}
