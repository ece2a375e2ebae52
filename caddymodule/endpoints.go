package caddymodule

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/cli"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func init() {
	caddy.RegisterModule(new(Endpoints))
	caddy.RegisterModule(adminAPI{})
	caddycmd.RegisterCommand(cli.Command())
}

// serveEndpoint answers the well-known paths of a guard. It returns false for other paths.
func (h *Handler) serveEndpoint(w http.ResponseWriter, r *http.Request) bool {
	if r = asAsked(r); !api.Owns(r.URL.Path) {
		return false
	}
	e := h.endpoints()
	e.Policy = func(mount string) any { return h.policyDocument(mount) }
	return e.Serve(w, r)
}

// endpoints returns the gateway's own paths, without those that only a guarded route has.
func (h *Handler) endpoints() *api.Endpoints {
	e := &api.Endpoints{
		Name: h.Name, Mount: mount, Challenge: h.challenge(),
		Write: func(w http.ResponseWriter, r *http.Request, p *problem.Problem) {
			p.Mount = mount(r)
			guard.WriteProblem(w, r, p)
		},
		Refused: func(p *problem.Problem, message string) {
			h.handler.CountRefusal(p.Kind().Slug)
			if p.Cause != nil {
				h.logger.Error(message, slog.String("problem", p.Kind().Slug), slog.Any("error", p.Cause))
			}
		},
	}
	if h.app != nil {
		e.Health, e.Keys, e.Open = h.app.health, h.app.publicKeys, h.openGateway
	}
	return e
}

// openGateway opens the gateway for a request at one of its endpoints.
func (h *Handler) openGateway() (*api.Gateway, error) {
	e, err := h.app.acquire()
	if err != nil {
		return nil, err
	}
	closeGateway := func() { _ = e.release() } // closing the store logs its own errors
	policy, err := h.app.tokenPolicy()
	if err != nil {
		closeGateway()
		return nil, err
	}
	g := &api.Gateway{
		Close: closeGateway, Executions: e.calls.Executions, Waits: e.calls.Waits,
		Reader: func(r *http.Request) (router.Reader, error) {
			who, _, err := h.asker(e, policy, r)
			return who, err
		},
		Circuits: func(r *http.Request) (any, error) { return h.visibleCircuits(e, policy, r) },
		Cascades: cascadesFor(h, e, policy),
		Escalations: &hitl.Endpoints{Store: e.calls.Escalations, Read: func(r *http.Request, body []byte) (*hitl.Reader, error) {
			who, _, err := h.escalationReader(e, policy, r, body)
			return who, err
		}, Coordinator: func(r *http.Request, body []byte) (string, string, error) { return h.holder(policy, r, body) }},
	}
	if policy == nil {
		return g, nil
	}
	g.Ledger = policy.graph(e)
	g.Ledger.Coordinators, g.Ledger.Reaching = h.app.rollbackOptions().Coordinators, e.calls.Escalations.Reaching
	g.Ledger.Plans, g.Ledger.CanUndo, g.Ledger.Ends = h.app.plans, h.app.canUndo, h.app.ctx
	g.Ledger.MayPut = func(r *http.Request, puts bool) (*evidence.MayPut, error) {
		who, token, err := h.readerOf(e, policy, r, puts)
		return &evidence.MayPut{Reader: who, Token: token}, err
	}
	if c := e.rollbacks.coordinator(); c != nil {
		o := h.app.rollbackOptions()
		g.Rollbacks = &rollback.Rollbacks{
			Coordinator: c, Tokens: &rollbackTokens{e: e, policy: policy, keep: e.rollbacks.keep},
			Ask: func(r *http.Request) (*rollback.Asker, error) { return h.rollbackAsker(e, policy, r) }, Read: g.Reader,
			Limit: &e.rollbacks.limit, Rate: o.Rate, Lineage: rollback.Lineage(o.Lineage), Coordinators: o.Coordinators, Whole: o.Partial == partialNever,
			Reservation: time.Duration(o.Reservation), PrepareTimeout: time.Duration(o.PrepareTimeout), Wait: time.Duration(o.Wait), Waits: e.calls.Waits, Logger: h.app.ctx.Slogger(),
		}

	}
	return g, nil
}

// mount returns the prefix that the path of r had when the caller sent it: /api for a guard
// in `handle_path /api/*`. It is empty if the path was changed in another way.
func mount(r *http.Request) string {
	sent, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request)
	if !ok || sent.URL == nil {
		return ""
	}
	prefix, ok := strings.CutSuffix(sent.URL.EscapedPath(), r.URL.EscapedPath())
	if !ok || !strings.HasPrefix(prefix, "/") || strings.HasPrefix(prefix, "//") { // it would name another host
		return ""
	}
	return prefix
}

// health tells load balancers and health checks whether guarded calls are accepted: not
// while the store is closed (P4) or the process exits. It reveals nothing else, so anybody
// may ask.
func (a *App) health() (state string, ready bool) {
	e, err := a.acquire()
	if err != nil {
		return "store-unavailable", false
	}
	defer func() { _ = e.release() }() // closing the store logs its own errors
	switch {
	case e.draining.Load():
		return "shutting-down", false
	case !e.healthy():
		return "store-unavailable", false
	}
	return "ok", true
}

// Endpoints answers the well-known paths that do not belong to one guarded route, on a site of
// their own: below /.well-known/cascade/ `health`, `circuits`, `cascades`, `escalations` and the pages of `problems`, and with
// an `identity` `jwks`, `ledger`, `workflows`, `checkpoints`, `errors` and `rollback`, also under
// the paths of ATD and AERR. It identifies callers like an `agent_guard` without options. The paths
// of a route are answered by its `agent_guard` handler.
type Endpoints struct {
	Roles

	// h is a guard that guards nothing.
	h *Handler
}

// CaddyModule returns the Caddy module information.
func (*Endpoints) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.agent_guard_endpoints", New: func() caddy.Module { return new(Endpoints) }}
}

// UnmarshalJSON implements json.Unmarshaler. Errors have the path of the member.
func (e *Endpoints) UnmarshalJSON(text []byte) error {
	type plain Endpoints
	return option.DecodeJSON(text, (*plain)(e))
}

// Provision finds the app, if there is one.
func (e *Endpoints) Provision(ctx caddy.Context) error {
	e.h = &Handler{Settings: guard.Settings{Name: "endpoints"}, logger: ctx.Slogger(), proxy: new(atomic.Pointer[proxy.Transport])}
	e.h.setDefaults()
	e.h.realm = "\x00endpoints" // no guard has this name, so its users are nobody's
	if err := e.h.classify(); err != nil {
		return err
	}
	e.h.Roles = e.Roles
	if err := checkOptions(roleOptions(), &e.Roles); err != nil {
		return err
	}
	app, err := ctx.AppIfConfigured("agent_guard")
	if errors.Is(err, caddy.ErrNotConfigured) {
		return nil
	}
	if err != nil {
		return err
	}
	e.h.app = app.(*App)
	guards := &e.h.app.guards
	guards.mu.Lock()
	guards.sites = append(guards.sites, &e.Roles)
	guards.mu.Unlock()
	return e.h.provisionActions(ctx)
}

// ServeHTTP answers the well-known paths and passes other requests on.
func (e *Endpoints) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if asked := asAsked(r); !guard.IsOwn(r) && api.Owns(asked.URL.Path) && e.h.endpoints().Serve(w, asked) {
		return nil
	}
	return next.ServeHTTP(w, r)
}

// parseEndpoints reads
//
//	agent_guard_endpoints [<matcher>] {
//		role       <role> <callers...>
//		roles_from <placeholder>
//	}
func parseEndpoints(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // the directive's name
	if h.NextArg() {
		return nil, h.ArgErr()
	}
	e := new(Endpoints)
	return e, roleOptions().Read(h.Dispenser, "agent_guard_endpoints", &e.Roles, originOf(h.Dispenser))
}

// policyDocument is the published idempotency policy of a guard. Its members are
// an API. Durations are in seconds, sizes in bytes.
type policyDocument struct {
	Guard        string          `json:"guard"`
	ExecutionID  policyID        `json:"execution_id"`
	Methods      string          `json:"guarded_methods"`
	Fingerprint  policyCompared  `json:"fingerprint"`
	MaxBody      int64           `json:"max_body_bytes"`
	AttachWait   float64         `json:"attach_wait_s"`
	FailOpen     bool            `json:"fail_open,omitempty"`
	Actions      []policyAction  `json:"actions"`
	Problems     []policyProblem `json:"problems"`
	Headers      policyHeaders   `json:"headers"`
	Executions   policyAsked     `json:"executions"`
	Tokens       *policyTokens   `json:"tokens,omitempty"`
	Quota        *policyQuota    `json:"quota,omitempty"`
	Rollback     *policyRollback `json:"rollback,omitempty"`
	Breaker      *policyBreaker  `json:"breaker,omitempty"`
	Guarantee    string          `json:"guarantee"`
	DocumentedBy string          `json:"describedby"`
}

type policyID struct {
	Sources []guard.IDSource `json:"sources"`
	// Pattern is a regular expression (RE2) of the names of further header fields. Where it is there, all places
	// count alike.
	Pattern string `json:"header_pattern,omitempty"`
	// Token says that the id of a verified token is used if no source has one.
	Token   bool            `json:"token_id,omitempty"`
	Format  string          `json:"format"`
	Missing guard.MissingID `json:"missing"`
	Window  float64         `json:"derive_window_s,omitempty"`
	// Recognized is how long after its end a call is found, where retries are recognised.
	Recognized float64 `json:"recognize_window_s,omitempty"`
}

type policyCompared struct {
	Covers   string   `json:"covers"`
	Excluded []string `json:"excluded_json_pointers,omitempty"`
}

type policyAction struct {
	Name string `json:"name"`
	// Tools and Arguments say which messages belong to the action.
	Tools        []string          `json:"tools,omitempty"`
	Arguments    map[string]string `json:"arguments,omitempty"`
	RetainResult float64           `json:"retain_result_s"`
	RetainKey    float64           `json:"retain_key_s"`
	MaxResult    int64             `json:"max_result_bytes"`
	Deadline     float64           `json:"deadline_s"`
	Preset       execution.Preset  `json:"preset"`
	Outcomes     []OutcomeRule     `json:"outcomes,omitempty"`
	OnUnknown    guard.OnUnknown   `json:"on_unknown"`
	// ResendFor is set where on_unknown is resend.
	ResendFor float64 `json:"resend_for_s,omitempty"`
	// InDoubtAs is set where a call in doubt is answered with a result for the model.
	InDoubtAs string `json:"in_doubt_as,omitempty"`
	// OnLeave is set where a call is cancelled when nobody waits for its answer.
	OnLeave string `json:"on_leave,omitempty"`
	// Order is set where what tokens name as parents has to be done.
	Order string `json:"order,omitempty"`
	Keys  string `json:"keys"`
	// OnError is set where a failed call is rolled back.
	OnError string `json:"on_error,omitempty"`
	// Critical and Severity are set where the configuration states them.
	Critical bool   `json:"critical,omitempty"`
	Severity string `json:"severity,omitempty"` // see Critical
	// Undo are the ways in which calls are undone, in the order in which they are tried,
	// and CheckpointTTL is for how long. Both are missing without an identity.
	Undo          []string `json:"undo,omitempty"`
	CheckpointTTL float64  `json:"checkpoint_ttl_s,omitempty"`
}

type policyProblem struct {
	Type       string `json:"type"`
	Status     int    `json:"status"`
	Title      string `json:"title"`
	SafeNewKey bool   `json:"safe_new_key"`
}

type policyHeaders struct {
	ID       string `json:"execution_id"`
	Status   string `json:"execution_status"`
	Replayed string `json:"replayed"`
}

// policyAsked has the URI templates (RFC 6570) at which callers read their executions.
type policyAsked struct {
	Status  string  `json:"status"`
	Output  string  `json:"output"`
	MaxWait float64 `json:"max_wait_s"`
}

// policyTokens describes the use of Execution Context Tokens.
type policyTokens struct {
	Header   string   `json:"header"`
	Audience []string `json:"audience"`
	Required bool     `json:"required"`
	// Keys, Ledger, Workflow and Errors are the URLs of the gateway's keys, of its ledger,
	// of a workflow, and for agents' errors.
	Keys     string `json:"jwks"`
	Ledger   string `json:"ledger"`
	Workflow string `json:"workflow"`
	Errors   string `json:"errors"`
}

// policyQuota is what one caller may have at a time, and one workflow; a missing member is no limit.
type policyQuota struct {
	Open     int   `json:"open_executions,omitempty"`
	Bytes    int64 `json:"stored_bytes,omitempty"`
	Workflow int64 `json:"workflow_stored_bytes,omitempty"`
	// Checkpoints are limits for a workflow and a caller, with an identity only.
	Checkpoints *policyCheckpoints `json:"checkpoints,omitempty"`
}

type policyCheckpoints struct {
	Workflow      int   `json:"workflow,omitempty"`
	WorkflowBytes int64 `json:"workflow_bytes,omitempty"`
	WorkflowRate  int   `json:"workflow_per_minute,omitempty"`
	Caller        int   `json:"caller,omitempty"`
	CallerBytes   int64 `json:"caller_bytes,omitempty"`
}

// policyBreaker tells callers when the upstreams' circuit breakers open and for how long, without revealing the
// upstreams.
type policyBreaker struct {
	Window      float64 `json:"window_s"`
	Threshold   float64 `json:"threshold"`
	MinVolume   int     `json:"min_volume"`
	Consecutive int     `json:"consecutive,omitempty"`
	Cooldown    float64 `json:"cooldown_s"`
	MaxCooldown float64 `json:"max_cooldown_s"`
	// Problem is the answer to a call that a breaker refuses. Fallback says that another
	// handler answers instead; its answer is marked as refused.
	Problem  string `json:"problem"`
	Fallback bool   `json:"fallback,omitempty"`
}

// policyDocument publishes the policy of the guard, with URLs below prefix.
func (h *Handler) policyDocument(prefix string) *policyDocument {
	doc := &policyDocument{
		Guard: h.Name,
		ExecutionID: policyID{
			Sources: h.ExecutionID, Missing: h.MissingID,
			Format: "1 to 255 visible ASCII characters; a quoted string and the bare characters are the same id",
		},
		Methods: "all but GET, HEAD, OPTIONS, TRACE, CONNECT, QUERY, SEARCH, PROPFIND and REPORT, unless configured otherwise",
		Fingerprint: policyCompared{
			Covers: "method, host, path, query and body; JSON bodies by value, multipart bodies by part, others by byte; of the header the media type, " +
				"Content-Encoding and fields that say what is to be done, such as Destination, Content-Range and If-Match; without a key all but those that differ between attempts",
			Excluded: h.FingerprintExclude,
		},
		MaxBody:    h.MaxBody,
		AttachWait: seconds(h.AttachWait),
		FailOpen:   h.FailOpen,
		Headers:    policyHeaders{guard.HeaderExecutionID, guard.HeaderExecutionStatus, guard.HeaderReplayed},
		Executions: policyAsked{
			Status:  prefix + problem.ExecutionsPath + "{id}{?wait,key,method,path}",
			Output:  prefix + problem.ExecutionsPath + "{id}/output{?wait,key,method,path}",
			MaxWait: router.LongestQuestion.Seconds(),
		},
		Guarantee: "A call is sent to the upstream at most once while its key is retained, unless it is known not to have been executed " +
			"or the action's on_unknown or preset says otherwise. A call whose outcome is unknown stays in doubt, whatever its age.",
		DocumentedBy: prefix + problem.BasePath,
	}
	if len(h.ExecutionID) == 0 {
		doc.ExecutionID.Pattern = guard.KeyPattern
		for _, name := range guard.KeyFields {
			doc.ExecutionID.Sources = append(doc.ExecutionID.Sources, guard.IDSource{Header: name})
		}
		for _, name := range guard.KeyMembers {
			doc.ExecutionID.Sources = append(doc.ExecutionID.Sources, guard.IDSource{JSON: "/" + name})
		}
	}
	if i, t := h.app.Identity, h.app.Trust; t != nil {
		doc.ExecutionID.Token = true
		doc.Tokens = &policyTokens{
			Header: ect.FieldName, Audience: append([]string{i.Name}, t.Audience...), Required: h.RequireECT,
			Keys: prefix + router.WellKnown + "jwks", Ledger: prefix + router.WellKnown + "ledger/head",
			Workflow: prefix + router.WellKnown + "workflows/{id}", Errors: prefix + router.WellKnown + "errors",
		}
	}
	if q := h.app.Quota; h.app.Identity != nil {
		t := q.ofCheckpoints()
		doc.Quota = &policyQuota{q.OpenExecutions, q.StoredBytes, q.WorkflowStoredBytes, &policyCheckpoints{
			t.Workflow.Count, t.Workflow.Bytes, t.Rate, t.Caller.Count, t.Caller.Bytes,
		}}
	} else if q.ofCaller() != (execution.Quota{}) || q.WorkflowStoredBytes > 0 {
		doc.Quota = &policyQuota{Open: q.OpenExecutions, Bytes: q.StoredBytes, Workflow: q.WorkflowStoredBytes}
	}
	doc.Breaker, doc.Rollback = h.breakerPolicy(prefix), h.app.rollbackPolicy(prefix)
	if h.MissingID == guard.MissingDerive {
		doc.ExecutionID.Window = seconds(h.DeriveWindow)
	}
	if h.MissingID == guard.MissingRecognize || slices.ContainsFunc(h.actions, func(a *Action) bool { return a.Keys == guard.KeysAdvisory }) {
		doc.ExecutionID.Recognized = seconds(h.RecognizeWindow)
	}
	if h.FailOpen {
		doc.Guarantee += " While the gateway's records are unavailable, calls are forwarded unguarded, marked Execution-Status: unguarded; the guarantee does not hold for them."
	}
	for _, a := range h.actions {
		doc.Actions = append(doc.Actions, h.policyAction(a))
	}
	for _, k := range api.Kinds() {
		doc.Problems = append(doc.Problems, policyProblem{doc.DocumentedBy + k.Slug, k.Status, k.Title, k.SafeNewKey})
	}
	return doc
}

// policyAction publishes an action.
func (h *Handler) policyAction(a *Action) policyAction {
	only := func(word, shown string) string { // what is the default is left out
		if word == shown {
			return word
		}
		return ""
	}
	published := policyAction{
		Name: a.Name, Tools: a.Tools, Arguments: a.Arguments, RetainResult: seconds(a.RetainResult), RetainKey: seconds(a.RetainKey),
		MaxResult: a.MaxResult, Deadline: seconds(a.Deadline), Preset: a.Preset, Outcomes: a.Outcomes, OnUnknown: a.OnUnknown, Keys: a.Keys,
		Critical: a.Critical, Severity: a.Severity, InDoubtAs: only(a.InDoubtAs, guard.InDoubtToolResult),
		OnError: only(a.OnError, guard.OnErrorRollback), OnLeave: only(a.OnLeave, guard.OnLeaveCancel), Order: only(a.Order, guard.OrderPar),
	}
	if a.OnUnknown == guard.OnUnknownResend {
		published.ResendFor = seconds(a.ResendFor)
	}
	if h.app.Identity != nil {
		published.Undo, published.CheckpointTTL = wordsOf(a.Undo), seconds(a.CheckpointTTL)
	}
	return published
}

func seconds[D ~int64](d D) float64 { return time.Duration(d).Seconds() }

// operatorKinds are the kinds of callers that can be operators.
var operatorKinds = []string{"issuer:", "certificate:", "user:", "caller:"}

func checkOperators(names []string) error {
	for _, name := range names {
		if !slices.ContainsFunc(operatorKinds, func(kind string) bool { return strings.HasPrefix(name, kind) && len(name) > len(kind) }) {
			return fmt.Errorf("%q is no caller: it must begin with one of %s, and go on with a name", name, strings.Join(operatorKinds, ", "))
		}
	}
	return nil
}

var (
	_ caddy.Provisioner           = (*Endpoints)(nil)
	_ caddyhttp.MiddlewareHandler = (*Endpoints)(nil)
)

// circuitsFor selects the breakers that a caller may see. Their states reveal the internal
// structure (cascade 6.2, ATD "Circuit Breaker State Leakage"). So operators see all,
// callers those behind this guard, which refusals name too, and participants of a workflow
// those recorded in it. An unverified credential is no identity.
func (h *Handler) circuitsFor(e *engine, policy *tokenPolicy, r *http.Request, who router.Reader, name string) (func(*proxy.Circuit) bool, error) {
	if !caller.Verified(name) {
		return nil, problem.New(router.Unauthenticated,
			"Ask as somebody whom this gateway knows: with a token, a certificate, or a name of its own authentication.")
	}
	operator := slices.Contains(h.Operators, h.handler.Callers.Operator(r, name))
	if wid := r.URL.Query().Get("wid"); wid != "" {
		return circuitsOf(e, policy, r, who, wid, operator)
	}
	if operator {
		return func(*proxy.Circuit) bool { return true }, nil
	}
	p := h.proxy.Load()
	return func(c *proxy.Circuit) bool { return p != nil && p.LeadsTo(c.Upstream) }, nil
}

// circuitsOf selects the breakers that a workflow has records of.
func circuitsOf(e *engine, policy *tokenPolicy, r *http.Request, who router.Reader, wid string, all bool) (func(*proxy.Circuit) bool, error) {
	unknown := problem.New(evidence.WorkflowUnknown, "Nothing of it is known for the identity that asks.")
	if policy == nil {
		return nil, unknown
	}
	names, found, err := policy.graph(e).Downstreams(r.Context(), wid, who, all)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, unknown
	}
	return func(c *proxy.Circuit) bool { return names[c.Downstream] }, nil
}

// visibleCircuits describes the breakers that a caller may see (cascade 3.2.3).
func (h *Handler) visibleCircuits(e *engine, policy *tokenPolicy, r *http.Request) (*proxy.Document, error) {
	who, name, err := h.asker(e, policy, r)
	if err != nil {
		return nil, err
	}
	may, err := h.circuitsFor(e, policy, r, who, name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), stateWithin)
	defer cancel()
	scope := r.URL.Query().Get("scope")
	if scope != "" && scope != proxy.ScopeNode && scope != proxy.ScopeFleet {
		return nil, problem.New(router.ParameterInvalid, "The scope must be node or fleet.")
	}
	only, view := r.URL.Query().Get("state"), policy.forCalls().Asked(r.URL.Query().Get("wid"), who.Issuer)
	doc := &proxy.Document{Circuits: []proxy.Circuit{}}
	all, err := e.describeCircuits(ctx, policy, scope == proxy.ScopeFleet)
	for i := range all {
		if c := &all[i]; may(c) && (only == "" || strings.EqualFold(only, c.State.String())) {
			c.SetView(view)
			doc.Circuits = append(doc.Circuits, *c)
		}
	}
	return doc, err
}

// breakerPolicy describes the breakers of the proxy behind the guard; nil if there are none
// or the proxy is unknown.
func (h *Handler) breakerPolicy(mount string) *policyBreaker {
	t := h.proxy.Load()
	if t == nil {
		return nil
	}
	rules := t.BreakerRules()
	if rules == nil {
		return nil
	}
	s := rules.Settings()
	return &policyBreaker{
		time.Duration(s.Window).Seconds(), s.Threshold, s.MinVolume, s.Consecutive,
		time.Duration(s.Cooldown).Seconds(), time.Duration(s.MaxCooldown).Seconds(),
		mount + problem.BasePath + problem.CircuitOpen.Slug, h.fallback != nil,
	}
}

// asker identifies who asks, in the same way as callers. Tokens of a POST and a PUT are content and
// do not identify it.
func (h *Handler) asker(e *engine, policy *tokenPolicy, r *http.Request) (who router.Reader, name string, err error) {
	var tokens guard.Tokens
	if r.Method != http.MethodPost && r.Method != http.MethodPut {
		if tokens, err = h.handler.VerifyTokens(policy.forCalls(), r, nil, false); err != nil {
			return who, "", err
		}
		if err := policy.forCalls().Spend(host{h}, &tokens, r); err != nil {
			return who, "", err
		}
	}
	if name, err = h.handler.Callers.Of(r, tokens.Issuer(), e.calls.Executions.Keyed); err != nil {
		return who, "", err
	}
	return router.Reader{
		Issuer: tokens.Issuer(), Caller: e.calls.Executions.Caller(name),
		Anonymous: caller.Unnamed(name), Credential: !caller.Unnamed(name) && !caller.Verified(name),
	}, name, nil
}

// challenge names a way to authenticate. No scheme is registered for API keys; this is the
// usual name.
func (h *Handler) challenge() string {
	if h.fields.Class("Authorization") == body.Credential {
		return `Bearer realm="executions"`
	}
	return `ApiKey realm="executions"`
}

// rollbackAsker identifies who requests a rollback: only a verified token can (cascade
// 6.1). A certificate counts as far as the token's verification uses it.
func (h *Handler) rollbackAsker(e *engine, policy *tokenPolicy, r *http.Request) (*rollback.Asker, error) {
	if policy.Verifier == nil {
		p := problem.New(problem.ECTInvalid, "This gateway believes nobody's tokens, since no `trust` is configured: only operators can roll back here.")
		p.Reason = "untrusted"
		return nil, p
	}
	tokens, err := policy.Verify(r, nil)
	if err == nil {
		// The rollback's lineage decides who may request it.
		err = policy.CheckReports(r.Context(), &tokens, rollback.Asks...)
	}
	h.handler.CountTokens(&tokens, err)
	unseen := ofParents(err)
	if unseen {
		tokens, err = policy.unseen(r)
	}
	if err != nil {
		if refusal := (*ect.Error)(nil); errors.As(err, &refusal) {
			return nil, err
		}
		return nil, guard.RefusedToken(err)
	}
	switch len(tokens.Own) {
	case 0:
		name, err := h.handler.Callers.Of(r, tokens.Issuer(), e.calls.Executions.Keyed)
		if err != nil {
			return nil, err
		}
		if caller.Unnamed(name) {
			return nil, problem.New(router.Unauthenticated, "Ask for a rollback with a signed token of the workflow.")
		}
		return nil, &ect.Error{Code: ect.CodeMissing}
	case 1:
		return &rollback.Asker{Token: tokens.Own[0], All: tokens.All, Late: tokens.Late, Unseen: unseen}, nil
	}
	p := problem.New(problem.ECTInvalid, "Several tokens ask at once; send the one that asks, and at most what led to it.")
	p.Reason = "several"
	return nil, p
}

// publicKeys are the keys that verify the gateway's tokens; nil without an identity.
func (a *App) publicKeys() ([]byte, error) {
	policy, err := a.tokenPolicy()
	if err != nil {
		return nil, guard.StoreClosed(err)
	}
	if policy == nil {
		return nil, nil
	}
	set, err := policy.Evidence.Ring().PublicSet(time.Now(), policy.Events.Identity(), policy.Events.Former()...)
	if err != nil {
		a.logger.Error("the public keys cannot be shown", zap.Error(err))
	}
	return set, err
}

// adminAPI adds the routes below `/agent_guard/` to Caddy's admin endpoint, with which
// operators list executions, resolve those in doubt, and inspect the store. The command
// `caddy agent-guard` uses them. It has no options.
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.agent_guard", New: func() caddy.Module { return new(adminAPI) }}
}

// Routes implements caddy.AdminRouter. Every request looks up the open stores: Caddy makes
// this module before any app and never cleans it up.
func (adminAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: admin.Prefix, Handler: admin.New(&engines)}}
}

// Paths lists the open engines.
func (p *enginePool) Paths() (all []string) {
	p.pool.Range(func(path, _ any) bool {
		all = append(all, path.(string))
		return true
	})
	return all
}

// View returns the open engine at path with a reference of its own.
func (p *enginePool) View(path string) (admin.Store, bool) {
	e := p.peek(path)
	return storeView{e}, e != nil
}

// Unopened returns why the store of the running configuration could not be reached.
func (p *enginePool) Unopened() (path string, why error) {
	app, err := caddy.ActiveContext().AppIfConfigured("agent_guard")
	if err != nil {
		return "", nil // none is configured
	}
	a, ok := app.(*App)
	if !ok {
		return "", nil
	}
	if reason := a.unreached.Load(); reason != nil {
		why = *reason
	}
	return a.spec.path, why
}

// storeView implements admin.Store for an engine.
type storeView struct{ e *engine }

func (b storeView) Path() string { return b.e.path }

func (b storeView) Executions() *execution.Guard { return b.e.calls.Executions }

func (b storeView) Now(ctx context.Context) (time.Time, error) { return b.e.calls.Store.Now(ctx) }

// Release implements admin.Store. Closing a store that has no other users logs its own
// errors.
func (b storeView) Release() { _ = b.e.release() }

func (b storeView) Evidence(ctx context.Context, key execution.Key, r *execution.Record, t execution.Resolution) *store.Batch {
	var policy *tokenPolicy
	if a := b.e.activeConfigs.latest(); a != nil {
		policy = a.policy.Load()
	}
	return policy.forCalls().SettledBy(ctx, key, r, t.Applied, t.By)
}

func (b storeView) Resolved(key execution.Key, found *execution.Record, decision execution.Resolution) {
	b.e.logger.Info("an operator has settled an execution that was in doubt",
		zap.Stringer("key", key), zap.String("guard", found.Guard), zap.String("action", found.Action),
		zap.String("cause", string(found.Cause)), zap.Bool("applied", decision.Applied),
		zap.String("operator", decision.Operator), zap.String("reason", decision.Reason))
	outcome := execution.Released
	if decision.Applied {
		outcome = execution.Completed
	}
	b.e.emit(eventResolved, map[string]any{
		"guard": found.Guard, "action": found.Action, "key": key.String(), "caller": hex.EncodeToString(found.Caller[:]),
		"outcome": outcome.String(), "by": "operator",
	})
}

// Quota implements admin.Store, with the quota of the latest configuration.
func (b storeView) Quota() *admin.Quota {
	a := b.e.activeConfigs.latest()
	if a == nil || a.Quota == (Quota{}) {
		return nil
	}
	return &admin.Quota{
		OpenExecutions: a.Quota.OpenExecutions, StoredBytes: a.Quota.StoredBytes, WorkflowStoredBytes: a.Quota.WorkflowStoredBytes,
	}
}

func (b storeView) Keys(ctx context.Context) (*gateway.KeyStatus, error) {
	return b.e.keys.Status(ctx)
}

func (b storeView) Ledger() *admin.Ledger {
	opened := b.e.ledger.open.Load()
	if opened == nil && b.e.ledger.coming.Load() {
		return new(admin.Ledger)
	}
	if opened == nil {
		return nil
	}
	return &admin.Ledger{Log: opened.Log(), Key: opened.HeadKeyOf}
}

func (b storeView) Rollbacks() admin.Rollbacks {
	if c := b.e.rollbacks.coordinator(); c != nil {
		return c
	}
	return nil
}

func (b storeView) Checkpoints() *checkpoint.Store { return b.e.calls.Checkpoints }

func (b storeView) Trial(checkpoint string) (admin.Trial, bool) {
	return b.e.rollbacks.trials.of(checkpoint)
}

func (b storeView) RotateKeys(ctx context.Context) (made uint32, ring string, err error) {
	made, err = b.e.keys.Rotate(ctx)
	if made != 0 {
		b.e.emit(eventKeysRotated, nil)
	}
	if errors.Is(err, gateway.ErrKeyGiven) {
		next, err := b.e.keys.Ring.Rotated()
		if err != nil {
			return 0, "", err
		}
		text, err := next.MarshalText()
		return 0, string(text), err
	}
	if errors.Is(err, execution.ErrKeyElsewhere) || errors.Is(err, seal.ErrBusy) {
		err = caddy.APIError{HTTPStatus: http.StatusConflict, Err: err}
	}
	return made, "", err
}

func (b storeView) Identity() *admin.Identity { return b.e.ledger.status() }

func (b storeView) RotateIdentity(stolen bool) error {
	err := b.e.ledger.rotate(stolen)
	if errors.Is(err, errKeyElsewhere) || errors.Is(err, ect.ErrBusy) {
		return caddy.APIError{HTTPStatus: http.StatusConflict, Err: err}
	}
	return err
}

func (b storeView) Escalations() *hitl.Store { return b.e.calls.Escalations }

func (b storeView) Plans() *plan.Store { return b.e.calls.Plans }

func (b storeView) PutPlan(ctx context.Context, text []byte, p plan.Putting) (evidence.PlanDocument, error) {
	a := b.e.activeConfigs.latest()
	if a == nil || a.policy.Load() == nil {
		return evidence.PlanDocument{}, caddy.APIError{HTTPStatus: http.StatusConflict, Err: errors.New("the running configuration has no identity: nothing of workflows is recorded, and no plan holds")}
	}
	graph := a.policy.Load().graph(b.e)
	graph.Assigned, graph.CanUndo = b.e.calls.Plans, a.canUndo
	doc, _, err := graph.PutPlan(ctx, text, p)
	return doc, err
}

func (b storeView) Circuits(ctx context.Context, fleet bool) ([]proxy.Circuit, error) {
	ctx, cancel := context.WithTimeout(ctx, stateWithin)
	defer cancel()
	return b.e.describeCircuits(ctx, b.e.latestPolicy(), fleet)
}

func (b storeView) Cascades() []api.Cascade { return b.e.cascades.List() }

func (b storeView) Cascade(id string) *api.Cascade { return b.e.cascades.Get(id) }

func (b storeView) Workflows() *evidence.Ledger {
	latest := b.e.activeConfigs.latest()
	policy := b.e.latestPolicy()
	if policy == nil {
		return nil
	}
	all := policy.graph(b.e)
	all.Plans, all.Ends, all.Reaching = latest.plans, latest.ctx, b.e.calls.Escalations.Reaching
	return all
}

func (b storeView) SetCircuitMode(ctx context.Context, key breaker.Key, mode breaker.Mode) (bool, error) {
	if !b.e.circuits.SetMode(key, mode) {
		return false, nil
	}
	b.e.logger.Warn("an operator has set the mode of a circuit breaker", zap.Stringer("upstream", key), zap.Stringer("mode", mode))
	return true, b.e.breakers.Keep(ctx, key, false) // not every mode changes the state, which would store it
}

func (b storeView) Report() *admin.Report {
	r := b.e.report()
	if r == nil {
		return nil
	}
	if r.Database != nil {
		r.Commits, r.Batches = b.e.counts.commits.Load(), b.e.counts.batches.Load()
	}
	if r.Commits > 0 {
		r.RecordsPerSync = float64(r.Batches) / float64(r.Commits)
	}
	return r
}

var (
	_ caddy.AdminRouter = adminAPI{}
	_ admin.Stores      = (*enginePool)(nil)
	_ admin.Store       = storeView{}
)
