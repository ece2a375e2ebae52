package e2e

import (
	"fmt"
	"maps"
	"net/http"
	"testing"
)

// questions are all ways to ask after the id k.
var questions = []string{"k", "k?wait=10s", "k?method=POST&path=/x", "k/output", "k/output?wait=10s"}

// asked asks all questions and returns what a client sees of the answers.
func (g *gateway) asked(r request) []string {
	g.t.Helper()
	var seen []string
	for _, question := range questions {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			r := r
			r.method, r.path = method, executionsPath+question
			got := g.call(r)
			h := maps.Clone(got.header)
			delete(h, "Date")
			seen = append(seen, fmt.Sprint(method, " ", question, ": ", got.status, h, got.body))
		}
	}
	return seen
}

// same checks that nobody can tell the answers apart.
func same(t *testing.T, who string, none, other []string) {
	t.Helper()
	for i := range none {
		if none[i] != other[i] {
			t.Errorf("%s can tell that it exists:\n%s\n%s", who, none[i], other[i])
		}
	}
}

// P3: each identity finds its own executions by their id, running and settled; for
// every other one they do not exist, in any part of the answer.
func TestP3ExecutionsAreTheirCallers(t *testing.T) {
	callers := map[string]headers{
		"api key": {"X-Api-Key": "ann"}, "other api key": {"X-Api-Key": "bob"}, "same word, other field": {"Api-Key": "ann"},
		"bearer": {"Authorization": "Bearer ann"}, "two credentials": {"Authorization": "Bearer ann", "X-Api-Key": "ann"},
		"basic": {"Authorization": "Basic YTpi"}, "any field": {"X-Auth-Token": "ann"}, "other in any field": {"X-Auth-Token": "bob"},
	}
	u, hold := newUpstream(t), newGate(t)
	g := start(t, "agent_proxy %s", u.addr)
	u.on("/held", func(http.ResponseWriter, *arrival) { hold.pass() })
	none := map[string][]string{}
	for name, h := range callers {
		none[name] = g.asked(request{header: h})
		if want := "GET k: 404"; none[name][0][:len(want)] != want {
			t.Fatalf("%s", none[name][0])
		}
	}
	nobody := g.asked(request{})
	for name, h := range callers {
		if name == "other in any field" || name == "other api key" {
			continue // these never make a call
		}
		t.Run(name, func(t *testing.T) {
			g.call(request{path: "/x", id: "k", header: h}).want(t, 201, fmt.Sprint("arrival ", u.arrivals("/x")), "executed")
			if e := g.call(asking("k", h)).execution(t, "k"); e.State != "completed" || e.Path != "/x" {
				t.Errorf("%+v", e)
			}
			g.call(asking("k/output", h)).want(t, 201, fmt.Sprint("arrival ", u.arrivals("/x")), "replayed")
			for _, stranger := range []string{"other in any field", "other api key"} {
				same(t, stranger, none[stranger], g.asked(request{header: callers[stranger]}))
			}
			same(t, "nobody", nobody, g.asked(request{}))
		})
	}
	running := g.begin(request{path: "/held", id: "k", header: ann})
	wait(t, hold.arrived, "the call")
	same(t, "a stranger to a running call", none["other in any field"], g.asked(request{header: callers["other in any field"]}))
	hold.open()
	running.answer()
}

// P3: who has no credential is told nothing, of its own calls neither.
func TestP3AnonymousIsToldNothing(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	before := g.asked(request{})
	g.call(request{path: "/x", id: "k"}).want(t, 201, "arrival 1", "executed")
	same(t, "nobody", before, g.asked(request{}))
	for _, question := range questions {
		got := g.call(asking(question, nil))
		got.terminal(t, 401, "authentication-required")
		if v := got.header.Get("WWW-Authenticate"); v != `Bearer realm="executions"` {
			t.Errorf("challenge %q", v)
		}
	}
	got := g.call(asking("k", headers{"Authorization": "DPoP changes"}))
	got.terminal(t, 400, "caller-unstable")

	g = start(t, "agent_proxy %s {\n credentials -Authorization -Proxy-Authorization\n}", u.addr)
	got = g.call(asking("k", headers{"Authorization": "Bearer ignored"}))
	got.terminal(t, 401, "authentication-required")
	if v := got.header.Get("WWW-Authenticate"); v != `ApiKey realm="executions"` {
		t.Errorf("challenge %q", v)
	}
}

// P3: what was recorded by another guard, or for another host, is not shown: callers
// may be named in another way there.
func TestP3ExecutionsStayAtTheirGuardAndHost(t *testing.T) {
	u := newUpstream(t)
	g := start(t, `
	@forged header X-Site two
	handle @forged {
		agent_proxy %[1]s {
			name two
			caller {http.request.header.X-Tenant}
		}
	}
	handle {
		agent_proxy %[1]s {
			name one
			caller {http.request.header.X-Tenant}
		}
	}`, u.addr)
	tenant, forged := headers{"X-Tenant": "t"}, headers{"X-Tenant": "t", "X-Site": "two"}
	here, other := request{header: tenant}, request{header: tenant, host: "other.example"}
	noneThere, noneElsewhere := g.asked(request{header: forged}), g.asked(other)
	g.call(request{path: "/x", id: "k", header: tenant}).want(t, 201, "arrival 1", "executed")
	same(t, "another guard", noneThere, g.asked(request{header: forged}))
	same(t, "another host", noneElsewhere, g.asked(other))
	here.method, here.path = "GET", executionsPath+"k"
	g.call(here).execution(t, "k")

	// Hosts are compared without case, as names are.
	named := request{path: "/y", id: "named", header: tenant, host: "Some.Example"}
	g.call(named).want(t, 201, "arrival 1", "executed")
	ask := asking("named", tenant)
	ask.host = "some.EXAMPLE"
	g.call(ask).execution(t, "named")
}

// P4: without the store nothing can be told, and nothing is.
func TestP4ExecutionsOfABrokenStore(t *testing.T) {
	u := newUpstream(t)
	g := start(t, "agent_proxy %s", u.addr)
	g.call(request{path: "/x", id: "k", header: ann})
	g.store.onGet(func([]byte) error { return errBroken })
	for _, question := range questions {
		g.call(asking(question, ann)).retryable(t, 503, "store-unavailable")
	}
	g.store.onGet(nil)
	g.call(asking("k", ann)).execution(t, "k")
	u.arrived("/x", 1)
}
