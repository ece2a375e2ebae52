//go:build unix

package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ECT level L3, ADR 0132: of two gateways on one database, each sends a call on once its token stands in the tree, where
// the other one proves it too; its parents may be in the log of the other one.
func TestProcessFleetLevel3(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, a := newUpstream(t), newAgent(t, "a")
	one, server, there := postgresSite(t, &procUpstream{addr: upstream.addr})
	if !there {
		return
	}
	two := withPostgres(procNewSite(t, upstream.addr), server.DSN())
	two.store = strings.Replace(one.store, "node one", "node two", 1)
	keys := "keys file " + one.path("keys")
	for _, site := range []*procSite{one, two} {
		site.app = keys + "\n" + trusting(t, a) + level3
		site.start(t)
	}
	at := map[*procSite]*gateway{one: one.gateway(t), two: two.gateway(t)}
	wid := uuid.NewString()
	last := a.issue(ect.Claims{Workflow: wid, Action: "plan"})
	chain := []*ect.Token{last}
	fields := last.Raw()
	for n, path := range []string{"/first", "/second", "/third"} {
		here, other := at[one], at[two]
		if n%2 == 1 {
			here, other = other, here
		}
		next := a.issue(ect.Claims{Workflow: wid, Action: path[1:], Parents: []string{last.ID()}})
		chain = append(chain, next)
		proven := append([]*ect.Token(nil), chain...)
		upstream.on(path, func(w http.ResponseWriter, _ *arrival) {
			for _, token := range proven {
				other.proves(a, token)
			}
			w.WriteHeader(http.StatusCreated)
		})
		got := here.call(request{path: path, header: headers{ect.FieldName: next.Raw() + ", " + fields}})
		if got.status != http.StatusCreated || got.header.Get("Execution-Status") != "executed" {
			t.Fatalf("%s: %d %s", path, got.status, got.body)
		}
		last, fields = next, next.Raw()
	}
	// A chain of which nobody has a part is sent on by neither.
	missing := a.issue(ect.Claims{Workflow: wid, Action: "missing"})
	for _, g := range at {
		token := a.issue(ect.Claims{Workflow: wid, Parents: []string{missing.ID()}})
		if got := g.call(with(token, request{path: "/behind"})); got.status < 400 {
			t.Errorf("without its parent: %d %s", got.status, got.body)
		}
	}
	upstream.arrived("/behind", 0)
}
