package api

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/drawing"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Planned is the state of a rollback that was planned and not accepted.
const Planned = "planned"

// How the effect of a rollback is uncertain (the heuristic outcomes of XA).
const (
	// EffectMixed: some effects were undone and others were not.
	EffectMixed = "mixed"
	// EffectUnknown: it is unknown whether some undos had their effect.
	EffectUnknown = "unknown"
)

// Document describes a rollback. Its members are an API.
type Document struct {
	// RollbackID is the id as a URN (urn:uuid:).
	RollbackID string `json:"rollback_id"`
	// KeptAs is the id by which operators name it, where RollbackID names the rollback of another
	// checkpoint too. Sent to operators only.
	KeptAs string `json:"kept_as,omitempty"`
	// CheckpointID is the checkpoint or group that is rolled back.
	CheckpointID string `json:"checkpoint_id"`
	// Workflow is the workflow of the checkpoint.
	Workflow string `json:"workflow,omitempty"`
	// WorkflowName is the caller's name of the workflow if it differs. Sent to operators
	// only.
	WorkflowName string `json:"workflow_name,omitempty"`
	// Scope is how much is rolled back.
	Scope rollback.Scope `json:"scope"`
	// Reason is the requester's sentence for people.
	Reason string `json:"reason,omitempty"`
	// Urgency is the urgency that the requester gave.
	Urgency string `json:"urgency,omitempty"`
	// Requester is the agent that requested it.
	Requester string `json:"requester,omitempty"`
	// Operator is the name of the operator who requested it.
	Operator string `json:"operator,omitempty"`
	// State is planned, executing or finished.
	State string `json:"state"`
	// Status is completed, partial, escalated or failed once it is finished. It never
	// claims more than is known (P6).
	Status rollback.Status `json:"status,omitempty"`
	// Effect is mixed or unknown if the effect is neither completely undone nor completely
	// kept.
	Effect string `json:"effect,omitempty"`
	// Prepared is when it was prepared, if it was.
	Prepared time.Time `json:"prepared,omitzero"`
	// Asked is when the rollback was accepted.
	Asked time.Time `json:"asked,omitzero"`
	// Due is the deadline, after which it is escalated.
	Due time.Time `json:"due,omitzero"`
	// Finished is when it ended.
	Finished time.Time `json:"finished,omitzero"`
	// TimedOut says that it had not ended at the deadline.
	TimedOut bool `json:"timed_out,omitempty"`
	// Joined is the wider rollback that this one became part of, and whose result it has.
	Joined string `json:"joined,omitempty"`
	// PlanHash identifies the plan: SHA-256 in hexadecimal.
	PlanHash string `json:"plan_hash,omitempty"`
	// Steps are in the order of execution, level by level.
	Steps []StepDocument `json:"steps"`
	// Uncovered are actions in the scope that no step undoes, because they have no
	// checkpoint.
	Uncovered []string `json:"uncovered,omitempty"`
	// Along are actions outside of the scope that are undone together with others.
	Along []string `json:"along,omitempty"`
	// Dependants are completed actions that depend on undone ones and are not undone.
	Dependants []string `json:"dependants,omitempty"`
	// Unreached are the participants of which nobody knows what they have of the workflow, with the
	// reason: there may be more to undo.
	Unreached []ReadinessDocument `json:"unreached,omitempty"`
	// Missing are members of groups that are unknown.
	Missing []string `json:"missing,omitempty"`
	// Elsewhere are checkpoints in the scope of a part of a rollback that whoever asks for the part
	// undoes itself: nothing was done for them here.
	Elsewhere []string `json:"elsewhere,omitempty"`
	// Others is how many checkpoints under the workflow's id are not rolled back, because
	// they are not linked to those of the requester.
	Others int `json:"others,omitempty"`
	// Cascaded are the agents other than that of the checkpoint with the results of their
	// parts, as in the token (cascade 4.4.1).
	Cascaded []AgentDocument `json:"cascaded"`
	// FailedAgents are all agents whose part was not completed (cascade 4.3.3).
	FailedAgents []string `json:"failed_agents,omitempty"`
	// Before is the hash of the state before the rollback, as in the token.
	Before string `json:"state_hash_before,omitempty"`
	// After is the hash of the state after the rollback.
	After string `json:"state_hash_after,omitempty"`
	// Escalations are the ids of the escalations to people.
	Escalations []string `json:"escalations,omitempty"`
	// Waits is the escalation whose decision it waits for.
	Waits string `json:"waits_for,omitempty"`
	// FollowUp lists in sentences what a person must still do; it may be empty.
	FollowUp []string `json:"follow_up,omitempty"`
	// Tokens are the ids of the rollback's tokens.
	Tokens *TokensDocument `json:"tokens,omitempty"`
	// ECT is the signed rollback_complete token.
	ECT string `json:"ect,omitempty"`
}

// StepDocument describes the step that handles one checkpoint.
type StepDocument struct {
	// CheckpointID is the checkpoint.
	CheckpointID string `json:"checkpoint_id"`
	// Agent is the identity that made the call.
	Agent string `json:"agent,omitempty"`
	// Via is the other gateway, or agent, that is asked to undo it; missing where this gateway does.
	Via string `json:"via,omitempty"`
	// Level counts from 0; all steps of a level finish before the next level begins.
	Level int `json:"level"`
	// Action is undo, cancel, wait, escalate, gather or none.
	Action string `json:"action"`
	// State is pending, running or done.
	State rollback.StepState `json:"state,omitempty"`
	// Status is the result of the step once it is done.
	Status rollback.Status `json:"status,omitempty"`
	// Effect is unknown if it is unknown whether the undo had its effect.
	Effect string `json:"effect,omitempty"`
	// Reason is a fixed word that says why the step is not completed.
	Reason string `json:"reason,omitempty"`
	// Cause refines the reason irreversible, in the word of the checkpoint.
	Cause string `json:"cause,omitempty"`
	// Critical is why a rollback does not leave it out: severity, target, action or priority.
	Critical string `json:"critical,omitempty"`
	// Review says that people are asked before it is undone.
	Review bool `json:"review,omitempty"`
	// HTTPStatus is the status of the last answer to the undo.
	HTTPStatus int `json:"http_status,omitempty"`
	// Attempts counts how often the undo was sent.
	Attempts int `json:"attempts,omitempty"`
	// Before is the hash of the state before the undo.
	Before string `json:"state_hash_before,omitempty"`
	// After is the hash of the state after the undo.
	After string `json:"state_hash_after,omitempty"`
	// Token is the id of the step's token.
	Token string `json:"token,omitempty"`
	// Escalation is the id of the escalation to a person.
	Escalation string `json:"escalation,omitempty"`
	// Begun is when the step was begun; missing if nothing had to be, or could be, tried.
	Begun time.Time `json:"begun,omitzero"`
	// Ended is when the step was done.
	Ended time.Time `json:"ended,omitzero"`
	// Earlier are the checkpoints whose steps come right before this one, because their calls
	// follow from its call, or because it is a group that contains them; at most 64.
	Earlier []string `json:"earlier,omitempty"`
	// LastCause is why the last attempt of a running step failed. It, Call and Way are sent
	// to operators only.
	LastCause string `json:"last_cause,omitempty"`
	// Call is the call that the checkpoint was made for, as far as it is recorded.
	Call *CallDocument `json:"call,omitempty"`
	// Way is how the call is undone, like "compensate POST /v1/refunds".
	Way string `json:"way,omitempty"`
}

// What an agent answers to a request to prepare (cascade 4.3.2).
const (
	statusPrepared      = "prepared"
	statusCannotPrepare = "cannot_prepare"
	statusReleased      = "released"
)

// ReleasedDocument is the answer to a release: nothing is reserved for the rollback.
type ReleasedDocument struct {
	// RollbackID is the id as a URN (urn:uuid:).
	RollbackID string `json:"rollback_id"`
	// CheckpointID is the checkpoint that was to be rolled back.
	CheckpointID string `json:"checkpoint_id"`
	// Status is released.
	Status string `json:"status"`
}

// PreparedDocument is the answer to a request to prepare a rollback: its document, with what
// stands in the way. Its members are an API.
type PreparedDocument struct {
	Document
	// Status is prepared or cannot_prepare.
	Status string `json:"status"`
	// Reason is a fixed word for why there is no plan that may be carried out; empty where
	// agents say why they cannot prepare.
	Reason string `json:"reason_code,omitempty"`
	// Conflicting is the rollback that takes precedence (cascade 4.3.4).
	Conflicting string `json:"conflicting_rollback_id,omitempty"`
	// Until is when the reservation ends; missing without one.
	Until time.Time `json:"reserved_until,omitzero"`
	// Irreversible are the checkpoints of calls that cannot be undone.
	Irreversible []string `json:"irreversible,omitempty"`
	// Agents are those of the plan, with their answers.
	Agents []ReadinessDocument `json:"agents"`
}

// ReadinessDocument says whether an agent can undo its part.
type ReadinessDocument struct {
	// Agent is its identity; missing where it is not known.
	Agent string `json:"agent,omitempty"`
	// Status is prepared or cannot_prepare.
	Status string `json:"status"`
	// Reason is a fixed word for why it cannot prepare.
	Reason string `json:"reason,omitempty"`
	// CheckpointID is the checkpoint that cannot be undone.
	CheckpointID string `json:"checkpoint_id,omitempty"`
}

// describePrepared makes the answer to a request to prepare.
func describePrepared(p *rollback.Prepared, id string) *PreparedDocument {
	doc := &PreparedDocument{Document: *Describe(p.Rollback, id), Status: statusPrepared, Until: p.Until.UTC(), Agents: []ReadinessDocument{}}
	if !p.Ready() {
		doc.Status = statusCannotPrepare
	}
	if p.Until.IsZero() && p.Rollback.State == rollback.Reserved {
		doc.State, doc.Asked, doc.Due = Planned, time.Time{}, time.Time{}
	}
	conflict, depended := (*rollback.ConflictError)(nil), (*rollback.DependedOnError)(nil)
	switch {
	case errors.As(p.Refusal, &conflict):
		doc.Reason, doc.Conflicting = "conflict", urn(conflict.Winner)
	case errors.As(p.Refusal, &depended):
		doc.Reason, doc.Dependants = dependedOn.Slug, depended.Dependants
	case errors.Is(p.Refusal, checkpoint.ErrExpired):
		doc.Reason = checkpointExpired.Slug
	case errors.Is(p.Refusal, checkpoint.ErrTampered):
		doc.Reason = checkpointTampered.Slug
	}
	status, named := statusPrepared, map[string]bool{}
	if doc.Reason != "" {
		status = statusCannotPrepare
	}
	for _, o := range p.Obstacles {
		if o.Reason == string(rollback.ReasonIrreversible) {
			doc.Irreversible = append(doc.Irreversible, o.Checkpoint)
		}
		named[o.Agent] = true
		doc.Agents = append(doc.Agents, ReadinessDocument{o.Agent, statusCannotPrepare, o.Reason, o.Checkpoint})
	}
	for i := range p.Rollback.Steps {
		if agent := p.Rollback.Steps[i].Agent; !named[agent] {
			named[agent] = true
			doc.Agents = append(doc.Agents, ReadinessDocument{Agent: agent, Status: status, Reason: doc.Reason})
		}
	}
	if len(doc.Agents) == 0 && doc.Reason != "" { // there is no plan that names them
		doc.Agents = append(doc.Agents, ReadinessDocument{Status: status, Reason: doc.Reason, CheckpointID: doc.CheckpointID})
	}
	return doc
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

// AgentDocument is the result of one agent's part.
type AgentDocument struct {
	// Agent is its identity.
	Agent string `json:"agent"`
	// Status is the result of its part.
	Status rollback.Status `json:"status"`
}

// TokensDocument lists the tokens of a rollback.
type TokensDocument struct {
	// Start is the id of the rollback_start token.
	Start string `json:"start,omitempty"`
	// Complete is the id of the rollback_complete token.
	Complete string `json:"complete,omitempty"`
}

// Describe makes the document of a rollback that was requested under an id.
func Describe(r *rollback.Rollback, id string) *Document {
	doc := &Document{
		RollbackID: urn(cmp.Or(r.Named, id)), CheckpointID: r.Checkpoint, Workflow: r.Workflow, Scope: r.Scope,
		Reason: r.Reason, Urgency: r.Urgency, Requester: r.Requester, Operator: r.Operator,
		State: string(r.State), Status: r.Status, Effect: effect(r.Unknown, r.Mixed),
		Prepared: r.Prepared.UTC(), Asked: r.Asked.UTC(), Due: r.Due.UTC(), Finished: r.Finished.UTC(), TimedOut: r.TimedOut,
		Steps: []StepDocument{}, Cascaded: []AgentDocument{}, Escalations: r.Escalations, Waits: r.Waits,
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
		for _, left := range p.Elsewhere {
			doc.Elsewhere = append(doc.Elsewhere, left.Checkpoint)
		}
	}
	for _, o := range r.Unreached {
		doc.Unreached = append(doc.Unreached, ReadinessDocument{Agent: o.Agent, Status: statusCannotPrepare, Reason: o.Reason, CheckpointID: o.Checkpoint})
	}
	for i := range r.Steps {
		step := describeStep(&r.Steps[i])
		for _, place := range r.Steps[i].Earlier {
			if place < len(r.Steps) {
				step.Earlier = append(step.Earlier, r.Steps[place].Checkpoint)
			}
		}
		doc.Steps = append(doc.Steps, step)
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
		CheckpointID: s.Checkpoint, Agent: s.Agent, Via: s.Via, Level: s.Level, Action: action(s), State: s.State, Status: s.Status,
		Effect: effect(s.Unknown, false), Reason: s.Reason, Cause: s.Cause, Critical: s.Critical, Review: s.Review, HTTPStatus: s.HTTPStatus, Attempts: s.Attempts,
		Before: hashed(s.Before), After: hashed(s.After), Token: s.Token, Escalation: s.Escalation, Begun: s.Begun.UTC(), Ended: s.Ended.UTC(),
	}
}

// Drawing draws the steps, with nothing that the document does not say: the target at the top,
// and the arrows to what followed from it.
func (d *Document) Drawing() *drawing.Drawing {
	top := 0
	places := make(map[string]int, len(d.Steps))
	for i := range d.Steps {
		places[d.Steps[i].CheckpointID] = i
		top = max(top, d.Steps[i].Level)
	}
	p := &drawing.Drawing{Title: "Rollback " + d.RollbackID + ": " + inWords(d.State, string(d.Status))}
	note := func(parts ...string) {
		if text := inWords(parts...); text != "" {
			p.Notes = append(p.Notes, text)
		}
	}
	note("checkpoint "+d.CheckpointID, "scope "+string(d.Scope))
	note(labelled("asked", moment(d.Asked)), labelled("due", moment(d.Due)), labelled("finished", moment(d.Finished)))
	if d.TimedOut {
		note("not done in time")
	}
	note(labelled("waits for the decision of people on escalation", d.Waits))
	note(labelled("effect", d.Effect))
	note(labelled("joined", d.Joined))
	for i := range d.Unreached {
		note(fmt.Sprintf("nobody knows what %s has done in the workflow (%s)", d.Unreached[i].Agent, d.Unreached[i].Reason))
	}
	if n := len(d.Uncovered); n > 0 {
		note(fmt.Sprintf("%d actions without a checkpoint are not shown", n))
	}
	note("What followed from a call stands below it, and is undone before it: level 0 first.")
	for level := range top + 1 {
		p.Layers = append(p.Layers, fmt.Sprint("level ", top-level))
	}
	for i := range d.Steps {
		s := &d.Steps[i]
		node := drawing.Node{Layer: top - s.Level, Name: cmp.Or(s.Agent, "(agent not known)"), Tone: s.tone()}
		node.State = s.Action + ": " + cmp.Or(string(s.Status), string(s.State), d.State)
		node.Lines = []string{
			labelled("reason", inWords(s.Reason, s.Cause)), labelled("effect", s.Effect), "", s.CheckpointID,
			labelled("begun", moment(s.Begun)), labelled("ended", moment(s.Ended)),
		}
		if c := s.Call; c != nil {
			node.Lines[2] = strings.TrimSpace(c.Action + " " + c.Method + " " + c.Path)
		}
		p.Nodes = append(p.Nodes, node)
		for _, id := range s.Earlier {
			if to, ok := places[id]; ok {
				p.Edges = append(p.Edges, drawing.Edge{From: i, To: to})
			}
		}
	}
	return p
}

func (s *StepDocument) tone() drawing.Tone {
	switch {
	case s.Status == rollback.Completed:
		return drawing.Good
	case s.Status == rollback.Failed:
		return drawing.Bad
	case s.Status != "", s.Action == "escalate":
		return drawing.Warning
	case s.State == rollback.StepRunning:
		return drawing.Active
	}
	return drawing.Plain
}

// inWords joins the parts that are not empty.
func inWords(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ", ")
}

func labelled(label, text string) string {
	if text == "" {
		return ""
	}
	return label + " " + text
}

func moment(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format("2006-01-02T15:04:05.000Z07:00")
}

// action returns the action of a step as one word. A call that never ran is cancelled, not
// rolled back: the architecture brief has a word of its own for it.
func action(s *rollback.Step) string {
	if s.Cancelled {
		return "cancel"
	}
	switch s.What {
	case rollback.Block:
		return "cancel"
	case rollback.Expired, rollback.Escalate:
		return "escalate"
	case rollback.Nothing:
		return "none"
	}
	return string(s.What) // wait, gather, undo
}

func effect(unknown, mixed bool) string {
	switch {
	case unknown:
		return EffectUnknown // EffectUnknown takes precedence over EffectMixed
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

// maxFollowUp is the largest number of sentences in a document.
const maxFollowUp = 50

// remedies say what a person should do about an uncompleted step, by its reason.
var remedies = map[string]string{
	string(rollback.ReasonIrreversible):  "it cannot be undone by the gateway; undo it by hand, or decide that it stays",
	string(rollback.ReasonChanged):       "somebody has changed it since; look at it, and put it back by hand or leave it",
	string(rollback.ReasonRefused):       "the upstream refuses to undo it for good; ask who runs it, and undo it by hand",
	string(rollback.ReasonUnauthorized):  "the upstream did not accept the credentials of the undo; correct `undo_auth`, and undo it by hand or ask again under a new id",
	string(rollback.ReasonUnexpected):    "the upstream's answer to the undo is not known; find out what became of it",
	string(rollback.ReasonPartial):       "the agent that was asked has undone a part of it; look there for the rest, and undo it by hand",
	string(rollback.ReasonEscalated):     "the agent that was asked has left it to a person; look there who decides",
	string(rollback.ReasonLost):          "no answer to the undo came, and it may have had its effect; find out in the target system",
	string(rollback.ReasonUnreachable):   "the upstream could not be reached, and nothing was sent; ask again under a new id when it is back",
	string(rollback.ReasonTimeout):       "it was not done in time; look at it, and ask again under a new id or undo it by hand",
	string(rollback.ReasonUnfilled):      "the request of the undo cannot be made of what was recorded, as where the answer to the call was lost; find out what became of the call, and undo it by hand",
	string(rollback.ReasonNoUpstream):    "nothing in the configuration leads to its upstream any more, and nothing was tried; undo it by hand, or put a route to it back and ask again under a new id",
	string(rollback.ReasonOtherUpstream): "the configuration leads to another upstream than the one that the recorded credentials are for; undo it by hand, or put the route back and ask again under a new id",
	string(rollback.ReasonNoCredentials): "the recorded credentials are gone; undo it by hand",
	string(rollback.ReasonUnverified):    "after the undo something else stands there; look at it",
	string(rollback.ReasonNoPostImage):   "what stood there after the call is not known; compare by hand before you put it back",
	reasonExpired:                        "its time to be undone is over; undo it by hand, or decide that it stays",
	"checkpoint-tampered":                "what is kept of it is not what was recorded; examine the store, and undo it by hand",
	"checkpoint-unknown":                 "a group has it, and nobody knows it here; find out what it stood for",
	"foreign":                            "another gateway or agent has made the checkpoint; ask for its rollback there",
	"policy":                             "it was not tried, since something that must be undone with it cannot be; look at the other steps, and ask again under a new id for what is to be undone all the same",
	"denied":                             "people have not approved that it is undone, and it stays as it is",
	"plan-changed":                       "what people have approved is another plan by now, and nothing was undone; ask again under a new id",
	"conflict":                           "the agent that was asked has another rollback under way; ask again under a new id when that is over",
	"missing":                            "the group contains checkpoints that nobody knows here; find out what they stood for",
	"members":                            "some of what the group contains was not undone; look at the steps of those",
	"busy":                               "another rollback has left it half undone; look at that one before you ask again under a new id",
	"unavailable":                        "the undo could not be carried on in time, and it may have had its effect; find out in the target system, and ask again under a new id",
}

// reasonExpired occurs in plans too.
const reasonExpired = "checkpoint-expired"

const otherRemedy = "it is not undone; look at it"

// followUp lists what a person must still do. For a plan it lists what would be left.
func followUp(r *rollback.Rollback) []string {
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
		case s.State == rollback.StepDone && s.Status == rollback.Completed:
			continue
		case s.State == rollback.StepDone:
		case r.State == rollback.Executing:
			continue // not finished: nothing to do yet
		case s.What == rollback.Expired:
			reason = reasonExpired
		case s.What == rollback.Escalate && reason == "":
			reason = string(rollback.ReasonIrreversible)
		case s.What == rollback.Escalate:
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
	if p := r.Plan; p != nil && r.State != rollback.Executing {
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

// result is the result of a rollback in the form of an older draft: the members of its
// token, and the token (ATD "Basic Rollback", AERR "Rollback Response"). Its members are an
// API.
type result struct {
	Action  string          `json:"exec_act"`
	ID      string          `json:"jti"`
	Parents []string        `json:"par"`
	OutHash string          `json:"out_hash,omitempty"`
	Ext     json.RawMessage `json:"ext"`
	ECT     string          `json:"ect"`
}

// answerIn answers with a finished rollback in the form of an older draft.
func (q *rollbackRequest) answerIn(ctx context.Context, r *rollback.Rollback, id string, v ect.Vocabulary, request string) error {
	raw, err := q.Tokens.Result(ctx, r, request, v)
	if err != nil {
		if q.r.Context().Err() == nil {
			q.Logger.Warn("the result of a rollback cannot be written in the vocabulary that was asked for",
				slog.String("rollback", id), slog.String("vocabulary", v.String()), slog.Any("error", err))
		}
		return err
	}
	token, err := ect.ParseInsecure(raw) // the gateway has just signed it
	if err != nil {
		return err
	}
	doc := result{
		Action: token.Action(), ID: token.ID(), Parents: token.Parents(), OutHash: token.OutputHash().String(),
		Ext: json.RawMessage(token.Ext().JSON()), ECT: raw,
	}
	if token.OutputHash().IsZero() {
		doc.OutHash = ""
	}
	q.w.Header().Set(ect.FieldName, raw)
	return q.writeJSON(http.StatusOK, doc)
}
