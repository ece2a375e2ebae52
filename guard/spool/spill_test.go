package spool_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// memFile is a temporary file that records, and fails when told to.
type memFile struct {
	data   []byte
	laps   [][]byte // every piece of ciphertext ever written
	space  int      // bytes until the disk is full
	short  bool     // the file was cut behind our back
	closes int
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	n := min(len(p), f.space)
	f.space -= n
	if need := int(off) + n; need > len(f.data) {
		f.data = append(f.data, make([]byte, need-len(f.data))...)
	}
	copy(f.data[off:], p[:n])
	f.laps = append(f.laps, bytes.Clone(p[:n]))
	if n < len(p) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	if f.short || off >= int64(len(f.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) Close() error {
	f.closes++
	return nil
}

func options(o spool.Options, f *memFile) spool.Options {
	return o.WithFile(func() (spool.File, error) { return f, nil })
}

// Disk full: the caller can tell it from a body that is too large (503, not 413).
func TestSpillFailure(t *testing.T) {
	f := &memFile{space: 1000}
	s := spool.New(options(spool.Options{Memory: 100}, f))
	want := pattern(21, 1100)
	if _, err := s.Write(want[:600]); err != nil {
		t.Fatal(err)
	}
	n, err := s.Write(pattern(22, 600))
	var spill *spool.SpillError
	if n != 0 || !errors.As(err, &spill) || !errors.Is(err, syscall.ENOSPC) || errors.Is(err, spool.ErrLimit) {
		t.Fatalf("Write on a full disk: %d, %v", n, err)
	}
	check(t, s, want[:600])

	// Space comes back, but the failed offsets have used their keystream: the
	// spool stays failed (P8).
	f.space = 1 << 20
	written := len(f.laps)
	if n, again := s.Write(want[600:]); n != 0 || again != err {
		t.Fatalf("Write after the failure: %d, %v", n, again)
	}
	if n, again := s.ReadFrom(bytes.NewReader(want)); n != 0 || again != err {
		t.Fatalf("ReadFrom after the failure: %d, %v", n, again)
	}
	if len(f.laps) != written {
		t.Fatal("bytes were written under a used keystream")
	}
	closed(t, s)
	if f.closes != 1 {
		t.Fatalf("file closed %d times", f.closes)
	}
}

func TestNoDirectory(t *testing.T) {
	s := spool.New(spool.Options{Memory: 10, Dir: filepath.Join(t.TempDir(), "missing")})
	defer closed(t, s)
	if _, err := s.Write(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	_, err := s.Write(make([]byte, 1))
	var spill *spool.SpillError
	if !errors.As(err, &spill) || !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("Write: %v", err)
	}
}

func TestFileCutBehindOurBack(t *testing.T) {
	f := &memFile{space: 1 << 20}
	s := spool.New(options(spool.Options{Memory: 100}, f))
	defer closed(t, s)
	want := pattern(23, 500)
	if _, err := s.Write(want); err != nil {
		t.Fatal(err)
	}
	f.short = true
	r := s.NewReader()
	defer closed(t, r)
	got, err := io.ReadAll(r)
	var spill *spool.SpillError
	if !errors.As(err, &spill) || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("Read: %v", err)
	}
	if !bytes.Equal(got, want[:len(got)]) {
		t.Fatal("wrong bytes before the error")
	}
}

// No piece of keystream serves twice, however often a ring goes round (P8).
// Ciphertext of zeros is the keystream itself.
func TestKeystreamIsNeverReused(t *testing.T) {
	f := &memFile{space: 1 << 30}
	s := spool.New(options(spool.Options{Memory: 48, Limit: 1000, Ring: true}, f))
	defer closed(t, s)
	for i := range 300 {
		if _, err := s.Write(make([]byte, 16*(1+i%30))); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[[16]byte]bool{}
	pieces := 0
	for _, lap := range f.laps {
		// Every window of 16 bytes, since the pieces begin anywhere.
		for i := 0; i+16 <= len(lap); i++ {
			k := [16]byte(lap[i:])
			if seen[k] {
				t.Fatal("a piece of keystream was used twice")
			}
			if k == [16]byte{} {
				t.Fatal("plain text in the file")
			}
			seen[k] = true
			pieces++
		}
	}
	if pieces < 10000 {
		t.Fatalf("only %d pieces seen: the test did not go round", pieces)
	}

	// Another spool has another key.
	g := &memFile{space: 1 << 30}
	other := spool.New(options(spool.Options{Memory: -1}, g))
	defer closed(t, other)
	if _, err := other.Write(make([]byte, 10000)); err != nil {
		t.Fatal(err)
	}
	for i := 0; i+16 <= len(g.data); i++ {
		if seen[[16]byte(g.data[i:])] {
			t.Fatal("two spools share their keystream")
		}
	}
}

func TestFileIsClosedWithTheLastUser(t *testing.T) {
	f := &memFile{space: 1 << 20}
	s := spool.New(options(spool.Options{Memory: -1}, f))
	if _, err := s.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	a, b := s.NewReader(), s.NewReader()
	closed(t, a)
	closed(t, s)
	closed(t, a)
	closed(t, s)
	if f.closes != 0 {
		t.Fatal("closed under a reader")
	}
	if got, err := io.ReadAll(b); err != nil || string(got) != "x" {
		t.Fatalf("last reader: %q, %v", got, err)
	}
	closed(t, b)
	closed(t, b)
	if f.closes != 1 {
		t.Fatalf("closed %d times", f.closes)
	}
}

// Where the name cannot go at once, it goes with the last user.
func TestNamedFileIsRemovedWithTheLastUser(t *testing.T) {
	dir := t.TempDir()
	names := func() int {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	s := spool.New(spool.Options{Memory: -1, Dir: dir}.WithNamedFiles())
	if _, err := s.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	r := s.NewReader()
	closed(t, s)
	if names() != 1 {
		t.Fatal("the test shows nothing")
	}
	closed(t, r)
	if names() != 0 {
		t.Fatal("the file is still there")
	}
}
