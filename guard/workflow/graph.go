// Package workflow makes the graph of a workflow from its recorded tokens, and derives the
// state of each node: ATD, section "Node States", and the details of the architecture brief's
// state model.
//
// States are derived from the records each time and stored nowhere. Nothing is called done or
// rolled back that is not (P6): an execution in doubt is not done, and only a completed
// rollback, reported by the gateway or the checkpoint's issuer, makes a node rolled back.
//
// Hostile input does no harm: missing parents and cycles are named, and every function takes
// O(n log n) time in nodes and edges.
package workflow

import (
	"container/heap"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Outcome is the gateway's outcome of a guarded call.
type Outcome string

// The outcomes. A call without one has not been settled.
const (
	Completed Outcome = "completed"
	InDoubt   Outcome = "in_doubt"
	Released  Outcome = "released"
)

// Record is a recorded token.
type Record struct {
	// ID is the jti.
	ID string
	// Parents are the ids of the tokens that it follows from (par).
	Parents []string
	// Event is an event of the drafts; empty for an agent's action, which is a task.
	Event ect.Event
	// Action is the exec_act.
	Action string
	// Issuer is the iss.
	Issuer string
	// By is the identity for lineage: the issuer, or for a record that the gateway wrote for a
	// caller without tokens that caller. Empty is nobody.
	By string
	// Report marks an event about somebody else's actions. It links no further nodes.
	Report bool
	// Time is the token's time.
	Time time.Time

	// Own marks a token of the gateway itself. Only its Outcome is trusted.
	Own bool
	// Outcome makes a task the settlement of a guarded call: of the agent's task among its
	// parents, or else of itself.
	Outcome Outcome

	// Execution names the execution of the gateway's checkpoint or settlement. It identifies a
	// settlement's own checkpoint among its parents, since a released call can be made again with
	// another one.
	Execution string

	// CheckpointID is the checkpoint that an error or a rollback names.
	CheckpointID string
	// Status is what a rollback ended as (completed, partial, escalated, failed), or the
	// terminal status of a workflow.
	Status string
	// Whole marks the gateway's result of a whole rollback. For one checkpoint, only its own
	// result counts.
	Whole bool
	// Severity of an error, or of an action by its own token: info, warning, error or critical.
	Severity string
	// Priority is what an agent's token claims of its action: critical, high, normal or low.
	Priority string
	// Critical marks a checkpoint whose action is configured as critical, here or at the gateway that has signed it.
	Critical bool
	// Attempt marks the gateway's error of one attempt of a call, or of its rollback, which does
	// not decide the call's outcome: its settlement does.
	Attempt bool
	// UpstreamErrors are the errors of others in the answer to the call that the gateway reports
	// on: their issuers take part in that call.
	UpstreamErrors []string
	// Stranger marks a report by an issuer that does not take part in its subject. It is ignored.
	Stranger bool
	// Reversible says that a checkpoint's action can be undone.
	Reversible bool
	// Expires is when a checkpoint ends; zero is never.
	Expires time.Time
	// Escalated says that a person was informed. It counts for a task and its errors.
	Escalated bool
	// Node is the node of a plan that the token names; empty for none.
	Node string
}

// IsTask reports whether it is an action, not an event about one.
func (r *Record) IsTask() bool { return r.Event == "" }

// IsCheckpoint reports whether it is a checkpoint or a group of them.
func (r *Record) IsCheckpoint() bool { return r.Event == ect.EventCheckpoint }

// TakesPart reports whether it makes its identity a participant of the workflow: of events only
// workflow_start does.
func (r *Record) TakesPart() bool {
	return r.IsTask() || r.IsCheckpoint() || r.Event == ect.EventWorkflowStart
}

// settlement reports whether it has the outcome of a guarded call.
func (r *Record) settlement() bool { return r.Own && r.IsTask() && r.Outcome != "" }

// State is the state of a node, in ATD's words.
type State string

// The states. Events other than checkpoints have none.
const (
	// Pending: a checkpoint announces an action of which there is no token yet.
	Pending State = "pending"
	// Running: it was begun, and neither an end nor an error is recorded.
	Running State = "running"
	// Done: its end is recorded, or an action that follows from it.
	Done State = "done"
	// Failed: an error refers to it, or its call is in doubt or was not executed.
	Failed State = "failed"
	// RolledBack: a completed rollback refers to its checkpoint.
	RolledBack State = "rolled_back"
	// Escalated: it failed or could not be undone, and a human was notified.
	Escalated State = "escalated"
)

// Detail refines a State. It is empty for most nodes.
type Detail string

// The details. The rollback's are those of the brief's state model.
const (
	// DetailInDoubt: the call may have had its effect.
	DetailInDoubt Detail = "in_doubt"
	// DetailReleased: the call was not executed.
	DetailReleased Detail = "released"
	// RollbackRequested: a rollback was asked for, and its result is not recorded.
	RollbackRequested Detail = "rollback_requested"
	// RollbackFailed: the last rollback has failed.
	RollbackFailed Detail = "rollback_failed"
	// CompensationRequired: the last rollback left effects to undo.
	CompensationRequired Detail = "compensation_required"
)

// Node is a record with its place in the graph.
type Node struct {
	Record
	// Group marks a checkpoint that contains others, its parents (ATD, "Hierarchical
	// Checkpoints").
	Group bool
	// State is empty for events other than checkpoints.
	State State
	// Detail refines the state, if possible.
	Detail Detail
	// Called says that the gateway has recorded a call for it.
	Called bool
	// Worst is the highest severity among the errors that refer to it.
	Worst string
	// CriticalError is the id of an agent's critical error that refers to it; empty without one.
	// The gateway's own do not count: each call in doubt has one.
	CriticalError string
	// Missing are the parents that are not recorded in this workflow.
	Missing []string
	// Guards are the tasks that a checkpoint was made for.
	Guards []string
	// Settles is the agent's task whose outcome a node of the gateway records.
	Settles []string
}

// EdgeKind says what an edge means.
type EdgeKind string

// The kinds of edges.
const (
	// caused: To follows from From.
	caused EdgeKind = "caused"
	// Contains: From is a checkpoint that groups the checkpoint To. It is the only kind
	// that runs against the parents of the token.
	Contains EdgeKind = "contains"
	// checkpointOf: To is the checkpoint of the action From.
	checkpointOf EdgeKind = "checkpoint_of"
	// errorOf: To is an error of From.
	errorOf EdgeKind = "error_of"
	// settles: To has the outcome of the call that From announced.
	settles EdgeKind = "settles"
)

// Edge leads from one node to another.
type Edge struct {
	From, To string
	Kind     EdgeKind
}

// Critical is the highest severity, and the highest priority.
const Critical = "critical"

var severities = map[string]int{"info": 1, "warning": 2, "error": 3, Critical: 4}

// worse is the higher severity of two. Unknown words rank lowest.
func worse(a, b string) string {
	if severities[b] > severities[a] || a == "" {
		return b
	}
	return a
}

// Graph is the graph of a workflow. It never changes, and several goroutines can use it.
//
// Each node has a place, from 0 in topological order, on which rollbacks are planned. A group has
// a second place, behind all nodes, for its consequences: the first leads to its members, and all
// of them to the second.
type Graph struct {
	nodes []Node         // in topological order
	seq   []int          // of each node: its place among the records
	index map[string]int // id -> place in nodes

	parents  [][]int // by the tokens' own par, as far as they are recorded
	children [][]int // the reverse of parents
	down     [][]int // children, but from a group to what it contains
	guards   [][]int // checkpoint -> the tasks that it was made for
	undoable []bool  // tasks with a checkpoint that can be undone
	// executions are the gateway's settlements by execution.
	executions map[string][]int
	ordered    int // nodes from here on lie on a cycle or behind one

	ends []int   // of a node: the place that its consequences follow from
	next [][]int // of a place: the places that follow from it
}

// New makes the graph of records, given in the order of recording. Of two with one id the first
// counts.
func New(records []Record) *Graph {
	nodes := make([]Node, len(records))
	for i := range records {
		nodes[i].Record = records[i]
	}
	g := new(Graph)
	g.withStates(nodes)
	g.follow()
	return g
}

// withStates makes the graph without the edges of consequences, on which states do not depend. It keeps nodes, and
// uses the memory of the graph that it was before.
func (g *Graph) withStates(nodes []Node) {
	g.take(nodes)
	g.build(g.contains)
	g.guard()
	g.note()
	derive(g)
}

// FromNodes makes the graph of nodes with known states, groups and guards, in the order of
// recording. Guards that are no tasks of the graph do not count.
func FromNodes(nodes []Node) *Graph {
	g := new(Graph)
	g.take(slices.Clone(nodes))
	g.build(func(i int) bool { return g.nodes[i].Group })
	g.guards = make([][]int, len(g.nodes))
	for i := range g.nodes {
		seen := make(map[int]bool)
		for _, id := range g.nodes[i].Guards {
			if t, ok := g.index[id]; ok && g.nodes[t].IsTask() && !seen[t] {
				seen[t] = true
				g.guards[i] = append(g.guards[i], t)
			}
		}
	}
	g.note()
	g.follow()
	return g
}

// take takes the first node of each id. It keeps nodes.
func (g *Graph) take(nodes []Node) {
	if g.nodes = nodes[:0]; g.index == nil {
		g.index = make(map[string]int, len(nodes))
	}
	clear(g.index)
	clear(g.executions)
	for i := range nodes {
		if _, twice := g.index[nodes[i].ID]; twice {
			continue
		}
		at := len(g.nodes)
		g.index[nodes[i].ID] = at
		if g.nodes = g.nodes[:at+1]; at < i {
			g.nodes[at] = nodes[i]
		}
	}
}

// empty are n empty lists, in the memory of those before.
func empty(lists [][]int, n int) [][]int {
	lists = slices.Grow(lists[:0], n)[:n]
	for i := range lists {
		lists[i] = lists[i][:0]
	}
	return lists
}

// build links and orders the nodes.
func (g *Graph) build(group func(i int) bool) {
	g.seq, g.ordered = g.seq[:0], len(g.nodes)
	for i := range g.nodes {
		g.seq = append(g.seq, i)
	}
	g.link(group)
	for i, to := range g.down {
		if slices.ContainsFunc(to, func(j int) bool { return j < i }) { // as a rule they were recorded in order
			g.reorder(g.sort())
			g.link(group)
			return
		}
	}
}

// link finds the neighbours of every node.
func (g *Graph) link(group func(i int) bool) {
	n := len(g.nodes)
	g.parents, g.children = empty(g.parents, n), empty(g.children, n)
	for i := range g.nodes {
		node := &g.nodes[i]
		node.Missing = nil
		var seen map[int]bool
		if len(node.Parents) > 8 { // of a few it takes longer to make the map
			seen = make(map[int]bool, len(node.Parents))
		}
		for _, id := range node.Parents {
			p, ok := g.index[id]
			switch {
			case !ok:
				node.Missing = append(node.Missing, id)
			case p == i, seen[p], seen == nil && slices.Contains(g.parents[i], p):
			default:
				if seen != nil {
					seen[p] = true
				}
				g.parents[i] = append(g.parents[i], p)
			}
		}
		node.Group = group(i)
	}
	grouped := false
	for i, parents := range g.parents {
		grouped = grouped || g.nodes[i].Group
		for _, p := range parents {
			g.children[p] = append(g.children[p], i)
		}
	}
	if g.down = g.children; !grouped {
		return
	}
	g.down = make([][]int, n)
	for i, parents := range g.parents {
		for _, p := range parents {
			if g.nodes[i].Group {
				g.down[i] = append(g.down[i], p)
			} else {
				g.down[p] = append(g.down[p], i)
			}
		}
	}
}

// follow makes the edges of consequences.
func (g *Graph) follow() {
	g.ends = from(0, len(g.nodes))
	places := len(g.nodes)
	for i := range g.nodes {
		if g.nodes[i].Group {
			g.ends[i] = places
			places++
		}
	}
	g.next = make([][]int, places)
	lead := func(from, to int) { g.next[from] = append(g.next[from], to) }
	for i := range g.nodes {
		node := &g.nodes[i]
		if node.Group {
			lead(i, g.ends[i])
		} else if slices.Contains(node.Parents, node.ID) {
			lead(i, i) // a cycle of one
		}
		for _, p := range g.parents[i] {
			if node.Group {
				lead(i, p)
			}
			lead(g.ends[p], g.ends[i])
		}
	}
}

// Len is how many nodes there are.
func (g *Graph) Len() int { return len(g.nodes) }

// At is node i, from 0 to Len-1, for reading only.
func (g *Graph) At(i int) *Node { return &g.nodes[i] }

// Index finds the node with an id.
func (g *Graph) Index(id string) (i int, ok bool) {
	i, ok = g.index[id]
	return i, ok
}

// Seq is the place of node i among the records, from 0 on: the higher of two was recorded later.
func (g *Graph) Seq(i int) int { return g.seq[i] }

// Parents are the parents of node i, each once and without itself, for reading only.
func (g *Graph) Parents(i int) []int { return g.parents[i] }

// Guarded are the tasks that the checkpoint i was made for, each once, for reading only.
func (g *Graph) Guarded(i int) []int { return g.guards[i] }

// Places is how many places there are: Len, and one for each group.
func (g *Graph) Places() int { return len(g.next) }

// Next are the places that follow from one, for reading only. A node can follow from itself.
func (g *Graph) Next(place int) []int { return g.next[place] }

// End is the place whose consequences are those of node i: the second one of a group, else i.
func (g *Graph) End(i int) int { return g.ends[i] }

// contains reports whether a node is a checkpoint that groups others: all its parents are
// checkpoints (ATD, "Hierarchical Checkpoints"). Those do not cause it. With another parent too
// it was caused like any other node: turning its edges around could make cycles. The gateway
// makes no groups: its checkpoint of a call within another call follows from that one's.
func (g *Graph) contains(i int) bool {
	if !g.nodes[i].IsCheckpoint() || g.nodes[i].Own || len(g.parents[i]) == 0 {
		return false
	}
	return !slices.ContainsFunc(g.parents[i], func(p int) bool { return !g.nodes[p].IsCheckpoint() })
}

// sort returns the nodes in topological order, by time of recording where that leaves a choice.
// Nodes on a cycle or behind one come last.
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

func (h smallest) Len() int { return len(h) }

func (h smallest) Less(i, j int) bool { return h[i] < h[j] }

func (h smallest) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

func (h *smallest) Push(x any) { *h = append(*h, x.(int)) }

func (h *smallest) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}

// guard finds the tasks that each checkpoint was made for. The drafts place it in two ways: with
// the action as its parent (ATD, "Checkpoint ECT Format"; cascade 4.2.1), or as the action's
// parent (cascade, Figure 7; AERR). The gateway's are of the first kind, and its settlement has
// the action's outcome; what an upstream does for the call follows from them as well.
func (g *Graph) guard() {
	g.guards = make([][]int, len(g.nodes))
	preceded := make([]bool, len(g.nodes)) // tasks whose checkpoint is their parent
	for i := range g.nodes {
		if !g.nodes[i].IsCheckpoint() || g.nodes[i].Group {
			continue
		}
		if g.nodes[i].Own {
			g.guards[i] = g.guarded(i)
		} else {
			g.guards[i] = g.placed(i, preceded)
		}
		g.nodes[i].Guards = g.ids(g.guards[i])
	}
	for i := range g.nodes {
		if g.nodes[i].settlement() {
			g.nodes[i].Settles = g.ids(g.announced(i))
		}
	}
}

// note finds the tasks that can be undone, and the settlements of each execution.
func (g *Graph) note() {
	g.undoable = slices.Grow(g.undoable[:0], len(g.nodes))[:len(g.nodes)]
	clear(g.undoable)
	for i := range g.nodes {
		for _, t := range g.guards[i] {
			g.undoable[t] = g.undoable[t] || g.nodes[i].Reversible
		}
		if name := g.nodes[i].Execution; name != "" && g.nodes[i].settlement() {
			if g.executions == nil {
				g.executions = make(map[string][]int)
			}
			g.executions[name] = append(g.executions[name], i)
		}
	}
}

// placed returns the tasks of an agent's checkpoint, wherever it is placed. preceded notes those
// that it precedes.
func (g *Graph) placed(i int, preceded []bool) []int {
	var before, after []int
	for _, p := range g.parents[i] {
		if g.nodes[p].IsTask() && !g.nodes[p].settlement() && !preceded[p] {
			before = append(before, p)
		}
	}
	for _, c := range g.children[i] {
		if g.nodes[c].IsTask() {
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

// guarded returns the tasks of the gateway's checkpoint i: the settlements of its claim, with
// what they settle, or else the announcement of the call.
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

// announced are the agents' tasks of a gateway's checkpoint or settlement: those among its
// parents, and those that an agent's checkpoint among them follows from.
func (g *Graph) announced(i int) []int {
	var tasks []int
	add := func(p int) {
		if g.nodes[p].IsTask() && !g.nodes[p].settlement() && !slices.Contains(tasks, p) {
			tasks = append(tasks, p)
		}
	}
	for _, p := range g.parents[i] {
		add(p)
		if g.nodes[p].IsCheckpoint() && !g.nodes[p].Own {
			for _, t := range g.parents[p] {
				add(t)
			}
		}
	}
	return tasks
}

// claimOf reports whether node s settles the claim of the gateway's checkpoint c. Its other
// parents may be checkpoints of the gateway too: of an enclosing call.
func (g *Graph) claimOf(s, c int) bool {
	settled, claimed := &g.nodes[s], &g.nodes[c]
	return settled.settlement() && claimed.IsCheckpoint() && claimed.Own &&
		(settled.Execution == claimed.Execution || settled.Execution == "" || claimed.Execution == "")
}

// subjects are the tasks that an error of node i is about.
func (g *Graph) subjects(i int) []int {
	switch node := &g.nodes[i]; {
	case node.settlement():
		return g.announced(i)
	case node.IsCheckpoint():
		return g.guards[i]
	}
	return nil
}

// culprits are the parents of error i that it is about. The gateway's error has its settlement
// and the settled task among its parents; others led to the call.
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

// Nodes are all nodes in topological order: none before one that it follows from, and a group
// before its members. The reverse is the order of a rollback (cascade 4.1.1). Unordered names
// those without a place in it.
func (g *Graph) Nodes() []Node { return slices.Clone(g.nodes) }

// Unordered are the nodes on a cycle or behind one, which are last in Nodes. A graph of tokens
// has none, since a token can only name earlier ones.
func (g *Graph) Unordered() []string { return g.ids(from(g.ordered, len(g.nodes))) }

// Edges are all edges, in the order of recording.
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

// kind is the kind of the edge by which p is a parent of i.
func (g *Graph) kind(p, i int) EdgeKind {
	switch {
	case g.nodes[i].Group:
		return Contains
	case g.nodes[i].Event == ect.EventError && !g.nodes[i].Stranger && slices.Contains(g.culprits(i), p):
		return errorOf
	case g.nodes[i].IsCheckpoint() && slices.Contains(g.guards[i], p):
		return checkpointOf
	case g.settles(i, p):
		return settles
	}
	return caused
}

// settles reports whether i has the outcome of the agent's task p.
func (g *Graph) settles(i, p int) bool {
	return g.nodes[i].settlement() && g.nodes[p].IsTask() && !g.nodes[p].settlement()
}

// Roots are the nodes that follow from nothing recorded.
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
