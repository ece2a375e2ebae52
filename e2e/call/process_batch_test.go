//go:build unix

package call

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1, P6: SIGKILL in the middle of a batch, where the protocol is configured and where it is not: what the server has
// shown is forgotten, and the call is in doubt all the same.
func TestCrashBatch(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, protocol := range []string{"mcp", "auto"} {
		t.Run(protocol, func(t *testing.T) {
			s, addr := harness.NewBatchServer(t)
			site := harness.ProcNewSite(t, addr)
			site.Guard = "protocol " + protocol + "\n breaker off"
			gateway := site.Start(t)
			if protocol == "auto" { // a proof, which the next process does not know
				gateway.Post(t, harness.ProcCall{Path: "/mcp", Body: harness.Initializes, Header: harness.Hello("").Header})
			}
			hold := harness.NewGate(t)
			t.Cleanup(hold.Open)
			s.Mu.Lock()
			s.Hold = hold
			s.Mu.Unlock()
			call := harness.ProcCall{Path: "/mcp", Body: harness.BatchOf(harness.Ping(1), harness.Keyed("2", "pay", "a")), Header: harness.Message("").Header}
			lost := gateway.Begin(t.Context(), harness.ProcDial(), call)
			harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
			gateway.Kill()
			<-lost
			gateway = site.Start(t)
			if again := gateway.Post(t, call); again.Status != 409 {
				t.Errorf("again: %v", again)
			}
			hold.Open()
			harness.Eventually(t, "the effect", func() bool { return s.Count("pay") == 1 })
			if again := gateway.Post(t, call); again.Status != 409 || s.Count("pay") != 1 {
				t.Errorf("P1: %v, %d effects", again, s.Count("pay"))
			}
			gateway.End(t)
		})
	}
}
