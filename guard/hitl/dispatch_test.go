package hitl_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// delivery is what is recorded of the notification, in words.
func delivery(e hitl.Escalation) string {
	text := fmt.Sprint(e.Attempts)
	if e.LastError != "" || !e.NextAttempt.IsZero() || e.Boot != "" {
		text = fmt.Sprint(text, e.LastError, e.NextAttempt, e.Boot)
	}
	return text
}

func TestOpenedEscalationIsDeliveredAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d, r := p.escalations(), &receiver{}
		end := run(t, d, r, hitl.Delivery{OnAttempt: func(e hitl.Escalation, err error) {
			if e.State != hitl.Notified || err != nil {
				t.Errorf("%+v, %v", e, err)
			}
		}})
		defer end()
		synctest.Wait() // it sleeps
		began := time.Now()
		e := open(t, d, opening("k"))
		synctest.Wait()
		if got := get(t, d, e.ID); got.State != hitl.Notified || delivery(got) != "1" || time.Since(began) != 0 {
			t.Errorf("%+v after %s", got, time.Since(began))
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := len(r.attempts(e.ID)); n != 1 {
			t.Errorf("told %d times", n)
		}
	})
}

// An extra write wakes the dispatcher as Open does, also where nobody can tell whether it landed.
func TestPreparedEscalationIsDeliveredAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d, r := p.escalations(), &receiver{}
		defer run(t, d, r, hitl.Delivery{})()
		for _, outcome := range []error{nil, store.ErrUnknown} {
			synctest.Wait() // it sleeps
			pending, err := d.Prepare(t.Context(), opening(fmt.Sprint(outcome)))
			if err != nil {
				t.Fatal(err)
			}
			if _, err = p.Commit(t.Context(), pending.Writes()...); err != nil {
				t.Fatal(err)
			}
			if err := pending.Done(outcome); !errors.Is(err, outcome) {
				t.Fatal(err)
			}
			synctest.Wait()
			if r.attempts(pending.Escalation().ID) == nil {
				t.Errorf("nobody was told after %v", outcome)
			}
		}
	})
}

func TestBackoffDoublesUpToItsBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		r := &receiver{answer: func(_ context.Context, _ hitl.Escalation, n int) error {
			if n < 13 {
				return errAttempt(n)
			}
			return nil
		}}
		e := open(t, d, opening("k"))
		end := run(t, d, r, hitl.Delivery{})
		defer end()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if got := get(t, d, e.ID); got.LastError != "attempt 4 failed" || got.Attempts != 4 || got.State != hitl.Open ||
			!got.NextAttempt.Equal(got.Opened.Add(15*time.Second)) {
			t.Errorf("%+v", got)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		var want []time.Duration
		for _, seconds := range []int{0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 811, 1111, 1411} {
			want = append(want, time.Duration(seconds)*time.Second)
		}
		if got := r.attempts(e.ID); !slices.Equal(got, want) {
			t.Errorf("attempts at %v\ninstead of   %v", got, want)
		}
		if got := get(t, d, e.ID); got.State != hitl.Notified || delivery(got) != "13" {
			t.Errorf("%+v", got)
		}
	})
}

// It goes on for ever.
func TestItIsTriedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		r := &receiver{answer: func(context.Context, hitl.Escalation, int) error { return errDown }}
		e := open(t, d, opening("k"))
		end := run(t, d, r, hitl.Delivery{})
		time.Sleep(100 * 24 * time.Hour)
		synctest.Wait()
		end()
		if got := get(t, d, e.ID); got.State != hitl.Open || got.Attempts < 28_000 {
			t.Errorf("%+v", got)
		}
	})
}

func TestRefusedIsNotTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		r := &receiver{answer: func(context.Context, hitl.Escalation, int) error { return fmt.Errorf("gone: %w", hitl.ErrRefused) }}
		e := open(t, d, opening("k"))
		defer run(t, d, r, hitl.Delivery{})()
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if got := get(t, d, e.ID); got.State != hitl.Undeliverable || len(r.attempts(e.ID)) != 1 {
			t.Errorf("%+v after %v", got, r.attempts(e.ID))
		}
	})
}

// A receiver's wish is honoured from the backoff's own time up to an hour.
func TestReceiverMayAskForLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		r := &receiver{answer: func(_ context.Context, _ hitl.Escalation, n int) error {
			wishes := []time.Duration{0, time.Millisecond, 90 * time.Second, 1000 * time.Hour}
			if n < len(wishes) {
				return fmt.Errorf("busy: %w", &hitl.LaterError{After: wishes[n], Err: errDown})
			}
			return nil
		}}
		e := open(t, d, opening("k"))
		defer run(t, d, r, hitl.Delivery{})()
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		want := []time.Duration{0, time.Second, 91 * time.Second, 91*time.Second + time.Hour}
		if got := r.attempts(e.ID); !slices.Equal(got, want) {
			t.Errorf("attempts at %v instead of %v", got, want)
		}
	})
}

// An attempt that hangs is ended, and tried again.
func TestAttemptIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		e := open(t, d, opening("k"))
		r := &receiver{answer: func(c context.Context, _ hitl.Escalation, n int) error {
			if n == 1 {
				<-c.Done()
				return c.Err()
			}
			return nil
		}}
		defer run(t, d, r, hitl.Delivery{Attempt: 10 * time.Second})()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got, want := r.attempts(e.ID), []time.Duration{0, 11 * time.Second}; !slices.Equal(got, want) {
			t.Errorf("told at %v instead of %v", got, want)
		}
	})
}

// A receiver that hangs keeps nobody from opening.
func TestOpeningNeverWaitsForTheNotifier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		r := &receiver{answer: func(c context.Context, _ hitl.Escalation, _ int) error { <-c.Done(); return c.Err() }}
		defer run(t, d, r, hitl.Delivery{Concurrent: 2, Attempt: time.Hour})()
		began := time.Now()
		for i := range 1000 {
			open(t, d, opening(fmt.Sprint(i)))
		}
		synctest.Wait()
		if waited := time.Since(began); waited != 0 || r.most != 2 {
			t.Errorf("waited %s; %d attempts at once", waited, r.most)
		}
	})
}

// flood opens n escalations through a store of its own.
func flood(t *testing.T, p place, n int) {
	t.Helper()
	d := p.escalations()
	for i := range n {
		open(t, d, opening(fmt.Sprint("flood ", i)))
	}
}

// A flood costs the dispatcher a page at a time, whatever its length, and all are delivered.
func TestFloodIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 3_000
		p := newPlace()
		flood(t, p, n)
		watched := &faulty{Store: p.Store}
		delivered := 0
		var mu sync.Mutex
		r := &receiver{answer: func(context.Context, hitl.Escalation, int) error { time.Sleep(time.Millisecond); return nil }}
		defer run(t, hitl.NewStore(watched, p.ring), r, hitl.Delivery{OnAttempt: func(hitl.Escalation, error) {
			mu.Lock()
			defer mu.Unlock()
			delivered++
		}})()
		time.Sleep(time.Minute)
		synctest.Wait()
		if delivered != n || len(r.times) != n {
			t.Errorf("%d delivered, %d by the receiver's count", delivered, len(r.times))
		}
		if r.most != 4 || watched.widest.Load() > 8 {
			t.Errorf("%d attempts at once, %d entries in a scan", r.most, watched.widest.Load())
		}
	})
}

// In a backlog a STOP is delivered before an approval, and that before a PAUSE.
func TestHighestLevelFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		var want []string
		for l := hitl.Pause; l <= hitl.Stop; l++ {
			o := opening(l.String())
			o.Level = l
			want = append([]string{open(t, d, o).ID}, want...)
			time.Sleep(time.Second)
		}
		r := &receiver{answer: func(context.Context, hitl.Escalation, int) error { time.Sleep(time.Second); return nil }}
		defer run(t, d, r, hitl.Delivery{Concurrent: 1})()
		time.Sleep(time.Minute)
		synctest.Wait()
		if !slices.Equal(r.order, want) {
			t.Errorf("order %v instead of %v", r.order, want)
		}
	})
}

// P4: a store that is away is reported, and the work goes on when it is back.
func TestP4DispatcherOutlivesTheStoresTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		away := &faulty{Store: p.Store}
		d := hitl.NewStore(away, p.ring)
		e := open(t, d, opening("k"))
		away.failing.Store(true)
		r := &receiver{}
		troubles := 0
		defer run(t, d, r, hitl.Delivery{OnError: func(err error) {
			if !errors.Is(err, hitl.ErrStore) || !errors.Is(err, errStore) {
				t.Error(err)
			}
			troubles++
		}})()
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		if troubles != 13 || r.order != nil { // every 5 s
			t.Errorf("%d reports, told %v", troubles, r.order)
		}
		away.failing.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := get(t, d, e.ID); got.State != hitl.Notified {
			t.Errorf("%+v", got)
		}
	})
}

func TestDispatcherEndsWithItsStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			p.escalations().Deliver(t.Context(), hitl.Delivery{Notify: new(receiver).Notify})
		}()
		synctest.Wait()
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		<-ended
	})
}

// One that does not open is reported again and again, and the others are delivered.
func TestUnreadableIsPostponed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		d := p.escalations()
		damaged := open(t, d, opening("damaged"))
		spoil(t, p, damaged.ID)
		sound := open(t, d, opening("sound"))
		r := &receiver{}
		troubles := 0
		defer run(t, d, r, hitl.Delivery{OnError: func(err error) {
			if !errors.Is(err, hitl.ErrUnreadable) || !strings.Contains(err.Error(), damaged.ID) {
				t.Error(err)
			}
			troubles++
		}})()
		time.Sleep(time.Hour + time.Second)
		synctest.Wait()
		if troubles != 13 { // every 5 min
			t.Errorf("%d reports", troubles)
		}
		if got := get(t, d, sound.ID); got.State != hitl.Notified {
			t.Errorf("%+v", got)
		}
		// The record went meanwhile: nothing is left to be tried.
		if _, err := p.Commit(t.Context(), store.Write{Key: recordName(damaged.ID), Delete: true}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, e := range entries(t, p) {
			if e.Key[1] == 'u' {
				t.Errorf("%q is left", e.Key)
			}
		}
	})
}

// Crash between the record and the delivery: whoever comes next finds what is due.
func TestUndeliveredIsFoundAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		failed, refused := open(t, p.escalations(), opening("failed")), open(t, p.escalations(), opening("refused"))
		end := run(t, p.escalations(), &receiver{answer: func(_ context.Context, e hitl.Escalation, _ int) error {
			if e.ID == failed.ID {
				return errDown
			}
			return hitl.ErrRefused
		}}, hitl.Delivery{Attempt: time.Second})
		synctest.Wait()
		end()
		fresh := open(t, p.escalations(), opening("opened while no dispatcher runs"))
		time.Sleep(time.Minute) // down
		r := &receiver{}
		defer run(t, p.escalations(), r, hitl.Delivery{})()
		synctest.Wait()
		if got := get(t, p.escalations(), failed.ID); got.State != hitl.Notified || got.Attempts != 2 {
			t.Errorf("%+v", got)
		}
		if got := get(t, p.escalations(), fresh.ID); got.State != hitl.Notified || got.Attempts != 1 {
			t.Errorf("%+v", got)
		}
		if r.attempts(refused.ID) != nil {
			t.Error("told after it was refused")
		}
	})
}

// Crash between the delivery and its record: when the lease ends it is delivered once more,
// with the same id. That is what at least once means.
func TestLostRecordOfADeliveryIsDeliveredAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		dying := &faulty{Store: p.Store}
		r := &receiver{answer: func(_ context.Context, _ hitl.Escalation, n int) error {
			dying.failing.Store(n == 1)
			return nil
		}}
		e := open(t, p.escalations(), opening("k"))
		var mu sync.Mutex
		var troubles []error // of the attempt, and of the look that follows it, in any order
		end := run(t, hitl.NewStore(dying, p.ring), r, hitl.Delivery{Attempt: 20 * time.Second, OnError: func(err error) {
			mu.Lock()
			defer mu.Unlock()
			troubles = append(troubles, err)
		}})
		synctest.Wait()
		end()
		if !slices.ContainsFunc(troubles, func(err error) bool { return strings.Contains(err.Error(), "may be told again") }) {
			t.Errorf("%v", troubles)
		}
		defer run(t, p.escalations(), r, hitl.Delivery{})()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got, want := r.attempts(e.ID), []time.Duration{0, 40 * time.Second}; !slices.Equal(got, want) {
			t.Errorf("told at %v instead of %v", got, want)
		}
		if got := get(t, p.escalations(), e.ID); got.State != hitl.Notified {
			t.Errorf("%+v", got)
		}
	})
}

// A dispatcher that is stopped in an attempt gives its lease back: the next one need not wait.
func TestStoppedDispatcherGivesItsLeaseBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		e := open(t, p.escalations(), opening("k"))
		hanging := &receiver{answer: func(c context.Context, _ hitl.Escalation, _ int) error { <-c.Done(); return c.Err() }}
		end := run(t, p.escalations(), hanging, hitl.Delivery{})
		synctest.Wait()
		end()
		r := &receiver{}
		began := time.Now()
		defer run(t, p.escalations(), r, hitl.Delivery{})()
		synctest.Wait()
		if got := get(t, p.escalations(), e.ID); got.State != hitl.Notified || time.Since(began) != 0 || got.LastError != "" {
			t.Errorf("%+v", got)
		}
	})
}

// Two nodes over one store: none is delivered twice, though each takes half of the hour.
func TestTwoDispatchersDeliverOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		a, b := p.escalations(), p.escalations()
		r := &receiver{answer: func(c context.Context, _ hitl.Escalation, n int) error {
			time.Sleep(3 * time.Second)
			if n == 1 {
				return errDown
			}
			return nil
		}}
		defer run(t, a, r, hitl.Delivery{Concurrent: 8, Attempt: 5 * time.Second})()
		defer run(t, b, r, hitl.Delivery{Concurrent: 8, Attempt: 5 * time.Second})()
		var ids []string
		for i := range 100 {
			ids = append(ids, open(t, []*hitl.Store{a, b}[i%2], opening(fmt.Sprint(i))).ID)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, id := range ids {
			if got := r.attempts(id); len(got) != 2 {
				t.Errorf("attempts at %v", got)
			}
			if got := get(t, a, id); got.State != hitl.Notified {
				t.Errorf("%+v", got)
			}
		}
		if r.most <= 8 || r.most > 16 {
			t.Errorf("%d at once: the nodes do not share the work", r.most)
		}
	})
}

// Of two dispatchers that have both seen the same one due, the one whose lease is committed
// first delivers it.
func TestLeaseIsTakenByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		e := open(t, p.escalations(), opening("k"))
		r := &receiver{answer: func(context.Context, hitl.Escalation, int) error { time.Sleep(time.Second); return nil }}
		slow := &faulty{Store: p.Store}
		var end func()
		slow.beforeCommit = func() { // it has read the record by now
			end = run(t, p.escalations(), r, hitl.Delivery{})
			synctest.Wait()
		}
		defer run(t, hitl.NewStore(slow, p.ring), r, hitl.Delivery{})()
		time.Sleep(time.Hour)
		synctest.Wait()
		defer end()
		if got := r.attempts(e.ID); len(got) != 1 {
			t.Errorf("told at %v", got)
		}
		if got := get(t, p.escalations(), e.ID); got.State != hitl.Notified || got.Attempts != 1 {
			t.Errorf("%+v", got)
		}
	})
}

// A dispatcher whose lease ran out in a failing attempt leaves the one that came after it
// alone; a delivery it records, whoever has the lease.
func TestLateOutcome(t *testing.T) {
	for name, outcome := range map[string]error{"failed": errDown, "delivered": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlace()
				e := open(t, p.escalations(), opening("k"))
				r := &receiver{answer: func(_ context.Context, _ hitl.Escalation, n int) error {
					if n == 1 { // deaf to its time limit
						time.Sleep(30 * time.Second)
						return outcome
					}
					time.Sleep(15 * time.Second)
					return nil
				}}
				o := hitl.Delivery{Attempt: 10 * time.Second} // a lease of 20 s
				defer run(t, p.escalations(), r, o)()
				synctest.Wait()
				defer run(t, p.escalations(), r, o)()
				time.Sleep(31 * time.Second)
				synctest.Wait()
				want := hitl.Notified
				if outcome != nil {
					want = hitl.Open
				}
				if got := get(t, p.escalations(), e.ID); got.State != want || got.LastError != "" {
					t.Errorf("after the late one: %+v", got)
				}
				time.Sleep(time.Hour)
				synctest.Wait()
				if got := get(t, p.escalations(), e.ID); got.State != hitl.Notified || got.Attempts != 2 || len(r.attempts(e.ID)) != 2 {
					t.Errorf("%+v, told at %v", got, r.attempts(e.ID))
				}
			})
		})
	}
}

// What another node opened before it died is found by looking.
func TestEscalationOfADeadNodeIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		r := &receiver{}
		defer run(t, p.escalations(), r, hitl.Delivery{Poll: 20 * time.Second})()
		synctest.Wait()
		e := open(t, p.escalations(), opening("k")) // at another store, which has no dispatcher
		time.Sleep(20*time.Second - 1)
		synctest.Wait()
		if r.attempts(e.ID) != nil {
			t.Error("the test does not show what it means to")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if r.attempts(e.ID) == nil {
			t.Error("nobody was told")
		}
	})
}

// P2: what was acknowledged is on the disk, there when the store is opened anew,
// and is delivered.
func TestP2EscalationOutlivesTheProcess(t *testing.T) {
	ring, dir := seal.Generate(), t.TempDir()
	var ids []string
	for _, key := range []string{"a", "b"} {
		st, err := badger.Open(dir, badger.Options{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, open(t, hitl.NewStore(st, ring), opening(key)).ID)
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
	}
	st, err := badger.Open(dir, badger.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	d := hitl.NewStore(st, ring)
	notified := make(chan hitl.Escalation, len(ids))
	end := run(t, d, &receiver{}, hitl.Delivery{OnAttempt: func(e hitl.Escalation, _ error) { notified <- e }})
	defer end()
	for range ids {
		<-notified
	}
	if got := listed(t, d, hitl.Filter{State: hitl.Notified}, 1); !slices.Equal(got, []string{ids[1], ids[0]}) {
		t.Errorf("%v instead of %v", got, ids)
	}
}
