// Package rollback plans rollbacks and carries them out: of one checkpoint, of what follows
// from it, or of a whole workflow (cascade 4, P5).
//
// The package knows neither Caddy nor tokens: it declares what it needs of the ledger as [Ledger], and of the
// upstreams as [Sender].
//
// # The way of a rollback
//
// A [Request] leads to a [Plan], which is carried out by a run, which has a result. One struct, [Rollback], is what is
// asked for, reserved, recorded, compared with others, and shown.
//
//	request.go    what a coordinator is asked: Plan, Prepare, Reserve, Execute, Release
//	draft.go      who may ask, what state each checkpoint is in, and the plan: plan.go, lineage.go
//	ask.go        the first phase: participants and targets of restores are asked whether it can be done
//	conflict.go   which of several rollbacks and reservations of a workflow takes precedence
//	lock.go       which calls must not begin meanwhile
//	run.go        levels of steps, questions to people, the end; step.go has one step
//	undo.go       how one call is undone: restore.go, compensate.go, participant.go
//	onerror.go    errors that roll back by themselves
//	journal.go    what is recorded; coordinator.go takes it up again, fleet.go at another gateway
//
// # The nodes of a plan
//
// A plan is made on a [workflow.Graph], whose nodes are recorded tokens: actions, checkpoints,
// groups of checkpoints, and events such as an error. Guards link a checkpoint to the actions
// that it was made for, since the drafts place it in two ways: below the action (cascade 4.2.1)
// or before it (cascade, Figure 7). All nodes that the target's plan depends on must be in the
// graph, for FullWorkflow all of the workflow. Parents that are missing belong to another
// workflow or were pruned, and the plan stops there (cascade 3.3.2).
//
// The consequences of a checkpoint are the nodes that are reached by walking forward from it
// and from its actions (cascade 4.1.1). What follows from a group follows from all that the
// group contains; the group itself does not, since anybody can make one afterwards (ATD,
// "Hierarchical Checkpoints").
//
// # The plan
//
// A [Plan] has one step for each checkpoint in its scope:
//
//   - Single: the target, and of a group all that it contains.
//   - SubDAG: the same and the checkpoints among their consequences. Where none of these was
//     made for an action among them, those that were: a checkpoint that is placed before its
//     action need not follow from what the action follows from.
//   - FullWorkflow: every checkpoint of the workflow. It needs a coordinator's authority.
//
// [What] says what a step does. A checkpoint that cannot be undone has a step that says so.
// Passed lists the actions in the scope that no step undoes, Along those outside it that are
// undone with others, Missing the unknown members of groups. Events have no effects and are in
// no list.
//
// Steps stand in levels with a barrier between them. Steps of one level are independent by the
// tokens and run side by side, listed in the reverse of their start. Consequences of an action
// come in an earlier level than the action's checkpoint, members of a group before the group.
// Checkpoints can be consequences of each other, such as two for one action; among those the
// parents in the tokens decide alone.
//
// Siblings that are no consequences stay (ATD, "Partial Rollback and Blast Radius
// Containment"), unless a completed one depends on what is undone: then Dependants names it,
// and [Plan.partial] refuses until the requester says that they may stay.
//
// [Plan.Hash] identifies a plan; it covers all that the plan says, and does not depend on nodes
// that the plan does not name nor on the order in which a token names its parents. Time and memory grow in
// proportion to the nodes and links, which MaxNodes and MaxEdges bound.
//
// # Acceptance and execution
//
// [Coordinator.Prepare] says what would be done, and for whom it cannot. It changes nothing;
// [Coordinator.Reserve] holds back, for a while, the calls that would make the answer wrong.
//
// [Coordinator.Execute] locks the workflow: calls that follow from what is undone do not begin
// (see [Coordinator.Enter]). It drafts the plan behind that lock and commits it. Rollbacks of a
// workflow that share a checkpoint conflict; the wider scope takes precedence, then the earlier
// request (cascade 4.3.4). Each step is journaled before it runs, so that none runs twice, and
// its outcome lands in one commit with the evidence and the escalation that it needs.
//
// # Undoing one call
//
// The way was decided before the call left: put back what stood there (restore), send another
// request (compensate), or ask the agent that was called (delegate). A request that changes
// something is a guarded execution under the key (rollback, checkpoint): it too is sent at most
// once, and the same task resumes after a crash.
//
// Answers to compensate and delegate are read by the contract of MicroProfile LRA (ADR 0035):
//
//	2xx            done, unless the body says that it has failed; of a delegate only where
//	               it says so in the words of one of the drafts, or nothing at all
//	202            under way: asked for at Location, else by the status request, else sent
//	               again with the same key after a while
//	410            it is gone already: done
//	409            it has failed for good: ReasonRefused
//	401, 403       ReasonUnauthorized
//	405, 411, 413, 414, 415, 421, 426, 431, 501
//	               turned away before anything was done: reasonUnexpected, without effect
//	425, 429       not executed: sent again later
//	408, other 5xx in doubt: asked for, else sent again later
//	no answer      in doubt, or sent again later where not a byte was sent
//	others         reasonUnexpected, of unknown effect; only another rollback sends it again,
//	               under the same key
//
// An undo that is a message of the protocol of the call's guard is judged by what its answer says:
//
//	a result       done; with isError, or of a task that has failed or was rejected, ReasonRefused
//	a task at work asked for with tasks/get until it has ended
//	an error that precedes execution
//	               reasonUnexpected, without effect; another guard's refusal that passes is sent again
//	-32603, server errors, an error after progress, no final answer that can be read
//	               in doubt, like a 500
//	400 or 404 of MCP, without a result
//	               sent once more, in a session of its own
//	other errors, a question to the client, 410
//	               reasonUnexpected, of unknown effect
//
// A doubt is resolved by the status request: 202 means wait, 404 that nothing has arrived.
// Without one the undo is sent again under the same key, since compensations are idempotent by
// contract, or, with OnLost Escalate, left to a person. Tools do not see that key: it needs a place
// in their message.
//
// Restore reads the target first and compares it with what stood there before and after the
// call, by existence and by the bytes of the body. The earlier state is done; a change by
// somebody else is left alone unless OnChanged is Overwrite. Otherwise the old state is written
// on the condition that nobody has changed it in between. If that answer is lost, the target
// says what came of it.
package rollback

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// Status is the outcome of a rollback, or of one agent's part of it (cascade 4.4.2). It is never
// more than what is known (P6).
type Status string

// The statuses. They are the words on the wire.
const (
	Completed Status = "completed"
	Partial   Status = "partial"
	Escalated Status = "escalated"
	Failed    Status = "failed"
)

// State is the state of a rollback.
type State string

// The states.
const (
	// Executing: it was accepted, and goes on by itself, also after a restart.
	Executing State = "executing"
	// Finished: it has a Status, which never changes.
	Finished State = "finished"
	// Reserved: it was prepared, and nothing was accepted yet. It ends by itself.
	reserved State = "prepared"
	// Planned: it is only shown.
	Planned State = "planned"
)

// Rollback is a rollback, as it is recorded and as everybody sees it: over the wire, in the admin API and at the
// command. The members of its JSON are an API; what nobody is shown is in the Journal.
type Rollback struct {
	// ID is a UUID. It is shown as a URN (urn:uuid:), that of the id under which it was asked for.
	ID string `json:"rollback_id"`
	// KeptAs is the id by which operators name it, where the one above names the rollback of another checkpoint
	// too. Shown to operators only.
	KeptAs string `json:"kept_as,omitempty"`
	// Checkpoint is the checkpoint or group that is rolled back, Workflow that of the checkpoint.
	Checkpoint string `json:"checkpoint_id"`
	Workflow   string `json:"workflow,omitempty"`
	// WorkflowName is the caller's name of the workflow if it differs. Shown to operators only.
	WorkflowName string `json:"workflow_name,omitempty"`
	// Scope is the applied one.
	Scope Scope `json:"scope"`
	// Reason is the requester's sentence for people, Urgency the requester's word.
	Reason  string `json:"reason,omitempty"`
	Urgency string `json:"urgency,omitempty"`
	// Requester is the identity of the agent that asked; Operator the name of the operator.
	Requester string `json:"requester,omitempty"`
	Operator  string `json:"operator,omitempty"`
	State     State  `json:"state"`
	// Status is empty before the rollback is finished. It never claims more than is known (P6).
	Status Status `json:"status,omitempty"`
	// Effect is EffectMixed or EffectUnknown if the effect is neither completely undone nor completely kept.
	Effect string `json:"effect,omitempty"`
	// Prepared is when it was prepared; zero where it was asked for in one request.
	Prepared time.Time `json:"prepared,omitzero"`
	// Asked is the time of acceptance. Due is Asked plus half of the shortest ttl; a rollback
	// that is not done by then is escalated, and TimedOut. Finished is zero before its end.
	Asked    time.Time `json:"asked,omitzero"`
	Due      time.Time `json:"due,omitzero"`
	Finished time.Time `json:"finished,omitzero"`
	TimedOut bool      `json:"timed_out,omitempty"`
	// Joined is the wider rollback to which this one gives way, and whose result it then has; empty without one.
	Joined string `json:"joined,omitempty"`
	// PlanHash identifies the plan: SHA-256 in hexadecimal.
	PlanHash string `json:"plan_hash,omitempty"`
	// Steps are those of the plan, in the order of their levels. They are recorded one by one.
	Steps []Step `json:"steps,omitzero"`
	// Uncovered, Along, Dependants and Missing are as in the plan: Uncovered are those that it passes.
	Uncovered  []string `json:"uncovered,omitempty"`
	Along      []string `json:"along,omitempty"`
	Dependants []string `json:"dependants,omitempty"`
	// Unreached are the participants of which nobody knows what they have of the workflow: there may
	// be more to undo.
	Unreached []Obstacle `json:"unreached,omitempty"`
	Missing   []string   `json:"missing,omitempty"`
	// elsewhere are checkpoints in the scope of a part of a rollback that whoever asks for the part
	// undoes itself: nothing was done for them here.
	Elsewhere []string `json:"elsewhere,omitempty"`
	// Others is how many checkpoints under the workflow's id are not rolled back, because
	// they are not linked to those of the requester.
	Others int `json:"others,omitempty"`
	// Cascaded are the agents other than that of the checkpoint with the results of their
	// parts, as in the token (cascade 4.4.1).
	Cascaded []agentStatus `json:"cascaded,omitzero"`
	// FailedAgents are all agents whose part was not completed (cascade 4.3.3).
	FailedAgents []string `json:"failed_agents,omitempty"`
	// Before and After are hashes of the state before and after; zero if there is no state to hash.
	Before Hash `json:"state_hash_before,omitzero"`
	After  Hash `json:"state_hash_after,omitzero"`
	// Escalations are the ids of its escalations to people.
	Escalations []string `json:"escalations,omitempty"`
	// Waits is the id of the escalation whose decision it waits for; empty while it goes on.
	Waits string `json:"waits_for,omitempty"`
	// FollowUp lists in sentences what a person must still do; it may be empty.
	FollowUp []string `json:"follow_up,omitempty"`
	Tokens   `json:"tokens,omitzero"`
	// ECT is the signed rollback_complete token.
	ECT string `json:"ect,omitempty"`

	Journal `json:"-" cbor:"journal"`
}

// agentStatus is the result of one agent's part.
type agentStatus struct {
	// Agent is its identity.
	Agent string `json:"agent"`
	// Status is the result of its part.
	Status Status `json:"status"`
}

// Tokens are the ids of a rollback's tokens.
type Tokens struct {
	// Start is the id of the rollback_start token; empty without.
	Start string `json:"start,omitempty"`
	// Complete is the id of the rollback_complete token; empty without.
	Complete string `json:"complete,omitempty"`
}

// How the effect of a rollback is uncertain (the heuristic outcomes of XA).
const (
	// EffectMixed: some effects were undone and others were not.
	EffectMixed = "mixed"
	// EffectUnknown: it is unknown whether some undos had their effect.
	EffectUnknown = "unknown"
)

// Hash is a hash of a state, SHA-256 with a salt of the rollback's (ADR 0041); zero is none.
type Hash [sha256.Size]byte

const hashPrefix = "sha256:"

// MarshalText writes a hash as the tokens have it: sha256: and the hash in base64url.
func (h Hash) MarshalText() ([]byte, error) {
	return base64.RawURLEncoding.AppendEncode([]byte(hashPrefix), h[:]), nil
}

// UnmarshalText reads what MarshalText writes.
func (h *Hash) UnmarshalText(text []byte) error {
	sum, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(string(text), hashPrefix))
	if err != nil || len(sum) != len(h) {
		return errors.New("no hash of a state")
	}
	*h = Hash(sum)
	return nil
}

// AskedAs is the id under which it was asked for.
func (b *Rollback) AskedAs() string { return cmp.Or(b.Named, b.ID) }

// StepState is the state of a step.
type StepState string

// The states of a step.
const (
	StepPending StepState = "pending" // not begun
	StepRunning StepState = "running" // it was journaled and may have begun
	StepDone    StepState = "done"    // it has a Status
)

// Step is the undo of one checkpoint, as it is recorded and shown. The members of its JSON are an API.
type Step struct {
	Checkpoint string `json:"checkpoint_id"`
	// Agent is the identity behind the checkpoint's call: the issuer of the token that led to it,
	// else the gateway.
	Agent string `json:"agent,omitempty"`
	// Via is the identity of the other gateway, or agent, that is asked to undo it; empty where this
	// gateway undoes it.
	Via string `json:"via,omitempty"`
	// Level is the place in the plan, from 0; all steps of a level finish before the next level begins.
	Level int `json:"level"`
	// Action is undo, cancel, wait, escalate, gather or none.
	Action string    `json:"action"`
	State  StepState `json:"state,omitempty"`
	// Status is set where State is StepDone.
	Status Status `json:"status,omitempty"`
	// Effect is EffectUnknown if it is not known whether the undo had its effect.
	Effect string `json:"effect,omitempty"`
	// Reason is a fixed word for why it is not completed; empty if it is.
	Reason string `json:"reason,omitempty"`
	// Cause is the checkpoint's fixed word for why the call is irreversible, if that is known, or the
	// participant's for why it refuses.
	Cause string `json:"cause,omitempty"`
	// Critical and Review are as in the plan.
	Critical string `json:"critical,omitempty"`
	Review   bool   `json:"review,omitempty"` // see Critical
	// HTTPStatus is the status of the last answer to the undo; 0 without one.
	HTTPStatus int `json:"http_status,omitempty"`
	// Attempts counts how often the undo was sent.
	Attempts int `json:"attempts,omitempty"`
	// Before and After are hashes of the state; zero without.
	Before Hash `json:"state_hash_before,omitzero"`
	After  Hash `json:"state_hash_after,omitzero"`
	// Token is the id of the step's token; empty without one.
	Token string `json:"token,omitempty"`
	// Escalation is the id of the step's escalation; empty without one.
	Escalation string `json:"escalation,omitempty"`
	// Begun is when the step was journaled, zero if nothing was tried; Ended is when it was done.
	Begun time.Time `json:"begun,omitzero"`
	Ended time.Time `json:"ended,omitzero"`
	// Earlier are the checkpoints whose steps come right before this one, because their calls
	// follow from its call, or because it is a group that contains them; at most 64.
	Earlier []string `json:"earlier,omitempty" cbor:"-"`
	// LastCause is why the last attempt of a running step failed. It, Call and Way are shown to operators only.
	LastCause string `json:"last_cause,omitempty"`
	// Call is the call that the checkpoint was made for, as far as it is recorded.
	Call *CallDocument `json:"call,omitempty"`
	// Way is how the call is undone, like "compensate POST /v1/refunds".
	Way string `json:"way,omitempty"`

	StepJournal `json:"-" cbor:"journal"`
}

// StepJournal is what is known of a step and not shown.
type StepJournal struct {
	// What is what the plan says.
	What What `cbor:"-"`
	// Cancelled says that the call never ran, so that there was nothing to undo: this is
	// cancellation, not rollback (architecture brief).
	Cancelled bool `cbor:"cancelled,omitempty"`
	// Unknown says that the undo may or may not have had its effect.
	Unknown bool `cbor:"unknown,omitempty"`
	// Completion is the id of the participant's signed result, from which the step's token follows; empty without.
	Completion string `cbor:"completion,omitempty"`
	// Root is the first attempt, whose mark this step holds; empty where it is that itself.
	Root string `cbor:"root,omitempty"`
}

// CallDocument describes the call of a checkpoint to operators.
type CallDocument struct {
	// Execution is the execution key, in hexadecimal.
	Execution string `json:"execution"`
	// ExecutionID is the caller's id of the execution.
	ExecutionID string `json:"execution_id,omitempty"`
	// Action is the configured name of the call's kind.
	Action string `json:"action,omitempty"`
	// Method is the method of the call.
	Method string `json:"method"`
	// Host is the host of the call.
	Host string `json:"host,omitempty"`
	// Path is the path of the call, without its query.
	Path string `json:"path"`
	// Created is when the call was claimed.
	Created time.Time `json:"created,omitzero"`
}

// Request asks for a rollback. The requester is authenticated; its authorization is decided here.
type Request struct {
	// ID is the rollback's id, a UUID in its canonical form (without `urn:uuid:`). The same id
	// with the same content is the same rollback while it is kept (P5).
	ID string
	// Named is the id under which it was asked for where ID, by Coordinator.Resolve, is another one:
	// the rollback of a further checkpoint was asked for under it. Those are parts of one rollback, and
	// do not conflict with each other. Empty where it is ID.
	Named string
	// Checkpoint is the id of the checkpoint or group to go back to.
	Checkpoint string
	// Scope is how far to go.
	Scope Scope
	// PartOf is the id of the rollback at another gateway of which this one is a part; empty
	// without. Parts of one requester's rollback do not conflict with each other.
	PartOf string
	// Precedence is that of the rollback of which this one is a part; zero is its own.
	Precedence precedence
	// Planned is the hash of the plan that is to be carried out, 32 bytes, and no other; empty is any.
	Planned string
	// Whole says that nothing is to be undone where a part cannot be, unless people approve: `partial never`.
	Whole bool
	// KeepDependants allows completed actions to stay that depend on what is undone; without it
	// such a rollback is refused.
	KeepDependants bool
	// Reason is a sentence for people, at most 512 bytes. Urgency is the requester's word.
	Reason, Urgency string
	// Token is the id of the requesting token, Error the id of the error that it names as its
	// cause (AERR): rollback_start follows from Error, else from Token. Both may be empty.
	Token, Error string
	// Unnamed says that the token does not name Checkpoint itself: then Error must follow from
	// Checkpoint, or one token would be valid for every checkpoint.
	Unnamed bool
	// By is the identity whose lineage is checked, the issuer of the token. Ignored for
	// operators.
	By string
	// Lineage is the policy for requesters in a workflow.
	Lineage Lineage
	// Coordinator says that By is a configured rollback coordinator.
	Coordinator bool
	// Operator is the name of an operator, who may ask for everything; empty for agents.
	Operator string
}

// Options configure a Coordinator. All up to Keep are required.
type Options struct {
	Store       store.Store
	Sealer      store.Sealer
	Guard       *execution.Guard
	Checkpoints *checkpoint.Store
	Escalations *hitl.Store
	Ledger      Ledger
	// Sender sends the requests of undos.
	Sender Sender
	// Keep is how long a finished rollback is kept to answer repeated requests; at least as long
	// as its checkpoints' execution keys.
	Keep time.Duration
	// Participants is where an agent is asked to roll back a checkpoint of its own, by its identity
	// and the checkpoint's rollback_uri; empty where nobody is to be asked. An error says nothing,
	// and it is called again. Nil asks nobody.
	Participants func(issuer, rollbackURI string) (uri string, err error)
	// Discover asks the configured participants for what they have of a workflow, each until it is silent
	// for PrepareTimeout, and records what the ledger lacks; fresh says that it did. unreached are those of which
	// nobody knows what they have, with the reason. Nil asks nobody.
	Discover func(ctx context.Context, workflow string) (fresh bool, unreached []Obstacle, err error)
	// Whole says that a rollback because of an error is whole or not at all, as in Request; nil is false.
	Whole func() bool
	// Configured are all participants that the configuration names: they hear when the whole workflow
	// is rolled back. Nil is none.
	Configured func() ([]hitl.Participant, error)
	// Parallel is how many steps of a level run at once; 0 is 8.
	Parallel int
	// PrepareTimeout is how long a participant that is asked in the first phase may be silent before it
	// counts as unreachable, as it is configured now; nil, and zero, is DefaultPrepareTimeout.
	// Reservation bounds the whole phase, if it is longer: how long what is prepared is reserved; nil,
	// and zero, is DefaultReservation.
	PrepareTimeout, Reservation func() time.Duration
	// Logger gets what no answer and no record says; nil is none.
	Logger *slog.Logger

	undoer callUndoer // nil is one that sends over Sender
}

// callUndoer undoes one call.
type callUndoer interface {
	// Undo returns when the undo or ctx has ended. It may then be called again with the same
	// task, and sends nothing again that was answered.
	Undo(ctx context.Context, t undoTask) (undoResult, error)
	// Prepare asks what the undo depends on whether it can be done: a participant, until the task is due, or of
	// a restore the target, once. obstacle is a fixed word for why it cannot; empty if it can, if that is not
	// known, or if nothing is to be asked.
	Prepare(ctx context.Context, t undoTask) (obstacle string, err error)
	// Release tells whoever has prepared to undo the call that it is not asked to, until the task
	// is due.
	Release(ctx context.Context, t undoTask) error
}

// Checkpoint is the ledger's record of a checkpoint's token.
type Checkpoint struct {
	ID, Workflow string
	// Agent is the identity behind the call.
	Agent string
	// Own says that this gateway made it; else Issuer did, and names RollbackURI.
	Own                 bool
	Issuer, RollbackURI string
	// Sum is its out_hash.
	Sum        [32]byte
	Reversible bool
	// Expires is when its ttl ends; TTL is that of the token.
	Expires time.Time
	TTL     time.Duration
	// Parents are the ids in its par.
	Parents []string
	// Audience are the identities in its aud: whom it was made for.
	Audience []string
}

// Query says what a plan needs of a workflow.
type Query struct {
	// Target is the checkpoint or group to go back to. If empty, all of Workflow is needed.
	Target, Workflow string
	// Scope is how far to go. Nodes that do not follow from Target count for FullWorkflow only.
	Scope Scope
	// By is the identity whose right to ask is checked by Lineage; empty if it may ask for all.
	By      string
	Lineage Lineage
	// Error is the id of an error that may follow from Target; empty without.
	Error string
}

// View is the part of a workflow that a plan is made of.
type View struct {
	// Graph is made of the records that are needed. It is never nil.
	Graph *workflow.Graph
	// More says, of a Single rollback, that more nodes follow from the target than Graph has.
	More bool
	// Version identifies the records of the workflow before Graph was read, for Ledger.Unchanged.
	// Empty is unknown.
	Version string
}

// Ledger reads the records of workflows and makes the evidence of rollbacks, which is written in
// the commit that it is about. One commit may have several. Zero Evidence is none. It must be
// safe for concurrent use.
type Ledger interface {
	// Checkpoint finds the token of a checkpoint or group and verifies its signature and those of
	// its parents (cascade 4.2.3). ErrUnknown means that there is none, checkpoint.ErrTampered
	// that the token is not the recorded one.
	Checkpoint(ctx context.Context, id string) (Checkpoint, error)
	// Graph returns the nodes of the target's workflow that its plan depends on. The states of
	// checkpoints are those of their tokens; the Coordinator updates them from the checkpoint
	// store and the guard. ErrUnknown means that nothing has the target.
	//
	// checkpoint.ErrTampered means that some of it is not what was recorded. The nodes are then
	// those by which lineage is checked, as far as they are readable.
	Graph(ctx context.Context, q Query) (View, error)
	// Unchanged reports whether the graph read with a version is still complete: nothing recorded
	// since can change a plan. It is false for an empty version.
	Unchanged(ctx context.Context, workflow, version string) (bool, error)
	// Workflows are those in which an event with this id is recorded, whose issuer is proven.
	Workflows(ctx context.Context, id string) ([]string, error)
	// Crossed are other workflows than r's in which something follows from what its Steps undo.
	Crossed(ctx context.Context, r *Rollback) ([]string, error)
	// Started records an accepted rollback; parents are what it follows from, if anything.
	Started(ctx context.Context, r *Rollback, parents []string) (Evidence, error)
	// Stepped records a step that has ended: as compensate where a compensation ran, else as
	// rollback_complete. r has no Steps. way is zero where nothing was undone.
	Stepped(ctx context.Context, r *Rollback, s *Step, way checkpoint.Way) (Evidence, error)
	// Completed records a finished rollback, with all its Steps.
	Completed(ctx context.Context, r *Rollback) (Evidence, error)
	// Erred records an error: errorType is a word of ECT's error types (timeout,
	// constraint_violation), why a fixed sentence. r has no Steps; of a request that is
	// refused it has what was asked and no Start.
	Erred(ctx context.Context, r *Rollback, checkpointID, errorType, why string) (Evidence, error)
}

// Evidence is evidence on its way into a commit.
type Evidence struct {
	// ID is that of the token.
	ID string
	// Batch records it; nil where it is recorded already.
	*store.Batch
}

// Errors of a Coordinator. Others that it returns as they are: checkpoint.ErrTampered and
// checkpoint.ErrExpired of the target, *DependedOnError, *ScopeError.
var (
	// ErrInvalid: the request breaks a rule; the message says which.
	ErrInvalid = errors.New("rollback: invalid request")
	// ErrUnknown: no rollback has this id, or it is not kept any more.
	ErrUnknown = errors.New("rollback: no such rollback")
	// ErrNotInWorkflow: the requester may not ask for this checkpoint, or there is none. Both
	// get the same answer (P3).
	ErrNotInWorkflow = errors.New("rollback: not in the workflow of the checkpoint, or not among its ancestors")
	// ErrCheckpointUnknown: there is no such checkpoint. Only operators and coordinators
	// learn this.
	ErrCheckpointUnknown = errors.New("rollback: no such checkpoint")
	// ErrUnnamed: the token that asks names neither the checkpoint nor an error that follows
	// from it. Only who may ask for the checkpoint learns this.
	ErrUnnamed = errors.New("rollback: the token names neither the checkpoint nor an error that follows from it")
	// ErrAccepted: the rollback was accepted, so that what it has reserved is not released.
	errAccepted = errors.New("rollback: it was accepted and goes on")
	// ErrMismatch: the id, or the token that asks, was used for another rollback.
	ErrMismatch = errors.New("rollback: the id or the token was used for another request")
	// ErrStore: the store or the ledger did not answer. Nothing was begun (P4).
	ErrStore = errors.New("rollback: the store is unavailable")
	// ErrStopping: the process is about to end and begins nothing new.
	ErrStopping = errors.New("rollback: shutting down")
	// errUnreadable: a record of a rollback stands there and cannot be read. It is an ErrStore.
	errUnreadable = fmt.Errorf("%w: a record cannot be read", ErrStore)
	// ErrCursor: the text does not say where a page begins.
	ErrCursor = errors.New("rollback: this is not where a page begins; give what an earlier page named as the next")
)

// planChangedError refuses to carry out another plan than the one that was prepared, or that the
// request names. Whoever asks may prepare anew.
type planChangedError struct {
	// Hash is that of the plan as it is now.
	Hash [32]byte
}

// Error implements error.
func (e *planChangedError) Error() string {
	return fmt.Sprintf("rollback: the plan is another one now: %x", e.Hash)
}

// ConflictError refuses a rollback that overlaps with another one, which takes
// precedence (cascade 4.3.4).
type ConflictError struct {
	// Winner is the id of the other one, or of the whole that it is a part of.
	Winner string

	kept string // the id of the other one here; empty where it is at a participant
}

// Error implements error.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("rollback: rollback %s is under way and takes precedence", e.Winner)
}

// maxFollowUp is the largest number of sentences of Remaining.
const maxFollowUp = 50

// remedies say what a person should do about an uncompleted step, by its reason.
var remedies = map[string]string{
	string(reasonIrreversible):  "it cannot be undone by the gateway; undo it by hand, or decide that it stays",
	string(ReasonChanged):       "somebody has changed it since; look at it, and put it back by hand or leave it",
	string(ReasonRefused):       "the upstream refuses to undo it for good; ask who runs it, and undo it by hand",
	string(ReasonUnauthorized):  "the upstream did not accept the credentials of the undo; correct `undo_auth`, and undo it by hand or ask again under a new id",
	string(reasonUnexpected):    "the upstream's answer to the undo is not known; find out what became of it",
	string(reasonPartial):       "the agent that was asked has undone a part of it; look there for the rest, and undo it by hand",
	string(reasonEscalated):     "the agent that was asked has left it to a person; look there who decides",
	string(reasonLost):          "no answer to the undo came, and it may have had its effect; find out in the target system",
	string(ReasonUnreachable):   "the upstream could not be reached, and nothing was sent; ask again under a new id when it is back",
	string(reasonTimeout):       "it was not done in time; look at it, and ask again under a new id or undo it by hand",
	string(reasonUnfilled):      "the request of the undo cannot be made of what was recorded, as where the answer to the call was lost; find out what became of the call, and undo it by hand",
	string(ReasonNoUpstream):    "nothing in the configuration leads to its upstream any more, and nothing was tried; undo it by hand, or put a route to it back and ask again under a new id",
	string(ReasonOtherUpstream): "the configuration leads to another upstream than the one that the recorded credentials are for; undo it by hand, or put the route back and ask again under a new id",
	string(ReasonNoCredentials): "the recorded credentials are gone; undo it by hand",
	string(reasonUnverified):    "after the undo something else stands there; look at it",
	string(reasonNoPostImage):   "what stood there after the call is not known; compare by hand before you put it back",
	reasonExpired:               "its time to be undone is over; undo it by hand, or decide that it stays",
	reasonTampered:              "what is kept of it is not what was recorded; examine the store, and undo it by hand",
	reasonUnknown:               "a group has it, and nobody knows it here; find out what it stood for",
	string(ReasonForeign):       "another gateway or agent has made the checkpoint; ask for its rollback there",
	reasonPolicy:                "it was not tried, since something that must be undone with it cannot be; look at the other steps, and ask again under a new id for what is to be undone all the same",
	answerDenied:                "people have not approved that it is undone, and it stays as it is",
	answerChanged:               "what people have approved is another plan by now, and nothing was undone; ask again under a new id",
	"conflict":                  "the agent that was asked has another rollback under way; ask again under a new id when that is over",
	reasonMissing:               "the group contains checkpoints that nobody knows here; find out what they stood for",
	reasonMembers:               "some of what the group contains was not undone; look at the steps of those",
	reasonBusy:                  "another rollback has left it half undone; look at that one before you ask again under a new id",
	reasonUnavailable:           "the undo could not be carried on in time, and it may have had its effect; find out in the target system, and ask again under a new id",
}

const otherRemedy = "it is not undone; look at it"

// remaining lists what a person must still do, in at most 50 sentences. For a plan it lists what would be left.
func (r *Rollback) remaining() []string {
	var all []string
	add := func(format string, args ...any) {
		switch len(all) {
		case maxFollowUp:
		case maxFollowUp - 1:
			all = append(all, "There is more; look at the steps.")
		default:
			all = append(all, fmt.Sprintf(format, args...))
		}
	}
	if r.Waits != "" {
		add("Escalation %s asks people whether it goes on.", r.Waits)
	}
	for i := range r.Steps {
		s := &r.Steps[i]
		reason := s.Reason
		switch {
		case s.State == StepDone && s.Status == Completed:
			continue
		case s.State == StepDone:
		case r.State == Executing:
			continue // not finished: nothing to do yet
		case s.What == expired:
			reason = reasonExpired
		case s.What == Escalate && reason == "":
			reason = string(reasonIrreversible)
		case s.What == Escalate:
		default:
			continue
		}
		remedy, ok := remedies[reason]
		if !ok {
			remedy = otherRemedy
		}
		text := fmt.Sprintf("Checkpoint %s: %s.", s.Checkpoint, remedy)
		if s.Escalation != "" {
			text += fmt.Sprintf(" Escalation %s tells people of it.", s.Escalation)
		}
		add("%s", text)
	}
	if p := r.Plan; p != nil && r.State != Executing {
		if n := len(p.Passed); n > 0 {
			add("%d actions in the scope have no checkpoint, so that nothing undoes them; look at `uncovered`.", n)
		}
		if n := len(p.Dependants); n > 0 {
			add("%d completed actions depend on what is undone, and stay; look at `dependants`.", n)
		}
		if n := p.Left; n > 0 {
			add("%d checkpoints under the workflow's id are not linked to the requester's part of it, and stay; a coordinator or an operator can undo them.", n)
		}
		for _, o := range r.Unreached {
			add("Nobody knows what %s has done in the workflow (%s), and none of it was undone; ask for the rollback again when it answers.", o.Agent, o.Reason)
		}
		if n := len(p.Missing); n > 0 {
			add("%d checkpoints of a group are not known here; look at `missing`.", n)
		}
	}
	return all
}
