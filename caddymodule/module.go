// Package caddymodule is the Caddy plugin: the app, the handlers, the endpoints and their
// Caddyfile syntax. It is the only package that depends on Caddy's configuration. It turns
// configuration and Caddy's chain of handlers into a guard.Handler.
package caddymodule

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

func init() {
	caddy.RegisterModule(Handler{})
}

// Handler executes calls that change something at most once. It stands before the handler that
// forwards them, usually `reverse_proxy` with the transport `agent_guard`; the Caddyfile directive
// `agent_proxy` creates both.
//
// A retried call is recognised by its execution id: it gets the recorded answer, or attaches to the
// execution that is still running. Calls that change nothing pass through untouched.
//
// It sets placeholders for logs and matchers: `{http.agent_guard.status}` (`executed`, `replayed`,
// `attached`, `in_doubt`, `refused`, `unguarded`; empty for calls that change nothing), and for
// guarded calls `{http.agent_guard.guard}`, `.action`, `.execution_id`, `.key`, `.caller`,
// `.workflow`, `.issuer` of a verified token, `.checkpoint` of the execution, `.outcome`
// (`completed`, `released`, `in_doubt`), `.cause` of a call in doubt, `.problem` of a refusal,
// `.age` of a replayed execution in seconds, and `.recognized`, the evidence by which a call was
// recognised as a retry. A placeholder that does not apply is empty.
type Handler struct {
	guard.Settings

	// Declares that other guards of this name share its namespace: they are one service with the
	// same users, and a call to one may be answered with the result of a call to another. Default:
	// false.
	Shared bool `json:"shared,omitempty"`

	// Calls with a safe method that are guarded nevertheless. Default: none.
	ConsequentialRaw caddyhttp.RawMatcherSets `json:"consequential,omitempty" caddy:"namespace=http.matchers"`

	// Calls with any other method that are not guarded, such as a search by POST. Default: none.
	ExemptRaw caddyhttp.RawMatcherSets `json:"exempt,omitempty" caddy:"namespace=http.matchers"`

	// How the upstream is shared among workflows. Default: limits that an ordinary site does not reach.
	Bulkhead Bulkhead `json:"bulkhead,omitzero"`

	// Callers who see the circuit breakers of all upstreams at `/.well-known/cascade/circuits`:
	// `issuer:` with the issuer of a verified token, `certificate:dn:` with the subject of a client
	// certificate (`certificate:uri:` with its URI if it has no subject), `user:` with a user name
	// of Caddy's authentication, or `caller:` with a value of `caller`. Everybody else sees those
	// of the upstreams behind this guard, and those recorded in a workflow of theirs. They also have
	// the role `operator`, and may decide escalations. Default: none.
	Operators []string `json:"operators,omitempty"`

	Roles

	// `off` passes the well-known paths on to the upstream instead of answering them. Default: on.
	Endpoints string `json:"endpoints,omitempty"`

	// The handlers through which the guard's own requests, such as probes, reach the upstream of
	// the calls without passing the site's authentication.
	UpstreamRaw []json.RawMessage `json:"upstream,omitempty" caddy:"namespace=http.handlers inline_key=handler"`

	// The handlers that answer instead of 503 `circuit-open`, while the circuit breakers refuse a
	// call: with a cached value, for example, or from another upstream. Their answer is marked
	// `Execution-Status: refused`, is not recorded and does not use up the id: each retry comes
	// here until an upstream is back, and then runs. So nothing that has an effect belongs here.
	// Default: the problem.
	FallbackRaw []json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.handlers inline_key=handler"`

	// How calls are judged and kept, where their action does not say otherwise.
	guard.Policy

	Answers

	// How calls that no action matches are undone. Default: they cannot be undone.
	DefaultUndo *Ways `json:"default_undo,omitempty"`

	// Kinds of calls with their own rules; the first that matches counts.
	Actions []*Action `json:"actions,omitempty"`

	// The place of the directive in the Caddyfile, like `Caddyfile:12`, so that errors at load can
	// name it. Default: they name none.
	WrittenAt string `json:"written_at,omitempty"`

	app               *App
	logger            *slog.Logger
	actions           []*Action        // the configured actions and the default one
	fields            *body.Fields     // what each header field is
	naming            execution.Naming // by what keys are named
	consequentialSets caddyhttp.MatcherSets
	exemptSets        caddyhttp.MatcherSets
	upstream          caddyhttp.Handler
	reach             rollback.Reach // where the gateway's own requests lead
	fallback          caddyhttp.Handler
	proxy             *atomic.Pointer[proxy.Transport] // the transport behind the guard, if known
	oneServer         *atomic.Bool                     // equal requests always go to the same upstream
	errorRoutes       *atomic.Bool                     // the server, or a subroute around the guard, has error routes
	balancing         *atomic.Pointer[[]string]        // the cookies by which the proxies behind it choose an upstream
	realm             string                           // the namespace of user names
	pool              *bulkhead.Pool                   // of Bulkhead; nil if it is off
	handler           *guard.Handler                   // made from this configuration

	origin  origin // in the Caddyfile
	server  *caddyhttp.Server
	place   string // the name of the server
	written string // its own JSON before loading, from writtenAs
}

const (
	endpointsOff = "off"

	// idleOff disables the idle timeout.
	idleOff = jsontime.Duration(-1)

	// defaultAction is the name for calls that match no action.
	defaultAction = "default"
	// defaultGuard is the name of a guard without a configured name.
	defaultGuard = "default"
)

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.agent_guard", New: func() caddy.Module { return new(Handler) }}
}

// UnmarshalJSON implements json.Unmarshaler. Errors have the path of the member.
func (h *Handler) UnmarshalJSON(text []byte) error {
	type plain Handler
	return option.DecodeJSON(text, (*plain)(h))
}

// Provision sets defaults, loads matchers and the upstream chain, and checks the options.
func (h *Handler) Provision(ctx caddy.Context) error {
	err := h.provision(ctx)
	if err == nil {
		err = h.validate()
	}
	return withPlace(err, h.WrittenAt)
}

func (h *Handler) provision(ctx caddy.Context) error {
	h.logger = ctx.Slogger()
	h.proxy, h.oneServer, h.balancing, h.errorRoutes = new(atomic.Pointer[proxy.Transport]), new(atomic.Bool), new(atomic.Pointer[[]string]), new(atomic.Bool)
	app, err := ctx.App("agent_guard")
	if err != nil {
		return err
	}
	h.app = app.(*App)
	h.setDefaults()
	h.written = h.writtenAs()
	if h.server, _ = ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); h.server != nil {
		h.place = serverName(ctx, h.server)
	}
	if err := h.app.guards.checkReached(h.server, h.place); err != nil {
		return err
	}
	if err := h.provisionIDs(); err != nil {
		return err
	}
	if err := h.lacksGlobal(h.app); err != nil {
		return err
	}
	if err := provisionMatchers(ctx, h, "ConsequentialRaw", h.ConsequentialRaw, &h.consequentialSets); err != nil {
		return fmt.Errorf("consequential: %w", err)
	}
	if err := provisionMatchers(ctx, h, "ExemptRaw", h.ExemptRaw, &h.exemptSets); err != nil {
		return fmt.Errorf("exempt: %w", err)
	}
	if h.UpstreamRaw != nil {
		sources := dynamicOf(h.UpstreamRaw) // loading empties it
		mods, err := ctx.LoadModule(h, "UpstreamRaw")
		if err != nil {
			return fmt.Errorf("upstream: %w", err)
		}
		h.reach = reachOf(mods.([]any), sources)
		h.upstream = compile(mods.([]any), "upstream")
	}
	if h.FallbackRaw != nil {
		mods, err := ctx.LoadModule(h, "FallbackRaw")
		if err != nil {
			return fmt.Errorf("fallback: %w", err)
		}
		h.fallback = compile(mods.([]any), "fallback")
	}
	if err := h.provisionBulkhead(); err != nil {
		return err
	}
	if err := h.provisionActions(ctx); err != nil {
		return err
	}
	if h.FailOpen {
		h.logger.Warn("fail_open: while the store is unavailable, calls are forwarded unguarded and their retries run again",
			slog.String("guard", h.Name))
	}
	everything := func(set caddyhttp.MatcherSet) bool {
		if len(set) != 1 {
			return false
		}
		paths, _ := set[0].(*caddyhttp.MatchPath)
		return paths != nil && (slices.Contains(*paths, "*") || slices.Contains(*paths, "/*"))
	}
	if slices.ContainsFunc(h.exemptSets, everything) {
		h.logger.Warn("`exempt` takes every path, so all calls pass unguarded but those that `consequential` names; name the paths that change nothing",
			slog.String("guard", h.Name))
	}
	return h.app.guards.add(h)
}

// lacksGlobal returns the error of an option whose global option is missing.
func (h *Handler) lacksGlobal(app *App) error {
	switch {
	case h.RequireECT && app.Trust == nil:
		return invalidOption("require_ect", "it needs `trust` in the global options, which says whose tokens are believed")
	case h.UpstreamIdentity != "" && app.Identity == nil:
		return invalidOption("identity", "it needs an `identity` in the global options, in whose name tokens are sent to the upstream")
	}
	return nil
}

func (h *Handler) setDefaults() {
	h.Settings.SetDefaults()
	h.Policy.Inherit(nil)
}

func (h *Handler) provisionIDs() error {
	if err := checkOptions(guardOptions(), h); err != nil {
		return err
	}
	if err := h.classify(); err != nil {
		return err
	}
	for i, source := range h.ExecutionID {
		if err := checkSource(source); err != nil {
			return fmt.Errorf("execution_id: source %d: %w", i+1, err)
		}
	}
	return nil
}

// classify finds out what each header field is for this guard, and checks what names callers and tenants.
func (h *Handler) classify() (err error) {
	c := guard.Settings{Caller: h.Caller, CallerCookies: h.CallerCookies, Credentials: h.Credentials, Tenant: h.Tenant}
	if h.fields, h.naming, err = c.Fields(); err != nil {
		return err
	}
	if err := checkCompared(h.Compare, nil, h.fields); err != nil {
		return fmt.Errorf("compare: %w", err)
	}
	if err := checkCompared(h.Ignore, h.Compare, h.fields); err != nil {
		return fmt.Errorf("ignore: %w", err)
	}
	h.fields.Set(body.Operand, h.Compare...)
	h.fields.Set(body.Volatile, h.Ignore...)
	return nil
}

// named is the table of header fields as `credentials` and `tenant` make it, as far as they were read.
func (h *Handler) named() *body.Fields {
	c := guard.Settings{Credentials: h.Credentials, Tenant: h.Tenant}
	if fields, _, err := c.Fields(); err == nil {
		return fields
	}
	return body.NewFields()
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

// provisionActions compiles the configured actions and the default one, and makes the
// guard.Handler of this configuration with them.
func (h *Handler) provisionActions(ctx caddy.Context) error {
	fallback := &Action{Action: guard.Action{Name: defaultAction, Default: true}}
	if h.DefaultUndo != nil {
		fallback.Ways = *h.DefaultUndo
	}
	if err := h.provisionPolicy(fallback, nil); err != nil {
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
		if err := h.provisionPolicy(a, h.Actions[:i]); err != nil {
			return fmt.Errorf("action %s: %w", a.Name, err)
		}
		if a.Consequential {
			h.consequentialSets = append(slices.Clip(h.consequentialSets), a.matchers...)
		}
	}
	h.actions = append(slices.Clip(h.Actions), fallback)
	var err error
	h.handler, err = h.newHandler()
	return err
}

// newHandler makes the guard.Handler of this configuration.
func (h *Handler) newHandler() (*guard.Handler, error) {
	c := guard.Config{
		Settings: h.Settings, Policy: h.Policy, Realm: h.realm, Host: host{h}, Open: h.app.openCalls, Verifies: h.app.Trust != nil,
		Tokens: func() (*guard.TokenPolicy, error) {
			policy, err := h.app.tokenPolicy()
			return policy.forCalls(), err
		},
		Consequential: matchOf(h.consequentialSets), Exempt: matchOf(h.exemptSets), BalancingCookies: h.balancingCookies,
		Quota: h.app.Quota.ofCaller(), Checkpoints: h.app.Quota.ofCheckpoints(),
		Bulkhead: h.pool, Fallback: h.fallback, Refusal: h.refusal, Counts: h.app.collector.Guard(h.Name), Logger: h.logger,
	}
	if h.oneServer != nil {
		c.OneServer = h.oneServer.Load
	}
	if h.Endpoints != endpointsOff {
		c.Endpoint = h.serveEndpoint
	}
	if h.upstream != nil {
		c.Send, c.Reach = h.send, h.reach.Name()
	}
	if c.Verifies {
		c.Counts.VerifiesTokens()
	}
	for _, a := range h.actions {
		c.Actions = append(c.Actions, a.forCalls(h))
	}
	return guard.New(c)
}

// readsMessages reports whether the guard reads the messages of a protocol.
func (h *Handler) readsMessages() bool { return h.Protocol != protocol.None }

// forCalls completes the action as package guard needs it.
func (a *Action) forCalls(h *Handler) *guard.Action {
	a.Match, a.Rule, a.Action.Irreversible = matchOf(a.matchers), a.rule, a.Ways.Irreversible
	a.Counts = h.app.collector.Action(h.Name, a.Name)
	if a.Answers.Probe != nil {
		a.Action.Probe = a.Answers.Probe.forCalls(h)
	}
	return &a.Action
}

// rule returns the verdict of the first rule that matches an answer.
func (a *Action) rule(status int, header http.Header) (execution.Verdict, bool) {
	for i := range a.Outcomes {
		if rule := &a.Outcomes[i]; rule.Match.Match(status, header) {
			return rule.verdict, true
		}
	}
	return 0, false
}

func matchOf(sets caddyhttp.MatcherSets) guard.Match {
	if len(sets) == 0 {
		return nil
	}
	return sets.AnyMatchWithError
}

// refusal returns the error with which the breakers behind the guard would refuse every
// call of this method and view, and the upstream's name; nil if they would not.
func (h *Handler) refusal(method string, view *breaker.View) (open *breaker.OpenError, name string) {
	t := h.proxy.Load()
	if t == nil {
		return nil, ""
	}
	if open = t.Refusal(method, view); open == nil {
		return nil, ""
	}
	return open, t.Downstream(open.Key.Upstream)
}

// complete completes the policy of an action with its guard's, checks the action as far as it depends on
// nothing but the guard, and compiles the way to undo its calls. earlier are the actions before it.
func (h *Handler) complete(a *Action, guards policy, earlier []*Action) (*guard.UndoPlan, error) {
	a.policy().inherit(guards)
	if err := a.policy().check(); err != nil {
		return nil, err
	}
	if err := a.checkMessages(h); err != nil {
		return nil, err
	}
	plan, err := compileUndo(&a.Ways, &a.Terms, h.Name, h.fields)
	if err != nil {
		return nil, err
	}
	return plan, cmp.Or(a.checkOnError(), a.checkConsequential(), a.checkReached(earlier))
}

// provisionPolicy completes, checks and compiles the policy of an action.
func (h *Handler) provisionPolicy(a *Action, earlier []*Action) error {
	if err := checkOptions(actionOptions(), a); err != nil {
		return err
	}
	plan, err := h.complete(a, h.policy(), earlier)
	if err != nil {
		return err
	}
	if a.Order == guard.OrderPar && (h.app.Identity == nil || h.app.Trust == nil) {
		return invalidOption("order", "par needs an `identity` and `trust` in the global options: it is about what verified tokens name, and what the ledger says of that")
	}
	for i := range a.Outcomes {
		a.Outcomes[i].verdict, _ = execution.ParseVerdict(a.Outcomes[i].Outcome) // validated
	}
	if err := h.provisionUndo(a, plan); err != nil {
		return err
	}
	if a.OnUnknown != guard.OnUnknownProbe {
		return nil
	}
	if h.upstream == nil {
		return errors.New("on_unknown: probe needs an `upstream`: the handlers by which the guard's own requests reach the upstream")
	}
	return a.Answers.Probe.provision()
}

func (h *Handler) validate() error {
	words := len(h.MetaKeys) + len(h.ArgumentKeys) + len(h.ExemptTools) + len(h.ConsequentialTools)
	if words > 0 && !h.readsMessages() {
		return errors.New("`exempt tool`, `consequential tool` and `execution_id meta` or `argument` are for messages, which `protocol none` does not read")
	}
	for name, tools := range map[string][]string{"exempt_tools": h.ExemptTools, "consequential_tools": h.ConsequentialTools} {
		for i, tool := range tools {
			if tool == "" || slices.Contains(tools[:i], tool) {
				return fmt.Errorf("%s: the tool %q is empty or named twice; name each tool once", name, tool)
			}
		}
	}
	for _, tool := range h.ExemptTools {
		if slices.Contains(h.ConsequentialTools, tool) {
			return fmt.Errorf("the tool %q is both exempt and consequential", tool)
		}
	}
	for name, v := range map[string]jsontime.Duration{
		"recognize_window": h.RecognizeWindow, "error_window": h.ErrorWindow, "derive_window": h.DeriveWindow,
	} {
		if err := option.CheckDuration(v); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)

// A guard's name is a namespace of execution ids and callers (ADR 0044). Two guards of one name would
// answer calls to one upstream with results of the other (P1), and confuse users of the same name
// (P3). So each name is unique in a configuration, unless its guards are `shared`.

// namesKey is the key of the guards' names in the state of one Caddyfile.
const namesKey = "agent_guard.names"

// claimName refuses a name that another guard of the same Caddyfile has.
func (h *Handler) claimName(helper httpcaddyfile.Helper) error {
	if helper.State == nil {
		return nil // Provision checks it too
	}
	at := h.origin[""][0]
	if name, ok := h.origin["name"]; ok {
		at = name[0]
	}
	type claimed struct {
		at     caddyfile.Token
		shared bool
		count  int
	}
	names, _ := helper.State[namesKey].(map[string]claimed)
	if names == nil {
		names = map[string]claimed{}
		helper.State[namesKey] = names
	}
	name := cmp.Or(h.Name, defaultGuard)
	first, taken := names[name]
	switch {
	case !taken:
		names[name] = claimed{at, h.Shared, 1}
		return nil
	case !first.shared || !h.Shared:
		return option.ErrorAt(at, sameName(name, placeOf(first.at), first.count+1))
	}
	first.count++
	names[name] = first
	return nil
}

// sameName returns the error of two guards with the same name.
func sameName(name, other string, number int) error {
	return fmt.Errorf("the guard at %s is called %q too, and one name is one space of execution ids and callers: "+
		"a call to one would be answered with the result of the other. "+
		"Write `name %s-%d`, or another name, in one of them; or, if both are one service with the same users, `name %s shared` in both",
		other, name, name, number, quotedWord(name))
}

// quotedWord quotes a word for a Caddyfile, if needed.
func quotedWord(word string) string {
	if strings.ContainsAny(word, " \t\"`{}") {
		return "`" + word + "`"
	}
	return word
}

// serverName names a server of the configuration, as errors do.
func serverName(ctx caddy.Context, server *caddyhttp.Server) string {
	name := "?"
	if app, err := ctx.App("http"); err == nil {
		for n, s := range app.(*caddyhttp.App).Servers {
			if s == server {
				name = n
			}
		}
	}
	return "apps/http/servers/" + name
}

// hostsOf are the hosts of a site.
func hostsOf(route *caddyhttp.Route) string {
	var hosts []string
	for _, set := range route.MatcherSets {
		for _, matcher := range set {
			switch m := matcher.(type) {
			case caddyhttp.MatchHost:
				hosts = append(hosts, m...)
			case *caddyhttp.MatchHost:
				hosts = append(hosts, *m...)
			}
		}
	}
	return strings.Join(hosts, ", ")
}

// add adds a guard that is being provisioned.
func (g *guards) add(h *Handler) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	number := 1
	for _, other := range g.all {
		if other.Name != h.Name {
			continue
		}
		number++
		if other.Shared && h.Shared {
			if h.naming != other.naming {
				return fmt.Errorf("%s: the guards that share the name %q have one namespace of callers; give them the same `caller`, `credentials` and `tenant`",
					h.place, h.Name)
			}
			if h.Bulkhead != other.Bulkhead {
				return fmt.Errorf("%s: bulkhead: the guards that share the name %q have one bulkhead; give them the same limits", h.place, h.Name)
			}
			continue
		}
		// Several servers may have the same site; checkVisits finds out whether it is the
		// same.
		if other.server != h.server && other.written == h.written {
			continue
		}
		return fmt.Errorf("%s: name: %w", h.place, sameName(h.Name, cmp.Or(other.WrittenAt, other.place), number))
	}
	g.all, g.sites = append(g.all, h), append(g.sites, &h.Roles)
	return nil
}

// writtenAs returns the configuration of a guard as text, before loading its modules
// empties parts of it.
func (h *Handler) writtenAs() string {
	text, err := json.Marshal(h)
	var members map[string]any
	if err == nil {
		err = json.Unmarshal(text, &members)
	}
	if err == nil {
		delete(members, placeMember)
		text, err = json.Marshal(withoutPlaces(members))
	}
	if err != nil {
		return fmt.Sprintf("%p", h) // unique
	}
	return string(text)
}

// placeMember is the member of a configuration with its place in a Caddyfile, for errors only.
const placeMember = "written_at"

// withoutPlaces removes the places from v, so that a configuration that moved to another line compares
// equal (ADR 0066).
func withoutPlaces(v any) any {
	switch v := v.(type) {
	case map[string]any:
		// A guard, or the breaker of a transport. Elsewhere the name may be the user's own, such as
		// in the body of an undo.
		if v["handler"] == "agent_guard" || v["verify_probe"] == true {
			delete(v, placeMember)
		}
		for _, member := range v {
			withoutPlaces(member)
		}
	case []any:
		for _, member := range v {
			withoutPlaces(member)
		}
	}
	return v
}

func (h *Handler) checkPolicies() error {
	if err := h.classify(); err != nil {
		return place(err, h.origin)
	}
	own := h.Policy // the JSON must not have what completing adds
	own.Inherit(nil)
	guards, fallback := policy{&own, &h.Answers}, new(Action)
	fallback.policy().inherit(guards)
	err := fallback.policy().check()
	if err == nil {
		err = fallback.checkMessages(h)
	}
	if err != nil {
		return place(err, h.origin)
	}
	if h.DefaultUndo != nil {
		if _, err := compileUndo(h.DefaultUndo, &own.Terms, h.Name, h.fields); err != nil {
			return placeUndo(err, "default_undo", h.origin)
		}
	}
	for i, a := range h.Actions {
		check := *a
		if _, err := h.complete(&check, guards, h.Actions[:i]); err != nil {
			return place(fmt.Errorf("action %s: %w", a.Name, err), a.origin, h.origin)
		}
	}
	return nil
}

// provisionUndo checks and completes the ways in which the calls of an action are undone.
func (h *Handler) provisionUndo(a *Action, plan *guard.UndoPlan) error {
	if err := a.needsIdentity(); err != nil && h.app.Identity == nil {
		return err
	}
	if wayOf(&a.Ways) == "" {
		return nil
	}
	if a.Ways.DelegateTo != "" && h.app.Trust == nil {
		return errors.New("delegate: the answers of a named agent count only if they verify; add `trust` with its keys to the global options, or write `unsigned` in the place of the identity")
	}
	if option, own := a.ownRequests(); own && h.upstream == nil {
		return fmt.Errorf("%s: it takes requests of the guard's own, and they need an `upstream`: the handlers that lead to the upstream", option)
	}
	for _, server := range exposed(plan) {
		h.logger.Warn("the credentials of an undo leave without TLS; use https, unless something beneath encrypts",
			slog.String("guard", h.Name), slog.String("action", a.Name), slog.String("server", server))
	}
	if err := unset(plan); err != nil {
		h.logger.Warn("a header field of an undo has no value; nothing can be undone without it",
			slog.String("guard", h.Name), slog.String("action", a.Name), slog.Any("error", err))
	}
	plan.Spec.Reach = h.reach
	if a.Undo = plan; h.readsMessages() {
		plan.Spec.Protocol = h.Protocol
	}
	return nil
}

// ServeHTTP guards a call, or passes the request on to next if it needs no guard.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	err := h.handler.Serve(w, r, next)
	if err == nil {
		return nil
	}
	if status := (*guard.StatusError)(nil); errors.As(err, &status) {
		return caddyhttp.Error(status.Status, status.Err)
	}
	return err
}
