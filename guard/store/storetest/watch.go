package storetest

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// patience is how long a wake-up may take on a busy machine; it bounds only tests
// that fail.
const patience = 30 * time.Second

func exerciseWatch(t *testing.T, open Opener) {
	woken := func(t *testing.T, changed <-chan struct{}) {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(patience):
			t.Fatal("slept through a change")
		}
	}

	t.Run("WakesOnEveryKindOfWrite", func(t *testing.T) {
		b := newBench(t, open)
		for _, w := range []store.Write{put("a", "1"), put("a", "2"), remove("a"), insert("a", "3")} {
			changed, cancel := b.Watch([]byte("a"))
			b.commit(put("other", "x"), w)
			woken(t, changed)
			cancel()
			cancel()
		}
	})

	t.Run("ChangeIsReadableWhenItWakes", func(t *testing.T) {
		b := newBench(t, open)
		changed, cancel := b.Watch([]byte("a"))
		defer cancel()
		landed := make(chan error, 1)
		go func() {
			_, err := b.Commit(t.Context(), put("a", "1"))
			landed <- err
		}()
		woken(t, changed)
		b.is("a", "1")
		if err := <-landed; err != nil {
			t.Fatal(err)
		}
	})

	t.Run("WatchThenReadMissesNothing", func(t *testing.T) {
		b := newBench(t, open)
		const last = 200
		done := make(chan error, 1)
		go func() {
			for i := range last + 1 {
				if _, err := b.Commit(t.Context(), put("a", string(rune('A'+i)))); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
		want := string(rune('A' + last))
		for {
			changed, cancel := b.Watch([]byte("a"))
			e, err := b.Get(t.Context(), []byte("a"))
			if err == nil && string(e.Value) == want {
				cancel()
				break
			}
			woken(t, changed)
			cancel()
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})

	t.Run("AllWatchersOfAKey", func(t *testing.T) {
		b := newBench(t, open)
		var all []<-chan struct{}
		for range 10 {
			changed, cancel := b.Watch([]byte("a"))
			defer cancel()
			all = append(all, changed)
		}
		b.put("a", "1")
		for _, changed := range all {
			woken(t, changed)
		}
	})

	t.Run("CloseWakes", func(t *testing.T) {
		b := newBench(t, open)
		changed, cancel := b.Watch([]byte("a"))
		defer cancel()
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		woken(t, changed)
		after, cancel := b.Watch([]byte("a"))
		defer cancel()
		woken(t, after)
	})
}
