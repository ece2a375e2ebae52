package operate

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// What happens to calls is counted by guard, action, outcome and slug.
func TestMetricsOfCalls(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `handle /metrics {
		metrics
	}
	handle {
		agent_proxy %s {
			name tools
			exempt path /search
			action pay {
				match path /pay*
				on_unknown probe GET /status/{http.agent_guard.execution_id} {
					applied 200
					not_applied 404
				}
			}
		}
	}`, u.Addr)
	count := func(name string, labels ...string) string {
		return "agent_guard_" + name + `{` + strings.Join(labels, ",") + `}`
	}
	pay := func(name string, more ...string) string {
		return count(name, append([]string{`action="pay"`, `guard="tools"`}, more...)...)
	}
	// The first time must show as an increase: everything begins at 0.
	before := g.Samples("/metrics")
	want := map[string]string{}
	expect := func(name string, n string) {
		t.Helper()
		if before[name] != "0" {
			t.Errorf("%s begins as %q", name, before[name])
		}
		want[name] = n
	}
	u.On("/pay/doubt", harness.Status(504, "late"))
	u.On("/pay/refused", harness.Status(401, "no"))
	for _, answer := range []int{500, 404, 200} {
		u.On("/status/"+fmt.Sprint("doubt", answer), harness.Status(answer, ""))
	}
	for range 3 {
		g.Call(harness.Request{Path: "/pay", Id: "a"})
	}
	g.Call(harness.Request{Path: "/pay", Id: "a", Body: `{"other":1}`})
	g.Call(harness.Request{Path: "/pay/refused", Id: "a"})
	for _, answer := range []int{500, 404, 200} {
		r := harness.Request{Path: "/pay/doubt", Id: fmt.Sprint("doubt", answer)}
		g.Call(r)
		g.Call(r)
	}
	g.Call(harness.Request{Path: "/search"})
	g.Call(harness.Request{Method: "GET", Path: "/x"})
	g.Call(harness.Request{Path: "/x", Id: "\x22"})
	expect(pay("executions_total", `outcome="completed"`), "1")
	expect(pay("executions_total", `outcome="released"`), "1")
	expect(pay("executions_total", `outcome="in_doubt"`), "4") // not_applied: it ran again
	expect(pay("replays_total"), "2")
	expect(pay("attaches_total"), "0")
	expect(pay("running"), "0")
	expect(pay("probes_total", `result="applied"`), "1")
	expect(pay("probes_total", `result="not_applied"`), "1")
	expect(pay("probes_total", `result="unknown"`), "1")
	expect(pay("problems_total", `problem="fingerprint-mismatch"`), "1")
	expect(pay("problems_total", `problem="in-doubt"`), "1")
	expect(pay("problems_total", `problem="result-unavailable"`), "1")
	expect(pay("fail_open_total"), "0")
	expect(count("problems_total", `action="default"`, `guard="tools"`, `problem="execution-id-invalid"`), "1")
	expect(count("unguarded_total", `guard="tools"`, `reason="exempt"`), "1")
	expect(count("unguarded_total", `guard="tools"`, `reason="safe"`), "1")
	got := g.Samples("/metrics")
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s is %q, want %s", name, got[name], n)
		}
	}
}

// Calls that run are counted while they do.
func TestMetricsOfARunningCall(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, "handle /metrics {\n metrics\n}\nhandle {\n agent_proxy %s\n}", u.Addr)
	u.On("/x", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
	const running, attached = `agent_guard_running{action="default",guard="default"}`, `agent_guard_attaches_total{action="default",guard="default"}`
	owner := g.Begin(harness.Request{Path: "/x", Id: "k"})
	harness.Wait(t, hold.Arrived, "the call")
	follower := g.Begin(harness.Request{Path: "/x", Id: "k"})
	harness.Followers(t, 1)
	if got := g.Samples("/metrics"); got[running] != "1" || got[attached] != "0" {
		t.Errorf("while it runs: %s running, %s attached", got[running], got[attached])
	}
	hold.Open()
	owner.Answer()
	follower.Answer()
	if got := g.Samples("/metrics"); got[running] != "0" || got[attached] != "1" {
		t.Errorf("afterwards: %s running, %s attached", got[running], got[attached])
	}
}
