package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4/table"
)

// Why all tables are read whole, at Open and from time to time: where a block does
// not match its checksum, Badger's Get says "not found" and its compaction leaves
// the rest of the table out, both without a word. To the guard that would be a key
// that is free (P1).

// verifyTables checks the tables ids in dir, several at a time. Tables that are
// missing are errors where all is true; a running store may have compacted them.
func verifyTables(dir string, ids []uint64, all bool, stop <-chan struct{}) error {
	next := make(chan uint64)
	failed := make(chan struct{})
	var once sync.Once
	var failure error
	var workers sync.WaitGroup
	for range min(len(ids), runtime.GOMAXPROCS(0), 4) {
		workers.Go(func() {
			for id := range next {
				err := checkTable(table.NewFilename(id, dir))
				if err == nil || !all && errors.Is(err, fs.ErrNotExist) {
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
// table that does not match closes the store, as a failed sync does. Bulk values are
// not checked; they are when they are read.
func (s *Store) Verify() error {
	ids, err := s.tables()
	if err != nil {
		return err
	}
	if err := verifyTables(s.lsm(), ids, false, s.closing); err != nil {
		err = corrupt(s.dir, "%w", err)
		s.fail(err)
		return err
	}
	return nil
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

// verifyLoop runs until the store closes.
func (s *Store) verifyLoop() {
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
