package execution_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func (r *rig) bounded(caller, id string, q execution.Quota) *execution.Call {
	c := r.call(id)
	c.Scope.Caller, c.Quota = caller, q
	c.Key = r.Key(c.Scope)
	return c
}

// refused claims c and wants to be told that its caller holds too much, without a
// trace of the call.
func (r *rig) refused(c *execution.Call) *execution.QuotaError {
	r.t.Helper()
	_, err := r.Claim(ctx, c, r.find(c))
	var over *execution.QuotaError
	if !errors.As(err, &over) {
		r.t.Fatalf("claimed over the quota: %v", err)
	}
	r.status(c, execution.Free)
	return over
}

func TestQuotaBoundsOpenExecutions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		q := execution.Quota{Open: 3}
		one := r.claim(r.bounded("a", "1", q))
		two := r.claim(r.bounded("a", "2", q))
		three := r.claim(r.bounded("a", "3", q))
		if over := r.refused(r.bounded("a", "4", q)); over.Open != 3 {
			t.Errorf("holds %d", over.Open)
		}
		r.claim(r.bounded("b", "4", q)) // another caller's is not touched

		r.settle(one, answered(one, nil)) // makes room
		four := r.claim(r.bounded("a", "4", q))
		r.settle(two, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
		r.refused(r.bounded("a", "5", q)) // a doubt makes none
		r.settle(three, execution.Outcome{Verdict: execution.Released})
		r.settle(four, execution.Outcome{Verdict: execution.Released})
		time.Sleep(365 * 24 * time.Hour)

		r.restart() // what is in doubt is counted from the store
		r.claim(r.bounded("a", "6", q))
		r.claim(r.bounded("a", "7", q))
		r.refused(r.bounded("a", "8", q))
		found, err := r.ByID(ctx, r.Caller("a"), "2")
		if err != nil || len(found) != 1 {
			t.Fatal(found, err)
		}
		if err := r.SettleDoubt(ctx, found[0], execution.Resolution{By: execution.ByOperator, Operator: "o", Reason: "r"}); err != nil {
			t.Fatal(err)
		}
		r.claim(r.bounded("a", "8", q))
		r.refused(r.bounded("a", "9", q))
	})
}

// A doubt that is run again is one open execution, not two.
func TestQuotaCountsARunAgainOnce(t *testing.T) {
	r := newRig(t)
	q := execution.Quota{Open: 2}
	c := r.bounded("a", "1", q)
	r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	again, err := r.Claim(ctx, c, r.status(c, execution.Doubtful))
	if err != nil {
		t.Fatal(err)
	}
	r.claim(r.bounded("a", "2", q))
	r.refused(r.bounded("a", "3", q))
	r.settle(again, answered(again, nil))
	r.claim(r.bounded("a", "3", q))
}

// A caller whose room is full of doubts can run them again, or it could settle none.
func TestQuotaLetsDoubtsRunAgain(t *testing.T) {
	r := newRig(t)
	q := execution.Quota{Open: 1, Bytes: 1}
	c := r.bounded("a", "1", q)
	r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	r.refused(r.bounded("a", "2", q))
	again, err := r.Claim(ctx, c, r.status(c, execution.Doubtful))
	if err != nil {
		t.Fatal(err)
	}
	r.refused(r.bounded("a", "2", q))
	r.settle(again, execution.Outcome{Verdict: execution.Released})
	r.claim(r.bounded("a", "2", q))
}

// A quota that is taken away and set again counts what came in between.
func TestQuotaCountsWhileThereIsNone(t *testing.T) {
	r := newRig(t)
	q := execution.Quota{Open: 2}
	r.settle(r.claim(r.bounded("a", "1", q)), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	r.settle(r.claim(r.bounded("a", "2", execution.Quota{})), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	r.claim(r.bounded("a", "3", execution.Quota{}))
	if over := r.refused(r.bounded("a", "4", q)); over.Open != 3 {
		t.Errorf("holds %d", over.Open)
	}
}

func TestQuotaBoundsStoredBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		q := execution.Quota{Bytes: 100_000}
		fill := func(from int) (stored int) {
			for i := from; ; i++ {
				c := r.bounded("a", fmt.Sprint(i), q)
				e, err := r.Claim(ctx, c, r.find(c))
				if err != nil {
					return i - from
				}
				r.settle(e, answered(e, make([]byte, 9_000)))
			}
		}
		if n := fill(0); n < 9 || n > 12 {
			t.Fatalf("%d answers of 9 KB fit into 100 KB", n)
		}
		over := r.refused(r.bounded("a", "more", q))
		if wait := time.Until(over.Retry); wait < 23*time.Hour || wait > 25*time.Hour {
			t.Errorf("room by expiry in %v", wait)
		}
		r.restart() // counted from the store
		r.refused(r.bounded("a", "more", q))
		time.Sleep(time.Until(over.Retry))
		if n := fill(100); n < 8 {
			t.Errorf("only %d fit after the answers have expired", n)
		}
	})
}

// Of many claims at a time exactly as many get through as are allowed.
func TestQuotaHoldsUnderConcurrency(t *testing.T) {
	r := newRig(t)
	var claimed, refused int
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			c := r.bounded("a", fmt.Sprint(i), execution.Quota{Open: 10})
			_, err := r.Claim(ctx, c, execution.Finding{})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				claimed++
			case errors.As(err, new(*execution.QuotaError)):
				refused++
			default:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if claimed != 10 || refused != 40 {
		t.Errorf("%d claimed, %d refused", claimed, refused)
	}
}

// Section "Store": counts come from the index, are bounded, and say so; what has lost
// its owner counts as in doubt, as it does in listings.
func TestTally(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		begun := time.Now()
		for i := range 7 {
			e := r.claim(r.call(fmt.Sprint("done-", i)))
			r.settle(e, answered(e, nil))
			time.Sleep(time.Second)
		}
		firstDoubt := time.Now()
		for i := range 2 {
			r.doubtful(fmt.Sprint("doubt-", i))
			time.Sleep(time.Second)
		}
		running := time.Now()
		r.claim(r.call("runs"))
		counted := func(most int) map[execution.State]execution.Count {
			t.Helper()
			all, err := r.Tally(ctx, most)
			if err != nil {
				t.Fatal(err)
			}
			return all
		}
		want := func(all map[execution.State]execution.Count, state execution.State, n int, more bool, oldest time.Time) {
			t.Helper()
			if c := all[state]; c.N != n || c.More != more || !c.Oldest.Equal(oldest) {
				t.Errorf("%s: %+v, want %d, %v, since %v", state, c, n, more, oldest)
			}
		}
		all := counted(100)
		want(all, execution.StateCompleted, 7, false, begun)
		want(all, execution.StateInDoubt, 2, false, firstDoubt)
		want(all, execution.StateSending, 1, false, running)
		want(all, execution.StateRolledBack, 0, false, time.Time{})
		want(counted(7), execution.StateCompleted, 7, false, begun)
		want(counted(6), execution.StateCompleted, 6, true, begun)
	})
}

// P1: an execution whose outcome was never recorded counts as in doubt, not as running.
func TestTallyOfAnUnrecordedOutcome(t *testing.T) {
	r, f := newFailing(t)
	e := r.claim(r.call("a"))
	f.fails(func([]store.Write) error { return errDisk })
	if err := e.Settle(ctx, answered(e, nil)); !errors.Is(err, execution.ErrUnrecorded) {
		t.Fatal(err)
	}
	all, err := r.Tally(ctx, 10)
	if err != nil {
		t.Fatal(err)
	}
	if all[execution.StateSending].N != 0 || all[execution.StateInDoubt].N != 1 || all[execution.StateInDoubt].Oldest.IsZero() {
		t.Errorf("%+v", all)
	}
}

// A key that is free again is still found by the first digits that a log shows, if it
// was resolved once; a recorded one goes before it.
func TestExpandFindsResolvedKeys(t *testing.T) {
	r := newRig(t)
	c, found := r.doubtful("a")
	for _, reason := range []string{"first", "second"} {
		if err := r.SettleDoubt(ctx, found, execution.Resolution{By: execution.ByOperator, Operator: "ada", Reason: reason}); err != nil {
			t.Fatal(err)
		}
		r.status(c, execution.Free)
		for _, n := range []int{15, 16, 64} {
			if key, err := r.Expand(ctx, c.Key.Hex()[:n]); err != nil || key != c.Key {
				t.Errorf("%d digits: %v, %v", n, key, err)
			}
		}
		if reason == "first" {
			_, found = r.doubtful("a")
		}
	}
}
