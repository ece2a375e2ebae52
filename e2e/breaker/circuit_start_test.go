package breaker

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// State survives a restart. No request reaches an upstream before the
// state of its breaker is there: calls that change nothing wait for it as others do, also
// where no guard stands before them.
func TestCircuitStateIsThereBeforeAnyRequest(t *testing.T) {
	for name, site := range map[string]string{
		"agent_proxy":         "agent_proxy %s {\n" + harness.Tripping + "\n}",
		"behind another site": "handle /a {\n agent_guard\n respond a\n}\nhandle {\n reverse_proxy %s {\n transport agent_guard {\n" + harness.Tripping + "\n}\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			u := harness.NewUpstream(t)
			s := harness.Setup{Site: fmt.Sprintf(site, u.Addr)}
			g := harness.Launch(t, s)
			u.On("/down", harness.Status(503, ""))
			for range 2 {
				g.Call(harness.Request{Method: "GET", Path: "/down"})
			}
			if got := harness.Circuit(t, u.Addr); got.State != breaker.Open {
				t.Fatalf("the breaker is %v", got.State)
			}
			harness.Stop(t)

			s.Store, s.Global = g.Store, "e2e_early"
			asked := func(url string) {
				harness.TestStores.Delete(g.Store.Path) // so that it cannot be opened
				res, err := http.Get(url + "/early")
				if err != nil || res.StatusCode != 503 && res.StatusCode != 502 {
					t.Errorf("without a store: %v %v", res, err)
				} else if got := harness.Read(res); name == "agent_proxy" {
					got.Retryable(t, 503, "store-unavailable")
				}
				harness.TestStores.Store(g.Store.Path, g.Store)
				for _, method := range []string{"GET", "HEAD", "POST"} {
					req, _ := http.NewRequest(method, url+"/early", strings.NewReader(""))
					req.Header.Set("Idempotency-Key", "early")
					res, err := http.DefaultClient.Do(req)
					if err != nil {
						t.Errorf("%s: %v", method, err)
						continue
					}
					body, _ := io.ReadAll(res.Body)
					_ = res.Body.Close()
					if res.StatusCode != 503 && res.StatusCode != 502 {
						t.Errorf("%s before anything has started: %d %q", method, res.StatusCode, body)
					}
				}
			}
			harness.EarlyRequests.Store(&asked)
			g = harness.Launch(t, s)
			u.Arrived("/early", 0)
			if got := harness.Circuit(t, u.Addr); got.State != breaker.Open {
				t.Errorf("after the start the breaker is %v", got.State)
			}
			g.Call(harness.Request{Method: "GET", Path: "/early"})
			u.Arrived("/early", 0)
		})
	}
}
