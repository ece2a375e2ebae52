package rollback

import (
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Status is what came of a rollback, or of the part of it that concerns one agent
// (cascade 4.4.2). It is never more than what is known (P6).
type Status string

// The statuses. They are the words on the wire.
const (
	Completed Status = "completed"
	Partial   Status = "partial"
	Escalated Status = "escalated"
	Failed    Status = "failed"
)

// State is how far a rollback has come.
type State string

// The states.
const (
	// Executing: it was accepted, and goes on by itself, also after a restart.
	Executing State = "executing"
	// Finished: it has a Status, which never changes.
	Finished State = "finished"
)

// Rollback is what is recorded of a rollback.
type Rollback struct {
	ID, Checkpoint, Workflow string
	// Scope is the one that was applied.
	Scope           plan.Scope
	Reason, Urgency string
	// Requester is the identity of the agent that asked; Operator the name of the operator.
	Requester, Operator string
	State               State
	// Status is empty before the rollback is finished.
	Status Status
	// Asked is when it was accepted. Due is when it must be done, after half of the shortest
	// ttl; it is escalated then, and TimedOut. Finished is zero before that.
	Asked, Due, Finished time.Time
	TimedOut             bool
	Plan                 *plan.Plan
	// Steps are those of the plan, in the order of their levels.
	Steps []Step
	// Unknown says that the effect of a step is not known, Mixed that some effects were
	// undone and others were not (the heuristic outcomes hazard and mixed of XA).
	Unknown, Mixed bool
	// Joined is the id of the wider rollback whose result this one has; empty without.
	Joined string
	// Start and Complete are the ids of the tokens that tell of it; empty without.
	Start, Complete string
	// Before and After are hashes of the state before and after, SHA-256 with a salt of the
	// rollback's (ADR 0041); zero where there is no state to be hashed.
	Before, After [32]byte
	// Escalations are the ids of what people have to look at.
	Escalations []string
}

// StepState is how far a step has come.
type StepState string

// The states of a step.
const (
	StepPending StepState = "pending" // not begun
	StepRunning StepState = "running" // it was journaled and may have begun
	StepDone    StepState = "done"    // it has a Status
)

// Step is what is done with one checkpoint.
type Step struct {
	Checkpoint string
	// Agent is the identity behind the checkpoint's call: the issuer of the token that led
	// to it, else the gateway.
	Agent string
	// Level is the place in the plan.
	Level int
	// What is what the plan says.
	What  plan.What
	State StepState
	// Status is set where State is StepDone.
	Status Status
	// Cancelled says that the call never ran, so that there was nothing to undo: this is
	// cancellation, not rollback (architecture brief).
	Cancelled bool
	// Unknown says that nobody knows whether the undo had its effect.
	Unknown bool
	// Reason is a fixed word that says why it is not completed; empty where it is.
	Reason string
	// Cause is why the call cannot be undone, where Reason is irreversible and that is known:
	// the fixed word that its checkpoint has for it.
	Cause string
	// HTTPStatus is that of the last answer to the undo; 0 without one.
	HTTPStatus int
	// Attempts counts how often the undo was sent.
	Attempts int
	// Before and After are hashes of the state; zero without.
	Before, After [32]byte
	// Token is the id of the token that tells of the step; empty without.
	Token string
	// Escalation is the id of what a person has to look at; empty without.
	Escalation string
	Ended      time.Time

	root string // the first attempt, whose mark this step holds; empty where it is that itself
}
