package caddymodule

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
)

func init() {
	caddy.RegisterModule(Handler{})
}

// Handler executes calls that change something at most once. It stands before the
// handler that forwards them, usually `reverse_proxy` with the transport
// `agent_guard`; the Caddyfile directive `agent_proxy` makes both.
//
// A retried call is found by its execution id: it gets the recorded answer, or
// follows the execution that is still running. Calls that change nothing pass
// through untouched.
//
// It sets placeholders for logs and matchers: `{http.agent_guard.status}`
// (`executed`, `replayed`, `attached`, `in_doubt`, `refused`, `unguarded`; empty for
// calls that change nothing), and for guarded calls `{http.agent_guard.guard}`,
// `.action`, `.execution_id`, `.key`, `.caller` and `.workflow`, `.issuer` of a
// verified token, `.checkpoint` of the execution, `.outcome` (`completed`, `released`,
// `in_doubt`), `.cause` of a doubt, `.problem` of a refusal, and `.age` of a replayed
// execution in seconds. What does not apply is
// empty.
type Handler struct {
	// The guard's name. It is part of the execution key: two handlers of one name
	// share their keys, so that a call can move from one to the other. Default:
	// `default`.
	Name string `json:"name,omitempty"`

	// Where callers name the intended effect, in order; the first that has an id
	// counts. Default: the header `Idempotency-Key`, then `Execution-Id`.
	ExecutionID []IDSource `json:"execution_id,omitempty"`

	// What happens to a call without an id: `require` (400), `mint` (it runs under
	// an id that the answer names; its retries cannot be recognised) or `derive`
	// (equal calls of one caller within a window are one execution). Default:
	// `mint`.
	MissingID string `json:"missing_id,omitempty"`

	// How long a derived id counts, from the end of the execution. Default: 60s.
	DeriveWindow caddy.Duration `json:"derive_window,omitempty"`

	// Gives a call without an id that names its parent in `Execution-Parent` an id
	// made of parent, action and request, so that a retried nested call lands on
	// the same execution. Goes before `missing_id`. Default: false.
	Inherit bool `json:"inherit,omitempty"`

	// Who the caller is, as text with placeholders like `{http.auth.user.tenant}`.
	// Where one of them has no value, and by default: the subject of a verified
	// client certificate, else
	// `{http.auth.user.id}`, else a hash of the credential fields, else a hash of
	// the cookies, else `anonymous`. No caller ever gets another one's result.
	Caller string `json:"caller,omitempty"`

	// The header fields that are credentials, in any order. Default:
	// `Authorization`, `X-Api-Key`, `Api-Key`. An `Authorization` whose scheme is
	// neither Basic nor Bearer is refused (400 `caller-unstable`) where none of the
	// better identities applies.
	Credentials []string `json:"credentials,omitempty"`

	// Further calls that are guarded, among those with a safe method.
	ConsequentialRaw caddyhttp.RawMatcherSets `json:"consequential,omitempty" caddy:"namespace=http.matchers"`

	// Calls that are not guarded, among those with any other method: a search by
	// POST, for example.
	ExemptRaw caddyhttp.RawMatcherSets `json:"exempt,omitempty" caddy:"namespace=http.matchers"`

	// JSON pointers to members of the request's body that differ between the
	// attempts of one call, and are left out when two attempts are compared.
	FingerprintExclude []string `json:"fingerprint_exclude,omitempty"`

	// The largest request body, in bytes. Guarded calls are read whole before they
	// are forwarded; over 1 MiB they are kept in an encrypted temporary file.
	// Default: 32 MiB.
	MaxBody int64 `json:"max_body,omitempty"`

	// How long a retry waits for the first byte of an execution that is running,
	// before it gets 409 `in-progress`. Default: 30s.
	AttachWait caddy.Duration `json:"attach_wait,omitempty"`

	// The request header field in which callers say how long they wait, in seconds
	// (`10`, `0.5`) or with a unit. A call may take nine tenths of that, and no more
	// than its action's `deadline`. `grpc-timeout` is read besides. Default:
	// `Request-Timeout`.
	DeadlineHeader string `json:"deadline_header,omitempty"`

	// Forwards calls unguarded, marked `Execution-Status: unguarded`, where the
	// store is unavailable and nothing was claimed for them, in place of refusing
	// them with 503: such a call, and each retry of it, runs. Where the store
	// answers, what it has found stands. Default: false.
	FailOpen bool `json:"fail_open,omitempty"`

	// Refuses requests without an Execution Context Token (403 `ect-invalid`), those
	// that change nothing too. It needs `trust` in the global options. Default: false.
	RequireECT bool `json:"require_ect,omitempty"`

	// Callers who see the circuit breakers of all upstreams at
	// `/.well-known/cascade/circuits`: `issuer:` and the issuer of a verified token,
	// `certificate:dn:` and the subject of a client's certificate (`certificate:uri:` and
	// its URI where it has none), `user:` and a name of Caddy's authentication, or
	// `caller:` and a value of `caller`. Everybody else sees those of the upstreams
	// behind this guard, and what was told to a workflow of theirs. Default: none.
	Operators []string `json:"operators,omitempty"`

	// The identity of the upstream, a URI. Calls are then forwarded with a token of
	// the gateway's as a further `Execution-Context` line, which names the upstream in
	// its `aud` and is what the upstream's own tokens can name as their parent. It
	// needs `identity` in the global options. Default: none is sent.
	UpstreamIdentity string `json:"identity,omitempty"`

	// `off` lets the well-known paths through to the upstream instead of answering
	// them. Default: on.
	Endpoints string `json:"endpoints,omitempty"`

	// The handlers for requests of the guard's own, such as a status probe. They
	// lead to the same upstream as the calls do, and past site authentication.
	UpstreamRaw []json.RawMessage `json:"upstream,omitempty" caddy:"namespace=http.handlers inline_key=handler"`

	// The handlers that answer a call in place of 503 `circuit-open`, while the circuit
	// breakers refuse it: with a cached value, for example, or from another upstream.
	// Their answer is marked `Execution-Status: refused`, is not recorded, and takes no
	// key: each retry comes here again until an upstream is back, and then runs. So
	// what changes something does not belong here. Default: the problem.
	FallbackRaw []json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.handlers inline_key=handler"`

	// How calls are judged and kept, where their action does not say otherwise.
	Policy

	// How calls are undone that no action matches. Default: they cannot be.
	DefaultUndo *undoing.Ways `json:"default_undo,omitempty"`

	// Kinds of calls with rules of their own, in order.
	Actions []*Action `json:"actions,omitempty"`

	app               *App
	logger            *zap.Logger
	actions           []*Action // Actions and the default one
	credentials       []string  // Credentials, canonical and sorted
	consequentialSets caddyhttp.MatcherSets
	exemptSets        caddyhttp.MatcherSets
	pointers          []fingerprint.Pointer // of ExecutionID, by index
	fingerprints      fingerprint.Config
	upstream          caddyhttp.Handler
	upstreamHash      string // of where requests of the guard's own go
	restores          bool   // an action of it restores
	fallback          caddyhttp.Handler
	proxy             *atomic.Pointer[transport.Transport] // behind it, where that is known
	probes            *prober
	counts            *metrics.Guard
	failures          *stretch // calls that were forwarded for want of a store

	origin origin // of a Caddyfile's guard
}

const (
	missingRequire = "require"
	missingMint    = "mint"
	missingDerive  = "derive"

	endpointsOff = "off"

	// defaultAction is the name of what no action matches.
	defaultAction = "default"
)

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.agent_guard", New: func() caddy.Module { return new(Handler) }}
}

// Provision sets defaults and loads matchers and the upstream chain.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	h.probes, h.failures = new(prober), new(stretch)
	h.proxy = new(atomic.Pointer[transport.Transport])
	app, err := ctx.App("agent_guard")
	if err != nil {
		return err
	}
	h.app = app.(*App)
	h.setDefaults()
	if err := h.provisionIDs(); err != nil {
		return err
	}
	if h.RequireECT && app.(*App).Trust == nil {
		return errors.New("require_ect: it needs `trust` in the global options, which says whose tokens are believed")
	}
	if h.UpstreamIdentity != "" {
		if err := checkIdentity(h.UpstreamIdentity); err != nil {
			return fmt.Errorf("identity: %w", err)
		}
		if app.(*App).Identity == nil {
			return errors.New("identity: it needs an `identity` in the global options, in whose name tokens are sent to the upstream")
		}
	}
	if err := provisionMatchers(ctx, h, "ConsequentialRaw", h.ConsequentialRaw, &h.consequentialSets); err != nil {
		return fmt.Errorf("consequential: %w", err)
	}
	if err := provisionMatchers(ctx, h, "ExemptRaw", h.ExemptRaw, &h.exemptSets); err != nil {
		return fmt.Errorf("exempt: %w", err)
	}
	if h.UpstreamRaw != nil {
		h.upstreamHash = nameOf(h.UpstreamRaw) // which loading empties
		mods, err := ctx.LoadModule(h, "UpstreamRaw")
		if err != nil {
			return fmt.Errorf("upstream: %w", err)
		}
		h.upstream = compile(mods.([]any), "upstream")
	}
	if h.FallbackRaw != nil {
		mods, err := ctx.LoadModule(h, "FallbackRaw")
		if err != nil {
			return fmt.Errorf("fallback: %w", err)
		}
		h.fallback = compile(mods.([]any), "fallback")
	}
	if err := h.provisionActions(ctx); err != nil {
		return err
	}
	if h.Caller == "" && !h.RequireECT {
		h.logger.Warn("calls without any credential share one space of execution ids; require authentication, or name the caller with `caller`",
			zap.String("guard", h.Name), zap.String("caller", anonymous))
	}
	if h.FailOpen {
		h.logger.Warn("fail_open: while the store is unavailable, calls are forwarded unguarded and their retries run again",
			zap.String("guard", h.Name))
	}
	h.app.guards.add(h)
	return nil
}

func (h *Handler) setDefaults() {
	inherit(&h.Name, "default")
	inherit(&h.DeadlineHeader, headerRequestTimeout)
	inherit(&h.MissingID, missingMint)
	inherit(&h.DeriveWindow, caddy.Duration(60*time.Second))
	inherit(&h.MaxBody, 32<<20)
	inherit(&h.AttachWait, caddy.Duration(30*time.Second))
	// An empty list is as good as none: without any credential field, every caller
	// would be the same (P3).
	if len(h.ExecutionID) == 0 {
		h.ExecutionID = []IDSource{{Header: "Idempotency-Key"}, {Header: headerExecutionID}}
	}
	if len(h.Credentials) == 0 {
		h.Credentials = []string{"Authorization", "X-Api-Key", "Api-Key"}
	}
	h.Policy.inherit(&defaults)
}

func (h *Handler) provisionIDs() error {
	if h.Caller != "" {
		if err := checkPlaceholder(h.Caller); err != nil {
			return fmt.Errorf("caller: %w", err)
		}
	}
	if err := checkFields([]string{h.DeadlineHeader}); err != nil {
		return fmt.Errorf("deadline_header: %w", err)
	}
	if err := checkFields(h.Credentials); err != nil {
		return fmt.Errorf("credentials: %w", err)
	}
	h.credentials = canonical(h.Credentials)
	if err := checkOperators(h.Operators); err != nil {
		return fmt.Errorf("operators: %w", err)
	}
	h.pointers = make([]fingerprint.Pointer, len(h.ExecutionID))
	for i := range h.ExecutionID {
		source := &h.ExecutionID[i]
		if err := source.check(); err != nil {
			return fmt.Errorf("execution_id: source %d: %w", i+1, err)
		}
		h.pointers[i], _ = fingerprint.ParsePointer(source.JSON) // checked
	}
	var err error
	if h.fingerprints.Exclude, err = parsePointers(h.FingerprintExclude); err != nil {
		return fmt.Errorf("fingerprint_exclude: %w", err)
	}
	return nil
}

// provisionMatchers loads the matchers in the named field of host.
func provisionMatchers(ctx caddy.Context, host any, field string, raw caddyhttp.RawMatcherSets, into *caddyhttp.MatcherSets) error {
	if len(raw) == 0 {
		return nil
	}
	for i, set := range raw {
		if len(set) == 0 {
			return fmt.Errorf("matcher set %d is empty and would match every call; name a matcher, or leave the set out", i+1)
		}
	}
	mods, err := ctx.LoadModule(host, field)
	if err != nil {
		return err
	}
	return into.FromInterface(mods)
}

// provisionActions makes h.actions of the configured ones and the default one.
func (h *Handler) provisionActions(ctx caddy.Context) error {
	fallback := &Action{Name: defaultAction}
	if h.DefaultUndo != nil {
		fallback.Ways = *h.DefaultUndo
	}
	if err := h.provisionPolicy(fallback); err != nil {
		return err
	}
	for i, a := range h.Actions {
		if a == nil {
			return fmt.Errorf("actions: action %d is null; leave it out", i+1)
		}
		if err := checkName(a.Name, h.Actions[:i]); err != nil {
			return fmt.Errorf("actions: action %d: %w", i+1, err)
		}
		if err := provisionMatchers(ctx, a, "MatcherSetsRaw", a.MatcherSetsRaw, &a.matchers); err != nil {
			return fmt.Errorf("action %s: match: %w", a.Name, err)
		}
		if err := h.provisionPolicy(a); err != nil {
			return fmt.Errorf("action %s: %w", a.Name, err)
		}
	}
	h.actions = append(slices.Clip(h.Actions), fallback)
	h.counts = h.app.collector.Guard(h.Name)
	if h.app.Trust != nil {
		h.counts.Tokens()
	}
	for _, a := range h.actions {
		a.counts = h.app.collector.Action(h.Name, a.Name)
	}
	return nil
}

// provisionPolicy completes the policy of an action.
func (h *Handler) provisionPolicy(a *Action) error {
	a.inherit(&h.Policy)
	if err := a.Policy.validate(); err != nil {
		return err
	}
	a.rules = guard.Rules{Preset: a.Preset}
	for i := range a.Outcomes {
		a.Outcomes[i].verdict, _ = guard.ParseVerdict(a.Outcomes[i].Outcome) // validated
	}
	if err := h.provisionUndo(a); err != nil {
		return err
	}
	if a.OnUnknown != onUnknownProbe {
		return nil
	}
	if h.upstream == nil {
		return errors.New("on_unknown: probe needs an `upstream`: the handlers by which the guard's own requests reach the upstream")
	}
	return a.Probe.provision()
}

// Validate checks what Provision has set.
func (h *Handler) Validate() error {
	if err := checkGuardName(h.Name); err != nil {
		return err
	}
	if err := oneOf(h.MissingID, missingRequire, missingMint, missingDerive); err != nil {
		return fmt.Errorf("missing_id: %w", err)
	}
	if h.Endpoints != "" {
		if err := oneOf(h.Endpoints, endpointsOff); err != nil {
			return fmt.Errorf("endpoints: %w, or leave it out", err)
		}
	}
	if err := checkDuration(h.DeriveWindow); err != nil {
		return fmt.Errorf("derive_window: %w", err)
	}
	if err := checkDuration(h.AttachWait); err != nil {
		return fmt.Errorf("attach_wait: %w", err)
	}
	if h.MaxBody < 0 {
		return fmt.Errorf("max_body: %d bytes is negative; it must be positive", h.MaxBody)
	}
	return nil
}

var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.Validator             = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
