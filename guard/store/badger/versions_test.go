package badger

import (
	"fmt"
	"iter"
	"math"
	"strings"
	"testing"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// versions counts what Badger holds under key, deletions included.
func versions(t *testing.T, s *Store, key string) (n int) {
	t.Helper()
	txn := s.db.NewTransactionAt(math.MaxUint64, false)
	defer txn.Discard()
	it := txn.NewIterator(badgerdb.IteratorOptions{AllVersions: true})
	defer it.Close()
	want := string(userKey([]byte(key)))
	for it.Seek([]byte(want)); it.Valid() && string(it.Item().Key()) == want; it.Next() {
		n++
	}
	return n
}

// flushed closes and opens the store, which moves everything to tables.
func flushed(t *testing.T, s *Store, o Options) *Store {
	t.Helper()
	dir := s.dir
	must(t, s.Close())
	return reopenWith(t, dir, o, osDisk{})
}

// rounds is so many tables that Badger finds them worth compacting.
const rounds = 8

func TestOldVersionsAreDropped(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	for range rounds {
		for i := range 10 {
			mustCommit(t, s, put("a", fmt.Sprint(i)), put("gone", "1"))
			mustCommit(t, s, store.Write{Key: []byte("gone"), Delete: true})
		}
		s = flushed(t, s, Options{})
	}
	s.discard()
	must(t, s.db.Flatten(1))
	if n := versions(t, s, "a"); n != 1 {
		t.Errorf("%d versions of one key after compaction, want 1", n)
	}
	if n := versions(t, s, "gone"); n != 0 {
		t.Errorf("%d versions of a deleted key after compaction, want 0", n)
	}
	wantValue(t, s, "a", "9")
}

func TestScanKeepsItsSnapshotOverCompaction(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	const n = 2 * firstPiece
	for range rounds {
		var batch []store.Write
		for i := range n {
			batch = append(batch, put(fmt.Sprintf("%03d", i), "old"))
		}
		mustCommit(t, s, batch...)
		s = flushed(t, s, Options{})
	}
	next, stop := iter.Pull2(s.Scan(t.Context(), store.Range{}))
	defer stop()
	if _, err, ok := next(); err != nil || !ok {
		t.Fatal(err)
	}
	overwriteInTables(t, s, n)
	s.discard()
	must(t, s.db.Flatten(1))
	seen := 1
	for {
		e, err, ok := next()
		if !ok {
			break
		}
		if err != nil || string(e.Value) != "old" {
			t.Fatalf("%q = %.10q, %v; want the value from when the scan began", e.Key, e.Value, err)
		}
		seen++
	}
	if seen != n {
		t.Errorf("%d entries, want %d", seen, n)
	}
	if len(s.scans) != 0 {
		t.Errorf("the scan still holds back %v", s.scans)
	}
}

// overwriteInTables gives the first n keys new values, until tables hold them all.
func overwriteInTables(t *testing.T, s *Store, n int) {
	t.Helper()
	large := strings.Repeat("new", store.MaxValue/3)
	all := store.Version(0)
	for {
		for i := range n {
			v := mustCommit(t, s, put(fmt.Sprintf("%03d", i), large))
			if i == n-1 && all == 0 {
				all = v
			}
		}
		for _, table := range s.db.Tables() {
			if table.MaxVersion >= uint64(all) {
				return
			}
		}
	}
}

// Deleted and compacted away, the highest versions must still not come again.
func TestVersionsOutliveTheirEntries(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	last := store.Version(0)
	for range rounds {
		for range 5 {
			v := mustCommit(t, s, put("a", "1"))
			if v <= last {
				t.Fatalf("version %d after %d", v, last)
			}
			last = mustCommit(t, s, store.Write{Key: []byte("a"), Delete: true})
		}
		s = flushed(t, s, Options{})
		s.discard()
		must(t, s.db.Flatten(1))
		s = flushed(t, s, Options{})
	}
}

func TestHint(t *testing.T) {
	if hint(time.Time{}, time.Now()) != 0 {
		t.Error("an entry without expiry would be dropped")
	}
	ours := time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC) // far from the machine's clock
	for _, left := range []time.Duration{time.Second, time.Hour, 1000 * time.Hour} {
		least := time.Now().Add(left + grace).Add(-2 * time.Second)
		at := time.Unix(int64(hint(ours.Add(left), ours)), 0)
		if at.Before(least) || at.After(least.Add(time.Minute)) {
			t.Errorf("with %v left, Badger may drop it at %v, want %v after now", left, at, left+grace)
		}
	}
	if hint(ours.AddDate(5000, 0, 0), ours) != 0 {
		t.Error("an expiry beyond counting must be left to our own check")
	}
}
