package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

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

	t.Run("ResultsOfManyBelongToEach", func(t *testing.T) { // P1, P3: a record is decrypted where it stands
		b := newBench(t, open)
		key, value := strings.Repeat("k", 40), strings.Repeat("v", 300)
		b.commit(put(key, value), store.Write{Key: []byte("bulk"), Value: []byte(value), Bulk: true, Expires: b.Now().Add(time.Hour)})
		mine := func(e *store.Entry, name string) bool {
			if string(e.Key) != name || string(e.Value) != value {
				return false
			}
			whole := e.Value[:cap(e.Value)] // an append writes there
			for i := range whole {
				whole[i] = 'x'
			}
			return true
		}
		var all sync.WaitGroup
		for i := range 32 {
			all.Go(func() {
				name := []string{key, "bulk"}[i%2]
				for range 25 {
					e, err := b.Get(t.Context(), []byte(name))
					if err != nil || !mine(&e, name) {
						t.Errorf("get %q = %q: %s, %v", name, e.Key, brief(e.Value), err)
						return
					}
					for e, err := range b.Scan(t.Context(), store.Range{}) {
						if err != nil || !mine(&e, string(e.Key)) {
							t.Errorf("scan has %q: %s, %v", e.Key, brief(e.Value), err)
							return
						}
						clear(e.Key)
					}
					_, err = b.Commit(t.Context(), insert(name, "other"))
					var lost *store.Conflict
					if !errors.As(err, &lost) || lost.Found == nil || !mine(lost.Found, name) {
						t.Errorf("the conflict under %q is %+v, %v", name, lost, err)
						return
					}
					clear(lost.Found.Key)
				}
			})
		}
		all.Wait()
		b.is(key, value)
		b.is("bulk", value)
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

	t.Run("BatchBelongsToTheCallerAgain", func(t *testing.T) { // P1: package execution writes it over
		b := newBench(t, open)
		large := strings.Repeat("l", 40<<10)
		values := []string{"1", strings.Repeat("o", 300), "2", large}
		var batch []store.Write
		for i, value := range values {
			batch = append(batch, store.Write{Key: []byte(fmt.Sprint("key", i)), Value: []byte(value), Expires: b.Now().Add(time.Hour), Bulk: i > 1})
		}
		scribble := func() {
			for i := range batch {
				clear(batch[i].Key)
				clear(batch[i].Value)
				batch[i].Delete = true
			}
		}
		changed, cancel := b.Watch([]byte("key0"))
		defer cancel()
		b.commit(batch...)
		scribble()
		<-changed
		for i, value := range values {
			b.is(fmt.Sprint("key", i), value)
		}
		batch = []store.Write{put("other", "x"), insert("key0", "y")}
		lost := b.conflict(batch...)
		scribble()
		if string(lost.Key) != "key0" || lost.Found == nil || string(lost.Found.Key) != "key0" || string(lost.Found.Value) != "1" {
			t.Errorf("the conflict is %+v", lost)
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

	t.Run("Check", func(t *testing.T) { // a condition alone
		b := newBench(t, open)
		v := b.put("a", "1")
		changed, cancel := b.Watch([]byte("a"))
		defer cancel()
		w := b.commit(put("b", "1"), check("a", store.VersionIs(v)), check("c", store.Absent()))
		if e := b.is("a", "1"); e.Version != v || w == v {
			t.Errorf("version %d after a check, want %d; that of the batch is %d", e.Version, v, w)
		}
		b.absent("c")
		b.scans(store.Range{}, "a", "b")
		select {
		case <-changed:
			t.Error("a check woke a watch")
		default:
		}
		lost := b.conflict(put("b", "2"), put("d", "1"), check("a", store.VersionIs(v+1)), check("c", store.Absent()))
		if lost.Index != 2 || string(lost.Key) != "a" || lost.Found == nil || string(lost.Found.Value) != "1" || lost.Found.Version != v {
			t.Errorf("conflict %+v, want write 2 and its entry", lost)
		}
		if lost := b.conflict(check("a", store.Absent()), put("d", "1")); lost.Index != 0 {
			t.Errorf("conflict at write %d, want 0", lost.Index)
		}
		b.is("b", "1")
		b.absent("d")
		b.commit(put("b", "2"), check("a", store.VersionIs(v)))
		b.commit(remove("a"), check("b", store.VersionIs(b.is("b", "2").Version)))
		b.conflict(put("b", "3"), check("a", store.VersionIs(v)))
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

	t.Run("TheBatchIsTheCallersAgain", func(t *testing.T) {
		b := newBench(t, open)
		a, c := put("a", "1"), put("c", "2")
		c.Bulk, c.Expires = true, b.Now().Add(time.Hour)
		b.commit(a, c)
		for _, slice := range [][]byte{a.Key, a.Value, c.Key, c.Value} {
			copy(slice, "x")
		}
		b.is("a", "1")
		b.is("c", "2")
		b.absent("x")
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

func exerciseScan(t *testing.T, open Opener) {
	t.Run("Ranges", func(t *testing.T) {
		b := newBench(t, open)
		// Not in order, with bytes that a careless encoding stumbles over.
		for _, key := range []string{"b", "a", "ab", "a\xff", "a\x00", "\xff\xff", "c", "\x00"} {
			b.put(key, key)
		}
		in := func(from, to string) store.Range {
			return store.Range{From: []byte(from), To: []byte(to)}
		}
		back := func(r store.Range) store.Range { r.Reverse = true; return r }
		limit := func(r store.Range, n int) store.Range { r.Limit = n; return r }

		b.scans(store.Range{}, "\x00", "a", "a\x00", "ab", "a\xff", "b", "c", "\xff\xff")
		b.scans(back(store.Range{}), "\xff\xff", "c", "b", "a\xff", "ab", "a\x00", "a", "\x00")
		b.scans(in("a", "b"), "a", "a\x00", "ab", "a\xff")
		b.scans(in("aa", "bb"), "ab", "a\xff", "b")
		b.scans(in("b", ""), "b", "c", "\xff\xff")
		b.scans(back(in("a", "b")), "a\xff", "ab", "a\x00", "a")
		b.scans(back(in("aa", "bb")), "b", "a\xff", "ab")
		b.scans(back(in("b", "")), "\xff\xff", "c", "b")
		b.scans(limit(in("a", "b"), 2), "a", "a\x00")
		b.scans(limit(back(in("a", "b")), 2), "a\xff", "ab")
		b.scans(limit(in("a", "b"), 100), "a", "a\x00", "ab", "a\xff")
		b.scans(in("d", "e"))
		b.scans(in("b", "b"))
		b.scans(in("c", "a"))
		b.scans(back(in("c", "a")))
		b.scans(store.Prefix([]byte("a")), "a", "a\x00", "ab", "a\xff")
		b.scans(store.Prefix([]byte("a\xff")), "a\xff")
		b.scans(store.Prefix([]byte("\xff")), "\xff\xff")
		b.scans(back(store.Prefix([]byte("\xff"))), "\xff\xff")
		b.scans(store.Prefix(nil), "\x00", "a", "a\x00", "ab", "a\xff", "b", "c", "\xff\xff")
	})

	t.Run("WholeEntries", func(t *testing.T) {
		b := newBench(t, open)
		expires := b.Now().Add(1e9)
		v := b.commit(store.Write{Key: []byte("a"), Value: []byte("1"), Expires: expires}, put("b", ""))
		entries := b.scan(store.Range{})
		if len(entries) != 2 {
			t.Fatalf("%d entries, want 2", len(entries))
		}
		a, z := entries[0], entries[1]
		if string(a.Value) != "1" || a.Version != v || !a.Expires.Equal(expires) {
			t.Errorf("first entry %+v", a)
		}
		if len(z.Value) != 0 || z.Version != v || !z.Expires.IsZero() {
			t.Errorf("second entry %+v", z)
		}
	})

	t.Run("EntriesBelongToTheCaller", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "1")
		b.put("b", "2")
		entries := b.scan(store.Range{})
		for i := range entries {
			entries[i].Key[0], entries[i].Value[0] = 'x', 'x'
		}
		b.is("a", "1")
		b.is("b", "2")
	})

	t.Run("DeletedAndOverwritten", func(t *testing.T) {
		b := newBench(t, open)
		b.commit(put("a", "1"), put("b", "1"), put("c", "1"))
		b.commit(remove("b"), put("c", "2"))
		b.scans(store.Range{}, "a", "c")
		if entries := b.scan(store.Range{}); string(entries[1].Value) != "2" {
			t.Errorf("c = %q, want the later value", entries[1].Value)
		}
	})

	t.Run("Many", func(t *testing.T) {
		b := newBench(t, open)
		const n = 2500 // more than any store fetches at once
		batch := make([]store.Write, 0, store.MaxBatch)
		for i := range n {
			batch = append(batch, put(fmt.Sprintf("%06d", i), "x"))
			if len(batch) == store.MaxBatch || i == n-1 {
				b.commit(batch...)
				batch = batch[:0]
			}
		}
		for _, reverse := range []bool{false, true} {
			entries := b.scan(store.Range{Reverse: reverse})
			if len(entries) != n {
				t.Fatalf("%d entries, want %d", len(entries), n)
			}
			for i, e := range entries {
				if reverse {
					i = n - 1 - i
				}
				if want := fmt.Sprintf("%06d", i); string(e.Key) != want {
					t.Fatalf("key %q where %q should stand (reverse %t)", e.Key, want, reverse)
				}
			}
		}
	})

	t.Run("OneSnapshot", func(t *testing.T) {
		b := newBench(t, open)
		const n = 1000
		for i := 0; i < n; i += 100 {
			var batch []store.Write
			for j := range 100 {
				batch = append(batch, put(fmt.Sprintf("%04d", i+j), "old"))
			}
			b.commit(batch...)
		}
		seen := 0
		for e, err := range b.Scan(t.Context(), store.Range{}) {
			if err != nil {
				t.Fatal(err)
			}
			if string(e.Value) != "old" {
				t.Fatalf("%q = %q: a write from after the scan's first entry", e.Key, e.Value)
			}
			if seen == 0 {
				// Ahead of the scan: a change, a removal and an insertion.
				b.commit(put("0500", "new"), remove("0600"), put("0500x", "new"), put("0999", "new"))
			}
			seen++
		}
		if seen != n {
			t.Errorf("%d entries, want the %d of the snapshot", seen, n)
		}
		b.is("0500", "new")
	})

	t.Run("StopsWhenToldTo", func(t *testing.T) {
		b := newBench(t, open)
		b.commit(put("a", "1"), put("b", "1"), put("c", "1"))
		seen := 0
		for _, err := range b.Scan(t.Context(), store.Range{}) {
			if err != nil {
				t.Fatal(err)
			}
			if seen++; seen == 2 {
				break
			}
		}
		b.put("d", "1") // the store is not held by the scan that was left
		b.scans(store.Range{}, "a", "b", "c", "d")
	})

	t.Run("TwiceOverTheSameSequence", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "1")
		seq := b.Scan(t.Context(), store.Range{})
		for range 2 {
			n := 0
			for range seq {
				n++
			}
			if n != 1 {
				t.Errorf("%d pairs, want 1", n)
			}
		}
	})

	t.Run("ContextOver", func(t *testing.T) {
		b := newBench(t, open)
		b.commit(put("a", "1"), put("b", "1"))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var last error
		seen := 0
		for _, err := range b.Scan(ctx, store.Range{}) {
			cancel()
			seen++
			last = err
		}
		if seen != 2 || !errors.Is(last, context.Canceled) {
			t.Errorf("%d pairs, the last with %v; want an entry and then the context's error", seen, last)
		}
	})
}

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

func exerciseBulk(t *testing.T, open Opener) {
	bulk := func(key string, value []byte, expires time.Time) store.Write {
		return store.Write{Key: []byte(key), Value: value, Expires: expires, Bulk: true}
	}

	t.Run("RoundTrip", func(t *testing.T) {
		b := newBench(t, open)
		expires := b.Now().Add(time.Hour)
		for i, size := range []int{0, 1, 100, 4096, store.MaxValue, store.MaxValue + 1, store.MaxBulk} {
			key := string(rune('a' + i))
			value := random(size)
			v := b.commit(bulk(key, value, expires))
			e := b.is(key, string(value))
			if e.Version != v || !e.Expires.Equal(expires) {
				t.Errorf("%d bytes: version %d and expiry %v, want %d and %v", size, e.Version, e.Expires, v, expires)
			}
		}
		if n := len(b.scan(store.Range{})); n != 7 {
			t.Errorf("%d entries, want 7", n)
		}
	})

	t.Run("WithOrdinaryWritesOfItsBatch", func(t *testing.T) {
		b := newBench(t, open)
		one, two := random(100_000), random(200_000)
		b.commit(put("a", "1"),
			bulk("b", one, b.Now().Add(time.Minute)),
			bulk("c", two, b.Now().Add(1000*time.Hour)),
			insert("d", "4"))
		entries := b.scan(store.Range{})
		want := [][]byte{[]byte("1"), one, two, []byte("4")}
		if len(entries) != len(want) {
			t.Fatalf("%d entries, want %d", len(entries), len(want))
		}
		for i, e := range entries {
			if !bytes.Equal(e.Value, want[i]) || e.Version != entries[0].Version {
				t.Errorf("%q = %s, version %d", e.Key, brief(e.Value), e.Version)
			}
		}
	})

	t.Run("WithoutAnExpiry", func(t *testing.T) {
		b := newBench(t, open)
		var all []string
		for i, size := range []int{0, 1, 300, store.MaxValue} {
			key, value := string(rune('a'+i)), random(size)
			w := bulk(key, value, time.Time{})
			w.If = store.Absent()
			v := b.commit(w)
			b.conflict(w)
			if e := b.is(key, string(value)); e.Version != v || !e.Expires.IsZero() {
				t.Errorf("%d bytes: version %d and expiry %v, want %d and none", size, e.Version, e.Expires, v)
			}
			all = append(all, string(value))
		}
		for i, e := range b.scan(store.Range{}) {
			if string(e.Value) != all[i] {
				t.Errorf("%q = %s, want %s", e.Key, brief(e.Value), brief([]byte(all[i])))
			}
		}
		v := b.commit(bulk("a", []byte("again"), time.Time{}))
		b.commit(store.Write{Key: []byte("a"), Value: []byte("once more"), Bulk: true, If: store.VersionIs(v)})
		b.is("a", "once more")
		b.commit(remove("b"))
		b.absent("b")
	})

	t.Run("LosingBatchLeavesNothing", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "1")
		b.conflict(bulk("b", random(1000), b.Now().Add(time.Hour)), insert("a", "2"))
		b.absent("b")
	})

	t.Run("OverwrittenAndDeleted", func(t *testing.T) {
		b := newBench(t, open)
		expires := b.Now().Add(time.Hour)
		second := random(70_000)
		b.commit(bulk("a", random(70_000), expires))
		b.commit(bulk("a", second, expires))
		e := b.is("a", string(second))
		b.commit(replace("a", "small", e.Version))
		b.is("a", "small")
		b.commit(bulk("a", second, expires))
		b.commit(remove("a"))
		b.absent("a")
	})

	t.Run("StandsInAConflict", func(t *testing.T) {
		b := newBench(t, open)
		value := random(5000)
		v := b.commit(bulk("a", value, b.Now().Add(time.Hour)))
		lost := b.conflict(insert("a", "1"))
		if lost.Found == nil || lost.Found.Version != v || !bytes.Equal(lost.Found.Value, value) {
			t.Errorf("conflict does not show the bulk value that stands there")
		}
	})

	t.Run("Expires", func(t *testing.T) {
		b := newBench(t, open)
		value := random(2000)
		b.commit(bulk("a", value, b.Now().Add(time.Minute)), bulk("gone", value, b.Now().Add(-time.Minute)))
		b.absent("gone")
		b.is("a", string(value))
		b.Advance(time.Minute)
		b.absent("a")
		b.scans(store.Range{})
	})
}

func random(n int) []byte {
	r := rand.New(rand.NewPCG(uint64(n), 1))
	value := make([]byte, n)
	for i := range value {
		value[i] = byte(r.Uint32())
	}
	return value
}
