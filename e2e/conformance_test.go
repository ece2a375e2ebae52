package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// entry is a token as the ledger shows it to an agent, waited for until it has its place.
func (g *gateway) entry(a *agent, wid, id string) *ect.Unverified {
	g.t.Helper()
	var got reply
	eventually(g.t, id+" stands in the ledger", func() bool {
		got = g.get(a, "ledger/entries?jti="+id+"&wid="+wid)
		return got.status == http.StatusOK
	})
	token, err := ect.ParseInsecure(document[struct{ Token string }](g.t, got).Token)
	if err != nil {
		g.t.Fatalf("%s: %v", id, err)
	}
	return token
}

// events are the tokens of one event in a workflow that has so many nodes, in the order of
// the workflow's page.
func (s *saga) events(nodes int, event ect.Event) (all []*ect.Unverified) {
	s.t.Helper()
	for _, n := range s.g.settledView(s.a, s.wid, nodes).Nodes {
		if n.Event == string(event) {
			all = append(all, s.g.entry(s.a, s.wid, n.JTI))
		}
	}
	return all
}

// follows checks what a token follows from.
func follows(t *testing.T, u *ect.Unverified, parents ...string) {
	t.Helper()
	got := u.Parents()
	slices.Sort(got)
	slices.Sort(parents)
	if !slices.Equal(got, parents) {
		t.Errorf("%s follows from %v, want %v", u.Action(), got, parents)
	}
}

// says checks the members of a token's extensions: all of want are there as they would be
// written in JSON, and those of absent are not.
func says(t *testing.T, u *ect.Unverified, want map[ect.Member]string, absent ...ect.Member) {
	t.Helper()
	for m, value := range want {
		if raw, _ := u.Ext().Raw(m); raw != value {
			t.Errorf("%s says %s = %s, want %s: %s", u.Action(), m, raw, value, u.Payload())
		}
	}
	for _, m := range absent {
		if raw, there := u.Ext().Raw(m); there {
			t.Errorf("%s says %s = %s: %s", u.Action(), m, raw, u.Payload())
		}
	}
}

// quoted is a string in JSON.
func quoted(text string) string { return fmt.Sprintf("%q", text) }

// failingWith is an action's answer that says no.
func failingWith(code int) func(*restCall) {
	return restSays(code, `{"error":"secret-of-the-upstream"}`)
}
