package breaker

import (
	"fmt"
	"time"
)

// Status is the state of a breaker for the circuits endpoint (cascade 3.2.3). Its JSON is an API; durations are not in
// it, nor what only the gateway needs.
type Status struct {
	Key        Key       `json:"-"`
	State      State     `json:"state"`
	Mode       Mode      `json:"mode"`
	Generation uint64    `json:"generation"`     // counts the changes of State
	Since      time.Time `json:"since,omitzero"` // of State

	// ErrorRate is that of the window, 0 to 1, with calls that hang as failures. Outside of CLOSED
	// it and the counts are those that opened the breaker.
	ErrorRate   float64       `json:"error_rate"`
	Window      time.Duration `json:"-"`
	MinVolume   int           `json:"min_volume"`   // calls from which the rate counts
	Threshold   float64       `json:"threshold"`    // rate above which the breaker opens, 0 to 1
	Calls       int           `json:"calls"`        // ended in the window
	Failures    int           `json:"failures"`     // among the calls
	Slow        int           `json:"slow"`         // among the calls
	RateLimited int           `json:"rate_limited"` // beside the calls
	Overdue     int           `json:"overdue"`      // hanging past their patience, beside the calls

	Cooldown          time.Duration `json:"-"`                   // the present or the last one
	CooldownRemaining time.Duration `json:"-"`                   // 0 outside of OPEN, and if forced open
	NextProbe         time.Time     `json:"next_probe,omitzero"` // end of the cooldown; zero outside of OPEN, and if forced open
	Probing           bool          `json:"probing"`             // a probe is under way
	FailedProbes      int           `json:"failed_probes"`       // in a row

	Reason    Reason `json:"reason,omitempty"`     // of the last transition; empty in CLOSED
	Cause     string `json:"last_cause,omitempty"` // of the newest failure, as it came with its outcome
	Evidence  string `json:"-"`                    // of the newest failure
	Reference string `json:"open_ect,omitempty"`   // that of Keep
	// Openings is how many times it opened since the process began.
	Openings uint64 `json:"-"`
	// Rejected is how many calls were refused, or would have been without mode Observe, since the
	// process began.
	Rejected uint64 `json:"rejected"`
}

// Status returns the present status.
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
		Key: b.key, State: b.state, Mode: b.mode, Generation: b.generation, Since: b.since,
		ErrorRate: c.rate(),
		Window:    time.Duration(rules.set.Window), MinVolume: rules.set.MinVolume, Threshold: rules.set.Threshold,
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

// Snapshot is the state of a breaker that is kept over restarts. The window of a closed breaker is not
// in it. Its JSON is stable; durations are in nanoseconds, times are wall time.
type Snapshot struct {
	Version    int    `json:"v"` // 1
	Upstream   string `json:"upstream"`
	Class      string `json:"class,omitempty"`
	State      State  `json:"state"`
	Mode       Mode   `json:"mode"`
	Generation uint64 `json:"generation"`
	// Outage is the generation in which the breaker left CLOSED; 0 in CLOSED.
	Outage uint64 `json:"outage,omitempty"`

	At    time.Time `json:"at"`    // when this was taken
	Since time.Time `json:"since"` // of State
	// Until is the end of the cooldown; zero outside of OPEN, and if forced open.
	Until time.Time `json:"until,omitzero"`

	Cooldown      time.Duration `json:"cooldown_ns"` // the newest
	TotalCooldown time.Duration `json:"total_cooldown_ns"`
	FailedProbes  int           `json:"failed_probes"`
	Calls         int           `json:"calls"`    // of the window that opened it
	Failures      int           `json:"failures"` // among the calls

	Reason    Reason `json:"reason,omitempty"`
	Cause     string `json:"cause,omitempty"`
	Evidence  string `json:"evidence,omitempty"`
	Reference string `json:"reference,omitempty"`
}

const snapshotVersion = 1

// Check returns an error that names a value that is out of its range.
func (s Snapshot) Check() error {
	for _, c := range []struct {
		ok    bool
		name  string
		value any
		right string
	}{
		{s.Version == snapshotVersion, "v", s.Version, "1"},
		{int(s.State) < len(stateNames), "state", s.State, "a state"},
		{int(s.Mode) < len(modeNames), "mode", s.Mode, "a mode"},
		{s.Generation > 0, "generation", s.Generation, "positive"},
		{s.Outage <= s.Generation, "outage", s.Outage, "no later than the generation"},
		{s.Mode != ForcedOpen || s.State == Open, "state", s.State, "open in mode forced_open"},
		{s.Mode != ForcedClosed || s.State == Closed, "state", s.State, "closed in mode forced_closed"},
		{s.Cooldown >= 0, "cooldown_ns", s.Cooldown, "0 or more"},
		{s.TotalCooldown >= 0, "total_cooldown_ns", s.TotalCooldown, "0 or more"},
		{s.FailedProbes >= 0, "failed_probes", s.FailedProbes, "0 or more"},
		{s.Failures >= 0 && s.Failures <= s.Calls, "failures", s.Failures, "from 0 to calls"},
	} {
		if !c.ok {
			return fmt.Errorf("breaker: snapshot of %q: %s is %v; it has to be %s", s.Upstream, c.name, c.value, c.right)
		}
	}
	return nil
}

// Snapshot returns the state for Registry.Restore. It never calls the hook, which may be waiting for who stores what
// it returns.
func (b *Breaker) Snapshot() Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := &b.outage
	return Snapshot{
		Version: snapshotVersion, Upstream: b.key.Upstream, Class: b.key.Class,
		State: b.state, Mode: b.mode, Generation: b.generation, Outage: o.began,
		At: time.Now().Round(0), Since: b.since.Round(0), Until: o.until.Round(0),
		Cooldown: o.cooldown, TotalCooldown: o.total, FailedProbes: o.failedProbes,
		Calls: int(o.counts.calls + o.counts.overdue), Failures: int(o.counts.failures + o.counts.overdue),
		Reason: o.reason, Cause: o.last.cause, Evidence: o.last.evidence, Reference: o.reference,
	}
}

// Blank reports whether the snapshot equals that of a new breaker.
func (s Snapshot) Blank() bool { return s.State == Closed && s.Mode == Auto && s.Cooldown == 0 }

// restore makes a breaker with the state of a snapshot. OPEN ends at the same wall time, but never later
// than if no time had passed since: a clock that was set back does not extend it. A probe that was
// under way is lost, and the next suitable call is one. The cooldown does not end before resume. The
// error is that of Check.
func restore(s Snapshot, rules *Rules, hook Hook) (*Breaker, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	now := time.Now()
	b := New(Key{s.Upstream, s.Class}, rules, hook)
	b.mu.Lock()
	defer b.unlock()
	b.state, b.mode, b.generation = s.State, s.Mode, s.Generation
	b.outage = outage{
		began: s.Outage, cooldown: s.Cooldown, total: s.TotalCooldown, failedProbes: s.FailedProbes,
		counts: counts{calls: uint64(s.Calls), failures: uint64(s.Failures)},
		reason: s.Reason, last: failureRecord{s.Cause, s.Evidence}, reference: s.Reference,
	}
	passed := now.Round(0).Sub(s.Since)
	b.since = now.Add(-min(max(passed, 0), healthy))
	switch {
	case s.State == Closed:
		b.period.generation = s.Generation
	case s.State == Open && s.Mode != ForcedOpen:
		b.period = nil
		left := min(s.Until.Sub(now.Round(0)), s.Until.Sub(s.At), time.Duration(rules.set.MaxCooldown))
		left = max(left, 0)
		b.outage.until, b.outage.lasts = now.Add(left), max(s.Until.Sub(s.Since), left)
	default:
		b.period = nil
	}
	if b.period == nil {
		b.safe.Store(1) // it is not known which calls came before
	}
	b.publish()
	return b, nil
}

// resume lets the cooldown of a restored breaker end. A breaker that gets no place in a registry is never
// resumed, so that the hook gets none of its events.
func (b *Breaker) resume() {
	b.mu.Lock()
	defer b.unlock()
	if b.state == Open && !b.outage.until.IsZero() {
		b.arm(time.Until(b.outage.until))
	}
}
