package evidence

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The gateway's own extension members, in the tokens of rollbacks.
const (
	// memberEffect is mixed where only some effects were undone, and unknown where one is not
	// known; it is absent otherwise (P6).
	memberEffect ect.Member = "agent_guard.effect"
	// memberCancelled says that the call never ran, so that there was nothing to undo.
	memberCancelled ect.Member = "agent_guard.cancelled"
)

// The values of rollback.MemberPhase beside the phases of a rollback.
const (
	PhaseCheckpoint = "checkpoint" // reads the checkpoint that the token names
	PhaseRead       = "read"       // reads the tokens of a workflow, or the breakers
)

// maxReason leaves room in the extensions of a token.
const maxReason = 512

// callerPrefix begins the name of a caller without tokens. Identities have no blanks, so
// nobody can issue tokens under such a name.
const callerPrefix = "caller "

// callerName is the name of a caller without tokens in rollbacks and their lineage; empty for
// the zero hash.
func callerName(caller execution.CallerHash) string {
	if caller == (execution.CallerHash{}) {
		return ""
	}
	return string(hex.AppendEncode(append(make([]byte, 0, 64), callerPrefix...), caller[:]))
}

// rollbackStartID is the id of the event that a rollback was accepted. The ids of a rollback's
// events make them unique over all restarts (P5), and only the gateway can make them: whoever
// took one first would keep the rollback's commits from landing.
func (e *Evidence) rollbackStartID(id string) string { return e.secretID("rollback start", id) }

// rollbackStepID is the id of the result of a checkpoint's step.
func (e *Evidence) rollbackStepID(id, checkpoint string) string {
	return e.secretID("rollback step", id+" "+checkpoint)
}

// rollbackCompleteID is the id of the rollback's result.
func (e *Evidence) rollbackCompleteID(id string) string { return e.secretID("rollback complete", id) }

// rollbackErrorID is the id of an error of a rollback.
func (e *Evidence) rollbackErrorID(id, checkpoint, errorType string) string {
	return e.secretID("rollback error", id+" "+checkpoint+" "+errorType)
}

// rollbackStart drafts the event that a rollback was accepted (cascade Figure 11). parent is
// the error that caused it, else the token that requested it, else the checkpoint.
func (b *EventBuilder) rollbackStart(now time.Time, r *rollback.Rollback, parent string) (*ect.Draft, error) {
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.rollbackAudience(r), ID: b.e.rollbackStartID(r.ID), Workflow: r.Workflow,
		Action: string(ect.EventRollbackStart), Parents: []string{parent},
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberRollbackID, rollbackURN(r.AskedAs())).
			Text(ect.MemberCheckpointID, r.Checkpoint).
			Text(ect.MemberScope, string(r.Scope)).
			Text(ect.MemberReason, Printable(r.Reason, maxReason)),
	})
}

// rollbackStep drafts the result of one checkpoint (cascade Figure 13). It follows from what the participant
// that has undone it has signed.
func (b *EventBuilder) rollbackStep(now time.Time, r *rollback.Rollback, s *rollback.Step) (*ect.Draft, error) {
	parents := startOf(r, s.Checkpoint)
	if s.Completion != "" {
		parents = append(parents, s.Completion)
	}
	return b.step(now, r, s, ect.EventRollbackComplete, parents)
}

// compensate drafts the result of a compensated checkpoint (cascade Figure 13). The
// checkpoint, which represents the action, is a parent too.
func (b *EventBuilder) compensate(now time.Time, r *rollback.Rollback, s *rollback.Step) (*ect.Draft, error) {
	parents := startOf(r, s.Checkpoint)
	if !slices.Contains(parents, s.Checkpoint) {
		parents = append(parents, s.Checkpoint)
	}
	return b.step(now, r, s, ect.EventCompensate, parents)
}

func (b *EventBuilder) step(now time.Time, r *rollback.Rollback, s *rollback.Step, event ect.Event, parents []string) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberRollbackID, rollbackURN(r.AskedAs())).
		Text(ect.MemberCheckpointID, s.Checkpoint).
		Text(ect.MemberStatus, string(s.Status))
	stateHashes(ext, s.Before, s.After).Optional(ect.MemberReason, Printable(s.Reason, maxReason))
	if s.Cancelled {
		ext.Bool(memberCancelled, true)
	}
	addEffect(ext, s.Unknown, false)
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.rollbackAudience(r), ID: b.e.rollbackStepID(r.ID, s.Checkpoint), Workflow: r.Workflow,
		Action: string(event), Parents: decided(r, parents), Output: hashOf(s.After), Ext: ext,
	})
}

// rollbackComplete drafts the result of the whole rollback (cascade Figure 12). Lists that
// are too long for a token are truncated: each step has its own event.
func (b *EventBuilder) rollbackComplete(now time.Time, r *rollback.Rollback) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberRollbackID, rollbackURN(r.AskedAs())).
		Text(ect.MemberCheckpointID, r.Checkpoint).
		Text(ect.MemberStatus, string(r.Status))
	stateHashes(ext, r.Before, r.After)
	others, failed := r.Agents()
	ext.Outcomes(ect.MemberCascaded, others)
	if len(failed) > 0 {
		ext.Texts(ect.MemberFailedAgents, failed)
	}
	addEffect(ext, r.Unknown, r.Mixed)
	parents := startOf(r, r.Checkpoint)
	if r.Token != "" && r.Start != "" { // by which its requester knows it: the start may follow from an error
		parents = append(parents, r.Token)
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.rollbackAudience(r), ID: b.e.rollbackCompleteID(r.ID), Workflow: r.Workflow,
		Action: string(ect.EventRollbackComplete), Parents: decided(r, parents), Output: hashOf(r.After), Ext: ext,
	})
}

// rollbackError drafts an error of a rollback (ATD "Rollback Timeout and Escalation", cascade
// 4.2.3). It is no error of the call to be undone.
func (b *EventBuilder) rollbackError(now time.Time, r *rollback.Rollback, checkpoint, errorType, why string) (*ect.Draft, error) {
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.rollbackAudience(r), ID: b.e.rollbackErrorID(r.ID, checkpoint, errorType), Workflow: r.Workflow,
		Action: string(ect.EventError), Parents: startOf(r, checkpoint),
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, "critical").
			Text(ect.MemberErrorType, errorType).
			Text(ect.MemberDescription, Printable(why, maxReason)).
			Text(ect.MemberCheckpointID, checkpoint).
			Texts(ect.MemberUpstreamErrors, nil).
			Bool(memberAttempt, true),
	})
}

// RollbackResult signs the result of a rollback in an older vocabulary (ATD "Basic Rollback",
// AERR "Rollback Response"), or for another requester than the first. Its parent is request, the token that
// requested the rollback, and for another requester also RollbackComplete.
// It is not recorded: the ledger has RollbackComplete.
func (b *EventBuilder) RollbackResult(now time.Time, r *rollback.Rollback, request string, v ect.Vocabulary) (*ect.Token, error) {
	action, ext, parents := string(ect.EventRollbackComplete), new(ect.ExtBuilder), []string{request}
	if v != ect.ATD {
		ext.Text(ect.MemberRollbackID, rollbackURN(r.AskedAs()))
	}
	if v != ect.AERR {
		ext.Text(ect.MemberCheckpointID, r.Checkpoint)
	}
	switch {
	case v == ect.AERR && r.Status == rollback.Escalated:
		action = "aerr:rollback_escalated"
	case v == ect.Cascade:
		parents = append(parents, r.Complete)
	}
	ext.Text(ect.MemberStatus, string(r.Status))
	if v != ect.ATD { // ATD has no names for them
		stateHashes(ext, r.Before, r.After)
	}
	others, _ := r.Agents()
	ext.Outcomes(ect.MemberCascaded, others)
	addEffect(ext, r.Unknown, r.Mixed)
	return b.issuer.Issue(now, ect.Claims{
		Audience: b.rollbackAudience(r), ID: b.e.secretID("rollback result", r.ID+" "+v.String()+" "+request), Workflow: r.Workflow,
		Action: action, Parents: parents, Output: hashOf(r.After), Ext: ext, Vocabulary: v,
	})
}

// rollbackAudience are the verifiers of a rollback's tokens, the requester included.
func (b *EventBuilder) rollbackAudience(r *rollback.Rollback) []string {
	all := []string{b.Identity()}
	if r.Requester != "" && r.Requester != b.Identity() && !strings.HasPrefix(r.Requester, callerPrefix) {
		all = append(all, r.Requester)
	}
	return all
}

// startOf is the parent of a rollback's events: its start, else the checkpoint.
func startOf(r *rollback.Rollback, checkpoint string) []string {
	if r.Start == "" {
		return []string{checkpoint}
	}
	return []string{r.Start}
}

// decided adds the decisions of people that an event of a rollback follows from, the latest first.
func decided(r *rollback.Rollback, parents []string) []string {
	for _, id := range slices.Backward(r.Decisions) {
		if len(parents) < ect.MaxParents {
			parents = append(parents, id)
		}
	}
	return parents
}

func stateHashes(ext *ect.ExtBuilder, before, after [32]byte) *ect.ExtBuilder {
	if h := hashOf(before); !h.IsZero() {
		ext.Text(ect.MemberStateBefore, h.Prefixed())
	}
	if h := hashOf(after); !h.IsZero() {
		ext.Text(ect.MemberStateAfter, h.Prefixed())
	}
	return ext
}

// addEffect adds the heuristic outcome.
func addEffect(ext *ect.ExtBuilder, unknown, mixed bool) {
	if effect := rollback.Effect(unknown, mixed); effect != "" {
		ext.Text(memberEffect, effect)
	}
}

func hashOf(sum [32]byte) ect.Hash {
	if sum == ([32]byte{}) {
		return ect.Hash{}
	}
	return ect.HashOf(sum)
}

func rollbackURN(id string) string { return "urn:uuid:" + id }

// Printable makes untrusted text printable ASCII of at most so many bytes.
func Printable(text string, most int) string {
	if len(text) > most {
		text = text[:most]
	}
	return strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return '?'
		}
		return c
	}, text)
}

// The events about escalations, for which the drafts have no names (ATD "Interaction with HITL").
// Only the gateway's own tokens are read as these: an agent's action may be called the same.
const (
	eventEscalation         ect.Event = "escalation"
	eventEscalationDecision ect.Event = "escalation_decision"
)

// readEvent reads the event of a token from its action, and of the gateway's own tokens also the events
// that the drafts do not have.
func readEvent(action string, own bool) (event ect.Event, ok bool) {
	if event = ect.Event(action); own && (event == eventEscalation || event == eventEscalationDecision) {
		return event, true
	}
	return ect.ParseEvent(action)
}

// The members of tokens about escalations.
const (
	memberEscalation ect.Member = "agent_guard.escalation"
	memberLevel      ect.Member = "agent_guard.level"
	memberEscCause   ect.Member = "agent_guard.cause"
	memberProposal   ect.Member = "agent_guard.proposal"
	memberRole       ect.Member = "agent_guard.required_role"
	// memberDecidedBy is the keyed hash of who decided: those who read the workflow do not learn
	// who that was, and who knows the name and has the store can prove it.
	memberDecidedBy ect.Member = "agent_guard.decided_by"
)

// Escalation drafts that an escalation was opened, or with old that it was decided, has expired or
// is asked again (ATD "Interaction with HITL"). It follows from the error or the checkpoint that
// the escalation is about, and a decision from the escalation too.
func (b *EventBuilder) Escalation(now time.Time, old, e *hitl.Escalation) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(memberEscalation, e.ID).
		Text(memberLevel, e.Level.String()).
		Text(memberEscCause, string(e.Cause)).
		Text(memberRole, Printable(e.RequiredRole, maxReason)).
		Text(ect.MemberStatus, string(e.Status)).
		Optional(memberProposal, string(e.Proposal.Kind))
	if e.Links.Rollback != "" {
		ext.Text(ect.MemberRollbackID, rollbackURN(e.Links.Rollback))
	}
	var parents []string
	if about := cmp.Or(e.Links.Error, e.Links.Checkpoint); about != "" && e.Workflow != "" {
		parents = append(parents, about)
	}
	action := eventEscalation
	if old != nil {
		if e.Token != "" {
			parents = append(parents, e.Token)
		}
		if e.Round == old.Round {
			action = eventEscalationDecision
		}
		if n := len(e.Decisions); n > 0 && e.Decisions[n-1].At.Equal(e.Changed) {
			hash := store.Index(b.e.sealer, "decider", e.Decisions[n-1].By)
			ext.Text(memberDecidedBy, hex.EncodeToString(hash[:16])).Bool("agent_guard.approve", e.Decisions[n-1].Decision == hitl.Approve)
		}
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: []string{b.Identity()}, ID: b.e.secretID("escalation", fmt.Sprintf("%s %d %s", e.ID, e.Changed.UnixNano(), e.Status)), Workflow: e.Workflow,
		Action: string(action), Parents: parents, Ext: ext,
	})
}

// Request asks another agent to undo a checkpoint, as a step of a rollback.
type Request struct {
	// Rollback is the rollback's id, Checkpoint that of the call to be undone.
	Rollback, Checkpoint string
	// Workflow is the id of the workflow as WorkflowID gives it; it may be empty.
	Workflow string
	// Audience is the identity of that agent.
	Audience string
	// PartOf is the id of the rollback of which this one is a part; empty without.
	PartOf string
	// Reason is that of the rollback; it may be empty.
	Reason string
	// Phase is what is asked for, and Input the hash of the request's body.
	Phase string
	Input ect.Hash // see Phase
}

// requestTime is how long the token of a request is used: verifiers refuse tokens older
// than ect.MaxAge, whatever their exp, and clocks differ.
const requestTime = 10 * time.Minute

// requestID is the id of the token that asks an agent to undo a checkpoint. It stays the same
// for requestTime, so that the agent recognises a retry; later retries it recognises by the
// rollback's id and the idempotency key.
func (e *Evidence) requestID(r *Request, now time.Time) string {
	span := now.Unix() / int64(requestTime/time.Second)
	name := r.Rollback + " " + r.Checkpoint + " " + strconv.FormatInt(span, 10) + " " + r.Phase + " " + r.Input.String()
	return e.secretID("rollback request", name)
}

// Ask makes the token of a request that undoes nothing. It is not recorded: it could be used by whoever
// reads it before, or instead of, the request itself. Each attempt has one of its own.
func (b *EventBuilder) Ask(ctx context.Context, r *Request) (string, error) {
	now, err := b.e.store.Now(ctx)
	if err != nil {
		return "", err
	}
	token, err := b.request(now, r, "")
	if err != nil {
		return "", err
	}
	return token.Raw(), nil
}

// Request records the token of a request that undoes something, and returns it for the header field. A
// retry gets the same bytes, after a restart too: agents that compare bytes, as this gateway does,
// refuse any others under that id. A new token is made before the old one is too old for
// verifiers.
func (b *EventBuilder) Request(ctx context.Context, r *Request) (string, error) {
	now, err := b.e.store.Now(ctx)
	if err != nil {
		return "", err
	}
	// The token of the previous span may still be young enough.
	before, err := b.recordedRequest(ctx, r.Workflow, b.e.requestID(r, now.Add(-requestTime)))
	if err != nil && !errors.Is(err, ledger.ErrPruned) {
		return "", err
	}
	if token, err := ect.ParseInsecure(before); err == nil && now.Sub(token.IssuedAt()) < requestTime { // the gateway's own
		return before, nil
	}
	id := b.e.requestID(r, now)
	for {
		if raw, err := b.recordedRequest(ctx, r.Workflow, id); err != nil || raw != "" {
			return raw, err
		}
		token, err := b.request(now, r, id)
		if err != nil {
			return "", err
		}
		switch err := b.e.Append(ctx, token.Expires(), []*ect.Token{token}); {
		case err == nil:
			return token.Raw(), nil
		case !errors.Is(err, ledger.ErrDuplicate): // else a concurrent request recorded it
			return "", err
		}
	}
}

// Asked reports whether id is that of a token with which an agent was asked for r: the first one, or
// that of a retry.
func (b *EventBuilder) Asked(ctx context.Context, r *Request, id string) (bool, error) {
	if id = ledger.Canonical(id); id == "" || len(id) > ledger.MaxName {
		return false, nil
	}
	raw, err := b.recordedRequest(ctx, r.Workflow, id)
	if errors.Is(err, ledger.ErrPruned) {
		return false, nil
	}
	if err != nil || raw == "" {
		return false, err
	}
	token, err := ect.ParseInsecure(raw) // the gateway's own, or another one under another id
	if err != nil {
		return false, nil
	}
	earlier := *r
	earlier.Input = token.InputHash() // an attempt may have had another body
	return b.e.requestID(&earlier, token.IssuedAt()) == id, nil
}

// ReadRequest makes a token with which an agent is asked for what it has of a workflow. It names no
// checkpoint, so that nothing can be undone with it, and is not recorded: it asks for nothing to be done.
func (b *EventBuilder) ReadRequest(ctx context.Context, workflow, audience string) (string, error) {
	return b.unrecorded(ctx, workflow, audience, ect.EventRollbackRequest, PhaseRead, ect.Hash{})
}

// Hold makes a token with which a participant is told what holds a workflow, in a body with that hash.
// It is not recorded: what it says is in the token of the escalation.
func (b *EventBuilder) Hold(ctx context.Context, workflow, audience string, body []byte) (string, error) {
	return b.unrecorded(ctx, workflow, audience, eventEscalation, hitl.PhaseHold, ect.Sum(body))
}

// unrecorded makes a token for one agent.
func (b *EventBuilder) unrecorded(ctx context.Context, workflow, audience string, action ect.Event, phase string, input ect.Hash) (string, error) {
	now, err := b.e.store.Now(ctx)
	if err != nil {
		return "", err
	}
	token, err := b.issuer.Issue(now, ect.Claims{
		Audience: []string{audience}, Workflow: workflow, Life: ect.MaxAge, Action: string(action), Input: input,
		Ext: new(ect.ExtBuilder).Text(rollback.MemberPhase, phase),
	})
	if err != nil {
		return "", err
	}
	return token.Raw(), nil
}

// recordedRequest is the token recorded under an id; empty without one.
func (b *EventBuilder) recordedRequest(ctx context.Context, workflow, id string) (string, error) {
	entry, err := b.e.log.Lookup(ctx, workflow, id)
	if errors.Is(err, ledger.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	token, err := b.e.log.Token(ctx, &entry)
	return string(token), err
}

func (b *EventBuilder) request(now time.Time, r *Request, id string) (*ect.Token, error) {
	reason := r.Reason
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "")
	}
	ext := new(ect.ExtBuilder).
		Text(ect.MemberRollbackID, rollbackURN(r.Rollback)).
		Text(ect.MemberCheckpointID, r.Checkpoint).
		Text(ect.MemberReason, cmp.Or(reason, "rollback")).
		Bool(ect.MemberCascade, true)
	if r.PartOf != "" {
		ext.Text(rollback.MemberPartOf, rollbackURN(r.PartOf))
	}
	return b.issuer.Issue(now, ect.Claims{
		Audience: []string{r.Audience}, ID: id, Workflow: r.Workflow, Life: ect.MaxAge, Input: r.Input,
		Action: string(ect.EventRollbackRequest), Parents: []string{r.Checkpoint}, Ext: ext.Text(rollback.MemberPhase, r.Phase),
	})
}
