package breaker

import "time"

// Everything here is called with the mutex held.

// enter changes the state.
func (b *Breaker) enter(to State, reason Reason, now time.Time) {
	from := b.state
	b.state, b.since = to, now
	b.generation++
	if to == Open {
		b.openings++
	}
	b.outage.reason = reason
	b.publish()
	b.report(event{kind: transition, Event: b.describe(from, now)})
}

// publish makes what calls look at without a lock fit what is known under it.
func (b *Breaker) publish() {
	switch {
	case b.state == Closed && b.period.awake:
		b.refusal.Store(nil)
		b.live.Store(b.period)
		return
	case b.state == Closed, b.inForce() == Observe, b.state == HalfOpen && b.probe.holder == 0:
		b.live.Store(nil)
		b.refusal.Store(nil)
		return
	}
	b.live.Store(nil)
	b.refusal.Store(b.refuse(b.outage.until))
}

// wake sets the window's timer going, if p is the present window.
func (b *Breaker) wake(p *period, now time.Time) {
	if b.period != p || b.state != Closed || p.awake || b.stopped {
		return
	}
	p.resume(now, b.rules.Load())
	b.arm(p.begun.Add(b.rules.Load().beat).Sub(now))
	b.publish()
}

// arm sets the one timer. What it is for follows from the state when it fires.
func (b *Breaker) arm(d time.Duration) {
	if b.timer == nil {
		b.timer = time.AfterFunc(d, b.alarm)
		return
	}
	b.timer.Reset(d)
}

// alarm is what the timer calls. One that comes too early or too late, because the
// state has changed meanwhile, finds nothing to do.
func (b *Breaker) alarm() {
	b.mu.Lock()
	defer b.unlock()
	if b.stopped {
		return
	}
	now := time.Now()
	switch b.state {
	case Closed:
		if b.period.awake {
			b.beat(now)
		}
	case Open:
		if b.outage.until.IsZero() {
			return // forced open
		}
		if left := b.outage.until.Sub(now); left > 0 {
			b.arm(left)
			return
		}
		b.halfOpen(CooldownOver, now)
	case HalfOpen:
		b.checkLease(now)
	}
}

// beat moves the window on by what has passed. With nothing left in it the breaker
// sleeps until the next call or outcome.
func (b *Breaker) beat(now time.Time) {
	p, rules := b.period, b.rules.Load()
	idle := p.advance(now, rules)
	if c := p.counts(p.window.Load()); c.overdue > 0 {
		if reason := rules.exceeded(c); reason != "" && b.trip(p, reason, c) {
			return
		}
	}
	if idle {
		// Calls that are admitted from here on come to wake, those just before are seen.
		b.live.Store(nil)
		if p.window.Load() == 0 && !p.queue.joined() {
			p.awake, p.slept = false, now
			return
		}
		b.live.Store(p)
	}
	b.arm(p.begun.Add(rules.beat).Sub(now))
}

// trip opens the breaker on account of p's counts, unless p is over or the operator
// holds the breaker closed. It reports whether it did.
func (b *Breaker) trip(p *period, reason Reason, c counts) bool {
	if b.period != p || b.state != Closed || b.mode == ForcedClosed || b.stopped {
		return false
	}
	now := time.Now()
	rules := b.rules.Load()
	cooldown := b.outage.cooldown
	if cooldown == 0 || now.Sub(b.since) >= rules.set.Healthy {
		cooldown = rules.set.Cooldown
	}
	b.outage = outage{began: b.generation + 1, counts: c}
	if reason != SlowCalls && c.failures > 0 {
		b.outage.last = p.last // else it has nothing to do with the opening
	}
	b.open(reason, cooldown, p.retryAfter, now)
	return true
}

// open begins a cooldown. It lasts until retryAfter at the least.
func (b *Breaker) open(reason Reason, cooldown time.Duration, retryAfter, now time.Time) {
	o := &b.outage
	o.cooldown = cooldown
	lasts := max(b.rules.Load().shortened(cooldown), retryAfter.Sub(now))
	o.until, o.lasts = now.Add(lasts), lasts
	o.total += lasts
	b.period = nil
	b.probe.holder = 0
	b.arm(lasts)
	b.enter(Open, reason, now)
}

// forceOpen opens without an end.
func (b *Breaker) forceOpen(now time.Time) {
	if b.state == Closed {
		p := b.period
		b.outage = outage{
			began: b.generation + 1, cooldown: b.outage.cooldown, counts: p.counts(p.window.Load()),
		}
	}
	b.outage.until = time.Time{}
	b.period = nil
	b.probe.holder = 0
	if b.state != Open {
		b.enter(Open, ByOperator, now)
	}
}

// halfOpen lets the next suitable call be the probe.
func (b *Breaker) halfOpen(reason Reason, now time.Time) {
	b.outage.until = time.Time{}
	b.enter(HalfOpen, reason, now)
}

// close begins a period with a clear window (cascade 3.2.2). What it takes to reopen
// with the last cooldown is kept.
func (b *Breaker) close(reason Reason, now time.Time) {
	b.outage.until = time.Time{}
	b.probe.holder = 0
	b.period = &period{owner: b, begun: now, slept: now, generation: b.generation + 1}
	b.enter(Closed, reason, now)
	b.outage = outage{cooldown: b.outage.cooldown}
}
