package ledger

import (
	"context"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// full is a store with room for what goes on only, as a badger store at its largest size.
type full struct{ store.Store }

func (s full) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if batch[0].If.Holds(nil) { // the first write may begin something
		return 0, store.ErrFull
	}
	return s.Store.Commit(ctx, batch...)
}

// A store that has no room for anything new is pruned all the same, and what waits
// comes into the tree.
func TestPruneMakesRoom(t *testing.T) {
	mem := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(mem))
	for n := range tileWidth {
		if err := l.Append(t.Context(), []Event{testEvent(n)}); err != nil {
			t.Fatal(err)
		}
	}
	l = mustOpen(t, testOptions(full{mem}))
	drain(t, l)
	if n, err := l.Prune(t.Context(), time.Now().Add(time.Minute)); err != nil || n != tileWidth {
		t.Errorf("%d pruned: %v", n, err)
	}
	mustVerify(t, l)
}
