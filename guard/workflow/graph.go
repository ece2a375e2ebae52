package workflow

import (
	"container/heap"
	"slices"
)

// Graph is the graph of a workflow. It never changes.
type Graph struct {
	nodes []Node         // in topological order
	seq   []int          // of each node: its place among the records
	index map[string]int // id -> place in nodes

	parents  [][]int // by the tokens' own par, as far as they are recorded
	children [][]int // the reverse of parents
	down     [][]int // children, but from a group to what it contains
	groups   []bool  // checkpoints that contain others
	guards   [][]int // checkpoint -> the tasks that it was made for
	undoable []bool  // tasks with a checkpoint that can be undone
	// executions are the gateway's settlements by execution.
	executions map[string][]int
	ordered    int // nodes from here on lie on a cycle or behind one
}

// New makes the graph of records, which are given in the order in which they were
// recorded. Of two with one id the first counts.
func New(records []Record) *Graph {
	g := &Graph{index: make(map[string]int, len(records))}
	var kept []int
	for i := range records {
		if _, twice := g.index[records[i].ID]; !twice {
			g.index[records[i].ID] = len(kept)
			kept = append(kept, i)
		}
	}
	for _, i := range kept {
		g.nodes = append(g.nodes, Node{Record: records[i]})
	}
	g.seq = make([]int, len(kept))
	for i := range g.seq {
		g.seq[i] = i
	}
	g.link()
	g.reorder(g.sort())
	g.link()
	g.guard()
	derive(g)
	return g
}

// link finds the neighbours of every node.
func (g *Graph) link() {
	n := len(g.nodes)
	g.parents, g.children, g.down, g.groups = make([][]int, n), make([][]int, n), make([][]int, n), make([]bool, n)
	for i := range g.nodes {
		node := &g.nodes[i]
		node.Missing = nil
		seen := make(map[int]bool, len(node.Parents))
		for _, id := range node.Parents {
			p, ok := g.index[id]
			switch {
			case !ok:
				node.Missing = append(node.Missing, id)
			case p != i && !seen[p]:
				seen[p] = true
				g.parents[i] = append(g.parents[i], p)
			}
		}
		g.groups[i] = g.contains(i)
	}
	for i, parents := range g.parents {
		for _, p := range parents {
			g.children[p] = append(g.children[p], i)
			if g.groups[i] {
				g.down[i] = append(g.down[i], p)
			} else {
				g.down[p] = append(g.down[p], i)
			}
		}
	}
}

// contains reports whether a node is a checkpoint that groups others: all its parents
// are checkpoints (ATD, "Hierarchical Checkpoints"). Those do not cause it. One that
// has another parent too was caused like any other node: its edges could not be turned
// around without cycles. The gateway makes no groups: its checkpoint of a call within
// another call follows from that one's.
func (g *Graph) contains(i int) bool {
	if !g.nodes[i].isCheckpoint() || g.nodes[i].Own || len(g.parents[i]) == 0 {
		return false
	}
	return !slices.ContainsFunc(g.parents[i], func(p int) bool { return !g.nodes[p].isCheckpoint() })
}

// sort gives the nodes in a topological order; of those that could come next, the one
// that was recorded first does. What lies on a cycle or behind one comes last.
func (g *Graph) sort() []int {
	waits := make([]int, len(g.nodes))
	for _, to := range g.down {
		for _, i := range to {
			waits[i]++
		}
	}
	var next smallest
	for i, n := range waits {
		if n == 0 {
			next = append(next, i) // ascending, which is a heap
		}
	}
	order := make([]int, 0, len(g.nodes))
	for len(next) > 0 {
		i := heap.Pop(&next).(int)
		order = append(order, i)
		for _, j := range g.down[i] {
			if waits[j]--; waits[j] == 0 {
				heap.Push(&next, j)
			}
		}
	}
	g.ordered = len(order)
	for i, n := range waits {
		if n > 0 {
			order = append(order, i)
		}
	}
	return order
}

// reorder brings the nodes into an order.
func (g *Graph) reorder(order []int) {
	nodes := make([]Node, len(order))
	for at, i := range order {
		nodes[at] = g.nodes[i]
		g.index[nodes[at].ID] = at
	}
	g.nodes, g.seq = nodes, order
}

// smallest is a heap of places.
type smallest []int

// Len implements heap.Interface.
func (h smallest) Len() int { return len(h) }

// Less implements heap.Interface.
func (h smallest) Less(i, j int) bool { return h[i] < h[j] }

// Swap implements heap.Interface.
func (h smallest) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *smallest) Push(x any) { *h = append(*h, x.(int)) }

// Pop implements heap.Interface.
func (h *smallest) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}
