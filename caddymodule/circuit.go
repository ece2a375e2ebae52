package caddymodule

import (
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/sent"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// joinProxies tells each guard the transport behind it, so that a call that no upstream
// would take is refused before it is claimed. Guards whose proxy is not plain to see
// learn of a refusal from the transport.
func joinProxies(app *caddyhttp.App) {
	for _, server := range app.Servers {
		joinIn(server.Routes)
		for _, route := range server.NamedRoutes {
			joinIn(caddyhttp.RouteList{*route})
		}
	}
}

func joinIn(routes caddyhttp.RouteList) {
	var guards []*Handler // from which all calls come to what is looked at
	for _, route := range routes {
		own := 0 // guards of this route, at the end of guards
		for _, handler := range route.Handlers {
			switch h := handler.(type) {
			case *Handler:
				guards, own = append(guards, h), own+1
				continue
			case *reverseproxy.Handler:
				t, ours := h.Transport.(*transport.Transport)
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

// changesMethod reports whether the call that a guard has seen comes out with another
// method: a breaker may then let one through and refuse the other.
func changesMethod(r *rewrite.Rewrite) bool { return r != nil && r.Method != "" }

// passesOn reports whether a handler leaves the call to those behind it, as it is as far
// as breakers go.
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

// circuitsOpen refuses a call that no upstream would take, so that it is not claimed and
// its key stays free.
func (x *exchange) circuitsOpen() error {
	t := x.h.proxy.Load()
	if t == nil {
		return nil
	}
	open := t.Refusal(x.r.Method, circuits.ViewOf(x.r.Context()))
	if open == nil {
		return nil
	}
	return circuitOpen(open, t.Downstream(open.Key.Upstream), verifiedHere(x.call.Scope.Caller))
}

// passOn hands on a request that is not guarded. Where a guard around this one has
// forwarded it, what became of it is for that one to say.
func (h *Handler) passOn(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	err := next.ServeHTTP(w, r)
	if err == nil || sent.FromContext(r.Context()) != nil {
		return err
	}
	err = refusedByCircuit(err, verifiedHere(h.verifiedSafe(r)))
	var p *problem.Problem
	if h.fallback == nil || !errors.As(err, &p) || p.Kind() != problem.CircuitOpen {
		return err
	}
	h.actions[len(h.actions)-1].counts.Refused(p.Kind().Slug) // the action default
	return h.fallback.ServeHTTP(answer.Mark(w, headerExecutionStatus, statusRefused), r)
}

// degrade answers a call that a breaker has refused with the fallback, if there is one.
func (x *exchange) degrade(w http.ResponseWriter, p *problem.Problem) (answered bool, err error) {
	if x.h.fallback == nil || p.Kind() != problem.CircuitOpen {
		return false, nil
	}
	x.note(statusRefused, p.Kind().Slug)
	x.action.counts.Refused(p.Kind().Slug)
	w.Header().Set(headerExecutionID, x.call.Scope.ID)
	r := x.unguardedRequest()
	defer r.Body.Close()
	return true, x.h.fallback.ServeHTTP(answer.Mark(w, headerExecutionStatus, statusRefused), r)
}
