package caddymodule

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/caddyauth"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/requestbody"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/caller"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// The routes of a configuration are read once, as Caddy runs them:
//
//   - A guard is refused behind a handler that answers every request, with nothing behind it that
//     answers, behind what changes by what a call or its caller is recognised, and behind several
//     authentications.
//   - One name in two servers is one service only if requests pass equal authentications and changes
//     before the guard, and equal handlers behind it: proxies to the same addresses, with the same Host
//     and header. What handlers of other modules do is not known: each equals only itself. Matchers are
//     not compared, nor are fixed answers.
//   - A handler of another module behind a guard may answer. What it answers with counts as DESIGN says.

// before are the handlers that a request may have passed.
type before struct {
	auths    []*caddyauth.Authentication // one that every request passes replaces the earlier ones
	always   bool                        // every request passes one of auths
	changers []caddyhttp.MiddlewareHandler
	copiers  []*headers.Handler // behind a proxy that has asked about the request, as in forward_auth
	guards   []*Handler
	by       string // the handler that has answered every request, so that none comes here; empty is none
}

func (b before) join(other before) before {
	joined := before{
		auths:    union(b.auths, other.auths),
		always:   b.always && other.always,
		changers: union(b.changers, other.changers),
		copiers:  union(b.copiers, other.copiers),
		guards:   union(b.guards, other.guards),
	}
	if other.by != "" {
		joined.by = b.by
	}
	return joined
}

func union[T comparable](a, b []T) []T {
	all := slices.Clip(a)
	for _, v := range b {
		if !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	return all
}

// visit is one route to a guard: its place and what a request passes before it.
type visit struct {
	guard  *Handler
	server *caddyhttp.Server
	name   string // of the server
	place  string
	before before
	// behind are the handlers behind the guard, on this route or another one, and ends those of them, and of the fixed
	// answers, that may answer; nil among them says that some calls may come to none of them.
	behind, ends []caddyhttp.MiddlewareHandler
	sends        string // the method with which requests are sent on behind it, whatever theirs; empty if it is theirs
	caught       bool   // error routes take the errors of the guard
}

// passage is a handler in the configuration that leads to an upstream.
type passage struct {
	proxy     *reverseproxy.Handler // nil for the option `upstream` of a guard
	server    *caddyhttp.Server
	place     string
	guards    []*Handler // guards whose calls reach it, according to the routes
	unguarded bool       // it is in error routes, with no guard before it

	// Set when everything is loaded; see App.passages.
	handler caddyhttp.Handler
	reach   rollback.Reach
	own     bool // the option `upstream` of a guard
}

// chains finds the routes to the guards of a configuration.
type chains struct {
	server   *caddyhttp.Server
	name     string
	place    string
	depth    int  // of named routes
	caught   bool // error routes take the errors of what is read
	errors   bool // the error routes are read
	visits   []visit
	passages []passage
	unsure   []*Handler // guards whose calls may not all take the route: it has matchers, or is further inside
	// behind and ends are those of visit, by the guard.
	behind, ends map[*Handler][]caddyhttp.MiddlewareHandler
	// read has the handlers of routes that are not loaded, decoded once for all routes to
	// them.
	read map[*json.RawMessage][]caddyhttp.MiddlewareHandler
}

// handlersOf returns the handlers of a route.
func (c *chains) handlersOf(route *caddyhttp.Route) []caddyhttp.MiddlewareHandler {
	if len(route.HandlersRaw) == 0 {
		return route.Handlers
	}
	key := &route.HandlersRaw[0]
	if _, ok := c.read[key]; !ok {
		c.read[key] = handlersOf(route)
	}
	return c.read[key]
}

// maxInvoked bounds how deep named routes invoke each other.
const maxInvoked = 20

// visitsOf lists the routes to the guards in an app's servers, and the proxies.
func visitsOf(app *caddyhttp.App) (visits []visit, passages []passage) {
	for _, name := range slices.Sorted(maps.Keys(app.Servers)) {
		v, p := visitsIn(app.Servers[name], name)
		visits, passages = append(visits, v...), append(passages, p...)
	}
	return visits, passages
}

func visitsIn(server *caddyhttp.Server, name string) ([]visit, []passage) {
	c := chains{server: server, name: name,
		behind: map[*Handler][]caddyhttp.MiddlewareHandler{}, ends: map[*Handler][]caddyhttp.MiddlewareHandler{},
		read: map[*json.RawMessage][]caddyhttp.MiddlewareHandler{}, caught: server.Errors != nil && len(server.Errors.Routes) > 0}
	c.place = name + "/routes"
	c.routes(server.Routes, before{}, true)
	if server.Errors != nil {
		c.place, c.caught, c.errors = name+"/errors/routes", false, true
		c.routes(server.Errors.Routes, before{}, true)
	}
	for i := range c.visits {
		v := &c.visits[i]
		v.behind, v.ends = c.behind[v.guard], c.ends[v.guard]
	}
	return c.visits, c.passages
}

// routes reads a list and returns what a request may have passed after it. top says that it
// is the list of a server.
func (c *chains) routes(routes caddyhttp.RouteList, b before, top bool) before {
	groups := map[string]before{} // before the first route of a group
	for i := range routes {
		route := &routes[i]
		enters := b
		if route.Group != "" { // a request takes one route of a group
			first, ok := groups[route.Group]
			if !ok {
				groups[route.Group], first = b, b
			}
			enters = first
		}
		place := c.place
		if c.depth == 0 {
			c.place = fmt.Sprintf("%s/%d", place, i)
		}
		if hosts := hostsOf(route); top && hosts != "" {
			c.place += " (" + hosts + ")"
		}
		all, unsure := len(route.MatcherSetsRaw) == 0 && takesAll(route), c.unsure
		if !all {
			c.unsure = union(unsure, enters.guards)
		}
		leaves, ends := c.handlers(route, enters)
		c.place, c.unsure = place, unsure
		switch {
		case route.Terminal || ends:
			if all && b.by == "" {
				b.by = leaves.by
			}
		case all:
			b = leaves
		default:
			b = b.join(leaves)
		}
	}
	return b
}

// handlers reads the handlers of a route. ends says that no request passes it.
func (c *chains) handlers(route *caddyhttp.Route, b before) (_ before, ends bool) {
	for _, handler := range c.handlersOf(route) {
		switch h := handler.(type) {
		case *Handler:
			c.visits = append(c.visits, visit{guard: h, server: c.server, name: c.name, place: c.place, before: b, caught: c.caught})
			b.guards = union(b.guards, []*Handler{h})
		case *caddyauth.Authentication:
			b.auths, b.always = []*caddyauth.Authentication{h}, true
		case *rewrite.Rewrite:
			c.sendsAs(h, b)
		case *caddyhttp.Subroute:
			outer, unsure := c.caught, c.unsure
			c.caught, c.unsure = outer || h.Errors != nil, union(unsure, b.guards)
			after := c.routes(h.Routes, b, false)
			c.caught, c.unsure = outer, unsure
			if h.Errors != nil {
				c.routes(h.Errors.Routes, b.join(after), false)
			}
			b = after
		case *caddyhttp.Invoke:
			if named := c.server.NamedRoutes[h.Name]; named != nil && c.depth < maxInvoked {
				c.depth++
				b = c.routes(caddyhttp.RouteList{*named}, b, false)
				c.depth--
			} else {
				c.answer(h, b)
			}
		case *reverseproxy.Handler:
			ends = true
			c.proxy(h, b)
			c.sendsAs(h.Rewrite, b)
			for _, response := range h.HandleResponse {
				b.copiers = union(b.copiers, copiersIn(response.Routes))
				ends = false
			}
		}
		switch name := nameOf(handler); name {
		case "agent_guard", "agent_guard_endpoints", "subroute", "invoke":
		default:
			c.passed(handler, &b)
			if name != "authentication" && name != "rewrite" && !passesOn(handler) { // handlers of other modules may answer
				c.answer(handler, b)
			}
		}
	}
	return b, ends
}

// passed notes a handler for what comes behind it, and for the guards before it.
func (c *chains) passed(handler caddyhttp.MiddlewareHandler, b *before) {
	if by := answersAll(handler); b.by == "" {
		b.by = by
	}
	if _, fixed := handler.(*caddyhttp.StaticResponse); fixed { // such as Caddy's redirects to https
		return
	}
	one := []caddyhttp.MiddlewareHandler{handler}
	for _, guard := range b.guards {
		c.behind[guard] = union(c.behind[guard], one)
	}
	if _, auth := handler.(*caddyauth.Authentication); !auth {
		b.changers = union(b.changers, one)
	}
}

// answer records that a handler may answer calls that passed b.
func (c *chains) answer(handler caddyhttp.MiddlewareHandler, b before) {
	for _, guard := range b.guards {
		c.ends[guard] = union(c.ends[guard], []caddyhttp.MiddlewareHandler{handler})
		if slices.Contains(c.unsure, guard) { // or none
			c.ends[guard] = union(c.ends[guard], []caddyhttp.MiddlewareHandler{nil})
		}
	}
}

// copiersIn are the handlers in routes that change header fields.
func copiersIn(routes caddyhttp.RouteList) (all []*headers.Handler) {
	for i := range routes {
		for _, handler := range handlersOf(&routes[i]) {
			switch h := handler.(type) {
			case *headers.Handler:
				all = append(all, h)
			case *caddyhttp.Subroute:
				all = append(all, copiersIn(h.Routes)...)
			}
		}
	}
	return all
}

// sendsAs notes for the last guard that requests get another method behind it.
func (c *chains) sendsAs(r *rewrite.Rewrite, b before) {
	if r == nil || len(b.guards) == 0 || guard.SafeMethod(strings.ToUpper(r.Method)) {
		return
	}
	for i := range c.visits {
		if c.visits[i].guard == b.guards[len(b.guards)-1] {
			c.visits[i].sends = strings.ToUpper(r.Method)
		}
	}
}

// proxy records a proxy, with the guards on the way there.
func (c *chains) proxy(h *reverseproxy.Handler, b before) {
	i := slices.IndexFunc(c.passages, func(p passage) bool { return p.proxy == h })
	if i < 0 {
		i = len(c.passages)
		c.passages = append(c.passages, passage{proxy: h, server: c.server, place: c.place})
	}
	p := &c.passages[i]
	p.guards = union(p.guards, b.guards)
	p.unguarded = p.unguarded || c.errors && len(b.guards) == 0
}

// warnBare warns of proxies without breakers behind guards (cascade 3.2): they send every call to a
// failing upstream. A proxy that only asks about a call, as forward_auth does, needs none.
func warnBare(logger *zap.Logger, passages []passage) {
	for _, p := range passages {
		_, ours := p.proxy.Transport.(*proxy.Transport)
		asks := changesMethod(p.proxy.Rewrite) && len(p.proxy.HandleResponse) > 0
		if ours || asks || len(p.guards) == 0 {
			continue
		}
		var upstreams []string
		for _, u := range p.proxy.Upstreams {
			upstreams = append(upstreams, u.Dial)
		}
		logger.Warn("a reverse_proxy behind agent_guard has no circuit breaker, and no proof of what was sent: "+
			"give it `transport agent_guard`, or write agent_proxy in its place",
			zap.String("route", p.place), zap.String("guard", p.guards[len(p.guards)-1].Name), zap.Strings("upstreams", upstreams))
	}
}

// warnErrorRoutes warns of servers whose error routes forward guarded calls without a guard. A call that was
// provably not sent gets there after its key was released; forwarding it there is not recorded.
func warnErrorRoutes(logger *zap.Logger, visits []visit, passages []passage) {
	warned := map[*caddyhttp.Server]bool{}
	for _, v := range visits {
		if v.caught && !warned[v.server] && slices.ContainsFunc(passages, func(p passage) bool { return p.unguarded && p.server == v.server }) {
			warned[v.server] = true
			logger.Warn("reverse_proxy in handle_errors is not guarded: a call that was released there runs again with each retry; "+
				"use agent_proxy in its place", zap.String("server", v.name))
		}
	}
}

// checkResends refuses a configuration in which Caddy would send a guarded call twice and
// the guard could not stop it (P1): a reverse_proxy with retries that apply to the call,
// with a transport such as fastcgi, whose connections the guard cannot watch.
func checkResends(passages []passage) error {
	for _, p := range passages {
		for _, guard := range p.guards {
			if resends(p.proxy, guard) {
				return withPlace(fmt.Errorf("reverse_proxy sends requests again that agent_guard %q lets through once, "+
					"and with the transport %s nothing can stop it: remove lb_retry_match (or its retries), or use the transport agent_guard",
					guard.Name, transportOf(p.proxy)), guard.WrittenAt)
			}
		}
	}
	return nil
}

// checkVisits refuses routes on which two calls or callers would look the same (P1, P3), and, once all handlers of all
// servers are loaded, different guards of one name.
func checkVisits(visits []visit, loaded bool) error {
	first := map[any]*visit{} // of each guard, or of each name
	for i := range visits {
		v := &visits[i]
		if err := v.check(); err != nil {
			return withPlace(err, v.guard.WrittenAt)
		}
		of := any(v.guard)
		if loaded {
			of = v.guard.Name
		}
		other := first[of]
		switch {
		case other == nil:
			first[of] = v
		case v.guard.Shared && other.guard.Shared:
		case v.guard == other.guard:
			return v.invokedTwice(other)
		case other.server == v.server, !v.alike(other):
			return withPlace(fmt.Errorf("%s: %w", v.place, sameName(v.guard.Name, other.place, 2)), v.guard.WrittenAt)
		}
	}
	return nil
}

// invokedTwice is the error of two routes to one guard.
func (v *visit) invokedTwice(other *visit) error {
	return withPlace(fmt.Errorf("the guard %q stands in a named route that is invoked at %s and at %s: behind different sites the same user name may be another user. "+
		"Give each site a guard of its own, or, if they are one service with the same users, write `name %s shared`",
		v.guard.Name, other.place, v.place, quotedWord(v.guard.Name)), v.guard.WrittenAt)
}

// check checks one route to a guard.
func (v *visit) check() error {
	if by := v.before.by; by != "" {
		return fmt.Errorf("%s: this agent_guard stands behind %s, which answers every request: no call would come to the guard, "+
			"and all would run unguarded. Put agent_guard before %s, or, if that is the proxy to guard, write agent_proxy in place of both", v.place, by, by)
	}
	if len(v.ends) == 0 {
		return fmt.Errorf("%s: nothing answers behind the guard %q: every call would be recorded as in doubt. "+
			"Write agent_proxy UPSTREAM in place of agent_guard, or put a handler that answers behind it, such as reverse_proxy", v.place, v.guard.Name)
	}
	kinds := map[string]bool{}
	for _, auth := range v.before.auths {
		if text, known := usersOf(auth); known {
			kinds[text] = true
		}
	}
	if len(kinds) > 1 && !v.guard.Shared {
		return fmt.Errorf("%s: requests come to the guard %q through %d authentications, in which one user name can be several users: "+
			"give each of them a guard of its own, or, if they know the same users, write `name %s shared`",
			v.place, v.guard.Name, len(kinds), quotedWord(v.guard.Name))
	}
	if v.sends != "" {
		return fmt.Errorf("%s: behind the guard %q requests are sent with the method %s, also a GET that the guard has let pass: it would have its effect with each retry. "+
			"Write `method %s` before the guard, outside of the proxy's block: then what leaves is what the guard decides by", v.place, v.guard.Name, v.sends, v.sends)
	}
	for _, copier := range v.before.copiers {
		if field := keyChangedBy(v.guard.ExecutionID, copier); field != "" {
			return fmt.Errorf("%s: %s is set from the answer of a proxy before the guard %q, which reads the execution id from it: with another answer a retry would run again. "+
				"Leave it out of `copy_headers`, or of the headers in `handle_response`", v.place, field, v.guard.Name)
		}
	}
	for _, changer := range v.before.changers {
		if what, instead := v.guard.changedBy(changer); what != "" {
			return fmt.Errorf("%s: %s before the guard %q, which recognises a call and its caller by it: with each change of it retries would run again, "+
				"or callers would be taken for one. Write %s", v.place, what, v.guard.Name, instead)
		}
	}
	return nil
}

// changedBy returns what a handler changes that identifies calls or callers, and where such
// a change belongs; empty if nothing. Caddy keeps only the original method and URI for the
// guard.
func (h *Handler) changedBy(handler caddyhttp.MiddlewareHandler) (what, instead string) {
	if body, ok := handler.(*requestbody.RequestBody); ok {
		if body.Set == "" {
			return "", ""
		}
		return "request_body replaces the body", "it behind the guard, in a route with agent_guard before it"
	}
	if r, ok := handler.(*rewrite.Rewrite); ok {
		return keyRewritten(h.ExecutionID, r), "a placeholder of what the client has sent, such as {http.request.orig_uri.path}, or the rewriting behind the guard"
	}
	changes, ok := handler.(*headers.Handler)
	if !ok || changes.Request == nil {
		return "", ""
	}
	if field := keyChangedBy(h.ExecutionID, changes); field != "" {
		return "request_header changes " + field, "`header_up " + field + " ...` in the proxy's block instead, and tell callers apart with `caller`"
	}
	for _, field := range []string{"Host", "Content-Type", "Content-Encoding", "Cookie"} {
		if setsField(changes.Request, field) {
			return "request_header changes " + field, "`header_up " + field + " ...` in the proxy's block instead"
		}
	}
	for _, name := range changedFields(changes.Request) {
		field := http.CanonicalHeaderKey(name)
		what, instead = "request_header changes "+field, "`header_up "+field+" ...` in the proxy's block instead"
		switch class := h.fields.Class(field); {
		case strings.Contains(field, "*"): // it may be any
			return "request_header removes " + field, "`header_up " + field + "` in the proxy's block instead, or each name by itself"
		case class == body.Credential:
			return what, instead + ", or, if it names no caller, `credentials -" + field + "` in the guard's"
		case class == body.Tenant:
			return what, instead + ", or, if it names no customer, `tenant -" + field + "` in the guard's"
		case class == body.Operand:
			return what, instead
		}
	}
	return "", ""
}

// keyChangedBy is the header field with the execution id that a handler changes; empty without one (P1: the id
// counts as it was sent).
func keyChangedBy(sources []guard.IDSource, changes *headers.Handler) string {
	if changes.Request == nil {
		return ""
	}
	fields := guard.KeyFieldsOf(sources)
	if len(sources) == 0 { // besides those of which nothing but a name is known
		for _, name := range changedFields(changes.Request) {
			if name = http.CanonicalHeaderKey(name); guard.IsKey(name) {
				fields = append(fields, name)
			}
		}
	}
	i := slices.IndexFunc(fields, func(field string) bool { return setsField(changes.Request, http.CanonicalHeaderKey(field)) })
	if i < 0 {
		return ""
	}
	return fields[i]
}

// keyRewritten says that a handler changes the part of the URI with the execution id; empty if it does not.
func keyRewritten(sources []guard.IDSource, r *rewrite.Rewrite) string {
	query := r.Query != nil || strings.Contains(r.URI, "?")
	path := r.URI != "" || r.StripPathPrefix != "" || r.StripPathSuffix != "" || len(r.URISubstring)+len(r.PathRegexp) > 0
	for _, s := range sources {
		_, part, reads := strings.Cut(s.Placeholder, "{http.request.uri")
		if reads && (query && !strings.HasPrefix(part, ".path") || path && !strings.HasPrefix(part, ".query")) {
			return "a rewrite changes the URI, from which `execution_id placeholder " + s.Placeholder + "` reads,"
		}
	}
	return ""
}

// setsField reports whether ops may change a header field.
func setsField(ops *headers.HeaderOps, field string) bool {
	may := func(name string) bool {
		return strings.Contains(name, "{") || http.CanonicalHeaderKey(name) == field
	}
	for name := range ops.Add {
		if may(name) {
			return true
		}
	}
	for name := range ops.Set {
		if may(name) {
			return true
		}
	}
	for name := range ops.Replace {
		if name == "*" || may(name) {
			return true
		}
	}
	lower := strings.ToLower(field)
	for _, name := range ops.Delete {
		part := strings.Trim(strings.ToLower(name), "*")
		front, back := strings.HasPrefix(name, "*"), strings.HasSuffix(name, "*")
		switch {
		case name == "*", may(name),
			front && back && strings.Contains(lower, part),
			front && !back && strings.HasSuffix(lower, part),
			back && !front && strings.HasPrefix(lower, part):
			return true
		}
	}
	return false
}

// alike reports whether two guards of one name are one: their calls come from the same users, unchanged or
// changed in the same way, and go to the same upstreams.
func (v *visit) alike(other *visit) bool {
	a, b := &v.before, &other.before
	return a.always == b.always && alike(a.auths, b.auths) && alike(a.changers, b.changers) && alike(a.copiers, b.copiers) && alike(v.behind, other.behind)
}

func alike[T caddyhttp.MiddlewareHandler](a, b []T) bool {
	return slices.EqualFunc(a, b, func(a, b T) bool { return textOf(a) == textOf(b) })
}

// textOf writes a module to compare it. What cannot be written equals only itself.
func textOf(module any) string {
	switch m := module.(type) {
	case *caddyauth.Authentication:
		text, _ := usersOf(m)
		return text
	case *reverseproxy.Handler:
		reach := reachOf([]any{m}, "")
		return reach.Name() + reach.Fields
	case *caddyauth.HTTPBasicAuth: // loading empties its list of accounts
		module = m.Accounts
	default:
		of := reflect.TypeOf(module)
		for of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		if !strings.HasPrefix(of.PkgPath(), caddyPackages) { // the JSON of others may be incomplete
			return fmt.Sprintf("%T %p", module, module)
		}
	}
	text, err := json.Marshal(module)
	if err != nil {
		return fmt.Sprintf("%T %p", module, module)
	}
	return fmt.Sprintf("%T %s", module, text)
}

const caddyPackages = "github.com/caddyserver/caddy/v2/modules/"

// usersOf writes the users that an authentication knows. known is false if they depend on defaults
// or placeholders that only loading resolves.
func usersOf(h *caddyauth.Authentication) (text string, known bool) {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(h.Providers)) {
		b.WriteString(name + textOf(h.Providers[name]))
	}
	for name, raw := range h.ProvidersRaw {
		var basic caddyauth.HTTPBasicAuth
		if name != "http_basic" || len(h.ProvidersRaw) > 1 || json.Unmarshal(raw, &basic) != nil {
			return "", false
		}
		basic.Accounts = map[string]caddyauth.Account{}
		for _, account := range basic.AccountList {
			if strings.Contains(account.Username+account.Password, "{") {
				return "", false
			}
			basic.Accounts[account.Username] = account
		}
		b.WriteString(name + textOf(&basic))
	}
	return b.String(), true
}

// warnAnonymous warns of guards that calls without a credential can reach: these calls
// share one space of execution ids. warned has the names of guards with an earlier warning.
func warnAnonymous(visits []visit, warned *sync.Map) {
	for i := range visits {
		h := visits[i].guard
		if h.Caller != "" || len(h.CallerCookies) > 0 || h.RequireECT || visits[i].before.always {
			continue
		}
		if _, before := warned.LoadOrStore(h.Name, true); before {
			continue
		}
		h.logger.Warn("calls without any credential share one space of execution ids; require authentication, or name the caller with `caller`",
			slog.String("guard", h.Name), slog.String("caller", caller.Anonymous))
	}
}

// join gives the guard the transport behind it, so that a call that all breakers would refuse is refused before it is
// claimed: that of the only handler there which may answer, where nothing on the way changes what breakers see. A guard
// without one learns of the refusal when it forwards.
func (v *visit) join() {
	if len(v.ends) != 1 {
		return
	}
	h, _ := v.ends[0].(*reverseproxy.Handler)
	if h == nil || changesMethod(h.Rewrite) {
		return
	}
	between := func(b caddyhttp.MiddlewareHandler) bool { return b != v.ends[0] && !passesOn(b) }
	t, ours := h.Transport.(*proxy.Transport)
	if !ours || slices.ContainsFunc(v.behind, between) {
		return
	}
	v.guard.proxy.Store(t)
	v.guard.oneServer.Store(len(h.Upstreams) == 1 && h.DynamicUpstreams == nil &&
		!strings.Contains(h.Upstreams[0].Dial, "{") && len(h.HandleResponse) == 0)
}

// changedFields are the names of the fields that ops change, sorted.
func changedFields(ops *headers.HeaderOps) []string {
	names := slices.AppendSeq(slices.Clone(ops.Delete), maps.Keys(ops.Add))
	names = slices.AppendSeq(slices.AppendSeq(names, maps.Keys(ops.Set)), maps.Keys(ops.Replace))
	slices.Sort(names)
	return names
}

// noteChanges gives each guard the names of the fields that handlers before it change.
func noteChanges(visits []visit) {
	changed := map[*Handler][]string{}
	for i := range visits {
		for _, changer := range visits[i].before.changers {
			if h, ok := changer.(*headers.Handler); ok && h.Request != nil {
				changed[visits[i].guard] = append(changed[visits[i].guard], changedFields(h.Request)...)
			}
		}
	}
	for guard, names := range changed {
		guard.handler.ChangedBefore(names)
	}
}

// noteBehind gives each guard its transport, and the names of the cookies by which proxies of its server choose an
// upstream.
func noteBehind(visits []visit, passages []passage) {
	for _, v := range visits {
		v.join()
		if v.caught {
			v.guard.errorRoutes.Store(true)
		}
		names := append([]string{"lb"}, v.guard.balancingCookies()...)
		for _, p := range passages {
			if p.server != v.server || p.proxy.LoadBalancing == nil {
				continue
			}
			if cookie, ok := p.proxy.LoadBalancing.SelectionPolicy.(*reverseproxy.CookieHashSelection); ok {
				names = append(names, cookie.Name)
			}
		}
		v.guard.balancing.Store(&names)
	}
}

// balancingCookies are the cookies by which the proxies behind the guard choose an upstream. They name no caller.
func (h *Handler) balancingCookies() []string {
	if h.balancing == nil || h.balancing.Load() == nil {
		return nil
	}
	return *h.balancing.Load()
}

// takesAll reports whether every request takes the route.
func takesAll(route *caddyhttp.Route) bool {
	return len(route.MatcherSets) == 0 && route.Group == ""
}

// changesMethod reports whether calls are forwarded with another method than the guard saw:
// breakers may treat the two methods differently.
func changesMethod(r *rewrite.Rewrite) bool { return r != nil && r.Method != "" }

// nameOf returns the name of a handler's module; "" if it is none.
func nameOf(handler caddyhttp.MiddlewareHandler) string {
	if module, ok := handler.(caddy.Module); ok {
		return module.CaddyModule().ID.Name()
	}
	return ""
}

// passesOn reports whether a handler passes every call on, and changes nothing that matters
// for breakers.
func passesOn(handler caddyhttp.MiddlewareHandler) bool {
	if r, ok := handler.(*rewrite.Rewrite); ok {
		return !changesMethod(r)
	}
	switch nameOf(handler) {
	case "headers", "vars", "map", "request_body", "encode", "tracing", "log_append":
		return true
	}
	return false
}
