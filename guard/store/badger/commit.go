package badger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger/wal"
)

// queue holds the batches that wait for their commit. The caller of the first one leads: it commits
// its own batch and all that wait by then, on its own goroutine, and hands the lead to the first of
// those that came meanwhile.
type queue struct {
	wait time.Duration // the longest

	mu      sync.Mutex
	waiting []*batch
	led     bool
	closed  bool
	leading sync.WaitGroup // done once nobody leads

	inFlight int // the recent number of concurrent commits, in sixteenths; the leader's
}

// put queues b, which leads if no other batch does, or fails where the queue was closed.
func (q *queue) put(b *batch) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return store.ErrClosed
	}
	q.waiting = append(q.waiting, b)
	if !q.led {
		q.led = true
		q.leading.Add(1)
		b.turn <- true
	}
	return nil
}

// take moves to group the waiting batches that fit into one frame, in order, at least the first.
func (q *queue) take(group []*batch) []*batch {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := fitting(q.waiting)
	group = append(group[:0], q.waiting[:n]...)
	q.waiting = slices.Delete(q.waiting, 0, n)
	return group
}

// handOn gives the lead to the first batch that waits.
func (q *queue) handOn() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) > 0 {
		q.waiting[0].turn <- true
		return
	}
	q.led = false
	q.leading.Done()
}

// countInFlight records n batches that are about to be answered; with those that wait they
// are the concurrent commits.
func (q *queue) countInFlight(n int) {
	now := 16 * (n + max(q.length(), 0))
	// Quick to rise, so that a burst takes effect at once.
	q.inFlight = max(now, q.inFlight+(now-q.inFlight)/4)
}

// waitForMore lets more commits of a burst join the group and share its sync. With few
// commits in flight it does not wait.
func (q *queue) waitForMore() {
	expected := (q.inFlight + 8) / 16
	if q.wait <= 0 || expected < defaultGroup {
		return
	}
	// Clients that were just answered commit again at once, and need this processor to do
	// so; a sleep would be too long.
	begun, yields := time.Now(), q.wait/6
	// Few have often all come before the wait is over; for many, looking costs more than it saves.
	nap := yields
	if expected >= manyCommits {
		nap = q.wait - yields
	}
	for n := q.length(); n >= 0 && n < expected; n = q.length() {
		switch waited := time.Since(begun); {
		case waited < yields:
			runtime.Gosched()
		case waited < q.wait:
			pause(nap)
		default:
			return
		}
	}
}

// length is the number of waiting batches, or -1 if the queue is closed.
func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return -1
	}
	return len(q.waiting)
}

// close refuses further batches, and returns when those that wait are committed.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.leading.Wait()
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// batch is one Commit on its way through the committer.
type batch struct {
	writes []store.Write
	staged []staged
	bulk   int // bytes of bulk values that go to their files first
	inline int // bytes of the others
	size   int // of its changes in a frame, and about their size in memory
	placed int // of that, what sequences will make at most

	turn chan bool // true: its caller leads; false: the result is set

	// The result.
	version store.Version
	err     error
	failed  int    // index of the write whose condition failed, or -1
	found   []byte // the value under its key; nil is none

	// onGroup is set if the result depends on an earlier batch of the same group, and so on
	// its sync.
	onGroup bool
}

// staged is one write as the log will hold it.
type staged struct {
	key   string // with the byte in front
	value []byte // header and value; nil deletes
	apart bool   // value is a pointer, to be filled in
	check bool   // a condition alone: it is not in the log, and changes nothing
	place bool   // it is not in the log either: its sequence makes what is
}

const (
	// entryOverhead is what Badger adds to key and value when it sizes a transaction.
	entryOverhead = 12
	// maxInline is the size from which on a bulk value goes straight to its file, with a
	// sync of its own: writing it twice would cost more.
	maxInline = 32 << 10
)

var batches = sync.Pool{New: func() any { return &batch{turn: make(chan bool, 1)} }}

// newBatch encodes writes on the caller's goroutine, so that the committer only fills in
// versions and pointers.
func newBatch(writes []store.Write, now time.Time) *batch {
	b := batches.Get().(*batch)
	b.writes, b.failed = writes, -1
	total, keys := 0, 0
	for i := range writes {
		w := &writes[i]
		keys += 1 + len(w.Key)
		if w.Delete || w.Check {
			continue
		}
		total += headerSize
		if w.Place != nil {
			b.placed += w.Place.Size
			b.size += w.Place.Size
		}
		if w.Large() && len(w.Value) >= maxInline {
			total += pointerSize
		} else {
			total += len(w.Value)
		}
	}
	var names strings.Builder // of all keys
	names.Grow(keys)
	for i := range writes {
		names.WriteByte(userSpace)
		names.Write(writes[i].Key)
	}
	name := names.String()
	memory := make([]byte, 0, total)
	take := func(n int) []byte {
		from := len(memory)
		memory = memory[:from+n]
		return memory[from : from+n : from+n]
	}
	for i := range writes {
		w := &writes[i]
		s := staged{key: name[:1+len(w.Key)], check: w.Check, place: w.Place != nil}
		name = name[1+len(w.Key):]
		// A write that has already expired is a deletion: its bulk file may have been swept.
		gone := w.Delete || !w.Expires.IsZero() && !now.Before(w.Expires)
		switch {
		case gone, w.Check:
		case w.Large() && len(w.Value) >= maxInline:
			s.value, s.apart = take(headerSize+pointerSize), true
			putHeader(s.value, w.Expires, flagBulk)
			b.bulk += len(w.Value)
		case w.Bulk:
			s.value = take(headerSize + len(w.Value))
			putHeader(s.value, w.Expires, flagBulk|flagInline)
			copy(s.value[headerSize:], w.Value)
			b.inline += len(w.Value)
		default:
			s.value = take(headerSize + len(w.Value))
			putHeader(s.value, w.Expires, 0)
			copy(s.value[headerSize:], w.Value)
		}
		if !w.Check {
			b.size += len(s.key) + len(s.value) + entryOverhead
		}
		b.staged = append(b.staged, s)
	}
	return b
}

func (b *batch) finish(err error) {
	b.err = err
	b.turn <- false
}

// release returns the batch to the pool; the overlay keeps the encoded values.
func (b *batch) release() {
	clear(b.staged)
	*b = batch{turn: b.turn, staged: b.staged[:0]}
	batches.Put(b)
}

// maxFrame bounds the changes of one group in the log, in bytes. A single batch that store.Check
// admits, with small bulk values only, is smaller.
const maxFrame = 6 << 20

// maxGroupBulk bounds the memory of one group's large bulk values, in bytes.
const maxGroupBulk = 8 << 20

// committer commits one group at a time: one frame of the log, one sync for all its batches.
type committer struct {
	*Store
	next store.Version // the next version to give

	// Scratch, one group after the other.
	group   []*batch
	values  []*bulkValue
	frame   []byte
	name    []byte // of a key
	pending map[string][]byte
	places  []*store.Place
}

// lead commits a group on the goroutine of its first batch. A goroutine of the committer's own would cost
// every commit two switches.
func (c *committer) lead() {
	completed := false
	defer func() {
		if !completed {
			// After a panic net/http would go on, though memory may not agree with the log (P1). After
			// runtime.Goexit all other commits would wait for ever.
			go panic(fmt.Sprintf("badger: a commit ended midway: %v\n%s", recover(), debug.Stack()))
		}
	}()
	c.queue.waitForMore()
	c.group = c.queue.take(c.group)
	c.commitGroup(c.group)
	c.queue.handOn()
	completed = true
}

// fitting is how many batches from the first on fit into one frame, at least one.
func fitting(waiting []*batch) int {
	size, bulk := maxFrame, maxGroupBulk
	for i, b := range waiting {
		size -= b.size
		bulk -= b.bulk
		if i > 0 && (size <= 0 || bulk <= 0) {
			return i
		}
	}
	return len(waiting)
}

func (c *committer) commitGroup(all []*batch) {
	c.awaitApplier()
	if c.unhealthy() != nil {
		finish(all, store.ErrUnhealthy)
		return
	}
	landing, err := c.appendBulk(all)
	if err != nil {
		// Nothing of the group went to the log, so nothing was committed.
		c.fail(err)
		finish(landing, store.ErrUnhealthy)
		return
	}
	g := c.evaluate(landing)
	if len(g.winners) == 0 {
		return
	}
	if err := c.assemble(g); err != nil {
		g.done(err)
		finish(append(g.winners, g.dependent...), store.NotAssembled(err))
		return
	}
	frame := c.encode(g)
	if err := c.log.EnsureSpace(len(frame), c.failed); err != nil {
		g.done(notWritten(err))
		finish(append(g.winners, g.dependent...), notWritten(err))
		return
	}
	c.counters.commits.Add(1)
	begun := time.Now()
	c.frame = frame
	seq, err := c.log.Append(frame, c.next-1)
	if err != nil {
		c.fail(err)
		// The frame may be on disk or not, and the conflicts depend on it.
		g.done(store.ErrUnknown)
		finish(append(g.winners, g.dependent...), store.ErrUnknown)
		return
	}
	if c.options.Observer != nil {
		c.options.Observer.Committed(len(g.winners), time.Since(begun))
	}
	c.publish(g, seq)
}

// awaitApplier waits while the applier is behind, which bounds the memory.
func (c *committer) awaitApplier() {
	for {
		applied := c.overlay.untilSpace()
		if applied == nil {
			return
		}
		select {
		case <-applied:
		case <-c.failed:
			return
		}
	}
}

func (c *committer) encode(g *group) []byte {
	if cap(c.frame) > maxLayer {
		c.frame = nil // do not keep the memory of one large group
	}
	b := wal.BeginFrame(c.frame)
	for w := range g.all {
		for i := range w.staged {
			if !w.staged[i].check && !w.staged[i].place {
				b = appendChange(b, w.staged[i].key, w.staged[i].value)
			}
		}
	}
	return b
}

// assemble has the sequences make what the group adds to them. An error means that one of them cannot go on.
func (c *committer) assemble(g *group) error {
	if len(g.places) == 0 {
		return nil
	}
	for now := c.options.Now(); len(g.places) > 0; {
		in, rest := g.places[0].In, g.places[:0:0]
		c.places = c.places[:0]
		for _, p := range g.places {
			if p.In == in {
				c.places = append(c.places, p)
			} else {
				rest = append(rest, p)
			}
		}
		g.places = rest
		writes, done, err := in.Assemble(c.places, now)
		clear(c.places)
		if err != nil {
			return err
		}
		made := newBatch(writes, now)
		c.reading.RLock()
		err = c.checkConditions(g, made, now)
		c.reading.RUnlock()
		if err == nil && made.failed >= 0 {
			err = store.ErrOvertaken
		}
		c.stage(g, made)
		g.made = append(g.made, made)
		g.ended = append(g.ended, func(err error) {
			if done != nil {
				done(made.version, err)
			}
			made.release()
		})
		if err != nil {
			return err
		}
	}
	for _, b := range g.winners {
		for i := range b.staged {
			// Of a key under which nothing was made, what stood there still stands.
			if w := &b.staged[i]; w.place && len(g.pending[w.key]) == headerSize && &g.pending[w.key][0] == &w.value[0] {
				delete(g.pending, w.key)
			}
		}
	}
	for _, b := range g.dependent { // shown what stands where it has lost to a place
		for _, made := range g.made {
			i := slices.IndexFunc(made.staged, func(s staged) bool { return s.key == b.staged[b.failed].key })
			if i >= 0 && len(b.found) == headerSize {
				b.found = made.staged[i].value
			}
		}
	}
	return nil
}

// appendBulk makes the group's large bulk values durable before the frame that points to
// them; small ones are in the frame. It finishes the batches whose values could not be
// written and returns the others. An error means that the state of the disk is unknown.
func (c *committer) appendBulk(all []*batch) ([]*batch, error) {
	values := c.values[:0]
	for _, b := range all {
		if b.bulk == 0 {
			continue
		}
		for i := range b.writes {
			w := &b.writes[i]
			if !b.staged[i].apart {
				continue
			}
			values = append(values, &bulkValue{key: string(w.Key), value: w.Value, expires: w.Expires})
		}
	}
	if len(values) == 0 {
		return all, nil
	}
	err := c.bodies.append(values, c.countBulkSync)
	if errors.As(err, new(syncError)) {
		return all, err
	}
	landing := all[:0:0]
	next := 0
	for _, b := range all {
		switch {
		case b.bulk == 0:
			landing = append(landing, b)
		case err != nil:
			b.finish(notWritten(err))
		default:
			landing = append(landing, b)
			for i := range b.writes {
				if b.staged[i].apart {
					values[next].at.put(b.staged[i].value[headerSize:])
					next++
				}
			}
		}
	}
	clear(values)
	c.values = values[:0]
	return landing, nil
}

// publish makes the group readable before it wakes watchers and answers the callers.
func (c *committer) publish(g *group, seq uint64) {
	c.overlay.publish(g.pending, seq, c.next-1)
	c.queue.countInFlight(len(g.winners) + len(g.dependent))
	c.counters.batches.Add(uint64(len(g.winners)))
	for b := range g.all {
		c.counters.bytes.Add(uint64(b.size - b.inline - b.placed))
		writes := len(b.staged)
		for i := range b.writes {
			if b.staged[i].check || b.staged[i].place {
				writes--
				continue
			}
			if w := &b.writes[i]; w.Bulk && b.staged[i].value != nil {
				c.counters.bulkBytes.Add(uint64(len(w.Value)))
			}
			c.watches.Wake(b.writes[i].Key)
		}
		c.counters.writes.Add(uint64(writes))
	}
	g.done(nil)
	finish(g.winners, nil)
	finish(g.dependent, nil)
}

func finish(all []*batch, err error) {
	for _, b := range all {
		b.finish(err)
	}
}

// group is a frame in the making, with the changes of its batches.
type group struct {
	winners   []*batch
	dependent []*batch // conflicts with a winner of this group
	pending   map[string][]byte
	places    []*store.Place // of the winners, until they are assembled
	made      []*batch       // what sequences have made of them
	ended     []func(err error)
}

// all yields what the frame has: the winners, and what sequences have made of their places.
func (g *group) all(yield func(b *batch) bool) {
	for _, b := range g.winners {
		if !yield(b) {
			return
		}
	}
	for _, b := range g.made {
		if !yield(b) {
			return
		}
	}
}

// done says to the sequences how the commit has ended.
func (g *group) done(err error) {
	for _, ended := range g.ended {
		ended(err)
	}
}

// maxPending is the number of keys up to which a group's map is used again.
const maxPending = 4096

// evaluate checks the conditions of each batch against the state that those before it
// leave, and collects the writes of those that hold. A conflict with the durable state is
// answered at once; one with a winner of this group waits for the sync.
func (c *committer) evaluate(all []*batch) *group {
	c.reading.RLock()
	defer c.reading.RUnlock()
	if c.pending == nil || len(c.pending) > maxPending {
		c.pending = make(map[string][]byte)
	}
	clear(c.pending)
	g := &group{winners: make([]*batch, 0, len(all)), pending: c.pending}
	now := c.options.Now()
	for _, b := range all {
		err := c.checkConditions(g, b, now)
		switch {
		case err != nil:
			b.finish(notWritten(err))
		case b.failed < 0:
			c.stage(g, b)
			g.winners = append(g.winners, b)
		case b.onGroup:
			c.counters.conflicts.Add(1)
			g.dependent = append(g.dependent, b)
		default:
			c.counters.conflicts.Add(1)
			b.finish(nil)
		}
	}
	return g
}

// checkConditions finds the first write whose condition does not hold.
func (c *committer) checkConditions(g *group, b *batch, now time.Time) error {
	for i := range b.writes {
		condition := b.writes[i].If
		if condition.None() {
			continue
		}
		raw, ok := g.pending[b.staged[i].key]
		if ok {
			b.onGroup = true
		} else {
			c.name = append(c.name[:0], b.staged[i].key...)
			stored, err := c.find(c.name)
			if err != nil {
				return err
			}
			raw = stored.raw
		}
		entry, living, err := livingEntry(raw, now)
		if err != nil {
			return err
		}
		var found *store.Entry
		if living {
			found = &entry
		}
		if !condition.Holds(found) {
			b.failed = i
			if living {
				b.found = raw
			}
			return nil
		}
	}
	return nil
}

func notWritten(err error) error {
	return fmt.Errorf("badger: nothing was written: %w", err)
}

// livingEntry decodes what a condition needs of raw; living is false where it is expired or none.
func livingEntry(raw []byte, now time.Time) (entry store.Entry, living bool, err error) {
	if raw == nil {
		return store.Entry{}, false, nil
	}
	r, err := decode(raw)
	if err != nil {
		return store.Entry{}, false, err
	}
	return store.Entry{Version: r.version}, r.living(now), nil
}

func (c *committer) stage(g *group, b *batch) {
	b.version = c.next
	c.next++
	for i := range b.staged {
		w := &b.staged[i]
		if w.check {
			continue
		}
		if w.place {
			g.places = append(g.places, b.writes[i].Place)
		}
		if w.value != nil {
			binary.BigEndian.PutUint64(w.value[1:], uint64(b.version))
		}
		g.pending[w.key] = w.value
	}
}
