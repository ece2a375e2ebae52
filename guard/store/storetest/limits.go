package storetest

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func exerciseLimits(t *testing.T, open Opener) {
	t.Run("Refused", func(t *testing.T) {
		b := newBench(t, open)
		soon := b.Now().Add(time.Hour)
		many := func(n, size int) []store.Write {
			var batch []store.Write
			for i := range n {
				batch = append(batch, store.Write{Key: []byte{byte(i >> 8), byte(i)}, Value: make([]byte, size)})
			}
			return batch
		}
		for name, batch := range map[string][]store.Write{
			"no writes":             {},
			"empty key":             {put("", "1")},
			"long key":              {put(strings.Repeat("k", store.MaxKey+1), "1")},
			"large value":           {put("a", strings.Repeat("v", store.MaxValue+1))},
			"large bulk value":      {{Key: []byte("a"), Value: make([]byte, store.MaxBulk+1), Bulk: true, Expires: soon}},
			"bulk for ever":         {{Key: []byte("a"), Bulk: true}},
			"bulk with a condition": {{Key: []byte("a"), Bulk: true, Expires: soon, If: store.Absent()}},
			"same key twice":        {put("a", "1"), remove("a")},
			"too many writes":       many(store.MaxBatch+1, 1),
			"too many bytes":        many(store.MaxBatchBytes/store.MaxValue+1, store.MaxValue),
		} {
			v, err := b.Commit(t.Context(), batch...)
			if !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%s: version %d, %v; want ErrInvalid", name, v, err)
			}
		}
		b.scans(store.Range{})
	})

	t.Run("Accepted", func(t *testing.T) {
		b := newBench(t, open)
		key := strings.Repeat("k", store.MaxKey)
		b.put(key, strings.Repeat("v", store.MaxValue))
		b.is(key, strings.Repeat("v", store.MaxValue))

		var most []store.Write
		for i := range store.MaxBatch {
			most = append(most, put(string(rune('A'+i)), "1"))
		}
		b.commit(most...)

		var largest []store.Write
		size := 0
		for i := 0; size+store.MaxValue+2 <= store.MaxBatchBytes; i++ {
			w := store.Write{Key: []byte{'z', byte(i)}, Value: bytes.Repeat([]byte{byte(i)}, store.MaxValue)}
			size += len(w.Key) + len(w.Value)
			largest = append(largest, w)
		}
		rest := store.MaxBatchBytes - size - 2
		largest = append(largest, store.Write{Key: []byte("zz"), Value: make([]byte, rest)})
		b.commit(largest...)
		for _, w := range largest {
			b.is(string(w.Key), string(w.Value))
		}
	})

	t.Run("AnyBytesAreAKey", func(t *testing.T) {
		b := newBench(t, open)
		keys := []string{"\x00", "\x00\x00", "\xff", "!badger!txn", "!", "%", "'", "\\", "é", "a\nb"}
		for _, key := range keys {
			b.put(key, "value of "+key)
		}
		for _, key := range keys {
			b.is(key, "value of "+key)
		}
		if n := len(b.scan(store.Range{})); n != len(keys) {
			t.Errorf("%d entries, want %d: the store keeps its own ones apart", n, len(keys))
		}
	})
}
