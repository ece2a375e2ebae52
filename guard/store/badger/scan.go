package badger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// A scan fetches pieces, so that the caller's pace holds no resource of Badger's:
// the caller may commit, close the store, or take all day.
const (
	firstPiece   = 32      // entries
	laterPiece   = 256     // entries
	pieceBytes   = 1 << 20 // of values
	pieceVisited = 4096    // entries looked at, expired ones included
)

// Scan implements store.Store.
func (s *Store) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		c, err := s.newCursor(ctx, r)
		if err != nil {
			yield(store.Entry{}, err)
			return
		}
		defer c.close()
		if err := s.vet(c.from, c.to); err != nil {
			yield(store.Entry{}, err)
			return
		}
		left := math.MaxInt
		if r.Limit > 0 {
			left = r.Limit
		}
		for size := firstPiece; left > 0 && !c.done; size = laterPiece {
			piece, err := c.fetch(ctx, min(size, left))
			if err != nil {
				yield(store.Entry{}, err)
				return
			}
			for _, f := range piece {
				e, err := c.entry(ctx, f)
				if errors.Is(err, store.ErrNotFound) {
					continue // a bulk value that expired since the scan began
				}
				if !yield(e, err) || err != nil {
					return
				}
				left--
			}
		}
	}
}

// cursor walks one snapshot: the timestamp and the time at which the scan began.
type cursor struct {
	s       *Store
	ts      uint64
	now     time.Time
	reverse bool
	from    []byte // inclusive
	to      []byte // exclusive
	done    bool
}

type fetched struct {
	key, raw []byte
}

func (s *Store) newCursor(ctx context.Context, r store.Range) (*cursor, error) {
	if err := s.drain(ctx); err != nil {
		return nil, err
	}
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return nil, err
	}
	c := &cursor{s: s, ts: s.durable.Load(), now: s.options.Now(), reverse: r.Reverse}
	c.from, c.to = userKey(r.From), []byte{afterUser}
	if len(r.To) > 0 {
		c.to = userKey(r.To)
	}
	c.done = bytes.Compare(c.from, c.to) >= 0
	s.scansMu.Lock()
	defer s.scansMu.Unlock()
	s.scans[c.ts]++
	return c, nil
}

// drain returns when Badger has all that can be read now.
func (s *Store) drain(ctx context.Context) error {
	for seq := s.overlay.newest(); ; {
		changed := s.overlay.behind(seq)
		if changed == nil {
			return nil
		}
		signal(s.applier.hurry)
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.failed:
			return store.ErrUnhealthy
		}
	}
}

func (c *cursor) close() {
	c.s.scansMu.Lock()
	defer c.s.scansMu.Unlock()
	if c.s.scans[c.ts]--; c.s.scans[c.ts] == 0 {
		delete(c.s.scans, c.ts)
	}
}

// fetch returns up to n living entries and moves the bound behind what it visited.
func (c *cursor) fetch(ctx context.Context, n int) (piece []fetched, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.s.reading.RLock()
	defer c.s.reading.RUnlock()
	if err := c.s.usable(); err != nil {
		return nil, err
	}
	txn := c.s.db.NewTransactionAt(c.ts, false)
	defer txn.Discard()
	it := txn.NewIterator(badgerdb.IteratorOptions{Reverse: c.reverse})
	defer it.Close()
	visited, size := 0, 0
	for c.seek(it); it.Valid(); it.Next() {
		key := it.Item().Key()
		if !c.within(key) {
			break
		}
		if len(piece) == n || size >= pieceBytes || visited == pieceVisited {
			return piece, nil
		}
		visited++
		raw, err := it.Item().ValueCopy(nil)
		if err != nil {
			return nil, fmt.Errorf("badger: reading: %w", err)
		}
		key = c.pass(key)
		r, err := decode(raw)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if r.living(c.now) {
			piece = append(piece, fetched{key: key, raw: raw})
			size += len(raw)
		}
	}
	c.done = true
	return piece, nil
}

func (c *cursor) seek(it *badgerdb.Iterator) {
	if !c.reverse {
		it.Seek(c.from)
		return
	}
	it.Seek(c.to) // the last one at or below it
	if it.Valid() && bytes.Equal(it.Item().Key(), c.to) {
		it.Next()
	}
}

func (c *cursor) within(key []byte) bool {
	if c.reverse {
		return bytes.Compare(key, c.from) >= 0
	}
	return bytes.Compare(key, c.to) < 0
}

// pass moves the bound behind key and returns the user's own copy of it.
func (c *cursor) pass(key []byte) []byte {
	if c.reverse {
		c.to = append(c.to[:0], key...)
	} else {
		c.from = append(append(c.from[:0], key...), 0)
	}
	return bytes.Clone(key[1:])
}

func (c *cursor) entry(ctx context.Context, f fetched) (store.Entry, error) {
	if err := ctx.Err(); err != nil {
		return store.Entry{}, err
	}
	return c.s.entry(f.key, f.raw, c.now)
}
