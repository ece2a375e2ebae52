//go:build unix

package call

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P4: the limits of a store are those of the latest configuration. Over its largest
// size nothing new begins, what was recorded is replayed, and with more room it goes on.
func TestProcessLimitsChangeWithAReload(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	gateway := site.Start(t)
	known := gateway.Post(t, harness.ProcCall{Id: "known"})

	limited := func(limits string) {
		t.Helper()
		site.Store = "badger " + site.Path("data") + " {\n\t\t\t" + limits + "\n\t\t}"
		gateway.Reload(t)
	}
	before := upstream.Total()
	limited("max_size 1KiB")
	if a := gateway.Retry(t, harness.ProcCall{Id: "new"}); a.Status != http.StatusServiceUnavailable || a.Problem() != "store-unavailable" {
		t.Errorf("over the largest size: %v", a)
	}
	if got := upstream.Total(); got != before {
		t.Errorf("P4: %d calls were forwarded", got-before)
	}
	harness.WantProcReplay(t, known, gateway.Retry(t, harness.ProcCall{Id: "known"}))

	limited("max_size 10GiB")
	if a := gateway.Retry(t, harness.ProcCall{Id: "new"}); !a.Executed() {
		t.Errorf("below the largest size: %v", a)
	}
	limited("min_free 1EiB")
	if a := gateway.Retry(t, harness.ProcCall{Id: "last"}); a.Problem() != "store-unavailable" {
		t.Errorf("with too little free space: %v", a)
	}
	harness.WantProcReplay(t, known, gateway.Retry(t, harness.ProcCall{Id: "known"}))
	gateway.End(t)
}
