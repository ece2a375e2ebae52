//go:build unix

package e2e

import (
	"net/http"
	"testing"
)

// P4: the limits of a store are those of the latest configuration. Over its largest
// size nothing new begins, what was recorded is replayed, and with more room it goes on.
func TestProcessLimitsChangeWithAReload(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	gateway := site.start(t)
	known := gateway.post(t, procCall{id: "known"})

	limited := func(limits string) {
		t.Helper()
		site.store = "badger " + site.path("data") + " {\n\t\t\t" + limits + "\n\t\t}"
		gateway.reload(t)
	}
	before := upstream.total()
	limited("max_size 1KiB")
	if a := gateway.retry(t, procCall{id: "new"}); a.status != http.StatusServiceUnavailable || a.problem() != "store-unavailable" {
		t.Errorf("over the largest size: %v", a)
	}
	if got := upstream.total(); got != before {
		t.Errorf("P4: %d calls were forwarded", got-before)
	}
	wantProcReplay(t, known, gateway.retry(t, procCall{id: "known"}))

	limited("max_size 10GiB")
	if a := gateway.retry(t, procCall{id: "new"}); !a.executed() {
		t.Errorf("below the largest size: %v", a)
	}
	limited("min_free 1EiB")
	if a := gateway.retry(t, procCall{id: "last"}); a.problem() != "store-unavailable" {
		t.Errorf("with too little free space: %v", a)
	}
	wantProcReplay(t, known, gateway.retry(t, procCall{id: "known"}))
	gateway.end(t)
}
