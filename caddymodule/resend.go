package caddymodule

import (
	"fmt"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// checkResends refuses a configuration in which Caddy would send a guarded call
// twice and the guard could not stop it (P1): reverse_proxy with retries that apply
// to the call, over a transport that makes its connections unseen, like fastcgi.
func checkResends(app *caddyhttp.App) error {
	for name, server := range app.Servers {
		guard, err := resendsIn(server.Routes, nil)
		if err != nil {
			return fmt.Errorf("server %s: %w", name, err)
		}
		for _, route := range server.NamedRoutes {
			if _, err := resendsIn(caddyhttp.RouteList{*route}, guard); err != nil {
				return fmt.Errorf("server %s: %w", name, err)
			}
		}
	}
	return nil
}

// resendsIn looks through routes in their order. guard is the last agent_guard on
// the way there; the last one that it finds is returned.
func resendsIn(routes caddyhttp.RouteList, guard *Handler) (*Handler, error) {
	for _, route := range routes {
		for _, handler := range route.Handlers {
			switch h := handler.(type) {
			case *Handler:
				guard = h
			case *caddyhttp.Subroute:
				var err error
				if guard, err = resendsIn(h.Routes, guard); err != nil {
					return nil, err
				}
			case *reverseproxy.Handler:
				if guard != nil && resends(h, guard) {
					return nil, fmt.Errorf("reverse_proxy sends requests again that agent_guard %q lets through once, "+
						"and with the transport %T nothing can stop it: remove lb_retry_match (or its retries), or use the transport agent_guard",
						guard.Name, h.Transport)
				}
			}
		}
	}
	return guard, nil
}

func resends(proxy *reverseproxy.Handler, guard *Handler) bool {
	switch proxy.Transport.(type) {
	case *reverseproxy.HTTPTransport, *transport.Transport:
		return false
	}
	lb := proxy.LoadBalancing
	if lb == nil || lb.Retries == 0 && lb.TryDuration == 0 {
		return false
	}
	// Without matchers only GET is sent again after its connection was made.
	return len(lb.RetryMatch) > 0 || len(guard.consequentialSets) > 0
}

// unguardedErrorRoutes lists the servers with a guard whose error routes forward calls
// past it. A call that was provably not sent comes there, and its key is free: what
// is forwarded there is recorded nowhere.
func unguardedErrorRoutes(app *caddyhttp.App) []string {
	var names []string
	for name, server := range app.Servers {
		if server.Errors == nil {
			continue
		}
		guard, err := resendsIn(server.Routes, nil)
		if err == nil && guard != nil && forwardsUnguarded(server.Errors.Routes) {
			names = append(names, name)
		}
	}
	return names
}

func forwardsUnguarded(routes caddyhttp.RouteList) bool {
	for _, route := range routes {
	handlers:
		for _, handler := range route.Handlers {
			switch h := handler.(type) {
			case *Handler:
				break handlers // what follows is guarded
			case *caddyhttp.Subroute:
				if forwardsUnguarded(h.Routes) {
					return true
				}
			case *reverseproxy.Handler:
				return true
			}
		}
	}
	return false
}
