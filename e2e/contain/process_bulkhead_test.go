//go:build unix

package contain

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD, "Unsatisfiable Resource Hints": a critical call that finds no place is an error of the type
// resource_exhausted, and people are asked, once; for others it is a warning. Over a crash, too.
func TestProcessCallsThatFindNoPlace(t *testing.T) {
	t.Parallel() // its gateways are processes
	a, u, hold := harness.NewAgent(t, "a"), harness.NewUpstream(t), harness.NewGate(t)
	u.On("/held", func(w http.ResponseWriter, a *harness.Arrival) {
		hold.Pass()
		harness.Status(201, "done")(w, a)
	})
	site := harness.ProcNewSite(t, u.Addr)
	site.App = harness.Trusting(t, a)
	site.Guard = "bulkhead {\n total 1\n wait 10ms\n}"
	gateway := site.Start(t)
	critical, normal, reading := site.Gateway(t).Saga(a), site.Gateway(t).Saga(a), site.Gateway(t).Saga(a)
	wait := func(s *harness.Saga, class, id string) {
		t.Helper()
		token := a.Issue(ect.Claims{Workflow: s.Wid, Ext: new(ect.ExtBuilder).Text("atd.resource_priority", class)})
		s.G.Call(harness.With(token, harness.Request{Path: "/pay", Id: id})).Retryable(t, 429, "bulkhead-full")
	}
	says := func(s *harness.Saga, severity string) {
		t.Helper()
		page := site.Gateway(t).Get(a, "workflows/"+s.Wid).Body
		if strings.Count(page, `"severity"`) != 1 || !strings.Contains(page, fmt.Sprintf(`"severity": %q`, severity)) {
			t.Errorf("the workflow says %s", page)
		}
	}
	for round := range 2 {
		held := site.Gateway(t).Begin(harness.Request{Path: "/held", Id: uuid.NewString()})
		harness.Eventually(t, "the permit is held", func() bool { return u.Arrivals("/held") == round+1 })
		for i := range 3 {
			wait(critical, "critical", fmt.Sprint(round, "-critical-", i))
			wait(normal, "normal", fmt.Sprint(round, "-normal-", i))
			token := a.Issue(ect.Claims{Workflow: reading.Wid, Ext: new(ect.ExtBuilder).Text("atd.resource_priority", "critical")})
			if got := reading.G.Call(harness.With(token, harness.Request{Method: "GET", Path: "/read"})); got.Status != 429 {
				t.Errorf("a request that is not guarded: %d %s", got.Status, got.Body)
			}
		}
		if round == 0 {
			gateway.Kill()
			gateway = site.Start(t)
		}
		_ = held
	}
	says(critical, "error")
	says(normal, "warning")
	says(reading, "error") // though nothing else is recorded of it
	list := site.Operate(t, "escalations", "list", "-o", "json").Says(t)
	if strings.Count(list, `"resource_exhausted"`) != 2 || !strings.Contains(list, critical.Wid) || !strings.Contains(list, reading.Wid) {
		t.Errorf("people are asked %s", list)
	}
	u.Arrived("/pay", 0)
	u.Arrived("/read", 0)
}
