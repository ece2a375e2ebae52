package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

func init() {
	caddy.RegisterModule(new(early))
	httpcaddyfile.RegisterGlobalOption("e2e_early", func(d *caddyfile.Dispenser, _ any) (any, error) {
		return httpcaddyfile.App{Name: "e2e_early", Value: []byte("{}")}, nil
	})
}

// early is an app that lets requests come to a site before any app has started: Caddy
// starts its apps in no particular order, and the one that listens may be the first.
type early struct{}

// earlyRequests makes the requests.
var earlyRequests atomic.Pointer[func(url string)]

func (*early) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "e2e_early", New: func() caddy.Module { return new(early) }}
}

func (*early) Provision(ctx caddy.Context) error {
	app, err := ctx.App("http")
	if err != nil {
		return err
	}
	for _, site := range app.(*caddyhttp.App).Servers {
		listening := httptest.NewServer(site)
		(*earlyRequests.Load())(listening.URL)
		listening.Close()
	}
	return nil
}

func (*early) Start() error { return nil }
func (*early) Stop() error  { return nil }

// State survives a restart. No request reaches an upstream before the
// state of its breaker is there: calls that change nothing wait for it as others do, also
// where no guard stands before them.
func TestCircuitStateIsThereBeforeAnyRequest(t *testing.T) {
	for name, site := range map[string]string{
		"agent_proxy":         "agent_proxy %s {\n" + tripping + "\n}",
		"behind another site": "handle /a {\n agent_guard\n respond a\n}\nhandle {\n reverse_proxy %s {\n transport agent_guard {\n" + tripping + "\n}\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			u := newUpstream(t)
			s := setup{site: fmt.Sprintf(site, u.addr)}
			g := launch(t, s)
			u.on("/down", status(503, ""))
			for range 2 {
				g.call(request{method: "GET", path: "/down"})
			}
			if got := circuit(t, u.addr); got.State != breaker.Open {
				t.Fatalf("the breaker is %v", got.State)
			}
			stop(t)

			s.store, s.global = g.store, "e2e_early"
			asked := func(url string) {
				testStores.Delete(g.store.path) // so that it cannot be opened
				res, err := http.Get(url + "/early")
				if err != nil || res.StatusCode != 503 && res.StatusCode != 502 {
					t.Errorf("without a store: %v %v", res, err)
				} else if got := read(res); name == "agent_proxy" {
					got.retryable(t, 503, "store-unavailable")
				}
				testStores.Store(g.store.path, g.store)
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
			earlyRequests.Store(&asked)
			g = launch(t, s)
			u.arrived("/early", 0)
			if got := circuit(t, u.addr); got.State != breaker.Open {
				t.Errorf("after the start the breaker is %v", got.State)
			}
			g.call(request{method: "GET", path: "/early"})
			u.arrived("/early", 0)
		})
	}
}
