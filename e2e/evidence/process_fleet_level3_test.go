//go:build unix

package evidence

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ECT level L3, ADR 0132: of two gateways on one database, each sends a call on once its token stands in the tree, where
// the other one proves it too; its parents may be in the log of the other one.
func TestProcessFleetLevel3(t *testing.T) {
	t.Parallel() // its gateways are processes
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	one, server, there := harness.PostgresSite(t, &harness.ProcUpstream{Addr: upstream.Addr})
	if !there {
		return
	}
	two := harness.WithPostgres(harness.ProcNewSite(t, upstream.Addr), server.DSN())
	two.Store = strings.Replace(one.Store, "node one", "node two", 1)
	keys := "keys file " + one.Path("keys")
	for _, site := range []*harness.ProcSite{one, two} {
		site.App = keys + "\n" + harness.Trusting(t, a) + harness.Level3
		site.Start(t)
	}
	at := map[*harness.ProcSite]*harness.Gateway{one: one.Gateway(t), two: two.Gateway(t)}
	wid := uuid.NewString()
	last := a.Issue(ect.Claims{Workflow: wid, Action: "plan"})
	chain := []*ect.Token{last}
	fields := last.Raw()
	for n, path := range []string{"/first", "/second", "/third"} {
		here, other := at[one], at[two]
		if n%2 == 1 {
			here, other = other, here
		}
		next := a.Issue(ect.Claims{Workflow: wid, Action: path[1:], Parents: []string{last.ID()}})
		chain = append(chain, next)
		proven := append([]*ect.Token(nil), chain...)
		upstream.On(path, func(w http.ResponseWriter, _ *harness.Arrival) {
			for _, token := range proven {
				other.Proves(a, token)
			}
			w.WriteHeader(http.StatusCreated)
		})
		got := here.Call(harness.Request{Path: path, Header: harness.Headers{ect.FieldName: next.Raw() + ", " + fields}})
		if got.Status != http.StatusCreated || got.Header.Get("Execution-Status") != "executed" {
			t.Fatalf("%s: %d %s", path, got.Status, got.Body)
		}
		last, fields = next, next.Raw()
	}
	// A chain of which nobody has a part is sent on by neither.
	missing := a.Issue(ect.Claims{Workflow: wid, Action: "missing"})
	for _, g := range at {
		token := a.Issue(ect.Claims{Workflow: wid, Parents: []string{missing.ID()}})
		if got := g.Call(harness.With(token, harness.Request{Path: "/behind"})); got.Status < 400 {
			t.Errorf("without its parent: %d %s", got.Status, got.Body)
		}
	}
	upstream.Arrived("/behind", 0)
}
