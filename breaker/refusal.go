package breaker

import (
	"fmt"
	"time"
)

// OpenError refuses a call: nothing of it was sent. Calls share it, so it is not to be
// changed.
type OpenError struct {
	Key        Key
	State      State // Open or HalfOpen; Closed where a View refuses
	Mode       Mode
	Generation uint64
	// Until is when the next probe may be let through; zero where nobody knows: a probe
	// is under way, or the breaker is forced open. Where a View refuses, it is when the
	// call may be let through if nothing fails until then.
	Until time.Time
	// View is what the call's own view asks for and the settings heed, where it refuses;
	// else nil.
	View *View
	// Reason, Cause and Evidence are those of the opening, Cause and Evidence as they
	// came with the failure.
	Reason   Reason
	Cause    string
	Evidence string
	// Reference is what Keep remembered of the opening.
	Reference string
}

func (e *OpenError) Error() string {
	text := fmt.Sprintf("breaker: %v is %v", e.Key, e.State)
	switch {
	case e.Mode == ForcedOpen:
		return text + " (forced)"
	case e.View != nil:
		text += fmt.Sprintf(", and fails more than %v of the calls in %v", e.View.Threshold(), e.View.Window())
	}
	if e.Cause != "" {
		text += ": " + e.Cause
	}
	return text
}

// unknownWait is the advice where it is not known how long to wait.
const unknownWait = time.Second

// RetryAfter is how long to wait before the call is worth another attempt, from now;
// never less than 0. It is 1 s where nobody knows.
func (e *OpenError) RetryAfter() time.Duration {
	if e.Until.IsZero() {
		return unknownWait
	}
	return max(time.Until(e.Until), 0)
}

// Refusal is what any call would be refused with at this moment, or nil: what Acquire
// would do is then not known. It takes no lock, counts nothing, and promises nothing
// for the next moment.
func (b *Breaker) Refusal() *OpenError { return b.refusal.Load() }

// RefusalOf is what a call of this kind would be refused with at this moment, or nil:
// beside Refusal, that its view refuses it, and that a half-open breaker still waits for
// a safe call to be the probe.
func (b *Breaker) RefusalOf(op Op) *OpenError {
	if refusal := b.refusal.Load(); refusal != nil {
		return refusal
	}
	if p := b.live.Load(); p != nil {
		if op.View != nil {
			if refusal := p.refused(op.View); refusal != nil && refusal.Mode != Observe {
				return refusal
			}
		}
		return nil
	}
	if op.preferred() {
		return nil
	}
	b.mu.Lock()
	defer b.unlock()
	if b.state == Closed || b.inForce() == Observe {
		return nil
	}
	return b.unsuited(op, time.Now())
}

// refuse describes the present state. Called with the mutex held.
func (b *Breaker) refuse(until time.Time) *OpenError {
	o := &b.outage
	return &OpenError{
		Key: b.key, State: b.state, Mode: b.mode, Generation: b.generation, Until: until,
		Reason: o.reason, Cause: o.last.cause, Evidence: o.last.evidence, Reference: o.reference,
	}
}
