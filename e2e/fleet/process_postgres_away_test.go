//go:build unix

package fleet

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1, P6, P7, ADR 0147: the database is away for longer than the commit of an outcome is tried. What came of the calls
// that ran is recorded once it is back, with their evidence, by the gateway that knows it, which lives: both gateways then
// give the answer, also that which the client has seen, or say the doubt; a call that was refused runs again. Nothing
// runs twice.
func TestProcessPostgresAwayForLong(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	one, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	one.Store = strings.Replace(one.Store, "lease 10s", "lease 60s", 1)
	two := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
	two.Store = strings.Replace(one.Store, "node one", "node two", 1)
	keys := one.App
	for _, site := range []*harness.ProcSite{one, two} {
		site.App = keys + "\n\t\tidentity spiffe://example.com/gateway {\n\t\t\tkey_file " + site.Path("identity") + "\n\t\t}"
	}
	a, b := one.Start(t), two.Start(t)
	harness.EventuallyWithin(t, harness.ProcBound, "the stores are open", func() bool {
		return !harness.Unavailable(t, a, harness.ProcCall{Id: "zero", Host: one.Addr}) && !harness.Unavailable(t, b, harness.ProcCall{Id: "zero", Host: one.Addr})
	})
	calls := []harness.ProcCall{
		{Id: "small"},
		{Id: "large", Header: map[string]string{harness.ProcSize: "700000"}},
		{Id: "doubt", Header: map[string]string{harness.ProcStatus: "502"}},
		{Id: "refused-1", Header: map[string]string{harness.ProcStatus: "429"}},
	}
	var holds []*harness.Gate
	var begun []<-chan harness.ProcFuture
	client := harness.ProcDial()
	defer client.CloseIdleConnections()
	for i := range calls {
		calls[i].Host = one.Addr
		hold := upstream.Hold(t, calls[i].Id)
		begun = append(begun, a.Begin(t.Context(), client, calls[i]))
		harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "the call arrives")
		holds = append(holds, hold)
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, hold := range holds {
		hold.Open()
	}
	for i, c := range calls {
		came := harness.WaitWithin(t, harness.ProcBound, begun[i], "the end of a call")
		switch {
		case came.Err == nil && came.Answer.Executed():
			t.Errorf("P2: %s was answered as recorded: %v", c.Id, came.Answer)
		}
	}
	<-time.After(5 * time.Second) // statement_timeout is a second: nothing is tried for so long
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	answers := map[string]harness.ProcAnswer{}
	for _, g := range []*harness.ProcGateway{b, a} { // the other one first
		for _, c := range calls {
			if strings.HasPrefix(c.Id, harness.ProcTwice) {
				c.Header = nil // it is not refused again
			}
			var last harness.ProcAnswer
			harness.EventuallyWithin(t, harness.ProcBound, c.Id+" is settled", func() bool {
				last = g.Post(t, c)
				return last.Problem() != "store-unavailable" && last.Problem() != "in-progress"
			})
			first, before := answers[c.Id]
			switch answers[c.Id] = last; {
			case c.Id == "doubt":
				harness.WantProcDoubt(t, last)
			case c.Id == "refused-1" && !before:
				if last.Status != http.StatusCreated || !last.Executed() {
					t.Errorf("a call that was refused: %v", last)
				}
			case before:
				harness.WantProcReplay(t, first, last)
			// Whoever asks before it is recorded waits for it.
			case !last.Replayed() && last.Execution() != "attached" || last.Status != http.StatusCreated || c.Id == "large" && len(last.Body) < 700_000:
				t.Errorf("%s: %d bytes, %v", c.Id, len(last.Body), last)
			}
		}
	}
	for _, c := range calls {
		want := 1
		if strings.HasPrefix(c.Id, harness.ProcTwice) {
			want = 2
		}
		if n := upstream.Arrivals(c.Id); n != want {
			t.Errorf("P1: %s was executed %d times", c.Id, n)
		}
	}
	count := map[string]int{}
	for checkpoint, outcomes := range harness.LedgersOf(t, one, two).Outcomes {
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
