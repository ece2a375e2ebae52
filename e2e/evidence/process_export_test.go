//go:build unix

package evidence

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
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
	log := new(harness.ProcLog)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	harness.WaitWithin(t, harness.ProcBound, stopped, "the middle of it")
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

	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	site.Env = append(site.Env, "TEST_DSN="+server.DSN(), "TEST_PROXY="+p.DSN())
	embedded := "badger:" + site.Path("data")
	site.App = "identity spiffe://example.com/gateway"
	gateway := site.Start(t)
	answers := map[string]harness.ProcAnswer{}
	call := func(g *harness.ProcGateway, id string) harness.ProcAnswer {
		c := harness.ProcCall{Id: id, Header: map[string]string{"Workflow-Id": "copied"}}
		if id == "large" {
			c.Header[harness.ProcSize] = "900000"
		}
		return g.Post(t, c)
	}
	execute := func(g *harness.ProcGateway, id string) {
		t.Helper()
		if answers[id] = call(g, id); !answers[id].Executed() {
			t.Fatalf("%s: %v", id, answers[id])
		}
	}
	execute(gateway, "large")
	for i := range 150 {
		execute(gateway, fmt.Sprint("call", i))
	}
	hold := upstream.Hold(t, "open")
	gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "open"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "the call arrives")
	file := site.Path("guard.export")
	site.Operate(t, "store", "export", "--from", embedded, "--to", file).Fails(t, "directory is in use")
	gateway.Kill()
	hold.Open()

	// knows checks a gateway on another store.
	knows := func(g *harness.ProcGateway) {
		t.Helper()
		for _, id := range []string{"large", "call0", "call149"} {
			harness.WantProcReplay(t, answers[id], call(g, id))
		}
		harness.WantProcDoubt(t, g.Post(t, harness.ProcCall{Id: "open"}))
		harness.EventuallyWithin(t, harness.ProcBound, "the ledger has all events", func() bool {
			return site.Operate(t, "ledger", "check").Code == 0
		})
		if out := site.Operate(t, "ledger", "check").Says(t); !regexp.MustCompile(`faults +none`).MatchString(out) {
			t.Errorf("the ledger: %s", out)
		}
	}

	// To the database: killed while a commit is under way.
	site.Operate(t, "store", "export", "--from", embedded, "--to", file).Says(t)
	stopped := procHeld(p, 1<<20, func(b []byte) int64 { return int64(len(b)) })
	procKilledMove(t, site.Operator(t, "store", "import", "--from", file, "--to", "postgres:TEST_PROXY"), p, stopped)
	files := "keys file " + site.Path("data.key") + "\n\t\tidentity spiffe://example.com/gateway {\n\t\t\tkey_file " + site.Path("data.identity") + "\n\t\t}"
	harness.WithPostgres(site, server.DSN())
	site.App = files
	part := site.Launch(t)
	harness.WaitWithin(t, harness.ProcBound, part.Log.When("an import into this store did not end"), "a part of a store is refused")
	part.Kill()
	harness.EventuallyWithin(t, harness.ProcBound, "nobody has the store open", func() bool {
		again := site.Operate(t, "store", "import", "--from", file, "--to", "postgres:TEST_DSN")
		return again.Code != 0 && strings.Contains(again.Err, "the target is not empty")
	})
	if _, err := server.SQL("drop schema agent_guard cascade"); err != nil {
		t.Fatal(err)
	}
	site.Operate(t, "store", "import", "--from", file, "--to", "postgres:TEST_DSN").Says(t)
	gateway = site.Start(t)
	harness.EventuallyWithin(t, harness.ProcBound, "the gateway has the database", func() bool {
		return !harness.Unavailable(t, gateway, harness.ProcCall{Id: "call1", Header: map[string]string{"Workflow-Id": "copied"}})
	})
	site.Operate(t, "store", "export", "--from", "postgres:TEST_DSN", "--to", file+"2").Fails(t, "another gateway", "has the store open")
	knows(gateway)
	execute(gateway, "on-the-database")
	gateway.End(t)

	// And back.
	site.Operate(t, "store", "export", "--from", "postgres:TEST_DSN", "--to", file+"2").Says(t)
	site.Operate(t, "store", "import", "--from", file+"2", "--to", "badger:"+site.Path("back")).Says(t)
	site.Store = "badger " + site.Path("back")
	gateway = site.Start(t)
	knows(gateway)
	harness.WantProcReplay(t, answers["on-the-database"], call(gateway, "on-the-database"))
	execute(gateway, "back")
	gateway.End(t)
}
