package badger_test

import (
	"fmt"
	"sync"
	"testing"
	"time"
	"math/rand/v2"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

func BenchmarkThink(b *testing.B) {
	for _, wait := range []time.Duration{-1, 300 * time.Microsecond} {
		for _, clients := range []int{1, 3, 6, 12, 40} {
			b.Run(fmt.Sprintf("wait=%v/clients=%d", wait, clients), func(b *testing.B) {
				s := openBench(b, badger.Options{GroupWait: wait})
				var all sync.WaitGroup
				var mu sync.Mutex
				var spent time.Duration
				var worst time.Duration
				for c := range clients {
					all.Go(func() {
						for i := range b.N / clients {
							t := time.Now()
							_, err := s.Commit(b.Context(), store.Write{Key: numbered(uint64(c<<32 + i)), Value: make([]byte, 200)})
							d := time.Since(t)
							if err != nil { b.Error(err) }
							mu.Lock()
							spent += d
							worst = max(worst, d)
							mu.Unlock()
							time.Sleep(time.Duration(rand.IntN(4000)) * time.Microsecond)
						}
					})
				}
				all.Wait()
				st := s.Stats()
				b.ReportMetric(float64(spent.Microseconds())/float64(b.N), "µs/commit")
				b.ReportMetric(float64(st.Batches)/float64(st.Commits), "rec/sync")
			})
		}
	}
}
