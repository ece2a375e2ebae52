package badger

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

// The bytes of one call are all there, also where they make the file grow, and a failure is seen.
func TestWriteDurably(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "frames"))
	must(t, err)
	var want []byte
	for _, size := range []int{1, 4096, 300_000, 100} {
		b := bytes.Repeat([]byte{byte(size)}, size)
		must(t, writeDurably(f, b, int64(len(want))))
		want = append(want, b...)
	}
	copy(want[4000:], "in the middle")
	must(t, writeDurably(f, []byte("in the middle"), 4000))
	got, err := os.ReadFile(f.Name())
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, or others, %v; want %d", len(got), err, len(want))
	}
	must(t, f.Close())
	if err := writeDurably(f, []byte("late"), 0); err == nil {
		t.Error("a closed file was written to")
	}
	f, err = os.Open(f.Name())
	must(t, err)
	defer f.Close()
	if err := writeDurably(f, []byte("late"), 0); err == nil {
		t.Error("a file was written to that is open for reading")
	}
}

// P2: a log that was written in single calls is replayed after a crash.
func TestLogInSingleCalls(t *testing.T) {
	o := Options{record: func(disk, string, *slog.Logger) recordFunc { return writeDurably }}
	s := reopenWith(t, t.TempDir(), o, osDisk{})
	for i := range 10 {
		mustCommit(t, s, insert(fmt.Sprintf("key-%d", i), "1"), put("last", fmt.Sprint(i)))
	}
	again := reopenWith(t, crashed(t, s.dir), Options{}, osDisk{})
	wantValue(t, again, "last", "9")
	wantValue(t, again, "key-0", "1")
}

// BenchmarkRecord is a frame of the log in both ways.
func BenchmarkRecord(b *testing.B) {
	for _, size := range []int{1 << 10, 16 << 10} {
		for name, record := range map[string]recordFunc{"two calls": osDisk{}.record, "one call": writeDurably} {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				l, err := createLog(b.TempDir(), 1, logSize, osDisk{})
				must(b, err)
				defer l.f.Close()
				frame, off := bytes.Repeat([]byte{1}, size), int64(logFrames)
				b.ReportAllocs()
				for b.Loop() {
					must(b, record(l.f, frame, off))
					if off += int64(size); off+int64(size) > logSize {
						off = logFrames
					}
				}
			})
		}
	}
}

// P4: the log of Badger's memory table is allocated before it is written.
func TestSpaceOfTheLogIsTaken(t *testing.T) {
	s := reopenWith(t, t.TempDir(), Options{}, osDisk{})
	for round := range 2 {
		s.checkSpace()
		logs, err := filepath.Glob(filepath.Join(s.lsm(), "*.mem"))
		must(t, err)
		if len(logs) == 0 {
			t.Fatal("no log")
		}
		for _, name := range logs {
			if got := blocks(t, name); got < memLogBytes {
				t.Errorf("round %d: %s has %d bytes of the disk, want %d", round, filepath.Base(name), got, memLogBytes)
			}
		}
		must(t, s.merge([]byte{userSpace}, []byte{afterUser})) // the next one
	}
}
