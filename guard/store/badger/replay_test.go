package badger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger/wal"
)

// frameHead is the size of a frame's header in the log.
const frameHead = 32

// crashedWith makes a store that crashed with n groups in its log, none of them in Badger's
// tables, and returns the offsets of their frames.
func crashedWith(t *testing.T, n int) (dir, file string, frames []int) {
	t.Helper()
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	for i := range n {
		mustCommit(t, s, insert(fmt.Sprintf("key-%d", i), "1"), put("last", fmt.Sprint(i)))
	}
	dir = crashed(t, s.dir)
	logs := logsIn(t, dir)
	if len(logs) != 1 {
		t.Fatalf("%d files of the log, want 1", len(logs))
	}
	return dir, logs[0], framesAt(t, logs[0])
}

func logsIn(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "wal", "*.wal"))
	must(t, err)
	return names
}

func framesAt(t *testing.T, name string) (at []int) {
	t.Helper()
	content, err := os.ReadFile(name)
	must(t, err)
	magic := []byte("agf1")
	for next := bytes.Index(content, magic); next >= 0; {
		at = append(at, next)
		length := int(binary.BigEndian.Uint32(content[next+24:]))
		if next += frameHead + (length+7)/8*8; !bytes.HasPrefix(content[next:], magic) {
			return append(at, next)
		}
	}
	return append(at, 4096)
}

// P2: what is only in the log is there after a crash.
func TestLogIsReplayed(t *testing.T) {
	dir, _, _ := crashedWith(t, 10)
	for range 2 {
		s := reopenWith(t, dir, Options{}, osDisk{})
		wantValue(t, s, "last", "9")
		wantValue(t, s, "key-0", "1")
		dir = crashed(t, s.dir)
	}
}

// A check is not in the log: a replay leaves its entry as it is.
func TestChecksAreNotReplayed(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	v := mustCommit(t, s, put("checked", "1"))
	mustCommit(t, s, put("a", "1"), store.Write{Key: []byte("checked"), If: store.VersionIs(v), Check: true},
		store.Write{Key: []byte("absent"), If: store.Absent(), Check: true})
	dir := crashed(t, s.dir)
	file := logsIn(t, dir)[0]
	content, err := os.ReadFile(file)
	must(t, err)
	last := content[framesAt(t, file)[1]:]
	if bytes.Contains(last, []byte("checked")) || bytes.Contains(last, []byte("absent")) {
		t.Errorf("the frame is %.200q", last)
	}
	s = reopenWith(t, dir, Options{}, osDisk{})
	if e, err := s.Get(t.Context(), []byte("checked")); err != nil || e.Version != v || string(e.Value) != "1" {
		t.Errorf("after a crash: %q, version %d, %v; want version %d", e.Value, e.Version, err, v)
	}
	wantValue(t, s, "a", "1")
	if _, err := s.Get(t.Context(), []byte("absent")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("what was checked to be absent: %v", err)
	}
}

// The last frame may be torn, since it may not have been acknowledged.
func TestTornFrame(t *testing.T) {
	const n = 5
	origin, file, frames := crashedWith(t, n)
	last, end := frames[n-1], frames[n]
	tear := map[string]func(b []byte){
		"not begun":     func(b []byte) { clear(b[last:end]) },
		"header only":   func(b []byte) { clear(b[last+frameHead : end]) },
		"without magic": func(b []byte) { clear(b[last : last+4]) },
		"without end":   func(b []byte) { clear(b[end-12 : end]) },
		"absurd length": func(b []byte) { copy(b[last+24:], "\xff\xff\xff\xff") },
		"flipped":       func(b []byte) { b[last+frameHead+3] ^= 1 },
	}
	for name, do := range tear {
		t.Run(name, func(t *testing.T) {
			dir := crashed(t, origin)
			change(t, filepath.Join(dir, "wal", filepath.Base(file)), do)
			for range 2 { // and once more over what the first opening made of it
				s := reopenWith(t, dir, Options{}, osDisk{})
				wantValue(t, s, "last", fmt.Sprint(n-2))
				_, err := s.Get(t.Context(), fmt.Appendf(nil, "key-%d", n-1))
				wantErr(t, "the torn frame", err, store.ErrNotFound)
				dir = crashed(t, dir)
			}
		})
	}
}

func change(t *testing.T, file string, do func(b []byte)) {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, err)
	do(b)
	must(t, os.WriteFile(file, b, 0o600))
}

// P1: a damaged frame with others after it was acknowledged, so the store does not open.
func TestDamagedFrame(t *testing.T) {
	origin, file, frames := crashedWith(t, 5)
	for name, at := range map[string]int{
		"magic": frames[0], "sum": frames[1] + 5, "number": frames[2] + 15, "length": frames[1] + 27,
		"changes": frames[3] + frameHead + 20, "header of the file": 20, "size of the file": 30,
	} {
		t.Run(name, func(t *testing.T) {
			dir := crashed(t, origin)
			flip(t, filepath.Join(dir, "wal", filepath.Base(file)), at)
			refused(t, dir)
		})
	}
	t.Run("one of them missing", func(t *testing.T) {
		dir := crashed(t, origin)
		change(t, filepath.Join(dir, "wal", filepath.Base(file)), func(b []byte) {
			n := copy(b[frames[1]:], b[frames[2]:frames[5]])
			clear(b[frames[1]+n : frames[5]])
		})
		refused(t, dir)
	})
	t.Run("cut", func(t *testing.T) {
		dir := crashed(t, origin)
		must(t, os.Truncate(filepath.Join(dir, "wal", filepath.Base(file)), int64(frames[3])))
		refused(t, dir)
	})
}

// P1: a store whose log is missing does not open.
func TestLostLog(t *testing.T) {
	origin, file, _ := crashedWith(t, 5)
	for name, lose := range map[string]func(dir string) error{
		"directory": func(dir string) error { return os.RemoveAll(filepath.Join(dir, "wal")) },
		"file":      func(dir string) error { return os.Remove(filepath.Join(dir, "wal", filepath.Base(file))) },
		"contents":  func(dir string) error { return os.Truncate(filepath.Join(dir, "wal", filepath.Base(file)), 0) },
		"number": func(dir string) error {
			return os.Rename(filepath.Join(dir, "wal", filepath.Base(file)), filepath.Join(dir, "wal", "000000000077.wal"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := crashed(t, origin)
			must(t, lose(dir))
			refused(t, dir)
		})
	}
	t.Run("after an ordinary end", func(t *testing.T) { // which leaves it empty
		s := reopenWith(t, crashed(t, origin), Options{}, osDisk{})
		dir := s.dir
		must(t, s.Close())
		if left := logsIn(t, dir); len(left) != 0 {
			t.Errorf("left behind: %q", left)
		}
		must(t, os.RemoveAll(filepath.Join(dir, "wal")))
		wantValue(t, reopenWith(t, dir, Options{}, osDisk{}), "last", "4")
	})
}

// rotated makes a store whose log has at least three files, with n acknowledged values.
func rotated(t *testing.T, d disk, o Options) (s *Store, n int) {
	t.Helper()
	s = reopenWith(t, t.TempDir(), o, d)
	value := strings.Repeat("v", 60_000)
	for held := int64(0); held < 9<<20; n++ {
		mustCommit(t, s, put(fmt.Sprintf("large-%04d", n), value), put("count", fmt.Sprint(n)))
		_, held, _ = s.log.Droppable(0)
		if s.manifest.log().First > 1 {
			held = 9 << 20
		}
	}
	return s, n
}

// The loss or truncation of any file of the log is noticed.
func TestLostFileOfTheLog(t *testing.T) {
	s, n := rotated(t, osDisk{}, Options{})
	origin := crashed(t, s.dir)
	wantValue(t, reopenWith(t, crashed(t, origin), Options{}, osDisk{}), "count", fmt.Sprint(n-1))
	for i, name := range logsIn(t, origin) {
		t.Run(fmt.Sprint("file ", i), func(t *testing.T) {
			dir := crashed(t, origin)
			must(t, os.Remove(filepath.Join(dir, "wal", filepath.Base(name))))
			refused(t, dir)
		})
	}
	t.Run("emptied in the middle", func(t *testing.T) {
		dir := crashed(t, origin)
		change(t, logsIn(t, dir)[1], func(b []byte) { clear(b[4096:]) })
		refused(t, dir)
	})
}

// Log files are dropped when Badger's tables have their contents, and are reused.
func TestLogIsDropped(t *testing.T) {
	m := newManual()
	s, n := rotated(t, osDisk{}, Options{Now: m.Now})
	mustCommit(t, s, m.bulk("bulk", 10_000, time.Hour))
	must(t, s.drain(t.Context()))
	signal(s.applier.flush)
	deadline := time.Now().Add(30 * time.Second)
	for s.manifest.log().First <= 1 {
		if time.Now().After(deadline) {
			t.Fatal("nothing was dropped")
		}
		mustCommit(t, s, put("more", "1"))
	}
	dir := crashed(t, s.dir)
	s = reopenWith(t, dir, Options{Now: m.Now}, osDisk{})
	wantValue(t, s, "count", fmt.Sprint(n-1))
	wantValue(t, s, "large-0000", strings.Repeat("v", 60_000))
	wantValue(t, s, "bulk", string(m.bulk("bulk", 10_000, 0).Value))

	// Only the tables have what was dropped.
	t.Run("tables of old", func(t *testing.T) {
		young, _, _ := crashedWith(t, 1)
		bad := crashed(t, dir)
		must(t, os.RemoveAll(filepath.Join(bad, "lsm")))
		must(t, os.CopyFS(filepath.Join(bad, "lsm"), os.DirFS(filepath.Join(young, "lsm"))))
		_, err := Open(bad, Options{})
		wantErr(t, "open", err, errCorrupt)
	})
}

// The changes of a frame are read as they were written, and an unknown form is refused.
func TestChanges(t *testing.T) {
	type pair struct{ key, value string }
	want := []pair{{"kput", strings.Repeat("x", headerSize)}, {"kgone", ""}, {"kmore", strings.Repeat("y", 1000)}}
	var b []byte
	for _, c := range want {
		value := []byte(c.value)
		if c.value == "" {
			value = nil
		}
		b = appendChange(b, c.key, value)
	}
	var got []pair
	must(t, eachChange(wal.Frame{Contents: b}, func(key, value []byte) {
		got = append(got, pair{string(key), string(value)})
	}))
	if !slices.Equal(got, want) {
		t.Errorf("changes %q, want %q", got, want)
	}
	for name, bad := range map[string][]byte{
		"cut": b[:len(b)-1], "of another kind": append([]byte{9}, b[1:]...), "short value": appendChange(nil, "k", []byte("v")),
	} {
		wantErr(t, name, eachChange(wal.Frame{Contents: bad}, func(_, _ []byte) {}), errChange)
	}
}

// P2: after a crash or a loss of power before or after any step, what was acknowledged is
// there, the rest is there whole or not at all, and nothing else is.
func TestCrashAtEveryPoint(t *testing.T) {
	m := newManual()
	dir := t.TempDir()
	const keys = 2
	body := func(i int) store.Write {
		size := 700
		if i == 2 {
			size = maxInline + 1
		}
		return m.bulk(fmt.Sprintf("body-%d-", i), size, time.Hour)
	}
	record := func(i int) store.Write { // goes to a segment from the applier alone
		return m.expiring(fmt.Sprintf("record-%d-", i%keys), 400+100*i, 2*time.Hour)
	}
	type moment struct {
		what     string
		answered int
		dirs     []string
	}
	var moments []moment
	answered := 0
	var d *imagingDisk
	d = newImaging(func(what string) {
		if answered < 0 {
			return
		}
		moments = append(moments, moment{what, answered, []string{crashed(t, dir), d.powerless(t, dir)}})
	})
	s, err := openWith(dir, Options{Now: m.Now, GroupWait: -1, keptSize: 600}, d)
	must(t, err)
	for i := range keys * 2 {
		mustCommit(t, s, body(i), record(i), kept(fmt.Sprintf("kept-%d-", i%keys), 500+i), put(fmt.Sprint("key-", i%keys), fmt.Sprint(i)), put(fmt.Sprint("passing-", i), ""),
			remove(fmt.Sprint("passing-", i-1)))
		d.mu.Lock()
		answered = i + 1
		d.mu.Unlock()
		if i%2 == 1 {
			must(t, s.drain(t.Context()))
		}
	}
	must(t, s.Close())
	d.mu.Lock()
	answered = -1
	d.mu.Unlock()
	if len(moments) < 25 {
		t.Errorf("only %d moments", len(moments))
	}
	for i, m2 := range moments {
		for j, image := range m2.dirs {
			again, err := openWith(image, Options{Now: m.Now}, osDisk{})
			what := fmt.Sprintf("moment %d (%s, answered %d, power %v)", i, m2.what, m2.answered, j == 1)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			last := -1
			for i := range keys * 2 {
				e, err := again.Get(t.Context(), body(i).Key)
				switch {
				case errors.Is(err, store.ErrNotFound):
				case err != nil || !slices.Equal(e.Value, body(i).Value):
					t.Errorf("%s: body %d: %v", what, i, err)
				default:
					last = i
				}
			}
			if last+1 < m2.answered || last > m2.answered {
				t.Errorf("%s: the last commit is %d", what, last)
			}
			for k := range keys {
				want := -1
				for i := k; i <= last; i += keys {
					want = i
				}
				if want >= 0 {
					wantValue(t, again, fmt.Sprint("key-", k), fmt.Sprint(want))
					wantValue(t, again, string(record(want).Key), string(record(want).Value))
					entry := kept(fmt.Sprintf("kept-%d-", k), 500+want)
					wantValue(t, again, string(entry.Key), string(entry.Value))
				}
			}
			var passing []string
			for e, err := range again.Scan(t.Context(), store.Prefix([]byte("passing-"))) {
				must(t, err)
				passing = append(passing, string(e.Key))
			}
			if last >= 0 && !slices.Equal(passing, []string{fmt.Sprint("passing-", last)}) {
				t.Errorf("%s: %q are there", what, passing)
			}
			must(t, again.Close())
			must(t, os.RemoveAll(image))
		}
	}
}

// A loss of power while the log is dropped: tables may point to bulk values in unsynced
// files, which the log keeps until they are synced.
func TestPowerLossAroundADrop(t *testing.T) {
	m := newManual()
	var images []string
	dir := ""
	var d *imagingDisk
	d = newImaging(func(what string) {
		if dir != "" && strings.HasSuffix(what, "Dir lsm") || what == "flushed" {
			images = append(images, d.powerless(t, dir))
		}
	})
	s, n := rotated(t, d, Options{Now: m.Now})
	small, record := m.bulk("small", 10_000, time.Hour), m.expiring("record", 10_000, 3*time.Hour)
	mustCommit(t, s, small, record, kept("kept", 10_000), put("names", "small"))
	must(t, s.drain(t.Context()))
	d.mu.Lock()
	dir = s.dir
	d.mu.Unlock()
	have := s.durable.Load()
	signal(s.applier.flush)
	deadline := time.Now().Add(30 * time.Second)
	for s.inTables() < have || s.manifest.log().First <= 1 {
		if s.inTables() >= have {
			d.mu.Lock()
			taken := len(images)
			d.mu.Unlock()
			if taken == 0 {
				d.step("flushed")
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing was dropped")
		}
		mustCommit(t, s, put("more", "1"))
	}
	d.step("flushed")
	d.mu.Lock()
	taken := slices.Clone(images)
	dir = ""
	d.mu.Unlock()
	for i, image := range taken {
		again := reopenWith(t, image, Options{Now: m.Now}, osDisk{})
		wantValue(t, again, "names", "small")
		wantValue(t, again, "small", string(small.Value))
		wantValue(t, again, "record", string(record.Value))
		wantValue(t, again, "kept", string(kept("kept", 10_000).Value))
		wantValue(t, again, "count", fmt.Sprint(n-1))
		if t.Failed() {
			t.Fatalf("image %d of %d", i, len(taken))
		}
		must(t, again.Close())
	}
}

// Our log and the tables have all that Badger's logs hold. Whatever a crash leaves of
// those, nothing is lost and the store opens.
func TestBadgersLogsDoNotMatter(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	const n = 10
	for i := range n {
		mustCommit(t, s, insert(fmt.Sprint("key-", i), "1"))
	}
	must(t, s.drain(t.Context()))
	mustCommit(t, s, put("last", "1"))
	origin := image(t, s.dir)
	for name, damage := range map[string]func(file string){
		"as they were": func(string) {},
		"missing":      func(file string) { must(t, os.Remove(file)) },
		"empty":        func(file string) { must(t, os.Truncate(file, 0)) },
		"cut":          func(file string) { must(t, os.Truncate(file, 30)) },
		"zeros":        func(file string) { change(t, file, func(b []byte) { clear(b) }) },
		"garbage":      func(file string) { change(t, file, func(b []byte) { copy(b, strings.Repeat("garbage!", 1000)) }) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := image(t, origin)
			for _, pattern := range []string{"*.mem", "*.vlog"} {
				files, err := filepath.Glob(filepath.Join(dir, "lsm", pattern))
				must(t, err)
				if len(files) == 0 {
					t.Fatalf("no %s", pattern)
				}
				for _, file := range files {
					damage(file)
				}
			}
			again := reopenWith(t, dir, Options{}, osDisk{})
			for i := range n {
				wantValue(t, again, fmt.Sprint("key-", i), "1")
			}
			wantValue(t, again, "last", "1")
		})
	}
}

// The last frame is written again at opening: its sync may have failed, which the kernel
// reports only once.
func TestLastFrameIsConfirmed(t *testing.T) {
	dir, _, _ := crashedWith(t, 3)
	d := &faultyDisk{left: 1 << 40, onCommit: func() error { return errDisk }}
	if _, err := openWith(dir, Options{}, d); !errors.Is(err, errDisk) {
		t.Fatalf("open: %v; want the error of the sync", err)
	}
	wantValue(t, reopenWith(t, dir, Options{}, osDisk{}), "last", "2")
}

// A log that ends at the end of a full layer, and one much longer than a layer.
func TestReplayOfManyLayers(t *testing.T) {
	for _, size := range []int{maxLayer / 64, maxLayer/64 - headerSize - 100, 60_000} {
		s, d := newFaulty(t, Options{})
		_, release := holdApplier(t, d)
		value := strings.Repeat("v", min(size, store.MaxValue))
		var batch []store.Write
		for i := range 16 {
			batch = append(batch, put(fmt.Sprintf("%02d", i), value))
		}
		for range 4 {
			mustCommit(t, s, batch...)
		}
		mustCommit(t, s, put("last", "1"))
		dir := crashed(t, s.dir)
		release()
		for range 2 {
			again := reopenWith(t, dir, Options{}, osDisk{})
			wantValue(t, again, "last", "1")
			wantValue(t, again, "15", value)
			dir = crashed(t, dir)
		}
	}
}

// P2: after a failed sync of a segment the log is trusted, and not what can be read of the segment.
// Its values are written again, in a bounded number of files at a time.
func TestSegmentsAreWrittenAgainAfterAFailedSync(t *testing.T) {
	m := newManual()
	d := newForgetful()
	o := Options{Now: m.Now, VerifyEvery: -1, keptSize: 20_000}
	s := reopenWith(t, t.TempDir(), o, d)
	var many []store.Write
	for i := range 5 * maxHandles {
		many = append(many, m.expiring(fmt.Sprintf("key-%03d", i), 300+i, time.Duration(1+i%(3*maxHandles))*time.Hour),
			kept(fmt.Sprintf("kept-%03d", i), 500))
	}
	for layer := range slices.Chunk(many, 40) {
		mustCommit(t, s, layer...)
		must(t, s.drain(t.Context()))
	}
	d.mu.Lock()
	d.failing = true
	d.mu.Unlock()
	mustCommit(t, s, put("last", "1"), m.expiring("last of the first", 300, time.Hour))
	wantErr(t, "close", s.Close(), errDisk)

	d.failing, d.most, d.cached = false, 0, make(map[string][]written)
	clear(d.durable) // what was synced before, too: the log has all of it
	s = reopenWith(t, s.dir, o, d)
	if limit := maxHandles/2 + 1; d.most > limit {
		t.Errorf("%d segments with unsynced writes during recovery, want at most %d", d.most, limit)
	}
	for _, file := range segments(t, s) {
		before := slices.Clone(d.durable[file])
		content, err := os.ReadFile(file)
		must(t, err)
		if !bytes.Equal(before, content) {
			t.Errorf("%s: %d of %d bytes are durable, or others", filepath.Base(file), len(before), len(content))
		}
	}
	must(t, s.Close())
	d.losePower(t, s.dir)
	s = reopenWith(t, s.dir, o, osDisk{})
	for _, w := range many {
		wantValue(t, s, string(w.Key), string(w.Value))
	}
	wantValue(t, s, "last of the first", string(m.expiring("last of the first", 300, 0).Value))
}
