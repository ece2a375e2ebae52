package breaker_test

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

func TestForcedOpen(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		late := acquire(t, b)
		b.SetMode(breaker.ForcedOpen)
		equal(t, "reason", hook.last(t).Reason, breaker.ByOperator)
		late.Done(ok)
		pass(24 * time.Hour)
		e := refused(t, b, breaker.Op{Safe: true})
		equal(t, "mode", e.Mode, breaker.ForcedOpen)
		equal(t, "advice", e.RetryAfter(), time.Second)
		equal(t, "text", e.Error(), "breaker: localhost:9001 is open (forced)")
		equal(t, "transitions", len(hook.heard), 1)

		// It comes back by a probe.
		b.SetMode(breaker.Auto)
		want(t, b, breaker.HalfOpen)
		calls(t, b, 1, failed)
		equal(t, "cooldown", hook.last(t).Cooldown, 30*time.Second)
		pass(30 * time.Second)
		calls(t, b, 1, ok)
		want(t, b, breaker.Closed)
		equal(t, "openings", b.Status().Openings, 2)
	})
}

// Forcing takes an open breaker's timer and a probe's lease away.
func TestForcedOpenWhileOpenAndProbing(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		trip(t, b)
		b.SetMode(breaker.ForcedOpen)
		pass(time.Hour)
		want(t, b, breaker.Open)
		equal(t, "remaining", b.Status().CooldownRemaining, 0)
		b.SetMode(breaker.Auto)
		probe := acquire(t, b)
		b.SetMode(breaker.ForcedOpen)
		probe.Done(ok)
		pass(time.Hour)
		want(t, b, breaker.Open)
	})
}

func TestForcedClosed(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{Consecutive: 5, Patience: time.Second}, nil)
		trip(t, b)
		b.SetMode(breaker.ForcedClosed)
		want(t, b, breaker.Closed)
		hang(t, b, 10, 0)
		calls(t, b, 100, failed)
		pass(10 * time.Second)
		want(t, b, breaker.Closed)
		s := b.Status()
		equal(t, "rate", s.ErrorRate, 1)
		equal(t, "failures", s.Failures, 100)
		equal(t, "overdue", s.Overdue, 10)
		b.SetMode(breaker.Auto)
		want(t, b, breaker.Closed)
		calls(t, b, 1, ok) // judged again
		want(t, b, breaker.Open)
	})
}

// An observing breaker says what it would do, and does nothing.
func TestObserve(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		b.SetMode(breaker.Observe)
		calls(t, b, 20, failed)
		want(t, b, breaker.Open)
		equal(t, "mode", hook.last(t).Mode, breaker.Observe)
		equal(t, "rejected", b.Status().Rejected, 10)
		calls(t, b, 20, ok)
		want(t, b, breaker.Open)
		pass(30 * time.Second)
		want(t, b, breaker.HalfOpen)
		probe := acquire(t, b)
		calls(t, b, 20, failed) // beside the probe
		want(t, b, breaker.HalfOpen)
		probe.Done(ok)
		want(t, b, breaker.Closed)

		// What it found holds when it is let loose, and no longer when it is not.
		trip(t, b)
		b.SetMode(breaker.Auto)
		refused(t, b, breaker.Op{Safe: true})
		b.SetMode(breaker.Observe)
		calls(t, b, 1, failed)
	})
}

// What the rules ask for follows them, and an operator's mode goes before it.
func TestObserveByRules(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{Observe: true}, hook)
		calls(t, b, 20, failed)
		want(t, b, breaker.Open)
		equal(t, "mode", hook.last(t).Mode, breaker.Observe)
		equal(t, "mode", b.Status().Mode, breaker.Observe)
		equal(t, "mode of the snapshot", b.Snapshot().Mode, breaker.Auto)
		equal(t, "rejected", b.Status().Rejected, 10)
		b.SetRules(mustRules(t, breaker.Settings{}))
		refused(t, b, breaker.Op{})
		b.SetRules(mustRules(t, breaker.Settings{Observe: true}))
		calls(t, b, 1, ok)
		b.SetMode(breaker.ForcedOpen)
		refused(t, b, breaker.Op{})
	})
}

// New thresholds change neither state nor counts (reload).
func TestRulesChangeInPlace(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 8, failed)
		b.SetRules(mustRules(t, breaker.Settings{MinVolume: 20, Window: 2 * time.Minute}))
		calls(t, b, 11, failed)
		want(t, b, breaker.Closed)
		equal(t, "failures", b.Status().Failures, 19)
		pass(100 * time.Second)
		equal(t, "failures", b.Status().Failures, 19)
		calls(t, b, 1, failed)
		want(t, b, breaker.Open)

		b.SetRules(mustRules(t, breaker.Settings{Cooldown: time.Second}))
		pass(29 * time.Second)
		want(t, b, breaker.Open)
		pass(time.Second)
		want(t, b, breaker.HalfOpen)
		calls(t, b, 1, ok)
		pass(time.Hour)
		trip(t, b)
		pass(time.Second)
		want(t, b, breaker.HalfOpen)
	})
}

// A longer window that becomes a short one forgets at the new pace.
func TestShorterWindow(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{Window: time.Hour}, nil)
		calls(t, b, 9, failed)
		b.SetRules(mustRules(t, breaker.Settings{Window: time.Second}))
		pass(2 * time.Minute)
		equal(t, "failures", b.Status().Failures, 0)
	})
}

func TestStatus(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 6, ok)
		calls(t, b, 3, failed)
		hang(t, b, 3, time.Second)
		pass(3 * time.Second)
		rate, n := b.Rate()
		equal(t, "rate", rate, 0.5)
		equal(t, "of", n, 12)
		began := time.Now()
		calls(t, b, 1, failed)
		b.Keep(2, "token-7")
		pass(8 * time.Second)
		equal(t, "status", b.Status(), breaker.Status{
			Key: upstream, State: breaker.Open, Generation: 2, Since: began,
			ErrorRate: 7.0 / 13, Window: time.Minute, MinVolume: 10, Threshold: 0.5, Calls: 10, Failures: 4, Overdue: 3,
			Cooldown: 30 * time.Second, CooldownRemaining: 22 * time.Second, NextProbe: began.Add(30 * time.Second),
			Reason: breaker.OverdueCalls, Cause: "status 502", Evidence: "error-1", Reference: "token-7", Openings: 1,
		})
		rate, n = b.Rate()
		equal(t, "rate", rate, 0)
		equal(t, "of", n, 0)
	})
}

func TestNamesOfStatesAndModes(t *testing.T) {
	for want, state := range map[string]breaker.State{
		"closed": breaker.Closed, "open": breaker.Open, "half_open": breaker.HalfOpen,
	} {
		equal(t, "name", state.String(), want)
	}
	var s breaker.State
	if err := s.UnmarshalText([]byte("ajar")); err == nil {
		t.Error("a state that does not exist was read")
	}
	if _, err := breaker.Mode(9).MarshalText(); err == nil {
		t.Error("a mode that does not exist was written")
	}
	equal(t, "name", breaker.Mode(9).String(), "unknown(9)")
	equal(t, "name", breaker.InBand.String(), "in_band")
}
