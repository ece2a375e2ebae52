package caddymodule

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
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
	// ancestors are tokens that were seen before, wrote nothing, and led to these.
	ancestors []*ect.Token
	// use is what the tokens are used for: this key with this request, so that a token
	// is good for no other body.
	use evidence.Use
	// taken are those that this call has taken in memory first; kept says that they
	// were used for it.
	taken []*ect.Token
	kept  bool
	// handed says that a guard around this one uses the tokens, for the same request.
	handed bool
	call   evidence.Call
	// forwarded is the checkpoint as a token, for upstreams with an identity.
	forwarded *ect.Token
}

// maxTarget leaves room in the extensions of a token.
const maxTarget = 512

// target names the system that the call changes: as configured, never as the caller
// has sent it unless a placeholder says so (cascade Table 2).
func (x *exchange) target() string {
	if text, ok := filled(x.r, x.action.Target); ok {
		return shortened(text, maxTarget)
	}
	return x.h.Name
}

// begin is what the ledger will be told of the call. Its key is known.
func (x *exchange) begin() error {
	s := &x.story
	if s.way == nil {
		return nil
	}
	s.call = evidence.Call{
		Key: x.call.Key, Caller: x.h.inEvidence(x.guard, x.call.Scope.Caller, x.r.Host), Action: x.action.Name,
		Workflow: evidence.WorkflowID(x.call.Workflow), Parents: s.tokens.leaves,
		Target: x.target(), RollbackURI: s.way.rollback, TTL: time.Duration(x.action.RetainResult),
	}
	if x.h.UpstreamIdentity != "" {
		s.call.Audience = []string{x.h.UpstreamIdentity}
	}
	if len(s.tokens.all) > 0 {
		return x.takeTokens()
	}
	return x.join()
}

// join finds the place of a call without a token in a workflow: behind the execution
// that it names as its parent. A workflow that tokens speak of cannot be joined without
// that: whoever knows its id could write into it, and read it (P3).
func (x *exchange) join() error {
	s := &x.story
	if s.call.Workflow == "" {
		return nil
	}
	named := s.call.Workflow
	if s.way.verifier != nil {
		named = evidence.NamedWorkflowID(x.call.Workflow)
	}
	if parent := x.r.Header.Get(headerExecutionParent); parent != "" {
		for _, workflow := range slices.Compact([]string{s.call.Workflow, named}) {
			id, err := s.way.evidence.Parent(x.r.Context(), workflow, parent)
			if err != nil {
				return x.storeFailed(err)
			}
			if id != "" {
				s.call.Workflow, s.call.Parents = workflow, []string{id}
				return nil
			}
		}
	}
	s.call.Workflow = named
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
	if err := x.admit(ctx); err != nil {
		return nil, err
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
	keep := now.Add(s.call.TTL)
	told, err := s.way.evidence.Tell(keep, tokens, drafts...)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	s.bind(told, expires)
	if link != nil {
		told.Ride(*link)
	}
	return told, nil
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
	tokens := s.unrecorded()
	if len(tokens) == 0 {
		return nil
	}
	ctx := x.r.Context()
	now, err := x.engine.store.Now(ctx)
	if err != nil {
		return x.storeFailed(err)
	}
	drafts, err := x.retold(now, found, tokens)
	if err != nil {
		return x.storeFailed(err)
	}
	told, err := s.way.evidence.Tell(now.Add(s.call.TTL), tokens, drafts...)
	if err != nil {
		return x.storeFailed(err)
	}
	s.bind(told, x.kept(now))
	_, err = x.engine.store.Commit(ctx, told.Writes()...)
	if conflict := (*store.Conflict)(nil); err != nil && !errors.As(err, &conflict) {
		_ = told.Done(err)
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

// admit waits while the ledger is far behind, as long as a retry would wait for a
// running execution.
func (x *exchange) admit(ctx context.Context) error {
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
	came.UpstreamErrors = x.keepUpstreamErrors(ctx, now, answer)
	drafts, err := s.way.witness.Outcome(now, &s.call, &came)
	if err == nil {
		var told *evidence.Telling
		if told, err = s.way.evidence.Tell(now.Add(s.call.TTL), nil, drafts...); err == nil {
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
		err := x.story.way.evidence.Append(ctx, now.Add(x.story.call.TTL), []*ect.Token{t})
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
		if err != nil || t.Event() != ect.EventError || t.Workflow() != s.call.Workflow || checkEvent(t) != nil {
			continue
		}
		if known, err := s.way.evidence.Holds(ctx, t); err == nil && known == evidence.Unused {
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
