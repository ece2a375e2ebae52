package caddymodule

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// story is what the ledger is told of a call.
type story struct {
	way    *testimony
	tokens presented
	// recorded and bound say of which of the tokens the store knows: that they are in
	// the ledger, and that they were used for this call.
	recorded, bound map[*ect.Token]bool
	call            evidence.Call
	// forwarded is the checkpoint as a token, for upstreams with an identity.
	forwarded *ect.Token
}

// Longest forms in a token, whose extensions have 4 KiB.
const (
	maxTarget = 512
	maxHost   = 255
)

// begin is what the ledger will be told of the call. Its key is known.
func (x *exchange) begin() error {
	s := &x.story
	if s.way == nil {
		return nil
	}
	s.call = evidence.Call{
		Key: x.call.Key, Caller: x.guard.Caller(x.call.Scope.Caller), Action: x.action.Name,
		Workflow: evidence.WorkflowID(x.call.Workflow), Parents: s.tokens.leaves,
		Target:      x.call.Scope.Method + " " + shortened(x.call.Host+x.call.Scope.Path, maxTarget),
		RollbackURI: rollbackURI(x.r), TTL: time.Duration(x.action.RetainResult),
	}
	if x.h.UpstreamIdentity != "" {
		s.call.Audience = []string{x.h.UpstreamIdentity}
	}
	parent := x.r.Header.Get(headerExecutionParent)
	if len(s.tokens.all) > 0 || parent == "" || s.call.Workflow == "" {
		return x.takeTokens()
	}
	id, err := s.way.evidence.Parent(x.r.Context(), s.call.Workflow, parent)
	if err != nil {
		return x.storeFailed(err)
	}
	if id != "" {
		s.call.Parents = []string{id}
	}
	return nil
}

func shortened(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return '?'
		}
		return c
	}, s)
}

// rollbackURI is where a rollback of the call is asked for: this gateway.
func rollbackURI(r *http.Request) string {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	return scheme + "://" + shortened(r.Host, maxHost) + wellKnown + "rollback"
}

// takeTokens keeps the caller's tokens for this call while it is on its way.
func (x *exchange) takeTokens() error {
	s := &x.story
	for _, t := range s.tokens.own {
		standing, err := s.way.evidence.Take(t, evidence.Use(x.call.Key), time.Now())
		if err == nil && standing == evidence.Other {
			return replayedToken()
		}
		// Where memory is full, the claim's commit decides.
	}
	return nil
}

// reviewTokens looks up what the store knows of the tokens. It reports whether anything
// was learned, and refuses a token that was used for something else.
func (x *exchange) reviewTokens() (learned bool, err error) {
	s := &x.story
	ctx := x.r.Context()
	for _, t := range s.tokens.own {
		standing, err := s.way.evidence.Recorded(ctx, t, evidence.Use(x.call.Key))
		if err != nil {
			return false, x.storeFailed(err)
		}
		if standing == evidence.Other {
			return false, replayedToken()
		}
		if standing == evidence.Same && !s.bound[t] {
			s.know(&s.bound, t)
			s.way.evidence.Forget(t)
			learned = true
		}
	}
	for _, t := range s.tokens.all {
		node, found, err := s.way.evidence.Find(ctx, t.Workflow(), t.ID())
		switch {
		case err != nil:
			return false, x.storeFailed(err)
		case !found:
		case node.Digest != t.Digest():
			return false, replayedToken()
		case !s.recorded[t]:
			s.know(&s.recorded, t)
			learned = true
		}
	}
	return learned, nil
}

func (s *story) know(set *map[*ect.Token]bool, t *ect.Token) {
	if *set == nil {
		*set = map[*ect.Token]bool{}
	}
	(*set)[t] = true
}

// announce makes the checkpoint of the call and the riders by which it, the tokens that
// led to it, and their use land in the claim's commit (P2).
func (x *exchange) announce(found guard.Finding) (*evidence.Telling, error) {
	s := &x.story
	x.call.Checkpoint = ""
	if s.way == nil {
		return nil, nil
	}
	ctx := x.r.Context()
	if err := s.way.evidence.Log().Admit(ctx); err != nil {
		return nil, x.storeFailed(err)
	}
	now, err := x.engine.store.Now(ctx)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	draft, err := s.way.witness.Checkpoint(now, &s.call)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	x.call.Checkpoint = draft.ID()
	var tokens []*ect.Token
	for _, t := range s.tokens.all {
		if !s.recorded[t] {
			tokens = append(tokens, t)
		}
	}
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
	keep := now.Add(s.call.TTL)
	told, err := s.way.evidence.Tell(keep, tokens, drafts...)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	for _, t := range s.tokens.own {
		if !s.bound[t] {
			told.Ride(s.way.evidence.Bound(t, evidence.Use(x.call.Key)))
		}
	}
	if s.call.Workflow != "" {
		expires := now.Add(x.call.Deadline + max(x.call.KeepKey, x.call.KeepResult))
		told.Ride(s.way.evidence.Link(s.call.Workflow, x.call.Scope.ID, draft.ID(), expires))
	}
	return told, nil
}

// announced says what came of the claim. A claim that was lost to a token's earlier use
// is tried again without it where that was for this very call.
func (x *exchange) announced(told *evidence.Telling, err error) error {
	if told == nil {
		return err
	}
	err = told.Done(err)
	if err == nil {
		for _, t := range x.story.tokens.own {
			x.story.way.evidence.Forget(t) // the store knows
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

// settle records what came of the execution, and tells of it in the same commit.
func (x *exchange) settle(e *guard.Execution, o guard.Outcome, answer http.Header) error {
	ctx := context.Background()
	told := x.tellOutcome(ctx, o, answer)
	if told == nil {
		return e.Settle(ctx, o)
	}
	return told.Done(e.Settle(ctx, o, told.Writes()...))
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
	upstream := x.upstreamErrors(ctx, answer)
	for _, t := range upstream {
		came.UpstreamErrors = append(came.UpstreamErrors, t.ID())
	}
	drafts, err := s.way.witness.Outcome(now, &s.call, &came)
	if err == nil {
		var told *evidence.Telling
		if told, err = s.way.evidence.Tell(now.Add(s.call.TTL), upstream, drafts...); err == nil {
			return told
		}
	}
	x.h.logger.Error("the ledger cannot be told what came of a call", zap.Stringer("key", x.call.Key), zap.Error(err))
	return nil
}

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
		if err != nil || t.Event() != ect.EventError || t.Workflow() != s.call.Workflow {
			continue
		}
		if _, known, err := s.way.evidence.Find(ctx, t.Workflow(), t.ID()); err == nil && !known {
			errs = append(errs, t)
		}
	}
	return errs
}

// bodyHash is the hash of the request's body as it was received.
func (x *exchange) bodyHash() (ect.Hash, error) {
	body, sum := x.body.NewReader(), sha256.New()
	defer body.Close()
	if _, err := io.Copy(sum, body); err != nil {
		return ect.Hash{}, x.unkept(err)
	}
	return ect.HashOf([sha256.Size]byte(sum.Sum(nil))), nil
}

// marked adds the checkpoint to the guard's own fields of an answer.
func marked(marks http.Header, checkpoint string) http.Header {
	if checkpoint != "" {
		marks[headerExecutionCheckpoint] = []string{checkpoint}
	}
	return marks
}
