package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/table"
)

// Why all tables are read whole, around Open and from time to time: where a block does
// not match its checksum, Badger's Get says "not found" and its compaction leaves
// the rest of the table out, both without a word. To the guard that would be a key
// that is free (P1).

// damagedFile says that a table was found damaged while the store was open. Badger's
// compaction may have replaced that table since, by one whose checksums are right and
// whose entries are not all there, so the tables cannot tell any more.
const damagedFile = "DAMAGED"

// verifyAtOpen checks the tables of a store that is about to be opened. After an
// orderly close those of the last level that are as they were known to be are left
// to vetting.
func (s *Store) verifyAtOpen(ids []uint64) error {
	if err := s.condemned(); err != nil {
		return err
	}
	now := ids
	if s.seal.current.State == stateClosed {
		s.known.load()
		s.known.keep(ids)
		var err error
		if now, err = s.putOff(ids); err != nil {
			return err
		}
	}
	err := s.known.checkAll(s.lsm(), now, nil, nil)
	if err != nil {
		s.vetting.release(err)
	}
	return err
}

// condemned returns an error where the store was found damaged before.
func (s *Store) condemned() error {
	why, err := os.ReadFile(filepath.Join(s.dir, damagedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("was found damaged before: %s", why)
}

// putOff hands to vetting what may wait and returns the rest.
func (s *Store) putOff(ids []uint64) (now []uint64, err error) {
	listed, err := s.listed()
	if err != nil {
		return nil, err
	}
	last := badgerdb.DefaultOptions("").MaxLevels - 1
	for _, id := range ids {
		if int(listed[id].Level) != last {
			now = append(now, id)
			continue
		}
		f, err := os.Open(table.NewFilename(id, s.lsm()))
		if err == nil && s.known.same(id, f) {
			s.vetting.add(id, f)
			continue
		}
		if err == nil {
			f.Close()
		}
		now = append(now, id)
	}
	return now, nil
}

// listed are the tables that Badger's manifest names.
func (s *Store) listed() (map[uint64]badgerdb.TableManifest, error) {
	f, err := os.Open(s.seal.manifest())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	manifest, _, err := badgerdb.ReplayManifestFile(f, 0, badgerdb.Options{})
	return manifest.Tables, err
}

// checkAll checks the tables ids in dir, several at a time. In a running store gone
// says whether Badger has dropped a table meanwhile: it cuts the file to nothing and
// removes it, under whoever reads it. Before Badger is open, gone is nil.
func (k *known) checkAll(dir string, ids []uint64, gone func(id uint64) bool, stop <-chan struct{}) error {
	next := make(chan uint64)
	failed := make(chan struct{})
	var once sync.Once
	var failure error
	var workers sync.WaitGroup
	for range min(len(ids), runtime.GOMAXPROCS(0), 4) {
		workers.Go(func() {
			for id := range next {
				err := k.checkIn(dir, id)
				if err == nil || gone != nil && gone(id) {
					continue
				}
				once.Do(func() {
					failure = fmt.Errorf("table %s: %w", filepath.Base(table.IDToFilename(id)), err)
					close(failed)
				})
			}
		})
	}
feed:
	for _, id := range ids {
		select {
		case next <- id:
		case <-failed:
			break feed
		case <-stop:
			break feed
		}
	}
	close(next)
	workers.Wait()
	return failure
}

// Verify reads all of Badger's tables and checks them against their checksums. A
// table that does not match closes the store for good: it does not open again, until
// a backup has replaced it. Bulk values are not checked; they are when they are read.
func (s *Store) Verify() error {
	return s.verify(func(uint64) bool { return true })
}

// verifyNew checks the tables that nothing is known of, which compaction has made
// since. It also counts what is in them.
func (s *Store) verifyNew() error {
	return s.verify(func(id uint64) bool {
		_, ok := s.known.get(id)
		return !ok
	})
}

func (s *Store) verify(which func(id uint64) bool) error {
	ids, err := s.tables()
	if err != nil {
		return err
	}
	s.known.keep(ids)
	chosen := ids[:0]
	for _, id := range ids {
		if which(id) {
			chosen = append(chosen, id)
		}
	}
	if err := s.known.checkAll(s.lsm(), chosen, s.dropped, s.closing); err != nil {
		err = corrupt(s.dir, "%w", err)
		s.condemn(err)
		return err
	}
	return nil
}

// dropped reports that Badger does not have the table any more: it forgets a table
// before it touches its file. Of a store that closes nobody knows.
func (s *Store) dropped(id uint64) bool {
	ids, err := s.tables()
	return err != nil || !slices.Contains(ids, id)
}

// condemn closes the store for good.
func (s *Store) condemn(err error) {
	name := filepath.Join(s.dir, damagedFile)
	noted := os.WriteFile(name, []byte(err.Error()), 0o600)
	if noted == nil {
		noted = s.disk.syncDir(s.dir)
	}
	s.fail(errors.Join(err, noted))
}

func (s *Store) tables() ([]uint64, error) {
	s.reading.RLock()
	defer s.reading.RUnlock()
	if err := s.usable(); err != nil {
		return nil, err
	}
	var ids []uint64
	for _, t := range s.db.Tables() {
		ids = append(ids, t.ID)
	}
	return ids, nil
}

// closePatienceForTables bounds what an orderly close adds to what is known, so that
// the next opening has less to read.
const closePatienceForTables = time.Second

// remember keeps what is known of the tables, after Badger was closed.
func (s *Store) remember() error {
	listed, err := s.listed()
	if err != nil {
		return err
	}
	ids := slices.Collect(maps.Keys(listed))
	s.known.keep(ids)
	begun := time.Now()
	for _, id := range ids {
		if _, ok := s.known.get(id); ok || time.Since(begun) > closePatienceForTables {
			continue
		}
		if err := s.known.checkIn(s.lsm(), id); err != nil {
			return fmt.Errorf("table %s: %w", filepath.Base(table.IDToFilename(id)), err)
		}
	}
	return s.known.save()
}

// verifyLoop runs until the store closes.
func (s *Store) verifyLoop() {
	s.vetAll()
	if s.options.VerifyEvery < 0 {
		return
	}
	tick := time.NewTicker(s.options.VerifyEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.closing:
			return
		case <-tick.C:
			_ = s.Verify() // it has told the logger and closed the store
		}
	}
}
