package breaker

import "time"

// Status is what the circuits endpoint shows of a breaker (cascade 3.2.3).
type Status struct {
	Key        Key
	State      State
	Mode       Mode // observe too where the rules ask for it
	Generation uint64
	Since      time.Time // of State

	// ErrorRate is the window's, 0 to 1, with calls that hang as failures. Outside of
	// CLOSED it and the counts are those that opened the breaker.
	ErrorRate   float64
	Window      time.Duration
	MinVolume   int
	Threshold   float64
	Calls       int // ended in the window
	Failures    int // among the calls
	Slow        int // among the calls
	RateLimited int // beside the calls
	Overdue     int // hanging past their patience, beside the calls

	Cooldown          time.Duration // the present or the last one
	CooldownRemaining time.Duration // 0 outside of OPEN, and if forced open
	NextProbe         time.Time     // end of the cooldown; zero outside of OPEN, and if forced open
	Probing           bool          // a probe is under way
	FailedProbes      int           // in a row

	Reason    Reason // of the last transition; empty in CLOSED
	Cause     string // of the newest failure, as it came with its outcome
	Evidence  string // of the newest failure
	Reference string // what Keep remembered
	// Openings is how many times it has opened since the process began.
	Openings uint64
	// Rejected is how many calls were refused, or would have been in mode observe, since
	// the process began.
	Rejected uint64
}

// Status returns the present state.
func (b *Breaker) Status() Status {
	b.mu.Lock()
	defer b.unlock()
	now, rules, o := time.Now(), b.rules.Load(), &b.outage
	c, last := o.counts, o.last
	if p := b.period; p != nil {
		if p.awake {
			p.advance(now, rules)
		}
		c, last = p.counts(p.window.Load()), p.last
	}
	s := Status{
		Key: b.key, State: b.state, Mode: b.inForce(), Generation: b.generation, Since: b.since,
		ErrorRate: c.rate(), Window: rules.set.Window, MinVolume: rules.set.MinVolume, Threshold: rules.set.Threshold,
		Calls: int(c.calls), Failures: int(c.failures), Slow: int(c.slow), RateLimited: int(c.limited),
		Overdue: int(c.overdue), Cooldown: o.lasts, NextProbe: o.until, Probing: b.probe.holder != 0,
		FailedProbes: o.failedProbes, Reason: o.reason, Cause: last.cause, Evidence: last.evidence,
		Reference: o.reference, Openings: b.openings, Rejected: b.rejected.Load(),
	}
	if !o.until.IsZero() {
		s.CooldownRemaining = max(o.until.Sub(now), 0)
	}
	return s
}
