package breaker_test

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// The cost of one guarded call that does nothing: Acquire and Done. The comparison
// with other breakers is in the module bench.

func benchmark(b *testing.B, br *breaker.Breaker, op breaker.Op, o breaker.Outcome) {
	call := func() {
		permit, err := br.Acquire(op)
		if err != nil {
			return
		}
		permit.Done(o)
	}
	b.Run("serial", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			call()
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				call()
			}
		})
	})
}

func BenchmarkClosed(b *testing.B) {
	benchmark(b, newBreaker(b, breaker.Settings{}, nil), breaker.Op{}, breaker.Outcome{Class: breaker.Success})
}

func BenchmarkClosedWithPatience(b *testing.B) {
	benchmark(b, newBreaker(b, breaker.Settings{Patience: 30 * time.Second}, nil), breaker.Op{},
		breaker.Outcome{Class: breaker.Success})
}

func BenchmarkClosedWithPatienceOfTheCall(b *testing.B) {
	benchmark(b, newBreaker(b, breaker.Settings{}, nil), breaker.Op{Patience: 100 * time.Second},
		breaker.Outcome{Class: breaker.Success})
}

func BenchmarkClosedWithAView(b *testing.B) {
	br := newBreaker(b, breaker.Settings{}, nil)
	calls(b, br, 10, ok)
	calls(b, br, 1, failed) // else there is nothing to look at
	benchmark(b, br, breaker.Op{View: mustView(b, 0.2, 0)}, breaker.Outcome{Class: breaker.Success})
}

func BenchmarkFailing(b *testing.B) {
	br := newBreaker(b, breaker.Settings{}, nil)
	br.SetMode(breaker.ForcedClosed)
	benchmark(b, br, breaker.Op{}, breaker.Outcome{Class: breaker.Failure, Cause: "status 502", Evidence: "token"})
}

func BenchmarkOpen(b *testing.B) {
	br := newBreaker(b, breaker.Settings{}, nil)
	br.SetMode(breaker.ForcedOpen)
	benchmark(b, br, breaker.Op{}, breaker.Outcome{})
}

func BenchmarkRegistry(b *testing.B) {
	rules := mustRules(b, breaker.Settings{})
	registry := breaker.NewRegistry(0, nil)
	key := breaker.Key{Upstream: "localhost:9001", Class: "write"}
	b.ReportAllocs()
	for b.Loop() {
		permit, err := registry.Get(key, rules).Acquire(breaker.Op{})
		if err != nil {
			b.Fatal(err)
		}
		permit.Done(breaker.Outcome{Class: breaker.Success})
	}
}

// BenchmarkClock is one clock read, for comparison.
func BenchmarkClock(b *testing.B) {
	var t time.Time
	for b.Loop() {
		t = time.Now()
	}
	_ = t
}
