package badger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/table"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func remove(key string) store.Write { return store.Write{Key: []byte(key), Delete: true} }

// holdApplier stops the applier before it writes to Badger; release continues it.
func holdApplier(t *testing.T, d *faultyDisk) (entered chan struct{}, release func()) {
	t.Helper()
	entered = make(chan struct{})
	released := make(chan struct{})
	release = sync.OnceFunc(func() { close(released) })
	t.Cleanup(release) // before the store is closed
	signal := sync.OnceFunc(func() { close(entered) })
	d.set(func() {
		d.onApply = func() error {
			signal()
			<-released
			return nil
		}
	})
	return entered, release
}

// An entry that is deleted before its layer is applied never goes to Badger.
func TestCoalescing(t *testing.T) {
	s, d := newFaulty(t, Options{})
	mustCommit(t, s, put("stood", "1"), put("stays", "1"), put("again", "1"), put("over", "1"))
	must(t, s.drain(t.Context()))
	before := s.Stats().Applied
	entered, release := holdApplier(t, d)
	mustCommit(t, s, put("blocker", "1"))
	wait(t, entered) // what follows is one layer
	mustCommit(t, s, insert("brief", "1"), put("index/sending", ""))
	mustCommit(t, s, remove("brief"), remove("index/sending"), put("index/done", ""))
	mustCommit(t, s, remove("stood"))
	mustCommit(t, s, remove("never"))
	mustCommit(t, s, remove("again"))
	last := mustCommit(t, s, insert("again", "2"))
	for i := range 5 {
		mustCommit(t, s, put("over", fmt.Sprint(i)))
	}
	check := func(what string, s *Store) {
		t.Helper()
		for _, gone := range []string{"brief", "index/sending", "stood", "never"} {
			if _, err := s.Get(t.Context(), []byte(gone)); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s: get %q: %v", what, gone, err)
			}
		}
		wantValue(t, s, "stays", "1")
		wantValue(t, s, "over", "4")
		e, err := s.Get(t.Context(), []byte("again"))
		if err != nil || string(e.Value) != "2" || e.Version != last {
			t.Errorf("%s: get again: %+v, %v; want version %d", what, e, err, last)
		}
	}
	check("from the overlay", s)
	dir := crashed(t, s.dir)
	release()
	must(t, s.drain(t.Context()))
	check("from Badger", s)
	for key, want := range map[string]int{"brief": 0, "index/sending": 0, "never": 0, "stood": 2, "again": 2, "over": 2, "index/done": 1} {
		if got := versions(t, s, key); got != want {
			t.Errorf("Badger has %d versions of %q, want %d", got, key, want)
		}
	}
	// blocker, stood, again, over, index/done, and twice the marker
	if got := s.Stats().Applied - before; got != 6 {
		t.Errorf("%d writes went to Badger, want 6", got)
	}
	check("after an ordinary end", flushed(t, s, Options{}))
	check("after a crash", reopenWith(t, dir, Options{}, osDisk{}))
}

// A bulk value that expires before it is applied goes to no file.
func TestExpiryBeforeApplying(t *testing.T) {
	m := newManual()
	s, d := newFaulty(t, Options{Now: m.Now})
	entered, release := holdApplier(t, d)
	mustCommit(t, s, put("blocker", "1"))
	wait(t, entered)
	short := m.bulk("short", 1000, time.Minute)
	mustCommit(t, s, short, m.bulk("long", 1000, 3*time.Hour))
	wantValue(t, s, "short", string(short.Value))
	m.advance(time.Hour)
	_, err := s.Get(t.Context(), []byte("short"))
	wantErr(t, "get from the overlay", err, store.ErrNotFound)
	release()
	if n := len(segments(t, s)); n != 1 {
		t.Errorf("%d files of bulk values, want one for what lives", n)
	}
	_, err = s.Get(t.Context(), []byte("short"))
	wantErr(t, "get", err, store.ErrNotFound)
	wantValue(t, s, "long", string(m.bulk("long", 1000, 0).Value))
	mustCommit(t, s, insert("short", "2"))
}

// While the overlay is applied, reads never go back in time, and scans see whole commits
// and everything that was acknowledged.
func TestReadsWhileApplying(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	number := func(e store.Entry) uint64 { return binary.BigEndian.Uint64(e.Value) }
	const commits = 400
	var answered sync.Map // of no key: the last number
	answered.Store("", uint64(0))
	done := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		defer close(done)
		for n := range uint64(commits) {
			value := string(binary.BigEndian.AppendUint64(nil, n+1))
			if _, err := s.Commit(t.Context(), put("a", value), put("b", value), put(fmt.Sprint("other-", n%100), value)); err != nil {
				t.Errorf("commit: %v", err)
				return
			}
			answered.Store("", n+1)
			if n%7 == 0 {
				signal(s.applier.hurry)
			}
		}
	})
	running := func() bool {
		select {
		case <-done:
			return false
		default:
			return true
		}
	}
	least := func() uint64 {
		n, _ := answered.Load("")
		return n.(uint64)
	}
	for range 3 {
		all.Go(func() {
			var last uint64
			for running() {
				from := least()
				e, err := s.Get(t.Context(), []byte("a"))
				if from == 0 && errors.Is(err, store.ErrNotFound) {
					continue
				}
				if err != nil || number(e) < last || number(e) < from {
					t.Errorf("get: %x, %v, after %d was read and %d was answered", e.Value, err, last, from)
					return
				}
				last = number(e)
			}
		})
	}
	all.Go(func() {
		for running() {
			from := least()
			var pair []uint64
			for e, err := range s.Scan(t.Context(), store.Range{From: []byte("a"), To: []byte("c")}) {
				if err != nil {
					t.Errorf("scan: %v", err)
					return
				}
				pair = append(pair, number(e))
			}
			if from == 0 {
				continue
			}
			if len(pair) != 2 || pair[0] != pair[1] || pair[0] < from {
				t.Errorf("scan: %v, after %d was answered", pair, from)
				return
			}
		}
	})
	all.Wait()
}

// P4: the overlay is bounded; commits wait, and none is lost.
func TestBackPressure(t *testing.T) {
	s, d := newFaulty(t, Options{})
	entered, release := holdApplier(t, d)
	value := strings.Repeat("v", 60_000)
	const n = 300 // three times what there is room for
	var all sync.WaitGroup
	var committed sync.Map
	all.Go(func() {
		for i := range n {
			if _, err := s.Commit(t.Context(), put(fmt.Sprintf("%03d", i), value)); err != nil {
				t.Errorf("commit: %v", err)
				return
			}
			committed.Store(i, true)
		}
	})
	wait(t, entered)
	for s.overlay.untilSpace() == nil {
		wantValue(t, s, "000", value) // reads go on
	}
	h := &held{s: s, d: d}
	results := make([]error, 1)
	h.queue(t, results, 0, &all, put("behind", "1"))
	size := 0
	s.overlay.mu.RLock()
	size = s.overlay.active.size + s.overlay.frozen.size
	s.overlay.mu.RUnlock()
	if size > 3*maxLayer {
		t.Errorf("%d bytes wait for Badger", size)
	}
	if _, all := committed.Load(n - 1); all {
		t.Error("all commits were answered while Badger took nothing")
	}
	release()
	all.Wait()
	must(t, results[0])
	for i := range n {
		wantValue(t, s, fmt.Sprintf("%03d", i), value)
	}
}

// A key that was read while it was absent is found once it is written.
func TestAbsenceIsForgotten(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	key := []byte("a")
	missing := func() {
		t.Helper()
		for range 2 {
			_, err := s.Get(t.Context(), key)
			wantErr(t, "get", err, store.ErrNotFound)
		}
	}
	missing()
	mustCommit(t, s, insert("a", "1"))
	wantValue(t, s, "a", "1")
	must(t, s.drain(t.Context()))
	wantValue(t, s, "a", "1")
	mustCommit(t, s, remove("a"))
	missing()
	must(t, s.drain(t.Context()))
	missing()
	mustCommit(t, s, insert("a", "2"))
	must(t, s.drain(t.Context()))
	wantValue(t, s, "a", "2")
}

// P2: after a failed write of a table Badger retries, and its success proves nothing.
func TestTableThatCannotBeWritten(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	mustCommit(t, s, put("a", "1"))
	must(t, s.drain(t.Context()))
	for id := range uint64(3) {
		must(t, os.Mkdir(table.NewFilename(id+1, s.lsm()), 0o700))
	}
	signal(s.applier.flush)
	wait(t, s.failed)
	_, err := s.Commit(t.Context(), put("b", "1"))
	wantErr(t, "commit", err, store.ErrUnhealthy)
	for id := range uint64(3) {
		_ = os.Remove(table.NewFilename(id+1, s.lsm()))
	}
	dir := s.dir
	_ = s.Close()
	wantValue(t, reopenWith(t, dir, Options{}, osDisk{}), "a", "1")
}

// P4, P6: if Badger or the bulk files fail, the store closes itself; what was acknowledged
// is in the log.
func TestApplyingFails(t *testing.T) {
	m := newManual()
	for name, fail := range map[string]func(d *faultyDisk){
		"Badger":            func(d *faultyDisk) { d.onApply = func() error { return errDisk } },
		"bulk values":       func(d *faultyDisk) { d.onWrite = func(string) error { return errDisk } },
		"while it is full":  func(d *faultyDisk) { d.onApply = func() error { return errDisk } },
		"and a scan waits":  func(d *faultyDisk) { d.onApply = func() error { return errDisk } },
		"and a close waits": func(d *faultyDisk) { d.onApply = func() error { return errDisk } },
	} {
		t.Run(name, func(t *testing.T) {
			s, d := newFaulty(t, Options{Now: m.Now})
			d.set(func() { fail(d) })
			record := m.expiring("c", 1000, time.Hour)
			mustCommit(t, s, put("a", "1"), m.bulk("b", 1000, time.Hour), record)
			switch name {
			case "while it is full":
				value := strings.Repeat("v", 60_000)
				for i := 0; ; i++ {
					if _, err := s.Commit(t.Context(), put(fmt.Sprint(i), value)); err != nil {
						wantErr(t, "commit", err, store.ErrUnhealthy)
						break
					}
				}
			case "and a close waits":
			default:
				var err error
				for _, err = range s.Scan(t.Context(), store.Range{}) {
				}
				wantErr(t, "scan", err, store.ErrUnhealthy)
				wantErr(t, "cause", s.cause(), errDisk)
			}
			dir := s.dir
			_ = s.Close()
			again := reopenWith(t, dir, Options{Now: m.Now}, osDisk{})
			wantValue(t, again, "a", "1")
			wantValue(t, again, "b", string(m.bulk("b", 1000, 0).Value))
			wantValue(t, again, "c", string(record.Value))
		})
	}
}

// P4: bulk values for which the disk has no space wait in the log and in memory.
func TestApplyingWaitsForSpace(t *testing.T) {
	m := newManual()
	s, d := newFaulty(t, Options{Now: m.Now})
	tried := make(chan struct{}, 1)
	d.set(func() {
		d.onWrite = func(string) error {
			select {
			case tried <- struct{}{}:
			default:
			}
			return &os.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}
		}
	})
	mustCommit(t, s, put("a", "1"), m.bulk("b", 1000, time.Hour))
	for range 3 {
		<-tried
	}
	wantValue(t, s, "b", string(m.bulk("b", 1000, 0).Value))
	mustCommit(t, s, put("c", "2"))
	d.set(func() { d.onWrite = nil })
	n := 0
	for _, err := range s.Scan(t.Context(), store.Range{}) { // waits for what is not applied
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if err := s.cause(); n != 3 || err != nil {
		t.Errorf("%d entries, %v", n, err)
	}

	d.set(func() { d.onWrite = func(string) error { return syscall.ENOSPC } })
	record := m.expiring("e", 1000, time.Hour)
	mustCommit(t, s, m.bulk("d", 1000, time.Hour), record)
	dir := s.dir
	_ = s.Close() // still without space: the log keeps it
	again := reopenWith(t, dir, Options{Now: m.Now}, osDisk{})
	wantValue(t, again, "d", string(m.bulk("d", 1000, 0).Value))
	wantValue(t, again, "e", string(record.Value))
}

// versions counts Badger's versions of key, deletions included.
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

// flushed closes and reopens the store, which moves everything to tables.
func flushed(t *testing.T, s *Store, o Options) *Store {
	t.Helper()
	dir := s.dir
	must(t, s.Close())
	return reopenWith(t, dir, o, osDisk{})
}

// rounds is the number of tables that Badger finds worth compacting.
const rounds = 8

// With merge, since Flatten leaves what Badger has compacted at the opening, before it was told what to discard.
func TestOldVersionsAreDropped(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	for range rounds {
		for i := range 10 {
			mustCommit(t, s, put("a", fmt.Sprint(i)), put("gone", "1"))
			mustCommit(t, s, store.Write{Key: []byte("gone"), Delete: true})
		}
		s = flushed(t, s, Options{})
	}
	s.discardOldVersions()
	must(t, s.merge([]byte{userSpace}, []byte{afterUser}))
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
	const n = 2 * firstPage
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
	s.discardOldVersions()
	must(t, s.merge([]byte{userSpace}, []byte{afterUser}))
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

// Versions of entries that were deleted and compacted away are not given again.
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
		s.discardOldVersions()
		must(t, s.merge([]byte{userSpace}, []byte{afterUser}))
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

// isRecent reports whether a read of key needs nothing of Badger, nor of a segment.
func isRecent(s *Store, key string) bool {
	s.overlay.mu.RLock()
	defer s.overlay.mu.RUnlock()
	_, ok := s.overlay.recent.get(userKey([]byte(key)))
	return ok
}

// P1: whatever is written, deleted and expires, a read finds what was committed last, also where
// it is read so often that it comes from memory.
func TestValuesReadAgainAreCurrent(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	m := newManual()
	s, _ := newFaulty(t, Options{Now: m.Now, GroupWait: -1})
	type entry struct {
		value   []byte
		expires time.Time
	}
	there := map[string]entry{}
	key := func() string { return fmt.Sprintf("key %d", random.IntN(20)) }
	hits := 0
	for n := range 4000 {
		switch name := key(); random.IntN(20) {
		case 0:
			mustCommit(t, s, remove(name))
			delete(there, name)
		case 1, 2:
			w := put(name, fmt.Sprint(n))
			if random.IntN(2) == 0 { // or it stands in a segment
				w.Value = bytes.Repeat(w.Value, 300)
			}
			if random.IntN(2) == 0 {
				w.Expires = m.Now().Add(time.Duration(1+random.IntN(60)) * time.Minute)
			}
			w.Bulk = random.IntN(2) == 0
			mustCommit(t, s, w)
			there[name] = entry{w.Value, w.Expires}
		case 3:
			must(t, s.drain(t.Context()))
		case 4:
			m.advance(time.Duration(random.IntN(60)) * time.Second)
		default:
			if isRecent(s, name) {
				hits++
			}
			want, ok := there[name]
			got, err := s.Get(t.Context(), []byte(name))
			if ok = ok && (want.expires.IsZero() || m.Now().Before(want.expires)); !ok {
				wantErr(t, name, err, store.ErrNotFound)
			} else if err != nil || !bytes.Equal(got.Value, want.value) || string(got.Key) != name || !got.Expires.Equal(want.expires) {
				t.Fatalf("%s after %d steps: %.40q until %v, %v; want %.40q until %v", name, n, got.Value, got.Expires, err, want.value, want.expires)
			}
			clear(got.Value) // it is the caller's
		}
	}
	if hits == 0 {
		t.Error("nothing came from memory")
	}
}

// P1: what a slow reader has read of Badger is not kept once it may have changed.
func TestLateReadsAreNotKept(t *testing.T) {
	s, _ := newFaulty(t, Options{})
	mustCommit(t, s, put("key", "before"))
	must(t, s.drain(t.Context()))
	key := userKey([]byte("key"))
	late, err := s.get(key)
	must(t, err)
	mustCommit(t, s, put("key", "after"))
	must(t, s.drain(t.Context()))
	for range 2 {
		s.overlay.remember(key, late, nil)
	}
	wantValue(t, s, "key", "after")
	for range 2 {
		wantValue(t, s, "key", "after")
	}
	if !isRecent(s, "key") {
		t.Error("a value that is read again and again is read of Badger each time")
	}
}

// What is kept of reads is bounded, and reading many values once keeps none.
func TestRecentValuesAreBounded(t *testing.T) {
	m := newManual()
	s, _ := newFaulty(t, Options{Now: m.Now})
	const n, size = 300, 20 << 10
	name := func(i int) string { return fmt.Sprintf("key %d", i) }
	for i := range n {
		mustCommit(t, s, m.expiring(name(i), size, time.Hour))
	}
	mustCommit(t, s, m.bulk("large", maxRecentValue+1, time.Hour))
	must(t, s.drain(t.Context()))
	read := func(key string) {
		t.Helper()
		_, err := s.Get(t.Context(), []byte(key))
		must(t, err)
	}
	kept := func() (kept int) {
		s.overlay.mu.RLock()
		defer s.overlay.mu.RUnlock()
		for _, all := range []map[string]stored{s.overlay.recent.young, s.overlay.recent.old} {
			for key, found := range all {
				kept += len(key) + len(found.raw) + len(found.value)
			}
		}
		return kept
	}
	for i := range n {
		read(name(i))
	}
	if got := kept(); got != 0 {
		t.Errorf("%d bytes are kept of values that were read once", got)
	}
	for i := range n {
		for range 3 {
			read(name(i))
			read("large")
		}
	}
	if got, most := kept(), 2*(maxRecent+size+1024); got < maxRecent || got > most {
		t.Errorf("%d bytes are kept, want %d to %d", got, maxRecent, most)
	}
	if isRecent(s, "large") || !isRecent(s, name(n-1)) {
		t.Error("the last values are not kept, or a large one is")
	}
}
