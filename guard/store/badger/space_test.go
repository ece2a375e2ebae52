package badger

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Sizes are those of the file system, by part, and Stats touches no file.
func TestSpace(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	fill{records: 200, key: time.Hour, result: time.Hour}.into(t, s)
	must(t, s.drain(t.Context())) // to where it stays
	// The file system allocates blocks when it likes: compare with a measurement between
	// two that agree.
	var got Space
	for deadline := time.Now().Add(time.Minute); ; {
		all := blocks(t, s.dir)
		got = s.measure()
		if blocks(t, s.dir) == all && got.Total <= all && got.Total >= all-1<<16 { // directories themselves do not count
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, want %d", got, all)
		}
	}
	if got.Bodies < 200*fillBulk || got.LSM < 200*fillValue || got.Log == 0 || got.Total != got.LSM+got.Bodies+got.Log {
		t.Errorf("%+v", got)
	}
	fill{from: 200, records: 200, key: time.Hour, result: time.Hour}.into(t, s)
	if s.Stats().Space != got {
		t.Error("the sizes have changed without a measurement")
	}
}

// A store that has reached MaxSize begins nothing new (P4), completes what runs (P6), logs
// that once, and begins again when it is smaller.
func TestMaxSize(t *testing.T) {
	var log bytes.Buffer
	begun, later := time.Now(), atomic.Int64{}
	s := reopenWith(t, t.TempDir(), Options{
		BulkWindow: time.Minute, Now: func() time.Time { return begun.Add(time.Duration(later.Load())) },
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	}, osDisk{})
	running := mustCommit(t, s, insert("a", "running"))
	body := func(key string) store.Write {
		return store.Write{Key: []byte(key), Value: make([]byte, 1<<20), Bulk: true, Expires: begun.Add(time.Minute)}
	}
	s.SetLimits(0, s.measure().Total+4<<20)
	written := 0
	for {
		s.checkSpace()
		_, err := s.Commit(t.Context(), body(strings.Repeat("b", written+1)))
		if errors.Is(err, errQuota) {
			break
		}
		must(t, err)
		if written++; written > 8 {
			t.Fatal("the store grows without a bound")
		}
	}
	if written < 3 {
		t.Errorf("%d MiB fit into 4", written)
	}
	_, err := s.Commit(t.Context(), insert("c", "1"))
	wantErr(t, "a claim", err, errQuota)
	wantErr(t, "a claim", err, errFull)
	if got := s.Stats(); got.Room != RoomLow || got.Full != 2 || got.MaxSize == 0 {
		t.Errorf("%+v", got)
	}
	checked := store.Write{Key: []byte("a"), If: store.VersionIs(running), Check: true}
	_, err = s.Commit(t.Context(), checked, insert("c", "1"))
	wantErr(t, "a claim behind a check", err, errQuota)
	mustCommit(t, s, store.Write{Key: []byte("a"), Value: []byte("done"), If: store.VersionIs(running)})
	wantValue(t, s, "a", "done")

	later.Store(int64(time.Hour))
	s.sweep()
	s.measure()
	s.checkSpace()
	mustCommit(t, s, insert("c", "1"))
	if got := s.Stats(); got.Room != RoomEnough {
		t.Errorf("%+v", got)
	}
	s.SetLimits(0, 1)
	_, err = s.Commit(t.Context(), insert("d", "1"))
	wantErr(t, "a claim under a smaller limit", err, errQuota)
	s.SetLimits(0, 0)
	mustCommit(t, s, insert("d", "1"))
	for text, n := range map[string]int{"store has reached its largest size": 2, "store is below its largest size again": 1} {
		if got := strings.Count(log.String(), text); got != n {
			t.Errorf("%q stands %d times in the log, want %d:\n%s", text, got, n, log.String())
		}
	}
}

// A store that closed itself reports that, and why, until it is opened anew.
func TestHealth(t *testing.T) {
	s, d := newFaulty(t, Options{})
	if got := s.Stats(); !got.Healthy || s.cause() != nil {
		t.Fatalf("%+v, %v", got, s.cause())
	}
	d.set(func() { d.onCommit = func() error { return errDisk } })
	_, err := s.Commit(t.Context(), put("a", "1"))
	wantErr(t, "commit", err, store.ErrUnknown)
	d.set(func() { d.onCommit = nil }) // the disk is well again, and nobody asks it
	for range 3 {
		_, err = s.Commit(t.Context(), put("a", "1"))
		wantErr(t, "commit after it", err, store.ErrUnhealthy)
	}
	if got := s.Stats(); got.Healthy {
		t.Errorf("%+v", got)
	}
	wantErr(t, "health", s.cause(), errDisk)
	_ = s.Close()
	again := reopenWith(t, s.dir, Options{}, osDisk{})
	mustCommit(t, again, put("a", "1"))
	if got := again.Stats(); !got.Healthy || again.cause() != nil {
		t.Errorf("%+v, %v", got, again.cause())
	}
}

// expiredFor is the time until the space of an entry with a minute to live is reclaimed: an
// hour's grace, a bucket of a quarter of an hour, and a tick of a minute.
const expiredFor = grace + 25*time.Minute

// lazyDisk does not sync bulk values: no test of space needs that.
type lazyDisk struct{ osDisk }

func (lazyDisk) sync(*os.File) error { return nil }

// emptyPools empties all pools: a channel of one bubble in another one ends the process. It
// takes two collections.
func emptyPools() {
	runtime.GC()
	runtime.GC()
}

// In a bubble, since Badger drops by the machine's clock.
func bubbleStore(t *testing.T, dir string) *Store {
	t.Helper()
	// Without GroupWait, which reads the clock in a loop.
	s, err := openWith(dir, Options{GroupWait: -1, BulkWindow: time.Minute}, lazyDisk{})
	must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(s.cause(), s.Close()); err != nil {
			t.Error(err)
		}
	})
	return s
}

// emptyStore is the size of an empty store.
func emptyStore(t *testing.T) int64 {
	t.Helper()
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	s.checkSpace()
	size := blocks(t, s.dir)
	must(t, s.Close())
	return size
}

// Section "Space": after 100,000 expired results the directory is at most twice what
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

// Expired entries in tables of the last level are reclaimed too, which Flatten alone does
// not do.
func TestExpiryInTheLastLevel(t *testing.T) {
	dir := t.TempDir()
	emptyPools()
	defer emptyPools()
	synctest.Test(t, func(t *testing.T) {
		s := bubbleStore(t, dir)
		fill{records: 30_000, settled: true, key: time.Second, result: time.Second}.into(t, s)
		must(t, s.writeFiller([]byte{userSpace}, []byte{userSpace})) // so that all is in tables
		must(t, s.awaitFlush(0))
		must(t, s.db.Flatten(1))
		must(t, s.verifyNewTables())
		before, err := s.lsmStats()
		must(t, err)
		if before.dead > before.total/100 || before.upper != 0 || before.total < 20_000*fillValue {
			t.Fatalf("%+v before, want all in one level and alive", before)
		}
		time.Sleep(expiredFor)
		after, err := s.lsmStats()
		must(t, err)
		if after.total > before.total/100 {
			t.Errorf("%d bytes of tables are left of %d", after.total, before.total)
		}
	})
}

// Section "Space": of an execution whose result has expired, the record and three index
// entries remain.
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
		if records := int64(records * (fillValue + 64)); got.Bodies < records/2 || got.Bodies > records {
			t.Errorf("%d bytes of segments, want those of the records, %d at most, and of no result", got.Bodies, records)
		}
		now, err := s.lsmStats()
		must(t, err)
		t.Logf("%d bytes of tables for each key, %d of segments", now.total/records, got.Bodies/records)
		if now.total > records*600 {
			t.Errorf("%d bytes of tables for %d keys", now.total, records)
		}
	})
}

// Filler entries are never visible, with or without an entry of the same key, nor after a
// crash.
func TestFillersAreNeverSeen(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	version := mustCommit(t, s, put("a", "1"), put("c", "1"))
	writeFillers := func(s *Store) {
		t.Helper()
		must(t, s.writeFiller(userKey([]byte("a")), userKey([]byte("b"))))
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
	writeFillers(s)
	must(t, s.merge(userKey([]byte("a")), userKey([]byte("b"))))
	writeFillers(s)
	again := reopenWith(t, image(t, s.dir), Options{}, osDisk{})
	writeFillers(again)
	if v := mustCommit(t, again, insert("b", "2")); v <= version {
		t.Errorf("version %d after %d", v, version)
	}
	err := again.writeFiller(userKey([]byte("a")), userKey([]byte("b")))
	must(t, err)
	wantValue(t, again, "b", "2")
}

// Commits during a compaction succeed.
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
		k, err := s.lsmStats()
		must(t, err)
		if k.last == nil {
			k.last = []tableRange{{left: []byte{userSpace}, right: []byte{afterUser}}}
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
		k := lsmStats{dead: row.dead, total: row.total}
		if k.worthCompacting(false, false) != row.pays || k.worthCompacting(true, true) != row.short || k.worthCompacting(false, true) != row.busy {
			t.Errorf("%d dead of %d: %v, short %v, busy %v", row.dead, row.total,
				k.worthCompacting(false, false), k.worthCompacting(true, true), k.worthCompacting(false, true))
		}
	}
}

func TestStretchIsWhereMostIsDead(t *testing.T) {
	k := lsmStats{last: []tableRange{
		{[]byte("a"), []byte("b"), 100, 10}, {[]byte("c"), []byte("d"), 100, 90},
		{[]byte("e"), []byte("f"), 100, 80}, {[]byte("g"), []byte("h"), 300, 100},
	}}
	for most, want := range map[int64]string{50: "g-h", 100: "g-h", 200: "c-f", 400: "a-f", 1000: "a-h"} {
		l := k.mostDead(most)
		if got := string(l.left) + "-" + string(l.right); got != want {
			t.Errorf("up to %d: %s, want %s", most, got, want)
		}
	}
}

// No compaction begins if the disk has no space for what lives.
func TestReclaimNeedsSpace(t *testing.T) {
	s, d := newFaulty(t, Options{MinFree: 4000})
	d.set(func() { d.left = 2*memTableSize + 1000 + 50 })
	full := lsmStats{total: 100, dead: 49, last: []tableRange{{[]byte("a"), []byte("b"), 100, 49}}}
	wantErr(t, "round", s.reclaimRound(full), errNoSpace)
	full.last[0].dead++
	must(t, s.reclaimRound(full))
}
