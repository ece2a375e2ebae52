package spool_test

import (
	"bytes"
	"io"
	"sync"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// The transport may read the body after the handler has returned: its bytes must
// not be another request's by then (P3).
func TestReaderNeverSeesRecycledMemory(t *testing.T) {
	for _, size := range []int{200, 4096, 60000, 200000} {
		for i := range 50 {
			mine := bytes.Repeat([]byte{'m'}, size)
			s := spool.New(spool.Options{Memory: 100000, Dir: t.TempDir()})
			if _, err := s.Write(mine); err != nil {
				t.Fatal(err)
			}
			first, second := s.NewReader(), s.NewReader()
			closed(t, first)
			closed(t, first)
			closed(t, s)
			closed(t, s)

			others := spool.New(spool.Options{})
			if _, err := others.Write(bytes.Repeat([]byte{'o'}, size)); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(second)
			if err != nil || !bytes.Equal(got, mine) {
				t.Fatalf("size %d, round %d: %d bytes, %v; another body's: %v", size, i, len(got), err, bytes.IndexByte(got, 'o') >= 0)
			}
			closed(t, second)
			closed(t, others)
		}
	}
}

// The opposite order of ends.
func TestOwnerReadsAfterReadersClosed(t *testing.T) {
	want := pattern(11, 10000)
	s := spool.New(spool.Options{Memory: 5000, Dir: t.TempDir()})
	if _, err := s.Write(want); err != nil {
		t.Fatal(err)
	}
	r := s.NewReader()
	closed(t, r)
	closed(t, r)
	others := spool.New(spool.Options{})
	defer closed(t, others)
	if _, err := others.Write(pattern(12, 10000)); err != nil {
		t.Fatal(err)
	}
	check(t, s, want)
	closed(t, s)
}

func TestClosedGivesErrors(t *testing.T) {
	s := spool.New(spool.Options{})
	if _, err := s.Write([]byte("secret")); err != nil {
		t.Fatal(err)
	}
	r := s.NewReader()
	defer closed(t, r)
	closed(t, s)
	p := make([]byte, 6)
	if n, err := s.ReadAt(p, 0); n != 0 || err != spool.ErrClosed {
		t.Errorf("ReadAt: %d, %v", n, err)
	}
	if n, err := s.Write(p); n != 0 || err != spool.ErrClosed {
		t.Errorf("Write: %d, %v", n, err)
	}
	if n, err := s.ReadFrom(bytes.NewReader(p)); n != 0 || err != spool.ErrClosed {
		t.Errorf("ReadFrom: %d, %v", n, err)
	}
	late := s.NewReader()
	defer closed(t, late)
	if n, err := late.Read(p); n != 0 || err != spool.ErrClosed {
		t.Errorf("Read of a late reader: %d, %v", n, err)
	}
	if n, err := io.ReadFull(r, p); n != 6 || err != nil || string(p) != "secret" {
		t.Errorf("Read of the early reader: %d, %v", n, err)
	}
	closed(t, r)
	if n, err := r.Read(p); n != 0 || err != spool.ErrClosed {
		t.Errorf("Read after Close: %d, %v", n, err)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// The owner closes in the middle of a read from a slow client, which then still
// writes to its memory: nobody else may have that memory yet.
func TestCloseDuringReadFrom(t *testing.T) {
	s := spool.New(spool.Options{})
	others := spool.New(spool.Options{})
	defer closed(t, others)
	want := bytes.Repeat([]byte{'o'}, 4096)
	n, err := s.ReadFrom(readerFunc(func(p []byte) (int, error) {
		closed(t, s)
		if _, err := others.Write(want); err != nil {
			t.Error(err)
		}
		return copy(p, bytes.Repeat([]byte{'m'}, 4096)), nil
	}))
	if n != 0 || err != spool.ErrClosed {
		t.Errorf("ReadFrom: %d, %v", n, err)
	}
	check(t, others, want)
}

// Attached followers read while the owner writes: each sees exactly the bytes,
// in order, none before they are there.
func TestReadersFollowTheWriter(t *testing.T) {
	want := pattern(13, 400000)
	s := spool.New(spool.Options{Memory: 100000, Dir: t.TempDir()})
	var wg sync.WaitGroup
	grown := sync.NewCond(&sync.Mutex{})
	for range 3 {
		wg.Go(func() {
			r := s.NewReader()
			defer closed(t, r)
			var got []byte
			p := make([]byte, 10000)
			for len(got) < len(want) {
				n, err := r.Read(p)
				got = append(got, p[:n]...)
				if err == io.EOF {
					grown.L.Lock()
					for s.Size() == int64(len(got)) {
						grown.Wait()
					}
					grown.L.Unlock()
				} else if err != nil {
					t.Errorf("Read: %v", err)
					return
				}
			}
			if !bytes.Equal(got, want) {
				t.Error("wrong bytes")
			}
		})
	}
	for i := 0; i < len(want); i += 1000 {
		if _, err := s.Write(want[i : i+1000]); err != nil {
			t.Fatal(err)
		}
		grown.L.Lock()
		grown.Broadcast()
		grown.L.Unlock()
	}
	wg.Wait()
	closed(t, s)
}

// Readers of a ring race with its writer: they get right bytes or ErrGone, never
// bytes of another lap.
func TestRingReadersNeverSeeAnotherLap(t *testing.T) {
	const limit, total = 8192, 400000
	want := pattern(14, total)
	s := spool.New(spool.Options{Memory: 3000, Limit: limit, Ring: true, Dir: t.TempDir()})
	var wg sync.WaitGroup
	start := make(chan struct{})
	for g := range 3 {
		wg.Go(func() {
			<-start
			p := make([]byte, 700)
			for {
				size := s.Size()
				off := max(0, size-limit+int64(g)*300)
				n, err := s.ReadAt(p, off)
				if !bytes.Equal(p[:n], want[off:off+int64(n)]) {
					t.Errorf("wrong bytes at %d", off)
					return
				}
				if err != nil && err != io.EOF && err != spool.ErrGone {
					t.Errorf("ReadAt: %v", err)
					return
				}
				if size == total {
					return
				}
			}
		})
	}
	close(start)
	for i := 0; i < total; i += 500 {
		if _, err := s.Write(want[i : i+500]); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	closed(t, s)
}

// Everything at once, for the race detector.
func TestCloseRaces(t *testing.T) {
	dir := t.TempDir()
	for range 50 {
		s := spool.New(spool.Options{Memory: 2000, Dir: dir})
		r := s.NewReader()
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 10 {
				if _, err := s.Write(bytes.Repeat([]byte{'m'}, 500)); err != nil && err != spool.ErrClosed {
					t.Errorf("Write: %v", err)
				}
			}
		})
		for range 2 {
			wg.Go(func() {
				p := make([]byte, 100)
				for {
					n, err := r.Read(p)
					if bytes.Count(p[:n], []byte{'m'}) != n {
						t.Error("another body's bytes")
					}
					if err != nil {
						if err != io.EOF && err != spool.ErrClosed {
							t.Errorf("Read: %v", err)
						}
						return
					}
				}
			})
		}
		wg.Go(func() { closed(t, s) })
		wg.Go(func() { closed(t, r) })
		wg.Wait()
	}
}
