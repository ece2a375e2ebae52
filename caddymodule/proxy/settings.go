package proxy

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
)

// Settings configure the circuit breakers of a transport's upstreams: one per address, shared by
// all transports that lead there, and kept over reloads.
//
// A breaker is closed, open, or half-open. It opens when more than `threshold` of the calls in the
// window have failed, refuses every call for `cooldown`, and then lets one probe through. A good
// answer closes it; a failure opens it for twice as long. A probe that has no answer after 30 s gives its
// place to the next call. A refused call was not sent:
// `reverse_proxy` may try the next upstream, and the guard releases the key.
//
// Failures are: no connection, a connection that breaks, a timeout, the statuses of
// `failure_status`, an answer that is cut off, and what `in_band` names. 4xx, 501 and 505 are never
// failures, since any caller can provoke them; a 429 fails a probe. Callers that leave, refusals of
// the gateway itself, and the health checks of `reverse_proxy` do not count.
//
// A gRPC answer is also judged by its `grpc-status`, in the header or trailer, like the HTTP status
// with the same meaning: with `failure_status` 5, UNKNOWN (500), DEADLINE_EXCEEDED (504), INTERNAL
// (500), UNAVAILABLE (503) and DATA_LOSS (500) are failures; RESOURCE_EXHAUSTED counts as 429.
// CANCELLED (499), and DEADLINE_EXCEEDED after the request's own `grpc-timeout`, do not count. A
// probe is judged by its first message, or by the status if there is none. The status of gRPC-Web is
// read from the header, not from the body.
type Settings struct {
	// Turns the breakers of this transport off. Default: false.
	Off bool `json:"off,omitempty"`

	breaker.Settings

	// Where several gateways share a store: `node` has each of them send its own probe; with `fleet`
	// one of those whose breakers for an upstream are open sends a probe for all that have this
	// option, and its result closes them, or keeps them open for as long as that one's. If it is gone
	// before the result, another one probes; while the store cannot be reached, each does. Default:
	// `node`.
	ProbeScope string `json:"probe_scope,omitempty"`

	// The statuses that are failures: of HTTP, and of gRPC by the HTTP status that they map to. One
	// digit is a class. Those of 4xx, 501 and 505 never count and are refused. Default: 5.
	FailureStatus []int `json:"failure_status,omitempty"`

	// Answers that are failures although their status is good: those that match any of these.
	// Default: none.
	InBand []InBand `json:"in_band,omitempty"`

	// The identities of upstreams, a URI each, by address. Tokens and documents name the upstream
	// by it. Default: the address itself.
	Downstream map[string]string `json:"downstream,omitempty"`

	// A probe closes the breaker only if the upstream proves its `downstream` identity in the
	// answer. The proof is a verified TLS certificate with the identity among its URIs, or the
	// upstream's own token in the field `Execution-Context` of the answer: verified by the app's
	// `trust`, issued after the probe was sent, and never used before. Any other answer fails the
	// probe, and reaches its caller unchanged. Every upstream that is known at load needs an
	// identity; one that is found later and has none is not verified. Default: false.
	VerifyProbe bool `json:"verify_probe,omitempty"`

	// The place of `verify_probe` in the Caddyfile, like `Caddyfile:12`, so that errors at load can
	// name it. Default: they name none.
	WrittenAt string `json:"written_at,omitempty"`
}

// The values of Settings.ProbeScope.
const (
	ScopeNode  = "node"
	ScopeFleet = "fleet" // see ScopeNode
)

type checkedSettings struct {
	rules      *breaker.Rules
	statuses   []int
	inBand     []inBandRule
	downstream map[string]string // by the breakers' addresses
}

// checkAll checks the options, and how they go together.
func (s *Settings) checkAll() (*checkedSettings, error) {
	if s.VerifyProbe && len(s.Downstream) == 0 {
		return nil, errors.New("verify_probe: there is no identity to hold answers to; name the upstreams' with downstream")
	}
	return s.check()
}

// check checks each option by itself.
func (s *Settings) check() (*checkedSettings, error) {
	c := &checkedSettings{statuses: s.FailureStatus, downstream: map[string]string{}}
	if s.ProbeScope != "" && s.ProbeScope != ScopeNode && s.ProbeScope != ScopeFleet {
		return nil, fmt.Errorf("probe_scope: %q is unknown; use node or fleet", s.ProbeScope)
	}
	var err error
	if c.rules, err = breaker.NewRules(s.Settings); err != nil {
		return nil, err
	}
	if len(c.statuses) == 0 {
		c.statuses = []int{5}
	}
	for _, code := range c.statuses {
		if code < 2 || code > 599 || code > 5 && code < 200 {
			return nil, fmt.Errorf("failure: %d is no final status; use 200 to 599, or a class from 2 to 5", code)
		}
		if code == 4 || provoked(code) {
			word := map[bool]string{true: "4xx", false: strconv.Itoa(code)}[code == 4]
			return nil, fmt.Errorf("failure: %s never counts, since any caller can provoke it; use other statuses of 5xx", word)
		}
	}
	for i := range s.InBand {
		rule, err := s.InBand[i].check()
		if err != nil {
			return nil, fmt.Errorf("in_band: %w", err)
		}
		c.inBand = append(c.inBand, rule)
	}
	for dial, identity := range s.Downstream {
		upstream, err := Address(dial)
		if err != nil {
			return nil, fmt.Errorf("downstream: %w", err)
		}
		if u, err := url.Parse(identity); err != nil || u.Scheme == "" {
			return nil, fmt.Errorf("downstream %s: %q is no URI; use one like spiffe://example.com/agent", dial, identity)
		}
		c.downstream[upstream] = identity
	}
	return c, nil
}

// provoked reports whether any caller can have an upstream answer with a status: one that refuses the request (4xx), its
// method (501) or its version of HTTP (505). Such answers open no breaker for others.
func provoked(status int) bool {
	return status/100 == 4 || status == http.StatusNotImplemented || status == http.StatusHTTPVersionNotSupported
}

// failedStatus reports whether status is a failure by itself.
func (c *Circuits) failedStatus(status int) bool {
	return !provoked(status) && (slices.Contains(c.checked.statuses, status) || slices.Contains(c.checked.statuses, status/100))
}

// UnmarshalCaddyfile reads
//
//	breaker off
//	breaker {
//		window        <duration>
//		threshold     <percent>
//		min_volume    <number>
//		consecutive   <number>
//		slow          <duration> [<percent>]
//		cooldown      <base> [<longest>]
//		probe_scope   node|fleet
//		failure       <statuses...>
//		in_band       json <pointer> [<value>]
//		in_band       header <field> [<value>]
//		in_band       sse_error
//		downstream    <address> <uri>
//		verify_probe
//	}
//
// in_band and downstream may be given several times. Statuses are like 503, or 5xx for a class.
// Errors name the option and its line.
func (s *Settings) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if d.Val() != "breaker" { // else the caller has consumed it
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
		if d.NextBlock(d.Nesting()) {
			return d.Err("breaker: it is off; leave the block out")
		}
	}
	err := breakerOptions.Read(d, "breaker", s, map[string]caddyfile.Segment{}, func() error {
		_, err := s.check()
		return err
	})
	switch {
	case err == nil:
		if _, err = s.checkAll(); err != nil {
			err = breakerError(s, err)
		}
	case !strings.HasPrefix(err.Error(), "breaker "): // such an error names the block already
		err = fmt.Errorf("breaker: %w", err)
	}
	return err
}

var breakerOptions = option.Set[*Settings]{
	"window": {Usage: "<duration>", Parse: args(1, 1, func(s *Settings, a []string) error {
		return parseDuration(a[0], &s.Window)
	})},
	"threshold": {Usage: "<percent>", Parse: args(1, 1, func(s *Settings, a []string) error {
		return parsePercent(a[0], &s.Threshold)
	})},
	"min_volume": {Usage: "<number>", Parse: args(1, 1, func(s *Settings, a []string) error {
		return parseCount(a[0], &s.MinVolume)
	})},
	"consecutive": {Usage: "<number>", Parse: args(1, 1, func(s *Settings, a []string) error {
		return parseCount(a[0], &s.Consecutive)
	})},
	"slow": {Usage: "<duration> [<percent>]", Parse: args(1, 2, func(s *Settings, a []string) error {
		if len(a) == 2 {
			if err := parsePercent(a[1], &s.SlowThreshold); err != nil {
				return err
			}
		}
		return parseDuration(a[0], &s.SlowCall)
	})},
	"cooldown": {Usage: "<base> [<longest>]", Parse: args(1, 2, func(s *Settings, a []string) error {
		if len(a) == 2 {
			if err := parseDuration(a[1], &s.MaxCooldown); err != nil {
				return err
			}
		}
		return parseDuration(a[0], &s.Cooldown)
	})},
	"probe_scope": {Usage: "node|fleet", Parse: args(1, 1, func(s *Settings, a []string) error {
		s.ProbeScope = a[0]
		return nil
	})},
	"failure": {Usage: "<statuses...>", Parse: args(1, math.MaxInt, func(s *Settings, a []string) error {
		for _, word := range a {
			digits, class := strings.CutSuffix(word, "xx")
			code, err := strconv.Atoi(digits)
			if err != nil || len(word) != 3 || class != (code < 10) {
				return fmt.Errorf("%q is no final status; use 200 to 599, or a class from 2xx to 5xx", word)
			}
			s.FailureStatus = append(s.FailureStatus, code)
		}
		return nil
	})},
	"in_band": {Several: true, Usage: "json <pointer> [<value>] | header <field> [<value>] | sse_error",
		Parse: args(1, 3, parseInBand)},
	"downstream": {Several: true, Usage: "<address> <uri>", Parse: args(2, 2, func(s *Settings, a []string) error {
		if _, twice := s.Downstream[a[0]]; twice {
			return fmt.Errorf("%s is named twice", a[0])
		}
		if s.Downstream == nil {
			s.Downstream = map[string]string{}
		}
		s.Downstream[a[0]] = a[1]
		return nil
	})},
	"verify_probe": {Parse: func(d *caddyfile.Dispenser, s *Settings) error {
		s.VerifyProbe = true
		// The rest of what it needs is found at the end of the block, or at load.
		s.WrittenAt = strings.TrimPrefix(d.WrapErr(errors.New("")).Error(), ", at ")
		return nil
	}},
}

// args parses an option with least to most arguments.
func args(least, most int, parse func(*Settings, []string) error) func(*caddyfile.Dispenser, *Settings) error {
	return func(d *caddyfile.Dispenser, s *Settings) error {
		all := d.RemainingArgs()
		if len(all) < least || len(all) > most {
			return option.ErrSyntax
		}
		return parse(s, all)
	}
}

func parseInBand(s *Settings, a []string) error {
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

func parseDuration(text string, into *jsontime.Duration) error {
	v, err := caddy.ParseDuration(text)
	if err != nil || v <= 0 {
		return fmt.Errorf("%q is no positive duration (like 500ms, 30s or 5m)", text)
	}
	if v > 24*time.Hour {
		return fmt.Errorf("%q is too long; it must be at most 24h", text)
	}
	*into = jsontime.Duration(v)
	return nil
}

func parsePercent(text string, into *float64) error {
	number, ok := strings.CutSuffix(text, "%")
	v, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil || !(v > 0 && v < 100) {
		return fmt.Errorf("%q is no share (like 50%%) above 0%% and below 100%%", text)
	}
	*into = v / 100
	return nil
}

func parseCount(text string, into *int) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return fmt.Errorf("%q is no count (like 10); it must be at least 1", text)
	}
	*into = n
	return nil
}

var _ caddyfile.Unmarshaler = (*Settings)(nil)
