package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// announce makes the checkpoint of the call and the riders by which it, the tokens that
// led to it, and their use land in the claim's commit (P2).
func (x *exchange) announce(found guard.Finding) (*evidence.Telling, error) {
	s := &x.story
	x.call.Checkpoint = ""
	if s.way == nil {
		return nil, nil
	}
	ctx := x.r.Context()
	now, err := x.engine.store.Now(ctx)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	if err := x.keepSnapshot(ctx); err != nil {
		return nil, err
	}
	draft, err := s.way.witness.Checkpoint(now, &s.call)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	x.call.Checkpoint = draft.ID()
	tokens := s.unrecorded()
	drafts := []*ect.Draft{draft}
	if x.h.UpstreamIdentity != "" {
		if s.forwarded, err = s.way.witness.Sign(draft); err != nil {
			return nil, x.storeFailed(err)
		}
		tokens, drafts = append(tokens, s.forwarded), nil
	}
	if x.probing != nil && found.Record != nil && found.Record.Checkpoint != "" { // the probe has said that it was not applied
		_, settled, err := s.way.settlement(ctx, x.engine, x.call.Key, found.Record, false, "probe")
		if err != nil {
			return nil, x.storeFailed(err)
		}
		drafts = append(drafts, settled...)
	}
	var link *store.Write
	expires := x.kept(now)
	if s.call.Workflow != "" {
		if link, err = s.way.evidence.Link(ctx, &s.call, x.call.Scope.ID, draft.ID(), expires); err != nil {
			return nil, x.storeFailed(err)
		}
	}
	told, err := s.way.evidence.Tell(x.toldUntil(now), tokens, drafts...)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	s.bind(told, expires)
	if link != nil {
		told.Ride(*link)
	}
	return told, nil
}

// toldUntil is how long the ledger keeps at least what it is told of the call: while it
// can be undone, and a rollback that began in time runs.
func (x *exchange) toldUntil(now time.Time) time.Time {
	ttl := x.story.call.TTL
	return now.Add(max(ttl+ttl/2, x.call.KeepResult))
}

// ledgerAdmits waits while the ledger is far behind, as long as a retry would wait for a
// running execution.
func (x *exchange) ledgerAdmits(ctx context.Context) error {
	if x.story.way == nil {
		return nil
	}
	ctx, cancel := context.WithDeadline(ctx, x.wait)
	defer cancel()
	if err := x.story.way.evidence.Log().Admit(ctx); err != nil {
		return x.storeFailed(err)
	}
	return nil
}

// announced says what came of the claim. A claim that was lost to a token's earlier use
// is tried again without it where that was for this very call.
func (x *exchange) announced(told *evidence.Telling, err error) error {
	if told == nil {
		return err
	}
	err = told.Done(err)
	if err == nil {
		x.story.kept = true
		for _, t := range slices.Concat(x.story.ancestors, x.story.tokens.all) {
			x.story.know(&x.story.recorded, t)
		}
		for _, t := range x.story.tokens.own {
			x.story.way.evidence.Forget(t, x.story.use) // the store knows
			x.story.know(&x.story.bound, t)
		}
		return nil
	}
	x.call.Checkpoint = ""
	var lost *store.Conflict
	if !errors.As(err, &lost) {
		return err // guard.ErrTaken is no conflict of ours
	}
	if failed := x.lostTo(lost); failed != nil {
		return failed
	}
	return guard.ErrTaken // look again
}

// settle records what came of the execution, and tells of it in the same commit.
func (x *exchange) settle(e *guard.Execution, o guard.Outcome, answer http.Header) error {
	defer x.engine.running.end(x.call.Checkpoint)
	ctx := context.Background()
	result := x.undoable(ctx, o, answer)
	told := x.tellOutcome(ctx, o, answer)
	riders := append(told.Writes(), result.Writes()...)
	return told.Done(result.Done(e.Settle(ctx, o, riders...)))
}

// tellOutcome makes the evidence of an outcome. The outcome is recorded whether or not
// that succeeds: what is not told is found at the next start, or missing.
func (x *exchange) tellOutcome(ctx context.Context, o guard.Outcome, answer http.Header) *evidence.Telling {
	s := &x.story
	if s.way == nil {
		return nil
	}
	now, err := x.engine.store.Now(ctx)
	if err != nil {
		return nil // then nothing is recorded either
	}
	came := evidence.Outcome{Checkpoint: x.call.Checkpoint, Verdict: o.Verdict, Cause: o.Cause, Status: o.Status}
	came.UpstreamErrors = x.keepUpstreamErrors(ctx, now, answer)
	drafts, err := s.way.witness.Outcome(now, &s.call, &came)
	if err == nil {
		var told *evidence.Telling
		if told, err = s.way.evidence.Tell(x.toldUntil(now), nil, drafts...); err == nil {
			return told
		}
	}
	x.h.logger.Error("the ledger cannot be told what came of a call", zap.Stringer("key", x.call.Key), zap.Error(err))
	return nil
}

// keepUpstreamErrors records what the upstream tells of with its answer, and returns the
// ids. It has commits of its own: an id that others take at the same time must not keep
// the outcome from being recorded (P6).
func (x *exchange) keepUpstreamErrors(ctx context.Context, now time.Time, answer http.Header) (ids []string) {
	ctx, cancel := context.WithTimeout(ctx, upstreamErrorTime)
	defer cancel()
	for _, t := range x.upstreamErrors(ctx, answer) {
		err := x.story.way.evidence.Append(ctx, x.toldUntil(now), []*ect.Token{t})
		if err == nil {
			ids = append(ids, t.ID())
		} else if !errors.Is(err, ledger.ErrDuplicate) {
			x.h.logger.Warn("an error that an upstream has told of could not be recorded", zap.Stringer("key", x.call.Key), zap.Error(err))
		}
	}
	return ids
}

// upstreamErrorTime is how long an outcome waits for what its errors need.
const upstreamErrorTime = 5 * time.Second

// upstreamErrors are the errors that the upstream has told of with its answer (ATD
// "Error Signaling", upstream_errors). What cannot be verified, or is known already, is
// left out.
func (x *exchange) upstreamErrors(ctx context.Context, answer http.Header) []*ect.Token {
	s := &x.story
	lines := answer[ect.FieldName]
	if len(lines) == 0 || s.way.verifier == nil {
		return nil
	}
	raws, err := ect.ParseFields(lines)
	if err != nil || len(raws) > maxPresented {
		return nil
	}
	var errs []*ect.Token
	for _, raw := range raws {
		t, err := s.way.verifier.Verify(ctx, raw, ect.Presentation{Now: time.Now(), DAG: s.way.evidence.Graph(s.call.Workflow)})
		if err == nil && (!t.Proven() || t.Event() != ect.EventError || t.Workflow() != s.call.Workflow) {
			continue // it tells of no error of this workflow
		}
		if err == nil {
			err = checkEvent(t)
		}
		if err == nil {
			err = s.way.graphOnly().CheckAnswer(ctx, t, s.tokens.all, x.h.UpstreamIdentity, x.calledWith())
		}
		if err != nil {
			x.h.logger.Debug("what an upstream has told of with its answer is left out", zap.Stringer("key", x.call.Key), zap.Error(err))
			continue
		}
		if known, err := s.way.evidence.Holds(ctx, t); err == nil && known == evidence.Unused {
			errs = append(errs, t)
		}
	}
	return errs
}

// calledWith are the ids of what an upstream was called with: the caller's own tokens, and the
// call's checkpoint.
func (x *exchange) calledWith() []string {
	ids := []string{x.call.Checkpoint}
	for _, t := range x.story.tokens.own {
		ids = append(ids, t.NodeID())
	}
	return ids
}
