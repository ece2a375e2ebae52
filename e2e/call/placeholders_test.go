package call

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// What logs and matchers can know of each call (README, "Placeholders"), and the span
// that `tracing` makes for it.
func TestPlaceholdersAndSpans(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	g := harness.Start(t, `e2e_observe
	agent_proxy %s {
		name tools
		exempt path /search
		missing_id require
		action pay {
			match path /pay*
		}
	}`, u.Addr)
	u.On("/pay/doubt", harness.Status(504, "late"))
	u.On("/pay/refused", harness.Status(429, "later"))
	hold := harness.NewGate(t)
	u.On("/pay/slow", func(w http.ResponseWriter, _ *harness.Arrival) {
		hold.Pass()
		_, _ = io.WriteString(w, "slow")
	})
	caller := map[string]string{"Authorization": "Bearer secret", "Workflow-Id": "flow-1"}
	n := -1
	check := func(want map[string]string) {
		t.Helper()
		n++
		got := maps.Clone(o.Request(n))
		if want["execution_id"] != "" {
			if !harness.ShortHash.MatchString(got["key"]) || !harness.LongHash.MatchString(got["caller"]) || got["workflow"] != "flow-1" {
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
		attributes := o.Attributes(n)
		if key := attributes["agent_guard.execution.key"]; key != o.Request(n)["key"] {
			t.Errorf("request %d: the span has the key %q, the log %q", n, key, o.Request(n)["key"])
		}
		delete(attributes, "agent_guard.execution.key")
		if fmt.Sprint(attributes) != fmt.Sprint(spanned) {
			t.Errorf("request %d: span %v, want %v", n, attributes, spanned)
		}
	}
	call := func(path string) harness.Reply {
		return g.Call(harness.Request{Path: path, Id: "id-1", Header: caller})
	}
	call("/pay")
	check(map[string]string{"status": "executed", "guard": "tools", "action": "pay", "outcome": "completed", "execution_id": "id-1"})
	g.Store.Pass(-time.Second)
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
	g.Call(harness.Request{Path: "/pay", Id: "id-1", Body: `{"amount":2}`, Header: caller})
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "fingerprint-mismatch", "execution_id": "id-1"})
	g.Call(harness.Request{Path: "/pay", Header: caller})
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "execution-id-missing", "workflow": "flow-1"})
	g.Call(harness.Request{Path: "/search", Header: caller})
	check(map[string]string{"status": "unguarded"})
	g.Call(harness.Request{Method: "GET", Path: "/pay", Header: caller})
	check(map[string]string{})
	g.Store.FailCommits(harness.ErrBroken)
	call("/pay/new")
	check(map[string]string{"status": "refused", "guard": "tools", "action": "pay", "problem": "store-unavailable", "execution_id": "id-1"})
	g.Store.OnCommit(nil)

	slow := harness.Request{Path: "/pay/slow", Id: "id-1", Header: caller}
	owner := g.Begin(slow)
	harness.Wait(t, hold.Arrived, "the call")
	follower := g.Begin(slow)
	harness.Followers(t, 1)
	hold.Open()
	owner.Answer()
	follower.Answer()
	statuses := o.Request(n + 1)["status"] + " " + o.Request(n + 2)["status"]
	if statuses != "executed attached" && statuses != "attached executed" {
		t.Errorf("%s", statuses)
	}
	if a, b := o.Request(n + 1)["key"], o.Request(n + 2)["key"]; a != b {
		t.Errorf("one execution has the keys %s and %s", a, b)
	}
}

// A doubt that the store did not even record is one for logs, too.
func TestPlaceholdersOfAnUnrecordedOutcome(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	g := harness.Start(t, "e2e_observe\nagent_proxy %s", u.Addr)
	u.On("/x", func(w http.ResponseWriter, _ *harness.Arrival) {
		g.Store.FailCommits(harness.ErrBroken)
		w.Header().Set("Content-Length", "0")
		w.WriteHeader(200)
	})
	g.Call(harness.Request{Path: "/x", Id: "k"}).Terminal(t, 409, "in-doubt")
	got := o.Request(0)
	if got["status"] != "in_doubt" || got["outcome"] != "in_doubt" || got["cause"] != "outcome_unrecorded" {
		t.Errorf("%v", got)
	}
}

// Of two guards in a chain, each fills its own templates, and the log shows the outer.
func TestPlaceholdersOfChainedGuards(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	g := harness.Start(t, `e2e_observe
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
	}`, u.Addr)
	g.Call(harness.Request{Path: "/x", Id: "a", Header: map[string]string{"X-Inner": "b"}})
	u.Mu.Lock()
	seen := u.Seen["/x"][0].Header.Get("X-Seen")
	u.Mu.Unlock()
	if seen != "inner/b" {
		t.Errorf("inside, the placeholders are %s", seen)
	}
	if got := o.Request(0); got["guard"] != "outer" || got["execution_id"] != "a" || got["status"] != "executed" {
		t.Errorf("outside: %v", got)
	}
}
