package hitl_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// gateway is one of several over a store.
type gateway struct {
	*memory.Member
	*hitl.Store
}

func (p place) join(node string) gateway {
	m := p.Join(node)
	return gateway{m, hitl.NewStore(m, p.ring)}
}

// holding is the opening of what holds the workflow w.
func holding(key string) hitl.Opening {
	o := opening(key)
	o.Level, o.Workflow = hitl.Pause, "w"
	return o
}

func approval(by string, e hitl.Escalation) hitl.Vote {
	return hitl.Vote{By: by, Every: true, Approve: true, Hash: e.Proposal.Hash(), Reason: "seen"}
}

// ADR 0133: what people hold at one gateway keeps calls from beginning at all of them from its commit on, also those
// that were admitted before, until people let it go on at any of them.
func TestFleetHoldsAtAllGateways(t *testing.T) {
	p := newPlace()
	a, b := p.join("a"), p.join("b")
	claim := func(at store.Fence) error {
		return store.Bind(store.NewBatch(store.Write{Key: []byte("call")}), at).Commit(t.Context(), b.Member)
	}
	blocks := func(d gateway) (*hitl.Escalation, store.Fence) {
		t.Helper()
		e, at, err := d.Blocks(t.Context(), "w")
		if err != nil {
			t.Fatal(err)
		}
		return e, at
	}
	for round := range 3 { // the first call of the workflow here, and later ones
		e, at := blocks(b)
		if e != nil {
			t.Fatalf("held by %+v", e)
		}
		if err := claim(at); err != nil {
			t.Fatal(err)
		}
		held := open(t, a.Store, holding(fmt.Sprint(round)))
		if err := claim(at); !errors.Is(err, store.ErrFenced) {
			t.Errorf("claimed what is held: %v", err)
		}
		for _, d := range []gateway{a, b, p.join("c")} {
			if e, _ := blocks(d); e == nil || e.ID != held.ID {
				t.Errorf("%s: %+v", d.Self().Node, e)
			}
			if e, _, err := d.Blocks(t.Context(), "another"); e != nil || err != nil {
				t.Errorf("another: %+v, %v", e, err)
			}
		}
		if _, err := b.Decide(t.Context(), held.ID, approval("ann", held)); err != nil {
			t.Fatal(err)
		}
		if e, _ := blocks(a); e != nil {
			t.Errorf("still held: %+v", e)
		}
	}
}

// A commit that holds its own workflow, such as the claim of a call that reports an error, is bound all the same.
func TestFleetClaimThatHoldsItsWorkflow(t *testing.T) {
	p := newPlace()
	a, b := p.join("a"), p.join("b")
	for _, other := range []bool{false, true} {
		_, at, err := a.Blocks(t.Context(), "w")
		if err != nil {
			t.Fatal(err)
		}
		opened, err := a.Prepare(t.Context(), holding(fmt.Sprint("own ", other)))
		if err != nil {
			t.Fatal(err)
		}
		if other {
			open(t, b.Store, holding("another's"))
		}
		err = store.Bind(opened.Batch, at).Commit(t.Context(), a.Member)
		if errors.Is(err, store.ErrFenced) != other || !other && err != nil {
			t.Errorf("with another one in between %t: %v", other, err)
		}
		if e, err := b.Find(t.Context(), fmt.Sprint("own ", other)); err == nil {
			if _, err := b.Decide(t.Context(), e.ID, approval("ann", e)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Whoever waits for a decision at one gateway wakes by that at another one, and no time passes.
func TestFleetWaitWakesByADecisionElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		a, b := p.join("a"), p.join("b")
		e := open(t, a.Store, opening("k"))
		began := time.Now()
		var got hitl.Escalation
		var err error
		go func() { got, err = a.Wait(t.Context(), e.ID) }()
		synctest.Wait()
		if got.ID != "" {
			t.Fatal("it did not wait")
		}
		if _, err := b.Decide(t.Context(), e.ID, approval("ann", e)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got.Status != hitl.Approved || err != nil || time.Since(began) != 0 {
			t.Errorf("%+v, %v, after %s", got, err, time.Since(began))
		}
	})
}

// Two people are two people, at whichever gateways they decide; the same one at two gateways at once counts once.
func TestFleetVotesRace(t *testing.T) {
	p := newPlace()
	a, b := p.join("a"), p.join("b")
	for round := range 20 {
		o := opening(fmt.Sprint(round))
		o.Quorum, o.Requester = 2, "bob"
		e := open(t, a.Store, o)
		vote := func(by ...string) (counted int) {
			var n atomic.Int64
			var wg sync.WaitGroup
			for i, name := range by {
				wg.Go(func() {
					_, err := []gateway{a, b}[i%2].Decide(t.Context(), e.ID, approval(name, e))
					switch {
					case err == nil:
						n.Add(1)
					case !errors.Is(err, hitl.ErrDecided) && !errors.Is(err, hitl.ErrOwn):
						t.Error(err)
					}
				})
			}
			wg.Wait()
			return int(n.Load())
		}
		if n := vote("ann", "ann", "bob", "bob"); n != 1 {
			t.Fatalf("%d votes of one person, and of who asked, count", n)
		}
		if got := get(t, b.Store, e.ID); got.Status != hitl.Pending {
			t.Fatalf("approved by one: %+v", got)
		}
		if n := vote("cid", "dan"); n != 1 {
			t.Errorf("%d votes of two that decide", n)
		}
		if got := get(t, a.Store, e.ID); got.Status != hitl.Approved || len(got.Decisions) != 2 {
			t.Errorf("%+v", got)
		}
	}
}

// A deadline acts once, whichever gateways live then: another role is asked, and after that it expires.
func TestFleetDeadlinesActOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		all := []gateway{p.join("a"), p.join("b"), p.join("c")}
		var ended atomic.Int64
		r := &receiver{}
		for _, d := range all {
			d.OnDecided(func(hitl.Escalation) { ended.Add(1) })
			defer run(t, d.Store, r, hitl.Delivery{})()
		}
		o := opening("k")
		o.Within, o.Unreachable = time.Hour, hitl.Unreachable{Do: hitl.UnreachableEscalate, NextRole: "boss", Within: time.Hour}
		e := open(t, all[0].Store, o)
		synctest.Wait()
		all[0].Remove() // who has opened it does not live to see it
		time.Sleep(90 * time.Minute)
		synctest.Wait()
		if got := get(t, all[1].Store, e.ID); got.Status != hitl.Pending || got.Round != 1 || got.RequiredRole != "boss" || ended.Load() != 0 {
			t.Errorf("%+v, %d ends", got, ended.Load())
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := get(t, all[2].Store, e.ID); got.Status != hitl.Expired || ended.Load() != 1 {
			t.Errorf("%+v, %d ends", got, ended.Load())
		}
		if n := len(r.attempts(e.ID)); n != 2 {
			t.Errorf("told %d times, want once for each role", n)
		}
	})
}

// One gateway delivers an escalation at a time. Once it is gone, another one does at once, under the same id; a
// living one that is slow is left alone.
func TestFleetTakesOverDeliveries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		a, b := p.join("a"), p.join("b")
		slow := &receiver{answer: func(ctx context.Context, _ hitl.Escalation, _ int) error {
			<-ctx.Done()
			return ctx.Err()
		}}
		quick := &receiver{}
		endA := run(t, a.Store, slow, hitl.Delivery{Attempt: time.Hour})
		e := open(t, a.Store, opening("k"))
		synctest.Wait()
		defer run(t, b.Store, quick, hitl.Delivery{Attempt: time.Hour, OnError: func(err error) { t.Error(err) }})()
		other := p.join("c")
		time.Sleep(10 * time.Minute)
		other.Remove() // it has nothing
		time.Sleep(10 * time.Minute)
		if n := len(quick.attempts(e.ID)); n != 0 || len(slow.attempts(e.ID)) != 1 {
			t.Fatalf("delivered beside a living gateway, %d times", n)
		}
		began := time.Now()
		a.Remove()
		synctest.Wait()
		if n := len(quick.attempts(e.ID)); n != 1 || time.Since(began) != 0 {
			t.Errorf("delivered %d times, %s after it was gone", n, time.Since(began))
		}
		if got := get(t, b.Store, e.ID); got.State != hitl.Notified || delivery(got) != "2" {
			t.Errorf("%+v", got)
		}
		endA()
	})
}

// What waits because of a requester counts wherever it was opened.
func TestFleetCountsWhatWaits(t *testing.T) {
	p := newPlace()
	a, b := p.join("a"), p.join("b")
	full := func(d gateway, most int) bool {
		t.Helper()
		full, err := d.Waits(t.Context(), "bob", most)
		if err != nil {
			t.Fatal(err)
		}
		return full
	}
	var all []hitl.Escalation
	for i, d := range []gateway{a, b, a} {
		o := opening(fmt.Sprint(i))
		o.Requester = "bob"
		all = append(all, open(t, d.Store, o))
	}
	if !full(a, 3) || !full(b, 3) || full(b, 4) {
		t.Error("not three wait at both")
	}
	if _, err := b.Decide(t.Context(), all[0].ID, approval("ann", all[0])); err != nil {
		t.Fatal(err)
	}
	if full(a, 3) || !full(a, 2) || full(b, 3) {
		t.Error("not two wait at both")
	}
	late := p.join("c") // which reads what is there when it opens
	if _, err := late.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !full(late, 2) {
		t.Error("not two wait at the one that comes later")
	}
}
