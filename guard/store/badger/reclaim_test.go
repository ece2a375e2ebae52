package badger

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// expiredFor is when what has lived for a minute is given back: Badger drops it an hour
// late, it is counted by quarters of an hour, and looked at once a minute.
const expiredFor = grace + 25*time.Minute

// lazyDisk does not sync bulk values: no test of space lives through a crash.
type lazyDisk struct{ osDisk }

func (lazyDisk) sync(*os.File) error { return nil }

// emptyPools takes what is in pools out of them. They would give channels of one
// bubble to the next, which ends the process; what is in a pool lives through one
// collection.
func emptyPools() {
	runtime.GC()
	runtime.GC()
}

// In a bubble, for Badger drops by the machine's clock.
func bubbleStore(t *testing.T, dir string) *Store {
	t.Helper()
	// Without the wait, which looks at the clock in a loop.
	s, err := openWith(dir, Options{GroupWait: -1, BulkWindow: time.Minute}, lazyDisk{})
	must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(s.Err(), s.Close()); err != nil {
			t.Error(err)
		}
	})
	return s
}

// emptyStore is what a store takes that holds nothing.
func emptyStore(t *testing.T) int64 {
	t.Helper()
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	s.lookAtDisk()
	size := blocks(t, s.dir)
	must(t, s.Close())
	return size
}

// Section "Space": after 300,000 expired results the directory is at most twice what
// lives and one empty store.
func TestExpiryGivesTheDiskBack(t *testing.T) {
	empty := emptyStore(t)
	dir := t.TempDir()
	emptyPools()
	defer emptyPools()
	synctest.Test(t, func(t *testing.T) {
		s := bubbleStore(t, dir)
		const dead, living = manyRecords, manyRecords / 100
		fill{records: dead, settled: true, key: time.Second, result: time.Second}.into(t, s)
		fill{from: dead, records: living, key: 10 * time.Hour, result: 10 * time.Hour}.into(t, s)
		full := blocks(t, s.dir)
		time.Sleep(expiredFor)
		left := blocks(t, s.dir)
		t.Logf("%d bytes with %d records, %d after they expired, %d are an empty store", full, dead, left, empty)
		if lives := int64(living * (fillValue + fillBulk + 500)); left > 2*(lives+empty) {
			t.Errorf("%d bytes are left of %d, want at most twice %d and %d", left, full, lives, empty)
		}
		if got := s.Stats(); got.Reclaimed == 0 || got.ReclaimedBytes == 0 || got.LastReclaim.IsZero() || got.Dropped == 0 {
			t.Errorf("%+v", got)
		}
		for n := dead; n < dead+living; n++ {
			if _, err := s.Get(t.Context(), fillKey('x', 0, n)); err != nil {
				t.Fatalf("record %d: %v", n, err)
			}
		}
		seen := 0
		for _, err := range s.Scan(t.Context(), store.Prefix([]byte("c"))) {
			must(t, err)
			seen++
		}
		if seen != living {
			t.Errorf("%d entries of an index, want %d", seen, living)
		}
	})
}

// Flatten alone leaves tables of the last level as they are, whatever has expired.
func TestExpiryInTheLastLevel(t *testing.T) {
	dir := t.TempDir()
	emptyPools()
	defer emptyPools()
	synctest.Test(t, func(t *testing.T) {
		s := bubbleStore(t, dir)
		fill{records: 30_000, settled: true, key: time.Second, result: time.Second}.into(t, s)
		must(t, s.nudge([]byte{userSpace}, []byte{userSpace})) // so that all is in tables
		must(t, s.flushed(0))
		must(t, s.db.Flatten(1))
		must(t, s.verifyNew())
		before, err := s.stock()
		must(t, err)
		if before.dead > before.total/100 || before.upper != 0 || before.total < 20_000*fillValue {
			t.Fatalf("%+v before, want all in one level and alive", before)
		}
		time.Sleep(expiredFor)
		after, err := s.stock()
		must(t, err)
		if after.total > before.total/100 {
			t.Errorf("%d bytes of tables are left of %d", after.total, before.total)
		}
	})
}

// Section "Space": what is left of an execution whose result has expired is its
// record and three index entries.
func TestKeysOutliveTheirResults(t *testing.T) {
	dir := t.TempDir()
	emptyPools()
	defer emptyPools()
	synctest.Test(t, func(t *testing.T) {
		s := bubbleStore(t, dir)
		const records = 30_000
		fill{records: records, key: 30 * 24 * time.Hour, result: time.Second}.into(t, s)
		time.Sleep(expiredFor)
		must(t, s.merge([]byte{userSpace}, []byte{userSpace})) // what was in memory too
		s.sweep()
		s.reclaim(false)
		s.measure()
		got := s.Stats().Space
		if got.Bodies != 0 {
			t.Errorf("%d bytes of expired results are left", got.Bodies)
		}
		now, err := s.stock()
		must(t, err)
		t.Logf("%d bytes of tables for each key, with a record of %d", now.total/records, fillValue)
		if now.total > records*(fillValue+700) {
			t.Errorf("%d bytes of tables for %d keys", now.total, records)
		}
	})
}

// What is written so that a compaction comes by is in nobody's sight, neither where
// an entry stands under the same key nor where none does, and not after a crash.
func TestNudgesAreNeverSeen(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	version := mustCommit(t, s, put("a", "1"), put("c", "1"))
	nudged := func(s *Store) {
		t.Helper()
		must(t, s.nudge(userKey([]byte("a")), userKey([]byte("b"))))
		wantValue(t, s, "a", "1")
		_, err := s.Get(t.Context(), []byte("b"))
		wantErr(t, "get b", err, store.ErrNotFound)
		for _, reverse := range []bool{false, true} {
			var keys string
			for e, err := range s.Scan(t.Context(), store.Range{Reverse: reverse}) {
				must(t, err)
				keys += string(e.Key)
			}
			if keys != "ac" && keys != "ca" {
				t.Errorf("a scan sees %q", keys)
			}
		}
	}
	nudged(s)
	must(t, s.merge(userKey([]byte("a")), userKey([]byte("b"))))
	nudged(s)
	again := reopenWith(t, image(t, s.dir), Options{}, osDisk{})
	nudged(again)
	if v := mustCommit(t, again, insert("b", "2")); v <= version {
		t.Errorf("version %d after %d", v, version)
	}
	nudgeAgain := again.nudge(userKey([]byte("a")), userKey([]byte("b")))
	must(t, nudgeAgain)
	wantValue(t, again, "b", "2")
}

// Calls that come while the space of others is given back are none the worse for it.
func TestReclaimBesideCommits(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	fill{records: 5_000, settled: true, key: time.Hour, result: time.Hour}.into(t, s)
	stop, stopped := make(chan struct{}), make(chan struct{})
	written := 5_000
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			fill{from: written, records: 1, key: time.Hour, result: time.Hour}.into(t, s)
			written++
		}
	}()
	for range 3 {
		k, err := s.stock()
		must(t, err)
		if k.last == nil {
			k.last = []lot{{left: []byte{userSpace}, right: []byte{afterUser}}}
		}
		must(t, s.reclaimRound(k))
	}
	close(stop)
	wait(t, stopped)
	if written == 5_000 {
		t.Error("no call came through meanwhile")
	}
	for n := range written {
		for _, key := range [][]byte{fillKey('x', 0, n), fillKey('r', 20, n)} {
			if _, err := s.Get(t.Context(), key); err != nil {
				t.Fatalf("record %d of %d: %v", n, written, err)
			}
		}
	}
}

func TestReclaimPays(t *testing.T) {
	const mib = 1 << 20
	for _, row := range []struct {
		dead, total       int64
		pays, short, busy bool
	}{
		{0, 0, false, false, false},
		{7 * mib, 7 * mib, false, false, false}, // not worth the writing
		{8 * mib, 16 * mib, true, true, true},
		{8 * mib, 32 * mib, true, true, false},
		{8 * mib, 33 * mib, false, true, false},
		{8 * mib, 161 * mib, false, false, false},
		{300 * mib, 1000 * mib, true, true, false},
	} {
		k := stock{dead: row.dead, total: row.total}
		if k.pays(false, false) != row.pays || k.pays(true, true) != row.short || k.pays(false, true) != row.busy {
			t.Errorf("%d dead of %d: %v, short %v, busy %v", row.dead, row.total,
				k.pays(false, false), k.pays(true, true), k.pays(false, true))
		}
	}
}

func TestStretchIsWhereMostIsDead(t *testing.T) {
	k := stock{last: []lot{
		{[]byte("a"), []byte("b"), 100, 10}, {[]byte("c"), []byte("d"), 100, 90},
		{[]byte("e"), []byte("f"), 100, 80}, {[]byte("g"), []byte("h"), 300, 100},
	}}
	for most, want := range map[int64]string{50: "g-h", 100: "g-h", 200: "c-f", 400: "a-f", 1000: "a-h"} {
		l := k.stretch(most)
		if got := string(l.left) + "-" + string(l.right); got != want {
			t.Errorf("up to %d: %s, want %s", most, got, want)
		}
	}
}

// On a disk that has no space for what lives to be written anew, nothing begins.
func TestReclaimNeedsSpace(t *testing.T) {
	s, d := newFaulty(t, Options{MinFree: 4000})
	d.set(func() { d.left = 2*memTableSize + 1000 + 50 })
	full := stock{total: 100, dead: 49, last: []lot{{[]byte("a"), []byte("b"), 100, 49}}}
	wantErr(t, "round", s.reclaimRound(full), errNoSpace)
	full.last[0].dead++
	must(t, s.reclaimRound(full))
}
