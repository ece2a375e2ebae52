package badger

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"math"
	"sync/atomic"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Keys in Badger begin with a byte that separates users' keys from our own and from the
// prefix that Badger reserves.
const (
	userSpace   = 'k'
	afterUser   = userSpace + 1
	markerSpace = 'm'
)

func userKey(key []byte) []byte {
	k := make([]byte, 1+len(key))
	k[0] = userSpace
	copy(k[1:], key)
	return k
}

// A value in Badger is a header and then the user's value, or a pointer to it.
//
//	byte 0      flags
//	bytes 1-8   version, big endian
//	bytes 9-16  expiry, Unix seconds; with bytes 17-20, nanoseconds
//
// The version is here because batches of one group share Badger's timestamp.
const (
	headerSize = 21

	flagExpires = 1 << 0
	// flagBulk marks a value that is stored in a segment, or will be if flagInline is set too.
	flagBulk = 1 << 1
	// flagInline marks a bulk value that is stored here itself: in the log and the overlay,
	// not in Badger.
	flagInline = 1 << 2
	knownFlags = flagExpires | flagBulk | flagInline
)

type record struct {
	version store.Version
	expires time.Time
	bulk    bool   // value is a pointer
	value   []byte // the user's value, or the pointer
}

// putHeader writes everything but the version, which only the committer knows.
func putHeader(b []byte, expires time.Time, flags byte) {
	b[0] |= flags
	if !expires.IsZero() {
		b[0] |= flagExpires
		binary.BigEndian.PutUint64(b[9:], uint64(expires.Unix()))
		binary.BigEndian.PutUint32(b[17:], uint32(expires.Nanosecond()))
	}
}

var errRecord = errors.New("record has an unknown form")

// decode reads a value of Badger; the record shares its memory.
func decode(b []byte) (record, error) {
	if len(b) < headerSize || b[0]&^knownFlags != 0 {
		return record{}, errRecord
	}
	r := record{
		version: store.Version(binary.BigEndian.Uint64(b[1:])),
		bulk:    b[0]&(flagBulk|flagInline) == flagBulk,
		value:   b[headerSize:],
	}
	if b[0]&flagExpires != 0 {
		r.expires = time.Unix(int64(binary.BigEndian.Uint64(b[9:])), int64(binary.BigEndian.Uint32(b[17:])))
	}
	if r.bulk && len(r.value) != pointerSize {
		return record{}, errRecord
	}
	return r, nil
}

func (r *record) living(now time.Time) bool {
	return r.expires.IsZero() || now.Before(r.expires)
}

// pointer locates a value in a segment.
type pointer struct {
	segment int64 // the end of its time partition, Unix seconds
	offset  uint64
	length  uint32 // of the value
	sum     uint32 // CRC-32C of key and value
}

const pointerSize = 24

// end is where the value and its key, of so many bytes, end in the segment.
func (p pointer) end(key int) int64 {
	return int64(p.offset) + int64(segmentHeader+key) + int64(p.length)
}

func (p pointer) put(b []byte) {
	binary.BigEndian.PutUint64(b, uint64(p.segment))
	binary.BigEndian.PutUint64(b[8:], p.offset)
	binary.BigEndian.PutUint32(b[16:], p.length)
	binary.BigEndian.PutUint32(b[20:], p.sum)
}

func readPointer(b []byte) pointer {
	return pointer{
		segment: int64(binary.BigEndian.Uint64(b)),
		offset:  binary.BigEndian.Uint64(b[8:]),
		length:  binary.BigEndian.Uint32(b[16:]),
		sum:     binary.BigEndian.Uint32(b[20:]),
	}
}

// Get implements store.Store.
func (s *Store) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if err := ctx.Err(); err != nil {
		return store.Entry{}, err
	}
	now := s.options.Now()
	var short [64]byte // on the stack: most keys are short, and what asks the overlay and the filter keeps none
	name := append(append(short[:0], userSpace), key...)
	if err := s.verifyRange(name, name); err != nil {
		return store.Entry{}, err
	}
	found, err := s.get(name)
	if err != nil {
		return store.Entry{}, err
	}
	if found.raw == nil {
		return store.Entry{}, store.ErrNotFound
	}
	e, err := s.entry(key, found, now)
	if err == nil && found.read {
		s.overlay.remember(name, found, e.Value)
	}
	return e, err
}

// stored is what is stored under a key, expired or not.
type stored struct {
	raw   []byte // as Badger has it, or the overlay; nil is none
	value []byte // that raw points to; nil where it was not read, or raw has it
	ts    uint64 // Badger's timestamp at which it is current
	read  bool   // now, of Badger: raw is the reader's own
}

func (s *Store) get(key []byte) (stored, error) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return stored{}, err
	}
	found, err := s.find(key)
	if err != nil {
		return stored{}, fmt.Errorf("badger: reading: %w", err)
	}
	return found, nil
}

// find returns what is stored under a key. It may share the overlay's memory. The caller holds
// reading.
func (s *Store) find(key []byte) (stored, error) {
	found, ok := s.overlay.get(key)
	if ok || s.absence.proves(key) {
		return found, nil
	}
	return s.findInTables(bytes.Clone(key), found.ts)
}

// findInTables is what Badger has under key at ts.
func (s *Store) findInTables(key []byte, ts uint64) (stored, error) {
	txn := s.db.NewTransactionAt(ts, false)
	defer txn.Discard()
	raw, err := lookUp(txn, key)
	return stored{raw: raw, ts: ts, read: true}, err
}

// entry decodes what was found, or returns ErrNotFound if it has expired by now. The zero time
// ignores expiry.
func (s *Store) entry(key []byte, found stored, now time.Time) (store.Entry, error) {
	r, err := decode(found.raw)
	if err != nil {
		return store.Entry{}, fmt.Errorf("%w: %w", errCorrupt, err)
	}
	if !now.IsZero() && !r.living(now) {
		return store.Entry{}, store.ErrNotFound
	}
	e := store.Entry{Key: key, Version: r.version, Expires: r.expires}
	switch {
	case !r.bulk && found.read:
		e.Value = r.value
		return e, nil
	case !r.bulk:
		e.Value = bytes.Clone(r.value)
		return e, nil
	case found.value != nil:
		e.Value = bytes.Clone(found.value)
		return e, nil
	}
	e.Value, err = s.bodies.read(readPointer(r.value), key)
	if err != nil && !now.IsZero() && !r.living(s.options.Now()) {
		// It expired and was swept between the two reads.
		return store.Entry{}, store.ErrNotFound
	}
	if err != nil {
		return store.Entry{Key: key}, err
	}
	return e, nil
}

// recent keeps what was read of Badger more than once lately, as it is stored: what is sealed in
// the store is sealed here (P8). The overlay drops what changes, under its lock.
type recent struct {
	seed maphash.Seed
	once [4096]atomic.Uint32 // hashes of keys that were read last, each in the place that it has

	young, old map[string]stored
	size       int // of what was put into young, in bytes
}

const (
	// maxRecent is the size in bytes at which the younger half of the cache becomes the older one.
	maxRecent = 1 << 20
	// maxRecentValue is the largest value that is kept, in bytes.
	maxRecentValue = 64 << 10
	// recentOverhead is about what an entry takes besides its bytes.
	recentOverhead = 160
)

// again reports whether key was read not long ago, and notes that it is now. So who reads many
// keys once each does not fill the cache.
func (r *recent) again(key []byte) bool {
	hash := maphash.Bytes(r.seed, key)
	mark := uint32(hash>>32) | 1
	return r.once[hash%uint64(len(r.once))].Swap(mark) == mark
}

func (r *recent) get(key []byte) (found stored, ok bool) {
	if found, ok = r.young[string(key)]; !ok {
		found, ok = r.old[string(key)]
	}
	return found, ok
}

func (r *recent) put(key string, found stored) {
	if r.size >= maxRecent || r.young == nil {
		r.young, r.old, r.size = make(map[string]stored), r.young, 0
	}
	r.young[key] = found
	r.size += len(key) + len(found.raw) + len(found.value) + recentOverhead
}

// drop removes the keys of a layer.
func (r *recent) drop(l *layer) {
	if len(r.young)+len(r.old) == 0 {
		return
	}
	for key := range l.values {
		delete(r.young, key)
		delete(r.old, key)
	}
}

// lookUp returns a copy of Badger's value of key, expired or not; nil is none.
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

// A scan fetches pages, so that a slow caller holds no resource of Badger's, and may commit
// or close the store.
const (
	firstPage   = 32      // entries
	laterPage   = 256     // entries
	pageBytes   = 1 << 20 // of values
	pageVisited = 4096    // entries visited, expired ones included
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
		if err := s.verifyRange(c.from, c.to); err != nil {
			yield(store.Entry{}, err)
			return
		}
		left := math.MaxInt
		if r.Limit > 0 {
			left = r.Limit
		}
		for size := firstPage; left > 0 && !c.done; size = laterPage {
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

// cursor reads one snapshot: the timestamp and the time at which the scan began.
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

// drain returns when Badger has everything that can be read now.
func (s *Store) drain(ctx context.Context) error {
	for seq := s.overlay.newest(); ; {
		changed := s.overlay.untilApplied(seq)
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

// fetch returns up to n living entries and moves the bound past those that it visited.
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
		if c.reverse && bytes.Compare(key, c.from) < 0 || !c.reverse && bytes.Compare(key, c.to) >= 0 {
			break
		}
		if len(piece) == n || size >= pageBytes || visited == pageVisited {
			return piece, nil
		}
		visited++
		raw, err := it.Item().ValueCopy(nil)
		if err != nil {
			return nil, fmt.Errorf("badger: reading: %w", err)
		}
		key = c.advance(key)
		r, err := decode(raw)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errCorrupt, err)
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
	it.Seek(c.to) // the last entry at or below it
	if it.Valid() && bytes.Equal(it.Item().Key(), c.to) {
		it.Next()
	}
}

// advance moves the bound past key and returns a copy of the user's key.
func (c *cursor) advance(key []byte) []byte {
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
	return c.s.entry(f.key, stored{raw: f.raw, read: true}, c.now)
}
