package plan

import (
	"cmp"
	"time"
)

const (
	// MaxNodes is the most nodes that a workflow may have here.
	MaxNodes = 10_000
	// MaxEdges is the most parents and guarded actions that all nodes may name together:
	// a hundred each, which is what a token may have.
	MaxEdges = 100 * MaxNodes
)

// Kind says what a node is.
type Kind string

// The kinds of nodes.
const (
	// Action is what somebody did, or what came of it.
	Action Kind = "action"
	// Checkpoint is one by which actions can be undone.
	Checkpoint Kind = "checkpoint"
	// Group is a checkpoint that contains others: its parents, which did not cause it
	// (ATD, "Hierarchical Checkpoints").
	Group Kind = "group"
	// Event tells of something, such as an error or a rollback. It has no effects.
	Event Kind = "event"
)

// State is how a checkpoint stands. Undone comes before everything else.
type State string

// The states of checkpoints.
const (
	// Standing: its call ran, or may have run (in doubt).
	Standing State = "standing"
	// Undone: a rollback has undone it.
	Undone State = "undone"
	// InFlight: its call is under way.
	InFlight State = "in_flight"
	// NeverRan: its call was not executed, or has not come yet.
	NeverRan State = "never_ran"
)

// Node is a node of a workflow's graph.
type Node struct {
	// ID is the token's jti. It is unique within the workflow.
	ID string
	// Parents are the ids in its par. Ids that are no nodes do not count, but for a group.
	Parents []string
	// Kind says what it is.
	Kind Kind
	// By is the identity that lineage is judged by: the issuer, or for a node that the
	// gateway wrote for a caller without tokens that caller. Empty is nobody.
	By string
	// Start is where the node stands in the order in which those of its workflow were
	// begun: the higher of two is the later one. Where two are equal their ids decide.
	Start int
	// Begins says of an event that it tells of the begin of the workflow (workflow_start).
	// It is a part in the workflow as an action is.
	Begins bool
	// Told says of an event that it is what somebody tells of others' doings. It follows from
	// them, and joins nothing that was apart.
	Told bool
	// Done says of an action that it is completed.
	Done bool

	// State is how a checkpoint or a group stands. The others have none.
	State State
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

func (n *Node) isCheckpoint() bool { return n.Kind == Checkpoint || n.Kind == Group }

// problem says what is wrong with a node by itself, or nothing.
func (n *Node) problem() string {
	switch n.Kind {
	case Checkpoint, Group:
		switch n.State {
		case Standing, Undone, InFlight, NeverRan:
		default:
			return "state " + quote(string(n.State)) + " is none of standing, undone, in_flight and never_ran"
		}
	case Action, Event:
		if n.State != "" {
			return "state " + quote(string(n.State)) + " on a node that is no checkpoint"
		}
	default:
		return "kind " + quote(string(n.Kind)) + " is none of action, checkpoint, group and event"
	}
	switch {
	case n.ID == "":
		return "its id is empty"
	case n.Kind != Checkpoint && len(n.Guards) > 0:
		return "guards actions and is no checkpoint"
	}
	return ""
}
