package bulkhead

import (
	"math"
	"time"
)

const (
	window     = int64(10 * time.Second / time.Microsecond) // over which calls and retries are compared
	remembered = int64(5 * time.Minute / time.Microsecond)  // for so long a failure is known, if not maxFailed follow
	maxFailed  = 1 << 15
)

// sent counts what a workflow has sent, in the window that runs and in the one before: its retry budget,
// since agents that all retry at once must not multiply a failure.
type sent struct {
	window         int64
	calls, retries [2]int
	refused        int // retries, in the window that runs
}

// turn begins a new window, once it is time.
func (s *sent) turn(now int64) {
	switch at := now / window; at - s.window {
	case 0:
	case 1:
		*s = sent{window: at, calls: [2]int{0, s.calls[0]}, retries: [2]int{0, s.retries[0]}}
	default:
		*s = sent{window: at}
	}
}

// recent is about how many of n there were in the last 10 s.
func recent(n [2]int, now int64) float64 {
	return float64(n[0]) + float64(n[1])*(1-float64(now%window)/float64(window))
}

// retry is what retries with one key share: most often all but one will find it running, and are not sent.
type retry struct {
	lot     *lot
	key     uint64
	holders int
	sent    bool
}

// retries counts a retry of l, or says when to try again.
func (p *Pool) retries(l *lot, key uint64, now int64) (*retry, time.Duration) {
	if r := p.again[key]; r != nil && r.lot == l {
		r.holders++
		return r, 0
	}
	s := &l.sent
	s.turn(now)
	part := float64(p.set.Retries) / 100 * recent(s.calls, now)
	most := part + float64(int64(p.set.RetryFloor)*window)/1e6
	if recent(s.retries, now)+1 > most {
		s.refused++
		// They come back one after the other, as fast as the budget grows.
		return nil, s.roomIn(most, now) + time.Duration(math.Min(float64(s.refused)/most*float64(window), 1e9))*time.Microsecond
	}
	r := &retry{lot: l, key: key, holders: 1}
	if key != 0 {
		p.again[key] = r
	}
	s.retries[0]++
	return r, 0
}

// roomIn is when there is room for one more retry, if at most so many may be recent.
func (s *sent) roomIn(most float64, now int64) time.Duration {
	ends := window - now%window // when the one that runs becomes the one before
	stays, goes := float64(s.retries[0]), float64(s.retries[1])
	wait := int64(0)
	if stays+1 > most {
		wait, stays, goes = ends, 0, stays
		ends = window
	}
	if most < 1 {
		return time.Minute
	}
	left := float64(ends) / float64(window)
	if need := (most - 1 - stays) / math.Max(goes, 1); need < left {
		wait += int64((left - need) * float64(window))
	}
	return time.Duration(wait) * time.Microsecond
}

// Sent says that the call goes to the upstream now, so that later retries with its key count anew.
func (t *Permit) Sent() {
	p, r := t.pool, t.retry
	if p == nil || r == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := &r.lot.sent; r.sent { // a slow one: it was between its admission and its claim for all of another attempt
		s.turn(p.now())
		s.retries[0]++
	}
	r.sent = true
	p.counts.Retries++
	if p.again[r.key] == r {
		delete(p.again, r.key)
	}
}

// leave ends what retries began for one holder. A retry that nobody has sent does not count.
func (p *Pool) leave(r *retry) {
	if r == nil {
		return
	}
	if r.holders--; r.holders > 0 || r.sent {
		return
	}
	if p.again[r.key] == r {
		delete(p.again, r.key)
	}
	if s := &r.lot.sent; s.retries[0] > 0 {
		s.retries[0]--
	} else {
		s.retries[1] = max(s.retries[1]-1, 0)
	}
}

// Failed reports that a call with this key was sent, and may be again: the next attempt is a retry.
func (p *Pool) Failed(key uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, now := &p.failed, p.now()
	if f.turn(now, len(f.keys[0]) >= maxFailed); f.keys[0] == nil {
		f.keys[0] = map[uint64]struct{}{}
	}
	f.keys[0][key] = struct{}{}
}

// failures are the keys of calls that failed lately, the newer ones in the first set.
type failures struct {
	keys  [2]map[uint64]struct{}
	since int64
}

func (f *failures) turn(now int64, full bool) {
	switch {
	case now-f.since >= 2*remembered:
		*f = failures{since: now}
	case full || now-f.since >= remembered:
		*f = failures{keys: [2]map[uint64]struct{}{nil, f.keys[0]}, since: now}
	}
}
