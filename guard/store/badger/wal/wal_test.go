package wal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
)

// realDisk is the file system.
func realDisk() Disk {
	write := func(f *os.File, b []byte, off int64) error {
		_, err := f.WriteAt(b, off)
		return err
	}
	return Disk{
		Record: func(f *os.File, frame []byte, off int64) error {
			return errors.Join(write(f, frame, off), f.Sync())
		},
		Write: write, Sync: (*os.File).Sync, SyncDir: func(string) error { return nil },
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func contents(b []byte) []byte { return append(BeginFrame(nil), b...) }

func accept(Frame) error { return nil }

// Frames of an earlier use of a file are not taken for new ones.
func TestReusedFile(t *testing.T) {
	dir, d := t.TempDir(), realDisk()
	f, err := create(dir, 1, firstSize, d)
	must(t, err)
	write := func(l *file, at int64, seq uint64) int64 {
		b := endFrame(contents(make([]byte, 100)), l.seed, seq, 0)
		must(t, d.Record(l.f, b, at))
		return at + int64(len(b))
	}
	at := int64(firstFrame)
	for seq := range uint64(5) {
		at = write(f, at, seq+1)
	}
	found, err := Read(dir, Range{First: 1, Last: 1}, accept)
	if err != nil || found.Seq != 5 {
		t.Fatalf("%+v, %v; want 5 frames", found, err)
	}
	f, err = f.reuse(2, d)
	must(t, err)
	defer f.f.Close()
	again := Range{First: 2, Last: 2, Settled: 5}
	if found, err = Read(dir, again, accept); err != nil || found.Seq != 5 {
		t.Errorf("%+v, %v; want none but the five that are settled", found, err)
	}
	write(f, firstFrame, 6) // as long as the one that was there, so that the next fits on to it
	if found, err = Read(dir, again, accept); err != nil || found.Seq != 6 {
		t.Errorf("%+v, %v; want one more", found, err)
	}
	names, err := os.ReadDir(dir)
	must(t, err)
	if len(names) != 1 || names[0].Name() != nameOf(2) {
		t.Errorf("files %v, want the one under its new number", names)
	}
}

func TestFrames(t *testing.T) {
	want := bytes.Repeat([]byte("contents"), 101)[:801]
	b := endFrame(contents(want), 7, 3, 99)
	f, ok := readFrame(append(slices.Clone(b), 1, 2, 3), 7)
	if !ok || f.Seq != 3 || f.Version != 99 || f.size != len(b) || len(b)%frameAlign != 0 || !bytes.Equal(f.Contents, want) {
		t.Fatalf("%+v, %v", f, ok)
	}
	if _, ok := readFrame(b, 8); ok {
		t.Error("passes under another seed")
	}
	for i := range b {
		bad := slices.Clone(b)
		bad[i] ^= 0x10
		// The padding is not covered, nor need it be.
		if _, ok := readFrame(bad, 7); ok && i < frameHeader+len(want) {
			t.Errorf("byte %d flipped: not found", i)
		}
		if _, ok := readFrame(b[:i], 7); ok {
			t.Errorf("cut to %d bytes: not found", i)
		}
	}
}

// A log over several files is read back whole, goes on once there is space again for its next
// file, is dropped from its beginning, and uses its files again.
func TestLog(t *testing.T) {
	dir, d := filepath.Join(t.TempDir(), "wal"), realDisk()
	var full atomic.Bool
	write := d.Write
	d.Write = func(f *os.File, b []byte, off int64) error {
		if full.Load() {
			return errFull
		}
		return write(f, b, off)
	}
	var stored atomic.Pointer[Range] // the log saves it on its own goroutine
	save := func(r Range) error { stored.Store(&r); return nil }
	w, err := Begin(dir, Range{}, 40, d, save)
	must(t, err)
	defer w.Close()
	add := func() error {
		b := contents(make([]byte, 300_000))
		if err := w.EnsureSpace(len(b), nil); err != nil {
			return err
		}
		_, err := w.Append(b, 1)
		return err
	}
	full.Store(true)
	for err = nil; err == nil && w.seq < 50; {
		err = add()
	}
	if !errors.Is(err, errFull) {
		t.Errorf("without space: %v", err)
	}
	full.Store(false)
	for w.seq < 140 {
		must(t, add())
	}
	saved := *stored.Load()
	found, err := Read(dir, saved, accept)
	if err != nil || found.Seq != 140 || found.Settled != 40 || saved.First != 1 || saved.Last < 4 {
		t.Fatalf("%+v of %+v, %v", found, saved, err)
	}
	if n, full, _ := w.Droppable(7); n != 0 || full < 3*fileSize {
		t.Error("dropped before the owner has anything elsewhere")
	}
	w.Applied(w.seq, 7)
	if n, _, applied := w.Droppable(6); n != 0 || applied != 7 {
		t.Error("dropped at an earlier timestamp")
	}
	n, _, _ := w.Droppable(7)
	must(t, w.Drop(n))
	saved = *stored.Load()
	if saved.First != uint64(n)+1 || n < 3 {
		t.Errorf("%d files dropped, %+v", n, saved)
	}
	found, err = Read(dir, saved, accept)
	if err != nil || found.Seq != 140 || found.Settled <= 40 {
		t.Errorf("%+v of %+v, %v", found, saved, err)
	}
	next := found.Settled
	must(t, found.Replay(dir, d, func(f Frame) error {
		if next++; f.Seq != next || len(f.Contents) != 300_000 {
			t.Errorf("frame %d has %d bytes, want number %d", f.Seq, len(f.Contents), next)
		}
		return nil
	}))
	spare := len(w.spare)
	if _, err := w.nextFile(); err != nil || len(w.spare) != spare-1 {
		t.Errorf("no file was used again: %d of %d spare, %v", len(w.spare), spare, err)
	}
	must(t, w.Finish(save))
	saved = *stored.Load()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 || saved.First != saved.Last+1 || saved.Settled != 140 {
		t.Errorf("%d files, %+v, %v after the end", len(left), saved, err)
	}
}

var errFull = errors.New("no space")
