package e2e

import (
	"net/http"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ECT, "Unique within wid, or globally if there is no wid": of two tokens with one jti, one
// of them without a workflow, exactly one is good for anything (P1), also where both come
// at once, and the ledger holds one of them.
func TestTokenWithoutWorkflowIsUniqueAnywhere(t *testing.T) {
	for _, level := range []string{"", level3} {
		upstream, a := newUpstream(t), newAgent(t, "a")
		g := launch(t, setup{app: trusting(t, a) + level, badger: true, site: "agent_proxy " + upstream.addr})
		pair := func() (both [2]*ect.Token) {
			id := uuid.NewString()
			for i, wid := range []string{"", uuid.NewString()} {
				both[i] = a.issue(ect.Claims{ID: id, Workflow: wid})
			}
			return both
		}
		good := func(r reply) bool {
			if r.status != 201 && r.status != 200 {
				r.refusedFor(t, http.StatusForbidden, "replayed")
				return false
			}
			return true
		}
		for n := range 15 {
			both := pair()
			methods := [][2]string{{"POST", "POST"}, {"POST", "GET"}, {"GET", "POST"}, {"GET", "GET"}, {"POST", "POST"}}[n%5]
			var accepted [2]bool
			var group sync.WaitGroup
			for i, token := range both {
				r := with(token, request{method: methods[i], path: [2]string{"/one", "/two"}[i]})
				if methods[i] == "POST" {
					r.body = "{}"
				}
				group.Go(func() { accepted[i] = good(g.call(r)) })
			}
			group.Wait()
			if accepted[0] == accepted[1] {
				t.Errorf("%q: %v at once: %v", level, methods, accepted)
			}
		}
		for _, method := range []string{"POST", "GET"} {
			for first := range 2 {
				both := pair()
				for i, want := range []bool{true, false, false} {
					token := both[(first+min(i, 1))%2]
					if got := good(g.call(with(token, request{method: method, path: "/three"}))); got != want {
						t.Errorf("%q: %s %d of %d: %v", level, method, i, first, got)
					}
				}
				if got := good(g.call(with(both[first], request{method: method, path: "/three"}))); !got {
					t.Errorf("%q: %s: a retry is refused", level, method)
				}
			}
		}
		stop(t)
	}
}
