//go:build unix

package fleet

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1, P2, P4 on PostgreSQL: a call runs once over a kill of the gateway and of the database, is in
// doubt if it ran while the gateway was killed, and is refused while the database is away; the
// gateway recovers without a restart.
func TestProcessPostgres(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "one"})
	if !first.Executed() {
		t.Fatalf("the first call: %d %s", first.Status, first.Body)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the database's statistics", func() bool {
		return strings.Contains(site.Operate(t, "store", "stats").Says(t), "oldest transaction")
	})
	harness.WantProcSays(t, site.Operate(t, "store", "stats").Says(t), "size ", "indexes ", "dead rows ", "standbys              0\n", "lease                 ends in ",
		"at most 10 for reading", "waits ", "commits ")
	named := site.Store
	site.Store = strings.Replace(named, "node one", "node other", 1)
	gateway.Reload(t)
	if !gateway.Log.Says("keeps its name in the store until the process is started again") {
		t.Error("a reload with another name says nothing")
	}
	harness.WantProcSays(t, site.Operate(t, "nodes").Says(t), "one *")
	site.Store = named
	hold := upstream.Hold(t, "open")
	gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "open"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "the call arrives")
	gateway.Kill()
	hold.Open()

	gateway = site.Start(t)
	harness.EventuallyWithin(t, harness.ProcBound, "the next gateway takes the store over", func() bool {
		return !harness.Unavailable(t, gateway, harness.ProcCall{Id: "one"})
	})
	harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: "one"}))
	harness.WantProcDoubt(t, gateway.Post(t, harness.ProcCall{Id: "open"}))

	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	if !harness.Unavailable(t, gateway, harness.ProcCall{Id: "two"}) {
		t.Error("a call without a database was not refused")
	}
	if n := upstream.Arrivals("two"); n != 0 {
		t.Errorf("it reached the upstream %d times", n)
	}
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the gateway recovers", func() bool { return !harness.Unavailable(t, gateway, harness.ProcCall{Id: "two"}) })
	if n := upstream.Arrivals("two"); n != 1 || !gateway.Post(t, harness.ProcCall{Id: "two"}).Replayed() {
		t.Errorf("the call that was refused has run %d times, and is no replay", n)
	}
	harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: "one"}))

	// A second gateway of the same name comes up, takes no call, says what to do, and takes over when the first ends.
	other := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
	other.App = site.App
	next := other.Start(t)
	if !harness.Unavailable(t, next, harness.ProcCall{Id: "three"}) {
		t.Error("two gateways have one name")
	}
	harness.WantProcSays(t, next.Log.String(), "another gateway", `has the name \"one\"`, "the option `node` of `store postgres`")
	gateway.End(t)
	harness.EventuallyWithin(t, harness.ProcBound, "the next gateway takes over", func() bool { return !harness.Unavailable(t, next, harness.ProcCall{Id: "three"}) })
	if a := next.Post(t, harness.ProcCall{Id: "one"}); a.Problem() != "fingerprint-mismatch" { // another host, so another call
		t.Errorf("what the first gateway recorded: %d %s", a.Status, a.Body)
	}
	next.End(t)

	// The database is missing at the start.
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	last := site.Start(t)
	if !harness.Unavailable(t, last, harness.ProcCall{Id: "one"}) {
		t.Error("a call without a database was not refused")
	}
	if nodes := site.Operate(t, "nodes"); nodes.Code == 0 || !strings.Contains(nodes.Err, "is not open, and is tried again") {
		t.Errorf("nodes, without a database: %s%s", nodes.Out, nodes.Err)
	}
	read, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+site.Addr+"/read", nil)
	if err != nil {
		t.Fatal(err)
	}
	read.Header.Set("Idempotency-Key", "read")
	resp, err := http.DefaultClient.Do(read)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode >= 300 {
		t.Errorf("a read without a database: %d", resp.StatusCode)
	}
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	harness.EventuallyWithin(t, harness.ProcBound, "the gateway opens its store", func() bool { return !harness.Unavailable(t, last, harness.ProcCall{Id: "one"}) })
	harness.WantProcReplay(t, first, last.Post(t, harness.ProcCall{Id: "one"}))
	for _, g := range []*harness.ProcGateway{gateway, next, last} {
		if strings.Contains(g.Log.String(), "user=postgres") {
			t.Error("the DSN is in the log")
		}
	}
}

// P1, P3 on PostgreSQL: many clients that repeat one key at the same time share reads of its record, and each gets the
// whole answer.
func TestProcessPostgresRetriesTogether(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site, _, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	gateway := site.Start(t)
	first := gateway.Post(t, harness.ProcCall{Id: "one"})
	var all sync.WaitGroup
	for range 32 {
		all.Go(func() {
			for range 50 {
				if a := gateway.Post(t, harness.ProcCall{Id: "one"}); !a.Replayed() || a.Digest() != first.Digest() {
					t.Errorf("P1: not a replay: %v", a)
					return
				}
			}
		})
	}
	all.Wait()
}
