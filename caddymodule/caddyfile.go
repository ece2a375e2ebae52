package caddymodule

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dustin/go-humanize"
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
//	}
func parseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	if existing != nil {
		return nil, d.Err("agent_guard stands twice in the global options; write one block")
	}
	app := new(App)
	d.Next() // the option's name
	if d.NextArg() {
		return nil, d.ArgErr()
	}
	seen := map[string]bool{}
	for d.NextBlock(0) {
		name := d.Val()
		if seen[name] {
			return nil, d.Errf("%s stands twice", name)
		}
		seen[name] = true
		var err error
		switch name {
		case "store":
			err = app.parseStore(d)
		case "keys":
			err = app.parseKeys(d)
		case "drain":
			err = parseDuration(d, &app.Drain)
		default:
			err = d.Errf("agent_guard has no global option %q; use store, keys or drain", name)
		}
		if err != nil {
			return nil, err
		}
	}
	return httpcaddyfile.App{Name: "agent_guard", Value: caddyconfig.JSON(app, nil)}, nil
}

func (a *App) parseStore(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	name := d.Val()
	module, err := caddyfile.UnmarshalModule(d, "agent_guard.stores."+name)
	if err != nil {
		return err
	}
	a.StoreRaw = caddyconfig.JSONModuleObject(module, "module", name, nil)
	return nil
}

func (a *App) parseKeys(d *caddyfile.Dispenser) error {
	var kind, value string
	if !d.Args(&kind, &value) {
		return d.ArgErr()
	}
	switch kind {
	case "file":
		a.KeyFile = value
	case "value":
		a.Key = value
	default:
		return d.Errf("keys has no source %q; use file or value", kind)
	}
	return noMore(d)
}

// parseGuard reads the directive
//
//	agent_guard [<matcher>] {
//		...
//	}
//
// Its options are those of Handler.UnmarshalCaddyfile, and
//
//	upstream {
//		<handler directives...>
//	}
func parseGuard(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	handler := new(Handler)
	h.Next() // the directive's name
	line := h.Token()
	if h.NextArg() {
		return nil, h.ArgErr()
	}
	seen := map[string]bool{}
	for h.NextBlock(0) {
		if h.Val() == "upstream" {
			if err := handler.parseUpstream(h); err != nil {
				return nil, err
			}
			continue
		}
		if err := handler.parseOption(h.Dispenser, seen); err != nil {
			return nil, err
		}
	}
	if at := handler.ownRequests; at != nil && handler.UpstreamRaw == nil {
		return nil, errorAt(at, "%s makes requests of the guard's own; give agent_guard an `upstream` block that says how they reach the upstream, or use agent_proxy", at.Text)
	}
	if err := handler.check(line); err != nil {
		return nil, err
	}
	return handler, nil
}

// parseUpstream reads the handlers for the guard's own requests.
func (h *Handler) parseUpstream(helper httpcaddyfile.Helper) error {
	if h.UpstreamRaw != nil {
		return helper.Err("upstream stands twice")
	}
	if helper.NextArg() {
		return helper.ArgErr()
	}
	subroute, err := httpcaddyfile.ParseSegmentAsSubroute(helper.WithDispenser(helper.NewFromNextSegment()))
	if err != nil {
		return err
	}
	h.UpstreamRaw = []json.RawMessage{caddyconfig.JSONModuleObject(subroute, "handler", "subroute", nil)}
	return nil
}

// UnmarshalCaddyfile reads the options of agent_guard that need no other directive:
//
//	agent_guard {
//		name                <name>
//		caller              <placeholder>
//		credentials         <fields...>
//		execution_id        header <fields...> | placeholder <placeholder> | json <pointer>
//		missing_id          require | mint | derive [<window>]
//		inherit
//		consequential       <matchers>
//		exempt              <matchers>
//		fingerprint_exclude <json pointers...>
//		max_body            <size>
//		attach_wait         <duration>
//		endpoints           off
//		<policy>
//		action <name> {
//			match <matchers>
//			<policy>
//		}
//	}
//
// <matchers> is one request matcher on the line, or a block of them. <policy> is
// any of the options that Policy has:
//
//	deadline      <duration>
//	retain_result <duration>
//	retain_key    <duration>
//	max_result    <size>
//	preset        default | stripe | acp | strict
//	outcome       completed | released | in_doubt <statuses...>
//	outcome       completed | released | in_doubt {
//		status <statuses...>
//		header <field> [<value>]
//	}
//	on_unknown    block | retry
//	on_unknown    probe <method> <uri> {
//		header      <field> <value>
//		applied     <evidence>
//		not_applied <evidence>
//		use_answer
//		timeout     <duration>
//	}
//	settle        awaited | async
//	unframed      doubt | complete
//	grpc          unary
//
// <evidence> is a list of statuses on the line, or a block of
//
//	status <statuses...>
//	header <field> [<value>]
//	json   <pointer> <value>
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the directive's name
	line := d.Token()
	seen := map[string]bool{}
	for d.NextBlock(0) {
		if err := h.parseOption(d, seen); err != nil {
			return err
		}
	}
	return h.check(line)
}

// repeatable lists the options that may stand several times.
var repeatable = map[string]bool{
	"execution_id": true, "consequential": true, "exempt": true, "fingerprint_exclude": true, "outcome": true, "action": true,
}

func (h *Handler) parseOption(d *caddyfile.Dispenser, seen map[string]bool) error {
	name := d.Val()
	if seen[name] && !repeatable[name] {
		return d.Errf("%s stands twice", name)
	}
	seen[name] = true
	switch name {
	case "name":
		return parseWord(d, &h.Name)
	case "caller":
		return parseWord(d, &h.Caller)
	case "credentials":
		return parseWords(d, &h.Credentials)
	case "execution_id":
		return h.parseExecutionID(d)
	case "missing_id":
		return h.parseMissingID(d)
	case "inherit":
		h.Inherit = true
		return noMore(d)
	case "consequential":
		return parseMatchers(d, &h.ConsequentialRaw)
	case "exempt":
		return parseMatchers(d, &h.ExemptRaw)
	case "fingerprint_exclude":
		return parseWords(d, &h.FingerprintExclude)
	case "max_body":
		return parseSize(d, &h.MaxBody)
	case "attach_wait":
		return parseDuration(d, &h.AttachWait)
	case "endpoints":
		return parseChoice(d, &h.Endpoints, endpointsOff)
	case "action":
		return h.parseAction(d)
	case "upstream":
		return d.Err("upstream is known to agent_guard only; agent_proxy makes its own")
	}
	known, err := h.Policy.parseOption(d, h)
	if err == nil && !known {
		return d.Errf("agent_guard has no option %q", name)
	}
	return err
}

func (h *Handler) parseExecutionID(d *caddyfile.Dispenser) error {
	var kind string
	if !d.AllArgs(&kind) && kind == "" {
		if !d.NextArg() {
			return d.ArgErr()
		}
		kind = d.Val()
	}
	args := d.RemainingArgs()
	if len(args) == 0 {
		return d.ArgErr()
	}
	for _, arg := range args {
		switch kind {
		case "header":
			h.ExecutionID = append(h.ExecutionID, IDSource{Header: arg})
		case "placeholder":
			h.ExecutionID = append(h.ExecutionID, IDSource{Placeholder: arg})
		case "json":
			h.ExecutionID = append(h.ExecutionID, IDSource{JSON: arg})
		default:
			return d.Errf("execution_id has no source %q; use header, placeholder or json", kind)
		}
	}
	return nil
}

func (h *Handler) parseMissingID(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	h.MissingID = d.Val()
	switch h.MissingID {
	case missingRequire, missingMint:
	case missingDerive:
		if d.NextArg() {
			if err := duration(d, &h.DeriveWindow); err != nil {
				return err
			}
		}
	default:
		return d.Errf("missing_id %q is unknown; use %s, %s or %s", h.MissingID, missingRequire, missingMint, missingDerive)
	}
	return noMore(d)
}

func (h *Handler) parseAction(d *caddyfile.Dispenser) error {
	a := new(Action)
	if err := parseWord(d, &a.Name); err != nil {
		return err
	}
	seen := map[string]bool{}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		if seen[name] && !repeatable[name] && name != "match" {
			return d.Errf("%s stands twice in action %s", name, a.Name)
		}
		seen[name] = true
		if name == "match" {
			if err := parseMatchers(d, &a.MatcherSetsRaw); err != nil {
				return err
			}
			continue
		}
		known, err := a.Policy.parseOption(d, h)
		if err != nil {
			return err
		}
		if !known {
			return d.Errf("an action has no option %q", name)
		}
	}
	h.Actions = append(h.Actions, a)
	return nil
}

// check finds at adapt time what Provision and Validate would find later, so that
// the error has its line.
func (h *Handler) check(at caddyfile.Token) error {
	probe := *h
	probe.Actions = nil
	for _, a := range h.Actions {
		clone := *a
		probe.Actions = append(probe.Actions, &clone)
	}
	probe.setDefaults()
	if err := probe.provisionIDs(); err != nil {
		return errorAt(&at, "%v", err)
	}
	for _, a := range probe.actions {
		a.inherit(&probe.Policy)
		if err := a.Policy.validate(); err != nil {
			return errorAt(&at, "action %s: %v", a.Name, err)
		}
	}
	if err := probe.Validate(); err != nil {
		return errorAt(&at, "%v", err)
	}
	return nil
}

func errorAt(at *caddyfile.Token, format string, args ...any) error {
	d := caddyfile.NewDispenser([]caddyfile.Token{*at})
	d.Next()
	return d.Errf(format, args...)
}

// The helpers below read the rest of an option's line.

func noMore(d *caddyfile.Dispenser) error {
	if d.NextArg() {
		return d.ArgErr()
	}
	return nil
}

func parseWord(d *caddyfile.Dispenser, into *string) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	*into = d.Val()
	return noMore(d)
}

func parseWords(d *caddyfile.Dispenser, into *[]string) error {
	words := d.RemainingArgs()
	if len(words) == 0 {
		return d.ArgErr()
	}
	*into = append(*into, words...)
	return nil
}

func parseChoice(d *caddyfile.Dispenser, into *string, choices ...string) error {
	name := d.Val()
	if err := parseWord(d, into); err != nil {
		return err
	}
	for _, choice := range choices {
		if *into == choice {
			return nil
		}
	}
	return d.Errf("%s %q is unknown; use %s", name, *into, strings.Join(choices, " or "))
}

func duration(d *caddyfile.Dispenser, into *caddy.Duration) error {
	v, err := caddy.ParseDuration(d.Val())
	if err != nil {
		return d.Errf("%q is no duration (like 30s, 5m or 24h): %v", d.Val(), err)
	}
	if v <= 0 {
		return d.Errf("%q must be positive", d.Val())
	}
	*into = caddy.Duration(v)
	return nil
}

func parseDuration(d *caddyfile.Dispenser, into *caddy.Duration) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	if err := duration(d, into); err != nil {
		return err
	}
	return noMore(d)
}

func parseSize(d *caddyfile.Dispenser, into *int64) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	size, err := humanize.ParseBytes(d.Val())
	if err != nil || size == 0 || size > math.MaxInt64 {
		return d.Errf("%q is no size (like 512KiB or 32MiB)", d.Val())
	}
	*into = int64(size)
	return noMore(d)
}

func parseMatchers(d *caddyfile.Dispenser, into *caddyhttp.RawMatcherSets) error {
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(d)
	if err != nil {
		return err
	}
	if len(set) == 0 {
		return d.Err("no matcher is given; write one on the line, or a block of them")
	}
	*into = append(*into, set)
	return nil
}

// parseStatuses reads statuses, where 5xx is a class, into a response matcher.
func parseStatuses(words []string) ([]int, error) {
	var codes []int
	for _, word := range words {
		text := word
		if len(word) == 3 && strings.HasSuffix(word, "xx") {
			text = word[:1]
		}
		code, err := strconv.Atoi(text)
		if err != nil || code < 1 || code > 599 || code > 5 && code < 100 {
			return nil, errors.New("\"" + word + "\" is no status (like 404 or 5xx)")
		}
		codes = append(codes, code)
	}
	return codes, nil
}
