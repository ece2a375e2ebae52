package checkpoint_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// gateway is one of several over a store.
type gateway struct {
	*memory.Member
	*checkpoint.Store
}

func join(mem *memory.Store, ring *seal.Ring, node string) gateway {
	m := mem.Join(node)
	return gateway{m, checkpoint.New(m, ring)}
}

// makes makes a checkpoint, or reports that there is no room.
func (d gateway) makes(t *testing.T, id string, terms checkpoint.Terms) (p *checkpoint.Pending, made bool) {
	t.Helper()
	terms.TTL = ttl
	p, err := d.Prepare(ctx, small(id), nil, terms)
	if over := (*checkpoint.QuotaError)(nil); errors.As(err, &over) {
		return nil, false
	}
	if err == nil {
		err = p.Commit(ctx, d.Member)
	}
	if err != nil {
		t.Error(err)
	}
	return p, err == nil
}

// ADR 0133: the checkpoints of a workflow, or of a caller, are never more than the limit at all gateways together,
// whatever races; and they are as many as that.
func TestFleetQuotaIsNeverExceeded(t *testing.T) {
	for name, terms := range map[string]checkpoint.Terms{
		"workflow": {Workflow: checkpoint.Quota{Count: 50}}, "caller": {Caller: checkpoint.Quota{Count: 50}},
		"both": {Workflow: checkpoint.Quota{Count: 50}, Caller: checkpoint.Quota{Count: 1000}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mem, ring := memory.New(memory.Options{}), seal.Generate()
				all := []gateway{join(mem, ring, "a"), join(mem, ring, "b"), join(mem, ring, "c")}
				var mu sync.Mutex
				made := map[string]*checkpoint.Pending{}
				for round := range 20 {
					var wg sync.WaitGroup
					for i, d := range all {
						for n := range 10 {
							wg.Go(func() {
								id := fmt.Sprint(round, "-", i, "-", n)
								if p, ok := d.makes(t, id, terms); ok {
									mu.Lock()
									made[id] = p
									mu.Unlock()
								}
							})
						}
					}
					wg.Wait()
					if len(made) > 50 {
						t.Fatalf("%d checkpoints", len(made))
					}
					time.Sleep(2 * time.Second) // what is not used is given back
				}
				if len(made) != 50 {
					t.Errorf("%d checkpoints, and there is room for 50", len(made))
				}
			})
		})
	}
}

// The bytes of checkpoints are bounded in the same way.
func TestFleetQuotaOfBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ring := memory.New(memory.Options{}), seal.Generate()
		all := []gateway{join(mem, ring, "a"), join(mem, ring, "b")}
		made := func(bytes int64) (n int) {
			for i := range 40 {
				if _, ok := all[i%2].makes(t, fmt.Sprint(bytes, "-", i), checkpoint.Terms{Caller: checkpoint.Quota{Bytes: bytes}}); ok {
					n++
				}
				time.Sleep(2 * time.Second)
			}
			return n
		}
		few := made(16 << 10) // each counts for its record and a small result
		if few < 4 || few > 8 {
			t.Fatalf("%d checkpoints in 16 KiB", few)
		}
		if more := made(32 << 10); more < few-1 || more > few+1 { // another limit counts at once
			t.Errorf("%d more in 16 KiB more, and %d in the first", more, few)
		}
	})
}

// What a gateway may have that is gone is free again but for what it has made, which counts; a later one of its
// name finds that.
func TestFleetQuotaOfWhoIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ring := memory.New(memory.Options{}), seal.Generate()
		terms := checkpoint.Terms{Workflow: checkpoint.Quota{Count: 40}}
		a, b := join(mem, ring, "a"), join(mem, ring, "b")
		if _, ok := a.makes(t, "first", terms); !ok {
			t.Fatal("no room")
		}
		a.Remove() // with a cap that it has not used
		if p, err := a.Prepare(ctx, small("late"), nil, checkpoint.Terms{TTL: ttl, Workflow: terms.Workflow}); err == nil {
			if err := p.Commit(ctx, a.Member); err == nil {
				t.Error("a gateway that is gone has made a checkpoint")
			}
		}
		again := join(mem, ring, "a")
		n := 1
		for i := range 60 {
			if _, ok := []gateway{b, again}[i%2].makes(t, fmt.Sprint(i), terms); ok {
				n++
			}
			time.Sleep(2 * time.Second)
		}
		if n != 40 {
			t.Errorf("%d checkpoints, and there is room for 40", n)
		}
		time.Sleep(2 * ttl) // all have expired
		if _, ok := b.makes(t, "later", terms); !ok {
			t.Error("what has expired counts")
		}
	})
}

// A gateway that has forgotten what it has counted reads it again.
func TestFleetQuotaCountsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ring := memory.New(memory.Options{}), seal.Generate()
		terms := checkpoint.Terms{Workflow: checkpoint.Quota{Count: 3}}
		a := join(mem, ring, "a")
		for i := range 3 {
			if _, ok := a.makes(t, fmt.Sprint(i), terms); !ok {
				t.Fatal("no room")
			}
		}
		forgetful := gateway{a.Member, checkpoint.New(a.Member, ring)} // the same member
		if _, ok := forgetful.makes(t, "4", terms); ok {
			t.Error("4 checkpoints")
		}
		other := small("5")
		other.Workflow, other.Caller = "another", execution.CallerHash{9}
		if _, err := forgetful.Prepare(ctx, other, nil, checkpoint.Terms{TTL: ttl, Workflow: terms.Workflow}); err != nil {
			t.Errorf("another workflow: %v", err)
		}
	})
}

// What a gateway has not used of its share holds up nobody for long, and is not used once it was given back.
func TestFleetQuotaOfAnIdleGateway(t *testing.T) {
	for _, patient := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			mem, ring := memory.New(memory.Options{}), seal.Generate()
			terms := checkpoint.Terms{Workflow: checkpoint.Quota{Count: 50}}
			a, b := join(mem, ring, "a"), join(mem, ring, "b")
			a.makes(t, "first", terms)
			n := 1
			for i := range 60 {
				_, ok := b.makes(t, fmt.Sprint("b", i), terms)
				switch {
				case ok:
					n++
				case patient:
					time.Sleep(2 * time.Second)
				}
				if !ok && !patient || n == 50 {
					break
				}
			}
			if patient && n != 50 || !patient && n < 30 {
				t.Errorf("patient %t: %d checkpoints", patient, n)
			}
			for i := range 20 {
				if _, ok := a.makes(t, fmt.Sprint("a", i), terms); ok {
					n++
				}
			}
			if n > 50 {
				t.Errorf("patient %t: %d checkpoints, at most 50", patient, n)
			}
		})
	}
}

// A limit that is lowered counts at once for all.
func TestFleetQuotaThatIsLowered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ring := memory.New(memory.Options{}), seal.Generate()
		a, b := join(mem, ring, "a"), join(mem, ring, "b")
		n := 0
		for i, most := range []int{1000, 1000, 1000, 1000, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10} {
			if _, ok := []gateway{a, b}[i%2].makes(t, fmt.Sprint(i), checkpoint.Terms{Workflow: checkpoint.Quota{Count: most}}); ok {
				n++
			}
		}
		if n < 4 || n > 10 {
			t.Errorf("%d checkpoints, at most 10", n)
		}
	})
}

// between does something right after a member has counted, before it writes what it may have.
type between struct {
	store.Shared
	once func()
}

func (b *between) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		for entry, err := range b.Shared.Scan(ctx, r) {
			if !yield(entry, err) {
				return
			}
		}
		if do := b.once; do != nil {
			b.once = nil
			do()
		}
	}
}

// Two that count at the same time do not both take what is left.
func TestFleetQuotaOfTwoThatCount(t *testing.T) {
	mem, ring := memory.New(memory.Options{}), seal.Generate()
	terms := checkpoint.Terms{Workflow: checkpoint.Quota{Count: 50}}
	b, n := join(mem, ring, "b"), 0
	m := mem.Join("a")
	hooked := &between{Shared: m, once: func() {
		for i := range 50 {
			if _, ok := b.makes(t, fmt.Sprint("b", i), terms); ok {
				n++
			}
		}
	}}
	a := gateway{m, checkpoint.New(hooked, ring)}
	for i := range 20 {
		if _, ok := a.makes(t, fmt.Sprint("a", i), terms); ok {
			n++
		}
	}
	if n != 50 {
		t.Errorf("%d checkpoints, at most 50", n)
	}
}

// commits counts the commits of a member.
type commits struct {
	store.Shared
	n atomic.Int64
}

func (c *commits) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	c.n.Add(1)
	return c.Shared.Commit(ctx, batch...)
}

// A-checkpoint-flooding-a: who is refused for its rate costs the database nothing.
func TestFleetRateCostsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := memory.New(memory.Options{}).Join("a")
		st := &commits{Shared: m}
		a := gateway{m, checkpoint.New(st, seal.Generate())}
		terms := checkpoint.Terms{Workflow: checkpoint.Quota{Count: 1000}, Rate: 3}
		for i := range 3 {
			if _, ok := a.makes(t, fmt.Sprint(i), terms); !ok {
				t.Fatal("no room")
			}
		}
		st.n.Store(0)
		for i := range 50 {
			if _, ok := a.makes(t, fmt.Sprint("over", i), terms); ok {
				t.Error("over the rate")
			}
		}
		if n := st.n.Load(); n > 0 {
			t.Errorf("50 refusals make %d commits", n)
		}
	})
}
