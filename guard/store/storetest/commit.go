package storetest

import (
	"context"
	"errors"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func exerciseCommit(t *testing.T, open Opener) {
	t.Run("AllOrNothing", func(t *testing.T) {
		b := newBench(t, open)
		b.put("b", "old")
		lost := b.conflict(put("a", "1"), insert("b", "new"), put("c", "1"))
		if lost.Index != 1 || string(lost.Key) != "b" {
			t.Errorf("conflict at write %d, key %q; want 1, b", lost.Index, lost.Key)
		}
		b.absent("a")
		b.is("b", "old")
		b.absent("c")
		v := b.commit(put("a", "1"), put("b", "new"), put("c", "1"), remove("d"))
		for key, value := range map[string]string{"a": "1", "b": "new", "c": "1"} {
			if e := b.is(key, value); e.Version != v {
				t.Errorf("%s has version %d, want that of its batch, %d", key, e.Version, v)
			}
		}
	})

	t.Run("ConflictNamesTheFirstLoserAndWhatStandsThere", func(t *testing.T) {
		b := newBench(t, open)
		v := b.put("b", "stands")
		b.put("c", "stands too")
		lost := b.conflict(insert("a", "1"), replace("b", "2", v+1), insert("c", "3"))
		if lost.Index != 1 || lost.Found == nil {
			t.Fatalf("conflict %+v, want write 1 and an entry", lost)
		}
		if f := lost.Found; string(f.Key) != "b" || string(f.Value) != "stands" || f.Version != v || !f.Expires.IsZero() {
			t.Errorf("found %+v, want the entry with version %d", f, v)
		}
	})

	t.Run("Absent", func(t *testing.T) {
		b := newBench(t, open)
		v := b.commit(insert("a", "1"))
		if lost := b.conflict(insert("a", "2")); lost.Found == nil || lost.Found.Version != v {
			t.Errorf("conflict %+v, want version %d", lost, v)
		}
		b.commit(remove("a"))
		again := b.commit(insert("a", "3"))
		if again == v {
			t.Errorf("version %d given twice to one key", v)
		}
		b.is("a", "3")
	})

	t.Run("VersionIs", func(t *testing.T) {
		b := newBench(t, open)
		if lost := b.conflict(replace("a", "1", 1)); lost.Found != nil {
			t.Errorf("found %+v under an absent key", lost.Found)
		}
		v1 := b.put("a", "1")
		v2 := b.commit(replace("a", "2", v1))
		if lost := b.conflict(replace("a", "3", v1)); lost.Found == nil || lost.Found.Version != v2 {
			t.Errorf("conflict %+v, want version %d", lost, v2)
		}
		b.is("a", "2")
		if v1 == v2 {
			t.Error("one version for two writes of one key")
		}
	})

	t.Run("SameValueNewVersion", func(t *testing.T) {
		b := newBench(t, open)
		if v1, v2 := b.put("a", "1"), b.put("a", "1"); v1 == v2 {
			t.Errorf("version %d given twice", v1)
		}
	})

	t.Run("Delete", func(t *testing.T) {
		b := newBench(t, open)
		if v := b.commit(remove("a")); v == 0 {
			t.Error("version 0 for a commit that deletes nothing")
		}
		v := b.put("a", "1")
		lost := b.conflict(store.Write{Key: []byte("a"), Delete: true, If: store.VersionIs(v + 1)})
		if lost.Found == nil || lost.Found.Version != v {
			t.Errorf("conflict %+v, want version %d", lost, v)
		}
		b.commit(store.Write{Key: []byte("a"), Delete: true, If: store.VersionIs(v)})
		b.absent("a")
		if lost := b.conflict(store.Write{Key: []byte("a"), Delete: true, If: store.VersionIs(v)}); lost.Found != nil {
			t.Errorf("found %+v under a deleted key", lost.Found)
		}
		// A delete that asks for absence writes nothing, but it asks.
		b.commit(store.Write{Key: []byte("a"), Delete: true, If: store.Absent()}, put("b", "1"))
		b.conflict(put("a", "1"), store.Write{Key: []byte("b"), Delete: true, If: store.Absent()})
		b.absent("a")
		b.is("b", "1")
	})

	t.Run("VersionsOfOneKeyNeverRepeat", func(t *testing.T) {
		b := newBench(t, open)
		seen := map[store.Version]bool{}
		for range 20 {
			v := b.put("a", "1")
			if v == 0 || seen[v] {
				t.Fatalf("version %d is zero or was given before", v)
			}
			seen[v] = true
			b.commit(remove("a"))
		}
	})

	t.Run("BatchStaysTheCallers", func(t *testing.T) {
		b := newBench(t, open)
		w := put("a", "1")
		b.commit(w)
		w.Key[0], w.Value[0] = 'x', 'x'
		b.is("a", "1")
		lost := b.conflict(insert("a", "2"))
		lost.Key[0], lost.Found.Value[0] = 'x', 'x'
		b.is("a", "1")
	})

	t.Run("ContextOverBeforeItIsQueued", func(t *testing.T) {
		b := newBench(t, open)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := b.Commit(ctx, put("a", "1"))
		if !errors.Is(err, context.Canceled) || errors.Is(err, store.ErrUnknown) {
			t.Errorf("commit with a cancelled context: %v; want the context's error, for it did not land", err)
		}
		b.absent("a")
	})
}
