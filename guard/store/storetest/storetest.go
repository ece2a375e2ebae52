// Package storetest is the contract of package store as tests: one suite, run
// against every store. A store that passes Exercise (and Reopen, if it is durable)
// may carry the promises of the guard.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

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
		{"Limits", exerciseLimits},
		{"Close", exerciseClose},
		{"Concurrency", exerciseConcurrency},
		{"Linearizability", exerciseLinearizability},
	} {
		t.Run(part.name, func(t *testing.T) { part.run(t, open) })
	}
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

func remove(key string) store.Write {
	return store.Write{Key: []byte(key), Delete: true}
}

func brief(value []byte) string {
	if len(value) > 32 {
		return fmt.Sprintf("%q... (%d bytes)", value[:32], len(value))
	}
	return fmt.Sprintf("%q", value)
}
