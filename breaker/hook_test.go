package breaker_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

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
		b := newBreaker(t, breaker.Settings{MinVolume: 1, Healthy: time.Nanosecond, Cooldown: time.Millisecond}, hook)
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
