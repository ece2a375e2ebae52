package store

import (
	"context"
	"errors"
	"iter"
	"testing"
	"time"
)

func newUsage(window time.Duration) *Usage[struct{}] {
	all := Usages[string, struct{}]{Window: window}
	u := all.Enter("a")
	u.Counted = true
	return u
}

// What a holder has is remembered in little memory, however long it is kept.
func TestUsageExpiryIsBounded(t *testing.T) {
	for _, window := range []time.Duration{time.Second, 10 * time.Minute} {
		u := newUsage(window)
		start := time.Unix(1_700_000_000, 0)
		const keep = 30 * 24 * time.Hour
		for at := start; at.Before(start.Add(2 * keep)); at = at.Add(time.Minute) {
			u.Expire(at)
			u.Add(1, 1, at, at.Add(keep))
			u.Add(1, 1, at, at.Add(24*time.Hour))
		}
		if n := len(u.expiry); n > 400 {
			t.Errorf("%d windows are remembered", n)
		}
		now := start.Add(2 * keep)
		u.Expire(now)
		held := int64((keep + 24*time.Hour) / time.Minute)
		if u.Bytes < held || u.Bytes > held+held/20 || int64(u.N) != u.Bytes {
			t.Errorf("%d bytes are held, counted are %d of %d", held, u.Bytes, u.N)
		}
		u.Expire(now.Add(keep + keep/20))
		if u.N != 0 || u.Bytes != 0 || len(u.expiry) != 0 {
			t.Errorf("%d, %d bytes in %d windows are left when all has expired", u.N, u.Bytes, len(u.expiry))
		}
	}
}

// An entry is forgotten at the end of its window, which is the same whenever it is changed,
// and then changes nothing any more. What expires never stays.
func TestUsageFollowsAnEntry(t *testing.T) {
	u := newUsage(time.Second)
	created := time.Unix(1_700_000_000, 0)
	expires := created.Add(time.Hour)
	want := func(n int, bytes int64) {
		t.Helper()
		if u.N != n || u.Bytes != bytes {
			t.Fatalf("%d, %d, want %d, %d", u.N, u.Bytes, n, bytes)
		}
	}
	u.Add(1, 10, created, expires)
	u.Add(1, 5, created, time.Time{})
	u.Add(0, 7, created, expires)
	want(2, 22)
	next := u.Expire(expires)
	if want(2, 22); next.Before(expires) || next.Sub(expires) > time.Hour/32 {
		t.Errorf("room %v after it expires", next.Sub(expires))
	}
	u.Add(-1, -10, created, expires) // and what it was charged with later
	want(1, 5)
	u.Add(1, 10, created, expires)
	u.Expire(next)
	want(1, 5)
	u.Add(0, 7, created, expires)
	u.Add(-1, -10, created, expires)
	want(1, 5)
	u.Add(-2, -10, created, time.Time{})
	want(0, 0)
}

// listed is a store that has only entries, and whose scans may fail behind them.
type listed struct {
	Store
	entries []Entry
	err     error
}

func (l *listed) Scan(ctx context.Context, _ Range) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for _, e := range l.entries {
			if !yield(e, ctx.Err()) {
				return
			}
		}
		if l.err != nil {
			yield(Entry{}, l.err)
		}
	}
}

// Nothing is counted before all was, and a count that fails leaves nothing.
func TestUsageIsCountedWhole(t *testing.T) {
	all := Usages[string, struct{}]{Window: time.Second}
	u := all.Enter("a")
	now := time.Unix(1_700_000_000, 0)
	st := &listed{entries: []Entry{{Expires: now.Add(time.Hour)}, {}}, err: ErrUnhealthy}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the client has left
	count := func() error {
		return u.Count(ctx, st, nil, func(e Entry) error {
			u.Add(1, 3, now, e.Expires)
			return nil
		})
	}
	u.Add(1, 1, now, time.Time{})
	if err := count(); !errors.Is(err, ErrUnhealthy) || u.Counted || u.N != 0 || u.Bytes != 0 || !u.Expire(now).IsZero() {
		t.Errorf("%v, %d, %d", err, u.N, u.Bytes)
	}
	st.err = nil
	if err := count(); err != nil || !u.Counted || u.N != 2 || u.Bytes != 6 || u.Expire(now).IsZero() {
		t.Errorf("%v, %d, %d", err, u.N, u.Bytes)
	}
}

// What is remembered of holders is bounded; those who have entered stay.
func TestIdleUsagesAreForgotten(t *testing.T) {
	u := Usages[int, struct{}]{Window: time.Second}
	busy := u.Enter(0)
	for i := range maxUsages - 1 {
		u.Leave(u.Enter(1 + i))
	}
	if u.Known(1) == nil {
		t.Error("forgotten without need")
	}
	u.Leave(u.Enter(maxUsages))
	if u.Known(1) != nil || len(u.m) != 2 {
		t.Errorf("%d are remembered", len(u.m))
	}
	if u.Known(0) != busy {
		t.Error("one that was entered is forgotten")
	}
}
