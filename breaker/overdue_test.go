package breaker_test

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

func hang(t testing.TB, b *breaker.Breaker, n int, patience time.Duration) []*breaker.Permit {
	t.Helper()
	var permits []*breaker.Permit
	for range n {
		p, err := b.Acquire(breaker.Op{Patience: patience})
		if err != nil {
			t.Fatal(err)
		}
		permits = append(permits, &p)
	}
	return permits
}

// Calls that hang open the breaker before any of them ends.
func TestOverdueCallsTrip(t *testing.T) {
	for _, s := range []breaker.Settings{{Patience: 5 * time.Second}, {Patience: time.Hour}} {
		bubble(t, func(t *testing.T, pass func(time.Duration)) {
			hook := &recorder{}
			b := newBreaker(t, s, hook)
			patience := time.Duration(0)
			if s.Patience == time.Hour {
				patience = 5 * time.Second // the call's own goes first
			}
			permits := hang(t, b, 10, patience)
			pass(5 * time.Second)
			want(t, b, breaker.Closed)
			pass(2 * time.Second)
			want(t, b, breaker.Open)
			e := hook.last(t)
			equal(t, "reason", e.Reason, breaker.OverdueCalls)
			equal(t, "rate", e.ErrorRate, 1)
			equal(t, "calls", e.Calls, 10)
			equal(t, "failures", e.Failures, 10)
			for _, p := range permits {
				p.Done(failed)
			}
			want(t, b, breaker.Open)
		})
	}
}

// An overdue call is a failure only while it hangs: what counts in the end is how it
// ended.
func TestOverdueIsProvisional(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		permits := hang(t, b, 9, time.Second)
		pass(3 * time.Second)
		equal(t, "overdue", b.Status().Overdue, 9)
		equal(t, "rate", b.Status().ErrorRate, 1)
		for i, p := range permits {
			if i%2 == 0 {
				p.Answered(3 * time.Second)
			}
			p.Done(ok)
		}
		s := b.Status()
		equal(t, "overdue", s.Overdue, 0)
		equal(t, "calls", s.Calls, 9)
		equal(t, "rate", s.ErrorRate, 0)

		// One that fails is not counted twice.
		permits = hang(t, b, 8, time.Second)
		pass(3 * time.Second)
		for _, p := range permits {
			p.Done(failed)
		}
		want(t, b, breaker.Closed)
		s = b.Status()
		equal(t, "overdue", s.Overdue, 0)
		equal(t, "failures", s.Failures, 8)
		equal(t, "calls", s.Calls, 17)
	})
}

// They count for as long as they hang, longer than the window too, and beside others.
func TestOverdueOutlastsTheWindow(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		hang(t, b, 6, 10*time.Second)
		pass(time.Hour)
		equal(t, "overdue", b.Status().Overdue, 6)
		calls(t, b, 3, ok)
		want(t, b, breaker.Closed)
		calls(t, b, 1, ok) // six of ten
		want(t, b, breaker.Open)
	})
}

// Hung calls of before a recovery say nothing about the time after it.
func TestOverdueOfAnOlderGeneration(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		hung := hang(t, b, 10, 5*time.Second)
		pass(7*time.Second + 30*time.Second)
		want(t, b, breaker.HalfOpen)
		calls(t, b, 1, ok)
		want(t, b, breaker.Closed)
		pass(time.Minute)
		equal(t, "overdue", b.Status().Overdue, 0)
		for _, p := range hung {
			p.Done(failed)
		}
		equal(t, "failures", b.Status().Failures, 0)
		want(t, b, breaker.Closed)
	})
}

// Patience is kept to: never less, and at most a quarter and two steps more.
func TestPatienceIsRoundedUp(t *testing.T) {
	for _, patience := range []time.Duration{
		time.Millisecond, 999 * time.Millisecond, time.Second, 8 * time.Second, 8*time.Second + 1, 17 * time.Second,
		time.Minute, 5 * time.Minute, 61 * time.Minute, 30 * time.Hour,
	} {
		bubble(t, func(t *testing.T, pass func(time.Duration)) {
			b := newBreaker(t, breaker.Settings{}, nil)
			pass(700 * time.Millisecond)
			hang(t, b, 1, patience)
			pass(patience - 1)
			equal(t, "overdue before its time", b.Status().Overdue, 0)
			pass(1 + patience/4 + 2*time.Second)
			equal(t, "overdue", b.Status().Overdue, 1)
		})
	}
}

func TestWithoutPatienceNothingIsOverdue(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		hang(t, b, 100, 0)
		pass(24 * time.Hour)
		equal(t, "overdue", b.Status().Overdue, 0)
		want(t, b, breaker.Closed)
	})
}
