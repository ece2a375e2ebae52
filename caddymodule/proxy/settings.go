package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

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
		if err := option.CheckStatus(code); err != nil {
			return nil, fmt.Errorf("failure: %w", err)
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

// parseBreaker reads
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
func parseBreaker(d *caddyfile.Dispenser, t *Transport) error {
	if t.Breaker != nil {
		return errors.New("breaker is given twice")
	}
	s := new(Settings)
	t.Breaker = s
	if d.NextArg() {
		if d.Val() != "off" {
			return fmt.Errorf("%q is unknown; write off, or a block", d.Val())
		}
		s.Off = true
		if d.CountRemainingArgs() == 0 && d.NextBlock(d.Nesting()) {
			return errors.New("it is off; leave the block out")
		}
		return nil
	}
	err := breakerOptions().Read(d, "breaker", s, map[string]caddyfile.Segment{})
	if err == nil {
		_, err = s.checkAll()
		err = s.place(err)
	}
	return err
}

func breakerOptions() option.Set[*Settings] {
	all := option.Set[*Settings]{
		"window":      option.Value("<duration>", func(s *Settings) *jsontime.Duration { return &s.Window }, option.ParseDuration),
		"threshold":   option.Value("<percent>", func(s *Settings) *float64 { return &s.Threshold }, parsePercent),
		"min_volume":  option.Value("<number>", func(s *Settings) *int { return &s.MinVolume }, option.ParseCount),
		"consecutive": option.Value("<number>", func(s *Settings) *int { return &s.Consecutive }, option.ParseCount),
		"slow": {Usage: "<duration> [<percent>]", Parse: func(d *caddyfile.Dispenser, s *Settings) error {
			err := option.ParseDuration(d, &s.SlowCall)
			if err == nil && d.CountRemainingArgs() > 0 {
				err = parsePercent(d, &s.SlowThreshold)
			}
			return err
		}},
		"cooldown": {Usage: "<base> [<longest>]", Parse: func(d *caddyfile.Dispenser, s *Settings) error {
			err := option.ParseDuration(d, &s.Cooldown)
			if err == nil && d.CountRemainingArgs() > 0 {
				err = option.ParseDuration(d, &s.MaxCooldown)
			}
			return err
		}},
		"probe_scope": {Usage: "node|fleet", Parse: func(d *caddyfile.Dispenser, s *Settings) error {
			if !d.Args(&s.ProbeScope) {
				return option.ErrSyntax
			}
			return nil
		}},
		"failure": {Usage: "<statuses...>", Parse: func(d *caddyfile.Dispenser, s *Settings) (err error) {
			if s.FailureStatus, err = option.ParseStatuses(d.RemainingArgs()); err == nil && s.FailureStatus == nil {
				err = option.ErrSyntax
			}
			return err
		}},
		"in_band": {Several: true, Usage: "json <pointer> [<value>] | header <field> [<value>] | sse_error", Parse: parseInBand},
		"downstream": {Several: true, Usage: "<address> <uri>", Parse: func(d *caddyfile.Dispenser, s *Settings) error {
			var address, identity string
			if !d.Args(&address, &identity) {
				return option.ErrSyntax
			}
			if _, twice := s.Downstream[address]; twice {
				return fmt.Errorf("%s is named twice", address)
			}
			if s.Downstream == nil {
				s.Downstream = map[string]string{}
			}
			s.Downstream[address] = identity
			return nil
		}},
		"verify_probe": {Parse: func(d *caddyfile.Dispenser, s *Settings) error {
			s.VerifyProbe = true
			// The rest of what it needs is found at the end of the block, or at load.
			s.WrittenAt = strings.TrimPrefix(d.WrapErr(errors.New("")).Error(), ", at ")
			return nil
		}},
	}
	for name, opt := range all { // each is checked at its own line
		opt.NamesItself, opt.Check = true, func(s *Settings) error {
			_, err := s.check()
			return err
		}
		all[name] = opt
	}
	return all
}

func parseInBand(d *caddyfile.Dispenser, s *Settings) error {
	var b InBand
	switch a := d.RemainingArgs(); {
	case len(a) == 0 || len(a) > 3:
		return option.ErrSyntax
	case a[0] == "sse_error" && len(a) == 1:
		b.SSEError = true
	case a[0] == "json" && len(a) > 1:
		b.JSON, b.Value = a[1], strings.Join(a[2:], "")
	case a[0] == "header" && len(a) > 1:
		b.Header, b.Value = a[1], strings.Join(a[2:], "")
	default:
		return fmt.Errorf("%q is unknown; use json <pointer> [<value>], header <field> [<value>] or sse_error", strings.Join(a, " "))
	}
	s.InBand = append(s.InBand, b)
	return nil
}

func parsePercent(d *caddyfile.Dispenser, into *float64) error {
	if !d.NextArg() {
		return option.ErrSyntax
	}
	number, ok := strings.CutSuffix(d.Val(), "%")
	v, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil || !(v > 0 && v < 100) {
		return fmt.Errorf("%q is no share (like 50%%) above 0%% and below 100%%", d.Val())
	}
	*into = v / 100
	return nil
}
