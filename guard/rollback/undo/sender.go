package undo

import (
	"context"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// Outgoing is a request of an undo. It is the sender's own: it may change it.
type Outgoing struct {
	// Method is GET for requests that only look.
	Method string
	// URL is a path and a query for the upstream of the call, or a whole URL.
	URL string
	// Header is never nil.
	Header http.Header
	// Body is nil where there is none.
	Body []byte
	// Host is that of the call, for requests to its upstream.
	Host string
	// Guard and Action name the configuration that the call went by. Upstream is where it
	// went: with recorded credentials in Header, the request must go to no other.
	Guard, Action, Upstream string
	// Recorded says that Header has the call's own credentials, if it had any. Without it
	// the sender adds those of the action's configuration.
	Recorded bool
	// Delegated says that it goes to an agent's rollback URI, to which the sender adds a
	// token of the gateway's.
	Delegated bool
	// Rollback, Checkpoint and Workflow are the ids of what it is for: of a call that was
	// made more than once the checkpoint of the first attempt, so that all tries of its undo
	// name the same.
	Rollback, Checkpoint, Workflow string
	// Step is the checkpoint of the rollback's step.
	Step string
	// Reason is that of the rollback, as a delegate is told.
	Reason string
	// Window is the one that the request is written in; nil where none is open. Where it is
	// disturbed already, the sender sends nothing, and says ReasonChanged.
	Window Window
}

// Answer is what came back.
type Answer struct {
	// Status is the final one.
	Status int
	// Header has canonical names.
	Header http.Header
	// Body is decoded of its transfer coding, and cut at MaxAnswer bytes.
	Body []byte
	// Cut says that the body was longer.
	Cut bool
}

// MaxAnswer is the largest body of an answer that a Sender reads, in bytes.
const MaxAnswer = checkpoint.MaxImage

// Sender sends requests of an undo, past open breakers and full bulkheads (DESIGN,
// "Checkpoints and rollback"). It sends each once, and follows no redirection.
type Sender interface {
	// Send returns the whole answer, or an error: a *SendError says what is known.
	Send(ctx context.Context, r *Outgoing) (*Answer, error)
}

// SendError says why there is no answer.
type SendError struct {
	// NotSent says that it is proven that not a byte was sent.
	NotSent bool
	// Reason is ReasonNoUpstream, ReasonOtherUpstream, ReasonNoCredentials or ReasonChanged
	// where trying again is no use; else empty. With a reason nothing was sent.
	Reason Reason
	// Err is the cause, for logs; it holds nothing secret.
	Err error
}

// Error is the cause's text.
func (e *SendError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *SendError) Unwrap() error { return e.Err }
