package breaker_test

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// cascade 3.2.1: over 50 %, not from 50 % on.
func TestThresholdIsStrict(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 10, ok)
		calls(t, b, 10, failed)
		want(t, b, breaker.Closed)
		calls(t, b, 1, failed)
		want(t, b, breaker.Open)
	})
}

// A threshold of 30 % means 30 %, not what 0.3 is in binary.
func TestThresholdIsExact(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		for _, percent := range []int{10, 30, 70, 90} {
			b := newBreaker(t, breaker.Settings{Threshold: float64(percent) / 100, MinVolume: 1000}, nil)
			calls(t, b, 1000-10*percent, ok)
			calls(t, b, 10*percent, failed)
			want(t, b, breaker.Closed)
			calls(t, b, 1, failed)
			want(t, b, breaker.Open)
		}
	})
}

func TestMinVolume(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 9, failed)
		want(t, b, breaker.Closed)
		calls(t, b, 1, failed)
		want(t, b, breaker.Open)
	})
}

// Nine failures and one success are 90 % of ten.
func TestJudgedOnSuccessToo(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		calls(t, b, 9, failed)
		calls(t, b, 1, ok)
		want(t, b, breaker.Open)
		e := hook.last(t)
		equal(t, "error rate", e.ErrorRate, 0.9)
		equal(t, "evidence", e.Evidence, "error-1")
		equal(t, "reason", e.Reason, breaker.ErrorRate)
	})
}

// Calls longer than the window count when they end, whether or not the breaker had
// anything else to count meanwhile.
func TestCallsLongerThanTheWindow(t *testing.T) {
	for _, busy := range []bool{false, true} {
		bubble(t, func(t *testing.T, pass func(time.Duration)) {
			b := newBreaker(t, breaker.Settings{}, nil)
			var permits []*breaker.Permit
			for range 12 {
				permits = append(permits, acquire(t, b))
			}
			for range 7 {
				pass(10 * time.Second)
				if busy {
					calls(t, b, 1, ok)
				}
			}
			for _, p := range permits {
				p.Done(failed)
			}
			want(t, b, breaker.Open)
		})
	}
}

func TestLongCallsEndOverTime(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		var permits []*breaker.Permit
		for range 10 {
			permits = append(permits, acquire(t, b))
		}
		pass(10 * time.Minute)
		for i, p := range permits {
			want(t, b, breaker.Closed)
			equal(t, "calls", b.Status().Calls, i)
			p.Done(failed)
			pass(5 * time.Second)
		}
		want(t, b, breaker.Open)
	})
}

// A burst over a step of the window, or over the whole ring's end, is one burst.
func TestBurstOverAnEdge(t *testing.T) {
	for _, at := range []time.Duration{time.Second, 30 * time.Second, 60 * time.Second, 61 * time.Second} {
		bubble(t, func(t *testing.T, pass func(time.Duration)) {
			b := newBreaker(t, breaker.Settings{MinVolume: 20}, nil)
			pass(at - 5*time.Millisecond)
			calls(t, b, 15, failed)
			pass(10 * time.Millisecond)
			calls(t, b, 4, failed)
			want(t, b, breaker.Closed)
			calls(t, b, 1, failed)
			want(t, b, breaker.Open)
		})
	}
}

func TestWindowForgets(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		pass(500 * time.Millisecond)
		calls(t, b, 9, failed)
		pass(30 * time.Second)
		calls(t, b, 2, breaker.Outcome{Class: breaker.RateLimited})
		pass(28 * time.Second) // 58 s
		equal(t, "failures", b.Status().Failures, 9)
		pass(2 * time.Second) // over 60 s
		s := b.Status()
		equal(t, "failures", s.Failures, 0)
		equal(t, "calls", s.Calls, 0)
		equal(t, "rate-limited", s.RateLimited, 2)
		equal(t, "rate", s.ErrorRate, 0)
		calls(t, b, 9, failed)
		want(t, b, breaker.Closed)
		pass(time.Hour)
		s = b.Status()
		equal(t, "failures", s.Failures, 0)
		equal(t, "rate-limited", s.RateLimited, 0)
	})
}

func TestIdleGapThenOneFailure(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 9, failed)
		pass(24 * time.Hour)
		calls(t, b, 1, failed)
		want(t, b, breaker.Closed)
		equal(t, "calls", b.Status().Calls, 1)
	})
}

// A hundred open streams do not shift the point at which the breaker opens (ADR 0022).
func TestStreamsAreNotInTheRatio(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{Patience: time.Second}, nil)
		var streams []*breaker.Permit
		for range 100 {
			p := acquire(t, b)
			p.Answered(time.Millisecond)
			streams = append(streams, p)
		}
		pass(time.Hour)
		equal(t, "overdue", b.Status().Overdue, 0)
		calls(t, b, 9, failed)
		want(t, b, breaker.Closed)
		calls(t, b, 1, failed)
		want(t, b, breaker.Open)
		for _, p := range streams {
			p.Done(ok) // of an older generation
		}
		want(t, b, breaker.Open)
	})
}

// A stream that breaks counts when it breaks.
func TestBrokenStreamsCount(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		for range 10 {
			p := acquire(t, b)
			p.Answered(time.Millisecond)
			pass(time.Second)
			p.Done(breaker.Outcome{Class: breaker.InBand, Cause: "truncated"})
		}
		want(t, b, breaker.Open)
		equal(t, "cause", b.Status().Cause, "truncated")
	})
}

func TestNeutralCountsForNothing(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{Consecutive: 3}, nil)
		calls(t, b, 2, failed)
		calls(t, b, 100, neutral)
		want(t, b, breaker.Closed)
		equal(t, "calls", b.Status().Calls, 2)
		calls(t, b, 1, failed)
		want(t, b, breaker.Open)
	})
}

func TestRateLimitedIsInNoRate(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 100, breaker.Outcome{Class: breaker.RateLimited, RetryAfter: time.Minute})
		want(t, b, breaker.Closed)
		s := b.Status()
		equal(t, "calls", s.Calls, 0)
		equal(t, "rate-limited", s.RateLimited, 100)
		trip(t, b)
	})
}

func TestConsecutiveFailures(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{Consecutive: 3}, hook)
		calls(t, b, 100, ok)
		calls(t, b, 2, failed)
		calls(t, b, 1, ok)
		calls(t, b, 2, failed)
		want(t, b, breaker.Closed)
		calls(t, b, 1, failed)
		want(t, b, breaker.Open)
		equal(t, "reason", hook.last(t).Reason, breaker.Consecutive)
		equal(t, "failures", hook.last(t).Failures, 5)
	})
}

func TestSlowCalls(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{SlowCall: time.Second, SlowThreshold: 0.3}, hook)
		call := func(latency time.Duration) {
			p := acquire(t, b)
			p.Answered(latency)
			p.Done(ok)
		}
		for range 6 {
			call(time.Second) // not above
		}
		acquire(t, b).Done(breaker.Outcome{Class: breaker.Failure, Cause: "status 500", Evidence: "error-1"})
		for range 3 {
			call(2 * time.Second)
		}
		want(t, b, breaker.Closed)
		equal(t, "slow", b.Status().Slow, 3)
		call(2 * time.Second)
		want(t, b, breaker.Open)
		equal(t, "reason", hook.last(t).Reason, breaker.SlowCalls)
		equal(t, "evidence", hook.last(t).Evidence, "") // failures have nothing to do with it

		// A probe that is slow proves nothing.
		pass(30 * time.Second)
		p := acquire(t, b)
		p.Answered(2 * time.Second)
		p.Done(ok)
		want(t, b, breaker.Open)
		equal(t, "cooldown", hook.last(t).Cooldown, time.Minute)
	})
}

func TestSlowCallsAreForgotten(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{SlowCall: time.Second}, nil)
		for range 9 {
			p := acquire(t, b)
			p.Answered(time.Minute)
			p.Done(ok)
		}
		pass(61 * time.Second)
		equal(t, "slow", b.Status().Slow, 0)
		calls(t, b, 20, ok)
		want(t, b, breaker.Closed)
	})
}
