package guard

import (
	"context"
	"fmt"
	"net/http"

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
