package operate

import (
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Handlers that are bound through Caddy's events app hear what happens to calls, with
// data that name nobody (P8).
func TestEvents(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Global: harness.EveryEvent, Site: fmt.Sprintf(`agent_proxy %s {
		missing_id recognize
		on_unknown probe GET /status?id={http.agent_guard.execution_id} {
			applied 200
			not_applied 404
		}
	}`, u.Addr)})
	u.On("/x", harness.Status(504, ""))
	asked := 404
	u.On("/status", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(asked) })
	header := map[string]string{"Authorization": "Bearer secret-credential", "Workflow-Id": "secret-flow"}
	var key string
	expect := func(name string, more map[string]any) {
		t.Helper()
		e := o.Event()
		if key == "" {
			key, _ = e.Data["key"].(string)
		}
		caller, _ := e.Data["caller"].(string)
		want := map[string]any{"guard": "default", "action": "default", "key": key, "caller": caller}
		maps.Copy(want, more)
		if e.Name() != name || fmt.Sprint(e.Data) != fmt.Sprint(want) {
			t.Errorf("%s %v, want %s %v", e.Name(), e.Data, name, want)
		}
		if !harness.ShortHash.MatchString(key) || !harness.LongHash.MatchString(caller) {
			t.Errorf("key %q, caller %q", key, caller)
		}
		if e.Origin() == nil || e.Origin().CaddyModule().ID != "agent_guard" {
			t.Errorf("%s comes from %v", name, e.Origin())
		}
		if text := fmt.Sprint(e.Data); strings.Contains(text, "secret") {
			t.Errorf("P8: %s", text)
		}
	}
	call := func(body string) {
		g.Call(harness.Request{Path: "/x", Id: "secret-id", Header: header, Body: `"secret` + body + `"`})
	}
	doubt := map[string]any{"cause": "upstream_status", "status": 504}
	call("")
	expect("agent_guard.execution_in_doubt", doubt)
	g.Store.FailCommits(harness.ErrBroken)
	call("") // what the probe says is not recorded: it stays in doubt, and nothing is told
	g.Store.OnCommit(nil)
	call("")
	expect("agent_guard.execution_resolved", map[string]any{"outcome": "released", "by": "probe"})
	expect("agent_guard.execution_in_doubt", doubt) // it ran again
	asked = 200
	call("")
	expect("agent_guard.execution_resolved", map[string]any{"outcome": "completed", "by": "probe"})
	call("another")
	expect("agent_guard.fingerprint_mismatch", nil)
	for _, count := range []string{"", "1"} {
		g.Call(harness.Request{Path: "/y", Header: map[string]string{"Authorization": "Bearer secret-credential", "X-Stainless-Retry-Count": count}})
	}
	key = ""
	expect("agent_guard.call_recognized", map[string]any{"evidence": "stated"})
}

// The store's state is told without any call.
func TestEventsOfTheStore(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{Global: harness.EveryEvent, Site: "agent_proxy " + u.Addr})
	g.Call(harness.Request{Path: "/x", Id: "k"}).Want(t, 201, "arrival 1", "executed")
	_ = g.Store.Memory.Close()
	if e := o.Event(); e.Name() != "agent_guard.store_unhealthy" || len(e.Data) != 0 {
		t.Errorf("%s %v", e.Name(), e.Data)
	}
}

// A handler of events that hangs holds up no call.
func TestEventHandlersHoldUpNothing(t *testing.T) {
	o, u := harness.Observed(t), harness.NewUpstream(t)
	o.Events = make(chan caddy.Event) // nobody takes
	g := harness.Launch(t, harness.Setup{Global: harness.EveryEvent, Site: "agent_proxy " + u.Addr})
	u.On("/x", harness.Status(504, ""))
	for n := range 5 {
		g.Call(harness.Request{Path: "/x", Id: fmt.Sprint(n)})
	}
	u.Arrived("/x", 5)
	for range 5 { // let it end
		o.Event()
	}
}
