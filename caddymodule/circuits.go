package caddymodule

import (
	"cmp"
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// joinProxies gives each guard the transport behind it, so that a call that every breaker would
// refuse is refused before it is claimed. Other guards learn of a refusal from the transport.
func joinProxies(app *caddyhttp.App) {
	for _, server := range app.Servers {
		joinIn(server.Routes)
		for _, route := range server.NamedRoutes {
			joinIn(caddyhttp.RouteList{*route})
		}
	}
}

func joinIn(routes caddyhttp.RouteList) {
	var guards []*Handler // through which all calls come to the current handler
	for _, route := range routes {
		own := 0 // guards of this route, at the end of guards
		for _, handler := range route.Handlers {
			switch h := handler.(type) {
			case *Handler:
				guards, own = append(guards, h), own+1
				continue
			case *reverseproxy.Handler:
				t, ours := h.Transport.(*proxy.Transport)
				for i, guard := range guards {
					// Calls come here from another route only if this one takes all.
					if ours && !changesMethod(h.Rewrite) && (i >= len(guards)-own || takesAll(&route)) {
						guard.proxy.Store(t)
					}
				}
			case *caddyhttp.Subroute:
				joinIn(h.Routes)
			default:
				if passesOn(h) {
					continue
				}
			}
			guards, own = nil, 0
		}
		if route.Terminal {
			guards = nil
		}
	}
}

// takesAll reports whether every request that comes to a route takes it.
func takesAll(route *caddyhttp.Route) bool {
	return len(route.MatcherSets) == 0 && route.Group == ""
}

// changesMethod reports whether a call is forwarded with another method than the guard has
// seen: a breaker may let one through and refuse the other.
func changesMethod(r *rewrite.Rewrite) bool { return r != nil && r.Method != "" }

// passesOn reports whether a handler hands every call on, unchanged as far as breakers go.
func passesOn(handler caddyhttp.MiddlewareHandler) bool {
	if r, ok := handler.(*rewrite.Rewrite); ok {
		return !changesMethod(r)
	}
	module, ok := handler.(caddy.Module)
	if !ok {
		return false
	}
	switch module.CaddyModule().ID.Name() {
	case "headers", "vars", "map", "request_body", "encode", "tracing", "log_append":
		return true
	}
	return false
}

// passOn forwards a request that is not guarded. If another guard has forwarded it before, that
// one handles the error.
func (h *Handler) passOn(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	err := h.forwardInTime(w, r, next)
	if err == nil || proxy.FromContext(r.Context()) != nil {
		return err
	}
	if unread := (*proxy.UnreadError)(nil); errors.As(err, &unread) {
		return storeClosed(err)
	}
	err = refusedByCircuit(err, verifiedHere(h.verifiedSafe(r)))
	var p *api.Problem
	if h.fallback == nil || !errors.As(err, &p) || p.Kind() != api.CircuitOpen {
		return err
	}
	h.actions[len(h.actions)-1].counts.Refused(p.Kind().Slug) // the action default
	return h.fallback.ServeHTTP(guard.Mark(w, headerExecutionStatus, statusRefused), r)
}

// circuitsOf selects the breakers that are recorded in a workflow.
func circuitsOf(e *engine, policy *tokenPolicy, r *http.Request, who evidence.Reader, wid string, all bool) (func(*proxy.Circuit) bool, error) {
	unknown := api.NewProblem(api.WorkflowUnknown, "Nothing of it is known for the identity that asks.")
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

// operatorKinds are the kinds of callers that can be operators.
var operatorKinds = []string{"issuer:", "certificate:", "user:", "caller:"}

// checkOperators checks names of callers.
func checkOperators(names []string) error {
	for _, name := range names {
		if !slices.ContainsFunc(operatorKinds, func(kind string) bool { return strings.HasPrefix(name, kind) && len(name) > len(kind) }) {
			return fmt.Errorf("%q is no caller: it must begin with one of %s, and go on with a name", name, strings.Join(operatorKinds, ", "))
		}
	}
	return nil
}

// runningCalls are the calls whose outcome is not recorded yet. A failure opens a breaker just
// before its call records an error. It may record none: an upstream that was tried in vain is
// not always a failure of the call.
type runningCalls struct {
	mu   sync.Mutex
	ends map[string]chan struct{} // by checkpoint
}

// begin notes that a call runs. One without a checkpoint records nothing.
func (r *runningCalls) begin(checkpoint string) {
	if checkpoint == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ends == nil {
		r.ends = map[string]chan struct{}{}
	}
	r.ends[checkpoint] = make(chan struct{})
}

// end notes that the outcome of a call is recorded.
func (r *runningCalls) end(checkpoint string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if end := r.ends[checkpoint]; end != nil {
		close(end)
		delete(r.ends, checkpoint)
	}
}

// wait waits for the end of a call, if it runs, until ctx ends.
func (r *runningCalls) wait(ctx context.Context, checkpoint string) {
	r.mu.Lock()
	end := r.ends[checkpoint]
	r.mu.Unlock()
	if end == nil {
		return
	}
	select {
	case <-end:
	case <-ctx.Done():
	}
}

// circuitErrorTime is how long the opening of a breaker waits for the call that caused it. A
// longer call, such as a stream, would fail for another reason.
const circuitErrorTime = 2 * time.Second

// await waits for the call that has caused a change.
func (r *runningCalls) await(ctx context.Context, ev breaker.Event) {
	ctx, cancel := context.WithTimeout(ctx, circuitErrorTime)
	defer cancel()
	r.wait(ctx, proxy.ParseEvidence(ev.Evidence).Checkpoint)
}

// describeCircuit describes a breaker, with the recorded error of its last failure.
func describeCircuit(ctx context.Context, circuits *proxy.Member, policy *tokenPolicy, s *breaker.Status) proxy.Circuit {
	c := circuits.Describe(s)
	c.LastFailure = policy.lastFailure(ctx, s)
	return c
}

// policyBreaker shows that each upstream has a circuit breaker.
type policyBreaker struct {
	proxy.Policy
	// Problem is the answer to a call that a breaker refuses. Fallback: another handler
	// answers instead, marked as refused.
	Problem  string `json:"problem"`
	Fallback bool   `json:"fallback,omitempty"`
}

// verifiedHere reports whether the gateway itself has verified a caller, so that it may see
// breakers (cascade 6.2). A credential that only the upstream can check may be made up.
func verifiedHere(caller string) bool {
	switch kind, _, _ := strings.Cut(caller, ":"); kind {
	case "issuer", "certificate", "user", "explicit":
		return true
	}
	return false
}

// refusedByCircuit returns err, or its problem where a breaker has refused the last attempt: the
// call was not sent. verified says that the caller is verified here.
func refusedByCircuit(err error, verified bool) error {
	open := (*breaker.OpenError)(nil)
	if !errors.As(err, &open) {
		return err
	}
	identity := ""
	if named := (interface{ Downstream() string })(nil); errors.As(err, &named) {
		identity = named.Downstream()
	}
	return circuitOpen(open, identity, verified)
}

// circuitOpen is the problem of a call that a breaker has refused. Only callers that are verified
// here see the address and the failures of the upstream, as at the endpoint of breakers. The
// identity that the configuration gives the upstream is public.
func circuitOpen(open *breaker.OpenError, identity string, verified bool) *api.Problem {
	name := cmp.Or(identity, "the upstream")
	if verified {
		name = cmp.Or(identity, open.Key.Upstream)
		if open.Key.Class != "" {
			name += " (" + open.Key.Class + ")"
		}
	}
	detail := "The circuit breaker of " + name + " is open"
	switch {
	case open.View != nil: // open for this caller only
		detail = "The circuit breaker of " + name + " refuses this caller, and no other, as its tokens ask for a stricter limit"
	case open.State == breaker.HalfOpen:
		detail = "The circuit breaker of " + name + " is half-open, and lets one call through at a time"
	}
	if open.View != nil && verified {
		detail += fmt.Sprintf(": more than %.4g%% of the calls in %v have failed", open.View.Threshold()*100, open.View.Window())
	}
	switch {
	case !verified:
	case open.Mode == breaker.ForcedOpen:
		detail += ", as its operator says"
	case open.Cause != "":
		detail += ": " + open.Cause
	}
	p := api.NewProblem(api.CircuitOpen, detail+".")
	p.Reason = open.State.String()
	if open.View != nil {
		p.Reason = "workflow_threshold"
	}
	p.RetryAfter, p.Cause = open.RetryAfter(), open
	return p
}

const (
	// maxRejected is the number of workflows in which the rejections of one breaker are
	// recorded, until it changes. Further rejections are counted only.
	maxRejected = 1024
	// maxRejectedUnverified is the same for callers that are not verified here: they can
	// make up workflows, and must not use up the others' room.
	maxRejectedUnverified = 64
)

// rejections remembers the workflows in which the rejections of a breaker are recorded, so that
// many retries cannot flood the ledger (cascade 3.3.2).
type rejections struct {
	mu sync.Mutex
	of map[breaker.Key]*rejected
}

type rejected struct {
	generation uint64
	verified   map[string]struct{} // the workflows of callers that are known here
	unverified map[string]struct{}
	errors     map[rejectedCaller]*shownError
}

// rejectedCaller is one caller in one workflow.
type rejectedCaller struct{ workflow, caller string }

// first reports whether to record a rejection: once for each workflow and generation of a
// breaker. Callers that are not verified here are counted apart.
func (r *rejections) first(open *breaker.OpenError, workflow string, verified bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.at(open)
	workflows, most := known.unverified, maxRejectedUnverified
	if verified {
		workflows, most = known.verified, maxRejected
	}
	if _, recorded := workflows[workflow]; recorded || len(workflows) >= most {
		return false
	}
	workflows[workflow] = struct{}{}
	return true
}

// at returns the rejections by a breaker since its last change. The caller holds the lock.
func (r *rejections) at(open *breaker.OpenError) *rejected {
	known := r.of[open.Key]
	if known == nil || known.generation != open.Generation {
		if r.of == nil || known == nil && len(r.of) >= maxCircuits {
			r.of = map[breaker.Key]*rejected{}
		}
		known = &rejected{open.Generation, map[string]struct{}{}, map[string]struct{}{}, map[rejectedCaller]*shownError{}}
		r.of[open.Key] = known
	}
	return known
}

// shown is the error that a caller got before, and whether there is room for another one.
func (r *rejections) shown(open *breaker.OpenError, to rejectedCaller) (e *shownError, room bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.at(open).errors
	return all[to], len(all) < maxRejected
}

func (r *rejections) show(open *breaker.OpenError, to rejectedCaller, e *shownError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at(open).errors[to] = e
}

// ledTo are the ids of the call's parents, recorded or not.
func (s *callEvidence) ledTo() []string {
	ids := slices.Clone(s.call.Parents)
	for _, t := range s.tokens.all {
		if t.Proven() { // others may name any
			ids = append(ids, t.Parents()...)
		}
	}
	return ids
}

// recordRejected records a rejection, with those of ids as parents that are recorded: the tokens
// of a call that was not claimed are not.
func recordRejected(ctx context.Context, e *engine, policy *tokenPolicy, open *breaker.OpenError, workflow string, ids []string) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return // nothing can be recorded then
	}
	c := evidence.Circuit{
		Event: ect.EventCircuitOpen, Downstream: e.circuits.Downstream(open.Key.Upstream), Workflow: workflow, Reason: rejectedReason,
		ErrorType: api.CircuitOpen.ErrorType,
	}
	for _, s := range e.circuits.Status() {
		if s.Key == open.Key {
			c.ErrorRate, c.Window, c.Cooldown = s.ErrorRate, s.Window, s.Cooldown
			ids = append(ids, s.Reference) // left out if it is of another workflow
		}
	}
	if c.Parents, err = policy.evidence.Known(ctx, workflow, ids); err == nil {
		_, err = e.recordDraft(ctx, policy, now, &c)
	}
	if err != nil {
		e.circuitUnrecorded(open.Key, breaker.Open, err)
	}
}

// rejectedReason distinguishes a rejection from an opening.
const rejectedReason = "rejected"

// Members with which a token constrains breakers (ATD "Circuit Breaker Policy Configuration"):
// in its extensions, or in an object there as in ATD's figure.
const (
	constraintThreshold = "atd.circuit_threshold" // a share, over 0 and under 1
	constraintWindow    = "atd.circuit_window_s"  // seconds, 1 or more

	constraintObject = "constraints"
)

// maxConstrained is how many askers' constraints are remembered.
const maxConstrained = 4096

// asker has asked breakers for a stricter limit: an issuer of tokens, in one workflow. The
// workflow alone is not enough, as a token may name any: one agent could make the limits of
// others stricter.
type asker struct {
	workflow string // its UUID
	issuer   string
}

// constraints remembers what askers have asked for, for their later calls. When it is full, the
// least recently used one is forgotten. The zero value is empty.
type constraints struct {
	mu     sync.Mutex
	of     map[asker]*list.Element
	recent list.List // of *constrained, the latest first
}

type constrained struct {
	by   asker
	view *breaker.View
}

// add combines what is asked with what was asked before: limits only get stricter.
func (c *constraints) add(by asker, asked *breaker.View) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.of[by]; at != nil {
		c.recent.MoveToFront(at)
		known := at.Value.(*constrained)
		known.view = known.view.And(asked)
		return
	}
	if c.of == nil {
		c.of = map[asker]*list.Element{}
	}
	if len(c.of) >= maxConstrained {
		oldest := c.recent.Back()
		delete(c.of, c.recent.Remove(oldest).(*constrained).by)
	}
	c.of[by] = c.recent.PushFront(&constrained{by, asked})
}

// find returns nil if nothing was asked, or is remembered.
func (c *constraints) find(by asker) *breaker.View {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.of[by]
	if at == nil {
		return nil
	}
	c.recent.MoveToFront(at)
	return at.Value.(*constrained).view
}

// askedBy is what a token asks of breakers, or nil. A token with an invalid value is refused,
// rather than accepted without the limit that it asks for.
func askedBy(t *ect.Token) (*breaker.View, error) {
	ext := t.Ext()
	if ext.JSON() == "" {
		return nil, nil
	}
	asked, err := readConstraints(func(name string) (string, bool) { return ext.Raw(ect.Member(name)) })
	if err != nil {
		return nil, err
	}
	var object map[string]json.RawMessage
	raw, ok := ext.Raw(constraintObject)
	if !ok || json.Unmarshal([]byte(raw), &object) != nil {
		return asked, nil // another use of this name
	}
	inner, err := readConstraints(func(name string) (string, bool) { raw, ok := object[name]; return string(raw), ok })
	return asked.And(inner), err
}

func readConstraints(member func(name string) (raw string, ok bool)) (*breaker.View, error) {
	threshold, hasThreshold := member(constraintThreshold)
	window, hasWindow := member(constraintWindow)
	if !hasThreshold && !hasWindow {
		return nil, nil
	}
	var share, seconds float64
	var err error
	// Zero would mean the breaker's own value.
	if hasThreshold {
		if share, err = strconv.ParseFloat(threshold, 64); err != nil || share == 0 {
			return nil, &ect.Error{Code: ect.CodeExt}
		}
	}
	if hasWindow {
		if seconds, err = strconv.ParseFloat(window, 64); err != nil || seconds == 0 {
			return nil, &ect.Error{Code: ect.CodeExt}
		}
	}
	// No breaker has a longer window.
	view, err := breaker.NewView(share, time.Duration(min(seconds, time.Hour.Seconds())*float64(time.Second)))
	if err != nil {
		return nil, &ect.Error{Code: ect.CodeExt}
	}
	return view, nil
}
