package badger

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/table"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// vetting are the tables that were not read at Open, since they are known and the
// system says that they have not changed. They are read right after it, and before
// anything that could rest on them: where a disk has altered one behind the system's
// back, a lookup would say "not found", and the guard would take that for a key that
// is free (P1). Only tables of Badger's last level are here. Those above it are read
// at Open, for what they lack is answered from below by what is out of date.
type vetting struct {
	done   atomic.Bool
	tables []*unvetted // by range of keys, once placed
}

type unvetted struct {
	id          uint64
	left, right []byte // its first and last key
	once        sync.Once
	err         error
	// file stays open, so that the table can be read while a compaction replaces it:
	// what is wrong with it is then wrong with what replaced it.
	file *os.File
}

// add takes a table whose reading can wait.
func (v *vetting) add(id uint64, f *os.File) {
	v.tables = append(v.tables, &unvetted{id: id, file: f})
}

// place puts the tables in order, once Badger knows their ranges. Tables that it has
// replaced in the meantime stand for all keys.
func (v *vetting) place(all []badgerdb.TableInfo) {
	ranges := make(map[uint64]badgerdb.TableInfo, len(all))
	for _, t := range all {
		ranges[t.ID] = t
	}
	for _, t := range v.tables {
		if info, ok := ranges[t.id]; ok {
			t.left, t.right = info.Left[:len(info.Left)-8], info.Right[:len(info.Right)-8]
		}
	}
	v.done.Store(len(v.tables) == 0)
}

// vet reads what could answer for keys from first to last, both inclusive, unless it
// was read. A nil last is the end.
func (s *Store) vet(first, last []byte) error {
	if s.vetting.done.Load() {
		return nil
	}
	for _, t := range s.vetting.tables {
		if t.right != nil && (bytes.Compare(t.right, first) < 0 || last != nil && bytes.Compare(t.left, last) > 0) {
			continue
		}
		if err := s.vetTable(t); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) vetTable(t *unvetted) error {
	t.once.Do(func() {
		err := s.known.check(t.id, t.file)
		if err != nil && empty(t.file) && s.dropped(t.id) {
			err = nil // a compaction was faster, and Badger has cut the file: nobody can tell
		}
		t.file.Close()
		if err != nil {
			t.err = corrupt(s.dir, "table %s: %w", filepath.Base(table.IDToFilename(t.id)), err)
			s.condemn(t.err)
		}
	})
	return t.err
}

func empty(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Size() == 0
}

// vetAll reads what is left.
func (s *Store) vetAll() {
	for _, t := range s.vetting.tables {
		select {
		case <-s.closing:
			s.vetting.release(store.ErrClosed)
			return
		default:
		}
		if s.vetTable(t) != nil {
			s.vetting.release(store.ErrUnhealthy)
			return
		}
	}
	s.vetting.done.Store(true)
}

// release gives up what is left, for the reason err.
func (v *vetting) release(err error) {
	for _, t := range v.tables {
		t.once.Do(func() {
			t.err = err
			t.file.Close()
		})
	}
}
