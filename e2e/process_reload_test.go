//go:build unix

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// P1: reloads under load. No call is refused, lost, or executed twice, and one whose
// connection a reload has closed had not begun: what its caller makes again is executed.
func TestProcessReloadsUnderLoad(t *testing.T) {
	t.Parallel() // its gateways are processes
	const reloads = 50
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var calls, broken atomic.Int64
	var clients sync.WaitGroup
	for worker := range 6 {
		clients.Go(func() {
			// Half of the clients keep their connections.
			client := &http.Client{Timeout: procBound, Transport: recorded{&http.Transport{DisableKeepAlives: worker%2 == 0}}}
			defer client.CloseIdleConnections()
			for n := 0; ctx.Err() == nil; n++ {
				c := procCall{id: fmt.Sprintf("reload-%d-%d", worker, n)}
				a, failures := procRetry(t, client, site.addr, c)
				if a.status != http.StatusCreated {
					t.Errorf("%s: %v", c.id, a)
					return
				}
				if failures > 0 && !a.executed() {
					t.Errorf("P1: a reload has closed the connection of a call that had begun: %s: %v", c.id, a)
				}
				again, more := procRetry(t, client, site.addr, c)
				wantProcReplay(t, a, again)
				calls.Add(1)
				broken.Add(int64(failures + more))
			}
		})
	}
	for n := range reloads {
		site.guard = fmt.Sprintf("deadline %ds", 60+n)
		before := calls.Load()
		gateway.reload(t)
		eventuallyWithin(t, procBound, "load", func() bool { return calls.Load() >= before+20 })
	}
	stop()
	clients.Wait()
	if got := upstream.total(); int64(got) != calls.Load() {
		t.Errorf("P1: %d calls, %d executions", calls.Load(), got)
	}
	t.Logf("%d reloads, %d calls, %d connections broken", reloads, calls.Load(), broken.Load())
	gateway.end(t)
	if gateway.log.has(`"level":"error"`) {
		t.Errorf("errors in the log:\n%s", gateway.log.tail(4000))
	}
}

// P1: what a reload changes frees no key.
func TestProcessReloadKeepsKeys(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	link := site.path("link")
	if err := os.Symlink(site.path("data"), link); err != nil {
		t.Fatal(err)
	}
	configs := []struct{ name, store, app, guard string }{
		{name: "an action is added", guard: "action create {\n match path /v1/charges\n }"},
		{name: "it is renamed", guard: "action make {\n match path /v1/charges\n preset strict\n }"},
		{name: "another comes before it", guard: "action other {\n match path /v1/*\n }\n action make {\n match path /v1/charges\n }"},
		{name: "all are removed"},
		{name: "other options", app: "drain 10s", guard: "retain_result 2h\n deadline 10s\n max_body 1MiB"},
		{name: "the directory by another name", store: "badger " + link},
		{name: "the key file by name", app: "keys file " + site.path("data.key")},
	}
	gateway := site.start(t)
	first := gateway.retry(t, procCall{id: "one"})
	for _, config := range configs {
		t.Run(config.name, func(t *testing.T) {
			site.store, site.app, site.guard = config.store, config.app, config.guard
			gateway.reload(t)
			wantProcReplay(t, first, gateway.retry(t, procCall{id: "one"}))
			before := strings.ReplaceAll(config.name, " ", "-")
			a := gateway.retry(t, procCall{id: before})
			if !a.executed() {
				t.Fatalf("%v", a)
			}
			wantProcReplay(t, a, gateway.retry(t, procCall{id: before}))
		})
	}
	// The engine was never opened anew, and restarts see the same.
	if n := strings.Count(gateway.log.String(), `"msg":"store open"`); n != 1 {
		t.Errorf("the store was opened %d times", n)
	}
	gateway.end(t)
	site.store, site.app, site.guard = "", "", ""
	gateway = site.start(t)
	wantProcReplay(t, first, gateway.retry(t, procCall{id: "one"}))
}

// P1: an execution that began under one configuration is found through the next one.
func TestProcessReloadWhileACallRuns(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	hold := upstream.hold(t, "running")
	owner := gateway.begin(t.Context(), procDial(), procCall{id: "running"})
	waitWithin(t, procBound, hold.arrived, "arrival")

	site.guard = "attach_wait 1ms"
	gateway.reload(t)
	if a := gateway.retry(t, procCall{id: "running"}); a.problem() != "in-progress" {
		t.Errorf("P1: the new configuration does not see the running call: %v", a)
	}
	site.guard = ""
	gateway.reload(t)
	followers := make([]<-chan procAnswer, 3)
	for i := range followers {
		done := make(chan procAnswer, 1)
		followers[i] = done
		go func() { done <- gateway.retry(t, procCall{id: "running"}) }()
	}
	site.guard = "deadline 30s"
	gateway.reload(t)
	hold.open()
	first := waitWithin(t, procBound, owner, "the call ends")
	if first.err != nil || !first.answer.executed() {
		t.Fatalf("P7: the running call: %v, %v", first.answer, first.err)
	}
	for _, f := range followers {
		if a := waitWithin(t, procBound, f, "those attached"); a.digest() != first.answer.digest() || a.executed() {
			t.Errorf("P1: an attached call: %v", a)
		}
	}
	wantProcReplay(t, first.answer, gateway.retry(t, procCall{id: "running"}))
}

// Section "Store": another directory is another store; the old one is closed when its
// last execution has ended, and not before.
func TestProcessReloadToAnotherDirectory(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	hold := upstream.hold(t, "running")
	owner := gateway.begin(t.Context(), procDial(), procCall{id: "running"})
	waitWithin(t, procBound, hold.arrived, "arrival")

	site.store = "badger " + site.path("elsewhere")
	gateway.reload(t)
	other := gateway.retry(t, procCall{id: "other"})
	wantProcReplay(t, other, gateway.retry(t, procCall{id: "other"}))

	rival := procNewSite(t, upstream.addr)
	rival.store = "badger " + site.path("data")
	wantProcSays(t, rival.refused(t), "in use")
	hold.open()
	first := waitWithin(t, procBound, owner, "the call ends")
	if first.err != nil {
		t.Fatal(first.err)
	}

	site.store = ""
	gateway.reload(t)
	wantProcReplay(t, first.answer, gateway.retry(t, procCall{id: "running"}))
	site.store = "badger " + site.path("elsewhere")
	gateway.reload(t)
	wantProcReplay(t, other, gateway.retry(t, procCall{id: "other"}))
	// A reload returns before the old configuration is gone for good.
	eventuallyWithin(t, procBound, "the first directory is free", func() bool {
		g := rival.launch(t)
		defer g.kill()
		return g.ready(t)
	})
}

// A configuration that cannot be used leaves the one before it running.
func TestProcessFailedReload(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	first := gateway.retry(t, procCall{id: "one"})
	taken := procNewSite(t, upstream.addr)
	neighbour := taken.start(t)

	tests := []struct{ name, store, app, guard, says, at string }{
		{name: "unknown option", guard: "no_such_option", says: "no_such_option", at: ", at Caddyfile:16"},
		{name: "refused option", guard: "preset nonsense", says: "nonsense", at: ", at Caddyfile:16"},
		{name: "another key", app: "keys value MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=", says: "keeps the index key that it was made with", at: ", at Caddyfile:10"},
		{name: "another key file", app: "keys file " + taken.path("data.key"), says: "keeps the index key that it was made with", at: ", at Caddyfile:10"},
		{name: "a key file that is missing", app: "keys file " + taken.path("none"), says: "is missing", at: ", at Caddyfile:10"},
		{name: "a directory in use", store: "badger " + taken.path("data"), says: "stop the process that has it open", at: ", at Caddyfile:9"},
		{name: "a directory that cannot be made", store: "badger /dev/null/agent_guard", says: "not a directory", at: ", at Caddyfile:9"},
	}
	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			bad := *site
			bad.store, bad.app, bad.guard = test.store, test.app, test.guard
			err := gateway.load(bad.config())
			if err == nil {
				t.Fatal("it was loaded")
			}
			wantProcSays(t, err.Error(), test.says, test.at)
			wantProcReplay(t, first, procServed(t, gateway, "one"))
			if a := procServed(t, gateway, fmt.Sprint("after-", i)); !a.executed() {
				t.Errorf("the old configuration: %v", a)
			}
		})
	}
	site.guard = "deadline 20s"
	gateway.reload(t)
	wantProcReplay(t, first, gateway.retry(t, procCall{id: "one"}))
	// No reference was lost on the way, nor one kept.
	gateway.end(t)
	neighbour.end(t)
	gateway = site.start(t)
	wantProcReplay(t, first, gateway.retry(t, procCall{id: "one"}))
}

// procServed makes a call after a reload that failed. Caddy may have started to serve
// the new configuration before it found that it cannot be used; what came to it in
// that moment was refused, to be sent again (P4).
func procServed(t *testing.T, gateway *procGateway, id string) (a procAnswer) {
	t.Helper()
	eventuallyWithin(t, procBound, "an answer of the old configuration", func() bool {
		a = gateway.retry(t, procCall{id: id})
		return a.problem() != "store-unavailable" || a.header.Get("Retry-After") == ""
	})
	return a
}

// without is a configuration in which the guard does not stand.
func (s *procSite) without() string {
	return fmt.Sprintf("{\n admin %s\n persist_config off\n servers {\n protocols h1 h2c\n }\n }\nhttp://%s {\n bind 127.0.0.1\n respond 404\n }\n",
		s.admin, s.addr)
}

// A call goes on when a reload takes the guard away, and is recorded.
func TestProcessReloadWithoutTheGuard(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, dial := range procProtocols {
		for _, stays := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/client stays %v", name, stays), func(t *testing.T) {
				upstream := procNewUpstream(t)
				site := procNewSite(t, upstream.addr)
				gateway := site.start(t)
				hold := upstream.hold(t, "running")
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				owner := gateway.begin(ctx, dial(), procCall{id: "running"})
				waitWithin(t, procBound, hold.arrived, "arrival")
				if !stays {
					leave()
					waitWithin(t, procBound, owner, "the client leaves")
				}
				if err := gateway.load(site.without()); err != nil {
					t.Fatal(err)
				}
				if a := gateway.retry(t, procCall{id: "running"}); a.status != http.StatusNotFound {
					t.Fatalf("the guard is still there: %v", a)
				}
				// Even an exit waits for it.
				gateway.term(t)
				waitWithin(t, procBound, gateway.log.when("exiting; byeee"), "the gateway knows")
				hold.open()
				if stays {
					if f := waitWithin(t, procBound, owner, "the call ends"); f.err != nil || !f.answer.executed() {
						t.Errorf("P7: %v, %v", f.answer, f.err)
					}
				}
				gateway.wait(t)
				gateway = site.start(t)
				if a := gateway.retry(t, procCall{id: "running"}); !a.replayed() {
					t.Errorf("P7: its result was not recorded: %v", a)
				}
			})
		}
	}
}

// facts: `caddy validate` is another process, and must not want the directory.
func TestProcessValidateBesideARunningServer(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	first := gateway.retry(t, procCall{id: "one"})
	out, err := site.command(t.Context(), "command", "validate", "--config", site.path("Caddyfile"), "--adapter", "caddyfile").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "Valid configuration") {
		t.Errorf("validate: %v\n%s", err, out)
	}
	wantProcReplay(t, first, gateway.retry(t, procCall{id: "one"}))
	// It makes nothing either.
	fresh := procNewSite(t, upstream.addr)
	if err := os.WriteFile(fresh.path("Caddyfile"), []byte(fresh.config()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := fresh.command(t.Context(), "command", "validate", "--config", fresh.path("Caddyfile"), "--adapter", "caddyfile").CombinedOutput(); err != nil {
		t.Errorf("validate: %v\n%s", err, out)
	}
	for _, name := range []string{"data", "data.key"} {
		if _, err := os.Stat(fresh.path(name)); !os.IsNotExist(err) {
			t.Errorf("validate made %s: %v", name, err)
		}
	}
}
