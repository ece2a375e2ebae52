package hitl_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

// Crash between the record and the delivery: whoever comes next finds what is due.
func TestUndeliveredIsFoundAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		failed, refused := open(t, p.desk(), opening("failed")), open(t, p.desk(), opening("refused"))
		end := run(t, p.desk(), &receiver{answer: func(_ context.Context, e hitl.Escalation, _ int) error {
			if e.ID == failed.ID {
				return errDown
			}
			return hitl.ErrRefused
		}}, hitl.CourierOptions{Attempt: time.Second, MaxAge: time.Hour})
		synctest.Wait()
		end()
		fresh := open(t, p.desk(), opening("opened while no courier runs"))
		time.Sleep(time.Minute) // down
		r := &receiver{}
		defer run(t, p.desk(), r, hitl.CourierOptions{})()
		synctest.Wait()
		if got := get(t, p.desk(), failed.ID); got.State != hitl.Notified || got.Delivery.Attempts != 2 {
			t.Errorf("%+v", got)
		}
		if got := get(t, p.desk(), fresh.ID); got.State != hitl.Notified || got.Delivery.Attempts != 1 {
			t.Errorf("%+v", got)
		}
		if r.attempts(refused.ID) != nil {
			t.Error("told after it was refused")
		}
	})
}

// Crash between the delivery and its record: when the lease ends it is told once more,
// with the same id. That is what at least once means.
func TestLostRecordOfADeliveryIsToldAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		dying := &faulty{Store: p.Store}
		r := &receiver{answer: func(_ context.Context, _ hitl.Escalation, n int) error {
			dying.failing.Store(n == 1)
			return nil
		}}
		e := open(t, p.desk(), opening("k"))
		var troubles []error
		end := run(t, hitl.NewDesk(dying, p.ring, 0), r, hitl.CourierOptions{Attempt: 20 * time.Second, Troubled: func(err error) { troubles = append(troubles, err) }})
		synctest.Wait()
		end()
		if len(troubles) == 0 || !strings.Contains(troubles[0].Error(), "may be told again") {
			t.Errorf("%v", troubles)
		}
		defer run(t, p.desk(), r, hitl.CourierOptions{})()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got, want := r.attempts(e.ID), []time.Duration{0, 40 * time.Second}; !slices.Equal(got, want) {
			t.Errorf("told at %v instead of %v", got, want)
		}
		if got := get(t, p.desk(), e.ID); got.State != hitl.Notified {
			t.Errorf("%+v", got)
		}
	})
}

// A courier that is stopped in an attempt gives its lease back: the next one need not wait.
func TestStoppedCourierGivesItsLeaseBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		e := open(t, p.desk(), opening("k"))
		hanging := &receiver{answer: func(c context.Context, _ hitl.Escalation, _ int) error { <-c.Done(); return c.Err() }}
		end := run(t, p.desk(), hanging, hitl.CourierOptions{})
		synctest.Wait()
		end()
		r := &receiver{}
		began := time.Now()
		defer run(t, p.desk(), r, hitl.CourierOptions{})()
		synctest.Wait()
		if got := get(t, p.desk(), e.ID); got.State != hitl.Notified || time.Since(began) != 0 || got.Delivery.LastError != "" {
			t.Errorf("%+v", got)
		}
	})
}

// Two nodes over one store: none is told of twice, though each takes half of the hour.
func TestTwoCouriersTellOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		a, b := p.desk(), p.desk()
		r := &receiver{answer: func(c context.Context, _ hitl.Escalation, n int) error {
			time.Sleep(3 * time.Second)
			if n == 1 {
				return errDown
			}
			return nil
		}}
		defer run(t, a, r, hitl.CourierOptions{Concurrent: 8, Attempt: 5 * time.Second})()
		defer run(t, b, r, hitl.CourierOptions{Concurrent: 8, Attempt: 5 * time.Second})()
		var ids []string
		for i := range 100 {
			ids = append(ids, open(t, []*hitl.Desk{a, b}[i%2], opening(fmt.Sprint(i))).ID)
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

// Of two couriers that have both seen the same one due, the one whose lease is committed
// first delivers it.
func TestLeaseIsTakenByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		e := open(t, p.desk(), opening("k"))
		r := &receiver{answer: func(context.Context, hitl.Escalation, int) error { time.Sleep(time.Second); return nil }}
		slow := &faulty{Store: p.Store}
		var end func()
		slow.beforeCommit = func() { // it has read the record by now
			end = run(t, p.desk(), r, hitl.CourierOptions{})
			synctest.Wait()
		}
		defer run(t, hitl.NewDesk(slow, p.ring, 0), r, hitl.CourierOptions{})()
		time.Sleep(time.Hour)
		synctest.Wait()
		defer end()
		if got := r.attempts(e.ID); len(got) != 1 {
			t.Errorf("told at %v", got)
		}
		if got := get(t, p.desk(), e.ID); got.State != hitl.Notified || got.Delivery.Attempts != 1 {
			t.Errorf("%+v", got)
		}
	})
}

// A courier whose lease ran out in a failing attempt leaves the one that came after it
// alone; a delivery it records, whoever has the lease.
func TestLateOutcome(t *testing.T) {
	for name, outcome := range map[string]error{"failed": errDown, "delivered": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlace()
				e := open(t, p.desk(), opening("k"))
				r := &receiver{answer: func(_ context.Context, _ hitl.Escalation, n int) error {
					if n == 1 { // deaf to its time limit
						time.Sleep(30 * time.Second)
						return outcome
					}
					time.Sleep(15 * time.Second)
					return nil
				}}
				o := hitl.CourierOptions{Attempt: 10 * time.Second} // a lease of 20 s
				defer run(t, p.desk(), r, o)()
				synctest.Wait()
				defer run(t, p.desk(), r, o)()
				time.Sleep(31 * time.Second)
				synctest.Wait()
				want := hitl.Notified
				if outcome != nil {
					want = hitl.Open
				}
				if got := get(t, p.desk(), e.ID); got.State != want || got.Delivery.LastError != "" {
					t.Errorf("after the late one: %+v", got)
				}
				time.Sleep(time.Hour)
				synctest.Wait()
				if got := get(t, p.desk(), e.ID); got.State != hitl.Notified || got.Delivery.Attempts != 2 || len(r.attempts(e.ID)) != 2 {
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
		defer run(t, p.desk(), r, hitl.CourierOptions{Poll: 20 * time.Second})()
		synctest.Wait()
		e := open(t, p.desk(), opening("k")) // at another desk, which has no courier
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
		ids = append(ids, open(t, hitl.NewDesk(st, ring, 0), opening(key)).ID)
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
	}
	st, err := badger.Open(dir, badger.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	d := hitl.NewDesk(st, ring, 0)
	told := make(chan hitl.Escalation, len(ids))
	end := run(t, d, &receiver{}, hitl.CourierOptions{Attempted: func(e hitl.Escalation, _ error) { told <- e }})
	defer end()
	for range ids {
		<-told
	}
	if got := listed(t, d, hitl.Filter{State: hitl.Notified}, 1); !slices.Equal(got, []string{ids[1], ids[0]}) {
		t.Errorf("%v instead of %v", got, ids)
	}
}
