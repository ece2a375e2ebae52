//go:build unix

package workflow

import (
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1, section "Sent or not": 4,000 calls to an upstream that closes its idle
// connections while they are about to be used.
func TestProcessUpstreamClosesIdleConnections(t *testing.T) {
	t.Parallel() // its gateways are processes
	tests := []struct {
		name      string
		idle      time.Duration // the upstream's
		keepalive string        // the gateway's
		certain   bool          // no call may be in doubt
		rounds    int           // of 500 calls
	}{
		// Nothing is used twice, so nothing can be stale.
		{"off", 3 * time.Millisecond, "off", true, 2},
		// The gateway gives connections up well before the upstream does.
		{"less than the upstream's", 10 * harness.ProcBound, "100ms", true, 8},
		// Requests race with the closing. A byte was sent, so there is doubt; but
		// never a second sending.
		{"more than the upstream's", 3 * time.Millisecond, "2s", false, 3},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var open atomic.Int64 // connections to the upstream
			upstream := harness.ProcServeUpstream(t, l, &http.Server{IdleTimeout: test.idle, ConnState: func(_ net.Conn, state http.ConnState) {
				switch state {
				case http.StateNew:
					open.Add(1)
				case http.StateClosed:
					open.Add(-1)
				}
			}})
			site := harness.ProcNewSite(t, upstream.Addr)
			// Doubts are failures to a breaker, and a slow machine makes many of them:
			// an open one would refuse the calls that this test counts.
			site.Guard = "breaker off\n transport agent_guard {\n keepalive_guarded " + test.keepalive + "\n }"
			gateway := site.Start(t)
			client := harness.ProcDial()
			defer client.CloseIdleConnections()

			var mu sync.Mutex
			var answers []harness.ProcFuture
			var calls []harness.ProcCall
			call := func() {
				mu.Lock()
				c := harness.ProcCall{Id: fmt.Sprint("call-", len(calls))}
				calls, answers = append(calls, c), append(answers, harness.ProcFuture{})
				n := len(calls) - 1
				mu.Unlock()
				a, err := harness.ProcPost(t.Context(), client, site.Addr, c)
				mu.Lock()
				defer mu.Unlock()
				answers[n] = harness.ProcFuture{Answer: a, Err: err}
			}
			// Many at once, which leaves many connections; then one after the other,
			// while the rest are idle.
			for range test.rounds {
				var burst sync.WaitGroup
				for range 40 {
					burst.Go(call)
				}
				burst.Wait()
				for range 460 {
					call()
				}
			}

			harness.EventuallyWithin(t, harness.ProcBound, "no connection is left", func() bool { return open.Load() == 0 })

			var done, doubtful, free int
			for n, f := range answers {
				id := calls[n].Id
				switch arrived := upstream.Arrivals(id); {
				case f.Err != nil:
					t.Fatal(f.Err)
				case f.Answer.Status == http.StatusCreated && arrived == 1:
					done++
				case f.Answer.Problem() == "in-doubt" && arrived <= 1 && !test.certain:
					doubtful++
				case f.Answer.Status == http.StatusBadGateway && f.Answer.Problem() == "upstream-unreachable" && arrived == 0 && !test.certain:
					free++
					// It says that nothing was sent, so the key is free.
					if a := gateway.Post(t, calls[n]); a.Status != http.StatusCreated && a.Problem() != "in-doubt" && a.Status != http.StatusBadGateway {
						t.Errorf("%s: after a release: %v", id, a)
					}
				default:
					t.Errorf("%s: %d arrivals, %v", id, arrived, f.Answer)
				}
			}
			if test.certain && upstream.Total() != len(calls) {
				t.Errorf("P1: %d calls, %d executions", len(calls), upstream.Total())
			}
			t.Logf("%d calls: %d done, %d in doubt, %d proven unsent", len(calls), done, doubtful, free)
		})
	}
}
