package badger

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/table"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// settledStore is a store that was closed in order, with verified tables in Badger's last
// level.
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

// decay silently alters a byte of the table with the entries: the recorded identity of the
// file still matches.
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
	k := newVerifiedTables(dir, newAbsence(nil, 0))
	k.load()
	if len(k.tables) == 0 {
		t.Fatal("nothing is known of the tables")
	}
	for id, f := range k.tables {
		file, err := os.Open(filepath.Join(dir, "lsm", fmt.Sprintf("%06d.sst", id)))
		must(t, err)
		var ok bool
		f.File, ok = identityOf(file)
		must(t, file.Close())
		if !ok {
			t.Fatal("this system does not tell files apart")
		}
		k.tables[id] = f
	}
	must(t, k.save())
}

func TestKnownTablesAreReadAfterOpening(t *testing.T) {
	dir := settledStore(t)
	s := reopenWith(t, dir, Options{}, osDisk{})
	if len(s.deferred.tables) == 0 {
		t.Fatal("all tables were read at Open")
	}
	wantValue(t, s, "070", strings.Repeat("v", 4000))
	s.verifyAllDeferred()
	if s.Stats().Verifying {
		t.Error("all tables were read and it is not said")
	}
	must(t, s.cause())
}

// P1: a block that decayed while the store was closed is not a free key, neither for a read
// nor for a condition, from the first moment on. The store does not open again.
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
				if !errors.Is(err, errCorrupt) && !errors.Is(err, store.ErrUnhealthy) {
					t.Fatalf("key %d: %v, want that the store is damaged", i, err)
				}
			}
			wantErr(t, "health", s.cause(), errCorrupt)
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

// P1: the first read of a key checks the deferred tables that could hold it, without
// waiting for the check in the background.
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
			directory: directory{
				dir: t.TempDir(), options: open.options, disk: osDisk{}, watches: open.watches, failed: make(chan struct{}),
				verified: newVerifiedTables(dir, newAbsence(nil, 0)), absence: newAbsence(nil, 0),
			},
			db: open.db, scans: make(map[uint64]int), overlay: newOverlay(open.durable.Load(), 0),
		}
		s.limits.Store(open.options.limits())
		if s.deferred.done.Load() {
			t.Fatal("nothing is left to read")
		}
		s.durable.Store(open.durable.Load())
		s.deferred.add(99, f)
		s.deferred.setRanges([]badgerdb.TableInfo{{ID: 99, Left: append(userKey([]byte("000")), make([]byte, 8)...), Right: append(userKey([]byte("399")), make([]byte, 8)...)}})
		if err := ask(s, "400"); err != nil && !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s of a key behind all of the table: %v", what, err)
		}
		if err := ask(s, "/"); err != nil && !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s of a key before all of the table: %v", what, err)
		}
		wantErr(t, what, ask(s, "399"), errCorrupt)
		wantErr(t, "health", s.cause(), errCorrupt)
	}
}

// A table that a compaction replaced before it was checked is checked all the same: its
// successor lacks the same entries, with right checksums.
func TestDecayIsFoundAfterCompaction(t *testing.T) {
	dir := settledStore(t)
	name := decay(t, dir)
	f, err := os.Open(name)
	must(t, err)
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	var v deferredVerification
	v.add(1, f)
	must(t, os.Remove(name))
	v.setRanges(nil)
	wantErr(t, "reading it", s.verifyDeferred(v.tables[0]), errCorrupt)
	must(t, errors.Join(s.Close()))
	refused(t, s.dir)
}

// After a crash, or if the files have changed, nothing is deferred.
func TestUnknownTablesAreReadAtOpen(t *testing.T) {
	settled := settledStore(t)
	for name, change := range map[string]func(dir string){
		"after a crash": func(dir string) {
			file := filepath.Join(dir, "STORE")
			b, err := os.ReadFile(file)
			must(t, err)
			var manifest map[string]any
			must(t, json.Unmarshal(b, &manifest))
			manifest["state"] = stateOpen
			b, err = json.Marshal(manifest)
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
		if len(s.deferred.tables) != 0 {
			t.Error("files that were never seen are taken for known")
		}
	})
}

// New tables are checked soon, so that an orderly close has verified them all.
func TestNewTablesAreRead(t *testing.T) {
	s := reopenWith(t, settledStore(t), Options{}, osDisk{})
	must(t, s.merge([]byte{userSpace}, []byte{afterUser}))
	must(t, s.verifyNewTables())
	ids, err := s.tables()
	must(t, err)
	for _, id := range ids {
		if _, ok := s.verified.get(id); !ok {
			t.Errorf("table %d is unknown", id)
		}
	}
	if known := len(knownTables(s)); known != len(ids) {
		t.Errorf("%d tables are known, %d are there", known, len(ids))
	}
}

// Badger truncates the file of a table that it drops, even while we read it. That is no
// damage; in a table that it still has, it is.
func TestDroppedTablesAreNoDamage(t *testing.T) {
	s := reopenWith(t, settledStore(t), Options{}, osDisk{})
	const never = 9999
	name := table.NewFilename(never, s.lsm())
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	check := func(gone func(uint64) bool) error {
		return s.verified.verifyAll(s.lsm(), []uint64{never}, gone, nil, nil)
	}
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

// Table statistics count what Badger itself treats as expired or deleted, late rather than
// early, in few buckets.
func TestTableStats(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	now := time.Now()
	txn := s.db.NewTransactionAt(1, true)
	const each = 100
	for i := range each {
		for kind, expires := range []int64{0, now.Add(-time.Hour).Unix(), now.Add(time.Duration(i) * 24 * time.Hour).Unix()} {
			e := badgerdb.NewEntry(fmt.Appendf(nil, "k%d-%05d", kind, i), make([]byte, 1000))
			e.ExpiresAt = uint64(expires)
			must(t, txn.SetEntry(e))
		}
		must(t, txn.SetEntry(badgerdb.NewEntry(fmt.Appendf(nil, "k4-%05d", i), make([]byte, 500))))
		must(t, txn.Delete(fmt.Appendf(nil, "k3-%05d", i)))
	}
	must(t, txn.CommitAt(2, nil))
	txn = s.db.NewTransactionAt(2, true)
	for i := range each {
		must(t, txn.Set(fmt.Appendf(nil, "k4-%05d", i), []byte("newer")))
	}
	must(t, txn.CommitAt(3, nil))
	s = flushed(t, s, Options{})
	must(t, s.verifyNewTables())
	k, err := s.lsmStats()
	must(t, err)
	if k.dead < each*1500 || k.dead > each*1650+1100 {
		t.Errorf("%d bytes are dead, want %d expired ones, %d replaced ones, and some for deletions", k.dead, each*1000, each*500)
	}
	var bytes int64
	for _, f := range knownTables(s) {
		if len(f.Stats.Expiring) > maxBuckets+2 {
			t.Errorf("%d buckets", len(f.Stats.Expiring))
		}
		for _, e := range f.Stats.Expiring {
			bytes += e.Bytes
		}
		if early := f.Stats.dead(now.Add(50 * 24 * time.Hour)); early > k.dead+51*1100 || early < k.dead+45*1000 {
			t.Errorf("%d bytes are called dead in 50 days", early)
		}
	}
	if bytes < 2*each*1250 || bytes > 2*each*1350 {
		t.Errorf("%d bytes expire or are replaced, want %d", bytes, 2*each*1250)
	}
}

// knownTables are the tables that s has verified; it goes on verifying beside the test.
func knownTables(s *Store) map[uint64]verifiedTable {
	s.verified.mu.Lock()
	defer s.verified.mu.Unlock()
	return maps.Clone(s.verified.tables)
}

// Garbled entries with a right checksum are an error, not a panic.
func FuzzBlockStats(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x00\x00\x0b\x00key\x00\x00\x00\x00\x00\x00\x00\x01" + "\x00\x00\x00v" + // one entry
		"\x00\x00\x00\x00" + "\x00\x00\x00\x01"))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		seen := 0
		c := statsCounter{buckets: make(map[int64]int64), seen: func(_, _ []byte) { seen++ }}
		if err := c.block(b); err != nil {
			return
		}
		c.stats(int64(len(b)))
		if len(c.key) > 0 && seen == 0 {
			t.Errorf("key %q was not seen", c.key)
		}
	})
}
