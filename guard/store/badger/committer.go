package badger

import (
	"errors"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// maxGroupBulk bounds the memory of one group's large bulk values, in bytes.
const maxGroupBulk = 8 << 20

// committer answers commits, one group at a time: it gathers the batches that wait into
// one frame of the log and one sync. Who comes alone commits in his own goroutine, since
// two changes of goroutine cost as much as the sync.
type committer struct {
	*Store
	turn  sync.Mutex    // held by who commits
	next  store.Version // the next version to give
	spent []*bulkValue  // scratch
	frame []byte        // scratch
}

func (c *committer) run() {
	for c.queue.await() {
		c.commitWaiting()
	}
}

func (c *committer) commitWaiting() {
	c.turn.Lock()
	defer c.turn.Unlock()
	for waiting := c.queue.take(); len(waiting) > 0; {
		n := fitting(waiting)
		c.commitGroup(waiting[:n])
		waiting = waiting[n:]
	}
}

// commitAlone commits b at once where nobody else does and nobody else is expected.
// Those who come meanwhile wait for the goroutine.
func (c *committer) commitAlone(b *batch) bool {
	if !c.queue.quiet() || !c.turn.TryLock() {
		return false
	}
	defer c.turn.Unlock()
	if !c.queue.quiet() {
		return false
	}
	c.commitGroup([]*batch{b})
	return true
}

// wait returns when nobody commits, once the queue is closed.
func (c *committer) wait() {
	c.turn.Lock()
	defer c.turn.Unlock()
}

// fitting is how many batches from the first fit into one frame, at least one.
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
	c.awaitRoom()
	if c.unhealthy() != nil {
		finish(all, store.ErrUnhealthy)
		return
	}
	landing, err := c.appendBulk(all)
	if err != nil {
		// Nothing of the group went to the log, so none of it has landed.
		c.fail(err)
		finish(landing, store.ErrUnhealthy)
		return
	}
	g := c.evaluate(landing)
	if len(g.winners) == 0 {
		return
	}
	frame := c.encode(g)
	if err := c.log.room(len(frame)+frameAlign, c.failed); err != nil {
		finish(append(g.winners, g.dependent...), notWritten(err))
		return
	}
	c.counters.commits.Add(1)
	begun := time.Now()
	c.frame, err = c.log.append(frame, c.next-1)
	if err != nil {
		c.fail(err)
		// They may be on disk or not. The losers lost to entries that may not be
		// there either.
		finish(append(g.winners, g.dependent...), store.ErrUnknown)
		return
	}
	if c.options.Observer != nil {
		c.options.Observer.Committed(len(g.winners), time.Since(begun))
	}
	c.publish(g)
}

// awaitRoom waits while the applier is behind, so that memory is bounded.
func (c *committer) awaitRoom() {
	for {
		applied := c.overlay.crowded()
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
		c.frame = nil // one large group, which need not cost its memory for ever
	}
	b := beginFrame(c.frame)
	for _, w := range g.winners {
		for i := range w.staged {
			b = appendChange(b, w.staged[i].key, w.staged[i].value)
		}
	}
	return b
}

// appendBulk makes the group's large bulk values durable before anything that names
// them is; the small ones go with the frame. It answers the batches whose values could not be written and returns the
// others; an error means that the disk is no longer to be trusted.
func (c *committer) appendBulk(all []*batch) ([]*batch, error) {
	values := c.spent[:0]
	for _, b := range all {
		if b.bulk == 0 {
			continue
		}
		for i := range b.writes {
			w := &b.writes[i]
			if !b.staged[i].apart {
				continue
			}
			values = append(values, &bulkValue{key: w.Key, value: w.Value, expires: w.Expires})
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
	c.spent = values[:0]
	return landing, nil
}

// publish lets the group be read, then wakes and answers, in this order: whoever is
// woken or answered finds it.
func (c *committer) publish(g *group) {
	c.overlay.publish(g.pending, c.log.seq, c.next-1)
	c.queue.landed(len(g.winners) + len(g.dependent))
	for _, b := range g.winners {
		c.counters.batches.Add(1)
		c.counters.writes.Add(uint64(len(b.staged)))
		c.counters.bytes.Add(uint64(b.size - b.inline))
		for i := range b.writes {
			if w := &b.writes[i]; w.Bulk && b.staged[i].value != nil {
				c.counters.bulkBytes.Add(uint64(len(w.Value)))
			}
			c.watches.Wake(b.writes[i].Key)
		}
	}
	finish(g.winners, nil)
	finish(g.dependent, nil)
}

func finish(all []*batch, err error) {
	for _, b := range all {
		b.finish(err)
	}
}

// group is a frame in the making, with what its batches change.
type group struct {
	winners   []*batch
	dependent []*batch // losers to a winner of this group
	pending   map[string][]byte
}
