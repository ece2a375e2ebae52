package rollback_test

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// Node is what a test says of a node. The order in which they stand is that of their records.
type Node struct {
	ID                     string
	Parents, Guards        []string
	Kind                   NodeKind
	By, Execution          string
	BeginsWorkflow, Report bool
	Done, Reversible, Own  bool      // Own: of the gateway itself
	State                  NodeState // of a checkpoint or a group
	Expires                time.Time

	Critical                  bool
	Severity, Priority, Error string // Error is an agent's critical error about it
}

type NodeKind string

const (
	ActionNode     NodeKind = "action"
	CheckpointNode NodeKind = "checkpoint"
	GroupNode      NodeKind = "group"
	EventNode      NodeKind = "event"
)

// known is the node as the graph has it.
func (n *Node) known() workflow.Node {
	k := workflow.Node{Record: workflow.Record{
		ID: n.ID, Parents: n.Parents, By: n.By, Report: n.Report, Execution: n.Execution, Event: "other", Own: n.Own, Issuer: n.By,
		Critical: n.Critical, Severity: n.Severity, Priority: n.Priority,
	}, CriticalError: n.Error}
	switch n.Kind {
	case ActionNode:
		if k.Event = ""; n.Done {
			k.State = workflow.Done
		}
	case CheckpointNode, GroupNode:
		k.Event, k.Group, k.Guards, k.Reversible, k.Expires = ect.EventCheckpoint, n.Kind == GroupNode, n.Guards, n.Reversible, n.Expires
		switch n.State {
		case Undone:
			k.State = workflow.RolledBack
		case NeverRan:
			k.Detail = workflow.DetailReleased
		case InFlight:
			k.Own, k.State = true, workflow.Running
		}
	}
	if n.BeginsWorkflow {
		k.Event = ect.EventWorkflowStart
	}
	return k
}

// Graph is the graph of a workflow, in which the state of a group can be more than what is
// recorded of it.
type Graph struct {
	*workflow.Graph
	workflow string
	states   map[string]NodeState
}

func graphOf(name string, nodes ...Node) *Graph {
	g := &Graph{workflow: name, states: make(map[string]NodeState)}
	known := make([]workflow.Node, len(nodes))
	for i := range nodes {
		known[i] = nodes[i].known()
		if _, twice := g.states[nodes[i].ID]; !twice {
			g.states[nodes[i].ID] = nodes[i].State
		}
	}
	g.Graph = workflow.FromNodes(known)
	return g
}

func (g *Graph) Plan(r PlanInput) (*Plan, error) {
	r.Workflow = g.workflow
	return MakePlan(g.Graph, r, func(n *workflow.Node) (NodeState, error) {
		recorded := RecordedState(n)
		if s := g.states[n.ID]; n.Group {
			return s, nil
		} else if s != "" && s != recorded {
			return recorded, fmt.Errorf("%s is recorded as %s, and is %s", n.ID, recorded, s)
		}
		return recorded, nil
	})
}

func (g *Graph) MayAsk(who, checkpoint string, policy Lineage) bool {
	return MayAsk(g.Graph, who, checkpoint, policy)
}

// act is a completed action.
func act(id string, parents ...string) Node {
	return Node{ID: id, Parents: parents, Kind: ActionNode, Done: true, By: "agent"}
}

func event(id string, parents ...string) Node {
	return Node{ID: id, Parents: parents, Kind: EventNode, By: "agent"}
}

// ckpt is the checkpoint of its parents (cascade 4.2.1).
func ckpt(id string, parents ...string) Node {
	return Node{
		ID: id, Parents: parents, Guards: parents, Kind: CheckpointNode, By: "agent",
		State: Ran, Reversible: true, Expires: now.Add(time.Hour),
	}
}

// before is a checkpoint that is placed before its actions (cascade, Figure 7).
func before(id string, actions []string, parents ...string) Node {
	n := ckpt(id, parents...)
	n.Guards = actions
	return n
}

func group(id string, contained ...string) Node {
	n := ckpt(id, contained...)
	n.Kind, n.Guards = GroupNode, nil
	return n
}

// with changes a node.
func with(n Node, change func(n *Node)) Node {
	change(&n)
	return n
}

func state(n Node, s NodeState) Node { return with(n, func(n *Node) { n.State = s }) }

func graph(t testing.TB, nodes ...Node) *Graph {
	t.Helper()
	return graphOf("w", nodes...)
}

func planRequest(target string, s Scope) PlanInput {
	return PlanInput{Target: target, Scope: s, Coordinator: s == FullWorkflow, Now: now}
}

func planned(t testing.TB, g *Graph, target string, s Scope) *Plan {
	t.Helper()
	p, err := g.Plan(planRequest(target, s))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// levels are the checkpoints of a plan, as in "C3 C2 | C1".
func levels(p *Plan) string {
	var all []string
	for _, level := range p.Levels {
		var ids []string
		for _, s := range level {
			ids = append(ids, s.Checkpoint)
		}
		all = append(all, strings.Join(ids, " "))
	}
	return strings.Join(all, " | ")
}

func wantLevels(t *testing.T, p *Plan, want string) {
	t.Helper()
	if got := levels(p); got != want {
		t.Errorf("levels %q, want %q", got, want)
	}
}

func wantIDs(t *testing.T, what string, got []string, want string) {
	t.Helper()
	if s := strings.Join(got, " "); s != want {
		t.Errorf("%s %q, want %q", what, s, want)
	}
}

// steps are the steps of a plan by their checkpoints.
func steps(t testing.TB, p *Plan) map[string]PlanStep {
	t.Helper()
	all := make(map[string]PlanStep)
	for _, level := range p.Levels {
		if len(level) == 0 {
			t.Error("a level without steps")
		}
		for _, s := range level {
			if _, twice := all[s.Checkpoint]; twice {
				t.Errorf("%s has two steps", s.Checkpoint)
			}
			all[s.Checkpoint] = s
		}
	}
	return all
}

// Cascade 4.1.1, Figure 7: B2, B1, B, A1, A.
func TestCascade411Figure7(t *testing.T) {
	p := planned(t, graph(t,
		before("A", []string{"A1"}), act("A1", "A"),
		before("B", []string{"B1", "B2"}, "A1"), act("B1", "B"), act("B2", "B"),
	), "A", SubDAG)
	var order []string
	for _, level := range p.Levels {
		for _, s := range level {
			order = append(append(order, s.Actions...), s.Checkpoint)
		}
	}
	wantIDs(t, "order", order, "B2 B1 B A1 A")
	wantIDs(t, "passed over", p.Passed, "")
}

// Cascade 4.1.1, Figure 7: siblings come in the reverse of their start. Their ids are
// random, and say nothing of it.
func TestCascade411SiblingsInReverseOfTheirStart(t *testing.T) {
	nodes := []Node{
		act("T"), ckpt("C", "T"), act("a", "T"), ckpt("9", "a"),
		act("z", "T"), ckpt("1", "z"), act("m", "T"), ckpt("5", "m", "a", "z"),
	}
	p := planned(t, graph(t, nodes...), "C", SubDAG)
	wantLevels(t, p, "5 1 9 | C")
	wantIDs(t, "actions", p.Levels[0][0].Actions, "m z a")
	nodes = append(slices.Delete(slices.Clone(nodes), 3, 4), nodes[3])
	if other := planned(t, graph(t, nodes...), "C", SubDAG); other.Hash() == p.Hash() {
		t.Error("another order, and the same hash")
	}
}

// Cascade 4.2.1: a checkpoint stands below its action, and beside what follows from
// that; it is undone after it all the same.
func TestCascade421ConsequencesOfTheAction(t *testing.T) {
	g := graph(t, act("T"), ckpt("C", "T"), act("S", "C", "T"), act("T2", "T"), ckpt("C2", "T2"))
	wantLevels(t, planned(t, g, "C", SubDAG), "C2 | C")
	wantLevels(t, planned(t, g, "C2", SubDAG), "C2")
}

// Cascade 4.1.3: the three scopes. Steps of one level have nothing to do with each
// other, siblings are untouched.
func TestCascade413Scopes(t *testing.T) {
	g := graph(t,
		act("R"), ckpt("CR", "R"),
		act("T1", "R"), ckpt("C1", "T1"), act("T2", "R"), ckpt("C2", "T2"),
		act("T3", "T1"), ckpt("C3", "T3"), act("T4", "T1"), ckpt("C4", "T4"), act("T5", "T4"), ckpt("C5", "T5"),
	)
	single := planned(t, g, "C1", Single)
	wantLevels(t, single, "C1")
	wantIDs(t, "dependants of a single rollback", single.Dependants, "T3 T4 T5")
	if single.Partial() == nil { // whoever asks has to say that they stay
		t.Error("a single rollback leaves what depends on it")
	}
	if err := planned(t, g, "C5", Single).Partial(); err != nil {
		t.Errorf("nothing depends on it: %v", err)
	}
	sub := planned(t, g, "C1", SubDAG)
	wantLevels(t, sub, "C5 C3 | C4 | C1")
	wantIDs(t, "dependants", sub.Dependants, "")
	wantLevels(t, planned(t, g, "C1", FullWorkflow), "C5 C3 C2 | C4 | C1 | CR")
}

// Cascade 4.1.3: all checkpoints, also those of other roots; only a coordinator asks.
func TestCascade413FullWorkflowNeedsCoordinator(t *testing.T) {
	g := graph(t, act("T1"), ckpt("C1", "T1"), act("T2"), ckpt("C2", "T2"))
	r := planRequest("C1", FullWorkflow)
	r.Coordinator = false
	var refused *ScopeError
	if _, err := g.Plan(r); !errors.As(err, &refused) || refused.Scope != FullWorkflow || !strings.Contains(err.Error(), "coordinator") {
		t.Errorf("error %v", err)
	}
	for _, s := range []Scope{"", "everything"} {
		if _, err := g.Plan(planRequest("C1", s)); !errors.As(err, &refused) || refused.Scope != s {
			t.Errorf("scope %q: error %v", s, err)
		}
	}
	wantLevels(t, planned(t, g, "C1", FullWorkflow), "C2 C1")
}

// Facts 5.1 and cascade 4.2: what is known of each step.
func TestWhatIsKnownOfAStep(t *testing.T) {
	irreversible := func(n *Node) { n.Reversible = false }
	ends := func(at time.Time) func(n *Node) { return func(n *Node) { n.Expires = at } }
	c := ckpt("C", "T")
	for name, test := range map[string]struct {
		node       Node
		what, then What
	}{
		"ran":                      {c, Undo, ""},
		"without end":              {with(c, ends(time.Time{})), Undo, ""},
		"irreversible":             {with(c, irreversible), Escalate, ""},
		"expires now":              {with(c, ends(now)), Expired, ""},
		"expires later":            {with(c, ends(now.Add(1))), Undo, ""},
		"irreversible and expired": {with(with(c, irreversible), ends(now)), Escalate, ""},
		"undone":                   {state(c, Undone), Nothing, ""},
		"undone, then expired":     {with(state(c, Undone), ends(now)), Nothing, ""},
		"never ran":                {state(c, NeverRan), Block, ""},
		"irreversible, never ran":  {with(state(c, NeverRan), irreversible), Block, ""},
		"in flight":                {state(c, InFlight), Wait, Undo},
		"in flight, irreversible":  {with(state(c, InFlight), irreversible), Wait, Escalate},
		"in flight, expired":       {with(state(c, InFlight), ends(now)), Wait, Expired},
		"group":                    {group("C"), Gather, ""},
		"irreversible group":       {with(group("C"), irreversible), Escalate, ""},
		"group in flight":          {state(group("C"), InFlight), Wait, Gather},
		"undone group":             {state(group("C"), Undone), Nothing, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := planned(t, graph(t, act("T"), test.node), "C", SubDAG)
			if s := steps(t, p)["C"]; s.What != test.what || s.Then != test.then {
				t.Errorf("%s, then %q; want %s, then %q", s.What, s.Then, test.what, test.then)
			}
		})
	}
}

// P6: an irreversible step is in the plan like all others, and so are those behind it.
func TestP6NothingIsSkippedSilently(t *testing.T) {
	g := graph(t,
		act("T1"), ckpt("C1", "T1"), act("read", "T1"), event("error", "read"), act("reaction", "error"),
		act("T2", "reaction"), with(ckpt("C2", "T2"), func(n *Node) { n.Reversible = false }), act("T3", "T2"), ckpt("C3", "T3"),
		act("elsewhere"),
	)
	p := planned(t, g, "C1", SubDAG)
	wantLevels(t, p, "C3 | C2 | C1")
	wantIDs(t, "passed over", p.Passed, "reaction read")
	wantIDs(t, "passed over in the workflow", planned(t, g, "C1", FullWorkflow).Passed, "elsewhere reaction read")
}

// ATD, "Hierarchical Checkpoints": rolling back the parent rolls back all children,
// whatever the scope, and their consequences with it.
func TestATDHierarchicalCheckpoints(t *testing.T) {
	g := graph(t,
		act("T1"), ckpt("C1", "T1"), act("between", "T1"), act("T2", "between"), ckpt("C2", "T2"),
		act("T3"), ckpt("C3", "T3"), group("G", "C1", "C2"), group("H", "G", "C3", "C3"),
		act("T4", "T2"), ckpt("C4", "T4"), act("T5", "H"), ckpt("C5", "T5"),
	)
	wantLevels(t, planned(t, g, "G", Single), "C2 | C1 | G")
	wantLevels(t, planned(t, g, "H", Single), "C3 C2 | C1 | G | H")
	// C5 follows from H, and so from all that H contains.
	wantLevels(t, planned(t, g, "H", SubDAG), "C5 C4 | C3 C2 | C1 | G | H")
	// A group is no consequence of what it contains.
	wantLevels(t, planned(t, g, "C2", SubDAG), "C5 C4 | C2")
}

// P6: what a group contains and nobody knows is said.
func TestP6MissingCheckpointsOfAGroup(t *testing.T) {
	g := graph(t, act("T"), before("C", []string{"T"}, "T", "pruned"), group("G", "gone", "C", "away", "gone"))
	for _, s := range []Scope{Single, SubDAG, FullWorkflow} {
		wantIDs(t, "missing", planned(t, g, "G", s).Missing, "away gone")
	}
	wantIDs(t, "missing from C", planned(t, g, "C", SubDAG).Missing, "")
	// What follows from the group is found all the same.
	bare := graph(t, group("G", "gone"), act("T", "G", "G"), before("C", []string{"T", "T"}, "T", "T"))
	p := planned(t, bare, "G", SubDAG)
	wantLevels(t, p, "C | G")
	wantIDs(t, "actions", steps(t, p)["C"].Actions, "T")
}

// ATD, "Partial Rollback and Blast Radius Containment": only if no completed sibling
// depends on what is undone.
func TestATDPartialRollback(t *testing.T) {
	nodes := func(change func(*Node)) []Node {
		// The call of C2 was announced by two, of which one is no consequence of T1.
		return []Node{
			act("T1"), ckpt("C1", "T1"), act("T2", "T1"), act("beside"), ckpt("C2", "T2", "beside"),
			with(act("sibling", "beside"), change), ckpt("CS", "sibling"), act("later", "CS"), act("other"), ckpt("CO", "other"),
		}
	}
	p := planned(t, graph(t, nodes(func(*Node) {})...), "C1", SubDAG)
	wantLevels(t, p, "C2 | C1")
	wantIDs(t, "along", p.Along, "beside")
	wantIDs(t, "dependants", p.Dependants, "later sibling")
	var refused *DependedOnError
	if err := p.Partial(); !errors.As(err, &refused) || !strings.Contains(err.Error(), `"later", "sibling"`) {
		t.Errorf("error %v", err)
	}
	all := planned(t, graph(t, nodes(func(*Node) {})...), "C1", FullWorkflow)
	if err := all.Partial(); err != nil || len(all.Dependants) > 0 {
		t.Errorf("nothing is left: %v", err)
	}

	pending := nodes(func(n *Node) { n.Done = false })
	pending[7].Done = false // later
	p = planned(t, graph(t, pending...), "C1", SubDAG)
	if err := p.Partial(); err != nil {
		t.Errorf("nothing completed depends on it: %v", err)
	}
	never := nodes(func(*Node) {})
	never[4].State = NeverRan
	p = planned(t, graph(t, never...), "C1", SubDAG)
	if err := p.Partial(); err != nil {
		t.Errorf("nobody depends on a call that never ran: %v", err)
	}
}

// A checkpoint that is placed before its action, and follows from nothing, is found by
// the action. It is not where the action has been undone by another one.
func TestCheckpointBesideAConsequence(t *testing.T) {
	g := graph(t,
		act("T1"), ckpt("C1", "T1"),
		before("B", []string{"B1", "B2"}), act("B1", "B", "T1"), act("B2", "B"),
		before("D", []string{"D1", "D2"}), act("D1", "D", "T1"), ckpt("CD1", "D1"), act("D2", "D"), ckpt("CD2", "D2"),
	)
	p := planned(t, g, "C1", SubDAG)
	wantLevels(t, p, "CD1 B | C1")
	wantIDs(t, "along", p.Along, "B2")
	wantIDs(t, "passed over", p.Passed, "")
	// One of two calls of a task with a checkpoint of its own.
	wantLevels(t, planned(t, g, "CD1", SubDAG), "CD1")
}

// Two checkpoints of one action, of which one was made on top of the other.
func TestCheckpointsOfOneAction(t *testing.T) {
	agents := ckpt("CA", "T")
	gateways := ckpt("CG", "T", "CA")
	gateways.Guards = []string{"T", "S"}
	nodes := []Node{act("T"), agents, gateways, act("S", "CG", "T"), act("T2", "S"), ckpt("C2", "T2")}
	wantLevels(t, planned(t, graph(t, nodes...), "CA", SubDAG), "C2 | CG | CA")
	wantLevels(t, planned(t, graph(t, nodes...), "CG", SubDAG), "C2 | CG | CA")

	// Side by side, they are each other's consequences and stand in one level.
	retried := []Node{act("T"), state(ckpt("C1", "T"), NeverRan), ckpt("C2", "T"), act("T3", "C2"), ckpt("C3", "T3")}
	wantLevels(t, planned(t, graph(t, retried...), "C1", SubDAG), "C3 | C2 C1")
}

// P1: attempts of one call are undone once, and do not depend on each other. What follows from
// one of them does.
func TestAttemptsAreNoDependants(t *testing.T) {
	of := func(n Node, execution string) Node { n.Execution = execution; return n }
	nodes := []Node{
		act("T"), of(ckpt("C1", "T"), "x"), of(act("S1", "T", "C1"), "x"), of(ckpt("C2", "T"), "x"), of(act("S2", "T", "C2"), "x"),
		of(act("again", "C1"), "x"), of(ckpt("C3", "other"), "y"), act("other"),
	}
	for i := range nodes {
		switch nodes[i].ID {
		case "C1":
			nodes[i].Guards = []string{"T", "S1"}
		case "C2":
			nodes[i].Guards = []string{"T", "S2"}
		}
	}
	for _, id := range []string{"C1", "C2"} {
		if p := planned(t, graph(t, nodes...), id, Single); p.Partial() != nil {
			t.Errorf("%s: %v", id, p.Dependants)
		}
	}
	p := planned(t, graph(t, append(nodes, act("more", "S2"))...), "C1", Single)
	wantIDs(t, "dependants", p.Dependants, "more")
}

// Checkpoints can be consequences of each other by their actions, three in a circle
// here. The tokens alone decide then, and the plan is finite.
func TestKnots(t *testing.T) {
	g := graph(t,
		act("top"), ckpt("CT", "top"), act("X", "top"), act("Y"), act("Z"),
		act("X1", "X"), act("Y1", "Y"), act("Z1", "Z"),
		before("CX", []string{"X"}, "X", "Y1"), before("CY", []string{"Y"}, "Y", "Z1"), before("CZ", []string{"Z"}, "Z", "X1"),
		act("more", "Z1"), ckpt("CM", "more"),
	)
	wantLevels(t, planned(t, g, "CX", FullWorkflow), "CM | CZ CY CX | CT")
	p := planned(t, g, "CX", SubDAG)
	wantLevels(t, p, "CZ | CX")
	if err := p.Partial(); err == nil {
		t.Errorf("more depends on Z, and is left: %+v", p)
	}
}

func TestRefusals(t *testing.T) {
	g := graph(t, act("T"), ckpt("C", "T"))
	for _, target := range []string{"", "T", "c"} {
		if _, err := g.Plan(planRequest(target, SubDAG)); !errors.Is(err, ErrCheckpointUnknown) {
			t.Errorf("target %q: %v", target, err)
		}
	}
}

// A cycle cannot be in verified tokens. It is refused where the plan would reach it.
func TestCyclesAreRefused(t *testing.T) {
	loop := act("L1", "L2", "T2")
	g := graph(t,
		act("T1"), ckpt("C1", "T1"), act("T2"), ckpt("C2", "T2"),
		loop, act("L2", "L1"), ckpt("CL", "L2"), group("G", "C1"), act("self", "self"), ckpt("CS", "self"),
	)
	for _, target := range []string{"C2", "CL", "CS"} {
		var cycle *CycleError
		if _, err := g.Plan(planRequest(target, SubDAG)); !errors.As(err, &cycle) || len(cycle.Nodes) == 0 {
			t.Errorf("%s: %v", target, err)
		}
	}
	_, err := g.Plan(planRequest("C2", Single))
	if want := `"CL", "L1", "L2"`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
	wantLevels(t, planned(t, g, "C1", SubDAG), "C1")
	groups := graph(t, act("T"), ckpt("C", "T"), group("G", "C", "H"), group("H", "G"))
	for target, want := range map[string]string{"C": "G H", "G": "C G H", "H": "C G H"} {
		var cycle *CycleError
		if _, err := groups.Plan(planRequest(target, SubDAG)); !errors.As(err, &cycle) || strings.Join(cycle.Nodes, " ") != want {
			t.Errorf("%s: %v", target, err)
		}
	}
	if !g.MayAsk("agent", "CL", Ancestor) || g.MayAsk("other", "CL", Workflow) {
		t.Error("lineage in a cycle")
	}
}

// The encoding is an API: a plan that was prepared by one version is executed by the
// next.
func TestHashGolden(t *testing.T) {
	p := planned(t, graph(t, act("T1"), ckpt("C1", "T1"), act("T2", "T1"), act("T3", "T1"), ckpt("C3", "T3")), "C1", SubDAG)
	const want = "8bba7e75a8a9e12d10012d7fc279776b3585da67b913e03ecfb013f4f0af50d3"
	if h := p.Hash(); hex.EncodeToString(h[:]) != want {
		t.Errorf("hash %x, want %s", h, want)
	}
}

// Facts 5.5: execute does exactly what was approved. The hash does not depend on the order in
// which a token names others, and is the same after the journal.
func TestHashIsStable(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	for range 20 {
		nodes := randomNodes(r, 60)
		target := someCheckpoint(r, nodes)
		for _, s := range []Scope{Single, SubDAG, FullWorkflow} {
			p := planned(t, graph(t, nodes...), target, s)
			want := p.Hash()
			mixed := slices.Clone(nodes)
			for i := range mixed {
				for _, list := range []*[]string{&mixed[i].Parents, &mixed[i].Guards} {
					*list = slices.Clone(*list)
					r.Shuffle(len(*list), func(a, b int) { (*list)[a], (*list)[b] = (*list)[b], (*list)[a] })
				}
			}
			if planned(t, graph(t, mixed...), target, s).Hash() != want {
				t.Fatalf("another order of the names, another hash of %s %s", s, target)
			}
			text, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			var stored Plan
			if err := json.Unmarshal(text, &stored); err != nil {
				t.Fatal(err)
			}
			if stored.Hash() != want {
				t.Fatalf("another hash after %s", text)
			}
		}
	}
}

// Whatever a plan says is in its hash.
func TestHashTellsPlansApart(t *testing.T) {
	base := Plan{
		Workflow: "w", Target: "C", Scope: SubDAG,
		Levels: [][]PlanStep{
			{{Checkpoint: "D", What: Wait, Then: Undo, Actions: []string{"b", "a"}}, {Checkpoint: "E", What: Undo}},
			{{Checkpoint: "C", What: Undo, Actions: []string{"c"}}},
		},
		Passed: []string{"p"}, Along: []string{"l"}, Dependants: []string{"q"}, Missing: []string{"r"},
	}
	seen := map[[32]byte]string{base.Hash(): "base"}
	for name, change := range map[string]func(p *Plan){
		"workflow":         func(p *Plan) { p.Workflow = "v" },
		"target":           func(p *Plan) { p.Target = "D" },
		"scope":            func(p *Plan) { p.Scope = FullWorkflow },
		"text moves":       func(p *Plan) { p.Workflow, p.Target = "wC", "" },
		"checkpoint":       func(p *Plan) { p.Levels[0][0].Checkpoint = "F" },
		"what":             func(p *Plan) { p.Levels[0][1].What = Expired },
		"then":             func(p *Plan) { p.Levels[0][0].Then = Escalate },
		"actions":          func(p *Plan) { p.Levels[0][0].Actions = []string{"b"} },
		"actions joined":   func(p *Plan) { p.Levels[0][0].Actions = []string{"ba"} },
		"way":              func(p *Plan) { p.Levels[0][0].Way = "restore" },
		"another way":      func(p *Plan) { p.Levels[0][0].Way = "compensate" },
		"another's way":    func(p *Plan) { p.Levels[0][1].Way = "restore" },
		"obstacle":         func(p *Plan) { p.Levels[0][0].Obstacle = "restore" },
		"way of an action": func(p *Plan) { p.Levels[0][0].Actions, p.Levels[0][0].Way = []string{"b"}, "a" },
		"barrier moves":    func(p *Plan) { p.Levels = [][]PlanStep{p.Levels[0][:1], {p.Levels[0][1], p.Levels[1][0]}} },
		"barrier is gone":  func(p *Plan) { p.Levels = [][]PlanStep{append(p.Levels[0], p.Levels[1]...)} },
		"no levels":        func(p *Plan) { p.Levels = nil },
		"passed":           func(p *Plan) { p.Passed = nil },
		"along":            func(p *Plan) { p.Along = nil },
		"dependants":       func(p *Plan) { p.Dependants = nil },
		"missing":          func(p *Plan) { p.Missing = nil },
		"passed, not left": func(p *Plan) { p.Passed, p.Dependants = p.Dependants, p.Passed },
	} {
		p := base
		p.Levels = [][]PlanStep{slices.Clone(base.Levels[0]), slices.Clone(base.Levels[1])}
		change(&p)
		if before, twice := seen[p.Hash()]; twice {
			t.Errorf("%s has the hash of %s", name, before)
		}
		seen[p.Hash()] = name
	}
}

// C-4.3.2-h: critical are the target, what is configured so, and what is of severity or priority
// critical, and nothing else. It is not in the hash, which says what is done.
func TestCriticalSteps(t *testing.T) {
	severe := func(word string) func(n *Node) { return func(n *Node) { n.Severity = word } }
	blamed := func(n *Node) { n.Error = "E" }
	for name, test := range map[string]struct {
		target         string
		scope          Scope
		action, change func(n *Node) // change the action of D, and D itself
		critical       string        // of D
	}{
		"nothing":                     {target: "C", scope: SubDAG},
		"the action's configuration":  {target: "C", scope: SubDAG, change: func(n *Node) { n.Critical = true }, critical: "action"},
		"its severity":                {target: "C", scope: SubDAG, change: severe("critical"), critical: "severity"},
		"a lower severity":            {target: "C", scope: SubDAG, change: severe("error")},
		"the severity of its action":  {target: "C", scope: SubDAG, action: severe("critical"), critical: "severity"},
		"the priority of its action":  {target: "C", scope: SubDAG, action: func(n *Node) { n.Priority = "critical" }, critical: "priority"},
		"a lower priority":            {target: "C", scope: SubDAG, action: func(n *Node) { n.Priority = "high" }},
		"an error about it":           {target: "C", scope: SubDAG, change: blamed, critical: "severity"},
		"an error about its action":   {target: "C", scope: SubDAG, action: blamed, critical: "severity"},
		"of the whole workflow":       {target: "C", scope: FullWorkflow, change: blamed, critical: "severity"},
		"it is what is asked for":     {target: "D", scope: SubDAG, change: blamed, critical: "severity"},
		"alone":                       {target: "D", scope: Single, change: blamed, critical: "severity"},
		"asked for, and nothing else": {target: "D", scope: SubDAG, critical: "target"},
		"in a group":                  {target: "G", scope: SubDAG, change: blamed, critical: "severity"},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := []Node{act("a"), ckpt("C", "a"), act("b", "a"), ckpt("D", "b"), group("G", "D")}
			plain := planned(t, graph(t, nodes...), test.target, test.scope).Hash()
			for i, f := range []func(n *Node){test.action, test.change} {
				if f != nil {
					f(&nodes[2+i])
				}
			}
			p := planned(t, graph(t, nodes...), test.target, test.scope)
			for _, s := range slices.Concat(p.Levels...) {
				if s.Checkpoint == "D" && s.Critical != test.critical || s.Checkpoint != "D" && (s.Critical == "target") != (s.Checkpoint == test.target) {
					t.Errorf("%+v", s)
				}
			}
			if p.Hash() != plain {
				t.Error("it is in the hash")
			}
		})
	}
}

// What lies outside a plan, and what is only reported, does not change it; what is known of
// a step does.
func TestHashFollowsTheWorkflow(t *testing.T) {
	nodes := []Node{act("R"), act("T", "R"), ckpt("C", "T"), act("read", "T")}
	p := planned(t, graph(t, nodes...), "C", SubDAG)
	outside := append(slices.Clone(nodes), event("error", "T"), act("sibling", "R"), ckpt("CS", "sibling"))
	if planned(t, graph(t, outside...), "C", SubDAG).Hash() != p.Hash() {
		t.Error("what is outside changes the hash")
	}
	later, err := graph(t, nodes...).Plan(PlanInput{Target: "C", Scope: SubDAG, Now: nodes[2].Expires})
	if err != nil {
		t.Fatal(err)
	}
	if later.Hash() == p.Hash() {
		t.Error("an expired step has the hash of one that stands")
	}
	if planned(t, graph(t, append(slices.Clone(nodes), act("read2", "T"))...), "C", SubDAG).Hash() == p.Hash() {
		t.Error("another action is passed over, with the same hash")
	}
}

// Too many nodes, or links, are refused before a plan is made of them.
func TestLimits(t *testing.T) {
	nodes := make([]Node, MaxNodes+1)
	for i := range nodes {
		nodes[i] = event(fmt.Sprint("n", i))
	}
	var refused *TooManyError
	if err := Bounded(graphOf("w", nodes...).Graph); !errors.As(err, &refused) || refused.Count != MaxNodes+1 || refused.What != "nodes" {
		t.Errorf("error %v", err)
	}
	if err := Bounded(graphOf("w", nodes[:MaxNodes]...).Graph); err != nil {
		t.Error(err)
	}
	many := make([]string, MaxEdges/2+1)
	few := []Node{act("T"), with(ckpt("C"), func(n *Node) { n.Parents, n.Guards = many, many })}
	if err := Bounded(graphOf("w", few...).Graph); !errors.As(err, &refused) || refused.Count != MaxEdges+2 || refused.What != "edges" {
		t.Errorf("error %v", err)
	}
}

// A plan follows each link a fixed number of times, whatever the graph looks like: 10^5
// nodes are a question of memory alone.
func TestLinear(t *testing.T) {
	n := 100_000
	if raced {
		n = 10_000
	}
	r := rand.New(rand.NewPCG(1, 2))
	shapes := map[string]func(i int) Node{
		"chain": func(i int) Node { return ckpt(fmt.Sprint(i), fmt.Sprint(i-1)) },
		"star":  func(i int) Node { return act(fmt.Sprint(i), "0") },
		"pairs": func(i int) Node {
			if i%2 == 1 {
				return act(fmt.Sprint(i), fmt.Sprint(max(0, i-3)), fmt.Sprint(i-1))
			}
			return ckpt(fmt.Sprint(i), fmt.Sprint(i-1))
		},
		"layers": func(i int) Node {
			if i < 100 {
				return ckpt(fmt.Sprint(i), "0")
			}
			return act(fmt.Sprint(i), fmt.Sprint(i-100+r.IntN(50)), fmt.Sprint(i-50+r.IntN(50)), fmt.Sprint(i-99))
		},
		"groups": func(i int) Node {
			if i%10 == 0 {
				return group(fmt.Sprint(i), fmt.Sprint(i-1), fmt.Sprint(i-2), fmt.Sprint(max(0, i-10)))
			}
			return ckpt(fmt.Sprint(i), fmt.Sprint(i-1))
		},
	}
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			nodes := []Node{ckpt("0")}
			links := 0
			for i := 1; i < n; i++ {
				node := shape(i)
				if name != "pairs" {
					node.Guards = nil // its parents are no actions
				}
				nodes = append(nodes, node)
				links += len(node.Parents) + len(node.Guards)
			}
			if name == "pairs" { // one knot of everything
				nodes[0].Guards = []string{fmt.Sprint(n - 1)}
			}
			g := graph(t, nodes...)
			for _, s := range []Scope{Single, SubDAG, FullWorkflow} {
				p, looked, err := Counted(g.Graph, planRequest("0", s))
				if err != nil {
					t.Fatal(err)
				}
				if most := 12 * (links + n); looked > most || looked == 0 {
					t.Errorf("%s: %d links were followed, of %d", s, looked, links+n)
				}
				if s == FullWorkflow && len(steps(t, p))+len(p.Passed)+coveredBy(p) != n {
					t.Errorf("%d steps, %d passed over", len(steps(t, p)), len(p.Passed))
				}
			}
		})
	}
}

func coveredBy(p *Plan) int {
	all := make(map[string]bool)
	for _, level := range p.Levels {
		for _, s := range level {
			for _, a := range s.Actions {
				all[a] = true
			}
		}
	}
	return len(all)
}

// Cascade 4.3.4: the wider scope, then the earlier time; then the lower id.
func TestCascade434Precedence(t *testing.T) {
	order := []Precedence{
		{"z", FullWorkflow, now.Add(time.Hour)},
		{"y", SubDAG, now},
		{"a", SubDAG, now.Add(1)},
		{"b", SubDAG, now.Add(1)},
		{"c", Single, now.Add(-time.Hour)},
		{"d", "unknown", now.Add(-2 * time.Hour)},
	}
	for i, a := range order {
		for j, b := range order {
			if got := ComparePrecedence(a, b); cmp.Compare(got, 0) != cmp.Compare(i, j) {
				t.Errorf("Compare(%v, %v) = %d", a, b, got)
			}
		}
	}
}

// Cascade 4.3.4: precedence is a strict total order, also where clocks show the same
// instant in different zones.
func TestCascade434CompareIsTotal(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 34))
	zones := []*time.Location{time.UTC, time.FixedZone("east", 3600)}
	var all []Precedence
	for i := range 60 {
		all = append(all, Precedence{
			ID: fmt.Sprint("r", i), Scope: []Scope{Single, SubDAG, FullWorkflow, "", "other"}[r.IntN(5)],
			Asked: now.Add(time.Duration(r.IntN(4))).In(zones[r.IntN(2)]),
		})
	}
	for _, a := range all {
		for _, b := range all {
			ab, ba := ComparePrecedence(a, b), ComparePrecedence(b, a)
			if (ab == 0) != (a.ID == b.ID) || ab != -ba {
				t.Fatalf("%v and %v: %d and %d", a, b, ab, ba)
			}
			for _, c := range all {
				if ab < 0 && ComparePrecedence(b, c) < 0 && ComparePrecedence(a, c) >= 0 {
					t.Fatalf("%v before %v before %v, and not transitive", a, b, c)
				}
			}
		}
	}
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, ComparePrecedence)
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	slices.SortFunc(all, ComparePrecedence)
	if !slices.Equal(all, sorted) {
		t.Error("the order depends on where one begins")
	}
}

// conflicts is a workflow with two branches and a group over both.
func conflicts(t *testing.T) *Graph {
	return graph(t,
		act("R"), ckpt("CR", "R"), act("T1", "R"), ckpt("C1", "T1"), act("T2", "R"), ckpt("C2", "T2"),
		act("T3", "T1"), ckpt("C3", "T3"), group("G", "C1", "C2"),
	)
}

// Cascade 4.3.4: rollbacks overlap if they share a checkpoint.
func TestCascade434Overlap(t *testing.T) {
	g := conflicts(t)
	one, other := planned(t, g, "C1", SubDAG), planned(t, g, "C2", SubDAG)
	if Overlap(one, other) || Overlap(other, one) {
		t.Error("branches overlap")
	}
	for _, p := range []*Plan{planned(t, g, "C3", Single), planned(t, g, "G", Single), planned(t, g, "CR", FullWorkflow), one} {
		if !Overlap(one, p) || !Overlap(p, one) {
			t.Errorf("%s and %s do not overlap", levels(one), levels(p))
		}
	}
	if Overlap(one, planned(t, graphOf("another", act("T1"), ckpt("C1", "T1")), "C1", SubDAG)) {
		t.Error("workflows overlap")
	}
}

// A narrower rollback that already executes finishes its level,
// then joins the wider one.
func TestResolveConflict(t *testing.T) {
	g := conflicts(t)
	of := func(id, target string, s Scope, after time.Duration) Contender {
		return NewContender(Precedence{id, s, now.Add(after)}, planned(t, g, target, s))
	}
	for name, test := range map[string]struct {
		there, comes Contender
		want         ConflictResolution
	}{
		"apart":                  {of("a", "C1", SubDAG, 0), of("b", "C2", SubDAG, 1), NoConflict},
		"narrower comes":         {of("a", "CR", SubDAG, 1), of("b", "C3", Single, 0), NewcomerRefused},
		"later comes":            {of("a", "CR", SubDAG, 0), of("b", "C1", SubDAG, 1), NewcomerRefused},
		"wider comes":            {of("a", "C3", Single, 0), of("b", "C1", SubDAG, 1), EarlierJoins},
		"full comes":             {of("a", "CR", SubDAG, 0), of("b", "C3", FullWorkflow, 1), EarlierJoins},
		"wider lacks some of it": {of("a", "G", Single, 0), of("b", "C1", SubDAG, 1), NewcomerWaits},
		"earlier comes":          {of("a", "C1", SubDAG, 1), of("b", "CR", SubDAG, 0), NewcomerWaits},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ResolveConflict(test.there, test.comes); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

// A step names those right before it: not those behind them, and over actions that nothing
// undoes to the next one that something does.
func TestPlansNameTheStepsBefore(t *testing.T) {
	wide := []Node{act("a"), ckpt("A", "a"), event("e", "a")}
	for i := range 70 {
		wide = append(wide, act(fmt.Sprint("w", i), "e"), ckpt(fmt.Sprint("W", i), fmt.Sprint("w", i)))
	}
	for name, test := range map[string]struct {
		nodes  []Node
		target string
		want   string
	}{
		"a chain":             {[]Node{act("a"), ckpt("A", "a"), act("b", "a"), ckpt("B", "b"), act("c", "b"), ckpt("C", "c")}, "A", "C:; B: C; A: B"},
		"over an action":      {[]Node{act("a"), ckpt("A", "a"), act("b", "a"), event("e", "b"), act("c", "e"), ckpt("C", "c")}, "A", "C:; A: C"},
		"over the checkpoint": {[]Node{act("a"), ckpt("A", "a"), act("b", "A"), ckpt("B", "b")}, "A", "B:; A: B"},
		"a diamond": {[]Node{
			act("a"), ckpt("A", "a"), act("b", "a"), ckpt("B", "b"), act("c", "a"), ckpt("C", "c"), act("d", "b", "c"), ckpt("D", "d"),
		}, "A", "D:; C: D; B: D; A: C B"},
		"both ways": {[]Node{act("a"), ckpt("A", "a"), act("b", "a"), ckpt("B", "b"), act("c", "b", "a"), ckpt("C", "c")}, "A", "C:; B: C; A: C B"},
		"a group":   {[]Node{act("a"), ckpt("A", "a"), act("b", "a"), ckpt("B", "b"), group("G", "A", "B")}, "G", "B:; A: B; G: B A"},
		"placed before its action": {[]Node{
			before("A", []string{"a"}), act("a", "A"), act("b", "a"), ckpt("B", "b"),
		}, "A", "B:; A: B"},
		"two attempts": {[]Node{act("a"), ckpt("A", "a"), ckpt("A2", "a"), act("b", "a"), ckpt("B", "b")}, "A", "B:; A: B; A2: B"},
	} {
		p := planned(t, graph(t, test.nodes...), test.target, SubDAG)
		order := strings.Fields(strings.ReplaceAll(levels(p), "|", ""))
		var got []string
		for _, level := range p.Levels {
			for _, s := range level {
				text := s.Checkpoint + ":"
				for _, place := range s.Earlier {
					text += " " + order[place]
				}
				got = append(got, text)
			}
		}
		slices.Sort(got)
		want := strings.Split(test.want, "; ")
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	p := planned(t, graph(t, wide...), "A", SubDAG)
	if last := p.Levels[len(p.Levels)-1][0]; last.Checkpoint != "A" || len(last.Earlier) != 64 {
		t.Errorf("%s names %d of 70", last.Checkpoint, len(last.Earlier))
	}
	unlike := planned(t, graph(t, wide...), "A", SubDAG)
	unlike.Levels[1][0].Earlier = nil
	if unlike.Hash() != p.Hash() {
		t.Error("the steps before one are in the hash")
	}
}

// A peer was configured, and two things followed from it: a check, and an announcement
// that nobody can take back.
func Example() {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	const agent = "spiffe://example.com/a"
	did := func(id, action string, parents ...string) workflow.Record {
		return workflow.Record{ID: id, Action: action, Parents: parents, By: agent}
	}
	checkpoint := func(id, action string, reversible bool) workflow.Record {
		return workflow.Record{ID: id, Event: ect.EventCheckpoint, Parents: []string{action}, Reversible: reversible, Expires: now.Add(time.Hour)}
	}
	g := workflow.New([]workflow.Record{
		did("configure", "configure_peer"), checkpoint("c1", "configure", true),
		did("check", "check_peer", "configure"),
		did("announce", "announce_peer", "configure"), checkpoint("c2", "announce", false),
	})
	fmt.Println("may ask:", MayAsk(g, agent, "c1", Ancestor))
	p, err := MakePlan(g, PlanInput{Workflow: "maintenance", Target: "c1", Scope: SubDAG, Now: now}, func(n *workflow.Node) (NodeState, error) {
		return RecordedState(n), nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for i, level := range p.Levels {
		for _, s := range level {
			fmt.Println(i, s.What, s.Checkpoint, s.Actions)
		}
	}
	fmt.Println("passed over:", p.Passed)
	hash := p.Hash()
	fmt.Printf("%x\n", hash[:4])
	// Output:
	// may ask: true
	// 0 escalate c2 [announce]
	// 1 undo c1 [configure]
	// passed over: [check]
	// 5c42d214
}
