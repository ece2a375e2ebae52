//go:build unix

package operate

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P1: reloads under load. No call is refused, lost, or executed twice, and one whose
// connection a reload has closed had not begun: what its caller makes again is executed.
func TestProcessReloadsUnderLoad(t *testing.T) {
	t.Parallel() // its gateways are processes
	const reloads = 50
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var calls, broken atomic.Int64
	var clients sync.WaitGroup
	for worker := range 6 {
		clients.Go(func() {
			// Half of the clients keep their connections.
			client := &http.Client{Timeout: harness.ProcBound, Transport: harness.Recorded{Transport: &http.Transport{DisableKeepAlives: worker%2 == 0}}}
			defer client.CloseIdleConnections()
			for n := 0; ctx.Err() == nil; n++ {
				c := harness.ProcCall{Id: fmt.Sprintf("reload-%d-%d", worker, n)}
				a, failures := harness.ProcRetry(t, client, site.Addr, c)
				if a.Status != http.StatusCreated {
					t.Errorf("%s: %v", c.Id, a)
					return
				}
				if failures > 0 && !a.Executed() {
					t.Errorf("P1: a reload has closed the connection of a call that had begun: %s: %v", c.Id, a)
				}
				again, more := harness.ProcRetry(t, client, site.Addr, c)
				harness.WantProcReplay(t, a, again)
				calls.Add(1)
				broken.Add(int64(failures + more))
			}
		})
	}
	for n := range reloads {
		site.Guard = fmt.Sprintf("deadline %ds", 60+n)
		before := calls.Load()
		gateway.Reload(t)
		harness.EventuallyWithin(t, harness.ProcBound, "load", func() bool { return calls.Load() >= before+20 })
	}
	stop()
	clients.Wait()
	if got := upstream.Total(); int64(got) != calls.Load() {
		t.Errorf("P1: %d calls, %d executions", calls.Load(), got)
	}
	t.Logf("%d reloads, %d calls, %d connections broken", reloads, calls.Load(), broken.Load())
	gateway.End(t)
	if gateway.Log.Has(`"level":"error"`) {
		t.Errorf("errors in the log:\n%s", gateway.Log.Tail(4000))
	}
}

// P1: what a reload changes frees no key.
func TestProcessReloadKeepsKeys(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	link := site.Path("link")
	if err := os.Symlink(site.Path("data"), link); err != nil {
		t.Fatal(err)
	}
	configs := []struct{ name, store, app, guard string }{
		{name: "an action is added", guard: "action create {\n match path /v1/charges\n }"},
		{name: "it is renamed", guard: "action make {\n match path /v1/charges\n preset strict\n }"},
		{name: "another comes before it", guard: "action other {\n match path /v1/*\n }\n action make {\n match path /v1/charges\n }"},
		{name: "all are removed"},
		{name: "other options", app: "drain 10s", guard: "retain_result 2h\n deadline 10s\n max_body 1MiB"},
		{name: "the directory by another name", store: "badger " + link},
		{name: "the key file by name", app: "keys file " + site.Path("data.key")},
	}
	gateway := site.Start(t)
	first := gateway.Retry(t, harness.ProcCall{Id: "one"})
	for _, config := range configs {
		t.Run(config.name, func(t *testing.T) {
			site.Store, site.App, site.Guard = config.store, config.app, config.guard
			gateway.Reload(t)
			harness.WantProcReplay(t, first, gateway.Retry(t, harness.ProcCall{Id: "one"}))
			before := strings.ReplaceAll(config.name, " ", "-")
			a := gateway.Retry(t, harness.ProcCall{Id: before})
			if !a.Executed() {
				t.Fatalf("%v", a)
			}
			harness.WantProcReplay(t, a, gateway.Retry(t, harness.ProcCall{Id: before}))
		})
	}
	// The engine was never opened anew, and restarts see the same.
	if n := strings.Count(gateway.Log.String(), `"msg":"store open"`); n != 1 {
		t.Errorf("the store was opened %d times", n)
	}
	gateway.End(t)
	site.Store, site.App, site.Guard = "", "", ""
	gateway = site.Start(t)
	harness.WantProcReplay(t, first, gateway.Retry(t, harness.ProcCall{Id: "one"}))
}

// P1: an execution that began under one configuration is found through the next one.
func TestProcessReloadWhileACallRuns(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	hold := upstream.Hold(t, "running")
	owner := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "running"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")

	site.Guard = "attach_wait 1ms"
	gateway.Reload(t)
	if a := gateway.Retry(t, harness.ProcCall{Id: "running"}); a.Problem() != "in-progress" {
		t.Errorf("P1: the new configuration does not see the running call: %v", a)
	}
	site.Guard = ""
	gateway.Reload(t)
	followers := make([]<-chan harness.ProcAnswer, 3)
	for i := range followers {
		done := make(chan harness.ProcAnswer, 1)
		followers[i] = done
		go func() { done <- gateway.Retry(t, harness.ProcCall{Id: "running"}) }()
	}
	site.Guard = "deadline 30s"
	gateway.Reload(t)
	hold.Open()
	first := harness.WaitWithin(t, harness.ProcBound, owner, "the call ends")
	if first.Err != nil || !first.Answer.Executed() {
		t.Fatalf("P7: the running call: %v, %v", first.Answer, first.Err)
	}
	for _, f := range followers {
		if a := harness.WaitWithin(t, harness.ProcBound, f, "those attached"); a.Digest() != first.Answer.Digest() || a.Executed() {
			t.Errorf("P1: an attached call: %v", a)
		}
	}
	harness.WantProcReplay(t, first.Answer, gateway.Retry(t, harness.ProcCall{Id: "running"}))
}

// Section "Store": another directory is another store; the old one is closed when its
// last execution has ended, and not before.
func TestProcessReloadToAnotherDirectory(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	hold := upstream.Hold(t, "running")
	owner := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "running"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")

	site.Store = "badger " + site.Path("elsewhere")
	gateway.Reload(t)
	other := gateway.Retry(t, harness.ProcCall{Id: "other"})
	harness.WantProcReplay(t, other, gateway.Retry(t, harness.ProcCall{Id: "other"}))

	rival := harness.ProcNewSite(t, upstream.Addr)
	rival.Store = "badger " + site.Path("data")
	harness.WantProcSays(t, rival.Refused(t), "in use")
	hold.Open()
	first := harness.WaitWithin(t, harness.ProcBound, owner, "the call ends")
	if first.Err != nil {
		t.Fatal(first.Err)
	}

	site.Store = ""
	gateway.Reload(t)
	harness.WantProcReplay(t, first.Answer, gateway.Retry(t, harness.ProcCall{Id: "running"}))
	site.Store = "badger " + site.Path("elsewhere")
	gateway.Reload(t)
	harness.WantProcReplay(t, other, gateway.Retry(t, harness.ProcCall{Id: "other"}))
	// A reload returns before the old configuration is gone for good.
	harness.EventuallyWithin(t, harness.ProcBound, "the first directory is free", func() bool {
		g := rival.Launch(t)
		defer g.Kill()
		return g.Ready(t)
	})
}

// A configuration that cannot be used leaves the one before it running.
func TestProcessFailedReload(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	first := gateway.Retry(t, harness.ProcCall{Id: "one"})
	taken := harness.ProcNewSite(t, upstream.Addr)
	neighbour := taken.Start(t)

	tests := []struct{ name, store, app, guard, says, at string }{
		{name: "unknown option", guard: "no_such_option", says: "no_such_option", at: ", at Caddyfile:16"},
		{name: "refused option", guard: "preset nonsense", says: "nonsense", at: ", at Caddyfile:16"},
		{name: "another key", app: "keys value MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=", says: "keeps the index key that it was made with", at: ", at Caddyfile:10"},
		{name: "another key file", app: "keys file " + taken.Path("data.key"), says: "keeps the index key that it was made with", at: ", at Caddyfile:10"},
		{name: "a key file that is missing", app: "keys file " + taken.Path("none"), says: "is missing", at: ", at Caddyfile:10"},
		{name: "a directory in use", store: "badger " + taken.Path("data"), says: "stop the process that has it open", at: ", at Caddyfile:9"},
		{name: "a directory that cannot be made", store: "badger /dev/null/agent_guard", says: "not a directory", at: ", at Caddyfile:9"},
	}
	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			bad := *site
			bad.Store, bad.App, bad.Guard = test.store, test.app, test.guard
			err := gateway.Load(bad.Config())
			if err == nil {
				t.Fatal("it was loaded")
			}
			harness.WantProcSays(t, err.Error(), test.says, test.at)
			harness.WantProcReplay(t, first, procServed(t, gateway, "one"))
			if a := procServed(t, gateway, fmt.Sprint("after-", i)); !a.Executed() {
				t.Errorf("the old configuration: %v", a)
			}
		})
	}
	site.Guard = "deadline 20s"
	gateway.Reload(t)
	harness.WantProcReplay(t, first, gateway.Retry(t, harness.ProcCall{Id: "one"}))
	// No reference was lost on the way, nor one kept.
	gateway.End(t)
	neighbour.End(t)
	gateway = site.Start(t)
	harness.WantProcReplay(t, first, gateway.Retry(t, harness.ProcCall{Id: "one"}))
}

// procServed makes a call after a reload that failed. Caddy may have started to serve
// the new configuration before it found that it cannot be used; what came to it in
// that moment was refused, to be sent again (P4).
func procServed(t *testing.T, gateway *harness.ProcGateway, id string) (a harness.ProcAnswer) {
	t.Helper()
	harness.EventuallyWithin(t, harness.ProcBound, "an answer of the old configuration", func() bool {
		a = gateway.Retry(t, harness.ProcCall{Id: id})
		return a.Problem() != "store-unavailable" || a.Header.Get("Retry-After") == ""
	})
	return a
}

// A call goes on when a reload takes the guard away, and is recorded.
func TestProcessReloadWithoutTheGuard(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		for _, stays := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/client stays %v", name, stays), func(t *testing.T) {
				upstream := harness.ProcNewUpstream(t)
				site := harness.ProcNewSite(t, upstream.Addr)
				gateway := site.Start(t)
				hold := upstream.Hold(t, "running")
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				owner := gateway.Begin(ctx, dial(), harness.ProcCall{Id: "running"})
				harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
				if !stays {
					leave()
					harness.WaitWithin(t, harness.ProcBound, owner, "the client leaves")
				}
				if err := gateway.Load(site.Without()); err != nil {
					t.Fatal(err)
				}
				if a := gateway.Retry(t, harness.ProcCall{Id: "running"}); a.Status != http.StatusNotFound {
					t.Fatalf("the guard is still there: %v", a)
				}
				// Even an exit waits for it.
				gateway.Term(t)
				harness.WaitWithin(t, harness.ProcBound, gateway.Log.When("exiting; byeee"), "the gateway knows")
				hold.Open()
				if stays {
					if f := harness.WaitWithin(t, harness.ProcBound, owner, "the call ends"); f.Err != nil || !f.Answer.Executed() {
						t.Errorf("P7: %v, %v", f.Answer, f.Err)
					}
				}
				gateway.Wait(t)
				gateway = site.Start(t)
				if a := gateway.Retry(t, harness.ProcCall{Id: "running"}); !a.Replayed() {
					t.Errorf("P7: its result was not recorded: %v", a)
				}
			})
		}
	}
}

// facts: `caddy validate` is another process, and must not want the directory.
func TestProcessValidateBesideARunningServer(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	first := gateway.Retry(t, harness.ProcCall{Id: "one"})
	out, err := site.Command(t.Context(), "command", "validate", "--config", site.Path("Caddyfile"), "--adapter", "caddyfile").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "Valid configuration") {
		t.Errorf("validate: %v\n%s", err, out)
	}
	harness.WantProcReplay(t, first, gateway.Retry(t, harness.ProcCall{Id: "one"}))
	// It makes nothing either.
	fresh := harness.ProcNewSite(t, upstream.Addr)
	if err := os.WriteFile(fresh.Path("Caddyfile"), []byte(fresh.Config()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := fresh.Command(t.Context(), "command", "validate", "--config", fresh.Path("Caddyfile"), "--adapter", "caddyfile").CombinedOutput(); err != nil {
		t.Errorf("validate: %v\n%s", err, out)
	}
	for _, name := range []string{"data", "data.key"} {
		if _, err := os.Stat(fresh.Path(name)); !os.IsNotExist(err) {
			t.Errorf("validate made %s: %v", name, err)
		}
	}
}
