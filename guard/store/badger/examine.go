package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// examine finds out whether the store is new, or else whole, and what its log holds.
func (s *Store) examine() (fresh bool, found recovery, err error) {
	sealed, err := s.seal.load()
	if err != nil {
		return false, found, err
	}
	if sealed && s.seal.current.Format == oldFormat {
		if err := s.carryOver(); err != nil {
			return false, found, err
		}
	}
	if sealed && s.seal.current.State != stateCreating {
		if found, err = s.examineContents(); err != nil {
			return false, found, err
		}
		// Before Badger changes anything, so that a crash is not taken for damage.
		return false, found, s.seal.opened()
	}
	if !sealed {
		for _, name := range []string{s.lsm(), s.bodiesDir(), s.walDir()} {
			if entries, err := os.ReadDir(name); err == nil && len(entries) > 0 {
				return false, found, corrupt(s.dir, "STORE is missing, but %s is not empty", filepath.Base(name))
			}
		}
	}
	// A creation that did not finish has acknowledged nothing.
	if err := s.seal.creating(); err != nil {
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
func (s *Store) examineContents() (found recovery, err error) {
	tables, err := s.seal.check()
	if err != nil {
		return found, err
	}
	if err := s.verifyAtOpen(tables); err != nil {
		return found, s.damaged(err)
	}
	if found, err = survey(s.walDir(), s.seal.current.Log); err != nil {
		return found, s.damaged(err)
	}
	return found, nil
}

// damaged tells what may not be read from what is not whole.
func (s *Store) damaged(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("badger: %w", err)
	}
	return corrupt(s.dir, "%w", err)
}
