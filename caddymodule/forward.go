package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// forwarding is what came of handing a call on.
type forwarding struct {
	rec      *answer.Recorder
	err      error
	panicked any
	proof    sent.Verdict
	unframed bool
	overdue  bool
}

// execute forwards the claimed call, settles what came of it, and lets the end of
// the answer go. The client's leaving stops none of it (P7).
func (x *exchange) execute(e *guard.Execution, next caddyhttp.Handler) error {
	x.note("executed", "")
	x.action.counts.Begun()
	x.engine.running.begin(x.call.Checkpoint)
	ctx, cancel := x.engine.detach(x.r.Context(), x.call.Deadline)
	defer cancel()

	var f forwarding
	settled := false
	defer func() {
		if !settled { // a panic of our own: nothing is proven
			_ = x.settle(e, guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseInterrupted}, nil)
			x.action.counts.Settled(guard.InDoubt)
		}
	}()
	if err := x.prove(ctx); err != nil {
		settled = true
		return x.unproven(e, err)
	}
	f = x.forward(ctx, e, next)
	outcome := x.stillInDoubt(x.judge(&f))
	x.noted.outcome = outcome.Verdict
	if x.action.Settle == settleAsync && outcome.Whole {
		x.observe(outcome, f.rec.Header())
		settled = true
		if outcome.Verdict == guard.InDoubt {
			x.doubted(outcome)
		}
		x.settleLater(e, outcome, f.rec.Header())
		f.rec.Release()
		return nil
	}
	err := x.settle(e, outcome, f.rec.Header())
	settled = true
	x.settled(outcome, err)
	if outcome.Verdict == guard.InDoubt {
		x.doubted(outcome)
	}
	return x.finish(&f, outcome, err)
}

// settled counts the end of the execution. What could not be recorded is in doubt.
func (x *exchange) settled(o guard.Outcome, unrecorded error) {
	if unrecorded != nil {
		o.Verdict = guard.InDoubt
	}
	x.action.counts.Settled(o.Verdict)
}

// doubted tells the operator, who is the one to find out.
func (x *exchange) doubted(o guard.Outcome) {
	x.doubtful = true
	x.note(statusInDoubt, "")
	x.noted.cause = o.Cause
	x.emit(eventInDoubt, map[string]any{"cause": string(o.Cause), "status": o.Status})
	x.h.logger.Warn("a call is in doubt", zap.Stringer("key", x.call.Key), zap.String("guard", x.h.Name),
		zap.String("action", x.action.Name), zap.String("cause", string(o.Cause)), zap.Int("status", o.Status))
}

// settleLater records the outcome after the answer has gone.
func (x *exchange) settleLater(e *guard.Execution, outcome guard.Outcome, answer http.Header) {
	release := x.release
	x.release = nil
	go func() {
		defer release()
		// P7: nobody else's calls end with a panic of ours; this one is in doubt, as in execute.
		defer func() {
			if p := recover(); p != nil {
				x.h.logger.Error("recording the outcome of an answered call panicked; it is in doubt",
					zap.Stringer("key", x.call.Key), zap.Any("panic", p), zap.Stack("stack"))
				x.settled(guard.Outcome{Verdict: guard.InDoubt}, x.settle(e, guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseInterrupted}, nil))
			}
		}()
		err := x.settle(e, outcome, answer)
		x.settled(outcome, err)
		if err != nil {
			x.unrecorded()
			x.h.logger.Error("the outcome of an answered call could not be recorded; it is in doubt",
				zap.Stringer("key", x.call.Key), zap.Error(err))
		}
	}()
}

// forward hands the call to the next handler. Where it is proven that not a byte
// was sent because the connection had gone stale, it does so once more.
func (x *exchange) forward(ctx context.Context, e *guard.Execution, next caddyhttp.Handler) forwarding {
	if x.h.restores {
		defer x.engine.targets.write(x.place(), x.window)()
	}
	var armed context.Context
	cut := func() bool { return armed.Err() != nil }
	rec := answer.NewRecorder(x.w, recording{e, x}, marked(x.marks("executed"), x.call.Checkpoint), cut)
	for again := false; ; again = true {
		var watch *sent.Watch
		armed, watch = sent.Arm(ctx)
		f := forwarding{rec: rec}
		r := x.request(armed)
		f.panicked, f.err = handOn(next, rec, r)
		_ = r.Body.Close() // nobody else does where no connection was made
		f.overdue = errors.Is(ctx.Err(), context.DeadlineExceeded)
		f.unframed = watch.Unframed()
		f.proof = watch.Proof(f.err, sent.Retries(armed))
		watch.Release()
		if again || f.panicked != nil || rec.Status() != 0 || !f.failed() || !f.proof.Again {
			return f
		}
		rec.Reset()
	}
}

// failed reports that no answer came.
func (f *forwarding) failed() bool { return f.err != nil || f.rec.Interrupted() }

func handOn(next caddyhttp.Handler, w http.ResponseWriter, r *http.Request) (panicked any, err error) {
	defer func() { panicked = recover() }()
	return nil, next.ServeHTTP(w, r)
}

// recording feeds an execution from a Recorder, and what its undo needs.
type recording struct {
	e *guard.Execution
	x *exchange
}

func (r recording) Start(status int, header map[string][]string) {
	r.e.Recording().Start(status, header)
}
func (r recording) Write(p []byte) {
	r.e.Write(p)
	r.x.overhear(p)
}
func (r recording) SetTrailer(trailer map[string][]string) {
	r.e.Recording().SetTrailer(trailer)
}

// request is the request to forward: the call's own, with the body that was read,
// naming this execution as the parent of what it may cause.
func (x *exchange) request(ctx context.Context) *http.Request {
	ctx = context.WithValue(ctx, guardedBy{x.h.Name}, true)
	ctx = circuits.WithEvidence(ctx, circuits.Evidence{Checkpoint: x.call.Checkpoint, Workflow: x.story.call.Workflow})
	if most := time.Duration(x.action.Deadline); x.call.Deadline < most {
		ctx = circuits.Impatient(ctx, most)
	}
	if len(x.story.tokens.own) > 0 {
		ctx = context.WithValue(ctx, tokensHanded{}, true)
	}
	r := x.r.WithContext(ctx)
	target := *x.r.URL // which inner handlers rewrite, and may have to once more
	r.URL = &target
	r.Header = x.r.Header.Clone()
	r.Header.Del("Expect")  // the body is here
	r.Header.Del("Upgrade") // what is guarded stays HTTP (isUpgrade)
	r.Header.Del(headerExecutionID)
	r.Header.Set(headerExecutionParent, x.call.Scope.ID)
	if x.call.Workflow != "" {
		r.Header.Set(headerWorkflowID, x.call.Workflow)
	}
	if x.story.forwarded != nil {
		r.Header.Add(ect.FieldName, x.story.forwarded.Raw())
	}
	answer.NarrowEncoding(r.Header)
	if x.capture.decision.ReadsAnswer() {
		r.Header.Set("Accept-Encoding", "identity")
	}
	r.TransferEncoding = nil
	r.ContentLength = x.body.Size()
	r.Body = http.NoBody
	if r.ContentLength > 0 {
		r.Body = x.body.NewReader()
	}
	return r
}

// judge reads what came of the call.
func (x *exchange) judge(f *forwarding) guard.Outcome {
	rec := f.rec
	switch {
	case f.panicked != nil, f.err != nil && rec.Status() != 0:
		return guard.Outcome{Verdict: guard.InDoubt, Cause: x.late(f, guard.CauseTruncated), Status: rec.Status()}
	case f.failed() && f.proof.NotSent():
		return guard.Outcome{Verdict: guard.Released, Cause: guard.CauseNotSent}
	case f.err != nil:
		return guard.Outcome{Verdict: guard.InDoubt, Cause: x.late(f, guard.CauseLost)}
	case rec.Interrupted():
		return guard.Outcome{Verdict: guard.InDoubt, Cause: x.late(f, guard.CauseInterrupted)}
	case rec.Status() == 0 && x.unanswered():
		return guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseNoAnswer}
	}
	rec.Finish()
	o := guard.Outcome{Status: rec.Status(), Cause: guard.CauseStatus, Whole: rec.Whole()}
	if !o.Whole {
		o.Verdict, o.Cause = guard.InDoubt, guard.CauseTruncated
		return o
	}
	var ruled bool
	o.Verdict, ruled = x.action.judge(o.Status, rec.Header(), rec.Trailer())
	if !ruled {
		o.Verdict = x.unmasked(o.Status, o.Verdict)
		if o.Verdict == guard.Completed && rec.Refused() && o.Status == http.StatusConflict {
			o.Verdict = guard.InDoubt
		}
		if o.Verdict == guard.InDoubt {
			return o
		}
	}
	// A refusal says so in its status, however its body ends.
	if f.unframed && o.Verdict == guard.Completed && x.action.Unframed != unframedComplete {
		o.Verdict, o.Cause = guard.InDoubt, guard.CauseUnframed
	}
	return o
}

// unanswered reports that silence does not mean 200 (P6): no handler took the call, or
// an upstream has answered and nothing was passed on of that, such as of an upgrade
// that nobody asked for.
func (x *exchange) unanswered() bool {
	_, answered := replacer(x.r).Get(upstreamStatus)
	return answered || caddyhttp.GetVar(x.r.Context(), "unhandled") == true
}

const upstreamStatus = "http.reverse_proxy.status_code"

// unmasked is the verdict where a handler behind the guard may have put status in the place
// of the upstream's own: what that leaves open stays open (P6), and a refusal that only the
// handler tells of frees no key (P1).
func (x *exchange) unmasked(status int, shown guard.Verdict) guard.Verdict {
	upstream := x.upstreamsOwn()
	if upstream == 0 || upstream == status {
		return shown
	}
	_, retryAfter := replacer(x.r).Get("http.reverse_proxy.header.Retry-After")
	if own := x.action.rules.Judge(upstream, retryAfter); own == guard.InDoubt || shown == guard.Released {
		return own
	}
	return shown
}

// upstreamsOwn is the status of the answer that came from the upstream, whatever handlers
// behind the guard have made of it; 0 where none came through a proxy.
func (x *exchange) upstreamsOwn() int {
	value, _ := replacer(x.r).Get(upstreamStatus)
	status, _ := value.(int)
	return status
}

// late names the deadline as the cause where it has passed.
func (x *exchange) late(f *forwarding, cause guard.Cause) guard.Cause {
	if f.overdue {
		return guard.CauseDeadline
	}
	return cause
}

// finish ends the client's answer as the settled outcome allows.
func (x *exchange) finish(f *forwarding, o guard.Outcome, unrecorded error) error {
	switch {
	case f.panicked != nil:
		panic(f.panicked)
	case unrecorded != nil:
		x.outcomeLost(unrecorded)
		x.abortIfSent()
		f.rec.Reset()
		return x.inDoubtAnswer(guard.CauseUnrecorded)
	case o.Whole:
		f.rec.Release()
		return nil
	}
	x.abortIfSent()
	f.rec.Reset()
	if o.Verdict == guard.Released {
		x.w.Header().Del(headerExecutionStatus)
		x.note(statusRefused, "")
		if f.err == nil {
			return caddyhttp.Error(http.StatusBadGateway, errNotSent)
		}
		return refusedByCircuit(f.err, verifiedHere(x.call.Scope.Caller))
	}
	return x.inDoubtAnswer(o.Cause)
}

// outcomeLost notes that the store did not take the outcome of the call.
func (x *exchange) outcomeLost(err error) {
	x.h.logger.Error("the outcome of a call could not be recorded; it is in doubt",
		zap.Stringer("key", x.call.Key), zap.Error(err))
	x.unrecorded()
	x.doubtful = true
	x.note(statusInDoubt, "")
	x.noted.outcome, x.noted.cause = guard.InDoubt, guard.CauseUnrecorded
}

// unrecorded tells of an execution whose outcome the store did not take.
func (x *exchange) unrecorded() {
	if x.doubtful {
		return // told already
	}
	x.emit(eventInDoubt, map[string]any{"cause": string(guard.CauseUnrecorded), "status": 0})
}

// errNotSent is the error of a call that could not be sent on two connections.
var errNotSent = errors.New("agent_guard: the upstream closed the connection before anything was sent")

func (x *exchange) abortIfSent() {
	if x.w.Sent() {
		panic(http.ErrAbortHandler)
	}
}

func (x *exchange) inDoubtAnswer(cause guard.Cause) error {
	x.w.Header().Del(headerExecutionStatus)
	return x.problem(problem.InDoubt, "Cause: "+string(cause)+".", guard.StateInDoubt)
}
