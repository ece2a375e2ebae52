package caddymodule

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	_ "github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
)

// parseProxy reads the shortcut
//
//	agent_proxy [<matcher>] [<upstreams...>] {
//		<options of agent_guard>
//		<options of reverse_proxy>
//		breaker off | { ... }
//		transport agent_guard {
//			<options of the transport>
//		}
//	}
//
// It makes agent_guard and then reverse_proxy with the transport agent_guard. The option breaker of
// that transport may stand outside of its block as well.
func parseProxy(h httpcaddyfile.Helper) ([]httpcaddyfile.ConfigValue, error) {
	h.Next() // the directive's name
	name := h.Token()
	matchers, err := h.ExtractMatcherSet()
	if err != nil {
		return nil, err
	}
	h.Next() // again: looking for a matcher has reset the dispenser
	d := h.NewFromNextSegment()
	d.Next()
	guard := &Handler{origin: originOf(d), WrittenAt: placeOf(d.Token())}
	d.RemainingArgs() // the upstreams
	own, proxy := &shortcut{guard: guard}, new(reverseproxy.Handler)
	err = proxyOptions().ReadBeside(d, "agent_proxy", own, guard.origin, proxy.UnmarshalCaddyfile)
	if err == nil {
		err = cmp.Or(guard.checkPolicies(), guard.finish(h), proxy.FinalizeUnmarshalCaddyfile(h))
	}
	if err == nil && len(proxy.Upstreams) == 0 && proxy.DynamicUpstreamsRaw == nil {
		err = errors.New("agent_proxy has no upstream; name one behind it, or in its block with `to` or `dynamic`")
	}
	if err == nil {
		proxy.TransportRaw, err = own.withBreaker(proxy.TransportRaw)
	}
	if err != nil {
		return nil, option.ErrorAt(name, err)
	}

	proxyRaw := caddyconfig.JSONModuleObject(proxy, "handler", "reverse_proxy", nil)
	if _, own := guard.ownRequests(); own {
		guard.UpstreamRaw = []json.RawMessage{proxyRaw}
	}
	route := caddyhttp.Route{HandlersRaw: []json.RawMessage{
		caddyconfig.JSONModuleObject(guard, "handler", "agent_guard", nil), proxyRaw,
	}}
	if h.IsNamedRoute() { // Caddy keeps only the first handler of a named route's only directive
		both := caddyhttp.Subroute{Routes: caddyhttp.RouteList{route}}
		route.HandlersRaw = []json.RawMessage{caddyconfig.JSONModuleObject(both, "handler", "subroute", nil)}
	}
	if matchers != nil {
		route.MatcherSetsRaw = []caddy.ModuleMap{matchers}
	}
	return []httpcaddyfile.ConfigValue{{Class: "route", Value: route}}, nil
}

// shortcut is what a directive agent_proxy says beside the options of reverse_proxy.
type shortcut struct {
	guard       *Handler
	transport   proxy.Transport // with the breaker that stands outside of its block
	transported bool            // the block of the transport was read
}

// proxyOptions are the options of agent_proxy that reverse_proxy does not have, and the transport that it may have.
func proxyOptions() option.Set[*shortcut] {
	breaker := proxy.Options()["breaker"]
	return merge(within(func(s *shortcut) *Handler { return s.guard }, guardOptions()), option.Set[*shortcut]{
		"breaker": {Several: true, NamesItself: true, Usage: breaker.Usage, Parse: func(d dispenser, s *shortcut) error {
			if s.transport.Breaker != nil {
				return errors.New("breaker stands twice")
			}
			return breaker.Parse(d, &s.transport)
		}},
		"transport": {Several: true, NamesItself: true, Passed: true, Parse: func(d dispenser, s *shortcut) error {
			switch {
			case s.transported:
				return errors.New("transport stands twice")
			case d.NextArg() && d.Val() != "agent_guard":
				return errors.New("agent_proxy forwards with agent_guard, which takes the options of transport http too; " +
					"for another transport use agent_guard and reverse_proxy, and read in the manual what that costs")
			}
			for s.transported = true; d.Next(); {
			}
			return nil
		}},
		"upstream": {Parse: func(dispenser, *shortcut) error {
			return errors.New("agent_proxy is its own; leave the block out, or use agent_guard and reverse_proxy")
		}},
	})
}

// withBreaker turns the transport that reverse_proxy has parsed (none, or http as the
// upstreams' scheme requires) into the transport agent_guard, which has all options of
// http, with the breaker that stands outside of its block.
func (s *shortcut) withBreaker(raw json.RawMessage) (json.RawMessage, error) {
	transport := map[string]json.RawMessage{}
	if raw != nil {
		if err := json.Unmarshal(raw, &transport); err != nil {
			return nil, err
		}
	}
	transport["protocol"] = json.RawMessage(`"agent_guard"`)
	if s.transport.Breaker != nil {
		if transport["breaker"] != nil {
			return nil, option.ErrorAt(s.guard.origin["breaker"][0], errors.New("breaker: the transport has one already; write one of them"))
		}
		transport["breaker"] = caddyconfig.JSON(s.transport.Breaker, nil)
	}
	return json.Marshal(transport)
}

// compile chains the handlers of an option, the first outermost.
func compile(mods []any, option string) caddyhttp.Handler {
	next := caddyhttp.Handler(caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		return caddyhttp.Error(http.StatusBadGateway, fmt.Errorf("agent_guard: no handler in `%s` answered", option))
	}))
	for i := len(mods) - 1; i >= 0; i-- {
		middleware, inner := mods[i].(caddyhttp.MiddlewareHandler), next
		next = caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			return middleware.ServeHTTP(w, r, inner)
		})
	}
	return next
}
