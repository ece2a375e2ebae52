package workflow

import "time"

// Event is an action with a meaning that the drafts define, by its name in the cascade
// vocabulary. Empty is an agent's own action, which is a task. Other words than these
// are events without a meaning here.
type Event string

// The events that make a difference to the graph.
const (
	Checkpoint       Event = "checkpoint"
	Error            Event = "error"
	RollbackRequest  Event = "rollback_request"
	RollbackStart    Event = "rollback_start"
	RollbackComplete Event = "rollback_complete"
	Compensate       Event = "compensate"
	WorkflowComplete Event = "workflow_complete"
)

// Outcome is what the gateway says came of a guarded call.
type Outcome string

// The outcomes. A call without one has not been settled.
const (
	Completed Outcome = "completed"
	InDoubt   Outcome = "in_doubt"
	Released  Outcome = "released"
)

// Record is a token as it was recorded.
type Record struct {
	// ID is the jti.
	ID string
	// Parents are the ids of the tokens that it follows from (par).
	Parents []string
	// Event is what it tells of.
	Event Event
	// Action is the exec_act as it is written.
	Action string
	// Issuer is who says so (iss).
	Issuer string
	// Time is when it happened, as the token tells.
	Time time.Time

	// Own marks a token of the gateway itself. An Outcome is believed of no other.
	Own bool
	// Outcome makes a task the settlement of a guarded call: of the agent's task among
	// its parents, or where there is none of itself.
	Outcome Outcome

	// Execution names the execution that a checkpoint or settlement of the gateway is
	// of. It tells which of its parents is a settlement's own checkpoint; and a call
	// that was released can be made again, with another one.
	Execution string

	// CheckpointID is the checkpoint that an error or a rollback names.
	CheckpointID string
	// Status is what a rollback ended as (completed, partial, escalated, failed), or the
	// terminal status of a workflow.
	Status string
	// Whole marks the gateway's result of a rollback as a whole. What became of a
	// checkpoint in it, the result of that one alone says.
	Whole bool
	// Severity of an error: info, warning, error or critical.
	Severity string
	// Attempt marks the gateway's error of one attempt of a call, or of its rollback,
	// which says nothing about what came of the call: its settlement does.
	Attempt bool
	// UpstreamErrors are the errors of others that came with the answer to the call that the
	// gateway tells of: whoever answers has a part in that call.
	UpstreamErrors []string
	// Stranger marks what somebody tells who has no part in what it tells of. It counts for
	// nothing.
	Stranger bool
	// Reversible says of a checkpoint that the action can be undone.
	Reversible bool
	// Expires is when a checkpoint ends; zero is never.
	Expires time.Time
	// Escalated says that a human was told of it, by the rules for that. It counts for
	// a task, and for an error of one.
	Escalated bool
}

// task reports whether it is an action of somebody, and no event about one.
func (r *Record) task() bool { return r.Event == "" }

func (r *Record) isCheckpoint() bool { return r.Event == Checkpoint }

// settlement reports whether it tells what came of a guarded call.
func (r *Record) settlement() bool { return r.Own && r.task() && r.Outcome != "" }
