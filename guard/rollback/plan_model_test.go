package rollback_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
	. "github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// randomNodes makes a workflow: actions in a random graph, checkpoints of one or two of
// them below or before them, groups, events.
func randomNodes(r *rand.Rand, n int) []Node {
	nodes := []Node{act("n0000")}
	actions, checkpoints := []string{"n0000"}, []string(nil)
	pick := func(from []string) string {
		// Recent ones more often, so that there are long chains.
		if r.IntN(2) == 0 {
			return from[len(from)-1-r.IntN(min(len(from), 5))]
		}
		return from[r.IntN(len(from))]
	}
	for i := 1; i < n; i++ {
		id := fmt.Sprintf("n%04d", i)
		anything := func() string { return nodes[max(0, i-1-r.IntN(min(i, 1+i/4)))].ID }
		var node Node
		switch kind := r.IntN(20); {
		case kind < 9:
			node = act(id, anything())
			if r.IntN(3) == 0 {
				node.Parents = append(node.Parents, anything(), "pruned")
			}
			if len(checkpoints) > 0 && r.IntN(6) == 0 { // placed before it
				c := pick(checkpoints)
				at := slices.IndexFunc(nodes, func(n Node) bool { return n.ID == c })
				nodes[at].Guards = append(slices.Clone(nodes[at].Guards), id)
				node.Parents = append(node.Parents, c)
			}
			if r.IntN(30) == 0 {
				node.Parents = nil
			}
			node.Done = r.IntN(4) > 0
			actions = append(actions, id)
		case kind < 17:
			a := pick(actions)
			node = ckpt(id, a)
			if r.IntN(8) == 0 {
				b := pick(actions)
				node.Parents, node.Guards = []string{a, b}, []string{b, a}
			}
			if r.IntN(6) == 0 {
				node.Parents = append(node.Parents, anything())
			}
			node.State = []NodeState{Ran, Ran, Ran, Undone, InFlight, NeverRan}[r.IntN(6)]
			node.Reversible = r.IntN(8) > 0
			checkpoints = append(checkpoints, id)
		case kind < 18 && len(checkpoints) > 1:
			node = group(id, pick(checkpoints), pick(checkpoints))
			if r.IntN(4) == 0 {
				node.Parents = append(node.Parents, "gone")
			}
			if r.IntN(2) == 0 {
				checkpoints = append(checkpoints, id)
			}
		default:
			node = event(id, anything())
		}
		nodes = append(nodes, node)
	}
	for i := range nodes {
		if nodes[i].Kind == GroupNode {
			nodes[i].Guards = nil
		}
	}
	// Neither ids nor parents say when something began.
	r.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	return nodes
}

func someCheckpoint(r *rand.Rand, nodes []Node) string {
	for {
		if n := nodes[r.IntN(len(nodes))]; n.Kind == CheckpointNode || n.Kind == GroupNode {
			return n.ID
		}
	}
}

// model finds out the slow way what a plan has to be: with sets, from the definitions.
type model struct {
	nodes  map[string]Node
	began  map[string]int
	follow map[string][]string // by the tokens
}

func newModel(nodes []Node) *model {
	m := &model{make(map[string]Node), make(map[string]int), make(map[string][]string)}
	named := make(map[string][]string) // id -> nodes that name it as a parent
	for i, n := range nodes {
		m.nodes[n.ID], m.began[n.ID] = n, i
		for _, p := range n.Parents {
			named[p] = append(named[p], n.ID)
		}
	}
	followers := func(id string) []string {
		var all []string
		todo, met := []string{id}, map[string]bool{id: true}
		for len(todo) > 0 {
			id, todo = todo[0], todo[1:]
			for _, c := range named[id] {
				if m.nodes[c].Kind != GroupNode {
					all = append(all, c)
				} else if !met[c] {
					met[c] = true
					todo = append(todo, c)
				}
			}
		}
		return all
	}
	for _, n := range nodes {
		m.follow[n.ID] = followers(n.ID)
		if n.Kind == GroupNode {
			for _, p := range n.Parents {
				if _, known := m.nodes[p]; known {
					m.follow[n.ID] = append(m.follow[n.ID], p)
				}
			}
		}
	}
	return m
}

// reach gives what can be reached, over the guarded actions of some checkpoints too.
func (m *model) reach(through map[string]bool, from ...string) map[string]bool {
	met := make(map[string]bool)
	for len(from) > 0 {
		id := from[0]
		from = from[1:]
		if met[id] {
			continue
		}
		met[id] = true
		from = append(from, m.follow[id]...)
		if through[id] {
			from = append(from, m.nodes[id].Guards...)
		}
	}
	return met
}

func (m *model) isCheckpoint(id string) bool {
	k := m.nodes[id].Kind
	return k == CheckpointNode || k == GroupNode
}

// roots are a target with all that it contains.
func (m *model) roots(id string) []string {
	all := []string{id}
	for n := 0; n < len(all); n++ {
		if m.nodes[all[n]].Kind != GroupNode {
			continue
		}
		for _, p := range m.nodes[all[n]].Parents {
			if _, known := m.nodes[p]; known && !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// scope gives what a rollback is about, and the checkpoints that it undoes.
func (m *model) scope(target string, s Scope) (about, undone map[string]bool) {
	about, undone = make(map[string]bool), make(map[string]bool)
	var starts []string
	for _, c := range m.roots(target) {
		starts = append(append(starts, c), m.nodes[c].Guards...)
	}
	for id := range m.nodes {
		if s == FullWorkflow || s == Single && slices.Contains(starts, id) {
			about[id] = true
		}
	}
	if s == SubDAG {
		about = m.reach(nil, starts...)
	}
	for id := range about {
		if m.isCheckpoint(id) {
			undone[id] = true
		}
	}
	if s != SubDAG {
		return about, undone
	}
	covered := m.covered(undone)
	for id, n := range m.nodes {
		for _, a := range n.Guards {
			if about[a] && !covered[a] {
				undone[id] = true
			}
		}
	}
	return about, undone
}

func (m *model) covered(undone map[string]bool) map[string]bool {
	all := make(map[string]bool)
	for c := range undone {
		for _, a := range m.nodes[c].Guards {
			all[a] = true
		}
	}
	return all
}

// check holds a plan against the definitions: each consequence once, in an earlier
// level than its cause; nothing else; and no level that nothing asks for.
func (m *model) check(t testing.TB, p *Plan) {
	t.Helper()
	about, undone := m.scope(p.Target, p.Scope)
	covered := m.covered(undone)
	all := steps(t, p)
	level := make(map[string]int)
	for l, some := range p.Levels {
		m.checkOrder(t, p, some)
		for _, s := range some {
			level[s.Checkpoint] = l
			if !undone[s.Checkpoint] {
				t.Errorf("%s %s undoes %s", p.Scope, p.Target, s.Checkpoint)
			}
		}
	}
	causes, tokens := make(map[string]map[string]bool), make(map[string]map[string]bool)
	for c := range undone {
		if _, there := all[c]; !there {
			t.Errorf("%s %s leaves out %s", p.Scope, p.Target, c)
		}
		causes[c], tokens[c] = m.reach(undone, c), m.reach(nil, c)
	}
	for y := range undone {
		reason := level[y] == 0
		for x := range causes[y] {
			if x == y || !undone[x] || causes[x][y] && !tokens[y][x] {
				continue
			}
			reason = reason || level[x] == level[y]-1
			if level[x] >= level[y] {
				t.Errorf("%s %s: %s follows from %s; levels %d and %d", p.Scope, p.Target, x, y, level[x], level[y])
			}
		}
		if !reason {
			t.Errorf("%s %s: nothing holds %s on level %d", p.Scope, p.Target, y, level[y])
		}
	}
	m.checkRest(t, p, about, undone, covered)
}

// checkOrder holds that siblings, and the actions of one step, stand in the reverse of
// their start (cascade 4.1.1, Figure 7).
func (m *model) checkOrder(t testing.TB, p *Plan, level []PlanStep) {
	t.Helper()
	later := func(a, b string) bool { return m.began[a] > m.began[b] }
	for i, s := range level {
		if i > 0 && !later(level[i-1].Checkpoint, s.Checkpoint) {
			t.Errorf("%s %s: %s before %s", p.Scope, p.Target, level[i-1].Checkpoint, s.Checkpoint)
		}
		for i := 1; i < len(s.Actions); i++ {
			if !later(s.Actions[i-1], s.Actions[i]) {
				t.Errorf("%s %s: actions %v", p.Scope, p.Target, s.Actions)
			}
		}
	}
}

// checkRest holds the lists of what is not undone, or undone besides.
func (m *model) checkRest(t testing.TB, p *Plan, about, undone, covered map[string]bool) {
	t.Helper()
	var acting, passed, along, dependants, missing []string
	for c := range undone {
		if s := m.nodes[c].State; s == Ran || s == InFlight {
			acting = append(append(acting, c), m.nodes[c].Guards...)
		}
		for _, id := range m.nodes[c].Parents {
			if _, known := m.nodes[id]; !known && m.nodes[c].Kind == GroupNode && !slices.Contains(missing, id) {
				missing = append(missing, id)
			}
		}
	}
	touched := m.reach(nil, acting...)
	for id, n := range m.nodes {
		switch {
		case n.Kind != ActionNode:
		case about[id] && !covered[id]:
			passed = append(passed, id)
		case covered[id] && !about[id]:
			along = append(along, id)
		case !covered[id] && touched[id] && n.Done:
			dependants = append(dependants, id)
		}
	}
	for _, list := range []struct {
		name      string
		got, want []string
	}{{"passed", p.Passed, passed}, {"along", p.Along, along}, {"dependants", p.Dependants, dependants}, {"missing", p.Missing, missing}} {
		slices.Sort(list.want)
		if !slices.Equal(list.got, list.want) {
			t.Errorf("%s %s: %s %v, want %v", p.Scope, p.Target, list.name, list.got, list.want)
		}
	}
}

// Cascade 4.1.1: 1,000 nodes, against a model that knows nothing of places and knots.
func TestCascade411AgainstModel(t *testing.T) {
	r := rand.New(rand.NewPCG(41, 1))
	seen := make(map[What]int)
	dependants, along, deepest := 0, 0, 0
	try := func(n int) {
		nodes := randomNodes(r, n)
		m, g := newModel(nodes), graph(t, nodes...)
		target := someCheckpoint(r, nodes[:n/4+len(nodes)/2])
		for _, s := range []Scope{Single, SubDAG, FullWorkflow} {
			p := planned(t, g, target, s)
			m.check(t, p)
			dependants, along, deepest = dependants+len(p.Dependants), along+len(p.Along), max(deepest, len(p.Levels))
			for _, s := range steps(t, p) {
				seen[s.What]++
			}
			if t.Failed() {
				t.FailNow()
			}
		}
	}
	for range 300 {
		try(40)
	}
	for range 5 {
		try(1000)
	}
	for _, w := range []What{Nothing, Block, Wait, Escalate, Gather, Undo} {
		if seen[w] == 0 {
			t.Errorf("no step had to %s", w)
		}
	}
	if dependants == 0 || along == 0 || deepest < 20 {
		t.Errorf("the graphs are too tame: %d dependants, %d along, %d levels", dependants, along, deepest)
	}
}

// encoded makes nodes of bytes, four for each: hostile ones too, with cycles and with
// ids that stand twice.
func encoded(data []byte) []Node {
	kinds := []NodeKind{ActionNode, ActionNode, ActionNode, CheckpointNode, CheckpointNode, CheckpointNode, GroupNode, EventNode}
	states := []NodeState{Ran, Undone, InFlight, NeverRan}
	var nodes []Node
	for ; len(data) >= 4 && len(nodes) < 32; data = data[4:] {
		i := len(nodes)
		n := Node{ID: fmt.Sprint(i), Kind: kinds[data[0]&7], Done: data[0]&8 != 0, By: string('a' + rune(data[0]>>6))}
		if data[0]&0x30 == 0x30 {
			n.Parents = append(n.Parents, "gone")
		}
		if n.Kind == CheckpointNode || n.Kind == GroupNode {
			n.State, n.Reversible = states[data[0]>>4&3], data[0]&8 == 0
		}
		near := func(b byte) string { return fmt.Sprint(i - int(int8(b<<2)>>2)%16) }
		for _, b := range data[1:3] {
			if b&0x80 == 0 {
				n.Parents = append(n.Parents, near(b))
			}
		}
		if b := data[3]; n.Kind == CheckpointNode {
			switch {
			case b&0xc0 == 0xc0:
				n.Guards = n.Parents
			case b&0x80 == 0:
				n.Guards = []string{near(b)}
			}
		}
		if data[3] == 0xbf {
			n.ID = "0"
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// mend takes out of the nodes what the records of a workflow never make, and the model knows
// nothing of.
func mend(nodes []Node) []Node {
	byID := make(map[string]NodeKind)
	var mended []Node
	for _, n := range nodes {
		if _, twice := byID[n.ID]; !twice {
			byID[n.ID] = n.Kind
			mended = append(mended, n)
		}
	}
	keep := func(ids []string, which func(k NodeKind, known bool) bool) []string {
		var kept []string
		for _, id := range ids {
			if k, known := byID[id]; which(k, known) {
				kept = append(kept, id)
			}
		}
		return kept
	}
	for i := range mended {
		n := &mended[i]
		n.Guards = keep(n.Guards, func(k NodeKind, _ bool) bool { return k == ActionNode })
		if n.Kind == GroupNode {
			n.Parents = keep(n.Parents, func(k NodeKind, known bool) bool { return !known || k == CheckpointNode || k == GroupNode })
		}
	}
	return mended
}

// FuzzPlan: whatever the nodes are, there is a typed refusal or a plan that the model
// agrees with; and asking who may do it is always safe.
func FuzzPlan(f *testing.F) {
	f.Add([]byte{0, 255, 255, 255, 3, 1, 255, 255, 0, 2, 255, 255, 3, 1, 255, 255}, uint8(0))
	f.Add([]byte{0, 63, 255, 255, 0, 1, 255, 255, 3, 1, 255, 255}, uint8(1)) // a cycle
	f.Add([]byte{0, 255, 255, 255, 3, 1, 255, 255, 3, 2, 255, 255, 6, 1, 2, 0, 6, 1, 62, 0}, uint8(2))
	f.Add([]byte{0, 255, 255, 255, 0, 255, 255, 191}, uint8(0))
	f.Add([]byte{0, 255, 255, 255, 3, 255, 255, 63, 8, 1, 255, 255, 3, 1, 3, 255, 8, 3, 255, 255}, uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, which uint8) {
		raw := encoded(data)
		nodes := mend(raw)
		g := graph(t, nodes...)
		scope := []Scope{Single, SubDAG, FullWorkflow}[which%3]
		unmended := graph(t, raw...)
		for _, n := range raw {
			unmended.MayAsk("a", n.ID, Ancestor)
			_, _ = unmended.Plan(planRequest(n.ID, scope))
		}
		for _, n := range nodes {
			p, err := g.Plan(planRequest(n.ID, scope))
			var cycle *CycleError
			switch {
			case errors.As(err, &cycle):
				if len(cycle.Nodes) == 0 {
					t.Error("a cycle of nothing")
				}
			case errors.Is(err, ErrCheckpointUnknown):
				if n.Kind == CheckpointNode || n.Kind == GroupNode {
					t.Errorf("%s is unknown", n.ID)
				}
			case err != nil:
				t.Fatalf("%T: %v", err, err)
			default:
				newModel(nodes).check(t, p)
			}
			if g.MayAsk("a", n.ID, Ancestor) && !g.MayAsk("a", n.ID, Workflow) {
				t.Errorf("an ancestor of %s is not of its workflow", n.ID)
			}
		}
	})
}

// The nodes of a guarded call as the gateway records them: the agent's action, the
// gateway's checkpoint below it, and the settlement of the call.
func TestFitsGuardedCalls(t *testing.T) {
	task := func(id string, parents ...string) workflow.Record {
		return workflow.Record{ID: id, Parents: parents, Action: "act", By: "agent"}
	}
	claim := func(id, execution string, parents ...string) workflow.Record {
		return workflow.Record{
			ID: id, Parents: parents, Event: ect.EventCheckpoint, Action: "checkpoint", Reversible: true,
			Issuer: "gateway", Own: true, Execution: execution,
		}
	}
	settled := func(id, execution string, o workflow.Outcome, parents ...string) workflow.Record {
		return workflow.Record{
			ID: id, Parents: parents, Action: "pay", Outcome: o, Issuer: "gateway", Own: true, Execution: execution,
		}
	}
	g := &Graph{Graph: workflow.New([]workflow.Record{
		task("T1"), claim("C1", "x1", "T1"), settled("S1", "x1", workflow.Completed, "C1", "T1"),
		claim("C2", "x2", "C1"), settled("S2", "x2", workflow.InDoubt, "C2"), // a call within the call
		task("T3", "T1"), claim("C3", "x3", "T3"), settled("S3", "x3", workflow.Released, "C3", "T3"),
		claim("C4", "x4", "T3"), // once more, and under way
		task("T5", "S1"), {ID: "E", Parents: []string{"S1"}, Event: ect.EventError, CheckpointID: "C1"},
		task("T6"), claim("C6", "x6", "T6"), settled("S6", "x6", workflow.Completed, "C6", "T6"),
	})}
	p := planned(t, g, "C1", SubDAG)
	wantLevels(t, p, "C4 C3 C2 | C1")
	wantIDs(t, "passed over", p.Passed, "T5")
	for c, want := range map[string]string{"C1": "undo [S1 T1]", "C2": "undo [S2]", "C3": "block [S3 T3]", "C4": "wait [T3]"} {
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
		at := map[string]int{}
		for i := range 60 {
			at[fmt.Sprint("r", i)] = i
			rec := workflow.Record{ID: fmt.Sprint("r", i), Action: "act", By: "a", Reversible: true}
			if r.IntN(2) == 0 {
				rec.Event = ect.EventCheckpoint
			}
			for range r.IntN(3) {
				if i > 0 {
					rec.Parents = append(rec.Parents, fmt.Sprint("r", r.IntN(i)))
				}
			}
			records = append(records, rec)
		}
		wf := workflow.New(records)
		g := &Graph{Graph: wf, states: map[string]NodeState{}}
		for _, n := range wf.Nodes() {
			if n.Event != ect.EventCheckpoint {
				continue
			}
			p := planned(t, g, n.ID, SubDAG)
			all := steps(t, p)
			for id := range reached(wf, n.ID) {
				if _, there := all[id]; !there && records[at[id]].Event == ect.EventCheckpoint {
					t.Fatalf("%s reaches %s, which is not in %s", n.ID, id, levels(p))
				}
			}
		}
	}
}

// reached is what follows from a checkpoint, from the actions that it was made for, and from
// what it contains as a group, by the edges of the workflow's graph.
func reached(wf *workflow.Graph, id string) map[string]bool {
	below, todo := map[string]bool{}, []string{id}
	edges, guards := wf.Edges(), map[string][]string{}
	for _, n := range wf.Nodes() {
		guards[n.ID] = n.Guards
	}
	add := func(next string) {
		if next != id && !below[next] {
			below[next] = true
			todo = append(todo, next)
		}
	}
	contains := func(e workflow.Edge) bool { return e.Kind == workflow.Contains }
	for n := 0; n < len(todo); n++ { // what belongs to the checkpoint
		for _, action := range guards[todo[n]] {
			add(action)
		}
		for _, e := range edges {
			if e.From == todo[n] && contains(e) {
				add(e.To)
			}
		}
	}
	for n := 0; n < len(todo); n++ {
		for _, e := range edges {
			if e.From == todo[n] {
				add(e.To)
			}
		}
	}
	return below
}
