package badger

import (
	"errors"
	"fmt"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// maxGroupBulk bounds the memory of one group's bulk values, in bytes.
const maxGroupBulk = 8 << 20

// committer is the one goroutine that writes. It gathers the batches that wait into
// one Badger transaction and one sync.
type committer struct {
	*Store
	next  store.Version // the next version to give
	spent []*bulkValue  // scratch
}

func (c *committer) run() {
	for {
		waiting := c.queue.take()
		if waiting == nil {
			return
		}
		for len(waiting) > 0 {
			n := c.fitting(waiting)
			c.commitGroup(waiting[:n])
			waiting = waiting[n:]
		}
	}
}

// fitting is how many batches from the first fit into one transaction, at least one:
// store.Check keeps every single batch below Badger's bound.
func (c *committer) fitting(waiting []*batch) int {
	const spare = 1024 // the marker and Badger's own entry
	size, count, bulk := c.db.MaxBatchSize()-spare, c.db.MaxBatchCount()-8, maxGroupBulk
	for i, b := range waiting {
		size -= b.size
		count -= int64(len(b.staged))
		bulk -= b.bulk
		if i > 0 && (size <= 0 || count <= 0 || bulk <= 0) {
			return i
		}
	}
	return len(waiting)
}

func (c *committer) commitGroup(all []*batch) {
	if c.unhealthy() != nil {
		finish(all, store.ErrUnhealthy)
		return
	}
	landing, err := c.appendBulk(all)
	if err != nil {
		// Nothing of the group went to Badger, so none of it has landed.
		c.fail(err)
		finish(landing, store.ErrUnhealthy)
		return
	}
	g, err := c.evaluate(landing)
	if err != nil {
		g.txn.Discard()
		finish(append(g.winners, g.dependent...), notWritten(err))
		return
	}
	if len(g.winners) == 0 {
		g.txn.Discard()
		return
	}
	if err := c.commitTxn(g); err != nil {
		c.fail(err)
		// They may be on disk or not. The losers lost to entries that may not be
		// there either.
		finish(append(g.winners, g.dependent...), store.ErrUnknown)
		return
	}
	c.publish(g)
}

// appendBulk makes the group's bulk values durable before anything that names them
// is. It answers the batches whose values could not be written and returns the
// others; an error means that the disk is no longer to be trusted.
func (c *committer) appendBulk(all []*batch) ([]*batch, error) {
	values := c.spent[:0]
	var bytes uint64
	for _, b := range all {
		if !b.hasBulk() {
			continue
		}
		for i := range b.writes {
			w := &b.writes[i]
			if !w.Bulk || b.staged[i].value == nil {
				continue
			}
			values = append(values, &bulkValue{key: w.Key, value: w.Value, expires: w.Expires})
			bytes += uint64(len(w.Value))
		}
	}
	if len(values) == 0 {
		return all, nil
	}
	err := c.bodies.append(values, func() { c.counters.bulkSyncs.Add(1) })
	if errors.As(err, new(syncError)) {
		return all, err
	}
	landing := all[:0:0]
	next := 0
	for _, b := range all {
		switch {
		case !b.hasBulk():
			landing = append(landing, b)
		case err != nil:
			b.finish(notWritten(err))
		default:
			landing = append(landing, b)
			for i := range b.writes {
				if b.writes[i].Bulk && b.staged[i].value != nil {
					values[next].at.put(b.staged[i].value[headerSize:])
					next++
				}
			}
		}
	}
	if err == nil {
		c.counters.bulkBytes.Add(bytes)
	}
	clear(values)
	c.spent = values[:0]
	return landing, nil
}

func (c *committer) commitTxn(g *group) error {
	c.counters.commits.Add(1)
	begun := time.Now()
	if err := c.disk.commit(g.txn, uint64(c.next-1)); err != nil {
		return fmt.Errorf("committing: %w", err)
	}
	if err := c.directory.settle(); err != nil {
		return err
	}
	if c.options.Observer != nil {
		c.options.Observer.Committed(len(g.winners), time.Since(begun))
	}
	return nil
}

// publish lets the group be read, then wakes and answers, in this order: whoever is
// woken or answered finds it.
func (c *committer) publish(g *group) {
	c.durable.Store(uint64(c.next - 1))
	c.queue.landed(len(g.winners) + len(g.dependent))
	for _, b := range g.winners {
		c.counters.batches.Add(1)
		c.counters.writes.Add(uint64(len(b.staged)))
		c.counters.bytes.Add(uint64(b.size))
		for i := range b.writes {
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

// group is a Badger transaction in the making, with what its batches change.
type group struct {
	txn       *badgerdb.Txn
	winners   []*batch
	dependent []*batch // losers to a winner of this group
	pending   map[string][]byte
}
