package breaker_test

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// halfOpen opens a new breaker and waits for the cooldown.
func halfOpen(t *testing.T, s breaker.Settings, hook breaker.Hook, pass func(time.Duration)) *breaker.Breaker {
	t.Helper()
	b := newBreaker(t, s, hook)
	trip(t, b)
	pass(30 * time.Second)
	want(t, b, breaker.HalfOpen)
	return b
}

// cascade 3.2.2: exactly one probe, even with 200 calls waiting.
func TestOneProbe(t *testing.T) {
	crowd(t, func(t *testing.T, pass, sleep func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		for round := range 3 {
			var reached, turned atomic.Int32
			var group sync.WaitGroup
			for range 200 {
				group.Go(func() {
					p, err := b.Acquire(breaker.Op{Safe: true})
					if err != nil {
						turned.Add(1)
						return
					}
					reached.Add(1)
					sleep(10 * time.Second)
					p.Done(neutral)
				})
			}
			pass(time.Second)
			equal(t, fmt.Sprint("reached in round ", round), reached.Load(), 1)
			equal(t, "turned away", turned.Load(), 199)
			equal(t, "probing", b.Status().Probing, true)
			group.Wait()
		}
	})
}

// A probe that hangs loses its lease; recovery goes on by itself.
func TestProbeHangs(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := halfOpen(t, breaker.Settings{}, hook, pass)
		hung := acquire(t, b)
		equal(t, "probe", hung.Probe(), true)
		pass(29 * time.Second)
		want(t, b, breaker.HalfOpen)
		pass(time.Second)
		want(t, b, breaker.Open)
		equal(t, "reason", hook.last(t).Reason, breaker.ProbeTimedOut)
		equal(t, "cooldown", hook.last(t).Cooldown, time.Minute)

		pass(time.Minute)
		want(t, b, breaker.HalfOpen)
		second := acquire(t, b)
		hung.Answered(time.Millisecond)
		hung.Done(ok) // too late: the lease is another's
		want(t, b, breaker.HalfOpen)
		equal(t, "probing", b.Status().Probing, true)
		second.Done(ok)
		want(t, b, breaker.Closed)
		equal(t, "calls", b.Status().Calls, 1)
	})
}

// Every way out frees the probe, and none of these says anything about the upstream.
func TestProbeIsFreed(t *testing.T) {
	ways := map[string]func(*breaker.Breaker){
		"panic": func(b *breaker.Breaker) {
			defer func() { recover() }()
			p := acquire(t, b)
			defer p.Done(neutral)
			panic("abort")
		},
		"Goexit": func(b *breaker.Breaker) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				p := acquire(t, b)
				defer p.Done(neutral)
				runtime.Goexit()
			}()
			<-done
		},
		"cancel": func(b *breaker.Breaker) { acquire(t, b).Done(breaker.Outcome{Class: breaker.Neutral}) },
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, pass func(time.Duration)) {
				b := halfOpen(t, breaker.Settings{}, nil, pass)
				for range 1000 {
					way(b)
					want(t, b, breaker.HalfOpen)
				}
				pass(time.Hour) // the leases' ends change nothing
				want(t, b, breaker.HalfOpen)
				calls(t, b, 1, ok)
				want(t, b, breaker.Closed)
			})
		})
	}
}

// A safe call is the probe at once, an unsafe one only when nothing safe has come.
func TestSafeProbeIsPreferred(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		e := refused(t, b, breaker.Op{})
		equal(t, "advice", e.RetryAfter(), 5*time.Second)
		pass(2 * time.Second)
		safe := acquire(t, b)
		safe.Done(neutral)
		refused(t, b, breaker.Op{})
		pass(3 * time.Second)
		p, err := b.Acquire(breaker.Op{})
		if err != nil {
			t.Fatal(err)
		}
		p.Done(ok)
		want(t, b, breaker.Closed)
	})
}

// Where only unsafe calls come, nothing safe is waited for: neither before the opening nor since then has one
// asked (ADR 0022).
func TestNoSafeCallIsAwaited(t *testing.T) {
	unsafe := func(t *testing.T, b *breaker.Breaker, n int, o breaker.Outcome) {
		t.Helper()
		for range n {
			p, err := b.Acquire(breaker.Op{})
			if err != nil {
				t.Fatal(err)
			}
			p.Done(o)
		}
	}
	fail := func(t *testing.T, b *breaker.Breaker) {
		t.Helper()
		for n := 0; n < 10 && b.Status().State == breaker.Closed; n++ {
			unsafe(t, b, 1, failed)
		}
		want(t, b, breaker.Open)
	}
	paced := breaker.Op{Safe: true, ClientPaced: true}
	for name, test := range map[string]struct {
		before  func(t *testing.T, b *breaker.Breaker, pass func(time.Duration))
		opened  func(t *testing.T, b *breaker.Breaker)
		awaited bool
	}{
		"none ever":         {},
		"one that was sent": {before: func(t *testing.T, b *breaker.Breaker, _ func(time.Duration)) { calls(t, b, 1, ok) }, awaited: true},
		"one that has not ended": {before: func(t *testing.T, b *breaker.Breaker, pass func(time.Duration)) {
			acquire(t, b)
			pass(50 * time.Second)
		}, awaited: true},
		"one of another window": {before: func(t *testing.T, b *breaker.Breaker, pass func(time.Duration)) {
			calls(t, b, 1, ok)
			pass(time.Minute)
		}},
		"one that has not ended since another window": {before: func(t *testing.T, b *breaker.Breaker, pass func(time.Duration)) {
			acquire(t, b)
			pass(time.Minute)
		}},
		"one whose client is slow": {before: func(t *testing.T, b *breaker.Breaker, _ func(time.Duration)) {
			p, _ := b.Acquire(paced)
			p.Done(ok)
		}},
		"one that was refused": {opened: func(t *testing.T, b *breaker.Breaker) {
			refused(t, b, breaker.Op{Safe: true})
		}, awaited: true},
		"one that was refused before it asked": {opened: func(t *testing.T, b *breaker.Breaker) {
			if b.RefusalOf(breaker.Op{Safe: true}) == nil {
				t.Error("it is not refused")
			}
		}, awaited: true},
		"one that an observing breaker let through": {opened: func(t *testing.T, b *breaker.Breaker) {
			b.SetMode(breaker.Observe)
			calls(t, b, 1, neutral)
			b.SetMode(breaker.Auto)
		}, awaited: true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, pass func(time.Duration)) {
				b := newBreaker(t, breaker.Settings{}, nil)
				if test.before != nil {
					test.before(t, b, pass)
				}
				fail(t, b)
				if test.opened != nil {
					test.opened(t, b)
				}
				pass(30 * time.Second)
				want(t, b, breaker.HalfOpen)
				equal(t, "refusal is foreseen", b.RefusalOf(breaker.Op{}) != nil, test.awaited)
				if test.awaited {
					refused(t, b, breaker.Op{})
					return
				}
				unsafe(t, b, 1, failed) // the probe
				want(t, b, breaker.Open)
				pass(time.Minute)
				unsafe(t, b, 1, ok)
				want(t, b, breaker.Closed)
			})
		})
	}
	awaits := func(t *testing.T, b *breaker.Breaker, pass func(time.Duration), awaited bool) {
		t.Helper()
		fail(t, b)
		pass(30 * time.Second)
		want(t, b, breaker.HalfOpen)
		equal(t, "safe call is awaited", b.RefusalOf(breaker.Op{}) != nil, awaited)
	}
	for name, closed := range map[string]func(*testing.T, *breaker.Breaker){
		"a call":      func(t *testing.T, b *breaker.Breaker) { calls(t, b, 1, ok) },
		"a stream":    func(t *testing.T, b *breaker.Breaker) { acquire(t, b).Answered(time.Millisecond) },
		"an operator": func(t *testing.T, b *breaker.Breaker) { b.SetMode(breaker.ForcedClosed); b.SetMode(breaker.Auto) },
	} {
		t.Run("of an outage that ended by "+name, func(t *testing.T) {
			bubble(t, func(t *testing.T, pass func(time.Duration)) {
				b := newBreaker(t, breaker.Settings{}, nil)
				unsafe(t, b, 1, ok)
				pass(10 * time.Second)
				calls(t, b, 1, ok)
				awaits(t, b, pass, true)
				closed(t, b)
				pass(59 * time.Second)
				awaits(t, b, pass, true)
				pass(5 * time.Second)
				unsafe(t, b, 1, ok)
				pass(59 * time.Second)
				awaits(t, b, pass, true)
				closed(t, b)
				pass(time.Minute)
				awaits(t, b, pass, false)
			})
		})
	}
	t.Run("of another process", func(t *testing.T) {
		bubble(t, func(t *testing.T, pass func(time.Duration)) {
			b := newBreaker(t, breaker.Settings{}, nil)
			b = restart(t, b, breaker.Settings{}, nil)
			awaits(t, b, pass, false)
			b = restart(t, b, breaker.Settings{}, nil)
			refused(t, b, breaker.Op{})
			pass(5 * time.Second)
			unsafe(t, b, 1, ok)
			want(t, b, breaker.Closed)
		})
	})
}

// A result belongs to the generation of its permit.
func TestLateResultsNeverMoveTheState(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		var before []*breaker.Permit
		for range 60 {
			before = append(before, acquire(t, b))
		}
		settle := func(o breaker.Outcome) {
			t.Helper()
			state, generation := b.Status().State, b.Status().Generation
			for range 10 {
				before[0].Answered(time.Millisecond)
				before[0].Done(o)
				before = before[1:]
			}
			want(t, b, state)
			equal(t, "generation", b.Status().Generation, generation)
		}
		trip(t, b)
		settle(ok)
		settle(failed)
		pass(30 * time.Second)
		settle(ok)
		settle(failed)
		calls(t, b, 1, ok)
		settle(ok)
		settle(failed)
		equal(t, "calls", b.Status().Calls, 1)
	})
}

// The answer of a probe closes the breaker; a stream behind it holds nothing, and its
// failure counts when it comes (ADR 0022).
func TestAnsweredProbeGoesOnAsACall(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		stream := acquire(t, b)
		stream.Answered(time.Millisecond)
		want(t, b, breaker.Closed)
		equal(t, "probe", stream.Probe(), false)
		pass(time.Hour)
		equal(t, "calls", b.Status().Calls, 0)
		calls(t, b, 9, failed)
		stream.Done(breaker.Outcome{Class: breaker.InBand})
		want(t, b, breaker.Open)
	})
}

// cascade 3.2.2: the counters are reset on close. With a window of 60 s and a cooldown
// of 30 s the failures before the trip would open it again.
func TestWindowIsClearAfterClose(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		calls(t, b, 1, ok)
		calls(t, b, 1, ok)
		want(t, b, breaker.Closed)
		equal(t, "failures", b.Status().Failures, 0)
		calls(t, b, 7, failed)
		want(t, b, breaker.Closed) // nine calls are below the volume
		equal(t, "calls", b.Status().Calls, 9)
	})
}

func TestDoneCountsOnce(t *testing.T) {
	bubble(t, func(t *testing.T, _ func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		p := acquire(t, b)
		var group sync.WaitGroup
		for range 100 {
			group.Go(func() { p.Done(failed) })
		}
		group.Wait()
		p.Answered(time.Hour)
		equal(t, "calls", b.Status().Calls, 1)
	})
}

func TestZeroPermitDoesNothing(t *testing.T) {
	var p breaker.Permit
	p.Answered(time.Second)
	p.Done(failed)
	equal(t, "probe", p.Probe(), false)
}

func TestRefusalSaysWhy(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := newBreaker(t, breaker.Settings{}, nil)
		trip(t, b)
		pass(8 * time.Second)
		e := refused(t, b, breaker.Op{Safe: true})
		equal(t, "state", e.State, breaker.Open)
		equal(t, "advice", e.RetryAfter(), 22*time.Second)
		equal(t, "generation", e.Generation, 2)
		equal(t, "key", e.Key, upstream)
		equal(t, "reason", e.Reason, breaker.ErrorRate)
		equal(t, "evidence", e.Evidence, "error-1")
		equal(t, "text", e.Error(), "breaker: localhost:9001 is open: status 502")
		pass(22 * time.Second)
		equal(t, "advice afterwards", e.RetryAfter(), 0)

		acquire(t, b)
		e = refused(t, b, breaker.Op{Safe: true})
		equal(t, "state", e.State, breaker.HalfOpen)
		equal(t, "advice", e.RetryAfter(), time.Second)
		equal(t, "rejected", b.Status().Rejected, 2)
		if err := error(e); !errors.As(fmt.Errorf("dial: %w", err), &e) {
			t.Error("a wrapped refusal is not found")
		}
	})
}

// paced asks for a safe call that its client is still sending.
func paced(t *testing.T, b *breaker.Breaker) *breaker.Permit {
	t.Helper()
	p, err := b.Acquire(breaker.Op{Safe: true, ClientPaced: true})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "probe", p.Probe(), true)
	return &p
}

// freed says that a lease has run out without a word on the upstream.
func freed(t *testing.T, b *breaker.Breaker) {
	t.Helper()
	want(t, b, breaker.HalfOpen)
	equal(t, "probing", b.Status().Probing, false)
	equal(t, "failed probes", b.Status().FailedProbes, 0)
}

// A call that its client sends slowly is no better a probe than one that changes
// something, and says nothing of the upstream while it is sent.
func TestClientPacedProbe(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		op := breaker.Op{Safe: true, ClientPaced: true}
		equal(t, "advice", refused(t, b, op).RetryAfter(), 5*time.Second)
		if b.RefusalOf(op) == nil {
			t.Error("its refusal is not foreseen")
		}
		pass(5 * time.Second)
		slow := paced(t, b)
		pass(29 * time.Second)
		equal(t, "probing", b.Status().Probing, true)
		pass(time.Second)
		freed(t, b)
		next := acquire(t, b)
		slow.Done(failed) // too late: the lease is another's
		want(t, b, breaker.HalfOpen)
		next.Done(ok)
		want(t, b, breaker.Closed)
	})
}

// Once the call is sent, the upstream has all of the lease, and its silence fails it.
func TestClientHasSent(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		pass(5 * time.Second) // any call may be the probe
		p := paced(t, b)
		pass(29 * time.Second)
		p.Lease().Sent()
		pass(29 * time.Second)
		p.Lease().Sent() // nothing is gained by saying it twice
		want(t, b, breaker.HalfOpen)
		pass(time.Second)
		want(t, b, breaker.Open)
		equal(t, "failed probes", b.Status().FailedProbes, 1)
	})
}

// An upstream that has begun an answer lives, whatever its client does after that.
func TestProbeIsAlive(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		pass(5 * time.Second) // any call may be the probe
		silent := acquire(t, b)
		silent.Lease().Alive()
		pass(30 * time.Second)
		freed(t, b)

		both := paced(t, b)
		both.Lease().Alive()
		both.Lease().Sent()
		pass(30 * time.Second)
		freed(t, b)

		alive := acquire(t, b)
		alive.Lease().Alive()
		alive.Done(failed)
		want(t, b, breaker.Open)
	})
}

// A lease that is over changes nothing of the next one.
func TestLeaseThatIsOver(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		pass(5 * time.Second) // any call may be the probe
		first := paced(t, b)
		lease := first.Lease()
		first.Done(neutral)
		equal(t, "lease of a call that is none", first.Lease(), breaker.Lease{})
		acquire(t, b)
		lease.Alive()
		breaker.Lease{}.Alive()
		breaker.Lease{}.Sent()
		pass(30 * time.Second)
		want(t, b, breaker.Open)
	})
}

// ATD, "Coordinated Circuit Breaking": a breaker does what the probe of another process says, if that is about its
// present outage, and nothing of its own is stronger: a probe under way, or an operator.
func TestFollow(t *testing.T) {
	passed := func(b *breaker.Breaker) breaker.PeerProbe {
		return breaker.PeerProbe{Outage: b.Snapshot().Outage, Passed: true}
	}
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		hook := &recorder{}
		b := newBreaker(t, breaker.Settings{}, hook)
		trip(t, b)
		longer := breaker.PeerProbe{Outage: b.Snapshot().Outage, Cooldown: 2 * time.Minute, Left: 90 * time.Second, FailedProbes: 3, Cause: "status 504"}
		equal(t, "followed while open", b.Follow(longer), true)
		equal(t, "open for", b.Status().CooldownRemaining, 90*time.Second)
		equal(t, "the last transition", hook.last(t).Reason, breaker.ErrorRate)
		pass(90 * time.Second)
		want(t, b, breaker.HalfOpen)
		longer.Left = 0
		equal(t, "followed when that is over", b.Follow(longer), false)
		longer.Left = 3 * time.Minute
		equal(t, "followed while half-open", b.Follow(longer), true)
		want(t, b, breaker.Open)
		equal(t, "reason", hook.last(t).Reason, breaker.PeerFailed)
		equal(t, "open for", b.Status().CooldownRemaining, 3*time.Minute)
		equal(t, "failed probes", b.Status().FailedProbes, 3)
		hook.mu.Lock()
		equal(t, "given up by who has not probed", len(hook.permanent), 0)
		hook.mu.Unlock()

		other := passed(b)
		other.Outage--
		equal(t, "followed in another outage", b.Follow(other), false)
		equal(t, "followed", b.Follow(passed(b)), true)
		want(t, b, breaker.Closed)
		equal(t, "reason", hook.last(t).Reason, breaker.PeerPassed)
		equal(t, "followed while closed", b.Follow(passed(b)), false)
	})
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		probe := acquire(t, b)
		equal(t, "followed while it probes", b.Follow(passed(b)), false)
		probe.Done(failed)
		want(t, b, breaker.Open)
		b.SetMode(breaker.ForcedOpen)
		equal(t, "followed while it is forced open", b.Follow(passed(b)), false)
	})
}

// A probe that another process is to send goes back, and its call is refused; not in mode observe.
func TestYield(t *testing.T) {
	bubble(t, func(t *testing.T, pass func(time.Duration)) {
		b := halfOpen(t, breaker.Settings{}, nil, pass)
		until := time.Now().Add(time.Minute)
		open := acquire(t, b).Yield(until)
		if open == nil || !open.Until.Equal(until) || open.State != breaker.HalfOpen {
			t.Errorf("%+v", open)
		}
		equal(t, "rejected", b.Status().Rejected, 1)
		equal(t, "the next call is a probe", acquire(t, b).Probe(), true)

		b = halfOpen(t, breaker.Settings{}, nil, pass)
		b.SetMode(breaker.Observe)
		permit := acquire(t, b)
		if open := permit.Yield(until); open != nil {
			t.Errorf("an observing breaker refuses: %v", open)
		}
		permit.Done(failed)
		want(t, b, breaker.HalfOpen)
	})
}
