package guard_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

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
		counted := func(most int) map[guard.State]guard.Count {
			t.Helper()
			all, err := r.Tally(ctx, most)
			if err != nil {
				t.Fatal(err)
			}
			return all
		}
		want := func(all map[guard.State]guard.Count, state guard.State, n int, more bool, oldest time.Time) {
			t.Helper()
			if c := all[state]; c.N != n || c.More != more || !c.Oldest.Equal(oldest) {
				t.Errorf("%s: %+v, want %d, %v, since %v", state, c, n, more, oldest)
			}
		}
		all := counted(100)
		want(all, guard.StateCompleted, 7, false, begun)
		want(all, guard.StateInDoubt, 2, false, firstDoubt)
		want(all, guard.StateSending, 1, false, running)
		want(all, guard.StateRolledBack, 0, false, time.Time{})
		want(counted(7), guard.StateCompleted, 7, false, begun)
		want(counted(6), guard.StateCompleted, 6, true, begun)
	})
}

// P1: an execution whose outcome was never recorded counts as in doubt, not as running.
func TestTallyOfAnUnrecordedOutcome(t *testing.T) {
	r, f := newFailing(t)
	e := r.claim(r.call("a"))
	f.fail = func([]store.Write) error { return errDisk }
	if err := e.Settle(ctx, answered(e, nil)); !errors.Is(err, guard.ErrUnrecorded) {
		t.Fatal(err)
	}
	all, err := r.Tally(ctx, 10)
	if err != nil {
		t.Fatal(err)
	}
	if all[guard.StateSending].N != 0 || all[guard.StateInDoubt].N != 1 || all[guard.StateInDoubt].Oldest.IsZero() {
		t.Errorf("%+v", all)
	}
}

// A key that is free again is still found by the first digits that a log shows, if it
// was resolved once; a recorded one goes before it.
func TestExpandFindsResolvedKeys(t *testing.T) {
	r := newRig(t)
	c, found := r.doubtful("a")
	for _, reason := range []string{"first", "second"} {
		if err := r.Resolve(ctx, found, guard.Resolution{Operator: "ada", Reason: reason}, nil, nil); err != nil {
			t.Fatal(err)
		}
		r.standing(c, guard.Free)
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
