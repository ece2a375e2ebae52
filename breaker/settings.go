package breaker

import (
	"cmp"
	"fmt"
	"math"
	"time"
)

// Settings say when a breaker opens and how it closes. Zero values stand for the defaults.
type Settings struct {
	// Window is the length of the window of the error rate: 1 s to 1 h, by default 60 s. It moves
	// in 60 steps.
	Window time.Duration
	// Threshold is the share of failures, over 0 and under 1, above which the breaker opens; by
	// default 0.5. A rate equal to it keeps the breaker closed.
	Threshold float64
	// MinVolume is how many calls must have ended in the window, or be overdue, before the breaker
	// can open because of a rate; by default 10.
	MinVolume int
	// Consecutive is how many failures in a row open the breaker at any rate; 0 is never.
	Consecutive int
	// SlowCall is the latency above which an answer is slow; 0 is never. A slow probe fails.
	SlowCall time.Duration
	// SlowThreshold is the share of slow calls, over 0 and under 1, above which the breaker opens;
	// by default 0.5.
	SlowThreshold float64

	// Cooldown is how long the breaker stays open at first, by default 30 s. A failed probe doubles
	// it, up to MaxCooldown, by default 300 s, which also bounds the Outcome.RetryAfter that is followed.
	Cooldown, MaxCooldown time.Duration

	// ProbeLease is how long a probe may go without an answer; by default 30 s.
	ProbeLease time.Duration
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

const day = 24 * time.Hour

// NewRules fills in the defaults and checks the ranges. The error names the value that is out of its
// range.
func NewRules(s Settings) (*Rules, error) {
	s.Window = cmp.Or(s.Window, 60*time.Second)
	s.Threshold = cmp.Or(s.Threshold, 0.5)
	s.MinVolume = cmp.Or(s.MinVolume, 10)
	s.SlowThreshold = cmp.Or(s.SlowThreshold, 0.5)
	s.Cooldown = cmp.Or(s.Cooldown, 30*time.Second)
	s.MaxCooldown = cmp.Or(s.MaxCooldown, max(300*time.Second, s.Cooldown))
	s.ProbeLease = cmp.Or(s.ProbeLease, 30*time.Second)
	for _, check := range []struct {
		ok    bool
		name  string
		value any
		right string
	}{
		{s.Window >= time.Second && s.Window <= time.Hour, "Window", s.Window, "from 1s to 1h"},
		{isShare(s.Threshold), "Threshold", s.Threshold, "above 0 and below 1"},
		{s.MinVolume > 0, "MinVolume", s.MinVolume, "positive"},
		{s.Consecutive >= 0, "Consecutive", s.Consecutive, "positive, or 0 for never"},
		{s.SlowCall >= 0, "SlowCall", s.SlowCall, "positive, or 0 for never"},
		{isShare(s.SlowThreshold), "SlowThreshold", s.SlowThreshold, "above 0 and below 1"},
		{s.Cooldown > 0, "Cooldown", s.Cooldown, "positive"},
		{s.MaxCooldown >= s.Cooldown && s.MaxCooldown <= day, "MaxCooldown", s.MaxCooldown, "no shorter than Cooldown, at most 24h"},
		{s.ProbeLease > 0, "ProbeLease", s.ProbeLease, "positive"},
	} {
		if !check.ok {
			return nil, fmt.Errorf("breaker: %s is %v; it has to be %s", check.name, check.value, check.right)
		}
	}
	return &Rules{
		set:       s,
		step:      s.Window / buckets,
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
