package breaker

import (
	"sync/atomic"
	"time"
)

// Permit is the right to make one call. Keep it in one place and do not copy it once
// it is in use. The zero value admits nothing and its methods do nothing.
type Permit struct {
	owner   *Breaker
	period  *period // of an ordinary call; nil if it counts for nothing
	waits   *group  // the group in which it waits for an answer; nil if in none
	lease   uint64  // of a probe; 0 otherwise
	settled uint32  // Done was called
	slow    bool
}

// Answered says that the header of a good answer has arrived, after latency. From
// here on the call is neither overdue nor the probe: a probe that is answered closes
// the breaker, so that a long stream does not hold it. What comes of the body is told
// by Done. Call it once at most, before Done, and not where the body is still to be
// looked into for a failure.
func (p *Permit) Answered(latency time.Duration) {
	if p.owner == nil || atomic.LoadUint32(&p.settled) != 0 {
		return
	}
	limit := p.owner.rules.Load().set.SlowCall
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

// Done settles the permit with what came of the call. Only the first call counts, so
// that `defer permit.Done(Outcome{})` covers every other exit path. It may be called
// from any goroutine.
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

// Probe reports whether the call is the one that decides whether the breaker closes.
func (p *Permit) Probe() bool { return p.lease != 0 }

// Lease returns what the call holds as a probe; the zero value where it is none.
func (p *Permit) Lease() Lease {
	if p.lease == 0 {
		return Lease{}
	}
	return Lease{owner: p.owner, id: p.lease}
}

func (p *Permit) stopWaiting() {
	if p.waits != nil {
		p.period.queue.leave(p.waits)
		p.waits = nil
	}
}

// endProbe gives the lease back. A call that passed counts like any other from then
// on: its body can still fail.
func (p *Permit) endProbe(o Outcome) {
	p.period = p.owner.judgeProbe(p.lease, o)
	p.lease = 0
}
