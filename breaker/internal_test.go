package breaker

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A breaker with nothing to count has no timer running, so that idle upstreams cost
// nothing and a breaker that nobody holds is freed.
func TestIdleBreakersSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rules, err := NewRules(Settings{})
		if err != nil {
			t.Fatal(err)
		}
		b := New(Key{}, rules, nil)
		awake := func() bool {
			synctest.Wait()
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.period.awake
		}
		check := func(when string, want bool) {
			t.Helper()
			if awake() != want {
				t.Errorf("%s: awake is %v", when, !want)
			}
		}
		check("new", false)
		p, _ := b.Acquire(Op{})
		check("with a call", true)
		time.Sleep(2 * time.Second)
		check("with a call that nothing is waited for", false)
		p.Done(Outcome{Class: Success})
		check("with a count", true)
		time.Sleep(59 * time.Second)
		check("with a count in the window", true)
		time.Sleep(2 * time.Second)
		check("after the window", false)
		p, _ = b.Acquire(Op{Patience: time.Hour})
		time.Sleep(3 * time.Hour)
		check("with a call that is overdue", true)
		p.Done(Outcome{})
		time.Sleep(time.Second)
		check("afterwards", false)
		if b.live.Load() != nil {
			t.Error("calls pass by a breaker that sleeps")
		}
	})
}

// Every time that is kept has a monotonic reading, so that a step of the wall clock
// changes nothing.
func TestTimesAreMonotonic(t *testing.T) {
	rules, err := NewRules(Settings{})
	if err != nil {
		t.Fatal(err)
	}
	b := New(Key{}, rules, nil)
	monotonic := func(what string, at time.Time) {
		t.Helper()
		if !strings.Contains(at.String(), " m=") {
			t.Errorf("%s, %v, is wall time", what, at)
		}
	}
	p, _ := b.Acquire(Op{})
	p.Done(Outcome{Class: RateLimited, RetryAfter: time.Second})
	monotonic("begin of the window", b.period.begun)
	monotonic("Retry-After", b.period.retryAfter)
	for range 10 {
		p, _ := b.Acquire(Op{})
		p.Done(Outcome{Class: Failure})
	}
	monotonic("end of the cooldown", b.outage.until)
	monotonic("since", b.since)
	restored, err := restore(b.Snapshot(), rules, nil)
	if err != nil {
		t.Fatal(err)
	}
	monotonic("end of the restored cooldown", restored.outage.until)
	monotonic("restored since", restored.since)
	b.SetMode(ForcedOpen)
	b.SetMode(Auto)
	if _, err := b.Acquire(Op{}); err != nil {
		t.Fatal(err)
	}
	monotonic("end of the lease", b.probe.ends)
}

// In the moment between a change and its delivery nobody else delivers it: the call that has changed the breaker waits
// for the hook, and the hook may wait for who stores a snapshot.
func TestOthersDeliverNothing(t *testing.T) {
	rules, err := NewRules(Settings{})
	if err != nil {
		t.Fatal(err)
	}
	h := new(counting)
	b := New(Key{}, rules, h)
	begun, err := b.Acquire(Op{})
	if err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	b.forceOpen(time.Now())
	b.reported = false // as unlock does
	b.mu.Unlock()
	s := b.Snapshot()
	b.Status()
	begun.Done(Outcome{Class: Success})
	if _, err := b.Acquire(Op{}); s.State != Open || err == nil || *h != 0 {
		t.Errorf("%v, %v, and %d calls of the hook", s.State, err, *h)
	}
	if b.deliver(); *h != 1 {
		t.Errorf("%d calls of the hook", *h)
	}
}

// counting is a hook that counts transitions.
type counting int

func (c *counting) Transition(Event)      { *c++ }
func (c *counting) PermanentlyOpen(Event) {}
