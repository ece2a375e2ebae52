package caddymodule

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
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
	parts, err := split(h.NextSegment())
	if err != nil {
		return nil, err
	}

	guard := new(Handler)
	if err := guard.UnmarshalCaddyfile(caddyfile.NewDispenser(parts.guard)); err != nil {
		return nil, err
	}
	if upstream, ok := guard.origin["upstream"]; ok {
		return nil, option.ErrorAt(upstream[0], errors.New("upstream: agent_proxy is its own; leave the block out, or use agent_guard and reverse_proxy"))
	}
	if err := guard.parseHandlers(h, "fallback", &guard.FallbackRaw); err != nil {
		return nil, err
	}
	if err := guard.claimName(h); err != nil {
		return nil, err
	}
	if err := guard.checkGlobals(h); err != nil {
		return nil, err
	}
	proxy := new(reverseproxy.Handler)
	d := caddyfile.NewDispenser(parts.proxy)
	if err := proxy.UnmarshalCaddyfile(d); err != nil {
		return nil, option.ErrorAt(name, err)
	}
	if err := proxy.FinalizeUnmarshalCaddyfile(h.WithDispenser(d)); err != nil {
		return nil, option.ErrorAt(name, err)
	}
	if len(proxy.Upstreams) == 0 && proxy.DynamicUpstreamsRaw == nil {
		return nil, option.ErrorAt(name, errors.New("agent_proxy has no upstream; name one behind it, or in its block with `to` or `dynamic`"))
	}
	if proxy.TransportRaw, err = guarded(proxy.TransportRaw, parts.breaker); err != nil {
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

// proxyParts are the tokens of an agent_proxy directive, separated by handler.
type proxyParts struct {
	guard   []caddyfile.Token // a directive agent_guard
	proxy   []caddyfile.Token // a directive reverse_proxy with all other options
	breaker caddyfile.Segment // the transport's option; nil without it
}

// split separates the tokens of an agent_proxy directive.
func split(whole caddyfile.Segment) (parts proxyParts, err error) {
	d := caddyfile.NewDispenser(whole)
	d.Next() // the directive's name
	line := 1 + len(d.RemainingArgs())
	parts.guard = append(parts.guard, whole[0])
	parts.proxy = append(parts.proxy, whole[:line]...)
	if line == len(whole) {
		return parts, nil // no block
	}
	open, end := whole[line], whole[len(whole)-1]
	parts.guard = append(parts.guard, open)
	parts.proxy = append(parts.proxy, open)
	transported := false
	ours := guardOptions()
	for d.NextBlock(0) {
		segment := d.NextSegment()
		name := segment.Directive()
		if _, known := ours[name]; known {
			parts.guard = append(parts.guard, segment...)
			continue
		}
		switch {
		case name == "breaker" && parts.breaker != nil:
			return parts, option.ErrorAt(segment[0], errors.New("breaker stands twice"))
		case name == "breaker":
			parts.breaker = segment
			continue
		case name == "transport" && transported:
			return parts, option.ErrorAt(segment[0], errors.New("transport stands twice"))
		case name == "transport" && len(segment) > 1 && segment[1].Text != "agent_guard":
			return parts, option.ErrorAt(segment[0], errors.New("transport: agent_proxy forwards with agent_guard, which takes the options of transport http too; "+
				"for another transport use agent_guard and reverse_proxy, and read in the manual what that costs"))
		}
		transported = transported || name == "transport"
		parts.proxy = append(parts.proxy, segment...)
	}
	parts.guard, parts.proxy = append(parts.guard, end), append(parts.proxy, end)
	return parts, nil
}

// guarded turns the transport that reverse_proxy has parsed (none, or http as the
// upstreams' scheme requires) into the transport agent_guard, which has all options of
// http. breaker is the option of that name if it is outside of the transport's block.
func guarded(raw json.RawMessage, breaker caddyfile.Segment) (json.RawMessage, error) {
	transport := map[string]json.RawMessage{}
	if raw != nil {
		if err := json.Unmarshal(raw, &transport); err != nil {
			return nil, err
		}
	}
	transport["protocol"] = json.RawMessage(`"agent_guard"`)
	if breaker != nil {
		if transport["breaker"] != nil {
			return nil, option.ErrorAt(breaker[0], errors.New("breaker: the transport has one already; write one of them"))
		}
		d := caddyfile.NewDispenser(breaker)
		d.Next()
		settings := new(proxy.Settings)
		if err := settings.UnmarshalCaddyfile(d); err != nil {
			return nil, err
		}
		transport["breaker"] = caddyconfig.JSON(settings, nil)
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
