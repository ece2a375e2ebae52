package call

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

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
	callers := map[string]harness.Headers{
		"api key": {"X-Api-Key": "ann"}, "other api key": {"X-Api-Key": "bob"}, "same word, other field": {"Api-Key": "ann"},
		"bearer": {"Authorization": "Bearer ann"}, "two credentials": {"Authorization": "Bearer ann", "X-Api-Key": "ann"},
		"basic": {"Authorization": "Basic YTpi"}, "any field": {"X-Auth-Token": "ann"}, "other in any field": {"X-Auth-Token": "bob"},
	}
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	u.On("/held", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
	none := map[string][]string{}
	for name, h := range callers {
		none[name] = g.Asked(harness.Request{Header: h})
		if want := "GET k: 404"; none[name][0][:len(want)] != want {
			t.Fatalf("%s", none[name][0])
		}
	}
	nobody := g.Asked(harness.Request{})
	for name, h := range callers {
		if name == "other in any field" || name == "other api key" {
			continue // these never make a call
		}
		t.Run(name, func(t *testing.T) {
			g.Call(harness.Request{Path: "/x", Id: "k", Header: h}).Want(t, 201, fmt.Sprint("arrival ", u.Arrivals("/x")), "executed")
			if e := g.Call(asking("k", h)).Execution(t, "k"); e.State != "completed" || e.Path != "/x" {
				t.Errorf("%+v", e)
			}
			g.Call(asking("k/output", h)).Want(t, 201, fmt.Sprint("arrival ", u.Arrivals("/x")), "replayed")
			for _, stranger := range []string{"other in any field", "other api key"} {
				same(t, stranger, none[stranger], g.Asked(harness.Request{Header: callers[stranger]}))
			}
			same(t, "nobody", nobody, g.Asked(harness.Request{}))
		})
	}
	running := g.Begin(harness.Request{Path: "/held", Id: "k", Header: harness.Ann})
	harness.Wait(t, hold.Arrived, "the call")
	same(t, "a stranger to a running call", none["other in any field"], g.Asked(harness.Request{Header: callers["other in any field"]}))
	hold.Open()
	running.Answer()
}

// P3: who has no credential is told nothing, of its own calls neither.
func TestP3AnonymousIsToldNothing(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	before := g.Asked(harness.Request{})
	g.Call(harness.Request{Path: "/x", Id: "k"}).Want(t, 201, "arrival 1", "executed")
	same(t, "nobody", before, g.Asked(harness.Request{}))
	for _, question := range harness.Questions {
		got := g.Call(asking(question, nil))
		got.Terminal(t, 401, "authentication-required")
		if v := got.Header.Get("WWW-Authenticate"); v != `Bearer realm="executions"` {
			t.Errorf("challenge %q", v)
		}
	}
	got := g.Call(asking("k", harness.Headers{"Authorization": "DPoP changes"}))
	got.Terminal(t, 400, "caller-unstable")

	g = harness.Start(t, "agent_proxy %s {\n credentials -Authorization -Proxy-Authorization\n}", u.Addr)
	got = g.Call(asking("k", harness.Headers{"Authorization": "Bearer ignored"}))
	got.Terminal(t, 401, "authentication-required")
	if v := got.Header.Get("WWW-Authenticate"); v != `ApiKey realm="executions"` {
		t.Errorf("challenge %q", v)
	}
}

// P3: what was recorded by another guard, or for another host, is not shown: callers
// may be named in another way there.
func TestP3ExecutionsStayAtTheirGuardAndHost(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, `
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
	}`, u.Addr)
	tenant, forged := harness.Headers{"X-Tenant": "t"}, harness.Headers{"X-Tenant": "t", "X-Site": "two"}
	here, other := harness.Request{Header: tenant}, harness.Request{Header: tenant, Host: "other.example"}
	noneThere, noneElsewhere := g.Asked(harness.Request{Header: forged}), g.Asked(other)
	g.Call(harness.Request{Path: "/x", Id: "k", Header: tenant}).Want(t, 201, "arrival 1", "executed")
	same(t, "another guard", noneThere, g.Asked(harness.Request{Header: forged}))
	same(t, "another host", noneElsewhere, g.Asked(other))
	here.Method, here.Path = "GET", harness.ExecutionsPath+"k"
	g.Call(here).Execution(t, "k")

	// Hosts are compared without case, as names are.
	named := harness.Request{Path: "/y", Id: "named", Header: tenant, Host: "Some.Example"}
	g.Call(named).Want(t, 201, "arrival 1", "executed")
	ask := asking("named", tenant)
	ask.Host = "some.EXAMPLE"
	g.Call(ask).Execution(t, "named")
}

// P4: without the store nothing can be told, and nothing is.
func TestP4ExecutionsOfABrokenStore(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	g.Call(harness.Request{Path: "/x", Id: "k", Header: harness.Ann})
	g.Store.OnGet(func([]byte) error { return harness.ErrBroken })
	for _, question := range harness.Questions {
		g.Call(asking(question, harness.Ann)).Retryable(t, 503, "store-unavailable")
	}
	g.Store.OnGet(nil)
	g.Call(asking("k", harness.Ann)).Execution(t, "k")
	u.Arrived("/x", 1)
}
