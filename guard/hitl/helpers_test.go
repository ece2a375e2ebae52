package hitl_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// place is a store and its keys, over which desks come and go.
type place struct {
	*memory.Store
	ring *seal.Ring
}

func newPlace() place { return place{memory.New(memory.Options{}), seal.Generate()} }

func (p place) desk() *hitl.Desk { return hitl.NewDesk(p.Store, p.ring, 0) }

func opening(key string) hitl.Opening {
	return hitl.Opening{Key: key, Level: hitl.Approval, Cause: hitl.CauseIrreversible, Summary: "The mail is sent and cannot be unsent."}
}

func open(t *testing.T, d *hitl.Desk, o hitl.Opening) hitl.Escalation {
	t.Helper()
	e, err := d.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func get(t *testing.T, d *hitl.Desk, id string) hitl.Escalation {
	t.Helper()
	e, err := d.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// entries lists what stands in the store.
func entries(t *testing.T, s store.Store) (all []store.Entry) {
	t.Helper()
	for entry, err := range s.Scan(t.Context(), store.Range{}) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, entry)
	}
	return all
}

// receiver is a notifier that remembers. answer, if any, decides; it is called for each
// attempt with its number, from 1.
type receiver struct {
	answer func(ctx context.Context, e hitl.Escalation, attempt int) error

	mu      sync.Mutex
	begun   time.Time
	times   map[string][]time.Duration // of the attempts, since the first of all
	order   []string
	running int
	most    int // attempts at once
}

func (r *receiver) Notify(ctx context.Context, e hitl.Escalation) error {
	r.mu.Lock()
	if r.times == nil {
		r.times, r.begun = map[string][]time.Duration{}, time.Now()
	}
	r.times[e.ID] = append(r.times[e.ID], time.Since(r.begun))
	r.order = append(r.order, e.ID)
	n := len(r.times[e.ID])
	r.running++
	r.most = max(r.most, r.running)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.running--
		r.mu.Unlock()
	}()
	if r.answer == nil {
		return nil
	}
	return r.answer(ctx, e, n)
}

func (r *receiver) attempts(id string) []time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.times[id]
}

// run starts a courier; end stops it and waits.
func run(t *testing.T, d *hitl.Desk, n hitl.Notifier, o hitl.CourierOptions) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		hitl.NewCourier(d, n, o).Run(ctx)
	}()
	return func() { cancel(); <-done }
}

var errDown = errors.New("the receiver is down")

func errAttempt(n int) error { return fmt.Errorf("attempt %d failed", n) }

// faulty is a store that fails on demand and watches how much is asked of it.
type faulty struct {
	store.Store
	// beforeGet and beforeCommit, if any, are called once each: what happens in between.
	beforeGet, beforeCommit func()
	failing                 atomic.Bool
	widest                  atomic.Int64 // limit of a scan; a scan without a limit counts as very many
}

func (f *faulty) between(what *func()) {
	if do := *what; do != nil {
		*what = nil
		do()
	}
}

func (f *faulty) Get(ctx context.Context, key []byte) (store.Entry, error) {
	f.between(&f.beforeGet)
	return f.Store.Get(ctx, key)
}

var errStore = errors.New("the disk is away")

func (f *faulty) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	f.between(&f.beforeCommit)
	if f.failing.Load() {
		return 0, errStore
	}
	return f.Store.Commit(ctx, batch...)
}

func (f *faulty) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	limit := int64(r.Limit)
	if limit == 0 {
		limit = 1 << 40
	}
	f.widest.Store(max(limit, f.widest.Load()))
	if f.failing.Load() {
		return func(yield func(store.Entry, error) bool) { yield(store.Entry{}, errStore) }
	}
	return f.Store.Scan(ctx, r)
}
