package guard

import (
	"context"
	"errors"
	"iter"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

func boundedCall(g *Guard, id string, q Quota) *Call {
	c := awaitedCall(g, id)
	c.Quota = q
	return c
}

// Whoever waits for an execution that is released unsent may run: the room that it had
// is free when it is told.
func TestQuotaMakesRoomBeforeFollowersWake(t *testing.T) {
	g, _, err := Open(t.Context(), memory.New(memory.Options{}), seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	c := boundedCall(g, "1", Quota{Open: 1})
	e, err := g.Claim(t.Context(), c, Finding{})
	if err != nil {
		t.Fatal(err)
	}
	e.flight.recording.mu.Lock() // holds the end up once the followers are told
	settled := make(chan error, 1)
	go func() { settled <- e.Settle(t.Context(), Outcome{Verdict: Released, Cause: CauseNotSent}) }()
	<-e.flight.Done()
	if _, err := g.Claim(t.Context(), c, Finding{}); err != nil {
		t.Errorf("who waited: %v", err)
	}
	e.flight.recording.mu.Unlock()
	if err := <-settled; err != nil {
		t.Fatal(err)
	}
}

// leaving is a store in whose scans the client leaves.
type leaving struct {
	*memory.Store
	leave context.CancelFunc
	scans int
}

func (l *leaving) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	l.scans++
	if l.leave != nil {
		l.leave()
	}
	if err := ctx.Err(); err != nil {
		return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, err) }
	}
	return l.Store.Scan(ctx, r)
}

// Counting what a caller holds takes long where that is much. It is not begun anew
// because a client's patience was shorter: else nobody's might ever do.
func TestQuotaCountOutlastsItsClient(t *testing.T) {
	st := &leaving{Store: memory.New(memory.Options{})}
	g, _, err := Open(t.Context(), st, seal.Generate())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	st.leave, st.scans = cancel, 0
	if _, err := g.Claim(ctx, boundedCall(g, "1", Quota{Open: 1}), Finding{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("the claim of a client that has left: %v", err)
	}
	if _, err := g.Claim(t.Context(), boundedCall(g, "2", Quota{Open: 1}), Finding{}); err != nil {
		t.Fatal(err)
	}
	if st.scans != 1 {
		t.Errorf("counted %d times", st.scans)
	}
}

// What a caller holds is remembered in little memory, however long it is kept.
func TestQuotaExpiryIsBounded(t *testing.T) {
	u := usage{expiry: map[int64]int64{}}
	start := time.Unix(1_700_000_000, 0)
	const keep = 30 * 24 * time.Hour
	for at := start; at.Before(start.Add(2 * keep)); at = at.Add(time.Minute) {
		u.expire(at)
		u.keep(1, at, at.Add(keep))
		u.keep(1, at, at.Add(24*time.Hour))
	}
	if n := len(u.expiry); n > 400 {
		t.Errorf("%d windows are remembered", n)
	}
	now := start.Add(2 * keep)
	u.expire(now)
	held := int64((keep + 24*time.Hour) / time.Minute)
	if u.bytes < held || u.bytes > held+held/20 {
		t.Errorf("%d bytes are held, counted are %d", held, u.bytes)
	}
	u.expire(now.Add(keep + keep/20))
	if u.bytes != 0 || len(u.expiry) != 0 {
		t.Errorf("%d bytes in %d windows are left when all has expired", u.bytes, len(u.expiry))
	}
}
