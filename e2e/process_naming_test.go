//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// P1: of two gateways of a fleet that name callers or tenants in different ways, one makes keys. Both start on an
// empty store; of their first calls, made at the same moment, one is recorded with how its gateway names them. The
// other gateway makes no key from then on, and does not start again but under `free_keys`.
func TestProcessNamingOfAFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	one, server, there := postgresSite(t, upstream)
	if !there {
		return
	}
	two := withPostgres(procNewSite(t, upstream.addr), server.DSN())
	two.store = strings.Replace(two.store, "node one", "node two", 1)
	two.app = one.app
	one.start(t).end(t) // makes the store and the key file
	sites := []*procSite{one, two}
	for n := range 4 {
		name := fmt.Sprint("guard-", n)
		var gateways [2]*procGateway
		for i, site := range sites {
			site.guard = fmt.Sprintf("name %s\n tenant X-Shop-%d", name, i)
			gateways[i] = site.launch(t)
		}
		var answers [2]procAnswer
		var wg sync.WaitGroup
		for _, g := range gateways {
			if !g.ready(t) {
				t.Fatalf("%s does not start on an empty store:\n%s", name, g.log.tail(3000))
			}
		}
		for i, g := range gateways {
			wg.Go(func() { answers[i] = g.post(t, procCall{id: fmt.Sprint(name, i)}) })
		}
		wg.Wait()
		winner := 0
		if answers[1].executed() {
			winner = 1
		}
		loser := 1 - winner
		if !answers[winner].executed() || answers[loser].status != http.StatusServiceUnavailable {
			t.Fatalf("%v and %v", answers[0], answers[1])
		}
		for range 2 {
			wantProcReplay(t, answers[winner], gateways[winner].post(t, procCall{id: fmt.Sprint(name, winner)}))
			if a := gateways[loser].post(t, procCall{id: "another"}); a.status != http.StatusServiceUnavailable {
				t.Errorf("another key of the refused gateway: %v", a)
			}
		}
		if n := upstream.arrivals(fmt.Sprint(name, loser)) + upstream.arrivals("another"); n != 0 {
			t.Errorf("P1: the refused gateway has sent %d calls", n)
		}
		wantProcSays(t, gateways[loser].log.String(), "`tenant` differ", "free_keys")
		gateways[loser].end(t)
		if log := sites[loser].refused(t); !strings.Contains(log, "`tenant` differ") || !strings.Contains(log, "free_keys") {
			t.Errorf("the refused gateway starts again: %s", log)
		}
		gateways[winner].end(t)
	}
}
