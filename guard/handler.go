// Package guard executes each call that changes something at most once, as an http.Handler in
// front of any other handler. The steps are in call.go, their parts in the files beside it;
// docs/request.md explains them. P1 to P8 are the promises of docs/guarantees.md.
//
// A Handler is made of a Config and an Engine, which all calls over one store share. A Host gives
// it what net/http does not know, such as placeholders, users and what was sent upstream. Without
// one it knows only what the upstream answered. For Caddy, caddymodule is the host.
//
// The packages below hold what the steps use: execution the records, answer the recorder and the
// writer of answers, evidence and api the tokens and endpoints, checkpoint and rollback how calls
// are undone.
package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// Config says which calls a Handler guards, and how. Open is required; all other members have
// defaults.
type Config struct {
	// Settings have their defaults, but no messages are read where they name no Protocol. Placeholders need a Host.
	Settings
	// Realm is the namespace of the Host's names of callers. Default: Name.
	Realm string
	// Open returns the engine and the release of its reference, which a running execution keeps.
	// See Engine.Open. An error because of the store's keys must wrap ErrKeys, or FailOpen would
	// forward past the records.
	Open func() (e *Engine, release func(), err error)
	// Tokens returns the token policy; without one tokens are ignored and no evidence is
	// recorded. Verifies says that the policy verifies tokens.
	Tokens   func() (*TokenPolicy, error)
	Verifies bool
	// Next is the handler behind ServeHTTP, such as an httputil.ReverseProxy.
	Next http.Handler
	// Host is the program that serves the requests. Default: net/http alone.
	Host Host

	// BalancingCookies are those that never name the caller, since the Host itself chooses an upstream by them; nil is
	// none.
	BalancingCookies func() []string
	// OneServer reports that equal requests always go to the same server. Where the Protocol is found
	// out by header and body, only then does an answer prove what the server speaks. Nil: no.
	OneServer func() bool

	// Consequential matches calls with a safe method to guard all the same, Exempt calls not to
	// guard. Nil matches none.
	Consequential, Exempt Match
	// Policy is that of calls whose action does not say otherwise. Its Priority is also the class of calls
	// that are not guarded.
	Policy Policy
	// Actions are the kinds of calls; the last one matches everything. Default: one action
	// "default".
	Actions []*Action
	// Quota bounds what a caller may hold, Checkpoints what a workflow and a caller may.
	Quota       execution.Quota
	Checkpoints checkpoint.Terms

	// Endpoint answers requests for the gateway's own paths, and reports whether it did. Problems
	// then link to problem.ExecutionPath. Nil has none.
	Endpoint func(w http.ResponseWriter, r *http.Request) bool
	// Gates and Parts are features of the program around the guard. They are asked in their order, after those of the
	// guard itself.
	Gates []Gate
	Parts []Part
	// Bulkhead shares the upstream among workflows, also for calls that are not guarded; nil does not.
	Bulkhead *bulkhead.Pool
	// Fallback answers calls that a circuit breaker refused. Nil: they get the problem.
	Fallback Next
	// Refusal returns the error with which the breakers of all upstreams would refuse a call of
	// this method, and the upstream's public name; nil if they would not, or unknown.
	Refusal func(method string, view *breaker.View) (open *breaker.OpenError, name string)
	// Send sends the guard's own request to the upstream, marked by AsOwn; one that IsUndo passes
	// open breakers. An answer longer than MaxAnswer is an error. Actions that restore need it.
	// Reach names the way of such requests, for checkpoints.
	Send  func(ctx context.Context, r *InternalRequest) (*InternalAnswer, error)
	Reach string

	// Counts may be shared by all handlers of one name. Default: its own, without problems.
	Counts *Counts
	// Logger gets what operators should know. Default: no logs.
	Logger *slog.Logger
}

// Match reports whether a request matches.
type Match func(r *http.Request) (bool, error)

// Next is the handler behind a guard, in Caddy's form: an error means that it did not answer.
type Next interface {
	ServeHTTP(w http.ResponseWriter, r *http.Request) error
}

// Host is the program that serves the requests: it adds what net/http does not know of them.
type Host interface {
	// Original is the request as its client sent it, before other handlers changed it: a reload
	// that adds such a handler must neither free a key (P1) nor merge two requests (P3). The URL
	// must not be changed.
	Original(r *http.Request) (method string, target *url.URL)
	// Mount is the prefix of the original path that the path of r lacks; empty if the path was
	// changed in another way.
	Mount(r *http.Request) string
	// Expand replaces the placeholders of text. It reports whether each has a value: otherwise
	// different callers or calls could look the same (P1, P3).
	Expand(r *http.Request, text string) (string, bool)
	// User is the id of the user whom the program authenticated, or empty.
	User(r *http.Request) string
	// Var is a variable of the request, which survives its rewrites by handlers.
	Var(r *http.Request, name string) any
	// SetVar sets it.
	SetVar(r *http.Request, name string, value any)
	// Note shows logs and matchers the `status` or `problem` of an unguarded request.
	Note(r *http.Request, name, value string)
	// Incremental reports whether to forward the body as it arrives (RFC 10036).
	Incremental(h http.Header) bool
	// Upstream makes next the upstream of one call.
	Upstream(next Next) Upstream
	// Begin shows logs and matchers a call. It returns the call of an enclosing guard that was
	// shown before and is not Over.
	Begin(r *http.Request, c *Call) (outer *Call)
	// Show shows a call again.
	Show(r *http.Request, c *Call)
	// Trace adds the outcome to the trace of the request.
	Trace(r *http.Request, c *Call)
	// Emit emits an event.
	Emit(Event)
	// Received reports that a client which has closed its direction of the connection still reads the
	// other one, and that its host has taken all that was written to it. It may wait for that.
	Received(r *http.Request) bool
	// Exiting reports that the process is shutting down.
	Exiting() bool
}

// The events of calls.
const (
	EventInDoubt = "agent_guard.execution_in_doubt"
	// EventWorkflowStarted: the first call of a workflow is recorded.
	EventWorkflowStarted = "agent_guard.workflow_started"
	EventResolved        = "agent_guard.execution_resolved"
	EventMismatch        = "agent_guard.fingerprint_mismatch"
	EventFailOpen        = "agent_guard.fail_open"

	eventRecognized = "agent_guard.call_recognized"
	eventCancelled  = "agent_guard.call_cancelled"
	eventUnserved   = "agent_guard.call_unserved"
)

// config embeds Config in Handler without exporting its members.
type config = Config

// Handler executes each call at most once, and answers retries from the record. It may be used by
// many goroutines.
type Handler struct {
	config
	Callers      caller.Names // who asks
	fingerprints body.Comparison
	whole        atomic.Pointer[body.Fields] // what counts of a header without a key (docs/same-call.md)
	fields       *body.Fields                // what each header field is
	rules        *protocol.Rules             // of the Protocol; nil: no message is read
	naming       execution.Naming            // by what keys are named, as far as it is configured
	warnedNames  atomic.Bool                 // that callers have no name that stays
	pointers     []jsonx.Pointer             // of ExecutionID, by index
	endToEnd     []string                    // fields that are never hop-by-hop
	probes       prober
	failures     throttle       // calls that were forwarded for want of a store
	unbound      throttle       // requests that passed though their tokens could not be bound
	tools        protocol.Tools // of the servers behind it, as announced
	proofs       proofs
}

// New returns a handler. An error names the invalid member.
func New(c Config) (*Handler, error) {
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("guard: %w", err)
	}
	if c.Tokens == nil {
		c.Tokens = func() (*TokenPolicy, error) { return nil, nil }
	}
	if c.Host == nil {
		c.Host = plainHost{}
	}
	if c.Refusal == nil {
		c.Refusal = func(string, *breaker.View) (*breaker.OpenError, string) { return nil, "" }
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	initial(&c.Protocol, protocol.None)
	c.Settings.SetDefaults()
	initial(&c.Realm, c.Name)
	c.Policy.Inherit(nil)
	if c.Counts == nil {
		c.Counts = NewCounts(c.Name, nil)
	}
	h := &Handler{
		config:   c,
		endToEnd: append(slices.Clip(ourFields[:]), KeyFieldsOf(c.ExecutionID)...),
	}
	if c.Protocol != protocol.None {
		h.rules = &protocol.Rules{
			Protocol: c.Protocol, MetaKeys: c.MetaKeys, Arguments: c.ArgumentKeys,
			Exempt: c.ExemptTools, Consequential: c.ConsequentialTools,
		}
	}
	if len(c.ExecutionID) == 0 {
		h.fingerprints.Members = KeyMembers[:]
	}
	var err error
	if h.fields, h.naming, err = c.Fields(); err != nil {
		return nil, fmt.Errorf("guard: %w", err)
	}
	h.Callers = caller.Names{
		Realm: strconv.Quote(c.Realm), Text: c.Caller, Cookies: c.CallerCookies, Balancing: c.BalancingCookies,
		Fields: h.fields, Host: c.Host,
	}
	if h.rules != nil {
		h.Callers.Session = protocol.HeaderSession
	}
	h.fingerprints.Fields = h.fields
	h.whole.Store(h.fields)
	if h.fingerprints.Exclude, err = jsonx.ParsePointers(c.FingerprintExclude); err != nil {
		return nil, fmt.Errorf("guard: FingerprintExclude: %w", err)
	}
	for i, s := range c.ExecutionID {
		p, err := jsonx.ParsePointer(s.JSON)
		if err != nil {
			return nil, fmt.Errorf("guard: ExecutionID: source %d: %w", i+1, err)
		}
		h.pointers = append(h.pointers, p)
	}
	if len(c.Actions) == 0 {
		c.Actions = []*Action{{Name: "default", Default: true}}
	}
	h.Actions = nil
	for _, a := range c.Actions {
		own := *a
		if err := h.complete(&own); err != nil {
			return nil, fmt.Errorf("guard: action %s: %w", a.Name, err)
		}
		h.Actions = append(h.Actions, &own)
	}
	return h, nil
}

// ChangedBefore names the fields that handlers before h set, add to or remove. Where a call has no key, those of no
// class do not count: a reload that adds or removes such a handler must not run a retry again (P1).
func (h *Handler) ChangedBefore(names []string) {
	t, _, err := h.config.Fields()
	if err != nil || len(names) == 0 { // New has returned the error
		return
	}
	for _, name := range names {
		if t.Class(http.CanonicalHeaderKey(name)) == body.Content {
			t.Set(body.Elsewhere, name)
		}
	}
	h.whole.Store(t)
}

// restores reports whether an action of the handler restores.
func (h *Handler) restores() bool {
	return slices.ContainsFunc(h.Actions, func(a *Action) bool { return a.Undo != nil && a.Undo.Restore })
}

// byMessage reports whether an action of the handler is chosen by its messages.
func (h *Handler) byMessage() bool {
	return slices.ContainsFunc(h.Actions, func(a *Action) bool { return len(a.Tools)+len(a.Arguments) > 0 })
}

// check refuses what would break a promise.
func (c *Config) check() error {
	if c.Open == nil {
		return errors.New("Open is missing: no engine keeps what is recorded of calls")
	}
	expands := c.Caller != "" || slices.ContainsFunc(c.ExecutionID, func(s IDSource) bool { return s.Placeholder != "" })
	if expands && c.Host == nil {
		return errors.New("there is no Host to replace the placeholders of Caller and ExecutionID: all calls would be one")
	}
	if c.RequireECT && !c.Verifies || c.Verifies && c.Tokens == nil {
		return errors.New("nothing verifies tokens: RequireECT and Verifies need Tokens, whose policy does")
	}
	if n := len(c.Actions); n > 0 && (c.Actions[n-1].Match != nil || len(c.Actions[n-1].Tools)+len(c.Actions[n-1].Arguments) > 0) {
		return fmt.Errorf("the last of Actions, %s, must match everything", c.Actions[n-1].Name)
	}
	return nil
}

func initial[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}

// ServeHTTP guards a request and forwards it to Config.Next.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Context().Value(varsKey{}) == nil { // no other guard is around this one
		r = r.WithContext(context.WithValue(r.Context(), varsKey{}, map[string]any{}))
	}
	err := h.Serve(w, r, plainNext{h.Next})
	if err == nil {
		return
	}
	status := http.StatusInternalServerError
	if known := (*StatusError)(nil); errors.As(err, &known) {
		status = known.Status
	} else {
		h.Logger.Error("a request could not be answered", slog.Any("error", err))
	}
	http.Error(w, http.StatusText(status), status)
}

type varsKey struct{}

// plainHost is the Host of a program that has only net/http.
type plainHost struct{}

func (plainHost) Original(r *http.Request) (string, *url.URL) { return r.Method, r.URL }

func (plainHost) Mount(*http.Request) string { return "" }

func (plainHost) Expand(_ *http.Request, text string) (string, bool) {
	return text, text != "" && !strings.Contains(text, "{")
}

func (plainHost) User(*http.Request) string { return "" }

func (plainHost) Var(r *http.Request, name string) any {
	vars, _ := r.Context().Value(varsKey{}).(map[string]any)
	return vars[name]
}

func (plainHost) SetVar(r *http.Request, name string, value any) {
	r.Context().Value(varsKey{}).(map[string]any)[name] = value
}

func (plainHost) Note(*http.Request, string, string) {}

func (plainHost) Incremental(h http.Header) bool { return h.Get("Incremental") == "?1" }

func (plainHost) Upstream(next Next) Upstream { return &plainUpstream{next: next} }

func (plainHost) Begin(*http.Request, *Call) *Call { return nil }

func (plainHost) Show(*http.Request, *Call) {}

func (plainHost) Trace(*http.Request, *Call) {}

func (plainHost) Emit(Event) {}

func (plainHost) Received(*http.Request) bool { return false }

func (plainHost) Exiting() bool { return false }

// plainNext adapts an http.Handler, which always answers.
type plainNext struct{ http.Handler }

func (n plainNext) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	n.Handler.ServeHTTP(w, r)
	return nil
}

// plainUpstream knows only what the handler answered. So a call is never proven unsent, and a
// cut-off body shows as a panic of the handler, as with httputil.ReverseProxy.
type plainUpstream struct {
	next Next
	ctx  context.Context
	late bool // the call's time had run out at its end
}

func (u *plainUpstream) Begin(ctx context.Context) context.Context {
	u.ctx = ctx
	return ctx
}

func (u *plainUpstream) Forward(w http.ResponseWriter, r *http.Request) (f Forwarded) {
	defer func() {
		f.Panicked, u.late = recover(), u.ctx.Err() != nil
		_ = r.Body.Close()
	}()
	f.Err = u.next.ServeHTTP(w, r)
	return f
}

func (u *plainUpstream) Cut() bool { return u.ctx.Err() != nil }

func (u *plainUpstream) Unframed() bool { return false }

func (u *plainUpstream) Status() int { return 0 }

func (u *plainUpstream) Answer() execution.Answer { return execution.Answer{} }

// Silent implements Upstream. A handler that writes nothing means 200, unless its time had run
// out.
func (u *plainUpstream) Silent() bool { return u.late }

// The header fields of the guard.
const (
	HeaderExecutionID     = "Execution-Id"
	headerIdempotencyKey  = "Idempotency-Key"
	headerExecutionParent = "Execution-Parent"
	HeaderExecutionStatus = "Execution-Status"
	HeaderWorkflowID      = "Workflow-Id"
	headerWorkflowNode    = "Workflow-Node"
	HeaderReplayed        = "Idempotent-Replayed"
	// HeaderRollback names the rollback of which a request is an undo.
	HeaderRollback = "Execution-Rollback"

	// headerResourceHints has what the plan says that a call needs, for the upstream.
	headerResourceHints       = "Resource-Hints"
	headerExecutionRecognized = "Execution-Recognized"
	headerExecutionCheckpoint = "Execution-Checkpoint"
)

// Values of Execution-Status.
const (
	// StatusRefused marks a guard's own problems: they tell what that guard has recorded,
	// and come from no execution.
	StatusRefused = "refused"
	// statusInDoubt marks every answer to a call that is in doubt.
	statusInDoubt = "in_doubt"
	// statusReleased marks the problem of a call that was not sent.
	statusReleased = "released"

	statusUnguarded = "unguarded"
)
