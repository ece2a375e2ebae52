//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// reports is an agent's error about the call that it got.
func reports(a *agent, wid string, parents, causes []string) *ect.Token {
	return a.issue(ect.Claims{Workflow: wid, Action: "error", Parents: parents, Ext: new(ect.ExtBuilder).
		Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "upstream_cascade").Text(ect.MemberDescription, "it failed").
		Texts(ect.MemberUpstreamErrors, causes)})
}

// relay is an agent that asks the next gateway, with a token that follows from the call that it got. What fails there
// it answers with an error that names that of the gateway, and passes along the errors that it got.
func relay(t *testing.T, a *agent, next *procSite, gateway string) *upstream {
	u := newUpstream(t)
	g := next.gateway(t)
	u.on("/work", func(w http.ResponseWriter, r *arrival) {
		checkpoint := checkpointIn(t, r.Header)
		got := g.call(with(a.issue(ect.Claims{Workflow: checkpoint.Workflow(), Parents: []string{checkpoint.ID()}}), request{path: "/work"}))
		passed, err := ect.ParseFields(got.header[ect.FieldName])
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
			t.Errorf("%s has answered %d, with %d errors of its own", gateway, got.status, len(causes))
		}
		for _, raw := range append(passed, reports(a, checkpoint.Workflow(), []string{checkpoint.ID()}, causes).Raw()) {
			w.Header().Add(ect.FieldName, raw)
		}
		w.WriteHeader(http.StatusInternalServerError)
	})
	return u
}

// checkpointIn is the gateway's token in a call to an agent.
func checkpointIn(t *testing.T, h http.Header) *ect.Unverified {
	raws, _ := ect.ParseFields(h[ect.FieldName])
	for _, raw := range raws {
		if token, err := ect.ParseInsecure(raw); err == nil && token.Event() == ect.EventCheckpoint {
			return token
		}
	}
	t.Error("an agent was called without a checkpoint")
	return new(ect.Unverified)
}

// Issue of containment, A-error-signaling-g, E-error-propagation-via-dag-b: where agents pass along the errors that they
// get, the first of three gateways names a cascade along the whole chain, with the error where it began. What an agent
// only says itself counts nobody but that agent (P3).
func TestProcessCascadeOverGateways(t *testing.T) {
	t.Parallel() // its gateways are processes
	second, failing := newAgent(t, "second"), newAgent(t, "failing")
	c := layStar(t, second, failing)
	for _, a := range []*agent{c.a, second, failing} {
		a.also = []string{starIdentity(1), starIdentity(2)}
	}
	tool := newUpstream(t)
	tool.on("/work", status(http.StatusInternalServerError, ""))
	behind := relay(t, failing, c.sites[2], starIdentity(2))
	front := relay(t, second, c.sites[1], starIdentity(1))
	front.on("/lies", func(w http.ResponseWriter, r *arrival) {
		checkpoint := checkpointIn(t, r.Header)
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
		{front.addr, second.issuer.Identity()}, {behind.addr, failing.issuer.Identity()}, {tool.addr, "spiffe://example.com/agent/tool"},
	} {
		c.before(i, fmt.Sprintf("agent_proxy %s {\n identity %s\n default_undo irreversible\n }", to.addr, to.identity))
	}
	c.begin()
	g := c.sites[0].gateway(t)
	call := func(path string) (wid string) {
		wid = uuid.NewString()
		if got := g.call(with(c.a.issue(ect.Claims{Workflow: wid}), request{path: path})); got.status != http.StatusInternalServerError {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return wid
	}
	lied, wid := call("/lies"), call("/work")
	var found []api.Cascade
	eventually(t, "the first gateway finds the cascade", func() bool {
		found = document[api.CascadeList](t, g.get(c.a, "cascades?wid="+wid)).Cascades
		return len(found) == 1
	})
	part := found[0].Workflows[0]
	want := []string{failing.issuer.Identity(), second.issuer.Identity(), starIdentity(2)}
	slices.Sort(want)
	if found[0].Pattern != "depth_first" || !slices.Equal(part.Failed, want) || found[0].Root == nil || found[0].Root.Agent != starIdentity(2) ||
		!slices.Contains(found[0].Root.Reasons, "named_by_errors") || len(part.Alerts) != 1 {
		t.Errorf("%+v %+v", found[0], found[0].Root)
	}
	// The root is in the ledger of the first gateway, as the last one has signed it.
	if root := g.entry(c.a, wid, found[0].Root.Error); root.Issuer() != starIdentity(2) || root.Event() != ect.EventError {
		t.Errorf("%s", root.Payload())
	}
	if all := document[api.CascadeList](t, g.get(c.a, "cascades?wid="+lied)).Cascades; len(all) != 0 {
		t.Errorf("one agent alone makes a cascade: %+v", all)
	}
	if n := tool.arrivals("/work"); n != 1 {
		t.Errorf("the tool was called %d times", n)
	}
}
