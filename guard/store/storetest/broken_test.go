package storetest

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// The suite is worth something only if it can fail: each of these stores breaks one
// promise, and the check of histories must say so.

type ignoresConditions struct{ store.Store }

func (s ignoresConditions) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	var changed []store.Write
	for _, w := range batch {
		if w.If = (store.Condition{}); !w.Check {
			changed = append(changed, w)
		}
	}
	return s.Store.Commit(ctx, changed...)
}

// losesWrites drops the last write of a batch now and then.
type losesWrites struct {
	store.Store
	mu sync.Mutex
	n  int
}

func (s *losesWrites) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	s.mu.Lock()
	s.n++
	lose := s.n%10 == 0 && len(batch) > 1
	s.mu.Unlock()
	if lose {
		batch = batch[:len(batch)-1]
	}
	return s.Store.Commit(ctx, batch...)
}

// readsStale answers every third read of a key with what it saw before.
type readsStale struct {
	store.Store
	mu   sync.Mutex
	n    int
	seen map[string]store.Entry
}

func (s *readsStale) Get(ctx context.Context, key []byte) (store.Entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	if e, ok := s.seen[string(key)]; ok && s.n%3 == 0 {
		return e, nil
	}
	e, err := s.Store.Get(ctx, key)
	if err == nil {
		s.seen[string(key)] = e
	}
	return e, err
}

// tearsBatches commits the writes of a batch one by one, where nothing is asked.
type tearsBatches struct{ store.Store }

func (s tearsBatches) Commit(ctx context.Context, batch ...store.Write) (v store.Version, err error) {
	for i := range batch {
		if !batch[i].If.None() {
			return s.Store.Commit(ctx, batch...)
		}
	}
	for i := range batch {
		if v, err = s.Store.Commit(ctx, batch[i]); err != nil {
			return 0, err
		}
		runtime.Gosched()
	}
	return v, nil
}

// acknowledgesEarly answers before the commit is readable.
type acknowledgesEarly struct {
	store.Store
	pending chan []store.Write
}

func (s acknowledgesEarly) Get(ctx context.Context, key []byte) (store.Entry, error) {
	e, err := s.Store.Get(ctx, key)
	select {
	case batch := <-s.pending:
		if _, err := s.Store.Commit(ctx, batch...); err != nil {
			return store.Entry{}, err
		}
	default:
	}
	return e, err
}

func (s acknowledgesEarly) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if len(batch) == 1 && batch[0].If.None() {
		select {
		case s.pending <- batch:
			return 1 << 40, nil
		default:
		}
	}
	return s.Store.Commit(ctx, batch...)
}

func TestBrokenStoresAreFoundOut(t *testing.T) {
	for name, wrap := range map[string]func(store.Store) store.Store{
		"IgnoresConditions": func(s store.Store) store.Store { return ignoresConditions{s} },
		"LosesWrites":       func(s store.Store) store.Store { return &losesWrites{Store: s} },
		"ReadsStale":        func(s store.Store) store.Store { return &readsStale{Store: s, seen: map[string]store.Entry{}} },
		"TearsBatches":      func(s store.Store) store.Store { return tearsBatches{s} },
		"AcknowledgesEarly": func(s store.Store) store.Store { return acknowledgesEarly{s, make(chan []store.Write, 1)} },
	} {
		t.Run(name, func(t *testing.T) {
			const rounds = 100
			for round := range uint64(rounds) {
				history, err := record(t.Context(), wrap(memory.New(memory.Options{})), round)
				if err != nil {
					t.Fatal(err)
				}
				if porcupine.CheckOperationsTimeout(model, history, patience) == porcupine.Illegal {
					return
				}
			}
			t.Errorf("%d histories of a broken store passed as linearizable", rounds)
		})
	}
}

func TestSoundStoreIsNotAccused(t *testing.T) {
	exerciseLinearizability(t, func(_ *testing.T, now func() time.Time) store.Store {
		return memory.New(memory.Options{Now: now})
	})
}
