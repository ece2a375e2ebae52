package badger

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// crashedWith makes a store that crashed with n groups in its log, none of which is in
// Badger's tables, and returns where each begins in its file.
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
	names, err := filepath.Glob(filepath.Join(dir, "wal", "*"+logSuffix))
	must(t, err)
	return names
}

func framesAt(t *testing.T, name string) (at []int) {
	t.Helper()
	number, _ := logNumber(filepath.Base(name))
	content, seed, err := readLog(filepath.Dir(name), number)
	must(t, err)
	end, err := framesIn(content, seed, func(offset int, _ frame) error {
		at = append(at, offset)
		return nil
	})
	must(t, err)
	return append(at, end)
}

// P2: what stands in the log alone is there after a crash.
func TestLogIsReplayed(t *testing.T) {
	dir, _, _ := crashedWith(t, 10)
	for range 2 {
		s := reopenWith(t, dir, Options{}, osDisk{})
		wantValue(t, s, "last", "9")
		wantValue(t, s, "key-0", "1")
		dir = crashed(t, s.dir)
	}
}

// The last frame may be torn, for it may not have been acknowledged.
func TestTornFrame(t *testing.T) {
	const n = 5
	origin, file, frames := crashedWith(t, n)
	last, end := frames[n-1], frames[n]
	tear := map[string]func(b []byte){
		"not begun":     func(b []byte) { clear(b[last:end]) },
		"header only":   func(b []byte) { clear(b[last+frameHeader : end]) },
		"without magic": func(b []byte) { clear(b[last : last+4]) },
		"without end":   func(b []byte) { clear(b[end-frameAlign-4 : end]) },
		"absurd length": func(b []byte) { copy(b[last+24:], "\xff\xff\xff\xff") },
		"flipped":       func(b []byte) { b[last+frameHeader+3] ^= 1 },
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

// P1: a frame that is damaged before others was acknowledged.
func TestDamagedFrame(t *testing.T) {
	origin, file, frames := crashedWith(t, 5)
	for name, at := range map[string]int{
		"magic": frames[0], "sum": frames[1] + 5, "number": frames[2] + 15, "length": frames[1] + 27,
		"changes": frames[3] + frameHeader + 20, "header of the file": 20, "size of the file": 30,
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

// P1: a log that is not there has forgotten what only it knew.
func TestLostLog(t *testing.T) {
	origin, file, _ := crashedWith(t, 5)
	for name, lose := range map[string]func(dir string) error{
		"directory": func(dir string) error { return os.RemoveAll(filepath.Join(dir, "wal")) },
		"file":      func(dir string) error { return os.Remove(filepath.Join(dir, "wal", filepath.Base(file))) },
		"contents":  func(dir string) error { return os.Truncate(filepath.Join(dir, "wal", filepath.Base(file)), 0) },
		"number": func(dir string) error {
			return os.Rename(filepath.Join(dir, "wal", filepath.Base(file)), filepath.Join(dir, "wal", logName(77)))
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

// rotated makes a store whose log has at least three files, and acknowledges n values.
func rotated(t *testing.T, d disk, o Options) (s *Store, n int) {
	t.Helper()
	s = reopenWith(t, t.TempDir(), o, d)
	value := strings.Repeat("v", 60_000)
	for held := int64(0); held < firstLogSize+logSize; n++ {
		mustCommit(t, s, put(fmt.Sprintf("large-%04d", n), value), put("count", fmt.Sprint(n)))
		s.log.mu.Lock()
		held = 0
		for _, f := range s.log.files {
			if f.full {
				held += f.size
			}
		}
		if s.log.files[0].number > 1 {
			held = firstLogSize + logSize
		}
		s.log.mu.Unlock()
	}
	return s, n
}

// Whatever file of several is lost or cut, it is noticed.
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
		change(t, logsIn(t, dir)[1], func(b []byte) { clear(b[logFrames:]) })
		refused(t, dir)
	})
}

// The log is dropped when Badger's tables have it, and the files are used again.
func TestLogIsDropped(t *testing.T) {
	m := newManual()
	s, n := rotated(t, osDisk{}, Options{Now: m.Now})
	mustCommit(t, s, m.bulk("bulk", 10_000, time.Hour))
	must(t, s.drain(t.Context()))
	signal(s.applier.flush)
	deadline := time.Now().Add(30 * time.Second)
	for s.seal.log().First <= 1 {
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

	// Its tables are all there is of what was dropped.
	t.Run("tables of old", func(t *testing.T) {
		young, _, _ := crashedWith(t, 1)
		bad := crashed(t, dir)
		must(t, os.RemoveAll(filepath.Join(bad, "lsm")))
		must(t, os.CopyFS(filepath.Join(bad, "lsm"), os.DirFS(filepath.Join(young, "lsm"))))
		_, err := Open(bad, Options{})
		wantErr(t, "open", err, ErrCorrupt)
	})
}

// Frames of an earlier use of a file do not pass for new ones.
func TestReusedFile(t *testing.T) {
	dir := t.TempDir()
	f, err := createLog(dir, 1, firstLogSize, osDisk{})
	must(t, err)
	write := func(l *logFile, at int64, seq uint64) int64 {
		b := appendChange(beginFrame(nil), []byte("kkey"), make([]byte, headerSize+100))
		b = endFrame(b, l.seed, seq, store.Version(seq))
		must(t, osDisk{}.record(l.f, b, at))
		return at + int64(len(b))
	}
	at := int64(logFrames)
	for seq := range uint64(5) {
		at = write(f, at, seq+1)
	}
	found, err := survey(dir, logRange{First: 1, Last: 1})
	if err != nil || found.seq != 5 {
		t.Fatalf("%+v, %v; want 5 frames", found, err)
	}
	f, err = f.again(2, osDisk{})
	must(t, err)
	defer f.f.Close()
	if found, err = survey(dir, logRange{First: 2, Last: 2, Settled: 5}); err != nil || found.seq != 5 {
		t.Errorf("%+v, %v; want none but the five that are settled", found, err)
	}
	write(f, logFrames, 6) // as long as the one that was there, so that the next fits on to it
	if found, err = survey(dir, logRange{First: 2, Last: 2, Settled: 5}); err != nil || found.seq != 6 {
		t.Errorf("%+v, %v; want one more", found, err)
	}
	names, err := os.ReadDir(dir)
	must(t, err)
	if len(names) != 1 || names[0].Name() != logName(2) {
		t.Errorf("files %v, want the one under its new number", names)
	}
}

func TestFrames(t *testing.T) {
	type pair struct{ key, value string }
	want := []pair{{"kput", strings.Repeat("x", headerSize)}, {"kgone", ""}, {"kmore", strings.Repeat("y", 1000)}}
	b := beginFrame(nil)
	for _, c := range want {
		value := []byte(c.value)
		if c.value == "" {
			value = nil
		}
		b = appendChange(b, []byte(c.key), value)
	}
	b = endFrame(b, 7, 3, 99)
	f, ok := readFrame(append(slices.Clone(b), 1, 2, 3), 7)
	if !ok || f.seq != 3 || f.version != 99 || f.size != len(b) || len(b)%frameAlign != 0 {
		t.Fatalf("%+v, %v", f, ok)
	}
	var got []pair
	must(t, f.each(func(key, value []byte) {
		got = append(got, pair{string(key), string(value)})
	}))
	if !slices.Equal(got, want) {
		t.Errorf("changes %q, want %q", got, want)
	}
	if _, ok := readFrame(b, 8); ok {
		t.Error("passes under another seed")
	}
	for i := range b {
		bad := slices.Clone(b)
		bad[i] ^= 0x10
		// The padding is not covered, nor need it be.
		if _, ok := readFrame(bad, 7); ok && i < frameHeader+len(f.changes) {
			t.Errorf("byte %d flipped: not found", i)
		}
		if _, ok := readFrame(b[:i], 7); ok {
			t.Errorf("cut to %d bytes: not found", i)
		}
	}
}
