package breaker

import (
	"sync/atomic"
	"time"
)

// buckets is how many steps a window has.
const buckets = 60

// period is one stretch of CLOSED: its window, and the calls that wait in it. A permit
// holds the period that it was given in. When the breaker opens the period is left
// behind, and with it whatever its late calls still write: that is how a late result
// never moves the state, and how the window is clear after a close.
type period struct {
	owner      *Breaker
	generation uint64

	// Written by calls. A word is always at least the sum of its ring, so that a
	// bucket can be taken off at any time.
	window atomic.Uint64 // calls, failures
	extra  atomic.Uint64 // slow, rate-limited
	at     atomic.Uint32 // the ring's present bucket
	streak atomic.Int64  // failures in a row
	ring   [buckets]bucket
	queue  queue // calls without an answer

	// Guarded by owner.mu.
	begun      time.Time     // of the present bucket
	awake      bool          // the timer moves the window on
	slept      time.Time     // since when it does not
	retryAfter time.Time     // the latest that an upstream asked for
	last       failureRecord // the newest failure
}

type bucket struct{ calls, extra atomic.Uint64 }

// failureRecord is what is remembered of a failure.
type failureRecord struct{ cause, evidence string }

// admit counts the call as waiting, if its patience ends.
func (p *period) admit(op Op) Permit {
	permit := Permit{owner: p.owner, period: p}
	rules := p.owner.rules.Load()
	class := rules.class
	if op.Patience > 0 {
		class = rules.classFor(op.Patience)
	}
	if class >= 0 {
		permit.waits = p.queue.join(class, p)
	}
	return permit
}

// count adds an outcome and judges by it.
func (p *period) count(o *Outcome, slow bool) {
	if o.RetryAfter > 0 {
		p.noteRetryAfter(o.RetryAfter)
	}
	here := &p.ring[p.at.Load()]
	var word uint64
	switch o.Class {
	case Success:
		word = p.window.Add(oneCall)
		here.calls.Add(oneCall)
		if p.streak.Load() != 0 {
			p.streak.Store(0)
		}
	case Failure, InBand:
		word = p.window.Add(oneCall | oneFailure)
		here.calls.Add(oneCall | oneFailure)
		p.streak.Add(1)
	case RateLimited:
		p.extra.Add(oneLimited)
		here.extra.Add(oneLimited)
		p.rouse()
		return
	default:
		return
	}
	if slow {
		p.extra.Add(oneSlow)
		here.extra.Add(oneSlow)
	}
	// The window may have been found empty, and been put to sleep, just before.
	if word>>32 == 1 {
		p.rouse()
	}
	p.judge(word, o)
}

// judge opens the breaker where the outcome, with which the window holds word, makes
// it exceed a limit.
func (p *period) judge(word uint64, o *Outcome) {
	rules := p.owner.rules.Load()
	c := p.counts(word)
	if c.failures|c.slow|c.overdue == 0 {
		return
	}
	reason := rules.exceeded(c)
	failed := o.Class != Success
	if reason == "" && failed && rules.set.Consecutive > 0 && p.streak.Load() >= int64(rules.set.Consecutive) {
		reason = Consecutive
	}
	b := p.owner
	if reason == "" {
		// Of failures at the same instant one is remembered: none waits for another.
		if failed && (o.Cause != "" || o.Evidence != "") && b.mu.TryLock() {
			p.last = failureRecord{o.Cause, o.Evidence}
			b.unlock()
		}
		return
	}
	b.mu.Lock()
	if failed {
		p.last = failureRecord{o.Cause, o.Evidence}
	}
	b.trip(p, reason, c)
	b.unlock()
}

func (p *period) counts(word uint64) counts {
	var c counts
	c.calls, c.failures = halves(word)
	c.slow, c.limited = halves(p.extra.Load())
	c.overdue = uint64(max(p.queue.overdue.Load(), 0))
	return c
}

func (p *period) noteRetryAfter(d time.Duration) {
	b := p.owner
	b.mu.Lock()
	defer b.mu.Unlock()
	until := time.Now().Add(min(d, b.rules.Load().set.MaxRetryAfter))
	if until.After(p.retryAfter) {
		p.retryAfter = until
	}
}

// rouse sets the timer going again.
func (p *period) rouse() {
	b := p.owner
	b.mu.Lock()
	b.wake(p, time.Now())
	b.unlock()
}

// resume goes on after a sleep. The ring was empty then: what stands in it now came
// just before, however long ago the sleep began.
func (p *period) resume(now time.Time, rules *Rules) {
	p.queue.advance(p.pass(now, rules))
	p.awake = true
}

// pass moves the begin of the present bucket, and returns by how many steps.
func (p *period) pass(now time.Time, rules *Rules) int64 {
	steps := max(int64(now.Sub(p.begun)/rules.beat), 0)
	p.begun = p.begun.Add(time.Duration(steps) * rules.beat)
	return steps
}

// advance moves the ring to the bucket of now, and looks for calls that have become
// overdue. It reports whether there is nothing left that time could change.
func (p *period) advance(now time.Time, rules *Rules) (idle bool) {
	steps := p.pass(now, rules)
	for range min(steps, buckets) {
		next := (p.at.Load() + 1) % buckets
		p.window.Add(-p.ring[next].calls.Swap(0))
		p.extra.Add(-p.ring[next].extra.Swap(0))
		p.at.Store(next)
	}
	waiting := p.queue.advance(steps)
	return !waiting && p.window.Load() == 0 && p.extra.Load() == 0
}
