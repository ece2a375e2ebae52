package e2e

import (
	"encoding/json"
	"net/http"
	"slices"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

// A-topological-order-b, -c: with `order par` a call whose token names a call that runs is refused, and nothing of
// it is recorded. One that waits gets through when that is done, and what does not depend on it is not held up.
func TestOrderByParents(t *testing.T) {
	upstream, a, hold := newUpstream(t), newAgent(t, "a"), newGate(t)
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + upstream.addr + " {\n order par\n action patient {\n match path /patient\n order_wait 1m\n }\n}"})
	upstream.on("/slow", func(w http.ResponseWriter, _ *arrival) { hold.pass() })
	upstream.on("/fails", status(http.StatusUnprocessableEntity, ""))
	wid := uuid.NewString()
	in := func(parents ...string) *ect.Token { return a.issue(ect.Claims{Workflow: wid, Parents: parents}) }
	first := in()
	running := g.begin(with(first, request{path: "/slow"}))
	wait(t, hold.arrived, "the first call")

	type problem struct {
		Reason       string
		Dependencies []api.Dependency
	}
	read := func(got reply) (doc problem) {
		t.Helper()
		got.problem(t, http.StatusConflict, "dependency-not-done")
		if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
			t.Fatal(err)
		}
		return doc
	}
	second := in(first.ID())
	for range 2 {
		got := g.call(with(second, request{path: "/pay"}))
		doc := read(got)
		if got.header.Get("Retry-After") == "" || len(doc.Dependencies) != 1 || doc.Dependencies[0].Task != first.ID() || doc.Dependencies[0].State != "running" {
			t.Fatalf("%d %v %s", got.status, got.header, got.body)
		}
	}
	if got := g.call(with(in(), request{path: "/pay"})); got.status != http.StatusCreated {
		t.Errorf("beside it: %d %s", got.status, got.body)
	}
	patient := g.begin(with(in(first.ID()), request{path: "/patient"}))
	eventually(t, "a call waits for its parent", func() bool { return waiting("guard.ordered") > 0 })
	upstream.arrived("/patient", 0)
	hold.open()
	if got := running.answer(); got.status != http.StatusOK {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if got := patient.answer(); got.status != http.StatusCreated {
		t.Errorf("who waited: %d %s", got.status, got.body)
	}
	g.call(with(second, request{path: "/pay"})).want(t, http.StatusCreated, "arrival 2", "executed")
	g.call(with(second, request{path: "/pay"})).want(t, http.StatusCreated, "arrival 2", "replayed")

	failed := in()
	g.call(with(failed, request{path: "/fails"}))
	got := g.call(with(in(failed.ID()), request{path: "/pay"}))
	got.terminal(t, http.StatusConflict, "dependency-not-done")
	if doc := read(got); doc.Reason != "final" || !doc.Dependencies[0].Final || doc.Dependencies[0].State != "failed" {
		t.Errorf("%s", got.body)
	}
	upstream.arrived("/pay", 2)
}

// A-topological-order-a, -c: a plan that was put orders the calls of its workflow, with tokens and without; what
// holds a node is named with its state, and nodes that do not depend on each other run side by side.
func TestOrderByPlan(t *testing.T) {
	p := newPlannedGateway(t, "")
	wid, hold := uuid.NewString(), newGate(t)
	const two = `{"wf_id": "the flow", "nodes": [{"id": "hold", "label": "hold_budget"}, {"id": "mail"}, {"id": "pay"}], "edges": [{"from": "hold", "to": "pay"}, {"from": "mail", "to": "pay"}]}`
	if got := p.put(p.c, wid, two, nil); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	held := func(got reply, want ...string) {
		t.Helper()
		got.problem(t, http.StatusConflict, "dependency-not-done")
		var doc struct{ Dependencies []api.Dependency }
		if err := json.Unmarshal([]byte(got.body), &doc); err != nil || got.header.Get("Retry-After") == "" {
			t.Fatalf("%v %v", err, got.header)
		}
		var nodes []string
		for _, d := range doc.Dependencies {
			nodes = append(nodes, d.Node+" "+string(d.State))
		}
		if !slices.Equal(nodes, want) {
			t.Errorf("held by %q, want %q", nodes, want)
		}
	}
	held(p.act(p.a, wid, "pay", "/pay", nil), "hold pending", "mail pending")
	p.upstream.on("/mail", func(http.ResponseWriter, *arrival) { hold.pass() })
	mail := p.begin(with(p.a.issue(ect.Claims{Workflow: wid, Action: "mail"}), request{path: "/mail"}))
	wait(t, hold.arrived, "the mail")
	if got := p.act(p.a, wid, "hold_budget", "/hold", nil); got.status != http.StatusCreated {
		t.Errorf("side by side: %d %s", got.status, got.body)
	}
	held(p.act(p.a, wid, "pay", "/pay", nil), "mail running")
	hold.open()
	mail.answer()
	if got := p.act(p.a, wid, "pay", "/pay", nil); got.status != http.StatusCreated {
		t.Errorf("at last: %d %s", got.status, got.body)
	}
	p.upstream.arrived("/pay", 1)
}
