package guard

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
)

// Upstream forwards one guarded call, at most twice: each attempt begins with Begin and ends with
// Forward. It is used by one goroutine, except Cut and Unframed, which are safe from Begin on.
type Upstream interface {
	// Begin prepares an attempt. Its request must carry the returned context, which ends with
	// ctx.
	Begin(ctx context.Context) context.Context
	// Forward forwards the request. It returns once the answer was written to w or there will be
	// none; after it no byte of the request is sent.
	Forward(w http.ResponseWriter, r *http.Request) Forwarded
	// Cut reports that ctx or the Upstream ended the attempt, not the server.
	Cut() bool
	// Unframed reports that only the end of the connection ends the answer's body, so that a
	// cut-off body looks whole.
	Unframed() bool
	// Status is the status given by the server, before handlers changed it; 0 if no server
	// answered.
	Status() int
	// Answer is the same answer, with what else is known of it.
	Answer() execution.Answer
	// Silent reports that an answer without a status does not mean 200 (P6): no handler took the
	// call, or a server's answer was not passed on.
	Silent() bool
}

// Forwarded is the result of an attempt to forward a call.
type Forwarded struct {
	// Err is the error that the handlers returned, Panicked the value that they panicked with.
	Err      error
	Panicked any
	// NotSent says that provably no byte of the request was sent.
	NotSent bool
	// Status is the status of the problem, 500 or above, that answers a call which was not sent. Zero
	// hands Err to the next handler outside, for example to error routes.
	Status int
	// Again says that no byte was sent because a kept connection had died, so that another
	// attempt is safe and likely to succeed.
	Again bool
	// FailedAt is the address of the upstream that failed, as far as it is known; else empty.
	FailedAt string
}

// StatusError is an error with the status to answer with, for which the guard has no problem.
type StatusError struct {
	// Status is the HTTP status, from 400 to 599.
	Status int
	Err    error
}

func (e *StatusError) Error() string { return fmt.Sprintf("HTTP status %d: %v", e.Status, e.Err) }

func (e *StatusError) Unwrap() error { return e.Err }

// statusClientClosed is the status of a request whose client has left, as nginx and Caddy log it.
const statusClientClosed = 499

// Values in a request's context by which a guard informs the handlers behind it.

// Evidence identifies the call of a failure. Breakers keep its text and show it in their events,
// refusals and status.
type Evidence struct {
	// Checkpoint is the id of the token that announced the call; without it the call is unknown.
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

// WithEvidence attaches the reference of a request's call, for its failures.
func WithEvidence(ctx context.Context, e Evidence) context.Context {
	if e.Checkpoint == "" {
		return ctx
	}
	return context.WithValue(ctx, evidenceKey{}, e)
}

// EvidenceOf returns the reference of WithEvidence, or zero.
func EvidenceOf(ctx context.Context) Evidence {
	e, _ := ctx.Value(evidenceKey{}).(Evidence)
	return e
}

// MessageKey is the key of the message of an agents' protocol that a forwarded request is, a
// *protocol.Message, by which a transport can judge what its answer says.
type MessageKey struct{}

type patienceKey struct{}

// WithPatience says that the request's deadline is its caller's: missing it is no failure of the
// upstream. patience is how long the call may hang before it is one.
func WithPatience(ctx context.Context, patience time.Duration) context.Context {
	return context.WithValue(ctx, patienceKey{}, patience)
}

// PatienceOf returns the patience of WithPatience, if any.
func PatienceOf(ctx context.Context) (patience time.Duration, ok bool) {
	patience, ok = ctx.Value(patienceKey{}).(time.Duration)
	return patience, ok
}

type undoKey struct{}

// WithUndo marks a request of an undo. It has its own lane past the breakers (ADR 0033): none
// refuses it, uses it as probe, or learns from its outcome, and constraints of workflows do not
// apply.
func WithUndo(ctx context.Context) context.Context { return context.WithValue(ctx, undoKey{}, true) }

// IsUndo reports whether WithUndo marked the request.
func IsUndo(ctx context.Context) bool { return ctx.Value(undoKey{}) != nil }

type statelessKey struct{}

// WithoutState marks a request that goes on although the breakers' recorded states are
// unreadable: its route says `fail_open` (P4).
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

// tokensHanded is the context key of the caller's own tokens, with which a call was forwarded and to
// which they are bound: a guard behind this one in the same process takes them for the same call. It
// cannot find them in the header, where the gateway's own token follows from them, or has taken their
// place.
type tokensHanded struct{}

// forwardedContext is the context of a forwarded call: all values that inform the handlers behind
// the guard, in one.
type forwardedContext struct {
	context.Context
	forwarder forwarder
	evidence  Evidence
	message   *protocol.Message
	patience  time.Duration
	patient   bool         // patience counts
	handed    []*ect.Token // see tokensHanded

	// Of the request, in one piece of memory with its context.
	target           url.URL
	parent, workflow [1]string
}

// Value implements context.Context.
func (c *forwardedContext) Value(key any) any {
	switch key.(type) {
	case forwardedKey:
		return &c.forwarder
	case evidenceKey:
		if c.evidence.Checkpoint != "" {
			return c.evidence
		}
	case MessageKey:
		if c.message != nil {
			return c.message
		}
	case patienceKey:
		if c.patient {
			return c.patience
		}
	case tokensHanded:
		if len(c.handed) > 0 {
			return c.handed
		}
	}
	return c.Context.Value(key)
}

// forwarderOf is the last guard that forwarded the request, or nil.
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

// UnreadError says that a request was not sent because its breaker's state could not be read.
type UnreadError struct {
	// Err is the cause, As the equivalent error of dialling, by which a proxy knows that nothing
	// was sent.
	Err, As error
}

// Error implements error.
func (e *UnreadError) Error() string { return e.Err.Error() }

// Unwrap returns As and Err.
func (e *UnreadError) Unwrap() []error { return []error{e.As, e.Err} }

// ViewVar is the request variable with the *breaker.View that the caller's tokens ask for. A
// variable survives rewrites of the request.
const ViewVar = "agent_guard.view"

// ParseGRPCTimeout reads the field grpc-timeout: at most eight digits and a unit. It reports
// false for malformed values, zero, or more than a Duration can hold.
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

// ownRequest is the context key of the gateway's own requests.
type ownRequest struct{}

// AsOwn marks a request as the gateway's own: guards and endpoints pass it on unchanged. It has
// no caller and needs no key, token or record.
func AsOwn(ctx context.Context) context.Context { return context.WithValue(ctx, ownRequest{}, true) }

// IsOwn reports whether AsOwn marked the request.
func IsOwn(r *http.Request) bool { return r.Context().Value(ownRequest{}) != nil }
