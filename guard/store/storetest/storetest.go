// Package storetest is the contract of package store as tests: one suite, run
// against every store. A store that passes Exercise (and Reopen, if it is durable)
// may carry the promises of the guard.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Opener opens an empty store that judges by now. The suite closes it.
type Opener func(t *testing.T, now func() time.Time) store.Store

// Place makes a new, empty place and returns a function that opens it, again and
// again. The suite closes what it opened before it opens anew.
type Place func(t *testing.T, now func() time.Time) (open func() store.Store)

// Exercise runs the whole contract. Times in it are whole milliseconds.
func Exercise(t *testing.T, open Opener) {
	for _, part := range []struct {
		name string
		run  func(*testing.T, Opener)
	}{
		{"Get", exerciseGet},
		{"Scan", exerciseScan},
		{"Commit", exerciseCommit},
		{"Watch", exerciseWatch},
		{"Expiry", exerciseExpiry},
		{"Bulk", exerciseBulk},
		{"Sequences", exerciseSequences},
		{"Limits", exerciseLimits},
		{"Close", exerciseClose},
		{"Concurrency", exerciseConcurrency},
		{"Linearizability", exerciseLinearizability},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(t, open) })
	}
}

// Concurrent runs the part of the contract that is about concurrent callers, for several stores
// over one place: the opener returns one that hands each call to any of them.
func Concurrent(t *testing.T, open Opener) {
	t.Run("Concurrency", func(t *testing.T) { exerciseConcurrency(t, open) })
	t.Run("Linearizability", func(t *testing.T) { exerciseLinearizability(t, open) })
}

// clock is a clock that only the test moves. It starts in the past, so that a
// store that looks at the machine's clock anywhere is found out.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock {
	return &clock{now: time.Date(2021, 3, 4, 5, 6, 7, 0, time.UTC)}
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// bench is what most tests need: a store, its clock, and short forms that fail the
// test where an error is not expected.
type bench struct {
	store.Store
	*clock
	t *testing.T
}

func newBench(t *testing.T, open Opener) *bench {
	t.Helper()
	c := newClock()
	s := open(t, c.Now)
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, store.ErrClosed) {
			t.Errorf("closing the store: %v", err)
		}
	})
	return &bench{Store: s, clock: c, t: t}
}

// Now settles that both embedded types have one.
func (b *bench) Now() time.Time { return b.clock.Now() }

func (b *bench) commit(batch ...store.Write) store.Version {
	b.t.Helper()
	v, err := b.Commit(b.t.Context(), batch...)
	if err != nil {
		b.t.Fatalf("commit: %v", err)
	}
	return v
}

func (b *bench) put(key, value string) store.Version {
	b.t.Helper()
	return b.commit(put(key, value))
}

// conflict commits a batch that must lose.
func (b *bench) conflict(batch ...store.Write) *store.Conflict {
	b.t.Helper()
	v, err := b.Commit(b.t.Context(), batch...)
	var lost *store.Conflict
	if !errors.As(err, &lost) {
		b.t.Fatalf("commit = version %d, %v; want a conflict", v, err)
	}
	return lost
}

// is checks that value stands under key, and returns the entry.
func (b *bench) is(key, value string) store.Entry {
	b.t.Helper()
	e, err := b.Get(b.t.Context(), []byte(key))
	if err != nil {
		b.t.Fatalf("get %q: %v", key, err)
	}
	if string(e.Key) != key || string(e.Value) != value {
		b.t.Fatalf("get %q = %q: %s; want %s", key, e.Key, brief(e.Value), brief([]byte(value)))
	}
	return e
}

func (b *bench) absent(key string) {
	b.t.Helper()
	if e, err := b.Get(b.t.Context(), []byte(key)); !errors.Is(err, store.ErrNotFound) {
		b.t.Fatalf("get %q = %s, %v; want ErrNotFound", key, brief(e.Value), err)
	}
}

func (b *bench) scan(r store.Range) []store.Entry {
	b.t.Helper()
	entries, err := collect(b.t.Context(), b.Store, r)
	if err != nil {
		b.t.Fatalf("scan: %v", err)
	}
	return entries
}

// scans checks the keys of r, in order.
func (b *bench) scans(r store.Range, want ...string) {
	b.t.Helper()
	var got []string
	for _, e := range b.scan(r) {
		got = append(got, string(e.Key))
	}
	if !slices.Equal(got, want) {
		b.t.Fatalf("scan of [%q, %q) limit %d reverse %t = %q, want %q",
			r.From, r.To, r.Limit, r.Reverse, got, want)
	}
}

func collect(ctx context.Context, s store.Store, r store.Range) (entries []store.Entry, err error) {
	for e, err := range s.Scan(ctx, r) {
		if err != nil {
			return entries, err
		}
		entries = append(entries, e)
	}
	return entries, nil
}

func put(key, value string) store.Write {
	return store.Write{Key: []byte(key), Value: []byte(value)}
}

func insert(key, value string) store.Write {
	return store.Write{Key: []byte(key), Value: []byte(value), If: store.Absent()}
}

func replace(key, value string, v store.Version) store.Write {
	return store.Write{Key: []byte(key), Value: []byte(value), If: store.VersionIs(v)}
}

func check(key string, c store.Condition) store.Write {
	return store.Write{Key: []byte(key), If: c, Check: true}
}

func remove(key string) store.Write {
	return store.Write{Key: []byte(key), Delete: true}
}

func brief(value []byte) string {
	if len(value) > 32 {
		return fmt.Sprintf("%q... (%d bytes)", value[:32], len(value))
	}
	return fmt.Sprintf("%q", value)
}

// model is the contract as a sequential machine: every operation happens at one
// instant between its call and its return, on all keys together.
var model = porcupine.Model{
	Init: func() any { return [len(historyKeys)]cell{} },
	Step: func(state, input, output any) (bool, any) {
		cells, in, out := state.([len(historyKeys)]cell), input.(request), output.(answer)
		switch in.kind {
		case get:
			return out.cells[in.key] == cells[in.key], cells
		case scan:
			return out.cells == cells, cells
		default:
			return step(cells, in.batch, out)
		}
	},
	DescribeOperation: func(input, output any) string {
		return fmt.Sprintf("%+v -> %+v", input, output)
	},
}

func step(cells [len(historyKeys)]cell, batch []change, out answer) (bool, [len(historyKeys)]cell) {
	for i, w := range batch {
		if w.want == wantAny || w.want == cells[w.key].version {
			continue
		}
		// The first write that loses is the one that must be named.
		return out.lost == i && out.cells[w.key] == cells[w.key], cells
	}
	if out.lost != -1 || out.version == 0 {
		return false, cells
	}
	for _, w := range batch {
		if !w.check && cells[w.key].version == out.version {
			return false, cells
		}
		switch {
		case w.check:
		case w.remove:
			cells[w.key] = cell{}
		default:
			cells[w.key] = cell{out.version, w.value}
		}
	}
	return true, cells
}

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
		v := b.commit(put("a", "1"), put("b", "2"), put("gone", "3"))
		b.commit(remove("gone"), put("b", "22"), check("a", store.VersionIs(v)), check("never", store.Absent()),
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

func exerciseClose(t *testing.T, open Opener) {
	t.Run("LaterCalls", func(t *testing.T) {
		b := newBench(t, open)
		b.put("a", "1")
		if err := b.Close(); err != nil {
			t.Fatalf("close: %v", err)
		}
		_, get := b.Get(t.Context(), []byte("a"))
		_, commit := b.Commit(t.Context(), put("a", "2"))
		_, now := b.Store.Now(t.Context())
		_, scan := collect(t.Context(), b.Store, store.Range{})
		for call, err := range map[string]error{
			"get": get, "commit": commit, "now": now, "scan": scan, "close": b.Close(),
		} {
			if !errors.Is(err, store.ErrClosed) {
				t.Errorf("%s after close: %v, want ErrClosed", call, err)
			}
		}
	})

	t.Run("CommitsUnderWayLandOrAreRefused", func(t *testing.T) {
		b := newBench(t, open)
		const writers = 8
		started := make(chan struct{}, writers)
		var all sync.WaitGroup
		for w := range writers {
			all.Go(func() {
				for i := 0; ; i++ {
					_, err := b.Commit(t.Context(), put(fmt.Sprintf("%d-%d", w, i), "1"))
					if i == 0 {
						started <- struct{}{}
					}
					if errors.Is(err, store.ErrClosed) {
						return
					}
					if err != nil {
						t.Errorf("commit beside close: %v, want it to land or ErrClosed", err)
						return
					}
				}
			})
		}
		for range writers {
			<-started
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		all.Wait()
	})

	t.Run("ReadsUnderWay", func(t *testing.T) {
		b := newBench(t, open)
		for i := range 20 {
			var batch []store.Write
			for j := range 100 {
				batch = append(batch, put(fmt.Sprintf("%03d-%03d", i, j), "1"))
			}
			b.commit(batch...)
		}
		const readers = 4
		started := make(chan struct{}, readers)
		var all sync.WaitGroup
		for range readers {
			all.Go(func() {
				for i := 0; ; i++ {
					_, scan := collect(t.Context(), b.Store, store.Range{})
					_, get := b.Get(t.Context(), []byte("000-000"))
					if i == 0 {
						started <- struct{}{}
					}
					for _, err := range []error{scan, get} {
						if err != nil && !errors.Is(err, store.ErrClosed) {
							t.Errorf("read beside close: %v", err)
						}
					}
					if get != nil {
						return
					}
				}
			})
		}
		for range readers {
			<-started
		}
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		all.Wait()
	})
}

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
			"large bulk for ever":   {{Key: []byte("a"), Value: make([]byte, store.MaxValue+1), Bulk: true}},
			"bulk with a condition": {{Key: []byte("a"), Bulk: true, Expires: soon, If: store.Absent()}},
			"same key twice":        {put("a", "1"), remove("a")},
			"written and checked":   {put("a", "1"), check("a", store.Absent())},
			"checks alone":          {check("a", store.Absent()), check("b", store.Absent())},
			"no condition to check": {put("a", "1"), {Key: []byte("b"), Check: true}},
			"check with a value":    {put("a", "1"), {Key: []byte("b"), Check: true, If: store.Absent(), Value: []byte("1")}},
			"check that expires":    {put("a", "1"), {Key: []byte("b"), Check: true, If: store.Absent(), Expires: soon}},
			"check that deletes":    {put("a", "1"), {Key: []byte("b"), Check: true, If: store.Absent(), Delete: true}},
			"check of bulk":         {put("a", "1"), {Key: []byte("b"), Check: true, If: store.Absent(), Bulk: true}},
			"too many writes":       many(store.MaxBatch+1, 1),
			"too many bytes":        many(store.MaxBatchBytes/store.MaxValue+1, store.MaxValue),
			"too many bytes of bulk": func() []store.Write {
				batch := many(store.MaxBatchBytes/store.MaxValue+1, store.MaxValue)
				for i := range batch {
					batch[i].Bulk = true
				}
				return batch
			}(),
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

// Damaged is a store whose values under some keys are damaged, as those in a file can be.
type Damaged struct {
	store.Store
	Keys map[string]bool
}

// Get returns store.ErrDamaged for those keys.
func (s *Damaged) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if s.Keys[string(key)] {
		return store.Entry{}, fmt.Errorf("reading: %w", store.ErrDamaged)
	}
	return s.Store.Get(ctx, key)
}

// Scan ends with store.ErrDamaged at the first of those keys.
func (s *Damaged) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		for e, err := range s.Store.Scan(ctx, r) {
			if err == nil && s.Keys[string(e.Key)] {
				yield(store.Entry{Key: e.Key}, fmt.Errorf("scanning: %w", store.ErrDamaged))
				return
			}
			if !yield(e, err) {
				return
			}
		}
	}
}
