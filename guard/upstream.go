package guard

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// Upstream forwards one guarded call, at most twice: each attempt begins with Begin and ends
// with Forward. One goroutine uses it, but for Cut and Unframed, which may be asked from
// Begin on.
type Upstream interface {
	// Begin prepares an attempt. The request that is then forwarded must carry the
	// returned context, which ends with ctx.
	Begin(ctx context.Context) context.Context
	// Forward hands the request on, and returns once its answer has been written to w or
	// it is known that there will be none. After it not a byte of the request is sent.
	Forward(w http.ResponseWriter, r *http.Request) Forwarded
	// Cut reports that the attempt was ended from inside, by ctx or by the Upstream, and
	// not by the server that it was sent to.
	Cut() bool
	// Unframed reports that nothing but the end of the connection ends the answer's body,
	// so that a body that was cut off looks whole.
	Unframed() bool
	// Status is that of the answer as the server has given it, whatever handlers on the
	// way made of it; 0 where no server has answered.
	Status() int
	// Answer is the same answer, with what else is known of it.
	Answer() execution.Answer
	// Silent reports that an answer without a status does not mean 200 (P6): no handler
	// took the call, or a server has answered and nothing of that was passed on.
	Silent() bool
}

// Forwarded is what came of an attempt to forward a call.
type Forwarded struct {
	// Err is what the handlers returned, Panicked what they panicked with.
	Err      error
	Panicked any
	// NotSent says that it is proven that no byte of the request was sent.
	NotSent bool
	// Again says that not a byte was sent because a kept connection had died, so that
	// another attempt is safe and likely to succeed.
	Again bool
}

// StatusError is an error that the server answers with a status: the guard has no problem of
// its own for it.
type StatusError struct {
	// Status is the HTTP status, from 400 to 599.
	Status int
	Err    error
}

func (e *StatusError) Error() string { return fmt.Sprintf("HTTP status %d: %v", e.Status, e.Err) }

func (e *StatusError) Unwrap() error { return e.Err }

// StatusClientClosed is the status of a request whose client has left, as nginx and Caddy
// log it.
const StatusClientClosed = 499

// What a guard says of a request to the handlers behind it stands in the request's context.

// Evidence is what the failures of a call are known by. As text a breaker keeps it, and hands it on
// in its events, refusals and status.
type Evidence struct {
	// Checkpoint is the id of the token that announced the call; nothing is known of a call
	// without.
	Checkpoint string
	// Workflow is the id of the call's workflow; it may be empty.
	Workflow string
}

// String is the text of e; empty without a checkpoint.
func (e Evidence) String() string {
	if e.Checkpoint == "" || e.Workflow == "" {
		return e.Checkpoint
	}
	return e.Checkpoint + "@" + e.Workflow
}

// ParseEvidence reads the text of an Evidence. Ids have no @ in them.
func ParseEvidence(text string) (e Evidence) {
	e.Checkpoint, e.Workflow, _ = strings.Cut(text, "@")
	return e
}

type evidenceKey struct{}

// WithEvidence gives the failures of a request the reference that they are known by.
func WithEvidence(ctx context.Context, e Evidence) context.Context {
	if e.Checkpoint == "" {
		return ctx
	}
	return context.WithValue(ctx, evidenceKey{}, e)
}

// EvidenceOf is the reference that WithEvidence gave, or zero.
func EvidenceOf(ctx context.Context) Evidence {
	e, _ := ctx.Value(evidenceKey{}).(Evidence)
	return e
}

type patienceKey struct{}

// WithPatience says that the deadline of a request is its caller's and not the upstream's to meet:
// that it passes is no failure. Patience is how long the call may hang until it is one.
func WithPatience(ctx context.Context, patience time.Duration) context.Context {
	return context.WithValue(ctx, patienceKey{}, patience)
}

// PatienceOf is what WithPatience said, if it did.
func PatienceOf(ctx context.Context) (patience time.Duration, ok bool) {
	patience, ok = ctx.Value(patienceKey{}).(time.Duration)
	return patience, ok
}

type undoKey struct{}

// WithUndo marks a request as one that undoes something. It has a lane of its own past the breakers
// (ADR 0033): none refuses it, none makes it the probe, and none learns from what comes of it.
// Constraints of workflows do not hold for it either.
func WithUndo(ctx context.Context) context.Context { return context.WithValue(ctx, undoKey{}, true) }

// IsUndo reports whether WithUndo marked the request.
func IsUndo(ctx context.Context) bool { return ctx.Value(undoKey{}) != nil }

type statelessKey struct{}

// WithoutState marks a request that goes on where the recorded states of the breakers cannot be
// read: its route says `fail_open` (P4).
func WithoutState(ctx context.Context) context.Context {
	return context.WithValue(ctx, statelessKey{}, true)
}

// IsWithoutState reports whether WithoutState marked the request.
func IsWithoutState(ctx context.Context) bool { return ctx.Value(statelessKey{}) != nil }

// forwarder is a guard that has forwarded the request, and the one before it.
type forwarder struct {
	name  string
	outer *forwarder
}

type forwardedKey struct{}

// forwarderOf is the last guard that has forwarded the request; nil without.
func forwarderOf(ctx context.Context) *forwarder {
	f, _ := ctx.Value(forwardedKey{}).(*forwarder)
	return f
}

// guardedBy reports whether a guard of this name has forwarded the request.
func guardedBy(ctx context.Context, name string) bool {
	f := forwarderOf(ctx)
	for f != nil && f.name != name {
		f = f.outer
	}
	return f != nil
}

// UnreadError says that a request was not sent, as the state of its upstream's breaker could
// not be read.
type UnreadError struct {
	// Err is the cause, As what else it amounts to: an error of dialling, so that a proxy and
	// the proof of what was sent know that nothing was.
	Err, As error
}

// Error implements error.
func (e *UnreadError) Error() string { return e.Err.Error() }

// Unwrap gives what it amounts to, and the cause.
func (e *UnreadError) Unwrap() []error { return []error{e.As, e.Err} }

// ViewVar is the variable of a request that holds what its caller's tokens ask of breakers,
// a *breaker.View. A variable outlives the request that the guard hands on.
const ViewVar = "agent_guard.view"

// ParseGRPCTimeout reads the field grpc-timeout: at most eight digits and a unit. It reports false
// for what says nothing: a malformed value, zero, or more than a Duration can be.
func ParseGRPCTimeout(text string) (time.Duration, bool) {
	if len(text) < 2 || len(text) > 9 {
		return 0, false
	}
	unit, known := map[byte]time.Duration{
		'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond,
	}[text[len(text)-1]]
	n, err := strconv.ParseUint(text[:len(text)-1], 10, 32)
	if !known || err != nil || n == 0 || n > uint64(math.MaxInt64/unit) {
		return 0, false
	}
	return time.Duration(n) * unit, true
}

// ownRequest is the context key of requests that the gateway makes by itself.
type ownRequest struct{}

// AsOwn marks a request as the gateway's own: guards and endpoints on its way hand it on
// as if they were not there. It is nobody's call, and needs no key, token or record.
func AsOwn(ctx context.Context) context.Context { return context.WithValue(ctx, ownRequest{}, true) }

// IsOwn reports whether AsOwn marked the request.
func IsOwn(r *http.Request) bool { return r.Context().Value(ownRequest{}) != nil }
