package caddymodule

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/google/uuid"

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

	headerExecutionCheckpoint = "Execution-Checkpoint"
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
	wait    time.Time   // when a retry stops waiting for a running execution
	probing *probing    // the probe that this call makes
	earlier guard.Cause // of the doubt in which the attempt before this one stands; empty without one
	before  string      // the checkpoint of that attempt, if it has one

	story    story
	capture  capture
	window   *window // in which nobody else must change what is restored; nil without
	verified bool    // its tokens, or that it needs none

	doubtful bool // it was forwarded, and is in doubt
	found    bool // an execution of this id was met
	noted    noted
}

// The statuses of calls that were not executed, as logs and matchers see them.
const (
	statusInDoubt   = "in_doubt"
	statusRefused   = answer.StatusRefused
	statusUnguarded = "unguarded"
)

// open takes a reference to the engine, which a running execution keeps.
func (x *exchange) open() error {
	e, err := x.h.app.acquire()
	if err != nil {
		return storeClosed(err)
	}
	x.engine, x.guard = e, e.guard
	x.release = func() { _ = e.release() } // closing the store logs its own errors
	if x.story.way, err = x.h.app.testimony(); err != nil {
		return storeClosed(err)
	}
	return nil
}

func (x *exchange) close() {
	x.traceCall()
	x.unpublish()
	x.giveTokensBack()
	x.probed()
	x.window.close()
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
	tokens := &x.story.tokens
	var err error
	if *tokens, err = x.h.verifyTokens(x.story.way, x.r); err != nil {
		return err
	}
	x.verified = true
	caller, err := x.h.caller(x.guard, x.r, tokens)
	if err != nil {
		return err
	}
	if err := x.readBody(); err != nil {
		return err
	}
	if err := tokens.checkInput(x.bodyHash); err != nil {
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
		Host:        strings.ToLower(x.r.Host),
		Action:      x.action.Name,
		Workflow:    workflow(x.r, tokens),
		Deadline:    x.deadline(),
		KeepResult:  time.Duration(policy.RetainResult),
		KeepKey:     time.Duration(policy.RetainKey),
		ResultCap:   policy.MaxResult,
		Quota:       x.h.app.Quota.ofCaller(),
	}
	id, err := x.statedID()
	if joint := tokens.executionID(); errors.Is(err, errNoID) && joint != "" {
		id, err = joint, nil
	}
	if errors.Is(err, errNoID) {
		id, err = x.missingID()
	}
	if err != nil {
		return x.unkept(err)
	}
	x.call.Scope.ID = id
	x.call.Key = x.guard.Key(x.call.Scope)
	x.wait = time.Now().Add(time.Duration(x.h.AttachWait))
	if err := x.begin(); err != nil {
		return err
	}
	x.story.way.constrain(x.r, tokens)
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

// note says to logs and matchers what becomes of the call.
func (x *exchange) note(status, slug string) {
	x.noted.status = status
	if slug != "" {
		x.noted.problem = slug
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
	if already := (*problem.Problem)(nil); errors.As(err, &already) {
		return already
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

// admit refuses a call that must not begin now, before anything is recorded of it, and
// prepares its claim. leave is called when the claim's commit has ended.
func (x *exchange) admit(found guard.Finding) (leave func(), err error) {
	leave, err = x.enter(found) // nothing is read for a call that is barred
	if err != nil {
		return nil, err
	}
	leave()
	if err := x.circuitsOpen(); err != nil {
		return nil, err
	}
	if err := x.foresee(found); err != nil {
		return nil, err
	}
	if err := x.ledgerAdmits(x.r.Context()); err != nil {
		return nil, err
	}
	return x.enter(found) // rollbacks wait for those who are inside, and nobody waits there
}

// claim makes this call the owner of its key. guard.ErrTaken says to look again. A call
// that is refused may have been executed before.
func (x *exchange) claim(found guard.Finding) (*guard.Execution, error) {
	x.earlier, x.before = "", ""
	if found.Standing == guard.Doubtful && x.probing == nil { // which has not denied it
		x.earlier, x.before = found.Record.Cause, found.Record.Checkpoint
	}
	execution, err := x.own(found)
	return execution, x.refusedInDoubt(err)
}

// own does what claim does.
func (x *exchange) own(found guard.Finding) (*guard.Execution, error) {
	leave, err := x.admit(found)
	if err != nil {
		x.probed()
		return nil, err
	}
	defer leave()
	told, err := x.announce(found)
	if err != nil {
		x.probed()
		return nil, x.snapshotEnded(err)
	}
	riders := append(told.Writes(), x.capture.pending.Writes()...)
	execution, err := x.guard.Claim(x.r.Context(), &x.call, found, riders...)
	err = x.announced(told, x.snapshotEnded(err))
	if err == nil && x.probing != nil { // the probe has said that it was not applied
		x.resolved(guard.Released)
	}
	x.probed()
	if over := (*guard.QuotaError)(nil); errors.As(err, &over) {
		return nil, x.overQuota(over)
	}
	if err != nil && !errors.Is(err, guard.ErrTaken) {
		return nil, x.storeFailed(err)
	}
	return execution, err
}
