package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Admit waits until the backlog is below MaxBacklog and MaxAge. It reserves nothing:
// concurrent callers may exceed the bounds. The error is that of ctx, ErrClosed or
// ErrTampered.
func (l *Log) Admit(ctx context.Context) error {
	return l.queue.wait(ctx, l.queue.short, true)
}

// Ready reports whether Admit would return nil at once, for callers that would make a deadline
// for it.
func (l *Log) Ready() bool {
	l.queue.mu.Lock()
	defer l.queue.mu.Unlock()
	return l.queue.ended == nil && l.queue.short()
}

// Flush waits until all events that this process has recorded, and those that earlier
// processes left, are in the tree, so that List and Find return them; with Options.Shared also what
// the store has for other logs. The error is ErrWaiting if some events cannot be decrypted.
func (l *Log) Flush(ctx context.Context) error {
	others, err := l.elsewhere(ctx)
	if err == nil {
		err = l.flush(ctx, false)
	}
	for i := 0; i < len(others) && err == nil; i++ {
		err = l.awaitMoved(ctx, others[i])
	}
	return err
}

// elsewhere are the keys of the events that wait for other logs.
func (l *Log) elsewhere(ctx context.Context) (keys [][]byte, err error) {
	if !l.options.Shared {
		return nil, nil
	}
	own := logKey(spaceOutbox, l.id, 0)
	for found, err := range l.scan(ctx, store.Prefix(own[:2])) {
		if err != nil && !errors.Is(err, store.ErrDamaged) {
			return nil, err
		}
		if !bytes.HasPrefix(found.Key, own) {
			keys = append(keys, bytes.Clone(found.Key))
		}
	}
	return keys, nil
}

// awaitMoved waits until a waiting event of another log is in its tree.
func (l *Log) awaitMoved(ctx context.Context, key []byte) error {
	for {
		changed, cancel := l.store.Watch(key)
		_, err := l.store.Get(ctx, key)
		if err != nil && !errors.Is(err, store.ErrDamaged) {
			cancel()
			if errors.Is(err, store.ErrNotFound) {
				return nil
			}
			return err
		}
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
			cancel()
			return ctx.Err()
		}
	}
}

// flush is Flush; with open it also waits for the commits that are under way.
func (l *Log) flush(ctx context.Context, open bool) error {
	l.queue.mu.Lock()
	end := l.queue.first + uint64(len(l.queue.tickets))
	l.queue.mu.Unlock()
	if err := l.queue.wait(ctx, func() bool { return !l.queue.waitsBefore(end, open) }, false); err != nil {
		return err
	}
	if n := l.damaged.Load(); n > 0 {
		return fmt.Errorf("%w: %d events do not open", ErrWaiting, n)
	}
	return nil
}

// Backlog measures the outbox: the events that wait for the sequencer.
type Backlog struct {
	// Entries is the number of events that are recorded and not yet in the tree.
	Entries int
	// Age is how long the oldest of them has waited.
	Age time.Duration
}

type ticketStatus uint8

const (
	ticketOpen    ticketStatus = iota // its commit is under way
	ticketLanded                      // it waits for the sequencer
	ticketUnknown                     // the result of its commit is unknown until a scan
	ticketDone                        // in the tree, or never recorded
)

// maxOpen bounds the tickets whose commit is under way. Beyond it the oldest counts as
// abandoned; should it land, a scan of the outbox finds it.
const maxOpen = 1 << 16

// queue has the events of this process that are not in the tree yet, by ticket. It saves the
// sequencer from reading what was just written, and lets readers wait for it.
type queue struct {
	entries int
	age     time.Duration
	wake    chan struct{} // buffers one signal: there is something to do

	mu        sync.Mutex
	first     uint64 // the number of tickets[0]
	tickets   []queuedEvent
	waiting   int // tickets with the status ticketLanded
	inherited int // events of other processes that the last scan found
	since     time.Time
	scans     uint64 // scans begun
	overtaken uint64 // how often another process has extended the tree
	unsure    bool   // another process may have moved landed events, or results are unknown
	ended     error
	changed   chan struct{} // closed and replaced when less waits, or at the end
	awaited   bool          // somebody has changed
}

type queuedEvent struct {
	status    ticketStatus
	overtaken uint64 // the queue's count when the ticket was opened
	scan      uint64 // scans begun when it landed
	at        time.Time
	event     *hashedEvent // nil once done
}

func newQueue(first uint64, entries int, age time.Duration) *queue {
	return &queue{
		entries: entries, age: age, first: first,
		wake: make(chan struct{}, 1), changed: make(chan struct{}),
	}
}

// open gives the next tickets to events and returns the first. The events must not change
// afterwards, but for their names until their commit. direct says that they need not wait for the sequencer: what
// they can follow from is in the tree, where wanted.
func (q *queue) open(events []hashedEvent, wanted bool) (first uint64, direct bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended != nil {
		return 0, false, q.ended
	}
	direct = wanted && q.waiting == 0 && q.inherited == 0 && !q.unsure
	first = q.first + uint64(len(q.tickets))
	for i := range events {
		q.tickets = append(q.tickets, queuedEvent{overtaken: q.overtaken, event: &events[i]})
		if len(q.tickets) > maxOpen && q.tickets[0].status == ticketOpen {
			q.set(q.first, ticketDone)
		}
	}
	return first, direct, nil
}

// placed notes that n events from first are in the tree with their commit. With wake the sequencer has to say so.
func (q *queue) placed(first uint64, n int, wake bool) {
	q.mu.Lock()
	for number := first; number < first+uint64(n); number++ {
		q.set(number, ticketDone)
	}
	if q.awaited {
		q.notify()
	}
	q.mu.Unlock()
	if wake {
		q.signal()
	}
}

// committed sets the result of the commit of n tickets from first: nil, ErrUnknown, or
// another error, which means that nothing was recorded.
func (q *queue) committed(first uint64, n int, err error) {
	unknown := errors.Is(err, store.ErrUnknown)
	q.mu.Lock()
	for number := first; number < first+uint64(n); number++ {
		t := q.find(number)
		switch {
		case err != nil && !unknown:
			q.set(number, ticketDone)
		case t == nil || t.status != ticketOpen: // the sequencer was faster
		case unknown:
			t.status, t.scan = ticketUnknown, q.scans
		default:
			t.status, t.scan, t.at = ticketLanded, q.scans, time.Now()
			q.waiting++
			// A scan since the ticket was opened may have missed the event.
			q.unsure = q.unsure || t.overtaken != q.overtaken
		}
	}
	q.unsure = q.unsure || unknown
	if err != nil {
		q.notify()
	}
	q.mu.Unlock()
	if err == nil || unknown {
		q.signal()
	}
}

// done marks a ticket whose event is in the tree or was never recorded.
func (q *queue) done(number uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.set(number, ticketDone)
}

// set changes the status. mu is held.
func (q *queue) set(number uint64, to ticketStatus) {
	t := q.find(number)
	if t == nil || t.status == ticketDone {
		return
	}
	if t.status == ticketLanded {
		q.waiting--
	}
	t.status, t.event = to, nil
	q.trim()
}

// trim drops the leading tickets that are done. mu is held.
func (q *queue) trim() {
	n := 0
	for n < len(q.tickets) && q.tickets[n].status == ticketDone {
		n++
	}
	q.tickets, q.first = q.tickets[n:], q.first+uint64(n)
}

func (q *queue) find(number uint64) *queuedEvent {
	if number < q.first || number-q.first >= uint64(len(q.tickets)) {
		return nil
	}
	return &q.tickets[number-q.first]
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// recorded returns the first landed events of this process, in the order of their tickets.
// sure is false if another process may have moved some of them.
func (q *queue) recorded(boot [8]byte, most int) (found []waiting, sure bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.unsure {
		return nil, false
	}
	found = make([]waiting, 0, min(q.waiting, most))
	for i := 0; len(found) < cap(found); i++ {
		if t := &q.tickets[i]; t.status == ticketLanded {
			found = append(found, waiting{ticket: ticket{q.first + uint64(i), boot}, event: *t.event})
		}
	}
	return found, true
}

// overtake notes that another process has extended the tree. It may have moved events whose
// commit is still under way here.
func (q *queue) overtake() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.overtaken++
}

// beginScan begins a scan of the whole outbox.
func (q *queue) beginScan() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.scans++
	q.unsure = false
	return q.scans
}

// endScan ends a scan of the whole outbox. Events that landed before the scan and were not
// seen were moved by another process. Commits with an unknown result landed if their events
// were seen. foreign is the number of events of other processes.
func (q *queue) endScan(scan uint64, seen map[uint64]bool, foreign int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.tickets {
		t := &q.tickets[i]
		switch there := seen[q.first+uint64(i)]; {
		case t.scan >= scan: // landed after the scan began
		case t.status == ticketLanded && !there:
			t.status, t.event = ticketDone, nil
			q.waiting--
		case t.status == ticketUnknown && there:
			t.status, t.at = ticketLanded, time.Now()
			q.waiting++
		case t.status == ticketUnknown:
			t.status, t.event = ticketDone, nil
		}
	}
	q.trim()
	q.setInherited(foreign)
	q.notify()
}

// setInherited sets the number of events of other processes. mu is held, or the queue new.
func (q *queue) setInherited(foreign int) {
	if q.inherited == 0 {
		q.since = time.Now()
	}
	q.inherited = foreign
}

// moved removes events that are in the tree: tickets of this process, and a number of
// others.
func (q *queue) moved(own []uint64, foreign int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, number := range own {
		q.set(number, ticketDone)
	}
	q.inherited = max(0, q.inherited-foreign)
	q.notify()
}

// changes returns a channel that closes when the sequencer moves events or ends.
func (q *queue) changes() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.awaited = true
	return q.changed
}

// notify wakes everybody who waits for a change. mu is held.
func (q *queue) notify() {
	close(q.changed)
	q.changed, q.awaited = make(chan struct{}), false
}

func (q *queue) backlog() Backlog {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.measure()
}

// measure is backlog with mu held.
func (q *queue) measure() Backlog {
	b := Backlog{Entries: q.waiting + q.inherited}
	if q.inherited > 0 {
		b.Age = time.Since(q.since)
	}
	if q.waiting > 0 {
		for i := range q.tickets {
			if q.tickets[i].status == ticketLanded {
				b.Age = max(b.Age, time.Since(q.tickets[i].at))
				break
			}
		}
	}
	return b
}

// short reports whether the backlog is below its bounds. mu is held.
func (q *queue) short() bool {
	b := q.measure()
	return b.Entries < q.entries && b.Age < q.age
}

// wait waits until holds returns true; it is called with mu held. The error is that of ctx,
// or why the queue was closed; if strict, a closed queue is an error even if holds is true.
func (q *queue) wait(ctx context.Context, holds func() bool, strict bool) error {
	for {
		q.mu.Lock()
		held, changed, ended := holds(), q.changed, q.ended
		q.awaited = true
		q.mu.Unlock()
		switch {
		case held && (ended == nil || !strict):
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

// waitsBefore reports whether a ticket before end waits, or an event without a ticket here
// may; with open, one whose commit is under way counts too. mu is held.
func (q *queue) waitsBefore(end uint64, open bool) bool {
	if q.inherited > 0 || q.unsure {
		return true
	}
	for i := range q.tickets {
		if q.first+uint64(i) >= end {
			return false
		}
		if t := q.tickets[i].status; t == ticketLanded || t == ticketUnknown || open && t == ticketOpen {
			return true
		}
	}
	return false
}

// close refuses further events with the error why. Later calls change nothing.
func (q *queue) close(why error) {
	q.mu.Lock()
	if q.ended == nil {
		q.ended = why
		q.notify()
	}
	q.mu.Unlock()
	q.signal()
}

func (q *queue) closed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended != nil
}

const (
	// movedWrites is the number of writes for one event: its outbox entry, its entry, its
	// location and its key in the workflow's index.
	movedWrites = 4
	// treeWrites is the number of writes for the tree in one move: the head, and one tile
	// for each level.
	treeWrites = 1 + 64/tileHeight
	// maxMoved is the largest number of events of one move.
	maxMoved = (store.MaxBatch - treeWrites) / movedWrites
	// maxMovedBytes bounds the entries of one move, in bytes.
	maxMovedBytes = store.MaxBatchBytes - treeWrites*(tileWidth*tlog.HashSize+64)
	// sealedOverhead bounds the bytes that sealing, keys and location add to an entry.
	sealedOverhead = 1 << 9
	// linkOverhead bounds the bytes of one link.
	linkOverhead = 1 << 7

	// sweepEvery is how often the whole outbox is scanned for events whose commit landed
	// although its result was unknown, and for those that could not be decrypted before.
	sweepEvery = 30 * time.Second

	minBackoff = 50 * time.Millisecond
	// maxBackoff allows two attempts within the five seconds that a call of level L3 waits.
	maxBackoff = 2 * time.Second
)

// The largest entry must fit into a value, and into a move.
const (
	_ = uint(store.MaxValue - maxLeaf - sealedOverhead)
	_ = uint(maxMovedBytes - maxLeaf - sealedOverhead - maxLinks*linkOverhead)
)

// sequencer moves events from the outbox into the tree.
type sequencer struct {
	*Log
	rescan     bool            // the next move reads the outbox
	unreadable map[ticket]bool // found by the scans since rescan was set
	x          extension
	fields     []byte
}

type waiting struct {
	ticket ticket
	event  hashedEvent
}

// run moves events until the log is closed and nothing waits, or ctx ends.
func (l *Log) run(ctx context.Context) {
	defer close(l.stopped)
	sweep := time.NewTicker(sweepEvery)
	defer sweep.Stop()
	m := sequencer{Log: l, rescan: true}
	pause := time.Duration(0)
	defer l.places.announce(math.MaxInt64)
	for {
		l.places.announce(math.MaxInt64)
		closed := l.queue.closed() // before the look
		rest, err := m.move(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, ErrTampered), errors.Is(err, store.ErrClosed), errors.Is(err, store.ErrUnhealthy):
			l.options.Logger.Error("the ledger takes nothing more", slog.Any("error", err))
			l.queue.close(err)
			return
		case err != nil:
			l.retries.Add(1)
			l.options.Logger.Warn("events could not be moved into the ledger", slog.Any("error", err))
			pause = min(max(2*pause, minBackoff), maxBackoff)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
			continue
		}
		pause = 0
		if rest {
			continue
		}
		if l.queue.closed() {
			if closed && m.rescan {
				return // the last scan, of after the close, found nothing
			}
			m.rescan = true
			continue
		}
		select {
		case <-l.queue.wake:
			l.gather(ctx)
		case <-sweep.C:
			m.rescan, m.unreadable = true, nil
		case <-ctx.Done():
			return
		}
	}
}

// gather waits a moment for more events, unless a move is full.
func (l *Log) gather(ctx context.Context) {
	if l.options.BatchDelay <= 0 {
		return
	}
	if l.queue.backlog().Entries == 0 {
		return // what is in the tree already is to be announced
	}
	enough := time.After(l.options.BatchDelay)
	for !l.queue.closed() && l.queue.backlog().Entries < maxMoved {
		select {
		case <-l.queue.wake:
		case <-enough:
			return
		case <-ctx.Done():
			return
		}
	}
}

// move moves the first waiting events into the tree in one commit. rest says that there may
// be more. The queue has the events of this process. The outbox is read for those of others:
// after Open, after a commit with an unknown result, and every sweepEvery.
func (m *sequencer) move(ctx context.Context) (rest bool, err error) {
	if m.rescan {
		return m.moveAll(ctx)
	}
	found, sure := m.queue.recorded(m.boot, maxMoved)
	if !sure {
		m.rescan = true
		return m.moveAll(ctx)
	}
	if len(found) == 0 {
		return false, nil
	}
	n, err := m.commit(ctx, found)
	return n < len(found) || n == maxMoved, err
}

// moveAll moves the first events of the outbox.
func (m *sequencer) moveAll(ctx context.Context) (rest bool, err error) {
	// Another process may have moved everything: then no commit of this one is lost, which would show it. The
	// head is read before the outbox, or what that process moves in between would be moved twice.
	before := m.now.Load()
	now := before
	same, err := m.unmoved(ctx, before)
	if err == nil && !same {
		now, err = m.advance(ctx, before)
	}
	if err != nil {
		return false, err
	}
	if now != before {
		if !m.now.CompareAndSwap(before, now) {
			return true, nil // a commit of this process was faster
		}
		m.queue.overtake()
	}
	scan := m.queue.beginScan()
	if m.unreadable == nil {
		m.unreadable = make(map[ticket]bool)
	}
	found, end, err := m.scan(ctx)
	if err != nil {
		return false, err
	}
	if end {
		m.scanned(scan, found)
	}
	if len(found) == 0 {
		if same, err := m.unmoved(ctx, now); err != nil || !same {
			return err == nil, err // moved by another process since the head was read: once more
		}
	}
	n := 0
	if len(found) > 0 {
		if n, err = m.commit(ctx, found); err != nil {
			return false, err
		}
	}
	if end && n == len(found) && !m.queue.closed() {
		m.rescan, m.unreadable = false, nil
	}
	return !end || n > 0 || n < len(found), nil
}

// scanned updates the queue after a complete scan.
func (m *sequencer) scanned(scan uint64, found []waiting) {
	seen, foreign := make(map[uint64]bool), 0
	for i := range found {
		if t := &found[i].ticket; t.boot == m.boot {
			seen[t.number] = true
		} else {
			foreign++
		}
	}
	m.queue.endScan(scan, seen, foreign)
	m.damaged.Store(int64(len(m.unreadable)))
}

// scan reads the first events of the outbox. end says that these are all.
func (m *sequencer) scan(ctx context.Context) (found []waiting, end bool, err error) {
	r := store.Prefix(logKey(spaceOutbox, m.id, 0))
	r.Limit = maxMoved + len(m.unreadable)
	n := 0
	for e, err := range m.store.Scan(ctx, r) {
		if err != nil {
			return nil, false, err
		}
		n++
		t, ok := ticketIn(e.Key)
		if !ok || m.unreadable[t] {
			continue
		}
		entry, err := m.open(e.Key, e.Value)
		if err != nil {
			// Later events go on. Verify reports this one; a complete key ring opens it.
			m.unreadable[t] = true
			m.damaged.Store(int64(len(m.unreadable)))
			if t.boot == m.boot {
				m.queue.done(t.number)
			}
			m.options.Logger.Error("an event that waits for the ledger does not open", slog.Any("error", err))
			continue
		}
		found = append(found, waiting{t, hashedEvent{entry.Event, m.namesOf(entry.Workflow, entry.ID)}})
	}
	return found, n < r.Limit, nil
}

// token makes the token of an unsigned event.
func (m *sequencer) token(ctx context.Context, e *Event) error {
	if !e.Unsigned || m.options.Sign == nil {
		return nil
	}
	token, err := m.options.Sign(ctx, *e)
	if err == nil {
		signed := *e
		signed.Payload, signed.Unsigned = token, false
		if err = signed.check(); err == nil {
			*e = signed
			return nil
		}
		err = fmt.Errorf("%w: its token: %w", ErrRefused, err)
	}
	if !errors.Is(err, ErrRefused) {
		return fmt.Errorf("signing an event: %w", err)
	}
	m.refused.Add(1)
	m.options.Logger.Error("an event goes into the ledger without a token", slog.String("id", e.ID), slog.Any("error", err))
	return nil
}

// tokens makes the tokens of as many events as it can, from the first.
func (m *sequencer) tokens(ctx context.Context, found []waiting) ([]waiting, error) {
	for i := range found {
		if err := m.token(ctx, &found[i].event.Event); err != nil {
			if i == 0 {
				return nil, err
			}
			return found[:i], nil
		}
	}
	return found, nil
}

// commit puts as many events as fit into the tree, from the first, and returns how many.
func (m *sequencer) commit(ctx context.Context, found []waiting) (n int, err error) {
	if found, err = m.tokens(ctx, found); err != nil {
		return 0, err
	}
	now, err := m.store.Now(ctx)
	if err != nil {
		return 0, err
	}
	before, x := m.now.Load(), &m.x
	x.begin(m.logStore, before, now)
	if m.sequencing {
		for level := range x.after.edge {
			x.after.edge[level] = slices.Clip(x.after.edge[level]) // commits of this process append to the same array
		}
	}
	room := maxMovedBytes
	var own []uint64
	var gone []store.Write
	for i := range found {
		w := &found[i]
		e := &w.event.Event
		fields := e.encodeFields(store.Encoder{B: m.fields[:0]})
		m.fields = fields
		x.encode(fields)
		links := m.linkKeysIn(w.event.names.workflow, e, 0)
		room -= len(x.leaf) + sealedOverhead + len(links)*linkOverhead
		if room < 0 || i > 0 && len(x.batch)-1+len(x.links)+len(gone)+movedWrites+len(links) > store.MaxBatch-treeWrites {
			found = found[:i]
			break
		}
		x.add(&w.event, links)
		gone = append(gone, store.Write{Key: x.memory.cut(m.outboxKey(x.memory.b, w.ticket)), Delete: true})
		if w.ticket.boot == m.boot {
			own = append(own, w.ticket.number)
		}
	}
	after := x.after
	batch, err := x.sign(m.Log, gone...)
	if err != nil {
		return 0, err
	}
	batch[0].If = store.VersionIs(before.version)
	batch[entryWrite].If = store.Absent() // anything beyond the end of the tree is forged
	after.version, err = m.store.Commit(ctx, batch...)
	x.end()
	if err == nil {
		m.now.Store(after)
		m.places.announce(before.size)
		m.queue.moved(own, len(found)-len(own))
		for i := range found {
			if m.options.Placed != nil {
				m.options.Placed(&found[i].event.Event, now)
			}
		}
		return len(found), nil
	}
	return 0, m.failed(ctx, before, err)
}

// failed handles a failed commit. If another process has extended the tree, this one
// continues from there, provided that the new tree extends the known one.
func (m *sequencer) failed(ctx context.Context, before *state, failure error) error {
	lost := (*store.Conflict)(nil)
	if !errors.As(failure, &lost) && !errors.Is(failure, store.ErrUnknown) {
		return failure
	}
	if lost != nil && m.now.Load() != before {
		return nil // to a commit of this process, and the next move goes on from there
	}
	found, err := m.load(ctx)
	if err != nil {
		return err
	}
	if err := found.contains(ctx, m.logStore, &before.head); err != nil {
		return err
	}
	if lost != nil && found.version == before.version {
		return fmt.Errorf("%w: something stands in the way of entry %d", ErrTampered, before.size)
	}
	if found.version == before.version {
		return failure // the commit did not land
	}
	if m.now.CompareAndSwap(before, found) {
		m.queue.overtake()
	}
	m.rescan = true
	return nil
}
