package caddymodule

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/undoing"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// policyOptions are the options of a guard and of its actions.
func policyOptions() options[*Policy] {
	type dispenser = *caddyfile.Dispenser
	return options[*Policy]{
		"deadline": {usage: "deadline <duration>", parse: func(d dispenser, p *Policy) error {
			return parseDuration(d, &p.Deadline)
		}},
		"retain_result": {usage: "retain_result <duration>", parse: func(d dispenser, p *Policy) error {
			return parseDuration(d, &p.RetainResult)
		}},
		"target": {usage: "target <text>", parse: func(d *caddyfile.Dispenser, p *Policy) error {
			return parseWord(d, &p.Target)
		}},
		"retain_key": {usage: "retain_key <duration>", parse: func(d dispenser, p *Policy) error {
			return parseDuration(d, &p.RetainKey)
		}},
		"max_result": {usage: "max_result <size>", parse: func(d dispenser, p *Policy) error {
			return parseSize(d, &p.MaxResult)
		}},
		"preset": {usage: "preset default | stripe | acp | strict", parse: func(d dispenser, p *Policy) error {
			var name string
			if err := parseChoice(d, &name, presets()...); err != nil {
				return err
			}
			p.Preset = guard.Preset(name)
			return nil
		}},
		"outcome": {several: true, usage: "outcome completed | released | in_doubt <statuses...>", parse: parseOutcome},
		"on_unknown": {usage: "on_unknown block | retry | probe <method> <uri> { ... }",
			parse: parseOnUnknown},
		"settle": {usage: "settle awaited | async", parse: func(d dispenser, p *Policy) error {
			return parseChoice(d, &p.Settle, settleAwaited, settleAsync)
		}},
		"unframed": {usage: "unframed doubt | complete", parse: func(d dispenser, p *Policy) error {
			return parseChoice(d, &p.Unframed, unframedDoubt, unframedComplete)
		}},
		"grpc": {usage: "grpc unary", parse: func(d dispenser, p *Policy) error {
			return parseChoice(d, &p.GRPC, grpcUnary)
		}},
	}.merge(within(func(p *Policy) *undoing.Terms { return &p.Terms }, termsOptions()))
}

func parseOutcome(d *caddyfile.Dispenser, p *Policy) error {
	var rule OutcomeRule
	if !d.NextArg() {
		return errSyntax
	}
	rule.Outcome = d.Val()
	if _, err := guard.ParseVerdict(rule.Outcome); err != nil {
		return err
	}
	if err := parseAnswer(d, "outcome", &rule.Match, &rule.Match, answerOptions()); err != nil {
		return err
	}
	p.Outcomes = append(p.Outcomes, rule)
	return nil
}

// answerOptions are the options of a block that describes answers.
func answerOptions() options[*caddyhttp.ResponseMatcher] {
	return options[*caddyhttp.ResponseMatcher]{
		"status": {several: true, usage: "status <statuses...>", parse: func(d *caddyfile.Dispenser, m *caddyhttp.ResponseMatcher) error {
			codes, err := parseStatuses(d.RemainingArgs())
			if err == nil && len(codes) == 0 {
				err = errSyntax
			}
			m.StatusCode = append(m.StatusCode, codes...)
			return err
		}},
		"header": {several: true, usage: "header <field> <value>", parse: func(d *caddyfile.Dispenser, m *caddyhttp.ResponseMatcher) error {
			if d.CountRemainingArgs() == 0 {
				return errSyntax
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

// parseAnswer reads statuses on the line, or a block of opts. Both go into m, which
// is a part of into.
func parseAnswer[T any](d *caddyfile.Dispenser, kind string, m *caddyhttp.ResponseMatcher, into T, opts options[T]) error {
	var err error
	if m.StatusCode, err = parseStatuses(d.RemainingArgs()); err != nil || len(m.StatusCode) > 0 {
		return err
	}
	at := originOf(d)
	if err := opts.readBlock(d, kind, into, at); err != nil {
		return err
	}
	if len(at) == 1 {
		return fmt.Errorf("it would match every answer; give statuses, or a block of %s", strings.Join(slices.Sorted(maps.Keys(opts)), ", "))
	}
	return nil
}

func parseOnUnknown(d *caddyfile.Dispenser, p *Policy) error {
	if err := parseChoice(d, &p.OnUnknown, onUnknownBlock, onUnknownProbe, onUnknownRetry); err != nil {
		return err
	}
	if p.OnUnknown != onUnknownProbe {
		return nil
	}
	p.Probe = new(Probe)
	var err error
	if p.Probe.Method, p.Probe.URI, err = parsePair(d); err != nil {
		return err
	}
	if d.NextArg() {
		return errSyntax
	}
	if err := probeOptions().readBlock(d, "a probe", p.Probe, originOf(d)); err != nil {
		return err
	}
	check := *p.Probe // what Provision makes of it is not for the JSON
	return check.provision()
}

// probeOptions are the options of a status probe.
func probeOptions() options[*Probe] {
	type dispenser = *caddyfile.Dispenser
	return options[*Probe]{
		"header": {several: true, usage: "header <field> <value>", parse: func(d dispenser, p *Probe) error {
			if err := parseEntry(d, &p.Header); err != nil {
				return err
			}
			return checkFields(slices.Sorted(maps.Keys(p.Header)))
		}},
		"applied": {usage: "applied <statuses...>", parse: func(d dispenser, p *Probe) error {
			return parseEvidence(d, &p.Applied)
		}},
		"not_applied": {usage: "not_applied <statuses...>", parse: func(d dispenser, p *Probe) error {
			return parseEvidence(d, &p.NotApplied)
		}},
		"use_answer": {usage: "use_answer", parse: func(_ dispenser, p *Probe) error {
			p.UseAnswer = true
			return nil
		}},
		"timeout": {usage: "timeout <duration>", parse: func(d dispenser, p *Probe) error {
			return parseDuration(d, &p.Timeout)
		}},
	}
}

func parseEvidence(d *caddyfile.Dispenser, into **Evidence) error {
	e := new(Evidence)
	*into = e
	return parseAnswer(d, d.Val(), &e.ResponseMatcher, e, evidenceOptions())
}

// evidenceOptions are the options of a block of evidence.
func evidenceOptions() options[*Evidence] {
	return options[*Evidence]{
		"json": {several: true, usage: "json <pointer> <value>", parse: func(d *caddyfile.Dispenser, e *Evidence) error {
			if err := parseEntry(d, &e.JSON); err != nil {
				return err
			}
			return e.provision()
		}},
	}.merge(within(func(e *Evidence) *caddyhttp.ResponseMatcher { return &e.ResponseMatcher }, answerOptions()))
}

// parseEntry reads a key and its value.
func parseEntry(d *caddyfile.Dispenser, into *map[string]string) error {
	name, value, err := parsePair(d)
	if err != nil {
		return err
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
