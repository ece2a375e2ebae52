package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// procUse is what a gateway holds, the files of its store left out.
type procUse struct{ goroutines, files int }

var procTotal = regexp.MustCompile(`goroutine profile: total (\d+)`)

func (g *procGateway) use(t *testing.T) procUse {
	t.Helper()
	_, text, err := g.admin("GET", "/debug/pprof/goroutine?debug=1", "", "")
	if err != nil {
		t.Fatal(err)
	}
	total := procTotal.FindStringSubmatch(text)
	if total == nil {
		t.Fatalf("no goroutine profile: %.200s", text)
	}
	goroutines, _ := strconv.Atoi(total[1])
	dir := fmt.Sprintf("/proc/%d/fd", g.cmd.Process.Pid)
	handles, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for _, h := range handles {
		// The store has as many tables as it needs.
		if name, err := os.Readlink(filepath.Join(dir, h.Name())); err == nil && !strings.HasPrefix(name, g.site.path("data/")) {
			files++
		}
	}
	return procUse{goroutines, files}
}

// Whatever calls do and however often the configuration changes, goroutines and files
// come back to what they were, and nothing is left on the disk.
func TestProcessLeaksNothing(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	work := func(round int) {
		t.Helper()
		large := strings.Repeat("x", 3<<20)
		var clients sync.WaitGroup
		for worker := range 8 {
			clients.Go(func() {
				client := procDial()
				defer client.CloseIdleConnections()
				for n := range 20 {
					c := procCall{id: fmt.Sprintf("leak-%d-%d-%d", round, worker/2, n), header: map[string]string{procSize: "600000"}}
					if n%5 == 0 {
						c.body, c.header[procSize] = large, "10" // the request is kept in a file
					}
					if a, _ := procRetry(t, client, site.addr, c); a.status != http.StatusCreated {
						t.Errorf("%s: %v", c.id, a)
					}
				}
			})
		}
		clients.Wait()
		// Clients that leave: the owner of a call, and who follows it.
		for n := range 5 {
			c := procCall{id: fmt.Sprintf("left-%d-%d", round, n), body: large}
			hold := upstream.hold(t, c.id)
			ctx, leave := context.WithCancel(t.Context())
			client := procDial()
			owner := gateway.begin(ctx, client, c)
			waitWithin(t, procBound, hold.arrived, "arrival")
			follower := gateway.begin(ctx, client, c)
			leave()
			waitWithin(t, procBound, owner, "the owner leaves")
			waitWithin(t, procBound, follower, "the follower leaves")
			client.CloseIdleConnections()
			hold.open()
			if a := gateway.retry(t, c); !a.replayed() && a.execution() != "attached" {
				t.Errorf("P7: %v", a)
			}
		}
		for n := range 10 {
			site.guard = fmt.Sprintf("deadline %ds\n transport agent_guard {\n keepalive_guarded 20ms\n }", 60+n)
			if n == 5 {
				if err := gateway.load(site.without()); err != nil {
					t.Error(err)
				}
			}
			gateway.reload(t)
		}
	}
	settle := func(what string, enough func(procUse) bool) procUse {
		t.Helper()
		var last procUse
		eventuallyWithin(t, procBound, what, func() bool {
			last = gateway.use(t)
			return enough(last)
		})
		return last
	}

	work(0)
	// At rest: the same twice.
	var before procUse
	settle("rest", func(u procUse) bool {
		same := u == before
		before = u
		return same
	})
	for round := range 3 {
		work(1 + round)
	}
	after := settle(fmt.Sprintf("no more than %+v", before), func(u procUse) bool {
		return u.goroutines <= before.goroutines && u.files <= before.files
	})
	t.Logf("before %+v, after %+v", before, after)

	hold := upstream.hold(t, "killed")
	gateway.begin(t.Context(), procDial(), procCall{id: "killed", body: strings.Repeat("x", 3<<20)})
	waitWithin(t, procBound, hold.arrived, "arrival")
	gateway.kill()
	for _, dir := range []string{site.dir, site.path("tmp")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			switch e.Name() {
			case "Caddyfile", "data", "data.key", "tmp", "xdg":
			default:
				t.Errorf("left behind: %s/%s", dir, e.Name())
			}
		}
	}
}
