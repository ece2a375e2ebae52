package storetest

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Reopen is the part of the contract for stores that outlive the process.
func Reopen(t *testing.T, place Place) {
	// again closes the bench's store and opens the same place anew.
	setup := func(t *testing.T) (b *bench, again func()) {
		c := newClock()
		open := place(t, c.Now)
		b = &bench{Store: open(), clock: c, t: t}
		t.Cleanup(func() {
			if err := b.Close(); err != nil && !errors.Is(err, store.ErrClosed) {
				t.Errorf("closing the store: %v", err)
			}
		})
		return b, func() {
			t.Helper()
			if err := b.Close(); err != nil {
				t.Fatalf("close: %v", err)
			}
			b.Store = open()
		}
	}

	t.Run("EverythingIsThere", func(t *testing.T) { // P2
		b, again := setup(t)
		body := random(300_000)
		expires := b.Now().Add(time.Hour)
		b.commit(put("a", "1"), put("b", "2"), put("gone", "3"))
		b.commit(remove("gone"), put("b", "22"),
			store.Write{Key: []byte("body"), Value: body, Expires: expires, Bulk: true},
			store.Write{Key: []byte("soon"), Value: []byte("5"), Expires: expires})
		before := b.scan(store.Range{})
		for range 3 {
			again()
			after := b.scan(store.Range{})
			if !slices.EqualFunc(before, after, sameEntry) {
				t.Fatalf("after reopening: %d entries that differ from the %d before", len(after), len(before))
			}
			b.is("b", "22")
			b.absent("gone")
			b.is("body", string(body))
		}
		b.Advance(2 * time.Hour)
		again()
		b.scans(store.Range{}, "a", "b")
	})

	t.Run("VersionsGoOnDiffering", func(t *testing.T) {
		b, again := setup(t)
		seen := map[store.Version]bool{}
		for i := range 5 {
			for j := range 5 {
				v := b.put("a", strconv.Itoa(j))
				if v == 0 || seen[v] {
					t.Fatalf("opened %d times: version %d is zero or was given before", i+1, v)
				}
				seen[v] = true
				// The entry with the highest version is gone at every opening.
				b.commit(remove("a"))
			}
			again()
		}
	})

	t.Run("ConditionsHoldOverIt", func(t *testing.T) {
		b, again := setup(t)
		v := b.commit(insert("a", "1"))
		again()
		b.conflict(insert("a", "2"))
		w := b.commit(replace("a", "2", v))
		again()
		b.conflict(replace("a", "3", v))
		b.commit(replace("a", "3", w))
	})

	t.Run("ManyTimes", func(t *testing.T) {
		b, again := setup(t)
		for i := range 10 {
			b.put(fmt.Sprintf("%03d", i), "1")
			again()
			if n := len(b.scan(store.Range{})); n != i+1 {
				t.Fatalf("opened %d times: %d entries, want %d", i+2, n, i+1)
			}
		}
	})
}

func sameEntry(a, b store.Entry) bool {
	return string(a.Key) == string(b.Key) && string(a.Value) == string(b.Value) &&
		a.Version == b.Version && a.Expires.Equal(b.Expires)
}
