//go:build unix

package call

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1: of two gateways of a fleet that name callers or tenants in different ways, one makes keys. Both start on an
// empty store; of their first calls, made at the same moment, one is recorded with how its gateway names them. The
// other gateway makes no key from then on, and does not start again but under `free_keys`.
func TestProcessNamingOfAFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	one, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
	two.Store = strings.Replace(two.Store, "node one", "node two", 1)
	two.App = one.App
	one.Start(t).End(t) // makes the store and the key file
	sites := []*harness.ProcSite{one, two}
	for n := range 4 {
		name := fmt.Sprint("guard-", n)
		var gateways [2]*harness.ProcGateway
		for i, site := range sites {
			site.Guard = fmt.Sprintf("name %s\n tenant X-Shop-%d", name, i)
			gateways[i] = site.Launch(t)
		}
		var answers [2]harness.ProcAnswer
		var wg sync.WaitGroup
		for _, g := range gateways {
			if !g.Ready(t) {
				t.Fatalf("%s does not start on an empty store:\n%s", name, g.Log.Tail(3000))
			}
		}
		for i, g := range gateways {
			wg.Go(func() { answers[i] = g.Post(t, harness.ProcCall{Id: fmt.Sprint(name, i)}) })
		}
		wg.Wait()
		winner := 0
		if answers[1].Executed() {
			winner = 1
		}
		loser := 1 - winner
		if !answers[winner].Executed() || answers[loser].Status != http.StatusServiceUnavailable {
			t.Fatalf("%v and %v", answers[0], answers[1])
		}
		for range 2 {
			harness.WantProcReplay(t, answers[winner], gateways[winner].Post(t, harness.ProcCall{Id: fmt.Sprint(name, winner)}))
			if a := gateways[loser].Post(t, harness.ProcCall{Id: "another"}); a.Status != http.StatusServiceUnavailable {
				t.Errorf("another key of the refused gateway: %v", a)
			}
		}
		if n := upstream.Arrivals(fmt.Sprint(name, loser)) + upstream.Arrivals("another"); n != 0 {
			t.Errorf("P1: the refused gateway has sent %d calls", n)
		}
		harness.WantProcSays(t, gateways[loser].Log.String(), "`tenant` differ", "free_keys")
		gateways[loser].End(t)
		if log := sites[loser].Refused(t); !strings.Contains(log, "`tenant` differ") || !strings.Contains(log, "free_keys") {
			t.Errorf("the refused gateway starts again: %s", log)
		}
		gateways[winner].End(t)
	}
}
