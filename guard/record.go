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
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// callEvidence is what the ledger records of a call.
type callEvidence struct {
	// recorded are the tokens in the ledger, bound those that were used for this call.
	recorded, bound []*ect.Token
	// ancestors are earlier tokens without a record of their own that led to these.
	ancestors []*ect.Token
	// held are the tokens whose recorded use has no expiry yet.
	held []*ect.Token
	// begins says that the call is the first of its workflow.
	begins bool
	// call is what the claim records of the call: its facts, and what was found out when it was admitted.
	call evidence.Call
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

// begin is what the ledger will record of the call, as far as its request says it. Its key is known.
func (q *Request) begin() (evidence.Call, error) {
	facts := evidence.Call{
		Key: q.call.Key, Caller: q.executions.Caller(q.call.Scope.Caller), Action: q.action.Name,
		Workflow: evidence.WorkflowID(q.call.Workflow), Parents: q.tokens.leaves,
		Target: q.target(), Description: q.action.Description, RollbackURI: q.policy.RollbackURI, TTL: time.Duration(q.action.CheckpointTTL),
		Critical: q.action.Critical, Severity: q.action.Severity, Guard: q.h.Name,
	}
	facts.Issuer = q.tokens.Issuer()
	if facts.Node, _ = q.tokens.node(); facts.Node == "" {
		facts.Node, _ = statedNode(q.r) // fingerprint has checked it
	}
	if own := q.tokens.Own; len(own) > 0 {
		facts.Hearers = own[0].Audience()
	}
	if q.h.UpstreamIdentity != "" {
		facts.Audience = []string{q.h.UpstreamIdentity}
	}
	var err error
	switch {
	case len(q.tokens.All) == 0:
		facts.Workflow, facts.Parents, err = q.join(facts.Workflow)
	case !q.handed(): // else a guard around this one has bound them
		err = q.lateTokens()
	}
	return facts, err
}

// join places a call without a token in a workflow, behind the execution that it names as its
// parent. A workflow with tokens cannot be joined otherwise: knowing its id would be enough to
// write into it, and to read it (P3).
func (q *Request) join(stated string) (workflow string, parents []string, err error) {
	if stated == "" {
		return "", nil, nil
	}
	named := stated
	if q.policy.Verifier != nil || q.r.Header.Get(HeaderRollback) != "" { // what undoes is no task of the workflow (ADR 0125)
		named = evidence.NamedWorkflowID(q.call.Workflow)
	}
	if parent := q.r.Header.Get(headerExecutionParent); parent != "" {
		for _, workflow := range slices.Compact([]string{stated, named}) {
			id, err := q.policy.Evidence.Parent(q.r.Context(), workflow, parent)
			if err != nil {
				return "", nil, q.storeFailed(err)
			}
			if id != "" {
				return workflow, []string{id}, nil
			}
		}
	}
	return named, nil, nil
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
func (x *Call) recordCall(in *admission) (*store.Batch, error) {
	s, ctx := &x.evidence, x.r.Context()
	s.call = in.facts
	now, err := x.engine.Store.Now(ctx)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	p, err := x.capture.keepSnapshot(ctx, &x.Request, in)
	if err != nil {
		return nil, err
	}
	s.call.Checkpoint, s.call.State, s.call.Reversible = p.Snapshot().ID, ect.HashOf(p.Sum()), p.Snapshot().Reversible()
	draft, err := x.policy.Events.Checkpoint(now, &s.call)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	tokens := s.unrecorded(&x.Request)
	drafts := []*ect.Draft{draft}
	if x.h.UpstreamIdentity != "" {
		if s.forwarded, err = x.policy.Events.Sign(draft); err != nil {
			return nil, x.storeFailed(err)
		}
		tokens, drafts = append(tokens, s.forwarded), nil
	}
	if r := in.found.Record; x.probing != nil && r != nil && r.Checkpoint != "" { // the probe has said that it was not applied
		_, settled, err := x.policy.settlement(ctx, x.call.Key, r, false, "probe")
		if err != nil {
			return nil, x.storeFailed(err)
		}
		drafts = append(drafts, settled...)
	}
	if drafts, err = s.beginWorkflow(ctx, &x.Request, in.planned.plan, now, drafts); err != nil {
		return nil, x.storeFailed(err)
	}
	var link *store.Write
	expires := x.kept(now, in.deadline)
	if s.call.Workflow != "" {
		if link, err = x.policy.Evidence.Link(ctx, &s.call, x.call.Scope.ID, draft.ID(), expires); err != nil {
			return nil, x.storeFailed(err)
		}
	}
	batch, err := x.policy.Evidence.NewBatch(x.recordUntil(now), tokens, drafts...)
	if err != nil {
		return nil, x.storeFailed(err)
	}
	s.held = nil
	if x.action.StreamIdle > 0 {
		expires = time.Time{}
	}
	s.bind(&x.Request, batch, expires)
	if link != nil {
		batch.Add(*link)
	}
	if err := beginPlan(ctx, &x.Request, in, draft.ID(), batch); err != nil {
		_ = batch.Done(err) // this error says why
		return nil, err
	}
	if in.planned.plan != nil || x.policy.AwaitEnds && inWorkflow(&x.Request) {
		batch.Add(x.policy.Evidence.Opened(now, s.call.Workflow))
	}
	return batch, nil
}

// inWorkflow reports whether somebody has named the workflow of the call: a mere trace is none that
// begins and ends.
func inWorkflow(q *Request) bool {
	return q.facts.Workflow != "" && (q.tokens.workflow() != "" || q.r.Header.Get(HeaderWorkflowID) != "")
}

// beginWorkflow adds the start of the call's workflow to the drafts of its claim, if this is the first
// call of it and no agent has sent a start (ATD "Workflow Boundary ECTs"). In the same commit, it is
// recorded if the call is, and once: of two first calls the loser looks again.
func (s *callEvidence) beginWorkflow(
	ctx context.Context, q *Request, planned *plan.Descriptor, now time.Time, drafts []*ect.Draft,
) ([]*ect.Draft, error) {
	if s.begins = false; !inWorkflow(q) {
		return drafts, nil
	}
	starts := func(t *ect.Token) bool { return t.Event() == ect.EventWorkflowStart && t.Proven() }
	if slices.ContainsFunc(q.tokens.All, starts) || slices.ContainsFunc(s.ancestors, starts) {
		return drafts, nil
	}
	begins, err := q.policy.Events.Begins(ctx, q.facts.Workflow)
	if err != nil || !begins {
		return drafts, err
	}
	about := evidence.WorkflowStart{Checkpoint: s.call.Checkpoint}
	if planned != nil {
		about.Name, about.Description, about.Nodes = planned.WorkflowID, planned.Description, len(planned.Nodes)
	}
	start, err := q.policy.Events.WorkflowStart(now, &s.call, &about)
	if err != nil {
		return drafts, err
	}
	s.begins = true
	return append(drafts, start), nil
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
func (q *Request) recordUntil(now time.Time) time.Time {
	ttl := q.facts.TTL
	return now.Add(max(ttl+ttl/2, q.call.KeepResult))
}

// callRecorded handles the result of the claim. A claim refused for an earlier use of a token is
// retried without that token if the use was for this very call.
func (s *callEvidence) callRecorded(q *Request, batch *store.Batch, err error) error {
	if batch == nil {
		return err
	}
	if err == nil {
		if s.begins {
			q.emit(EventWorkflowStarted, nil)
		}
		s.recorded = slices.Concat(s.recorded, s.ancestors, q.tokens.All)
		s.bound = append(s.bound, q.tokens.Own...)
		return nil
	}
	var lost *store.Conflict
	if !errors.As(err, &lost) {
		return err // execution.ErrTaken is no conflict of ours
	}
	if failed := s.lostTo(q, lost); failed != nil {
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
	f := rollback.Failure{Checkpoint: came.Checkpoint, By: x.policy.Events.Identity(), Undo: x.r.Header.Get(HeaderRollback) != ""}
	switch {
	case c == nil:
		return events
	case x.action.OnError == OnErrorRollback && came.Failed():
	case x.tokens.workflow() == "" && x.r.Header.Get(HeaderWorkflowID) == "":
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
		f.Error = x.policy.Evidence.ErrorID(came.Checkpoint)
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
	if x.policy == nil {
		return nil
	}
	now, err := x.engine.Store.Now(ctx)
	if err != nil {
		return nil // then nothing is recorded either
	}
	came := evidence.Outcome{Checkpoint: s.call.Checkpoint, Verdict: o.Verdict, Cause: o.Cause, Status: o.Status}
	reported, before := x.keepUpstreamErrors(ctx, now, answer), x.carried.reported
	if len(before.ids) > 0 { // by a commit that has failed: what is known is left out the next time
		reported = reportedErrors{
			append(slices.Clip(before.ids), reported.ids...), cmp.Or(before.severe, reported.severe), before.critical || reported.critical,
		}
	}
	x.carried.reported = reported
	came.UpstreamErrors = reported.ids
	if o.Verdict == execution.Completed && !came.Failed() && !again {
		x.policy.Evidence.Answered(&s.call)
	}
	drafts, err := x.policy.Events.Outcome(now, &s.call, &came)
	failed := len(drafts) > 1
	var signed []*ect.Token
	if err == nil && failed && x.hears() && !again {
		signed, err = x.policy.signAll(drafts)
		drafts = nil
	}
	if err == nil {
		var batch *store.Batch
		if batch, err = x.policy.Evidence.NewBatch(x.recordUntil(now), signed, drafts...); err == nil {
			if len(signed) > 0 {
				s.failed = signed[len(signed)-1]
			}
			if failed && o.Upstream != "" {
				batch.Add(x.policy.Evidence.FailedAt(s.call.Checkpoint, o.Upstream, now))
			}
			if o.Verdict != execution.InDoubt { // whose key does not expire either
				for _, t := range s.held {
					w := x.policy.Evidence.UseWrite(t, x.use(), now.Add(max(x.call.KeepKey, x.call.KeepResult)))
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
	own, passed := x.upstreamErrors(ctx, x.evidence.call.Checkpoint, answer)
	for _, t := range slices.Backward(passed) { // causes first; people are asked because of what the called agent says itself
		if err := x.policy.Evidence.Append(ctx, x.recordUntil(now), []*ect.Token{t}); err == nil {
			reported.ids = append(reported.ids, t.ID())
		} else if !errors.Is(err, ledger.ErrDuplicate) {
			x.h.Logger.Warn("an error that was passed along could not be recorded", slog.Any("key", x.call.Key), slog.Any("error", err))
		}
	}
	for _, t := range own {
		fits, err := keepReported(ctx, &x.Request, x.evidence.call.Checkpoint, x.recordUntil(now), t)
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
func keepReported(
	ctx context.Context, q *Request, checkpoint string, until time.Time, t *ect.Token,
) (fits bool, err error) {
	policy, o := q.policy, hitl.Opening{}
	if policy.Rule != nil && q.engine.Escalations != nil {
		o, fits = policy.Rule(t)
		o.Links.Checkpoint = cmp.Or(o.Links.Checkpoint, checkpoint)
	}
	for {
		b, err := policy.Evidence.NewBatch(until, []*ect.Token{t})
		if err != nil {
			return fits, err
		}
		if fits {
			p, err := q.engine.Escalations.Prepare(ctx, o)
			if err != nil {
				return fits, b.Done(err)
			}
			b.Join(p.Batch)
		}
		if err = b.Commit(ctx, q.engine.Store); !errors.Is(err, hitl.ErrAlreadyOpen) { // by another error of the call
			return fits, err
		}
	}
}

// upstreamErrorTime is how long an outcome waits for the keys and records of its errors.
const upstreamErrorTime = 5 * time.Second

// upstreamErrors are the errors that the upstream reports with its answer (ATD "Error Signaling",
// upstream_errors), and those that it passes along: in this workflow and for this gateway, each named by an error
// of somebody else that leads to one of its own (ADR 0112). Unverifiable and known ones are left out.
func (q *Request) upstreamErrors(
	ctx context.Context, checkpoint string, answer http.Header,
) (own, passed []*ect.Token) {
	if q.policy.Verifier == nil {
		return nil, nil
	}
	raws, err := ect.ParseFields(answer[ect.FieldName])
	if err != nil || len(raws) > MaxTokens {
		return nil, nil
	}
	var others []*ect.Token
	for _, raw := range raws {
		t, err := q.policy.Verifier.Verify(ctx, raw, ect.Presentation{Now: time.Now()})
		if err == nil && (!t.Proven() || t.Event() != ect.EventError || t.Workflow() != q.facts.Workflow) {
			continue // it is no error of this workflow
		}
		if err == nil {
			err = checkEvent(t, false)
		}
		if err == nil {
			var known evidence.TokenStatus
			if known, err = q.policy.Evidence.LedgerStatus(ctx, t); err == nil && known != evidence.Unused {
				continue
			}
		}
		if err != nil {
			q.h.Logger.Debug("an error that an upstream reported is left out", slog.Any("key", q.call.Key), slog.Any("error", err))
			continue
		}
		if err := q.reportsItself(ctx, checkpoint, t); err != nil {
			q.h.Logger.Debug("an error that an upstream reported is not its own", slog.Any("key", q.call.Key), slog.Any("error", err))
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
func (q *Request) reportsItself(ctx context.Context, checkpoint string, t *ect.Token) error {
	graph := func(*ect.Token) ect.DAG { return q.policy.Evidence.Graph(q.facts.Workflow) }
	if _, err := q.policy.Verifier.Verify(ctx, t.Raw(), ect.Presentation{Now: time.Now(), DAG: graph}); err != nil {
		return err
	}
	with := []string{checkpoint} // the upstream was called
	for _, t := range q.tokens.Own {
		with = append(with, t.NodeID())
	}
	return q.policy.Reports.CheckAnswer(ctx, t, q.tokens.All, q.h.UpstreamIdentity, with)
}

// lateTokens accepts expired tokens for the very call that they were used for, and refuses them
// otherwise.
func (q *Request) lateTokens() error {
	if q.tokens.Late == nil {
		return nil
	}
	for _, t := range q.tokens.Own {
		status, err := q.policy.Evidence.UseStatus(q.r.Context(), t, q.use())
		if err != nil {
			return q.storeFailed(err)
		}
		if status != evidence.Same {
			return RefusedToken(q.tokens.Late)
		}
	}
	return nil
}

// use binds the tokens to the key and the request, so that they are valid for no other body.
func (q *Request) use() evidence.Use {
	return sha256.Sum256(append(q.call.Key[:], q.call.Fingerprint[:]...))
}

// handed reports that an enclosing guard uses the tokens for the same request.
func (q *Request) handed() bool { return q.r.Context().Value(tokensHanded{}) != nil }

// reviewTokens looks up the tokens in the store. It reports whether it learned anything, and
// refuses a token that was used for something else.
func (s *callEvidence) reviewTokens(q *Request) (learned bool, err error) {
	ctx := q.r.Context()
	own := q.tokens.Own
	if q.handed() {
		own = nil
	}
	for _, t := range own {
		status, err := q.policy.Evidence.UseStatus(ctx, t, q.use())
		if err != nil {
			return false, q.storeFailed(err)
		}
		if status == evidence.Other {
			return false, replayedToken()
		}
		if status == evidence.Same && !slices.Contains(s.bound, t) {
			s.bound = append(s.bound, t)
			learned = true
		}
	}
	for _, t := range slices.Concat(q.tokens.All, s.ancestors) {
		status, err := q.policy.Evidence.LedgerStatus(ctx, t)
		if err != nil {
			return false, q.storeFailed(err)
		}
		if status == evidence.Other {
			return false, replayedToken()
		}
		if status == evidence.Same && !slices.Contains(s.recorded, t) {
			if slices.Contains(own, t) && !slices.Contains(s.bound, t) {
				switch status, err := q.policy.Evidence.ActStatus(ctx, t, q.use()); {
				case err != nil:
					return false, q.storeFailed(err)
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
func (s *callEvidence) unrecorded(q *Request) []*ect.Token {
	if len(q.tokens.All) == 0 {
		return nil
	}
	s.ancestors = q.policy.Evidence.Unrecorded(q.tokens.All, maxAncestors)
	return slices.DeleteFunc(slices.Concat(s.ancestors, q.tokens.All), func(t *ect.Token) bool { return slices.Contains(s.recorded, t) })
}

// bind records the use of the caller's tokens in a batch, for as long as the key is kept: even
// the latest retry must find it. Without a time it has no end until the outcome sets one: a
// stream may outlast its deadline (ADR 0049).
func (s *callEvidence) bind(q *Request, to *store.Batch, until time.Time) {
	for _, t := range q.tokens.Own {
		if !slices.Contains(s.bound, t) && !q.handed() {
			writes := q.policy.Evidence.UseWrites(t, q.use(), until)
			if until.IsZero() {
				writes[0].Expires = until
				s.held = append(s.held, t)
			}
			to.Add(writes...)
		}
	}
}

// kept is until when the call's key is kept, should it end at its deadline only.
func (q *Request) kept(now time.Time, deadline time.Duration) time.Time {
	return now.Add(deadline + max(q.call.KeepKey, q.call.KeepResult))
}

// keepTokens records the tokens of a call that is answered from the record: its caller will name
// them as parents. After execution.ErrTaken look the call up again.
func (s *callEvidence) keepTokens(q *Request, found execution.Finding) error {
	if len(q.tokens.All) == 0 || q.tokens.Late != nil {
		return nil
	}
	if _, err := s.reviewTokens(q); err != nil || found.Status == execution.Mismatch {
		return err // a refusal is no step of the workflow
	}
	if tokens := s.unrecorded(q); len(tokens) > 0 {
		if err := s.recordTokens(q, found, tokens); err != nil {
			return err
		}
	}
	return nil
}

func (s *callEvidence) recordTokens(q *Request, found execution.Finding, tokens []*ect.Token) error {
	ctx := q.r.Context()
	now, err := q.engine.Store.Now(ctx)
	if err != nil {
		return q.storeFailed(err)
	}
	drafts, err := q.retryDrafts(now, found, tokens)
	if err != nil {
		return q.storeFailed(err)
	}
	batch, err := q.policy.Evidence.NewBatch(q.recordUntil(now), tokens, drafts...)
	if err != nil {
		return q.storeFailed(err)
	}
	s.bind(q, batch, q.kept(now, q.call.Deadline))
	err, s.begins = batch.Commit(ctx, q.engine.Store), false // it begins no workflow
	if conflict := (*store.Conflict)(nil); err != nil && !errors.As(err, &conflict) {
		if q.policy.LedgerFirst {
			return q.storeFailed(err)
		}
		q.h.Logger.Warn("the tokens of a retry could not be recorded; it is answered all the same", slog.Any("key", q.call.Key), slog.Any("error", err))
		return nil
	}
	return s.callRecorded(q, batch, err)
}

// retryDrafts records the outcome of its call for the tokens of a retry, unless the call still
// runs.
func (q *Request) retryDrafts(now time.Time, found execution.Finding, tokens []*ect.Token) ([]*ect.Draft, error) {
	r := found.Record
	if r == nil || r.Checkpoint == "" || !slices.ContainsFunc(tokens, func(t *ect.Token) bool { return slices.Contains(q.tokens.Own, t) }) {
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
	d, err := q.policy.Events.RetryOutcome(now, &q.facts, &came)
	return []*ect.Draft{d}, err
}

// lostTo finds the conflicting write of a claim.
func (s *callEvidence) lostTo(q *Request, lost *store.Conflict) error {
	ctx, cancel := context.WithDeadline(q.r.Context(), q.wait)
	defer cancel()
	for {
		learned, err := s.reviewTokens(q)
		if err == nil && !learned && s.begins { // another first call of the workflow may have come before
			var begins bool
			begins, err = q.policy.Events.Begins(ctx, q.facts.Workflow)
			learned = !begins
		}
		if err != nil || learned {
			return err
		}
		if store.AwaitGroup(ctx) != nil {
			return q.storeFailed(lost)
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

func (q *Request) hears() bool {
	return q.policy != nil && q.tokens.Issuer() != ""
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
		failure = x.recordedError(x.noted.checkpoint)
	case errors.As(p.Cause, &open):
		failure = x.rejectionError(open, &x.in.facts)
	}
	if failure != nil {
		p.ErrorECT = failure.id
		h.Set(ect.FieldName, failure.raw)
	}
}

// recordedError is the error recorded for the caller's own call, or nil.
func (q *Request) recordedError(checkpoint string) *shownError {
	if checkpoint == "" || !q.hears() {
		return nil
	}
	ctx, cancel := context.WithTimeout(q.r.Context(), errorTime)
	defer cancel()
	return q.errorOf(ctx, q.facts.Workflow, q.policy.Evidence.ErrorID(checkpoint))
}

func (q *Request) errorOf(ctx context.Context, workflow, id string) *shownError {
	log := q.policy.Evidence.Log()
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
func (q *Request) recordRejection(p *problem.Problem, facts *evidence.Call) {
	open := (*breaker.OpenError)(nil)
	if q.policy == nil || q.facts.Workflow == "" || !errors.As(p.Cause, &open) {
		return
	}
	// A rejection that is left out now may be recorded with the next one.
	c := q.engine.Circuits
	if c == nil || c.Busy() || !q.engine.rejections.first(open, q.facts.Workflow, caller.Verified(q.call.Scope.Caller)) {
		return
	}
	c.RecordRejection(q.policy, open, q.facts.Workflow, q.parentIDs(facts))
}

// rejectionError is the error that shows a caller that a breaker refused its call (AERR "States":
// it is emitted to upstream peers). There is one per caller, workflow and state of the breaker,
// so that retries cannot flood the ledger. If it cannot be recorded, the refusal has none.
func (q *Request) rejectionError(open *breaker.OpenError, facts *evidence.Call) *shownError {
	if q.facts.Workflow == "" || q.engine.Circuits == nil {
		return nil
	}
	rejections := &q.engine.rejections
	to := rejectedCaller{q.facts.Workflow, q.tokens.Issuer()}
	if failure, room := rejections.shown(open, to); failure != nil || !room {
		return failure
	}
	ctx, cancel := context.WithTimeout(q.r.Context(), errorTime)
	defer cancel()
	id := q.policy.Evidence.RejectionID(open.Key.String(), open.Generation, to.workflow, to.caller)
	if failure := q.errorOf(ctx, to.workflow, id); failure != nil { // of an earlier life
		rejections.show(open, to, failure)
		return failure
	}
	token, err := q.recordRejected(ctx, facts, evidence.Rejection{
		ID: id, Downstream: q.engine.Circuits.Name(open.Key.Upstream), ErrorType: problem.CircuitOpen.ErrorType,
		Severity: "error", Description: "the circuit breaker refuses the call; nothing was forwarded",
	})
	switch {
	case errors.Is(err, ledger.ErrDuplicate): // another call of this caller was first
		return q.errorOf(ctx, to.workflow, id)
	case err != nil:
		q.engine.Circuits.Unrecorded(open.Key, err)
		return nil
	}
	failure := &shownError{token.ID(), token.Raw()}
	rejections.show(open, to, failure)
	return failure
}

// recordRejected records that the call was held up, in its workflow. With ErrDuplicate that was recorded before.
func (q *Request) recordRejected(ctx context.Context, facts *evidence.Call, r evidence.Rejection) (*ect.Token, error) {
	now, err := q.policy.Engine.Store.Now(ctx)
	if err != nil {
		return nil, err
	}
	parents, err := q.policy.Evidence.Known(ctx, q.facts.Workflow, q.parentIDs(facts))
	if err != nil {
		return nil, err
	}
	r.Workflow, r.Issuer, r.Caller = q.facts.Workflow, q.tokens.Issuer(), q.facts.Caller
	r.Parents = parents[:min(len(parents), ect.MaxParents)]
	draft, err := q.policy.Events.Rejection(now, &r)
	if err != nil {
		return nil, err
	}
	token, err := q.policy.Events.Sign(draft)
	if err != nil {
		return nil, err
	}
	return token, q.policy.Evidence.Append(ctx, now.Add(KeepCircuitTokens), []*ect.Token{token})
}

// ancestors yields the ids of the call's ancestors, the nearest first. An id that the ledger does not
// have ends the walk. It is read only while a rollback of the workflow is under way.
func (q *Request) ancestors(workflow string, in *admission) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		if q.policy == nil {
			return
		}
		todo := slices.Clone(in.facts.Parents)
		if in.found.Record != nil { // an attempt in doubt, which a rollback may be undoing
			todo = append(todo, in.found.Record.Checkpoint)
		}
		for _, t := range q.tokens.All {
			todo = append(todo, t.ID())
			todo = append(todo, t.Parents()...)
		}
		planned, err := before(q, in)
		if err != nil {
			yield("", err)
			return
		}
		todo = append(todo, planned...)
		graph, known := q.policy.Evidence.Graph(workflow), map[string]bool{}
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
			nodes, err := graph.Nodes(q.r.Context(), id)
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
