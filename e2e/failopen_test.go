package e2e

import (
	"fmt"
	"net/http"
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
		"look-up":    func() { g.store.onGet(func() error { return errBroken }) },
		"everything": func() { g.store.failCommits(errBroken); g.store.onGet(func() error { return errBroken }) },
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

// P4, P1: fail_open forwards nothing where it is not certain that nothing is claimed
// or was executed.
func TestFailOpenStaysClosed(t *testing.T) {
	u := newUpstream(t)
	g := start(t, failOpen, u.addr)
	u.on("/doubt", status(504, ""))
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/doubt", id: "k"})
	closed := func(what, path string, broken func()) {
		t.Helper()
		broken()
		g.call(request{path: path, id: "k"}).retryable(t, 503, "store-unavailable")
		g.store.onCommit(nil)
		g.store.onGet(nil)
	}
	closed("the claim may stand", "/new", func() { g.store.failCommits(store.ErrUnknown) })
	closed("the record is not taken", "/new", func() { g.store.failCommits(store.ErrInvalid) })
	u.arrived("/new", 0)

	// Where the look-up finds an execution, that stands, whatever fails.
	g.store.failCommits(errBroken)
	g.call(request{path: "/known", id: "k"}).want(t, 201, "arrival 1", "replayed")
	g.call(request{path: "/known", id: "k", body: `{"other":1}`}).terminal(t, 422, "fingerprint-mismatch")
	g.call(request{path: "/doubt", id: "k"}).terminal(t, 409, "in-doubt")
	g.store.onCommit(nil)
	u.arrived("/known", 1)
	u.arrived("/doubt", 1)
}

// A call that has met an earlier one is refused when the store fails afterwards.
func TestFailOpenAfterAnEarlierCall(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "agent_proxy %s {\n fail_open\n on_unknown retry\n}", u.addr)
	u.on("/doubt", status(504, ""))
	r := request{path: "/doubt", id: "k"}
	g.call(r).want(t, 504, "", "in_doubt")
	g.store.failCommits(errBroken)
	g.call(r).retryable(t, 503, "store-unavailable")
	g.store.onCommit(nil)
	u.arrived("/doubt", 1)

	// It waits for an execution that is released; the look-up then fails.
	u.on("/x", func(w http.ResponseWriter, _ *arrival) {
		hold.pass()
		w.WriteHeader(504)
	})
	owner := g.begin(request{path: "/x", id: "k"})
	wait(t, hold.arrived, "the call")
	follower := g.begin(request{path: "/x", id: "k"})
	followers(t, 1)
	g.store.onGet(func() error { return errBroken })
	hold.open()
	owner.answer()
	if got := follower.answer(); got.header.Get("Execution-Status") == "unguarded" {
		t.Errorf("%d %v", got.status, got.header)
	}
	u.arrived("/x", 1)
}
