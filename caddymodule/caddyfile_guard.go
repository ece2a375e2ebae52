package caddymodule

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/protocol"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/internal/jsonx"
)

// read reads the directive
//
//	agent_guard {
//		name                <name> [shared]
//		caller              <placeholder> | cookie <names...>
//		credentials         [-]<fields...>
//		tenant              [-]<fields...>
//		free_keys
//		require_ect
//		operators           <callers...>
//		role                <role> <callers...>
//		roles_from          <placeholder>
//		identity            <uri>
//		execution_id        header <fields...> | placeholder <placeholder> | json <pointer> | meta <names...> | argument <names...>
//		missing_id          require | mint | derive [<window>] | recognize {
//			window       <duration>
//			error_window <duration>
//		}
//		protocol            none | auto | mcp | a2a | jsonrpc
//		consequential       <matchers> | tool <names...>
//		exempt              <matchers> | tool <names...>
//		unguarded_streams   pass | refuse
//		bulkhead            off | {
//			total        <number>
//			per_workflow <number>
//			queue        <number> | off
//			wait         <duration>
//			rate         <number>
//			retries      <percent>% | off
//		}
//		fingerprint_exclude <json pointers...>
//		compare             <fields...>
//		ignore              <fields...>
//		max_body            <size>
//		attach_wait         <duration>
//		idle_timeout        <duration> | off
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
//			match       <matchers> | tool <names...> | argument <pointer> <value>
//			description <text>
//			on_error    rollback | escalate
//			critical
//			severity    info | warning | error | critical
//			<policy>
//			<way>
//		}
//	}
//
// execution_id, consequential, exempt, fingerprint_exclude, compare, ignore, outcome, action and match
// may appear several times. Sources of the id are tried in order; a call is consequential, exempt
// or belongs to an action if any of the lines matches. Lines of match with tool are one
// condition beside those with matchers, and each with argument is a further one. Values replace
// the default.
//
// <matchers> is one request matcher on the line, or a block of matchers, all of which must
// match. <policy> is any of the options that Policy has:
//
//	deadline      <duration>
//	stream_idle   <duration>
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
//	on_unknown    probe task {
//		header      <field> <value>
//		timeout     <duration>
//	}
//	keys          trusted | advisory
//	target        <text>
//	grpc          unary
//	in_doubt_as   problem | tool_result
//	on_leave      continue | cancel
//	priority      low | normal | high | critical | <placeholder>
//	order         plan | par
//	approve       [off | <role>] [{
//		quorum <number>
//		within <duration>
//	}]
//	checkpoint_ttl    <duration>
//	undo_auth         config | recorded
//	on_snapshot_error refuse | irreversible
//	on_lost           resend | escalate
//	on_changed        escalate | overwrite
//
// <way> is how calls are undone: one of these, or restore together with compensate for calls
// that cannot be restored.
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
//	delegate <uri> <identity> | unsigned
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
func (h *Handler) read(d *caddyfile.Dispenser) error {
	d.Next() // the directive's name
	h.origin = originOf(d)
	h.WrittenAt = placeOf(d.Token())
	if d.NextArg() {
		return d.Errf("agent_guard takes no argument but a matcher; %q is none", d.Val())
	}
	if err := guardOptions().Read(d, "agent_guard", h, h.origin); err != nil {
		return err
	}
	return h.checkPolicies()
}

// guardOptions are the options of agent_guard, which agent_proxy takes too.
func guardOptions() option.Set[*Handler] {
	return merge(option.Set[*Handler]{
		"name": {Usage: "<name> [shared]", Parse: parseName, Check: func(h *Handler) error { return checkGuardName(h.Name) }},
		"caller": {Usage: "<placeholder> | cookie <names...>", Parse: parseCaller, Check: func(h *Handler) error {
			return checkCaller(h.Caller)
		}},
		"operators":   words("<callers...>", func(h *Handler) *[]string { return &h.Operators }, checkOperators),
		"require_ect": flag(func(h *Handler) *bool { return &h.RequireECT }),
		"identity":    word("<uri>", func(h *Handler) *string { return &h.UpstreamIdentity }, checkIdentity),
		"credentials": words("[-]<fields...>", func(h *Handler) *[]string { return &h.Credentials }, checkChanged),
		"tenant":      words("[-]<fields...>", func(h *Handler) *[]string { return &h.Tenant }, checkChanged),
		"free_keys":   flag(func(h *Handler) *bool { return &h.FreeKeys }),
		"execution_id": {Several: true, Parse: parseExecutionID,
			Usage: "header <fields...> | placeholder <placeholder> | json <pointer> | meta <names...> | argument <names...>"},
		"protocol": choice(func(h *Handler) *protocol.Protocol { return &h.Protocol },
			protocol.None, protocol.Auto, protocol.MCP, protocol.A2A, protocol.JSONRPC),
		"missing_id": {Usage: "require | mint | derive [<window>] | recognize [{ ... }]", Parse: parseMissingID,
			Check: func(h *Handler) error {
				return oneOf(cmp.Or(h.MissingID, guard.MissingRecognize), missingID...)
			}},
		"consequential": {Several: true, Usage: "<matchers> | tool <names...>", Parse: func(d dispenser, h *Handler) error {
			return parseTools(d, &h.ConsequentialTools, &h.ConsequentialRaw)
		}},
		"exempt": {Several: true, Usage: "<matchers> | tool <names...>", Parse: func(d dispenser, h *Handler) error {
			return parseTools(d, &h.ExemptTools, &h.ExemptRaw)
		}},
		"bulkhead": {Usage: "{ ... } | off", Parse: parseBulkhead},
		"unguarded_streams": choice(func(h *Handler) *string { return &h.UnguardedStreams },
			"pass", guard.StreamsRefuse),
		"fingerprint_exclude": repeated(words("<json pointers...>", func(h *Handler) *[]string { return &h.FingerprintExclude },
			checkPointers)),
		"compare": {Several: true, Usage: "<fields...>", Parse: func(d *caddyfile.Dispenser, h *Handler) error {
			return cmp.Or(parseWords(d, &h.Compare), checkCompared(h.Compare, h.Ignore, h.named()))
		}},
		"ignore": {Several: true, Usage: "<fields...>", Parse: func(d *caddyfile.Dispenser, h *Handler) error {
			return cmp.Or(parseWords(d, &h.Ignore), checkCompared(h.Ignore, h.Compare, h.named()))
		}},
		"max_body":    size(func(h *Handler) *int64 { return &h.MaxBody }),
		"attach_wait": duration(func(h *Handler) *jsontime.Duration { return &h.AttachWait }),
		"idle_timeout": option.Value("<duration> | off", func(h *Handler) *jsontime.Duration { return &h.IdleTimeout },
			option.OrOff(option.ParseDuration[jsontime.Duration]), func(v jsontime.Duration) error {
				if v == idleOff {
					return nil
				}
				return option.CheckDuration(v)
			}),
		"fail_open":    flag(func(h *Handler) *bool { return &h.FailOpen }),
		"endpoints":    choice(func(h *Handler) *string { return &h.Endpoints }, endpointsOff),
		"default_undo": {Usage: "restore | compensate | delegate | irreversible ...", Parse: parseDefaultUndo},
		"upstream":     {Usage: "{ <handler directives...> }", Parse: skipHandlers},
		"fallback":     {Usage: "{ <handler directives...> }", Parse: skipHandlers},
		"action":       {Several: true, Named: true, Usage: "<name> { ... }", Parse: parseAction},
	}, within((*Handler).policy, policyOptions()),
		within(func(h *Handler) *Roles { return &h.Roles }, roleOptions()))
}

func parseName(d *caddyfile.Dispenser, h *Handler) error {
	if err := parseWord(d, &h.Name); err != nil {
		return err
	}
	if h.Shared = d.NextArg(); h.Shared {
		return oneOf(d.Val(), "shared")
	}
	return nil
}

func parseCaller(d *caddyfile.Dispenser, h *Handler) error {
	if err := parseWord(d, &h.Caller); err != nil || h.Caller != "cookie" {
		return err
	}
	h.Caller = ""
	return parseWords(d, &h.CallerCookies)
}

// checkCaller checks a text that names callers; without one their credentials do.
func checkCaller(text string) error {
	if text == "" {
		return nil
	}
	return checkPlaceholder(text)
}

func checkPointers(texts []string) error {
	_, err := jsonx.ParsePointers(texts)
	return err
}

// parseTools reads names of tools after the word `tool`, or matchers.
func parseTools(d *caddyfile.Dispenser, tools *[]string, sets *caddyhttp.RawMatcherSets) error {
	if d.NextArg() {
		if d.Val() == "tool" && !d.Token().Quoted() {
			return parseWords(d, tools)
		}
		d.Prev()
	}
	return parseMatchers(d, sets)
}

// skipHandlers leaves a block of handlers to parseHandlers.
func skipHandlers(d *caddyfile.Dispenser, _ *Handler) error {
	if d.NextArg() {
		return option.ErrSyntax
	}
	for d.Next() {
	}
	return nil
}

func parseExecutionID(d *caddyfile.Dispenser, h *Handler) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	kind, values := d.Val(), d.RemainingArgs()
	if err := oneOf(kind, "header", "placeholder", "json", "meta", "argument"); err != nil {
		return err
	}
	if len(values) == 0 {
		return option.ErrSyntax
	}
	switch kind {
	case "meta":
		h.MetaKeys = append(h.MetaKeys, values...)
		return nil
	case "argument":
		h.ArgumentKeys = append(h.ArgumentKeys, values...)
		return nil
	}
	for _, value := range values {
		var source guard.IDSource
		switch kind {
		case "header":
			source.Header = value
		case "placeholder":
			source.Placeholder = value
		default:
			source.JSON = value
		}
		if err := checkSource(source); err != nil {
			return err
		}
		if slices.Contains(h.ExecutionID, source) {
			return fmt.Errorf("the %s %s is named twice", kind, value)
		}
		h.ExecutionID = append(h.ExecutionID, source)
	}
	return nil
}

// missingID are the words of the option missing_id.
var missingID = []guard.MissingID{guard.MissingRequire, guard.MissingMint, guard.MissingDerive, guard.MissingRecognize}

func parseMissingID(d *caddyfile.Dispenser, h *Handler) error {
	if err := parseChoice(d, &h.MissingID, missingID...); err != nil {
		return err
	}
	if h.MissingID == guard.MissingDerive && d.CountRemainingArgs() > 0 {
		return option.ParseDuration(d, &h.DeriveWindow)
	}
	if h.MissingID == guard.MissingRecognize {
		return option.Set[*Handler]{
			"window":       duration(func(h *Handler) *jsontime.Duration { return &h.RecognizeWindow }),
			"error_window": duration(func(h *Handler) *jsontime.Duration { return &h.ErrorWindow }),
		}.Read(d, "missing_id recognize", h, originOf(d))
	}
	return nil
}

func parseAction(d *caddyfile.Dispenser, h *Handler) error {
	a := &Action{origin: originOf(d)}
	if !d.NextArg() {
		return option.ErrSyntax
	}
	a.Name = d.Val()
	if err := checkName(a.Name, h.Actions); err != nil {
		return err
	}
	if err := actionOptions().Read(d, "an action", a, a.origin); err != nil {
		return err
	}
	h.Actions = append(h.Actions, a)
	return nil
}

// parseMatch parses a line that says which calls belong to an action.
func parseMatch(d *caddyfile.Dispenser, a *Action) (err error) {
	if !d.NextArg() {
		return parseMatchers(d, &a.MatcherSetsRaw)
	}
	switch word := d.Val(); {
	case word == "tool" && !d.Token().Quoted():
		err = parseWords(d, &a.Tools)
	case word == "argument" && !d.Token().Quoted():
		err = parseEntry(d, &a.Arguments)
	default:
		d.Prev()
		return parseMatchers(d, &a.MatcherSetsRaw)
	}
	if err == nil { // the line is the one at fault; whether there is a protocol is known later
		err = a.checkMessages(new(Handler))
	}
	return err
}

// actionOptions are the options of an action.
func actionOptions() option.Set[*Action] {
	return merge(option.Set[*Action]{
		"match": {Several: true, NamesItself: true, Usage: "<matchers> | tool <names...> | argument <pointer> <value>",
			Parse: parseMatch},
		"description":   word("<text>", func(a *Action) *string { return &a.Description }, checkDescription),
		"consequential": flag(func(a *Action) *bool { return &a.Consequential }),
		"on_error":      choice(func(a *Action) *string { return &a.OnError }, guard.OnErrorRollback, "escalate"),
		"critical":      flag(func(a *Action) *bool { return &a.Critical }),
		"severity":      choice(func(a *Action) *string { return &a.Severity }, severities...),
	}, within((*Action).policy, policyOptions()),
		within(func(a *Action) *Ways { return &a.Ways }, waysOptions()))
}

// checkName checks the name of a further action.
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

// maxName bounds a name, in bytes: tokens add a prefix.
const maxName = 200

// fitsTokens reports whether a name can be used in tokens and logs.
func fitsTokens(name string) bool {
	return len(name) <= maxName && !strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

func checkGuardName(name string) error {
	if !fitsTokens(name) {
		return fmt.Errorf("name: %.40q is too long, or has characters that are not printable; it has at most %d bytes", name, maxName)
	}
	return nil
}

// parseApprove reads who has to approve calls.
func parseApprove(d *caddyfile.Dispenser, p policy) error {
	a := new(guard.Approve)
	p.Approve = a
	if d.NextArg() {
		if a.Off = d.Val() == "off"; !a.Off {
			a.Role = d.Val()
		}
	}
	if err := checkApprove(a); err != nil || a.Off {
		return err
	}
	return option.Set[*guard.Approve]{
		"quorum": option.Value("<number>", func(a *guard.Approve) *int { return &a.Quorum },
			option.ParseCount, func(int) error { return checkApprove(a) }),
		"within": duration(func(a *guard.Approve) *jsontime.Duration { return &a.Within }),
	}.Read(d, "approve", a, originOf(d))
}

// policyOptions are the options of a guard and of its actions.
func policyOptions() option.Set[policy] {
	return merge(option.Set[policy]{
		"deadline":      duration(func(p policy) *jsontime.Duration { return &p.Deadline }),
		"stream_idle":   duration(func(p policy) *jsontime.Duration { return &p.StreamIdle }),
		"retain_result": duration(func(p policy) *jsontime.Duration { return &p.RetainResult }),
		"retain_key":    duration(func(p policy) *jsontime.Duration { return &p.RetainKey }),
		"target":        word("<text>", func(p policy) *string { return &p.Target }),
		"approve": {Usage: "[off | <role>] [{ ... }]", Parse: parseApprove, Check: func(p policy) error {
			return checkApprove(p.Approve)
		}},
		"max_result": size(func(p policy) *int64 { return &p.MaxResult }),
		"preset":     choice(func(p policy) *execution.Preset { return &p.Preset }, execution.Presets()...),
		"outcome":    {Several: true, Usage: "completed | released | in_doubt <statuses...>", Parse: parseOutcome},
		"on_unknown": {Usage: "block | retry | resend [<duration>] | probe <method> <uri> { ... } | probe task { ... }",
			Parse: parseOnUnknown, Check: func(p policy) error {
				return oneOf(cmp.Or(p.OnUnknown, guard.OnUnknownBlock), onUnknown...)
			}},
		"keys":        choice(func(p policy) *string { return &p.Keys }, "trusted", guard.KeysAdvisory),
		"grpc":        choice(func(p policy) *string { return &p.GRPC }, guard.GRPCUnary),
		"in_doubt_as": choice(func(p policy) *string { return &p.InDoubtAs }, "problem", guard.InDoubtToolResult),
		"on_leave":    choice(func(p policy) *string { return &p.OnLeave }, "continue", guard.OnLeaveCancel),
		"priority": word("low | normal | high | critical | <placeholder>", func(p policy) *string { return &p.Priority },
			checkPriority),
		"order": choice(func(p policy) *string { return &p.Order }, "plan", guard.OrderPar),
	}, within(func(p policy) *guard.Terms { return &p.Terms }, termsOptions()))
}

func parseOutcome(d *caddyfile.Dispenser, p policy) error {
	var rule OutcomeRule
	if !d.NextArg() {
		return option.ErrSyntax
	}
	rule.Outcome = d.Val()
	if _, err := execution.ParseVerdict(rule.Outcome); err != nil {
		return err
	}
	if err := parseAnswer(d, "outcome", &rule.Match, &rule.Match, answerOptions()); err != nil {
		return err
	}
	p.Outcomes = append(p.Outcomes, rule)
	return nil
}

// answerOptions are the options of a block that describes answers.
func answerOptions() option.Set[*caddyhttp.ResponseMatcher] {
	return option.Set[*caddyhttp.ResponseMatcher]{
		"status": {Several: true, Usage: "<statuses...>", Parse: func(d dispenser, m *caddyhttp.ResponseMatcher) error {
			codes, err := option.ParseStatuses(d.RemainingArgs())
			if err == nil && len(codes) == 0 {
				err = option.ErrSyntax
			}
			m.StatusCode = append(m.StatusCode, codes...)
			return err
		}},
		"header": {Several: true, Usage: "<field> <value>", Parse: func(d dispenser, m *caddyhttp.ResponseMatcher) error {
			if d.CountRemainingArgs() == 0 {
				return option.ErrSyntax
			}
			if m.Headers == nil {
				m.Headers = http.Header{}
			}
			matcher := caddyhttp.MatchHeader(m.Headers) // the same map
			if err := matcher.UnmarshalCaddyfile(d.NewFromNextSegment()); err != nil {
				return err
			}
			return checkAnswer(m)
		}},
	}
}

// parseAnswer parses statuses on the line, or a block of opts, into m, which is part of
// into.
func parseAnswer[T any](d *caddyfile.Dispenser, kind string, m *caddyhttp.ResponseMatcher, into T, opts option.Set[T]) error {
	var err error
	if m.StatusCode, err = option.ParseStatuses(d.RemainingArgs()); err != nil || len(m.StatusCode) > 0 {
		return err
	}
	at := originOf(d)
	if err := opts.Read(d, kind, into, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return fmt.Errorf("it would match every answer; give statuses, or a block of %s", strings.Join(slices.Sorted(maps.Keys(opts)), ", "))
	}
	return nil
}

// onUnknown are the words of the option on_unknown.
var onUnknown = []guard.OnUnknown{
	guard.OnUnknownBlock, guard.OnUnknownProbe, guard.OnUnknownResend, guard.OnUnknownRetry,
}

func parseOnUnknown(d *caddyfile.Dispenser, p policy) error {
	if err := parseChoice(d, &p.OnUnknown, onUnknown...); err != nil {
		return err
	}
	if p.OnUnknown == guard.OnUnknownResend && d.CountRemainingArgs() > 0 {
		return option.ParseDuration(d, &p.ResendFor)
	}
	if p.OnUnknown != guard.OnUnknownProbe {
		return nil
	}
	p.Probe = new(Probe)
	switch args := d.RemainingArgs(); {
	case len(args) == 1 && args[0] == "task":
		p.Probe.Task = true
	case len(args) == 2:
		p.Probe.Method, p.Probe.URI = args[0], args[1]
	default:
		return option.ErrSyntax
	}
	if err := probeOptions().Read(d, "a probe", p.Probe, originOf(d)); err != nil {
		return err
	}
	check := *p.Probe // the JSON must not contain what Provision adds
	return check.provision()
}

// probeOptions are the options of a status probe.
func probeOptions() option.Set[*Probe] {
	return option.Set[*Probe]{
		"header": repeated(option.Value("<field> <value>", func(p *Probe) *map[string]string { return &p.Header },
			parseEntry, func(all map[string]string) error {
				return checkFields(slices.Sorted(maps.Keys(all)))
			})),
		"applied":     option.Value("<statuses...>", func(p *Probe) **Evidence { return &p.Applied }, parseEvidence),
		"not_applied": option.Value("<statuses...>", func(p *Probe) **Evidence { return &p.NotApplied }, parseEvidence),
		"use_answer":  flag(func(p *Probe) *bool { return &p.UseAnswer }),
		"timeout":     duration(func(p *Probe) *caddy.Duration { return &p.Timeout }),
	}
}

func parseEvidence(d *caddyfile.Dispenser, into **Evidence) error {
	e := new(Evidence)
	*into = e
	return parseAnswer(d, d.Val(), &e.ResponseMatcher, e, evidenceOptions())
}

// evidenceOptions are the options of a block of evidence.
func evidenceOptions() option.Set[*Evidence] {
	return merge(option.Set[*Evidence]{
		"json": {Several: true, Usage: "<pointer> <value>", Parse: func(d *caddyfile.Dispenser, e *Evidence) error {
			if err := parseEntry(d, &e.JSON); err != nil {
				return err
			}
			return e.provision()
		}},
	}, within(func(e *Evidence) *caddyhttp.ResponseMatcher { return &e.ResponseMatcher }, answerOptions()))
}

// parseEntry reads a key and its value.
func parseEntry(d *caddyfile.Dispenser, into *map[string]string) error {
	var name, value string
	if !d.Args(&name, &value) {
		return option.ErrSyntax
	}
	if _, ok := (*into)[name]; ok {
		return fmt.Errorf("%s is given twice", name)
	}
	if *into == nil {
		*into = map[string]string{}
	}
	(*into)[name] = value
	return nil
}

// termsOptions are the options of a guard and of its actions that say how checkpoints are
// made and kept.
func termsOptions() option.Set[*guard.Terms] {
	return option.Set[*guard.Terms]{
		"undo_auth": choice(func(t *guard.Terms) *string { return &t.UndoAuth },
			rollback.AuthConfig, rollback.AuthRecorded),
		"on_snapshot_error": choice(func(t *guard.Terms) *string { return &t.OnSnapshotError },
			"refuse", checkpoint.Irreversible.String()),
		"on_lost": choice(func(t *guard.Terms) *string { return &t.OnLost },
			rollback.Resend, rollback.UndoEscalate),
		"on_changed": choice(func(t *guard.Terms) *string { return &t.OnChanged },
			rollback.UndoEscalate, rollback.Overwrite),
		"checkpoint_ttl": option.Value("<duration>", func(t *guard.Terms) *jsontime.Duration { return &t.CheckpointTTL },
			option.ParseDuration, checkTTL),
	}
}

// checkTTL checks how long checkpoints are kept.
func checkTTL(v jsontime.Duration) error {
	switch ttl := time.Duration(v); {
	case ttl < 0 || 0 < ttl && ttl < checkpoint.MinTTL || ttl > checkpoint.MaxTTL:
		return fmt.Errorf("%v; it must be from %v to %dd", ttl, checkpoint.MinTTL, checkpoint.MaxTTL/(24*time.Hour))
	case ttl%time.Second != 0: // tokens have whole seconds
		return fmt.Errorf("%v; it must be whole seconds", ttl)
	}
	return nil
}

// waysOptions are the ways to undo a call.
func waysOptions() option.Set[*Ways] {
	return option.Set[*Ways]{
		"restore": {Usage: "{ ... }", Parse: func(d *caddyfile.Dispenser, w *Ways) error {
			w.Restore = new(Restore)
			return restoreOptions().Read(d, "restore", w.Restore, originOf(d))
		}},
		"compensate": {Usage: "<method> <url> { ... }", Parse: func(d *caddyfile.Dispenser, w *Ways) error {
			w.Compensate = new(Compensation)
			if !d.Args(&w.Compensate.Method, &w.Compensate.URL) {
				return option.ErrSyntax
			}
			return compensationOptions().Read(d, "compensate", w.Compensate, originOf(d))
		}},
		"delegate": {Usage: "<uri> <identity> | unsigned", Parse: func(d *caddyfile.Dispenser, w *Ways) error {
			if !d.Args(&w.Delegate) {
				return option.ErrSyntax
			}
			for _, arg := range d.RemainingArgs() {
				switch {
				case arg == "unsigned":
					w.DelegateUnsigned = true
				case w.DelegateTo == "":
					w.DelegateTo = arg
				default:
					return option.ErrSyntax
				}
			}
			return nil
		}},
		"irreversible": flag(func(w *Ways) *bool { return &w.Irreversible }),
	}
}

// parseDefaultUndo parses how calls without an action are undone.
func parseDefaultUndo(d *caddyfile.Dispenser, h *Handler) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	way, ok := waysOptions()[d.Val()]
	if !ok {
		return fmt.Errorf("%q is no way to undo a call; use restore, compensate, delegate or irreversible", d.Val())
	}
	h.DefaultUndo = new(Ways)
	return way.Parse(d, h.DefaultUndo)
}

// restoreOptions are the options of the way restore.
func restoreOptions() option.Set[*Restore] {
	return option.Set[*Restore]{
		"header": entries("<field> <value>", func(r *Restore) *map[string]string { return &r.Header }),
		"on_changed": choice(func(r *Restore) *string { return &r.OnChanged },
			rollback.UndoEscalate, rollback.Overwrite),
		"verify": choice(func(r *Restore) *string { return &r.Verify }, verifyOff),
	}
}

// entries makes an option that may stand several times, with a name and its value.
func entries[T any](usage string, into func(T) *map[string]string) option.Option[T] {
	return repeated(option.Value(usage, into, parseEntry))
}

// requestOptions are the options of each request of an undo.
func requestOptions() option.Set[*Request] {
	return option.Set[*Request]{"header": entries("<field> <value>", func(r *Request) *map[string]string { return &r.Header })}
}

// compensationOptions are the options of the way compensate.
func compensationOptions() option.Set[*Compensation] {
	return merge(option.Set[*Compensation]{
		"json": entries("<name> <value>", func(c *Compensation) *map[string]string { return &c.JSON }),
		"form": entries("<name> <value>", func(c *Compensation) *map[string]string { return &c.Form }),
		"body": {Usage: "<media type> <text>", Parse: func(d *caddyfile.Dispenser, c *Compensation) error {
			if !d.Args(&c.ContentType, &c.Body) {
				return option.ErrSyntax
			}
			return nil
		}},
		"status": {Usage: "<method> <url> { ... }", Parse: func(d *caddyfile.Dispenser, c *Compensation) error {
			c.Status = new(Request)
			if !d.Args(&c.Status.Method, &c.Status.URL) {
				return option.ErrSyntax
			}
			return requestOptions().Read(d, "status", c.Status, originOf(d))
		}},
	}, within(func(c *Compensation) *Request { return &c.Request }, requestOptions()))
}

// placeUndo adds to an error the place of the option that says how calls are undone.
func placeUndo(err error, option string, at origin) error {
	bad := (*invalid)(nil)
	if errors.As(err, &bad) {
		if _, ok := at[bad.options[0]]; ok {
			option = bad.options[0]
		}
	}
	return place(invalidOption(option, "%w", err), at)
}

var errUndoNeedsIdentity = errors.New("it needs an `identity` in the global options, in whose name checkpoints are made")

// maxDescription bounds a description, in bytes, so that it fits into a token's extensions.
const maxDescription = 512

func checkDescription(text string) error {
	if len(text) > maxDescription || strings.ContainsFunc(text, func(c rune) bool { return c < ' ' || c > '~' }) {
		return fmt.Errorf("%.40q is too long, or has characters that are not printable ASCII; it has at most %d bytes and stands in tokens", text, maxDescription)
	}
	return nil
}

// checkGlobals finds options whose global option is missing; global options are parsed
// first.
func (h *Handler) checkGlobals(helper httpcaddyfile.Helper) error {
	app := new(App)
	if global, ok := helper.Option("agent_guard").(httpcaddyfile.App); ok {
		if err := json.Unmarshal(global.Value, app); err != nil {
			return err
		}
	}
	if err := h.lacksGlobal(app); err != nil {
		return place(err, h.origin)
	}
	if app.Identity != nil {
		return nil
	}
	if h.DefaultUndo != nil && wayOf(h.DefaultUndo) != "" {
		return place(invalidOption("default_undo", "%w", errUndoNeedsIdentity), h.origin)
	}
	for _, a := range h.Actions {
		if err := a.needsIdentity(); err != nil {
			return place(fmt.Errorf("action %s: %w", a.Name, err), a.origin)
		}
	}
	return nil
}

// parseHandlers parses the handlers in the block of an option. It needs the helper, which
// UnmarshalCaddyfile does not have.
func (h *Handler) parseHandlers(helper httpcaddyfile.Helper, name string, into *[]json.RawMessage) error {
	segment, ok := h.origin[name]
	if !ok {
		return nil
	}
	handler, err := httpcaddyfile.ParseSegmentAsSubroute(helper.WithDispenser(caddyfile.NewDispenser(segment)))
	if err != nil {
		return err
	}
	if subroute, ok := handler.(*caddyhttp.Subroute); ok && len(subroute.Routes) == 0 {
		return option.ErrorAt(segment[0], fmt.Errorf("%s: no handler is given; write %s", name, map[string]string{
			"upstream": "those that lead to the upstream, like reverse_proxy",
			"fallback": "those that answer, like respond",
		}[name]))
	}
	*into = []json.RawMessage{caddyconfig.JSONModuleObject(handler, "handler", "subroute", nil)}
	return nil
}

// ownRequests reports whether the guard makes its own requests, and the first option that
// needs them.
func (h *Handler) ownRequests() (wanting, bool) {
	const probe, undo = "on_unknown: a probe is a request", ": an undo is made of requests"
	if h.OnUnknown == guard.OnUnknownProbe {
		return wanting{h.origin["on_unknown"][0], probe}, true
	}
	if h.DefaultUndo != nil {
		if _, own := h.DefaultUndo.ownRequests(); own {
			return wanting{h.origin["default_undo"][0], "default_undo" + undo}, true
		}
	}
	for _, a := range h.Actions {
		if a.OnUnknown == guard.OnUnknownProbe {
			return wanting{a.origin["on_unknown"][0], probe}, true
		}
		if option, own := a.ownRequests(); own {
			return wanting{a.origin[option][0], option + undo}, true
		}
	}
	return wanting{}, false
}
