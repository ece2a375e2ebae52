package e2e

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"testing"
	"time"
)

var (
	shortHash = regexp.MustCompile(`^[0-9a-f]{16}$`)
	longHash  = regexp.MustCompile(`^[0-9a-f]{32}$`)
)

// What logs and matchers can know of each call (README, "Placeholders"), and the span
// that `tracing` makes for it.
func TestPlaceholdersAndSpans(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := start(t, `e2e_observe
	agent_proxy %s {
		name tools
		exempt path /search
		missing_id require
		action pay {
			match path /pay*
		}
	}`, u.addr)
	u.on("/pay/doubt", status(504, "late"))
	u.on("/pay/refused", status(429, "later"))
	hold := newGate(t)
	u.on("/pay/slow", func(w http.ResponseWriter, _ *arrival) {
		hold.pass()
		_, _ = io.WriteString(w, "slow")
	})
	caller := map[string]string{"Authorization": "Bearer secret", "Workflow-Id": "flow-1"}
	n := -1
	check := func(want map[string]string) {
		t.Helper()
		n++
		got := maps.Clone(o.request(n))
		if want["execution_id"] != "" {
			if !shortHash.MatchString(got["key"]) || !longHash.MatchString(got["caller"]) || got["workflow"] != "flow-1" {
				t.Errorf("%v", got)
			}
			for _, name := range []string{"key", "caller", "workflow"} {
				delete(got, name)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("request %d: %v, want %v", n, got, want)
		}
		spanned := map[string]string{}
		for _, name := range []string{"status", "guard", "action", "outcome", "problem"} {
			if v := want[name]; v != "" && want["guard"] != "" {
				spanned["agent_guard.execution."+name] = v
			}
		}
		attributes := o.attributes(n)
		if key := attributes["agent_guard.execution.key"]; key != o.request(n)["key"] {
			t.Errorf("request %d: the span has the key %q, the log %q", n, key, o.request(n)["key"])
		}
		delete(attributes, "agent_guard.execution.key")
		if fmt.Sprint(attributes) != fmt.Sprint(spanned) {
			t.Errorf("request %d: span %v, want %v", n, attributes, spanned)
		}
	}
	call := func(path string) reply { return g.call(request{path: path, id: "id-1", header: caller}) }
	call("/pay")
	check(map[string]string{"status": "executed", "guard": "tools", "action": "pay", "outcome": "completed", "execution_id": "id-1"})
	g.store.pass(-time.Second)
	call("/pay")
	check(map[string]string{"status": "replayed", "guard": "tools", "action": "pay", "outcome": "completed", "execution_id": "id-1", "age": "0"})
	call("/other")
	check(map[string]string{"status": "executed", "guard": "tools", "action": "default", "outcome": "completed", "execution_id": "id-1"})
	call("/pay/doubt")
	check(map[string]string{"status": "in_doubt", "guard": "tools", "action": "pay", "outcome": "in_doubt", "cause": "upstream_status", "execution_id": "id-1"})
	call("/pay/doubt")
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "in-doubt", "execution_id": "id-1"})
	call("/pay/refused")
	check(map[string]string{"status": "executed", "guard": "tools", "action": "pay", "outcome": "released", "execution_id": "id-1"})
	g.call(request{path: "/pay", id: "id-1", body: `{"amount":2}`, header: caller})
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "fingerprint-mismatch", "execution_id": "id-1"})
	g.call(request{path: "/pay", header: caller})
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "execution-id-missing", "workflow": "flow-1"})
	g.call(request{path: "/search", header: caller})
	check(map[string]string{"status": "unguarded"})
	g.call(request{method: "GET", path: "/pay", header: caller})
	check(map[string]string{})
	g.store.failCommits(errBroken)
	call("/pay/new")
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "store-unavailable", "execution_id": "id-1"})
	g.store.onCommit(nil)

	slow := request{path: "/pay/slow", id: "id-1", header: caller}
	owner := g.begin(slow)
	wait(t, hold.arrived, "the call")
	follower := g.begin(slow)
	followers(t, 1)
	hold.open()
	owner.answer()
	follower.answer()
	statuses := o.request(n + 1)["status"] + " " + o.request(n + 2)["status"]
	if statuses != "executed attached" && statuses != "attached executed" {
		t.Errorf("%s", statuses)
	}
	if a, b := o.request(n + 1)["key"], o.request(n + 2)["key"]; a != b {
		t.Errorf("one execution has the keys %s and %s", a, b)
	}
}

// A doubt that the store did not even record is one for logs, too.
func TestPlaceholdersOfAnUnrecordedOutcome(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := start(t, "e2e_observe\nagent_proxy %s", u.addr)
	u.on("/x", func(w http.ResponseWriter, _ *arrival) {
		g.store.failCommits(errBroken)
		w.Header().Set("Content-Length", "0")
		w.WriteHeader(200)
	})
	g.call(request{path: "/x", id: "k"}).terminal(t, 409, "in-doubt")
	got := o.request(0)
	if got["status"] != "in_doubt" || got["outcome"] != "in_doubt" || got["cause"] != "outcome_unrecorded" {
		t.Errorf("%v", got)
	}
}

// Of two guards in a chain, each fills its own templates, and the log shows the outer.
func TestPlaceholdersOfChainedGuards(t *testing.T) {
	o, u := observed(t), newUpstream(t)
	g := start(t, `e2e_observe
	agent_guard {
		name outer
	}
	route {
		agent_guard {
			name inner
			execution_id header X-Inner
		}
		reverse_proxy %s {
			header_up X-Seen {http.agent_guard.guard}/{http.agent_guard.execution_id}
		}
	}`, u.addr)
	g.call(request{path: "/x", id: "a", header: map[string]string{"X-Inner": "b"}})
	u.mu.Lock()
	seen := u.seen["/x"][0].Header.Get("X-Seen")
	u.mu.Unlock()
	if seen != "inner/b" {
		t.Errorf("inside, the placeholders are %s", seen)
	}
	if got := o.request(0); got["guard"] != "outer" || got["execution_id"] != "a" || got["status"] != "executed" {
		t.Errorf("outside: %v", got)
	}
}
