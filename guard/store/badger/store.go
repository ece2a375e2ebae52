// Package badger is the embedded store. Commits go to a write-ahead log of its own, one
// sync for each group; from there small values move to Badger, and bulk values and large ones
// that expire to files by time of expiry.
//
// Commit returns after the sync of the log (P2). Reads find the entry in memory at once,
// and in Badger a little later. After a failed sync the store closes itself: every later
// call fails until it is opened anew (P4).
//
// A directory holds:
//
//	lock      taken by the process that has it open
//	STORE     format and state of the store; see manifest
//	wal/      the log
//	lsm/      Badger
//	bodies/   values that are stored apart from Badger
package badger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger/wal"
)

// Store is a store in a directory. Make one with Open.
type Store struct {
	directory
	db        *badgerdb.DB
	bodies    *bodies
	log       *wal.Log
	overlay   *overlay
	applier   *applier
	committer *committer

	// reading is held shared by every access to Badger, and exclusively by close and by
	// discardOldVersions.
	reading sync.RWMutex
	closed  bool
	scans   map[uint64]int // running scans by timestamp, guarded by scansMu
	scansMu sync.Mutex
	kept    map[int64]*keptSegment // full ones; tidyLoop's

	committed  chan struct{} // closed when no commit is under way
	background sync.WaitGroup
	applying   sync.WaitGroup
	closeOnce  sync.Once
}

// directory is where a store lies, with its health and its room.
type directory struct {
	dir      string
	options  Options
	disk     disk
	lock     *os.File
	manifest *manifestFile
	watches  *store.Watchers
	queue    *queue
	counters counters

	// durable is the Badger timestamp of the last applied layer: scans read at it.
	durable atomic.Uint64

	failure atomic.Pointer[error] // set once, by the first failed sync
	failed  chan struct{}         // closed then
	closing chan struct{}         // closed first when the store closes

	verified *verifiedTables // Badger's tables whose checksums are right
	deferred deferredVerification
	absence  *absence

	room        atomic.Int32 // a Room
	limits      atomic.Pointer[limits]
	free        atomic.Uint64 // bytes on the disk, when last checked
	freeKnown   atomic.Bool
	oversized   atomic.Bool  // the store is larger than it may be
	size        atomic.Int64 // when last measured
	sizeWritten atomic.Int64 // what had been written by then
	space       atomic.Pointer[Space]
	checking    sync.Mutex
	reserved    reservation // guarded by checking
}

var _ store.Store = (*Store)(nil)

// usable is called with reading held.
func (s *Store) usable() error {
	if s.closed {
		return store.ErrClosed
	}
	return s.unhealthy()
}

func (s *directory) unhealthy() error {
	if s.failure.Load() != nil {
		return store.ErrUnhealthy
	}
	return nil
}

// cause returns what made the store close itself, or nil.
func (s *directory) cause() error {
	if err := s.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// fail closes the store until it is opened again: after a failed sync the contents of the
// disk are unknown, and another sync of the same file would report success.
func (s *directory) fail(cause error) {
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

// Commit implements store.Store. It returns after the batch was synced to the log (P2).
func (s *Store) Commit(ctx context.Context, writes ...store.Write) (store.Version, error) {
	if err := store.Check(writes); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if err := s.admit(writes); err != nil {
		return 0, err
	}
	b := newBatch(writes, s.options.Now())
	if err := s.queue.put(b); err != nil {
		return 0, err
	}
	for <-b.turn {
		s.committer.lead()
	}
	version, err := b.version, b.err
	if err == nil && b.failed >= 0 {
		version, err = 0, s.conflict(b)
	}
	b.release()
	return version, err
}

// conflict returns the error with the entry that the condition met.
func (s *Store) conflict(b *batch) error {
	lost := &store.Conflict{Index: b.failed, Key: bytes.Clone(b.writes[b.failed].Key)}
	if b.found == nil {
		return lost
	}
	e, err := s.entry(lost.Key, stored{raw: b.found}, time.Time{})
	if err != nil {
		return fmt.Errorf("badger: the condition does not hold, and the stored entry cannot be read: %w", err)
	}
	lost.Found = &e
	return lost
}

// Open opens the store in dir, and creates it where there is none. It refuses a directory that is
// in use, one whose contents are damaged, and one that holds other files and no store.
//
// The check for damage covers both manifests, every byte of every table, and after a crash the
// log, except for its last frame: that one may be torn because it was never acknowledged. What
// is stored apart is checked right after it, and whenever it is read.
func Open(dir string, o Options) (*Store, error) {
	return openWith(dir, o, osDisk{})
}

func openWith(dir string, o Options, d disk) (*Store, error) {
	dir, err := prepare(dir, d)
	if err != nil {
		return nil, fmt.Errorf("badger: directory of the store: %w", err)
	}
	if err := CheckDir(dir); err != nil { // before a lock is left among them
		return nil, err
	}
	held, err := lock(dir)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("badger: %w: the user of this process must be able to write %s", err, dir)
		}
		return nil, err
	}
	s := &Store{
		directory: directory{
			dir: dir, options: o.withDefaults(), disk: d, lock: held, watches: store.NewWatchers(),
			failed: make(chan struct{}), closing: make(chan struct{}),
		},
		scans:     make(map[uint64]int),
		kept:      make(map[int64]*keptSegment),
		committed: make(chan struct{}),
	}
	s.absence = newAbsence(s.options.Absent, s.options.mostAbsent)
	s.verified = newVerifiedTables(dir, s.absence)
	s.manifest = &manifestFile{dir: dir, lsm: s.lsm(), disk: d}
	s.limits.Store(s.options.limits())
	s.queue = &queue{wait: s.options.GroupWait}
	if err := s.open(); err != nil {
		held.Close()
		return nil, err
	}
	return s, nil
}

func (s *directory) lsm() string { return filepath.Join(s.dir, "lsm") }

// prepare creates dir durably, with its parents.
func prepare(dir string, d disk) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	there := filepath.Dir(dir)
	for there != filepath.Dir(there) {
		if _, err := os.Stat(there); err == nil {
			break
		}
		there = filepath.Dir(there)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		err := d.syncDir(at)
		if errors.Is(err, fs.ErrPermission) && at == there {
			return dir, nil // a parent that may be entered but not read
		}
		if err != nil || at == there {
			return dir, err
		}
	}
}

// CheckDir returns an error where dir, which exists, holds other files and nothing of a store. A
// store that is just being created has only files with known names, so it passes.
func CheckDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("badger: directory of the store: %w", err)
	}
	foreign := false
	for _, e := range entries {
		switch e.Name() {
		case "STORE":
			return nil
		case "lsm", "bodies", "wal":
			inside, err := os.ReadDir(filepath.Join(dir, e.Name()))
			if len(inside) > 0 {
				return nil // what is left of a store: see examine
			}
			foreign = foreign || err != nil // not a directory, so not ours
		case "STORE.new", "lock", "lost+found":
		default:
			foreign = true
		}
	}
	if foreign {
		return errors.New("badger: the directory holds other files and no store; give the store a directory of its own")
	}
	return nil
}

func (s *Store) open() error {
	fresh, found, err := s.examine()
	if err != nil {
		s.deferred.cancel(err)
		return err
	}
	if err := removeMemory(s.lsm()); err != nil {
		s.deferred.cancel(err)
		return fmt.Errorf("badger: %w", err)
	}
	if s.db, err = s.openBadger(); err != nil {
		s.deferred.cancel(err)
		return s.openError(err)
	}
	s.deferred.setRanges(s.db.Tables())
	if err := s.start(fresh, found); err != nil {
		s.deferred.cancel(err)
		return errors.Join(err, s.abandon())
	}
	return nil
}

// abandon closes what start opened.
func (s *Store) abandon() error {
	if s.bodies != nil {
		s.bodies.close()
	}
	if s.log != nil {
		s.log.Close()
	}
	if s.db == nil {
		return nil
	}
	return s.closeBadger()
}

func (s *directory) bodiesDir() string { return filepath.Join(s.dir, "bodies") }

func (s *directory) walDir() string { return filepath.Join(s.dir, "wal") }

func (s *directory) logDisk() wal.Disk {
	return wal.Disk{Record: s.disk.record, Write: s.disk.write, Sync: s.disk.sync, SyncDir: s.disk.syncDir}
}

// removeMemory removes the logs of Badger's memory tables and its value log. Our own log has all
// that they hold. They are not synced, so after a crash Badger may refuse to open with them.
func removeMemory(lsm string) error {
	for _, pattern := range []string{"*.mem", "*.vlog"} {
		names, err := filepath.Glob(filepath.Join(lsm, pattern))
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := os.Remove(name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *directory) openBadger() (db *badgerdb.DB, err error) {
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, fmt.Errorf("opening panicked: %v", r)
		}
	}()
	return badgerdb.OpenManaged(badgerOptions(s.lsm(), s.options, s.fail))
}

// openError separates a directory that cannot be used from damaged contents. Badger does
// not wrap the system's errors, so the text decides.
func (s *directory) openError(err error) error {
	text := err.Error()
	for _, cause := range []string{"permission denied", "read-only file system", "no space left", "too many open files", "cannot allocate memory"} {
		if strings.Contains(text, cause) {
			return fmt.Errorf("badger: opening %s: %w", s.dir, err)
		}
	}
	return corrupt(s.dir, "%w", err)
}

func (s *Store) start(fresh bool, found wal.Found) error {
	var err error
	s.bodies, err = openBodies(s.bodiesDir(), s.options.BulkWindow, s.options.keptSize, s.disk)
	if err != nil {
		return fmt.Errorf("badger: bulk values: %w", err)
	}
	s.applier = &applier{
		Store: s, ts: s.db.MaxVersion(), hurry: make(chan struct{}, 1), flush: make(chan struct{}, 1),
	}
	if !fresh {
		if err := s.recover(found); err != nil {
			return err
		}
	}
	s.log, err = wal.Begin(s.walDir(), s.manifest.current.Log, found.Seq, s.logDisk(), s.manifest.setLog)
	if err != nil {
		return fmt.Errorf("badger: log: %w", err)
	}
	if err := s.manifest.markOpen(); err != nil {
		return fmt.Errorf("badger: %w", err)
	}
	s.durable.Store(s.applier.ts)
	s.overlay = newOverlay(s.applier.ts, found.Seq)
	s.checkSpace()
	s.discardOldVersions()
	s.sweep()
	s.committer = &committer{Store: s, next: max(store.Version(s.applier.ts), found.Version) + versionGap}
	k := &logCleaner{Store: s, flush: s.applier.flush}
	s.applying.Go(func() { s.applier.run(s.committed) })
	s.background.Go(func() { k.run(s.committed) })
	s.background.Go(s.maintain)
	s.background.Go(s.verifyLoop)
	return nil
}

// examine finds out whether the store is new, checks it if it is not, and reads its log.
func (s *directory) examine() (fresh bool, found wal.Found, err error) {
	present, err := s.manifest.load()
	if err != nil {
		return false, found, err
	}
	if present && s.manifest.current.State != stateCreating {
		if found, err = s.examineContents(); err != nil {
			return false, found, err
		}
		// Before Badger changes anything, or a crash would look like damage.
		return false, found, s.manifest.markOpen()
	}
	if !present {
		for _, name := range []string{s.lsm(), s.bodiesDir(), s.walDir()} {
			if entries, err := os.ReadDir(name); err == nil && len(entries) > 0 {
				return false, found, corrupt(s.dir, "STORE is missing, but %s is not empty", filepath.Base(name))
			}
		}
	}
	// An unfinished creation has acknowledged nothing: begin anew.
	if err := s.manifest.markCreating(); err != nil {
		return false, found, err
	}
	for _, name := range []string{s.lsm(), s.walDir()} {
		if err := os.RemoveAll(name); err != nil {
			return false, found, err
		}
	}
	return true, found, os.Mkdir(s.lsm(), 0o700)
}

// examineContents checks everything that will be trusted, and changes nothing.
func (s *directory) examineContents() (found wal.Found, err error) {
	tables, err := s.manifest.check()
	if err != nil {
		return found, err
	}
	if err := s.verifyAtOpen(tables); err != nil {
		return found, s.contentError(err)
	}
	if found, err = s.readLog(); err != nil {
		return found, s.contentError(err)
	}
	return found, nil
}

// contentError separates missing permission from damage.
func (s *directory) contentError(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("badger: %w", err)
	}
	return corrupt(s.dir, "%w", err)
}

// recover applies the log to Badger and to the bulk files, durably, so that a new log can begin.
func (s *Store) recover(found wal.Found) error {
	m, err := s.checkMarker(found)
	if err != nil {
		return err
	}
	changed, err := s.applier.replay(found, m)
	if err != nil {
		return fmt.Errorf("badger: replaying the log: %w", err)
	}
	if changed {
		// Closing flushes Badger's memory to tables.
		err := s.closeBadger()
		s.db = nil
		if err == nil {
			err = s.cause()
		}
		if err != nil {
			return fmt.Errorf("badger: replaying the log: %w", err)
		}
		db, err := s.openBadger()
		if err != nil {
			return s.openError(err)
		}
		s.db, s.applier.ts = db, db.MaxVersion()
		if m, err = s.checkMarker(found); err == nil && m.seq != found.Seq {
			err = fmt.Errorf("badger: replaying the log: the tables end with frame %d, the log with %d", m.seq, found.Seq)
		}
		if err != nil {
			return err
		}
	}
	return s.syncTablesAndBodies()
}

// checkMarker returns Badger's marker, which must agree with the manifest and the log.
func (s *Store) checkMarker(found wal.Found) (marker, error) {
	m, there, err := readMarker(s.db)
	switch {
	case err != nil:
		return m, corrupt(s.dir, "%w", err)
	case !there && found.Settled > 0:
		return m, corrupt(s.dir, "entries are lost, the marker among them")
	case m.seq < found.Settled:
		return m, corrupt(s.dir, "entries are lost: the tables end with frame %d, the log begins behind %d", m.seq, found.Settled)
	case m.seq > found.Seq:
		return m, corrupt(s.dir, "the log is cut: it ends with frame %d, the tables have %d", found.Seq, m.seq)
	}
	return m, nil
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
	close(s.committed)
	s.applying.Wait()
	s.background.Wait()
	s.reading.Lock()
	s.closed = true
	s.reading.Unlock()
	s.watches.WakeAll()

	err := s.closeBadger()
	s.log.Close()
	if err == nil && s.unhealthy() == nil {
		err = errors.Join(s.saveVerified(), s.saveClosed())
	}
	s.bodies.close()
	return errors.Join(err, s.lock.Close())
}

// saveClosed writes the manifest of an orderly close: the log is empty, since all of it is
// in Badger's tables.
func (s *Store) saveClosed() error {
	if err := s.syncTablesAndBodies(); err != nil {
		return err
	}
	return s.log.Finish(s.manifest.markClosed)
}

// closePatience bounds the close of a store whose disk has failed: Badger would retry its
// flush for ever.
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

// syncTablesAndBodies makes bulk values and the names of the tables durable; Badger syncs
// the tables.
func (s *Store) syncTablesAndBodies() error {
	if err := s.bodies.syncStaged(s.countBulkSync); err != nil {
		return err
	}
	if err := s.disk.syncDir(s.lsm()); err != nil {
		return fmt.Errorf("syncing the directory of tables: %w", err)
	}
	return nil
}

func (s *directory) countBulkSync() { s.counters.bulkSyncs.Add(1) }
