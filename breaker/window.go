package breaker

import (
	"fmt"
	"math"
	"math/bits"
	"sync/atomic"
	"time"
)

// buckets is how many steps a window has.
const buckets = 60

// period is the time from one closing to the next opening, with its window and its waiting calls. A
// permit points to its period: results that come after the opening go into the old period, so that
// they change neither the state nor the window after the next closing.
type period struct {
	owner      *Breaker
	generation uint64

	// Written by calls, window and extra before the ring: a bucket can be subtracted at any time.
	window atomic.Uint64 // calls, failures
	extra  atomic.Uint64 // slow, rate-limited
	at     atomic.Uint32 // the ring's present bucket
	streak atomic.Int64  // failures in a row
	ring   [buckets]bucket
	queue  queue // calls without an answer

	// Guarded by owner.mu.
	begun      time.Time     // of the present bucket
	awake      bool          // the timer advances the window
	slept      time.Time     // when the timer was stopped
	retryAfter time.Time     // the latest that the upstream asked for
	last       failureRecord // the newest failure
}

type bucket struct{ calls, extra atomic.Uint64 }

type failureRecord struct{ cause, evidence string }

// admit counts the call as waiting, unless its patience is unlimited.
func (p *period) admit(op Op) Permit {
	permit := Permit{owner: p.owner, period: p}
	if op.Patience > 0 {
		permit.waits = p.queue.join(p.owner.rules.Load().classFor(op.Patience), p)
	}
	return permit
}

// count adds an outcome and opens the breaker if that exceeds a limit.
func (p *period) count(o *Outcome, slow bool) {
	if o.RetryAfter > 0 {
		p.noteRetryAfter(o.RetryAfter)
	}
	here := &p.ring[p.at.Load()]
	var word uint64
	switch o.Class {
	case Success:
		word = p.window.Add(oneCall)
		here.calls.Add(oneCall)
		if p.streak.Load() != 0 {
			p.streak.Store(0)
		}
	case Failure, InBand:
		word = p.window.Add(oneCall | oneFailure)
		here.calls.Add(oneCall | oneFailure)
		p.streak.Add(1)
	case RateLimited:
		p.extra.Add(oneLimited)
		here.extra.Add(oneLimited)
		p.wakeOwner()
		return
	default:
		return
	}
	if slow {
		p.extra.Add(oneSlow)
		here.extra.Add(oneSlow)
	}
	// The timer may have found the window empty and stopped just before.
	if word>>32 == 1 {
		p.wakeOwner()
	}
	p.judge(word, o)
}

// judge opens the breaker if the outcome, after which the window is word, exceeds a limit.
func (p *period) judge(word uint64, o *Outcome) {
	rules := p.owner.rules.Load()
	c := p.counts(word)
	if c.failures|c.slow|c.overdue == 0 {
		return
	}
	reason := rules.exceeded(c)
	failed := o.Class != Success
	if reason == "" && failed && rules.set.Consecutive > 0 && p.streak.Load() >= int64(rules.set.Consecutive) {
		reason = Consecutive
	}
	b := p.owner
	if reason == "" {
		// Of concurrent failures only one is recorded: none waits for the lock.
		if failed && (o.Cause != "" || o.Evidence != "") && b.mu.TryLock() {
			p.last = failureRecord{o.Cause, o.Evidence}
			b.unlock()
		}
		return
	}
	b.mu.Lock()
	if failed {
		p.last = failureRecord{o.Cause, o.Evidence}
	}
	b.trip(p, reason, c)
	b.unlock()
}

func (p *period) counts(word uint64) counts {
	var c counts
	c.calls, c.failures = halves(word)
	c.slow, c.limited = halves(p.extra.Load())
	c.overdue = uint64(max(p.queue.overdue.Load(), 0))
	return c
}

func (p *period) noteRetryAfter(d time.Duration) {
	b := p.owner
	b.mu.Lock()
	defer b.mu.Unlock()
	until := time.Now().Add(min(d, time.Duration(b.rules.Load().set.MaxCooldown)))
	if until.After(p.retryAfter) {
		p.retryAfter = until
	}
}

// wakeOwner starts the timer.
func (p *period) wakeOwner() {
	b := p.owner
	b.mu.Lock()
	b.wake(p, time.Now())
	b.unlock()
}

// resume continues after the timer was stopped. The ring was empty then, so that its content is of now,
// however long ago that was.
func (p *period) resume(now time.Time, rules *Rules) {
	p.queue.advance(p.pass(now, rules))
	p.awake = true
}

// pass advances the beginning of the present bucket and returns by how many steps.
func (p *period) pass(now time.Time, rules *Rules) int64 {
	steps := max(int64(now.Sub(p.begun)/rules.step), 0)
	p.begun = p.begun.Add(time.Duration(steps) * rules.step)
	return steps
}

// advance moves the ring to the bucket of now and marks overdue calls. It reports whether the window is
// empty, also of safe calls that asked, and no call waits.
func (p *period) advance(now time.Time, rules *Rules) (idle bool) {
	steps := p.pass(now, rules)
	for range min(steps, buckets) {
		next := (p.at.Load() + 1) % buckets
		p.window.Add(-p.ring[next].calls.Swap(0))
		p.extra.Add(-p.ring[next].extra.Swap(0))
		p.owner.safe.CompareAndSwap(next+1, 0)
		p.at.Store(next)
	}
	waiting := p.queue.advance(steps)
	return !waiting && p.window.Load() == 0 && p.extra.Load() == 0 && p.owner.safe.Load() == 0
}

type counts struct {
	calls, failures uint64 // ended; failures are among the calls
	slow, limited   uint64 // slow ones are among the calls, rate-limited ones are not
	overdue         uint64 // still hanging
}

// rate is the error rate, with calls that hang as failures; 0 without calls.
func (c counts) rate() float64 {
	if c.calls+c.overdue == 0 {
		return 0
	}
	return float64(c.failures+c.overdue) / float64(c.calls+c.overdue)
}

// Two counts share a word, the first in the upper half, so that both change in one atomic operation and
// each outcome is judged by exact counts.
const (
	oneCall    = 1 << 32
	oneFailure = 1
	oneSlow    = 1 << 32
	oneLimited = 1
)

func halves(word uint64) (upper, lower uint64) { return word >> 32, word & (1<<32 - 1) }

// queue counts the calls without an answer whose patience is limited, in groups: those that came in the
// same step of the window with about the same patience. So a call joins and leaves by one atomic
// addition each.
type queue struct {
	overdue atomic.Int64 // calls of late groups; it can be below 0 for a moment
	open    [classes]atomic.Pointer[group]

	// Guarded by the breaker's mutex.
	now    int64    // steps of the window since the period began
	closed []*group // no longer open, and not empty
}

// group counts calls. The highest bit of its word says that they are overdue. It is set in the atomic
// operation that reads the count, so that no call is missed or counted twice.
type group struct {
	word atomic.Uint64
	due  int64 // the step in which its patience is over; guarded by the breaker's mutex
}

const late = 1 << 63

func (q *queue) join(class int, p *period) *group {
	g := q.open[class].Load()
	if g == nil {
		g = q.first(class, p)
	}
	if g.word.Add(1)&late != 0 {
		q.overdue.Add(1)
	}
	return g
}

// first opens the first group of a class.
func (q *queue) first(class int, p *period) *group {
	p.owner.mu.Lock()
	defer p.owner.mu.Unlock()
	g := q.open[class].Load()
	if g == nil {
		g = &group{due: q.due(class)}
		q.open[class].Store(g)
	}
	return g
}

func (q *queue) leave(g *group) {
	if g.word.Add(^uint64(0))&late != 0 {
		q.overdue.Add(-1)
	}
}

// due is the step in which a call of the class that comes now is overdue. One step is added for the
// present one, which has partly passed.
func (q *queue) due(class int) int64 { return q.now + stepsOf(class) + 1 }

// advance replaces groups that calls have joined by new ones, and marks groups whose patience is over.
// It reports whether a call waits.
func (q *queue) advance(steps int64) (waiting bool) {
	if steps > 0 {
		q.now += steps
		for class := range q.open {
			g := q.open[class].Load()
			if g == nil {
				continue
			}
			if g.word.Load() != 0 {
				q.closed = append(q.closed, g)
				q.open[class].Store(&group{due: q.due(class)})
			} else {
				g.due = q.due(class)
			}
		}
	}
	kept := q.closed[:0]
	for _, g := range q.closed {
		if g.word.Load()&^late == 0 {
			continue
		}
		if g.due <= q.now && g.word.Load()&late == 0 {
			q.overdue.Add(int64(g.word.Or(late)))
		}
		kept = append(kept, g)
	}
	clear(q.closed[len(kept):])
	q.closed = kept
	return len(kept) > 0 || q.joined()
}

// joined reports whether a call waits in an open group.
func (q *queue) joined() bool {
	for class := range q.open {
		if g := q.open[class].Load(); g != nil && g.word.Load() != 0 {
			return true
		}
	}
	return false
}

// Patience is rounded up to classes: 1 to 8 steps exactly, then four classes for each doubling. The last
// is 131072 steps (36 h with a window of 60 s) and everything above.
const (
	classes    = 64
	exactSteps = 8
)

// classFor is the class of a patience.
func (r *Rules) classFor(patience time.Duration) int {
	n := uint64(patience / r.step)
	if patience%r.step > 0 {
		n++
	}
	if n <= exactSteps {
		return int(max(n, 1)) - 1
	}
	shift := bits.Len64(n-1) - 3
	return min(exactSteps+(shift-1)*4+int((n-1)>>shift)-4, classes-1)
}

// stepsOf is the patience of a class in steps.
func stepsOf(class int) int64 {
	if class < exactSteps {
		return int64(class) + 1
	}
	shift := (class-exactSteps)/4 + 1
	return int64((class-exactSteps)%4+5) << shift
}

// View makes a closed breaker stricter for one caller: calls with it are refused while more than a share
// of the calls in a recent window failed. It never admits a call that the breaker refuses, and does
// not change the breaker's state. A View is immutable and can be shared.
type View struct {
	threshold         uint64        // in millionths; a million for none
	shortest, longest time.Duration // of the windows
}

// NewView returns a view with a threshold, over 0 and under 1, and a window, 1 s or more. For either, 0
// is that of the breaker. The error names a value that is out of its range.
func NewView(threshold float64, window time.Duration) (*View, error) {
	v := &View{threshold: million, shortest: math.MaxInt64, longest: math.MaxInt64}
	if threshold != 0 {
		if !isShare(threshold) {
			return nil, fmt.Errorf("breaker: Threshold is %v; it has to be above 0 and below 1", threshold)
		}
		v.threshold = uint64(math.Round(threshold * million))
	}
	if window != 0 {
		if window < time.Second {
			return nil, fmt.Errorf("breaker: Window is %v; it has to be 1s or more", window)
		}
		v.shortest, v.longest = window, window
	}
	return v, nil
}

// And returns a view that refuses every call that v or other refuses: with the lower threshold, over all
// windows from the shortest to the longest of the two. Either may be nil, which refuses nothing.
func (v *View) And(other *View) *View {
	switch {
	case other == nil, v != nil && *v == *other:
		return v
	case v == nil:
		return other
	}
	both := View{min(v.threshold, other.threshold), min(v.shortest, other.shortest), max(v.longest, other.longest)}
	if both == *v {
		return v
	}
	return &both
}

// Threshold is the share of failures, over 0 and up to 1, above which calls are refused; 1 if NewView
// got none.
func (v *View) Threshold() float64 { return float64(v.threshold) / million }

// Window is the longest window that is examined.
func (v *View) Window() time.Duration { return v.longest }

// boundedView is a view within the bounds of a breaker's rules.
type boundedView struct {
	threshold uint64
	from, to  int // steps, the present one included, of the windows that are examined
}

// viewFloor is the lowest threshold of a View, in millionths; lower ones are raised to it.
const viewFloor = million / 10

// bounded returns the view within the bounds of the rules. ok is false if it is not stricter than these.
func (r *Rules) bounded(v *View) (l boundedView, ok bool) {
	l = boundedView{min(max(v.threshold, viewFloor), r.threshold), r.stepsBack(v.shortest), r.stepsBack(v.longest)}
	return l, l.threshold < r.threshold || l.from < buckets
}

// stepsBack is how many steps cover a window. One is added for the present one, which has partly passed.
func (r *Rules) stepsBack(window time.Duration) int {
	if window >= time.Duration(r.set.Window) {
		return buckets
	}
	return min(int((window+r.step-1)/r.step)+1, buckets)
}

// excesses has a bit for each window, of l.from to l.to steps, in which more than the threshold failed.
// It takes no lock.
func (p *period) excesses(rules *Rules, l boundedView) uint64 {
	c := p.counts(p.window.Load())
	if c.failures+c.overdue == 0 {
		return 0
	}
	c.calls, c.failures = 0, 0
	var found uint64
	at := int(p.at.Load())
	for n := 0; ; n++ {
		if n >= l.from && rules.fails(c, l.threshold) {
			found |= 1 << n
		}
		if n == l.to {
			return found
		}
		calls, failures := halves(p.ring[at].calls.Load())
		c.calls += calls
		c.failures += failures
		if at--; at < 0 {
			at = buckets - 1
		}
	}
}

// refused is the refusal of a call with this view, also if the breaker only observes; nil if the call is
// admitted.
func (p *period) refused(v *View) *OpenError {
	b := p.owner
	rules := b.rules.Load()
	l, ok := rules.bounded(v)
	if !ok || p.excesses(rules, l) == 0 {
		return nil
	}
	b.mu.Lock()
	defer b.unlock()
	if b.period != p || b.mode == ForcedClosed {
		return nil
	}
	window := time.Duration(rules.set.Window)
	return &OpenError{
		Key: b.key, State: b.state, Mode: b.mode, Generation: b.generation,
		Until: p.begun.Add(time.Duration(p.wait(rules, l)) * rules.step), Reason: StricterView,
		Cause: p.last.cause, Evidence: p.last.evidence,
		View: &View{l.threshold, min(v.shortest, window), min(v.longest, window)},
	}
}

// admitIn is admit for a call that may have a view.
func (p *period) admitIn(op Op) (Permit, error) {
	if op.View != nil {
		if refusal := p.refused(op.View); refusal != nil {
			p.owner.rejected.Add(1)
			if refusal.Mode != Observe {
				return Permit{}, refusal
			}
		}
	}
	return p.admit(op), nil
}

// wait is the number of steps after which no examined window exceeds the threshold, if nothing else is
// counted until then: at most l.to, since calls may go on to hang.
func (p *period) wait(rules *Rules, l boundedView) int {
	found := p.excesses(rules, boundedView{l.threshold, 0, l.to})
	for n := 1; n < l.to; n++ {
		// A window of k steps then has k-n of the present ones.
		looked := uint64(1)<<(l.to-n+1) - uint64(1)<<max(l.from-n, 0)
		if found&looked == 0 {
			return n
		}
	}
	return l.to
}
