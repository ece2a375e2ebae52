package guard

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/answer"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

type forwarding struct {
	Forwarded
	failed  bool
	overdue bool
}

// cut reports that the answer has no end.
func (f *forwarding) cut() bool {
	return f.Panicked == http.ErrAbortHandler || f.Panicked == nil && f.Err != nil
}

// roundTrip is one request to the upstream: what is sent, what comes back, and what that means.
type roundTrip struct {
	q        *Request
	in       *admission
	client   *client // that waits for the answer
	undo     *capture
	e        *execution.Execution // which the answer is recorded in
	own      string               // its checkpoint; empty without one
	upstream Upstream
	clock    clock         // of the forwarded request
	apart    time.Duration // that the upstream has taken
	rec      answer.Recorder
	shown    *bytes.Buffer    // what may prove that the server speaks the message's protocol; nil where nothing can
	heard    *protocol.Answer // to the message; nil where only HTTP says what it means

	neighbour   string          // the Execution-Status of another guard behind this one: refused, in doubt, or empty
	headerCause execution.Cause // of the doubt that the header of the answer shows; empty without one
	heldUp      bool            // the next gateway has held it up, before it sent anything (ADR 0099)
}

func (u *roundTrip) Start(status int, header map[string][]string) {
	if idle := time.Duration(u.q.action.StreamIdle); idle > 0 && len(header["Content-Length"]) == 0 {
		u.clock.pausing(idle)
	}
	u.heard = nil
	if m, h := u.q.message, u.rec.Header(); m != nil && h.Get("Content-Encoding") == "" {
		u.heard = m.Answer(h.Get("Content-Type"))
	}
	if u.shown != nil {
		u.shown.Reset()
	}
	u.e.Recording().Start(status, header)
}
func (u *roundTrip) Write(p []byte, needed bool) bool {
	u.clock.touch()
	u.undo.hears(p)
	if u.heard != nil {
		_, _ = u.heard.Write(p) // never fails
		c := u.client
		if c.session.session != "" && !c.resumable.Load() && isEvents(u.rec.Header().Get("Content-Type")) {
			c.resumable.Store(u.heard.End().Resumable)
		}
	}
	if s := u.shown; s != nil && s.Len() <= maxShown {
		_, _ = s.Write(p) // never fails
	}
	return u.e.Write(p, needed)
}
func (u *roundTrip) ReadBack(off int64) io.ReadCloser { return u.e.Recording().ReadBack(off) }
func (u *roundTrip) Wait(ready <-chan struct{}) bool  { return u.clock.wait(ready) }
func (u *roundTrip) SetTrailer(trailer map[string][]string) {
	u.e.Recording().SetTrailer(trailer)
}
func (u *roundTrip) Judge(status int) http.Header { return u.doubtInHeader(status) }
func (u *roundTrip) Cut() bool                    { return u.upstream.Cut() }

func (u *roundTrip) judge(f *forwarding) execution.Outcome {
	rec := &u.rec
	switch {
	case f.cut() && rec.Status() == http.StatusOK && u.headerCause == "" && u.heard != nil && u.q.h.understood(u.q.proves) &&
		isEvents(rec.Header().Get("Content-Type")) && u.heard.End().Meaning != protocol.Unanswered:
		// What was cut off behind the final answer of a stream says no more of the call.
	case f.Panicked != nil && rec.Status() == 0:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: u.orDeadline(f, execution.CauseNoAnswer)}
	case f.Panicked != nil, f.Err != nil && rec.Status() != 0:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: u.orDeadline(f, execution.CauseTruncated), Status: rec.Status()}
	case f.failed && f.NotSent:
		return execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent}
	case f.Err != nil:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: u.orDeadline(f, execution.CauseLost)}
	case rec.Interrupted():
		return execution.Outcome{Verdict: execution.InDoubt, Cause: u.orDeadline(f, execution.CauseInterrupted)}
	case rec.Status() == 0 && u.upstream.Silent():
		return execution.Outcome{Verdict: execution.InDoubt, Cause: u.orLeft(execution.CauseNoAnswer)}
	}
	trailer, whole := rec.Finish()
	o := execution.Outcome{Status: rec.Status(), Cause: execution.CauseStatus, Whole: whole}
	if !o.Whole {
		o.Verdict, o.Cause = execution.InDoubt, execution.CauseTruncated
		return o
	}
	if u.headerCause != "" { // P6: what the client was shown stays so; our own fields are in the header now
		o.Verdict, o.Cause = execution.InDoubt, u.headerCause
		return o
	}
	return u.outcomeOf(o, rec, trailer, u.upstream.Unframed())
}

// marks returns the guard's own fields of an answer. They are valid until it is called again.
func (x *Call) marks(status, checkpoint string) []answer.Field {
	fields := append(x.fields[:0],
		answer.Field{Name: HeaderExecutionID, Value: x.call.Scope.ID}, answer.Field{Name: HeaderExecutionStatus, Value: status})
	if checkpoint != "" {
		fields = append(fields, answer.Field{Name: headerExecutionCheckpoint, Value: checkpoint})
	}
	if a := x.call.Attempt; a != nil && a.Evidence != "" {
		fields = append(fields, answer.Field{Name: headerExecutionRecognized, Value: a.ID})
	}
	return fields
}

// outcomeOf completes the outcome o by an answer's status, header and trailer.
func (u *roundTrip) outcomeOf(o execution.Outcome, rec *answer.Recorder, trailer map[string][]string, unframed bool) execution.Outcome {
	var ruled bool
	o.Verdict, ruled = u.q.action.judge(o.Status, rec.Header(), trailer)
	if !ruled {
		o.Verdict = u.unmasked(o.Status, o.Verdict)
		switch {
		case u.heldUp:
			o.Verdict = execution.Released
		case u.neighbour == statusInDoubt || u.neighbour == StatusRefused && (o.Status == http.StatusConflict || refusedAsConflict(rec.Header())):
			o.Verdict = execution.InDoubt
		}
		if o.Verdict == execution.InDoubt {
			return o
		}
	}
	// A refusal is clear from its status, however its body ends.
	if unframed && o.Verdict == execution.Completed {
		o.Verdict, o.Cause = execution.InDoubt, execution.CauseUnframed
	}
	return o
}

// doubtInHeader judges an answer before its header is sent. If the call is in doubt already,
// whatever follows, it returns the fields that say so, and tells those attached.
func (u *roundTrip) doubtInHeader(status int) http.Header {
	rec := &u.rec
	for _, said := range rec.Header()[HeaderExecutionStatus] {
		if said == StatusRefused || said == statusInDoubt {
			u.neighbour = said
		}
	}
	for _, id := range rec.Header()[headerExecutionCheckpoint] {
		if id != u.own {
			u.undo.participant = id
		}
	}
	own := u.upstream.Status()
	u.heldUp = u.neighbour == StatusRefused && u.q.h.UpstreamIdentity != "" && (own == 0 || own == status) && problem.NothingSent(rec.Header(), u.q.call.Scope.ID)
	if u.q.action.GRPC == GRPCUnary && status == http.StatusOK && rec.Header().Get("Grpc-Status") == "" {
		return nil // the trailer says it
	}
	o := u.in.stillInDoubt(u.outcomeOf(execution.Outcome{Status: status, Cause: execution.CauseStatus}, rec, nil, u.upstream.Unframed()))
	if o.Verdict == execution.Released && u.heldUp {
		return http.Header{HeaderExecutionStatus: {StatusRefused}} // also for a gateway before this one
	}
	if o.Verdict != execution.InDoubt {
		return nil
	}
	u.headerCause = o.Cause
	u.e.Recording().Doubt()
	return u.q.doubtMarks()
}

// judge reads a whole answer. ruled reports that a rule of the configuration decided.
func (a *Action) judge(status int, header http.Header, trailer map[string][]string) (v execution.Verdict, ruled bool) {
	if a.Rule != nil {
		if v, ruled = a.Rule(status, header); ruled {
			return v, true
		}
	}
	if a.GRPC == GRPCUnary && status == http.StatusOK {
		return judgeGRPC(header, trailer), false
	}
	return a.Preset.Judge(execution.Answer{
		Status: status, RetryAfter: header.Get("Retry-After") != "", ShouldRetry: header.Get("Stripe-Should-Retry"),
	}), false
}

// refusedAsConflict reports that a guard behind this one refused a gRPC call with what is a 409
// in HTTP: its own record, perhaps of an execution, is in the way.
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

// unmasked is the verdict where a handler behind the guard may have replaced the upstream's
// status: a doubt stays a doubt (P6), and a refusal that only the handler shows frees no key
// (P1).
func (u *roundTrip) unmasked(status int, shown execution.Verdict) execution.Verdict {
	own := u.upstream.Status()
	if own == 0 || own == status {
		return shown
	}
	if said := u.q.action.Preset.Judge(u.upstream.Answer()); said == execution.InDoubt || shown == execution.Released {
		return said
	}
	return shown
}

func (u *roundTrip) orDeadline(f *forwarding, cause execution.Cause) execution.Cause {
	if f.overdue {
		return execution.CauseDeadline
	}
	return u.orLeft(cause)
}

func (u *roundTrip) orLeft(cause execution.Cause) execution.Cause {
	if context.Cause(u.clock.Context) == errLeft {
		return execution.CauseLeft
	}
	return cause
}

func (x *Call) outcomeLost(err error) {
	x.h.Logger.Error("the outcome of a call could not be recorded; it is in doubt",
		slog.Any("key", x.call.Key), slog.Any("error", err))
	if x.noted.status != statusInDoubt { // else it is reported already
		x.emit(EventInDoubt, map[string]any{"cause": string(execution.CauseUnrecorded), "status": 0})
	}
	x.note(statusInDoubt, "")
	x.noted.outcome, x.noted.cause = execution.InDoubt, execution.CauseUnrecorded
}

// errNotSent is the error of a call that could not be sent on two connections.
var errNotSent = errors.New("agent_guard: the upstream closed the connection before anything was sent")

// shorter is the part of its caller's time that a call may take: the outcome must be known before
// the caller gives up (cascade 3.3.1).
const shorter = 0.9

// atMost is most, or less where the caller's header says that it waits for less.
func atMost(most time.Duration, h http.Header) time.Duration {
	left, said := callersTime(h)
	if !said {
		return most
	}
	return min(most, time.Duration(float64(left)*shorter))
}

// headerRequestTimeout says how long the caller waits, in seconds or with a unit.
const headerRequestTimeout = "Request-Timeout"

// callersTime is how long the caller waits, by the first field that says so. Malformed values are
// ignored.
func callersTime(h http.Header) (time.Duration, bool) {
	if text := h.Get(headerRequestTimeout); text != "" {
		if d, ok := parseSeconds(text); ok {
			return d, true
		}
	}
	return ParseGRPCTimeout(h.Get("Grpc-Timeout"))
}

// longestTime keeps times within 64 bits of nanoseconds.
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

// clock is the context of a forwarded request and its time limit: a deadline, later the longest
// pause.
type clock struct {
	context.Context
	cancel context.CancelCauseFunc

	uncut func() bool // ends the watch over Engine.Uncut; nil for an unguarded request

	mu       sync.Mutex
	timer    *time.Timer   // nil once the clock was stopped
	at       time.Time     // when it is over
	idle     time.Duration // the longest pause; 0 where there is a deadline, or no limit
	begun    bool          // the answer has begun, and pauses count
	left     bool          // it runs out because nobody waits for the answer
	patience time.Duration // for how long readers may still be waited for
}

// start starts a clock that runs out after d. Its waits may stop it for d in total.
func (c *clock) start(parent context.Context, d time.Duration) {
	c.at, c.patience = time.Now().Add(d), d
	c.Context, c.cancel = context.WithCancelCause(parent)
	c.timer = time.AfterFunc(d, c.ring)
}

// errPaused ends an answer that paused for too long. Unlike a deadline it says nothing about the
// upstream's health: a stream may have nothing to send.
var errPaused = errors.New("agent_guard: nothing has come for too long")

// ring ends the request: its time is over.
func (c *clock) ring() {
	c.mu.Lock()
	cause := context.DeadlineExceeded
	if c.begun {
		cause = errPaused
	}
	if c.left {
		cause = errLeft
	}
	c.mu.Unlock()
	c.cancel(cause)
}

// leaves gives the request d from now at most, whatever comes: nobody waits for its answer.
func (c *clock) leaves(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left, c.idle = true, 0
	if time.Until(c.at) > d {
		c.restart(d)
	}
}

func (c *clock) overdue() bool {
	cause := context.Cause(c.Context)
	return cause == context.DeadlineExceeded || cause == errPaused
}

// stop ends the request without a passed deadline.
func (c *clock) stop() {
	c.mu.Lock()
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	c.mu.Unlock()
	c.cancel(context.Canceled)
	if c.uncut != nil {
		c.uncut()
	}
}

// Deadline implements context.Context. There is none where only pauses are limited.
func (c *clock) Deadline() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at, c.idle == 0 && !c.begun
}

// pausing replaces the deadline by the longest pause; not positive means none.
func (c *clock) pausing(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.begun = true; c.left {
		return
	}
	c.idle = max(idle, 0)
	if idle > 0 {
		c.restart(idle)
		return
	}
	if c.timer != nil {
		c.timer.Stop()
	}
}

// touch restarts the pause: something has arrived.
func (c *clock) touch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle > 0 {
		c.restart(c.idle)
	}
}

// restart gives the request d from now. A clock that has run out stays so.
func (c *clock) restart(d time.Duration) {
	if c.timer != nil && c.timer.Stop() {
		c.at = time.Now().Add(d)
		c.timer.Reset(d)
	}
}

// wait waits for ready while the clock stands still, since slow readers are not the upstream's
// fault. It reports whether ready came before the patience was used up.
func (c *clock) wait(ready <-chan struct{}) (came bool) {
	c.mu.Lock()
	if c.patience <= 0 || c.timer == nil || !c.timer.Stop() {
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
	if c.left {
		left = min(left, cancelTime)
	}
	c.at = time.Now().Add(left)
	if c.timer == nil {
		return false // it was stopped meanwhile
	}
	c.timer.Reset(left)
	return came
}

// failsOpen reports that the call may be forwarded unguarded instead of refused with err (P4):
// the route says `fail_open`, the store is unavailable, nothing is claimed for the call, and no
// earlier record was found.
func (x *Call) failsOpen(err error) bool {
	switch {
	case !x.h.FailOpen || x.found || x.h.Host.Exiting():
		return false
	case x.engine != nil && x.engine.Stopping != nil && x.engine.Stopping():
		return false
	case !x.proven && x.h.needsTokens(x.r, x.message):
		return false // whose call it is, is not known
	case x.unreadable != nil && x.body == nil:
		return false // what was read of its body is lost
	case x.policy != nil && x.policy.LedgerFirst && len(x.tokens.All) > 0:
		return false // its tokens are good for nothing before they stand in the ledger
	case x.engine == nil:
		// The store could not be opened. Where only the keys are refused, it may hold an earlier
		// call.
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
	x.note(statusUnguarded, problem.StoreUnavailable.Slug)
	if calls := x.h.failures.due(time.Now()); calls > 0 {
		x.h.Logger.Warn("the store is unavailable; calls are forwarded unguarded, and retries of them run again",
			slog.String("guard", x.h.Name), slog.Uint64("calls", calls), slog.Any("error", rootOf(cause)))
		x.emit(EventFailOpen, map[string]any{"calls": calls})
	}
	r := x.unguardedRequest()
	defer r.Body.Close()
	if x.engine == nil { // nobody reads the breakers' states, and the route wants it sent
		r = r.WithContext(withoutState(r.Context()))
	}
	return x.h.forwardInTime(mark(w, HeaderExecutionStatus, statusUnguarded), r, nil, next)
}

func (q *Request) unguardedRequest() *http.Request {
	q.r.Header.Del("Upgrade") // an unsafe method leaves HTTP nowhere (isTunnel)
	if q.body == nil {
		return q.r
	}
	r := q.r.WithContext(q.r.Context())
	r.Header = r.Header.Clone()
	q.body.PutInto(r)
	return r
}

func rootOf(err error) error {
	if p := (*problem.Problem)(nil); errors.As(err, &p) && p.Cause != nil {
		return p.Cause
	}
	return err
}

// reportEvery is the shortest time between two reports of calls forwarded unguarded.
const reportEvery = 10 * time.Second

// throttle limits how often something frequent is reported.
type throttle struct {
	unreported atomic.Uint64
	reported   atomic.Int64 // when, in Unix nanoseconds
}

// due counts one more. It returns how many to report now, or 0 if it is too early.
func (s *throttle) due(now time.Time) uint64 {
	s.unreported.Add(1)
	last := s.reported.Load()
	since := now.UnixNano() - last // negative where the clock was set back
	if last != 0 && since >= 0 && since < int64(reportEvery) || !s.reported.CompareAndSwap(last, now.UnixNano()) {
		return 0
	}
	return s.unreported.Swap(0)
}

// degrade answers a call that a breaker refused with the fallback, if there is one.
func (x *Call) degrade(w http.ResponseWriter, p *problem.Problem) (answered bool, err error) {
	if x.h.Fallback == nil || p.Kind() != problem.CircuitOpen {
		return false, nil
	}
	x.note(StatusRefused, p.Kind().Slug)
	x.action.Counts.Refused(p.Kind().Slug)
	w.Header().Set(HeaderExecutionID, x.call.Scope.ID)
	r := x.unguardedRequest()
	defer r.Body.Close()
	return true, x.h.Fallback.ServeHTTP(mark(w, HeaderExecutionStatus, StatusRefused), r)
}

// giveBack makes the body readable again for the site's error routes, which would otherwise
// forward the call without it.
func (q *Request) giveBack() {
	if q.body == nil || q.body.Size() == 0 {
		return
	}
	body := q.body.NewReader()
	q.r.Body = body
	context.AfterFunc(q.r.Context(), func() { _ = body.Close() })
}
