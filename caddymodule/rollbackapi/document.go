package rollbackapi

import (
	"encoding/hex"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Planned is the state of a rollback that was only planned.
const Planned = "planned"

// What is not sure about the effect of a rollback (the heuristic outcomes of XA).
const (
	// EffectMixed: some effects were undone and others were not.
	EffectMixed = "mixed"
	// EffectUnknown: of some undo nobody knows whether it had its effect.
	EffectUnknown = "unknown"
)

// Document describes a rollback. Its members are an API.
type Document struct {
	// RollbackID is urn:uuid: and the id.
	RollbackID string `json:"rollback_id"`
	// CheckpointID is the checkpoint or group that it goes back to.
	CheckpointID string `json:"checkpoint_id"`
	// Workflow is that of the checkpoint.
	Workflow string `json:"workflow,omitempty"`
	// WorkflowName is what its caller calls it, where that is another name. Only operators
	// are told.
	WorkflowName string `json:"workflow_name,omitempty"`
	// Scope is how far it goes.
	Scope plan.Scope `json:"scope"`
	// Reason is the requester's, a sentence for people.
	Reason string `json:"reason,omitempty"`
	// Urgency is the requester's word.
	Urgency string `json:"urgency,omitempty"`
	// Requester is the agent that has asked.
	Requester string `json:"requester,omitempty"`
	// Operator is the name of the operator who has asked.
	Operator string `json:"operator,omitempty"`
	// State is planned, executing or finished.
	State string `json:"state"`
	// Status is completed, partial, escalated or failed, once it is finished. It is never
	// more than what is known (P6).
	Status rollback.Status `json:"status,omitempty"`
	// Effect is mixed or unknown where the effect is not simply undone or not.
	Effect string `json:"effect,omitempty"`
	// Asked is when it was accepted.
	Asked time.Time `json:"asked,omitzero"`
	// Due is when it must be done; then it is escalated.
	Due time.Time `json:"due,omitzero"`
	// Finished is when it was.
	Finished time.Time `json:"finished,omitzero"`
	// TimedOut says that it was not done when it was due.
	TimedOut bool `json:"timed_out,omitempty"`
	// Joined is the wider rollback whose result this one has.
	Joined string `json:"joined,omitempty"`
	// PlanHash is what the plan is recognised by, SHA-256 in hexadecimal.
	PlanHash string `json:"plan_hash,omitempty"`
	// Steps are in the order in which they are taken, level by level.
	Steps []StepDocument `json:"steps"`
	// Uncovered are actions in the scope that no step undoes, since nobody made a
	// checkpoint for them.
	Uncovered []string `json:"uncovered,omitempty"`
	// Along are actions outside of the scope that are undone with others.
	Along []string `json:"along,omitempty"`
	// Dependants are completed actions that depend on what is undone, and stay.
	Dependants []string `json:"dependants,omitempty"`
	// Missing is what groups contain and nobody knows.
	Missing []string `json:"missing,omitempty"`
	// Others is how many checkpoints under the workflow's id stay, since they are not linked
	// to those of who has asked for the whole.
	Others int `json:"others,omitempty"`
	// Cascaded are the agents besides that of the checkpoint with what came of their part,
	// as in the token (cascade 4.4.1).
	Cascaded []AgentDocument `json:"cascaded"`
	// FailedAgents are all agents whose part is not completed (cascade 4.3.3).
	FailedAgents []string `json:"failed_agents,omitempty"`
	// Before is the hash of the state before the rollback, as in the token.
	Before string `json:"state_hash_before,omitempty"`
	// After is that of the state after it.
	After string `json:"state_hash_after,omitempty"`
	// Escalations are the ids of what people have to look at.
	Escalations []string `json:"escalations,omitempty"`
	// FollowUp says in words what a person must still do. It is empty where that is nothing.
	FollowUp []string `json:"follow_up,omitempty"`
	// Tokens are the ids of the tokens that tell of it.
	Tokens *TokensDocument `json:"tokens,omitempty"`
	// ECT is the signed token rollback_complete.
	ECT string `json:"ect,omitempty"`
}

// StepDocument describes what is done with one checkpoint.
type StepDocument struct {
	// CheckpointID is the checkpoint.
	CheckpointID string `json:"checkpoint_id"`
	// Agent is the identity behind its call.
	Agent string `json:"agent,omitempty"`
	// Level counts from 0; all steps of one are finished before the next begins.
	Level int `json:"level"`
	// Action is undo, cancel, wait, escalate, gather or none.
	Action string `json:"action"`
	// State is pending, running or done.
	State rollback.StepState `json:"state,omitempty"`
	// Status is what came of it, once it is done.
	Status rollback.Status `json:"status,omitempty"`
	// Effect is unknown where nobody knows whether the undo had its effect.
	Effect string `json:"effect,omitempty"`
	// Reason is a fixed word that says why it is not completed.
	Reason string `json:"reason,omitempty"`
	// Cause says more where Reason is irreversible, in the word of the checkpoint.
	Cause string `json:"cause,omitempty"`
	// HTTPStatus is that of the last answer to the undo.
	HTTPStatus int `json:"http_status,omitempty"`
	// Attempts counts how often the undo was sent.
	Attempts int `json:"attempts,omitempty"`
	// Before is the hash of the state before the undo.
	Before string `json:"state_hash_before,omitempty"`
	// After is that of the state after it.
	After string `json:"state_hash_after,omitempty"`
	// Token is the id of the token that tells of the step.
	Token string `json:"token,omitempty"`
	// Escalation is the id of what a person has to look at.
	Escalation string `json:"escalation,omitempty"`
	// Ended is when it was done.
	Ended time.Time `json:"ended,omitzero"`
	// LastCause is why the last attempt of a step that is running was in vain. Only
	// operators are told; so with Call and Way.
	LastCause string `json:"last_cause,omitempty"`
	// Call is the call that the checkpoint was made for, as far as it is recorded.
	Call *CallDocument `json:"call,omitempty"`
	// Way is how it is undone, like "compensate POST /v1/refunds".
	Way string `json:"way,omitempty"`
}

// CallDocument describes the call of a checkpoint to operators.
type CallDocument struct {
	// Execution is the execution key, in hexadecimal.
	Execution string `json:"execution"`
	// ExecutionID is the caller's name for the execution.
	ExecutionID string `json:"execution_id,omitempty"`
	// Action is the configured name of the call's kind.
	Action string `json:"action,omitempty"`
	// Method is the call's.
	Method string `json:"method"`
	// Host is the call's.
	Host string `json:"host,omitempty"`
	// Path is the call's, without its query.
	Path string `json:"path"`
	// Created is when it was claimed.
	Created time.Time `json:"created,omitzero"`
}

// AgentDocument is what came of one agent's part.
type AgentDocument struct {
	// Agent is its identity.
	Agent string `json:"agent"`
	// Status is what came of it.
	Status rollback.Status `json:"status"`
}

// TokensDocument names the tokens that tell of a rollback.
type TokensDocument struct {
	// Start is the id of rollback_start.
	Start string `json:"start,omitempty"`
	// Complete is that of rollback_complete.
	Complete string `json:"complete,omitempty"`
}

// Describe describes a rollback that was asked for under an id.
func Describe(r *rollback.Rollback, id string) *Document {
	doc := &Document{
		RollbackID: urn(id), CheckpointID: r.Checkpoint, Workflow: r.Workflow, Scope: r.Scope,
		Reason: r.Reason, Urgency: r.Urgency, Requester: r.Requester, Operator: r.Operator,
		State: string(r.State), Status: r.Status, Effect: effect(r.Unknown, r.Mixed),
		Asked: utc(r.Asked), Due: utc(r.Due), Finished: utc(r.Finished), TimedOut: r.TimedOut,
		Steps: []StepDocument{}, Cascaded: []AgentDocument{}, Escalations: r.Escalations,
		Before: hashed(r.Before), After: hashed(r.After),
	}
	if r.Joined != "" {
		doc.Joined = urn(r.Joined)
	}
	if r.Start != "" || r.Complete != "" {
		doc.Tokens = &TokensDocument{r.Start, r.Complete}
	}
	if p := r.Plan; p != nil {
		sum := p.Hash()
		doc.PlanHash = hex.EncodeToString(sum[:])
		doc.Uncovered, doc.Along, doc.Dependants, doc.Missing = p.Passed, p.Along, p.Dependants, p.Missing
		doc.Others = p.Left
	}
	for i := range r.Steps {
		doc.Steps = append(doc.Steps, describeStep(&r.Steps[i]))
	}
	if r.State == rollback.Finished {
		var others []ect.Outcome
		others, doc.FailedAgents = evidence.RollbackAgents(r)
		for _, o := range others {
			doc.Cascaded = append(doc.Cascaded, AgentDocument{o.Agent, rollback.Status(o.Status)})
		}
	}
	doc.FollowUp = followUp(r)
	return doc
}

func describeStep(s *rollback.Step) StepDocument {
	return StepDocument{
		CheckpointID: s.Checkpoint, Agent: s.Agent, Level: s.Level, Action: action(s), State: s.State, Status: s.Status,
		Effect: effect(s.Unknown, false), Reason: s.Reason, Cause: s.Cause, HTTPStatus: s.HTTPStatus, Attempts: s.Attempts,
		Before: hashed(s.Before), After: hashed(s.After), Token: s.Token, Escalation: s.Escalation, Ended: utc(s.Ended),
	}
}

// action says what is done in a word for those who ask. That a call which never ran is
// cancelled and not rolled back is told apart (architecture brief).
func action(s *rollback.Step) string {
	if s.Cancelled {
		return "cancel"
	}
	switch s.What {
	case plan.Block:
		return "cancel"
	case plan.Expired, plan.Escalate:
		return "escalate"
	case plan.Nothing:
		return "none"
	}
	return string(s.What) // wait, gather, undo
}

func effect(unknown, mixed bool) string {
	switch {
	case unknown:
		return EffectUnknown // which says less than mixed does
	case mixed:
		return EffectMixed
	}
	return ""
}

func hashed(sum [32]byte) string {
	if sum == [32]byte{} {
		return ""
	}
	return ect.HashOf(sum).Prefixed()
}

func utc(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC()
}
