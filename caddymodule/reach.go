package caddymodule

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/fileserver"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// reachOf returns where handlers lead: the upstreams, and what tells the services there apart (ADR
// 0052). That does not include breakers, health checks, timeouts, load balancing and certificates.
// sources is that of dynamicOf, if known.
func reachOf(handlers []any, sources string) rollback.Reach {
	w := wayOut{sources: sources}
	for _, handler := range handlers {
		w.pass(handler)
	}
	if len(w.addresses) == 0 {
		w.addresses = w.others
	} else {
		w.rewrites = append(w.rewrites, w.others...) // it must be the same, and is nowhere to go
	}
	slices.Sort(w.addresses)
	reach := rollback.Reach{
		Addresses: slices.Compact(w.addresses), Host: strings.Join(w.hosts, " "), Rewrite: strings.Join(w.rewrites, " "),
	}
	if len(w.fields) > 0 {
		reach.Fields = digest(w.fields)
	}
	return reach
}

// dynamicOf returns a digest of the dynamic upstreams in the JSON of handlers, since the source `multi` does not keep
// its own sources. It is empty without any.
func dynamicOf(raw []json.RawMessage) string {
	var all []json.RawMessage
	for _, handler := range raw {
		var of struct {
			Dynamic json.RawMessage `json:"dynamic_upstreams"`
		}
		_ = json.Unmarshal(handler, &of) // loading reports the error
		if of.Dynamic != nil {
			all = append(all, of.Dynamic)
		}
	}
	if all == nil {
		return ""
	}
	return digest(all)
}

// digest is of the JSON of a value that may have credentials (P8).
func digest(v any) string {
	text, err := json.Marshal(v) // members of maps are sorted
	if err != nil {
		return "?"
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// wayOut collects the result of reachOf.
type wayOut struct {
	sources                    string
	addresses, hosts, rewrites []string
	others                     []string // handlers that may answer in the place of a proxy
	fields                     []*headers.HeaderOps
}

func (w *wayOut) pass(handler any) {
	switch h := handler.(type) {
	case *reverseproxy.Handler:
		w.proxy(h)
	case *Handler, *Endpoints:
		// They ignore the gateway's own requests.
	case *caddyhttp.Subroute:
		for i := range h.Routes {
			route := &h.Routes[i]
			if !takesAll(route) {
				w.rewrites = append(w.rewrites, "if "+digest(matchersOf(route.MatcherSets)))
			}
			for _, inner := range route.Handlers {
				w.pass(inner)
			}
		}
	case *rewrite.Rewrite:
		w.rewrites = append(w.rewrites, textOf(h))
	case *headers.Handler:
		w.header(h.Request)
	case caddyhttp.MiddlewareHandler:
		switch name := nameOf(h); {
		case name == "vars", name == "map": // an address may be made of it
			w.rewrites = append(w.rewrites, name+" "+digest(h))
		case !passesOn(h): // it may answer itself
			w.others = append(w.others, name+"://"+digest(h))
		}
	}
}

// matchersOf has what matchers are made of, in an order that loading them again does not change.
func matchersOf(sets []caddyhttp.MatcherSet) (all [][]string) {
	for _, set := range sets {
		var texts []string
		for _, matcher := range set {
			of := matcher
			if not, is := matcher.(*caddyhttp.MatchNot); is { // loading empties its JSON
				of = matchersOf(not.MatcherSets)
			}
			texts = append(texts, fmt.Sprintf("%T %s", matcher, digest(of)))
		}
		slices.Sort(texts)
		all = append(all, texts)
	}
	return all
}

// proxy adds the upstreams of a reverse_proxy with their scheme, and what it does to requests.
func (w *wayOut) proxy(h *reverseproxy.Handler) {
	scheme, name := transportOf(h), ""
	if scheme == "agent_guard" {
		scheme = "http"
	}
	if secure, ok := h.Transport.(reverseproxy.TLSTransport); ok && secure.TLSEnabled() {
		scheme = "https"
	}
	transport, _ := h.Transport.(*reverseproxy.HTTPTransport)
	if ours, ok := h.Transport.(*proxy.Transport); ok {
		transport = ours.HTTPTransport
	}
	switch {
	case transport == nil && h.Transport != nil: // such as FastCGI, whose services are told apart by what it sends
		name = digest(h.Transport) + "@"
	case transport != nil && transport.TLS != nil && transport.TLS.ServerName != "":
		name = transport.TLS.ServerName + "@"
	}
	for _, upstream := range h.Upstreams {
		address, err := proxy.Address(upstream.Dial)
		if err != nil {
			address = upstream.Dial
		}
		w.addresses = append(w.addresses, scheme+"://"+name+address)
	}
	if module, ok := h.DynamicUpstreams.(caddy.Module); ok {
		kind, source := module.CaddyModule().ID.Name(), digest(h.DynamicUpstreams)
		if kind == "multi" { // it does not keep its sources
			source = w.sources
		}
		if source != "" {
			w.addresses = append(w.addresses, scheme+"+"+kind+"://"+source)
		}
	}
	if h.Rewrite != nil {
		w.rewrites = append(w.rewrites, textOf(h.Rewrite))
	}
	if h.Headers != nil {
		w.header(h.Headers.Request)
	}
}

// header adds the changes to the header of requests.
func (w *wayOut) header(ops *headers.HeaderOps) {
	if ops == nil {
		return
	}
	w.hosts = append(w.hosts, ops.Set.Values("Host")...)
	rest := *ops
	if rest.Set = maps.Clone(ops.Set); rest.Set != nil {
		rest.Set.Del("Host")
	}
	if setsField(&rest, "Host") { // in another way
		w.hosts = append(w.hosts, digest(rest))
	}
	w.fields = append(w.fields, ops)
}

// of reports whether the calls of a guard with this name reach it.
func (p *passage) of(guard string) bool {
	return slices.ContainsFunc(p.guards, func(h *Handler) bool { return h.Name == guard })
}

// passages are all passages of the configuration, those of guards' `upstream` first. Call it when
// everything is provisioned.
func (a *App) passages() []passage {
	a.passagesOnce.Do(func() {
		loaded, err := a.ctx.AppIfConfigured("http")
		if err != nil {
			return
		}
		visits, found := visitsOf(loaded.(*caddyhttp.App))
		seen := map[*Handler]bool{}
		for _, v := range visits {
			if v.guard.upstream != nil && !seen[v.guard] {
				seen[v.guard] = true
				a.knownPassages = append(a.knownPassages, passage{handler: v.guard.upstream, reach: v.guard.reach, guards: []*Handler{v.guard}, own: true, server: v.server})
			}
		}
		for _, p := range found {
			p.handler, p.reach = compile([]any{p.proxy}, "reverse_proxy"), reachOf([]any{p.proxy}, "")
			a.knownPassages = append(a.knownPassages, p)
		}
	})
	return a.knownPassages
}

// find returns the passage that leads to the upstream of a call, preferring that of the call's guard.
// Another guard's must change the header in the same way, so that nobody undoes with another one's
// credentials; the call's guard may have new ones by now.
//
// If none leads there, a guard with a name of its own is followed to where its upstream has moved.
// Nothing is guessed (P6).
func (a *App) find(o *rollback.Outgoing) (*passage, error) {
	var own, others, named []*passage
	all := a.passages()
	for i := range all {
		p := &all[i]
		mine := p.of(o.Guard)
		switch leads := o.Spec != nil && o.Spec.Reach.Leads(&p.reach); {
		case leads && p.reach.Fields == o.Spec.Reach.Fields:
			if mine {
				return p, nil
			}
			others = append(others, p)
		case leads && mine:
			own = append(own, p)
		case mine && p.own:
			named = append(named, p)
		}
	}
	if len(others) > 0 {
		return others[0], nil
	}
	if p, err := only(own, func(p *passage) string { return p.reach.Fields }); p != nil || err != nil {
		return p, err
	}
	if o.Guard == defaultGuard {
		return nil, errNoGuard
	}
	p, err := only(named, func(p *passage) string { return p.reach.Name() + p.reach.Fields })
	if p != nil && o.Recorded {
		return nil, errOtherWay
	}
	if p == nil && err == nil {
		err = errNoGuard
	}
	return p, err
}

// only returns the first of several passages, for all of which name must be the same.
func only(all []*passage, name func(*passage) string) (*passage, error) {
	if len(all) == 0 {
		return nil, nil
	}
	for _, p := range all[1:] {
		if name(p) != name(all[0]) {
			return nil, errManyGuards
		}
	}
	return all[0], nil
}

// undoFields are the header fields of an undo's request: those of the call's action, if the current
// configuration has it and knows the server, else those recorded with the checkpoint. to is nil for
// a whole URL.
func (a *App) undoFields(o *rollback.Outgoing, to *passage) (http.Header, error) {
	for _, h := range a.guards.list() {
		if h.Name != o.Guard {
			continue
		}
		// P8: not those of a guard that has taken this name and leads elsewhere.
		if to != nil && !slices.Contains(to.guards, h) && (o.Spec == nil || !h.reach.Leads(&o.Spec.Reach)) {
			continue
		}
		for _, action := range h.actions {
			if action.Name == o.Action && action.Undo != nil && len(action.Undo.Spec.Fields[originOfURL(o.URL)]) > 0 {
				return fieldsOf(action.Undo.Spec.Fields, o.URL)
			}
		}
	}
	if o.Spec == nil {
		return http.Header{}, nil
	}
	return fieldsOf(o.Spec.Fields, o.URL)
}

// checkReached checks a server's routes when the first of its guards is provisioned, also by `caddy
// validate`. It refuses a guard behind a handler that is certain to answer every request: all calls
// would run unguarded, unnoticed (P1). Some handlers are loaded by then, others are still JSON. Start
// checks again when all are loaded.
func (g *guards) checkReached(server *caddyhttp.Server, place string) error {
	g.mu.Lock()
	checked := server == nil || slices.Contains(g.checked, server)
	g.checked = append(g.checked, server)
	g.mu.Unlock()
	if checked {
		return nil
	}
	server.RegisterConnContext(func(ctx context.Context, conn net.Conn) context.Context { // once for all of its guards
		return context.WithValue(ctx, connKey{}, conn)
	})
	visits, passages := visitsIn(server, place)
	return cmp.Or(checkResends(passages), checkVisits(visits, false))
}

// unknown is a handler of which no module is known: loading reports that, and until then it may answer.
type unknown struct{ caddyhttp.MiddlewareHandler }

// handlersOf returns the handlers of a route. Those not loaded yet are decoded, not provisioned. What cannot be
// decoded is left out: loading reports the error.
func handlersOf(route *caddyhttp.Route) []caddyhttp.MiddlewareHandler {
	if route.HandlersRaw == nil {
		return route.Handlers
	}
	var all []caddyhttp.MiddlewareHandler
	for _, raw := range route.HandlersRaw {
		var members map[string]json.RawMessage
		var name string
		_ = json.Unmarshal(raw, &members) // loading reports the error
		_ = json.Unmarshal(members["handler"], &name)
		module, err := caddy.GetModule("http.handlers." + name)
		if err != nil {
			all = append(all, unknown{})
			continue
		}
		empty := any(module.New())
		if kind := reflect.TypeOf(empty); kind.Kind() != reflect.Pointer { // as Caddy does it
			empty = reflect.New(kind).Interface()
		}
		handler, ok := empty.(caddyhttp.MiddlewareHandler)
		delete(members, "handler") // a module has no such member
		if !ok || json.Unmarshal(caddyconfig.JSON(members, nil), handler) != nil {
			continue
		}
		if h, ok := handler.(*Handler); ok {
			if h.setDefaults(); h.classify() != nil {
				continue
			}
		}
		all = append(all, handler)
	}
	return all
}

// answersAll returns the directive of a handler that passes no request on; "" if it may.
func answersAll(handler caddyhttp.MiddlewareHandler) string {
	switch h := handler.(type) {
	case *reverseproxy.Handler:
		if len(h.HandleResponse) == 0 { // forward_auth passes requests on with it
			return "reverse_proxy"
		}
	case *caddyhttp.StaticResponse:
		if code := string(h.StatusCode); code != "103" && !strings.Contains(code, "{") { // early hints come before an answer
			return "respond"
		}
	case *caddyhttp.StaticError:
		return "error"
	case *fileserver.FileServer:
		if !h.PassThru {
			return "file_server"
		}
	}
	return ""
}

// transportOf returns the name of a proxy's transport, loaded or not.
func transportOf(proxy *reverseproxy.Handler) string {
	if module, ok := proxy.Transport.(caddy.Module); ok {
		return module.CaddyModule().ID.Name()
	}
	var of struct {
		Protocol string `json:"protocol"`
	}
	_ = json.Unmarshal(proxy.TransportRaw, &of) // loading reports the error
	return cmp.Or(of.Protocol, "http")
}

func resends(proxy *reverseproxy.Handler, guard *Handler) bool {
	switch transportOf(proxy) {
	case "http", "agent_guard":
		return false
	}
	lb := proxy.LoadBalancing
	if lb == nil || lb.Retries == 0 && lb.TryDuration == 0 {
		return false
	}
	// Without matchers, only GET is retried after its connection was made.
	return len(lb.RetryMatch)+len(lb.RetryMatchRaw) > 0 || len(guard.consequentialSets)+len(guard.ConsequentialRaw) > 0 ||
		slices.ContainsFunc(guard.Actions, func(a *Action) bool { return a != nil && a.Consequential })
}

// places are the upstreams of undoable calls that the configuration does not lead to.
type places struct {
	mu sync.Mutex
	// warned has the places that were logged, so that a reload does not repeat the warning.
	warned map[string]bool
}

// placesTime bounds the duration of the check.
const placesTime = 10 * time.Minute

// watchPlaces warns of checkpoints that this configuration cannot undo (ADR 0052). It runs
// in the background, and reads one checkpoint for each upstream.
func (a *App) watchPlaces(e *engine) {
	if a.Identity == nil {
		return
	}
	held, err := a.acquire()
	if err != nil {
		return // the store is closing
	}
	go func() {
		defer func() { _ = held.release() }() // closing the store logs its own errors
		ctx, cancel := context.WithTimeout(a.ctx, placesTime)
		defer cancel()
		if err := e.places.check(ctx, e.calls.Checkpoints, a); err != nil && ctx.Err() == nil {
			a.logger.Warn("it cannot be found out whether this configuration leads to the upstreams of all calls that can be undone", zap.Error(err))
		}
	}()
}

func (p *places) check(ctx context.Context, checkpoints *checkpoint.Store, a *App) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	all, err := checkpoints.Places(ctx)
	if err != nil {
		return err
	}
	before := p.warned
	p.warned = map[string]bool{}
	for _, place := range all {
		spec, err := rollback.ParseSpec(place.Sample.Undo)
		if err != nil {
			continue // it can never be undone, whatever the configuration
		}
		_, err = a.find(&rollback.Outgoing{Guard: spec.Guard, Recorded: spec.Auth == rollback.AuthRecorded, Spec: spec})
		if err == nil {
			continue
		}
		name := spec.Place()
		p.warned[name] = true
		if before[name] {
			continue
		}
		count, last, countErr := checkpoints.Reversible(ctx, place)
		if countErr != nil {
			return countErr
		}
		if count > 0 {
			fields := []zap.Field{zap.Int("checkpoints", count), zap.String("guard", spec.Guard),
				zap.Strings("upstreams", spec.Reach.Addresses), zap.Error(err)}
			if !last.IsZero() { // checkpoints may be kept without an end
				fields = append(fields, zap.Time("until", last))
			}
			a.logger.Warn("nothing in this configuration leads to the upstream of calls that can still be undone; "+
				"rollbacks of them will escalate with no-upstream until a configuration leads there again", fields...)
		}
	}
	return nil
}
