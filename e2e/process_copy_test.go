//go:build unix

package e2e

import (
	"bytes"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// procCopy is what `store copy -o json` prints.
type procCopy struct {
	From, To                string
	Entries, Bytes, Written int64
	SHA256                  string
}

// procHeld is a network that stops at the nth request that counts says it is.
func procHeld(p *pgserver.Proxy, n int64, counts func(b []byte) int64) (stopped <-chan struct{}) {
	reached := make(chan struct{})
	var passed atomic.Int64
	var once sync.Once
	p.Judge(func(b []byte) pgserver.Fate {
		if passed.Add(counts(b)) < n {
			return pgserver.Pass
		}
		once.Do(func() { close(reached) })
		return pgserver.Hold
	})
	return reached
}

// procKilledCopy begins a copy and kills it when the network has stopped.
func procKilledCopy(t *testing.T, cmd *exec.Cmd, p *pgserver.Proxy, stopped <-chan struct{}) {
	t.Helper()
	log := new(procLog)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waitWithin(t, procBound, stopped, "the middle of the copy")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Errorf("the copy ended before it was killed:\n%s", log)
	}
	p.Cut() // what was held does not arrive
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass })
	p.Release()
}

var procPageQuery = regexp.MustCompile(`stmtcache_[0-9a-f]+`)

// P1, P2: a gateway's store goes to a database and back with `store copy`, each time killed in the middle
// and gone on with. The gateway on the copy has the same keys, node and ledger: what was executed is
// replayed, what was open is in doubt, and the ledger is as it was written. Half of a copy opens no
// gateway, and no store is copied that a gateway has open.
func TestProcessStoreCopy(t *testing.T) {
	t.Parallel() // its gateways are processes
	server := pgserver.Test(t)
	if server == nil {
		return
	}
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)

	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	site.env = append(site.env, "TEST_DSN="+server.DSN(), "TEST_PROXY="+p.DSN())
	embedded := "badger:" + site.path("data")
	site.app = "identity spiffe://example.com/gateway"
	gateway := site.start(t)
	answers := map[string]procAnswer{}
	call := func(g *procGateway, id string) procAnswer {
		c := procCall{id: id, header: map[string]string{"Workflow-Id": "copied"}}
		if id == "large" {
			c.header[procSize] = "900000"
		}
		return g.post(t, c)
	}
	execute := func(g *procGateway, id string) {
		t.Helper()
		if answers[id] = call(g, id); !answers[id].executed() {
			t.Fatalf("%s: %v", id, answers[id])
		}
	}
	execute(gateway, "large")
	for i := range 150 {
		execute(gateway, fmt.Sprint("call", i))
	}
	hold := upstream.hold(t, "open")
	gateway.begin(t.Context(), procDial(), procCall{id: "open"})
	waitWithin(t, procBound, hold.arrived, "the call arrives")
	site.operate(t, "store", "copy", "--from", embedded, "--to", "postgres:TEST_DSN").fails(t, "directory is in use")
	gateway.kill()
	hold.open()

	// knows checks a gateway on a copy.
	knows := func(g *procGateway) {
		t.Helper()
		for _, id := range []string{"large", "call0", "call149"} {
			wantProcReplay(t, answers[id], call(g, id))
		}
		wantProcDoubt(t, g.post(t, procCall{id: "open"}))
		eventuallyWithin(t, procBound, "the ledger has all events", func() bool {
			return site.operate(t, "ledger", "check").code == 0
		})
		if out := site.operate(t, "ledger", "check").says(t); !regexp.MustCompile(`faults +none`).MatchString(out) {
			t.Errorf("the ledger of the copy: %s", out)
		}
	}

	// To the database: killed while a commit is under way.
	stopped := procHeld(p, 1<<20, func(b []byte) int64 { return int64(len(b)) })
	procKilledCopy(t, site.operator(t, "store", "copy", "--from", embedded, "--to", "postgres:TEST_PROXY"), p, stopped)
	files := "keys file " + site.path("data.key") + "\n\t\tidentity spiffe://example.com/gateway {\n\t\t\tkey_file " + site.path("data.identity") + "\n\t\t}"
	withPostgres(site, server.DSN())
	site.app = files
	half := site.launch(t)
	waitWithin(t, procBound, half.log.when("a copy into this store was interrupted"), "half of a copy is refused")
	half.kill()
	done := procDocument[procCopy](t, site.operate(t, "store", "copy", "--from", embedded, "--to", "postgres:TEST_DSN", "-o", "json").says(t))
	if done.Entries < 1500 || done.Bytes < 900_000 || done.Written == 0 || done.Written == done.Entries || done.From != embedded || done.To != "postgres:TEST_DSN" {
		t.Errorf("the copy: %+v", done)
	}
	site.operate(t, "store", "copy", "--from", embedded, "--to", "postgres:TEST_DSN").fails(t, "the target is not empty")
	gateway = site.start(t)
	eventuallyWithin(t, procBound, "the gateway has the database", func() bool {
		return !unavailable(t, gateway, procCall{id: "call1", header: map[string]string{"Workflow-Id": "copied"}})
	})
	site.operate(t, "store", "copy", "--from", "postgres:TEST_DSN", "--to", "badger:"+site.path("back")).fails(t, "another gateway", "has the store open")
	knows(gateway)
	execute(gateway, "on-the-database")
	gateway.end(t)

	// And back: killed while the source is read, with a part written.
	var statement atomic.Pointer[string]
	stopped = procHeld(p, 7, func(b []byte) int64 {
		if bytes.Contains(b, []byte("order by key limit 256")) {
			name := string(procPageQuery.Find(b))
			statement.Store(&name)
			return 0
		}
		if name := statement.Load(); name != nil && bytes.Contains(b, []byte(*name)) {
			return 1
		}
		return 0
	})
	back := "badger:" + site.path("back")
	procKilledCopy(t, site.operator(t, "store", "copy", "--from", "postgres:TEST_PROXY", "--to", back), p, stopped)
	out := site.operate(t, "store", "copy", "--from", "postgres:TEST_DSN", "--to", back).says(t)
	for _, words := range []string{back + " has the ", "entries of postgres:TEST_DSN", "SHA-256 ", "the same key files"} {
		if !strings.Contains(out, words) {
			t.Errorf("%q is not in\n%s", words, out)
		}
	}
	site.store = "badger " + site.path("back")
	gateway = site.start(t)
	knows(gateway)
	wantProcReplay(t, answers["on-the-database"], call(gateway, "on-the-database"))
	execute(gateway, "on-the-copy-of-the-copy")
	gateway.end(t)
}
