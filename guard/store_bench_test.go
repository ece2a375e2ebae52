package guard_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// stores are what executions are measured over: the reference, and the default on a
// real disk, where a claim and an outcome are one synced commit each.
var stores = []struct {
	name string
	open func(b *testing.B) store.Store
}{
	{"memory", func(*testing.B) store.Store { return memory.New(memory.Options{}) }},
	{"badger", func(b *testing.B) store.Store {
		st, err := badger.Open(b.TempDir(), badger.Options{})
		if err != nil {
			b.Fatal(err)
		}
		return st
	}},
}

func overStores(b *testing.B, measure func(b *testing.B, g *guard.Guard)) {
	for _, s := range stores {
		b.Run(s.name, func(b *testing.B) {
			st := s.open(b)
			b.Cleanup(func() { _ = st.Close() })
			g, _, err := guard.Open(ctx, st, seal.Generate())
			if err != nil {
				b.Fatal(err)
			}
			measure(b, g)
		})
	}
}

// BenchmarkClaim is what stands between a call and its upstream (P2).
func BenchmarkClaim(b *testing.B) {
	overStores(b, func(b *testing.B, g *guard.Guard) {
		n := 0
		b.ReportAllocs()
		for b.Loop() {
			n++
			if _, err := g.Claim(ctx, benchCall(g, fmt.Sprint(n)), guard.Finding{}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkSettle is what stands before the end of an answer of 1 KiB. The claims
// before it are not measured.
func BenchmarkSettle(b *testing.B) {
	body := make([]byte, 1<<10)
	overStores(b, func(b *testing.B, g *guard.Guard) {
		b.ReportAllocs()
		for n := range b.N {
			b.StopTimer()
			e, err := g.Claim(ctx, benchCall(g, fmt.Sprint(n)), guard.Finding{})
			if err != nil {
				b.Fatal(err)
			}
			e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}})
			e.Write(body)
			b.StartTimer()
			if err := e.Settle(ctx, guard.Outcome{Verdict: guard.Completed, Status: 201, Whole: true}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkExecutions is whole executions with answers of 100 B, which stand in the
// record, and of 1 KiB, which stand beside it: one after the other, and 64 at a time,
// which share syncs.
func BenchmarkExecutions(b *testing.B) {
	for _, size := range []int{100, 1 << 10} {
		body := make([]byte, size)
		b.Run(fmt.Sprintf("%dB/serial", size), func(b *testing.B) {
			overStores(b, func(b *testing.B, g *guard.Guard) {
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					n++
					run(b, g, benchCall(g, fmt.Sprint(n)), body)
				}
			})
		})
		b.Run(fmt.Sprintf("%dB/parallel64", size), func(b *testing.B) {
			overStores(b, func(b *testing.B, g *guard.Guard) {
				b.ReportAllocs()
				at64(b, func(n int64) error {
					e, err := g.Claim(ctx, benchCall(g, fmt.Sprint(n)), guard.Finding{})
					if err != nil {
						return err
					}
					e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}})
					e.Write(body)
					return e.Settle(ctx, guard.Outcome{Verdict: guard.Completed, Status: 201, Whole: true})
				})
			})
		})
	}
}

// at64 calls do b.N times, 64 at a time, with the number of the call.
func at64(b *testing.B, do func(n int64) error) {
	var next atomic.Int64
	done := make(chan error, 64)
	for range cap(done) {
		go func() {
			for {
				n := next.Add(1)
				if n > int64(b.N) {
					done <- nil
					return
				}
				if err := do(n); err != nil {
					done <- err
					return
				}
			}
		}()
	}
	for range cap(done) {
		if err := <-done; err != nil {
			b.Error(err)
		}
	}
}
