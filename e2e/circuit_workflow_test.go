package e2e

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// longWindow keeps what is counted for longer than any test takes.
const longWindow = "breaker {\n window 1h\n"

// asking is a token of a workflow with this member of its extensions.
func (a *agent) asking(wid, member, value string) *ect.Token {
	a.t.Helper()
	return a.issue(ect.Claims{Workflow: wid, Ext: new(ect.ExtBuilder).JSON(ect.Member(member), value)})
}

// failThird makes 20 calls that belong to no workflow, of which six fail.
func (g *gateway) failThird(u *upstream) {
	g.t.Helper()
	u.on("/down", status(500, ""))
	for n := range 20 {
		path := "/up"
		if n%10 > 6 {
			path = "/down"
		}
		g.call(request{method: "GET", path: path})
	}
	if s := circuit(g.t, u.addr); s.State != breaker.Closed || s.Calls < 20 || s.Failures != 6 {
		g.t.Fatalf("%+v", s)
	}
}

// refusedByItself reads an answer as the refusal that its workflow has asked for. The
// limit and the upstream are told to who is verified here; the limit is empty for others.
func (r reply) refusedByItself(t *testing.T, upstream, limit string) {
	t.Helper()
	const refuses = " refuses this caller, and no other, as its tokens or its plan ask for a stricter limit"
	doc := r.retryable(t, 503, "circuit-open")
	ok := doc.Detail == "The circuit breaker of the upstream"+refuses+"."
	if limit != "" {
		ok = strings.HasPrefix(doc.Detail, "The circuit breaker of "+upstream+refuses+": more than "+limit) && strings.HasSuffix(doc.Detail, ": status 500.")
	}
	if !ok || doc.Reason != "workflow_threshold" || doc.ErrorType != "circuit_open" || r.header.Get("Execution-Status") != "refused" {
		t.Errorf("%q, %q, %q, want the limit %q", doc.Detail, doc.Reason, doc.ErrorType, limit)
	}
	if len(r.header.Get("Retry-After")) > len("3600") {
		t.Errorf("Retry-After %s with a window of an hour", r.header.Get("Retry-After"))
	}
}

// ATD "Circuit Breaker Policy Configuration": an upstream that fails for 30 % is closed to
// an agent that allows 20 % in a workflow, for its later calls there too, and to no other.
// The refused call's key is free, what is recorded is replayed, and nothing is claimed.
func TestWorkflowsOwnThreshold(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n" + longWindow + "}\n}"})
	strict, other := uuid.NewString(), uuid.NewString()
	first := a.asking(strict, "atd.circuit_threshold", "0.2")
	g.call(with(first, request{path: "/a"})).want(t, 201, "arrival 1", "executed")
	g.failThird(u)

	next := a.issue(ect.Claims{Workflow: strict})
	for range 2 {
		g.call(with(next, request{path: "/b"})).refusedByItself(t, u.addr, "20% of the calls in 1h0m0s")
	}
	g.call(with(a.issue(ect.Claims{Workflow: strict}), request{method: "GET", path: "/b"})).refusedByItself(t, u.addr, "20%")
	u.arrived("/b", 0)
	g.call(with(first, request{path: "/a"})).want(t, 201, "arrival 1", "replayed")

	g.call(with(a.issue(ect.Claims{Workflow: other}), request{path: "/c"})).want(t, 201, "arrival 1", "executed")
	g.call(request{path: "/c", id: "k2", header: headers{"Workflow-Id": other}}).want(t, 201, "arrival 2", "executed")
	g.call(request{path: "/c", id: "k3"}).want(t, 201, "arrival 3", "executed")
	// Who only names the workflow is not the agent that has asked.
	g.call(request{path: "/c", id: "k4", header: headers{"Workflow-Id": strict}}).want(t, 201, "arrival 4", "executed")
	if s := circuit(t, u.addr); s.State != breaker.Closed || s.Generation != 1 || s.Rejected != 1 { // what the guard refuses never comes to it
		t.Errorf("%+v", s)
	}

	for range 15 { // the upstream is better again
		g.call(request{method: "GET", path: "/up"})
	}
	g.call(with(next, request{path: "/b"})).want(t, 201, "arrival 1", "executed")
	g.call(with(next, request{path: "/b"})).want(t, 201, "arrival 1", "replayed")
}

// Only who has a token of a workflow is held to more in it, and the strictest value counts.
func TestWhoMakesAWorkflowStricter(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n" + longWindow + "}\n}"})
	g.failThird(u)
	named, stated := uuid.NewString(), uuid.NewString()
	// A token of no workflow is for its own call, whatever a header names.
	r := request{path: "/a", id: "a", header: headers{"Workflow-Id": named}}
	g.call(with(a.asking("", "atd.circuit_threshold", "0.2"), r)).refusedByItself(t, u.addr, "20%")
	g.call(request{path: "/a", id: "b", header: headers{"Workflow-Id": named}}).want(t, 201, "arrival 1", "executed")

	for _, step := range []struct{ value, limit string }{{"0.25", "25%"}, {"0.9", "25%"}, {"0.15", "15%"}, {"0.2", "15%"}} {
		g.call(with(a.asking(stated, "atd.circuit_threshold", step.value), request{path: "/b"})).refusedByItself(t, u.addr, step.limit)
	}
	// Whose a call is, its token says before a header.
	for _, method := range []string{"POST", "GET"} {
		r = request{method: method, path: "/c", header: headers{"Workflow-Id": stated}}
		if got := g.call(with(a.issue(ect.Claims{Workflow: uuid.NewString()}), r)); got.status == 503 {
			t.Errorf("%s of another workflow: %s", method, got.body)
		}
	}
	// Of several tokens of one call, the strictest.
	parent := a.asking(named, "atd.circuit_threshold", "0.22")
	child := a.issue(ect.Claims{Workflow: named, Parents: []string{parent.ID()}, Ext: new(ect.ExtBuilder).Number("atd.circuit_threshold", 0.28)})
	r = with(child, request{path: "/b"})
	r.header[ect.FieldName] = parent.Raw() + ", " + child.Raw()
	g.call(r).refusedByItself(t, u.addr, "22%")
	u.arrived("/b", 0)
}

// An agent cannot make the calls of another one stricter, whatever workflow its tokens
// name and whatever it has got recorded there. Each sees what holds for itself.
func TestNobodyMakesOthersStricter(t *testing.T) {
	u, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	u.on("/down", status(500, ""))
	g := launch(t, setup{app: trusting(t, a, b), badger: true, site: "agent_proxy " + u.addr + " {\n" + longWindow + "}\n}"})
	wid := uuid.NewString()
	g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/up"})).want(t, 201, "arrival 1", "executed")
	// b writes into the workflow, and follows from what it has written.
	root := b.issue(ect.Claims{Workflow: wid})
	g.call(with(root, request{path: "/root"})).want(t, 201, "arrival 1", "executed")
	for range 14 {
		g.call(request{method: "GET", path: "/up"})
	}
	for range 6 {
		g.call(request{method: "GET", path: "/down"})
	}
	ask := new(ect.ExtBuilder).Number("atd.circuit_threshold", 0.1)
	for _, method := range []string{"GET", "POST"} {
		for _, parents := range [][]string{{root.ID()}, nil} {
			token := b.issue(ect.Claims{Workflow: wid, Parents: parents, Ext: ask})
			g.call(with(token, request{method: method, path: "/b"})).refusedByItself(t, u.addr, "10%")
		}
	}
	g.call(with(b.issue(ect.Claims{Workflow: wid}), request{path: "/b"})).refusedByItself(t, u.addr, "10%")
	for _, method := range []string{"POST", "GET"} {
		next := a.issue(ect.Claims{Workflow: wid, Parents: []string{root.ID()}}) // with which a sees what b was told
		if got := g.call(with(next, request{method: method, path: "/a"})); got.status != 201 {
			t.Errorf("%s of a: %d %s", method, got.status, got.body)
		}
	}
	// Token, checkpoint and node of two calls, and the rejection.
	g.settledView(b, wid, 7)
	for who, want := range map[*agent]float64{a: 0, b: 0.1} {
		seen := document[circuitsView](t, g.get(who, "circuits?wid="+wid))
		if len(seen.Circuits) != 1 || seen.Circuits[0].WorkflowThreshold != want {
			t.Errorf("%s sees %+v, want %v", who.issuer.Identity(), seen, want)
		}
	}
}

// Upstreams that are known only with the call: the transport asks, and the key is
// released.
func TestWorkflowThresholdOfADynamicUpstream(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	_, port, _ := net.SplitHostPort(u.addr)
	g := launch(t, setup{app: trusting(t, a), badger: true, site: fmt.Sprintf(`agent_proxy {
		dynamic a {
			name localhost
			port %s
			versions ipv4
		}
		%s
		}
	}`, port, longWindow)})
	g.failThird(u)
	token := a.asking(uuid.NewString(), "atd.circuit_threshold", "0.2")
	for range 2 {
		g.call(with(token, request{path: "/a"})).refusedByItself(t, u.addr, "20%")
	}
	u.arrived("/a", 0)
	force(t, u.addr, breaker.ForcedClosed)
	g.call(with(token, request{path: "/a"})).want(t, 201, "arrival 1", "executed")
}

// cascade 3.3.2: the workflow is told that its work is rejected, once, and sees which
// breaker it is and what it has asked of it.
func TestWorkflowThresholdIsToldOnce(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n" + longWindow + "}\n}"})
	wid := uuid.NewString()
	first := a.asking(wid, "atd.circuit_threshold", "0.2")
	g.call(with(first, request{path: "/a"})).want(t, 201, "arrival 1", "executed")
	g.failThird(u)
	for range 5 {
		next := a.issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}})
		g.call(with(next, request{path: "/a"})).refusedByItself(t, u.addr, "20%")
	}
	rejections := 0
	for _, n := range g.settledView(a, wid, 5).Nodes { // two of the call, two of its refusals, and the token
		if n.Event == "circuit_breaker_open" {
			rejections++
		}
	}
	if rejections != 1 {
		t.Errorf("told %d times", rejections)
	}
	seen := document[circuitsView](t, g.get(a, "circuits?wid="+wid))
	if len(seen.Circuits) != 1 || seen.Circuits[0].State != "closed" || seen.Circuits[0].WorkflowThreshold != 0.2 {
		t.Errorf("%+v", seen)
	}
}
