package rollback_test

import (
	"math/rand/v2"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

func by(who string, n Node) Node {
	n.By = who
	return n
}

// ATD, "Rollback Authorization", and cascade 6.1: who may ask for what.
func TestLineage(t *testing.T) {
	g := graph(t,
		by("root", act("R")), by("a", act("A", "R")), by("gateway", ckpt("CA", "A")),
		by("sibling", act("S", "R")), by("gateway", ckpt("CS", "S")),
		by("below", act("B", "A")), by("b", ckpt("CB", "B")),
		by("reporter", event("E", "A")), by("c", act("C", "E")), by("gateway", ckpt("CC", "C")),
		by("stranger", act("X")), by("", act("N", "A")),
		by("grouper", group("G", "CA", "CS")), by("root", group("H", "CA", "gone")), by("grouper", group("I")),
		by("d", act("D", "G")), by("gateway", ckpt("CD", "D")),
	)
	for _, test := range []struct {
		who, checkpoint    string
		ancestor, workflow bool
	}{
		{"a", "CA", true, true},
		{"root", "CA", true, true},
		{"gateway", "CA", true, true},
		{"sibling", "CA", false, true},
		{"below", "CA", false, true},
		{"below", "CB", true, true},
		{"b", "CB", true, true}, // its own
		{"a", "CB", true, true},
		{"a", "CC", true, true}, // over an event
		{"reporter", "CC", false, false},
		{"reporter", "CA", false, false},
		{"stranger", "CA", false, false}, // the same name, and not linked
		{"nobody", "CA", false, false},
		{"", "CA", false, false},
		{"a", "A", false, false}, // no checkpoint
		{"a", "unknown", false, false},
		// Groups: all that they contain, and none of it unknown.
		{"root", "G", true, true},
		{"a", "G", false, true},
		{"grouper", "G", false, true},
		{"grouper", "CA", false, true},
		{"root", "H", false, false},
		{"grouper", "I", false, false},
		// What follows from a group follows for rights from whoever made it.
		{"grouper", "CD", true, true},
		{"a", "CD", false, true},
	} {
		if got := g.MayAsk(test.who, test.checkpoint, Ancestor); got != test.ancestor {
			t.Errorf("ancestor: %q for %q: %v", test.who, test.checkpoint, got)
		}
		if got := g.MayAsk(test.who, test.checkpoint, Workflow); got != test.workflow {
			t.Errorf("workflow: %q for %q: %v", test.who, test.checkpoint, got)
		}
		if g.MayAsk(test.who, test.checkpoint, "") {
			t.Errorf("no policy: %q for %q", test.who, test.checkpoint)
		}
	}
}

// What somebody reports of others leads to what follows from it, and joins nothing (ADR 0024).
func TestLineageJoinsNothingByWhatIsTold(t *testing.T) {
	report := event("E", "A", "B")
	report.Report = true
	g := graph(t,
		by("a", act("A")), by("gateway", ckpt("CA", "A")), by("b", act("B")), by("gateway", ckpt("CB", "B")),
		by("eve", report), by("c", act("C", "E")), by("gateway", ckpt("CC", "C")),
	)
	for _, test := range []struct {
		who, checkpoint string
		may             bool
	}{
		{"a", "CA", true}, {"a", "CB", false}, {"b", "CA", false}, {"a", "CC", true}, {"c", "CC", true}, {"c", "CA", false}, {"eve", "CA", false},
	} {
		if got := g.MayAsk(test.who, test.checkpoint, Workflow); got != test.may {
			t.Errorf("%q for %q: %v", test.who, test.checkpoint, got)
		}
	}
}

// A token that names a checkpoint as its parent does not make its issuer an ancestor,
// also where the checkpoint counts as made for it.
func TestLineageIsNotTakenFromBelow(t *testing.T) {
	g := graph(t,
		by("a", before("C", []string{"A1", "M"})), by("a", act("A1", "C")),
		by("mallory", act("M0")), by("mallory", act("M", "C", "M0")),
	)
	if !g.MayAsk("a", "C", Ancestor) || g.MayAsk("mallory", "C", Ancestor) {
		t.Error("rights from below")
	}
}

// Follows is by the tokens, from a checkpoint and from what it was made for on; a group's
// consequences are those of what it contains.
func TestFollows(t *testing.T) {
	g := graph(t,
		act("a"), ckpt("C", "a"), act("b", "a"), event("below", "b"), event("direct", "C"), event("above"),
		act("x"), ckpt("X", "x"), event("beside", "x"), group("G", "C", "X"), event("on", "G"),
	)
	for checkpoint, follow := range map[string]string{"C": "below direct on", "X": "beside on", "G": "below direct beside on", "a": "", "none": ""} {
		var got []string
		for _, id := range []string{"below", "direct", "above", "beside", "on", "none", ""} {
			if Follows(g.Graph, id, checkpoint) {
				got = append(got, id)
			}
		}
		wantIDs(t, checkpoint, got, follow)
	}
}

// Cascade 4.3.1: the initiator of a workflow is who was first. What others do later under
// the same id takes nothing from it.
func TestCascade431Initiator(t *testing.T) {
	begins := func(n Node) Node { return with(n, func(n *Node) { n.BeginsWorkflow = true }) }
	for what, c := range map[string]struct {
		nodes []Node
		want  string
	}{
		"nobody":                      {nil, ""},
		"one":                         {[]Node{by("a", act("A")), by("b", act("B", "A"))}, "a"},
		"another one's root later":    {[]Node{by("a", act("A")), by("e", act("E")), by("e", ckpt("CE", "E"))}, "a"},
		"events before":               {[]Node{by("e", event("X")), by("a", act("A"))}, "a"},
		"the begin is recorded":       {[]Node{begins(by("o", event("W"))), by("a", act("A", "W"))}, "o"},
		"the begin is recorded later": {[]Node{by("a", act("A")), begins(by("e", event("W")))}, "a"},
		"the first follows from one":  {[]Node{by("a", act("A", "elsewhere")), by("e", act("E"))}, ""},
		"a checkpoint first":          {[]Node{by("a", before("C", nil)), by("e", act("E"))}, "a"},
	} {
		if got := Initiator(graph(t, c.nodes...).Graph); got != c.want {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
}

// Cascade 4.1.3: of the whole workflow its initiator undoes what it has a part in, and what
// follows from that. What strangers do under the same id stays, and is counted.
func TestCascade413InitiatorLeavesStrangersAlone(t *testing.T) {
	g := graph(t,
		by("a", act("A")), by("a", ckpt("CA", "A")),
		by("e", act("E")), by("e", ckpt("CE", "E")),
		by("b", act("B", "A")), by("b", ckpt("CB", "B")),
		by("a", act("A2")), by("a", ckpt("CA2", "A2")),
		by("e", act("J", "A", "E")), by("e", ckpt("CJ", "J")), // has joined a's part
		by("a", group("G1", "CA", "CB")), by("a", group("G2", "CA", "CE")), by("e", group("G3", "CE")),
		by("a", ckpt("K", "E")), by("e", act("E2", "E")), by("e", ckpt("CE2", "E2")), // a's own, for a stranger's action
	)
	r := planRequest("CA", FullWorkflow)
	r.By, r.Lineage = "a", Ancestor
	p, err := g.Plan(r)
	if err != nil {
		t.Fatal(err)
	}
	wantLevels(t, p, "CJ CA2 CB | K CA | G1")
	if p.Left != 5-1 {
		t.Errorf("%d left", p.Left)
	}
	r.Lineage = Workflow // everything is linked
	if p, err = g.Plan(r); err != nil || p.Left != 0 {
		t.Errorf("%d left, %v", p.Left, err)
	}
	if p := planned(t, g, "CA", FullWorkflow); p.Left != 0 {
		t.Errorf("a coordinator leaves %d", p.Left)
	}
	// Nor does a checkpoint for somebody else's action reach what followed from that.
	r = planRequest("K", SubDAG)
	r.By, r.Lineage = "a", Ancestor
	if p, err = g.Plan(r); err != nil {
		t.Fatal(err)
	}
	wantLevels(t, p, "K")
	wantIDs(t, "dependants", p.Dependants, "E2 J")
	if p.Partial() == nil {
		t.Error("what depends on it is left, and it is prepared")
	}
	r.By = "e"
	if p, err = g.Plan(r); err != nil {
		t.Fatal(err)
	}
	wantLevels(t, p, "CE2 CJ | K CE")
}

// The same, whatever the graph: each checkpoint in the plan is one that the initiator may
// ask for, or a consequence of its own.
func TestCascade413InitiatorAgainstModel(t *testing.T) {
	r := rand.New(rand.NewPCG(43, 1))
	left, taken := 0, 0
	for range 200 {
		nodes := randomNodes(r, 60)
		for i := range nodes {
			nodes[i].By = string('a' + rune(r.IntN(4)))
		}
		g, m := graph(t, nodes...), newModel(nodes)
		q := planRequest(someCheckpoint(r, nodes), FullWorkflow)
		q.By, q.Lineage = "a", Ancestor
		p, err := g.Plan(q)
		if err != nil {
			t.Fatal(err)
		}
		var own []string
		for _, n := range nodes {
			if n.By == "a" && n.Kind != EventNode && n.Kind != GroupNode {
				own = append(own, n.ID)
			}
		}
		follow := m.reach(nil, own...)
		all := steps(t, p)
		for _, n := range nodes {
			_, in := all[n.ID]
			may := g.MayAsk("a", n.ID, Ancestor)
			if may && n.Kind == CheckpointNode && !in {
				t.Errorf("%s is left out", n.ID)
			}
			covers := false
			for _, a := range n.Guards {
				covers = covers || follow[a] || Follows(g.Graph, a, n.ID) && may
			}
			if in && !may && !follow[n.ID] && !covers && n.Kind == CheckpointNode {
				t.Errorf("%s is a stranger's, and in the plan", n.ID)
			}
			if in {
				taken++
			}
		}
		left += p.Left
	}
	if left == 0 || taken == 0 {
		t.Errorf("too tame: %d taken, %d left", taken, left)
	}
}
