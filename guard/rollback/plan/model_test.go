package plan_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	. "github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
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
			node.State = []State{Standing, Standing, Standing, Undone, InFlight, NeverRan}[r.IntN(6)]
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
		if nodes[i].Kind == Group {
			nodes[i].Guards = nil
		}
		nodes[i].Start = r.IntN(n) // some at once, and ids tell nothing
	}
	return nodes
}

func someCheckpoint(r *rand.Rand, nodes []Node) string {
	for {
		if n := nodes[r.IntN(len(nodes))]; n.Kind == Checkpoint || n.Kind == Group {
			return n.ID
		}
	}
}

// model finds out the slow way what a plan has to be: with sets, from the definitions.
type model struct {
	nodes  map[string]Node
	follow map[string][]string // by the tokens
}

func newModel(nodes []Node) *model {
	m := &model{make(map[string]Node), make(map[string][]string)}
	named := make(map[string][]string) // id -> nodes that name it as a parent
	for _, n := range nodes {
		m.nodes[n.ID] = n
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
				if m.nodes[c].Kind != Group {
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
		if n.Kind == Group {
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
	return k == Checkpoint || k == Group
}

// roots are a target with all that it contains.
func (m *model) roots(id string) []string {
	all := []string{id}
	for n := 0; n < len(all); n++ {
		if m.nodes[all[n]].Kind != Group {
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
func (m *model) checkOrder(t testing.TB, p *Plan, level []Step) {
	t.Helper()
	later := func(a, b string) bool {
		if x, y := m.nodes[a].Start, m.nodes[b].Start; x != y {
			return x > y
		}
		return a > b
	}
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
		if s := m.nodes[c].State; s == Standing || s == InFlight {
			acting = append(append(acting, c), m.nodes[c].Guards...)
		}
		for _, id := range m.nodes[c].Parents {
			if _, known := m.nodes[id]; !known && m.nodes[c].Kind == Group && !slices.Contains(missing, id) {
				missing = append(missing, id)
			}
		}
	}
	touched := m.reach(nil, acting...)
	for id, n := range m.nodes {
		switch {
		case n.Kind != Action:
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
