//go:build unix

package contain

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// reports is an agent's error about the call that it got.
func reports(a *harness.Agent, wid string, parents, causes []string) *ect.Token {
	return a.Issue(ect.Claims{Workflow: wid, Action: "error", Parents: parents, Ext: new(ect.ExtBuilder).
		Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "upstream_cascade").Text(ect.MemberDescription, "it failed").
		Texts(ect.MemberUpstreamErrors, causes)})
}

// relay is an agent that asks the next gateway, with a token that follows from the call that it got. What fails there
// it answers with an error that names that of the gateway, and passes along the errors that it got.
func relay(t *testing.T, a *harness.Agent, next *harness.ProcSite, gateway string) *harness.Upstream {
	u := harness.NewUpstream(t)
	g := next.Gateway(t)
	u.On("/work", func(w http.ResponseWriter, r *harness.Arrival) {
		checkpoint := harness.CheckpointIn(t, r.Header)
		got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: checkpoint.Workflow(), Parents: []string{checkpoint.ID()}}), harness.Request{Path: "/work"}))
		passed, err := ect.ParseFields(got.Header[ect.FieldName])
		if err != nil {
			t.Error(err)
		}
		var causes []string
		for _, raw := range passed {
			if token, err := ect.ParseInsecure(raw); err == nil && token.Issuer() == gateway {
				causes = append(causes, token.ID())
			}
		}
		if len(causes) != 1 {
			t.Errorf("%s has answered %d, with %d errors of its own", gateway, got.Status, len(causes))
		}
		for _, raw := range append(passed, reports(a, checkpoint.Workflow(), []string{checkpoint.ID()}, causes).Raw()) {
			w.Header().Add(ect.FieldName, raw)
		}
		w.WriteHeader(http.StatusInternalServerError)
	})
	return u
}

// Issue of containment, A-error-signaling-g, E-error-propagation-via-dag-b: where agents pass along the errors that they
// get, the first of three gateways names a cascade along the whole chain, with the error where it began. What an agent
// only says itself counts nobody but that agent (P3).
func TestProcessCascadeOverGateways(t *testing.T) {
	t.Parallel() // its gateways are processes
	second, failing := harness.NewAgent(t, "second"), harness.NewAgent(t, "failing")
	c := harness.LayStar(t, second, failing)
	for _, a := range []*harness.Agent{c.A, second, failing} {
		a.Also = []string{harness.StarIdentity(1), harness.StarIdentity(2)}
	}
	tool := harness.NewUpstream(t)
	tool.On("/work", harness.Status(http.StatusInternalServerError, ""))
	behind := relay(t, failing, c.Sites[2], harness.StarIdentity(2))
	front := relay(t, second, c.Sites[1], harness.StarIdentity(1))
	front.On("/lies", func(w http.ResponseWriter, r *harness.Arrival) {
		checkpoint := harness.CheckpointIn(t, r.Header)
		var causes []string
		for range 3 {
			lie := reports(second, checkpoint.Workflow(), []string{uuid.NewString()}, nil)
			causes = append(causes, lie.ID())
			w.Header().Add(ect.FieldName, lie.Raw())
		}
		w.Header().Add(ect.FieldName, reports(second, checkpoint.Workflow(), []string{checkpoint.ID()}, causes).Raw())
		w.WriteHeader(http.StatusInternalServerError)
	})
	for i, to := range []struct{ addr, identity string }{
		{front.Addr, second.Issuer.Identity()}, {behind.Addr, failing.Issuer.Identity()}, {tool.Addr, "spiffe://example.com/agent/tool"},
	} {
		c.Before(i, fmt.Sprintf("agent_proxy %s {\n identity %s\n default_undo irreversible\n }", to.addr, to.identity))
	}
	c.Begin()
	g := c.Sites[0].Gateway(t)
	call := func(path string) (wid string) {
		wid = uuid.NewString()
		if got := g.Call(harness.With(c.A.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: path})); got.Status != http.StatusInternalServerError {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		return wid
	}
	lied, wid := call("/lies"), call("/work")
	var found []api.Cascade
	harness.Eventually(t, "the first gateway finds the cascade", func() bool {
		found = harness.Document[api.CascadeList](t, g.Get(c.A, "cascades?wid="+wid)).Cascades
		return len(found) == 1
	})
	part := found[0].Workflows[0]
	want := []string{failing.Issuer.Identity(), second.Issuer.Identity(), harness.StarIdentity(2)}
	slices.Sort(want)
	if found[0].Pattern != "depth_first" || !slices.Equal(part.Failed, want) || found[0].Root == nil || found[0].Root.Agent != harness.StarIdentity(2) ||
		!slices.Contains(found[0].Root.Reasons, "named_by_errors") || len(part.Alerts) != 1 {
		t.Errorf("%+v %+v", found[0], found[0].Root)
	}
	// The root is in the ledger of the first gateway, as the last one has signed it.
	if root := g.Entry(c.A, wid, found[0].Root.Error); root.Issuer() != harness.StarIdentity(2) || root.Event() != ect.EventError {
		t.Errorf("%s", root.Payload())
	}
	if all := harness.Document[api.CascadeList](t, g.Get(c.A, "cascades?wid="+lied)).Cascades; len(all) != 0 {
		t.Errorf("one agent alone makes a cascade: %+v", all)
	}
	if n := tool.Arrivals("/work"); n != 1 {
		t.Errorf("the tool was called %d times", n)
	}
}
