package badger

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/table"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// settledStore is a store that was closed in order, with tables in Badger's last
// level which are known.
func settledStore(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	s := reopenWith(t, dir, Options{}, osDisk{})
	for i := range 400 {
		mustCommit(t, s, put(fmt.Sprintf("%03d", i), strings.Repeat("v", 4000)))
	}
	s = flushed(t, s, Options{})
	must(t, s.merge([]byte{userSpace}, []byte{afterUser}))
	for _, table := range s.db.Tables() {
		if table.Level != s.db.Opts().MaxLevels-1 {
			t.Fatalf("a table is in level %d", table.Level)
		}
	}
	must(t, s.Close())
	return dir
}

// decay alters a byte of the table that holds the entries, behind the back of the
// file system: what is known of the file says that nobody has touched it.
func decay(t *testing.T, dir string) (table string) {
	t.Helper()
	for _, name := range tablesIn(t, dir) {
		info, err := os.Stat(name)
		must(t, err)
		if info.Size() < 400*4000 {
			continue
		}
		flip(t, name, 300_000)
		pretendKnown(t, dir)
		return name
	}
	t.Fatal("no table holds the entries")
	return ""
}

func pretendKnown(t *testing.T, dir string) {
	t.Helper()
	k := newKnown(dir)
	k.load()
	if len(k.facts) == 0 {
		t.Fatal("nothing is known of the tables")
	}
	for id, f := range k.facts {
		file, err := os.Open(filepath.Join(dir, "lsm", fmt.Sprintf("%06d.sst", id)))
		must(t, err)
		var ok bool
		f.Mark, ok = markOf(file)
		must(t, file.Close())
		if !ok {
			t.Fatal("this system does not tell files apart")
		}
		k.facts[id] = f
	}
	must(t, k.save())
}

func TestKnownTablesAreReadAfterOpening(t *testing.T) {
	dir := settledStore(t)
	s := reopenWith(t, dir, Options{}, osDisk{})
	if len(s.vetting.tables) == 0 {
		t.Fatal("all tables were read at Open")
	}
	wantValue(t, s, "070", strings.Repeat("v", 4000))
	s.vetAll()
	if s.Stats().Verifying {
		t.Error("all tables were read and it is not said")
	}
	must(t, s.Err())
}

// P1: a block that has decayed while the store was closed is no free key, neither for
// a read nor for a condition, from the first moment on. The store does not come back.
func TestDecayedTableIsNoFreeKey(t *testing.T) {
	settled := settledStore(t)
	for name, ask := range map[string]func(s *Store, key string) error{
		"get": func(s *Store, key string) error {
			_, err := s.Get(t.Context(), []byte(key))
			return err
		},
		"insert": func(s *Store, key string) error {
			_, err := s.Commit(t.Context(), insert(key, "again"))
			return err
		},
		"scan": func(s *Store, key string) error {
			for _, err := range s.Scan(t.Context(), store.Prefix([]byte(key))) {
				return err
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := image(t, settled)
			decay(t, dir)
			s, err := Open(dir, Options{})
			must(t, err)
			for i := range 400 {
				err := ask(s, fmt.Sprintf("%03d", i))
				if !errors.Is(err, ErrCorrupt) && !errors.Is(err, store.ErrUnhealthy) {
					t.Fatalf("key %d: %v, want that the store is damaged", i, err)
				}
			}
			wantErr(t, "health", s.Err(), ErrCorrupt)
			if s.Stats().Healthy {
				t.Error("the store calls itself healthy")
			}
			_ = s.Close()
			for range 2 {
				refused(t, dir)
			}
		})
	}
}

// P1: nobody waits for the reading in the background to come by: who asks first reads
// the table first, and only the tables that could answer.
func TestTablesAreReadBeforeTheyAnswer(t *testing.T) {
	dir := settledStore(t)
	open := reopenWith(t, image(t, dir), Options{}, osDisk{})
	name := decay(t, dir)
	for what, ask := range map[string]func(s *Store, key string) error{
		"get": func(s *Store, key string) error {
			_, err := s.Get(t.Context(), []byte(key))
			return err
		},
		"insert": func(s *Store, key string) error { return s.admit([]store.Write{insert(key, "1")}) },
		"replace": func(s *Store, key string) error {
			return s.admit([]store.Write{{Key: []byte(key), If: store.VersionIs(1)}})
		},
		"scan": func(s *Store, key string) error {
			for _, err := range s.Scan(t.Context(), store.Range{From: []byte(key), To: []byte(key + "0")}) {
				return err
			}
			return nil
		},
	} {
		f, err := os.Open(name)
		must(t, err)
		// As it is between Open and the reading of this table.
		s := &Store{
			dir: t.TempDir(), options: open.options, disk: osDisk{}, watches: open.watches,
			known: newKnown(dir), db: open.db, scans: make(map[uint64]int),
			failed: make(chan struct{}), overlay: newOverlay(open.durable.Load(), 0),
		}
		s.limits.Store(open.options.limits())
		if s.vetting.done.Load() {
			t.Fatal("nothing is left to read")
		}
		s.durable.Store(open.durable.Load())
		s.vetting.add(99, f)
		s.vetting.place([]badgerdb.TableInfo{{ID: 99, Left: append(userKey([]byte("000")), make([]byte, 8)...), Right: append(userKey([]byte("399")), make([]byte, 8)...)}})
		if err := ask(s, "400"); err != nil && !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s of a key behind all of the table: %v", what, err)
		}
		if err := ask(s, "/"); err != nil && !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s of a key before all of the table: %v", what, err)
		}
		wantErr(t, what, ask(s, "399"), ErrCorrupt)
		wantErr(t, "health", s.Err(), ErrCorrupt)
	}
}

// A table that a compaction has replaced before it was read is read all the same:
// what it had lost, its successor lacks too, with checksums that are right.
func TestDecayIsFoundAfterCompaction(t *testing.T) {
	dir := settledStore(t)
	name := decay(t, dir)
	f, err := os.Open(name)
	must(t, err)
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	var v vetting
	v.add(1, f)
	must(t, os.Remove(name))
	v.place(nil)
	wantErr(t, "reading it", s.vetTable(v.tables[0]), ErrCorrupt)
	must(t, errors.Join(s.Close()))
	refused(t, s.dir)
}

// After a crash, or where the files are not those that were known, nothing is put off.
func TestUnknownTablesAreReadAtOpen(t *testing.T) {
	settled := settledStore(t)
	for name, change := range map[string]func(dir string){
		"after a crash": func(dir string) {
			file := filepath.Join(dir, "STORE")
			b, err := os.ReadFile(file)
			must(t, err)
			var seal map[string]any
			must(t, json.Unmarshal(b, &seal))
			seal["state"] = stateOpen
			b, err = json.Marshal(seal)
			must(t, err)
			must(t, os.WriteFile(file, b, 0o600))
		},
		"nothing is known":   func(dir string) { must(t, os.Remove(filepath.Join(dir, "TABLES"))) },
		"TABLES is no JSON":  func(dir string) { must(t, os.WriteFile(filepath.Join(dir, "TABLES"), []byte("["), 0o600)) },
		"TABLES is of zeros": func(dir string) { must(t, os.WriteFile(filepath.Join(dir, "TABLES"), make([]byte, 900), 0o600)) },
		"touched": func(dir string) {
			for _, name := range tablesIn(t, dir) {
				must(t, os.Chmod(name, 0o640))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := image(t, settled)
			decay(t, dir)
			change(dir)
			refused(t, dir)
		})
	}
	t.Run("a copy", func(t *testing.T) {
		s := reopenWith(t, image(t, settled), Options{}, osDisk{})
		if len(s.vetting.tables) != 0 {
			t.Error("files that were never seen are taken for known")
		}
	})
}

// What compaction makes is read soon, so that an orderly close leaves nothing unknown.
func TestNewTablesAreRead(t *testing.T) {
	s := reopenWith(t, settledStore(t), Options{}, osDisk{})
	must(t, s.merge([]byte{userSpace}, []byte{afterUser}))
	must(t, s.verifyNew())
	ids, err := s.tables()
	must(t, err)
	for _, id := range ids {
		if _, ok := s.known.get(id); !ok {
			t.Errorf("table %d is unknown", id)
		}
	}
	if len(s.known.facts) != len(ids) {
		t.Errorf("%d tables are known, %d are there", len(s.known.facts), len(ids))
	}
}

// Badger cuts the file of a table that it drops, under whoever reads it. That is no
// damage; the same of a table that it has is.
func TestDroppedTablesAreNoDamage(t *testing.T) {
	s := reopenWith(t, settledStore(t), Options{}, osDisk{})
	const never = 9999
	name := table.NewFilename(never, s.lsm())
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check := func(gone func(uint64) bool) error { return s.known.checkAll(s.lsm(), []uint64{never}, gone, nil) }
	if err := check(s.dropped); err != nil {
		t.Errorf("a dropped table: %v", err)
	}
	if check(func(uint64) bool { return false }) == nil || check(nil) == nil {
		t.Error("a table without content is taken for whole")
	}
	if err := os.Remove(name); err != nil {
		t.Fatal(err)
	}
	if err := check(s.dropped); err != nil {
		t.Errorf("and removed: %v", err)
	}
	ids, err := s.tables()
	if err != nil || len(ids) == 0 || s.dropped(ids[0]) {
		t.Errorf("tables %v, %v", ids, err)
	}
}
