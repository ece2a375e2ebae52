package breaker_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
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
		b := newBreaker(t, breaker.Settings{}, nil)
		streams := hang(t, b, 100, time.Second)
		for _, p := range streams {
			p.Answered(time.Millisecond)
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
		b := newBreaker(t, breaker.Settings{SlowCall: jsontime.Duration(time.Second), SlowThreshold: 0.3}, hook)
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
		b := newBreaker(t, breaker.Settings{SlowCall: jsontime.Duration(time.Second)}, nil)
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
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		permits := hang(t, b, 10, 5*time.Second)
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

func mustView(t testing.TB, threshold float64, window time.Duration) *breaker.View {
	t.Helper()
	v, err := breaker.NewView(threshold, window)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// admitted asks for a call with a view that has to be let through.
func admitted(t testing.TB, b *breaker.Breaker, v *breaker.View) {
	t.Helper()
	if refusal := b.RefusalOf(breaker.Op{View: v}); refusal != nil {
		t.Errorf("a call would be refused: %v", refusal)
	}
	permit, err := b.Acquire(breaker.Op{View: v})
	if err != nil {
		t.Errorf("refused: %v", err)
	}
	permit.Done(neutral)
}

// third fails three calls of ten.
func third(t testing.TB, b *breaker.Breaker, times int) {
	t.Helper()
	for range times {
		calls(t, b, 7, ok)
		calls(t, b, 3, failed)
	}
}

// ATD "Circuit Breaker Policy Configuration": a workflow with a lower threshold is
// refused, others are not, and it is back when the window has moved on.
func TestViewIsStricter(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		view := mustView(t, 0.2, 0)
		admitted(t, b, view)
		third(t, b, 2)
		admitted(t, b, nil)
		admitted(t, b, mustView(t, 0.3, 0)) // equal is not above: cascade 3.2.1
		r := refused(t, b, breaker.Op{Safe: true, View: view})
		equal(t, "state", r.State, breaker.Closed)
		equal(t, "reason", r.Reason, breaker.StricterView)
		equal(t, "generation", r.Generation, 1)
		equal(t, "cause", r.Cause, "status 502")
		equal(t, "evidence", r.Evidence, "error-1")
		equal(t, "threshold", r.View.Threshold(), 0.2)
		equal(t, "window", r.View.Window(), time.Minute)
		equal(t, "wait", r.RetryAfter(), time.Minute)
		equal(t, "text", r.Error(), "breaker: localhost:9001 is closed, and fails more than 0.2 of the calls in 1m0s: status 502")
		if b.RefusalOf(breaker.Op{View: view}) == nil {
			t.Error("RefusalOf knows of no refusal")
		}
		s := b.Status()
		equal(t, "rejected", s.Rejected, 1)
		equal(t, "state", s.State, breaker.Closed)
		equal(t, "calls", s.Calls, 20)

		pass(59 * time.Second)
		refused(t, b, breaker.Op{View: view})
		pass(time.Second)
		admitted(t, b, view)
	})
}

// Calls that succeed let a workflow back before the window has moved on.
func TestViewSeesRecovery(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		view := mustView(t, 0.2, 0)
		third(t, b, 2)
		refused(t, b, breaker.Op{View: view})
		calls(t, b, 10, ok)
		admitted(t, b, view)
	})
}

// A shorter window sees what is diluted in the breaker's own, and forgets it sooner, but
// never before its time.
func TestViewOverAShorterWindow(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		short, long := mustView(t, 0.2, 10*time.Second), mustView(t, 0.2, 0)
		calls(t, b, 40, ok)
		pass(20 * time.Second)
		third(t, b, 2)
		admitted(t, b, long)
		r := refused(t, b, breaker.Op{View: short})
		equal(t, "window", r.View.Window(), 10*time.Second)
		equal(t, "wait", r.RetryAfter(), 11*time.Second)
		refused(t, b, breaker.Op{View: short.And(long)})
		pass(10 * time.Second)
		refused(t, b, breaker.Op{View: short})
		pass(time.Second)
		admitted(t, b, short)
		// 40 calls of 20 s before are forgotten, and what is left fails too often.
		pass(30 * time.Second)
		admitted(t, b, short)
		refused(t, b, breaker.Op{View: long})
		refused(t, b, breaker.Op{View: short.And(long)})
	})
}

// The minimum volume holds, and calls that hang are failures.
func TestViewCountsAsTheBreakerDoes(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		view := mustView(t, 0.2, 0)
		calls(t, b, 7, ok)
		var hanging []*breaker.Permit
		for range 2 {
			p, err := b.Acquire(breaker.Op{Patience: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			hanging = append(hanging, &p)
		}
		calls(t, b, 2, failed)
		admitted(t, b, mustView(t, 0.2, 0)) // two of nine
		pass(3 * time.Second)
		r := refused(t, b, breaker.Op{View: view}) // four of eleven
		equal(t, "wait", r.RetryAfter(), 57*time.Second)
		for _, p := range hanging {
			p.Done(ok)
		}
		admitted(t, b, view) // two of eleven
	})
}

// What a view asks for is bounded by the breaker's settings: it never lets more through,
// and refuses no sooner than they allow.
func TestViewIsBounded(t *testing.T) {
	for name, test := range map[string]struct {
		set     breaker.Settings
		view    *breaker.View
		refuses float64 // the threshold; 0 for none
	}{
		"its own":              {breaker.Settings{}, mustView(t, 0.2, 0), 0.2},
		"over a longer window": {breaker.Settings{}, mustView(t, 0.2, time.Hour), 0.2},
		"laxer":                {breaker.Settings{Threshold: 0.2, MinVolume: 50}, mustView(t, 0.9, time.Hour), 0},
		"as strict":            {breaker.Settings{Threshold: 0.2, MinVolume: 50}, mustView(t, 0.2, time.Minute), 0},
		"nothing":              {breaker.Settings{Threshold: 0.2, MinVolume: 50}, mustView(t, 0, 0), 0},
		"below the floor":      {breaker.Settings{}, mustView(t, 0.001, 0), 0.1},
		"the lower of two":     {breaker.Settings{}, mustView(t, 0.9, 0).And(mustView(t, 0.25, 0)), 0.25},
		"with none":            {breaker.Settings{}, (*breaker.View)(nil).And(mustView(t, 0.25, 0)).And(nil), 0.25},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, _ func(time.Duration)) {
				b := newBreaker(t, test.set, nil)
				third(t, b, 4)
				if test.refuses == 0 {
					admitted(t, b, test.view)
					return
				}
				equal(t, "threshold", refused(t, b, breaker.Op{View: test.view}).View.Threshold(), test.refuses)
			})
		})
	}
}

// A view as strict as the breaker is none: what the breaker was not opened by, because
// good calls were in the window then, refuses nobody when these are forgotten.
func TestViewAsStrictAsTheBreaker(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 20, ok)
		pass(30 * time.Second)
		calls(t, b, 15, failed)
		pass(31 * time.Second)
		equal(t, "rate", b.Status().ErrorRate, 1)
		admitted(t, b, mustView(t, 0.5, time.Minute))
		admitted(t, b, mustView(t, 0.6, 59*time.Second)) // a window of the same steps
		refused(t, b, breaker.Op{View: mustView(t, 0.5, 40*time.Second)})
	})
}

// Modes that refuse nobody do not refuse for a view, and the breaker's own refusal goes
// before that of a view.
func TestViewInModesAndStates(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		view := mustView(t, 0.2, 0)
		third(t, b, 2)
		for _, mode := range []breaker.Mode{breaker.ForcedClosed, breaker.Observe} {
			b.SetMode(mode)
			admitted(t, b, view)
		}
		equal(t, "would have been rejected", b.Status().Rejected, 1) // in observe
		b.SetMode(breaker.Auto)
		refused(t, b, breaker.Op{View: view})

		trip(t, b)
		r := refused(t, b, breaker.Op{View: view})
		equal(t, "state", r.State, breaker.Open)
		if r.View != nil {
			t.Errorf("the view refuses in the breaker's place: %v", r)
		}
		pass(35 * time.Second)
		permit, err := b.Acquire(breaker.Op{View: view}) // the probe
		if err != nil || !permit.Probe() {
			t.Fatalf("no probe: %v", err)
		}
		equal(t, "state", refused(t, b, breaker.Op{View: view}).State, breaker.HalfOpen)
		permit.Done(ok)
		want(t, b, breaker.Closed)
		admitted(t, b, view) // its window is clear
	})
}

// The advice when to come again is right: if nothing is counted until then the call is
// let through, and no sooner.
func TestViewRetryAfter(t *testing.T) {
	waits := 0
	for seed := range uint64(50) {
		bubble(t, func(t *testing.T, pass func(time.Duration)) {
			rnd := rand.New(rand.NewPCG(seed, 2))
			b := newBreaker(t, breaker.Settings{Threshold: 0.99, MinVolume: 5}, nil)
			calls(t, b, 1, ok) // so that not all have failed
			bad := 0.5
			for n := range 120 {
				if n%20 == 0 {
					bad = pick(rnd, 0.05, 0.2, 0.6)
				}
				if rnd.Float64() < bad {
					calls(t, b, 1, failed)
				} else {
					calls(t, b, 1, ok)
				}
				pass(time.Duration(rnd.IntN(3)) * time.Second / 2)
			}
			if b.Status().State != breaker.Closed {
				t.Fatal("the breaker has opened")
			}
			view := mustView(t, 0.3, time.Duration(1+rnd.IntN(70))*time.Second).And(mustView(t, 0.4, time.Duration(1+rnd.IntN(70))*time.Second))
			r := b.RefusalOf(breaker.Op{View: view})
			if r == nil {
				return
			}
			waits++
			if wait := r.RetryAfter(); wait > time.Minute {
				t.Errorf("seed %d: it is to wait for %v, longer than the window", seed, wait)
			}
			for r.RetryAfter() > time.Second {
				pass(time.Second)
				refused(t, b, breaker.Op{View: view})
			}
			pass(r.RetryAfter())
			admitted(t, b, view)
		})
	}
	if waits < 20 {
		t.Errorf("%d waits were looked at", waits)
	}
}

// Two views are together what each is, in either order.
func TestViewAnd(t *testing.T) {
	a, b := mustView(t, 0.2, 30*time.Second), mustView(t, 0.4, 10*time.Second)
	for _, both := range []*breaker.View{a.And(b), b.And(a), a.And(b).And(a)} {
		equal(t, "threshold", both.Threshold(), 0.2)
		equal(t, "window", both.Window(), 30*time.Second)
		equal(t, "both", *both, *a.And(b))
	}
	equal(t, "a with itself", a.And(mustView(t, 0.2, 30*time.Second)), a)
	if both := a.And(b); both.And(a) != both || both.And(b) != both {
		t.Error("what one holds already makes another one")
	}
}

// A view that cannot be meant is refused by name.
func TestViewErrors(t *testing.T) {
	for want, v := range map[string]struct {
		threshold float64
		window    time.Duration
	}{
		"Threshold is -0.1; it has to be above 0 and below 1": {-0.1, 0},
		"Threshold is 1;":                          {1, time.Minute},
		"Window is 999ms; it has to be 1s or more": {0.5, 999 * time.Millisecond},
		"Window is -1s":                            {0, -time.Second},
	} {
		if _, err := breaker.NewView(v.threshold, v.window); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", v, err, want)
		}
	}
}

// Looking costs a call that is let through no memory, and is safe beside all else.
func TestViewAtOnce(t *testing.T) {
	crowd(t, func(t *testing.T, pass, sleep func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{Threshold: 0.9}, nil)
		view := mustView(t, 0.2, 20*time.Second)
		done := make(chan int)
		for i := range 8 {
			go func() {
				n := 0
				for range 500 {
					permit, err := b.Acquire(breaker.Op{View: view})
					switch {
					case err != nil:
						n++
						sleep(time.Second)
					case i == 0:
						permit.Done(failed)
					default:
						permit.Done(ok)
					}
					sleep(10 * time.Millisecond)
				}
				done <- n
			}()
		}
		var refused int
		for range 8 {
			refused += <-done
		}
		equal(t, "rejected", b.Status().Rejected, uint64(refused))
		pass(2 * time.Minute)
		calls(t, b, 20, ok)
		calls(t, b, 3, failed)
		equal(t, "allocations", testing.AllocsPerRun(1000, func() {
			permit, err := b.Acquire(breaker.Op{View: view})
			if err != nil {
				t.Error(err)
			}
			permit.Done(neutral)
		}), 0)
	})
}

func ExampleView() {
	rules, err := breaker.NewRules(breaker.Settings{})
	if err != nil {
		fmt.Println(err)
		return
	}
	careful, err := breaker.NewView(0.2, 30*time.Second)
	if err != nil {
		fmt.Println(err)
		return
	}
	b := breaker.New(breaker.Key{Upstream: "localhost:9001"}, rules, nil)
	for i := range 10 {
		permit, _ := b.Acquire(breaker.Op{})
		outcome := breaker.Outcome{Class: breaker.Success}
		if i%3 == 0 {
			outcome = breaker.Outcome{Class: breaker.Failure}
		}
		permit.Done(outcome)
	}
	_, err = b.Acquire(breaker.Op{View: careful})
	fmt.Println(err)
	_, err = b.Acquire(breaker.Op{})
	fmt.Println(err)
	// Output:
	// breaker: localhost:9001 is closed, and fails more than 0.2 of the calls in 30s
	// <nil>
}
