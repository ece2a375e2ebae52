//go:build unix

package e2e

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// postgresSite is a gateway's site with its store in the server's database, and false where there
// is no PostgreSQL.
func postgresSite(t *testing.T, upstream *procUpstream) (*procSite, *pgserver.Server, bool) {
	t.Helper()
	server := pgserver.Test(t)
	if server == nil {
		return nil, nil, false
	}
	return withPostgres(procNewSite(t, upstream.addr), server.DSN()), server, true
}

// withPostgres gives the site its store there. Its node is "one".
func withPostgres(site *procSite, dsn string) *procSite {
	site.store = "postgres {\n\t\t\tdsn {env.TEST_DSN}\n\t\t\tnode one\n\t\t\tlease 10s\n\t\t}"
	site.app = "keys file " + site.path("keys")
	site.env = append(site.env, "TEST_DSN="+dsn+" statement_timeout=1000")
	return site
}

// unavailable reports that the call was refused since the store is not available, in the time that
// is promised (P4).
func unavailable(t *testing.T, gateway *procGateway, c procCall) bool {
	t.Helper()
	begun := time.Now()
	a := gateway.post(t, c)
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("the call was answered after %v", took)
	}
	return a.status == http.StatusServiceUnavailable && a.problem() == "store-unavailable"
}

// P1, P2, P4 on PostgreSQL: a call runs once over a kill of the gateway and of the database, is in
// doubt if it ran while the gateway was killed, and is refused while the database is away; the
// gateway recovers without a restart.
func TestProcessPostgres(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site, server, there := postgresSite(t, upstream)
	if !there {
		return
	}
	gateway := site.start(t)
	first := gateway.post(t, procCall{id: "one"})
	if !first.executed() {
		t.Fatalf("the first call: %d %s", first.status, first.body)
	}
	eventuallyWithin(t, procBound, "the database's statistics", func() bool {
		return strings.Contains(site.operate(t, "store", "stats").says(t), "oldest transaction")
	})
	wantProcSays(t, site.operate(t, "store", "stats").says(t), "size ", "indexes ", "dead rows ", "standbys              0\n", "lease                 ends in ",
		"at most 10 for reading", "waits ", "commits ")
	named := site.store
	site.store = strings.Replace(named, "node one", "node other", 1)
	gateway.reload(t)
	if !gateway.log.says("keeps its name in the store until the process is started again") {
		t.Error("a reload with another name says nothing")
	}
	wantProcSays(t, site.operate(t, "nodes").says(t), "one *")
	site.store = named
	hold := upstream.hold(t, "open")
	gateway.begin(t.Context(), procDial(), procCall{id: "open"})
	waitWithin(t, procBound, hold.arrived, "the call arrives")
	gateway.kill()
	hold.open()

	gateway = site.start(t)
	eventuallyWithin(t, procBound, "the next gateway takes the store over", func() bool {
		return !unavailable(t, gateway, procCall{id: "one"})
	})
	wantProcReplay(t, first, gateway.post(t, procCall{id: "one"}))
	wantProcDoubt(t, gateway.post(t, procCall{id: "open"}))

	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	if !unavailable(t, gateway, procCall{id: "two"}) {
		t.Error("a call without a database was not refused")
	}
	if n := upstream.arrivals("two"); n != 0 {
		t.Errorf("it reached the upstream %d times", n)
	}
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	eventuallyWithin(t, procBound, "the gateway recovers", func() bool { return !unavailable(t, gateway, procCall{id: "two"}) })
	if n := upstream.arrivals("two"); n != 1 || !gateway.post(t, procCall{id: "two"}).replayed() {
		t.Errorf("the call that was refused has run %d times, and is no replay", n)
	}
	wantProcReplay(t, first, gateway.post(t, procCall{id: "one"}))

	// A second gateway of the same name comes up, takes no call, says what to do, and takes over when the first ends.
	other := withPostgres(procNewSite(t, upstream.addr), server.DSN())
	other.app = site.app
	next := other.start(t)
	if !unavailable(t, next, procCall{id: "three"}) {
		t.Error("two gateways have one name")
	}
	wantProcSays(t, next.log.String(), "another gateway", `has the name \"one\"`, "the option `node` of `store postgres`")
	gateway.end(t)
	eventuallyWithin(t, procBound, "the next gateway takes over", func() bool { return !unavailable(t, next, procCall{id: "three"}) })
	if a := next.post(t, procCall{id: "one"}); a.problem() != "fingerprint-mismatch" { // another host, so another call
		t.Errorf("what the first gateway recorded: %d %s", a.status, a.body)
	}
	next.end(t)

	// The database is missing at the start.
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	last := site.start(t)
	if !unavailable(t, last, procCall{id: "one"}) {
		t.Error("a call without a database was not refused")
	}
	if nodes := site.operate(t, "nodes"); nodes.code == 0 || !strings.Contains(nodes.err, "is not open, and is tried again") {
		t.Errorf("nodes, without a database: %s%s", nodes.out, nodes.err)
	}
	read, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+site.addr+"/read", nil)
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
	eventuallyWithin(t, procBound, "the gateway opens its store", func() bool { return !unavailable(t, last, procCall{id: "one"}) })
	wantProcReplay(t, first, last.post(t, procCall{id: "one"}))
	for _, g := range []*procGateway{gateway, next, last} {
		if strings.Contains(g.log.String(), "user=postgres") {
			t.Error("the DSN is in the log")
		}
	}
}

// P1, P3 on PostgreSQL: many clients that repeat one key at the same time share reads of its record, and each gets the
// whole answer.
func TestProcessPostgresRetriesTogether(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site, _, there := postgresSite(t, upstream)
	if !there {
		return
	}
	gateway := site.start(t)
	first := gateway.post(t, procCall{id: "one"})
	var all sync.WaitGroup
	for range 32 {
		all.Go(func() {
			for range 50 {
				if a := gateway.post(t, procCall{id: "one"}); !a.replayed() || a.digest() != first.digest() {
					t.Errorf("P1: not a replay: %v", a)
					return
				}
			}
		})
	}
	all.Wait()
}
