//go:build unix

package e2e

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

// ADR 0136, ADR 0132, P1: two gateways on one database, each with its own copy of the key ring. A key that one makes
// seals once the other has it, and the commands say who lacks it; all that was recorded stays a replay. Each publishes
// the signing keys of both, also when one of them rotates, and when that one is gone.
func TestProcessPostgresKeys(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	one, server, there := postgresSite(t, upstream)
	if !there {
		return
	}
	two := withPostgres(procNewSite(t, upstream.addr), server.DSN())
	two.store = strings.Replace(one.store, "node one", "node two", 1)
	for _, site := range []*procSite{one, two} {
		site.app = "keys file " + site.path("keys") + "\n\t\tidentity " + gatewayIdentity + " {\n\t\t\tkey_file " + site.path("identity") + "\n\t\t}"
	}
	if _, err := seal.Create(one.path("keys")); err != nil {
		t.Fatal(err)
	}
	hand := func() {
		t.Helper()
		text, err := os.ReadFile(one.path("keys"))
		if err == nil {
			err = os.WriteFile(two.path("keys"), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	hand()
	a, b := one.start(t), two.start(t)
	call := func(id string) procCall { return procCall{id: id, host: one.addr} }
	first := a.post(t, call("first"))
	wantProcReplay(t, first, b.post(t, call("first")))

	said := one.operate(t, "keys", "rotate")
	if out := said.says(t); !strings.Contains(out, "It is missing at: two.") || !strings.Contains(said.err, "Copy the key file to the gateways that lack the key") {
		t.Errorf("%s\n%s", out, said.err)
	}
	if refused := two.operate(t, "keys", "rotate"); refused.code == 0 || !strings.Contains(refused.err, "has a newer key ring") {
		t.Errorf("at the gateway that lacks it: %s%s", refused.out, refused.err)
	}
	second := a.post(t, call("second"))
	wantProcReplay(t, second, b.post(t, call("second")))
	hand()
	two.guard = "deadline 50s" // Caddy passes over a configuration that has not changed
	b.reload(t)
	for _, site := range []*procSite{one, two} {
		eventuallyWithin(t, procBound, "the key seals, and the rest is sealed anew", func() bool {
			out := site.operate(t, "keys", "list").says(t)
			first := site == one // which does that, since it has joined first
			return strings.Contains(out, "2    seals") && strings.Contains(out, "Re-sealing to key 2: done") == first
		})
	}
	third := b.post(t, call("third"))
	for id, want := range map[string]procAnswer{"first": first, "second": second, "third": third} {
		wantProcReplay(t, want, a.post(t, call(id)))
		wantProcReplay(t, want, b.post(t, call(id)))
	}

	rotated := one.identity(t, "rotate").signs(t)
	var published []string
	eventuallyWithin(t, procBound, "the other publishes the new signing key", func() bool {
		_, published = b.jwks(t)
		return slices.Contains(published, rotated)
	})
	if len(published) != 3 { // one's old and new, and its own
		t.Errorf("published: %v", published)
	}
	a.end(t)
	if _, after := b.jwks(t); !slices.Equal(after, published) {
		t.Errorf("published once the other is gone: %v of %v; their tokens live", after, published)
	}
}

// P1: the gateways of a new fleet start together, with one key file that nobody has made yet and a database that comes
// later. Each takes calls by itself, and all have one record of them.
func TestProcessPostgresKeyFileOfANewFleet(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream := procNewUpstream(t)
	one, server, there := postgresSite(t, upstream)
	if !there {
		return
	}
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	sites := []*procSite{one}
	for _, name := range []string{"two", "three", "four"} {
		site := withPostgres(procNewSite(t, upstream.addr), server.DSN())
		site.store = strings.Replace(one.store, "node one", "node "+name, 1)
		site.app = one.app
		sites = append(sites, site)
	}
	var gateways []*procGateway
	for _, site := range sites {
		gateways = append(gateways, site.launch(t))
	}
	for _, g := range gateways {
		if !g.ready(t) {
			t.Fatalf("a gateway did not start: %v\n%s", g.err, g.log.tail(6000))
		}
	}
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	var first procAnswer
	for i, g := range gateways {
		var last procAnswer
		eventuallyWithin(t, procBound, sites[i].store+" takes calls", func() bool {
			last = g.post(t, procCall{id: "first", host: one.addr})
			return last.problem() != "store-unavailable" || g.log.says("is reached, and refused")
		})
		if i == 0 {
			first = last
		} else {
			wantProcReplay(t, first, last)
		}
	}
}
