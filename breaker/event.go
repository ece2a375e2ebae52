package breaker

import "time"

// Hook hears what becomes of breakers. It is called outside of locks, for each
// breaker in order and by one goroutine at a time: the one whose call caused the
// change, or a timer's. It may call every method of the breaker. It should be quick,
// since a call waits for it.
type Hook interface {
	// Transition hears every change of state.
	Transition(Event)
	// PermanentlyOpen hears that Settings.GiveUp probes in a row have failed, once an
	// outage, after the transition (ATD, HITL case 4).
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
	// Cause and Evidence are those of the newest failure before it, as they came with
	// its Outcome: the one that tripped the breaker, or the failed probe.
	Cause    string
	Evidence string
	// Reference is what Keep remembered of this outage.
	Reference string
	// ErrorRate, Calls and Failures are the window's when the breaker left CLOSED;
	// calls that hung then are in all three. Window is its length.
	ErrorRate       float64
	Calls, Failures int
	Window          time.Duration
	// Cooldown is the present one when To is Open, else the last. TotalCooldown is the
	// sum since the breaker left CLOSED, over restarts too.
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

// report queues an event. Called with the mutex held, by whoever ends with unlock.
func (b *Breaker) report(e event) {
	if b.hook != nil && !b.stopped {
		b.events = append(b.events, e)
	}
}

// describe is the event of the present state. Called with the mutex held.
func (b *Breaker) describe(from State, now time.Time) Event {
	o := &b.outage
	return Event{
		Key: b.key, From: from, To: b.state, Mode: b.inForce(), Generation: b.generation, Time: now,
		Reason: o.reason, Cause: o.last.cause, Evidence: o.last.evidence, Reference: o.reference,
		ErrorRate: o.counts.rate(),
		Calls:     int(o.counts.calls + o.counts.overdue),
		Failures:  int(o.counts.failures + o.counts.overdue),
		Window:    b.rules.Load().set.Window,
		Cooldown:  o.lasts, TotalCooldown: o.total, FailedProbes: o.failedProbes,
	}
}

// tell hands the queued events to the hook, unless somebody else does so already.
func (b *Breaker) tell() {
	b.mu.Lock()
	if b.telling {
		b.mu.Unlock()
		return
	}
	b.telling = true
	// A hook that panics must not silence the breaker for good.
	defer func() {
		b.telling = false
		b.mu.Unlock()
	}()
	for len(b.events) > 0 {
		e := b.events[0]
		b.events = b.events[1:]
		b.hear(e)
	}
}

func (b *Breaker) hear(e event) {
	b.mu.Unlock()
	defer b.mu.Lock()
	if e.kind == permanent {
		b.hook.PermanentlyOpen(e.Event)
	} else {
		b.hook.Transition(e.Event)
	}
}
