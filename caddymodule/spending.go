package caddymodule

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// takeTokens keeps the caller's tokens for this call while it is on its way.
func (x *exchange) takeTokens() error {
	s := &x.story
	s.use = sha256.Sum256(append(x.call.Key[:], x.call.Fingerprint[:]...))
	if x.r.Context().Value(tokensHanded{}) != nil {
		s.handed = true // a guard around this one has bound them
		return nil
	}
	if s.tokens.late != nil {
		return x.lateTokens()
	}
	for _, t := range s.tokens.own {
		standing, err := s.way.evidence.Take(t, s.use, time.Now())
		switch {
		case err != nil: // memory is full, and the claim's commit decides
		case standing == evidence.Unused:
			s.taken = append(s.taken, t)
		case standing == evidence.Other:
			// Somebody tries it for something else. What was recorded counts.
			recorded, err := s.way.evidence.Recorded(x.r.Context(), t, s.use)
			if err != nil {
				return x.storeFailed(err)
			}
			if recorded != evidence.Same {
				return replayedToken()
			}
			s.know(&s.bound, t)
		}
	}
	return nil
}

// lateTokens lets tokens whose time is over pass for the very call that they were used
// for, and refuses them for any other.
func (x *exchange) lateTokens() error {
	s := &x.story
	if s.tokens.late == nil {
		return nil
	}
	for _, t := range s.tokens.own {
		standing, err := s.way.evidence.Recorded(x.r.Context(), t, s.use)
		if err != nil {
			return x.storeFailed(err)
		}
		if standing != evidence.Same {
			return refusedToken(s.tokens.late)
		}
	}
	return nil
}

// giveTokensBack forgets what was taken for a call that came to nothing.
func (x *exchange) giveTokensBack() {
	s := &x.story
	if s.kept {
		return
	}
	for _, t := range s.taken {
		s.way.evidence.Forget(t, s.use)
	}
}

// reviewTokens looks up what the store knows of the tokens. It reports whether anything
// was learned, and refuses a token that was used for something else.
func (x *exchange) reviewTokens() (learned bool, err error) {
	s := &x.story
	ctx := x.r.Context()
	own := s.tokens.own
	if s.handed {
		own = nil
	}
	for _, t := range own {
		standing, err := s.way.evidence.Recorded(ctx, t, s.use)
		if err != nil {
			return false, x.storeFailed(err)
		}
		if standing == evidence.Other {
			return false, replayedToken()
		}
		if standing == evidence.Same && !s.bound[t] {
			s.know(&s.bound, t)
			s.way.evidence.Forget(t, s.use)
			learned = true
		}
	}
	for _, t := range slices.Concat(s.tokens.all, s.ancestors) {
		standing, err := s.way.evidence.Holds(ctx, t)
		if err != nil {
			return false, x.storeFailed(err)
		}
		if standing == evidence.Other {
			return false, replayedToken()
		}
		if standing == evidence.Same && !s.recorded[t] {
			s.know(&s.recorded, t)
			learned = true
		}
	}
	return learned, nil
}

// maxAncestors bounds the tokens that are recorded because of others, so that all events
// fit into one commit.
const maxAncestors = ledger.MaxEvents - maxPresented - 2

// unrecorded are the tokens that the ledger lacks: what led to others first.
func (s *story) unrecorded() []*ect.Token {
	if len(s.tokens.all) == 0 {
		return nil
	}
	s.ancestors = s.way.evidence.Unrecorded(s.tokens.all, maxAncestors)
	return slices.DeleteFunc(slices.Concat(s.ancestors, s.tokens.all), func(t *ect.Token) bool { return s.recorded[t] })
}

// bind lets the riders say what the caller's tokens are used for, for as long as the key
// is kept: a retry must find it, however late it comes.
func (s *story) bind(told *evidence.Telling, until time.Time) {
	for _, t := range s.tokens.own {
		if !s.bound[t] && !s.handed {
			told.Ride(s.way.evidence.Bound(t, s.use, until))
		}
	}
}

// kept is until when the key of the call is kept, should it end at its deadline.
func (x *exchange) kept(now time.Time) time.Time {
	return now.Add(x.call.Deadline + max(x.call.KeepKey, x.call.KeepResult))
}

// keepTokens records the tokens of a call that is answered from what is recorded: what
// its caller does next will name them as parents. It reports guard.ErrTaken where
// somebody else was first, to look again.
func (x *exchange) keepTokens(found guard.Finding) error {
	s := &x.story
	if len(s.tokens.all) == 0 || s.tokens.late != nil {
		return nil
	}
	if _, err := x.reviewTokens(); err != nil || found.Standing == guard.Mismatch {
		return err // a refusal is no step of the workflow
	}
	if tokens := s.unrecorded(); len(tokens) > 0 {
		if err := x.recordTokens(found, tokens); err != nil {
			return err
		}
	}
	return x.proveRetry()
}

// recordTokens records tokens of a retry by a commit of their own.
func (x *exchange) recordTokens(found guard.Finding, tokens []*ect.Token) error {
	s := &x.story
	ctx := x.r.Context()
	now, err := x.engine.store.Now(ctx)
	if err != nil {
		return x.storeFailed(err)
	}
	drafts, err := x.retold(now, found, tokens)
	if err != nil {
		return x.storeFailed(err)
	}
	told, err := s.way.evidence.Tell(x.toldUntil(now), tokens, drafts...)
	if err != nil {
		return x.storeFailed(err)
	}
	s.bind(told, x.kept(now))
	_, err = x.engine.store.Commit(ctx, told.Writes()...)
	if conflict := (*store.Conflict)(nil); err != nil && !errors.As(err, &conflict) {
		_ = told.Done(err)
		if s.way.ledgerFirst {
			return x.storeFailed(err)
		}
		x.h.logger.Warn("the tokens of a retry could not be recorded; it is answered all the same", zap.Stringer("key", x.call.Key), zap.Error(err))
		return nil
	}
	return x.announced(told, err)
}

// tokensHanded is the context key of requests that a guard has forwarded with the tokens
// that it has bound: a guard behind it in this process takes them for the same call.
type tokensHanded struct{}

// retold says of the tokens of a retry what came of the call that they ask for once more.
// While it runs that is not known.
func (x *exchange) retold(now time.Time, found guard.Finding, tokens []*ect.Token) ([]*ect.Draft, error) {
	r := found.Record
	if r == nil || r.Checkpoint == "" || !slices.ContainsFunc(tokens, func(t *ect.Token) bool { return slices.Contains(x.story.tokens.own, t) }) {
		return nil, nil
	}
	came := evidence.Outcome{Checkpoint: r.Checkpoint, Cause: r.Cause, Status: r.Status}
	switch r.State {
	case guard.StateCompleted:
		came.Verdict = guard.Completed
	case guard.StateInDoubt:
		came.Verdict = guard.InDoubt
	default:
		return nil, nil
	}
	d, err := x.story.way.witness.Retold(now, &x.story.call, &came)
	return []*ect.Draft{d}, err
}

// lostTo finds out what a claim was lost to. A commit that stands in the same group is
// lost to before it can be read.
func (x *exchange) lostTo(lost *store.Conflict) error {
	ctx, cancel := context.WithDeadline(x.r.Context(), x.wait)
	defer cancel()
	for {
		learned, err := x.reviewTokens()
		if err != nil || learned {
			return err
		}
		select {
		case <-time.After(lostPause):
		case <-ctx.Done():
			return x.storeFailed(lost)
		}
	}
}

// lostPause is how long a group of commits may take until it can be read.
const lostPause = 5 * time.Millisecond
