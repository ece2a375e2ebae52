//go:build unix

package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// ATD, "Coordinated Circuit Breaking", ADR 0138: two gateways on one database have breakers of their own, each shows
// those of both, and with `probe_scope fleet` one sends the probe for both.
func TestProcessFleetCircuits(t *testing.T) {
	t.Parallel() // its gateways are processes
	u, hold := newUpstream(t), newGate(t)
	u.on("/down", status(503, ""))
	u.on("/slow", func(w http.ResponseWriter, _ *arrival) { hold.pass() })
	one, server, there := postgresSite(t, &procUpstream{addr: u.addr})
	if !there {
		return
	}
	two := withPostgres(procNewSite(t, u.addr), server.DSN())
	two.store = strings.Replace(one.store, "node one", "node two", 1)
	for _, site := range []*procSite{one, two} {
		site.app = "keys file " + one.path("keys")
		site.guard = strings.Replace(tripping, "{", "{\n probe_scope fleet", 1)
		site.start(t)
	}
	get := func(site *procSite, path string) int {
		t.Helper()
		return site.gateway(t).call(request{method: "GET", path: path}).status
	}
	open := func(site *procSite) {
		t.Helper()
		for range 2 {
			get(site, "/down")
		}
		if got := get(site, "/works"); got != http.StatusServiceUnavailable {
			t.Fatalf("the breaker is not open: %d", got)
		}
	}
	states := func(at *procSite) (all [2]string) {
		t.Helper()
		for _, c := range procDocument[proxy.Document](t, at.operate(t, "circuits", "list", "--fleet", "-o", "json").says(t)).Circuits {
			if c.Upstream == u.addr {
				all[map[string]int{"one": 0, "two": 1}[c.Node]] = c.State.String()
			}
		}
		return all
	}
	halve := func(site *procSite) {
		t.Helper()
		site.operate(t, "circuits", "set", u.addr, "forced_open").says(t)
		site.operate(t, "circuits", "set", u.addr, "auto").says(t)
	}

	open(one)
	if got := get(two, "/works"); got != http.StatusCreated {
		t.Errorf("the breaker of the other node: %d", got)
	}
	for _, at := range []*procSite{one, two} {
		if got := states(at); got != [2]string{"open", "closed"} {
			t.Errorf("one is open: %v", got)
		}
	}
	open(two)
	for _, at := range []*procSite{one, two} {
		if got := states(at); got != [2]string{"open", "open"} {
			t.Errorf("both are open: %v", got)
		}
	}

	// While one probes, the other sends none; the answer closes both.
	halve(one)
	halve(two)
	probe := one.gateway(t).begin(request{method: "GET", path: "/slow"})
	wait(t, hold.arrived, "the probe")
	if got := get(two, "/works"); got != http.StatusServiceUnavailable {
		t.Errorf("a second probe: %d", got)
	}
	hold.open()
	probe.answer()
	eventuallyWithin(t, procBound, "both breakers close", func() bool { return states(two) == [2]string{"closed", "closed"} })
	open(two) // and again, now with one
	open(one)
	halve(one)
	if got := get(one, "/works"); got != http.StatusCreated {
		t.Errorf("the probe: %d", got)
	}
	eventuallyWithin(t, procBound, "the other breaker closes, whose cooldown is ten hours", func() bool { return states(one) == [2]string{"closed", "closed"} })
	u.arrived("/slow", 1)
}
