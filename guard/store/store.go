// Package store is the contract between the guard and its storage: ordered keys, and batches of
// conditional writes that are written whole or not at all.
//
// Everything that must survive a crash (executions, their index entries, result bodies, and the
// extra writes of other packages) is encoded on top of it, once. The memory store is the
// reference and for tests; badger is the embedded default. A new store must pass the suite in
// package storetest.
package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"slices"
	"sync"
	"time"
)

// Limits of every store, so that all stores accept the same batches.
const (
	// MaxKey is the longest key, in bytes. A key has at least one byte.
	MaxKey = 512
	// MaxValue is the largest value of an ordinary write, in bytes. Promises rest on ordinary
	// values (P2); stores keep them where a sync error is noticed.
	MaxValue = 64 << 10
	// MaxBulk is the largest value of a bulk write with an expiry, in bytes.
	MaxBulk = 1 << 20
	// MaxBatch is the largest number of writes in one commit.
	MaxBatch = 1024
	// MaxBatchBytes bounds the keys and ordinary values of one commit together, in bytes, so that
	// a batch fits into one transaction of every store. Bulk values that expire do not count.
	MaxBatchBytes = 2 << 20
)

// Store holds versioned values under ordered keys. All methods are safe for concurrent use. The
// caller owns returned values and keys; those given to Commit must not change until it returns.
type Store interface {
	// Get returns the current entry of key, or ErrNotFound. An entry whose expiry has passed (Now
	// is at or after it) is not found, swept or not. A value that is missing or does not match
	// its checksum is ErrDamaged. The entry's Key may be the key that was given.
	Get(ctx context.Context, key []byte) (Entry, error)

	// Scan yields the living entries of r in the order of their keys, from one consistent
	// snapshot. The last pair carries the error, if any; with ErrDamaged also the key, so that a
	// caller may continue after it.
	Scan(ctx context.Context, r Range) iter.Seq2[Entry, error]

	// Commit makes all writes of batch durable, or none. It returns the version that all of them
	// carry, but for checks. If a condition does not hold, the error is a *Conflict with the first such
	// write and the current entry. After its return the batch, with its keys and values, is the caller's.
	//
	// ctx counts only until the batch is queued: from there on the batch may land. ErrUnknown
	// means that the store does not know whether it did (a failed sync, a lost connection); any
	// other error that it did not.
	Commit(ctx context.Context, batch ...Write) (Version, error)

	// Watch returns a channel that is closed when the entry under key may have changed since the
	// call. It may wake without a change, but never misses one. A passing expiry is no change.
	// Close wakes every watch. cancel frees the watch; calling it twice is harmless.
	Watch(key []byte) (changed <-chan struct{}, cancel func())

	// Now is the clock for expiries and leases: the store's own if several nodes share it.
	Now(ctx context.Context) (time.Time, error)

	// Close waits for commits under way and releases the store. Later calls return ErrClosed.
	Close() error
}

// Version identifies a state of one key. It is opaque, never zero, and never the same for two
// writes of one key.
type Version uint64

// Unchanged is the condition that the version of a key is still v; that it has no living entry, if v is zero.
func (v Version) Unchanged() Condition {
	if v == 0 {
		return Absent()
	}
	return VersionIs(v)
}

// Entry is one living key.
type Entry struct {
	Key     []byte
	Value   []byte
	Version Version
	// Expires is when the entry stops being found; zero is never.
	Expires time.Time
}

// Range is From <= key < To. An empty To is the end of the store.
type Range struct {
	From, To []byte
	// Limit is the largest number of entries; zero is no limit.
	Limit int
	// Reverse yields the entries from the last to the first.
	Reverse bool
}

// Prefix is the range of all keys that begin with p. An empty p is everything.
func Prefix(p []byte) Range {
	to := bytes.Clone(p)
	for i := len(to) - 1; i >= 0; i-- {
		if to[i] != 0xff {
			to[i]++
			return Range{From: p, To: to[:i+1]}
		}
	}
	return Range{From: p}
}

// Write is one change of a batch. A batch has each key at most once.
type Write struct {
	Key []byte
	// If is the condition on the current entry of Key; the zero value is none.
	If Condition
	// Delete removes the entry; Value, Expires and Bulk are then unused. Deleting a missing entry
	// succeeds unless If forbids it.
	Delete bool
	// Check makes the write a condition on its key and nothing else: the entry stays as it is, with
	// its version, and no watch wakes. It needs an If, and takes no value, expiry or Delete. A batch
	// has at least one write that is no check.
	Check bool
	Value []byte
	// Expires is when the entry stops being found; zero is never. A past time is allowed, and the
	// entry then counts as expired.
	Expires time.Time
	// Bulk marks a value that is written once, and may be stored apart so that its space is freed
	// as a whole. One with an Expires may be large, must have no condition, and is durable before
	// the other writes of its batch. One without is held to the limits of an ordinary value.
	Bulk bool
	// Place, if not nil, asks for a place in a sequence. What is written then depends on the order of the
	// commits, and the sequence makes it; this write itself is a condition on its key, as Check is.
	Place *Place
}

// Place is what a batch adds to a sequence.
type Place struct {
	In   *Sequence
	Item any
	// Size bounds the keys and values that the sequence makes of it, in bytes, from 1 to MaxBulk. It counts as
	// that of an ordinary value.
	Size int
}

// Sequence makes writes of which the order of all commits decides what they are, such as the entries of a log.
type Sequence struct {
	// Assemble gets the places of the batches that are about to be committed together, in the order of their
	// commits, and returns the writes to commit with them. Their keys are the sequence's own and those of the writes
	// with the places; they come behind all batches, with a version of their own. now is the store's time. Bulk
	// values among the writes have no expiry.
	//
	// With an error, and if a condition of one of the writes does not hold, nothing of what is committed together is
	// written, and the commits return ErrUnavailable.
	//
	// done, if it is not nil, is called with how that commit has ended: with the version of the writes, or with an
	// error, which is ErrOvertaken if a condition of these or other writes of sequences did not hold. It is called before any of the batches returns that
	// has landed, and before the next Assemble. Until then the writes stay as they are. A commit with an unknown result
	// is done once the store knows it; if the store never does, done is not called.
	//
	// Both are called where all commits of this process pass through, one at a time: they neither wait nor use the
	// store.
	Assemble func(places []*Place, now time.Time) (writes []Write, done func(Version, error), err error)
}

// NotAssembled is the error of batches that were not written since a sequence could not go on.
func NotAssembled(why error) error {
	return fmt.Errorf("%w, nothing was written: %w", ErrUnavailable, why)
}

// Condition is a write's condition on the entry of its key. An expired entry counts as absent.
type Condition struct {
	kind    conditionKind
	version Version
}

type conditionKind uint8

const (
	conditionAny conditionKind = iota
	conditionAbsent
	conditionVersion
)

// Absent holds if the key has no living entry.
func Absent() Condition { return Condition{kind: conditionAbsent} }

// VersionIs holds if the living entry has exactly version v.
func VersionIs(v Version) Condition { return Condition{kind: conditionVersion, version: v} }

// None reports that c is no condition, so that a store need not read.
func (c Condition) None() bool { return c.kind == conditionAny }

// Version is the version that c asks for; 0 for another condition, or none.
func (c Condition) Version() Version { return c.version }

// Holds reports whether c accepts found, the living entry under the key or nil.
func (c Condition) Holds(found *Entry) bool {
	switch c.kind {
	case conditionAbsent:
		return found == nil
	case conditionVersion:
		return found != nil && found.Version == c.version
	default:
		return true
	}
}

// Errors that stores return, possibly wrapped.
var (
	// ErrNotFound: no living entry under the key.
	ErrNotFound = errors.New("store: not found")
	// ErrClosed: the store was closed by its owner.
	ErrClosed = errors.New("store: closed")
	// ErrUnhealthy: the store closed itself after a failed sync. Its content is known again only
	// after it was reopened.
	ErrUnhealthy = errors.New("store: closed itself after a failed sync, restart needed")
	// ErrUnknown: it is unknown whether the batch was written. Treat its entries as unknown,
	// never as not recorded.
	ErrUnknown = errors.New("store: outcome of the commit unknown")
	// ErrUnavailable: the store cannot be reached now, and nothing was written. It may pass by itself.
	ErrUnavailable = errors.New("store: not available")
	// ErrOvertaken: something else was written where a sequence goes on.
	ErrOvertaken = errors.New("store: something else was written where a sequence goes on")
	// ErrFull: there is no room for the batch now, and nothing of it was written.
	ErrFull = errors.New("store: no room")
	// ErrDamaged: the entry exists, its value is missing or altered.
	ErrDamaged = errors.New("store: value damaged")
	// ErrInvalid: the batch breaks a limit or a rule of Write.
	ErrInvalid = errors.New("store: invalid batch")
)

// Conflict is the error of a batch whose condition did not hold.
type Conflict struct {
	// Index is the place in the batch of the first write whose condition failed.
	Index int
	// Key is that write's key.
	Key []byte
	// Found is the current living entry, or nil.
	Found *Entry
}

func (c *Conflict) Error() string {
	if c.Found == nil {
		return fmt.Sprintf("store: write %d lost: nothing stands under its key", c.Index)
	}
	return fmt.Sprintf("store: write %d lost to version %d", c.Index, c.Found.Version)
}

// groupTime is how long a group of commits may take until it can be read.
const groupTime = 5 * time.Millisecond

// AwaitGroup waits until what a batch has lost to can be read: a commit of the same group is
// lost to before. The error is that of ctx, if it ends sooner.
func AwaitGroup(ctx context.Context) error {
	select {
	case <-time.After(groupTime):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Batch gathers the writes of one commit and the callbacks to run after it. The zero value is
// ready, and a nil Batch is empty. A Batch is for one goroutine.
//
// Committing a batch also ends it: with Commit, or in functions that take batches into their own
// commit. A batch that is not committed is ended with Done and the reason, so that callbacks can
// release what they hold.
type Batch struct {
	writes []Write
	done   []func(error) error  // the callbacks, in their order
	few    [2]func(error) error // room for the first two, which then cost no allocation
	ended  bool
}

// NewBatch returns a batch of writes.
func NewBatch(writes ...Write) *Batch { return &Batch{writes: writes} }

// Add adds writes.
func (b *Batch) Add(writes ...Write) { b.writes = append(b.writes, writes...) }

// OnDone adds a callback, which runs after earlier ones and gets the error that they returned:
// nil means that the commit is durable, ErrUnknown that it may be, any other error that nothing
// was written. It returns that error, or wraps it.
func (b *Batch) OnDone(callback func(err error) error) {
	if b.done == nil {
		b.done = b.few[:0]
	}
	b.done = append(b.done, callback)
}

// Join adds the writes and the callbacks of another batch, which must not change any more.
func (b *Batch) Join(other *Batch) {
	if other != nil {
		b.Add(other.writes...)
		b.OnDone(other.Done)
	}
}

// Writes returns the writes.
func (b *Batch) Writes() []Write {
	if b == nil {
		return nil
	}
	return b.writes
}

// Done runs the callbacks with the error of the commit and returns their result. Only the first
// call runs them.
func (b *Batch) Done(err error) error {
	if b == nil || b.ended {
		return err
	}
	b.ended = true
	for _, callback := range b.done {
		err = callback(err)
	}
	return err
}

// Commit commits the writes, if any, and runs the callbacks.
func (b *Batch) Commit(ctx context.Context, st Store) error {
	var err error
	if len(b.Writes()) > 0 {
		_, err = st.Commit(ctx, b.writes...)
	}
	return b.Done(err)
}

// Lost reports whether err is a Conflict of one of the writes.
func Lost(err error, writes []Write) bool {
	if err == nil {
		return false
	}
	var lost *Conflict
	return errors.As(err, &lost) && slices.ContainsFunc(writes, func(w Write) bool { return bytes.Equal(w.Key, lost.Key) })
}

// Check returns an ErrInvalid with the limit or rule of Write that batch breaks. Stores call it
// first.
func Check(batch []Write) error {
	switch {
	case len(batch) == 0:
		return fmt.Errorf("%w: no writes", ErrInvalid)
	case len(batch) > MaxBatch:
		return fmt.Errorf("%w: %d writes, at most %d", ErrInvalid, len(batch), MaxBatch)
	}
	size, checks := 0, 0
	var seen map[uint64]int // where comparing all with all would take long
	if len(batch) > fewWrites {
		seen = make(map[uint64]int, len(batch))
	}
	for i := range batch {
		if err := batch[i].check(); err != nil {
			return fmt.Errorf("%w: write %d: %s", ErrInvalid, i, err)
		}
		if batch[i].Check {
			checks++
		}
		if p := batch[i].Place; p != nil {
			size += p.Size
		}
		size += len(batch[i].Key)
		if !batch[i].Delete && !batch[i].Large() {
			size += len(batch[i].Value)
		}
		if j := before(batch[:i], batch[i].Key, seen); j >= 0 {
			return fmt.Errorf("%w: writes %d and %d have the same key", ErrInvalid, j, i)
		}
	}
	if checks == len(batch) {
		return fmt.Errorf("%w: %d checks and no write beside them", ErrInvalid, checks)
	}
	if size > MaxBatchBytes {
		return fmt.Errorf("%w: %d bytes of keys and values, at most %d", ErrInvalid, size, MaxBatchBytes)
	}
	return nil
}

// fewWrites is the size of a batch up to which its keys are compared with each other.
const fewWrites = 32

// hashed is the seed of the hashes by which before finds a key.
var hashed = maphash.MakeSeed()

// before is the index of the earlier write with this key, or -1. seen, if any, has the first key of
// each hash, and gets this one.
func before(earlier []Write, key []byte, seen map[uint64]int) int {
	if seen != nil {
		hash := maphash.Bytes(hashed, key)
		if _, ok := seen[hash]; !ok {
			seen[hash] = len(earlier)
			return -1
		}
	}
	for j := range earlier {
		if bytes.Equal(key, earlier[j].Key) {
			return j
		}
	}
	return -1
}

// Large reports whether the write has a bulk value that expires, which may be large.
func (w *Write) Large() bool { return w.Bulk && !w.Expires.IsZero() }

func (w *Write) check() error {
	switch {
	case len(w.Key) == 0:
		return errors.New("empty key")
	case len(w.Key) > MaxKey:
		return fmt.Errorf("key of %d bytes, at most %d", len(w.Key), MaxKey)
	case w.Check && w.If.None():
		return errors.New("a check without a condition")
	case w.Check && (w.Delete || w.Bulk || len(w.Value) > 0 || !w.Expires.IsZero()):
		return errors.New("a check that writes or deletes")
	case w.Place != nil && (w.Delete || w.Check || w.Bulk || len(w.Value) > 0 || !w.Expires.IsZero()):
		return errors.New("a place in a sequence, and something else beside it")
	case w.Place != nil && (w.Place.In == nil || w.Place.Size < 1 || w.Place.Size > MaxBulk):
		return fmt.Errorf("a place in no sequence, or of %d bytes, from 1 to %d", w.Place.Size, MaxBulk)
	case w.Delete:
		return nil
	case w.Large() && !w.If.None():
		return errors.New("bulk value with an expiry and a condition")
	case w.Large() && len(w.Value) > MaxBulk:
		return fmt.Errorf("bulk value of %d bytes, at most %d", len(w.Value), MaxBulk)
	case !w.Large() && len(w.Value) > MaxValue:
		return fmt.Errorf("value of %d bytes, at most %d", len(w.Value), MaxValue)
	}
	return nil
}

const shards = 64

// Watchers holds the watches of one store. The zero value is not ready; see NewWatchers.
type Watchers struct {
	seed   maphash.Seed
	shards [shards]shard
}

type shard struct {
	mu   sync.Mutex
	keys map[string]map[*waiter]struct{}
}

type waiter struct {
	changed chan struct{}
}

// NewWatchers returns an empty set of watches.
func NewWatchers() *Watchers {
	return &Watchers{seed: maphash.MakeSeed()}
}

// Watch returns a channel that the next Wake of key closes. cancel forgets it and may be called
// more than once.
func (k *Watchers) Watch(key []byte) (changed <-chan struct{}, cancel func()) {
	s := k.shard(key)
	name := string(key)
	w := &waiter{changed: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil {
		s.keys = make(map[string]map[*waiter]struct{})
	}
	if s.keys[name] == nil {
		s.keys[name] = make(map[*waiter]struct{})
	}
	s.keys[name][w] = struct{}{}
	return w.changed, func() { s.forget(name, w) }
}

// Wake closes the channels of all watches of key. The change must be readable before the call, or
// a waiter reads the old state and sleeps on.
func (k *Watchers) Wake(key []byte) {
	s := k.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	waiters, ok := s.keys[string(key)]
	if !ok {
		return
	}
	for w := range waiters {
		close(w.changed)
	}
	delete(s.keys, string(key))
}

// WakeAll closes every channel, for a store that closes or fails.
func (k *Watchers) WakeAll() {
	for i := range k.shards {
		s := &k.shards[i]
		s.mu.Lock()
		for _, waiters := range s.keys {
			for w := range waiters {
				close(w.changed)
			}
		}
		clear(s.keys)
		s.mu.Unlock()
	}
}

func (k *Watchers) shard(key []byte) *shard {
	return &k.shards[maphash.Bytes(k.seed, key)%shards]
}

func (s *shard) forget(name string, w *waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	waiters := s.keys[name]
	delete(waiters, w)
	if len(waiters) == 0 {
		delete(s.keys, name)
	}
}
