package caddymodule

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

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
// It sets the placeholders `{http.agent_guard.execution_id}`,
// `{http.agent_guard.action}` and `{http.agent_guard.status}` (`executed`,
// `replayed`, `attached`, `refused`, `unguarded`; empty for calls that change
// nothing), and `{http.agent_guard.problem}` on refusals.
type Handler struct {
	// The guard's name. It is part of the execution key: two handlers of one name
	// share their keys, so that a call can move from one to the other. Default:
	// `default`.
	Name string `json:"name,omitempty"`

	// Where callers name the intended effect, in order. Default: the header
	// `Idempotency-Key`, then `Execution-Id`.
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

	// Who the caller is, as a placeholder like `{http.auth.user.tenant}`. Where it
	// is empty, and by default: the subject of a verified client certificate, else
	// `{http.auth.user.id}`, else a hash of the credential fields, else a hash of
	// the cookies, else `anonymous`. No caller ever gets another one's result.
	Caller string `json:"caller,omitempty"`

	// The header fields that are credentials. Default: `Authorization`,
	// `X-Api-Key`, `Api-Key`.
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

	// `off` lets the well-known paths through to the upstream instead of answering
	// them. Default: on.
	Endpoints string `json:"endpoints,omitempty"`

	// The handlers for requests of the guard's own, such as a status probe. They
	// lead to the same upstream as the calls do, and past site authentication.
	UpstreamRaw []json.RawMessage `json:"upstream,omitempty" caddy:"namespace=http.handlers inline_key=handler"`

	// How calls are judged and kept, where their action does not say otherwise.
	Policy

	// Kinds of calls with rules of their own, in order.
	Actions []*Action `json:"actions,omitempty"`

	app               *App
	logger            *zap.Logger
	actions           []*Action // Actions and the default one
	consequentialSets caddyhttp.MatcherSets
	exemptSets        caddyhttp.MatcherSets
	pointers          []fingerprint.Pointer // of ExecutionID, by index
	fingerprints      fingerprint.Config
	upstream          caddyhttp.Handler
	probes            *prober

	// ownRequests is the first option that makes requests of the guard's own.
	ownRequests *caddyfile.Token
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
	h.probes = new(prober)
	app, err := ctx.App("agent_guard")
	if err != nil {
		return err
	}
	h.app = app.(*App)
	h.setDefaults()
	if err := h.provisionIDs(); err != nil {
		return err
	}
	if err := h.provisionMatchers(ctx); err != nil {
		return err
	}
	if h.UpstreamRaw != nil {
		mods, err := ctx.LoadModule(h, "UpstreamRaw")
		if err != nil {
			return fmt.Errorf("upstream: %w", err)
		}
		h.upstream = compile(mods.([]any))
	}
	for i, a := range h.actions {
		if err := h.provisionAction(ctx, a); err != nil {
			return fmt.Errorf("action %d (%s): %w", i+1, a.Name, err)
		}
	}
	if h.Caller == "" {
		h.logger.Warn("calls without any credential share one space of execution ids; require authentication, or name the caller with `caller`",
			zap.String("guard", h.Name), zap.String("caller", anonymous))
	}
	return nil
}

func (h *Handler) setDefaults() {
	inherit(&h.Name, "default")
	inherit(&h.MissingID, missingMint)
	inherit(&h.DeriveWindow, caddy.Duration(60*time.Second))
	inherit(&h.MaxBody, 32<<20)
	inherit(&h.AttachWait, caddy.Duration(30*time.Second))
	if h.ExecutionID == nil {
		h.ExecutionID = []IDSource{{Header: "Idempotency-Key"}, {Header: headerExecutionID}}
	}
	if h.Credentials == nil {
		h.Credentials = []string{"Authorization", "X-Api-Key", "Api-Key"}
	}
	h.Policy.inherit(&defaults)
	h.actions = append(slices.Clip(h.Actions), &Action{Name: defaultAction})
}

func (h *Handler) provisionIDs() error {
	h.pointers = make([]fingerprint.Pointer, len(h.ExecutionID))
	for i, s := range h.ExecutionID {
		set := 0
		for _, v := range []string{s.Header, s.Placeholder, s.JSON} {
			if v != "" {
				set++
			}
		}
		if set != 1 {
			return fmt.Errorf("execution_id source %d names %d places; it needs exactly one of header, placeholder and json", i+1, set)
		}
		if s.JSON != "" {
			p, err := fingerprint.ParsePointer(s.JSON)
			if err != nil {
				return fmt.Errorf("execution_id json %q: %w", s.JSON, err)
			}
			h.pointers[i] = p
		}
	}
	for _, text := range h.FingerprintExclude {
		p, err := fingerprint.ParsePointer(text)
		if err != nil {
			return fmt.Errorf("fingerprint_exclude %q: %w", text, err)
		}
		h.fingerprints.Exclude = append(h.fingerprints.Exclude, p)
	}
	return nil
}

func (h *Handler) provisionMatchers(ctx caddy.Context) error {
	for _, m := range []struct {
		name, field string
		raw         caddyhttp.RawMatcherSets
		sets        *caddyhttp.MatcherSets
	}{
		{"consequential", "ConsequentialRaw", h.ConsequentialRaw, &h.consequentialSets},
		{"exempt", "ExemptRaw", h.ExemptRaw, &h.exemptSets},
	} {
		if len(m.raw) == 0 {
			continue
		}
		mods, err := ctx.LoadModule(h, m.field)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if err := m.sets.FromInterface(mods); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return nil
}

func (h *Handler) provisionAction(ctx caddy.Context, a *Action) error {
	if len(a.MatcherSetsRaw) > 0 {
		mods, err := ctx.LoadModule(a, "MatcherSetsRaw")
		if err != nil {
			return fmt.Errorf("match: %w", err)
		}
		if err := a.matchers.FromInterface(mods); err != nil {
			return fmt.Errorf("match: %w", err)
		}
	}
	a.inherit(&h.Policy)
	a.rules = guard.Rules{Preset: a.Preset}
	if err := a.Policy.validate(); err != nil {
		return err
	}
	if a.OnUnknown != onUnknownProbe {
		return nil
	}
	if h.upstream == nil {
		return errors.New("on_unknown probe needs an `upstream`: the handlers by which the guard's own requests reach the upstream")
	}
	return a.Probe.provision()
}

// Validate checks what Provision has set.
func (h *Handler) Validate() error {
	if !slices.Contains([]string{missingRequire, missingMint, missingDerive}, h.MissingID) {
		return fmt.Errorf("missing_id %q is unknown; use %s, %s or %s", h.MissingID, missingRequire, missingMint, missingDerive)
	}
	if h.Endpoints != "" && h.Endpoints != endpointsOff {
		return fmt.Errorf("endpoints %q is unknown; leave it out or use off", h.Endpoints)
	}
	if h.DeriveWindow < 0 || h.AttachWait < 0 || h.MaxBody < 0 {
		return errors.New("derive_window, attach_wait and max_body must not be negative")
	}
	names := map[string]bool{}
	for _, a := range h.actions {
		switch {
		case a.Name == "":
			return errors.New("an action has no name")
		case names[a.Name]:
			return fmt.Errorf("two actions have the name %q; %q is also the name of what no action matches", a.Name, defaultAction)
		}
		names[a.Name] = true
	}
	return nil
}

var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.Validator             = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
