package badger_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

func openBench(b *testing.B, o badger.Options) *badger.Store {
	b.Helper()
	s, err := badger.Open(b.TempDir(), o)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = s.Close() })
	return s
}

func numbered(n uint64) []byte {
	key := make([]byte, 32)
	binary.BigEndian.PutUint64(key, n*0x9e3779b97f4a7c15) // as spread as hashes are
	binary.BigEndian.PutUint64(key[8:], n)
	return key
}

// BenchmarkCommit is the claim of a call: one insertion of 200 bytes, if absent.
func BenchmarkCommit(b *testing.B) {
	for _, clients := range []int{1, 4, 16, 64, 256} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			s := openBench(b, badger.Options{})
			commit(b, s, clients)
		})
	}
}

// BenchmarkCommitAtOnce is the same without GroupWait.
func BenchmarkCommitAtOnce(b *testing.B) {
	for _, clients := range []int{1, 4, 16, 64, 256} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			s := openBench(b, badger.Options{GroupWait: -1})
			commit(b, s, clients)
		})
	}
}

func commit(b *testing.B, s *badger.Store, clients int) {
	value := make([]byte, 200)
	var next atomic.Uint64
	var all sync.WaitGroup
	before := s.Stats()
	b.ReportAllocs()
	b.ResetTimer()
	for range clients {
		all.Go(func() {
			for {
				n := next.Add(1)
				if n > uint64(b.N) {
					return
				}
				w := store.Write{Key: numbered(n), Value: value, If: store.Absent()}
				if _, err := s.Commit(b.Context(), w); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	b.StopTimer()
	after := s.Stats()
	b.ReportMetric(float64(after.Batches-before.Batches)/float64(after.Commits-before.Commits), "records/sync")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "records/s")
}

func BenchmarkGet(b *testing.B) {
	const records = 50_000
	s := openBench(b, badger.Options{})
	value := make([]byte, 200)
	for n := 0; n < records; {
		var batch []store.Write
		for range store.MaxBatch {
			batch = append(batch, store.Write{Key: numbered(uint64(n)), Value: value})
			n++
		}
		if _, err := s.Commit(b.Context(), batch...); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("present", func(b *testing.B) {
		b.ReportAllocs()
		for i := range b.N {
			if _, err := s.Get(b.Context(), numbered(uint64(i%records))); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("absent", func(b *testing.B) {
		b.ReportAllocs()
		for i := range b.N {
			if _, err := s.Get(b.Context(), numbered(uint64(1<<40+i))); !errors.Is(err, store.ErrNotFound) {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkLargeValues reads values of 1,500 bytes that stand in Badger, and others that stand in
// segments: all in the order of their keys, and single ones.
func BenchmarkLargeValues(b *testing.B) {
	const n = 40_000
	for _, bulk := range []bool{false, true} {
		s := openBench(b, badger.Options{})
		var batch []store.Write
		for i := range uint64(n) {
			batch = append(batch, store.Write{Key: binary.BigEndian.AppendUint64(nil, i), Value: make([]byte, 1500), Bulk: bulk})
			if len(batch) == 500 {
				if _, err := s.Commit(b.Context(), batch...); err != nil {
					b.Fatal(err)
				}
				batch = nil
			}
		}
		b.Run(fmt.Sprintf("scan/segment=%v", bulk), func(b *testing.B) {
			for b.Loop() {
				for _, err := range s.Scan(b.Context(), store.Range{}) {
					if err != nil {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/value")
		})
		b.Run(fmt.Sprintf("get/segment=%v", bulk), func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(p *testing.PB) {
				for i := uint64(0); p.Next(); i++ {
					if _, err := s.Get(b.Context(), binary.BigEndian.AppendUint64(nil, i*7919%n)); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
