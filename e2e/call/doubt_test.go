package call

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// probing is a site that asks /status about calls in doubt.
const probing = `agent_proxy %s {
	on_unknown probe GET /status/{http.agent_guard.execution_id}?ref={http.agent_guard.execution_id}&fixed=1 {
		header X-Probe {http.agent_guard.action}
		applied 200
		not_applied 404
		%s
	}
}`

// doubtful makes the call to path one in doubt.
func doubtful(g *harness.Gateway, u *harness.Upstream, r harness.Request) {
	g.T.Helper()
	u.On(r.Path, first(harness.Reset))
	if got := g.Call(r); got.Status != 409 && got.Status != 201 {
		g.T.Fatalf("%d %q", got.Status, got.Body)
	}
	u.Arrived(r.Path, 1)
}

// `on_unknown probe`: the status URL settles a doubt, either way, or not at all.
func TestProbe(t *testing.T) {
	for _, row := range []struct {
		name, options string
		answer        func(http.ResponseWriter, *harness.Arrival)
		check         func(t *testing.T, g *harness.Gateway, u *harness.Upstream, r harness.Request)
	}{
		{"applied", "", harness.Status(200, "it is done"), func(t *testing.T, g *harness.Gateway, u *harness.Upstream, r harness.Request) {
			for range 2 { // the second is answered from the record
				doc := g.Call(r).Terminal(t, 409, "result-unavailable")
				if doc.State != "completed" || *doc.SafeNewKey {
					t.Errorf("%+v", doc)
				}
			}
			u.Arrived(r.Path, 1)
			u.Arrived("/status/k", 1)
		}},
		{"applied, its answer is the result", "use_answer", harness.Status(200, "it is done", "X-Found", "yes", "Set-Cookie", "a=b"), func(t *testing.T, g *harness.Gateway, u *harness.Upstream, r harness.Request) {
			for range 2 {
				got := g.Call(r)
				got.Want(t, 200, "it is done", "replayed")
				if got.Header.Get("X-Found") != "yes" || got.Header.Get("Set-Cookie") != "" {
					t.Errorf("header %v", got.Header)
				}
			}
			u.Arrived(r.Path, 1)
			u.Arrived("/status/k", 1)
		}},
		{"not applied", "", harness.Status(404, "no such payment"), func(t *testing.T, g *harness.Gateway, u *harness.Upstream, r harness.Request) {
			g.Call(r).Want(t, 201, "arrival 2", "executed")
			g.Call(r).Want(t, 201, "arrival 2", "replayed")
			u.Arrived(r.Path, 2)
			u.Arrived("/status/k", 1)
		}},
		{"neither", "", harness.Status(202, "who knows"), stillInDoubt},
		{"lost", "", harness.Reset, stillInDoubt},
		{"cut", "", harness.Raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"), stillInDoubt},
		{"too large", "", harness.Status(200, strings.Repeat("x", 300<<10)), stillInDoubt},
		{"silent", "timeout 1s", func(_ http.ResponseWriter, a *harness.Arrival) { <-a.Context().Done() }, stillInDoubt},
	} {
		t.Run(row.name, func(t *testing.T) {
			u := harness.NewUpstream(t)
			g := harness.Start(t, probing, u.Addr, row.options)
			u.On("/status/k", row.answer)
			r := harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"Authorization": "Bearer secret", "Cookie": "c=d"}}
			doubtful(g, u, r)
			u.Arrived("/status/k", 0) // the first call's own answer does not wait for a probe
			row.check(t, g, u, r)
			asked := u.Last("/status/k")
			if asked.RequestURI != "/status/k?ref=k&fixed=1" || asked.Method != "GET" || asked.Header.Get("X-Probe") != "default" {
				t.Errorf("asked %s %s %v", asked.Method, asked.RequestURI, asked.Header)
			}
			for _, name := range []string{"Authorization", "Cookie", "Idempotency-Key", "Execution-Parent"} {
				if v := asked.Header.Get(name); v != "" {
					t.Errorf("the probe has the caller's %s: %q", name, v)
				}
			}
		})
	}
}

func stillInDoubt(t *testing.T, g *harness.Gateway, u *harness.Upstream, r harness.Request) {
	t.Helper()
	for range 2 {
		g.Call(r).Terminal(t, 409, "in-doubt")
	}
	u.Arrived(r.Path, 1)
	u.Arrived("/status/k", 2) // each retry asks anew
}

// Requests of the guard's own do not pass the site's authentication, and are not
// guarded themselves.
func TestProbeGoesPastSiteAuth(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `
	@stranger not header X-Api-Key good
	respond @stranger "stranger" 401
	agent_guard {
		consequential path /status*
		on_unknown probe GET /status?id={http.agent_guard.execution_id} {
			not_applied 404
		}
		upstream {
			reverse_proxy %[1]s
		}
	}
	reverse_proxy %[1]s`, u.Addr)
	u.On("/status", harness.Status(404, ""))
	r := harness.Request{Path: "/x", Id: "k", Header: harness.Headers{"X-Api-Key": "good"}}
	doubtful(g, u, r)
	g.Call(r).Want(t, 201, "arrival 2", "executed")
	asked := u.Last("/status")
	if asked.Header.Get("X-Api-Key") != "" || asked.Header.Get("Execution-Parent") != "" {
		t.Errorf("asked with %v", asked.Header)
	}
	u.Arrived("/status", 1)
}
