// Package badger is the embedded store: a log of its own that concurrent commits share,
// and behind it ordinary values in Badger and bulk values in files by time of expiry.
//
// What Commit has acknowledged was synced to the log before (P2). Reads find it in
// memory at once, and in Badger a little later. After a failed sync the store closes
// itself: every later call fails until it is opened anew (P4).
//
// A directory holds:
//
//	lock      taken by the process that has it open
//	STORE     form and state of the store; see seal
//	wal/      the log
//	lsm/      Badger
//	bodies/   bulk values
package badger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/internal/watch"
)

// Store is a store in a directory. Make one with Open.
type Store struct {
	dir     string
	options Options
	disk    disk
	lock    *os.File

	db        *badgerdb.DB
	bodies    *bodies
	log       *wal
	overlay   *overlay
	applier   *applier
	committer *committer
	seal      *sealer
	watches   *watch.Keys
	queue     *queue
	counters  counters

	// durable is the timestamp up to which Badger has whole layers of the overlay:
	// scans see what is at or below it.
	durable atomic.Uint64

	// reading is held shared by every access to Badger and alone by what changes
	// the ground under reads: closing, and moving the timestamp below which
	// Badger may forget old versions.
	reading sync.RWMutex
	closed  bool
	scans   map[uint64]int // timestamps of running scans, guarded by scansMu
	scansMu sync.Mutex

	failure atomic.Pointer[error] // set once, by the first failed sync
	failed  chan struct{}         // closed then
	room    atomic.Int32          // a Room; what the disk has left

	known   *known // of Badger's tables
	vetting vetting

	limits    atomic.Pointer[limits]
	free      atomic.Uint64 // bytes on the disk, at the last look
	freeKnown atomic.Bool
	over      atomic.Bool  // the store is larger than it may be
	size      atomic.Int64 // when last measured
	grown     atomic.Int64 // what had been written by then
	space     atomic.Pointer[Space]
	looking   sync.Mutex
	reserved  [2]time.Time // guarded by looking; of Badger's directory: as last seen, as looked through

	closing    chan struct{} // closed first
	committed  chan struct{} // closed when the committer has ended
	background sync.WaitGroup
	committing sync.WaitGroup
	applying   sync.WaitGroup
	closeOnce  sync.Once
}

var _ store.Store = (*Store)(nil)

// Get implements store.Store.
func (s *Store) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if err := ctx.Err(); err != nil {
		return store.Entry{}, err
	}
	now := s.options.Now()
	name := userKey(key)
	if err := s.vet(name, name); err != nil {
		return store.Entry{}, err
	}
	raw, err := s.getRaw(name)
	if err != nil {
		return store.Entry{}, err
	}
	if raw == nil {
		return store.Entry{}, store.ErrNotFound
	}
	return s.entry(append([]byte(nil), key...), raw, now)
}

func (s *Store) getRaw(key []byte) ([]byte, error) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return nil, err
	}
	raw, err := s.find(key)
	if err != nil {
		return nil, fmt.Errorf("badger: reading: %w", err)
	}
	return raw, nil
}

// find returns what stands under a key of Badger's, living or not; nil is nothing. It
// may share the overlay's memory. It is called with reading held.
func (s *Store) find(key []byte) ([]byte, error) {
	raw, ok, ts := s.overlay.get(key)
	if ok {
		return raw, nil
	}
	txn := s.db.NewTransactionAt(ts, false)
	defer txn.Discard()
	raw, err := lookUp(txn, key)
	if raw == nil && err == nil {
		s.overlay.lacks(key, ts)
	}
	return raw, err
}

// entry makes the user's entry of raw, or ErrNotFound where it has expired by now.
// The zero time makes it whatever its expiry.
func (s *Store) entry(key, raw []byte, now time.Time) (store.Entry, error) {
	r, err := decode(raw)
	if err != nil {
		return store.Entry{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if !now.IsZero() && !r.living(now) {
		return store.Entry{}, store.ErrNotFound
	}
	e := store.Entry{Key: key, Value: bytes.Clone(r.value), Version: r.version, Expires: r.expires}
	if !r.bulk {
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

// usable is called with reading held.
func (s *Store) usable() error {
	if s.closed {
		return store.ErrClosed
	}
	return s.unhealthy()
}

func (s *Store) unhealthy() error {
	if s.failure.Load() != nil {
		return store.ErrUnhealthy
	}
	return nil
}

// Err returns what made the store close itself, or nil.
func (s *Store) Err() error {
	if err := s.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// fail closes the store for good: after a failed sync nobody knows what is on disk,
// and asking the same file again would be told that all is well.
func (s *Store) fail(cause error) {
	if s.failure.CompareAndSwap(nil, &cause) {
		s.options.Logger.Error("store closed itself, restart needed", "dir", s.dir, "error", cause)
		close(s.failed)
		s.watches.WakeAll()
	}
}

// Watch implements store.Store.
func (s *Store) Watch(key []byte) (changed <-chan struct{}, cancel func()) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if s.usable() != nil {
		gone := make(chan struct{})
		close(gone)
		return gone, func() {}
	}
	changed, cancel = s.watches.Watch(key)
	if s.unhealthy() != nil {
		s.watches.WakeAll() // it failed in between
	}
	return changed, cancel
}

// Now implements store.Store.
func (s *Store) Now(context.Context) (time.Time, error) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return time.Time{}, err
	}
	return s.options.Now(), nil
}

// Close implements store.Store. Commits under way finish first; a running Scan ends
// with ErrClosed at its next fetch.
func (s *Store) Close() error {
	err := store.ErrClosed
	s.closeOnce.Do(func() { err = s.close() })
	return err
}

func (s *Store) close() error {
	close(s.closing)
	s.queue.close()
	s.committing.Wait()
	s.committer.wait()
	close(s.committed)
	s.applying.Wait()
	s.background.Wait()
	s.reading.Lock()
	s.closed = true
	s.reading.Unlock()
	s.watches.WakeAll()

	err := s.closeBadger()
	s.log.close()
	if err == nil && s.unhealthy() == nil {
		err = errors.Join(s.remember(), s.finish())
	}
	s.bodies.close()
	return errors.Join(err, s.lock.Close())
}

// finish seals a store that was closed in order, whose log is empty: all of it is in
// Badger's tables.
func (s *Store) finish() error {
	if err := s.settle(); err != nil {
		return err
	}
	if err := s.seal.closed(s.log.ranged().none(s.log.seq)); err != nil {
		return err
	}
	return removeLogs(s.walDir(), s.seal.log())
}

// closePatience bounds the close of a store whose disk has failed: Badger would
// repeat the flush of its memory for ever.
const closePatience = 10 * time.Second

func (s *Store) closeBadger() error {
	done := make(chan error, 1)
	go func() { done <- s.db.Close() }()
	select {
	case err := <-done:
		return err
	case <-s.failed:
	}
	select {
	case err := <-done:
		return err
	case <-time.After(closePatience):
		return fmt.Errorf("%w: %s could not be closed either", store.ErrUnhealthy, s.dir)
	}
}
