//go:build unix

package harness

import (
	"net/http"
	"testing"
)

// ProcTripped starts a gateway and opens the breaker of its upstream with two calls.
func ProcTripped(t *testing.T, site *ProcSite, upstream *ProcUpstream) *ProcGateway {
	t.Helper()
	gateway := site.Start(t)
	if a := gateway.Post(t, ProcCall{Id: "before"}); !a.Executed() {
		t.Fatal(a)
	}
	for _, id := range []string{"lost-1", "lost-2"} {
		upstream.Script(id, ProcLost)
		gateway.Post(t, ProcCall{Id: id})
	}
	WantProcRefused(t, gateway, upstream)
	return gateway
}

// WantProcRefused makes a call that the breaker refuses, and a replay that it does not.
func WantProcRefused(t *testing.T, gateway *ProcGateway, upstream *ProcUpstream) {
	t.Helper()
	if a := gateway.Retry(t, ProcCall{Id: "refused"}); a.Problem() != "circuit-open" || a.Status != http.StatusServiceUnavailable {
		t.Errorf("while the breaker is open: %v", a)
	}
	if a := gateway.Retry(t, ProcCall{Id: "before"}); !a.Replayed() {
		t.Errorf("a recorded call while the breaker is open: %v", a)
	}
	if upstream.Arrivals("refused") != 0 {
		t.Error("an open breaker has let a call through")
	}
}
