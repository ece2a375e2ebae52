package breaker

import (
	"fmt"
	"time"
)

// probe is the one call that is let through in HALF_OPEN. It holds a lease: whatever
// becomes of the call, recovery goes on when the lease ends.
type probe struct {
	leases uint64    // given so far
	holder uint64    // the lease that is out; 0 without one
	ends   time.Time // when it ends
	turn   turn
}

// turn is who is waited for while a lease is out.
type turn uint8

const (
	upstreams turn = iota // its silence fails the probe
	clients               // it is still sending the call
	nobodys               // the upstream has shown that it lives
)

// Lease is a probe's hold on HALF_OPEN. It may be copied, and used from any goroutine.
// Of the zero value, and after the lease has ended, the methods do nothing.
type Lease struct {
	owner *Breaker
	id    uint64
}

// Sent says that the client has sent all of a call that was Op.ClientPaced. The upstream
// has the whole of Settings.ProbeLease from here on: a client that took nearly all of it
// must not fail the probe either.
func (l Lease) Sent() {
	l.change(func(b *Breaker) {
		if b.probe.turn != clients {
			return
		}
		lasts := b.rules.Load().set.ProbeLease
		b.probe.turn, b.probe.ends = upstreams, time.Now().Add(lasts)
		b.arm(lasts)
	})
}

// Alive says that the upstream has begun an answer in time, though not yet one that says
// whether the call has failed. A lease that runs out after it is neutral.
func (l Lease) Alive() {
	l.change(func(b *Breaker) { b.probe.turn = nobodys })
}

// change does something to a lease that is out, with the mutex held.
func (l Lease) change(do func(*Breaker)) {
	if l.owner == nil {
		return
	}
	l.owner.mu.Lock()
	defer l.owner.unlock()
	if l.owner.probe.holder == l.id && !l.owner.stopped {
		do(l.owner)
	}
}

// grant makes the call the probe, if there is none and it is suited. Called with the
// mutex held, in OPEN or HALF_OPEN.
func (b *Breaker) grant(op Op, now time.Time) (Permit, *OpenError) {
	if refusal := b.unsuited(op, now); refusal != nil {
		return Permit{}, refusal
	}
	rules := b.rules.Load()
	b.probe.leases++
	b.probe.holder = b.probe.leases
	b.probe.ends = now.Add(rules.set.ProbeLease)
	b.probe.turn = upstreams
	if op.ClientPaced {
		b.probe.turn = clients
	}
	b.arm(rules.set.ProbeLease)
	b.publish()
	return Permit{owner: b, lease: b.probe.holder}, nil
}

// preferred reports whether the call is the probe before all others.
func (op Op) preferred() bool { return op.Safe && !op.ClientPaced }

// unsuited refuses a call that cannot be the probe now. Called with the mutex held, in
// OPEN or HALF_OPEN.
func (b *Breaker) unsuited(op Op, now time.Time) *OpenError {
	if b.state == Open || b.probe.holder != 0 {
		return b.refuse(b.outage.until)
	}
	// A call that changes something is risked only when nothing safe has come.
	if safeUntil := b.since.Add(b.rules.Load().set.ProbeWait); !op.preferred() && now.Before(safeUntil) {
		return b.refuse(safeUntil)
	}
	return nil
}

// checkLease ends a lease whose time has come. Called with the mutex held.
func (b *Breaker) checkLease(now time.Time) {
	if b.probe.holder == 0 {
		return
	}
	if left := b.probe.ends.Sub(now); left > 0 {
		b.arm(left)
		return
	}
	if b.probe.turn != upstreams {
		// A stranger's slow call, or a stream that is quiet by nature, must not keep the
		// breaker open.
		b.freeProbe()
		return
	}
	lease := b.rules.Load().set.ProbeLease
	b.reopen(ProbeTimedOut, Outcome{Cause: fmt.Sprintf("no answer within %v", lease)}, now)
}

// judgeProbe takes the outcome of the probe with that lease. It returns the period in
// which a call that passed goes on to count, or nothing.
func (b *Breaker) judgeProbe(lease uint64, o Outcome) *period {
	b.mu.Lock()
	defer b.unlock()
	if b.probe.holder != lease || b.stopped {
		return nil // too late: the lease had ended
	}
	now := time.Now()
	switch o.Class {
	case Success:
		b.close(ProbePassed, now)
		return b.period
	case Neutral:
		b.freeProbe()
	default:
		b.reopen(ProbeFailed, o, now)
	}
	return nil
}

// freeProbe lets the next suitable call be the probe. Called with the mutex held.
func (b *Breaker) freeProbe() {
	b.probe.holder = 0
	b.publish()
}

// reopen is what a failed probe does. Called with the mutex held.
func (b *Breaker) reopen(reason Reason, o Outcome, now time.Time) {
	rules := b.rules.Load()
	b.outage.last = failureRecord{o.Cause, o.Evidence}
	b.outage.failedProbes++
	var retryAfter time.Time
	if o.RetryAfter > 0 {
		retryAfter = now.Add(min(o.RetryAfter, rules.set.MaxRetryAfter))
	}
	b.open(reason, rules.doubled(b.outage.cooldown), retryAfter, now)
	if b.outage.failedProbes == rules.set.GiveUp {
		b.report(event{kind: permanent, Event: b.describe(HalfOpen, now)})
	}
}
