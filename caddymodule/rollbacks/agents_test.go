package rollbacks_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// counting counts what is read of a store.
type counting struct {
	store.Store
	gets atomic.Int64
}

func (c *counting) Get(ctx context.Context, key []byte) (store.Entry, error) {
	c.gets.Add(1)
	return c.Store.Get(ctx, key)
}

// Cascade 4.2.3: what led to the checkpoints of one workflow is not verified anew for each
// of them, or nobody could plan the rollback of a long chain in time. The agent behind each
// is the nearest all the same.
func TestAgentsOfALongChain(t *testing.T) {
	b := newBench(t)
	if err := b.told.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	reads := &counting{Store: b.store}
	b.store = reads
	b.open()
	each := func(length int, first, middle string) int64 {
		wid := uuid.NewString()
		var ids, want []string
		var parents []string
		by := gateway
		for i := range length {
			for at, agent := range map[int]string{0: first, length / 2: middle} {
				if i == at && agent != "" {
					parents, by = append(parents, b.token(agent, ect.Claims{Workflow: wid, Parents: parents}).ID()), agent
				}
			}
			id := b.checkpoint(gateway, wid, fmt.Sprint(wid, i), parents...).ID()
			parents = []string{id}
			ids, want = append(ids, id), append(want, by)
		}
		b.get(ids[0]) // all have their places
		before := reads.gets.Load()
		for i := length - 1; i >= 0; i-- {
			if got := b.get(ids[i]).Agent; got != want[i] {
				t.Errorf("%d of %d: %s, want %s", i, length, got, want[i])
			}
		}
		return (reads.gets.Load() - before) / int64(length)
	}
	for _, agents := range [][2]string{{"", ""}, {alice, ""}, {alice, bob}, {"", bob}} {
		short, long := each(10, agents[0], agents[1]), each(60, agents[0], agents[1])
		if long > 2*short {
			t.Errorf("%v: %d reads for each of 10, and %d for each of 60", agents, short, long)
		}
	}
}
