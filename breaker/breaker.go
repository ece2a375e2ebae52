package breaker

import (
	"sync"
	"sync/atomic"
	"time"
)

// Breaker guards one upstream. Make one with New or Restore, or get it from a Registry.
type Breaker struct {
	key  Key
	hook Hook

	// What calls look at without a lock: where they are admitted, or else how they
	// are refused. Where both are nil, decide knows. Only publish writes them.
	live    atomic.Pointer[period]
	refusal atomic.Pointer[OpenError]

	rules    atomic.Pointer[Rules]
	rejected atomic.Uint64

	mu         sync.Mutex
	state      State
	mode       Mode
	generation uint64    // one more with every change of state
	openings   uint64    // since New or Restore
	since      time.Time // of state
	period     *period   // in CLOSED
	outage     outage
	probe      probe
	timer      *time.Timer // the window's next step, the cooldown's end, the lease's end
	stopped    bool        // dropped from its registry: changes its state no more
	events     []event     // that the hook is still to hear
	telling    bool        // somebody tells them
}

// outage is what is remembered from the first opening until the breaker has been
// closed for long enough.
type outage struct {
	began        uint64        // generation of the first opening
	until        time.Time     // end of the present cooldown; zero without one
	cooldown     time.Duration // the newest, before jitter and Retry-After; 0 before the first
	lasts        time.Duration // the newest as it is
	total        time.Duration // all cooldowns since the first opening (cascade 3.2.4)
	failedProbes int           // in a row
	counts       counts        // when it opened
	reason       Reason
	last         failureRecord
	reference    string // the caller's
}

// New returns a closed breaker. The hook may be nil.
func New(key Key, rules *Rules, hook Hook) *Breaker {
	b := &Breaker{key: key, hook: hook, generation: 1, since: time.Now()}
	b.rules.Store(rules)
	b.period = &period{owner: b, generation: 1, begun: b.since, slept: b.since}
	return b
}

// Op is a call that asks to be let through.
type Op struct {
	// Safe says that the call changes nothing (GET, HEAD): it is preferred as a probe.
	Safe bool
	// ClientPaced says that the call is sent as fast as its client gives it, until
	// Lease.Sent. It is not preferred as a probe, and a lease that runs out in that time
	// says nothing of the upstream.
	ClientPaced bool
	// Patience is how long the call may go without an answer until it counts as a
	// failure while it hangs; 0 is Settings.Patience.
	Patience time.Duration
	// View is stricter than the breaker, for this call; nil is as strict.
	View *View
}

// Acquire lets the call through or refuses it with an *OpenError. The permit has to
// be settled with Done on every exit path. It never waits for another call.
func (b *Breaker) Acquire(op Op) (Permit, error) {
	if p := b.live.Load(); p != nil {
		if op.View != nil {
			return p.admitIn(op)
		}
		return p.admit(op), nil
	}
	if refusal := b.refusal.Load(); refusal != nil {
		b.rejected.Add(1)
		return Permit{}, refusal
	}
	return b.decide(op)
}

// decide is Acquire where the state has to be looked at: a closed breaker that sleeps,
// the probe, and a breaker that only observes.
func (b *Breaker) decide(op Op) (Permit, error) {
	b.mu.Lock()
	now := time.Now()
	if b.state == Closed {
		p := b.period
		b.wake(p, now)
		b.unlock()
		return p.admitIn(op)
	}
	permit, refusal := b.grant(op, now)
	observing := b.inForce() == Observe
	b.unlock()
	if refusal == nil {
		return permit, nil
	}
	b.rejected.Add(1)
	if observing {
		return Permit{}, nil
	}
	return Permit{}, refusal
}

// Key returns what the breaker stands for.
func (b *Breaker) Key() Key { return b.key }

// Rate returns the error rate of the window, 0 to 1, with the calls that hang as
// failures, and of how many calls. It takes no lock; while the breaker is not closed,
// or sleeps, both are 0.
func (b *Breaker) Rate() (rate float64, calls int) {
	p := b.live.Load()
	if p == nil {
		return 0, 0
	}
	c := p.counts(p.window.Load())
	return c.rate(), int(c.calls + c.overdue)
}

// SetRules changes thresholds and times from now on. State, counts and the present
// cooldown stay.
func (b *Breaker) SetRules(rules *Rules) {
	if b.rules.Swap(rules).set.Observe == rules.set.Observe {
		return
	}
	b.mu.Lock()
	defer b.unlock()
	b.publish()
}

// inForce is the mode that the breaker works in. Called with the mutex held.
func (b *Breaker) inForce() Mode {
	if b.mode == Auto && b.rules.Load().set.Observe {
		return Observe
	}
	return b.mode
}

// Keep remembers the caller's reference to an opening, such as the id of the token
// that tells of it, until the breaker has closed. It shows in events, refusals, status
// and snapshot. It does nothing where the breaker has closed since that generation.
func (b *Breaker) Keep(generation uint64, reference string) {
	b.mu.Lock()
	defer b.unlock()
	if b.state == Closed || generation > b.generation || generation < b.outage.began {
		return
	}
	b.outage.reference = reference
	b.publish()
}

// SetMode changes what the breaker is allowed to do. Forcing changes the state at
// once; a breaker that was forced open and is so no longer comes back by a probe.
func (b *Breaker) SetMode(mode Mode) {
	b.mu.Lock()
	defer b.unlock()
	if b.mode == mode || b.stopped {
		return
	}
	was := b.mode
	b.mode = mode
	now := time.Now()
	switch {
	case mode == ForcedOpen:
		b.forceOpen(now)
	case mode == ForcedClosed && b.state != Closed:
		b.close(ByOperator, now)
	case was == ForcedOpen:
		b.halfOpen(ByOperator, now)
	}
	b.publish()
}

// unlock is how every change ends: the hook hears of it outside the lock.
func (b *Breaker) unlock() {
	tell := len(b.events) > 0 && !b.telling
	b.mu.Unlock()
	if tell {
		b.tell()
	}
}
