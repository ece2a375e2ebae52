package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/uuid"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// The header fields of the guard.
const (
	headerExecutionID     = "Execution-Id"
	headerExecutionParent = "Execution-Parent"
	headerExecutionStatus = "Execution-Status"
	headerWorkflowID      = "Workflow-Id"
	headerReplayed        = "Idempotent-Replayed"
)

// statusClientClosed is Caddy's status for a client that has left.
const statusClientClosed = 499

// exchange is one guarded call on its way.
type exchange struct {
	h      *Handler
	w      *answer.Writer
	r      *http.Request
	action *Action

	engine  *engine
	guard   *guard.Guard
	release func() // of the engine; taken over by who works on after the answer
	body    *spool.Spool
	read    bool // the request's body was read to its end
	call    guard.Call
	wait    time.Time // when a retry stops waiting for a running execution
	probing *probing  // the probe that this call makes

	doubtful bool // it was forwarded, and is in doubt
}

// open takes a reference to the engine, which a running execution keeps.
func (x *exchange) open() error {
	e, err := x.h.app.acquire()
	if err != nil {
		p := problem.New(problem.StoreUnavailable, "The gateway's store cannot be opened.")
		p.Cause = err
		return p
	}
	x.engine, x.guard = e, e.guard
	x.release = func() { _ = e.release() } // closing the store logs its own errors
	return nil
}

func (x *exchange) close() {
	x.probed()
	if x.body != nil {
		_ = x.body.Close()
	}
	if x.release != nil {
		x.release()
	}
}

// identify makes the guarded call of the request: its caller, workflow, execution
// id and fingerprint.
func (x *exchange) identify() error {
	caller, err := x.h.caller(x.guard, x.r)
	if err != nil {
		return err
	}
	if err := x.readBody(); err != nil {
		return err
	}
	fp, err := x.fingerprintBody()
	if err != nil {
		return x.unkept(err)
	}
	policy := &x.action.Policy
	x.call = guard.Call{
		Fingerprint: fp,
		Scope:       guard.Scope{Caller: caller, Guard: x.h.Name, Method: x.r.Method, Path: x.r.URL.EscapedPath()},
		Origin:      guard.OriginGiven,
		Action:      x.action.Name,
		Workflow:    workflow(x.r),
		Deadline:    time.Duration(policy.Deadline),
		KeepResult:  time.Duration(policy.RetainResult),
		KeepKey:     time.Duration(policy.RetainKey),
		ResultCap:   policy.MaxResult,
	}
	id, err := x.statedID()
	if errors.Is(err, errNoID) {
		id, err = x.missingID()
	}
	if err != nil {
		return x.unkept(err)
	}
	x.call.Scope.ID = id
	x.call.Key = x.guard.Key(x.call.Scope)
	x.wait = time.Now().Add(time.Duration(x.h.AttachWait))
	x.note("", "")
	return nil
}

// unkept makes a problem of an error in reading the kept body again.
func (x *exchange) unkept(err error) error {
	var p *problem.Problem
	if errors.As(err, &p) {
		return p
	}
	p = problem.New(problem.StoreUnavailable, "The request's body could not be read again.")
	p.Cause = err
	return p
}

// missingID names a call whose caller did not.
func (x *exchange) missingID() (string, error) {
	if parent := x.r.Header.Get(headerExecutionParent); x.h.Inherit && parent != "" {
		x.call.Origin = guard.OriginDerived
		return x.guard.Inherit(x.call.Scope, parent, x.action.Name, x.call.Fingerprint), nil
	}
	switch x.h.MissingID {
	case missingRequire:
		return "", problem.New(problem.ExecutionIDMissing, "Send one "+x.h.firstHeader()+" header.")
	case missingDerive:
		// Two equal calls can be intended, so the id counts for a short while only.
		x.call.Origin = guard.OriginDerived
		x.call.KeepResult, x.call.KeepKey = time.Duration(x.h.DeriveWindow), time.Duration(x.h.DeriveWindow)
		return x.guard.Derive(x.call.Scope, x.call.Fingerprint), nil
	default:
		x.call.Origin = guard.OriginMinted
		return uuid.NewString(), nil
	}
}

func (h *Handler) firstHeader() string {
	for _, s := range h.ExecutionID {
		if s.Header != "" {
			return s.Header
		}
	}
	return "Idempotency-Key"
}

// note publishes what is known of the call to logs and matchers.
func (x *exchange) note(status, slug string) {
	repl := replacer(x.r)
	repl.Set("http.agent_guard.execution_id", x.call.Scope.ID)
	repl.Set("http.agent_guard.action", x.action.Name)
	repl.Set("http.agent_guard.status", status)
	if slug != "" {
		repl.Set("http.agent_guard.problem", slug)
	}
}

// problem refuses the call, which stands at state.
func (x *exchange) problem(k problem.Kind, detail string, state guard.State) *problem.Problem {
	p := problem.New(k, detail)
	p.ExecutionID = x.call.Scope.ID
	if state != 0 {
		p.State = state.String()
	}
	return p
}

// gone ends a call whose client has left before anything was claimed for it.
func (x *exchange) gone() error {
	return caddyhttp.Error(statusClientClosed, x.r.Context().Err())
}

func (x *exchange) storeFailed(err error) error {
	if x.r.Context().Err() != nil {
		return x.gone()
	}
	if errors.Is(err, guard.ErrDraining) {
		return x.problem(problem.ShuttingDown, "Send the call again.", 0)
	}
	p := x.problem(problem.StoreUnavailable, "Nothing was forwarded.", 0)
	p.Cause = err
	return p
}

// find looks the call up.
func (x *exchange) find() (guard.Finding, error) {
	found, err := x.guard.Find(x.r.Context(), x.call.Key, x.call.Fingerprint)
	if err != nil {
		return found, x.storeFailed(err)
	}
	return found, nil
}

// claim makes this call the owner of its key. guard.ErrTaken says to look again.
func (x *exchange) claim(found guard.Finding) (*guard.Execution, error) {
	execution, err := x.guard.Claim(x.r.Context(), &x.call, found)
	x.probed()
	if err != nil && !errors.Is(err, guard.ErrTaken) {
		return nil, x.storeFailed(err)
	}
	return execution, err
}

// step is where a call goes after a recorded execution was found.
type step int

const (
	stepDone  step = iota // it is answered
	stepFind              // look again
	stepClaim             // claim it over what was found
)

// answer answers the call from what is recorded of it.
func (x *exchange) answer(found guard.Finding) (step, error) {
	switch found.Standing {
	case guard.Mismatch:
		return stepDone, x.problem(problem.FingerprintMismatch,
			"The host, the query, the media type or the body differ from the call that this id was first used for.", 0)
	case guard.RunningHere:
		return x.attach(found.Flight)
	case guard.RunningElsewhere:
		return stepDone, x.problem(problem.InProgress, "It runs on another node.", guard.StateSending)
	case guard.Replayable:
		return stepDone, x.replay(found)
	case guard.ResultExpired:
		return stepDone, x.problem(problem.ResultExpired, "The result was kept until "+
			found.Record.Result.Expires.UTC().Format(time.RFC3339)+".", guard.StateCompleted)
	case guard.ResultUnavailable:
		return stepDone, x.unavailable()
	case guard.RolledBack:
		return stepDone, x.problem(problem.RolledBack, "It was undone.", guard.StateRolledBack)
	default:
		return x.doubt(found)
	}
}

func (x *exchange) unavailable() error {
	return x.problem(problem.ResultUnavailable, "The call was executed.", guard.StateCompleted)
}

// inDoubt refuses a call that may have been executed.
func (x *exchange) inDoubt(cause guard.Cause) error {
	return x.problem(problem.InDoubt, "Cause: "+string(cause)+".", guard.StateInDoubt)
}

// doubt settles a call in doubt as its action says.
func (x *exchange) doubt(found guard.Finding) (step, error) {
	switch x.action.OnUnknown {
	case onUnknownRetry:
		return stepClaim, nil
	case onUnknownProbe:
		return x.probe(found)
	}
	return stepDone, x.inDoubt(found.Record.Cause)
}

// marks are the guard's own fields of an answer.
func (x *exchange) marks(status string) http.Header {
	return http.Header{headerExecutionID: {x.call.Scope.ID}, headerExecutionStatus: {status}}
}

// replay answers with the recorded result.
func (x *exchange) replay(found guard.Finding) error {
	result, err := x.guard.Result(x.r.Context(), x.call.Key, found)
	switch {
	case errors.Is(err, guard.ErrResultUnavailable):
		return x.unavailable()
	case err != nil:
		return x.storeFailed(err)
	}
	x.note("replayed", "")
	marks := x.marks("replayed")
	marks[headerReplayed] = []string{"true"}
	err = answer.Play(x.w, x.r, answer.Source{
		Head: &result.Head, Body: result.Body(x.r.Context()),
		Trailer: func() map[string][]string { return result.Head.Trailer },
	}, marks)
	return x.played(err)
}

// played ends an answer that was played from a source.
func (x *exchange) played(err error) error {
	switch {
	case err == nil:
		return nil
	case x.w.Sent():
		panic(http.ErrAbortHandler) // the client must see that it is not whole
	}
	return x.unavailable()
}

// attach follows the execution that is running in this process.
func (x *exchange) attach(flight *guard.Flight) (step, error) {
	if x.r.Header.Get(headerExecutionParent) == x.call.Scope.ID {
		x.h.logger.Warn("a call has come back to the guard that runs it; give the guards of a chain different names",
			zap.Stringer("key", x.call.Key), zap.String("guard", x.h.Name))
		return stepDone, x.problem(problem.InProgress, "It has come back to the guard that runs it.", guard.StateSending)
	}
	follower := flight.Follow()
	if follower == nil {
		select {
		case <-flight.Done():
			return stepFind, nil
		default:
			return stepDone, x.problem(problem.ResultUnavailable,
				"The call is running; its answer is too large to be kept.", guard.StateSending)
		}
	}
	defer follower.Close()

	ctx, cancel := context.WithDeadline(x.r.Context(), x.wait)
	head, err := follower.Head(ctx)
	cancel()
	switch {
	case errors.Is(err, guard.ErrNoAnswer):
		if flight.Ending() == guard.EndedInDoubt {
			return stepDone, x.followedIntoDoubt()
		}
		return stepFind, nil // released unsent: one of those that wait runs
	case x.r.Context().Err() != nil:
		return stepDone, x.gone()
	case err != nil:
		return stepDone, x.problem(problem.InProgress, "An earlier attempt has not answered yet.", guard.StateSending)
	}
	x.note("attached", "")
	err = answer.Play(x.w, x.r, answer.Source{
		Head: head, Body: followed{x.r.Context(), follower}, Trailer: follower.Trailer, Live: true,
	}, x.marks("attached"))
	if err != nil && !x.w.Sent() {
		return stepFind, nil
	}
	return stepDone, x.played(err)
}

// followedIntoDoubt refuses a call that has waited for an execution that is now in
// doubt. on_unknown is for calls that come afterwards: applied here, each of those that
// wait would run in its turn.
func (x *exchange) followedIntoDoubt() error {
	found, err := x.find()
	if err != nil {
		return err
	}
	cause := guard.CauseUnrecorded
	if found.Standing == guard.Doubtful {
		cause = found.Record.Cause
	}
	return x.inDoubt(cause)
}

// followed makes a follower an io.Reader.
type followed struct {
	ctx context.Context
	f   *guard.Follower
}

func (f followed) Read(p []byte) (int, error) { return f.f.Read(f.ctx, p) }
