package store

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

var errCounting = errors.New("counting failed")

// listing is what a counter finds in a store.
type listing struct {
	entries []Entry // each of 3 bytes
	err     error   // behind them
	reads   int
}

func (l *listing) counter(window time.Duration) *Counter[struct{}] {
	c := &Counter[struct{}]{Window: window, Failed: errCounting}
	c.Read = func(ctx context.Context, _ *Held[struct{}], add Stands) error {
		l.reads++
		for _, e := range l.entries {
			add("", Amount{1, 3}, started, e.Expires)
		}
		return errors.Join(l.err, ctx.Err())
	}
	c.Use(nil)
	return c
}

var started = time.Unix(1_700_000_000, 0)

// What a holder has is remembered in little memory, however long it is kept.
func TestCountedExpiryIsBounded(t *testing.T) {
	for _, window := range []time.Duration{time.Second, 10 * time.Minute} {
		c := new(listing).counter(window)
		h := c.Enter(Holder{})
		if err := c.Count(t.Context(), h, started); err != nil {
			t.Fatal(err)
		}
		const keep = 30 * 24 * time.Hour
		for at := started; at.Before(started.Add(2 * keep)); at = at.Add(time.Minute) {
			h.expire(at)
			h.Add(Amount{1, 1}, at, at.Add(keep))
			h.Add(Amount{1, 1}, at, at.Add(24*time.Hour))
		}
		if n := len(h.expiry); n > 400 {
			t.Errorf("%d windows are remembered", n)
		}
		now := started.Add(2 * keep)
		h.expire(now)
		held := int64((keep + 24*time.Hour) / time.Minute)
		if h.stands.Bytes < held || h.stands.Bytes > held+held/20 || int64(h.stands.N) != h.stands.Bytes {
			t.Errorf("%d bytes are held, counted are %+v", held, h.stands)
		}
		h.expire(now.Add(keep + keep/20))
		if h.stands != (Amount{}) || len(h.expiry) != 0 {
			t.Errorf("%+v in %d windows are left when all has expired", h.stands, len(h.expiry))
		}
	}
}

// An entry counts until the end of its window, and what has no expiry stays.
func TestCountedEntriesExpire(t *testing.T) {
	c := new(listing).counter(time.Second)
	h := c.Enter(Holder{})
	h.Add(Amount{1, 1}, started, time.Time{}) // before the store was counted, which will find it
	if err := c.Count(t.Context(), h, started); err != nil {
		t.Fatal(err)
	}
	expires := started.Add(time.Hour)
	h.Add(Amount{1, 10}, started, expires)
	h.Add(Amount{1, 5}, started, time.Time{})
	h.Add(Amount{0, 7}, started, expires)
	h.expire(expires)
	next := h.next()
	if h.stands != (Amount{2, 22}) || next.Before(expires) || next.Sub(expires) > time.Hour/32 {
		t.Errorf("%+v, and room %v after it expires", h.stands, next.Sub(expires))
	}
	if h.expire(next); h.stands != (Amount{1, 5}) || !h.next().IsZero() {
		t.Errorf("%+v, next %v", h.stands, h.next())
	}
}

// Who is refused where counting takes long is not counted all the time: a flood must not keep the store busy.
func TestCountingThatTakesLongRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &listing{entries: []Entry{{}, {}}}
		c := l.counter(time.Second)
		read := c.Read
		c.Read = func(ctx context.Context, h *Held[struct{}], add Stands) error {
			time.Sleep(2 * time.Second)
			return read(ctx, h, add)
		}
		h := c.Enter(Holder{})
		h.Lose([32]byte{1}, Amount{N: 1}) // so that there may be less than is counted
		for begun := time.Now(); time.Since(begun) < 2*time.Minute; time.Sleep(100 * time.Millisecond) {
			full, err := c.Take(t.Context(), h, Request{Now: time.Now(), Limit: Amount{N: 2}, Need: Amount{N: 1}})
			if full == nil || err != nil {
				t.Fatalf("%+v, %v", full, err)
			}
		}
		if l.reads > 4 {
			t.Errorf("counted %d times in two minutes, each for two seconds", l.reads)
		}
	})
}

// Nothing is counted before all was, also where the client leaves, and a count that fails leaves nothing.
func TestHoldersAreCountedWhole(t *testing.T) {
	l := &listing{entries: []Entry{{Expires: started.Add(time.Hour)}, {}}, err: ErrUnhealthy}
	c := l.counter(time.Second)
	h := c.Enter(Holder{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 {
		_, err := c.Take(ctx, h, Request{Now: started, Limit: Amount{N: 9}, Need: Amount{N: 1}})
		if !errors.Is(err, ErrUnhealthy) || !errors.Is(err, errCounting) || h.counted || h.mine() != (Amount{}) || !h.next().IsZero() {
			t.Errorf("%v, %+v", err, h.mine())
		}
	}
	l.err = nil
	if full, err := c.Take(ctx, h, Request{Now: started, Limit: Amount{N: 9}, Need: Amount{N: 1}}); full != nil || err != nil || h.stands != (Amount{2, 6}) || h.next().IsZero() {
		t.Errorf("%+v, %v, %+v", full, err, h.stands)
	}
}

// The store is counted anew for a refusal where there may be less than was counted, and else not: who is at the limit
// must not cost a scan with each call.
func TestCountedAnewWhereThereMayBeLess(t *testing.T) {
	l := &listing{entries: []Entry{{}, {}}}
	c := l.counter(time.Second)
	h := c.Enter(Holder{})
	now := started
	take := func(must bool) bool {
		full, err := c.Take(t.Context(), h, Request{now, Amount{N: 2}, Amount{N: 1}, must})
		if err != nil {
			t.Fatal(err)
		}
		return full == nil
	}
	want := func(what string, got, want bool, reads int) {
		t.Helper()
		if got != want || l.reads != reads {
			t.Errorf("%s: %t after %d counts, want %t after %d", what, got, l.reads, want, reads)
		}
	}
	for range 5 {
		want("full", take(false), false, 1)
	}
	l.entries = nil
	h.Less()
	want("all is gone", take(false), true, 2)
	want("one runs", take(false), true, 2)
	h.Lose([32]byte{1}, Amount{N: 1})
	h.Release(Amount{N: 1})
	want("the store may have it", take(false), false, 3)
	want("just counted", take(false), false, 3)
	now = now.Add(fullTime)
	want("a while later", take(false), false, 4)
	h.Found([32]byte{1})
	want("it has", take(false), true, 4)
	want("in the place of another", take(true), true, 4)
	h.Drop(Amount{N: 1})
	h.Drop(Amount{N: 1})
	want("room again", take(false), true, 4)
}

// What is remembered of holders is bounded; those stay who have entered, and who have what the store may lack.
func TestIdleHoldersAreForgotten(t *testing.T) {
	c := new(listing).counter(time.Second)
	holder := func(i int) Holder { return Holder{byte(i), byte(i >> 8)} }
	busy, lost := c.Enter(holder(0)), c.Enter(holder(1))
	lost.Lose([32]byte{}, Amount{N: 1})
	c.Leave(lost)
	for i := range maxHeld - 2 {
		c.Leave(c.Enter(holder(2 + i)))
	}
	if c.Known(holder(2)) == nil {
		t.Error("forgotten without need")
	}
	c.Leave(c.Enter(holder(maxHeld)))
	if c.Known(holder(2)) != nil || len(c.all) != 3 {
		t.Errorf("%d are remembered", len(c.all))
	}
	if c.Known(holder(0)) != busy || c.Known(holder(1)) != lost {
		t.Error("one that was entered, or has lost something, is forgotten")
	}
}
