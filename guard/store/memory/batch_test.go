package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// failing is a store whose commits end with an error.
type failing struct {
	store.Store
	err error
}

func (f failing) Commit(context.Context, ...store.Write) (store.Version, error) { return 0, f.err }

func TestBatchRunsItsCallbacksOnceInOrderWithTheErrorOfTheCommit(t *testing.T) {
	key := []byte("a")
	for name, want := range map[string]error{
		"landed": nil, "unknown": fmt.Errorf("x: %w", store.ErrUnknown), "conflict": &store.Conflict{Key: key}, "refused": store.ErrFull,
	} {
		t.Run(name, func(t *testing.T) {
			var st store.Store = memory.New(memory.Options{})
			if want != nil {
				st = failing{st, want}
			}
			var calls []string
			note := func(which string) func(error) error {
				return func(err error) error {
					if !errors.Is(err, want) {
						t.Errorf("%s got %v", which, err)
					}
					calls = append(calls, which)
					if err != nil {
						return fmt.Errorf("%s: %w", which, err)
					}
					return nil
				}
			}
			inner := store.NewBatch(store.Write{Key: key, Value: []byte("1")})
			inner.OnDone(note("inner"))
			b := store.NewBatch()
			b.OnDone(note("first"))
			b.Join(inner)
			b.Join(nil)
			b.Add(store.Write{Key: []byte("b")})
			b.OnDone(note("last"))
			err := b.Commit(t.Context(), st)
			if !errors.Is(err, want) || want != nil && err.Error() != "last: inner: first: "+want.Error() {
				t.Errorf("%v", err)
			}
			if again := b.Done(store.ErrClosed); again != store.ErrClosed {
				t.Errorf("ended again: %v", again)
			}
			if inner.Done(nil) != nil || fmt.Sprint(calls) != "[first inner last]" {
				t.Errorf("callbacks: %v", calls)
			}
			if _, err := st.Get(t.Context(), key); (err == nil) != (want == nil) {
				t.Errorf("the write: %v", err)
			}
		})
	}
}

// A batch that is never committed releases what its callbacks hold.
func TestBatchThatIsGivenUpIsDone(t *testing.T) {
	var got error
	b := store.NewBatch(store.Write{Key: []byte("a")})
	b.OnDone(func(err error) error { got = err; return err })
	if err := b.Done(context.Canceled); err != context.Canceled || got != context.Canceled {
		t.Error(err, got)
	}
}

func TestEmptyBatchCommitsNothing(t *testing.T) {
	done := false
	b := new(store.Batch)
	b.OnDone(func(err error) error { done = true; return err })
	if err := b.Commit(t.Context(), failing{err: store.ErrClosed}); err != nil || !done {
		t.Error(err, done)
	}
	var none *store.Batch
	if none.Writes() != nil || none.Done(store.ErrFull) != store.ErrFull || none.Commit(t.Context(), failing{}) != nil {
		t.Error("a nil batch is not empty")
	}
}

func TestLostFindsTheWriteOfAConflict(t *testing.T) {
	writes := []store.Write{{Key: []byte("a")}, {Key: []byte("b")}}
	lost := fmt.Errorf("x: %w", &store.Conflict{Index: 7, Key: []byte("b")})
	if !store.Lost(lost, writes) || store.Lost(lost, writes[:1]) || store.Lost(store.ErrUnknown, writes) || store.Lost(nil, writes) {
		t.Error("Lost")
	}
}
