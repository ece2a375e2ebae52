package execution_test

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

func benchGuard(b *testing.B) *execution.Guard {
	g, _, err := execution.Open(ctx, memory.New(memory.Options{}), seal.Generate())
	if err != nil {
		b.Fatal(err)
	}
	return g
}

// forgetful takes every commit and keeps none, once it is on: what is measured over
// it is the guard's own cost.
type forgetful struct {
	store.Store
	on bool
}

func (f *forgetful) Commit(c context.Context, batch ...store.Write) (store.Version, error) {
	if f.on {
		return 1, nil
	}
	return f.Store.Commit(c, batch...)
}

func benchCall(g *execution.Guard, id string) *execution.Call {
	s := execution.Scope{Caller: "credential:0123456789abcdef", Guard: "default", Method: "POST", Path: "/v1/charges", ID: id}
	return &execution.Call{
		Key: g.Key(s), Scope: s, Action: "charge", Deadline: time.Minute,
		KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 8 << 20,
	}
}

func run(b *testing.B, g *execution.Guard, c *execution.Call, body []byte) {
	e, err := g.Claim(ctx, c, execution.Finding{})
	if err != nil {
		b.Fatal(err)
	}
	e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}})
	e.Write(body, false)
	if err := e.Settle(ctx, execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true}); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkKey(b *testing.B) {
	g := benchGuard(b)
	c := benchCall(g, "8e03978e-40d5-43dd-bc93-6894a57f9324")
	b.ReportAllocs()
	for b.Loop() {
		g.Key(c.Scope)
	}
}

// One whole execution, without its store: of a caller without a quota, and with one.
func BenchmarkExecution(b *testing.B) {
	measure := func(name string, size int, q execution.Quota) {
		b.Run(name, func(b *testing.B) {
			st := &forgetful{Store: memory.New(memory.Options{})}
			g, _, err := execution.Open(ctx, st, seal.Generate())
			if err != nil {
				b.Fatal(err)
			}
			st.on = true
			body, n := make([]byte, size), 0
			b.ReportAllocs()
			for b.Loop() {
				n++
				c := benchCall(g, fmt.Sprint(n))
				c.Quota = q
				run(b, g, c, body)
			}
		})
	}
	measure("100", 100, execution.Quota{})
	measure("1024", 1<<10, execution.Quota{})
	measure("quota", 100, execution.Quota{Open: 100, Bytes: 1 << 50})
}

func BenchmarkReplay(b *testing.B) {
	for _, size := range []int{100, 1 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			overStores(b, func(b *testing.B, g *execution.Guard) {
				c := benchCall(g, "1")
				run(b, g, c, make([]byte, size))
				buf := make([]byte, 32<<10)
				b.ReportAllocs()
				for b.Loop() {
					found, err := g.LookUp(ctx, c.Key, c.Fingerprint)
					if err != nil || found.Status != execution.Replayable {
						b.Fatal(found.Status, err)
					}
					result, err := g.Result(ctx, c.Key, found)
					if err != nil {
						b.Fatal(err)
					}
					for body := result.Body(ctx); err == nil; {
						_, err = body.Read(buf)
					}
					if err != io.EOF {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

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

func overStores(b *testing.B, measure func(b *testing.B, g *execution.Guard)) {
	for _, s := range stores {
		b.Run(s.name, func(b *testing.B) {
			st := s.open(b)
			b.Cleanup(func() { _ = st.Close() })
			g, _, err := execution.Open(ctx, st, seal.Generate())
			if err != nil {
				b.Fatal(err)
			}
			measure(b, g)
		})
	}
}

// BenchmarkClaim is what stands between a call and its upstream (P2).
func BenchmarkClaim(b *testing.B) {
	overStores(b, func(b *testing.B, g *execution.Guard) {
		n := 0
		b.ReportAllocs()
		for b.Loop() {
			n++
			if _, err := g.Claim(ctx, benchCall(g, fmt.Sprint(n)), execution.Finding{}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkSettle is what stands before the end of an answer of 1 KiB. The claims
// before it are not measured.
func BenchmarkSettle(b *testing.B) {
	body := make([]byte, 1<<10)
	overStores(b, func(b *testing.B, g *execution.Guard) {
		b.ReportAllocs()
		for n := range b.N {
			b.StopTimer()
			e, err := g.Claim(ctx, benchCall(g, fmt.Sprint(n)), execution.Finding{})
			if err != nil {
				b.Fatal(err)
			}
			e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}})
			e.Write(body, false)
			b.StartTimer()
			if err := e.Settle(ctx, execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true}); err != nil {
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
			overStores(b, func(b *testing.B, g *execution.Guard) {
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					n++
					run(b, g, benchCall(g, fmt.Sprint(n)), body)
				}
			})
		})
		b.Run(fmt.Sprintf("%dB/parallel64", size), func(b *testing.B) {
			overStores(b, func(b *testing.B, g *execution.Guard) {
				b.ReportAllocs()
				at64(b, func(n int64) error {
					e, err := g.Claim(ctx, benchCall(g, fmt.Sprint(n)), execution.Finding{})
					if err != nil {
						return err
					}
					e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}})
					e.Write(body, false)
					return e.Settle(ctx, execution.Outcome{Verdict: execution.Completed, Status: 201, Whole: true})
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
