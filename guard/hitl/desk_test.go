package hitl_test

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

func TestOpenedEscalationIsFoundAgain(t *testing.T) {
	p := newPlace()
	o := hitl.Opening{
		Key: "r1/k1", Level: hitl.Stop, Cause: hitl.CauseRollbackFailed, Summary: "The refund was refused.",
		Workflow: "w", Caller: "spiffe://example.com/agent/a",
		Links: hitl.Links{Checkpoint: "k1", Rollback: "r1", Error: "e1", Execution: "abc", Upstream: "bank:443"},
	}
	e := open(t, p.desk(), o)
	if id, err := uuid.Parse(e.ID); err != nil || id.Version() != 8 || id.Variant() != uuid.RFC4122 {
		t.Errorf("id %q: %v", e.ID, err)
	}
	got := get(t, p.desk(), e.ID)
	if got.Level != o.Level || got.Cause != o.Cause || got.Summary != o.Summary || got.Workflow != o.Workflow ||
		got.Caller != o.Caller || got.Links != o.Links || got.State != hitl.Open || got.Opened.IsZero() {
		t.Errorf("%+v", got)
	}
	if got.ID != e.ID || !got.Opened.Equal(e.Opened) {
		t.Errorf("opened as %+v, found as %+v", e, got)
	}
	for _, id := range []string{"", "x", strings.ToUpper(e.ID), uuid.NewString()} {
		if _, err := p.desk().Get(t.Context(), id); !errors.Is(err, hitl.ErrNotFound) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// The same occasion is one escalation: opened at once by many at two nodes, and again
// after a restart; and one person is told once.
func TestSameOccasionIsOneEscalation(t *testing.T) {
	p := newPlace()
	desks := []*hitl.Desk{p.desk(), p.desk()}
	ids := make([]string, 64)
	var all sync.WaitGroup
	start := make(chan struct{})
	for i := range ids {
		all.Go(func() {
			<-start
			e, err := desks[i%2].Open(t.Context(), opening("r1/k1"))
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
	e := open(t, p.desk(), again)
	if e.Level != hitl.Approval {
		t.Error("the second opening has changed the first one")
	}
	for _, id := range ids {
		if id != e.ID {
			t.Fatalf("%s beside %s", id, e.ID)
		}
	}
	if other := open(t, p.desk(), opening("r1/k2")); other.ID == e.ID {
		t.Error("another occasion is the same escalation")
	}
	page, err := p.desk().List(t.Context(), hitl.Filter{}, "", 10)
	if err != nil || len(page.Escalations) != 2 {
		t.Fatalf("%+v, %v", page, err)
	}
}

// P6: the escalation and the decision that causes it land together or not at all.
func TestP6EscalationLandsWithItsDecision(t *testing.T) {
	p := newPlace()
	d := p.desk()
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
func TestLostRiderIsPreparedAgain(t *testing.T) {
	p := newPlace()
	first, err := p.desk().Prepare(t.Context(), opening("k"))
	if err != nil || !first.Fresh() {
		t.Fatal(err)
	}
	open(t, p.desk(), opening("k"))
	decision := store.Write{Key: []byte("decision"), If: store.Absent()}
	_, err = p.Commit(t.Context(), append([]store.Write{decision}, first.Writes()...)...)
	if err = first.Done(err); !errors.Is(err, hitl.ErrAlreadyOpen) {
		t.Fatal(err)
	}
	second, err := p.desk().Prepare(t.Context(), opening("k"))
	if err != nil || second.Fresh() || second.Escalation().ID != first.Escalation().ID {
		t.Fatalf("%+v, %v", second, err)
	}
	_, err = p.Commit(t.Context(), append([]store.Write{decision}, second.Writes()...)...)
	if err = second.Done(err); err != nil {
		t.Fatal(err)
	}
}

func TestNoEscalationHasNoRiders(t *testing.T) {
	var none *hitl.Pending
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
		_, err := newPlace().desk().Open(t.Context(), o)
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
	if _, err := hitl.NewDesk(away, p.ring, 0).Open(t.Context(), opening("k")); !errors.Is(err, hitl.ErrStore) || !errors.Is(err, errStore) {
		t.Error(err)
	}
}

// P8: nothing of an escalation is readable at rest.
func TestP8StoreShowsNothing(t *testing.T) {
	p := newPlace()
	o := opening("secret-key")
	o.Workflow, o.Caller, o.Summary, o.Links = "secret-w", "secret-c", "secret-s", hitl.Links{Checkpoint: "secret-k"}
	open(t, p.desk(), o)
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
		d := hitl.NewDesk(p.Store, p.ring, 48*time.Hour)
		o := opening("k")
		o.Workflow = "w"
		e := open(t, d, o)
		time.Sleep(10_000 * time.Hour)
		end := run(t, d, &receiver{}, hitl.CourierOptions{})
		synctest.Wait()
		end()
		time.Sleep(48*time.Hour - 1)
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
		open(t, p.desk(), opening("k"))
		end := run(t, p.desk(), &receiver{}, hitl.CourierOptions{})
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
	d := p.desk()
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
		ids = append(ids, open(t, p.desk(), opening(key)).ID)
	}
	rotate(t, p.ring)
	between := &faulty{Store: p.Store}
	between.beforeCommit = func() { spoil(t, p, ids[1]) }
	if moved, err := hitl.NewDesk(between, p.ring, 0).Reseal(t.Context()); err != nil || moved != 2 {
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
	d := p.desk()
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
