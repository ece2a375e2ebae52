package guard_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func (r *rig) announced(id, checkpoint string) *guard.Call {
	c := r.call(id)
	c.Fingerprint = guard.Fingerprint{1}
	c.Checkpoint = checkpoint
	return c
}

func undoing(c *guard.Call, checkpoint string) guard.Undoing {
	return guard.Undoing{Key: c.Key, Checkpoint: checkpoint, Workflow: "w-1", Method: "POST", Path: "/v1/charges"}
}

var rider = store.Write{Key: []byte("z rider"), If: store.Absent(), Value: []byte("1")}

// DESIGN, "Checkpoints and rollback": a late duplicate of an undone request is refused for
// ever, whatever came of the call, and after a restart.
func TestLateDuplicateIsRefusedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		calls := map[string]*guard.Call{}
		for name, o := range map[string]guard.Outcome{
			"completed": {Verdict: guard.Completed, Status: 201},
			"in doubt":  {Verdict: guard.InDoubt, Cause: guard.CauseLost},
			"released":  {Verdict: guard.Released, Cause: guard.CauseNotSent},
		} {
			c := r.announced(name, "ckpt "+name)
			calls[name] = c
			r.settle(r.claim(c), o)
		}
		calls["never came"] = r.announced("never came", "ckpt never came")
		for name, c := range calls {
			for range 2 { // the second changes nothing
				if err := r.Undone(ctx, undoing(c, "ckpt "+name)); err != nil {
					t.Fatal(name, err)
				}
			}
		}
		if n, _, err := r.Doubts(ctx); n != 0 || err != nil {
			t.Errorf("%d doubts are left, %v", n, err)
		}
		for range 2 {
			for name, c := range calls {
				r.standing(c, guard.RolledBack)
				if _, err := r.Claim(ctx, c, guard.Finding{}); !errors.Is(err, guard.ErrTaken) {
					t.Errorf("%s: claimed by somebody who saw the key free: %v", name, err)
				}
			}
			time.Sleep(400 * 24 * time.Hour)
			r.restart()
		}
		page, err := r.List(ctx, guard.Filter{States: []guard.State{guard.StateRolledBack}, Workflow: "w-1"}, "", 10)
		if err != nil || len(page.Executions) != len(calls) {
			t.Errorf("listed %d, %v", len(page.Executions), err)
		}
	})
}

// What runs is waited for and not overwritten: its outcome lands.
func TestUndoneWaitsForWhatRuns(t *testing.T) {
	r := newRig(t)
	c := r.announced("a", "ckpt")
	e := r.claim(c)
	if err := r.Undone(ctx, undoing(c, "ckpt"), rider); !errors.Is(err, guard.ErrRunning) {
		t.Errorf("while it runs: %v", err)
	}
	r.settle(e, answered(e, nil))
	if err := r.Undone(ctx, undoing(c, "ckpt"), rider); err != nil {
		t.Fatal(err)
	}
	if _, err := r.mem.Get(ctx, rider.Key); err != nil {
		t.Errorf("the rider: %v", err)
	}
	r.standing(c, guard.RolledBack)
}

// A key that was released and claimed again belongs to another checkpoint.
func TestUndoneLeavesOtherCallsAlone(t *testing.T) {
	r := newRig(t)
	first, again := r.announced("a", "ckpt 1"), r.announced("a", "ckpt 2")
	r.settle(r.claim(first), guard.Outcome{Verdict: guard.Released, Cause: guard.CauseNotSent})
	e := r.claim(again)
	for range 2 {
		if err := r.Undone(ctx, undoing(first, "ckpt 1"), rider); !errors.Is(err, guard.ErrOtherCall) {
			t.Errorf("%v", err)
		}
		if e != nil {
			r.settle(e, answered(e, nil))
			e = nil
		}
	}
	r.standing(again, guard.Replayable)
	if _, err := r.mem.Get(ctx, rider.Key); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the rider landed: %v", err)
	}
}

// A rider that loses keeps everything as it was, and says which one it is.
func TestUndoneLandsWithItsRidersOrNotAtAll(t *testing.T) {
	r := newRig(t)
	if _, err := r.mem.Commit(ctx, rider); err != nil {
		t.Fatal(err)
	}
	done, free := r.announced("a", "ckpt"), r.announced("b", "ckpt b")
	e := r.claim(done)
	r.settle(e, answered(e, nil))
	for c, checkpoint := range map[*guard.Call]string{done: "ckpt", free: "ckpt b"} {
		var lost *store.Conflict
		if err := r.Undone(ctx, undoing(c, checkpoint), rider); !errors.As(err, &lost) || string(lost.Key) != string(rider.Key) {
			t.Errorf("%v", err)
		}
	}
	r.standing(done, guard.Replayable)
	r.standing(free, guard.Free)
}

// P1: of a call and the record that it must not run, one wins.
func TestP1BlockOrClaim(t *testing.T) {
	for range 200 {
		r := newRig(t)
		c := r.announced("a", "ckpt")
		found := r.find(c)
		blocked := make(chan error)
		go func() { blocked <- r.Undone(ctx, undoing(c, "ckpt")) }()
		e, err := r.Claim(ctx, c, found)
		switch undone := <-blocked; {
		case undone == nil && !errors.Is(err, guard.ErrTaken):
			t.Fatalf("blocked, and claimed: %v", err)
		case undone != nil && (err != nil || !errors.Is(undone, guard.ErrRunning) && !errors.Is(undone, guard.ErrTaken)):
			t.Fatalf("not blocked: %v; claimed: %v", undone, err)
		}
		if e != nil {
			r.settle(e, answered(e, nil))
		}
	}
}

// P4: without a store nothing is recorded.
func TestP4UndoneOnABrokenStore(t *testing.T) {
	r := newRig(t)
	c := r.announced("a", "ckpt")
	if err := r.mem.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.Undone(ctx, undoing(c, "ckpt")); !errors.Is(err, guard.ErrStore) {
		t.Errorf("%v", err)
	}
}

// What a caller holds is the same whether it was counted on the way or is counted anew.
func TestQuotaOfUndoneExecutions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		held := func() (open int, bytes int64) {
			c := r.announced("probe", "")
			for _, q := range []guard.Quota{{Open: 1}, {Bytes: 1}} {
				c.Quota = q
				var full *guard.QuotaError
				e, err := r.Claim(ctx, c, guard.Finding{})
				if errors.As(err, &full) {
					open, bytes = full.Open, full.Bytes
				} else if err != nil {
					t.Fatal(err)
				} else {
					r.settle(e, guard.Outcome{Verdict: guard.Released})
				}
			}
			return open, bytes
		}
		quota := guard.Quota{Open: 100, Bytes: 1 << 30}
		for _, name := range []string{"done", "doubt"} {
			c := r.announced(name, "ckpt "+name)
			c.Quota = quota
			e := r.claim(c)
			o := answered(e, make([]byte, 5000))
			if name == "doubt" {
				o = guard.Outcome{Verdict: guard.InDoubt}
			}
			r.settle(e, o)
		}
		for _, name := range []string{"done", "doubt", "free"} {
			u := undoing(r.announced(name, ""), "ckpt "+name)
			u.Caller = r.Caller("user:ada")
			if err := r.Undone(ctx, u); err != nil {
				t.Fatal(err)
			}
		}
		for _, age := range []time.Duration{0, 25 * time.Hour, 60 * 24 * time.Hour} {
			time.Sleep(age)
			open, bytes := held()
			r.restart()
			if again, anew := held(); open != again || bytes != anew || open != 0 {
				t.Errorf("after %v: %d open and %d bytes, counted anew %d and %d", age, open, bytes, again, anew)
			}
		}
	})
}
