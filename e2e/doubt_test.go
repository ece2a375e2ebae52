package e2e

import (
	"net/http"
	"strings"
	"testing"
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
func doubtful(g *gateway, u *upstream, r request) {
	g.t.Helper()
	u.on(r.path, first(reset))
	if got := g.call(r); got.status != 409 && got.status != 201 {
		g.t.Fatalf("%d %q", got.status, got.body)
	}
	u.arrived(r.path, 1)
}

// `on_unknown probe`: the status URL settles a doubt, either way, or not at all.
func TestProbe(t *testing.T) {
	for _, row := range []struct {
		name, options string
		answer        func(http.ResponseWriter, *arrival)
		check         func(t *testing.T, g *gateway, u *upstream, r request)
	}{
		{"applied", "", status(200, "it is done"), func(t *testing.T, g *gateway, u *upstream, r request) {
			for range 2 { // the second is answered from the record
				doc := g.call(r).terminal(t, 409, "result-unavailable")
				if doc.State != "completed" || *doc.SafeNewKey {
					t.Errorf("%+v", doc)
				}
			}
			u.arrived(r.path, 1)
			u.arrived("/status/k", 1)
		}},
		{"applied, its answer is the result", "use_answer", status(200, "it is done", "X-Found", "yes", "Set-Cookie", "a=b"), func(t *testing.T, g *gateway, u *upstream, r request) {
			for range 2 {
				got := g.call(r)
				got.want(t, 200, "it is done", "replayed")
				if got.header.Get("X-Found") != "yes" || got.header.Get("Set-Cookie") != "" {
					t.Errorf("header %v", got.header)
				}
			}
			u.arrived(r.path, 1)
			u.arrived("/status/k", 1)
		}},
		{"not applied", "", status(404, "no such payment"), func(t *testing.T, g *gateway, u *upstream, r request) {
			g.call(r).want(t, 201, "arrival 2", "executed")
			g.call(r).want(t, 201, "arrival 2", "replayed")
			u.arrived(r.path, 2)
			u.arrived("/status/k", 1)
		}},
		{"neither", "", status(202, "who knows"), stillInDoubt},
		{"lost", "", reset, stillInDoubt},
		{"cut", "", raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"), stillInDoubt},
		{"too large", "", status(200, strings.Repeat("x", 300<<10)), stillInDoubt},
		{"silent", "timeout 1s", func(_ http.ResponseWriter, a *arrival) { <-a.Context().Done() }, stillInDoubt},
	} {
		t.Run(row.name, func(t *testing.T) {
			u := newUpstream(t)
			g := start(t, probing, u.addr, row.options)
			u.on("/status/k", row.answer)
			r := request{path: "/x", id: "k", header: headers{"Authorization": "Bearer secret", "Cookie": "c=d"}}
			doubtful(g, u, r)
			u.arrived("/status/k", 0) // the first call's own answer does not wait for a probe
			row.check(t, g, u, r)
			asked := u.last("/status/k")
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

func stillInDoubt(t *testing.T, g *gateway, u *upstream, r request) {
	t.Helper()
	for range 2 {
		g.call(r).terminal(t, 409, "in-doubt")
	}
	u.arrived(r.path, 1)
	u.arrived("/status/k", 2) // each retry asks anew
}

// Requests of the guard's own do not pass the site's authentication, and are not
// guarded themselves.
func TestProbeGoesPastSiteAuth(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `
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
	reverse_proxy %[1]s`, u.addr)
	u.on("/status", status(404, ""))
	r := request{path: "/x", id: "k", header: headers{"X-Api-Key": "good"}}
	doubtful(g, u, r)
	g.call(r).want(t, 201, "arrival 2", "executed")
	asked := u.last("/status")
	if asked.Header.Get("X-Api-Key") != "" || asked.Header.Get("Execution-Parent") != "" {
		t.Errorf("asked with %v", asked.Header)
	}
	u.arrived("/status", 1)
}

// noRetry checks that an answer tells of the doubt and keeps every SDK from retrying.
func (r reply) noRetry(t *testing.T) {
	t.Helper()
	for name, want := range map[string]string{"Execution-Status": "in_doubt", "X-Should-Retry": "false", "Stripe-Should-Retry": "false"} {
		if got := r.header.Values(name); len(got) != 1 || got[0] != want {
			t.Errorf("%d has %s %q, want %q", r.status, name, got, want)
		}
	}
}
