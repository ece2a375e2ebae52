package evidence

import (
	"context"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// The gateway's own extension members, in the tokens of rollbacks.
const (
	// MemberEffect is mixed where some effects were undone and others were not, and unknown
	// where nobody knows of one; it is not there otherwise (P6).
	MemberEffect ect.Member = "agent_guard.effect"
	// MemberCancelled says that the call never ran: its checkpoint was cancelled, and there
	// was nothing to undo (architecture brief).
	MemberCancelled ect.Member = "agent_guard.cancelled"
)

// The values of MemberEffect.
const (
	effectMixed   = "mixed"
	effectUnknown = "unknown"
)

// maxReason leaves room in the extensions of a token.
const maxReason = 512

// callerPrefix begins the name of a caller without tokens. It has a blank, which no
// identity has: nobody can issue tokens under such a name.
const callerPrefix = "caller "

// CallerName is the name by which a caller without tokens stands in a rollback, and is
// judged by lineage; empty for the zero hash, which is nobody's.
func CallerName(caller guard.CallerHash) string {
	if caller == (guard.CallerHash{}) {
		return ""
	}
	return callerPrefix + hex.EncodeToString(caller[:])
}

// RollbackStartID is the id of what tells that a rollback was accepted. Like the other ids
// of its tokens it can be told once, in whatever life of the gateway (P5), and nobody else
// can make it: whoever took one before would keep the rollback's commits from landing.
func (e *Evidence) RollbackStartID(id string) string { return e.secretID("rollback start", id) }

// RollbackStepID is the id of what is told of a checkpoint's step, be it compensate or
// rollback_complete.
func (e *Evidence) RollbackStepID(id, checkpoint string) string {
	return e.secretID("rollback step", id+" "+checkpoint)
}

// RollbackCompleteID is the id of the rollback's result.
func (e *Evidence) RollbackCompleteID(id string) string { return e.secretID("rollback complete", id) }

// RollbackErrorID is the id of an error of a rollback.
func (e *Evidence) RollbackErrorID(id, checkpoint, errorType string) string {
	return e.secretID("rollback error", id+" "+checkpoint+" "+errorType)
}

// RollbackStart drafts the token that a rollback was accepted (cascade Figure 11). It
// follows from parent: the error that caused it, else the token that asked, else the
// checkpoint.
func (w *Witness) RollbackStart(now time.Time, r *rollback.Rollback, parent string) (*ect.Draft, error) {
	return w.issuer.Draft(now, ect.Claims{
		Audience: w.hearers(r), ID: w.e.RollbackStartID(r.ID), Workflow: r.Workflow,
		Action: string(ect.EventRollbackStart), Parents: []string{parent},
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberRollbackID, rollbackURN(r.ID)).
			Text(ect.MemberCheckpointID, r.Checkpoint).
			Text(ect.MemberScope, string(r.Scope)).
			Text(ect.MemberReason, plain(r.Reason, maxReason)),
	})
}

// RollbackStep drafts what came of one checkpoint (cascade Figure 13).
func (w *Witness) RollbackStep(now time.Time, r *rollback.Rollback, s *rollback.Step) (*ect.Draft, error) {
	return w.step(now, r, s, ect.EventRollbackComplete, begun(r, s.Checkpoint))
}

// Compensate drafts what came of one checkpoint whose call was compensated for. It follows
// from the checkpoint too, which stands for the action that it takes back.
func (w *Witness) Compensate(now time.Time, r *rollback.Rollback, s *rollback.Step) (*ect.Draft, error) {
	parents := begun(r, s.Checkpoint)
	if !slices.Contains(parents, s.Checkpoint) {
		parents = append(parents, s.Checkpoint)
	}
	return w.step(now, r, s, ect.EventCompensate, parents)
}

func (w *Witness) step(now time.Time, r *rollback.Rollback, s *rollback.Step, event ect.Event, parents []string) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberRollbackID, rollbackURN(r.ID)).
		Text(ect.MemberCheckpointID, s.Checkpoint).
		Text(ect.MemberStatus, string(s.Status))
	stateHashes(ext, s.Before, s.After)
	if s.Reason != "" {
		ext.Text(ect.MemberReason, plain(s.Reason, maxReason))
	}
	if s.Cancelled {
		ext.Bool(MemberCancelled, true)
	}
	tellEffect(ext, s.Unknown, false)
	return w.issuer.Draft(now, ect.Claims{
		Audience: w.hearers(r), ID: w.e.RollbackStepID(r.ID, s.Checkpoint), Workflow: r.Workflow,
		Action: string(event), Parents: parents, Output: hashOf(s.After), Ext: ext,
	})
}

// RollbackComplete drafts what came of the rollback as a whole (cascade Figure 12). Lists
// that are too long for a token lose their end; what each step came to stands in its own.
func (w *Witness) RollbackComplete(now time.Time, r *rollback.Rollback) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberRollbackID, rollbackURN(r.ID)).
		Text(ect.MemberCheckpointID, r.Checkpoint).
		Text(ect.MemberStatus, string(r.Status))
	stateHashes(ext, r.Before, r.After)
	others, failed := agentsOf(r)
	ext.Outcomes(ect.MemberCascaded, others)
	if len(failed) > 0 {
		ext.Texts(ect.MemberFailedAgents, failed)
	}
	tellEffect(ext, r.Unknown, r.Mixed)
	return w.issuer.Draft(now, ect.Claims{
		Audience: w.hearers(r), ID: w.e.RollbackCompleteID(r.ID), Workflow: r.Workflow,
		Action: string(ect.EventRollbackComplete), Parents: begun(r, r.Checkpoint), Output: hashOf(r.After), Ext: ext,
	})
}

// RollbackError drafts an error of a rollback (ATD "Rollback Timeout and Escalation",
// cascade 4.2.3). It says nothing of the call that was to be undone, only of the rollback.
func (w *Witness) RollbackError(now time.Time, r *rollback.Rollback, checkpoint, errorType, why string) (*ect.Draft, error) {
	return w.issuer.Draft(now, ect.Claims{
		Audience: w.hearers(r), ID: w.e.RollbackErrorID(r.ID, checkpoint, errorType), Workflow: r.Workflow,
		Action: string(ect.EventError), Parents: begun(r, checkpoint),
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, "critical").
			Text(ect.MemberErrorType, errorType).
			Text(ect.MemberDescription, plain(why, maxReason)).
			Text(ect.MemberCheckpointID, checkpoint).
			Texts(ect.MemberUpstreamErrors, nil).
			Bool(MemberAttempt, true),
	})
}

// RollbackResult signs what came of a finished rollback for an answer in an older dialect
// (ATD "Basic Rollback", AERR "Rollback Response"): it follows from the token that asked.
// The ledger has RollbackComplete in its place.
func (w *Witness) RollbackResult(now time.Time, r *rollback.Rollback, request string, v ect.Vocabulary) (*ect.Token, error) {
	action, ext := string(ect.EventRollbackComplete), new(ect.ExtBuilder)
	if v == ect.AERR {
		if r.Status == rollback.Escalated {
			action = "aerr:rollback_escalated"
		}
		ext.Text(ect.MemberRollbackID, rollbackURN(r.ID))
	} else {
		ext.Text(ect.MemberCheckpointID, r.Checkpoint)
	}
	ext.Text(ect.MemberStatus, string(r.Status))
	if v != ect.ATD { // which has no names for them
		stateHashes(ext, r.Before, r.After)
	}
	others, _ := agentsOf(r)
	ext.Outcomes(ect.MemberCascaded, others)
	tellEffect(ext, r.Unknown, r.Mixed)
	return w.issuer.Issue(now, ect.Claims{
		Audience: w.hearers(r), ID: w.e.secretID("rollback result", r.ID+" "+v.String()+" "+request), Workflow: r.Workflow,
		Action: action, Parents: []string{request}, Output: hashOf(r.After), Ext: ext, Vocabulary: v,
	})
}

// hearers are the verifiers of a rollback's tokens: who asked is to be one.
func (w *Witness) hearers(r *rollback.Rollback) []string {
	all := []string{w.Identity()}
	if r.Requester != "" && r.Requester != w.Identity() && !strings.HasPrefix(r.Requester, callerPrefix) {
		all = append(all, r.Requester)
	}
	return all
}

// begun is what tokens of a rollback follow from: its start, or the checkpoint where none
// was told.
func begun(r *rollback.Rollback, checkpoint string) []string {
	if r.Start == "" {
		return []string{checkpoint}
	}
	return []string{r.Start}
}

// agentsOf says what became of the agents behind a rollback's steps: of each but the one
// behind the target its status, and which were not wholly rolled back.
func agentsOf(r *rollback.Rollback) (others []ect.Outcome, failed []string) {
	own, all, order := "", map[string]rollback.Status{}, []string(nil)
	for i := range r.Steps {
		s := &r.Steps[i]
		if s.Checkpoint == r.Checkpoint {
			own = s.Agent
		}
		status, met := all[s.Agent]
		if !met {
			order = append(order, s.Agent)
			all[s.Agent] = s.Status
			continue
		}
		all[s.Agent] = together(status, s.Status)
	}
	for _, agent := range order {
		status := all[agent]
		if status == "" { // a step that was never taken (P6)
			status = rollback.Failed
		}
		if agent != own {
			others = append(others, ect.Outcome{Agent: agent, Status: string(status)})
		}
		if status != rollback.Completed {
			failed = append(failed, agent)
		}
	}
	return others, failed
}

// together is what two steps of one agent come to. Of two that were not taken back a
// failure is the worse.
func together(a, b rollback.Status) rollback.Status {
	switch {
	case a == b:
		return a
	case a == rollback.Completed, b == rollback.Completed, a == rollback.Partial, b == rollback.Partial:
		return rollback.Partial
	}
	return rollback.Failed
}

func stateHashes(ext *ect.ExtBuilder, before, after [32]byte) {
	if h := hashOf(before); !h.IsZero() {
		ext.Text(ect.MemberStateBefore, h.Prefixed())
	}
	if h := hashOf(after); !h.IsZero() {
		ext.Text(ect.MemberStateAfter, h.Prefixed())
	}
}

// tellEffect says what heuristic outcome there is. Where both are true, that something is
// unknown is told: it says less.
func tellEffect(ext *ect.ExtBuilder, unknown, mixed bool) {
	switch {
	case unknown:
		ext.Text(MemberEffect, effectUnknown)
	case mixed:
		ext.Text(MemberEffect, effectMixed)
	}
}

func hashOf(sum [32]byte) ect.Hash {
	if sum == ([32]byte{}) {
		return ect.Hash{}
	}
	return ect.HashOf(sum)
}

func rollbackURN(id string) string { return "urn:uuid:" + id }

// plain is a text of somebody else's, short and in printable ASCII.
func plain(text string, most int) string {
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

// Told reports whether a workflow has something recorded under an id, also where it waits
// for its place, or was pruned.
func (e *Evidence) Told(ctx context.Context, workflow, id string) (bool, error) {
	switch _, err := e.log.Lookup(ctx, workflow, id); {
	case err == nil, errors.Is(err, ledger.ErrWaiting), errors.Is(err, ledger.ErrPruned):
		return true, nil
	case errors.Is(err, ledger.ErrNotFound):
		return false, nil
	default:
		return false, err
	}
}

// Now is the time of the store's clock.
func (e *Evidence) Now(ctx context.Context) (time.Time, error) { return e.store.Now(ctx) }
