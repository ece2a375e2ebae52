package storetest

import (
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func exerciseExpiry(t *testing.T, open Opener) {
	until := func(w store.Write, at time.Time) store.Write { w.Expires = at; return w }

	t.Run("FoundBeforeAndNotAfter", func(t *testing.T) {
		b := newBench(t, open)
		expires := b.Now().Add(1500 * time.Millisecond)
		b.commit(until(put("a", "1"), expires), put("b", "1"))
		if e := b.is("a", "1"); !e.Expires.Equal(expires) {
			t.Errorf("expires %v, want %v", e.Expires, expires)
		}
		b.Advance(1499 * time.Millisecond)
		b.is("a", "1")
		b.scans(store.Range{}, "a", "b")
		b.Advance(time.Millisecond)
		b.absent("a")
		b.scans(store.Range{}, "b")
		b.scans(store.Range{Reverse: true}, "b")
	})

	t.Run("FarAway", func(t *testing.T) {
		b := newBench(t, open)
		expires := b.Now().AddDate(500, 0, 0)
		b.commit(until(put("a", "1"), expires))
		b.Advance(24 * time.Hour)
		if e := b.is("a", "1"); !e.Expires.Equal(expires) {
			t.Errorf("expires %v, want %v", e.Expires, expires)
		}
	})

	t.Run("ExpiredIsAbsentForConditions", func(t *testing.T) {
		b := newBench(t, open)
		v := b.commit(until(put("a", "1"), b.Now().Add(time.Second)))
		b.conflict(insert("a", "2"))
		b.Advance(time.Second)
		if lost := b.conflict(replace("a", "2", v)); lost.Found != nil {
			t.Errorf("found %+v, which has expired", lost.Found)
		}
		again := b.commit(insert("a", "2"))
		if again == v {
			t.Errorf("version %d given twice to one key", v)
		}
		if e := b.is("a", "2"); !e.Expires.IsZero() {
			t.Errorf("expires %v, want never: the new entry has no expiry", e.Expires)
		}
	})

	t.Run("OverwriteSetsItAnew", func(t *testing.T) {
		b := newBench(t, open)
		b.commit(until(put("longer", "1"), b.Now().Add(time.Second)),
			until(put("never", "1"), b.Now().Add(time.Second)),
			until(put("shorter", "1"), b.Now().Add(time.Hour)))
		b.commit(until(put("longer", "2"), b.Now().Add(time.Hour)),
			put("never", "2"),
			until(put("shorter", "2"), b.Now().Add(time.Second)))
		b.Advance(2 * time.Second)
		b.is("longer", "2")
		b.is("never", "2")
		b.absent("shorter")
	})

	t.Run("ExpiredOverwriteDoesNotBringBackTheOld", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "old")
		b.commit(until(put("a", "new"), b.Now().Add(time.Second)))
		b.Advance(time.Hour)
		b.absent("a")
	})

	t.Run("WrittenExpired", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "old")
		for _, ago := range []time.Duration{0, time.Millisecond, 1000 * time.Hour} {
			b.commit(until(put("a", "new"), b.Now().Add(-ago)))
			b.absent("a")
			b.commit(insert("a", "again"))
			b.is("a", "again")
		}
		b.scans(store.Range{}, "a")
	})

	t.Run("ExpiredDoNotCountInALimit", func(t *testing.T) {
		b := newBench(t, open)
		soon := b.Now().Add(time.Second)
		b.commit(until(put("a", "1"), soon), until(put("b", "1"), soon), put("c", "1"),
			until(put("d", "1"), soon), put("e", "1"), put("f", "1"))
		b.Advance(time.Minute)
		b.scans(store.Range{Limit: 2}, "c", "e")
		b.scans(store.Range{Limit: 3, Reverse: true}, "f", "e", "c")
	})
}
