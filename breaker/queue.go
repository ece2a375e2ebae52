package breaker

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// queue is the calls that have no answer yet and whose patience ends some day. They
// are counted in groups: those that came in the same step of the window with about
// the same patience. So a call joins and leaves by one atomic addition each.
type queue struct {
	overdue atomic.Int64 // calls of groups that are late; below 0 for an instant at most
	open    [classes]atomic.Pointer[group]

	// Guarded by the breaker's mutex.
	now    int64    // steps of the window so far
	closed []*group // no longer open, and not empty
}

// group counts calls. The highest bit of its word says that they are overdue: it is
// set and counted by in one atomic operation, so that no call is missed or taken twice.
type group struct {
	word atomic.Uint64
	due  int64 // the step in which its patience is over; guarded by the breaker's mutex
}

const late = 1 << 63

// join adds a call.
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

// first opens the group of a class that no call had before.
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

// leave takes off a call that joined g.
func (q *queue) leave(g *group) {
	if g.word.Add(^uint64(0))&late != 0 {
		q.overdue.Add(-1)
	}
}

// due is when a call of the class that comes now is overdue. The present step has
// partly passed, so that one more is added: it is never too early.
func (q *queue) due(class int) int64 { return q.now + stepsOf(class) + 1 }

// advance opens new groups in place of those that calls have joined, and marks groups
// whose patience is over. It reports whether a call is waiting.
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

// Patience is sorted into classes: 1 to 8 steps exactly, then four classes to each
// doubling. The last one holds all that is longer, 131072 steps (36 h of a window of 60 s).
const (
	classes    = 64
	exactSteps = 8
)

// classFor is the class of a patience, which is rounded up.
func (r *Rules) classFor(patience time.Duration) int {
	n := uint64(patience / r.beat)
	if patience%r.beat > 0 {
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
