package breaker_test

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// Nothing is lost or counted twice, however many calls end at once.
func TestCountsAreExactAtOnce(t *testing.T) {
	crowd(t, func(t *testing.T, pass, sleep func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{SlowCall: time.Second, Patience: time.Minute}, nil)
		b.SetMode(breaker.ForcedClosed)
		const callers, each = 16, 1000
		var group sync.WaitGroup
		for range callers {
			group.Go(func() {
				for i := range each {
					p := acquire(t, b)
					if i%5 == 0 {
						p.Answered(2 * time.Second)
					}
					switch i % 4 {
					case 0, 1:
						p.Done(ok)
					case 2:
						p.Done(failed)
					case 3:
						p.Done(breaker.Outcome{Class: breaker.RateLimited})
					}
					if i%100 == 0 {
						sleep(time.Millisecond)
					}
				}
			})
		}
		group.Wait()
		s := b.Status()
		equal(t, "calls", s.Calls, callers*each*3/4)
		equal(t, "failures", s.Failures, callers*each/4)
		equal(t, "rate-limited", s.RateLimited, callers*each/4)
		equal(t, "slow", s.Slow, callers*each/5*3/4)
		equal(t, "overdue", s.Overdue, 0)
		pass(61 * time.Second)
		s = b.Status()
		equal(t, "calls later", s.Calls, 0)
		equal(t, "slow later", s.Slow, 0)
		equal(t, "rate-limited later", s.RateLimited, 0)
	})
}

// Calls that become overdue, are answered and end at the same instants leave nothing
// behind.
func TestOverdueIsExactAtOnce(t *testing.T) {
	crowd(t, func(t *testing.T, pass, sleep func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		b.SetMode(breaker.ForcedClosed)
		var group sync.WaitGroup
		for i := range 200 {
			group.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 0))
				for range 20 {
					p, err := b.Acquire(breaker.Op{Patience: time.Duration(rnd.IntN(10)) * time.Second})
					if err != nil {
						t.Error(err)
						return
					}
					sleep(time.Duration(rnd.IntN(10)) * time.Second)
					if rnd.IntN(2) == 0 {
						p.Answered(time.Second)
						sleep(time.Duration(rnd.IntN(10)) * time.Second)
					}
					p.Done(ok)
				}
			})
		}
		group.Wait()
		equal(t, "overdue", b.Status().Overdue, 0)
		equal(t, "rate", b.Status().ErrorRate, 0)
		pass(2 * time.Minute)
		calls(t, b, 1, ok)
		equal(t, "overdue", b.Status().Overdue, 0)
		equal(t, "calls", b.Status().Calls, 1)
	})
}

// Everything at once: the race detector looks on, and it all comes to an end.
func TestEverythingAtOnce(t *testing.T) {
	crowd(t, func(t *testing.T, _, sleep func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{Patience: time.Second, ProbeWait: -1}, hook)
		other := mustRules(t, breaker.Settings{MinVolume: 5, Window: 10 * time.Second})
		var group sync.WaitGroup
		for i := range 32 {
			group.Go(func() {
				rnd := rand.New(rand.NewPCG(uint64(i), 1))
				for range 200 {
					p, err := b.Acquire(breaker.Op{Safe: rnd.IntN(2) == 0, Patience: time.Duration(rnd.IntN(3)) * time.Second})
					sleep(time.Duration(rnd.IntN(3000)) * time.Millisecond)
					if err == nil && rnd.IntN(3) > 0 {
						p.Answered(time.Second)
					}
					p.Done(breaker.Outcome{Class: breaker.Class(rnd.IntN(5)), RetryAfter: time.Duration(rnd.IntN(2)) * time.Second})
					switch rnd.IntN(200) {
					case 0:
						b.SetMode(breaker.Mode(rnd.IntN(4)))
					case 1:
						b.SetRules(other)
					case 2:
						b.Status()
					case 3:
						b.Snapshot()
					case 4:
						b.Keep(b.Status().Generation, "token")
					}
				}
			})
		}
		group.Wait()
		b.SetMode(breaker.ForcedClosed)
		b.SetMode(breaker.Auto)
		calls(t, b, 1, ok)
		for i, e := range hook.heard {
			equal(t, "generation", e.Generation, uint64(i+2))
		}
	})
}

func TestNothingIsAllocated(t *testing.T) {
	for name, s := range map[string]breaker.Settings{"plain": {}, "patience": {Patience: time.Minute}} {
		b := newBreaker(t, s, nil)
		b.SetMode(breaker.ForcedClosed)
		equal(t, "allocations of a call, "+name, testing.AllocsPerRun(1000, func() {
			p, _ := b.Acquire(breaker.Op{})
			p.Answered(time.Millisecond)
			p.Done(ok)
			p, _ = b.Acquire(breaker.Op{Patience: time.Hour})
			p.Done(failed)
		}), 0)
		b.SetMode(breaker.ForcedOpen)
		equal(t, "allocations of a refusal", testing.AllocsPerRun(1000, func() {
			p, _ := b.Acquire(breaker.Op{})
			p.Done(ok)
		}), 0)
	}
}
