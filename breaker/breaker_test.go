package breaker_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
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
		b := newBreaker(t, breaker.Settings{}, hook)
		recover := func() {
			pass(hook.last(t).Cooldown)
			calls(t, b, 1, ok)
			want(t, b, breaker.Closed)
		}
		trip(t, b)
		pass(30 * time.Second)
		calls(t, b, 1, failed)
		recover()
		pass(10*time.Minute - time.Second)
		trip(t, b)
		equal(t, "cooldown of a relapse", hook.last(t).Cooldown, time.Minute)
		equal(t, "total", hook.last(t).TotalCooldown, time.Minute)
		recover()
		pass(10 * time.Minute)
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
		{"bound", breaker.Settings{MaxCooldown: jsontime.Duration(10 * time.Minute)}, limited(time.Hour), failed, 10 * time.Minute, time.Minute},
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

func TestSettingsAreChecked(t *testing.T) {
	day := 24 * time.Hour
	for want, s := range map[string]breaker.Settings{
		"window is 1ms; it has to be from 1s to 1h":                                                   {Window: jsontime.Duration(time.Millisecond)},
		"threshold is 1; it has to be above 0 and below 1":                                            {Threshold: 1},
		"min_volume is -1; it has to be positive":                                                     {MinVolume: -1},
		"consecutive is -1; it has to be positive, or 0 for never":                                    {Consecutive: -1},
		"slow: -1ns is negative; it must be positive":                                                 {SlowCall: -1},
		"slow (share) is -0.5; it has to be above 0 and below 1":                                      {SlowThreshold: -0.5},
		"cooldown: -1s is negative; it must be positive":                                              {Cooldown: jsontime.Duration(-time.Second)},
		"cooldown (longest) is 1s; it has to be no shorter than cooldown, at most 24h":                {MaxCooldown: jsontime.Duration(time.Second)},
		"cooldown (longest) is 24h0m0.000000001s; it has to be no shorter than cooldown, at most 24h": {Cooldown: jsontime.Duration(day + 1)},
		"ProbeLease: -1ns is negative; it must be positive":                                           {ProbeLease: -1},
	} {
		_, err := breaker.NewRules(s)
		if err == nil || err.Error() != want {
			t.Errorf("%+v: %v, want %s", s, err, want)
		}
	}
	got := mustRules(t, breaker.Settings{Cooldown: jsontime.Duration(10 * time.Minute)}).Settings()
	equal(t, "settings", got, breaker.Settings{
		Window: jsontime.Duration(time.Minute), Threshold: 0.5, MinVolume: 10, SlowThreshold: 0.5, Cooldown: jsontime.Duration(10 * time.Minute),
		MaxCooldown: jsontime.Duration(10 * time.Minute),
		ProbeLease:  jsontime.Duration(30 * time.Second),
	})
}

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
		b := newBreaker(t, breaker.Settings{Consecutive: 5}, nil)
		trip(t, b)
		b.SetMode(breaker.ForcedClosed)
		want(t, b, breaker.Closed)
		hang(t, b, 10, time.Second)
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

// New thresholds change neither state nor counts (reload).
func TestRulesChangeInPlace(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		calls(t, b, 8, failed)
		b.SetRules(mustRules(t, breaker.Settings{MinVolume: 20, Window: jsontime.Duration(2 * time.Minute)}))
		calls(t, b, 11, failed)
		want(t, b, breaker.Closed)
		equal(t, "failures", b.Status().Failures, 19)
		pass(100 * time.Second)
		equal(t, "failures", b.Status().Failures, 19)
		calls(t, b, 1, failed)
		want(t, b, breaker.Open)

		b.SetRules(mustRules(t, breaker.Settings{Cooldown: jsontime.Duration(time.Second)}))
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
		b := newBreaker(t, breaker.Settings{Window: jsontime.Duration(time.Hour)}, nil)
		calls(t, b, 9, failed)
		b.SetRules(mustRules(t, breaker.Settings{Window: jsontime.Duration(time.Second)}))
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
		s := b.Status()
		equal(t, "rate", s.ErrorRate, 0.5)
		equal(t, "of", s.Calls+s.Overdue, 12)
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

// cascade 3.2.4: each change of state is told once, with what its token needs.
func TestHookHearsEveryTransition(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		calls(t, b, 2, ok)
		calls(t, b, 7, failed)
		began := time.Now()
		calls(t, b, 1, breaker.Outcome{Class: breaker.Failure, Cause: "reset", Evidence: "error-2"})
		b.Keep(2, "open-1")
		pass(30 * time.Second)
		calls(t, b, 1, breaker.Outcome{Class: breaker.RateLimited, Evidence: "error-3"})
		b.Keep(4, "open-2")
		pass(time.Minute)
		calls(t, b, 1, ok)

		first := breaker.Event{
			Key: upstream, From: breaker.Closed, To: breaker.Open, Generation: 2, Time: began,
			Reason: breaker.ErrorRate, Cause: "reset", Evidence: "error-2",
			ErrorRate: 0.8, Calls: 10, Failures: 8, Window: time.Minute,
			Cooldown: 30 * time.Second, TotalCooldown: 30 * time.Second,
		}
		half := first
		half.From, half.To, half.Generation, half.Time = breaker.Open, breaker.HalfOpen, 3, began.Add(30*time.Second)
		half.Reason, half.Reference = breaker.CooldownOver, "open-1"
		again := half
		again.From, again.To, again.Generation, again.Reason = breaker.HalfOpen, breaker.Open, 4, breaker.ProbeFailed
		again.Cause, again.Evidence = "", "error-3"
		again.Cooldown, again.TotalCooldown, again.FailedProbes = time.Minute, 90*time.Second, 1
		half2 := again
		half2.From, half2.To, half2.Generation, half2.Reason = breaker.Open, breaker.HalfOpen, 5, breaker.CooldownOver
		half2.Time, half2.Reference = began.Add(90*time.Second), "open-2"
		closed := half2
		closed.From, closed.To, closed.Generation, closed.Reason = breaker.HalfOpen, breaker.Closed, 6, breaker.ProbePassed

		for i, w := range []breaker.Event{first, half, again, half2, closed} {
			if i < len(hook.heard) {
				equal(t, fmt.Sprint("event ", i), hook.heard[i], w)
			}
		}
		equal(t, "events", len(hook.heard), 5)
	})
}

// A reference belongs to its outage.
func TestKeepOfAnotherOutage(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		b.Keep(1, "closed")
		trip(t, b)
		b.Keep(1, "before")
		b.Keep(3, "ahead")
		equal(t, "reference", refused(t, b, breaker.Op{}).Reference, "")
		b.Keep(2, "open-1")
		equal(t, "reference", refused(t, b, breaker.Op{}).Reference, "open-1")
		pass(30 * time.Second)
		calls(t, b, 1, ok)
		b.Keep(2, "late")
		trip(t, b)
		b.Keep(2, "later")
		equal(t, "reference", b.Status().Reference, "")
	})
}

// meddler does in the hook what would deadlock under a lock.
type meddler struct {
	b     *breaker.Breaker
	heard []string
}

func (m *meddler) Transition(e breaker.Event) {
	m.heard = append(m.heard, fmt.Sprint(e.From, "-", e.To))
	m.b.Status()
	m.b.Snapshot()
	m.b.Keep(e.Generation, "token")
	if p, err := m.b.Acquire(breaker.Op{Safe: true}); err == nil {
		p.Done(ok)
	}
	if len(m.heard) == 1 {
		m.b.SetMode(breaker.ForcedOpen)
		m.b.SetMode(breaker.Auto)
	}
	m.heard = append(m.heard, "end")
}

func (*meddler) PermanentlyOpen(breaker.Event) {}

// The hook may use the breaker; what it causes it hears afterwards.
func TestHookMayUseTheBreaker(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		m := &meddler{}
		m.b = newBreaker(t, breaker.Settings{}, m)
		calls(t, m.b, 10, failed)
		got := strings.Join(m.heard, " ")
		// The call in the second event is the probe, and closes the breaker.
		equal(t, "heard", got, "closed-open end open-half_open end half_open-closed end")
	})
}

type bomb struct{ recorder }

func (b *bomb) Transition(e breaker.Event) {
	b.recorder.Transition(e)
	if len(b.heard) == 1 {
		panic("hook")
	}
}

// A hook that panics hurts the call that it was called by, and not the breaker.
func TestHookPanics(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &bomb{}
		b := newBreaker(t, breaker.Settings{}, hook)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			calls(t, b, 10, failed)
		}()
		want(t, b, breaker.Open)
		pass(30 * time.Second)
		calls(t, b, 1, ok)
		want(t, b, breaker.Closed)
		equal(t, "transitions", len(hook.heard), 3)
	})
}

// Whatever happens at once, the hook hears one transition at a time and in order.
func TestHookHearsInOrder(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{MinVolume: 1, Cooldown: jsontime.Duration(time.Millisecond), MaxCooldown: jsontime.Duration(time.Millisecond)}, hook)
		for range 200 {
			var group sync.WaitGroup
			for i := range 8 {
				group.Go(func() {
					p, err := b.Acquire(breaker.Op{Safe: true})
					if err != nil {
						return
					}
					if i%2 == 0 {
						p.Done(ok)
					} else {
						p.Done(failed)
					}
				})
			}
			group.Wait()
			pass(time.Minute)
		}
		if len(hook.heard) < 100 {
			t.Fatalf("only %d transitions", len(hook.heard))
		}
		for i, e := range hook.heard {
			equal(t, "generation", e.Generation, uint64(i+2))
			if i > 0 {
				equal(t, "from", e.From, hook.heard[i-1].To)
			}
		}
	})
}

// The cost of one guarded call that does nothing: Acquire and Done. The comparison
// with other breakers is in the module bench.

func benchmark(b *testing.B, br *breaker.Breaker, op breaker.Op, o breaker.Outcome) {
	call := func() {
		permit, err := br.Acquire(op)
		if err != nil {
			return
		}
		permit.Done(o)
	}
	b.Run("serial", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			call()
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				call()
			}
		})
	})
}

func BenchmarkClosed(b *testing.B) {
	benchmark(b, newBreaker(b, breaker.Settings{}, nil), breaker.Op{}, breaker.Outcome{Class: breaker.Success})
}

func BenchmarkClosedWithPatience(b *testing.B) {
	benchmark(b, newBreaker(b, breaker.Settings{}, nil), breaker.Op{Patience: 100 * time.Second},
		breaker.Outcome{Class: breaker.Success})
}

func BenchmarkClosedWithAView(b *testing.B) {
	br := newBreaker(b, breaker.Settings{}, nil)
	calls(b, br, 10, ok)
	calls(b, br, 1, failed) // else there is nothing to look at
	benchmark(b, br, breaker.Op{View: mustView(b, 0.2, 0)}, breaker.Outcome{Class: breaker.Success})
}

func BenchmarkFailing(b *testing.B) {
	br := newBreaker(b, breaker.Settings{}, nil)
	br.SetMode(breaker.ForcedClosed)
	benchmark(b, br, breaker.Op{}, breaker.Outcome{Class: breaker.Failure, Cause: "status 502", Evidence: "token"})
}

func BenchmarkOpen(b *testing.B) {
	br := newBreaker(b, breaker.Settings{}, nil)
	br.SetMode(breaker.ForcedOpen)
	benchmark(b, br, breaker.Op{}, breaker.Outcome{})
}

func BenchmarkRegistry(b *testing.B) {
	rules := mustRules(b, breaker.Settings{})
	registry := breaker.NewRegistry(0, nil)
	key := breaker.Key{Upstream: "localhost:9001", Class: "write"}
	b.ReportAllocs()
	for b.Loop() {
		permit, err := registry.Get(key, rules).Acquire(breaker.Op{})
		if err != nil {
			b.Fatal(err)
		}
		permit.Done(breaker.Outcome{Class: breaker.Success})
	}
}

// BenchmarkClock is one clock read, for comparison.
func BenchmarkClock(b *testing.B) {
	var t time.Time
	for b.Loop() {
		t = time.Now()
	}
	_ = t
}

// Trip is a trip like any other: calls are refused for a cooldown, and a probe closes the breaker again. An
// operator's word is stronger.
func TestTrip(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		calls(t, b, 3, ok)
		if !b.Trip(breaker.ByCascade) {
			t.Fatal("it was not opened")
		}
		if b.Trip(breaker.ByCascade) {
			t.Error("it was opened twice")
		}
		ev := hook.last(t)
		equal(t, "reason", ev.Reason, breaker.ByCascade)
		equal(t, "calls", ev.Calls, 3)
		refused(t, b, breaker.Op{Safe: true})
		pass(30 * time.Second)
		acquire(t, b).Done(ok)
		want(t, b, breaker.Closed)

		b.SetMode(breaker.ForcedClosed)
		if b.Trip(breaker.ByCascade) {
			t.Error("it was opened against the operator's word")
		}
		acquire(t, b).Done(ok)
	})
}
