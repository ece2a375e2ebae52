package storetest

import (
	"context"
	"errors"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func exerciseGet(t *testing.T, open Opener) {
	t.Run("Absent", func(t *testing.T) {
		newBench(t, open).absent("a")
	})

	t.Run("Present", func(t *testing.T) {
		b := newBench(t, open)
		v := b.put("a", "1")
		e := b.is("a", "1")
		if v == 0 || e.Version != v {
			t.Errorf("version %d after commit %d, want the same and not zero", e.Version, v)
		}
		if !e.Expires.IsZero() {
			t.Errorf("expires %v, want never", e.Expires)
		}
	})

	t.Run("EmptyValue", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "")
		b.is("a", "")
	})

	t.Run("NeighboursAreNotFound", func(t *testing.T) {
		b := newBench(t, open)
		b.put("ab", "1")
		for _, key := range []string{"a", "abc", "ac", "aa", "b", "\x00", "\xff"} {
			b.absent(key)
		}
	})

	t.Run("ResultBelongsToTheCaller", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "1")
		e := b.is("a", "1")
		e.Key[0], e.Value[0] = 'x', 'x'
		b.is("a", "1")
	})

	t.Run("ContextOver", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "1")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := b.Get(ctx, []byte("a")); !errors.Is(err, context.Canceled) {
			t.Errorf("get with a cancelled context: %v", err)
		}
	})

	t.Run("Now", func(t *testing.T) {
		b := newBench(t, open)
		now, err := b.Store.Now(t.Context())
		if err != nil || !now.Equal(b.clock.Now()) {
			t.Errorf("now = %v, %v; want %v", now, err, b.clock.Now())
		}
	})

	t.Run("LatestOfManyVersions", func(t *testing.T) {
		b := newBench(t, open)
		var last store.Version
		for _, value := range []string{"1", "2", "3"} {
			last = b.put("a", value)
		}
		if e := b.is("a", "3"); e.Version != last {
			t.Errorf("version %d, want that of the last commit, %d", e.Version, last)
		}
	})
}
