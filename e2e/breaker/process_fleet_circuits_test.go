//go:build unix

package breaker

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// ATD, "Coordinated Circuit Breaking", ADR 0138: two gateways on one database have breakers of their own, each shows
// those of both, and with `probe_scope fleet` one sends the probe for both.
func TestProcessFleetCircuits(t *testing.T) {
	t.Parallel() // its gateways are processes
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	u.On("/down", harness.Status(503, ""))
	u.On("/slow", func(w http.ResponseWriter, _ *harness.Arrival) { hold.Pass() })
	one, server, there := harness.PostgresSite(t, &harness.ProcUpstream{Addr: u.Addr})
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, u.Addr), server.DSN())
	two.Store = strings.Replace(one.Store, "node one", "node two", 1)
	for _, site := range []*harness.ProcSite{one, two} {
		site.App = "keys file " + one.Path("keys")
		site.Guard = strings.Replace(harness.Tripping, "{", "{\n probe_scope fleet", 1)
		site.Start(t)
	}
	get := func(site *harness.ProcSite, path string) int {
		t.Helper()
		return site.Gateway(t).Call(harness.Request{Method: "GET", Path: path}).Status
	}
	open := func(site *harness.ProcSite) {
		t.Helper()
		for range 2 {
			get(site, "/down")
		}
		if got := get(site, "/works"); got != http.StatusServiceUnavailable {
			t.Fatalf("the breaker is not open: %d", got)
		}
	}
	states := func(at *harness.ProcSite) (all [2]string) {
		t.Helper()
		for _, c := range harness.ProcDocument[proxy.Document](t, at.Operate(t, "circuits", "list", "--fleet", "-o", "json").Says(t)).Circuits {
			if c.Upstream == u.Addr {
				all[map[string]int{"one": 0, "two": 1}[c.Node]] = c.State.String()
			}
		}
		return all
	}
	halve := func(site *harness.ProcSite) {
		t.Helper()
		site.Operate(t, "circuits", "set", u.Addr, "forced_open").Says(t)
		site.Operate(t, "circuits", "set", u.Addr, "auto").Says(t)
	}

	open(one)
	if got := get(two, "/works"); got != http.StatusCreated {
		t.Errorf("the breaker of the other node: %d", got)
	}
	for _, at := range []*harness.ProcSite{one, two} {
		if got := states(at); got != [2]string{"open", "closed"} {
			t.Errorf("one is open: %v", got)
		}
	}
	open(two)
	for _, at := range []*harness.ProcSite{one, two} {
		if got := states(at); got != [2]string{"open", "open"} {
			t.Errorf("both are open: %v", got)
		}
	}

	// While one probes, the other sends none; the answer closes both.
	halve(one)
	halve(two)
	probe := one.Gateway(t).Begin(harness.Request{Method: "GET", Path: "/slow"})
	harness.Wait(t, hold.Arrived, "the probe")
	if got := get(two, "/works"); got != http.StatusServiceUnavailable {
		t.Errorf("a second probe: %d", got)
	}
	hold.Open()
	probe.Answer()
	harness.EventuallyWithin(t, harness.ProcBound, "both breakers close", func() bool { return states(two) == [2]string{"closed", "closed"} })
	open(two) // and again, now with one
	open(one)
	halve(one)
	if got := get(one, "/works"); got != http.StatusCreated {
		t.Errorf("the probe: %d", got)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the other breaker closes, whose cooldown is ten hours", func() bool { return states(one) == [2]string{"closed", "closed"} })
	u.Arrived("/slow", 1)
}
