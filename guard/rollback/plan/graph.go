package plan

import (
	"fmt"
	"slices"
)

// Graph is the graph of one workflow. It never changes, and several goroutines can use
// it.
//
// Inside, nodes are places: 0 to len(nodes)-1. A group has a second place, which stands
// for what follows from it: the first leads to what it contains, all of that leads to
// the second.
type Graph struct {
	workflow string
	nodes    []Node
	index    map[string]int
	parents  [][]int    // of a node: those of its parents that are nodes
	guards   [][]int    // of a checkpoint: the actions that it was made for, each once
	unknown  [][]string // of a group: those of its parents that are no nodes
	after    []int      // of a node: the place that its consequences follow from
	groups   []int      // in the order of their second places
	down     [][]int    // of a place: what follows from it
}

// New makes the graph of a workflow, whose name becomes a part of every plan's hash.
// The nodes may come in any order. It fails with *TooManyError or *NodeError. Nodes are
// not copied deeply: nobody may change them afterwards.
func New(workflow string, nodes []Node) (*Graph, error) {
	if len(nodes) > MaxNodes {
		return nil, &TooManyError{"nodes", len(nodes), MaxNodes}
	}
	links := 0
	for i := range nodes {
		links += len(nodes[i].Parents) + len(nodes[i].Guards)
	}
	if links > MaxEdges {
		return nil, &TooManyError{"edges", links, MaxEdges}
	}
	return build(workflow, nodes)
}

// build is New without limits.
func build(workflow string, nodes []Node) (*Graph, error) {
	g := &Graph{workflow: workflow, nodes: slices.Clone(nodes), index: make(map[string]int, len(nodes))}
	for i := range g.nodes {
		n := &g.nodes[i]
		if problem := n.problem(); problem != "" {
			return nil, &NodeError{n.ID, problem}
		}
		if _, twice := g.index[n.ID]; twice {
			return nil, &NodeError{n.ID, "the id stands twice; it must be unique within the workflow"}
		}
		g.index[n.ID] = i
	}
	if err := g.look(); err != nil {
		return nil, err
	}
	g.link()
	return g, nil
}

// look finds the nodes that are named by others.
func (g *Graph) look() error {
	g.parents, g.guards, g.unknown = make([][]int, len(g.nodes)), make([][]int, len(g.nodes)), make([][]string, len(g.nodes))
	for i := range g.nodes {
		n := &g.nodes[i]
		for _, id := range n.Parents {
			switch p, known := g.index[id]; {
			case !known && n.Kind == Group:
				g.unknown[i] = append(g.unknown[i], id)
			case !known:
			case n.Kind == Group && !g.nodes[p].isCheckpoint():
				return &NodeError{n.ID, fmt.Sprintf("the group contains %s, which is no checkpoint", quote(id))}
			default:
				g.parents[i] = append(g.parents[i], p)
			}
		}
	}
	met := make([]int, len(g.nodes)) // the checkpoint that named it last, from 1 on
	for i := range g.nodes {
		for _, id := range g.nodes[i].Guards {
			a, known := g.index[id]
			if !known || g.nodes[a].Kind != Action {
				return &NodeError{g.nodes[i].ID, fmt.Sprintf("guards %s, which is no action of the workflow", quote(id))}
			}
			if met[a] != i+1 {
				met[a] = i + 1
				g.guards[i] = append(g.guards[i], a)
			}
		}
	}
	return nil
}

// link makes the edges along which consequences are found.
func (g *Graph) link() {
	g.after = make([]int, len(g.nodes))
	for i := range g.nodes {
		g.after[i] = i
		if g.nodes[i].Kind == Group {
			g.after[i] = len(g.nodes) + len(g.groups)
			g.groups = append(g.groups, i)
		}
	}
	g.down = make([][]int, len(g.nodes)+len(g.groups))
	for i := range g.nodes {
		group := g.nodes[i].Kind == Group
		if group {
			g.down[i] = append(g.down[i], g.after[i])
		}
		for _, p := range g.parents[i] {
			if group {
				g.down[i] = append(g.down[i], p)
			}
			g.down[g.after[p]] = append(g.down[g.after[p]], g.after[i])
		}
	}
}

// node is the node of a place.
func (g *Graph) node(place int) *Node {
	if place >= len(g.nodes) {
		place = g.groups[place-len(g.nodes)]
	}
	return &g.nodes[place]
}

// checkpoint finds a checkpoint or group by its id.
func (g *Graph) checkpoint(id string) (int, bool) {
	i, ok := g.index[id]
	return i, ok && g.nodes[i].isCheckpoint()
}

// contained gives the checkpoint i, and if it is a group all that it contains, groups
// in it too.
func (g *Graph) contained(i int) []int {
	all, met := []int{i}, map[int]bool{i: true}
	for n := 0; n < len(all); n++ {
		if g.nodes[all[n]].Kind != Group {
			continue
		}
		for _, p := range g.parents[all[n]] {
			if !met[p] {
				met[p] = true
				all = append(all, p)
			}
		}
	}
	return all
}
