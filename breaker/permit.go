package breaker

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Class is the result of a call with regard to the upstream's health.
type Class uint8

const (
	// Neutral says nothing about the upstream: the client left, the gateway refused the call, or
	// the result is unknown. It is the zero value, so that Done can be deferred with an empty
	// Outcome.
	Neutral Class = iota
	// Success is a complete and good answer.
	Success
	// Failure is an upstream that cannot be reached, breaks off, or answers with an error.
	Failure
	// RateLimited is a refusal for too many calls (429). It counts in no rate, since the upstream
	// works, but fails a probe.
	RateLimited
	// InBand is a failure inside an answer that began well: an error in the body, an error event of
	// a stream, a truncated body. It counts as a Failure.
	InBand
)

var classNames = []string{"neutral", "success", "failure", "rate_limited", "in_band"}

func (c Class) String() string { return nameOf(classNames, int(c)) }

// Outcome is the result of a call that has ended.
type Outcome struct {
	Class Class
	// RetryAfter is how long the upstream asked not to be called; 0 if it did not. It extends the
	// cooldown, up to Settings.MaxCooldown.
	RetryAfter time.Duration
	// Cause describes the failure for people, in a few words. Events, refusals and status contain
	// it, so that it must not contain secrets.
	Cause string
	// Evidence is the caller's reference to the failure, such as the id of an error token. The
	// breaker only passes it on.
	Evidence string
}

// Op describes a call to Acquire.
type Op struct {
	// Safe says that the call changes nothing (GET, HEAD). Safe calls are preferred as probes.
	Safe bool
	// ClientPaced says that the call is sent at the pace of its client, until Lease.Sent. It is not
	// preferred as a probe, and a lease that ends before Lease.Sent is neutral.
	ClientPaced bool
	// Patience is how long the call may go without an answer before it counts as a failure; 0 is for
	// ever. It is rounded up, by at most a quarter and two steps of the window.
	Patience time.Duration
	// View makes the breaker stricter for this call; nil does not.
	View *View
}

// Acquire admits the call or refuses it with an *OpenError. The permit has to be settled with Done
// on every exit path. Acquire never waits for another call.
func (b *Breaker) Acquire(op Op) (Permit, error) {
	if p := b.live.Load(); p != nil {
		b.noteSafe(op, p.at.Load())
		if op.View != nil {
			return p.admitIn(op)
		}
		return p.admit(op), nil
	}
	if refusal := b.refusal.Load(); refusal != nil {
		b.noteSafe(op, 0)
		b.rejected.Add(1)
		return Permit{}, refusal
	}
	return b.decide(op)
}

// decide is Acquire with the lock, for a closed breaker whose timer is stopped, for the probe, and for
// a breaker that only observes.
func (b *Breaker) decide(op Op) (Permit, error) {
	b.mu.Lock()
	now := time.Now()
	if b.state == Closed {
		p := b.period
		b.wake(p, now)
		b.noteSafe(op, p.at.Load())
		b.unlock()
		return p.admitIn(op)
	}
	b.noteSafe(op, 0)
	permit, refusal := b.grant(op, now)
	observing := b.mode == Observe
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

// noteSafe records that a call asks in that bucket, if it is a preferred one.
func (b *Breaker) noteSafe(op Op, bucket uint32) {
	if op.preferred() && b.safe.Load() != bucket+1 {
		b.safe.Store(bucket + 1)
	}
}

// Permit is the right to make one call. Do not copy it once it is in use. Methods of the zero value do
// nothing.
type Permit struct {
	owner   *Breaker
	period  *period // in which the call counts; nil for none
	waits   *group  // in which the call waits for an answer; nil for none
	lease   uint64  // of a probe; 0 otherwise
	settled uint32  // Done was called
	slow    bool
}

// Answered reports that the header of a good answer arrived after latency. The call is not overdue
// from then on, and a probe closes the breaker, so that a long stream does not delay that. Done
// reports the result of the body. Call Answered once at most, before Done, and not if a failure in
// the body has to count for the probe.
func (p *Permit) Answered(latency time.Duration) {
	if p.owner == nil || atomic.LoadUint32(&p.settled) != 0 {
		return
	}
	limit := time.Duration(p.owner.rules.Load().set.SlowCall)
	p.slow = limit > 0 && latency > limit
	p.stopWaiting()
	if p.lease == 0 {
		return
	}
	if p.slow {
		p.endProbe(Outcome{Class: Failure, Cause: "slow answer"})
	} else {
		p.endProbe(Outcome{Class: Success})
	}
}

// Done settles the permit with the result of the call. Only the first call counts, so that `defer
// permit.Done(Outcome{})` covers every other exit path. It may be called from any goroutine.
func (p *Permit) Done(o Outcome) {
	if p.owner == nil || !atomic.CompareAndSwapUint32(&p.settled, 0, 1) {
		return
	}
	p.stopWaiting()
	if p.lease != 0 {
		p.endProbe(o)
	}
	if p.period != nil {
		p.period.count(&o, p.slow)
	}
}

// Probe reports whether the call is the probe of a HALF_OPEN breaker.
func (p *Permit) Probe() bool { return p.lease != 0 }

// Lease returns the lease of a probe; the zero value for other calls.
func (p *Permit) Lease() Lease {
	if p.lease == 0 {
		return Lease{}
	}
	return Lease{owner: p.owner, id: p.lease}
}

// Yield gives a probe back that another process is to send, and returns the refusal of its call. until is when
// the next one may be sent; zero if that is unknown. In mode Observe it refuses nothing, and the permit counts
// nothing.
func (p *Permit) Yield(until time.Time) *OpenError {
	b := p.owner
	p.Done(Outcome{})
	*p = Permit{}
	b.rejected.Add(1)
	b.mu.Lock()
	defer b.unlock()
	if b.mode == Observe {
		return nil
	}
	return b.refuse(until)
}

func (p *Permit) stopWaiting() {
	if p.waits != nil {
		p.period.queue.leave(p.waits)
		p.waits = nil
	}
}

// endProbe ends the lease. A call that passed counts like any other from then on: its body can still
// fail.
func (p *Permit) endProbe(o Outcome) {
	p.period = p.owner.judgeProbe(p.lease, o)
	p.lease = 0
}

// probe is the one call that is admitted in HALF_OPEN. Its lease has an end, so that a call that never
// reports a result does not keep the breaker open.
type probe struct {
	leases uint64    // given so far
	holder uint64    // the present lease; 0 without one
	ends   time.Time // when it ends
	awaits awaited
}

// awaited is what a lease waits for. It decides what its end means.
type awaited uint8

const (
	awaitsUpstream awaited = iota // no answer: the probe failed
	awaitsClient                  // the call is still being sent: neutral
	awaitsNobody                  // the answer has begun: neutral
)

// lane is shared by breakers that stand before one downstream: one of them probes at a time, and after a
// failed probe none does until the cooldown of its breaker is over (ATD, "Coordinated Circuit Breaking").
type lane struct {
	mu     sync.Mutex
	holder *Breaker
	until  time.Time // end of the cooldown after the last failed probe
}

// enter lets b probe; if not, it returns when it may. The time is zero while another one probes.
func (l *lane) enter(b *Breaker, now time.Time) (until time.Time, ok bool) {
	if l == nil {
		return time.Time{}, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.holder != nil && l.holder != b:
		return time.Time{}, false
	case now.Before(l.until):
		return l.until, false
	}
	l.holder = b
	return time.Time{}, true
}

// leave ends the probe of b, if it has one. until is the end of its cooldown if that failed.
func (l *lane) leave(b *Breaker, until time.Time) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holder == b {
		l.holder, l.until = nil, until
	}
}

// endLease ends the probe. until is the end of the cooldown if it failed. The mutex is held.
func (b *Breaker) endLease(until time.Time) {
	b.probe.holder = 0
	b.lane.leave(b, until)
}

// Lease is that of a probe. It may be copied, and used from any goroutine. Methods do nothing on the
// zero value and after the lease has ended.
type Lease struct {
	owner *Breaker
	id    uint64
}

// Sent reports that a call with Op.ClientPaced is sent completely. Settings.ProbeLease begins anew, so
// that a slow client does not take the upstream's time.
func (l Lease) Sent() {
	l.change(func(b *Breaker) {
		if b.probe.awaits != awaitsClient {
			return
		}
		lasts := time.Duration(b.rules.Load().set.ProbeLease)
		b.probe.awaits, b.probe.ends = awaitsUpstream, time.Now().Add(lasts)
		b.arm(lasts)
	})
}

// Alive reports that the upstream began an answer that does not show yet whether the call failed. The
// end of the lease is neutral then.
func (l Lease) Alive() {
	l.change(func(b *Breaker) { b.probe.awaits = awaitsNobody })
}

// change calls do with the mutex held, unless the lease has ended.
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

// grant admits the call as the probe or refuses it. The mutex is held, in OPEN or HALF_OPEN.
func (b *Breaker) grant(op Op, now time.Time) (Permit, *OpenError) {
	if refusal := b.unsuited(op, now); refusal != nil {
		return Permit{}, refusal
	}
	if until, ok := b.lane.enter(b, now); !ok {
		return Permit{}, b.refuse(until)
	}
	rules := b.rules.Load()
	b.probe.leases++
	b.probe.holder = b.probe.leases
	b.probe.ends = now.Add(time.Duration(rules.set.ProbeLease))
	b.probe.awaits = awaitsUpstream
	if op.ClientPaced {
		b.probe.awaits = awaitsClient
	}
	b.arm(time.Duration(rules.set.ProbeLease))
	b.publish()
	return Permit{owner: b, lease: b.probe.holder}, nil
}

// probeWait is how long, in HALF_OPEN, only preferred calls are admitted as the probe.
const probeWait = 5 * time.Second

// preferred reports whether the call may be the probe at once.
func (op Op) preferred() bool { return op.Safe && !op.ClientPaced }

// unsuited refuses a call that cannot be the probe now; nil if it can. The mutex is held, in OPEN or
// HALF_OPEN.
func (b *Breaker) unsuited(op Op, now time.Time) *OpenError {
	if b.state == Open || b.probe.holder != 0 {
		return b.refuse(b.outage.until)
	}
	if op.preferred() {
		return nil
	}
	// Unsafe calls are probes only if no safe one came, or none is to be expected, since none came in the
	// window before the opening or since then (ADR 0022).
	if safeUntil := b.since.Add(probeWait); b.safe.Load() != 0 && now.Before(safeUntil) {
		return b.refuse(safeUntil)
	}
	return nil
}

// checkLease ends a lease that has expired. The mutex is held.
func (b *Breaker) checkLease(now time.Time) {
	if b.probe.holder == 0 {
		return
	}
	if left := b.probe.ends.Sub(now); left > 0 {
		b.arm(left)
		return
	}
	if b.probe.awaits != awaitsUpstream {
		// Neither a slow client nor a quiet stream is a failure of the upstream.
		b.freeProbe()
		return
	}
	lease := time.Duration(b.rules.Load().set.ProbeLease)
	b.reopen(ProbeTimedOut, Outcome{Cause: fmt.Sprintf("no answer within %v", lease)}, now)
}

// judgeProbe handles the outcome of the probe with that lease. It returns the period in which a call
// that passed counts from then on; nil for others.
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

// freeProbe admits the next suitable call as the probe. The mutex is held.
func (b *Breaker) freeProbe() {
	b.endLease(time.Time{})
	b.publish()
}

// reopen opens the breaker after a failed probe, for twice as long as before (cascade 3.2.2). The mutex
// is held.
func (b *Breaker) reopen(reason Reason, o Outcome, now time.Time) {
	rules := b.rules.Load()
	b.outage.last = failureRecord{o.Cause, o.Evidence}
	b.outage.failedProbes++
	var retryAfter time.Time
	if o.RetryAfter > 0 {
		retryAfter = now.Add(min(o.RetryAfter, time.Duration(rules.set.MaxCooldown)))
	}
	doubled := min(max(b.outage.cooldown, time.Duration(rules.set.Cooldown)/2)*2, time.Duration(rules.set.MaxCooldown))
	b.open(reason, doubled, retryAfter, now)
	if b.outage.failedProbes == giveUp {
		b.report(event{kind: permanent, Event: b.describe(HalfOpen, now)})
	}
}

// PeerProbe is the result of a probe that another process has sent to the same upstream.
type PeerProbe struct {
	// Outage is that of this breaker (Snapshot.Outage) when the probe was sent.
	Outage uint64
	Passed bool
	// Of a probe that failed: the cooldown that follows from it, and what remains of it; how
	// many have failed in a row, and why.
	Cooldown, Left time.Duration
	FailedProbes   int
	Cause          string
}

// Follow does what the result of another process's probe asks for (ATD, "Coordinated Circuit Breaking"): it
// closes the breaker, or keeps it open for as long as the other one's. It reports whether it did. It leaves alone
// a breaker that has closed since, that is forced open, or that has a probe of its own under way, and does
// nothing once the cooldown is over.
func (b *Breaker) Follow(p PeerProbe) bool {
	b.mu.Lock()
	defer b.unlock()
	o := &b.outage
	if b.stopped || b.state == Closed || b.mode == ForcedOpen || o.began != p.Outage || b.probe.holder != 0 || !p.Passed && p.Left <= 0 {
		return false
	}
	now := time.Now()
	if p.Passed {
		b.close(PeerPassed, now)
		return true
	}
	set := &b.rules.Load().set
	left := now.Add(min(p.Left, time.Duration(set.MaxCooldown)))
	o.last = failureRecord{p.Cause, ""}
	o.failedProbes = max(o.failedProbes, p.FailedProbes)
	o.cooldown = min(max(o.cooldown, p.Cooldown), time.Duration(set.MaxCooldown))
	switch {
	case b.state == HalfOpen:
		b.open(PeerFailed, o.cooldown, left, now)
	case left.After(o.until):
		o.total += left.Sub(o.until)
		o.until, o.lasts = left, left.Sub(b.since)
		b.arm(left.Sub(now))
		b.publish()
	}
	return true
}

// OpenError refuses a call: nothing of it was sent. It is shared by calls; do not change it.
type OpenError struct {
	Key        Key
	State      State // Open or HalfOpen; Closed where a View refuses
	Mode       Mode
	Generation uint64
	// Until is when the next probe may be admitted; zero if that is unknown, because a probe is
	// under way or the breaker is forced open. If a View refuses, it is when the call may be
	// admitted if nothing fails until then.
	Until time.Time
	// View is the call's view, within the bounds of the settings, if that refuses; else nil.
	View *View
	// Reason is that of the opening; Cause and Evidence are those of the failure's Outcome.
	Reason   Reason
	Cause    string
	Evidence string
	// Reference is that of Keep.
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

// RetryAfter is how long to wait, from now, before another attempt: 0 or more, and 1 s if Until is
// unknown.
func (e *OpenError) RetryAfter() time.Duration {
	if e.Until.IsZero() {
		return time.Second
	}
	return max(time.Until(e.Until), 0)
}

// Refusal is the refusal that every call would get at this moment. If it is nil, Acquire may still
// refuse. It takes no lock and counts nothing.
func (b *Breaker) Refusal() *OpenError { return b.refusal.Load() }

// RefusalOf is the refusal that this call would get at this moment, or nil. Unlike Refusal it includes
// that of a view, and of a HALF_OPEN breaker that waits for a safe call as the probe.
func (b *Breaker) RefusalOf(op Op) *OpenError {
	if refusal := b.refusal.Load(); refusal != nil {
		b.noteSafe(op, 0) // it does not come to Acquire
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
	if b.state == Closed || b.mode == Observe {
		return nil
	}
	return b.unsuited(op, time.Now())
}

// refuse is the refusal of the present state. The mutex is held.
func (b *Breaker) refuse(until time.Time) *OpenError {
	o := &b.outage
	return &OpenError{
		Key: b.key, State: b.state, Mode: b.mode, Generation: b.generation, Until: until,
		Reason: o.reason, Cause: o.last.cause, Evidence: o.last.evidence, Reference: o.reference,
	}
}
