package caddymodule

import (
	"net/http"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// parseOption reads one option of a policy. It reports false for a name that is
// none. What needs requests of the guard's own is noted in h, with its place.
func (p *Policy) parseOption(d *caddyfile.Dispenser, h *Handler) (known bool, err error) {
	switch d.Val() {
	case "deadline":
		err = parseDuration(d, &p.Deadline)
	case "retain_result":
		err = parseDuration(d, &p.RetainResult)
	case "retain_key":
		err = parseDuration(d, &p.RetainKey)
	case "max_result":
		err = parseSize(d, &p.MaxResult)
	case "preset":
		err = p.parsePreset(d)
	case "outcome":
		err = p.parseOutcome(d)
	case "on_unknown":
		err = p.parseOnUnknown(d, h)
	case "settle":
		err = parseChoice(d, &p.Settle, settleAwaited, settleAsync)
	case "unframed":
		err = parseChoice(d, &p.Unframed, unframedDoubt, unframedComplete)
	case "grpc":
		err = parseChoice(d, &p.GRPC, grpcUnary)
	default:
		return false, nil
	}
	return true, err
}

func (p *Policy) parsePreset(d *caddyfile.Dispenser) error {
	var names []string
	for _, preset := range guard.Presets() {
		names = append(names, string(preset))
	}
	var name string
	err := parseChoice(d, &name, names...)
	p.Preset = guard.Preset(name)
	return err
}

func (p *Policy) parseOutcome(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.ArgErr()
	}
	rule := OutcomeRule{Outcome: d.Val()}
	if _, err := guard.ParseVerdict(rule.Outcome); err != nil {
		return d.Errf("%v", err)
	}
	if err := parseResponse(d, &rule.Match, nil); err != nil {
		return err
	}
	p.Outcomes = append(p.Outcomes, rule)
	return nil
}

// parseResponse reads a response matcher: statuses on the line, or a block. further
// reads what a block may have besides.
func parseResponse(d *caddyfile.Dispenser, m *caddyhttp.ResponseMatcher, further func() (bool, error)) error {
	statuses := func(words []string) error {
		codes, err := parseStatuses(words)
		if err != nil {
			return d.Errf("%v", err)
		}
		m.StatusCode = append(m.StatusCode, codes...)
		return nil
	}
	words := d.RemainingArgs()
	if err := statuses(words); err != nil {
		return err
	}
	empty := len(words) == 0
	for nesting := d.Nesting(); d.NextBlock(nesting); empty = false {
		switch d.Val() {
		case "status":
			words := d.RemainingArgs()
			if len(words) == 0 {
				return d.ArgErr()
			}
			if err := statuses(words); err != nil {
				return err
			}
		case "header":
			if m.Headers == nil {
				m.Headers = http.Header{}
			}
			matcher := caddyhttp.MatchHeader(m.Headers)
			if err := matcher.UnmarshalCaddyfile(d.NewFromNextSegment()); err != nil {
				return err
			}
			m.Headers = http.Header(matcher)
		default:
			known := false
			var err error
			if further != nil {
				known, err = further()
			}
			if err != nil {
				return err
			}
			if !known {
				return d.Errf("%q says nothing about an answer; use status or header", d.Val())
			}
		}
	}
	if empty {
		return d.Err("it would match every answer; name a status or a header")
	}
	return nil
}

func (p *Policy) parseOnUnknown(d *caddyfile.Dispenser, h *Handler) error {
	at := d.Token()
	if !d.NextArg() {
		return d.ArgErr()
	}
	p.OnUnknown = d.Val()
	switch p.OnUnknown {
	case onUnknownBlock, onUnknownRetry:
		return noMore(d)
	case onUnknownProbe:
		h.ownRequests = &at
		p.Probe = new(Probe)
		return p.Probe.parse(d)
	}
	return d.Errf("on_unknown %q is unknown; use %s, %s or %s", p.OnUnknown, onUnknownBlock, onUnknownProbe, onUnknownRetry)
}

// parse reads <method> <uri> and the block of a probe.
func (p *Probe) parse(d *caddyfile.Dispenser) error {
	if !d.Args(&p.Method, &p.URI) {
		return d.ArgErr()
	}
	if err := noMore(d); err != nil {
		return err
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		var err error
		switch d.Val() {
		case "header":
			var field, value string
			if !d.Args(&field, &value) {
				return d.ArgErr()
			}
			if p.Header == nil {
				p.Header = map[string]string{}
			}
			p.Header[field] = value
			err = noMore(d)
		case "applied":
			err = parseEvidence(d, &p.Applied)
		case "not_applied":
			err = parseEvidence(d, &p.NotApplied)
		case "use_answer":
			p.UseAnswer = true
			err = noMore(d)
		case "timeout":
			err = parseDuration(d, &p.Timeout)
		default:
			err = d.Errf("a probe has no option %q", d.Val())
		}
		if err != nil {
			return err
		}
	}
	check := *p
	if err := check.provision(); err != nil {
		return d.Errf("%v", err)
	}
	return nil
}

func parseEvidence(d *caddyfile.Dispenser, into **Evidence) error {
	if *into != nil {
		return d.Errf("%s stands twice", d.Val())
	}
	e := new(Evidence)
	*into = e
	return parseResponse(d, &e.ResponseMatcher, func() (bool, error) {
		if d.Val() != "json" {
			return false, nil
		}
		var pointer, value string
		if !d.Args(&pointer, &value) {
			return true, d.ArgErr()
		}
		if e.JSON == nil {
			e.JSON = map[string]string{}
		}
		e.JSON[pointer] = value
		return true, noMore(d)
	})
}
