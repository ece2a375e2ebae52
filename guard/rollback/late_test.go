package rollback_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// lateCall has what undoing needs of a call recorded with its outcome, as the gateway does.
type lateCall struct {
	r *rig
	h checkpoint.Handle
	v execution.Verdict
}

func (l *lateCall) batch(ctx context.Context) *store.Batch {
	switch l.v {
	case execution.Released:
		return l.r.checkpoints.Release(l.h)
	case execution.InDoubt:
		return nil
	}
	p, err := l.r.checkpoints.Record(ctx, l.h, checkpoint.Result{Status: 200})
	if err != nil {
		l.r.t.Error(err)
		return nil
	}
	return p.Batch
}

func (l *lateCall) Size() int64                              { return 0 }
func (l *lateCall) Again(ctx context.Context) []*store.Batch { return []*store.Batch{l.batch(ctx)} }

// ADR 0147: a call whose outcome could not be recorded when it came is undone by what its answer has left, as any
// other: at its own gateway and at another one, whether the rollback comes behind the outcome, with the store, or
// before it.
func TestRollbackOfAnOutcomeThatWaited(t *testing.T) {
	const behind, together, before = "behind the outcome", "with the store", "before the store"
	for _, v := range []execution.Verdict{execution.Completed, execution.Released, execution.InDoubt} {
		for _, way := range []checkpoint.Way{checkpoint.Compensate, checkpoint.Restore} {
			for _, at := range []string{"its gateway", "another"} {
				for _, when := range []string{behind, together, before} {
					if at == "its gateway" && when == before { // whose store takes nothing
						continue
					}
					t.Run(fmt.Sprint(v, "/", way, "/", at, "/", when), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) { rollBackLate(t, v, way, at == "another", when == behind, when == before) })
					})
				}
			}
		}
	}
}

func rollBackLate(t *testing.T, v execution.Verdict, way checkpoint.Way, elsewhere, behind, before bool) {
	root := newRig(t)
	a, b := root.join("a"), root.join("b")
	e, h := a.claimed("1", way)
	a.start()
	b.start()
	at := a
	if elsewhere {
		at = b
	}
	undone := 0
	at.undoer.seen = func(task rollback.Task) {
		undone++
		if has := task.Checkpoint.Result != nil; has != (v == execution.Completed) {
			t.Errorf("what the answer has left is there: %t", has)
		}
	}
	late := &lateCall{r: a, h: h, v: v}
	a.st.refuses.Store(true)
	o := execution.Outcome{Verdict: v, Status: 200, Whole: v == execution.Completed}
	if v == execution.InDoubt {
		o.Cause = execution.CauseLost
	}
	if err := e.SettleWith(ctx, o, late, late.batch(ctx)); !errors.Is(err, execution.ErrUnrecorded) {
		t.Fatal(err)
	}
	q := request("c1", rollback.Single)
	if before {
		at.execute(q)
	}
	<-time.After(20*time.Second + 500*time.Millisecond) // between two tries
	if undone > 0 {
		t.Fatal("it is over before the store is back")
	}
	a.st.refuses.Store(false)
	if behind {
		<-time.After(2 * time.Second)
	}
	if !before {
		at.execute(q)
	}
	end := at.wait(q.ID)
	want, steps := 1, "c1=completed"
	if v == execution.Released {
		want, steps = 0, "c1=completed(cancelled)"
	}
	wantEnd(t, end, rollback.Completed, steps)
	if n := len(root.world.effects["c1"]); n != want || undone != want {
		t.Errorf("%d undos were sent under %d keys", undone, n)
	}
	<-time.After(5 * time.Second)
	a.wantCallStatus("1", execution.RolledBack)
	b.wantCallStatus("1", execution.RolledBack)
	stop(a.Coordinator)
	stop(b.Coordinator)
}
