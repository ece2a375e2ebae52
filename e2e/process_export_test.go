//go:build unix

package e2e

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

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

// procKilledMove begins an export or import and kills it when the network has stopped.
func procKilledMove(t *testing.T, cmd *exec.Cmd, p *pgserver.Proxy, stopped <-chan struct{}) {
	t.Helper()
	log := new(procLog)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waitWithin(t, procBound, stopped, "the middle of it")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Errorf("it ended before it was killed:\n%s", log)
	}
	p.Cut() // what was held does not arrive
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass })
	p.Release()
}

// P1, P2: a gateway's store goes to a database and back by export and import. The gateway on it has the same keys, node
// and ledger: what was executed is replayed, what was open is in doubt, and the ledger is as it was written. A part of
// an import opens no gateway, and no store is exported that a gateway has open.
func TestProcessStoreExportAndImport(t *testing.T) {
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
	file := site.path("guard.export")
	site.operate(t, "store", "export", "--from", embedded, "--to", file).fails(t, "directory is in use")
	gateway.kill()
	hold.open()

	// knows checks a gateway on another store.
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
			t.Errorf("the ledger: %s", out)
		}
	}

	// To the database: killed while a commit is under way.
	site.operate(t, "store", "export", "--from", embedded, "--to", file).says(t)
	stopped := procHeld(p, 1<<20, func(b []byte) int64 { return int64(len(b)) })
	procKilledMove(t, site.operator(t, "store", "import", "--from", file, "--to", "postgres:TEST_PROXY"), p, stopped)
	files := "keys file " + site.path("data.key") + "\n\t\tidentity spiffe://example.com/gateway {\n\t\t\tkey_file " + site.path("data.identity") + "\n\t\t}"
	withPostgres(site, server.DSN())
	site.app = files
	part := site.launch(t)
	waitWithin(t, procBound, part.log.when("an import into this store did not end"), "a part of a store is refused")
	part.kill()
	eventuallyWithin(t, procBound, "nobody has the store open", func() bool {
		again := site.operate(t, "store", "import", "--from", file, "--to", "postgres:TEST_DSN")
		return again.code != 0 && strings.Contains(again.err, "the target is not empty")
	})
	if _, err := server.SQL("drop schema agent_guard cascade"); err != nil {
		t.Fatal(err)
	}
	site.operate(t, "store", "import", "--from", file, "--to", "postgres:TEST_DSN").says(t)
	gateway = site.start(t)
	eventuallyWithin(t, procBound, "the gateway has the database", func() bool {
		return !unavailable(t, gateway, procCall{id: "call1", header: map[string]string{"Workflow-Id": "copied"}})
	})
	site.operate(t, "store", "export", "--from", "postgres:TEST_DSN", "--to", file+"2").fails(t, "another gateway", "has the store open")
	knows(gateway)
	execute(gateway, "on-the-database")
	gateway.end(t)

	// And back.
	site.operate(t, "store", "export", "--from", "postgres:TEST_DSN", "--to", file+"2").says(t)
	site.operate(t, "store", "import", "--from", file+"2", "--to", "badger:"+site.path("back")).says(t)
	site.store = "badger " + site.path("back")
	gateway = site.start(t)
	knows(gateway)
	wantProcReplay(t, answers["on-the-database"], call(gateway, "on-the-database"))
	execute(gateway, "back")
	gateway.end(t)
}
