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

	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/fingerprint"
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/caddyauth"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/requestbody"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"
	"go.uber.org/zap"
)

// before are the handlers that a request may have passed.
type before struct {
	auths    []*caddyauth.Authentication // one that every request passes replaces the earlier ones
	always   bool                        // every request passes one of auths
	changers []caddyhttp.MiddlewareHandler
	copiers  []*headers.Handler // behind a proxy that has asked about the request, as in forward_auth
	guards   []*Handler
}

func (b before) join(other before) before {
	return before{
		auths:    union(b.auths, other.auths),
		always:   b.always && other.always,
		changers: union(b.changers, other.changers),
		copiers:  union(b.copiers, other.copiers),
		guards:   union(b.guards, other.guards),
	}
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
	site   caddyhttp.RouteList
	before before
	// answered reports that a handler behind the guard may answer, on this route or another one.
	answered bool
	sends    string // the method with which requests are sent on behind it, whatever theirs; empty if it is theirs
	caught   bool   // error routes take the errors of the guard
}

// chains finds the routes to the guards of a configuration.
type chains struct {
	server *caddyhttp.Server
	name   string
	place  string
	site   caddyhttp.RouteList
	depth  int  // of named routes
	caught bool // error routes take the errors of what is read
	visits []visit
	bare   map[*reverseproxy.Handler]bareProxy
	// answered has the guards behind which a handler may answer.
	answered map[*Handler]bool
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

// bareProxy is a reverse_proxy behind a guard that has no circuit breakers.
type bareProxy struct {
	guard, place string
	upstreams    []string
}

// maxInvoked bounds how deep named routes invoke each other.
const maxInvoked = 20

// visitsOf lists the routes to the guards in an app's servers, and the proxies behind them that have
// no breakers.
func visitsOf(app *caddyhttp.App) ([]visit, map[*reverseproxy.Handler]bareProxy) {
	var all []visit
	bare := map[*reverseproxy.Handler]bareProxy{}
	for _, name := range slices.Sorted(maps.Keys(app.Servers)) {
		all = append(all, visitsIn(app.Servers[name], name, bare)...)
	}
	return all, bare
}

func visitsIn(server *caddyhttp.Server, name string, bare map[*reverseproxy.Handler]bareProxy) []visit {
	c := chains{server: server, name: name, bare: bare, answered: map[*Handler]bool{},
		read: map[*json.RawMessage][]caddyhttp.MiddlewareHandler{}, caught: server.Errors != nil && len(server.Errors.Routes) > 0}
	c.sites(server.Routes, "/routes")
	if c.caught = false; server.Errors != nil {
		c.sites(server.Errors.Routes, "/errors/routes")
	}
	for i := range c.visits {
		c.visits[i].answered = c.answered[c.visits[i].guard]
	}
	return c.visits
}

// sites reads the routes of a server. Each site has its own route; a single site may have
// all of them.
func (c *chains) sites(routes caddyhttp.RouteList, list string) {
	c.place, c.site = c.name+list, nil
	for i := range routes { // except other sites and Caddy's redirects to https
		if hostsOf(&routes[i]) == "" && !answersOnly(&routes[i]) {
			c.site = append(c.site, routes[i])
		}
	}
	c.routes(routes, before{}, true)
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
		place, site := c.place, c.site
		if c.depth == 0 {
			c.place = fmt.Sprintf("%s/%d", place, i)
		}
		if hosts := hostsOf(route); top && hosts != "" {
			c.place += " (" + hosts + ")"
			c.site = siteOf(route)
		}
		leaves, ends := c.handlers(route, enters)
		c.place, c.site = place, site
		switch {
		case route.Terminal || ends:
		case len(route.MatcherSetsRaw) == 0 && takesAll(route):
			b = leaves
		default:
			b = b.join(leaves)
		}
	}
	return b
}

// answersOnly reports whether a route only has fixed answers.
func answersOnly(route *caddyhttp.Route) bool {
	return len(route.Handlers) > 0 && !slices.ContainsFunc(route.Handlers, func(h caddyhttp.MiddlewareHandler) bool {
		_, answers := h.(*caddyhttp.StaticResponse)
		return !answers
	})
}

// siteOf returns the routes of a site that has its own route.
func siteOf(route *caddyhttp.Route) caddyhttp.RouteList {
	if len(route.Handlers) == 1 {
		if sub, ok := route.Handlers[0].(*caddyhttp.Subroute); ok && sub.Errors == nil {
			return sub.Routes
		}
	}
	return caddyhttp.RouteList{{Handlers: route.Handlers}}
}

// handlers reads the handlers of a route. ends says that no request passes it.
func (c *chains) handlers(route *caddyhttp.Route, b before) (_ before, ends bool) {
	for _, handler := range c.handlersOf(route) {
		switch h := handler.(type) {
		case *Handler:
			c.visits = append(c.visits, visit{guard: h, server: c.server, name: c.name, place: c.place, site: c.site, before: b, caught: c.caught})
			b.guards = union(b.guards, []*Handler{h})
		case *caddyauth.Authentication:
			b.auths, b.always = []*caddyauth.Authentication{h}, true
		case *rewrite.Rewrite:
			b.changers = union(b.changers, []caddyhttp.MiddlewareHandler{h})
			c.sendsAs(h, b)
		case *headers.Handler, *requestbody.RequestBody:
			b.changers = union(b.changers, []caddyhttp.MiddlewareHandler{h})
		case *caddyhttp.Subroute:
			outer := c.caught
			c.caught = outer || h.Errors != nil
			after := c.routes(h.Routes, b, false)
			c.caught = outer
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
				c.answer(b)
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
		switch nameOf(handler) {
		case "agent_guard", "agent_guard_endpoints", "subroute", "invoke", "authentication", "rewrite":
		default:
			if !passesOn(handler) { // handlers of other modules may answer
				c.answer(b)
			}
		}
	}
	return b, ends
}

// answer records that a handler may answer calls that passed b.
func (c *chains) answer(b before) {
	for _, guard := range b.guards {
		c.answered[guard] = true
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

// proxy records a proxy without breakers behind a guard, unless it does not forward the
// call itself, as in forward_auth.
func (c *chains) proxy(h *reverseproxy.Handler, b before) {
	_, ours := h.Transport.(*proxy.Transport)
	asks := changesMethod(h.Rewrite) && len(h.HandleResponse) > 0
	if ours || asks || len(b.guards) == 0 {
		return
	}
	bare := bareProxy{guard: b.guards[len(b.guards)-1].Name, place: c.place}
	for _, u := range h.Upstreams {
		bare.upstreams = append(bare.upstreams, u.Dial)
	}
	c.bare[h] = bare
}

// warnBare warns of proxies without breakers behind guards (cascade 3.2): they send every call to a
// failing upstream.
func warnBare(logger *zap.Logger, bare map[*reverseproxy.Handler]bareProxy) {
	for _, p := range bare {
		logger.Warn("a reverse_proxy behind agent_guard has no circuit breaker, and no proof of what was sent: "+
			"give it `transport agent_guard`, or write agent_proxy in its place",
			zap.String("route", p.place), zap.String("guard", p.guard), zap.Strings("upstreams", p.upstreams))
	}
}

// checkVisits refuses routes on which two calls or callers would look the same (P1, P3). It
// reports only what is certain, since not all handlers of a server are loaded yet.
func checkVisits(visits []visit) error {
	first := map[*Handler]*visit{}
	for i := range visits {
		v := &visits[i]
		if err := v.check(); err != nil {
			return withPlace(err, v.guard.WrittenAt)
		}
		if other := first[v.guard]; other != nil && !v.guard.Shared {
			return v.invokedTwice(other)
		}
		first[v.guard] = v
	}
	return nil
}

// invokedTwice is the error of two routes to one guard.
func (v *visit) invokedTwice(other *visit) error {
	return withPlace(fmt.Errorf("the guard %q stands in a named route that is invoked at %s and at %s: behind different sites the same user name may be another user. "+
		"Give each site a guard of its own, or, if they are one service with the same users, write `name %s shared`",
		v.guard.Name, other.place, v.place, quotedWord(v.guard.Name)), v.guard.WrittenAt)
}

// checkChains refuses what checkVisits does, and different guards of one name.
func checkChains(visits []visit) error {
	first := map[string]*visit{} // of each name
	for i := range visits {
		v := &visits[i]
		if err := v.check(); err != nil {
			return withPlace(err, v.guard.WrittenAt)
		}
		other := first[v.guard.Name]
		switch {
		case other == nil:
			first[v.guard.Name] = v
		case v.guard.Shared && other.guard.Shared:
		case v.guard == other.guard:
			return v.invokedTwice(other)
		case other.server == v.server, v.text().routes(v.site) != other.text().routes(other.site):
			return withPlace(fmt.Errorf("%s: %w", v.place, sameName(v.guard.Name, other.place, 2)), v.guard.WrittenAt)
		}
	}
	return nil
}

// check checks one route to a guard.
func (v *visit) check() error {
	if !v.answered {
		return fmt.Errorf("%s: nothing answers behind the guard %q: every call would be recorded as in doubt. "+
			"Write agent_proxy UPSTREAM in place of agent_guard, or put a handler that answers behind it, such as reverse_proxy", v.place, v.guard.Name)
	}
	kinds := map[string]bool{}
	for _, auth := range v.before.auths {
		if text, known := v.text().authentication(auth); known {
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
		if field := v.guard.keyChangedBy(copier); field != "" {
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
		return h.keyRewritten(r), "a placeholder of what the client has sent, such as {http.request.orig_uri.path}, or the rewriting behind the guard"
	}
	changes, ok := handler.(*headers.Handler)
	if !ok || changes.Request == nil {
		return "", ""
	}
	if field := h.keyChangedBy(changes); field != "" {
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
		case class == fingerprint.Credential:
			return what, instead + ", or, if it names no caller, `credentials -" + field + "` in the guard's"
		case class == fingerprint.Tenant:
			return what, instead + ", or, if it names no customer, `tenant -" + field + "` in the guard's"
		case class == fingerprint.Operand:
			return what, instead
		}
	}
	return "", ""
}

// keyChangedBy is the header field with the execution id that a handler changes; empty without one (P1: the id
// counts as it was sent).
func (h *Handler) keyChangedBy(changes *headers.Handler) string {
	if changes.Request == nil {
		return ""
	}
	var sources []guard.IDSource
	for _, s := range h.ExecutionID {
		sources = append(sources, guard.IDSource(s))
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
func (h *Handler) keyRewritten(r *rewrite.Rewrite) string {
	query := r.Query != nil || strings.Contains(r.URI, "?")
	path := r.URI != "" || r.StripPathPrefix != "" || r.StripPathSuffix != "" || len(r.URISubstring)+len(r.PathRegexp) > 0
	for _, s := range h.ExecutionID {
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

// routeText writes routes as text to compare them. Equal texts lead to the same upstreams
// through the same authentication. Parts that cannot be written equal nothing else.
type routeText struct {
	server *caddyhttp.Server
	name   string
	depth  int // of named routes
}

func (v *visit) text() *routeText { return &routeText{server: v.server, name: v.name} }

func (w *routeText) routes(routes caddyhttp.RouteList) string {
	var b strings.Builder
	for i := range routes {
		fmt.Fprintf(&b, "(%q %v ", routes[i].Group, routes[i].Terminal)
		for _, set := range routes[i].MatcherSets {
			b.WriteByte('[')
			for _, matcher := range set {
				b.WriteString(w.module(matcher))
			}
			b.WriteByte(']')
		}
		for _, handler := range routes[i].Handlers {
			b.WriteString(w.handler(handler))
		}
		b.WriteByte(')')
	}
	return b.String()
}

func (w *routeText) handler(handler caddyhttp.MiddlewareHandler) string {
	switch h := handler.(type) {
	case *Handler:
		return h.written
	case *caddyhttp.Subroute:
		text := "{" + w.routes(h.Routes)
		if h.Errors != nil {
			text += " errors " + w.routes(h.Errors.Routes)
		}
		return text + "}"
	case *caddyhttp.Invoke:
		named := w.server.NamedRoutes[h.Name]
		if named == nil || w.depth == maxInvoked {
			return w.module(h)
		}
		w.depth++
		defer func() { w.depth-- }()
		return w.routes(caddyhttp.RouteList{*named})
	case *caddyauth.Authentication:
		text, _ := w.authentication(h)
		return text
	case *reverseproxy.Handler:
		text := w.module(h) + w.module(h.DynamicUpstreams) + w.module(unplaced(h.Transport))
		for _, response := range h.HandleResponse {
			text += w.routes(response.Routes)
		}
		return text
	}
	return w.module(handler)
}

// authentication writes the users that h knows. known is false if they depend on defaults
// or placeholders that only loading resolves.
func (w *routeText) authentication(h *caddyauth.Authentication) (text string, known bool) {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(h.Providers)) {
		b.WriteString(name + w.module(h.Providers[name]))
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
		b.WriteString(name + w.module(&basic))
	}
	return b.String(), true
}

// unplaced removes the place in the Caddyfile from a transport.
func unplaced(t http.RoundTripper) http.RoundTripper {
	ours, ok := t.(*proxy.Transport)
	if !ok || ours.Breaker == nil {
		return t
	}
	breaker := *ours.Breaker
	breaker.WrittenAt = ""
	return &proxy.Transport{HTTPTransport: ours.HTTPTransport, KeepaliveGuarded: ours.KeepaliveGuarded, Breaker: &breaker}
}

func (w *routeText) module(module any) string {
	switch m := module.(type) {
	case nil:
		return "nil"
	case *caddyauth.HTTPBasicAuth: // loading empties its list of accounts
		text, err := json.Marshal(m.Accounts)
		if err == nil {
			return string(text)
		}
	case *reverseproxy.MultiUpstreams: // its parts are not written
	default:
		of := reflect.TypeOf(module)
		for of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		text, err := json.Marshal(module)
		if err == nil && (strings.HasPrefix(of.PkgPath(), caddyPackages) || strings.HasPrefix(of.PkgPath(), ownPackages)) {
			return of.String() + string(text)
		}
	}
	return fmt.Sprintf("%s %T %p", w.name, module, module)
}

// Modules of these packages are compared by their JSON. The JSON of others may be
// incomplete.
const (
	caddyPackages = "github.com/caddyserver/caddy/v2/modules/"
	ownPackages   = "github.com/agent-guard/caddy-agent-guard/"
)

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
			slog.String("guard", h.Name), slog.String("caller", guard.Anonymous))
	}
}

// joinProxies gives each guard the transport behind it, so that a call that all breakers
// would refuse is refused before it is claimed. A guard without one learns of the refusal
// when it forwards.
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
					// The calls of other routes arrive here only if every request takes
					// this route.
					if ours && !changesMethod(h.Rewrite) && (i >= len(guards)-own || takesAll(&route)) {
						guard.proxy.Store(t)
						guard.oneServer.Store(len(h.Upstreams) == 1 && h.DynamicUpstreams == nil && !strings.Contains(h.Upstreams[0].Dial, "{") && len(h.HandleResponse) == 0)
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

// noteBalancing gives each guard the names of the cookies by which proxies of its server choose an upstream.
func noteBalancing(visits []visit) {
	for i := range visits {
		if visits[i].caught {
			visits[i].guard.errorRoutes.Store(true)
		}
		names := append([]string{"lb"}, visits[i].guard.balancingCookies()...)
		for _, route := range visits[i].server.NamedRoutes {
			names = balancingIn(names, caddyhttp.RouteList{*route})
		}
		names = balancingIn(names, visits[i].server.Routes)
		visits[i].guard.balancing.Store(&names)
	}
}

func balancingIn(names []string, routes caddyhttp.RouteList) []string {
	for _, route := range routes {
		for _, handler := range route.Handlers {
			switch h := handler.(type) {
			case *caddyhttp.Subroute:
				names = balancingIn(names, h.Routes)
			case *reverseproxy.Handler:
				if h.LoadBalancing == nil {
					continue
				}
				if cookie, ok := h.LoadBalancing.SelectionPolicy.(*reverseproxy.CookieHashSelection); ok {
					names = append(names, cookie.Name)
				}
			}
		}
	}
	return names
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
	switch h := handler.(type) {
	case unloaded:
		return h.name
	case caddy.Module:
		return h.CaddyModule().ID.Name()
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
