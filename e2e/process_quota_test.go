//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"testing"
)

// What a caller holds counts over restarts, and after kill -9; a reload changes the
// bound at once.
func TestProcessQuota(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	site := procNewSite(t, upstream.addr)
	quota := func(n int) { site.app = fmt.Sprintf("quota {\n open_executions %d\n}", n) }
	refused := func(gateway *procGateway, when string) {
		t.Helper()
		if a := gateway.retry(t, procCall{id: "refused"}); a.status != http.StatusTooManyRequests || a.problem() != "quota-exceeded" {
			t.Errorf("%s: %v", when, a)
		}
		other := procCall{id: when, header: map[string]string{"Authorization": "Bearer another"}}
		if a := gateway.retry(t, other); !a.executed() {
			t.Errorf("%s: another caller: %v", when, a)
		}
	}
	quota(2)
	gateway := site.start(t)
	doubt := func(id string) {
		t.Helper()
		upstream.script(id, func(http.ResponseWriter, *http.Request, int) { panic(http.ErrAbortHandler) })
		wantProcDoubt(t, gateway.retry(t, procCall{id: id}))
	}
	doubt("1")
	hold := upstream.hold(t, "2") // open when the process dies: in doubt afterwards
	lost := gateway.begin(t.Context(), procDial(), procCall{id: "2"})
	waitWithin(t, procBound, hold.arrived, "arrival")
	refused(gateway, "running")
	gateway.kill()
	waitWithin(t, procBound, lost, "the call ends")
	hold.open()
	gateway = site.start(t)
	refused(gateway, "killed")
	gateway.end(t)
	gateway = site.start(t)
	refused(gateway, "restarted")

	quota(3)
	gateway.reload(t)
	doubt("3")
	refused(gateway, "raised")
	site.app = ""
	gateway.reload(t)
	doubt("4")
	quota(4)
	gateway.reload(t)
	refused(gateway, "set-again")
	if got := upstream.arrivals("refused"); got != 0 {
		t.Errorf("%d refused calls were sent", got)
	}
	quota(5)
	gateway.reload(t)
	if a := gateway.retry(t, procCall{id: "refused"}); !a.executed() {
		t.Errorf("with room: %v", a)
	}
	gateway.end(t)
}
