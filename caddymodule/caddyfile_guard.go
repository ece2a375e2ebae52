package caddymodule

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
)

// UnmarshalCaddyfile reads the directive
//
//	agent_guard {
//		name                <name>
//		caller              <placeholder>
//		credentials         <fields...>
//		require_ect
//		operators           <callers...>
//		deadline_header     <field>
//		identity            <uri>
//		execution_id        header <fields...> | placeholder <placeholder> | json <pointer>
//		missing_id          require | mint | derive [<window>]
//		inherit
//		consequential       <matchers>
//		exempt              <matchers>
//		fingerprint_exclude <json pointers...>
//		max_body            <size>
//		attach_wait         <duration>
//		fail_open
//		endpoints           off
//		default_undo        <way>
//		upstream {
//			<handler directives...>
//		}
//		fallback {
//			<handler directives...>
//		}
//		<policy>
//		action <name> {
//			match       <matchers>
//			description <text>
//			<policy>
//			<way>
//		}
//	}
//
// execution_id, consequential, exempt, fingerprint_exclude, outcome, action and
// match may stand several times: sources of the id are tried in the order in which
// they stand, and a call is consequential, exempt or of an action if any of the
// lines matches it. What stands replaces the default; it does not add to it.
//
// <matchers> is one request matcher on the line, or a block of them which must all
// match. <policy> is any of the options that Policy has:
//
//	deadline      <duration>
//	retain_result <duration>
//	retain_key    <duration>
//	max_result    <size>
//	preset        default | stripe | acp | strict
//	outcome       completed | released | in_doubt <statuses...>
//	outcome       completed | released | in_doubt {
//		status <statuses...>
//		header <field> <value>
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
//	target        <text>
//	unframed      doubt | complete
//	grpc          unary
//	checkpoint_ttl    <duration>
//	undo_auth         config | recorded
//	on_snapshot_error refuse | irreversible
//	snapshot_timeout  <duration>
//	on_lost           resend | escalate
//	on_changed        escalate | overwrite
//	max_image         <size>
//
// <way> is how calls are undone: one of these, or restore and compensate, of which the
// latter is for what cannot be restored.
//
//	restore {
//		header     <field> <value>
//		on_changed escalate | overwrite
//		verify     off
//	}
//	compensate <method> <url> {
//		json   <name> <value>
//		form   <name> <value>
//		body   <media type> <text>
//		header <field> <value>
//		status <method> <url> {
//			header <field> <value>
//		}
//	}
//	delegate <uri>
//	irreversible
//
// <evidence> is a list of statuses on the line, or a block of
//
//	status <statuses...>
//	header <field> <value>
//	json   <pointer> <value>
//
// <statuses> are like 404, or 5xx for a class. The <value> of a header may begin or
// end with *, which stands for anything; !<field> without a value says that the
// field is absent.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the directive's name
	h.origin = originOf(d)
	if d.NextArg() {
		return d.Errf("agent_guard takes no argument but a matcher; %q is none", d.Val())
	}
	if err := guardOptions().readBlock(d, "agent_guard", h, h.origin); err != nil {
		return err
	}
	return h.checkPolicies()
}

// checkPolicies finds what is wrong with options only together.
func (h *Handler) checkPolicies() error {
	base := h.Policy
	base.inherit(&defaults)
	if err := base.validate(); err != nil {
		return place(err, h.origin)
	}
	if h.DefaultUndo != nil {
		if _, err := undoing.Compile(h.DefaultUndo, &base.Terms, h.Name, h.Credentials); err != nil {
			return placeUndo(err, "default_undo", h.origin)
		}
	}
	for _, a := range h.Actions {
		policy := a.Policy
		policy.inherit(&base)
		err := policy.validate()
		if err == nil {
			_, err = undoing.Compile(&a.Ways, &policy.Terms, h.Name, h.Credentials)
			err = undoError(err)
		}
		if err != nil {
			return place(fmt.Errorf("action %s: %w", a.Name, err), a.origin, h.origin)
		}
	}
	return nil
}

// guardOptions are the options of agent_guard. Those are agent_guard's in
// agent_proxy, too.
func guardOptions() options[*Handler] {
	type dispenser = *caddyfile.Dispenser
	return options[*Handler]{
		"name": {usage: "name <name>", parse: func(d dispenser, h *Handler) error {
			if err := parseWord(d, &h.Name); err != nil {
				return err
			}
			return checkGuardName(h.Name)
		}},
		"caller": {usage: "caller <placeholder>", parse: func(d dispenser, h *Handler) error {
			if err := parseWord(d, &h.Caller); err != nil {
				return err
			}
			return checkPlaceholder(h.Caller)
		}},
		"deadline_header": {usage: "deadline_header <field>", parse: func(d dispenser, h *Handler) error {
			if err := parseWord(d, &h.DeadlineHeader); err != nil {
				return err
			}
			return checkFields([]string{h.DeadlineHeader})
		}},
		"operators": {usage: "operators <callers...>", parse: func(d dispenser, h *Handler) error {
			if err := parseWords(d, &h.Operators); err != nil {
				return err
			}
			return checkOperators(h.Operators)
		}},
		"require_ect": {usage: "require_ect", parse: func(_ dispenser, h *Handler) error {
			h.RequireECT = true
			return nil
		}},
		"identity": {usage: "identity <uri>", parse: func(d dispenser, h *Handler) error {
			if err := parseWord(d, &h.UpstreamIdentity); err != nil {
				return err
			}
			return checkIdentity(h.UpstreamIdentity)
		}},
		"credentials": {usage: "credentials <fields...>", parse: func(d dispenser, h *Handler) error {
			if err := parseWords(d, &h.Credentials); err != nil {
				return err
			}
			return checkFields(h.Credentials)
		}},
		"execution_id": {several: true, parse: parseExecutionID,
			usage: "execution_id header <fields...> | placeholder <placeholder> | json <pointer>"},
		"missing_id": {usage: "missing_id require | mint | derive [<window>]", parse: parseMissingID},
		"inherit": {usage: "inherit", parse: func(_ dispenser, h *Handler) error {
			h.Inherit = true
			return nil
		}},
		"consequential": {several: true, usage: "consequential <matchers>", parse: func(d dispenser, h *Handler) error {
			return parseMatchers(d, &h.ConsequentialRaw)
		}},
		"exempt": {several: true, usage: "exempt <matchers>", parse: func(d dispenser, h *Handler) error {
			return parseMatchers(d, &h.ExemptRaw)
		}},
		"fingerprint_exclude": {several: true, usage: "fingerprint_exclude <json pointers...>", parse: func(d dispenser, h *Handler) error {
			if err := parseWords(d, &h.FingerprintExclude); err != nil {
				return err
			}
			_, err := parsePointers(h.FingerprintExclude)
			return err
		}},
		"max_body": {usage: "max_body <size>", parse: func(d dispenser, h *Handler) error {
			return parseSize(d, &h.MaxBody)
		}},
		"attach_wait": {usage: "attach_wait <duration>", parse: func(d dispenser, h *Handler) error {
			return parseDuration(d, &h.AttachWait)
		}},
		"fail_open": {usage: "fail_open", parse: func(_ dispenser, h *Handler) error {
			h.FailOpen = true
			return nil
		}},
		"endpoints": {usage: "endpoints off", parse: func(d dispenser, h *Handler) error {
			return parseChoice(d, &h.Endpoints, endpointsOff)
		}},
		"default_undo": {usage: "default_undo restore | compensate | delegate | irreversible ...", parse: parseDefaultUndo},
		"upstream":     {usage: "upstream { <handler directives...> }", parse: skipHandlers},
		"fallback":     {usage: "fallback { <handler directives...> }", parse: skipHandlers},
		"action":       {several: true, named: true, usage: "action <name> { ... }", parse: parseAction},
	}.merge(within(func(h *Handler) *Policy { return &h.Policy }, policyOptions()))
}

// skipHandlers leaves a block of handlers to parseHandlers.
func skipHandlers(d *caddyfile.Dispenser, _ *Handler) error {
	if d.NextArg() {
		return errSyntax
	}
	for d.Next() {
	}
	return nil
}

func parseExecutionID(d *caddyfile.Dispenser, h *Handler) error {
	if !d.NextArg() {
		return errSyntax
	}
	kind, values := d.Val(), d.RemainingArgs()
	if err := oneOf(kind, "header", "placeholder", "json"); err != nil {
		return err
	}
	if len(values) == 0 {
		return errSyntax
	}
	for _, value := range values {
		var source IDSource
		switch kind {
		case "header":
			source.Header = value
		case "placeholder":
			source.Placeholder = value
		default:
			source.JSON = value
		}
		if err := source.check(); err != nil {
			return err
		}
		if slices.Contains(h.ExecutionID, source) {
			return fmt.Errorf("the %s %s is named twice", kind, value)
		}
		h.ExecutionID = append(h.ExecutionID, source)
	}
	return nil
}

func parseMissingID(d *caddyfile.Dispenser, h *Handler) error {
	if err := parseChoice(d, &h.MissingID, missingRequire, missingMint, missingDerive); err != nil {
		return err
	}
	if h.MissingID == missingDerive && d.CountRemainingArgs() > 0 {
		return parseDuration(d, &h.DeriveWindow)
	}
	return nil
}

func parseAction(d *caddyfile.Dispenser, h *Handler) error {
	a := &Action{origin: originOf(d)}
	if !d.NextArg() {
		return errSyntax
	}
	a.Name = d.Val()
	if err := checkName(a.Name, h.Actions); err != nil {
		return err
	}
	if d.NextArg() {
		return errSyntax
	}
	if err := actionOptions().readBlock(d, "an action", a, a.origin); err != nil {
		return err
	}
	h.Actions = append(h.Actions, a)
	return nil
}

// actionOptions are the options of an action.
func actionOptions() options[*Action] {
	return options[*Action]{
		"match": {several: true, usage: "match <matchers>", parse: func(d *caddyfile.Dispenser, a *Action) error {
			return parseMatchers(d, &a.MatcherSetsRaw)
		}},
		"description": {usage: "description <text>", parse: func(d *caddyfile.Dispenser, a *Action) error {
			if err := parseWord(d, &a.Description); err != nil {
				return err
			}
			return checkDescription(a.Description)
		}},
	}.merge(within(func(a *Action) *Policy { return &a.Policy }, policyOptions())).
		merge(within(func(a *Action) *undoing.Ways { return &a.Ways }, waysOptions()))
}

// checkName checks the name of an action that comes after others.
func checkName(name string, others []*Action) error {
	switch {
	case name == "":
		return errors.New("an action has no name; give it one")
	case !fitsTokens(name):
		return fmt.Errorf("the name %.40q is too long, or has characters that are not printable; it has at most %d bytes and stands in tokens", name, maxName)
	case name == defaultAction:
		return fmt.Errorf("%q is the name of what no action matches; choose another", defaultAction)
	case slices.ContainsFunc(others, func(a *Action) bool { return a.Name == name }):
		return fmt.Errorf("two actions are called %q; give each a name of its own", name)
	}
	return nil
}

// maxName leaves room for what stands before a name in a token.
const maxName = 200

// fitsTokens reports whether a name can stand in tokens and in logs.
func fitsTokens(name string) bool {
	return len(name) <= maxName && !strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

// checkGuardName checks the option `name`.
func checkGuardName(name string) error {
	if !fitsTokens(name) {
		return fmt.Errorf("name: %.40q is too long, or has characters that are not printable; it has at most %d bytes", name, maxName)
	}
	return nil
}

var _ caddyfile.Unmarshaler = (*Handler)(nil)
