package breaker

import (
	"fmt"
	"net"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Circuit Breaker Policy Configuration": an upstream that fails for 30 % is closed to
// an agent that allows 20 % in a workflow, for its later calls there too, and to no other.
// The refused call's key is free, what is recorded is replayed, and nothing is claimed.
func TestWorkflowsOwnThreshold(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" + harness.LongWindow + "}\n}"})
	strict, other := uuid.NewString(), uuid.NewString()
	first := a.Asking(strict, "atd.circuit_threshold", "0.2")
	g.Call(harness.With(first, harness.Request{Path: "/a"})).Want(t, 201, "arrival 1", "executed")
	g.FailThird(u)

	next := a.Issue(ect.Claims{Workflow: strict})
	for range 2 {
		g.Call(harness.With(next, harness.Request{Path: "/b"})).RefusedByItself(t, u.Addr, "20% of the calls in 1h0m0s")
	}
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: strict}), harness.Request{Method: "GET", Path: "/b"})).RefusedByItself(t, u.Addr, "20%")
	u.Arrived("/b", 0)
	g.Call(harness.With(first, harness.Request{Path: "/a"})).Want(t, 201, "arrival 1", "replayed")

	g.Call(harness.With(a.Issue(ect.Claims{Workflow: other}), harness.Request{Path: "/c"})).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.Request{Path: "/c", Id: "k2", Header: harness.Headers{"Workflow-Id": other}}).Want(t, 201, "arrival 2", "executed")
	g.Call(harness.Request{Path: "/c", Id: "k3"}).Want(t, 201, "arrival 3", "executed")
	// Who only names the workflow is not the agent that has asked.
	g.Call(harness.Request{Path: "/c", Id: "k4", Header: harness.Headers{"Workflow-Id": strict}}).Want(t, 201, "arrival 4", "executed")
	if s := harness.Circuit(t, u.Addr); s.State != breaker.Closed || s.Generation != 1 || s.Rejected != 1 { // what the guard refuses never comes to it
		t.Errorf("%+v", s)
	}

	for range 15 { // the upstream is better again
		g.Call(harness.Request{Method: "GET", Path: "/up"})
	}
	g.Call(harness.With(next, harness.Request{Path: "/b"})).Want(t, 201, "arrival 1", "executed")
	g.Call(harness.With(next, harness.Request{Path: "/b"})).Want(t, 201, "arrival 1", "replayed")
}

// Only who has a token of a workflow is held to more in it, and the strictest value counts.
func TestWhoMakesAWorkflowStricter(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" + harness.LongWindow + "}\n}"})
	g.FailThird(u)
	named, stated := uuid.NewString(), uuid.NewString()
	// A token of no workflow is for its own call, whatever a header names.
	r := harness.Request{Path: "/a", Id: "a", Header: harness.Headers{"Workflow-Id": named}}
	g.Call(harness.With(a.Asking("", "atd.circuit_threshold", "0.2"), r)).RefusedByItself(t, u.Addr, "20%")
	g.Call(harness.Request{Path: "/a", Id: "b", Header: harness.Headers{"Workflow-Id": named}}).Want(t, 201, "arrival 1", "executed")

	for _, step := range []struct{ value, limit string }{{"0.25", "25%"}, {"0.9", "25%"}, {"0.15", "15%"}, {"0.2", "15%"}} {
		g.Call(harness.With(a.Asking(stated, "atd.circuit_threshold", step.value), harness.Request{Path: "/b"})).RefusedByItself(t, u.Addr, step.limit)
	}
	// Whose a call is, its token says before a header.
	for _, method := range []string{"POST", "GET"} {
		r = harness.Request{Method: method, Path: "/c", Header: harness.Headers{"Workflow-Id": stated}}
		if got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: uuid.NewString()}), r)); got.Status == 503 {
			t.Errorf("%s of another workflow: %s", method, got.Body)
		}
	}
	// Of several tokens of one call, the strictest.
	parent := a.Asking(named, "atd.circuit_threshold", "0.22")
	child := a.Issue(ect.Claims{Workflow: named, Parents: []string{parent.ID()}, Ext: new(ect.ExtBuilder).Number("atd.circuit_threshold", 0.28)})
	r = harness.With(child, harness.Request{Path: "/b"})
	r.Header[ect.FieldName] = parent.Raw() + ", " + child.Raw()
	g.Call(r).RefusedByItself(t, u.Addr, "22%")
	u.Arrived("/b", 0)
}

// An agent cannot make the calls of another one stricter, whatever workflow its tokens
// name and whatever it has got recorded there. Each sees what holds for itself.
func TestNobodyMakesOthersStricter(t *testing.T) {
	u, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	u.On("/down", harness.Status(500, ""))
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" + harness.LongWindow + "}\n}"})
	wid := uuid.NewString()
	g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/up"})).Want(t, 201, "arrival 1", "executed")
	// b writes into the workflow, and follows from what it has written.
	root := b.Issue(ect.Claims{Workflow: wid})
	g.Call(harness.With(root, harness.Request{Path: "/root"})).Want(t, 201, "arrival 1", "executed")
	for range 14 {
		g.Call(harness.Request{Method: "GET", Path: "/up"})
	}
	for range 6 {
		g.Call(harness.Request{Method: "GET", Path: "/down"})
	}
	ask := new(ect.ExtBuilder).Number("atd.circuit_threshold", 0.1)
	for _, method := range []string{"GET", "POST"} {
		for _, parents := range [][]string{{root.ID()}, nil} {
			token := b.Issue(ect.Claims{Workflow: wid, Parents: parents, Ext: ask})
			g.Call(harness.With(token, harness.Request{Method: method, Path: "/b"})).RefusedByItself(t, u.Addr, "10%")
		}
	}
	g.Call(harness.With(b.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/b"})).RefusedByItself(t, u.Addr, "10%")
	for _, method := range []string{"POST", "GET"} {
		next := a.Issue(ect.Claims{Workflow: wid, Parents: []string{root.ID()}}) // with which a sees what b was told
		if got := g.Call(harness.With(next, harness.Request{Method: method, Path: "/a"})); got.Status != 201 {
			t.Errorf("%s of a: %d %s", method, got.Status, got.Body)
		}
	}
	// Token, checkpoint and node of two calls, and the rejection.
	g.SettledView(b, wid, 7)
	for who, want := range map[*harness.Agent]float64{a: 0, b: 0.1} {
		seen := harness.Document[harness.CircuitsView](t, g.Get(who, "circuits?wid="+wid))
		if len(seen.Circuits) != 1 || seen.Circuits[0].WorkflowThreshold != want {
			t.Errorf("%s sees %+v, want %v", who.Issuer.Identity(), seen, want)
		}
	}
}

// Upstreams that are known only with the call: the transport asks, and the key is
// released.
func TestWorkflowThresholdOfADynamicUpstream(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	_, port, _ := net.SplitHostPort(u.Addr)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: fmt.Sprintf(`agent_proxy {
		dynamic a {
			name localhost
			port %s
			versions ipv4
		}
		%s
		}
	}`, port, harness.LongWindow)})
	g.FailThird(u)
	token := a.Asking(uuid.NewString(), "atd.circuit_threshold", "0.2")
	for range 2 {
		g.Call(harness.With(token, harness.Request{Path: "/a"})).RefusedByItself(t, u.Addr, "20%")
	}
	u.Arrived("/a", 0)
	harness.Force(t, u.Addr, breaker.ForcedClosed)
	g.Call(harness.With(token, harness.Request{Path: "/a"})).Want(t, 201, "arrival 1", "executed")
}

// cascade 3.3.2: the workflow is told that its work is rejected, once, and sees which
// breaker it is and what it has asked of it.
func TestWorkflowThresholdIsToldOnce(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" + harness.LongWindow + "}\n}"})
	wid := uuid.NewString()
	first := a.Asking(wid, "atd.circuit_threshold", "0.2")
	g.Call(harness.With(first, harness.Request{Path: "/a"})).Want(t, 201, "arrival 1", "executed")
	g.FailThird(u)
	for range 5 {
		next := a.Issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}})
		g.Call(harness.With(next, harness.Request{Path: "/a"})).RefusedByItself(t, u.Addr, "20%")
	}
	rejections := 0
	for _, n := range g.SettledView(a, wid, 5).Nodes { // two of the call, two of its refusals, and the token
		if n.Event == "circuit_breaker_open" {
			rejections++
		}
	}
	if rejections != 1 {
		t.Errorf("told %d times", rejections)
	}
	seen := harness.Document[harness.CircuitsView](t, g.Get(a, "circuits?wid="+wid))
	if len(seen.Circuits) != 1 || seen.Circuits[0].State != "closed" || seen.Circuits[0].WorkflowThreshold != 0.2 {
		t.Errorf("%+v", seen)
	}
}
