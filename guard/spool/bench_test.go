package spool_test

import (
	"bytes"
	"io"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/spool"
)

// One body in and out: received, read once by the transport, closed.
func BenchmarkBody(b *testing.B) {
	for _, c := range []struct {
		name string
		size int
	}{{"200B", 200}, {"64KiB", 64 << 10}, {"4MiB", 4 << 20}} {
		b.Run(c.name, func(b *testing.B) {
			want := pattern(1, c.size)
			body := bytes.NewReader(want)
			src := struct{ io.Reader }{body}
			buf := make([]byte, 32<<10)
			dir := b.TempDir()
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			for b.Loop() {
				body.Reset(want)
				s := spool.New(spool.Options{Dir: dir})
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
