package guard

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

type forwarding struct {
	Forwarded
	rec      *Recorder
	unframed bool
	overdue  bool
}

// settled counts the end of the execution, which is in doubt if it could not be recorded.
func (x *Call) settled(o execution.Outcome, unrecorded error) {
	if unrecorded != nil {
		o.Verdict = execution.InDoubt
	}
	x.action.Counts.Settled(o.Verdict)
}

// doubted reports the doubt to the operator, who is the one to find out.
func (x *Call) doubted(o execution.Outcome) {
	x.doubtful = true
	x.note(StatusInDoubt, "")
	x.noted.cause = o.Cause
	x.emit(EventInDoubt, map[string]any{"cause": string(o.Cause), "status": o.Status})
	x.h.Logger.Warn("a call is in doubt", slog.Any("key", x.call.Key), slog.String("guard", x.h.Name),
		slog.String("action", x.action.Name), slog.String("cause", string(o.Cause)), slog.Int("status", o.Status))
}

func (x *Call) settleLater(e *execution.Execution, outcome execution.Outcome, answer http.Header) {
	release := x.release
	x.release = nil
	go func() {
		defer release()
		// P7: nobody else's calls end with a panic of ours; this one is in doubt, as in execute.
		defer func() {
			if p := recover(); p != nil {
				x.h.Logger.Error("recording the outcome of an answered call panicked; it is in doubt",
					slog.Any("key", x.call.Key), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
				x.settled(execution.Outcome{Verdict: execution.InDoubt}, x.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseInterrupted}, nil))
			}
		}()
		err := x.settle(e, outcome, answer)
		x.settled(outcome, err)
		if err != nil {
			x.unrecorded()
			x.h.Logger.Error("the outcome of an answered call could not be recorded; it is in doubt",
				slog.Any("key", x.call.Key), slog.Any("error", err))
		}
	}()
}

// forward hands the call to the next handler. Where it is proven that not a byte
// was sent because the connection had gone stale, it does so once more.
func (x *Call) forward(e *execution.Execution) forwarding {
	if x.h.restores {
		defer x.engine.Writes.Write(x.place(), x.window)()
	}
	e.Recording().SetPace(x.clock.wait)
	if x.evidence.tokens.Issuer() != "" && x.evidence.policy != nil {
		x.w.HoldFailures(maxHeldFailure)
	}
	up := x.upstream
	rec := NewRecorder(x.w, recording{e, x}, withCheckpoint(x.marks("executed"), x.call.Checkpoint), up.Cut)
	rec.Judge(func(status int) http.Header { return x.doubtInHeader(e, rec, status) })
	for again := false; ; again = true {
		r := x.request(up.Begin(x.clock))
		f := forwarding{rec: rec, Forwarded: up.Forward(rec, r), overdue: x.clock.overdue(), unframed: up.Unframed()}
		if again || f.Panicked != nil || rec.Status() != 0 || !f.failed() || !f.Again {
			return f
		}
		rec.Reset()
	}
}

func (f *forwarding) failed() bool { return f.Err != nil || f.rec.Interrupted() }

// recording feeds an execution from a Recorder, and what its undo needs.
type recording struct {
	e *execution.Execution
	x *Call
}

func (r recording) Start(status int, header map[string][]string) {
	if idle := time.Duration(r.x.action.StreamIdle); idle > 0 && len(header["Content-Length"]) == 0 {
		r.x.clock.pausing(idle)
	}
	r.e.Recording().Start(status, header)
}
func (r recording) Write(p []byte, needed bool) bool {
	r.x.clock.touch()
	r.x.captureBody(p)
	return r.e.WriteFor(p, needed)
}
func (r recording) ReadBack(off int64) io.ReadCloser { return r.e.Recording().ReadBack(off) }
func (r recording) Wait(ready <-chan struct{}) bool  { return r.x.clock.wait(ready) }
func (r recording) SetTrailer(trailer map[string][]string) {
	r.e.Recording().SetTrailer(trailer)
}

// request is the request to forward: the call's own, with the body that was read,
// naming this execution as the parent of what it may cause.
func (x *Call) request(ctx context.Context) *http.Request {
	ctx = context.WithValue(ctx, forwardedKey{}, &forwarder{x.h.Name, forwarderOf(ctx)})
	ctx = WithEvidence(ctx, Evidence{Checkpoint: x.call.Checkpoint, Workflow: x.evidence.call.Workflow})
	if most := x.action.Deadline; x.call.Deadline < most {
		ctx = WithPatience(ctx, most)
	}
	if len(x.evidence.tokens.Own) > 0 {
		ctx = context.WithValue(ctx, tokensHanded{}, true)
	}
	r := x.r.WithContext(ctx)
	target := *x.r.URL // which inner handlers rewrite, and may have to once more
	r.URL = &target
	r.Header = x.r.Header.Clone()
	r.Header.Del("Expect")  // the body is here
	r.Header.Del("Upgrade") // what is guarded stays HTTP (isTunnel)
	r.Header.Del(HeaderExecutionID)
	r.Header.Set(HeaderExecutionParent, x.call.Scope.ID)
	if x.call.Workflow != "" {
		r.Header.Set(HeaderWorkflowID, x.call.Workflow)
	}
	if x.evidence.forwarded != nil {
		r.Header.Add(ect.FieldName, x.evidence.forwarded.Raw())
	}
	NarrowEncoding(r.Header)
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
func (x *Call) judge(f *forwarding) execution.Outcome {
	rec := f.rec
	switch {
	case f.Panicked != nil, f.Err != nil && rec.Status() != 0:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.late(f, execution.CauseTruncated), Status: rec.Status()}
	case f.failed() && f.NotSent:
		return execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent}
	case f.Err != nil:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.late(f, execution.CauseLost)}
	case rec.Interrupted():
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.late(f, execution.CauseInterrupted)}
	case rec.Status() == 0 && x.upstream.Silent():
		return execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseNoAnswer}
	}
	rec.Finish()
	o := execution.Outcome{Status: rec.Status(), Cause: execution.CauseStatus, Whole: rec.Whole()}
	if !o.Whole {
		o.Verdict, o.Cause = execution.InDoubt, execution.CauseTruncated
		return o
	}
	if x.headerCause != "" { // P6: what the client was shown stays so; our own fields are in the header now
		o.Verdict, o.Cause = execution.InDoubt, x.headerCause
		return o
	}
	return x.outcomeOf(o, rec, rec.Trailer(), f.unframed)
}

// outcomeOf is the outcome o of an answer by its status, its header and its trailer.
func (x *Call) outcomeOf(o execution.Outcome, rec *Recorder, trailer map[string][]string, unframed bool) execution.Outcome {
	var ruled bool
	o.Verdict, ruled = x.action.judge(o.Status, rec.Header(), trailer)
	if !ruled {
		o.Verdict = x.unmasked(o.Status, o.Verdict)
		if rec.Doubtful() || rec.Refused() && (o.Status == http.StatusConflict || refusedAsConflict(rec.Header())) {
			o.Verdict = execution.InDoubt
		}
		if o.Verdict == execution.InDoubt {
			return o
		}
	}
	// A refusal says so in its status, however its body ends.
	if unframed && o.Verdict == execution.Completed && !x.action.AcceptUnframed {
		o.Verdict, o.Cause = execution.InDoubt, execution.CauseUnframed
	}
	return o
}

// doubtInHeader reads an answer before its header leaves. Where that leaves the call in doubt,
// whatever follows, it returns what the answer says of it, and whoever follows it learns
// it too.
func (x *Call) doubtInHeader(e *execution.Execution, rec *Recorder, status int) http.Header {
	if x.action.Unary && status == http.StatusOK && rec.Header().Get("Grpc-Status") == "" {
		return nil // the trailer says it
	}
	o := x.stillInDoubt(x.outcomeOf(execution.Outcome{Status: status, Cause: execution.CauseStatus}, rec, nil, x.upstream.Unframed()))
	if o.Verdict != execution.InDoubt {
		return nil
	}
	x.headerCause = o.Cause
	e.Recording().Doubt()
	return x.doubtMarks()
}

// judge reads a whole answer. ruled says that a rule of the configuration has decided.
func (a *Action) judge(status int, header http.Header, trailer map[string][]string) (v execution.Verdict, ruled bool) {
	if a.Rule != nil {
		if v, ruled = a.Rule(status, header); ruled {
			return v, true
		}
	}
	if a.Unary && status == http.StatusOK {
		return judgeGRPC(header, trailer), false
	}
	return a.Rules.Judge(execution.Answer{
		Status: status, RetryAfter: header.Get("Retry-After") != "", ShouldRetry: header.Get("Stripe-Should-Retry"),
	}), false
}

// refusedAsConflict reports that a guard behind this one has refused a gRPC call with what
// would be a 409 of HTTP: its own record stands against it, and may be of an execution.
func refusedAsConflict(header http.Header) bool {
	switch header.Get("Grpc-Status") {
	case "6", "9", "10":
		return true
	}
	return false
}

// judgeGRPC reads the status of a unary call: in the trailer, or in the header of
// an answer that has nothing else.
func judgeGRPC(header http.Header, trailer map[string][]string) execution.Verdict {
	text := header.Get("Grpc-Status")
	if values := trailer["Grpc-Status"]; len(values) > 0 {
		text = values[0]
	}
	code, err := strconv.ParseUint(text, 10, 32) // no sign
	if err != nil {
		return execution.InDoubt
	}
	switch code {
	case 7, 8, 16: // permission denied, resource exhausted, unauthenticated
		return execution.Released
	case 2, 4, 13, 14: // unknown, deadline exceeded, internal, unavailable
		return execution.InDoubt
	default:
		return execution.Completed
	}
}

// unmasked is the verdict where a handler behind the guard may have put status in the place
// of the upstream's own: what that leaves open stays open (P6), and a refusal that only the
// handler shows frees no key (P1).
func (x *Call) unmasked(status int, shown execution.Verdict) execution.Verdict {
	own := x.upstream.Status()
	if own == 0 || own == status {
		return shown
	}
	if said := x.action.Rules.Judge(x.upstream.Answer()); said == execution.InDoubt || shown == execution.Released {
		return said
	}
	return shown
}

func (x *Call) late(f *forwarding, cause execution.Cause) execution.Cause {
	if f.overdue {
		return execution.CauseDeadline
	}
	return cause
}

func (x *Call) finish(f *forwarding, o execution.Outcome, unrecorded error) error {
	switch {
	case f.Panicked != nil:
		x.drain(f)
		panic(f.Panicked)
	case unrecorded != nil:
		x.outcomeLost(unrecorded)
		x.abortIfSent(f)
		f.rec.Reset()
		return x.inDoubtAnswer(execution.CauseUnrecorded)
	case o.Whole:
		x.showFailure(f.rec.Header())
		return x.releaseEnd(f)
	}
	x.abortIfSent(f)
	f.rec.Reset()
	if o.Verdict == execution.Released {
		x.w.Header().Del(HeaderExecutionStatus)
		x.note(StatusRefused, "")
		if f.Err == nil {
			f.Err = &StatusError{Status: http.StatusBadGateway, Err: errNotSent}
		}
		x.showFailure(x.w.Header())
		return refusedByCircuit(f.Err, VerifiedHere(x.call.Scope.Caller))
	}
	return x.inDoubtAnswer(o.Cause)
}

func (x *Call) outcomeLost(err error) {
	x.h.Logger.Error("the outcome of a call could not be recorded; it is in doubt",
		slog.Any("key", x.call.Key), slog.Any("error", err))
	x.unrecorded()
	x.doubtful = true
	x.note(StatusInDoubt, "")
	x.noted.outcome, x.noted.cause = execution.InDoubt, execution.CauseUnrecorded
}

func (x *Call) unrecorded() {
	if x.doubtful {
		return // reported already
	}
	x.emit(EventInDoubt, map[string]any{"cause": string(execution.CauseUnrecorded), "status": 0})
}

// errNotSent is the error of a call that could not be sent on two connections.
var errNotSent = errors.New("agent_guard: the upstream closed the connection before anything was sent")

// releaseEnd lets the end of the answer go, once the client has got the rest.
func (x *Call) releaseEnd(f *forwarding) error {
	if f.rec.Apart() {
		x.engine.readers.enter()
		defer x.engine.readers.leave()
	}
	if !f.rec.Release(x.engine.Waits) {
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return nil
}

// drain gives the client what has come of an answer that has no end.
func (x *Call) drain(f *forwarding) {
	if f.rec.Apart() {
		x.engine.readers.enter()
		defer x.engine.readers.leave()
	}
	f.rec.Drain(x.engine.Waits)
}

func (x *Call) abortIfSent(f *forwarding) {
	if x.w.Sent() {
		x.drain(f)
		panic(http.ErrAbortHandler)
	}
}

func (x *Call) inDoubtAnswer(cause execution.Cause) error {
	x.w.Header().Del(HeaderExecutionStatus)
	return x.inDoubt(cause)
}

// shorter is the part of a caller's time that a call may take: what comes of it must be
// known before the caller gives up (cascade 3.3.1).
const shorter = 0.9

// deadline is the longest that the call may take: its action's, or less where its caller
// has said for how long it waits.
func (x *Call) deadline() time.Duration {
	return atMost(x.action.Deadline, x.r.Header, x.h.DeadlineHeader)
}

// atMost is most, or less where a caller says in its header h that it waits for less.
func atMost(most time.Duration, h http.Header, field string) time.Duration {
	left, said := callersTime(h, field)
	if !said {
		return most
	}
	return min(most, time.Duration(float64(left)*shorter))
}

// callersTime is how long the caller waits, from the first field that says so. What is
// malformed says nothing.
func callersTime(h http.Header, field string) (time.Duration, bool) {
	if text := h.Get(field); text != "" {
		if d, ok := parseSeconds(text); ok {
			return d, true
		}
	}
	return ParseGRPCTimeout(h.Get("Grpc-Timeout"))
}

// longestTime is more than anybody waits, and keeps times within 64 bits of nanoseconds.
const longestTime = 100 * 365 * 24 * time.Hour

// parseSeconds reads a number of seconds, or a duration with a unit.
func parseSeconds(text string) (time.Duration, bool) {
	text = strings.TrimSpace(text)
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil {
		d, err := time.ParseDuration(text)
		return d, err == nil && d > 0
	}
	if !(seconds > 0) || seconds > longestTime.Seconds() {
		return 0, false
	}
	return time.Duration(math.Ceil(seconds * float64(time.Second))), true
}

// clock is the context of a forwarded request, and the time that it has: until a
// deadline, or as long as it never pauses for too long.
type clock struct {
	context.Context
	cancel context.CancelCauseFunc
	stops  func() bool // what else ends it; nil with nothing

	mu       sync.Mutex
	timer    *time.Timer
	at       time.Time     // when it is over
	idle     time.Duration // the longest pause; 0 where there is a deadline, or no limit
	begun    bool          // the answer has begun, and pauses count
	patience time.Duration // for how long readers may still be waited for
}

// newClock starts a clock that is over after d. For as long at most, it stands still in
// its wait.
func newClock(parent context.Context, d time.Duration) *clock {
	c := &clock{at: time.Now().Add(d), patience: d}
	c.Context, c.cancel = context.WithCancelCause(parent)
	c.timer = time.AfterFunc(d, c.over)
	return c
}

// errPaused is the cause of the end of an answer that has paused for too long. It says
// nothing of the upstream's health, unlike a deadline: streams may have nothing to send.
var errPaused = errors.New("agent_guard: nothing has come for too long")

func (c *clock) over() {
	c.mu.Lock()
	begun := c.begun
	c.mu.Unlock()
	if begun {
		c.cancel(errPaused)
		return
	}
	c.cancel(context.DeadlineExceeded)
}

// overdue reports that the time was over.
func (c *clock) overdue() bool {
	cause := context.Cause(c.Context)
	return cause == context.DeadlineExceeded || cause == errPaused
}

// stop ends the request without a deadline having passed, and the clock with it.
func (c *clock) stop() {
	c.timer.Stop()
	c.cancel(context.Canceled)
	if c.stops != nil {
		c.stops()
	}
}

// Deadline implements context.Context. There is none where only pauses count.
func (c *clock) Deadline() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at, c.idle == 0 && !c.begun
}

// pausing puts the longest pause in the place of the deadline; none, where it is not
// positive.
func (c *clock) pausing(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle, c.begun = max(idle, 0), true
	if idle > 0 {
		c.restart(idle)
		return
	}
	c.timer.Stop()
}

// touch says that something has come.
func (c *clock) touch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle > 0 {
		c.restart(c.idle)
	}
}

// restart gives the request d from now. What is over stays over.
func (c *clock) restart(d time.Duration) {
	if c.timer.Stop() {
		c.at = time.Now().Add(d)
		c.timer.Reset(d)
	}
}

// wait waits for ready while the clock stands still: that readers are slow is not the
// upstream's fault. It reports whether ready came before all patience was used up.
func (c *clock) wait(ready <-chan struct{}) (came bool) {
	c.mu.Lock()
	if c.patience <= 0 || !c.timer.Stop() {
		c.mu.Unlock()
		return false
	}
	began, patience := time.Now(), c.patience
	left := c.at.Sub(began)
	c.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-ready:
		came = true
	case <-timer.C:
	case <-c.Done():
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.patience -= time.Since(began)
	c.at = time.Now().Add(left)
	c.timer.Reset(left)
	return came
}

// failsOpen reports that the call may be forwarded unguarded in place of being refused
// with err (P4): the route says `fail_open`, the store is what is missing, nothing is
// claimed for the call, and nothing was found of an earlier one.
func (x *Call) failsOpen(err error) bool {
	switch {
	case !x.h.FailOpen || x.found || x.h.Host.Exiting():
		return false
	case x.engine != nil && x.engine.Stopping != nil && x.engine.Stopping():
		return false
	case !x.verified && x.h.needsTokens(x.r):
		return false // whose call it is, is not known
	case x.evidence.policy != nil && x.evidence.policy.LedgerFirst && len(x.evidence.tokens.All) > 0:
		return false // its tokens are good for nothing before they stand in the ledger
	case x.engine == nil:
		// The store could not be opened. Where it could and only the keys are refused,
		// an earlier call may stand in it.
		return !errors.Is(err, ErrKeys) && !errors.Is(err, execution.ErrWrongKey) && !errors.Is(err, execution.ErrMissingKey)
	case errors.Is(err, store.ErrUnknown):
		return false // the claim may stand
	case errors.Is(err, execution.ErrUnreadable):
		return false // there was an earlier call
	case errors.Is(err, store.ErrInvalid):
		return false // the store answers: it is the record that it does not take
	}
	return errors.Is(err, execution.ErrStore)
}

// forwardUnguarded hands the call to the next handler as if there were no guard.
func (x *Call) forwardUnguarded(w http.ResponseWriter, next Next, cause error) error {
	x.action.Counts.FailedOpen()
	x.note(statusUnguarded, api.StoreUnavailable.Slug)
	if calls := x.h.failures.due(time.Now()); calls > 0 {
		x.h.Logger.Warn("the store is unavailable; calls are forwarded unguarded, and retries of them run again",
			slog.String("guard", x.h.Name), slog.Uint64("calls", calls), slog.Any("error", rootOf(cause)))
		x.emit(EventFailOpen, map[string]any{"calls": calls})
	}
	r := x.unguardedRequest()
	defer r.Body.Close()
	if x.engine == nil { // nobody reads the breakers' states, and the route wants it sent
		r = r.WithContext(WithoutState(r.Context()))
	}
	return x.h.forwardInTime(Mark(w, HeaderExecutionStatus, statusUnguarded), r, next)
}

func (x *Call) unguardedRequest() *http.Request {
	x.r.Header.Del("Upgrade") // an unsafe method leaves HTTP nowhere (isTunnel)
	if !x.read {
		return x.r
	}
	r := x.r.WithContext(x.r.Context())
	r.Header = r.Header.Clone()
	r.Header.Del("Expect") // the body is here
	r.TransferEncoding = nil
	r.ContentLength = x.body.Size()
	r.Body = http.NoBody
	if r.ContentLength > 0 {
		r.Body = x.body.NewReader()
	}
	return r
}

func rootOf(err error) error {
	if p := (*api.Problem)(nil); errors.As(err, &p) && p.Cause != nil {
		return p.Cause
	}
	return err
}

// reportEvery is how often calls that were forwarded unguarded are reported.
const reportEvery = 10 * time.Second

// throttle counts what happens too often to be reported each time.
type throttle struct {
	unreported atomic.Uint64
	reported   atomic.Int64 // when, in Unix nanoseconds
}

// due counts one more. It returns how many there are to report, or 0 where it is too
// early to report again.
func (s *throttle) due(now time.Time) uint64 {
	s.unreported.Add(1)
	last := s.reported.Load()
	since := now.UnixNano() - last // negative where the clock was set back
	if last != 0 && since >= 0 && since < int64(reportEvery) || !s.reported.CompareAndSwap(last, now.UnixNano()) {
		return 0
	}
	return s.unreported.Swap(0)
}

// degrade answers a call that a breaker has refused with the fallback, if there is one.
func (x *Call) degrade(w http.ResponseWriter, p *api.Problem) (answered bool, err error) {
	if x.h.Fallback == nil || p.Kind() != api.CircuitOpen {
		return false, nil
	}
	x.note(StatusRefused, p.Kind().Slug)
	x.action.Counts.Refused(p.Kind().Slug)
	w.Header().Set(HeaderExecutionID, x.call.Scope.ID)
	r := x.unguardedRequest()
	defer r.Body.Close()
	return true, x.h.Fallback.ServeHTTP(Mark(w, HeaderExecutionStatus, StatusRefused), r)
}
