package circuits

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// Settings are the circuit breakers of a transport's upstreams: one for each address,
// shared by all transports that lead there, and kept over reloads.
//
// A breaker is closed, open, or half-open. It opens when more than `threshold` of the
// calls in the window have failed, then refuses every call for `cooldown`, and lets
// one probe through. The probe's answer closes it; a failure opens it for twice as
// long. A refused call was not sent: `reverse_proxy` may try the next upstream, and the
// guard releases the key.
//
// What counts as a failure: no connection, a connection that breaks, a timeout, the
// statuses of `failure_status`, an answer that is cut off, and what `in_band` names.
// 429 is in no rate, but fails a probe. Callers that leave and the gateway's own
// refusals say nothing about the upstream. Health checks of `reverse_proxy` pass by.
//
// An answer of gRPC is judged by its `grpc-status` as well, in the header or trailer, as
// by the HTTP status that means the same: with `failure_status` 5, UNKNOWN (500),
// DEADLINE_EXCEEDED (504), INTERNAL (500), UNAVAILABLE (503) and DATA_LOSS (500) are
// failures; RESOURCE_EXHAUSTED is 429. UNIMPLEMENTED is one only where 501 itself stands
// there, since anybody can ask for a method that there is not. CANCELLED (499), and
// DEADLINE_EXCEEDED once the request's own `grpc-timeout` has passed, say nothing about
// the upstream. A probe is judged by the first message, or the status where there is
// none. The status of gRPC-Web is read where it is in the header, not in the body.
type Settings struct {
	// Turns the breakers of this transport off. Default: false.
	Off bool `json:"off,omitempty"`

	// How far back the error rate looks, 1s to 1h. Default: 60s.
	Window caddy.Duration `json:"window,omitempty"`

	// The share of failures, over 0 and under 1, above which a breaker opens.
	// Default: 0.5.
	Threshold float64 `json:"threshold,omitempty"`

	// How many calls must have ended in the window before a rate is judged.
	// Default: 10.
	MinVolume int `json:"min_volume,omitempty"`

	// How many failures in a row open a breaker whatever the rate. Default: none do.
	Consecutive int `json:"consecutive,omitempty"`

	// The latency above which an answer is slow. Default: none is.
	SlowCall caddy.Duration `json:"slow_call,omitempty"`

	// The share of slow answers above which a breaker opens. Default: 0.5.
	SlowThreshold float64 `json:"slow_threshold,omitempty"`

	// How long a call without a deadline may go without an answer before it counts
	// as a failure while it hangs. A guarded call has its action's deadline instead.
	// Default: for ever.
	Patience caddy.Duration `json:"patience,omitempty"`

	// How long a breaker stays open at first; each failed probe doubles it.
	// Default: 30s.
	Cooldown caddy.Duration `json:"cooldown,omitempty"`

	// The longest cooldown, at most 24h, and the longest that a `Retry-After` of the
	// upstream is honoured. Default: 300s, or the cooldown if that is longer.
	MaxCooldown caddy.Duration `json:"max_cooldown,omitempty"`

	// Shortens each cooldown by a random share of up to this, 0 to 0.5, so that many
	// gateways do not probe at the same instant. Default: 0.
	Jitter float64 `json:"jitter,omitempty"`

	// The lowest threshold that a workflow may ask for, over 0 and under 1. A workflow's
	// verified tokens can be stricter than `threshold` and `window`, for its own calls
	// (`atd.circuit_threshold`, `atd.circuit_window_s`); lower thresholds are raised to
	// this one, and looser values change nothing. Negative heeds none. Default: 0.1.
	WorkflowThreshold float64 `json:"workflow_threshold,omitempty"`

	// A breaker for reading and another for writing calls of each upstream: those
	// with a safe method, and all others. Default: false.
	ByOperation bool `json:"by_operation,omitempty"`

	// How long a half-open breaker waits for a call with a safe method before it
	// takes another one as its probe; negative is not at all. Default: 5s.
	ProbePrefer caddy.Duration `json:"probe_prefer,omitempty"`

	// How long a probe may go without an answer. Default: 30s.
	ProbeTimeout caddy.Duration `json:"probe_timeout,omitempty"`

	// `auto`; `observe` goes through the states and refuses nobody; `forced_open`
	// refuses every call; `forced_closed` none. Default: `auto`.
	Mode breaker.Mode `json:"mode,omitempty"`

	// The statuses that are failures, of HTTP and of gRPC by what they map to; one digit
	// is a class. Default: 5.
	FailureStatus []int `json:"failure_status,omitempty"`

	// Which answers are failures although their status is good: those that match any
	// of these. Default: none.
	InBand []InBand `json:"in_band,omitempty"`

	// The identities of upstreams by their address, a URI each, by which tokens and
	// documents name them. Default: the address itself.
	Downstream map[string]string `json:"downstream,omitempty"`

	// A probe closes the breaker only if the upstream's identity in `downstream` has
	// answered it: by the certificate of a TLS connection, verified, with the identity
	// among its URIs; or by a token of its in the field `Execution-Context` of the
	// answer, which the app's `trust` verifies, which was made since the probe was sent,
	// and which was never used before. Any other answer fails the probe, and goes to its
	// caller unchanged. Every upstream that is known needs an identity; one that is not
	// known has none to be held to. Default: false.
	VerifyProbe bool `json:"verify_probe,omitempty"`
}

// settings are Settings that were checked.
type settings struct {
	rules      *breaker.Rules
	statuses   []int
	inBand     []rule
	downstream map[string]string // by the breakers' addresses
}

// Validate checks the settings. Errors name the option.
func (s *Settings) Validate() error {
	_, err := s.checkAll()
	return err
}

// checkAll checks the options, and how they go together.
func (s *Settings) checkAll() (*settings, error) {
	if s.VerifyProbe && len(s.Downstream) == 0 {
		return nil, errors.New("verify_probe: there is no identity to hold answers to; name the upstreams' with downstream")
	}
	return s.check()
}

// check checks the options one by one.
func (s *Settings) check() (*settings, error) {
	c := &settings{statuses: s.FailureStatus, downstream: map[string]string{}}
	if s.Mode > breaker.ForcedClosed {
		return nil, fmt.Errorf("mode: %v; use auto, observe, forced_open or forced_closed", s.Mode)
	}
	for name, d := range map[string]caddy.Duration{
		"window": s.Window, "slow": s.SlowCall, "patience": s.Patience, "cooldown": s.Cooldown,
		"cooldown (longest)": s.MaxCooldown, "probe_timeout": s.ProbeTimeout,
	} {
		if d < 0 {
			return nil, fmt.Errorf("%s: %v is negative; it must be positive", name, time.Duration(d))
		}
	}
	var err error
	if c.rules, err = breaker.NewRules(s.breaker()); err != nil {
		return nil, named(err)
	}
	if len(c.statuses) == 0 {
		c.statuses = []int{5}
	}
	for _, code := range c.statuses {
		if code < 2 || code > 599 || code > 5 && code < 200 {
			return nil, fmt.Errorf("failure: %d is no final status; use 200 to 599, or a class from 2 to 5", code)
		}
	}
	for i := range s.InBand {
		rule, err := s.InBand[i].rule()
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

func (s *Settings) breaker() breaker.Settings {
	return breaker.Settings{
		Window: time.Duration(s.Window), Threshold: s.Threshold, MinVolume: s.MinVolume, Consecutive: s.Consecutive,
		SlowCall: time.Duration(s.SlowCall), SlowThreshold: s.SlowThreshold, Patience: time.Duration(s.Patience),
		Cooldown: time.Duration(s.Cooldown), MaxCooldown: time.Duration(s.MaxCooldown), Jitter: s.Jitter,
		ProbeWait: time.Duration(s.ProbePrefer), ProbeLease: time.Duration(s.ProbeTimeout),
		ViewFloor: s.WorkflowThreshold, Observe: s.Mode == breaker.Observe,
	}
}

// optionOf are the options by the names of package breaker.
var optionOf = strings.NewReplacer(
	"breaker: ", "", "MaxCooldown", "cooldown (longest)", "Cooldown", "cooldown", "Window", "window",
	"SlowThreshold", "slow (share)", "Threshold", "threshold", "MinVolume", "min_volume", "Consecutive", "consecutive",
	"SlowCall", "slow", "Patience", "patience", "Jitter", "jitter", "MaxRetryAfter", "cooldown (longest)",
	"ProbeLease", "probe_timeout", "ViewFloor", "workflow_threshold", "for no views", "to heed no workflow",
)

// named is err with the option's name in place of the package's.
func named(err error) error { return errors.New(optionOf.Replace(err.Error())) }

// Failed reports whether status is a failure by itself.
func (c *Circuits) Failed(status int) bool {
	return slices.Contains(c.checked.statuses, status) || slices.Contains(c.checked.statuses, status/100)
}
