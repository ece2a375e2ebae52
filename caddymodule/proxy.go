package caddymodule

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	// agent_proxy writes this transport into its configuration.
	_ "github.com/agent-guard/caddy-agent-guard/caddymodule/transport"
)

// guardOptions are the options of agent_proxy that are agent_guard's. All others
// are reverse_proxy's.
var guardOptions = map[string]bool{
	"name": true, "caller": true, "credentials": true, "execution_id": true, "missing_id": true, "inherit": true,
	"consequential": true, "exempt": true, "fingerprint_exclude": true, "max_body": true, "attach_wait": true,
	"endpoints": true, "action": true,
	"deadline": true, "retain_result": true, "retain_key": true, "max_result": true, "preset": true, "outcome": true,
	"on_unknown": true, "settle": true, "unframed": true, "grpc": true,
}

// parseProxy reads the shortcut
//
//	agent_proxy [<matcher>] <upstreams...> {
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
	if !h.Next() {
		return nil, h.ArgErr()
	}
	matchers, err := h.ExtractMatcherSet()
	if err != nil {
		return nil, err
	}
	h.Next() // the directive's name again: the look for a matcher has rewound
	guardTokens, proxyTokens, err := split(h.NewFromNextSegment())
	if err != nil {
		return nil, err
	}

	guard := new(Handler)
	if err := guard.UnmarshalCaddyfile(caddyfile.NewDispenser(guardTokens)); err != nil {
		return nil, err
	}
	proxy := new(reverseproxy.Handler)
	d := caddyfile.NewDispenser(proxyTokens)
	if err := proxy.UnmarshalCaddyfile(d); err != nil {
		return nil, err
	}
	if err := proxy.FinalizeUnmarshalCaddyfile(h.WithDispenser(d)); err != nil {
		return nil, err
	}
	proxyRaw := caddyconfig.JSONModuleObject(proxy, "handler", "reverse_proxy", nil)
	if guard.ownRequests != nil {
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

// split parts the tokens of an agent_proxy segment into those of a directive with
// the guard's options and one with the rest.
func split(d *caddyfile.Dispenser) (guard, proxy []caddyfile.Token, err error) {
	d.Next()
	name := d.Token()
	guard = []caddyfile.Token{name}
	proxy = append([]caddyfile.Token{name}, tokensOfArgs(d)...)
	brace := func(text string, like caddyfile.Token) caddyfile.Token {
		token := like.Clone()
		token.Text = text
		return token
	}
	line := func(token caddyfile.Token, n int) caddyfile.Token {
		token.Line += n
		return token
	}
	guard = append(guard, brace("{", name))
	proxy = append(proxy, brace("{", name))
	transported := false
	last := name
	for d.NextBlock(0) {
		option := d.Token()
		segment := d.NextSegment()
		last = segment[len(segment)-1]
		if guardOptions[option.Text] {
			guard = append(guard, segment...)
			continue
		}
		if option.Text == "transport" {
			if len(segment) < 2 || segment[1].Text != "agent_guard" {
				return nil, nil, errorAt(&option, "agent_proxy forwards with the transport agent_guard, which takes the options of transport http too; "+
					"for another transport use agent_guard and reverse_proxy, and read in the manual what that costs")
			}
			transported = true
		}
		proxy = append(proxy, segment...)
	}
	if !transported {
		for _, word := range []string{"transport", "agent_guard"} {
			proxy = append(proxy, line(brace(word, last), 1))
		}
	}
	guard = append(guard, line(brace("}", last), 2))
	proxy = append(proxy, line(brace("}", last), 2))
	return guard, proxy, nil
}

// tokensOfArgs takes the rest of the line.
func tokensOfArgs(d *caddyfile.Dispenser) []caddyfile.Token {
	var tokens []caddyfile.Token
	for d.NextArg() {
		tokens = append(tokens, d.Token())
	}
	return tokens
}
