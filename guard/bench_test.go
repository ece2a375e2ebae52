package guard_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

func benchGuard(b *testing.B) *guard.Guard {
	g, _, err := guard.Open(ctx, memory.New(memory.Options{}), seal.Generate())
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

func benchCall(g *guard.Guard, id string) *guard.Call {
	s := guard.Scope{Caller: "credential:0123456789abcdef", Guard: "default", Method: "POST", Path: "/v1/charges", ID: id}
	return &guard.Call{
		Key: g.Key(s), Scope: s, Action: "charge", Deadline: time.Minute,
		KeepResult: time.Hour, KeepKey: time.Hour, ResultCap: 8 << 20,
	}
}

func run(b *testing.B, g *guard.Guard, c *guard.Call, body []byte) {
	e, err := g.Claim(ctx, c, guard.Finding{})
	if err != nil {
		b.Fatal(err)
	}
	e.Recording().Start(201, map[string][]string{"Content-Type": {"application/json"}})
	e.Write(body)
	if err := e.Settle(ctx, guard.Outcome{Verdict: guard.Completed, Status: 201, Whole: true}); err != nil {
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

// One whole execution, without its store.
func BenchmarkExecution(b *testing.B) {
	for _, size := range []int{100, 1 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			st := &forgetful{Store: memory.New(memory.Options{})}
			g, _, err := guard.Open(ctx, st, seal.Generate())
			if err != nil {
				b.Fatal(err)
			}
			st.on = true
			body, n := make([]byte, size), 0
			b.ReportAllocs()
			for b.Loop() {
				n++
				run(b, g, benchCall(g, fmt.Sprint(n)), body)
			}
		})
	}
}

func BenchmarkReplay(b *testing.B) {
	for _, size := range []int{100, 1 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			overStores(b, func(b *testing.B, g *guard.Guard) {
				c := benchCall(g, "1")
				run(b, g, c, make([]byte, size))
				buf := make([]byte, 32<<10)
				b.ReportAllocs()
				for b.Loop() {
					found, err := g.Find(ctx, c.Key, c.Fingerprint)
					if err != nil || found.Standing != guard.Replayable {
						b.Fatal(found.Standing, err)
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
