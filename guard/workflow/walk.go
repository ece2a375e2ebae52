package workflow

import "slices"

// Descendants are the nodes that follow from the node with an id, in topological order,
// each once: what a failure of it reaches (cascade, "Blast radius"). From a checkpoint
// the walk goes on from the tasks that it was made for, from a group also from what it
// contains. It ends after limit nodes, and more says that there are others. An unknown
// id has none.
//
// Whoever undoes them goes through the list backwards, and then undoes id itself. A
// group may contain checkpoints of other agents: to undo it is to undo theirs.
func (g *Graph) Descendants(id string, limit int) (ids []string, more bool) {
	start, ok := g.index[id]
	if !ok {
		return []string{}, false
	}
	w := walk{graph: g, limit: limit, met: map[int]bool{start: true}, todo: []int{start}}
	w.widen()
	return w.along(func(i int) []int { return g.down[i] })
}

// Ancestors are the nodes that the node with an id follows from, in topological order,
// each once. It ends after limit nodes, and more says that there are others. A group is
// no ancestor of what it contains, nor the reverse: it was made afterwards, by anybody,
// and gives nobody a right to undo (ATD, "Rollback Authorization").
func (g *Graph) Ancestors(id string, limit int) (ids []string, more bool) {
	start, ok := g.index[id]
	if !ok {
		return []string{}, false
	}
	w := walk{graph: g, limit: limit, met: map[int]bool{start: true}, todo: []int{start}}
	return w.along(func(i int) []int {
		if g.groups[i] {
			return nil
		}
		return g.parents[i]
	})
}

// walk goes over the nodes that can be reached, breadth first.
type walk struct {
	graph *Graph
	limit int
	met   map[int]bool
	todo  []int
	found []int
	more  bool
}

// widen adds to the start what belongs to it.
func (w *walk) widen() {
	g := w.graph
	for n := 0; n < len(w.todo); n++ {
		at := w.todo[n]
		w.meet(g.guards[at])
		if g.groups[at] {
			w.meet(g.parents[at])
		}
	}
}

func (w *walk) along(edges func(int) []int) ([]string, bool) {
	for n := 0; n < len(w.todo); n++ {
		w.meet(edges(w.todo[n]))
	}
	slices.Sort(w.found)
	return w.graph.ids(w.found), w.more
}

func (w *walk) meet(nodes []int) {
	for _, i := range nodes {
		switch {
		case w.met[i]:
		case len(w.found) >= w.limit:
			w.more = true
			return
		default:
			w.met[i] = true
			w.todo, w.found = append(w.todo, i), append(w.found, i)
		}
	}
}
