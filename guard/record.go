package guard

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// callEvidence is what the ledger records of a call.
type callEvidence struct {
	policy *TokenPolicy
	tokens Tokens
	// recorded are the tokens in the ledger, bound those that were used for this call.
	recorded, bound []*ect.Token
	// ancestors are earlier tokens without a record of their own that led to these.
	ancestors []*ect.Token
	// use binds the tokens to this key and request, so that they are valid for no other body.
	use evidence.Use
	// held are the tokens whose recorded use has no expiry yet.
	held []*ect.Token
	// handed says that an enclosing guard uses the tokens for the same request.
	handed bool
	// begins says that the call is the first of its workflow.
	begins bool
	call   evidence.Call
	// planned is what the plan of the workflow says of the call.
	planned planned
	// forwarded is the checkpoint as a token, for upstreams with an identity.
	forwarded *ect.Token
	// failed is the recorded error of the call as a token, for its caller.
	failed *ect.Token
}

// maxTarget leaves room in the extensions of a token.
const maxTarget = 512

// target names the system that the call changes: as configured, never as sent by the caller
// unless a placeholder says so (cascade Table 2).
func (q *guardedRequest) target() string {
	if text, ok := q.h.Host.Expand(q.r, q.action.Target); ok {
		return evidence.Printable(text, maxTarget)
	}
	return q.h.Name
}

// begin prepares the evidence of the call. Its key is known.
func (x *Call) begin() error {
	s := &x.evidence
	if s.policy == nil {
		return nil
	}
	s.call = evidence.Call{
		Key: x.call.Key, Caller: x.executions.Caller(x.call.Scope.Caller), Action: x.action.Name,
		Workflow: evidence.WorkflowID(x.call.Workflow), Parents: s.tokens.leaves,
		Target: x.target(), Description: x.action.Description, RollbackURI: s.policy.RollbackURI, TTL: time.Duration(x.action.CheckpointTTL),
		Critical: x.action.Critical, Severity: x.action.Severity, Guard: x.h.Name,
	}
	s.call.Issuer = s.tokens.Issuer()
	if s.call.Node, _ = s.tokens.node(); s.call.Node == "" {
		s.call.Node, _ = statedNode(x.r) // prepare has checked it
	}
	if own := s.tokens.Own; len(own) > 0 {
		s.call.Hearers = own[0].Audience()
	}
	if x.h.UpstreamIdentity != "" {
		s.call.Audience = []string{x.h.UpstreamIdentity}
	}
	if len(s.tokens.All) > 0 {
		return x.takeTokens()
	}
	return x.join()
}

// join places a call without a token in a workflow, behind the execution that it names as its
// parent. A workflow with tokens cannot be joined otherwise: knowing its id would be enough to
// write into it, and to read it (P3).
func (x *Call) join() error {
	s := &x.evidence
	if s.call.Workflow == "" {
		return nil
	}
	named := s.call.Workflow
	if s.policy.Verifier != nil || x.r.Header.Get(HeaderRollback) != "" { // what undoes is no task of the workflow (ADR 0125)
		named = evidence.NamedWorkflowID(x.call.Workflow)
	}
	if parent := x.r.Header.Get(headerExecutionParent); parent != "" {
		for _, workflow := range slices.Compact([]string{s.call.Workflow, named}) {
			id, err := s.policy.Evidence.Parent(x.r.Context(), workflow, parent)
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

func bodyHash(of *body.Spool) (ect.Hash, error) {
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(of, 0, of.Size())); err != nil {
		return ect.Hash{}, unkept(err)
	}
	return ect.HashOf([sha256.Size]byte(sum.Sum(nil))), nil
}

// recordCall makes the call's checkpoint and the batch that records it, the tokens that led to it
// and their use in the claim's commit (P2).
func (x *Call) recordCall(found execution.Finding) (*store.Batch, error) {
	s := &x.evidence
	x.call.Checkpoint = ""
	if s.policy == nil {
		return nil, nil
	}
	ctx := x.r.Context()
	now, err := x.engine.Store.Now(ctx)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	if err := x.keepSnapshot(ctx); err != nil {
		return nil, err
	}
	draft, err := s.policy.Events.Checkpoint(now, &s.call)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	x.call.Checkpoint = draft.ID()
	tokens := s.unrecorded()
	drafts := []*ect.Draft{draft}
	if x.h.UpstreamIdentity != "" {
		if s.forwarded, err = s.policy.Events.Sign(draft); err != nil {
			return nil, x.storeFailed(err)
		}
		tokens, drafts = append(tokens, s.forwarded), nil
	}
	if x.probing != nil && found.Record != nil && found.Record.Checkpoint != "" { // the probe has said that it was not applied
		_, settled, err := s.policy.settlement(ctx, x.call.Key, found.Record, false, "probe")
		if err != nil {
			return nil, x.storeFailed(err)
		}
		drafts = append(drafts, settled...)
	}
	if drafts, err = beginWorkflow(ctx, x, now, drafts); err != nil {
		return nil, x.storeFailed(err)
	}
	var link *store.Write
	expires := x.kept(now)
	if s.call.Workflow != "" {
		if link, err = s.policy.Evidence.Link(ctx, &s.call, x.call.Scope.ID, draft.ID(), expires); err != nil {
			return nil, x.storeFailed(err)
		}
	}
	batch, err := s.policy.Evidence.NewBatch(x.recordUntil(now), tokens, drafts...)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	s.held = nil
	if x.action.StreamIdle > 0 {
		expires = time.Time{}
	}
	s.bind(batch, expires)
	if link != nil {
		batch.Add(*link)
	}
	if err := beginPlan(ctx, x, batch); err != nil {
		_ = batch.Done(err) // this error says why
		return nil, err
	}
	if s.planned.plan != nil || s.policy.AwaitEnds && inWorkflow(x) {
		batch.Add(s.policy.Evidence.Opened(now, s.call.Workflow))
	}
	return batch, nil
}

// sendOn leaves those tokens in a header that may go to an upstream with an identity. It would
// refuse the call because of one that is for this gateway alone. What only such a token follows
// from stays here with it: to the upstream it would be a call of somebody else's. follows are the ids
// of what the call follows from directly. Where the message has tokens that stay here, it is returned
// without them; else nil.
func (p *Tokens) sendOn(policy *TokenPolicy, h http.Header, upstream string, follows []string) (message []byte) {
	keeps := func(t *ect.Token) bool {
		return !policy.Verifier.OnlyFor(t) || slices.Contains(t.Audience(), upstream)
	}
	if !slices.ContainsFunc(p.All, func(t *ect.Token) bool { return !keeps(t) }) {
		return nil
	}
	var sent []string
	follows = slices.Clone(follows)
	for n := 0; n < len(follows); n++ {
		for _, t := range p.All {
			if (t.NodeID() == follows[n] || t.ID() == follows[n]) && keeps(t) && !slices.Contains(sent, t.Raw()) {
				sent = append(sent, t.Raw())
				follows = append(follows, t.Parents()...)
			}
		}
	}
	raws, _ := ect.ParseFields(h[ect.FieldName]) // they were verified
	h.Del(ect.FieldName)
	for _, raw := range raws {
		if slices.Contains(sent, raw) {
			h.Add(ect.FieldName, raw)
		}
	}
	if p.message == nil {
		return nil
	}
	lines, _ := p.message.Tokens()
	inside, _ := ect.ParseFields(lines)
	kept := slices.DeleteFunc(slices.Clone(inside), func(raw string) bool { return !slices.Contains(sent, raw) })
	if len(kept) == len(inside) {
		return nil
	}
	for _, name := range protocol.OfBody {
		h.Del(name)
	}
	return p.message.WithTokens(kept)
}

// withTokensFor is an unguarded request for an upstream with an identity, without the tokens of r that
// it must not get.
func withTokensFor(h *Handler, r *http.Request) (*http.Request, error) {
	p := h.verifiedBefore(r)
	if len(p.All) == 0 {
		return r, nil
	}
	policy, err := h.Tokens()
	if err != nil {
		return nil, StoreClosed(err)
	}
	r = r.WithContext(r.Context()) // other handlers have the header too
	r.Header = r.Header.Clone()
	if message := p.sendOn(policy, r.Header, h.UpstreamIdentity, p.leaves); message != nil {
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(message)), int64(len(message))
	}
	return r, nil
}

// recordUntil is how long the ledger keeps the records of the call at least: while it can be
// undone, and a rollback that began in time runs.
func (x *Call) recordUntil(now time.Time) time.Time {
	ttl := x.evidence.call.TTL
	return now.Add(max(ttl+ttl/2, x.call.KeepResult))
}

// callRecorded handles the result of the claim. A claim refused for an earlier use of a token is
// retried without that token if the use was for this very call.
func (x *Call) callRecorded(batch *store.Batch, err error) error {
	if batch == nil {
		return err
	}
	if err == nil {
		if x.evidence.begins {
			x.emit(EventWorkflowStarted, nil)
		}
		x.evidence.recorded = slices.Concat(x.evidence.recorded, x.evidence.ancestors, x.evidence.tokens.All)
		x.evidence.bound = append(x.evidence.bound, x.evidence.tokens.Own...)
		return nil
	}
	x.call.Checkpoint = ""
	var lost *store.Conflict
	if !errors.As(err, &lost) {
		return err // execution.ErrTaken is no conflict of ours
	}
	if failed := x.lostTo(lost); failed != nil {
		return failed
	}
	return execution.ErrTaken // look again
}

// answerFailure records, in the commit of the outcome, that a call has failed or that its answer carries
// an error: the coordinator rolls it back or asks people, also after a crash (A-error-signaling-f, P5).
// If that cannot be recorded the outcome is all the same.
func (x *Call) answerFailure(came *evidence.Outcome, reported reportedErrors, events *store.Batch) *store.Batch {
	failed := came.Failed() || reported.severe != "" && came.Verdict != execution.Released
	if !failed || x.engine.Coordinator == nil {
		return events
	}
	c, s := x.engine.Coordinator(), &x.evidence
	f := rollback.Failure{Checkpoint: came.Checkpoint, By: s.policy.Events.Identity(), Undo: x.r.Header.Get(HeaderRollback) != ""}
	switch {
	case c == nil:
		return events
	case x.action.OnError == OnErrorRollback && came.Failed():
	case s.tokens.workflow() == "" && x.r.Header.Get(HeaderWorkflowID) == "":
		return events // at most a trace, for which nobody answers
	default:
		f.Asks, f.Workflow = hitl.CauseFailed, s.call.Workflow
		switch {
		case !s.call.Reversible: // ATD "Interaction with HITL", case 1
			f.Asks = hitl.CauseIrreversible
		case reported.critical:
			f.Asks = hitl.CauseError
		}
		if name := x.call.Scope.Caller; caller.Verified(name) {
			f.Caller = cmp.Or(x.h.Callers.Operator(x.r, name), name)
		}
	}
	switch {
	case !came.Failed():
		f.Error = reported.severe
	case events != nil:
		f.Error = s.policy.Evidence.ErrorID(came.Checkpoint)
	}
	b := c.Failed(f)
	b.Join(events)
	return b
}

// outcomeEvents makes the evidence of an outcome. If that fails the outcome is recorded all the
// same; missing evidence is found at the next start, or not at all. With again it is made anew, since the store has not
// taken the outcome (ADR 0147): the call's client is not there any more, and other goroutines use the call.
func (x *Call) outcomeEvents(ctx context.Context, o execution.Outcome, answer http.Header, again bool) *store.Batch {
	s := &x.evidence
	if s.policy == nil {
		return nil
	}
	now, err := x.engine.Store.Now(ctx)
	if err != nil {
		return nil // then nothing is recorded either
	}
	came := evidence.Outcome{Checkpoint: x.call.Checkpoint, Verdict: o.Verdict, Cause: o.Cause, Status: o.Status}
	reported, before := x.keepUpstreamErrors(ctx, now, answer), x.carried.reported
	if len(before.ids) > 0 { // by a commit that has failed: what is known is left out the next time
		reported = reportedErrors{
			append(slices.Clip(before.ids), reported.ids...), cmp.Or(before.severe, reported.severe), before.critical || reported.critical,
		}
	}
	x.carried.reported = reported
	came.UpstreamErrors = reported.ids
	if o.Verdict == execution.Completed && !came.Failed() && !again {
		s.policy.Evidence.Answered(&s.call)
	}
	drafts, err := s.policy.Events.Outcome(now, &s.call, &came)
	failed := len(drafts) > 1
	var signed []*ect.Token
	if err == nil && failed && x.hears() && !again {
		signed, err = s.policy.signAll(drafts)
		drafts = nil
	}
	if err == nil {
		var batch *store.Batch
		if batch, err = s.policy.Evidence.NewBatch(x.recordUntil(now), signed, drafts...); err == nil {
			if len(signed) > 0 {
				s.failed = signed[len(signed)-1]
			}
			if failed && o.Upstream != "" {
				batch.Add(s.policy.Evidence.FailedAt(x.call.Checkpoint, o.Upstream, now))
			}
			if o.Verdict != execution.InDoubt { // whose key does not expire either
				for _, t := range s.held {
					w := s.policy.Evidence.UseWrite(t, s.use, now.Add(max(x.call.KeepKey, x.call.KeepResult)))
					w.If = store.Condition{} // the claim has written it
					batch.Add(w)
				}
			}
			return x.answerFailure(&came, reported, batch)
		}
	}
	x.h.Logger.Error("the outcome of a call could not be recorded in the ledger", slog.Any("key", x.call.Key), slog.Any("error", err))
	return x.answerFailure(&came, reported, nil)
}

// reportedErrors are the errors that an upstream has reported with its answer: their ids, the first one
// that is more than a warning, and whether one is critical.
type reportedErrors struct {
	ids      []string
	severe   string
	critical bool
}

// keepUpstreamErrors records the errors that the upstream reports with its answer. It commits
// separately: an id taken by others meanwhile must not keep the outcome from being recorded (P6).
func (x *Call) keepUpstreamErrors(ctx context.Context, now time.Time, answer http.Header) (reported reportedErrors) {
	if len(answer[ect.FieldName]) == 0 {
		return reported
	}
	ctx, cancel := context.WithTimeout(ctx, upstreamErrorTime)
	defer cancel()
	own, passed := x.upstreamErrors(ctx, answer)
	for _, t := range slices.Backward(passed) { // causes first; people are asked because of what the called agent says itself
		if err := x.evidence.policy.Evidence.Append(ctx, x.recordUntil(now), []*ect.Token{t}); err == nil {
			reported.ids = append(reported.ids, t.ID())
		} else if !errors.Is(err, ledger.ErrDuplicate) {
			x.h.Logger.Warn("an error that was passed along could not be recorded", slog.Any("key", x.call.Key), slog.Any("error", err))
		}
	}
	for _, t := range own {
		fits, err := keepReported(ctx, x, x.recordUntil(now), t)
		if err == nil {
			reported.ids = append(reported.ids, t.ID())
			severity, _ := t.Ext().Text(ect.MemberSeverity)
			if fits { // the rule asks
				continue
			}
			if reported.severe == "" && evidence.Severe(severity) {
				reported.severe = t.ID()
			}
			reported.critical = reported.critical || severity == "critical"
		} else if !errors.Is(err, ledger.ErrDuplicate) {
			x.h.Logger.Warn("an error that an upstream reported could not be recorded", slog.Any("key", x.call.Key), slog.Any("error", err))
		}
	}
	return reported
}

// keepReported records an error of the called agent, in one commit with what the deployment's rules
// want for it. It reports whether one fits.
func keepReported(ctx context.Context, x *Call, until time.Time, t *ect.Token) (fits bool, err error) {
	policy, o := x.evidence.policy, hitl.Opening{}
	if policy.Rule != nil && x.engine.Escalations != nil {
		o, fits = policy.Rule(t)
		o.Links.Checkpoint = cmp.Or(o.Links.Checkpoint, x.call.Checkpoint)
	}
	for {
		b, err := policy.Evidence.NewBatch(until, []*ect.Token{t})
		if err != nil {
			return fits, err
		}
		if fits {
			p, err := x.engine.Escalations.Prepare(ctx, o)
			if err != nil {
				return fits, b.Done(err)
			}
			b.Join(p.Batch)
		}
		if err = b.Commit(ctx, x.engine.Store); !errors.Is(err, hitl.ErrAlreadyOpen) { // by another error of the call
			return fits, err
		}
	}
}

// upstreamErrorTime is how long an outcome waits for the keys and records of its errors.
const upstreamErrorTime = 5 * time.Second

// upstreamErrors are the errors that the upstream reports with its answer (ATD "Error Signaling",
// upstream_errors), and those that it passes along: in this workflow and for this gateway, each named by an error
// of somebody else that leads to one of its own (ADR 0112). Unverifiable and known ones are left out.
func (x *Call) upstreamErrors(ctx context.Context, answer http.Header) (own, passed []*ect.Token) {
	s := &x.evidence
	if s.policy.Verifier == nil {
		return nil, nil
	}
	raws, err := ect.ParseFields(answer[ect.FieldName])
	if err != nil || len(raws) > MaxTokens {
		return nil, nil
	}
	var others []*ect.Token
	for _, raw := range raws {
		t, err := s.policy.Verifier.Verify(ctx, raw, ect.Presentation{Now: time.Now()})
		if err == nil && (!t.Proven() || t.Event() != ect.EventError || t.Workflow() != s.call.Workflow) {
			continue // it is no error of this workflow
		}
		if err == nil {
			err = checkEvent(t, false)
		}
		if err == nil {
			var known evidence.TokenStatus
			if known, err = s.policy.Evidence.LedgerStatus(ctx, t); err == nil && known != evidence.Unused {
				continue
			}
		}
		if err != nil {
			x.h.Logger.Debug("an error that an upstream reported is left out", slog.Any("key", x.call.Key), slog.Any("error", err))
			continue
		}
		if err := x.reportsItself(ctx, t); err != nil {
			x.h.Logger.Debug("an error that an upstream reported is not its own", slog.Any("key", x.call.Key), slog.Any("error", err))
			others = append(others, t)
			continue
		}
		own = append(own, t)
	}
	for at, named := 0, slices.Clone(own); at < len(named); at++ {
		ids, _ := named[at].Ext().Texts(ect.MemberUpstreamErrors)
		others = slices.DeleteFunc(others, func(t *ect.Token) bool {
			is := slices.Contains(ids, t.ID()) && t.Issuer() != named[at].Issuer()
			if is {
				passed, named = append(passed, t), append(named, t)
			}
			return is
		})
	}
	return own, passed
}

// reportsItself checks that the issuer of an error that came with the answer takes part in what it names.
func (x *Call) reportsItself(ctx context.Context, t *ect.Token) error {
	s := &x.evidence
	graph := func(*ect.Token) ect.DAG { return s.policy.Evidence.Graph(s.call.Workflow) }
	if _, err := s.policy.Verifier.Verify(ctx, t.Raw(), ect.Presentation{Now: time.Now(), DAG: graph}); err != nil {
		return err
	}
	return s.policy.Reports.CheckAnswer(ctx, t, s.tokens.All, x.h.UpstreamIdentity, x.calledWith())
}

// calledWith are the ids of the caller's own tokens and of the call's checkpoint.
func (x *Call) calledWith() []string {
	ids := []string{x.call.Checkpoint}
	for _, t := range x.evidence.tokens.Own {
		ids = append(ids, t.NodeID())
	}
	return ids
}

func (x *Call) takeTokens() error {
	s := &x.evidence
	s.use = sha256.Sum256(append(x.call.Key[:], x.call.Fingerprint[:]...))
	if x.r.Context().Value(tokensHanded{}) != nil {
		s.handed = true // a guard around this one has bound them
		return nil
	}
	return x.lateTokens()
}

// lateTokens accepts expired tokens for the very call that they were used for, and refuses them
// otherwise.
func (x *Call) lateTokens() error {
	s := &x.evidence
	if s.tokens.Late == nil {
		return nil
	}
	for _, t := range s.tokens.Own {
		status, err := s.policy.Evidence.UseStatus(x.r.Context(), t, s.use)
		if err != nil {
			return x.storeFailed(err)
		}
		if status != evidence.Same {
			return RefusedToken(s.tokens.Late)
		}
	}
	return nil
}

// reviewTokens looks up the tokens in the store. It reports whether it learned anything, and
// refuses a token that was used for something else.
func (x *Call) reviewTokens() (learned bool, err error) {
	s := &x.evidence
	ctx := x.r.Context()
	own := s.tokens.Own
	if s.handed {
		own = nil
	}
	for _, t := range own {
		status, err := s.policy.Evidence.UseStatus(ctx, t, s.use)
		if err != nil {
			return false, x.storeFailed(err)
		}
		if status == evidence.Other {
			return false, replayedToken()
		}
		if status == evidence.Same && !slices.Contains(s.bound, t) {
			s.bound = append(s.bound, t)
			learned = true
		}
	}
	for _, t := range slices.Concat(s.tokens.All, s.ancestors) {
		status, err := s.policy.Evidence.LedgerStatus(ctx, t)
		if err != nil {
			return false, x.storeFailed(err)
		}
		if status == evidence.Other {
			return false, replayedToken()
		}
		if status == evidence.Same && !slices.Contains(s.recorded, t) {
			if slices.Contains(own, t) && !slices.Contains(s.bound, t) {
				switch status, err := s.policy.Evidence.ActStatus(ctx, t, s.use); {
				case err != nil:
					return false, x.storeFailed(err)
				case status == evidence.Other:
					return false, replayedToken()
				}
			}
			s.recorded = append(s.recorded, t)
			learned = true
		}
	}
	return learned, nil
}

// maxAncestors bounds the tokens that are recorded because of others, so that all events
// fit into one commit.
const maxAncestors = ledger.MaxEvents - MaxTokens - 3

// unrecorded are the tokens that the ledger lacks, parents first.
func (s *callEvidence) unrecorded() []*ect.Token {
	if len(s.tokens.All) == 0 {
		return nil
	}
	s.ancestors = s.policy.Evidence.Unrecorded(s.tokens.All, maxAncestors)
	return slices.DeleteFunc(slices.Concat(s.ancestors, s.tokens.All), func(t *ect.Token) bool { return slices.Contains(s.recorded, t) })
}

// bind records the use of the caller's tokens in a batch, for as long as the key is kept: even
// the latest retry must find it. Without a time it has no end until the outcome sets one: a
// stream may outlast its deadline (ADR 0049).
func (s *callEvidence) bind(to *store.Batch, until time.Time) {
	for _, t := range s.tokens.Own {
		if !slices.Contains(s.bound, t) && !s.handed {
			writes := s.policy.Evidence.UseWrites(t, s.use, until)
			if until.IsZero() {
				writes[0].Expires = until
				s.held = append(s.held, t)
			}
			to.Add(writes...)
		}
	}
}

// kept is until when the call's key is kept, should it end at its deadline.
func (x *Call) kept(now time.Time) time.Time {
	return now.Add(x.call.Deadline + max(x.call.KeepKey, x.call.KeepResult))
}

// keepTokens records the tokens of a call that is answered from the record: its caller will name
// them as parents. After execution.ErrTaken look the call up again.
func (x *Call) keepTokens(found execution.Finding) error {
	s := &x.evidence
	if len(s.tokens.All) == 0 || s.tokens.Late != nil {
		return nil
	}
	if _, err := x.reviewTokens(); err != nil || found.Status == execution.Mismatch {
		return err // a refusal is no step of the workflow
	}
	if tokens := s.unrecorded(); len(tokens) > 0 {
		if err := x.recordTokens(found, tokens); err != nil {
			return err
		}
	}
	return nil
}

func (x *Call) recordTokens(found execution.Finding, tokens []*ect.Token) error {
	s := &x.evidence
	ctx := x.r.Context()
	now, err := x.engine.Store.Now(ctx)
	if err != nil {
		return x.storeFailed(err)
	}
	drafts, err := x.retryDrafts(now, found, tokens)
	if err != nil {
		return x.storeFailed(err)
	}
	batch, err := s.policy.Evidence.NewBatch(x.recordUntil(now), tokens, drafts...)
	if err != nil {
		return x.storeFailed(err)
	}
	s.bind(batch, x.kept(now))
	err = batch.Commit(ctx, x.engine.Store)
	if conflict := (*store.Conflict)(nil); err != nil && !errors.As(err, &conflict) {
		if s.policy.LedgerFirst {
			return x.storeFailed(err)
		}
		x.h.Logger.Warn("the tokens of a retry could not be recorded; it is answered all the same", slog.Any("key", x.call.Key), slog.Any("error", err))
		return nil
	}
	return x.callRecorded(batch, err)
}

// retryDrafts records the outcome of its call for the tokens of a retry, unless the call still
// runs.
func (x *Call) retryDrafts(now time.Time, found execution.Finding, tokens []*ect.Token) ([]*ect.Draft, error) {
	r := found.Record
	if r == nil || r.Checkpoint == "" || !slices.ContainsFunc(tokens, func(t *ect.Token) bool { return slices.Contains(x.evidence.tokens.Own, t) }) {
		return nil, nil
	}
	came := evidence.Outcome{Checkpoint: r.Checkpoint, Cause: r.Cause, Status: r.Status}
	switch r.State {
	case execution.StateCompleted:
		came.Verdict = execution.Completed
	case execution.StateInDoubt:
		came.Verdict = execution.InDoubt
	default:
		return nil, nil
	}
	d, err := x.evidence.policy.Events.RetryOutcome(now, &x.evidence.call, &came)
	return []*ect.Draft{d}, err
}

// lostTo finds the conflicting write of a claim.
func (x *Call) lostTo(lost *store.Conflict) error {
	ctx, cancel := context.WithDeadline(x.r.Context(), x.wait)
	defer cancel()
	for {
		learned, err := x.reviewTokens()
		if err == nil && !learned && x.evidence.begins { // another first call of the workflow may have come before
			var begins bool
			begins, err = x.evidence.policy.Events.Begins(ctx, x.evidence.call.Workflow)
			learned = !begins
		}
		if err != nil || learned {
			return err
		}
		if store.AwaitGroup(ctx) != nil {
			return x.storeFailed(lost)
		}
	}
}

const reasonLedger = "ledger_unavailable"

// LedgerFailed is the problem of tokens that the ledger did not record in time (P4).
func LedgerFailed(why error) *problem.Problem {
	p := problem.New(problem.ECTUnavailable, "The ledger has not taken the token, and nothing goes on before it has.")
	p.Reason, p.Cause = reasonLedger, why
	return p
}

// enter records the tokens of an unguarded request and their use in one commit, before anybody relies on them
// (level L3), or another node is asked with them.
func (t *TokenPolicy) enter(r *http.Request, p *Tokens, use evidence.Use) error {
	ctx := r.Context()
	if err := t.follow(ctx, p.All); err != nil {
		return err
	}
	err := t.Evidence.RecordTokens(ctx, p.All, p.Own, use)
	var refused *ect.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		return RefusedToken(err)
	case r.Context().Err() != nil:
		return &StatusError{Status: statusClientClosed, Err: r.Context().Err()}
	}
	return LedgerFailed(err)
}

// The caller gets the error of its call in Execution-Context of the answer (ADR 0055): the same
// token that the ledger has. Only callers with a verified token see it, and only for their own
// call (P3).

const (
	// errorTime is how long an answer waits for the error that names its failure.
	errorTime = 2 * time.Second
	// maxHeldFailure is the size up to which a failure's answer is held until its end, so that
	// its header can carry the error.
	maxHeldFailure = 64 << 10
)

type shownError struct{ id, raw string }

func (x *Call) hears() bool {
	return x.evidence.policy != nil && x.verified && x.evidence.tokens.Issuer() != ""
}

// signAll signs drafts.
func (t *TokenPolicy) signAll(drafts []*ect.Draft) ([]*ect.Token, error) {
	signed := make([]*ect.Token, 0, len(drafts))
	for _, d := range drafts {
		token, err := t.Events.Sign(d)
		if err != nil {
			return nil, err
		}
		signed = append(signed, token)
	}
	return signed, nil
}

// showFailure adds the error to an answer of the upstream: to its header, or to its trailer if
// the header is sent. An answer of known length that is under way has neither.
func (x *Call) showFailure(h http.Header) {
	failed := x.evidence.failed
	switch {
	case failed == nil:
	case !x.w.Sent():
		h.Add(ect.FieldName, failed.Raw())
	default:
		h.Add(http.TrailerPrefix+ect.FieldName, failed.Raw())
	}
}

func (x *Call) pointToError(h http.Header, p *problem.Problem) {
	if !x.hears() {
		return
	}
	var failure *shownError
	switch open := (*breaker.OpenError)(nil); {
	case x.evidence.failed != nil:
		failure = &shownError{x.evidence.failed.ID(), x.evidence.failed.Raw()}
	case p.Kind() == problem.InDoubt:
		failure = x.recordedError(x.call.Checkpoint)
	case errors.As(p.Cause, &open):
		failure = x.rejectionError(open)
	}
	if failure != nil {
		p.ErrorECT = failure.id
		h.Set(ect.FieldName, failure.raw)
	}
}

// recordedError is the error recorded for the caller's own call, or nil.
func (x *Call) recordedError(checkpoint string) *shownError {
	if checkpoint == "" || !x.hears() {
		return nil
	}
	ctx, cancel := context.WithTimeout(x.r.Context(), errorTime)
	defer cancel()
	return x.errorOf(ctx, x.evidence.call.Workflow, x.evidence.policy.Evidence.ErrorID(checkpoint))
}

func (x *Call) errorOf(ctx context.Context, workflow, id string) *shownError {
	log := x.evidence.policy.Evidence.Log()
	entry, err := log.Lookup(ctx, workflow, id)
	if err != nil {
		return nil
	}
	token, err := log.Token(ctx, &entry)
	if err != nil {
		return nil
	}
	return &shownError{entry.ID, string(token)}
}

// recordRejection records in a call's workflow that a breaker rejected it: a gateway is the
// boundary of its workflows (cascade 3.3.2).
func (x *Call) recordRejection(p *problem.Problem) {
	s := &x.evidence
	open := (*breaker.OpenError)(nil)
	if s.policy == nil || s.call.Workflow == "" || !errors.As(p.Cause, &open) {
		return
	}
	// A rejection that is left out now may be recorded with the next one.
	c := x.engine.Circuits
	if c == nil || c.Busy() || !x.engine.rejections.first(open, s.call.Workflow, caller.Verified(x.call.Scope.Caller)) {
		return
	}
	c.RecordRejection(s.policy, open, s.call.Workflow, s.parentIDs())
}

// rejectionError is the error that shows a caller that a breaker refused its call (AERR "States":
// it is emitted to upstream peers). There is one per caller, workflow and state of the breaker,
// so that retries cannot flood the ledger. If it cannot be recorded, the refusal has none.
func (x *Call) rejectionError(open *breaker.OpenError) *shownError {
	s := &x.evidence
	if s.call.Workflow == "" || x.engine.Circuits == nil {
		return nil
	}
	rejections := &x.engine.rejections
	to := rejectedCaller{s.call.Workflow, s.tokens.Issuer()}
	if failure, room := rejections.shown(open, to); failure != nil || !room {
		return failure
	}
	ctx, cancel := context.WithTimeout(x.r.Context(), errorTime)
	defer cancel()
	id := s.policy.Evidence.RejectionID(open.Key.String(), open.Generation, to.workflow, to.caller)
	if failure := x.errorOf(ctx, to.workflow, id); failure != nil { // of an earlier life
		rejections.show(open, to, failure)
		return failure
	}
	token, err := s.recordRejected(ctx, evidence.Rejection{
		ID: id, Downstream: x.engine.Circuits.Name(open.Key.Upstream), ErrorType: problem.CircuitOpen.ErrorType,
		Severity: "error", Description: "the circuit breaker refuses the call; nothing was forwarded",
	})
	switch {
	case errors.Is(err, ledger.ErrDuplicate): // another call of this caller was first
		return x.errorOf(ctx, to.workflow, id)
	case err != nil:
		x.engine.Circuits.Unrecorded(open.Key, err)
		return nil
	}
	failure := &shownError{token.ID(), token.Raw()}
	rejections.show(open, to, failure)
	return failure
}

// recordRejected records that the call was held up, in its workflow. With ErrDuplicate that was recorded before.
func (s *callEvidence) recordRejected(ctx context.Context, r evidence.Rejection) (*ect.Token, error) {
	now, err := s.policy.Engine.Store.Now(ctx)
	if err != nil {
		return nil, err
	}
	parents, err := s.policy.Evidence.Known(ctx, s.call.Workflow, s.parentIDs())
	if err != nil {
		return nil, err
	}
	r.Workflow, r.Issuer, r.Caller = s.call.Workflow, s.tokens.Issuer(), s.call.Caller
	r.Parents = parents[:min(len(parents), ect.MaxParents)]
	draft, err := s.policy.Events.Rejection(now, &r)
	if err != nil {
		return nil, err
	}
	token, err := s.policy.Events.Sign(draft)
	if err != nil {
		return nil, err
	}
	return token, s.policy.Evidence.Append(ctx, now.Add(KeepCircuitTokens), []*ect.Token{token})
}

// ancestors yields the ids of the call's ancestors, the nearest first. An id that the ledger does not
// have ends the walk. It is read only while a rollback of the workflow is under way.
func (x *Call) ancestors(workflow string, found execution.Finding) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		s := &x.evidence
		if s.policy == nil {
			return
		}
		todo := slices.Clone(s.call.Parents)
		if found.Record != nil { // an attempt in doubt, which a rollback may be undoing
			todo = append(todo, found.Record.Checkpoint)
		}
		for _, t := range s.tokens.All {
			todo = append(todo, t.ID())
			todo = append(todo, t.Parents()...)
		}
		planned, err := before(x)
		if err != nil {
			yield("", err)
			return
		}
		todo = append(todo, planned...)
		graph, known := s.policy.Evidence.Graph(workflow), map[string]bool{}
		for len(todo) > 0 {
			id := todo[0]
			todo = todo[1:]
			if known[id] {
				continue
			}
			if known[id] = true; len(known) > ect.MaxAncestors {
				yield("", errTooManyAncestors) // one of the others may be among what is undone
				return
			}
			if !yield(id, nil) {
				return
			}
			nodes, err := graph.Nodes(x.r.Context(), id)
			if err != nil {
				yield("", err)
				return
			}
			for i := range nodes {
				if nodes[i].Workflow == workflow || nodes[i].Workflow == "" {
					todo = append(todo, nodes[i].Parents...)
				}
			}
		}
	}
}

var errTooManyAncestors = errors.New("more has led to the call than can be looked at")
