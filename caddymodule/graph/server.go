// Package graph answers the well-known paths of the ledger, of workflows and of
// agents' errors: what was recorded, to those who took part in it.
//
// Heads and proofs hold no content, and go to every reader whom the gateway knows. Entries
// and workflows go to who took part (ADR 0023, 0024). For everybody else they are the
// same as ones that do not exist (P3).
package graph

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// DefaultMaxNodes is how much of a workflow is read.
const DefaultMaxNodes = ect.MaxAncestors

// Options are the settings of a Server.
type Options struct {
	// Log is the ledger. Required.
	Log *ledger.Log
	// HeadKey is the public key of its heads, as note.NewVerifier reads it.
	HeadKey string
	// Identities are the names under which the gateway issues tokens. What they issue is
	// the gateway's word.
	Identities []string
	// Own reports whether an entry is the gateway's, also under names that it had before;
	// nil goes by Identities alone.
	Own func(e *ledger.Entry) bool
	// Verify verifies tokens of a request, as ect.Verifier.VerifyAll does. Errors are
	// *ect.Error, or what says that nothing is known of them. Required.
	Verify func(r *http.Request, raws []string) ([]*ect.Token, error)
	// Record records tokens durably, all or none, each with its Raw as the payload of
	// an event of its id and workflow. An id that is taken is ledger.ErrDuplicate.
	// Required.
	Record func(ctx context.Context, tokens []*ect.Token) error
	// Verified reports whether a token of the gateway's has a valid signature. Nil leaves
	// that unknown.
	Verified func(ctx context.Context, raw string) error
	// Undos are what is kept for undoing calls; nil where nothing is.
	Undos Undos
	// Execution tells how a guarded call stands, and the status of its answer, if there
	// was one. Nil is where nobody knows.
	Execution func(ctx context.Context, key guard.Key) (state string, status int, err error)
	// Called tells whether the gateway has guarded calls of a caller. Nil is where nobody
	// knows, and then it may have.
	Called func(ctx context.Context, caller [16]byte) (bool, error)
	// Waits ends what waits for the ledger: at an exit. Nil is never.
	Waits context.Context
	// MaxNodes is how much of a workflow is read; DefaultMaxNodes if zero.
	MaxNodes int
}

// Reader is who asks.
type Reader struct {
	// Issuer is the issuer of a verified token; empty for who has none.
	Issuer string
	// Caller is the keyed hash of the caller's identity; zero for who has none.
	Caller [16]byte
	// Anonymous is who has no credential at all, and is told nothing (P3).
	Anonymous bool
	// Credential is who is known by a credential that nobody here has verified. It is told
	// of its own calls' workflows and checkpoints, and of nothing else (ADR 0024).
	Credential bool
}

// Server answers. It is safe for concurrent use and holds nothing but its settings.
type Server struct {
	Options
}

// New makes a Server.
func New(o Options) *Server {
	if o.MaxNodes == 0 {
		o.MaxNodes = DefaultMaxNodes
	}
	if o.Waits == nil {
		o.Waits = context.Background()
	}
	return &Server{o}
}

// Handles reports whether a request's path is one of this package.
func Handles(r *http.Request) bool {
	_, ok := parseRoute(r.URL)
	return ok
}

// Serve answers a request that Handles has said yes to. It returns the problem that it
// has not answered with, as a *problem.Problem with its cause, or the end of the
// request's context.
func (s *Server) Serve(w http.ResponseWriter, r *http.Request, who Reader) error {
	to, ok := parseRoute(r.URL)
	if !ok {
		return badParameter("There is no such path.")
	}
	if allowed := to.methods(); !slices.Contains(allowed, r.Method) {
		refuseMethod(w, allowed)
		return nil
	}
	q := &question{Server: s, w: w, r: r, who: who, route: to}
	return q.problem(q.answer())
}

// question is one request on its way.
type question struct {
	*Server
	w   http.ResponseWriter
	r   *http.Request
	who Reader
	route
}

func (q *question) answer() error {
	if q.place == placeErrors {
		return q.takeErrors()
	}
	if q.who.Anonymous {
		return problem.New(problem.AuthenticationRequired, "Send the credential that the workflow's calls were made with.")
	}
	if q.who.Credential {
		if err := q.admitCredential(); err != nil {
			return err
		}
	}
	switch q.place {
	case placeHead:
		return q.head()
	case placeProof:
		return q.proof()
	case placeConsistency:
		return q.consistency()
	case placeEntry:
		return q.entry()
	case placeEntries:
		return q.entryByID()
	case placeCheckpoint:
		return q.checkpoint()
	}
	return q.workflow()
}

// admitCredential holds what a credential is good for that is made up at no cost. Nothing
// is read or waited for on behalf of who has made no calls here.
func (q *question) admitCredential() error {
	unknown := notInWorkflow
	switch q.place {
	case placeCheckpoint:
	case placeWorkflow:
		unknown = unknownWorkflow
	default:
		return problem.New(problem.AuthenticationRequired,
			"Ask as somebody whom this gateway knows: with a token, a certificate, or a name of its own authentication.")
	}
	called, err := q.hasCalled(q.r.Context(), q.who)
	if err == nil && !called {
		err = unknown()
	}
	return err
}

// hasCalled reports whether the reader may have a part in anything.
func (s *Server) hasCalled(ctx context.Context, who Reader) (bool, error) {
	if !who.Credential || s.Called == nil {
		return true, nil
	}
	return s.Called(ctx, who.Caller)
}

// problem says what went wrong in the words of problems.
func (q *question) problem(err error) error {
	if err == nil || q.r.Context().Err() != nil {
		return err
	}
	var known *problem.Problem
	if errors.As(err, &known) {
		return known
	}
	var refusal *ect.Error
	if errors.As(err, &refusal) {
		p := problem.New(problem.ECTInvalid, refusal.Detail())
		p.Status, p.Reason, p.Cause = refusal.Status(), string(refusal.Code), refusal.Unwrap()
		return p
	}
	if errors.Is(err, ect.ErrUnavailable) {
		p := problem.New(problem.ECTUnavailable, "Its issuer's keys, or the ledger, do not answer.")
		p.Cause = err
		return p
	}
	p := problem.New(problem.StoreUnavailable, "The gateway's ledger does not answer.")
	p.Cause = err
	return p
}

func badParameter(detail string) error { return problem.New(problem.ParameterInvalid, detail) }

// wait is a context that ends with a time, another one, or an exit.
func (s *Server) wait(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, d)
	stop := context.AfterFunc(s.Waits, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}
