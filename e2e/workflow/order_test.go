package workflow

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// A-topological-order-b, -c: with `order par` a call whose token names a call that runs is refused, and nothing of
// it is recorded. It gets through when that is done, and what does not depend on it is not held up.
func TestOrderByParents(t *testing.T) {
	upstream, a, hold := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewGate(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + upstream.Addr + " {\n order par\n}"})
	upstream.On("/slow", func(w http.ResponseWriter, _ *harness.Arrival) { hold.Pass() })
	upstream.On("/fails", harness.Status(http.StatusUnprocessableEntity, ""))
	wid := uuid.NewString()
	in := func(parents ...string) *ect.Token { return a.Issue(ect.Claims{Workflow: wid, Parents: parents}) }
	first := in()
	running := g.Begin(harness.With(first, harness.Request{Path: "/slow"}))
	harness.Wait(t, hold.Arrived, "the first call")

	type refusal struct {
		Reason       string
		Dependencies []problem.Dependency
	}
	read := func(got harness.Reply) (doc refusal) {
		t.Helper()
		got.Problem(t, http.StatusConflict, "dependency-not-done")
		if err := json.Unmarshal([]byte(got.Body), &doc); err != nil {
			t.Fatal(err)
		}
		return doc
	}
	second := in(first.ID())
	for range 2 {
		got := g.Call(harness.With(second, harness.Request{Path: "/pay"}))
		doc := read(got)
		if got.Header.Get("Retry-After") == "" || len(doc.Dependencies) != 1 || doc.Dependencies[0].Task != first.ID() || doc.Dependencies[0].State != "running" {
			t.Fatalf("%d %v %s", got.Status, got.Header, got.Body)
		}
	}
	if got := g.Call(harness.With(in(), harness.Request{Path: "/pay"})); got.Status != http.StatusCreated {
		t.Errorf("beside it: %d %s", got.Status, got.Body)
	}
	hold.Open()
	if got := running.Answer(); got.Status != http.StatusOK {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	g.Call(harness.With(second, harness.Request{Path: "/pay"})).Want(t, http.StatusCreated, "arrival 2", "executed")
	g.Call(harness.With(second, harness.Request{Path: "/pay"})).Want(t, http.StatusCreated, "arrival 2", "replayed")

	failed := in()
	g.Call(harness.With(failed, harness.Request{Path: "/fails"}))
	got := g.Call(harness.With(in(failed.ID()), harness.Request{Path: "/pay"}))
	got.Terminal(t, http.StatusConflict, "dependency-not-done")
	if doc := read(got); doc.Reason != "final" || !doc.Dependencies[0].Final || doc.Dependencies[0].State != "failed" {
		t.Errorf("%s", got.Body)
	}
	upstream.Arrived("/pay", 2)
}

// A-topological-order-a, -c: a plan that was put orders the calls of its workflow, with tokens and without; what
// holds a node is named with its state, and nodes that do not depend on each other run side by side.
func TestOrderByPlan(t *testing.T) {
	p := newPlannedGateway(t, "")
	wid, hold := uuid.NewString(), harness.NewGate(t)
	const two = `{"wf_id": "the flow", "nodes": [{"id": "hold", "label": "hold_budget"}, {"id": "mail"}, {"id": "pay"}], "edges": [{"from": "hold", "to": "pay"}, {"from": "mail", "to": "pay"}]}`
	if got := p.put(p.c, wid, two, nil); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	held := func(got harness.Reply, want ...string) {
		t.Helper()
		got.Problem(t, http.StatusConflict, "dependency-not-done")
		var doc struct{ Dependencies []problem.Dependency }
		if err := json.Unmarshal([]byte(got.Body), &doc); err != nil || got.Header.Get("Retry-After") == "" {
			t.Fatalf("%v %v", err, got.Header)
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
	p.upstream.On("/mail", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
	mail := p.Begin(harness.With(p.a.Issue(ect.Claims{Workflow: wid, Action: "mail"}), harness.Request{Path: "/mail"}))
	harness.Wait(t, hold.Arrived, "the mail")
	if got := p.act(p.a, wid, "hold_budget", "/hold", nil); got.Status != http.StatusCreated {
		t.Errorf("side by side: %d %s", got.Status, got.Body)
	}
	held(p.act(p.a, wid, "pay", "/pay", nil), "mail running")
	hold.Open()
	mail.Answer()
	if got := p.act(p.a, wid, "pay", "/pay", nil); got.Status != http.StatusCreated {
		t.Errorf("at last: %d %s", got.Status, got.Body)
	}
	p.upstream.Arrived("/pay", 1)
}

// A-topological-order-b, A-node-states-d: what has failed or was rolled back refuses for good, a call in doubt until it
// is settled.
func TestOrderByPlanAfterFailures(t *testing.T) {
	u, a, c := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "c")
	p := &plannedGateway{t: t, upstream: u, a: a, c: c}
	p.Gateway = harness.Launch(t, harness.Setup{
		App:  harness.Trusting(t, a, c) + "\nrollback {\n coordinators spiffe://example.com/agent/c\n}",
		Site: "agent_proxy " + u.Addr + " {\n action hold {\n match path /hold/*\n compensate POST /undo\n }\n}", Badger: true,
	})
	u.On("/hold/fails", harness.Status(http.StatusUnprocessableEntity, ""))
	u.On("/hold/doubt", harness.Status(http.StatusBadGateway, ""))
	const steps = `{"wf_id": "w", "nodes": [{"id": "hold"}, {"id": "pay"}, {"id": "last"}],
		"edges": [{"from": "hold", "to": "pay"}, {"from": "pay", "to": "last"}]}`
	begin := func() string {
		wid := uuid.NewString()
		if got := p.put(c, wid, steps, nil); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		return wid
	}
	held := func(wid, node, want string) {
		t.Helper()
		got := p.act(a, wid, node, "/"+node, nil)
		got.Problem(t, http.StatusConflict, "dependency-not-done")
		doc := document409(t, got)
		d := doc.Dependencies[0]
		retry := map[bool]string{true: "later", false: "never"}[got.Header.Get("Retry-After") != ""]
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
	s := p.Saga(a)
	s.Wid = undone
	step := p.act(a, undone, "hold", "/hold/x", nil)
	s.Back(harness.RollbackBody{Checkpoint: step.Header.Get("Execution-Checkpoint"), Scope: "single"}).Want(t, "completed")
	held(undone, "pay", "hold rolled_back  true never final")

	u.Arrived("/pay", 0)
}

// document409 is what a refusal says of what holds a call.
func document409(t *testing.T, got harness.Reply) (doc struct {
	Reason       string
	Dependencies []problem.Dependency
}) {
	t.Helper()
	if err := json.Unmarshal([]byte(got.Body), &doc); err != nil || len(doc.Dependencies) == 0 {
		t.Fatalf("%v %s", err, got.Body)
	}
	return doc
}

// A-resource-claim-format-a, A-checkpoint-placement-policy-f, A-circuit-breaker-policy-configuration-a: of a node's needs the
// upstream gets all, its timeout is the call's, and its breaker limits refuse its calls and no others. A GET that
// names its node has a checkpoint.
func TestNeedsOfANode(t *testing.T) {
	u, a, c, hold := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "c"), harness.NewGate(t)
	p := &plannedGateway{t: t, upstream: u, a: a, c: c}
	p.Gateway = harness.Launch(t, harness.Setup{
		App:  harness.Trusting(t, a, c) + "\nrollback {\n coordinators spiffe://example.com/agent/c\n}",
		Site: "agent_proxy " + u.Addr + " {\n" + harness.LongWindow + "}\n}", Badger: true,
	})
	wid := uuid.NewString()
	const needs = `{"wf_id": "w", "nodes": [{"id": "look", "resource_hints": {"priority": "high", "cpu": "0.5", "timeout_s": 600}},
		{"id": "slow", "resource_hints": {"timeout_s": 1}}, {"id": "strict", "constraints": {"atd.circuit_threshold": 0.2}}, {"id": "other"}]}`
	if got := p.put(c, wid, needs, nil); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	wrong := document422(t, p.put(c, uuid.NewString(), strings.Replace(needs, `"high"`, `"urgent"`, 1), nil))
	if text := fmt.Sprint(wrong); !strings.Contains(text, "look resource_hints.priority") {
		t.Errorf("%s", text)
	}
	look := harness.With(a.Issue(ect.Claims{Workflow: wid, Action: "look"}), harness.Request{Method: http.MethodGet, Path: "/report", Header: harness.Headers{"Workflow-Node": "look", "Resource-Hints": "cpu=\"64\""}})
	if got := p.Call(look); got.Header.Get("Execution-Checkpoint") == "" || got.Header.Get("Execution-Status") != "executed" {
		t.Errorf("%d %v", got.Status, got.Header)
	}
	if got := u.Last("/report").Header.Get("Resource-Hints"); got != `priority=high, timeout_s=600, cpu="0.5"` {
		t.Errorf("hints %q", got)
	}
	shown := harness.Document[struct {
		Plan struct {
			Nodes []struct {
				ID        string
				Hints     plan.Hints `json:"resource_hints"`
				Threshold float64    `json:"atd.circuit_threshold"`
			}
		}
	}](t, p.Get(a, "workflows/"+wid)).Plan.Nodes
	if len(shown) != 4 || shown[0].Hints != (plan.Hints{Priority: "high", TimeoutS: 600, CPU: "0.5"}) || shown[1].Hints.TimeoutS != 1 || shown[2].Threshold != 0.2 {
		t.Errorf("%+v", shown)
	}
	u.On("/slow", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
	if got := p.act(a, wid, "slow", "/slow", nil); got.Header.Get("Execution-Status") != "in_doubt" {
		t.Errorf("%d %v %s", got.Status, got.Header, got.Body)
	}
	hold.Open()

	u.On("/down", harness.Status(500, ""))
	for n := range 20 {
		p.Call(harness.Request{Method: "GET", Path: map[bool]string{true: "/down", false: "/up"}[n%3 == 0]})
	}
	p.act(a, wid, "strict", "/strict", nil).RefusedByItself(t, u.Addr, "20%")
	if got := p.act(a, wid, "other", "/other", nil); got.Status != http.StatusCreated {
		t.Errorf("another node: %d %s", got.Status, got.Body)
	}
	u.Arrived("/strict", 0)
}
