package caddymodule

import (
	"context"
	"iter"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// stuck is a store whose scans hang, whatever their context says, as a read of a disk
// that is gone does.
type stuck struct {
	*memory.Store
	hang  chan struct{}
	scans atomic.Int32
}

func (s *stuck) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	if s.hang != nil {
		s.scans.Add(1)
		<-s.hang
	}
	return s.Store.Scan(ctx, r)
}

// A store that hangs holds up no scrape for longer than its patience, and is read once
// at a time, however many scrapes come. Afterwards all is as before.
func TestDoubtsOfAStoreThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &stuck{Store: memory.New(memory.Options{})}
		ring := seal.Generate()
		g, _, err := execution.Open(t.Context(), st, ring)
		if err != nil {
			t.Fatal(err)
		}
		e := &engine{calls: &guard.Engine{Store: st, Executions: g, Escalations: hitl.NewStore(st, ring)}}
		st.hang = make(chan struct{})
		var scrapes sync.WaitGroup
		for range 10 {
			scrapes.Go(func() {
				if d := e.doubts(); d != nil {
					t.Errorf("%d doubts were counted", d.N)
				}
			})
		}
		scrapes.Wait() // else without end
		if n := st.scans.Load(); n != 1 {
			t.Errorf("%d scans hang", n)
		}
		close(st.hang)
		synctest.Wait()
		if d := e.doubts(); d == nil || d.N != 0 {
			t.Errorf("afterwards: %v", d)
		}
	})
}
