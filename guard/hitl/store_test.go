package hitl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// place is a store and its keys, over which stores come and go.
type place struct {
	*memory.Store
	ring *seal.Ring
}

func newPlace() place { return place{memory.New(memory.Options{}), seal.Generate()} }

func (p place) escalations() *hitl.Store { return hitl.NewStore(p.Store, p.ring) }

func opening(key string) hitl.Opening {
	return hitl.Opening{Key: key, Level: hitl.Approval, Cause: hitl.CauseIrreversible, Summary: "The mail is sent and cannot be unsent."}
}

func open(t *testing.T, d *hitl.Store, o hitl.Opening) hitl.Escalation {
	t.Helper()
	e, err := d.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func get(t *testing.T, d *hitl.Store, id string) hitl.Escalation {
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

// run starts the delivery to r; end stops it and waits.
func run(t *testing.T, d *hitl.Store, r *receiver, o hitl.Delivery) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		o.Notify = r.Notify
		d.Deliver(ctx, o)
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
	if f.failing.Load() {
		return store.Entry{}, errStore
	}
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

func TestOpenedEscalationIsFoundAgain(t *testing.T) {
	p := newPlace()
	o := hitl.Opening{
		Key: "r1/k1", Level: hitl.Stop, Cause: hitl.CauseRollbackFailed, Summary: "The refund was refused.",
		Workflow: "w", Caller: "spiffe://example.com/agent/a",
		Links: hitl.Links{Checkpoint: "k1", Rollback: "r1", Error: "e1", Execution: "abc", Upstream: "bank:443"},
	}
	e := open(t, p.escalations(), o)
	if id, err := uuid.Parse(e.ID); err != nil || id.Version() != 8 || id.Variant() != uuid.RFC4122 {
		t.Errorf("id %q: %v", e.ID, err)
	}
	got := get(t, p.escalations(), e.ID)
	if got.Level != o.Level || got.Cause != o.Cause || got.Summary != o.Summary || got.Workflow != o.Workflow ||
		got.Caller != o.Caller || got.Links != o.Links || got.State != hitl.Open || got.Opened.IsZero() {
		t.Errorf("%+v", got)
	}
	if got.ID != e.ID || !got.Opened.Equal(e.Opened) {
		t.Errorf("opened as %+v, found as %+v", e, got)
	}
	for _, id := range []string{"", "x", strings.ToUpper(e.ID), uuid.NewString()} {
		if _, err := p.escalations().Get(t.Context(), id); !errors.Is(err, hitl.ErrNotFound) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// The same occasion is one escalation: opened at once by many at two nodes, and again
// after a restart; and one person is told once.
func TestSameOccasionIsOneEscalation(t *testing.T) {
	p := newPlace()
	stores := []*hitl.Store{p.escalations(), p.escalations()}
	ids := make([]string, 64)
	var all sync.WaitGroup
	start := make(chan struct{})
	for i := range ids {
		all.Go(func() {
			<-start
			e, err := stores[i%2].Open(t.Context(), opening("r1/k1"))
			if err != nil {
				t.Error(err)
			}
			ids[i] = e.ID
		})
	}
	close(start)
	all.Wait()
	again := opening("r1/k1")
	again.Level, again.Summary = hitl.Stop, "Told otherwise."
	e := open(t, p.escalations(), again)
	if e.Level != hitl.Approval {
		t.Error("the second opening has changed the first one")
	}
	for _, id := range ids {
		if id != e.ID {
			t.Fatalf("%s beside %s", id, e.ID)
		}
	}
	if other := open(t, p.escalations(), opening("r1/k2")); other.ID == e.ID {
		t.Error("another occasion is the same escalation")
	}
	page, err := p.escalations().List(t.Context(), hitl.Filter{}, "", 10)
	if err != nil || len(page.Escalations) != 2 {
		t.Fatalf("%+v, %v", page, err)
	}
}

// P6: the escalation and the decision that causes it land together or not at all.
func TestP6EscalationLandsWithItsDecision(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	decision := store.Write{Key: []byte("decision"), If: store.Absent()}
	if _, err := p.Commit(t.Context(), decision); err != nil {
		t.Fatal(err)
	}
	pending, err := d.Prepare(t.Context(), opening("k"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.Commit(t.Context(), append([]store.Write{decision}, pending.Writes()...)...)
	if err = pending.Done(err); err == nil || errors.Is(err, hitl.ErrAlreadyOpen) {
		t.Fatal(err)
	}
	if _, err := d.Get(t.Context(), pending.Escalation().ID); !errors.Is(err, hitl.ErrNotFound) {
		t.Fatalf("it is there without its decision: %v", err)
	}
	other := store.Write{Key: []byte("other"), If: store.Absent()}
	_, err = p.Commit(t.Context(), append([]store.Write{other}, pending.Writes()...)...)
	if err = pending.Done(err); err != nil {
		t.Fatal(err)
	}
	get(t, d, pending.Escalation().ID)
}

// Whoever loses the race for an occasion hears it by its own name, and commits again
// without the escalation.
func TestLostOpeningIsPreparedAgain(t *testing.T) {
	p := newPlace()
	first, err := p.escalations().Prepare(t.Context(), opening("k"))
	if err != nil || !first.Fresh() {
		t.Fatal(err)
	}
	open(t, p.escalations(), opening("k"))
	decision := store.Write{Key: []byte("decision"), If: store.Absent()}
	_, err = p.Commit(t.Context(), append([]store.Write{decision}, first.Writes()...)...)
	if err = first.Done(err); !errors.Is(err, hitl.ErrAlreadyOpen) {
		t.Fatal(err)
	}
	second, err := p.escalations().Prepare(t.Context(), opening("k"))
	if err != nil || second.Fresh() || second.Escalation().ID != first.Escalation().ID {
		t.Fatalf("%+v, %v", second, err)
	}
	_, err = p.Commit(t.Context(), append([]store.Write{decision}, second.Writes()...)...)
	if err = second.Done(err); err != nil {
		t.Fatal(err)
	}
}

func TestNoEscalationHasNoWrites(t *testing.T) {
	none := new(hitl.Opened)
	if err := none.Done(errStore); none.Writes() != nil || !errors.Is(err, errStore) {
		t.Error(none.Writes(), err)
	}
}

func TestOpeningIsChecked(t *testing.T) {
	for name, spoil := range map[string]func(*hitl.Opening){
		"key is empty":     func(o *hitl.Opening) { o.Key = "" },
		"level is 0":       func(o *hitl.Opening) { o.Level = 0 },
		"level is 4":       func(o *hitl.Opening) { o.Level = 4 },
		`cause is "bored"`: func(o *hitl.Opening) { o.Cause = "bored" },
		"summary is empty": func(o *hitl.Opening) { o.Summary = "" },
	} {
		o := opening("k")
		spoil(&o)
		_, err := newPlace().escalations().Open(t.Context(), o)
		if !errors.Is(err, hitl.ErrOpening) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// P4: what cannot be recorded is not said to be escalated.
func TestP4StoreAwayIsAnError(t *testing.T) {
	p := newPlace()
	away := &faulty{Store: p.Store}
	away.failing.Store(true)
	if _, err := hitl.NewStore(away, p.ring).Open(t.Context(), opening("k")); !errors.Is(err, hitl.ErrStore) || !errors.Is(err, errStore) {
		t.Error(err)
	}
}

// P8: nothing of an escalation is readable at rest.
func TestP8StoreShowsNothing(t *testing.T) {
	p := newPlace()
	o := opening("secret-key")
	o.Workflow, o.Caller, o.Summary, o.Links = "secret-w", "secret-c", "secret-s", hitl.Links{Checkpoint: "secret-k"}
	open(t, p.escalations(), o)
	all := entries(t, p)
	if len(all) != 4 {
		t.Errorf("%d entries", len(all))
	}
	for _, e := range all {
		if bytes.Contains(e.Key, []byte("secret")) || bytes.Contains(e.Value, []byte("secret")) || e.Key[0] != 'h' {
			t.Errorf("%q: %q", e.Key, e.Value)
		}
	}
}

// What nobody was told of never expires; the rest does after its time, indexes included.
func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := hitl.NewStore(p.Store, p.ring)
		o := opening("k")
		o.Workflow = "w"
		e := open(t, d, o)
		time.Sleep(10_000 * time.Hour)
		end := run(t, d, &receiver{}, hitl.Delivery{})
		synctest.Wait()
		end()
		time.Sleep(hitl.Keep - 1)
		if got := get(t, d, e.ID); got.State != hitl.Notified {
			t.Fatalf("%+v", got)
		}
		if n := len(entries(t, p)); n != 3 {
			t.Errorf("%d entries", n)
		}
		time.Sleep(time.Nanosecond)
		if all := entries(t, p); len(all) > 0 {
			t.Errorf("%d entries are left, the first is %q", len(all), all[0].Key)
		}
	})
}

func TestDefaultRetentionIsNinetyDays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		open(t, p.escalations(), opening("k"))
		end := run(t, p.escalations(), &receiver{}, hitl.Delivery{})
		synctest.Wait()
		end()
		for _, e := range entries(t, p) {
			if want := time.Now().Add(90 * 24 * time.Hour); !e.Expires.Equal(want) {
				t.Errorf("%q expires %s instead of %s", e.Key, e.Expires, want)
			}
		}
	})
}

// One that does not open is counted, and in nobody's way.
func TestUnreadableEscalation(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	damaged, sound := open(t, d, opening("damaged")), open(t, d, opening("sound"))
	spoil(t, p, damaged.ID)
	if _, err := d.Get(t.Context(), damaged.ID); !errors.Is(err, hitl.ErrUnreadable) {
		t.Error(err)
	}
	if _, err := d.Open(t.Context(), opening("damaged")); !errors.Is(err, hitl.ErrUnreadable) {
		t.Error(err)
	}
	page, err := d.List(t.Context(), hitl.Filter{}, "", 10)
	if err != nil || page.Unreadable != 1 || len(page.Escalations) != 1 || page.Escalations[0].ID != sound.ID {
		t.Errorf("%+v, %v", page, err)
	}
}

func recordName(id string) []byte {
	parsed := uuid.MustParse(id)
	return append([]byte("he"), parsed[:]...)
}

func spoil(t *testing.T, p place, id string) {
	t.Helper()
	if _, err := p.Commit(t.Context(), store.Write{Key: recordName(id), Value: make([]byte, 100)}); err != nil {
		t.Fatal(err)
	}
}

func rotate(t *testing.T, ring *seal.Ring) {
	t.Helper()
	next, err := ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Adopt(next, nil, func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
}

// What changes in the middle of a pass is left to whoever changed it, and keeps nothing
// from being moved.
func TestResealLosesToChanges(t *testing.T) {
	p := newPlace()
	var ids []string
	for _, key := range []string{"a", "b", "c"} {
		ids = append(ids, open(t, p.escalations(), opening(key)).ID)
	}
	rotate(t, p.ring)
	between := &faulty{Store: p.Store}
	between.beforeCommit = func() { spoil(t, p, ids[1]) }
	if moved, err := hitl.NewStore(between, p.ring).Reseal(t.Context()); err != nil || moved != 2 {
		t.Fatalf("%d sealed anew, %v", moved, err)
	}
	for i, want := range []uint32{2, 0, 2} { // 0: what spoil has written
		if e, err := p.Store.Get(t.Context(), recordName(ids[i])); err != nil || p.ring.KeyOf(e.Value) != want {
			t.Errorf("%v, under key %d instead of %d", err, p.ring.KeyOf(e.Value), want)
		}
	}
}

// After a rotation and a pass nothing needs the older key (ADR 0016).
func TestReseal(t *testing.T) {
	st := memory.New(memory.Options{})
	ring := seal.Generate()
	p := place{st, ring}
	d := p.escalations()
	const n = 600 // more than two pages
	for i := range n {
		open(t, d, opening(strings.Repeat("k", i+1)))
	}
	damaged := open(t, d, opening("damaged"))
	rotate(t, ring)
	moved, err := d.Reseal(t.Context())
	if err != nil || moved != n+1 {
		t.Fatalf("%d sealed anew, %v", moved, err)
	}
	for _, e := range entries(t, p) {
		if bytes.HasPrefix(e.Key, []byte("he")) && ring.KeyOf(e.Value) != 2 {
			t.Fatalf("%q is under key %d", e.Key, ring.KeyOf(e.Value))
		}
	}
	get(t, d, damaged.ID)
	if moved, err = d.Reseal(t.Context()); err != nil || moved != 0 {
		t.Errorf("again: %d sealed anew, %v", moved, err)
	}
	spoil(t, p, damaged.ID)
	if moved, err = d.Reseal(t.Context()); !errors.Is(err, hitl.ErrUnreadable) || moved != 0 {
		t.Errorf("with a damaged one: %d sealed anew, %v", moved, err)
	}
}

// Every filter, in pages of every size, gives what a look at everything gives.
func TestListAgainstBruteForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		rnd := rand.New(rand.NewPCG(1, 2))
		var all []hitl.Escalation // the newest first
		answers := map[string]error{}
		for i := range 400 {
			o := opening(fmt.Sprint(i))
			o.Level = hitl.Level(1 + rnd.IntN(3))
			o.Workflow = []string{"", "a", "b"}[rnd.IntN(3)]
			e := open(t, d, o)
			answers[e.ID] = []error{nil, hitl.ErrRefused, errDown}[rnd.IntN(3)]
			all = append([]hitl.Escalation{e}, all...)
			time.Sleep(time.Second)
		}
		end := run(t, d, &receiver{answer: func(_ context.Context, e hitl.Escalation, _ int) error { return answers[e.ID] }}, hitl.Delivery{})
		synctest.Wait()
		end()
		for i := range all {
			all[i] = get(t, d, all[i].ID)
		}
		for _, f := range filters() {
			var want []string
			for _, e := range all {
				if (f.Workflow == "" || f.Workflow == e.Workflow) && (f.Level == 0 || f.Level == e.Level) && (f.State == "" || f.State == e.State) {
					want = append(want, e.ID)
				}
			}
			for _, limit := range []int{1, 7, 100, 1000} {
				if got := listed(t, d, f, limit); fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%+v by %d: %d instead of %d, or another order", f, limit, len(got), len(want))
				}
			}
		}
	})
}

func filters() (all []hitl.Filter) {
	for _, w := range []string{"", "a", "nobody's"} {
		for l := range hitl.Stop + 1 {
			for _, s := range append(hitl.States(), "") {
				all = append(all, hitl.Filter{Workflow: w, Level: l, State: s})
			}
		}
	}
	return all
}

// listed goes through all pages.
func listed(t *testing.T, d *hitl.Store, f hitl.Filter, limit int) (ids []string) {
	t.Helper()
	for cursor := ""; ; {
		page, err := d.List(t.Context(), f, cursor, limit)
		if err != nil {
			t.Fatal(err)
		}
		if len(page.Escalations) > limit {
			t.Fatalf("%d on a page of %d", len(page.Escalations), limit)
		}
		for _, e := range page.Escalations {
			ids = append(ids, e.ID)
		}
		if cursor = page.Next; cursor == "" {
			return ids
		}
	}
}

// A filter that hardly any pass gives short pages that go on, instead of a long wait.
func TestListOfRareOnesGoesOn(t *testing.T) {
	p := newPlace()
	d := p.escalations()
	rare := opening("rare")
	rare.Level = hitl.Stop
	e := open(t, d, rare)
	flood(t, p, 5_200)
	page, err := d.List(t.Context(), hitl.Filter{Level: hitl.Stop}, "", 1)
	if err != nil || len(page.Escalations) != 0 || page.Next == "" {
		t.Fatalf("%+v, %v", page, err)
	}
	page, err = d.List(t.Context(), hitl.Filter{Level: hitl.Stop}, page.Next, 2)
	if err != nil || len(page.Escalations) != 1 || page.Escalations[0].ID != e.ID || page.Next != "" {
		t.Fatalf("%+v, %v", page, err)
	}
}

// One that changes between the look at the index and at the record is judged by the record.
func TestListShowsOnlyWhatPassesStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		open(t, p.escalations(), opening("k"))
		between := &faulty{Store: p.Store}
		between.beforeGet = func() {
			end := run(t, p.escalations(), &receiver{}, hitl.Delivery{})
			synctest.Wait()
			end()
		}
		page, err := hitl.NewStore(between, p.ring).List(t.Context(), hitl.Filter{State: hitl.Open}, "", 10)
		if err != nil || len(page.Escalations) != 0 {
			t.Errorf("%+v, %v", page, err)
		}
	})
}

func TestCursorOfSomebodyElse(t *testing.T) {
	for _, cursor := range []string{"x", "!", "AAAA"} {
		if _, err := newPlace().escalations().List(t.Context(), hitl.Filter{}, cursor, 1); !errors.Is(err, hitl.ErrCursor) {
			t.Errorf("%q: %v", cursor, err)
		}
	}
}

// Counts follow what becomes of each escalation, and what is opened is heard of once. What was decided does not count as
// waiting.
func TestCountAndHear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		heard := map[string]int{}
		d.OnOpened(func(e hitl.Escalation) { heard[e.ID]++ })
		refused := map[string]bool{}
		for i := range 12 {
			o := opening(fmt.Sprint(i))
			o.Level = hitl.Level(1 + i%3)
			e := open(t, d, o)
			open(t, d, o) // again
			refused[e.ID] = i%4 == 0
			if heard[e.ID] != 1 {
				t.Errorf("heard of %d times", heard[e.ID])
			}
		}
		opened := time.Now()
		count := func(open, notified, undeliverable int) {
			t.Helper()
			c, err := d.Count(t.Context())
			for l := hitl.Pause; l <= hitl.Stop; l++ {
				want := fmt.Sprint(map[hitl.State]map[hitl.Status]int{
					hitl.Open: {hitl.Pending: open}, hitl.Notified: {hitl.Pending: notified}, hitl.Undeliverable: {hitl.Pending: undeliverable},
				})
				if got := fmt.Sprint(c.N[l]); err != nil || got != want {
					t.Errorf("%v: %s, %v; want %s", l, got, err, want)
				}
				if oldest, waits := c.Oldest[l]; waits != (open+notified+undeliverable > 0) || waits && !oldest.Equal(opened) {
					t.Errorf("%v: the oldest is of %v, %t", l, oldest, waits)
				}
			}
		}
		count(4, 0, 0)
		end := run(t, d, &receiver{answer: func(_ context.Context, e hitl.Escalation, _ int) error {
			if refused[e.ID] {
				return hitl.ErrRefused
			}
			return nil
		}}, hitl.Delivery{})
		synctest.Wait()
		end()
		count(0, 3, 1)
		time.Sleep(hitl.Keep + time.Second)
		count(0, 0, 0)
	})
}
