package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/internal/watch"
)

// Open opens the store in dir, which it makes where there is none. The error wraps
// ErrLocked where the directory is in use, ErrCorrupt where its contents are not
// whole, and that of the system where it cannot be read or written. A directory that
// holds other files and no store is refused and left as it is.
//
// Covered by the check for damage are the manifest, every byte of every table, and
// after a crash the log, except for its last frame: that one may be torn without
// having been acknowledged, and nothing tells the one case from the other. Bulk values
// are checked when they are read.
func Open(dir string, o Options) (*Store, error) {
	return openWith(dir, o, osDisk{})
}

func openWith(dir string, o Options, d disk) (*Store, error) {
	dir, err := prepare(dir, d)
	if err != nil {
		return nil, fmt.Errorf("badger: directory of the store: %w", err)
	}
	if err := refuseForeign(dir); err != nil { // before a lock is left among them
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
		dir:     dir,
		options: o.withDefaults(),
		disk:    d,
		lock:    held,
		watches: watch.New(),
		scans:   make(map[uint64]int),
		failed:  make(chan struct{}),
		closing: make(chan struct{}),

		committed: make(chan struct{}),
		known:     newKnown(dir),
	}
	s.seal = &sealer{dir: dir, lsm: s.lsm(), disk: d}
	s.limits.Store(s.options.limits())
	s.queue = newQueue(s.options.GroupWait)
	if err := s.open(); err != nil {
		held.Close()
		return nil, err
	}
	return s, nil
}

func (s *Store) lsm() string { return filepath.Join(s.dir, "lsm") }

// prepare makes dir, and makes its name durable up to the first parent that was there.
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

// refuseForeign returns an error where dir holds files of others and nothing of a
// store. All that a store may have written is known by its name, so a store that is
// being made at this moment is not taken for foreign.
func refuseForeign(dir string) error {
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
				return nil // what is left of a store, which examine judges
			}
			foreign = foreign || err != nil // no directory, so not ours
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
		s.vetting.release(err)
		return err
	}
	if err := removeMemory(s.lsm()); err != nil {
		s.vetting.release(err)
		return fmt.Errorf("badger: %w", err)
	}
	if s.db, err = s.openBadger(false); err != nil {
		s.vetting.release(err)
		return s.explain(err)
	}
	s.vetting.place(s.db.Tables())
	if err := s.start(fresh, found); err != nil {
		s.vetting.release(err)
		return errors.Join(err, s.abandon())
	}
	return nil
}

// abandon closes what start has opened.
func (s *Store) abandon() error {
	if s.bodies != nil {
		s.bodies.close()
	}
	if s.log != nil {
		s.log.close()
	}
	if s.db == nil {
		return nil
	}
	return s.closeBadger()
}

func (s *Store) bodiesDir() string { return filepath.Join(s.dir, "bodies") }

func (s *Store) walDir() string { return filepath.Join(s.dir, "wal") }

// removeMemory removes the logs of Badger's memory tables, which hold nothing that the
// tables or the log have not, and its value log, which holds nothing at all. None of
// them is synced, so a crash leaves anything in them; then Badger may refuse to open.
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

func (s *Store) openBadger(sync bool) (db *badgerdb.DB, err error) {
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, fmt.Errorf("opening panicked: %v", r)
		}
	}()
	return badgerdb.OpenManaged(badgerOptions(s.lsm(), s.options, s.fail).WithSyncWrites(sync))
}

// explain tells a directory that cannot be used from contents that are not whole.
// Badger does not wrap the errors of the system, so they are looked for in its text.
func (s *Store) explain(err error) error {
	text := err.Error()
	for _, cause := range []string{"permission denied", "read-only file system", "no space left", "too many open files", "cannot allocate memory"} {
		if strings.Contains(text, cause) {
			return fmt.Errorf("badger: opening %s: %w", s.dir, err)
		}
	}
	return corrupt(s.dir, "%w", err)
}

func (s *Store) start(fresh bool, found recovery) error {
	var err error
	s.bodies, err = openBodies(s.bodiesDir(), s.options.BulkWindow, s.disk)
	if err != nil {
		return fmt.Errorf("badger: bulk values: %w", err)
	}
	s.applier = &applier{
		Store: s, ts: s.db.MaxVersion(), hurry: make(chan struct{}, 1), flush: make(chan struct{}, 1),
	}
	if !fresh {
		if err := s.recover(&found); err != nil {
			return err
		}
	}
	s.log, err = beginLog(s.walDir(), s.seal.current.Log, found.seq, s.disk, s.seal.logged)
	if err != nil {
		return fmt.Errorf("badger: log: %w", err)
	}
	if err := s.seal.opened(); err != nil {
		return fmt.Errorf("badger: %w", err)
	}
	s.durable.Store(s.applier.ts)
	s.overlay = newOverlay(s.applier.ts, found.seq)
	s.lookAtDisk()
	s.discard()
	s.sweep()
	s.committer = &committer{Store: s, next: max(store.Version(s.applier.ts), found.version) + versionGap}
	k := &keeper{Store: s, flush: s.applier.flush}
	s.committing.Go(s.committer.run)
	s.applying.Go(func() { s.applier.run(s.committed) })
	s.background.Go(func() { k.run(s.committed) })
	s.background.Go(s.maintain)
	s.background.Go(s.verifyLoop)
	return nil
}
