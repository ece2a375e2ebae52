package workflow_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

const gateway = "spiffe://example.com/gateway"

// by gives a record to its issuer; the gateway's are its own.
func by(issuer string, r Record) Record {
	r.Issuer, r.Own = issuer, issuer == gateway
	return r
}

func task(id string, parents ...string) Record {
	return by("a", Record{ID: id, Parents: parents, Action: "act"})
}

func ckpt(id string, parents ...string) Record {
	return by("a", Record{ID: id, Parents: parents, Event: ect.EventCheckpoint, Action: "checkpoint", Reversible: true})
}

// claim is the gateway's checkpoint, settled its node after the call.
func claim(id string, parents ...string) Record { return by(gateway, ckpt(id, parents...)) }

func settled(id string, o Outcome, parents ...string) Record {
	return by(gateway, Record{ID: id, Parents: parents, Action: "pay", Outcome: o})
}

func failure(id, checkpoint string, parents ...string) Record {
	return by("a", Record{ID: id, Parents: parents, Event: ect.EventError, CheckpointID: checkpoint, Severity: "error"})
}

// undone is a result of a rollback by an issuer.
func undone(issuer, id, checkpoint, status string, parents ...string) Record {
	return by(issuer, Record{ID: id, Parents: parents, Event: ect.EventRollbackComplete, CheckpointID: checkpoint, Status: status})
}

func start(id, checkpoint string, parents ...string) Record {
	return by("a", Record{ID: id, Parents: parents, Event: ect.EventRollbackStart, CheckpointID: checkpoint})
}

// node is the node with an id.
func node(g *Graph, id string) (Node, bool) {
	all := g.Nodes()
	i := slices.IndexFunc(all, func(n Node) bool { return n.ID == id })
	if i < 0 {
		return Node{}, false
	}
	return all[i], true
}

func ids(g *Graph) string {
	var all []string
	for _, n := range g.Nodes() {
		all = append(all, n.ID)
	}
	return strings.Join(all, " ")
}

func edges(g *Graph) []string {
	var all []string
	for _, e := range g.Edges() {
		all = append(all, fmt.Sprintf("%s-%s->%s", e.From, e.Kind, e.To))
	}
	slices.Sort(all)
	return all
}

func wantEdges(t *testing.T, g *Graph, want ...string) {
	t.Helper()
	slices.Sort(want)
	if got := edges(g); !slices.Equal(got, want) {
		t.Errorf("edges\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// figure7 is the graph of cascade's Figure 7.
func figure7(more ...Record) *Graph {
	return New(append([]Record{ckpt("A"), task("A1", "A"), ckpt("B", "A1"), task("B1", "B"), task("B2", "B")}, more...))
}

// Cascade 4.1.1, Figure 7: what is undone, in the reverse of the topological order.
func TestRollbackOrderOfFigure7(t *testing.T) {
	g := figure7()
	order := strings.Fields(ids(g))
	slices.Reverse(order)
	if got := strings.Join(order, ", "); got != "B2, B1, B, A1, A" {
		t.Errorf("rollback order %s", got)
	}
	wantEdges(t, g, "A-caused->A1", "A1-caused->B", "B-caused->B1", "B-caused->B2")
	for id, want := range map[string]string{"A": "A1", "B": "B1 B2"} {
		if n, _ := node(g, id); strings.Join(n.Guards, " ") != want {
			t.Errorf("%s was made for %v, want %s", id, n.Guards, want)
		}
	}
	if got := fmt.Sprint(g.Roots(), g.Leaves(), g.Unordered()); got != "[A] [B1 B2] []" {
		t.Error(got)
	}
}

// Cascade 4.4.2, Figure 13: the audit trail, whose results stand below one start.
func TestEdgesOfFigure13(t *testing.T) {
	g := New([]Record{
		task("T"), ckpt("C", "T"), failure("E", "C", "T"), start("S", "C", "E"),
		undone("a", "RA", "", "completed", "S"), undone("a", "RB", "", "completed", "S"),
		by("a", Record{ID: "RC", Parents: []string{"S"}, Event: ect.EventCompensate}),
	})
	wantEdges(t, g, "T-checkpoint_of->C", "T-error_of->E", "E-caused->S", "S-caused->RA", "S-caused->RB", "S-caused->RC")
	if n, _ := node(g, "T"); n.State != RolledBack {
		t.Errorf("T is %s", n.State)
	}
}

// ATD, "Hierarchical Checkpoints": the parents of a group are what it contains, and
// did not cause it.
func TestGroupsContain(t *testing.T) {
	g := New([]Record{
		task("T1"), ckpt("C1", "T1"), task("T2", "T1"), ckpt("C2", "T2"),
		ckpt("G", "C1", "C2"), ckpt("C3", "T2"), ckpt("H", "G", "C3"), task("T3", "T2"),
	})
	wantEdges(t, g, "T1-checkpoint_of->C1", "T1-caused->T2", "T2-checkpoint_of->C2", "T2-checkpoint_of->C3",
		"G-contains->C1", "G-contains->C2", "H-contains->G", "H-contains->C3", "T2-caused->T3")
	if order := strings.Fields(ids(g)); slices.Index(order, "H") > slices.Index(order, "G") || slices.Index(order, "G") > slices.Index(order, "C1") {
		t.Errorf("a group comes before what it contains: %v", order)
	}
}

// A checkpoint with an action among its parents is no group, also beside checkpoints:
// its edges cannot be turned around.
func TestMixedParentsAreNoGroup(t *testing.T) {
	g := New([]Record{task("T1"), ckpt("C1", "T1"), task("T2", "C1"), ckpt("M", "T2", "C1")})
	wantEdges(t, g, "T1-checkpoint_of->C1", "C1-caused->T2", "T2-checkpoint_of->M", "C1-caused->M")
	if len(g.Unordered()) > 0 {
		t.Errorf("a cycle: %v", g.Unordered())
	}
}

// ATD, "Topological Order": parents first; else in the order of recording.
func TestTopologicalOrder(t *testing.T) {
	g := New([]Record{task("d", "b", "c"), task("b", "a"), task("x"), task("c", "a"), task("a")})
	if got := ids(g); got != "x a b c d" {
		t.Errorf("order %s", got)
	}
}

func TestDuplicatesAndMissingParents(t *testing.T) {
	g := New([]Record{task("a", "gone", "a", "gone"), task("b", "a", "a"), by("z", task("a", "b"))})
	a, ok := node(g, "a")
	if !ok || a.Issuer != "a" || fmt.Sprint(a.Missing) != "[gone gone]" || len(g.Nodes()) != 2 {
		t.Errorf("%+v", g.Nodes())
	}
	wantEdges(t, g, "a-caused->b")
	if _, ok := node(g, "gone"); ok {
		t.Error("a node that is not recorded")
	}
	if g := New(nil); len(g.Nodes()) != 0 || len(g.Roots()) != 0 || g.Summary().Status != "running" {
		t.Errorf("the empty graph: %+v", g.Summary())
	}
}

// Hostile input: what lies on a cycle is named, and nothing runs for ever.
func TestCyclesAreNamed(t *testing.T) {
	g := New([]Record{
		task("root"), task("a", "b", "root"), task("b", "a"), task("behind", "b"),
		ckpt("c1", "c2"), ckpt("c2", "c1"),
	})
	if got := fmt.Sprint(g.Unordered()); got != "[a b behind c1 c2]" {
		t.Errorf("unordered %s", got)
	}
}

// 10,000 nodes, each with as many parents as are allowed.
func TestLargeGraph(t *testing.T) {
	const size, width = 10_000, 100
	records := make([]Record, size)
	for i := range records {
		records[i] = task(fmt.Sprint(i))
		switch i % 5 {
		case 1:
			records[i].Event = ect.EventCheckpoint
		case 2:
			records[i].Event, records[i].CheckpointID = ect.EventError, fmt.Sprint(i-1)
		case 3:
			records[i].Event, records[i].Status = ect.EventRollbackComplete, "completed"
		case 4:
			records[i].Event = ect.EventRollbackRequest
		}
		for p := max(0, i-width); p < i; p++ {
			records[i].Parents = append(records[i].Parents, fmt.Sprint(p))
		}
	}
	g := New(records)
	if len(g.Unordered()) > 0 {
		t.Errorf("%d unordered", len(g.Unordered()))
	}
	g.RecoveryPoints(records[0].Time)
	if n := len(g.Edges()); n != size*width-width*(width+1)/2 {
		t.Errorf("%d edges", n)
	}
}

// Nodes of which is known what the records say make the same graph; what they name wrongly does
// not count.
func TestGraphOfKnownNodes(t *testing.T) {
	of := New([]Record{
		task("T1"), ckpt("C1", "T1"), task("T2", "T1"), claim("C2", "T2"), settled("S2", Completed, "C2", "T2"),
		ckpt("G", "C1", "C2"), undone("a", "R", "C1", "completed", "C1"), task("T3", "G", "gone"),
	})
	recorded := make([]Node, of.Len())
	for i := range recorded {
		recorded[of.Seq(i)] = *of.At(i)
	}
	again := FromNodes(recorded)
	if got, want := fmt.Sprintf("%+v", again.Nodes()), fmt.Sprintf("%+v", of.Nodes()); got != want {
		t.Errorf("nodes\n%s\nwant\n%s", got, want)
	}
	wantEdges(t, again, edges(of)...)
	if got, want := fmt.Sprint(again.Summary(), again.RecoveryPoints(time.Time{})), fmt.Sprint(of.Summary(), of.RecoveryPoints(time.Time{})); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	first := Node{Record: task("T")}
	wrong := Node{Record: ckpt("C", "T"), Guards: []string{"T", "E", "gone", "T", "C"}}
	g := FromNodes([]Node{first, {Record: by("z", task("T"))}, {Record: failure("E", "")}, wrong})
	c, _ := g.Index("C")
	if guarded := g.Guarded(c); g.Len() != 3 || len(guarded) != 1 || g.At(guarded[0]).Issuer != "a" {
		t.Errorf("%d nodes, %v", g.Len(), guarded)
	}
}

// What follows from a group follows from all that it contains, and the group from none of it
// (ATD, "Hierarchical Checkpoints"). What names itself is a cycle.
func TestConsequences(t *testing.T) {
	g := New([]Record{
		task("T1"), ckpt("C1", "T1"), task("T2"), ckpt("C2", "T2"), ckpt("G", "C1", "C2"), ckpt("H", "G"),
		task("T3", "G"), task("T4", "H"), task("self", "self", "T2"),
	})
	if g.Places() != g.Len()+2 {
		t.Errorf("%d places of %d nodes and two groups", g.Places(), g.Len())
	}
	for id, want := range map[string]string{
		"T1": "C1 T3 T4", "C1": "T3 T4", "G": "C1 C2 T3 T4", "H": "C1 C2 G T3 T4", "T2": "C2 T3 T4 self", "T3": "", "self": "self",
	} {
		at, _ := g.Index(id)
		met := make(map[int]bool)
		for todo := []int{at}; len(todo) > 0; todo = todo[1:] {
			for _, next := range g.Next(todo[0]) {
				if !met[next] {
					met[next] = true
					todo = append(todo, next)
				}
			}
		}
		var got []string
		for i := range g.Len() {
			if met[i] {
				got = append(got, g.At(i).ID)
			}
		}
		slices.Sort(got)
		if s := strings.Join(got, " "); s != want {
			t.Errorf("from %s follow %q, want %q", id, s, want)
		}
	}
}
