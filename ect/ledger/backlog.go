package ledger

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Backlog is what waits for the sequencer.
type Backlog struct {
	// Entries is the number of events that are recorded and not yet in the tree.
	Entries int
	// Age is how long the oldest of them has waited.
	Age time.Duration
}

// Backlog is what waits for the sequencer now.
func (l *Log) Backlog() Backlog { return l.queue.backlog() }

// Admit waits until the backlog is below its bounds, or returns why it never will be:
// the end of ctx, of the log, or ErrTampered. It reserves nothing: the backlog may
// exceed its bound by what was admitted together.
func (l *Log) Admit(ctx context.Context) error { return l.queue.admit(ctx) }

// Flush waits until all that this process has recorded before, and what others have left
// behind, is in the tree, so that List and Find show it. ErrWaiting says that some of it
// never will be, since it does not open. What other nodes record in logs of their own is
// not waited for.
func (l *Log) Flush(ctx context.Context) error {
	if err := l.queue.drain(ctx); err != nil {
		return err
	}
	if n := l.counts.damaged.Load(); n > 0 {
		return fmt.Errorf("%w: %d events do not open", ErrWaiting, n)
	}
	return nil
}

// standing is where a ticket stands.
type standing uint8

const (
	ticketOpen   standing = iota // its commit is under way
	ticketLanded                 // it waits for the sequencer
	ticketLost                   // nobody knows whether it landed: a scan will say
	ticketGone                   // in the tree, or never recorded
)

// maxOpen bounds the tickets whose commit is waited for. With more, the oldest is
// taken for abandoned: the scan of everything finds it, should it land.
const maxOpen = 1 << 16

// queue has the events of this process that are on their way, by ticket, so that the
// sequencer need not read what was written a moment ago, and so that claims can wait for
// it.
type queue struct {
	entries int
	age     time.Duration
	wake    chan struct{} // of one: there is something to do

	mu        sync.Mutex
	first     uint64 // the number of tickets[0]
	tickets   []standingTicket
	waiting   int // landed ones
	inherited int // events of other lives and processes, as far as seen
	since     time.Time
	looks     uint64 // scans begun
	overtaken uint64 // times that another process has moved the log on
	unsure    bool   // what landed since the last scan may have been moved by another, or is unknown
	ended     error
	changed   chan struct{} // closed and made anew when less waits, or at the end
}

type standingTicket struct {
	standing  standing
	overtaken uint64 // what the queue's was when it was given out
	look      uint64 // the scans that had begun when it landed
	at        time.Time
	event     *Event // what it stands for, until it is gone
}

func newQueue(first uint64, entries int, age time.Duration) *queue {
	return &queue{
		entries: entries, age: age, first: first,
		wake: make(chan struct{}, 1), changed: make(chan struct{}),
	}
}

// open gives the next ticket, for an event that does not change any more.
func (q *queue) open(e *Event) (uint64, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended != nil {
		return 0, q.ended
	}
	q.tickets = append(q.tickets, standingTicket{overtaken: q.overtaken, event: e})
	number := q.first + uint64(len(q.tickets)-1)
	if len(q.tickets) > maxOpen && q.tickets[0].standing == ticketOpen {
		q.set(q.first, ticketGone)
	}
	return number, nil
}

// landed says that the ticket's event is recorded.
func (q *queue) landed(number uint64) {
	q.mu.Lock()
	// Gone already: the sequencer was faster than the one who recorded it.
	if t := q.find(number); t != nil && t.standing == ticketOpen {
		t.standing, t.look, t.at = ticketLanded, q.looks, time.Now()
		q.waiting++
		// A scan since then may have found the outbox without it.
		q.unsure = q.unsure || t.overtaken != q.overtaken
	}
	q.mu.Unlock()
	q.rouse()
}

// gone says that the ticket's event is in the tree, or was never recorded.
func (q *queue) gone(number uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.set(number, ticketGone)
}

// lost says that nobody knows. A scan of everything will.
func (q *queue) lost(number uint64) {
	q.mu.Lock()
	if t := q.find(number); t != nil && t.standing == ticketOpen {
		t.standing, t.look = ticketLost, q.looks
	}
	q.unsure = true
	q.mu.Unlock()
	q.rouse()
}

// set is called with mu held.
func (q *queue) set(number uint64, to standing) {
	t := q.find(number)
	if t == nil || t.standing == ticketGone {
		return
	}
	if t.standing == ticketLanded {
		q.waiting--
	}
	t.standing, t.event = to, nil
	q.trim()
}

// trim forgets the tickets that are gone, from the first. It is called with mu held.
func (q *queue) trim() {
	n := 0
	for n < len(q.tickets) && q.tickets[n].standing == ticketGone {
		n++
	}
	q.tickets, q.first = q.tickets[n:], q.first+uint64(n)
}

func (q *queue) find(number uint64) *standingTicket {
	if number < q.first || number-q.first >= uint64(len(q.tickets)) {
		return nil
	}
	return &q.tickets[number-q.first]
}

func (q *queue) rouse() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// recorded are the first events of this process that landed, at most so many, in the
// order of their tickets. sure says that nobody else can have moved one of them.
func (q *queue) recorded(boot [8]byte, most int) (found []waiting, sure bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.unsure {
		return nil, false
	}
	found = make([]waiting, 0, min(q.waiting, most))
	for i := 0; len(found) < cap(found); i++ {
		if t := &q.tickets[i]; t.standing == ticketLanded {
			found = append(found, waiting{ticket: ticket{q.first + uint64(i), boot}, event: *t.event})
		}
	}
	return found, true
}

// overtake says that another process has moved the log on, and perhaps events whose commit
// is still under way here.
func (q *queue) overtake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.overtaken++
}

// look begins a scan of the whole outbox.
func (q *queue) look() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.looks++
	q.unsure = false
	return q.looks
}

// looked ends a scan that saw all there was: what had landed before it began and is not
// among seen was moved by another process, and what was lost has landed if it is among
// them. foreign is the number of events of others.
func (q *queue) looked(look uint64, seen map[uint64]bool, foreign int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.tickets {
		t := &q.tickets[i]
		switch there := seen[q.first+uint64(i)]; {
		case t.look >= look: // since then
		case t.standing == ticketLanded && !there:
			t.standing, t.event = ticketGone, nil
			q.waiting--
		case t.standing == ticketLost && there:
			t.standing, t.at = ticketLanded, time.Now()
			q.waiting++
		case t.standing == ticketLost:
			t.standing, t.event = ticketGone, nil
		}
	}
	q.trim()
	q.inherit(foreign)
	q.shrink()
}

// inherit is called with mu held, or before the queue is used.
func (q *queue) inherit(foreign int) {
	if q.inherited == 0 {
		q.since = time.Now()
	}
	q.inherited = foreign
}

// moved says which events reached the tree.
func (q *queue) moved(own []uint64, foreign int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, number := range own {
		q.set(number, ticketGone)
	}
	q.inherited = max(0, q.inherited-foreign)
	q.shrink()
}

// next is closed when the sequencer has moved something, or has ended.
func (q *queue) next() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.changed
}

// shrink wakes those who wait for less. It is called with mu held.
func (q *queue) shrink() {
	close(q.changed)
	q.changed = make(chan struct{})
}

func (q *queue) backlog() Backlog {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.measure()
}

func (q *queue) measure() Backlog {
	b := Backlog{Entries: q.waiting + q.inherited}
	if q.inherited > 0 {
		b.Age = time.Since(q.since)
	}
	if q.waiting > 0 {
		for i := range q.tickets {
			if q.tickets[i].standing == ticketLanded {
				b.Age = max(b.Age, time.Since(q.tickets[i].at))
				break
			}
		}
	}
	return b
}

func (q *queue) admit(ctx context.Context) error {
	for {
		q.mu.Lock()
		b, changed, ended := q.measure(), q.changed, q.ended
		q.mu.Unlock()
		switch {
		case ended != nil:
			return ended
		case b.Entries < q.entries && b.Age < q.age:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drain waits until nothing of before waits any more.
func (q *queue) drain(ctx context.Context) error {
	q.mu.Lock()
	end := q.first + uint64(len(q.tickets))
	q.mu.Unlock()
	for {
		q.mu.Lock()
		waits, changed, ended := q.waitsBefore(end), q.changed, q.ended
		q.mu.Unlock()
		switch {
		case !waits:
			return nil
		case ended != nil:
			return ended
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// waitsBefore reports whether something waits that landed under a ticket before end, or
// that nobody has counted. It is called with mu held.
func (q *queue) waitsBefore(end uint64) bool {
	if q.inherited > 0 || q.unsure {
		return true
	}
	for i := range q.tickets {
		if q.first+uint64(i) >= end {
			return false
		}
		if t := q.tickets[i].standing; t == ticketLanded || t == ticketLost {
			return true
		}
	}
	return false
}

// close lets nothing more in. The first reason stays.
func (q *queue) close(why error) {
	q.mu.Lock()
	if q.ended == nil {
		q.ended = why
		q.shrink()
	}
	q.mu.Unlock()
	q.rouse()
}

func (q *queue) closed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended != nil
}
