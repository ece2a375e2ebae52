package rollback

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

const (
	// MaxNodes is the most nodes that a plan is made of: those of a workflow with as many
	// checkpoints as may stand by default, of calls that have three tokens each and were
	// retried or have failed now and then.
	MaxNodes = 50_000
	// MaxEdges is the most parents and guarded actions that all nodes may name together.
	maxEdges = 20 * MaxNodes
)

// NodeKind says what a node is.
type NodeKind string

// The kinds of nodes.
const (
	// Action is what somebody did, or what came of it.
	ActionNode NodeKind = "action"
	// PlanCheckpoint is one by which actions can be undone.
	CheckpointNode NodeKind = "checkpoint"
	// Group is a checkpoint that contains others: its parents, which did not cause it
	// (ATD, "Hierarchical Checkpoints").
	GroupNode NodeKind = "group"
	// EventNode reports something, such as an error or a rollback. It has no effects.
	EventNode NodeKind = "event"
)

// NodeState is what is known of a checkpoint's call. Undone comes before everything else.
type NodeState string

// The states of checkpoints.
const (
	// Standing: its call ran, or may have run (in doubt).
	Ran NodeState = "ran"
	// Undone: a rollback has undone it.
	Undone NodeState = "undone"
	// InFlight: its call is under way.
	InFlight NodeState = "in_flight"
	// NeverRan: its call was not executed, or has not come yet.
	NeverRan NodeState = "never_ran"
)

// Node is a node of a workflow's graph.
type Node struct {
	// ID is the token's jti. It is unique within the workflow.
	ID string
	// Parents are the ids in its par. Ids that are no nodes do not count, but for a group.
	Parents []string
	// Kind says what it is.
	Kind NodeKind
	// By is the identity that lineage is judged by: the issuer, or for a node that the
	// gateway wrote for a caller without tokens that caller. Empty is nobody.
	By string
	// Start is where the node stands in the order in which those of its workflow were
	// begun: the higher of two is the later one. Where two are equal their ids decide.
	Start int
	// BeginsWorkflow marks workflow_start. Like an action, it makes its issuer take part in the
	// workflow.
	BeginsWorkflow bool
	// Report marks an event about somebody else's actions. It follows from them, but links
	// nothing that was not linked before.
	Report bool
	// Execution names the call of a checkpoint, or of the action that settles it. Attempts of one
	// call have the same. Empty is unknown.
	Execution string
	// Done says of an action that it is completed.
	Done bool

	// State is that of a checkpoint or a group. The others have none.
	State NodeState
	// Reversible says of a checkpoint or a group that it can be undone
	// (cascade.reversible).
	Reversible bool
	// Expires is the end of a checkpoint's or group's ttl. Zero is never.
	Expires time.Time
	// Guards are the actions that a checkpoint was made for. They need not be its
	// parents, but have to be nodes.
	Guards []string
}

// latestFirst orders nodes by the reverse of their start (cascade 4.1.1, Figure 7).
func latestFirst(a, b *Node) int {
	return cmp.Or(cmp.Compare(b.Start, a.Start), cmp.Compare(b.ID, a.ID))
}

func (n *Node) isCheckpoint() bool { return n.Kind == CheckpointNode || n.Kind == GroupNode }

// problem says what is wrong with a node by itself, or nothing.
func (n *Node) problem() string {
	switch n.Kind {
	case CheckpointNode, GroupNode:
		switch n.State {
		case Ran, Undone, InFlight, NeverRan:
		default:
			return "state " + quote(string(n.State)) + " is none of ran, undone, in_flight and never_ran"
		}
	case ActionNode, EventNode:
		if n.State != "" {
			return "state " + quote(string(n.State)) + " on a node that is no checkpoint"
		}
	default:
		return "kind " + quote(string(n.Kind)) + " is none of action, checkpoint, group and event"
	}
	switch {
	case n.ID == "":
		return "its id is empty"
	case n.Kind != CheckpointNode && len(n.Guards) > 0:
		return "guards actions and is no checkpoint"
	}
	return ""
}

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

// NewGraph makes the graph of a workflow, whose name becomes a part of every plan's hash.
// The nodes may come in any order. It fails with *TooManyError or *NodeError. Nodes are
// not copied deeply: nobody may change them afterwards.
func NewGraph(workflow string, nodes []Node) (*Graph, error) {
	if len(nodes) > MaxNodes {
		return nil, &TooManyError{"nodes", len(nodes), MaxNodes}
	}
	links := 0
	for i := range nodes {
		links += len(nodes[i].Parents) + len(nodes[i].Guards)
	}
	if links > maxEdges {
		return nil, &TooManyError{"edges", links, maxEdges}
	}
	return build(workflow, nodes)
}

// build is New without limits.
func build(workflow string, nodes []Node) (*Graph, error) {
	g := &Graph{workflow: workflow, nodes: slices.Clone(nodes), index: make(map[string]int, len(nodes))}
	for i := range g.nodes {
		n := &g.nodes[i]
		if problem := n.problem(); problem != "" {
			return nil, &nodeError{n.ID, problem}
		}
		if _, twice := g.index[n.ID]; twice {
			return nil, &nodeError{n.ID, "the id stands twice; it must be unique within the workflow"}
		}
		g.index[n.ID] = i
	}
	if err := g.resolve(); err != nil {
		return nil, err
	}
	g.link()
	return g, nil
}

// resolve finds the nodes that are named by others.
func (g *Graph) resolve() error {
	g.parents, g.guards, g.unknown = make([][]int, len(g.nodes)), make([][]int, len(g.nodes)), make([][]string, len(g.nodes))
	for i := range g.nodes {
		n := &g.nodes[i]
		for _, id := range n.Parents {
			switch p, known := g.index[id]; {
			case !known && n.Kind == GroupNode:
				g.unknown[i] = append(g.unknown[i], id)
			case !known:
			case n.Kind == GroupNode && !g.nodes[p].isCheckpoint():
				return &nodeError{n.ID, fmt.Sprintf("the group contains %s, which is no checkpoint", quote(id))}
			default:
				g.parents[i] = append(g.parents[i], p)
			}
		}
	}
	met := make([]int, len(g.nodes)) // the checkpoint that named it last, from 1 on
	for i := range g.nodes {
		for _, id := range g.nodes[i].Guards {
			a, known := g.index[id]
			if !known || g.nodes[a].Kind != ActionNode {
				return &nodeError{g.nodes[i].ID, fmt.Sprintf("guards %s, which is no action of the workflow", quote(id))}
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
		if g.nodes[i].Kind == GroupNode {
			g.after[i] = len(g.nodes) + len(g.groups)
			g.groups = append(g.groups, i)
		}
	}
	g.down = make([][]int, len(g.nodes)+len(g.groups))
	for i := range g.nodes {
		group := g.nodes[i].Kind == GroupNode
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
		if g.nodes[all[n]].Kind != GroupNode {
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

// Lineage is who of a workflow may ask for a rollback.
type Lineage string

// The policies. Unknown policies deny everyone.
const (
	// Ancestor: whoever is behind a checkpoint, or behind a node that it follows from
	// (ATD, "Rollback Authorization").
	Ancestor Lineage = "ancestor"
	// Workflow: whoever is behind an action, checkpoint or group that is linked to the
	// checkpoint, in whatever direction and over however many nodes (cascade 6.1).
	// Reports link nothing.
	Workflow Lineage = "workflow"
)

// MayAsk reports whether an identity may ask for the rollback of a checkpoint. For a
// checkpoint that is unknown nobody may, so that the answer to it is the one that
// strangers get.
//
// Events give no right, but for workflow_start. Who asks for a group must be allowed to ask
// for all that it contains, and all of that must be known. Among ancestors it gives no right to have made a group
// of others' checkpoints. A node in another workflow never counts, and that strangers
// give theirs the same name links nothing.
func (g *Graph) MayAsk(requester, checkpoint string, policy Lineage) bool {
	target, known := g.checkpoint(checkpoint)
	return known && g.whole(target, g.near(requester, policy))
}

// initiator is who began the workflow: who is behind the node that began first, if that
// follows from nothing; events do not count but for workflow_start. Empty is
// nobody. Roots of others that come later take nothing from it: whoever knows the name of
// a workflow can make one.
func (g *Graph) initiator() string {
	var first *Node
	for i := range g.nodes {
		n := &g.nodes[i]
		if (n.Kind != EventNode || n.BeginsWorkflow) && (first == nil || latestFirst(first, n) < 0) {
			first = n
		}
	}
	if first == nil || len(first.Parents) > 0 {
		return ""
	}
	return first.By
}

// near marks the nodes that are linked to the requester's own as the policy wants it.
func (g *Graph) near(requester string, policy Lineage) []bool {
	if requester == "" || policy != Ancestor && policy != Workflow {
		return make([]bool, len(g.nodes))
	}
	return g.spread(requester, policy == Workflow)
}

// whole reports whether a checkpoint, or all that a group contains, is among some nodes.
func (g *Graph) whole(checkpoint int, among []bool) bool {
	some := false
	for _, i := range g.contained(checkpoint) {
		group := g.nodes[i].Kind == GroupNode
		if group && len(g.unknown[i]) > 0 || !group && !among[i] {
			return false
		}
		some = some || !group
	}
	return some
}

// follows reports whether a node follows from a checkpoint, or from what it was made for:
// an error that does is one that its rollback can be asked for.
func (g *Graph) follows(id, checkpoint string) bool {
	target, known := g.checkpoint(checkpoint)
	i, there := g.index[id]
	if !known || !there {
		return false
	}
	d := planner{Graph: g}
	return d.reach(d.withGuards(g.contained(target)))[g.after[i]]
}

// spread marks the requester's nodes and what follows from them by the tokens. A group
// does not follow from what it contains. With any, it goes along every link, and
// against it too, but not from a report to its subjects.
func (g *Graph) spread(requester string, any bool) []bool {
	links := make([][]int, len(g.nodes))
	met := make([]bool, len(g.nodes))
	var todo []int
	for i := range g.nodes {
		n := &g.nodes[i]
		for _, p := range g.parents[i] {
			if any && !n.Report {
				links[i] = append(links[i], p)
			}
			if any || n.Kind != GroupNode {
				links[p] = append(links[p], i)
			}
		}
		if (n.Kind != EventNode || n.BeginsWorkflow) && n.By == requester {
			met[i] = true
			todo = append(todo, i)
		}
	}
	for len(todo) > 0 {
		last := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, i := range links[last] {
			if !met[i] {
				met[i] = true
				todo = append(todo, i)
			}
		}
	}
	return met
}
