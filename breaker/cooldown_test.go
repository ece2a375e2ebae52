package breaker_test

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// cascade 3.2.1: 30 s, doubled by each failed probe, 300 s at most. ATD, HITL case 4:
// three in a row are reported, once.
func TestCooldownDoubles(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		trip(t, b)
		var total time.Duration
		for i, seconds := range []time.Duration{30, 60, 120, 240, 300, 300} {
			cooldown := seconds * time.Second
			total += cooldown
			e := hook.last(t)
			equal(t, "to", e.To, breaker.Open)
			equal(t, "cooldown", e.Cooldown, cooldown)
			equal(t, "total", e.TotalCooldown, total)
			equal(t, "failed probes", e.FailedProbes, i)
			equal(t, "reports", len(hook.permanent), min(i/3, 1))
			pass(cooldown - 1)
			want(t, b, breaker.Open)
			pass(1)
			want(t, b, breaker.HalfOpen)
			if i < 5 {
				calls(t, b, 1, breaker.Outcome{Class: breaker.Failure, Evidence: "probe"})
				equal(t, "evidence", hook.last(t).Evidence, "probe")
				equal(t, "rate", hook.last(t).ErrorRate, 1)
			}
		}
		calls(t, b, 1, ok)
		e := hook.last(t)
		equal(t, "to", e.To, breaker.Closed)
		equal(t, "total", e.TotalCooldown, total)
		equal(t, "failed probes", e.FailedProbes, 5)
		equal(t, "generation", e.Generation, 1+2*6+1)

		p := hook.permanent[0]
		equal(t, "report", p.FailedProbes, 3)
		equal(t, "report", p.To, breaker.Open)
		equal(t, "report", p.Evidence, "probe")

		// The next outage is reported again.
		pass(time.Second)
		trip(t, b)
		for range 3 {
			pass(5 * time.Minute)
			calls(t, b, 1, failed)
		}
		equal(t, "reports", len(hook.permanent), 2)
	})
}

// Who relapses opens for as long as last time; who was healthy for long begins anew.
func TestHealthyTimeResetsTheCooldown(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{Healthy: time.Minute}, hook)
		recover := func() {
			pass(hook.last(t).Cooldown)
			calls(t, b, 1, ok)
			want(t, b, breaker.Closed)
		}
		trip(t, b)
		pass(30 * time.Second)
		calls(t, b, 1, failed)
		recover()
		pass(59 * time.Second)
		trip(t, b)
		equal(t, "cooldown of a relapse", hook.last(t).Cooldown, time.Minute)
		equal(t, "total", hook.last(t).TotalCooldown, time.Minute)
		recover()
		pass(time.Minute)
		trip(t, b)
		equal(t, "cooldown after health", hook.last(t).Cooldown, 30*time.Second)
	})
}

// What the upstream asks for lengthens the cooldown, up to a bound, and never shortens it.
func TestRetryAfterIsHonoured(t *testing.T) {
	limited := func(d time.Duration) breaker.Outcome {
		return breaker.Outcome{Class: breaker.RateLimited, RetryAfter: d}
	}
	for _, c := range []struct {
		name     string
		settings breaker.Settings
		before   breaker.Outcome // a call before the failures
		probe    breaker.Outcome
		first    time.Duration
		second   time.Duration
	}{
		{"none", breaker.Settings{}, ok, failed, 30 * time.Second, time.Minute},
		{"longer", breaker.Settings{}, limited(100 * time.Second), limited(200 * time.Second), 100 * time.Second, 200 * time.Second},
		{"shorter", breaker.Settings{}, limited(time.Second), limited(time.Second), 30 * time.Second, time.Minute},
		{"bounded", breaker.Settings{}, limited(time.Hour), limited(time.Hour), 300 * time.Second, 300 * time.Second},
		{"bound", breaker.Settings{MaxRetryAfter: 10 * time.Minute}, limited(time.Hour), failed, 10 * time.Minute, time.Minute},
		{"of a failure", breaker.Settings{},
			breaker.Outcome{Class: breaker.Failure, RetryAfter: 90 * time.Second},
			breaker.Outcome{Class: breaker.Failure, RetryAfter: 91 * time.Second}, 90 * time.Second, 91 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, pass func(time.Duration)) {
				hook := &recorder{}
				b := newBreaker(t, c.settings, hook)
				calls(t, b, 1, c.before)
				want(t, b, breaker.Closed)
				for b.Status().State == breaker.Closed {
					calls(t, b, 1, failed)
				}
				equal(t, "cooldown", hook.last(t).Cooldown, c.first)
				equal(t, "next probe", b.Status().NextProbe, time.Now().Add(c.first))
				pass(c.first)
				calls(t, b, 1, c.probe)
				want(t, b, breaker.Open)
				equal(t, "cooldown", hook.last(t).Cooldown, c.second)
				// What was asked for once does not go on doubling.
				pass(c.second)
				calls(t, b, 1, failed)
				equal(t, "cooldown", hook.last(t).Cooldown, 2*time.Minute)
			})
		})
	}
}

// Jitter shortens, by its share at most.
func TestJitter(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		seen := map[time.Duration]bool{}
		for range 100 {
			hook := &recorder{}
			b := newBreaker(t, breaker.Settings{Jitter: 0.2}, hook)
			trip(t, b)
			got := hook.last(t).Cooldown
			if got < 24*time.Second || got > 30*time.Second {
				t.Fatalf("cooldown %v", got)
			}
			seen[got] = true
			pass(got)
			calls(t, b, 1, failed)
			if got := hook.last(t).Cooldown; got < 48*time.Second || got > time.Minute {
				t.Fatalf("second cooldown %v", got)
			}
		}
		if len(seen) < 90 {
			t.Errorf("%d different cooldowns of 100", len(seen))
		}
	})
}

func TestSettingsAreChecked(t *testing.T) {
	day := 24 * time.Hour
	for want, s := range map[string]breaker.Settings{
		"breaker: Window is 1ms; it has to be from 1s to 1h":                                            {Window: time.Millisecond},
		"breaker: Threshold is 1; it has to be above 0 and below 1":                                     {Threshold: 1},
		"breaker: MinVolume is -1; it has to be positive":                                               {MinVolume: -1},
		"breaker: Consecutive is -1; it has to be positive, or 0 for never":                             {Consecutive: -1},
		"breaker: SlowCall is -1ns; it has to be positive, or 0 for never":                              {SlowCall: -1},
		"breaker: SlowThreshold is -0.5; it has to be above 0 and below 1":                              {SlowThreshold: -0.5},
		"breaker: Patience is -1ns; it has to be positive, or 0 for ever":                               {Patience: -1},
		"breaker: Cooldown is -1s; it has to be positive":                                               {Cooldown: -time.Second},
		"breaker: MaxCooldown is 1s; it has to be no shorter than Cooldown, at most 24h":                {MaxCooldown: time.Second},
		"breaker: MaxCooldown is 24h0m0.000000001s; it has to be no shorter than Cooldown, at most 24h": {Cooldown: day + 1},
		"breaker: Jitter is 0.6; it has to be from 0 to 0.5":                                            {Jitter: 0.6},
		"breaker: MaxRetryAfter is -1ns; it has to be positive, at most 24h":                            {MaxRetryAfter: -1},
		"breaker: Healthy is -1ns; it has to be positive":                                               {Healthy: -1},
		"breaker: ProbeLease is -1ns; it has to be positive":                                            {ProbeLease: -1},
		"breaker: ViewFloor is 1; it has to be above 0 and below 1, or negative for no views":           {ViewFloor: 1},
		"breaker: GiveUp is -1; it has to be positive":                                                  {GiveUp: -1},
	} {
		_, err := breaker.NewRules(s)
		if err == nil || err.Error() != want {
			t.Errorf("%+v: %v, want %s", s, err, want)
		}
	}
	got := mustRules(t, breaker.Settings{Cooldown: 10 * time.Minute}).Settings()
	equal(t, "settings", got, breaker.Settings{
		Window: time.Minute, Threshold: 0.5, MinVolume: 10, SlowThreshold: 0.5, Cooldown: 10 * time.Minute,
		MaxCooldown: 10 * time.Minute, MaxRetryAfter: 10 * time.Minute, Healthy: 10 * time.Minute,
		ProbeLease: 30 * time.Second, ProbeWait: 5 * time.Second, ViewFloor: 0.1, GiveUp: 3,
	})
}
