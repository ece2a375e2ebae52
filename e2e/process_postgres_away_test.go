//go:build unix

package e2e

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// P1, P6, P7, ADR 0147: the database is away for longer than the commit of an outcome is tried. What came of the calls
// that ran is recorded once it is back, with their evidence, by the gateway that knows it, which lives: both gateways then
// give the answer, also that which the client has seen, or say the doubt; a call that was refused runs again. Nothing
// runs twice.
func TestProcessPostgresAwayForLong(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	one, server, there := postgresSite(t, upstream)
	if !there {
		return
	}
	one.store = strings.Replace(one.store, "lease 10s", "lease 60s", 1)
	two := withPostgres(procNewSite(t, upstream.addr), server.DSN())
	two.store = strings.Replace(one.store, "node one", "node two", 1)
	keys := one.app
	for _, site := range []*procSite{one, two} {
		site.app = keys + "\n\t\tidentity spiffe://example.com/gateway {\n\t\t\tkey_file " + site.path("identity") + "\n\t\t}"
	}
	a, b := one.start(t), two.start(t)
	eventuallyWithin(t, procBound, "the stores are open", func() bool {
		return !unavailable(t, a, procCall{id: "zero", host: one.addr}) && !unavailable(t, b, procCall{id: "zero", host: one.addr})
	})
	calls := []procCall{
		{id: "small"},
		{id: "large", header: map[string]string{procSize: "700000"}},
		{id: "doubt", header: map[string]string{procStatus: "502"}},
		{id: "refused-1", header: map[string]string{procStatus: "429"}},
	}
	var holds []*gate
	var begun []<-chan procFuture
	client := procDial()
	defer client.CloseIdleConnections()
	for i := range calls {
		calls[i].host = one.addr
		hold := upstream.hold(t, calls[i].id)
		begun = append(begun, a.begin(t.Context(), client, calls[i]))
		waitWithin(t, procBound, hold.arrived, "the call arrives")
		holds = append(holds, hold)
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, hold := range holds {
		hold.open()
	}
	for i, c := range calls {
		came := waitWithin(t, procBound, begun[i], "the end of a call")
		switch {
		case came.err == nil && came.answer.executed():
			t.Errorf("P2: %s was answered as recorded: %v", c.id, came.answer)
		}
	}
	<-time.After(5 * time.Second) // statement_timeout is a second: nothing is tried for so long
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	answers := map[string]procAnswer{}
	for _, g := range []*procGateway{b, a} { // the other one first
		for _, c := range calls {
			if strings.HasPrefix(c.id, procTwice) {
				c.header = nil // it is not refused again
			}
			var last procAnswer
			eventuallyWithin(t, procBound, c.id+" is settled", func() bool {
				last = g.post(t, c)
				return last.problem() != "store-unavailable" && last.problem() != "in-progress"
			})
			first, before := answers[c.id]
			switch answers[c.id] = last; {
			case c.id == "doubt":
				wantProcDoubt(t, last)
			case c.id == "refused-1" && !before:
				if last.status != http.StatusCreated || !last.executed() {
					t.Errorf("a call that was refused: %v", last)
				}
			case before:
				wantProcReplay(t, first, last)
			// Whoever asks before it is recorded waits for it.
			case !last.replayed() && last.execution() != "attached" || last.status != http.StatusCreated || c.id == "large" && len(last.body) < 700_000:
				t.Errorf("%s: %d bytes, %v", c.id, len(last.body), last)
			}
		}
	}
	for _, c := range calls {
		want := 1
		if strings.HasPrefix(c.id, procTwice) {
			want = 2
		}
		if n := upstream.arrivals(c.id); n != want {
			t.Errorf("P1: %s was executed %d times", c.id, n)
		}
	}
	count := map[string]int{}
	for checkpoint, outcomes := range ledgersOf(t, one, two).outcomes {
		if len(outcomes) != 1 {
			t.Errorf("of %s the ledger says %q", checkpoint, outcomes)
		}
		for _, o := range outcomes {
			count[o]++
		}
	}
	// Besides the first call: two answers, and that to the call that was refused before.
	if count["completed"] != 4 || count["in_doubt"] != 1 || count["released"] != 1 {
		t.Errorf("the ledger has %v", count)
	}
}
