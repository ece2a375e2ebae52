package workflow

// State is what is known of a node: one of ATD's words.
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
	// Escalated: it failed or could not be undone, and a human was told.
	Escalated State = "escalated"
)

// Detail says more than a State does. It is empty for most nodes.
type Detail string

// The details. The rollback's are those of the brief's state model.
const (
	// DetailInDoubt: the call may have had its effect, and nobody knows.
	DetailInDoubt Detail = "in_doubt"
	// DetailReleased: the call was not executed.
	DetailReleased Detail = "released"
	// RollbackRequested: a rollback was asked for, and its result is not recorded.
	RollbackRequested Detail = "rollback_requested"
	// RollbackFailed: the last rollback has failed.
	RollbackFailed Detail = "rollback_failed"
	// CompensationRequired: the last rollback left effects that somebody must undo.
	CompensationRequired Detail = "compensation_required"
)

// Node is a record with what the graph knows of it.
type Node struct {
	Record
	// State is empty for events other than checkpoints.
	State State
	// Detail says more, where there is more to say.
	Detail Detail
	// Worst is the highest severity among the errors that refer to it.
	Worst string
	// Missing are the parents that are not recorded in this workflow.
	Missing []string
	// Guards are the tasks that a checkpoint was made for.
	Guards []string
	// Settles is the agent's task whose outcome a node of the gateway tells.
	Settles []string
}

// EdgeKind says what an edge means.
type EdgeKind string

// The kinds of edges.
const (
	// Caused: To follows from From.
	Caused EdgeKind = "caused"
	// Contains: From is a checkpoint that groups the checkpoint To. It is the only kind
	// that runs against the parents of the token.
	Contains EdgeKind = "contains"
	// CheckpointOf: To is the checkpoint of the action From.
	CheckpointOf EdgeKind = "checkpoint_of"
	// ErrorOf: To is an error of From.
	ErrorOf EdgeKind = "error_of"
	// Settles: To tells what came of the call that From announced.
	Settles EdgeKind = "settles"
)

// Edge leads from one node to another.
type Edge struct {
	From, To string
	Kind     EdgeKind
}

var severities = map[string]int{"info": 1, "warning": 2, "error": 3, "critical": 4}

// worse is the higher severity of two. What is no word of the drafts ranks lowest.
func worse(a, b string) string {
	if severities[b] > severities[a] || a == "" {
		return b
	}
	return a
}
