package workflow

import "slices"

// Nodes are all nodes in topological order: none before one that it follows from, and
// a group before the checkpoints that it contains. The reverse is the order of a
// rollback (cascade 4.1.1). Unordered names what has no place in it.
func (g *Graph) Nodes() []Node { return slices.Clone(g.nodes) }

// Node is the node with an id.
func (g *Graph) Node(id string) (Node, bool) {
	i, ok := g.index[id]
	if !ok {
		return Node{}, false
	}
	return g.nodes[i], true
}

// Unordered are the nodes on a cycle or behind one. A graph of tokens has none, since
// a token can only name what was there before it; these stand last in Nodes.
func (g *Graph) Unordered() []string { return g.ids(from(g.ordered, len(g.nodes))) }

// Edges are all edges, in the order of the nodes that they were recorded with.
func (g *Graph) Edges() []Edge {
	var edges []Edge
	for i, parents := range g.parents {
		for _, p := range parents {
			e := Edge{g.nodes[p].ID, g.nodes[i].ID, g.kind(p, i)}
			if e.Kind == Contains {
				e.From, e.To = e.To, e.From
			}
			edges = append(edges, e)
		}
	}
	return edges
}

// kind says what it means that p is a parent of i.
func (g *Graph) kind(p, i int) EdgeKind {
	switch {
	case g.groups[i]:
		return Contains
	case g.nodes[i].Event == Error && !g.nodes[i].Stranger && slices.Contains(g.culprits(i), p):
		return ErrorOf
	case g.nodes[i].isCheckpoint() && slices.Contains(g.guards[i], p):
		return CheckpointOf
	case g.settles(i, p):
		return Settles
	}
	return Caused
}

// settles reports whether i tells what came of the agent's task p.
func (g *Graph) settles(i, p int) bool {
	return g.nodes[i].settlement() && g.nodes[p].task() && !g.nodes[p].settlement()
}

// Roots are the nodes that follow from nothing that is recorded.
func (g *Graph) Roots() []string {
	follows := make([]bool, len(g.nodes))
	for _, to := range g.down {
		for _, i := range to {
			follows[i] = true
		}
	}
	return g.where(func(i int) bool { return !follows[i] })
}

// Leaves are the nodes from which nothing follows.
func (g *Graph) Leaves() []string {
	return g.where(func(i int) bool { return len(g.down[i]) == 0 })
}

func (g *Graph) where(is func(int) bool) []string {
	return g.ids(slices.DeleteFunc(from(0, len(g.nodes)), func(i int) bool { return !is(i) }))
}

// ids are the ids of places; an empty list is not nil.
func (g *Graph) ids(places []int) []string {
	list := make([]string, len(places))
	for n, i := range places {
		list[n] = g.nodes[i].ID
	}
	return list
}

func from(first, end int) []int {
	all := make([]int, 0, end-first)
	for i := first; i < end; i++ {
		all = append(all, i)
	}
	return all
}
