package plan_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

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
// random, and tell nothing of it.
func TestCascade411SiblingsInReverseOfTheirStart(t *testing.T) {
	began := func(n Node, at int) Node { return with(n, func(n *Node) { n.Start = at }) }
	nodes := []Node{
		began(act("T"), 0), began(ckpt("C", "T"), 1),
		began(act("a", "T"), 2), began(ckpt("9", "a"), 3),
		began(act("z", "T"), 4), began(ckpt("1", "z"), 5),
		began(act("m", "T"), 6), began(ckpt("5", "m", "a", "z"), 7),
	}
	p := planned(t, graph(t, nodes...), "C", SubDAG)
	wantLevels(t, p, "5 1 9 | C")
	wantIDs(t, "actions", p.Levels[0][0].Actions, "m z a")
	nodes[3].Start = 8
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
	if err := single.Partial(); err != nil {
		t.Errorf("a single rollback leaves its consequences: %v", err)
	}
	sub := planned(t, g, "C1", SubDAG)
	wantLevels(t, sub, "C5 C3 | C4 | C1")
	wantIDs(t, "dependants", sub.Dependants, "")
	wantLevels(t, planned(t, g, "C1", FullWorkflow), "C5 C3 C2 | C4 | C1 | CR")
}

// Cascade 4.1.3: all checkpoints, also those of other roots; only a coordinator asks.
func TestCascade413FullWorkflowNeedsCoordinator(t *testing.T) {
	g := graph(t, act("T1"), ckpt("C1", "T1"), act("T2"), ckpt("C2", "T2"))
	r := request("C1", FullWorkflow)
	r.Coordinator = false
	var refused *ScopeError
	if _, err := g.Plan(r); !errors.As(err, &refused) || refused.Scope != FullWorkflow || !strings.Contains(err.Error(), "coordinator") {
		t.Errorf("error %v", err)
	}
	for _, s := range []Scope{"", "everything"} {
		if _, err := g.Plan(request("C1", s)); !errors.As(err, &refused) || refused.Scope != s {
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
		"standing":                 {c, Undo, ""},
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
	var unknown *UnknownError
	for _, target := range []string{"", "T", "c"} {
		if _, err := g.Plan(request(target, SubDAG)); !errors.As(err, &unknown) || unknown.Checkpoint != target {
			t.Errorf("target %q: %v", target, err)
		}
	}
	for name, test := range map[string]struct {
		nodes []Node
		want  string
	}{
		"no id":               {[]Node{act("")}, `node "": its id is empty`},
		"twice":               {[]Node{act("T"), ckpt("T")}, `"T": the id stands twice`},
		"kind":                {[]Node{{ID: "T", Kind: "task"}}, `kind "task" is none of`},
		"no state":            {[]Node{{ID: "C", Kind: Checkpoint}}, `state "" is none of`},
		"state of an action":  {[]Node{{ID: "T", Kind: Action, State: Undone}}, `state "undone" on a node`},
		"guards of an action": {[]Node{act("T"), {ID: "U", Kind: Action, Guards: []string{"T"}}}, "guards actions and is no checkpoint"},
		"guards of a group":   {[]Node{act("T"), with(group("G"), func(n *Node) { n.Guards = []string{"T"} })}, "is no checkpoint"},
		"guards nobody":       {[]Node{ckpt("C", "T")}, `guards "T", which is no action`},
		"guards an event":     {[]Node{event("E"), ckpt("C", "E")}, `guards "E", which is no action`},
		"group of an action":  {[]Node{act("T"), group("G", "T")}, `contains "T", which is no checkpoint`},
	} {
		t.Run(name, func(t *testing.T) {
			var refused *NodeError
			if _, err := New("w", test.nodes); !errors.As(err, &refused) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %s", err, test.want)
			}
		})
	}
}

// A cycle cannot be in verified tokens. It is refused where the plan would meet it.
func TestCyclesAreRefused(t *testing.T) {
	loop := act("L1", "L2", "T2")
	g := graph(t,
		act("T1"), ckpt("C1", "T1"), act("T2"), ckpt("C2", "T2"),
		loop, act("L2", "L1"), ckpt("CL", "L2"), group("G", "C1"), act("self", "self"), ckpt("CS", "self"),
	)
	for _, target := range []string{"C2", "CL", "CS"} {
		var cycle *CycleError
		if _, err := g.Plan(request(target, SubDAG)); !errors.As(err, &cycle) || len(cycle.Nodes) == 0 {
			t.Errorf("%s: %v", target, err)
		}
	}
	_, err := g.Plan(request("C2", Single))
	if want := `"CL", "L1", "L2"`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
	wantLevels(t, planned(t, g, "C1", SubDAG), "C1")
	groups := graph(t, act("T"), ckpt("C", "T"), group("G", "C", "H"), group("H", "G"))
	for target, want := range map[string]string{"C": "G H", "G": "C G H", "H": "C G H"} {
		var cycle *CycleError
		if _, err := groups.Plan(request(target, SubDAG)); !errors.As(err, &cycle) || strings.Join(cycle.Nodes, " ") != want {
			t.Errorf("%s: %v", target, err)
		}
	}
	if !g.MayAsk("agent", "CL", Ancestor) || g.MayAsk("other", "CL", Workflow) {
		t.Error("lineage in a cycle")
	}
}
