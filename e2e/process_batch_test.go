//go:build unix

package e2e

import "testing"

// P1, P6: SIGKILL in the middle of a batch, where the protocol is configured and where it is not: what the server has
// shown is forgotten, and the call is in doubt all the same.
func TestCrashBatch(t *testing.T) {
	t.Parallel() // its gateways are processes
	for _, protocol := range []string{"mcp", "auto"} {
		t.Run(protocol, func(t *testing.T) {
			s, addr := newBatchServer(t)
			site := procNewSite(t, addr)
			site.guard = "protocol " + protocol + "\n breaker off"
			gateway := site.start(t)
			if protocol == "auto" { // a proof, which the next process does not know
				gateway.post(t, procCall{path: "/mcp", body: initializes, header: hello("").header})
			}
			hold := newGate(t)
			t.Cleanup(hold.open)
			s.mu.Lock()
			s.hold = hold
			s.mu.Unlock()
			call := procCall{path: "/mcp", body: batchOf(ping(1), keyed("2", "pay", "a")), header: message("").header}
			lost := gateway.begin(t.Context(), procDial(), call)
			waitWithin(t, procBound, hold.arrived, "arrival")
			gateway.kill()
			<-lost
			gateway = site.start(t)
			if again := gateway.post(t, call); again.status != 409 {
				t.Errorf("again: %v", again)
			}
			hold.open()
			eventually(t, "the effect", func() bool { return s.count("pay") == 1 })
			if again := gateway.post(t, call); again.status != 409 || s.count("pay") != 1 {
				t.Errorf("P1: %v, %d effects", again, s.count("pay"))
			}
			gateway.end(t)
		})
	}
}
