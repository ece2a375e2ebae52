package guard_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

func (r *rig) bounded(caller, id string, q guard.Quota) *guard.Call {
	c := r.call(id)
	c.Scope.Caller, c.Quota = caller, q
	c.Key = r.Key(c.Scope)
	return c
}

// refused claims c and wants to be told that its caller holds too much, without a
// trace of the call.
func (r *rig) refused(c *guard.Call) *guard.QuotaError {
	r.t.Helper()
	_, err := r.Claim(ctx, c, r.find(c))
	var over *guard.QuotaError
	if !errors.As(err, &over) {
		r.t.Fatalf("claimed over the quota: %v", err)
	}
	r.standing(c, guard.Free)
	return over
}

func TestQuotaBoundsOpenExecutions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		q := guard.Quota{Open: 3}
		one := r.claim(r.bounded("a", "1", q))
		two := r.claim(r.bounded("a", "2", q))
		three := r.claim(r.bounded("a", "3", q))
		if over := r.refused(r.bounded("a", "4", q)); over.Open != 3 {
			t.Errorf("holds %d", over.Open)
		}
		r.claim(r.bounded("b", "4", q)) // another caller's is not touched

		r.settle(one, answered(one, nil)) // makes room
		four := r.claim(r.bounded("a", "4", q))
		r.settle(two, guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost})
		r.refused(r.bounded("a", "5", q)) // a doubt makes none
		r.settle(three, guard.Outcome{Verdict: guard.Released})
		r.settle(four, guard.Outcome{Verdict: guard.Released})
		time.Sleep(365 * 24 * time.Hour)

		r.restart() // what is in doubt is counted from the store
		r.claim(r.bounded("a", "6", q))
		r.claim(r.bounded("a", "7", q))
		r.refused(r.bounded("a", "8", q))
		found, err := r.ByID(ctx, r.Caller("a"), "2")
		if err != nil || len(found) != 1 {
			t.Fatal(found, err)
		}
		if err := r.Resolve(ctx, found[0], guard.Resolution{Operator: "o", Reason: "r"}, nil, nil); err != nil {
			t.Fatal(err)
		}
		r.claim(r.bounded("a", "8", q))
		r.refused(r.bounded("a", "9", q))
	})
}

// A doubt that is run again is one open execution, not two.
func TestQuotaCountsARunAgainOnce(t *testing.T) {
	r := newRig(t)
	q := guard.Quota{Open: 2}
	c := r.bounded("a", "1", q)
	r.settle(r.claim(c), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost})
	again, err := r.Claim(ctx, c, r.standing(c, guard.Doubtful))
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
	q := guard.Quota{Open: 1, Bytes: 1}
	c := r.bounded("a", "1", q)
	r.settle(r.claim(c), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost})
	r.refused(r.bounded("a", "2", q))
	again, err := r.Claim(ctx, c, r.standing(c, guard.Doubtful))
	if err != nil {
		t.Fatal(err)
	}
	r.refused(r.bounded("a", "2", q))
	r.settle(again, guard.Outcome{Verdict: guard.Released})
	r.claim(r.bounded("a", "2", q))
}

// A quota that is taken away and set again counts what came in between.
func TestQuotaCountsWhileThereIsNone(t *testing.T) {
	r := newRig(t)
	q := guard.Quota{Open: 2}
	r.settle(r.claim(r.bounded("a", "1", q)), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost})
	r.settle(r.claim(r.bounded("a", "2", guard.Quota{})), guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost})
	r.claim(r.bounded("a", "3", guard.Quota{}))
	if over := r.refused(r.bounded("a", "4", q)); over.Open != 3 {
		t.Errorf("holds %d", over.Open)
	}
}

func TestQuotaBoundsStoredBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		q := guard.Quota{Bytes: 100_000}
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
			c := r.bounded("a", fmt.Sprint(i), guard.Quota{Open: 10})
			_, err := r.Claim(ctx, c, guard.Finding{})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				claimed++
			case errors.As(err, new(*guard.QuotaError)):
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
