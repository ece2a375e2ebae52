package badger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// carryOver makes a store of the old form one of the present form. There Badger's own
// logs were synced, and are checked once more before Badger reads them; then all is in
// tables, and an empty log is enough.
func (s *Store) carryOver() error {
	if s.seal.current.State == stateCreating {
		return nil
	}
	tables, err := s.seal.check()
	if err != nil {
		return err
	}
	for _, err := range []error{s.condemned(), s.known.checkAll(s.lsm(), tables, nil, nil), checkLogs(s.lsm())} {
		if err != nil {
			return s.damaged(err)
		}
	}
	if err := removeUnborn(s.lsm()); err != nil {
		return err
	}
	if err := s.seal.opened(); err != nil {
		return err
	}
	if err := s.flushOld(); err != nil {
		return err
	}
	if err := s.disk.syncDir(s.lsm()); err != nil {
		return err
	}
	if err := os.RemoveAll(s.walDir()); err != nil { // of an attempt that did not finish
		return err
	}
	return s.seal.closed(logRange{First: 1})
}

func (s *Store) flushOld() error {
	db, err := s.openBadger(true)
	if err != nil {
		return s.explain(err)
	}
	_, there, err := readMarker(db)
	switch {
	case err != nil:
		err = corrupt(s.dir, "%w", err)
	case !there:
		err = corrupt(s.dir, "entries are lost, the marker among them")
	}
	if closeErr := db.Close(); closeErr != nil {
		err = errors.Join(err, fmt.Errorf("badger: %w", closeErr))
	}
	return err
}

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
