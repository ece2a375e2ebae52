package guard

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// memberPriority is the class that a caller's token asks for (ATD, "Priority Levels").
const memberPriority ect.Member = "atd.resource_priority"

// credentials hashes what callers show, for their shares of a bulkhead.
var credentials = maphash.MakeSeed()

// sharer says whose share of the bulkhead a request is. A workflow without proof is its caller's own
// (P3).
func sharer(h *Handler, r *http.Request, issuer, proven, stated string) bulkhead.Sharer {
	switch {
	case proven != "":
		return bulkhead.Sharer{Workflow: proven}
	case stated == "":
		return bulkhead.Sharer{}
	}
	s := bulkhead.Sharer{Workflow: stated, Caller: h.Callers.Known(r, issuer)}
	if s.Caller == "" {
		s.Caller = caller.Anonymous
		if shown := h.fields.Join(r.Header, body.Credential); shown != "" {
			s.Credential = maphash.String(credentials, shown)
		}
	}
	return s
}

// classOf is the class of a request: what a token of its caller says, or what is configured. What a
// caller says who is not verified raises nothing.
func classOf(h *Handler, r *http.Request, configured string, tokens []*ect.Token, verified bool) bulkhead.Class {
	for _, t := range tokens {
		if !t.Proven() {
			continue
		}
		name, _ := t.Ext().Text(memberPriority)
		if c, ok := bulkhead.ParseClass(name); ok {
			return c
		}
	}
	if c, ok := bulkhead.ParseClass(configured); ok || configured == "" {
		return c
	}
	name, _ := h.Host.Expand(r, configured)
	c, _ := bulkhead.ParseClass(name)
	if !verified {
		c = min(c, bulkhead.Normal)
	}
	return c
}

// permitted waits for a permit to send the call. found is what is recorded of it. Undos need none, since no guard
// sees requests of the gateway's own: what a failed workflow holds must not keep them waiting.
func permitted(q *Request, in *admission, permit *bulkhead.Permit) error {
	h := q.h
	if h.Bulkhead == nil {
		return nil
	}
	tokens := &q.tokens
	c := bulkhead.Call{
		Sharer: sharer(h, q.r, tokens.Issuer(), tokens.proven(), q.call.Workflow),
		Class:  classOf(h, q.r, q.action.Priority, tokens.Own, caller.Verified(q.call.Scope.Caller)),
		Key:    retryKey(q.call.Key),
		Retry:  in.found.Status == execution.Doubtful || retryCount(q.r.Header) > 0,
	}
	if n := in.planned.binds(); n != nil {
		if class, ok := bulkhead.ParseClass(n.Hints.Priority); ok {
			c.Class = class
		}
	}
	facts := in.facts
	c.Unserved = func() { unserved(q, &facts, c.Class) }
	begun := time.Time{}
	if _, said := callersTime(q.r.Header); said {
		begun = time.Now()
		c.Deadline = begun.Add(in.deadline)
	}
	err := h.Bulkhead.Acquire(q.r.Context(), &c, permit)
	if q.r.Context().Err() != nil {
		return q.gone()
	}
	if err != nil {
		return noPermit(err)
	}
	if !begun.IsZero() {
		in.deadline -= time.Since(begun)
	}
	return nil
}

// retryKey names a call and its retries for the retry budget of its workflow.
func retryKey(k execution.Key) uint64 { return binary.BigEndian.Uint64(k[:]) }

// failed notes a forwarded call whose key is about to be free again: its next attempt is a retry.
func failed(q *Request, o execution.Outcome) {
	if q.h.Bulkhead != nil && o.Verdict == execution.Released {
		q.h.Bulkhead.Failed(retryKey(q.call.Key))
	}
}

// permitUnguarded is permitted for a request that is not guarded, the message m or none. The permit
// must be released. What the holder of a permit may wait for needs none.
func permitUnguarded(h *Handler, r *http.Request, m *protocol.Message) (permit bulkhead.Permit, err error) {
	if h.Bulkhead == nil || m != nil && m.Frees || endsSession(h, r) {
		return permit, nil
	}
	tokens := h.verifiedBefore(r)
	stated, err := workflow(r, m, new(Tokens))
	if err != nil {
		stated = "" // an upstream may read it
	}
	c := bulkhead.Call{
		Sharer: sharer(h, r, tokens.Issuer(), tokens.proven(), stated),
		Class:  classOf(h, r, h.Policy.Priority, tokens.Own, tokens.Issuer() != "" || h.Policy.Priority != "" && caller.Verified(h.Callers.Known(r, ""))),
		Retry:  retryCount(r.Header) > 0,
	}
	if left, said := callersTime(r.Header); said {
		c.Deadline = time.Now().Add(left)
	}
	class := c.Class
	c.Unserved = func() { unservedUnguarded(h, r, tokens, stated, class) }
	err = h.Bulkhead.Acquire(r.Context(), &c, &permit)
	if r.Context().Err() != nil {
		permit.Release()
		return permit, &StatusError{Status: statusClientClosed, Err: r.Context().Err()}
	}
	if err != nil {
		return permit, noPermit(err)
	}
	permit.Sent()
	return permit, nil
}

// noPermit is the problem of a call that got no permit.
func noPermit(err error) *problem.Problem {
	full := (*bulkhead.FullError)(nil)
	if !errors.As(err, &full) {
		panic(fmt.Sprintf("agent_guard: a bulkhead refused with %v", err))
	}
	kind := problem.BulkheadFull
	if full.Reason >= bulkhead.OverRate {
		kind = problem.QuotaExceeded
	}
	p := problem.New(kind, noPermits[full.Reason])
	p.Reason, p.RetryAfter = full.Reason.String(), full.RetryAfter
	return p
}

var noPermits = map[bulkhead.Reason]string{
	bulkhead.QueueFull:     "The workflow has as many calls at the upstream, and waiting, as it may. Nothing was forwarded.",
	bulkhead.WaitedTooLong: "The upstream was busy with other calls for as long as this one could wait. Nothing was forwarded.",
	bulkhead.TooLate:       "The upstream is busy, and the call would not be in time. Nothing was forwarded.",
	bulkhead.OverRate:      "The workflow makes more calls a second than it may. Nothing was forwarded.",
	bulkhead.OverRetries:   "The workflow sends more retries than it may for the calls that it makes. Nothing was forwarded.",
}

// maxUnserved is how many escalations may wait for people because of one caller's calls that wait.
const maxUnserved = 16

// unserved says that the call waits for a permit too long: a critical one to people, others with a
// warning (ATD, "Unsatisfiable Resource Hints"). Workflows are told once an hour; a failing store tells
// nobody but the log.
func unserved(q *Request, facts *evidence.Call, class bulkhead.Class) {
	q.emit(eventUnserved, map[string]any{"class": class.String()})
	if q.policy == nil || q.facts.Workflow == "" {
		return
	}
	ctx, cancel := context.WithTimeout(q.r.Context(), errorTime)
	defer cancel()
	if err := recordUnserved(ctx, q, facts, class); err != nil && q.r.Context().Err() == nil {
		q.h.Logger.Error("that calls wait for the bulkhead cannot be recorded", slog.String("guard", q.h.Name), slog.Any("error", err))
	}
}

// unservedUnguarded is unserved for a request that is not guarded. A workflow that it only states counts if its
// caller is verified (P3).
func unservedUnguarded(h *Handler, r *http.Request, tokens *Tokens, stated string, class bulkhead.Class) {
	q := guardedRequest{opened: h.open(), h: h, r: r, action: h.Actions[len(h.Actions)-1]}
	if q.engine == nil { // there is only the event
		unserved(&Request{guardedRequest: q}, nil, class)
		return
	}
	defer q.release()
	name := cmp.Or(h.Callers.Known(r, tokens.Issuer()), caller.Anonymous)
	wid := tokens.proven()
	if wid == "" && caller.Verified(name) {
		wid = stated
	}
	facts := evidence.Call{Workflow: wid, Caller: q.executions.Caller(name)}
	unserved(&Request{
		guardedRequest: q, tokens: *tokens, call: execution.Call{Scope: execution.Scope{Caller: name}}, facts: facts,
	}, &facts, class)
}

func recordUnserved(ctx context.Context, q *Request, facts *evidence.Call, class bulkhead.Class) error {
	now, err := q.engine.Store.Now(ctx)
	if err != nil {
		return err
	}
	r := evidence.Rejection{
		ID:         q.policy.Evidence.RejectionID("bulkhead "+q.h.Name+" "+class.String(), uint64(now.Unix()/3600), q.facts.Workflow, ""),
		Downstream: cmp.Or(q.h.UpstreamIdentity, q.h.Name), ErrorType: problem.BulkheadFull.ErrorType,
		Severity: "warning", Description: "calls of the workflow wait for the upstream; nothing was forwarded yet",
	}
	if class == bulkhead.Critical {
		r.Severity = "error"
	}
	_, err = q.recordRejected(ctx, facts, r)
	if err != nil && !errors.Is(err, ledger.ErrDuplicate) { // which a process may have recorded that ended then
		return err
	}
	if class != bulkhead.Critical || q.engine.Escalations == nil {
		return nil
	}
	caller := q.call.Scope.Caller
	if full, err := q.engine.Escalations.Waits(ctx, caller, maxUnserved); full || err != nil {
		return err
	}
	_, err = q.engine.Escalations.Open(ctx, hitl.Opening{
		Key: "unserved " + r.ID, Level: hitl.Approval, Cause: hitl.CauseUnserved, Workflow: q.facts.Workflow, Requester: caller,
		Summary: "A critical call of the action " + strconv.Quote(q.action.Name) + " finds no place at its upstream.",
		Links:   hitl.Links{Error: r.ID},
	})
	return err
}
