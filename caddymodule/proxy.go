package caddymodule

import (
	"encoding/json"
	"errors"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	// agent_proxy writes this transport into its configuration.
	_ "github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// parseProxy reads the shortcut
//
//	agent_proxy [<matcher>] [<upstreams...>] {
//		<options of agent_guard>
//		<options of reverse_proxy>
//		transport agent_guard {
//			<options of the transport>
//		}
//	}
//
// It is agent_guard, then reverse_proxy with the transport agent_guard, which the
// block for it configures.
func parseProxy(h httpcaddyfile.Helper) ([]httpcaddyfile.ConfigValue, error) {
	h.Next() // the directive's name
	name := h.Token()
	matchers, err := h.ExtractMatcherSet()
	if err != nil {
		return nil, err
	}
	h.Next() // the name again: the look for a matcher has rewound
	guardTokens, proxyTokens, err := split(h.NextSegment())
	if err != nil {
		return nil, err
	}

	guard := new(Handler)
	if err := guard.UnmarshalCaddyfile(caddyfile.NewDispenser(guardTokens)); err != nil {
		return nil, err
	}
	if upstream, ok := guard.origin["upstream"]; ok {
		return nil, errorAt(upstream[0], errors.New("upstream: agent_proxy is its own; leave the block out, or use agent_guard and reverse_proxy"))
	}
	proxy := new(reverseproxy.Handler)
	d := caddyfile.NewDispenser(proxyTokens)
	if err := proxy.UnmarshalCaddyfile(d); err != nil {
		return nil, errorAt(name, err)
	}
	if err := proxy.FinalizeUnmarshalCaddyfile(h.WithDispenser(d)); err != nil {
		return nil, errorAt(name, err)
	}
	if len(proxy.Upstreams) == 0 && proxy.DynamicUpstreamsRaw == nil {
		return nil, errorAt(name, errors.New("agent_proxy has no upstream; name one behind it, or in its block with `to` or `dynamic`"))
	}
	if proxy.TransportRaw, err = guarded(proxy.TransportRaw); err != nil {
		return nil, errorAt(name, err)
	}

	proxyRaw := caddyconfig.JSONModuleObject(proxy, "handler", "reverse_proxy", nil)
	if _, own := guard.ownRequests(); own {
		guard.UpstreamRaw = []json.RawMessage{proxyRaw}
	}
	route := caddyhttp.Route{HandlersRaw: []json.RawMessage{
		caddyconfig.JSONModuleObject(guard, "handler", "agent_guard", nil), proxyRaw,
	}}
	if matchers != nil {
		route.MatcherSetsRaw = []caddy.ModuleMap{matchers}
	}
	return []httpcaddyfile.ConfigValue{{Class: "route", Value: route}}, nil
}

// split parts the tokens of an agent_proxy directive into those of one with the
// guard's options and of one with all others.
func split(whole caddyfile.Segment) (guard, proxy []caddyfile.Token, err error) {
	d := caddyfile.NewDispenser(whole)
	d.Next() // the directive's name
	line := 1 + len(d.RemainingArgs())
	guard = append(guard, whole[0])
	proxy = append(proxy, whole[:line]...)
	if line == len(whole) {
		return guard, proxy, nil // no block
	}
	open, end := whole[line], whole[len(whole)-1]
	transported := false
	guard = append(guard, open)
	proxy = append(proxy, open)
	ours := guardOptions()
	for d.NextBlock(0) {
		option := d.NextSegment()
		if _, known := ours[option.Directive()]; known {
			guard = append(guard, option...)
			continue
		}
		if option.Directive() == "transport" {
			switch {
			case transported:
				return nil, nil, errorAt(option[0], errors.New("transport stands twice"))
			case len(option) > 1 && option[1].Text != "agent_guard":
				return nil, nil, errorAt(option[0], errors.New("transport: agent_proxy forwards with agent_guard, which takes the options of transport http too; "+
					"for another transport use agent_guard and reverse_proxy, and read in the manual what that costs"))
			}
			transported = true
		}
		proxy = append(proxy, option...)
	}
	return append(guard, end), append(proxy, end), nil
}

// guarded makes the transport agent_guard of the one that reverse_proxy has made:
// none, or http with what the scheme of the upstreams asks for. agent_guard has all
// options of http.
func guarded(raw json.RawMessage) (json.RawMessage, error) {
	transport := map[string]json.RawMessage{}
	if raw != nil {
		if err := json.Unmarshal(raw, &transport); err != nil {
			return nil, err
		}
	}
	transport["protocol"] = json.RawMessage(`"agent_guard"`)
	return json.Marshal(transport)
}
