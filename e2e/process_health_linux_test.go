package e2e

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
)

// wantHealth asks the page for load balancers and containers, which anybody may.
func wantHealth(t *testing.T, g *procGateway, status int, word string) {
	t.Helper()
	got, text := g.read(t, "health")
	if got != status || strings.TrimSpace(text) != `{"status":"`+word+`"}` {
		t.Errorf("health is %d %s; want %d %q", got, text, status, word)
	}
}

// P2, P4: one sync that fails closes the store. Although the disk is well again at
// once, nothing is forwarded any more, until a restart has found out what was stored.
func TestProcessFailedSync(t *testing.T) {
	t.Parallel() // its gateways are processes
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Fatal("this test needs strace: apt-get install strace")
	}
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	// The hundredth sync of a thread fails, which is after the start.
	site.wrap = []string{
		strace, "-f", "-o", site.path("strace"), "-e", "signal=none",
		"-e", "trace=msync,fdatasync", "-e", "inject=msync,fdatasync:error=EIO:when=100",
	}
	gateway := site.start(t)
	wantHealth(t, gateway, http.StatusOK, "ok")
	answers := map[string]procAnswer{}
	client := procDial()
	defer client.CloseIdleConnections()
	last := ""
	for n := 0; ; n++ {
		if n == 5000 {
			t.Fatal("no sync has failed")
		}
		last = fmt.Sprint("call-", n)
		a, err := procPost(t.Context(), client, site.addr, procCall{id: last})
		if err != nil {
			break // its outcome could not be recorded, so its end is held back
		}
		if !a.executed() {
			if a.problem() != "store-unavailable" && a.problem() != "in-doubt" {
				t.Errorf("the call whose sync failed: %v", a)
			}
			break
		}
		answers[last] = a
	}
	before := upstream.total()
	for n := range 20 {
		a := gateway.post(t, procCall{id: fmt.Sprint("after-", n)})
		if a.status != http.StatusServiceUnavailable || a.problem() != "store-unavailable" {
			t.Errorf("a call after it: %v", a)
		}
	}
	if got := upstream.total(); got != before {
		t.Errorf("P4: %d calls were forwarded after the sync had failed", got-before)
	}
	if !gateway.log.says("store closed itself, restart needed") {
		t.Error("the log does not say that the store has closed itself")
	}
	// A container's health check sees it, without the admin API.
	wantHealth(t, gateway, http.StatusServiceUnavailable, "store-unavailable")
	// It stays closed over a reload.
	site.guard = "deadline 61s"
	gateway.reload(t)
	if a := gateway.retry(t, procCall{id: "reloaded"}); a.problem() != "store-unavailable" {
		t.Errorf("a call after a reload: %v", a)
	}
	if status, text, err := gateway.admin("POST", "/stop", "", ""); err != nil || status != http.StatusOK {
		t.Fatalf("stop: %d %s %v", status, text, err)
	}
	gateway.wait(t)

	site.wrap = nil
	gateway = site.start(t)
	wantHealth(t, gateway, http.StatusOK, "ok")
	if a := gateway.post(t, procCall{id: "restarted"}); !a.executed() {
		t.Errorf("a call after a restart: %v", a)
	}
	for id, first := range answers {
		wantProcReplay(t, first, gateway.post(t, procCall{id: id}))
	}
	gateway.post(t, procCall{id: last})
	if n := upstream.arrivals(last); n > 1 {
		t.Errorf("P1: the call whose sync failed was executed %d times", n)
	}
	gateway.end(t)
}
