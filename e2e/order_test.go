package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// A-topological-order-b, -c: with `order par` a call whose token names a call that runs is refused, and nothing of
// it is recorded. It gets through when that is done, and what does not depend on it is not held up.
func TestOrderByParents(t *testing.T) {
	upstream, a, hold := newUpstream(t), newAgent(t, "a"), newGate(t)
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + upstream.addr + " {\n order par\n}"})
	upstream.on("/slow", func(w http.ResponseWriter, _ *arrival) { hold.pass() })
	upstream.on("/fails", status(http.StatusUnprocessableEntity, ""))
	wid := uuid.NewString()
	in := func(parents ...string) *ect.Token { return a.issue(ect.Claims{Workflow: wid, Parents: parents}) }
	first := in()
	running := g.begin(with(first, request{path: "/slow"}))
	wait(t, hold.arrived, "the first call")

	type refusal struct {
		Reason       string
		Dependencies []problem.Dependency
	}
	read := func(got reply) (doc refusal) {
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
	hold.open()
	if got := running.answer(); got.status != http.StatusOK {
		t.Fatalf("%d %s", got.status, got.body)
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
		var doc struct{ Dependencies []problem.Dependency }
		if err := json.Unmarshal([]byte(got.body), &doc); err != nil || got.header.Get("Retry-After") == "" {
			t.Fatalf("%v %v", err, got.header)
		}
		var nodes []string
		for _, d := range doc.Dependencies {
			nodes = append(nodes, d.Node+" "+d.State)
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

// A-topological-order-b, A-node-states-d: what has failed or was rolled back refuses for good, a call in doubt until it
// is settled.
func TestOrderByPlanAfterFailures(t *testing.T) {
	u, a, c := newUpstream(t), newAgent(t, "a"), newAgent(t, "c")
	p := &plannedGateway{t: t, upstream: u, a: a, c: c}
	p.gateway = launch(t, setup{
		app:  trusting(t, a, c) + "\nrollback {\n coordinators spiffe://example.com/agent/c\n}",
		site: "agent_proxy " + u.addr + " {\n action hold {\n match path /hold/*\n compensate POST /undo\n }\n}", badger: true,
	})
	u.on("/hold/fails", status(http.StatusUnprocessableEntity, ""))
	u.on("/hold/doubt", status(http.StatusBadGateway, ""))
	const steps = `{"wf_id": "w", "nodes": [{"id": "hold"}, {"id": "pay"}, {"id": "last"}],
		"edges": [{"from": "hold", "to": "pay"}, {"from": "pay", "to": "last"}]}`
	begin := func() string {
		wid := uuid.NewString()
		if got := p.put(c, wid, steps, nil); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return wid
	}
	held := func(wid, node, want string) {
		t.Helper()
		got := p.act(a, wid, node, "/"+node, nil)
		got.problem(t, http.StatusConflict, "dependency-not-done")
		doc := document409(t, got)
		d := doc.Dependencies[0]
		retry := map[bool]string{true: "later", false: "never"}[got.header.Get("Retry-After") != ""]
		if now := strings.TrimSpace(fmt.Sprintf("%s %s %s %v %s %s", d.Node, d.State, d.Detail, d.Final, retry, doc.Reason)); now != want {
			t.Errorf("%s is held: %q, want %q", node, now, want)
		}
	}
	failed := begin()
	p.act(a, failed, "hold", "/hold/fails", nil)
	held(failed, "pay", "hold failed  true never final")
	held(failed, "last", "pay pending  true never final")

	doubt := begin()
	p.act(a, doubt, "hold", "/hold/doubt", nil)
	held(doubt, "pay", "hold failed in_doubt false later")

	undone := begin()
	s := p.saga(a)
	s.wid = undone
	step := p.act(a, undone, "hold", "/hold/x", nil)
	s.back(rollbackBody{Checkpoint: step.header.Get("Execution-Checkpoint"), Scope: "single"}).want(t, "completed")
	held(undone, "pay", "hold rolled_back  true never final")

	u.arrived("/pay", 0)
}

// document409 is what a refusal says of what holds a call.
func document409(t *testing.T, got reply) (doc struct {
	Reason       string
	Dependencies []problem.Dependency
}) {
	t.Helper()
	if err := json.Unmarshal([]byte(got.body), &doc); err != nil || len(doc.Dependencies) == 0 {
		t.Fatalf("%v %s", err, got.body)
	}
	return doc
}

// A-resource-claim-format-a, A-checkpoint-placement-policy-f, A-circuit-breaker-policy-configuration-a: of a node's needs the
// upstream gets all, its timeout is the call's, and its breaker limits refuse its calls and no others. A GET that
// names its node has a checkpoint.
func TestNeedsOfANode(t *testing.T) {
	u, a, c, hold := newUpstream(t), newAgent(t, "a"), newAgent(t, "c"), newGate(t)
	p := &plannedGateway{t: t, upstream: u, a: a, c: c}
	p.gateway = launch(t, setup{
		app:  trusting(t, a, c) + "\nrollback {\n coordinators spiffe://example.com/agent/c\n}",
		site: "agent_proxy " + u.addr + " {\n" + longWindow + "}\n}", badger: true,
	})
	wid := uuid.NewString()
	const needs = `{"wf_id": "w", "nodes": [{"id": "look", "resource_hints": {"priority": "high", "cpu": "0.5", "timeout_s": 600}},
		{"id": "slow", "resource_hints": {"timeout_s": 1}}, {"id": "strict", "constraints": {"atd.circuit_threshold": 0.2}}, {"id": "other"}]}`
	if got := p.put(c, wid, needs, nil); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	wrong := document422(t, p.put(c, uuid.NewString(), strings.Replace(needs, `"high"`, `"urgent"`, 1), nil))
	if text := fmt.Sprint(wrong); !strings.Contains(text, "look resource_hints.priority") {
		t.Errorf("%s", text)
	}
	look := with(a.issue(ect.Claims{Workflow: wid, Action: "look"}), request{method: http.MethodGet, path: "/report", header: headers{"Workflow-Node": "look", "Resource-Hints": "cpu=\"64\""}})
	if got := p.call(look); got.header.Get("Execution-Checkpoint") == "" || got.header.Get("Execution-Status") != "executed" {
		t.Errorf("%d %v", got.status, got.header)
	}
	if got := u.last("/report").Header.Get("Resource-Hints"); got != `priority=high, timeout_s=600, cpu="0.5"` {
		t.Errorf("hints %q", got)
	}
	shown := document[struct {
		Plan struct {
			Nodes []struct {
				ID        string
				Hints     plan.Hints `json:"resource_hints"`
				Threshold float64    `json:"atd.circuit_threshold"`
			}
		}
	}](t, p.get(a, "workflows/"+wid)).Plan.Nodes
	if len(shown) != 4 || shown[0].Hints != (plan.Hints{Priority: "high", TimeoutS: 600, CPU: "0.5"}) || shown[1].Hints.TimeoutS != 1 || shown[2].Threshold != 0.2 {
		t.Errorf("%+v", shown)
	}
	u.on("/slow", func(http.ResponseWriter, *arrival) { hold.pass() })
	if got := p.act(a, wid, "slow", "/slow", nil); got.header.Get("Execution-Status") != "in_doubt" {
		t.Errorf("%d %v %s", got.status, got.header, got.body)
	}
	hold.open()

	u.on("/down", status(500, ""))
	for n := range 20 {
		p.call(request{method: "GET", path: map[bool]string{true: "/down", false: "/up"}[n%3 == 0]})
	}
	p.act(a, wid, "strict", "/strict", nil).refusedByItself(t, u.addr, "20%")
	if got := p.act(a, wid, "other", "/other", nil); got.status != http.StatusCreated {
		t.Errorf("another node: %d %s", got.status, got.body)
	}
	u.arrived("/strict", 0)
}
