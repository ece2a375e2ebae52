package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

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
