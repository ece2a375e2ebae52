package breaker

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// wantHealth asks the page for load balancers and containers, which anybody may.
func wantHealth(t *testing.T, g *harness.ProcGateway, status int, word string) {
	t.Helper()
	got, text := g.Read(t, "health")
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
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	// The hundredth sync of a thread fails, which is after the start.
	site.Wrap = []string{
		strace, "-f", "-o", site.Path("strace"), "-e", "signal=none",
		"-e", "trace=msync,fdatasync", "-e", "inject=msync,fdatasync:error=EIO:when=100",
	}
	gateway := site.Start(t)
	wantHealth(t, gateway, http.StatusOK, "ok")
	answers := map[string]harness.ProcAnswer{}
	client := harness.ProcDial()
	defer client.CloseIdleConnections()
	last := ""
	for n := 0; ; n++ {
		if n == 5000 {
			t.Fatal("no sync has failed")
		}
		last = fmt.Sprint("call-", n)
		a, err := harness.ProcPost(t.Context(), client, site.Addr, harness.ProcCall{Id: last})
		if err != nil {
			break // its outcome could not be recorded, so its end is held back
		}
		if !a.Executed() {
			if a.Problem() != "store-unavailable" && a.Problem() != "in-doubt" {
				t.Errorf("the call whose sync failed: %v", a)
			}
			break
		}
		answers[last] = a
	}
	before := upstream.Total()
	for n := range 20 {
		a := gateway.Post(t, harness.ProcCall{Id: fmt.Sprint("after-", n)})
		if a.Status != http.StatusServiceUnavailable || a.Problem() != "store-unavailable" {
			t.Errorf("a call after it: %v", a)
		}
	}
	if got := upstream.Total(); got != before {
		t.Errorf("P4: %d calls were forwarded after the sync had failed", got-before)
	}
	if !gateway.Log.Says("store closed itself, restart needed") {
		t.Error("the log does not say that the store has closed itself")
	}
	// A container's health check sees it, without the admin API.
	wantHealth(t, gateway, http.StatusServiceUnavailable, "store-unavailable")
	// It stays closed over a reload.
	site.Guard = "deadline 61s"
	gateway.Reload(t)
	if a := gateway.Retry(t, harness.ProcCall{Id: "reloaded"}); a.Problem() != "store-unavailable" {
		t.Errorf("a call after a reload: %v", a)
	}
	if status, text, err := gateway.Admin("POST", "/stop", "", ""); err != nil || status != http.StatusOK {
		t.Fatalf("stop: %d %s %v", status, text, err)
	}
	gateway.Wait(t)

	site.Wrap = nil
	gateway = site.Start(t)
	wantHealth(t, gateway, http.StatusOK, "ok")
	if a := gateway.Post(t, harness.ProcCall{Id: "restarted"}); !a.Executed() {
		t.Errorf("a call after a restart: %v", a)
	}
	for id, first := range answers {
		harness.WantProcReplay(t, first, gateway.Post(t, harness.ProcCall{Id: id}))
	}
	gateway.Post(t, harness.ProcCall{Id: last})
	if n := upstream.Arrivals(last); n > 1 {
		t.Errorf("P1: the call whose sync failed was executed %d times", n)
	}
	gateway.End(t)
}
