package breaker

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
)

// Settings say when a breaker opens and how it closes. Zero values stand for the defaults.
type Settings struct {
	// The time over which the error rate is measured, 1s to 1h. Default: 60s.
	Window jsontime.Duration `json:"window,omitempty"`

	// The share of failures, over 0 and under 1, above which a breaker opens. Default: 0.5.
	Threshold float64 `json:"threshold,omitempty"`

	// How many calls must have ended in the window before the rate counts. Default: 10.
	MinVolume int `json:"min_volume,omitempty"`

	// How many failures in a row open a breaker, whatever the rate. Default: no number does.
	Consecutive int `json:"consecutive,omitempty"`

	// The latency above which an answer is slow. Default: none.
	SlowCall jsontime.Duration `json:"slow_call,omitempty"`

	// The share of slow answers above which a breaker opens. Default: 0.5.
	SlowThreshold float64 `json:"slow_threshold,omitempty"`

	// How long a breaker stays open at first; each failed probe doubles it. Default: 30s.
	Cooldown jsontime.Duration `json:"cooldown,omitempty"`

	// The longest cooldown, at most 24h, and the longest `Retry-After` of the upstream that is
	// honoured. Default: 300s, or the cooldown if that is longer.
	MaxCooldown jsontime.Duration `json:"max_cooldown,omitempty"`

	// How long a probe may go without an answer. Default: 30s.
	ProbeLease jsontime.Duration `json:"-"`
}

const (
	// healthy is how long the breaker must be closed before its next cooldown is Settings.Cooldown again.
	// Before that it opens for as long as the last time.
	healthy = 10 * time.Minute
	// giveUp is the number of failed probes in a row after which Hook.PermanentlyOpen is called (ATD, HITL
	// case 4).
	giveUp = 3
)

// Rules are checked settings. They can be shared by many breakers.
type Rules struct {
	set       Settings
	step      time.Duration // one step of the window
	threshold uint64        // in millionths
	slow      uint64        // in millionths
}

// million is the resolution of thresholds. Shares are compared as integers, so that exactly 30 % is not
// above 0.3.
const million = 1_000_000

const second = jsontime.Duration(time.Second)

// NewRules fills in the defaults and checks the ranges. The error names the option of the Caddyfile that is out of its
// range.
func NewRules(s Settings) (*Rules, error) {
	s.Window = cmp.Or(s.Window, 60*second)
	s.Threshold = cmp.Or(s.Threshold, 0.5)
	s.MinVolume = cmp.Or(s.MinVolume, 10)
	s.SlowThreshold = cmp.Or(s.SlowThreshold, 0.5)
	s.Cooldown = cmp.Or(s.Cooldown, 30*second)
	s.MaxCooldown = cmp.Or(s.MaxCooldown, max(300*second, s.Cooldown))
	s.ProbeLease = cmp.Or(s.ProbeLease, 30*second)
	for _, d := range []struct {
		name  string
		value jsontime.Duration
	}{
		{"window", s.Window}, {"slow", s.SlowCall}, {"cooldown", s.Cooldown}, {"cooldown (longest)", s.MaxCooldown},
		{"ProbeLease", s.ProbeLease},
	} {
		if d.value < 0 {
			return nil, fmt.Errorf("%s: %v is negative; it must be positive", d.name, time.Duration(d.value))
		}
	}
	for _, check := range []struct {
		ok    bool
		name  string
		value any
		right string
	}{
		{s.Window >= second && s.Window <= 3600*second, "window", time.Duration(s.Window), "from 1s to 1h"},
		{isShare(s.Threshold), "threshold", s.Threshold, "above 0 and below 1"},
		{s.MinVolume > 0, "min_volume", s.MinVolume, "positive"},
		{s.Consecutive >= 0, "consecutive", s.Consecutive, "positive, or 0 for never"},
		{isShare(s.SlowThreshold), "slow (share)", s.SlowThreshold, "above 0 and below 1"},
		{s.MaxCooldown >= s.Cooldown && s.MaxCooldown <= 24*3600*second, "cooldown (longest)",
			time.Duration(s.MaxCooldown), "no shorter than cooldown, at most 24h"},
	} {
		if !check.ok {
			return nil, fmt.Errorf("%s is %v; it has to be %s", check.name, check.value, check.right)
		}
	}
	return &Rules{
		set:       s,
		step:      time.Duration(s.Window) / buckets,
		threshold: uint64(math.Round(s.Threshold * million)),
		slow:      uint64(math.Round(s.SlowThreshold * million)),
	}, nil
}

// Settings returns the settings with the defaults filled in.
func (r *Rules) Settings() Settings { return r.set }

func isShare(f float64) bool { return f > 0 && f < 1 }

// exceeded is the limit that the counts of a window are above; empty for none. Being equal to a limit is
// not enough (cascade 3.2.1).
func (r *Rules) exceeded(c counts) Reason {
	if c.calls >= uint64(r.set.MinVolume) {
		if c.failures*million > r.threshold*c.calls {
			return ErrorRate
		}
		if r.set.SlowCall > 0 && c.slow*million > r.slow*c.calls {
			return SlowCalls
		}
	}
	if all := c.calls + c.overdue; all >= uint64(r.set.MinVolume) &&
		(c.failures+c.overdue)*million > r.threshold*all {
		return OverdueCalls
	}
	return ""
}

// fails reports whether more than a threshold of the calls failed or hang.
func (r *Rules) fails(c counts, threshold uint64) bool {
	most, all := uint64(r.set.MinVolume), c.calls+c.overdue
	return c.calls >= most && c.failures*million > threshold*c.calls ||
		all >= most && (c.failures+c.overdue)*million > threshold*all
}
