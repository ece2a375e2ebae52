//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD, "Unsatisfiable Resource Hints": a critical call that finds no place is an error of the type
// resource_exhausted, and people are asked, once; for others it is a warning. Over a crash, too.
func TestProcessCallsThatFindNoPlace(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, u, hold := newAgent(t, "a"), newUpstream(t), newGate(t)
	u.on("/held", func(w http.ResponseWriter, a *arrival) {
		hold.pass()
		status(201, "done")(w, a)
	})
	site := procNewSite(t, u.addr)
	site.app = trusting(t, a)
	site.guard = "bulkhead {\n total 1\n wait 10ms\n}"
	gateway := site.start(t)
	critical, normal, reading := site.gateway(t).saga(a), site.gateway(t).saga(a), site.gateway(t).saga(a)
	wait := func(s *saga, class, id string) {
		t.Helper()
		token := a.issue(ect.Claims{Workflow: s.wid, Ext: new(ect.ExtBuilder).Text("atd.resource_priority", class)})
		s.g.call(with(token, request{path: "/pay", id: id})).retryable(t, 429, "bulkhead-full")
	}
	says := func(s *saga, severity string) {
		t.Helper()
		page := site.gateway(t).get(a, "workflows/"+s.wid).body
		if strings.Count(page, `"severity"`) != 1 || !strings.Contains(page, fmt.Sprintf(`"severity": %q`, severity)) {
			t.Errorf("the workflow says %s", page)
		}
	}
	for round := range 2 {
		held := site.gateway(t).begin(request{path: "/held", id: uuid.NewString()})
		eventually(t, "the permit is held", func() bool { return u.arrivals("/held") == round+1 })
		for i := range 3 {
			wait(critical, "critical", fmt.Sprint(round, "-critical-", i))
			wait(normal, "normal", fmt.Sprint(round, "-normal-", i))
			token := a.issue(ect.Claims{Workflow: reading.wid, Ext: new(ect.ExtBuilder).Text("atd.resource_priority", "critical")})
			if got := reading.g.call(with(token, request{method: "GET", path: "/read"})); got.status != 429 {
				t.Errorf("a request that is not guarded: %d %s", got.status, got.body)
			}
		}
		if round == 0 {
			gateway.kill()
			gateway = site.start(t)
		}
		_ = held
	}
	says(critical, "error")
	says(normal, "warning")
	says(reading, "error") // though nothing else is recorded of it
	list := site.operate(t, "escalations", "list", "-o", "json").says(t)
	if strings.Count(list, `"resource_exhausted"`) != 2 || !strings.Contains(list, critical.wid) || !strings.Contains(list, reading.wid) {
		t.Errorf("people are asked %s", list)
	}
	u.arrived("/pay", 0)
	u.arrived("/read", 0)
}
