package plan_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Which node a call is: the id that it names, else the id or the label that its action is.
func TestWhich(t *testing.T) {
	d := parse(t, `{"wf_id": "w", "nodes": [{"id": "a", "label": "pay"}, {"id": "b", "label": "mail"}, {"id": "c", "label": "mail"}, {"id": "d", "label": "a"}, {"id": "pay2"}]}`)
	for call, want := range map[[2]string]string{
		{"a", "mail"}: "a", {"", "a"}: "a", {"", "pay"}: "a", {"c", ""}: "c", {"", "pay2"}: "pay2", {"d", "a"}: "d",
		{"", "mail"}: ErrAmbiguousNode.Error(), {"", "other"}: ErrUnknownNode.Error(), {"x", "pay"}: ErrUnknownNode.Error(), {"pay", ""}: ErrUnknownNode.Error(),
		{"", ""}: ErrUnknownNode.Error(),
	} {
		place, err := d.Which(call[0], call[1])
		got := d.Nodes[place].ID
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: %s, want %s", call, got, want)
		}
	}
}

// call is one call of a node in the reference model, which knows what happened to it, and no records.
type call struct {
	node   int
	name   string // of its execution
	begun  int    // how often it was claimed
	base   string // running, done, failed, in doubt, released
	undo   string // of its rollback: requested, or a status
	writes int    // how many records it has
}

func (c *call) checkpoint() string { return fmt.Sprint(c.name, "/c", c.begun) }

// state is ATD's state of the call, by section "Node States".
func (c *call) state() (workflow.State, workflow.Detail) {
	state, detail := map[string]workflow.State{
		"running": workflow.Running, "done": workflow.Done, "failed": workflow.Failed, "in doubt": workflow.Failed, "released": workflow.Failed,
	}[c.base], map[string]workflow.Detail{"in doubt": workflow.DetailInDoubt, "released": workflow.DetailReleased}[c.base]
	switch c.undo {
	case "completed":
		return workflow.RolledBack, ""
	case "escalated":
		return workflow.Escalated, workflow.CompensationRequired
	case "requested":
		detail = workflow.RollbackRequested
	case "failed":
		detail = workflow.RollbackFailed
	case "partial":
		detail = workflow.CompensationRequired
	}
	return state, detail
}

// world is a workflow that follows a plan, or does not: the model, and what a ledger has of it.
type world struct {
	*rand.Rand
	plan    *Descriptor
	calls   []*call
	records []workflow.Record
	live    *Live // gets the records one by one, and of some several at once
	has     int   // how many of the records live has
	// stranger uses the same name for calls of its own, also of the plan's nodes (P3).
	stranger *world
	name     string // of whoever calls
}

// shared is a world beside which a stranger acts.
func shared(r *rand.Rand, d *Descriptor) *world {
	return &world{Rand: r, plan: d, name: "x", stranger: &world{Rand: r, plan: d, name: "y"}}
}

// part is what the caller takes part in, by the live states of now.
func (w *world) part() *Part {
	if w.live == nil {
		w.live, w.has, w.stranger.has = NewLive(), 0, 0
	}
	for _, w2 := range []*world{w, w.stranger} {
		w.live.Add(w2.records[w2.has:]...)
		w2.has = len(w2.records)
	}
	for _, w2 := range []*world{w.stranger, w} {
		p := w.live.Part([]string{w2.name}, nil)
		if w2 == w {
			return p
		}
	}
	return nil
}

func (w *world) record(c *call, r workflow.Record) string {
	c.writes++
	r.Node = w.plan.Nodes[c.node].ID
	r.ID, r.Own, r.Issuer = cmp.Or(r.ID, fmt.Sprint(c.name, "/", c.writes)), r.Issuer == "", cmp.Or(r.Issuer, "gateway")
	if r.Own {
		r.By = w.name
	}
	r.Report = !r.Own
	w.records = append(w.records, r)
	return r.ID
}

// claim records what a claim does: a checkpoint.
func (w *world) claim(c *call) {
	c.begun++
	c.base = "running"
	w.record(c, workflow.Record{ID: c.checkpoint(), Event: ect.EventCheckpoint, Execution: c.name, Reversible: true})
}

func (w *world) settle(c *call, outcome workflow.Outcome) {
	id := w.record(c, workflow.Record{Parents: []string{c.checkpoint()}, Action: "act", Execution: c.name, Outcome: outcome})
	c.base = map[workflow.Outcome]string{workflow.Completed: "done", workflow.InDoubt: "in doubt", workflow.Released: "released"}[outcome]
	if outcome == workflow.InDoubt {
		w.record(c, workflow.Record{Parents: []string{id}, Event: ect.EventError, Severity: "error"})
	}
}

// step lets something happen.
func (w *world) step() string {
	if len(w.calls) == 0 || w.IntN(3) == 0 {
		// Also calls that the plan does not allow yet: it may be observed only, or come later.
		c := &call{node: w.IntN(len(w.plan.Nodes)), name: fmt.Sprint(w.name, len(w.calls))}
		w.calls = append(w.calls, c)
		w.claim(c)
		return "begin " + c.name
	}
	return w.happens(w.calls[w.IntN(len(w.calls))])
}

// happens lets something happen to a call.
func (w *world) happens(c *call) string {
	switch {
	case c.undo == "completed" || c.undo == "escalated":
		return "nothing"
	case c.undo == "requested":
		c.undo = []string{"completed", "completed", "failed", "partial", "escalated"}[w.IntN(5)]
		w.record(c, workflow.Record{Event: ect.EventRollbackComplete, CheckpointID: c.checkpoint(), Status: c.undo})
		return c.name + " rollback " + c.undo
	case c.base == "running":
		// A crash leaves it running, until it is found in doubt.
		w.settle(c, []workflow.Outcome{workflow.Completed, workflow.Completed, workflow.Completed, workflow.InDoubt, workflow.Released}[w.IntN(5)])
	case c.base == "released":
		w.claim(c)
	case c.base == "in doubt" && c.undo == "" && w.IntN(2) == 0:
		w.settle(c, []workflow.Outcome{workflow.Completed, workflow.Released}[w.IntN(2)])
	case c.base == "done" && c.undo == "" && w.IntN(3) == 0:
		w.record(c, workflow.Record{Event: ect.EventError, Issuer: "agent", Severity: "error", Parents: []string{c.checkpoint()}, CheckpointID: c.checkpoint()})
		c.base = "failed"
	default:
		c.undo = "requested"
		w.record(c, workflow.Record{Event: ect.EventRollbackStart, CheckpointID: c.checkpoint()})
	}
	return c.name + " " + c.base + " " + c.undo
}

// model says of node i by the definitions, with no regard to cost: its state and possible details, and
// whether it was begun.
func (w *world) model(i int) (state workflow.State, details []workflow.Detail, begun bool) {
	by := map[string][]workflow.Detail{}
	states := map[string]workflow.State{}
	for _, c := range w.calls {
		if c.node != i {
			continue
		}
		s, d := c.state()
		class := string(s)
		switch {
		case s == workflow.Failed && (d == workflow.DetailInDoubt || d == workflow.DetailReleased):
			class = string(d)
		case s == workflow.Done && d != "":
			class = "to be undone"
		}
		by[class], states[class] = append(by[class], d), s
	}
	// Of what left something, the worst; then what left nothing.
	for _, class := range []string{"escalated", "failed", "in_doubt", "running", "to be undone", "done", "rolled_back"} {
		if len(by[class]) > 0 {
			return states[class], by[class], true
		}
	}
	if len(by["released"]) > 0 {
		return workflow.Failed, by["released"], false
	}
	return workflow.Pending, []workflow.Detail{""}, false
}

// final says of node i whether it will never be done: it ended otherwise, or can never begin.
func (w *world) final(i int) bool {
	state, details, begun := w.model(i)
	if !begun {
		return slices.ContainsFunc(w.plan.Nodes[i].Before, w.final)
	}
	return state == workflow.RolledBack || state == workflow.Failed && details[0] != workflow.DetailInDoubt
}

func (w *world) done(i int) bool {
	state, details, _ := w.model(i)
	return state == workflow.Done && details[0] == ""
}

func (w *world) check(t *testing.T) {
	t.Helper()
	p := w.plan.Progress(workflow.New(w.records))
	part := w.part()
	if len(p.Others) > 0 {
		t.Fatalf("no node of the plan: %v", p.Others)
	}
	tasks := 0
	for i := range w.plan.Nodes {
		got := &p.Nodes[i]
		tasks += len(got.Tasks)
		state, details, begun := w.model(i)
		if got.State != state || !slices.Contains(details, got.Detail) {
			t.Fatalf("node %d is %s %s, want %s %q", i, got.State, got.Detail, state, details)
		}
		var holds []int
		for _, j := range w.plan.Nodes[i].Before {
			if !begun && !w.done(j) {
				holds = append(holds, j)
			}
		}
		if got.Ready != (!begun && len(holds) == 0) || len(got.Holds) != len(holds) {
			t.Fatalf("node %d: ready %v, held by %v; want %v", i, got.Ready, got.Holds, holds)
		}
		live := part.Holds(w.plan, w.plan.Nodes[i].ID, func(string) bool { return false })
		if same := func(a, b Hold) bool { return a.Node == b.Node && a.State == b.State && a.Final == b.Final }; !begun && !slices.EqualFunc(live, got.Holds, same) {
			t.Fatalf("node %d: live it is held by %v, want %v", i, live, got.Holds)
		}
		for k, h := range got.Holds {
			before := &p.Nodes[holds[k]]
			if _, details, _ := w.model(holds[k]); !slices.Contains(details, live[k].Detail) {
				t.Fatalf("node %d: live it is held by %+v, want %q", i, live[k], details)
			}
			if h.Node != before.ID || h.State != before.State || h.Detail != before.Detail || h.Final != w.final(holds[k]) {
				t.Fatalf("node %d is held by %+v, want node %d (for good: %v)", i, h, holds[k], w.final(holds[k]))
			}
		}
	}
	if tasks != len(w.calls) {
		t.Fatalf("%d tasks of %d calls", tasks, len(w.calls))
	}
	if want := w.ending(); p.Status != want {
		t.Fatalf("the workflow is %q, want %q", p.Status, want)
	}
}

// stuck says of node i, which was not begun, whether it begins only if somebody decides, or never.
func (w *world) stuck(i int) bool {
	return w.final(i) || slices.ContainsFunc(w.plan.Nodes[i].Before, func(j int) bool {
		state, details, begun := w.model(j)
		undecided := details[0] == workflow.RollbackFailed || details[0] == workflow.CompensationRequired
		return begun && (state == workflow.Escalated || state == workflow.Done && undecided) || !begun && w.stuck(j)
	})
}

// ending is how the workflow has ended, by ATD's words: when all leaves are done, or nothing goes on.
func (w *world) ending() workflow.Status {
	over := true
	for i := range w.plan.Nodes {
		inner := slices.ContainsFunc(w.plan.Nodes, func(n Node) bool { return slices.Contains(n.Before, i) })
		over = over && (inner || w.done(i))
	}
	for _, c := range w.calls {
		if s, d := c.state(); s == workflow.Running || d == workflow.DetailInDoubt || d == workflow.RollbackRequested {
			return workflow.StatusRunning
		}
	}
	n := map[string]int{}
	for i := range w.plan.Nodes {
		switch state, _, begun := w.model(i); {
		case !begun && (over || w.stuck(i)):
			n["missing"]++
		case !begun:
			return workflow.StatusRunning
		default:
			n[string(state)]++
		}
	}
	switch lost := n["failed"] + n["rolled_back"] + n["missing"]; {
	case n["escalated"] > 0:
		return "escalated"
	case lost == 0:
		return "success"
	case n["done"] > 0:
		return "partial"
	case n["failed"] > 0 || n["rolled_back"] == 0:
		return "failed"
	}
	return "rolled_back"
}

// A-topological-order-a, -b, A-node-states: whatever happens in whatever order, with crashes, doubts
// and rollbacks, the states, the ready set and what holds each node are those of the definitions.
func TestProgressIsThatOfTheModel(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 17))
		w := shared(r, parse(t, string(random(r, 1+r.IntN(9), 1+r.IntN(2)))))
		var steps []string
		w.check(t)
		for range 40 {
			w.stranger.step()
			steps = append(steps, w.step())
			if w.check(t); t.Failed() {
				t.Fatalf("seed %d after %q", seed, steps)
			}
		}
	}
}

// A-topological-order-a, -c: who begins only what is ready reaches every node, in topological order,
// and nodes that do not depend on each other are ready side by side.
func TestReadySetReachesEverything(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 18))
		w := shared(r, parse(t, string(random(r, 2+r.IntN(20), 1+r.IntN(3)))))
		done := map[int]bool{}
		for len(done) < len(w.plan.Nodes) {
			p := w.plan.Progress(workflow.New(w.records))
			var ready []int
			for i := range p.Nodes {
				before := !slices.ContainsFunc(w.plan.Nodes[i].Before, func(j int) bool { return !done[j] })
				if p.Nodes[i].Ready != (before && !done[i]) {
					t.Fatalf("seed %d: node %d ready: %v", seed, i, p.Nodes[i].Ready)
				}
				if p.Nodes[i].Ready {
					ready = append(ready, i)
				}
			}
			for _, i := range ready {
				c := &call{node: i, name: fmt.Sprint(w.name, len(w.calls))}
				w.calls = append(w.calls, c)
				w.claim(c)
				w.settle(c, workflow.Completed)
				done[i] = true
			}
		}
	}
}

// A call that fits no node is named.
func TestOthers(t *testing.T) {
	d := parse(t, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}], "edges": [{"from": "a", "to": "b"}]}`)
	g := workflow.New([]workflow.Record{
		{ID: "1", Action: "a", Issuer: "agent"}, {ID: "2", Action: "other", Issuer: "agent", Parents: []string{"1"}},
	})
	p := d.Progress(g)
	if fmt.Sprintf("%s %s %s %s %v", p.Others, p.Nodes[0].Tasks, p.Nodes[0].State, p.Nodes[1].State, p.Nodes[1].Ready) != "[2] [1] done pending true" {
		t.Errorf("%+v", p)
	}
}

// BenchmarkProgress derives a workflow of 10,000 nodes, half of them done.
func BenchmarkProgress(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 3))
	w := &world{Rand: r, plan: parse(b, string(random(r, MaxNodes, 2)))}
	for _, i := range w.plan.Order()[:MaxNodes/2] {
		c := &call{node: i, name: fmt.Sprint("x", i)}
		w.claim(c)
		w.settle(c, workflow.Completed)
	}
	g := workflow.New(w.records)
	b.ReportAllocs()
	for b.Loop() {
		w.plan.Progress(g)
	}
}
