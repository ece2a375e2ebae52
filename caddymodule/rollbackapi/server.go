// Package rollbackapi answers the paths on which agents ask for rollbacks and look at them
// (cascade 4.3, ATD and AERR "Rollback Protocol"). It says who asks for what, and how that
// is answered; what is done is a rollback.Coordinator's.
//
// To those who have no part in a checkpoint's workflow nothing is told apart: a checkpoint
// or a rollback of others is the same as one that does not exist (P3).
package rollbackapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// DefaultWait is how long an answer waits for the end of its rollback.
	DefaultWait = 10 * time.Second
	// LongestWait is how long it waits at most.
	LongestWait = 30 * time.Second
	// tokenTime is how long an answer waits for the token that tells of it.
	tokenTime = 5 * time.Second
	// retryAfter is when it is worth looking at a running rollback again, in seconds.
	retryAfter = "2"
)

// Coordinator carries rollbacks out. *rollback.Coordinator is one.
type Coordinator interface {
	// Plan shows what Execute would do, or why it would not.
	Plan(ctx context.Context, r rollback.Request) (*rollback.Rollback, error)
	// Execute accepts a rollback durably, and riders in the accepting commit only. The
	// same id with the same content gives the same rollback (P5).
	Execute(ctx context.Context, r rollback.Request, riders ...store.Write) (*rollback.Rollback, error)
	// Get returns a rollback, or rollback.ErrUnknown.
	Get(ctx context.Context, id string) (*rollback.Rollback, error)
	// Wait returns a rollback once it is finished, or as it is with ctx's error.
	Wait(ctx context.Context, id string) (*rollback.Rollback, error)
}

// Tokens is what is known of tokens: what they were used for, and what was told by them.
type Tokens interface {
	// Recorded looks up how a token stands to a use.
	Recorded(ctx context.Context, t *ect.Token, use evidence.Use) (evidence.Standing, error)
	// Enter records the tokens of a request, unless they are, and waits for their place.
	// An *ect.Error says that one is not accepted.
	Enter(ctx context.Context, all []*ect.Token) error
	// Bound is the write that binds the token that asks to its use, on the condition that
	// it was not used. It rides in the accepting commit.
	Bound(ctx context.Context, t *ect.Token, use evidence.Use) (store.Write, error)
	// Bind does that by a commit of its own, unless it was done.
	Bind(ctx context.Context, t *ect.Token, use evidence.Use) error
	// Event is the event that was recorded under an id of a workflow, empty for other
	// actions. Found is false where nothing was.
	Event(ctx context.Context, workflow, id string) (event ect.Event, found bool, err error)
	// Mine reports whether what was recorded under an id of a workflow is linked to the
	// reader's own part in it.
	Mine(ctx context.Context, workflow, id string, who graph.Reader) (bool, error)
	// Raw is the signed token with this id. It waits until there is one.
	Raw(ctx context.Context, workflow, id string) (string, error)
	// Result is the signed token that tells the result of a finished rollback in another
	// vocabulary than cascade's. request is the id of the token that has asked.
	Result(ctx context.Context, r *rollback.Rollback, request string, v ect.Vocabulary) (string, error)
}

// Options are the settings of a Server. All but the last four are required.
type Options struct {
	Coordinator Coordinator
	Tokens      Tokens
	// Ask verifies who asks for a rollback. Errors are problems, or an *ect.Error.
	Ask func(r *http.Request) (*Asker, error)
	// Read finds out who looks at one.
	Read func(r *http.Request) (graph.Reader, error)
	// Limit bounds how many new rollbacks are asked for.
	Limit *Limit
	// Rate is how many new ones an issuer, and a workflow, may ask for in a minute.
	Rate int
	// Lineage is who of a workflow may ask.
	Lineage plan.Lineage

	// Coordinators are the identities with the authority of a rollback coordinator.
	Coordinators []string
	// Wait is how long an answer waits; DefaultWait if zero.
	Wait time.Duration
	// Waits ends what waits: at an exit. Nil is never.
	Waits context.Context
	// Logger gets what cannot be told to anybody else; nil is none.
	Logger *slog.Logger
}

// Asker is who asks for a rollback, by the tokens of the request.
type Asker struct {
	// Token is the one that asks. It was verified, and is of level L2 at least.
	Token *ect.Token
	// Unseen says that its parents do not bear it out: they are unknown, or cannot be its
	// parents. Nobody is told that, since it tells what is there (P3).
	Unseen bool
	// All are all tokens of the request.
	All []*ect.Token
	// Late refuses tokens whose time is over: they are good for what they were used for
	// before, and for nothing else.
	Late error
}

// Server answers. It is safe for concurrent use.
type Server struct {
	Options
}

// New makes a Server.
func New(o Options) *Server {
	if o.Wait == 0 {
		o.Wait = DefaultWait
	}
	if o.Waits == nil {
		o.Waits = context.Background()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Server{o}
}

// Handles reports whether a request's path is one of this package.
func Handles(r *http.Request) bool {
	_, ok := parseRoute(r.URL)
	return ok
}

// Allowed reports whether the path is for the request's method, and answers if not.
func Allowed(w http.ResponseWriter, r *http.Request) bool {
	to, _ := parseRoute(r.URL)
	allowed := to.methods()
	if slices.Contains(allowed, r.Method) {
		return true
	}
	w.Header().Set("Allow", strings.Join(allowed, ", "))
	w.WriteHeader(http.StatusMethodNotAllowed)
	return false
}

// Serve answers a request that Handles and Allowed have said yes to. It returns the
// problem that it has not answered with, as a *problem.Problem with its cause, or the end
// of the request's context.
func (s *Server) Serve(w http.ResponseWriter, r *http.Request) error {
	to, ok := parseRoute(r.URL)
	if !ok {
		return badParameter("There is no such path.")
	}
	q := &question{Server: s, w: w, r: r, route: to}
	if to.name != "" {
		return q.problem(q.show())
	}
	return q.problem(q.ask())
}

// question is one request on its way.
type question struct {
	*Server
	w http.ResponseWriter
	r *http.Request
	route
	counted counted
}

// coordinator reports whether an identity is a configured rollback coordinator.
func (s *Server) coordinator(identity string) bool {
	return identity != "" && slices.Contains(s.Coordinators, identity)
}

// show answers GET: to who takes part in what is rolled back, and to coordinators.
func (q *question) show() error {
	id, err := ParseID(q.name)
	if err != nil {
		return err
	}
	patience, err := q.patience(0)
	if err != nil {
		return err
	}
	who, err := q.Read(q.r)
	if err != nil {
		return err
	}
	if who.Anonymous {
		return problem.New(problem.AuthenticationRequired, "Send the credential that the workflow's calls were made with.")
	}
	r, err := q.Coordinator.Get(q.r.Context(), id)
	if errors.Is(err, rollback.ErrUnknown) {
		return notInWorkflow()
	}
	if err != nil {
		return err
	}
	if may, err := q.maySee(r, who); err != nil || !may {
		if err == nil {
			err = notInWorkflow()
		}
		return err
	}
	return q.await(r, id, patience, ect.Cascade, "")
}

// maySee reports whether a reader takes part in what is rolled back.
func (q *question) maySee(r *rollback.Rollback, who graph.Reader) (bool, error) {
	if who.Issuer != "" && who.Issuer == r.Requester || q.coordinator(who.Issuer) {
		return true, nil
	}
	return q.Tokens.Mine(q.r.Context(), r.Workflow, r.Checkpoint, who)
}

// await answers with the rollback, once it is finished or patience is over.
func (q *question) await(r *rollback.Rollback, id string, patience time.Duration, dialect ect.Vocabulary, request string) error {
	if r.State != rollback.Finished && patience > 0 {
		ctx, cancel := q.wait(patience)
		later, err := q.Coordinator.Wait(ctx, id)
		cancel()
		switch {
		case q.r.Context().Err() != nil:
			return q.r.Context().Err() // it goes on by itself
		case err != nil && later == nil:
			// It was accepted, and that is what the answer says.
			q.Logger.Warn("a rollback could not be waited for", slog.String("rollback", id), slog.Any("error", err))
		default:
			r = later
		}
	}
	if r.State != rollback.Finished {
		q.w.Header().Set("Location", URL(id))
		q.w.Header().Set("Retry-After", retryAfter)
		return q.writeJSON(http.StatusAccepted, Describe(r, id))
	}
	ctx, cancel := q.wait(tokenTime)
	defer cancel()
	if dialect != ect.Cascade {
		return q.answerIn(ctx, r, id, dialect, request)
	}
	doc := Describe(r, id)
	if r.Complete != "" {
		raw, err := q.Tokens.Raw(ctx, r.Workflow, r.Complete)
		if err != nil && q.r.Context().Err() == nil {
			// The result stands without it, and the ledger has it a moment later.
			q.Logger.Warn("the token that tells of a rollback cannot be had", slog.String("rollback", id), slog.Any("error", err))
		}
		doc.ECT = raw
	}
	if doc.ECT != "" {
		q.w.Header().Set(ect.FieldName, doc.ECT)
	}
	return q.writeJSON(http.StatusOK, doc)
}

// wait is a context that ends with a time, the request, or an exit.
func (q *question) wait(d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(q.r.Context(), d)
	stop := context.AfterFunc(q.Waits, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}
