package body_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
)

// pattern gives n bytes that differ at every place and for every seed.
func pattern(seed uint64, n int) []byte {
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	p := make([]byte, n)
	_, _ = r.Read(p)
	return p
}

func closed(t *testing.T, c io.Closer) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func TestReadsBackWhatWasWritten(t *testing.T) {
	for _, size := range []int{0, 1, 200, 4095, 4096, 4097, 65535, 65536, 65537, 70000, 300000} {
		for _, memory := range []int64{-1, 10, 4096, 5000, 65536, 100001, 0} {
			for _, chunk := range []int{1, 777, 1 << 20} {
				if size/chunk > 5000 {
					continue
				}
				t.Run(fmt.Sprintf("size=%d,memory=%d,chunk=%d", size, memory, chunk), func(t *testing.T) {
					want := pattern(uint64(size), size)
					byWrite := body.NewSpool(body.SpoolOptions{Memory: memory, Dir: t.TempDir()})
					defer closed(t, byWrite)
					for rest := want; len(rest) > 0; {
						n, err := byWrite.Write(rest[:min(chunk, len(rest))])
						if err != nil {
							t.Fatal(err)
						}
						rest = rest[n:]
					}
					check(t, byWrite, want)

					byRead := body.NewSpool(body.SpoolOptions{Memory: memory, Dir: t.TempDir(), Limit: int64(size)})
					defer closed(t, byRead)
					n, err := io.Copy(byRead, struct{ io.Reader }{bytes.NewReader(want)})
					if err != nil || n != int64(size) {
						t.Fatalf("ReadFrom: %d, %v", n, err)
					}
					check(t, byRead, want)
				})
			}
		}
	}
}

func check(t *testing.T, s *body.Spool, want []byte) {
	t.Helper()
	if s.Size() != int64(len(want)) {
		t.Fatalf("Size %d, want %d", s.Size(), len(want))
	}
	r := s.NewReader()
	defer closed(t, r)
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("reader: %d bytes, %v; equal: %v", len(got), err, bytes.Equal(got, want))
	}
	rnd := rand.New(rand.NewPCG(1, uint64(len(want))))
	for range 50 {
		off := rnd.IntN(len(want) + 1)
		p := make([]byte, rnd.IntN(len(want)+10)+1)
		n, err := s.ReadAt(p, int64(off))
		wantN := min(len(p), len(want)-off)
		if n != wantN || (err == nil) != (wantN == len(p)) || (err != nil && err != io.EOF) {
			t.Fatalf("ReadAt(%d bytes, %d) = %d, %v; want %d", len(p), off, n, err, wantN)
		}
		if !bytes.Equal(p[:n], want[off:off+n]) {
			t.Fatalf("ReadAt(%d bytes, %d): wrong bytes", len(p), off)
		}
	}
	if p, ok := s.Bytes(); ok && !bytes.Equal(p, want) {
		t.Fatal("Bytes: wrong bytes")
	}
	if _, err := s.ReadAt(make([]byte, 1), -1); err == nil || err == io.EOF {
		t.Fatalf("negative offset: %v", err)
	}
}

func TestReaderKeepsTheRulesOfReaders(t *testing.T) {
	want := pattern(9, 20000)
	s := body.NewSpool(body.SpoolOptions{Memory: 5000, Dir: t.TempDir()})
	defer closed(t, s)
	if _, err := s.Write(want); err != nil {
		t.Fatal(err)
	}
	r := s.NewReader()
	defer closed(t, r)
	if err := iotest.TestReader(r, want); err != nil {
		t.Fatal(err)
	}
}

func TestBytesInOnePiece(t *testing.T) {
	for _, c := range []struct {
		size int
		o    body.SpoolOptions
		want bool
	}{
		{0, body.SpoolOptions{}, true},
		{200, body.SpoolOptions{}, true},
		{4097, body.SpoolOptions{}, true},
		{65536, body.SpoolOptions{}, true},
		{65537, body.SpoolOptions{}, false},
		{100, body.SpoolOptions{Memory: 99}, false},
		{100, body.SpoolOptions{Limit: 1000, Ring: true}, false},
	} {
		c.o.Dir = t.TempDir()
		s := body.NewSpool(c.o)
		want := pattern(3, c.size)
		for i := range want {
			if _, err := s.Write(want[i : i+1]); err != nil {
				t.Fatal(err)
			}
		}
		got, ok := s.Bytes()
		if ok != c.want || (ok && !bytes.Equal(got, want)) {
			t.Errorf("%d bytes with %+v: ok = %v", c.size, c.o, ok)
		}
		closed(t, s)
		if _, ok := s.Bytes(); ok {
			t.Error("Bytes after Close")
		}
	}
}

// Bytes that were handed out stay as they are while the spool grows.
func TestBytesStayWhileWriting(t *testing.T) {
	s := body.NewSpool(body.SpoolOptions{})
	defer closed(t, s)
	want := pattern(4, 200000)
	if _, err := s.Write(want[:4000]); err != nil {
		t.Fatal(err)
	}
	got, ok := s.Bytes()
	if !ok || len(got) != 4000 || cap(got) != 4000 {
		t.Fatalf("Bytes: %d, %v", len(got), ok)
	}
	if _, err := s.Write(want[4000:]); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want[:4000]) {
		t.Fatal("bytes changed under their holder")
	}
	check(t, s, want)
}

// Body over the cap: 413, and nothing of the piece that did not fit is kept.
func TestLimit(t *testing.T) {
	for _, memory := range []int64{0, 50, -1} {
		t.Run(fmt.Sprint("memory=", memory), func(t *testing.T) {
			o := body.SpoolOptions{Memory: memory, Limit: 100, Dir: t.TempDir()}
			want := pattern(5, 101)
			s := body.NewSpool(o)
			defer closed(t, s)
			for _, step := range []struct {
				p    []byte
				want error
			}{{want[:60], nil}, {want[:41], body.ErrLimit}, {want[60:100], nil}, {want[:1], body.ErrLimit}, {nil, nil}} {
				n, err := s.Write(step.p)
				if err != step.want || (err == nil && n != len(step.p)) || (err != nil && n != 0) {
					t.Fatalf("Write of %d bytes at size %d: %d, %v", len(step.p), s.Size(), n, err)
				}
			}
			check(t, s, want[:100])

			over := body.NewSpool(o)
			defer closed(t, over)
			n, err := over.ReadFrom(iotest.OneByteReader(bytes.NewReader(want)))
			if n != 100 || err != body.ErrLimit {
				t.Fatalf("ReadFrom of 101 bytes: %d, %v", n, err)
			}
			check(t, over, want[:100])

			fits := body.NewSpool(o)
			defer closed(t, fits)
			n, err = fits.ReadFrom(iotest.DataErrReader(bytes.NewReader(want[:100])))
			if n != 100 || err != nil {
				t.Fatalf("ReadFrom of 100 bytes: %d, %v", n, err)
			}
			check(t, fits, want[:100])
		})
	}
}

// A client that breaks off: what it sent is kept, its error is reported.
func TestReadFromGivesTheSourcesError(t *testing.T) {
	broken := errors.New("connection lost")
	want := pattern(6, 9000)
	s := body.NewSpool(body.SpoolOptions{Memory: 5000, Dir: t.TempDir()})
	defer closed(t, s)
	n, err := s.ReadFrom(io.MultiReader(bytes.NewReader(want), iotest.ErrReader(broken)))
	if n != 9000 || err != broken {
		t.Fatalf("ReadFrom: %d, %v", n, err)
	}
	check(t, s, want)
}

// A ring against a plain slice as the model.
func TestRing(t *testing.T) {
	for _, limit := range []int{1, 100, 4096, 5000, 200000} {
		for _, memory := range []int64{-1, 64, 4096, 70000, 0} {
			t.Run(fmt.Sprintf("limit=%d,memory=%d", limit, memory), func(t *testing.T) {
				s := body.NewSpool(body.SpoolOptions{Memory: memory, Limit: int64(limit), Ring: true, Dir: t.TempDir()})
				defer closed(t, s)
				early := s.NewReader()
				defer closed(t, early)
				rnd := rand.New(rand.NewPCG(uint64(limit), uint64(memory)))
				var all []byte
				for range 40 {
					p := pattern(rnd.Uint64(), rnd.IntN(limit+limit/4+2))
					if n, err := s.Write(p); n != len(p) || err != nil {
						t.Fatalf("Write: %d, %v", n, err)
					}
					all = append(all, p...)
					if s.Size() != int64(len(all)) {
						t.Fatalf("Size %d, want %d", s.Size(), len(all))
					}
					low := max(0, len(all)-limit)
					off := low + rnd.IntN(len(all)-low+1)
					q := make([]byte, limit+1)
					n, err := s.ReadAt(q, int64(off))
					if err != io.EOF || !bytes.Equal(q[:n], all[off:]) {
						t.Fatalf("ReadAt %d of [%d, %d): %d bytes, %v", off, low, len(all), n, err)
					}
					if low > 0 {
						if n, err := s.ReadAt(q, int64(low-1)); n != 0 || err != body.ErrGone {
							t.Fatalf("ReadAt of what is gone: %d, %v", n, err)
						}
						if n, err := early.Read(q); n != 0 || err != body.ErrGone {
							t.Fatalf("reader of what is gone: %d, %v", n, err)
						}
					}
				}
				if len(all) <= 2*limit {
					t.Fatal("the test did not wrap around")
				}
			})
		}
	}
}

func TestRingReadFrom(t *testing.T) {
	want := pattern(8, 300000)
	s := body.NewSpool(body.SpoolOptions{Memory: 1000, Limit: 70000, Ring: true, Dir: t.TempDir()})
	defer closed(t, s)
	if n, err := s.ReadFrom(bytes.NewReader(want)); n != 300000 || err != nil {
		t.Fatalf("ReadFrom: %d, %v", n, err)
	}
	got := make([]byte, 70000)
	if n, err := s.ReadAt(got, 230000); n != 70000 || err != nil || !bytes.Equal(got, want[230000:]) {
		t.Fatalf("ReadAt: %d, %v", n, err)
	}
}

func ExampleSpool() {
	spool := body.NewSpool(body.SpoolOptions{Limit: 1 << 20})
	if _, err := io.WriteString(spool, "amount=100"); err != nil {
		panic(err)
	}
	r := spool.NewReader() // for the transport, which closes it in its own time
	_ = spool.Close()      // the handler is done

	got, _ := io.ReadAll(r)
	fmt.Printf("%s\n", got)
	_ = r.Close()
	_, err := r.Read(got)
	fmt.Println(err)
	// Output:
	// amount=100
	// spool: closed
}

// One body in and out: received, read once by the transport, closed.
func BenchmarkBody(b *testing.B) {
	for _, c := range []struct {
		name string
		size int
	}{{"200B", 200}, {"64KiB", 64 << 10}, {"4MiB", 4 << 20}} {
		b.Run(c.name, func(b *testing.B) {
			want := pattern(1, c.size)
			from := bytes.NewReader(want)
			src := struct{ io.Reader }{from}
			buf := make([]byte, 32<<10)
			dir := b.TempDir()
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			for b.Loop() {
				from.Reset(want)
				s := body.NewSpool(body.SpoolOptions{Dir: dir})
				if n, err := s.ReadFrom(src); err != nil || n != int64(c.size) {
					b.Fatal(n, err)
				}
				r := s.NewReader()
				for {
					_, err := r.Read(buf)
					if err == io.EOF {
						break
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
				if err := r.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Bodies share their memory: what finds no room is in files, and reads as it was
// written, however it came; a closed body gives its room back.
func TestBudget(t *testing.T) {
	const block, small = 64 << 10, 4 << 10
	want := make([]byte, 5*block+123)
	for i := range want {
		want[i] = byte(i / 7)
	}
	for _, limit := range []int64{0, 1, block, 2*block + 1, 5 * block, 100 * block} {
		for name, fill := range map[string]func(*body.Spool) error{
			"at once": func(s *body.Spool) error { _, err := s.Write(want); return err },
			"in parts": func(s *body.Spool) error {
				for p := want; len(p) > 0; p = p[min(len(p), 1000):] {
					if _, err := s.Write(p[:min(len(p), 1000)]); err != nil {
						return err
					}
				}
				return nil
			},
			"read":           func(s *body.Spool) error { _, err := s.ReadFrom(bytes.NewReader(want)); return err },
			"read in halves": func(s *body.Spool) error { _, err := s.ReadFrom(iotest.HalfReader(bytes.NewReader(want))); return err },
		} {
			b := body.NewBudget(limit)
			for _, ring := range []bool{false, true} {
				s := body.NewSpool(body.SpoolOptions{Budget: b, Dir: t.TempDir(), Limit: int64(len(want)), Ring: ring})
				if err := fill(s); err != nil {
					t.Fatalf("%d %s: %v", limit, name, err)
				}
				if used := b.Used(); used > limit || limit >= block && used == 0 {
					t.Errorf("%d %s: %d bytes are taken", limit, name, used)
				}
				got, err := io.ReadAll(s.NewReader())
				if err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d %s, ring %t: %d bytes, %v", limit, name, ring, len(got), err)
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	// A small body takes none of it.
	b := body.NewBudget(block)
	s := body.NewSpool(body.SpoolOptions{Budget: b, Dir: t.TempDir()})
	if _, err := s.Write(want[:small]); err != nil || b.Used() != 0 {
		t.Errorf("%d bytes are taken, %v", b.Used(), err)
	}
	if _, err := s.Write(want[small : small+1]); err != nil || b.Used() != block {
		t.Errorf("%d bytes are taken, %v", b.Used(), err)
	}
	if _ = s.Close(); b.Used() != 0 {
		t.Errorf("%d bytes are taken after the end", b.Used())
	}
}

// The transport may read the body after the handler has returned: its bytes must
// not be another request's by then (P3).
func TestReaderNeverSeesRecycledMemory(t *testing.T) {
	for _, size := range []int{200, 4096, 60000, 200000} {
		for i := range 50 {
			mine := bytes.Repeat([]byte{'m'}, size)
			s := body.NewSpool(body.SpoolOptions{Memory: 100000, Dir: t.TempDir()})
			if _, err := s.Write(mine); err != nil {
				t.Fatal(err)
			}
			first, second := s.NewReader(), s.NewReader()
			closed(t, first)
			closed(t, first)
			closed(t, s)
			closed(t, s)

			others := body.NewSpool(body.SpoolOptions{})
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
	s := body.NewSpool(body.SpoolOptions{Memory: 5000, Dir: t.TempDir()})
	if _, err := s.Write(want); err != nil {
		t.Fatal(err)
	}
	r := s.NewReader()
	closed(t, r)
	closed(t, r)
	others := body.NewSpool(body.SpoolOptions{})
	defer closed(t, others)
	if _, err := others.Write(pattern(12, 10000)); err != nil {
		t.Fatal(err)
	}
	check(t, s, want)
	closed(t, s)
}

func TestClosedGivesErrors(t *testing.T) {
	s := body.NewSpool(body.SpoolOptions{})
	if _, err := s.Write([]byte("secret")); err != nil {
		t.Fatal(err)
	}
	r := s.NewReader()
	defer closed(t, r)
	closed(t, s)
	p := make([]byte, 6)
	if n, err := s.ReadAt(p, 0); n != 0 || err != body.ErrClosed {
		t.Errorf("ReadAt: %d, %v", n, err)
	}
	if n, err := s.Write(p); n != 0 || err != body.ErrClosed {
		t.Errorf("Write: %d, %v", n, err)
	}
	if n, err := s.ReadFrom(bytes.NewReader(p)); n != 0 || err != body.ErrClosed {
		t.Errorf("ReadFrom: %d, %v", n, err)
	}
	late := s.NewReader()
	defer closed(t, late)
	if n, err := late.Read(p); n != 0 || err != body.ErrClosed {
		t.Errorf("Read of a late reader: %d, %v", n, err)
	}
	if n, err := io.ReadFull(r, p); n != 6 || err != nil || string(p) != "secret" {
		t.Errorf("Read of the early reader: %d, %v", n, err)
	}
	closed(t, r)
	if n, err := r.Read(p); n != 0 || err != body.ErrClosed {
		t.Errorf("Read after Close: %d, %v", n, err)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// The owner closes in the middle of a read from a slow client, which then still
// writes to its memory: nobody else may have that memory yet.
func TestCloseDuringReadFrom(t *testing.T) {
	s := body.NewSpool(body.SpoolOptions{})
	others := body.NewSpool(body.SpoolOptions{})
	defer closed(t, others)
	want := bytes.Repeat([]byte{'o'}, 4096)
	n, err := s.ReadFrom(readerFunc(func(p []byte) (int, error) {
		closed(t, s)
		if _, err := others.Write(want); err != nil {
			t.Error(err)
		}
		return copy(p, bytes.Repeat([]byte{'m'}, 4096)), nil
	}))
	if n != 0 || err != body.ErrClosed {
		t.Errorf("ReadFrom: %d, %v", n, err)
	}
	check(t, others, want)
}

// Attached followers read while the owner writes: each sees exactly the bytes,
// in order, none before they are there.
func TestReadersFollowTheWriter(t *testing.T) {
	want := pattern(13, 400000)
	s := body.NewSpool(body.SpoolOptions{Memory: 100000, Dir: t.TempDir()})
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
	s := body.NewSpool(body.SpoolOptions{Memory: 3000, Limit: limit, Ring: true, Dir: t.TempDir()})
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
				if err != nil && err != io.EOF && err != body.ErrGone {
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
		s := body.NewSpool(body.SpoolOptions{Memory: 2000, Dir: dir})
		r := s.NewReader()
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 10 {
				if _, err := s.Write(bytes.Repeat([]byte{'m'}, 500)); err != nil && err != body.ErrClosed {
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
						if err != io.EOF && err != body.ErrClosed {
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

func options(o body.SpoolOptions, f *memFile) body.SpoolOptions {
	return o.WithFile(func() (body.File, error) { return f, nil })
}

// Disk full: the caller can tell it from a body that is too large (503, not 413).
func TestSpillFailure(t *testing.T) {
	f := &memFile{space: 1000}
	s := body.NewSpool(options(body.SpoolOptions{Memory: 100}, f))
	want := pattern(21, 1100)
	if _, err := s.Write(want[:600]); err != nil {
		t.Fatal(err)
	}
	n, err := s.Write(pattern(22, 600))
	var spill *body.SpillError
	if n != 0 || !errors.As(err, &spill) || !errors.Is(err, syscall.ENOSPC) || errors.Is(err, body.ErrLimit) {
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
	s := body.NewSpool(body.SpoolOptions{Memory: 10, Dir: filepath.Join(t.TempDir(), "missing")})
	defer closed(t, s)
	if _, err := s.Write(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	_, err := s.Write(make([]byte, 1))
	var spill *body.SpillError
	if !errors.As(err, &spill) || !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("Write: %v", err)
	}
}

func TestFileCutBehindOurBack(t *testing.T) {
	f := &memFile{space: 1 << 20}
	s := body.NewSpool(options(body.SpoolOptions{Memory: 100}, f))
	defer closed(t, s)
	want := pattern(23, 500)
	if _, err := s.Write(want); err != nil {
		t.Fatal(err)
	}
	f.short = true
	r := s.NewReader()
	defer closed(t, r)
	got, err := io.ReadAll(r)
	var spill *body.SpillError
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
	s := body.NewSpool(options(body.SpoolOptions{Memory: 48, Limit: 1000, Ring: true}, f))
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
	other := body.NewSpool(options(body.SpoolOptions{Memory: -1}, g))
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
	s := body.NewSpool(options(body.SpoolOptions{Memory: -1}, f))
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
	s := body.NewSpool(body.SpoolOptions{Memory: -1, Dir: dir}.WithNamedFiles())
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
