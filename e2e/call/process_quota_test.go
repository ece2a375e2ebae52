//go:build unix

package call

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// What a caller holds counts over restarts, and after kill -9; a reload changes the
// bound at once.
func TestProcessQuota(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	site := harness.ProcNewSite(t, upstream.Addr)
	quota := func(n int) { site.App = fmt.Sprintf("quota {\n open_executions %d\n}", n) }
	refused := func(gateway *harness.ProcGateway, when string) {
		t.Helper()
		if a := gateway.Retry(t, harness.ProcCall{Id: "refused"}); a.Status != http.StatusTooManyRequests || a.Problem() != "quota-exceeded" {
			t.Errorf("%s: %v", when, a)
		}
		other := harness.ProcCall{Id: when, Header: map[string]string{"Authorization": "Bearer another"}}
		if a := gateway.Retry(t, other); !a.Executed() {
			t.Errorf("%s: another caller: %v", when, a)
		}
	}
	quota(2)
	gateway := site.Start(t)
	doubt := func(id string) {
		t.Helper()
		upstream.Script(id, func(http.ResponseWriter, *http.Request, int) { panic(http.ErrAbortHandler) })
		harness.WantProcDoubt(t, gateway.Retry(t, harness.ProcCall{Id: id}))
	}
	doubt("1")
	hold := upstream.Hold(t, "2") // open when the process dies: in doubt afterwards
	lost := gateway.Begin(t.Context(), harness.ProcDial(), harness.ProcCall{Id: "2"})
	harness.WaitWithin(t, harness.ProcBound, hold.Arrived, "arrival")
	refused(gateway, "running")
	gateway.Kill()
	harness.WaitWithin(t, harness.ProcBound, lost, "the call ends")
	hold.Open()
	gateway = site.Start(t)
	refused(gateway, "killed")
	gateway.End(t)
	gateway = site.Start(t)
	refused(gateway, "restarted")

	quota(3)
	gateway.Reload(t)
	doubt("3")
	refused(gateway, "raised")
	site.App = ""
	gateway.Reload(t)
	doubt("4")
	quota(4)
	gateway.Reload(t)
	refused(gateway, "set-again")
	if got := upstream.Arrivals("refused"); got != 0 {
		t.Errorf("%d refused calls were sent", got)
	}
	quota(5)
	gateway.Reload(t)
	if a := gateway.Retry(t, harness.ProcCall{Id: "refused"}); !a.Executed() {
		t.Errorf("with room: %v", a)
	}
	gateway.End(t)
}
