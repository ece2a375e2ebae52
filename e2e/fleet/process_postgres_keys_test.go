//go:build unix

package fleet

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

// ADR 0136, ADR 0132, P1: two gateways on one database, each with its own copy of the key ring. A key that one makes
// seals once the other has it, and the commands say who lacks it; all that was recorded stays a replay. Each publishes
// the signing keys of both, also when one of them rotates, and when that one is gone.
func TestProcessPostgresKeys(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	one, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
	two.Store = strings.Replace(one.Store, "node one", "node two", 1)
	for _, site := range []*harness.ProcSite{one, two} {
		site.App = "keys file " + site.Path("keys") + "\n\t\tidentity " + harness.GatewayIdentity + " {\n\t\t\tkey_file " + site.Path("identity") + "\n\t\t}"
	}
	if _, err := seal.Create(one.Path("keys")); err != nil {
		t.Fatal(err)
	}
	hand := func() {
		t.Helper()
		text, err := os.ReadFile(one.Path("keys"))
		if err == nil {
			err = os.WriteFile(two.Path("keys"), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	hand()
	a, b := one.Start(t), two.Start(t)
	call := func(id string) harness.ProcCall { return harness.ProcCall{Id: id, Host: one.Addr} }
	first := a.Post(t, call("first"))
	harness.WantProcReplay(t, first, b.Post(t, call("first")))

	said := one.Operate(t, "keys", "rotate")
	if out := said.Says(t); !strings.Contains(out, "It is missing at: two.") || !strings.Contains(said.Err, "Copy the key file to the gateways that lack the key") {
		t.Errorf("%s\n%s", out, said.Err)
	}
	if refused := two.Operate(t, "keys", "rotate"); refused.Code == 0 || !strings.Contains(refused.Err, "has a newer key ring") {
		t.Errorf("at the gateway that lacks it: %s%s", refused.Out, refused.Err)
	}
	second := a.Post(t, call("second"))
	harness.WantProcReplay(t, second, b.Post(t, call("second")))
	hand()
	two.Guard = "deadline 50s" // Caddy passes over a configuration that has not changed
	b.Reload(t)
	for _, site := range []*harness.ProcSite{one, two} {
		harness.EventuallyWithin(t, harness.ProcBound, "the key seals, and the rest is sealed anew", func() bool {
			out := site.Operate(t, "keys", "list").Says(t)
			first := site == one // which does that, since it has joined first
			return strings.Contains(out, "2    seals") && strings.Contains(out, "Re-sealing to key 2: done") == first
		})
	}
	third := b.Post(t, call("third"))
	for id, want := range map[string]harness.ProcAnswer{"first": first, "second": second, "third": third} {
		harness.WantProcReplay(t, want, a.Post(t, call(id)))
		harness.WantProcReplay(t, want, b.Post(t, call(id)))
	}

	rotated := one.Identity(t, "rotate").Signs(t)
	var published []string
	harness.EventuallyWithin(t, harness.ProcBound, "the other publishes the new signing key", func() bool {
		_, published = b.Jwks(t)
		return slices.Contains(published, rotated)
	})
	if len(published) != 3 { // one's old and new, and its own
		t.Errorf("published: %v", published)
	}
	a.End(t)
	if _, after := b.Jwks(t); !slices.Equal(after, published) {
		t.Errorf("published once the other is gone: %v of %v; their tokens live", after, published)
	}
}

// P1: the gateways of a new fleet start together, with one key file that nobody has made yet and a database that comes
// later. Each takes calls by itself, and all have one record of them.
func TestProcessPostgresKeyFileOfANewFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := harness.ProcNewUpstream(t)
	one, server, there := harness.PostgresSite(t, upstream)
	if !there {
		return
	}
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	sites := []*harness.ProcSite{one}
	for _, name := range []string{"two", "three", "four"} {
		site := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
		site.Store = strings.Replace(one.Store, "node one", "node "+name, 1)
		site.App = one.App
		sites = append(sites, site)
	}
	var gateways []*harness.ProcGateway
	for _, site := range sites {
		gateways = append(gateways, site.Launch(t))
	}
	for _, g := range gateways {
		if !g.Ready(t) {
			t.Fatalf("a gateway did not start: %v\n%s", g.Err, g.Log.Tail(6000))
		}
	}
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	var first harness.ProcAnswer
	for i, g := range gateways {
		var last harness.ProcAnswer
		harness.EventuallyWithin(t, harness.ProcBound, sites[i].Store+" takes calls", func() bool {
			last = g.Post(t, harness.ProcCall{Id: "first", Host: one.Addr})
			return last.Problem() != "store-unavailable" || g.Log.Says("is reached, and refused")
		})
		if i == 0 {
			first = last
		} else {
			harness.WantProcReplay(t, first, last)
		}
	}
}
