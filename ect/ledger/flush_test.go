package ledger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

func plainEvent(n int) Event {
	return Event{ID: fmt.Sprint("e", n), Workflow: "w", Payload: []byte("token")}
}

// Flush waits until earlier events can be listed, and no longer than ctx.
func TestFlush(t *testing.T) {
	st := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(st))
	if err := l.Flush(t.Context()); err != nil {
		t.Errorf("nothing waits, and: %v", err)
	}
	mustAppend(t, l, plainEvent(0))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Flush(over); !errors.Is(err, context.Canceled) {
		t.Errorf("nothing moves, and: %v", err)
	}
	// What an earlier life has left behind is waited for too.
	next := mustOpen(t, testOptions(st))
	if err := next.Flush(over); !errors.Is(err, context.Canceled) {
		t.Errorf("nothing moves, and: %v", err)
	}
	next.Start()
	var all sync.WaitGroup
	for n := 1; n <= 50; n++ {
		all.Go(func() {
			if err := next.Append(t.Context(), []Event{plainEvent(n)}); err != nil {
				t.Error(err)
			}
			if err := next.Flush(t.Context()); err != nil {
				t.Error(err)
			}
			if found, err := next.Find(t.Context(), fmt.Sprint("e", n)); err != nil || len(found) != 1 {
				t.Errorf("event %d after a flush: %v %v", n, found, err)
			}
		})
	}
	all.Wait()
	if page, err := next.List(t.Context(), "w", "", MaxPage); err != nil || len(page.Entries) != 51 {
		t.Errorf("%d entries, %v", len(page.Entries), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := next.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if err := next.Flush(t.Context()); err != nil {
		t.Errorf("closed, with nothing left: %v", err)
	}
}

// A commit of unknown result makes Flush scan and wait at once.
func TestFlushAfterALostCommit(t *testing.T) {
	for range 300 { // the sequencer is anywhere, such as in the middle of its first scan
		flushAfterALostCommit(t)
	}
}

func flushAfterALostCommit(t *testing.T) {
	t.Helper()
	st := memory.New(memory.Options{})
	l := mustStart(t, testOptions(st))
	p := must(l.Record(plainEvent(1)))(t)
	if _, err := st.Commit(t.Context(), p.Writes()...); err != nil {
		t.Fatal(err)
	}
	_ = p.Done(fmt.Errorf("%w: the answer was lost", store.ErrUnknown))
	ctx, cancel := context.WithTimeout(t.Context(), sweepEvery/2)
	defer cancel()
	if err := l.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	if found, err := l.Find(t.Context(), "e1"); err != nil || len(found) != 1 {
		t.Fatalf("%v %v", found, err)
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// An event that does not open never reaches the tree, which Flush reports.
func TestFlushOfWhatDoesNotOpen(t *testing.T) {
	st := memory.New(memory.Options{})
	l := mustOpen(t, testOptions(st))
	p := must(l.Record(plainEvent(1)))(t)
	writes := p.Writes()
	writes[1].Value[len(writes[1].Value)-1] ^= 1
	if _, err := st.Commit(t.Context(), writes...); err != nil {
		t.Fatal(err)
	}
	next := mustStart(t, testOptions(st))
	if err := next.Flush(t.Context()); !errors.Is(err, ErrWaiting) {
		t.Errorf("%v", err)
	}
}
