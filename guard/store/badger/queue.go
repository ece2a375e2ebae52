package badger

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// queue hands batches to the committer, all that wait at a time: one slice fills
// while the committer works on the other.
type queue struct {
	wait time.Duration // the longest

	mu      sync.Mutex
	waiting []*batch
	spare   []*batch
	closed  bool

	wake chan struct{} // something waits, or the queue was closed

	// flight is how many commits were in flight of late, in sixteenths.
	flight atomic.Int64
}

func newQueue(wait time.Duration) *queue {
	return &queue{wait: wait, wake: make(chan struct{}, 1)}
}

// put queues b, or fails where the queue was closed.
func (q *queue) put(b *batch) error {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return store.ErrClosed
	}
	q.waiting = append(q.waiting, b)
	first := len(q.waiting) == 1
	q.mu.Unlock()
	if first {
		signal(q.wake)
	}
	return nil
}

// await returns when batches wait and had time to become more, or false when the queue
// is closed and empty.
func (q *queue) await() bool {
	for {
		q.mu.Lock()
		some, closed := len(q.waiting) > 0, q.closed
		q.mu.Unlock()
		switch {
		case some:
			q.gather()
			return true
		case closed:
			return false
		}
		<-q.wake
	}
}

// take returns the batches that wait, in the order of their coming. The slice is good
// until the next take.
func (q *queue) take() []*batch {
	q.mu.Lock()
	defer q.mu.Unlock()
	group := q.waiting
	q.waiting, q.spare = q.spare[:0], group
	return group
}

// quiet reports whether nobody waits and few have come of late, so that there is no
// company to wait for.
func (q *queue) quiet() bool {
	return q.expected() < DefaultGroup && q.state() == 0
}

func (q *queue) expected() int { return int(q.flight.Load()+8) / 16 }

// landed tells how many batches are about to be answered. Together with those that
// wait they are the commits in flight.
func (q *queue) landed(n int) {
	now, before := 16*int64(n+max(q.state(), 0)), q.flight.Load()
	// Quick to rise, so that a burst is met at once.
	q.flight.Store(max(now, before+(now-before)/4))
}

// gather gives the others of a busy stretch a moment to join: each sync that they
// share is one that nobody pays alone. Where few are in flight nobody waits.
func (q *queue) gather() {
	expected := q.expected()
	if q.wait <= 0 || expected < DefaultGroup {
		return
	}
	// Those who were answered just now come back at once if they come back at
	// all, and need this processor to do so. A sleep is longer than that.
	begun := time.Now()
	for time.Since(begun) < q.wait/6 {
		if n := q.state(); n < 0 || n >= expected {
			return
		}
		runtime.Gosched()
	}
	pause(q.wait - q.wait/6)
}

// state is how many wait, or -1 where the queue is closed.
func (q *queue) state() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return -1
	}
	return len(q.waiting)
}

// close lets take return what waits and then nil.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	signal(q.wake)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
