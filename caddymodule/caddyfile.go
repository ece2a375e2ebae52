package caddymodule

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("agent_guard", parseApp)
	httpcaddyfile.RegisterHandlerDirective("agent_guard", parseGuard)
	httpcaddyfile.RegisterHandlerDirective("agent_guard_endpoints", parseEndpoints)
	httpcaddyfile.RegisterDirective("agent_proxy", parseProxy)
	// After encode: identity is known, bodies are limited, and what is recorded is
	// not compressed by Caddy.
	httpcaddyfile.RegisterDirectiveOrder("agent_guard", httpcaddyfile.After, "encode")
	httpcaddyfile.RegisterDirectiveOrder("agent_guard_endpoints", httpcaddyfile.Before, "respond")
	httpcaddyfile.RegisterDirectiveOrder("agent_proxy", httpcaddyfile.Before, "reverse_proxy")
}

// parseApp reads the global option
//
//	agent_guard {
//		store <module> [<options...>]
//		keys  file <path> | value <placeholder>
//		drain <duration>
//		quota {
//			open_executions  <number>
//			stored_bytes     <size>
//			checkpoints      workflow | caller <number>
//			checkpoint_bytes workflow | caller <size>
//			checkpoint_rate  <number> | off
//		}
//		identity <uri> {
//			key_file  <path>
//			algorithm ES256 | ES384 | EdDSA
//			spelling  00 | 01
//			life      <duration>
//			retain    <duration>
//			public_url <url>
//		}
//		trust jwks_file <path> [<owner>]
//		trust jwks_url  <url>  [<owner>]
//		trust {
//			...
//		}
//		rollback {
//			lineage      ancestor | workflow
//			coordinators <issuers...>
//			rate         <number>
//			wait         <duration>
//			retain       <duration>
//		}
//		hitl {
//			webhook <url> {
//				secret  <placeholder>...
//				timeout <duration>
//			}
//			keep <duration>
//		}
//	}
func parseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the option's name
	if existing != nil {
		return nil, d.Err("agent_guard stands twice in the global options; write one block")
	}
	at := originOf(d)
	if d.NextArg() {
		return nil, d.Errf("agent_guard takes no argument here, but a block; %q is too much", d.Val())
	}
	app := new(App)
	if err := appOptions().readBlock(d, "the global option agent_guard", app, at); err != nil {
		return nil, err
	}
	return httpcaddyfile.App{Name: "agent_guard", Value: caddyconfig.JSON(app, nil)}, nil
}

func appOptions() options[*App] {
	return options[*App]{
		"store": {usage: "store <module> [<options...>]", parse: parseStore},
		"keys":  {usage: "keys file <path> | value <placeholder>", parse: parseKeys},
		"drain": {usage: "drain <duration>", parse: func(d *caddyfile.Dispenser, a *App) error {
			return parseDuration(d, &a.Drain)
		}},
		"hitl":     {usage: "hitl { ... }", parse: parseHITL},
		"quota":    {usage: "quota { ... }", parse: parseQuota},
		"identity": {usage: "identity <uri> { ... }", parse: parseIdentity},
		"trust":    {usage: "trust jwks_file <path> [<owner>] | jwks_url <url> [<owner>] | { ... }", several: true, parse: parseTrust},
		"rollback": {usage: "rollback { ... }", parse: parseRollback},
	}
}

func parseStore(d *caddyfile.Dispenser, a *App) error {
	if !d.NextArg() {
		return errSyntax
	}
	name := d.Val()
	module, err := caddyfile.UnmarshalModule(d, "agent_guard.stores."+name)
	if err != nil {
		return err
	}
	a.StoreRaw = caddyconfig.JSONModuleObject(module, "module", name, nil)
	return nil
}

func parseKeys(d *caddyfile.Dispenser, a *App) error {
	kind, value, err := parsePair(d)
	if err != nil {
		return err
	}
	if value == "" {
		return fmt.Errorf("the %s is empty; name one", kind)
	}
	switch kind {
	case "file":
		a.KeyFile = value
	case "value":
		a.Key = value
	default:
		return oneOf(kind, "file", "value")
	}
	return nil
}

// parseGuard reads the directive agent_guard [<matcher>] with the options of
// Handler.UnmarshalCaddyfile.
func parseGuard(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	guard := new(Handler)
	if err := guard.UnmarshalCaddyfile(h.Dispenser); err != nil {
		return nil, err
	}
	if err := guard.parseHandlers(h, "upstream", &guard.UpstreamRaw); err != nil {
		return nil, err
	}
	if err := guard.parseHandlers(h, "fallback", &guard.FallbackRaw); err != nil {
		return nil, err
	}
	if asks, own := guard.ownRequests(); own && guard.UpstreamRaw == nil {
		return nil, errorAt(asks.at, errors.New(asks.what+" of the guard's own; "+
			"give agent_guard an `upstream` block that says how it reaches the upstream, or use agent_proxy"))
	}
	return guard, nil
}

// parseHandlers reads the handlers in the block of an option, which takes the helper
// that UnmarshalCaddyfile does not have.
func (h *Handler) parseHandlers(helper httpcaddyfile.Helper, option string, into *[]json.RawMessage) error {
	segment, ok := h.origin[option]
	if !ok {
		return nil
	}
	handler, err := httpcaddyfile.ParseSegmentAsSubroute(helper.WithDispenser(caddyfile.NewDispenser(segment)))
	if err != nil {
		return err
	}
	if subroute, ok := handler.(*caddyhttp.Subroute); ok && len(subroute.Routes) == 0 {
		return errorAt(segment[0], fmt.Errorf("%s: no handler is given; write %s", option, map[string]string{
			"upstream": "those that lead to the upstream, like reverse_proxy",
			"fallback": "those that answer, like respond",
		}[option]))
	}
	*into = []json.RawMessage{caddyconfig.JSONModuleObject(handler, "handler", "subroute", nil)}
	return nil
}

// wanting is an option that makes the guard send requests of its own.
type wanting struct {
	at   caddyfile.Token
	what string
}

// ownRequests reports whether the guard makes requests of its own, and what asks
// for the first.
func (h *Handler) ownRequests() (wanting, bool) {
	const probe, undo = "on_unknown: a probe is a request", ": an undo is made of requests"
	if h.OnUnknown == onUnknownProbe {
		return wanting{h.origin["on_unknown"][0], probe}, true
	}
	if h.DefaultUndo != nil {
		if _, own := h.DefaultUndo.OwnRequests(); own {
			return wanting{h.origin["default_undo"][0], "default_undo" + undo}, true
		}
	}
	for _, a := range h.Actions {
		if a.OnUnknown == onUnknownProbe {
			return wanting{a.origin["on_unknown"][0], probe}, true
		}
		if option, own := a.OwnRequests(); own {
			return wanting{a.origin[option][0], option + undo}, true
		}
	}
	return wanting{}, false
}
