package circuits

import (
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// Document is what is told of breakers: Figure 3 of the cascade draft, with more
// members. They are an API.
type Document struct {
	// Circuits are sorted by upstream and class.
	Circuits []Circuit `json:"circuits"`
}

// Circuit is what is told of one breaker.
type Circuit struct {
	// Downstream is the identity of the upstream where one is configured, else its address.
	Downstream string `json:"downstream_agent"`
	// State is closed, open or half_open.
	State string `json:"state"`
	// ErrorRate is the share of failures in the window, 0 to 1; of an open breaker, as it
	// opened.
	ErrorRate float64 `json:"error_rate"`
	// Window is how far back the rate looks, in seconds.
	Window float64 `json:"window_s"`
	// LastFailure is the id of the error token of the last failure, where there is one.
	LastFailure string `json:"last_failure_ect,omitempty"`
	// CooldownRemaining are the seconds until a probe may be let through.
	CooldownRemaining float64 `json:"cooldown_remaining_s"`

	// Upstream is the address.
	Upstream string `json:"upstream"`
	// Class is read or write, where they have breakers of their own.
	Class string `json:"class,omitempty"`
	// Mode is auto, observe, forced_open or forced_closed.
	Mode string `json:"mode"`
	// Generation counts the changes of state.
	Generation uint64 `json:"generation"`
	// Since is when the present state began.
	Since time.Time `json:"since,omitzero"`
	// MinVolume is how many calls the rate is judged from on.
	MinVolume int `json:"min_volume"`
	// Threshold is the rate above which it opens, 0 to 1.
	Threshold float64 `json:"threshold"`
	// Calls are those that count in the window.
	Calls int `json:"calls"`
	// Failures are those of them that failed.
	Failures int `json:"failures"`
	// Slow are those of them whose answer began too late.
	Slow int `json:"slow"`
	// RateLimited are the answers with 429 in the window, which count for no rate.
	RateLimited int `json:"rate_limited"`
	// Overdue are the calls that hang at the moment.
	Overdue int `json:"overdue"`
	// Cooldown is how long it is open, in seconds.
	Cooldown float64 `json:"cooldown_s"`
	// NextProbe is when a probe may be let through.
	NextProbe time.Time `json:"next_probe,omitzero"`
	// Probing says that one is under way.
	Probing bool `json:"probing"`
	// FailedProbes are those in a row.
	FailedProbes int `json:"failed_probes"`
	// Reason says in a word why it opened.
	Reason string `json:"reason,omitempty"`
	// LastCause is what the last failure was.
	LastCause string `json:"last_cause,omitempty"`
	// Opened is the id of the token of the opening, where there is one.
	Opened string `json:"open_ect,omitempty"`
	// Rejected counts the calls that it has refused since the process began.
	Rejected uint64 `json:"rejected"`

	// WorkflowThreshold is the rate above which it refuses the workflow that was asked
	// for, where that has asked for one. The settings bound it.
	WorkflowThreshold float64 `json:"workflow_threshold,omitempty"`
	// WorkflowWindow is over how many seconds, where it has asked for that.
	WorkflowWindow float64 `json:"workflow_window_s,omitempty"`
}

// SetView shows what a workflow asks of the breaker; nil is nothing.
func (c *Circuit) SetView(v *breaker.View) {
	if v == nil {
		return
	}
	if v.Threshold() < 1 {
		c.WorkflowThreshold = v.Threshold()
	}
	if v.Window() <= time.Hour {
		c.WorkflowWindow = v.Window().Seconds()
	}
}

// Policy is what callers may know of when breakers open, and for how long: nothing of
// which upstreams there are. Its members are an API; durations are in seconds.
type Policy struct {
	// Window is how far back the error rate looks.
	Window float64 `json:"window_s"`
	// Threshold is the rate above which a breaker opens, 0 to 1.
	Threshold float64 `json:"threshold"`
	// MinVolume is how many calls the rate is judged from on.
	MinVolume int `json:"min_volume"`
	// Consecutive is how many failures in a row open it, where they do.
	Consecutive int `json:"consecutive,omitempty"`
	// Cooldown is how long it is open at first.
	Cooldown float64 `json:"cooldown_s"`
	// MaxCooldown is how long at most, after probes that have failed.
	MaxCooldown float64 `json:"max_cooldown_s"`
	// ByOperation says that calls with a safe method have breakers of their own.
	ByOperation bool `json:"by_operation,omitempty"`
}

// Policy is that of the breakers as this transport uses them; nil where its settings let
// them refuse nobody.
func (c *Circuits) Policy() *Policy {
	if c.set.Mode == breaker.Observe || c.set.Mode == breaker.ForcedClosed {
		return nil
	}
	s := c.checked.rules.Settings()
	return &Policy{
		Window: s.Window.Seconds(), Threshold: s.Threshold, MinVolume: s.MinVolume, Consecutive: s.Consecutive,
		Cooldown: s.Cooldown.Seconds(), MaxCooldown: s.MaxCooldown.Seconds(), ByOperation: c.set.ByOperation,
	}
}

// Describe describes a breaker.
func (m *Member) Describe(s *breaker.Status) Circuit {
	c := Circuit{
		Downstream: m.Downstream(s.Key.Upstream), State: s.State.String(), ErrorRate: s.ErrorRate, Window: s.Window.Seconds(),
		CooldownRemaining: s.CooldownRemaining.Seconds(), Upstream: s.Key.Upstream, Class: s.Key.Class, Mode: s.Mode.String(),
		Generation: s.Generation, MinVolume: s.MinVolume, Threshold: s.Threshold, Calls: s.Calls, Failures: s.Failures, Slow: s.Slow,
		RateLimited: s.RateLimited, Overdue: s.Overdue, Cooldown: s.Cooldown.Seconds(), Probing: s.Probing, FailedProbes: s.FailedProbes,
		Reason: string(s.Reason), LastCause: s.Cause, Opened: s.Reference, Rejected: s.Rejected,
	}
	if !s.Since.IsZero() {
		c.Since = s.Since.UTC()
	}
	if !s.NextProbe.IsZero() {
		c.NextProbe = s.NextProbe.UTC()
	}
	return c
}
