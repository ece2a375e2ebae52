package circuits

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// UnmarshalCaddyfile reads
//
//	breaker off
//	breaker {
//		window        <duration>
//		threshold     <percent>
//		min_volume    <number>
//		consecutive   <number>
//		slow          <duration> [<percent>]
//		patience      <duration>
//		cooldown      <base> [<longest>]
//		jitter        <percent>
//		workflow_threshold off|<percent>
//		by_operation
//		probe_prefer  off|<duration>
//		probe_timeout <duration>
//		mode          auto|observe|forced_open|forced_closed
//		failure       <statuses...>
//		in_band       json <pointer> [<value>]
//		in_band       header <field> [<value>]
//		in_band       sse_error
//		downstream    <address> <uri>
//		verify_probe
//	}
//
// in_band and downstream may stand several times. Statuses are like 503, or 5xx for a
// class. Errors name the option and its line.
func (s *Settings) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if d.Val() != "breaker" { // else the caller stands on it
		d.Next()
	}
	if d.NextArg() {
		if d.Val() != "off" {
			return d.Errf("breaker: %q is unknown; write off, or a block", d.Val())
		}
		s.Off = true
		if d.NextArg() {
			return d.ArgErr()
		}
	}
	seen := map[string]bool{}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		o, ok := options[name]
		switch {
		case s.Off:
			return d.Err("breaker: it is off; leave the block out")
		case !ok:
			return d.Errf("breaker has no option %q; it has %s", name, names)
		case seen[name] && !o.several:
			return d.Errf("breaker: %s stands twice", name)
		}
		seen[name] = true
		args := d.RemainingArgs()
		if len(args) < o.least || o.most >= 0 && len(args) > o.most {
			return d.Errf("breaker: %s: wrong number of arguments; the syntax is `%s`", name, strings.TrimSpace(name+" "+o.usage))
		}
		err := o.parse(s, args)
		if err == nil {
			_, err = s.check()
		} else {
			err = fmt.Errorf("%s: %w", name, err)
		}
		if err != nil {
			return d.Errf("breaker: %v", err)
		}
	}
	if err := s.Validate(); err != nil {
		return d.Errf("breaker: %v", err)
	}
	return nil
}

type option struct {
	usage       string // of its arguments
	least, most int    // arguments; -1 is any number
	several     bool
	parse       func(s *Settings, args []string) error
}

var options = map[string]option{
	"window":        {usage: "<duration>", least: 1, most: 1, parse: into(func(s *Settings) *caddy.Duration { return &s.Window })},
	"patience":      {usage: "<duration>", least: 1, most: 1, parse: into(func(s *Settings) *caddy.Duration { return &s.Patience })},
	"probe_timeout": {usage: "<duration>", least: 1, most: 1, parse: into(func(s *Settings) *caddy.Duration { return &s.ProbeTimeout })},
	"threshold":     {usage: "<percent>", least: 1, most: 1, parse: func(s *Settings, a []string) error { return percent(a[0], &s.Threshold) }},
	"jitter":        {usage: "<percent>", least: 1, most: 1, parse: func(s *Settings, a []string) error { return percent(a[0], &s.Jitter) }},
	"min_volume":    {usage: "<number>", least: 1, most: 1, parse: func(s *Settings, a []string) error { return count(a[0], &s.MinVolume) }},
	"consecutive":   {usage: "<number>", least: 1, most: 1, parse: func(s *Settings, a []string) error { return count(a[0], &s.Consecutive) }},
	"slow": {usage: "<duration> [<percent>]", least: 1, most: 2, parse: func(s *Settings, a []string) error {
		if len(a) == 2 {
			if err := percent(a[1], &s.SlowThreshold); err != nil {
				return err
			}
		}
		return duration(a[0], &s.SlowCall)
	}},
	"cooldown": {usage: "<base> [<longest>]", least: 1, most: 2, parse: func(s *Settings, a []string) error {
		if len(a) == 2 {
			if err := duration(a[1], &s.MaxCooldown); err != nil {
				return err
			}
		}
		return duration(a[0], &s.Cooldown)
	}},
	"workflow_threshold": {usage: "off|<percent>", least: 1, most: 1, parse: func(s *Settings, a []string) error {
		if a[0] == "off" {
			s.WorkflowThreshold = -1
			return nil
		}
		return percent(a[0], &s.WorkflowThreshold)
	}},
	"by_operation": {parse: func(s *Settings, _ []string) error { s.ByOperation = true; return nil }},
	"verify_probe": {parse: func(s *Settings, _ []string) error { s.VerifyProbe = true; return nil }},
	"probe_prefer": {usage: "off|<duration>", least: 1, most: 1, parse: func(s *Settings, a []string) error {
		if a[0] == "off" {
			s.ProbePrefer = -1
			return nil
		}
		return duration(a[0], &s.ProbePrefer)
	}},
	"mode": {usage: "auto|observe|forced_open|forced_closed", least: 1, most: 1, parse: func(s *Settings, a []string) error {
		if err := s.Mode.UnmarshalText([]byte(a[0])); err != nil {
			return fmt.Errorf("%q is unknown; use auto, observe, forced_open or forced_closed", a[0])
		}
		return nil
	}},
	"failure": {usage: "<statuses...>", least: 1, most: -1, parse: func(s *Settings, a []string) error {
		for _, word := range a {
			digits, class := strings.CutSuffix(word, "xx")
			code, err := strconv.Atoi(digits)
			if err != nil || len(word) != 3 || class != (code < 10) {
				return fmt.Errorf("%q is no final status; use 200 to 599, or a class from 2xx to 5xx", word)
			}
			s.FailureStatus = append(s.FailureStatus, code)
		}
		return nil
	}},
	"in_band": {usage: "json <pointer> [<value>] | header <field> [<value>] | sse_error", least: 1, most: 3, several: true, parse: inBand},
	"downstream": {usage: "<address> <uri>", least: 2, most: 2, several: true, parse: func(s *Settings, a []string) error {
		if _, twice := s.Downstream[a[0]]; twice {
			return fmt.Errorf("%s is named twice", a[0])
		}
		if s.Downstream == nil {
			s.Downstream = map[string]string{}
		}
		s.Downstream[a[0]] = a[1]
		return nil
	}},
}

// names are the options' names, for errors.
const names = "by_operation, consecutive, cooldown, downstream, failure, in_band, jitter, min_volume, mode, " +
	"patience, probe_prefer, probe_timeout, slow, threshold, verify_probe, window, workflow_threshold"

func inBand(s *Settings, a []string) error {
	var b InBand
	switch {
	case a[0] == "sse_error" && len(a) == 1:
		b.SSEError = true
	case a[0] == "json" && len(a) > 1:
		b.JSON = a[1]
	case a[0] == "header" && len(a) > 1:
		b.Header = a[1]
	default:
		return fmt.Errorf("%q is unknown; use json <pointer> [<value>], header <field> [<value>] or sse_error", strings.Join(a, " "))
	}
	if len(a) == 3 {
		b.Value = a[2]
	}
	s.InBand = append(s.InBand, b)
	return nil
}

func into(field func(*Settings) *caddy.Duration) func(*Settings, []string) error {
	return func(s *Settings, a []string) error { return duration(a[0], field(s)) }
}

func duration(text string, into *caddy.Duration) error {
	v, err := caddy.ParseDuration(text)
	if err != nil || v <= 0 {
		return fmt.Errorf("%q is no positive duration (like 500ms, 30s or 5m)", text)
	}
	if v > 24*time.Hour {
		return fmt.Errorf("%q is too long; it must be at most 24h", text)
	}
	*into = caddy.Duration(v)
	return nil
}

func percent(text string, into *float64) error {
	number, ok := strings.CutSuffix(text, "%")
	v, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil || !(v > 0 && v < 100) {
		return fmt.Errorf("%q is no share (like 50%%) above 0%% and below 100%%", text)
	}
	*into = v / 100
	return nil
}

func count(text string, into *int) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return fmt.Errorf("%q is no count (like 10); it must be at least 1", text)
	}
	*into = n
	return nil
}

var _ caddyfile.Unmarshaler = (*Settings)(nil)
