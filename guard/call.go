package guard

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/answer"
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

// Serve guards r and forwards it to next (docs/request.md). Calls that change nothing take its first step only. An
// error means that r was not answered; a StatusError has the status to answer with.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request, next Next) error {
	if IsOwn(r) {
		return next.ServeHTTP(w, r)
	}
	if h.Endpoint != nil && h.Endpoint(w, r) {
		return nil
	}
	h.keepEndToEnd(r.Header)
	action, as, err := h.classify(r)
	if err != nil {
		if p := (*problem.Problem)(nil); errors.As(err, &p) {
			h.Host.Note(r, "status", StatusRefused)
			h.Host.Note(r, "problem", p.Kind().Slug)
			h.refuseUnguarded(w, r, nil, p)
			return nil
		}
		return err
	}
	if as == classStream {
		w = mark(w, HeaderExecutionStatus, statusUnguarded)
	}
	if as != classGuarded {
		return h.pass(w, r, nil, next)
	}
	q, harmless, err := h.read(r, action)
	if harmless != nil {
		return q.pass(w, harmless, next)
	}
	x := &Call{Request: Request{guardedRequest: q, body: q.text}} // a guarded call may outlive its request
	defer x.close()
	if err != nil {
		if p := (*problem.Problem)(nil); errors.As(err, &p) {
			x.refuse(w, p)
			return nil
		}
		return err
	}
	if m := q.message; m != nil && (opens(m) || m.Method == "tools/list") &&
		h.rules.Guesses() && h.OneServer != nil && h.OneServer() {
		x.up.shown = new(bytes.Buffer)
	}
	x.up.q, x.up.in, x.up.client, x.up.undo = &x.Request, &x.in, &x.client, &x.capture
	x.up.upstream = h.Host.Upstream(next)
	x.w = answer.NewWriter(w, r)
	x.w.Host = h.Host
	outer := h.Host.Begin(r, x) // of the guard around this one
	defer func() {
		h.Host.Trace(r, x)
		if i := slices.Index(countedStatuses[:], x.noted.status); i >= 0 {
			h.Counts.calls[i].took(time.Since(x.began), callBounds[:])
		}
		x.noted.over = true
		if outer != nil { // else it stays, for the access log
			h.Host.Show(r, outer)
		}
	}()
	if err = x.run(); err == nil {
		return nil
	}
	return x.unanswered(w, next, err)
}

// unanswered ends a call that was not answered, with the problem that err is, by the fallback, or
// unguarded. It returns the error that remains.
func (x *Call) unanswered(w http.ResponseWriter, next Next, err error) error {
	x.leave()
	if x.failsOpen(err) {
		err = refusedByCircuit(x.forwardUnguarded(w, next, err), caller.Verified(x.call.Scope.Caller))
	}
	if p := (*problem.Problem)(nil); errors.As(err, &p) {
		x.recordRejection(p, &x.in.facts)
		if answered, err := x.degrade(w, p); answered {
			return err
		}
		x.refuse(w, p)
		return nil
	}
	if err != nil {
		x.giveBack()
	}
	return err
}

// pass forwards an unguarded request. Its tokens are verified all the same, also those of its
// message; m is nil without one.
func (h *Handler) pass(w http.ResponseWriter, r *http.Request, m *protocol.Message, next Next) error {
	err := h.verifySafe(r, m)
	if err == nil && h.UpstreamIdentity != "" {
		r, err = withTokensFor(h, r)
	}
	if err == nil {
		var l *resumer
		if l, r = h.listen(w, r); l != nil {
			defer l.close()
			w = l
		}
		err = h.passOn(w, r, m, next)
	}
	if err == nil {
		return nil
	}
	if p := (*problem.Problem)(nil); errors.As(err, &p) {
		h.refuseUnguarded(w, r, m, p)
		return nil
	}
	return err
}

// run takes a guarded call through its steps. A record that it finds may answer the call or send
// it back to the look-up; so does a claim that another call won.
func (x *Call) run() error {
	if err := x.start(); err != nil {
		return err
	}
	x.in.deadline = x.call.Deadline
	for {
		x.in = admission{deadline: x.in.deadline, facts: x.facts}
		if x.message != nil { // whose answer on a GET stream may be being recorded
			x.engine.running.wait(x.r.Context(), x.wait, string(x.call.Key[:]))
		}
		found, err := x.lookUp() // 3
		if err != nil {
			return err
		}
		x.state = found.State()
		then, err := x.answer(found)
		if errors.Is(err, execution.ErrTaken) || err == nil && then == stepLookUp {
			continue
		}
		if err != nil || then == stepDone {
			return err
		}
		if x.in, err = x.admit(found, x.in.deadline); err != nil { // 4
			return err
		}
		run, err := x.claim() // 5
		if errors.Is(err, execution.ErrTaken) {
			x.leave()
			x.found = true
			continue
		}
		if err != nil {
			return err
		}
		return x.execute(run) // 6, 7 and 8
	}
}

// Call is one guarded call. Its exported methods may be called by the goroutine that serves it, also after the call.
type Call struct {
	Request
	w answer.Writer

	up      roundTrip
	fields  [5]answer.Field // of the answer; see marks
	probing *probing        // the probe that this call makes
	in      admission       // of this round: the latest one, where no other call is faster

	permit   bulkhead.Permit // to send it
	gates    []func()        // give back what gates hold
	evidence callEvidence
	capture  capture

	state   execution.State // of the execution that was found; 0 without one
	carried carried         // by the commit of its outcome
	found   bool            // an execution of this id was met
	client  client          // that waits for its answer
	noted   noted
}

// noted holds what logs and matchers may read of a call.
type noted struct {
	status     string // empty until it is decided
	problem    string // the slug of a refusal
	outcome    execution.Verdict
	cause      execution.Cause
	created    time.Time // of the execution that is replayed
	checkpoint string    // of the execution that was found, or was claimed; empty without one
	over       bool
}

// start identifies the call (steps 1 and 2), and lists the client that waits for its answer.
func (x *Call) start() error {
	x.client.call = x
	c, err := x.identify(&x.client)
	x.Request = c
	a := c.call.Attempt
	if a != nil {
		x.w.Attempt = a
		if c.message != nil && !c.message.REST {
			x.w.Message = callMessage{&x.up}
		}
		if a.Evidence != "" {
			x.found = true // it must not run again unguarded
			x.action.Counts.Recognized(a.Evidence)
			x.emit(eventRecognized, nil)
		}
	}
	if err == nil && (x.client.leave != nil || x.action.OnLeave == OnLeaveCancel) {
		x.engine.clients.add(&x.client)
	}
	return err
}

// leave gives back what the call holds to be sent.
func (x *Call) leave() {
	x.permit.Release()
	for _, leave := range x.gates {
		leave()
	}
	x.gates = nil
}

func (x *Call) close() {
	x.leave()
	x.waitOver()
	x.probed()
	x.capture.window.Close()
	if x.body != nil {
		_ = x.body.Close()
	}
	if x.release != nil {
		x.release()
	}
}

// waitOver ends the wait of the client.
func (x *Call) waitOver() {
	if x.client.listed {
		x.engine.clients.remove(&x.client)
	}
	if x.call.Attempt != nil {
		x.call.Attempt.End()
	}
	if x.client.leave != nil {
		x.client.leave()
	}
}

// lookUp finds what runs or is recorded under the call's key.
func (q *Request) lookUp() (execution.Finding, error) {
	found, err := q.executions.LookUp(q.r.Context(), q.call.Key, q.call.Fingerprint)
	if err != nil {
		return found, q.storeFailed(err)
	}
	return found, nil
}

// step says how a call goes on after a recorded execution was found.
type step int

const (
	stepDone   step = iota // it is answered
	stepLookUp             // look again
	stepClaim              // admit and claim it, over what was found
)

// answer answers the call from its record, if there is one. After ErrTaken look it up again.
func (x *Call) answer(found execution.Finding) (step, error) {
	if found.Status == execution.Free {
		return stepClaim, nil
	}
	x.found = true
	if err := x.evidence.keepTokens(&x.Request, found); err != nil {
		return stepDone, err
	}
	switch found.Status {
	case execution.Mismatch:
		x.emit(EventMismatch, nil)
		return stepDone, problemOf(problem.FingerprintMismatch,
			"The host, the query, the media type or the body differ from the call that this id was first used for.", x.state)
	case execution.RunningHere, execution.RunningElsewhere:
		return x.attach(found)
	case execution.Replayable:
		return stepDone, x.replay(found)
	case execution.Doubtful:
		x.noted.checkpoint = found.Record.Checkpoint
		return x.doubt(found)
	case execution.ResultExpired:
		until := found.Record.Result.Expires.UTC().Format(time.RFC3339)
		return stepDone, problemOf(problem.ResultExpired, "The result was kept until "+until+".", x.state)
	case execution.RolledBack:
		return stepDone, problemOf(problem.RolledBack, "It was undone.", x.state)
	}
	return stepDone, unavailable()
}

func (x *Call) replay(found execution.Finding) error {
	result, err := x.executions.Result(x.r.Context(), x.call.Key, found)
	switch {
	case errors.Is(err, execution.ErrResultUnavailable):
		return unavailable()
	case err != nil:
		return x.storeFailed(err)
	}
	if x.call.Attempt != nil {
		x.call.Attempt.Completed(x.r.Context())
	}
	x.note("replayed", "")
	x.noted.outcome, x.noted.created = execution.Completed, result.Created
	x.action.Counts.Replayed()
	x.noted.checkpoint = found.Record.Checkpoint
	if result.Head.Status >= http.StatusBadRequest {
		if failed := x.recordedError(x.noted.checkpoint); failed != nil {
			result.Head.Header[ect.FieldName] = append(result.Head.Header[ect.FieldName], failed.raw)
		}
	}
	marks := append(x.marks("replayed", x.noted.checkpoint), answer.Field{Name: HeaderReplayed, Value: "true"})
	a := answer.Recorded(x.r.Context(), result)
	a.Reply = replyTo(x.message, false)
	return x.played(answer.Play(&x.w, x.r, a, marks...))
}

// attach follows an execution that is running, here or on another node.
func (x *Call) attach(found execution.Finding) (step, error) {
	if x.r.Header.Get(headerExecutionParent) == x.call.Scope.ID {
		x.h.Logger.Warn("a call has come back to the guard that runs it; give the guards of a chain different names",
			slog.Any("key", x.call.Key), slog.String("guard", x.h.Name))
		return stepDone, problemOf(problem.InProgress, "It has come back to the guard that runs it.", execution.StateSending)
	}
	flight, follower := x.executions.Follow(x.call.Key, found)
	if flight == nil {
		return stepDone, problemOf(problem.InProgress, "It runs on another node.", execution.StateSending)
	}
	if follower == nil {
		select {
		case <-flight.Done():
			return stepLookUp, nil
		default:
			return stepDone, problemOf(problem.ResultUnavailable,
				"The call is running; its answer is too large to be kept.", execution.StateSending)
		}
	}
	defer follower.Close()

	ctx, cancel := context.WithDeadline(x.r.Context(), x.wait)
	head, err := follower.Head(ctx)
	cancel()
	switch {
	case errors.Is(err, execution.ErrNoAnswer):
		return x.followedInVain(flight)
	case x.r.Context().Err() != nil:
		return stepDone, x.gone()
	case err != nil:
		return stepDone, problemOf(problem.InProgress, "An earlier attempt has not answered yet.", execution.StateSending)
	}
	x.note("attached", "")
	x.action.Counts.Attached()
	status, a := "attached", answer.Following(x.r.Context(), head, follower)
	if follower.Doubtful() { // head has the rest of what its owner gets
		status, a.Shows = statusInDoubt, http.StatusInternalServerError
	}
	a.Reply = replyTo(x.message, true)
	err = answer.Play(&x.w, x.r, a, x.marks(status, flight.Checkpoint())...)
	if err != nil && !x.w.Sent() {
		return x.followedInVain(flight)
	}
	if err != nil && x.sayDoubt(flight) {
		return stepDone, nil
	}
	return stepDone, x.played(err)
}

// sayDoubt ends a stream of events that breaks off, with the problem as the response to the message of x, where the
// call is in doubt: its client could not resume it, and would wait for a response until its own timeout.
func (x *Call) sayDoubt(flight *execution.Flight) bool {
	if replyTo(x.message, true) == nil || x.message.ID == nil || !isEvents(x.w.Header().Get("Content-Type")) {
		return false
	}
	select {
	case <-flight.Done():
	case <-x.r.Context().Done():
		return false
	}
	if flight.Ending() != execution.EndedInDoubt {
		return false
	}
	_, err := x.followedInVain(flight)
	p := (*problem.Problem)(nil)
	if !errors.As(err, &p) {
		return false
	}
	p.ExecutionID = x.call.Scope.ID
	p.Known(x.state.String(), false)
	p.Mount = x.h.Host.Mount(x.r)
	x.note(statusInDoubt, p.Kind().Slug)
	w := &documentWriter{header: http.Header{}}
	body := messageProblem(w, p, x.message, x.action.InDoubtAs == InDoubtToolResult)
	_, _ = fmt.Fprintf(&x.w, "\n\nevent: message\ndata: %s\n\n", body) // never fails
	x.w.Release()
	return true
}

// followedInVain goes on with a call that got no answer from the execution it followed. If that
// was released unsent, one of the waiting calls may run. If it is in doubt, none may: on_unknown
// is for later calls only, or each waiting call would run.
func (x *Call) followedInVain(flight *execution.Flight) (step, error) {
	select {
	case <-flight.Done():
	default:
		return stepLookUp, nil
	}
	if flight.Ending() != execution.EndedInDoubt {
		return stepLookUp, nil
	}
	found, err := x.lookUp()
	if err != nil {
		return stepDone, err
	}
	x.state = found.State()
	cause := execution.CauseUnrecorded
	if found.Status == execution.Doubtful {
		cause = found.Record.Cause
	}
	return stepDone, x.inDoubt(cause)
}

func (x *Call) played(err error) error {
	switch {
	case err == nil:
		return nil
	case x.w.Sent():
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return unavailable()
}

func (x *Call) doubt(found execution.Finding) (step, error) {
	switch x.action.OnUnknown {
	case OnUnknownRetry:
		return stepClaim, nil
	case OnUnknownResend:
		return x.resend(found)
	case OnUnknownProbe:
		return x.probe(found)
	}
	return stepDone, x.inDoubt(found.Record.Cause)
}

// resend sends a call in doubt again, to an upstream that answers a repeated key from its record: with that key and the
// same bytes, and only while the upstream keeps the key. After that the call is in doubt as before (P1).
func (q *Request) resend(found execution.Finding) (step, error) {
	age, err := q.executions.Age(q.r.Context(), found)
	if err != nil {
		return stepDone, q.storeFailed(err)
	}
	if q.call.Sent == [32]byte{} || q.call.Sent != found.Record.Sent || age < 0 || age >= time.Duration(q.action.ResendFor) {
		p := q.inDoubt(found.Record.Cause)
		p.RetryHelps = false
		return stepDone, p
	}
	return stepClaim, nil
}

// probe settles a call in doubt by asking the upstream. Of concurrent retries one asks; the others use its answer.
func (x *Call) probe(found execution.Finding) (step, error) {
	probe, first := x.h.probes.enter(x.call.Key)
	if !first {
		select {
		case <-probe.over:
		case <-x.r.Context().Done():
			return stepDone, x.gone()
		}
		if probe.doubt {
			return stepDone, x.inDoubt(found.Record.Cause)
		}
		return stepLookUp, nil
	}
	x.probing = probe
	// It may have been settled since it was found.
	now, err := x.lookUp()
	if err == nil {
		x.state = now.State()
	}
	if err != nil || now.Status != execution.Doubtful {
		x.probed()
		return stepLookUp, err
	}
	next, err := x.settleDoubt(now)
	if next == stepDone && err == nil {
		probe.doubt = true
		err = x.inDoubt(now.Record.Cause)
	}
	if next != stepClaim { // those who wait must find the claim
		x.probed()
	}
	return next, err
}

// probed wakes the retries that wait for this call's probe.
func (x *Call) probed() {
	if x.probing != nil {
		x.h.probes.leave(x.call.Key, x.probing)
		x.probing = nil
	}
}

// admission is a call that may begin, if its claim finds that nothing holds it up since.
type admission struct {
	*rollback.Admission
	found    execution.Finding // of its key
	earlier  execution.Cause   // why the attempt before this one is in doubt; empty without one
	before   string            // the checkpoint of that attempt, if it has one
	people   store.Fence       // what people hold
	planned  planned
	deadline time.Duration // the longest that the execution may take
	facts    evidence.Call // what the ledger will record of it
}

// admit refuses a call that must not begin now, before anything is recorded, and prepares its claim. The admission must
// be left when the claim's commit has ended. A refused call may have been executed before. The call may take the time
// left at most.
func (x *Call) admit(found execution.Finding, left time.Duration) (admission, error) {
	in := admission{found: found, deadline: left, facts: x.facts}
	if err := x.tokens.inTime(); err != nil {
		return in, err // nothing new begins with them
	}
	if found.Status == execution.Doubtful && x.probing == nil { // which has not denied it
		in.earlier, in.before = found.Record.Cause, found.Record.Checkpoint
	}
	if err := x.admitted(&in); err != nil {
		x.probed()
		return in, in.refusedInDoubt(err)
	}
	return in, nil
}

func (x *Call) admitted(in *admission) error {
	q := &x.Request
	if err := q.enter(in); err != nil { // nothing is read for a call that is refused here
		return err
	}
	in.Leave()
	var err error
	if q.facts.Workflow != "" {
		if in.planned, err = findNode(q, &in.facts); err != nil {
			return err
		}
	}
	ranked := q.action.Order == OrderPar || in.planned.plan != nil
	if ranked {
		if err := ordered(q, in); err != nil {
			return err
		}
		if in.planned.plan != nil && in.planned.node >= 0 {
			in.facts.Node = in.planned.plan.Nodes[in.planned.node].ID
		}
		in.deadline = min(in.deadline, constrainNode(q, in.planned.binds()))
	}
	if err := q.circuitsOpen(); err != nil {
		return err
	}
	if a := approvalOf(q, &in.planned); a != nil {
		if _, err := x.evidence.reviewTokens(q); err != nil { // a used token asks no person (C-6.1-a)
			return err
		}
		if err := q.approved(a, in); err != nil {
			return err
		}
	}
	if x.gates, err = q.pass(x.h.Gates); err != nil {
		return err
	}
	if err := permitted(q, in, &x.permit); err != nil {
		return err
	}
	if err := x.capture.planUndo(q, in); err != nil {
		return err
	}
	err = q.enter(in) // rollbacks wait for calls between here and the end of the claim, so these must not wait
	if err == nil && ranked {
		if err = ordered(q, in); err != nil {
			in.Leave()
		}
	}
	return err
}

// enter admits a call that would claim (step 4): not where people hold its workflow or a rollback has ended it, nor
// where it follows from what is being undone. The admission is left when the claim's commit has ended.
func (q *Request) enter(in *admission) error {
	workflow := q.facts.Workflow
	if q.policy == nil { // this configuration has no identity, and another one had
		workflow = evidence.WorkflowID(q.call.Workflow)
	}
	var c *rollback.Coordinator
	if find := q.engine.Coordinator; find != nil {
		c = find()
	}
	if c != nil {
		scope := workflow
		if scope == "" && in.found.Record != nil && in.found.Record.Checkpoint != "" {
			root, err := q.engine.Checkpoints.First(q.r.Context(), in.found.Record.Checkpoint)
			if err != nil {
				return q.storeFailed(err)
			}
			scope = rollback.AttemptsScope(root)
		}
		var err error
		in.Admission, err = c.Enter(q.r.Context(), scope, q.ancestors(scope, in))
		blocked := (*rollback.BlockedError)(nil)
		switch {
		case err == nil:
		case !errors.As(err, &blocked):
			return q.storeFailed(err)
		case blocked.Stopped: // for good, whatever people say
			return problemOf(problem.WorkflowStopped,
				"A rollback of the whole workflow has ended it. Nothing was forwarded.", 0)
		default:
			return problemOf(problem.WorkflowPaused, "What the call follows from is being rolled back. Nothing was forwarded.", 0)
		}
	}
	if q.engine.Escalations == nil || workflow == "" {
		return nil
	}
	e, passed, err := q.engine.Escalations.Blocks(q.r.Context(), workflow)
	if e != nil || err != nil {
		in.Leave()
		return q.heldBy(e, err)
	}
	in.people = passed
	return nil
}

// heldBy refuses a call whose workflow an escalation holds, or may hold (P4).
func (q *Request) heldBy(e *hitl.Escalation, err error) error {
	if err != nil {
		return q.storeFailed(err)
	}
	p := problemOf(problem.WorkflowPaused,
		"A person has to look at the workflow before it goes on. Nothing was forwarded.", 0)
	p.RetryAfter = decisionRetry
	if e.Level == hitl.Stop {
		p = problemOf(problem.WorkflowStopped, "The workflow is stopped until a person resumes it. Nothing was forwarded.", 0)
	}
	p.EscalationID = e.ID
	return p
}

const (
	// decisionRetry is when a call that waits for a person may come again.
	decisionRetry = 30 * time.Second
	// approvalTime is the time to decide where none is configured.
	approvalTime = 24 * time.Hour
	// maxWaiting is how many calls of a caller may wait for people.
	maxWaiting = 100
	// maxShownBody is how much of a body people are shown.
	maxShownBody = 4 << 10
)

// approved refuses a call for which people are asked first, until they have approved this very
// request. The approval is good for the request and its execution id, and for the time to decide
// once more, but for no longer than its key is kept: so a key that is free has not run since.
func (q *Request) approved(a *Approve, in *admission) error {
	all, ctx := q.engine.Escalations, q.r.Context()
	sum := sha256.New()
	for _, part := range [][]byte{q.call.Key[:], q.call.Fingerprint[:], []byte(in.earlier), []byte(in.before)} { // another attempt needs an approval of its own
		_, _ = sum.Write(part) // never fails
	}
	hash := "sha-256:" + hex.EncodeToString(sum.Sum(nil))
	e, err := all.Find(ctx, "call "+hash)
	if errors.Is(err, hitl.ErrNotFound) {
		e, err = q.askPeople(a, in, hash)
	}
	if err != nil {
		return q.storeFailed(err)
	}
	now, err := q.engine.Store.Now(ctx)
	if err != nil {
		return q.storeFailed(err)
	}
	within := cmp.Or(time.Duration(a.Within), approvalTime) // to decide, and then to use the approval
	refused, keep := problemOf(problem.ApprovalDenied, "A person has denied this call.", 0), time.Duration(0)
	switch {
	case e.Status == hitl.Pending:
		keep = 2 * within
		refused = problemOf(problem.ApprovalRequired,
			"The call waits until a person has approved it. Nothing was forwarded.", 0)
		refused.RetryAfter = decisionRetry
	case e.Status == hitl.Approved && now.Before(e.Decisions[len(e.Decisions)-1].At.Add(min(within, q.call.KeepKey))):
		if f := &in.facts; e.Resolution != "" && f.Workflow != "" && len(f.Parents) < ect.MaxParents && !slices.Contains(f.Parents, e.Resolution) {
			f.Parents = append(slices.Clip(f.Parents), e.Resolution) // what follows from the decision
		}
		return nil
	case e.Status == hitl.Approved:
		refused.Detail = "The call was approved, and not made in time."
	case e.Status == hitl.Expired:
		refused.Detail = "Nobody has approved the call in time."
	}
	if attempt := q.call.Attempt; attempt != nil {
		attempt.Asked(keep)
	}
	refused.EscalationID = e.ID
	return refused
}

// askPeople opens the escalation of a call that waits for an approval.
func (q *Request) askPeople(a *Approve, in *admission, hash string) (hitl.Escalation, error) {
	ctx, name, what := q.r.Context(), q.call.Scope.Caller, "A call of the action "+strconv.Quote(q.action.Name)
	if n := in.planned.binds(); n != nil {
		what += ", the node " + strconv.Quote(n.ID) + " of its workflow's plan,"
	}
	requester := cmp.Or(q.h.Callers.Operator(q.r, name), name)
	full, err := q.engine.Escalations.Waits(ctx, requester, maxWaiting)
	if err != nil {
		return hitl.Escalation{}, err
	}
	if full {
		return hitl.Escalation{}, problemOf(problem.QuotaExceeded, fmt.Sprintf("%d calls of the caller wait for approvals, at most so many.", maxWaiting), 0)
	}
	named := ""
	if caller.Verified(name) {
		named = requester
	}
	shown := new(strings.Builder)
	method, target := q.h.Host.Original(q.r)
	fmt.Fprintf(shown, "%s %s%s\n", method, q.call.Host, target.RequestURI())
	if _, err := io.Copy(shown, io.NewSectionReader(q.body, 0, maxShownBody)); err != nil {
		return hitl.Escalation{}, unkept(err)
	}
	if left := q.body.Size() - maxShownBody; left > 0 {
		fmt.Fprintf(shown, "\n(%d more bytes)", left)
	}
	workflow := q.facts.Workflow
	if q.policy == nil {
		workflow = evidence.WorkflowID(q.call.Workflow)
	}
	return q.engine.Escalations.Open(ctx, hitl.Opening{
		Key: "call " + hash, Level: hitl.Approval, Cause: hitl.CauseCall, Workflow: workflow, Caller: named, Requester: requester,
		Summary:  what + " waits for an approval.",
		Links:    hitl.Links{Checkpoint: in.before},
		Proposal: hitl.Proposal{Kind: hitl.RunCall, Text: shown.String(), RequestHash: hash},
		Role:     a.Role, Quorum: a.Quorum, Within: cmp.Or(time.Duration(a.Within), approvalTime),
	})
}

// claim makes this call the owner of its key, in one commit with its checkpoint (P2). After
// execution.ErrTaken look the key up again.
func (x *Call) claim() (run *execution.Execution, err error) {
	in := &x.in
	defer in.Leave()
	defer x.probed()
	x.noted.checkpoint = ""
	call := x.call
	call.Deadline = in.deadline
	parts, err := x.claimed(x.h.Parts)
	var batch *store.Batch
	if err == nil && x.policy != nil {
		batch, err = x.recordCall(in)
		call.Checkpoint = x.evidence.call.Checkpoint
	}
	if err == nil {
		bound := store.Bind(batch, in.Fence(), in.people, in.planned.fence)
		write := written(&x.Request, false, in.deadline)
		run, err = x.executions.Claim(x.r.Context(), &call, in.found, bound, x.capture.pending, write, parts)
		if errors.Is(err, store.ErrFenced) {
			err = execution.ErrTaken // as after another call's: look again
		}
		err = x.evidence.callRecorded(&x.Request, batch, x.capture.ended(err))
	} else {
		err = x.capture.ended(parts.Done(err))
	}
	if err == nil && x.probing != nil { // the probe has said that it was not applied
		x.resolved(execution.Released, execution.ByProbe)
	}
	if err == nil {
		x.noted.checkpoint = call.Checkpoint
		return run, nil
	}
	if over := (*execution.QuotaError)(nil); errors.As(err, &over) {
		err = overQuota(over)
	} else if !errors.Is(err, execution.ErrTaken) {
		err = x.storeFailed(err)
	}
	return nil, in.refusedInDoubt(err)
}

// execute forwards the claimed call, records its outcome and releases the end of the answer. A
// client that leaves stops none of it (P7).
func (x *Call) execute(e *execution.Execution) error {
	x.note("executed", "")
	x.state = 0 // the record that was found has been replaced
	x.action.Counts.Begun()
	x.engine.running.begin(x.noted.checkpoint)
	x.engine.detach(&x.up.clock, x.r.Context(), x.in.deadline)
	if x.client.listed {
		x.engine.clients.left(x.call.Key, &x.client)
	}
	defer x.up.clock.stop()

	ended := false
	defer func() {
		if !ended { // a panic of our own: nothing is proven
			if x.up.rec.Apart() { // else it would write after the handler has returned
				over, cancel := context.WithCancel(context.Background())
				cancel()
				x.up.rec.Drain(over)
			}
			_ = x.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseInterrupted}, nil)
			x.action.Counts.Settled(execution.InDoubt)
		}
	}()
	x.permit.Sent()
	f := x.forward(e)
	byHTTP := x.up.judge(&f)
	outcome := x.in.stillInDoubt(x.up.understand(byHTTP))
	outcome.Upstream = f.FailedAt
	x.leave()         // the upstream has done its part
	x.up.clock.stop() // readers have all the time that they need
	failed(&x.Request, outcome)
	if x.up.heard != nil && outcome.Verdict == execution.InDoubt {
		outcome.Task = x.up.heard.End().Task
	}
	x.noted.outcome = outcome.Verdict
	if outcome.Whole && !f.cut() {
		x.showed(x.up.shown, x.up.rec.Status(), x.up.rec.Header())
	}
	err := x.settle(e, outcome, x.up.rec.Header())
	ended = true
	x.h.Counts.added.took(time.Since(x.began)-x.sent-x.up.apart, addedBounds[:])
	x.countEnd(outcome, err)
	if outcome.Verdict == execution.InDoubt {
		x.doubted(outcome)
	}
	if outcome.Cause == execution.CauseElsewhere && err == nil {
		x.engine.elsewhere.add(x, e.Claim(), byHTTP)
	}
	return x.finish(&f, outcome, err)
}

// forward sends the call to the next handler, and once more where the connection had gone stale
// and provably no byte was sent.
func (x *Call) forward(e *execution.Execution) forwarding {
	if x.h.restores() {
		defer x.engine.Writes.write(x.place(), x.capture.window)()
	}
	x.up.e, x.up.own = e, x.noted.checkpoint
	e.Recording().SetPace(x.up.clock.wait)
	if x.tokens.Issuer() != "" && x.policy != nil {
		x.w.HoldFailures = maxHeldFailure
	}
	x.up.rec = answer.NewRecorder(&x.w, &x.up, x.marks("executed", x.noted.checkpoint))
	rec := &x.up.rec
	for again := false; ; again = true {
		r := x.request(x.up.upstream.Begin(&x.up.clock))
		sent := time.Now()
		done := x.up.upstream.Forward(rec, r)
		x.up.apart += time.Since(sent)
		f := forwarding{done, done.Err != nil || rec.Interrupted(), x.up.clock.overdue()}
		if again || f.Panicked != nil || rec.Status() != 0 || !f.failed || !f.Again {
			return f
		}
		rec.Reset()
	}
}

// request is the request to forward: the call's own, with the body that was read and this
// execution as the parent of what it causes.
func (x *Call) request(ctx context.Context) *http.Request {
	to := &forwardedContext{
		Context: ctx, forwarder: forwarder{x.h.Name, forwarderOf(ctx)},
		evidence: Evidence{Checkpoint: x.noted.checkpoint, Workflow: x.facts.Workflow},
		patience: time.Duration(x.action.Deadline), patient: x.in.deadline < time.Duration(x.action.Deadline),
		handed: x.tokens.Own,
		target: *x.r.URL, // which inner handlers rewrite, and may have to once more
		parent: [1]string{x.call.Scope.ID}, workflow: [1]string{x.call.Workflow},
	}
	if x.message != nil && x.h.understood(x.proves) { // else breakers hear from HTTP alone
		to.message = x.message
	}
	r := x.r.WithContext(to)
	r.URL = &to.target
	r.Header = x.r.Header.Clone()
	r.Header.Del("Upgrade") // what is guarded stays HTTP (isTunnel)
	r.Header.Del(HeaderExecutionID)
	r.Header[headerExecutionParent] = to.parent[:]
	if x.call.Workflow != "" {
		r.Header[HeaderWorkflowID] = to.workflow[:]
	}
	var message []byte // in the place of the body
	if x.evidence.forwarded != nil {
		if len(x.tokens.All) > 0 {
			message = x.tokens.sendOn(x.policy, r.Header, x.h.UpstreamIdentity, x.evidence.forwarded.Parents())
		}
		r.Header.Add(ect.FieldName, x.evidence.forwarded.Raw())
	}
	if n := x.in.planned.binds(); n != nil && n.Hints != (plan.Hints{}) {
		r.Header.Set(headerResourceHints, n.Hints.String())
	}
	answer.NarrowEncoding(r.Header)
	if x.capture.decision.ReadsAnswer() || x.message != nil {
		r.Header.Set("Accept-Encoding", "identity")
	}
	x.body.PutInto(r)
	if message != nil {
		_ = r.Body.Close()
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(message)), int64(len(message))
	}
	return r
}

// settle records the outcome of the execution and its evidence in one commit.
func (x *Call) settle(e *execution.Execution, o execution.Outcome, answer http.Header) error {
	defer x.engine.running.end(x.noted.checkpoint)
	ctx := context.Background()
	result := x.capture.undoable(ctx, x, o, answer)
	batch := x.outcomeEvents(ctx, o, answer, false)
	x.carried.x, x.carried.outcome = x, o
	if errs := answer[ect.FieldName]; len(errs) > 0 { // the rest is the recorder's
		x.carried.answer = http.Header{ect.FieldName: errs}
	}
	err := e.SettleWith(ctx, o, &x.carried, batch, result, written(&x.Request, true, 0), x.settled(ctx, x.h.Parts, o))
	if err != nil {
		x.evidence.failed = nil // it was not recorded
	}
	return err
}

// countEnd counts the end of the execution; one that could not be recorded is in doubt.
func (q *guardedRequest) countEnd(o execution.Outcome, unrecorded error) {
	if unrecorded != nil {
		o.Verdict = execution.InDoubt
	}
	q.action.Counts.Settled(o.Verdict)
}

// doubted reports the doubt to operators, who have to find out.
func (x *Call) doubted(o execution.Outcome) {
	x.note(statusInDoubt, "")
	x.noted.cause = o.Cause
	x.emit(EventInDoubt, map[string]any{"cause": string(o.Cause), "status": o.Status})
	x.h.Logger.Warn("a call is in doubt", slog.Any("key", x.call.Key), slog.String("guard", x.h.Name),
		slog.String("action", x.action.Name), slog.String("cause", string(o.Cause)), slog.Int("status", o.Status))
}

func (x *Call) finish(f *forwarding, o execution.Outcome, unrecorded error) error {
	switch {
	case f.Panicked != nil:
		x.drain(f)
		panic(f.Panicked)
	case unrecorded != nil:
		x.outcomeLost(unrecorded)
		if x.w.Sent() {
			x.abort(f)
		}
		x.up.rec.Reset()
		return x.inDoubtAnswer(execution.CauseUnrecorded)
	case o.Whole && !f.cut():
		x.showFailure(x.up.rec.Header())
		return x.releaseEnd(f, o)
	}
	if x.w.Sent() || x.up.rec.Waits() { // no handler that forwards shows the client an answer in place of a cut one
		x.abort(f)
	}
	x.up.rec.Reset()
	if o.Verdict == execution.Released {
		x.w.Header().Del(HeaderExecutionStatus)
		x.note(StatusRefused, "")
		if f.Err == nil {
			f.Err = &StatusError{Status: http.StatusBadGateway, Err: errNotSent}
		}
		x.showFailure(x.w.Header())
		return x.notSent(f)
	}
	return x.inDoubtAnswer(o.Cause)
}

// releaseEnd sends the held end of the answer, once the client has the rest.
func (x *Call) releaseEnd(f *forwarding, o execution.Outcome) error {
	shows := 0
	if o.Internal || o.Verdict == execution.InDoubt { // ADR 0070
		shows = http.StatusInternalServerError
	}
	if x.up.rec.Apart() {
		x.engine.readers.enter()
		defer x.engine.readers.leave()
	}
	if !x.up.rec.Release(x.engine.Waits, shows) {
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return nil
}

// drain sends the client what has arrived of an answer without an end. Its connection must be aborted then.
func (x *Call) drain(f *forwarding) {
	if x.up.rec.Apart() {
		x.engine.readers.enter()
		defer x.engine.readers.leave()
	}
	x.up.rec.Drain(x.engine.Waits)
}

func (x *Call) abort(f *forwarding) {
	x.drain(f)
	panic(http.ErrAbortHandler)
}

func (x *Call) inDoubtAnswer(cause execution.Cause) error {
	x.w.Header().Del(HeaderExecutionStatus)
	return x.inDoubt(cause)
}
