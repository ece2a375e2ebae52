package workflow

import (
	"slices"
	"strings"
)

// guard finds the tasks that each checkpoint was made for. The drafts place it in two
// ways: with the action as its parent (ATD, "Checkpoint ECT Format"; cascade 4.2.1), or
// before the action, as the action's parent (cascade, Figure 7; AERR). The gateway's
// are of the first kind, and its settlement tells what came of the action; what an
// upstream does on behalf of the call follows from them as well.
func (g *Graph) guard() {
	g.guards, g.undoable = make([][]int, len(g.nodes)), make([]bool, len(g.nodes))
	preceded := make([]bool, len(g.nodes)) // tasks whose checkpoint is their parent
	for i := range g.nodes {
		if !g.nodes[i].isCheckpoint() || g.groups[i] {
			continue
		}
		if g.nodes[i].Own {
			g.guards[i] = g.guarded(i)
		} else {
			g.guards[i] = g.placed(i, preceded)
		}
		g.nodes[i].Guards = g.ids(g.guards[i])
		for _, t := range g.guards[i] {
			g.undoable[t] = g.undoable[t] || g.nodes[i].Reversible
		}
	}
	g.executions = make(map[string][]int)
	for i := range g.nodes {
		if !g.nodes[i].settlement() {
			continue
		}
		if name := g.nodes[i].Execution; name != "" {
			g.executions[name] = append(g.executions[name], i)
		}
		g.nodes[i].Settles = g.ids(g.announced(i))
	}
}

// placed gives the tasks of an agent's checkpoint, wherever it is placed. preceded
// notes those that it is placed before.
func (g *Graph) placed(i int, preceded []bool) []int {
	var before, after []int
	for _, p := range g.parents[i] {
		if g.nodes[p].task() && !g.nodes[p].settlement() && !preceded[p] {
			before = append(before, p)
		}
	}
	for _, c := range g.children[i] {
		if g.nodes[c].task() {
			after = append(after, c)
		}
	}
	if len(before) > 0 && !(len(after) > 0 && strings.HasPrefix(g.nodes[i].Action, "aerr:")) {
		return before
	}
	for _, c := range after {
		preceded[c] = true
	}
	return after
}

// guarded gives the tasks of the gateway's checkpoint i: the settlements of its claim,
// with what they settle, or else what announced the call.
func (g *Graph) guarded(i int) []int {
	announced := g.announced(i)
	var settled, shared []int
	for _, c := range g.children[i] {
		if !g.claimOf(c, i) {
			continue
		}
		settled = append(settled, c)
		for _, t := range g.announced(c) {
			if slices.Contains(announced, t) && !slices.Contains(shared, t) {
				shared = append(shared, t)
			}
		}
	}
	if len(settled) == 0 {
		return announced
	}
	return append(settled, shared...)
}

// announced are the agents' tasks that a checkpoint or settlement of the gateway is of:
// those among its parents, and those that an agent's checkpoint among them follows
// from.
func (g *Graph) announced(i int) []int {
	var tasks []int
	add := func(p int) {
		if g.nodes[p].task() && !g.nodes[p].settlement() && !slices.Contains(tasks, p) {
			tasks = append(tasks, p)
		}
	}
	for _, p := range g.parents[i] {
		add(p)
		if g.nodes[p].isCheckpoint() && !g.nodes[p].Own {
			for _, t := range g.parents[p] {
				add(t)
			}
		}
	}
	return tasks
}

// claimOf reports whether node s is a settlement of the claim of the gateway's
// checkpoint c. Its other parents can be checkpoints of the gateway too: of the call
// that it was made within.
func (g *Graph) claimOf(s, c int) bool {
	settled, claimed := &g.nodes[s], &g.nodes[c]
	return settled.settlement() && claimed.isCheckpoint() && claimed.Own &&
		(settled.Execution == claimed.Execution || settled.Execution == "" || claimed.Execution == "")
}

// subjects are the tasks that an error of node i is about.
func (g *Graph) subjects(i int) []int {
	switch node := &g.nodes[i]; {
	case node.settlement():
		return g.announced(i)
	case node.isCheckpoint():
		return g.guards[i]
	}
	return nil
}

// culprits are the parents of error i that it is about. The gateway's error has its
// settlement among its parents, and what that settles; others led to the call.
func (g *Graph) culprits(i int) []int {
	if !g.nodes[i].Own {
		return g.parents[i]
	}
	var about []int
	for _, p := range g.parents[i] {
		if g.nodes[p].settlement() {
			about = append(about, p)
			about = append(about, g.announced(p)...)
		}
	}
	if len(about) == 0 {
		return g.parents[i]
	}
	return slices.DeleteFunc(slices.Clone(g.parents[i]), func(p int) bool { return !slices.Contains(about, p) })
}
