package spool_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"

	"github.com/agent-guard/caddy-agent-guard/guard/spool"
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
					byWrite := spool.New(spool.Options{Memory: memory, Dir: t.TempDir()})
					defer closed(t, byWrite)
					for rest := want; len(rest) > 0; {
						n, err := byWrite.Write(rest[:min(chunk, len(rest))])
						if err != nil {
							t.Fatal(err)
						}
						rest = rest[n:]
					}
					check(t, byWrite, want)

					byRead := spool.New(spool.Options{Memory: memory, Dir: t.TempDir(), Limit: int64(size)})
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

func check(t *testing.T, s *spool.Spool, want []byte) {
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
	s := spool.New(spool.Options{Memory: 5000, Dir: t.TempDir()})
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
		o    spool.Options
		want bool
	}{
		{0, spool.Options{}, true},
		{200, spool.Options{}, true},
		{4097, spool.Options{}, true},
		{65536, spool.Options{}, true},
		{65537, spool.Options{}, false},
		{100, spool.Options{Memory: 99}, false},
		{100, spool.Options{Limit: 1000, Ring: true}, false},
	} {
		c.o.Dir = t.TempDir()
		s := spool.New(c.o)
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
	s := spool.New(spool.Options{})
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
			o := spool.Options{Memory: memory, Limit: 100, Dir: t.TempDir()}
			want := pattern(5, 101)
			s := spool.New(o)
			defer closed(t, s)
			for _, step := range []struct {
				p    []byte
				want error
			}{{want[:60], nil}, {want[:41], spool.ErrLimit}, {want[60:100], nil}, {want[:1], spool.ErrLimit}, {nil, nil}} {
				n, err := s.Write(step.p)
				if err != step.want || (err == nil && n != len(step.p)) || (err != nil && n != 0) {
					t.Fatalf("Write of %d bytes at size %d: %d, %v", len(step.p), s.Size(), n, err)
				}
			}
			check(t, s, want[:100])

			over := spool.New(o)
			defer closed(t, over)
			n, err := over.ReadFrom(iotest.OneByteReader(bytes.NewReader(want)))
			if n != 100 || err != spool.ErrLimit {
				t.Fatalf("ReadFrom of 101 bytes: %d, %v", n, err)
			}
			check(t, over, want[:100])

			fits := spool.New(o)
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
	s := spool.New(spool.Options{Memory: 5000, Dir: t.TempDir()})
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
				s := spool.New(spool.Options{Memory: memory, Limit: int64(limit), Ring: true, Dir: t.TempDir()})
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
						if n, err := s.ReadAt(q, int64(low-1)); n != 0 || err != spool.ErrGone {
							t.Fatalf("ReadAt of what is gone: %d, %v", n, err)
						}
						if n, err := early.Read(q); n != 0 || err != spool.ErrGone {
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
	s := spool.New(spool.Options{Memory: 1000, Limit: 70000, Ring: true, Dir: t.TempDir()})
	defer closed(t, s)
	if n, err := s.ReadFrom(bytes.NewReader(want)); n != 300000 || err != nil {
		t.Fatalf("ReadFrom: %d, %v", n, err)
	}
	got := make([]byte, 70000)
	if n, err := s.ReadAt(got, 230000); n != 70000 || err != nil || !bytes.Equal(got, want[230000:]) {
		t.Fatalf("ReadAt: %d, %v", n, err)
	}
}

func Example() {
	body := spool.New(spool.Options{Limit: 1 << 20})
	if _, err := io.WriteString(body, "amount=100"); err != nil {
		panic(err)
	}
	r := body.NewReader() // for the transport, which closes it in its own time
	_ = body.Close()      // the handler is done

	got, _ := io.ReadAll(r)
	fmt.Printf("%s\n", got)
	_ = r.Close()
	_, err := r.Read(got)
	fmt.Println(err)
	// Output:
	// amount=100
	// spool: closed
}
