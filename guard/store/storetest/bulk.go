package storetest

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

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
