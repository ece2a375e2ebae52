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
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/answer"
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
	x := spareCalls.Get().(*Call)
	q, harmless, err := h.read(x, r, action)
	x.guardedRequest = q
	if harmless != nil {
		defer func() {
			*x = Call{}
			spareCalls.Put(x)
		}()
		return h.passMessage(w, x, harmless, next)
	}
	if err != nil {
		defer x.close()
		if p := (*problem.Problem)(nil); errors.As(err, &p) {
			x.refuse(w, p)
			return nil
		}
		return err
	}
	if m := q.message; m != nil && (opens(m) || m.Method == "tools/list") &&
		h.rules.Guesses() && h.OneServer != nil && h.OneServer() {
		x.shown = new(bytes.Buffer)
	}
	x.upstream = h.Host.Upstream(next)
	x.w = answer.NewWriter(w, r)
	x.w.Alarms, x.w.Host, x.clock.alarms = &h.alarms, h.Host, &h.alarms
	x.noted.outer = h.Host.Begin(r, x)
	defer func() {
		h.Host.Trace(r, x)
		if i := slices.Index(countedStatuses[:], x.noted.status); i >= 0 {
			h.Counts.calls[i].took(time.Since(x.began), callBounds[:])
		}
		x.noted.over = true
		if x.noted.outer != nil { // else it stays, for the access log
			h.Host.Show(r, x.noted.outer)
		}
		x.close()
	}()
	if err = x.run(); err == nil {
		return nil
	}
	return x.unanswered(w, next, err)
}

// spareCalls are those of messages that passed. A guarded call may outlive its request.
var spareCalls = sync.Pool{New: func() any { return new(Call) }}

// unanswered ends a call that was not answered, with the problem that err is, by the fallback, or
// unguarded. It returns the error that remains.
func (x *Call) unanswered(w http.ResponseWriter, next Next, err error) error {
	x.permit.Release()
	if x.failsOpen(err) {
		err = refusedByCircuit(x.forwardUnguarded(w, next, err), caller.Verified(x.call.Scope.Caller))
	}
	if p := (*problem.Problem)(nil); errors.As(err, &p) {
		x.recordRejection(p)
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
	if err := x.open(x.h); err != nil {
		return err
	}
	if err := x.prepare(); err != nil { // 1 and 2
		return err
	}
	for {
		if x.message != nil { // whose answer on a GET stream may be being recorded
			x.engine.running.wait(x.r.Context(), x.wait, string(x.call.Key[:]))
		}
		found, err := x.lookUp() // 3
		if err != nil {
			return err
		}
		then, err := x.answer(found)
		if errors.Is(err, execution.ErrTaken) || err == nil && then == stepLookUp {
			continue
		}
		if err != nil || then == stepDone {
			return err
		}
		in, err := x.admit(found) // 4
		if err != nil {
			return err
		}
		run, err := x.claim(found, in) // 5
		if errors.Is(err, execution.ErrTaken) {
			x.permit.Release()
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
	guardedRequest
	apart time.Duration // of the time since it began, for the request's body and at the upstream
	w     answer.Writer

	upstream   Upstream
	engine     *Engine
	executions *execution.Guard
	release    func() // of the engine; taken over by who works on after the answer
	clock      clock  // of the forwarded call
	rec        answer.Recorder
	sink       callSink        // what rec feeds
	fields     [5]answer.Field // of the answer; see marks
	body       *body.Spool
	shown      *bytes.Buffer    // what may show that; nil where nothing can
	heard      *protocol.Answer // to the message; nil where only HTTP says what it means
	call       execution.Call
	wait       time.Time       // when a retry stops waiting for a running execution
	probing    *probing        // the probe that this call makes
	earlier    execution.Cause // why the attempt before this one is in doubt; empty without one
	before     string          // the checkpoint of that attempt, if it has one

	permit   bulkhead.Permit // to send it
	evidence callEvidence
	capture  capture
	window   *writeWindow // in which nobody else must change what is restored; nil without
	verified bool         // its tokens, or that it needs none

	state       execution.State // of the execution that lookUp has found; 0 without one
	stays       bool            // its doubt stays, though on_unknown would have it sent again
	doubtful    bool            // it was forwarded, and is in doubt
	headerCause execution.Cause // of the doubt that the header of its answer shows; empty without one
	heldUp      bool            // the next gateway has, before it sent anything (ADR 0099)
	carried     carried         // by the commit of its outcome
	found       bool            // an execution of this id was met
	client      client          // that waits for its answer
	noted       noted
}

// guardedRequest is the request of a guarded call with what its message says. Handler.read makes it; it never changes.
type guardedRequest struct {
	h          *Handler
	r          *http.Request
	began      time.Time
	action     *Action            // that the request, or its message, belongs to
	message    *protocol.Message  // that the body is, or that changes something in its batch; nil for any other call
	unreadable error              // why the body could not be read as a message
	proves     proof              // that the server speaks the protocol, where nobody has configured it
	cancels    []protocol.Message // of the body, where one cancels another request; else nil
}

// noted holds what logs and matchers may read of a call.
type noted struct {
	status  string // empty until it is decided
	problem string // the slug of a refusal
	outcome execution.Verdict
	cause   execution.Cause
	created time.Time // of the execution that is replayed

	outer *Call // of the guard around this one
	over  bool
}

// open takes a reference to the engine, unless x has it; a running execution keeps it. It is called
// again where a step before the first could do without.
func (x *Call) open(h *Handler) error {
	if x.engine == nil {
		e, release, err := h.Open()
		if err != nil {
			return StoreClosed(err)
		}
		x.engine, x.executions, x.release = e, e.Executions, release
	}
	var err error
	if x.evidence.policy, err = h.Tokens(); err != nil {
		return StoreClosed(err)
	}
	return nil
}

func (x *Call) close() {
	x.permit.Release()
	x.waitOver()
	x.probed()
	x.window.Close()
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

// prepare identifies the call that the request makes. Nothing is recorded yet.
func (x *Call) prepare() error {
	var err error // 1
	if x.evidence.tokens, err = x.h.VerifyTokens(x.evidence.policy, x.r, x.message, x.h.RequireECT); err != nil {
		return err
	}
	x.verified = true
	name, err := x.h.Callers.Of(x.r, x.evidence.tokens.Issuer(), x.executions.Keyed)
	if err != nil {
		return err
	}
	fp, members, err := x.fingerprint() // 2
	if err != nil {
		return err
	}
	x.client.call, x.client.gone = x, x.r.Context()
	if m := x.message; m != nil && m.Protocol == protocol.MCP && m.ID != nil && len(m.ID) <= execution.MaxID {
		x.client.name, x.client.id = x.h.requestName(x.r, name, m.ID), m.ID
		x.client.session = x.h.sessionOf(x.executions, x.r)
		x.client.gone, x.client.leave = context.WithCancel(x.client.gone)
	}
	if x.call, err = x.describe(name, fp, members); err != nil {
		return err
	}
	if x.client.leave != nil || x.action.OnLeave == OnLeaveCancel {
		x.engine.clients.add(&x.client, x.call.Key)
	}
	if a := x.call.Attempt; a != nil && a.Evidence != "" {
		x.emit(eventRecognized, nil)
	}
	x.wait = time.Now().Add(time.Duration(x.h.AttachWait))
	if err := x.begin(); err != nil {
		return err
	}
	x.evidence.policy.constrain(x.h, x.r, &x.evidence.tokens)
	return nil
}

// fingerprint reads and hashes the request's body, and compares it with the hash in the tokens. members are those
// that may name the call.
func (x *Call) fingerprint() (fp body.Fingerprint, members []body.Member, err error) {
	if x.unreadable != nil {
		return fp, nil, x.unreadable
	}
	if x.body == nil {
		if x.body, x.apart, err = x.h.readBody(x.r, x.executions, nil); err != nil {
			return fp, nil, err
		}
	}
	if err := x.evidence.tokens.checkInput(func() (ect.Hash, error) { return bodyHash(x.body) }); err != nil {
		return fp, nil, err
	}
	node, err := statedNode(x.r)
	if err != nil {
		return fp, nil, err
	}
	config := x.h.fingerprints
	if x.message != nil { // which has its own places for a key
		config.Exclude = append(x.h.rules.Exclude(x.message), config.Exclude...)
		config.Members = nil
	}
	method, target := x.h.Host.Original(x.r)
	sum, members, err := config.Read(body.Request{
		Method:          method,
		Host:            strings.ToLower(x.r.Host),
		Path:            target.EscapedPath(),
		RawQuery:        target.RawQuery,
		ContentType:     x.r.Header.Get("Content-Type"),
		ContentEncoding: x.r.Header.Get("Content-Encoding"),
		Node:            node,
		Header:          x.r.Header,
		Body:            x.body,
		Size:            x.body.Size(),
	})
	if err != nil {
		return fp, nil, unkept(err)
	}
	return sum, members, nil
}

// readBody reads the body of r whole, before anything is claimed (see body.Reading), into the memory that g has for
// bodies; nil where no engine is open.
func (h *Handler) readBody(
	r *http.Request, g *execution.Guard, wanted func(start []byte) bool,
) (whole *body.Spool, took time.Duration, err error) {
	how := body.Reading{Limit: h.MaxBody, Incremental: h.Host.Incremental(r.Header), OneMessage: isGRPC(r)}
	if g != nil {
		how.Budget = g.BodyMemory()
	}
	whole, took, err = body.Read(r, how, wanted)
	if err != nil && !errors.As(err, new(*problem.Problem)) {
		err = &StatusError{Status: http.StatusBadRequest, Err: fmt.Errorf("reading the request's body: %w", err)}
	}
	return whole, took, err
}

// describe names the call: its workflow, its execution id and its key.
func (x *Call) describe(name string, fp body.Fingerprint, members []body.Member) (execution.Call, error) {
	tokens, policy := &x.evidence.tokens, x.action
	work, err := workflow(x.r, x.message, tokens)
	if err != nil {
		return execution.Call{}, err
	}
	method, target := x.h.Host.Original(x.r)
	c := execution.Call{
		Fingerprint: fp,
		Scope:       execution.Scope{Caller: name, Tenant: x.h.fields.Join(x.r.Header, body.Tenant), Guard: x.h.Name, Method: method, Path: target.EscapedPath()},
		Naming:      &x.h.naming,
		FreeKeys:    x.h.FreeKeys,
		Origin:      execution.OriginGiven,
		Host:        strings.ToLower(x.r.Host),
		Action:      x.action.Name,
		Workflow:    work,
		Proven:      work != "" && tokens.proven() == work,
		Deadline:    atMost(time.Duration(policy.Deadline), x.r.Header),
		KeepResult:  time.Duration(policy.RetainResult),
		KeepKey:     time.Duration(policy.RetainKey),
		ResultCap:   policy.MaxResult,
		Quota:       x.h.Quota,
	}
	id, err := x.h.statedID(x.r, x.body, members)
	if m := x.message; err == nil && m != nil && m.Protocol == protocol.MCP {
		id = m.StepOf(id)
	}
	if errors.Is(err, errNoID) {
		id, err = x.h.messageKey(x.message)
	}
	// A token is its issuer's word.
	evident := policy.Keys == KeysAdvisory && err == nil && len(tokens.Own) == 0 && !opens(x.message)
	if fromTokens := tokens.executionID(); errors.Is(err, errNoID) && fromTokens != "" {
		id, err = fromTokens, nil
	}
	if errors.Is(err, errNoID) {
		id, err = x.missingID(x.executions, &c)
	}
	if err == nil && caller.Changing(name) {
		err = x.refuseUnnamed(&c)
	}
	if err != nil {
		return c, unkept(err)
	}
	c.Scope.ID = id
	if evident || id == "" {
		if err := x.recognize(&c); err != nil {
			return c, err
		}
		id = c.Scope.ID
	} else {
		c.Key = x.executions.Key(c.Scope)
	}
	if policy.OnUnknown == OnUnknownResend {
		c.Sent, err = sentAs(id, x.r.Header, x.body)
	}
	return c, err
}

// lookUp finds what runs or is recorded under the call's key.
func (x *Call) lookUp() (execution.Finding, error) {
	found, err := x.executions.LookUp(x.r.Context(), x.call.Key, x.call.Fingerprint)
	if err != nil {
		return found, x.storeFailed(err)
	}
	x.state = found.State()
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
	if err := x.keepTokens(found); err != nil {
		return stepDone, err
	}
	switch found.Status {
	case execution.Mismatch:
		x.emit(EventMismatch, nil)
		return stepDone, x.problem(problem.FingerprintMismatch,
			"The host, the query, the media type or the body differ from the call that this id was first used for.", x.state)
	case execution.RunningHere, execution.RunningElsewhere:
		return x.attach(found)
	case execution.Replayable:
		return stepDone, x.replay(found)
	case execution.Doubtful:
		x.call.Checkpoint = found.Record.Checkpoint
		return x.doubt(found)
	case execution.ResultExpired:
		until := found.Record.Result.Expires.UTC().Format(time.RFC3339)
		return stepDone, x.problem(problem.ResultExpired, "The result was kept until "+until+".", x.state)
	case execution.RolledBack:
		return stepDone, x.problem(problem.RolledBack, "It was undone.", x.state)
	}
	return stepDone, x.unavailable()
}

func (x *Call) replay(found execution.Finding) error {
	result, err := x.executions.Result(x.r.Context(), x.call.Key, found)
	switch {
	case errors.Is(err, execution.ErrResultUnavailable):
		return x.unavailable()
	case err != nil:
		return x.storeFailed(err)
	}
	if x.call.Attempt != nil {
		x.call.Attempt.Completed(x.r.Context())
	}
	x.note("replayed", "")
	x.noted.outcome, x.noted.created = execution.Completed, result.Created
	x.action.Counts.Replayed()
	x.call.Checkpoint = found.Record.Checkpoint
	if result.Head.Status >= http.StatusBadRequest {
		if failed := x.recordedError(x.call.Checkpoint); failed != nil {
			result.Head.Header[ect.FieldName] = append(result.Head.Header[ect.FieldName], failed.raw)
		}
	}
	marks := append(x.marks("replayed", x.call.Checkpoint), answer.Field{Name: HeaderReplayed, Value: "true"})
	a := answer.Recorded(x.r.Context(), result)
	a.Reply = replyTo(x.message, false)
	return x.played(answer.Play(&x.w, x.r, a, marks...))
}

// attach follows an execution that is running, here or on another node.
func (x *Call) attach(found execution.Finding) (step, error) {
	if x.r.Header.Get(headerExecutionParent) == x.call.Scope.ID {
		x.h.Logger.Warn("a call has come back to the guard that runs it; give the guards of a chain different names",
			slog.Any("key", x.call.Key), slog.String("guard", x.h.Name))
		return stepDone, x.problem(problem.InProgress, "It has come back to the guard that runs it.", execution.StateSending)
	}
	flight, follower := x.executions.Follow(x.call.Key, found)
	if flight == nil {
		return stepDone, x.problem(problem.InProgress, "It runs on another node.", execution.StateSending)
	}
	if follower == nil {
		select {
		case <-flight.Done():
			return stepLookUp, nil
		default:
			return stepDone, x.problem(problem.ResultUnavailable,
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
		return stepDone, x.problem(problem.InProgress, "An earlier attempt has not answered yet.", execution.StateSending)
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
	return x.unavailable()
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
func (x *Call) resend(found execution.Finding) (step, error) {
	age, err := x.executions.Age(x.r.Context(), found)
	if err != nil {
		return stepDone, x.storeFailed(err)
	}
	if x.call.Sent == [32]byte{} || x.call.Sent != found.Record.Sent || age < 0 || age >= time.Duration(x.action.ResendFor) {
		x.stays = true
		return stepDone, x.inDoubt(found.Record.Cause)
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
	people store.Fence // what people hold
}

// admit refuses a call that must not begin now, before anything is recorded, and prepares its claim. The admission must
// be left when the claim's commit has ended. A refused call may have been executed before.
func (x *Call) admit(found execution.Finding) (in admission, err error) {
	if err := x.evidence.tokens.inTime(); err != nil {
		return in, err // nothing new begins with them
	}
	x.earlier, x.before = "", ""
	if found.Status == execution.Doubtful && x.probing == nil { // which has not denied it
		x.earlier, x.before = found.Record.Cause, found.Record.Checkpoint
	}
	in, err = x.admitted(found)
	if err != nil {
		x.probed()
		return in, x.refusedInDoubt(err)
	}
	return in, nil
}

func (x *Call) admitted(found execution.Finding) (in admission, err error) {
	in, err = x.enter(found) // nothing is read for a call that is refused here
	if err != nil {
		return in, err
	}
	in.Leave()
	if x.evidence.planned = (planned{}); x.evidence.call.Workflow != "" {
		if err := findNode(x); err != nil {
			return in, err
		}
	}
	if x.action.Order == OrderPar || x.evidence.planned.plan != nil {
		if err := ordered(x); err != nil {
			return in, err
		}
		constrainNode(x)
	}
	if err := x.circuitsOpen(); err != nil {
		return in, err
	}
	if a := approvalOf(x); a != nil {
		if _, err := x.reviewTokens(); err != nil { // with a used token nobody is asked (C-6.1-a)
			return in, err
		}
		if err := x.approved(a); err != nil {
			return in, err
		}
	}
	if err := permitted(x, found); err != nil {
		return in, err
	}
	if err := x.planUndo(found); err != nil {
		return in, err
	}
	in, err = x.enter(found) // rollbacks wait for those who are inside, and nobody waits there
	if err == nil && (x.action.Order == OrderPar || x.evidence.planned.plan != nil) {
		if err = ordered(x); err != nil {
			in.Leave()
		}
	}
	return in, err
}

// enter admits a call that would claim (step 4): not where people hold its workflow or a rollback has ended it, nor
// where it follows from what is being undone. The admission is left when the claim's commit has ended.
func (x *Call) enter(found execution.Finding) (in admission, err error) {
	workflow := x.evidence.call.Workflow
	if x.evidence.policy == nil { // this configuration has no identity, and another one had
		workflow = evidence.WorkflowID(x.call.Workflow)
	}
	var c *rollback.Coordinator
	if find := x.engine.Coordinator; find != nil {
		c = find()
	}
	if c != nil {
		scope := workflow
		if scope == "" && found.Record != nil && found.Record.Checkpoint != "" {
			root, err := x.engine.Checkpoints.First(x.r.Context(), found.Record.Checkpoint)
			if err != nil {
				return in, x.storeFailed(err)
			}
			scope = rollback.AttemptsScope(root)
		}
		in.Admission, err = c.Enter(x.r.Context(), scope, x.ancestors(scope, found))
		blocked := (*rollback.BlockedError)(nil)
		switch {
		case err == nil:
		case !errors.As(err, &blocked):
			return in, x.storeFailed(err)
		case blocked.Stopped: // for good, whatever people say
			return in, x.problem(problem.WorkflowStopped,
				"A rollback of the whole workflow has ended it. Nothing was forwarded.", 0)
		default:
			return in, x.problem(problem.WorkflowPaused, "What the call follows from is being rolled back. Nothing was forwarded.", 0)
		}
	}
	if x.engine.Escalations == nil || workflow == "" {
		return in, nil
	}
	e, passed, err := x.engine.Escalations.Blocks(x.r.Context(), workflow)
	if e != nil || err != nil {
		in.Leave()
		return in, x.heldBy(e, err)
	}
	in.people = passed
	return in, nil
}

// heldBy refuses a call whose workflow an escalation holds, or may hold (P4).
func (x *Call) heldBy(e *hitl.Escalation, err error) error {
	if err != nil {
		return x.storeFailed(err)
	}
	p := x.problem(problem.WorkflowPaused,
		"A person has to look at the workflow before it goes on. Nothing was forwarded.", 0)
	p.RetryAfter = decisionRetry
	if e.Level == hitl.Stop {
		p = x.problem(problem.WorkflowStopped, "The workflow is stopped until a person resumes it. Nothing was forwarded.", 0)
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
func (x *Call) approved(a *Approve) error {
	all, ctx := x.engine.Escalations, x.r.Context()
	sum := sha256.New()
	for _, part := range [][]byte{x.call.Key[:], x.call.Fingerprint[:], []byte(x.earlier), []byte(x.before)} { // another attempt is asked for anew
		_, _ = sum.Write(part) // never fails
	}
	hash := "sha-256:" + hex.EncodeToString(sum.Sum(nil))
	e, err := all.Find(ctx, "call "+hash)
	if errors.Is(err, hitl.ErrNotFound) {
		e, err = x.askPeople(a, hash)
	}
	if err != nil {
		return x.storeFailed(err)
	}
	now, err := x.engine.Store.Now(ctx)
	if err != nil {
		return x.storeFailed(err)
	}
	within := cmp.Or(time.Duration(a.Within), approvalTime) // to decide, and then to use the approval
	refused, keep := x.problem(problem.ApprovalDenied, "A person has denied this call.", 0), time.Duration(0)
	switch {
	case e.Status == hitl.Pending:
		keep = 2 * within
		refused = x.problem(problem.ApprovalRequired,
			"The call waits until a person has approved it. Nothing was forwarded.", 0)
		refused.RetryAfter = decisionRetry
	case e.Status == hitl.Approved && now.Before(e.Decisions[len(e.Decisions)-1].At.Add(min(within, x.call.KeepKey))):
		if s := &x.evidence; e.Resolution != "" && s.call.Workflow != "" && len(s.call.Parents) < ect.MaxParents && !slices.Contains(s.call.Parents, e.Resolution) {
			s.call.Parents = append(slices.Clip(s.call.Parents), e.Resolution) // what follows from the decision
		}
		return nil
	case e.Status == hitl.Approved:
		refused.Detail = "The call was approved, and not made in time."
	case e.Status == hitl.Expired:
		refused.Detail = "Nobody has approved the call in time."
	}
	if attempt := x.call.Attempt; attempt != nil {
		attempt.Asked(keep)
	}
	refused.EscalationID = e.ID
	return refused
}

// askPeople opens the escalation of a call that waits for an approval.
func (x *Call) askPeople(a *Approve, hash string) (hitl.Escalation, error) {
	ctx, name, what := x.r.Context(), x.call.Scope.Caller, "A call of the action "+strconv.Quote(x.action.Name)
	if n := nodeOf(x); n != nil {
		what += ", the node " + strconv.Quote(n.ID) + " of its workflow's plan,"
	}
	requester := cmp.Or(x.h.Callers.Operator(x.r, name), name)
	full, err := x.engine.Escalations.Waits(ctx, requester, maxWaiting)
	if err != nil {
		return hitl.Escalation{}, err
	}
	if full {
		return hitl.Escalation{}, x.problem(problem.QuotaExceeded, fmt.Sprintf("%d calls of the caller wait for approvals, at most so many.", maxWaiting), 0)
	}
	named := ""
	if caller.Verified(name) {
		named = requester
	}
	shown := new(strings.Builder)
	method, target := x.h.Host.Original(x.r)
	fmt.Fprintf(shown, "%s %s%s\n", method, x.call.Host, target.RequestURI())
	if _, err := io.Copy(shown, io.NewSectionReader(x.body, 0, maxShownBody)); err != nil {
		return hitl.Escalation{}, unkept(err)
	}
	if left := x.body.Size() - maxShownBody; left > 0 {
		fmt.Fprintf(shown, "\n(%d more bytes)", left)
	}
	workflow := x.evidence.call.Workflow
	if x.evidence.policy == nil {
		workflow = evidence.WorkflowID(x.call.Workflow)
	}
	return x.engine.Escalations.Open(ctx, hitl.Opening{
		Key: "call " + hash, Level: hitl.Approval, Cause: hitl.CauseCall, Workflow: workflow, Caller: named, Requester: requester,
		Summary:  what + " waits for an approval.",
		Links:    hitl.Links{Checkpoint: x.before},
		Proposal: hitl.Proposal{Kind: hitl.RunCall, Text: shown.String(), RequestHash: hash},
		Role:     a.Role, Quorum: a.Quorum, Within: cmp.Or(time.Duration(a.Within), approvalTime),
	})
}

// claim makes this call the owner of its key, in one commit with its checkpoint (P2). After
// execution.ErrTaken look the key up again.
func (x *Call) claim(found execution.Finding, in admission) (run *execution.Execution, err error) {
	defer in.Leave()
	defer x.probed()
	batch, err := x.recordCall(found)
	if err == nil {
		bound := store.Bind(batch, in.Fence(), in.people, x.evidence.planned.fence)
		run, err = x.executions.Claim(x.r.Context(), &x.call, found, bound, x.capture.pending, written(x, false))
		if errors.Is(err, store.ErrFenced) {
			err = execution.ErrTaken // as after another call's: look again
		}
		err = x.callRecorded(batch, x.snapshotEnded(err))
	} else {
		x.call.Checkpoint = "" // it was not recorded
		err = x.snapshotEnded(err)
	}
	if err == nil && x.probing != nil { // the probe has said that it was not applied
		x.resolved(execution.Released, execution.ByProbe)
	}
	if err == nil {
		return run, nil
	}
	if over := (*execution.QuotaError)(nil); errors.As(err, &over) {
		err = x.overQuota(over)
	} else if !errors.Is(err, execution.ErrTaken) {
		err = x.storeFailed(err)
	}
	return nil, x.refusedInDoubt(err)
}

// execute forwards the claimed call, records its outcome and releases the end of the answer. A
// client that leaves stops none of it (P7).
func (x *Call) execute(e *execution.Execution) error {
	x.note("executed", "")
	x.state = 0 // the record that was found has been replaced
	x.action.Counts.Begun()
	x.engine.running.begin(x.call.Checkpoint)
	x.engine.detach(&x.clock, x.r.Context(), x.call.Deadline)
	if x.client.listed {
		x.engine.clients.left(x.call.Key, &x.client)
	}
	defer x.clock.stop()

	var f forwarding
	ended := false
	defer func() {
		if !ended { // a panic of our own: nothing is proven
			if x.rec.Apart() { // else it would write after the handler has returned
				over, cancel := context.WithCancel(context.Background())
				cancel()
				x.rec.Drain(over)
			}
			_ = x.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseInterrupted}, nil)
			x.action.Counts.Settled(execution.InDoubt)
		}
	}()
	x.permit.Sent()
	f = x.forward(e)
	byHTTP := x.judge(&f)
	outcome := x.stillInDoubt(understand(x, byHTTP))
	outcome.Upstream = f.FailedAt
	x.permit.Release() // the upstream has done its part
	x.clock.stop()     // readers have all the time that they need
	failed(x, outcome)
	if x.heard != nil && outcome.Verdict == execution.InDoubt {
		outcome.Task = x.heard.End().Task
	}
	x.noted.outcome = outcome.Verdict
	if outcome.Whole && !f.cut() {
		x.showed(x.shown, f.rec.Status(), f.rec.Header())
	}
	err := x.settle(e, outcome, f.rec.Header())
	ended = true
	x.h.Counts.added.took(time.Since(x.began)-x.apart, addedBounds[:])
	x.countEnd(outcome, err)
	if outcome.Verdict == execution.InDoubt {
		x.doubted(outcome)
	}
	if outcome.Cause == execution.CauseElsewhere && err == nil {
		x.engine.elsewhere.add(x, byHTTP)
	}
	return x.finish(&f, outcome, err)
}

// forward sends the call to the next handler, and once more where the connection had gone stale
// and provably no byte was sent.
func (x *Call) forward(e *execution.Execution) forwarding {
	if x.h.restores {
		defer x.engine.Writes.write(x.place(), x.window)()
	}
	x.sink = callSink{e: e, x: x}
	e.Recording().SetPace(x.clock.wait)
	if x.evidence.tokens.Issuer() != "" && x.evidence.policy != nil {
		x.w.HoldFailures = maxHeldFailure
	}
	x.rec = answer.NewRecorder(&x.w, &x.sink, x.marks("executed", x.call.Checkpoint))
	rec := &x.rec
	for again := false; ; again = true {
		r := x.request(x.upstream.Begin(&x.clock))
		sent := time.Now()
		done := x.upstream.Forward(rec, r)
		x.apart += time.Since(sent)
		f := forwarding{rec: rec, Forwarded: done, overdue: x.clock.overdue(), unframed: x.upstream.Unframed()}
		if again || f.Panicked != nil || rec.Status() != 0 || !f.failed() || !f.Again {
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
		evidence: Evidence{Checkpoint: x.call.Checkpoint, Workflow: x.evidence.call.Workflow},
		patience: time.Duration(x.action.Deadline), patient: x.call.Deadline < time.Duration(x.action.Deadline),
		handed: x.evidence.tokens.Own,
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
		if len(x.evidence.tokens.All) > 0 {
			message = x.evidence.tokens.sendOn(x.evidence.policy, r.Header, x.h.UpstreamIdentity, x.evidence.forwarded.Parents())
		}
		r.Header.Add(ect.FieldName, x.evidence.forwarded.Raw())
	}
	if n := nodeOf(x); n != nil && n.Hints != (plan.Hints{}) {
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

func (x *Call) judge(f *forwarding) execution.Outcome {
	rec := f.rec
	switch {
	case f.cut() && rec.Status() == http.StatusOK && x.headerCause == "" && x.heard != nil && x.h.understood(x.proves) &&
		isEvents(rec.Header().Get("Content-Type")) && x.heard.End().Meaning != protocol.Unanswered:
		// What was cut off behind the final answer of a stream says no more of the call.
	case f.Panicked != nil && rec.Status() == 0:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.orDeadline(f, execution.CauseNoAnswer)}
	case f.Panicked != nil, f.Err != nil && rec.Status() != 0:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.orDeadline(f, execution.CauseTruncated), Status: rec.Status()}
	case f.failed() && f.NotSent:
		return execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent}
	case f.Err != nil:
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.orDeadline(f, execution.CauseLost)}
	case rec.Interrupted():
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.orDeadline(f, execution.CauseInterrupted)}
	case rec.Status() == 0 && x.upstream.Silent():
		return execution.Outcome{Verdict: execution.InDoubt, Cause: x.orLeft(execution.CauseNoAnswer)}
	}
	trailer, whole := rec.Finish()
	o := execution.Outcome{Status: rec.Status(), Cause: execution.CauseStatus, Whole: whole}
	if !o.Whole {
		o.Verdict, o.Cause = execution.InDoubt, execution.CauseTruncated
		return o
	}
	if x.headerCause != "" { // P6: what the client was shown stays so; our own fields are in the header now
		o.Verdict, o.Cause = execution.InDoubt, x.headerCause
		return o
	}
	return x.outcomeOf(o, rec, trailer, f.unframed)
}

// settle records the outcome of the execution and its evidence in one commit.
func (x *Call) settle(e *execution.Execution, o execution.Outcome, answer http.Header) error {
	defer x.engine.running.end(x.call.Checkpoint)
	ctx := context.Background()
	result := x.undoable(ctx, o, answer)
	batch := x.outcomeEvents(ctx, o, answer, false)
	x.carried.x, x.carried.outcome = x, o
	if errs := answer[ect.FieldName]; len(errs) > 0 { // the rest is the recorder's
		x.carried.answer = http.Header{ect.FieldName: errs}
	}
	err := e.SettleWith(ctx, o, &x.carried, batch, result, written(x, true))
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
	x.doubtful = true
	x.note(statusInDoubt, "")
	x.noted.cause = o.Cause
	reportDoubt(x, o)
}

func reportDoubt(x *Call, o execution.Outcome) {
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
		f.rec.Reset()
		return x.inDoubtAnswer(execution.CauseUnrecorded)
	case o.Whole && !f.cut():
		x.showFailure(f.rec.Header())
		return x.releaseEnd(f, o)
	}
	if x.w.Sent() || f.rec.Waits() { // no handler that forwards shows the client an answer in place of a cut one
		x.abort(f)
	}
	f.rec.Reset()
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
	if f.rec.Apart() {
		x.engine.readers.enter()
		defer x.engine.readers.leave()
	}
	if !f.rec.Release(x.engine.Waits, shows) {
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return nil
}

// drain sends the client what has arrived of an answer without an end. Its connection must be aborted then.
func (x *Call) drain(f *forwarding) {
	if f.rec.Apart() {
		x.engine.readers.enter()
		defer x.engine.readers.leave()
	}
	f.rec.Drain(x.engine.Waits)
}

func (x *Call) abort(f *forwarding) {
	x.drain(f)
	panic(http.ErrAbortHandler)
}

func (x *Call) inDoubtAnswer(cause execution.Cause) error {
	x.w.Header().Del(HeaderExecutionStatus)
	return x.inDoubt(cause)
}
