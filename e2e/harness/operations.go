package harness

import (
	"flag"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Begins makes a call of an agent, which may be refused.
func (f *Flow) Begins(a *Agent, path string, parents ...string) Reply {
	f.T.Helper()
	token := a.Issue(ect.Claims{Workflow: f.Wid, Action: "do", Parents: parents})
	return f.Call(With(token, Request{Method: "PUT", Path: path, Body: "later", Header: Headers{"Content-Type": "text/plain"}}))
}

// UpdateGolden says that golden files are written instead of compared.
var UpdateGolden = flag.Bool("update", false, "write the golden files anew")

// EveryEvent hands all events to the handler of the tests.
const EveryEvent = `events {
	on agent_guard.execution_in_doubt e2e
	on agent_guard.execution_resolved e2e
	on agent_guard.executions_recovered e2e
	on agent_guard.fingerprint_mismatch e2e
	on agent_guard.call_recognized e2e
	on agent_guard.call_cancelled e2e
	on agent_guard.fail_open e2e
	on agent_guard.store_unhealthy e2e
	on agent_guard.disk_low e2e
	on agent_guard.disk_recovered e2e
}`

// Samples reads the site's metrics: values by `name{labels}`.
func (g *Gateway) Samples(path string) map[string]string {
	g.T.Helper()
	return ParseSamples(g.Call(Request{Method: "GET", Path: path}).Body)
}

// ParseSamples returns the values of metrics by name and labels.
func ParseSamples(text string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			all[line[:i]] = strings.TrimSpace(line[i+1:])
		}
	}
	return all
}
