package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// samples reads the site's metrics: values by `name{labels}`.
func (g *gateway) samples(path string) map[string]string {
	g.t.Helper()
	return parseSamples(g.call(request{method: "GET", path: path}).body)
}

func parseSamples(text string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			all[line[:i]] = strings.TrimSpace(line[i+1:])
		}
	}
	return all
}

// What happens to calls is counted by guard, action, outcome and slug.
func TestMetricsOfCalls(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `handle /metrics {
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
	}`, u.addr)
	count := func(name string, labels ...string) string {
		return "agent_guard_" + name + `{` + strings.Join(labels, ",") + `}`
	}
	pay := func(name string, more ...string) string {
		return count(name, append([]string{`action="pay"`, `guard="tools"`}, more...)...)
	}
	// The first time must show as an increase: everything begins at 0.
	before := g.samples("/metrics")
	want := map[string]string{}
	expect := func(name string, n string) {
		t.Helper()
		if before[name] != "0" {
			t.Errorf("%s begins as %q", name, before[name])
		}
		want[name] = n
	}
	u.on("/pay/doubt", status(504, "late"))
	u.on("/pay/refused", status(401, "no"))
	for _, answer := range []int{500, 404, 200} {
		u.on("/status/"+fmt.Sprint("doubt", answer), status(answer, ""))
	}
	for range 3 {
		g.call(request{path: "/pay", id: "a"})
	}
	g.call(request{path: "/pay", id: "a", body: `{"other":1}`})
	g.call(request{path: "/pay/refused", id: "a"})
	for _, answer := range []int{500, 404, 200} {
		r := request{path: "/pay/doubt", id: fmt.Sprint("doubt", answer)}
		g.call(r)
		g.call(r)
	}
	g.call(request{path: "/search"})
	g.call(request{method: "GET", path: "/x"})
	g.call(request{path: "/x", id: "\x22"})
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
	got := g.samples("/metrics")
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s is %q, want %s", name, got[name], n)
		}
	}
}

// Calls that run are counted while they do.
func TestMetricsOfARunningCall(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "handle /metrics {\n metrics\n}\nhandle {\n agent_proxy %s\n}", u.addr)
	u.on("/x", func(http.ResponseWriter, *arrival) { hold.pass() })
	const running, attached = `agent_guard_running{action="default",guard="default"}`, `agent_guard_attaches_total{action="default",guard="default"}`
	owner := g.begin(request{path: "/x", id: "k"})
	wait(t, hold.arrived, "the call")
	follower := g.begin(request{path: "/x", id: "k"})
	followers(t, 1)
	if got := g.samples("/metrics"); got[running] != "1" || got[attached] != "0" {
		t.Errorf("while it runs: %s running, %s attached", got[running], got[attached])
	}
	hold.open()
	owner.answer()
	follower.answer()
	if got := g.samples("/metrics"); got[running] != "0" || got[attached] != "1" {
		t.Errorf("afterwards: %s running, %s attached", got[running], got[attached])
	}
}
