package plan_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// recorded makes nodes of a workflow's graph: how the two packages fit together.
func recorded(g *workflow.Graph) []Node {
	groups := make(map[string]bool)
	for _, e := range g.Edges() {
		groups[e.From] = groups[e.From] || e.Kind == workflow.Contains
	}
	var nodes []Node
	for _, n := range g.Nodes() {
		node := Node{ID: n.ID, Parents: n.Parents, Kind: Event, By: n.Issuer}
		switch {
		case n.Event == "":
			node.Kind, node.Done = Action, n.State == workflow.Done
		case n.Event == workflow.Checkpoint:
			node.Kind, node.State = Checkpoint, Standing
			node.Reversible, node.Expires, node.Guards = n.Reversible, n.Expires, n.Guards
			switch {
			case groups[n.ID]:
				node.Kind = Group
				node.Parents = slices.DeleteFunc(slices.Clone(n.Parents), func(id string) bool { return id == n.ID })
			case n.State == workflow.RolledBack:
				node.State = Undone
			case n.Detail == workflow.DetailReleased:
				node.State = NeverRan
			case n.Own && n.State == workflow.Running:
				node.State = InFlight
			}
		}
		nodes = append(nodes, node)
	}
	return nodes
}

// The nodes of a guarded call as the gateway records them: the agent's action, the
// gateway's checkpoint below it, and the settlement of the call.
func TestFitsGuardedCalls(t *testing.T) {
	task := func(id string, parents ...string) workflow.Record {
		return workflow.Record{ID: id, Parents: parents, Action: "act", Issuer: "agent"}
	}
	claim := func(id, execution string, parents ...string) workflow.Record {
		return workflow.Record{
			ID: id, Parents: parents, Event: workflow.Checkpoint, Action: "checkpoint", Reversible: true,
			Issuer: "gateway", Own: true, Execution: execution,
		}
	}
	settled := func(id, execution string, o workflow.Outcome, parents ...string) workflow.Record {
		return workflow.Record{
			ID: id, Parents: parents, Action: "pay", Outcome: o, Issuer: "gateway", Own: true, Execution: execution,
		}
	}
	g := graph(t, recorded(workflow.New([]workflow.Record{
		task("T1"), claim("C1", "x1", "T1"), settled("S1", "x1", workflow.Completed, "C1", "T1"),
		claim("C2", "x2", "C1"), settled("S2", "x2", workflow.InDoubt, "C2"), // a call within the call
		task("T3", "T1"), claim("C3", "x3", "T3"), settled("S3", "x3", workflow.Released, "C3", "T3"),
		claim("C4", "x4", "T3"), // once more, and under way
		task("T5", "S1"), {ID: "E", Parents: []string{"S1"}, Event: workflow.Error, CheckpointID: "C1"},
		task("T6"), claim("C6", "x6", "T6"), settled("S6", "x6", workflow.Completed, "C6", "T6"),
	}))...)
	p := planned(t, g, "C1", SubDAG)
	wantLevels(t, p, "C4 C3 C2 | C1")
	wantIDs(t, "passed over", p.Passed, "T5")
	for c, want := range map[string]string{"C1": "undo [T1 S1]", "C2": "undo [S2]", "C3": "block [T3 S3]", "C4": "wait [T3]"} {
		if s := steps(t, p)[c]; fmt.Sprint(s.What, " ", s.Actions) != want {
			t.Errorf("%s: %s %v, want %s", c, s.What, s.Actions, want)
		}
	}
	if !g.MayAsk("agent", "C2", Ancestor) || g.MayAsk("other", "C2", Workflow) {
		t.Error("lineage")
	}
}

// A plan undoes at least the checkpoints that the graph's own walk reaches.
func TestFitsTheGraphsWalk(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	for range 200 {
		var records []workflow.Record
		for i := range 60 {
			rec := workflow.Record{ID: fmt.Sprint("r", i), Action: "act", Issuer: "a", Reversible: true}
			if r.IntN(2) == 0 {
				rec.Event = workflow.Checkpoint
			}
			for range r.IntN(3) {
				if i > 0 {
					rec.Parents = append(rec.Parents, fmt.Sprint("r", r.IntN(i)))
				}
			}
			records = append(records, rec)
		}
		wf := workflow.New(records)
		g := graph(t, recorded(wf)...)
		for _, n := range wf.Nodes() {
			if n.Event != workflow.Checkpoint {
				continue
			}
			p := planned(t, g, n.ID, SubDAG)
			all := steps(t, p)
			below, _ := wf.Descendants(n.ID, len(records))
			for _, id := range below {
				node, _ := wf.Node(id)
				if _, there := all[id]; !there && node.Event == workflow.Checkpoint {
					t.Fatalf("%s reaches %s, which is not in %s", n.ID, id, levels(p))
				}
			}
		}
	}
}
