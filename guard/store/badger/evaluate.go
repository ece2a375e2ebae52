package badger

import (
	"errors"
	"fmt"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// grace is how much later than at the entry's expiry Badger may drop it. Badger's
// clock is the machine's; ours decides, and this is the difference it may gain.
const grace = time.Hour

// evaluate judges the batches in order, each by what the ones before it leave, and
// collects the winners' writes. Losers whom the durable state refuses are
// answered at once; those who lose to a winner of this group wait for its sync.
func (c *committer) evaluate(all []*batch) *group {
	c.reading.RLock()
	defer c.reading.RUnlock()
	g := &group{
		winners: make([]*batch, 0, len(all)),
		pending: make(map[string][]byte),
	}
	now := c.options.Now()
	for _, b := range all {
		err := c.judge(g, b, now)
		switch {
		case err != nil:
			b.finish(notWritten(err))
		case b.lost < 0:
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

// judge finds the first write whose condition does not hold.
func (c *committer) judge(g *group, b *batch, now time.Time) error {
	for i := range b.writes {
		condition := b.writes[i].If
		if condition.None() {
			continue
		}
		raw, ok := g.pending[string(b.staged[i].key)]
		if ok {
			b.onGroup = true
		} else {
			var err error
			if raw, err = c.find(b.staged[i].key); err != nil {
				return err
			}
		}
		found, err := standing(raw, now)
		if err != nil {
			return err
		}
		if !condition.Holds(found) {
			b.lost = i
			if found != nil {
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

// standing is the living entry in raw as far as a condition asks for it.
func standing(raw []byte, now time.Time) (*store.Entry, error) {
	if raw == nil {
		return nil, nil
	}
	r, err := decode(raw)
	if err != nil || !r.living(now) {
		return nil, err
	}
	return &store.Entry{Version: r.version}, nil
}

func (c *committer) stage(g *group, b *batch) {
	b.version = c.next
	c.next++
	for i := range b.staged {
		w := &b.staged[i]
		if w.value != nil {
			putVersion(w.value, b.version)
		}
		g.pending[string(w.key)] = w.value
	}
}

// hint tells Badger's compaction when it may drop an entry, by the machine's clock.
// The time left is what counts: our clock need not be that one.
func hint(expires, now time.Time) uint64 {
	if expires.IsZero() {
		return 0
	}
	left := expires.Sub(now) // saturates
	if left > 100*365*24*time.Hour {
		return 0
	}
	return uint64(time.Now().Add(left + grace).Unix())
}

// stands reports whether Badger has anything under key. What its clock takes for
// expired it has not.
func stands(txn *badgerdb.Txn, key []byte) (bool, error) {
	_, err := txn.Get(key)
	if errors.Is(err, badgerdb.ErrKeyNotFound) {
		return false, nil
	}
	return err == nil, err
}

// lookUp returns a copy of what stands under key, living or not; nil is nothing.
func lookUp(txn *badgerdb.Txn, key []byte) ([]byte, error) {
	item, err := txn.Get(key)
	if errors.Is(err, badgerdb.ErrKeyNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return item.ValueCopy(nil)
}
