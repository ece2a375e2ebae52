package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store/internal/watch"
)

// Open opens the store in dir, which it makes where there is none. The error wraps
// ErrLocked where the directory is in use, ErrCorrupt where its contents are not
// whole, and that of the system where it cannot be read or written. A directory that
// holds other files and no store is refused and left as it is.
//
// Covered by the check for damage are the manifest, every byte of every table, and
// after a crash the logs of memory tables, except for the last transaction in each:
// that one may be torn without having been acknowledged, and nothing tells the one
// case from the other. Bulk values are checked when they are read.
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
		closing: make(chan struct{}),
		known:   newKnown(dir),
	}
	s.seal = &sealer{dir: dir, lsm: s.lsm(), disk: d}
	s.directory = &dirSync{dir: s.lsm(), disk: d}
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
		case "lsm", "bodies":
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
	fresh, err := s.examine()
	if err != nil {
		return err
	}
	s.db, err = openBadger(s.lsm(), s.options)
	if err != nil {
		s.vetting.release(err)
		return s.explain(err)
	}
	s.vetting.place(s.db.Tables())
	if err := s.start(fresh); err != nil {
		s.vetting.release(err)
		return errors.Join(err, s.db.Close())
	}
	return nil
}

// examine finds out whether the store is new, or else whole.
func (s *Store) examine() (fresh bool, err error) {
	found, err := s.seal.load()
	if err != nil {
		return false, err
	}
	if found && s.seal.current.State != stateCreating {
		if err := s.examineContents(); err != nil {
			return false, err
		}
		if err := removeUnborn(s.lsm()); err != nil {
			return false, err
		}
		// Before Badger changes anything, so that a crash is not taken for damage.
		return false, s.seal.opened()
	}
	if !found {
		for _, name := range []string{s.lsm(), s.bodiesDir()} {
			if entries, err := os.ReadDir(name); err == nil && len(entries) > 0 {
				return false, corrupt(s.dir, "STORE is missing, but %s is not empty", filepath.Base(name))
			}
		}
		if err := s.seal.creating(); err != nil {
			return false, err
		}
	}
	// A creation that did not finish has acknowledged nothing.
	return true, os.RemoveAll(s.lsm())
}

// examineContents checks everything that Badger will trust.
func (s *Store) examineContents() error {
	tables, err := s.seal.check()
	if err != nil {
		return err
	}
	for _, err := range []error{s.verifyAtOpen(tables), checkLogs(s.lsm())} {
		if err == nil {
			continue
		}
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("badger: %w", err)
		}
		return corrupt(s.dir, "%w", err)
	}
	return nil
}

func (s *Store) bodiesDir() string { return filepath.Join(s.dir, "bodies") }

// removeUnborn removes log files of no length. A crash between their creation and
// their first byte leaves them behind, and Badger refuses to open beside them.
func removeUnborn(lsm string) error {
	entries, err := os.ReadDir(lsm)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".mem") && !strings.HasSuffix(e.Name(), ".vlog") {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.Size() > 0 {
			continue
		}
		if err := os.Remove(filepath.Join(lsm, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func openBadger(dir string, o Options) (db *badgerdb.DB, err error) {
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, fmt.Errorf("opening panicked: %v", r)
		}
	}()
	return badgerdb.OpenManaged(badgerOptions(dir, o))
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

func (s *Store) start(fresh bool) error {
	marked, err := mark(s.db, s.disk, fresh)
	if err != nil {
		return corrupt(s.dir, "%w", err)
	}
	s.durable.Store(uint64(marked))
	if err := s.directory.settle(); err != nil {
		return err
	}
	s.bodies, err = openBodies(s.bodiesDir(), s.options.BulkWindow, s.disk)
	if err != nil {
		return fmt.Errorf("badger: bulk values: %w", err)
	}
	if err := s.seal.opened(); err != nil {
		return fmt.Errorf("badger: %w", err)
	}
	s.lookAtDisk()
	s.discard()
	s.sweep()
	c := &committer{Store: s, next: marked + 1}
	s.committing.Go(c.run)
	s.background.Go(s.maintain)
	s.background.Go(s.verifyLoop)
	return nil
}
