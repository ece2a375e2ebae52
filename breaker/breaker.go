// Package breaker is a circuit breaker (cascade 3.2): it refuses calls to a failing upstream, and
// closes again after one probe has succeeded.
//
// A Breaker is CLOSED, OPEN or HALF_OPEN (cascade 3.2.1). A call begins with Acquire and reports its
// outcome with Permit.Done, on every exit path:
//
//	permit, err := b.Acquire(breaker.Op{Safe: true})
//	if err != nil {
//		return err // *OpenError: nothing was sent
//	}
//	defer permit.Done(breaker.Outcome{}) // a panic or Goexit is neutral and frees the probe
//	... send; when the header of a good answer arrives:
//	permit.Answered(time.Since(start))
//	... when the body has ended:
//	permit.Done(breaker.Outcome{Class: breaker.Success})
//
// What counts, and when:
//
//   - A call enters the error rate when it ends, however long it took. The rate is compared with the
//     threshold at every outcome. A call without an answer after its patience counts as a failure
//     for as long as it hangs. A call that was answered, such as a long stream, counts when its body
//     ends.
//   - A permit belongs to the generation in which it was acquired. Results of an older generation
//     change nothing.
//   - A View makes the breaker stricter for one caller, who is refused at a lower share of failures.
//   - In HALF_OPEN one call is the probe, under a lease. Its answer closes the breaker; a failure,
//     or the end of the lease, opens it for twice as long.
//
// A closed breaker admits and counts calls with a few atomic operations and reads no clock: a timer,
// which runs only while there are calls to count, advances the window. All times are monotonic: steps
// of the wall clock have no effect.
//
// A Registry holds a breaker for each upstream. The package knows neither HTTP nor Caddy: callers
// classify outcomes.
package breaker

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Breaker guards one upstream. Make one with New, or get it from a Registry. It is safe for
// concurrent use.
type Breaker struct {
	key  Key
	hook Hook

	// Read without a lock: live admits calls, refusal refuses them. If both are nil, decide takes
	// the lock. Only publish writes them.
	live    atomic.Pointer[period]
	refusal atomic.Pointer[OpenError]

	rules    atomic.Pointer[Rules]
	rejected atomic.Uint64

	// safe is when a preferred call last asked: 1 + the bucket of the period; 0 for none in the window. It
	// stays while there is no period. What asked before the next one counts for its first bucket.
	safe atomic.Uint32

	mu         sync.Mutex
	state      State
	mode       Mode
	generation uint64    // one more with every change of state
	openings   uint64    // since New or restore
	since      time.Time // of state
	period     *period   // in CLOSED
	outage     outage
	probe      probe
	lane       *lane       // shared with others; nil for none
	timer      *time.Timer // the window's next step, the cooldown's end, the lease's end
	stopped    bool        // dropped from its registry: the state does not change any more
	events     []event     // not yet delivered to the hook
	reported   bool        // whoever has the mutex has queued one
	delivering bool        // a goroutine is delivering them
}

// outage is kept from the first opening until the breaker has been closed for healthy.
type outage struct {
	began        uint64        // generation of the first opening
	until        time.Time     // end of the present cooldown; zero without one
	cooldown     time.Duration // the newest, before Retry-After; 0 before the first
	lasts        time.Duration // the newest, with it
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

// Key returns the breaker's name.
func (b *Breaker) Key() Key { return b.key }

// Keep stores the caller's reference to an opening, such as the id of the token that reports it,
// until the breaker has closed. Events, refusals, status and snapshot contain it. Keep does nothing
// if the breaker has closed since that generation.
func (b *Breaker) Keep(generation uint64, reference string) {
	b.mu.Lock()
	defer b.unlock()
	if b.state == Closed || generation > b.generation || generation < b.outage.began {
		return
	}
	b.outage.reference = reference
	b.publish()
}

// SetMode changes the mode. Forced modes change the state at once; a breaker that is no longer forced
// open becomes HALF_OPEN.
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

// Trip opens a closed breaker for a cooldown, as if it had exceeded a limit. It reports whether it did: not
// one that is open or half-open, or that an operator keeps closed.
func (b *Breaker) Trip(reason Reason) bool {
	b.mu.Lock()
	defer b.unlock()
	p := b.period
	return p != nil && b.trip(p, reason, p.counts(p.window.Load()))
}

// unlock unlocks the mutex and then delivers the events to the hook that were queued under it. Those of others are
// theirs to deliver: their calls wait for the hook.
func (b *Breaker) unlock() {
	deliver := b.reported && !b.delivering
	b.reported = false
	b.mu.Unlock()
	if deliver {
		b.deliver()
	}
}

// State is the state of a breaker. Its text is that of the circuits endpoint (cascade 3.2.3):
// closed, open, half_open.
type State uint8

const (
	Closed   State = iota // calls flow and are counted
	Open                  // every call is refused
	HalfOpen              // one probe decides
)

var stateNames = []string{"closed", "open", "half_open"}

func (s State) String() string { return nameOf(stateNames, int(s)) }

// MarshalText returns the state's name. Unknown values are an error.
func (s State) MarshalText() ([]byte, error) { return marshalName(stateNames, int(s), "state") }

// UnmarshalText reads a state's name.
func (s *State) UnmarshalText(text []byte) error {
	i, err := unmarshalName(stateNames, text, "state")
	*s = State(i)
	return err
}

// Mode is set by an operator. Its text is auto, observe, forced_open or forced_closed.
type Mode uint8

const (
	Auto         Mode = iota // the breaker decides
	Observe                  // the breaker decides, and refuses nobody
	ForcedOpen               // every call is refused
	ForcedClosed             // no call is refused; outcomes are counted
)

var modeNames = []string{"auto", "observe", "forced_open", "forced_closed"}

func (m Mode) String() string { return nameOf(modeNames, int(m)) }

// MarshalText returns the mode's name. Unknown values are an error.
func (m Mode) MarshalText() ([]byte, error) { return marshalName(modeNames, int(m), "mode") }

// UnmarshalText reads a mode's name.
func (m *Mode) UnmarshalText(text []byte) error {
	i, err := unmarshalName(modeNames, text, "mode")
	*m = Mode(i)
	return err
}

// Reason is why a breaker changed its state or refused a call.
type Reason string

// The reasons. If several apply, it is the first in this order.
const (
	ErrorRate     Reason = "error_rate"        // more failures than the threshold
	Consecutive   Reason = "consecutive"       // that many failures in a row
	SlowCalls     Reason = "slow_calls"        // more slow answers than their threshold
	OverdueCalls  Reason = "overdue_calls"     // more than the threshold, with calls that hang
	CooldownOver  Reason = "cooldown_over"     // OPEN to HALF_OPEN
	ProbePassed   Reason = "probe_passed"      // HALF_OPEN to CLOSED
	ProbeFailed   Reason = "probe_failed"      // HALF_OPEN to OPEN
	ProbeTimedOut Reason = "probe_timeout"     // HALF_OPEN to OPEN: the lease ran out
	ByOperator    Reason = "operator_mode"     // SetMode
	ByCascade     Reason = "cascade"           // Trip: what failed behind it spreads
	StricterView  Reason = "stricter_view"     // only of refusals: a View
	PeerPassed    Reason = "peer_probe_passed" // to CLOSED: Follow
	PeerFailed    Reason = "peer_probe_failed" // HALF_OPEN to OPEN: Follow
)

func nameOf(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("unknown(%d)", i)
}

func marshalName(names []string, i int, what string) ([]byte, error) {
	if i >= len(names) {
		return nil, fmt.Errorf("breaker: %d is no %s; it is one of %v", i, what, names)
	}
	return []byte(names[i]), nil
}

func unmarshalName(names []string, text []byte, what string) (int, error) {
	for i, name := range names {
		if string(text) == name {
			return i, nil
		}
	}
	return 0, fmt.Errorf("breaker: %q is no %s; it is one of %v", text, what, names)
}

// enter changes the state. The mutex is held by the callers of this and of all functions down to close.
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

// publish updates live and refusal from the state.
func (b *Breaker) publish() {
	switch {
	case b.state == Closed && b.period.awake:
		b.refusal.Store(nil)
		b.live.Store(b.period)
		return
	case b.state == Closed, b.mode == Observe, b.state == HalfOpen && b.probe.holder == 0:
		b.live.Store(nil)
		b.refusal.Store(nil)
		return
	}
	b.live.Store(nil)
	b.refusal.Store(b.refuse(b.outage.until))
}

// wake starts the timer of the window, if p is the present period.
func (b *Breaker) wake(p *period, now time.Time) {
	if b.period != p || b.state != Closed || p.awake || b.stopped {
		return
	}
	p.resume(now, b.rules.Load())
	b.arm(p.begun.Add(b.rules.Load().step).Sub(now))
	b.publish()
}

// arm sets the timer. Its meaning depends on the state when it fires.
func (b *Breaker) arm(d time.Duration) {
	if b.timer == nil {
		b.timer = time.AfterFunc(d, b.onTimer)
		return
	}
	b.timer.Reset(d)
}

// onTimer is called by the timer, perhaps after the state has changed meanwhile.
func (b *Breaker) onTimer() {
	b.mu.Lock()
	defer b.unlock()
	if b.stopped {
		return
	}
	now := time.Now()
	switch b.state {
	case Closed:
		if b.period.awake {
			b.advanceWindow(now)
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

// advanceWindow advances the window to now. If it is empty then, the timer stops until the next call
// or outcome.
func (b *Breaker) advanceWindow(now time.Time) {
	p, rules := b.period, b.rules.Load()
	idle := p.advance(now, rules)
	if c := p.counts(p.window.Load()); c.overdue > 0 {
		if reason := rules.exceeded(c); reason != "" && b.trip(p, reason, c) {
			return
		}
	}
	if idle {
		// Calls that are admitted from here on call wake; those before are counted below.
		b.live.Store(nil)
		if p.window.Load() == 0 && !p.queue.joined() {
			p.awake, p.slept = false, now
			return
		}
		b.live.Store(p)
	}
	b.arm(p.begun.Add(rules.step).Sub(now))
}

// trip opens the breaker because of p's counts, unless p has ended or the breaker is forced closed. It
// reports whether it did.
func (b *Breaker) trip(p *period, reason Reason, c counts) bool {
	if b.period != p || b.state != Closed || b.mode == ForcedClosed || b.stopped {
		return false
	}
	now := time.Now()
	rules := b.rules.Load()
	cooldown := b.outage.cooldown
	if cooldown == 0 || now.Sub(b.since) >= healthy {
		cooldown = time.Duration(rules.set.Cooldown)
	}
	b.outage = outage{began: b.generation + 1, counts: c}
	if reason != SlowCalls && c.failures > 0 {
		b.outage.last = p.last // else it is unrelated to the opening
	}
	b.open(reason, cooldown, p.retryAfter, now)
	return true
}

// open begins a cooldown that lasts until retryAfter at least.
func (b *Breaker) open(reason Reason, cooldown time.Duration, retryAfter, now time.Time) {
	o := &b.outage
	o.cooldown = cooldown
	lasts := max(cooldown, retryAfter.Sub(now))
	o.until, o.lasts = now.Add(lasts), lasts
	o.total += lasts
	b.period = nil
	b.endLease(o.until)
	b.arm(lasts)
	b.enter(Open, reason, now)
}

// forceOpen opens the breaker until the mode changes.
func (b *Breaker) forceOpen(now time.Time) {
	if b.state == Closed {
		p := b.period
		b.outage = outage{
			began: b.generation + 1, cooldown: b.outage.cooldown, counts: p.counts(p.window.Load()),
		}
	}
	b.outage.until = time.Time{}
	b.period = nil
	b.endLease(time.Time{})
	if b.state != Open {
		b.enter(Open, ByOperator, now)
	}
}

// halfOpen admits the next suitable call as the probe.
func (b *Breaker) halfOpen(reason Reason, now time.Time) {
	b.outage.until = time.Time{}
	b.enter(HalfOpen, reason, now)
}

// close begins a period with an empty window (cascade 3.2.2). The last cooldown is kept for an early
// reopening.
func (b *Breaker) close(reason Reason, now time.Time) {
	b.outage.until = time.Time{}
	b.endLease(time.Time{})
	b.period = &period{owner: b, begun: now, slept: now, generation: b.generation + 1}
	b.enter(Closed, reason, now)
	b.outage = outage{cooldown: b.outage.cooldown}
	if b.safe.Load() != 0 {
		b.safe.Store(1)
		b.wake(b.period, now) // or it would not be forgotten after a window
	}
}

// Hook receives the events of breakers. It is called without locks held, for each breaker in order
// and by one goroutine at a time: that of the call that caused the change, or a timer's. It may call
// every method of the breaker. It should return quickly, since the call waits for it.
type Hook interface {
	// Transition receives every change of state.
	Transition(Event)
	// PermanentlyOpen reports that three probes in a row failed. It is called once an
	// outage, after Transition (ATD, HITL case 4).
	PermanentlyOpen(Event)
}

// Event is a change of state.
type Event struct {
	Key        Key
	From, To   State
	Mode       Mode
	Generation uint64 // of To
	Time       time.Time
	Reason     Reason
	// Cause and Evidence are those of the Outcome of the newest failure: the one that opened the
	// breaker, or the failed probe.
	Cause    string
	Evidence string
	// Reference is that of Keep in this outage.
	Reference string
	// ErrorRate (0 to 1), Calls and Failures are those of the window when the breaker left CLOSED,
	// with calls that hung as failures. Window is its length.
	ErrorRate       float64
	Calls, Failures int
	Window          time.Duration
	// Cooldown is the present one if To is Open, else the last. TotalCooldown is the sum since the
	// breaker left CLOSED, over restarts too.
	Cooldown      time.Duration
	TotalCooldown time.Duration
	FailedProbes  int // in a row
}

type eventKind uint8

const (
	transition eventKind = iota
	permanent
)

type event struct {
	Event
	kind eventKind
}

// report queues an event for unlock. The mutex is held.
func (b *Breaker) report(e event) {
	if b.hook != nil && !b.stopped {
		b.events, b.reported = append(b.events, e), true
	}
}

// describe is the event of the present state. The mutex is held.
func (b *Breaker) describe(from State, now time.Time) Event {
	o := &b.outage
	return Event{
		Key: b.key, From: from, To: b.state, Mode: b.mode, Generation: b.generation, Time: now,
		Reason: o.reason, Cause: o.last.cause, Evidence: o.last.evidence, Reference: o.reference,
		ErrorRate: o.counts.rate(),
		Calls:     int(o.counts.calls + o.counts.overdue),
		Failures:  int(o.counts.failures + o.counts.overdue),
		Window:    time.Duration(b.rules.Load().set.Window),
		Cooldown:  o.lasts, TotalCooldown: o.total, FailedProbes: o.failedProbes,
	}
}

// deliver passes the queued events to the hook, unless another goroutine does so already.
func (b *Breaker) deliver() {
	b.mu.Lock()
	if b.delivering {
		b.mu.Unlock()
		return
	}
	b.delivering = true
	// Events are delivered even after a hook has panicked.
	defer func() {
		b.delivering, b.reported = false, len(b.events) > 0
		b.mu.Unlock()
	}()
	for len(b.events) > 0 {
		e := b.events[0]
		b.events = b.events[1:]
		b.callHook(e)
	}
}

func (b *Breaker) callHook(e event) {
	b.mu.Unlock()
	defer b.mu.Lock()
	if e.kind == permanent {
		b.hook.PermanentlyOpen(e.Event)
	} else {
		b.hook.Transition(e.Event)
	}
}
