package operate

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// Whatever calls do and however often the configuration changes, goroutines and files
// come back to what they were, and nothing is left on the disk.
func TestProcessLeaksNothing(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	work := func(round int) {
		t.Helper()
		large := strings.Repeat("x", 3<<20)
		var clients sync.WaitGroup
		for worker := range 8 {
			clients.Go(func() {
				client := harness.ProcDial()
				defer client.CloseIdleConnections()
				for n := range 20 {
					c := harness.ProcCall{Id: fmt.Sprintf("leak-%d-%d-%d", round, worker/2, n), Header: map[string]string{harness.ProcSize: "600000"}}
					if n%5 == 0 {
						c.Body, c.Header[harness.ProcSize] = large, "10" // the request is kept in a file
					}
					if a, _ := harness.ProcRetry(t, client, site.Addr, c); a.Status != http.StatusCreated {
						t.Errorf("%s: %v", c.Id, a)
					}
				}
			})
		}
		clients.Wait()
		// Clients that leave: the owner of a call, and who follows it.
		for n := range 5 {
			c := harness.ProcCall{Id: fmt.Sprintf("left-%d-%d", round, n), Body: large}
			hold := upstream.Hold(t, c.Id)
			ctx, leave := context.WithCancel(t.Context())
			client := harness.ProcDial()
			owner := gateway.Begin(ctx, client, c)
			harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
			follower := gateway.Begin(ctx, client, c)
			leave()
			harness.WaitWithin(t, harness.ProcBound, owner, "the owner leaves")
			harness.WaitWithin(t, harness.ProcBound, follower, "the follower leaves")
			client.CloseIdleConnections()
			hold.Open()
			if a := gateway.Retry(t, c); !a.Replayed() && a.Execution() != "attached" {
				t.Errorf("P7: %v", a)
			}
		}
		for n := range 10 {
			site.Guard = fmt.Sprintf("deadline %ds\n transport agent_guard {\n keepalive_guarded 20ms\n }", 60+n)
			if n == 5 {
				if err := gateway.Load(site.Without()); err != nil {
					t.Error(err)
				}
			}
			gateway.Reload(t)
		}
	}
	settle := func(what string, enough func(harness.ProcUse) bool) harness.ProcUse {
		t.Helper()
		var last harness.ProcUse
		harness.EventuallyWithin(t, harness.ProcBound, what, func() bool {
			last = gateway.Use(t)
			return enough(last)
		})
		return last
	}

	work(0)
	// At rest: the same twice.
	var before harness.ProcUse
	settle("rest", func(u harness.ProcUse) bool {
		same := u == before
		before = u
		return same
	})
	for round := range 3 {
		work(1 + round)
	}
	after := settle(fmt.Sprintf("no more than %+v", before), func(u harness.ProcUse) bool {
		return u.Goroutines <= before.Goroutines && u.Files <= before.Files
	})
	t.Logf("before %+v, after %+v", before, after)

	hold := upstream.Hold(t, "killed")
	gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "killed", Body: strings.Repeat("x", 3<<20)})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	gateway.Kill()
	for _, dir := range []string{site.Dir, site.Path("tmp")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			switch e.Name() {
			case "Caddyfile", "data", "data.key", "tmp", "xdg":
			default:
				t.Errorf("left behind: %s/%s", dir, e.Name())
			}
		}
	}
}
