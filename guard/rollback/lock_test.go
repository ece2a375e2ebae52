package rollback_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

func ids(all ...string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for _, id := range all {
			if !yield(id, nil) {
				return
			}
		}
	}
}

// enters reports who keeps a call from beginning, if anybody does.
func (r *rig) enters(workflow string, parents ...string) *rollback.BlockedError {
	r.t.Helper()
	admitted, err := r.Enter(ctx, workflow, ids(parents...))
	blocked := (*rollback.BlockedError)(nil)
	switch {
	case err == nil:
		admitted.Leave()
	case !errors.As(err, &blocked):
		r.t.Error(err)
	}
	return blocked
}

// Facts 7.4, "Joining after rollback began: refused": while a rollback is under way, what
// follows from it does not begin, over a restart too; afterwards it may.
func TestJoiningAfterRollbackBegan(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.action("3", "2")
	r.made("9", checkpoint.Restore, execution.Completed)
	r.start()
	asked, hold := make(chan string, 10), make(chan struct{})
	r.undoer.asked, r.world.hold["c2"] = asked, hold
	q := request("c1", rollback.SubDAG)
	r.execute(q)
	<-asked
	for _, again := range []bool{false, true} {
		if again {
			stop(r.Coordinator)
			r.open()
			if err := r.Load(ctx); err != nil {
				t.Fatal(err)
			}
		}
		for _, parent := range []string{"1", "c1", "2", "c2", "3"} {
			if got := r.enters("w", "9", parent); got == nil || got.Stopped || got.Rollback != q.ID {
				t.Errorf("behind %s, again %v: %v", parent, again, got)
			}
		}
		for _, parent := range []string{"9", "c9", "unknown"} {
			if got := r.enters("w", parent); got != nil {
				t.Errorf("behind %s, again %v: %v", parent, again, got)
			}
		}
		if r.enters("w") != nil || r.enters("another", "c1") != nil || r.enters("", "c1") != nil {
			t.Error("what follows from nothing, or is elsewhere, is blocked")
		}
		if !again {
			close(hold)
			r.world.mu.Lock()
			delete(r.world.hold, "c2")
			r.world.mu.Unlock()
			go func(asked chan string) {
				for range asked {
				}
			}(asked)
			r.wait(q.ID)
			if got := r.enters("w", "c1"); got != nil {
				t.Errorf("when it is finished: %v", got)
			}
			// Another one, whose life ends in the middle.
			r.made("4", checkpoint.Restore, execution.Completed, "2")
			asked = make(chan string, 10)
			r.undoer.asked, r.undoer.block = asked, true
			q = request("c1", rollback.SubDAG)
			r.execute(q)
			<-asked
		}
	}
}

// Package plan, "Prepare and execute": a call that was admitted before the rollback was
// asked for is in its plan, and those that come meanwhile wait for what is decided.
func TestCallThatIsInsideIsInThePlan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.made("9", checkpoint.Restore, execution.Completed)
		r.start()
		r.world.hold["c1"] = make(chan struct{})
		admitted, err := r.Enter(ctx, "w", ids("c1"))
		if err != nil {
			t.Fatal(err)
		}
		q := request("c1", rollback.SubDAG)
		var accepted *rollback.Rollback
		go func() { accepted, err = r.Execute(ctx, q, nil) }()
		synctest.Wait()
		if accepted != nil {
			t.Fatal("it did not wait for the call")
		}
		var behind, beside *rollback.BlockedError
		var came atomic.Int32
		go func() { behind = r.enters("w", "c1"); came.Add(1) }()
		go func() { beside = r.enters("w", "c9"); came.Add(1) }()
		synctest.Wait()
		if came.Load() > 0 || r.enters("another", "c1") != nil {
			t.Fatal("calls of the workflow did not wait, or others did")
		}
		r.made("2", checkpoint.Restore, execution.Completed, "1")
		admitted.Leave()
		synctest.Wait()
		if err != nil || len(accepted.Steps) != 2 || accepted.Steps[0].Checkpoint != "c2" {
			t.Fatalf("%+v, %v", accepted, err)
		}
		if came.Load() != 2 || behind == nil || behind.Rollback != q.ID || beside != nil || r.enters("w", "c2") == nil {
			t.Errorf("%d came: behind it %v, beside it %v", came.Load(), behind, beside)
		}
		close(r.world.hold["c1"])
		wantEnd(t, r.wait(q.ID), rollback.Completed, "c2=completed c1=completed")
		stop(r.Coordinator)
	})
}

// Whoever is refused, or leaves while calls are waited for, blocks nothing.
func TestRefusedRollbackBarsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		free := func(why string) {
			t.Helper()
			if got := r.enters("w", "c1"); got != nil {
				t.Errorf("%s: %v", why, got)
			}
		}
		stranger := request("c1", rollback.SubDAG)
		stranger.By = "stranger"
		if _, err := r.Execute(ctx, stranger, nil); !errors.Is(err, rollback.ErrNotInWorkflow) {
			t.Errorf("%v", err)
		}
		free("a stranger's")
		var lost *store.Conflict
		extra := store.Write{Key: []byte("z"), If: store.VersionIs(7), Value: []byte("used")}
		if _, err := r.Execute(ctx, request("c1", rollback.FullWorkflow), writing(extra)); !errors.As(err, &lost) {
			t.Errorf("%v", err)
		}
		free("one whose extra write lost")

		admitted, err := r.Enter(ctx, "w", ids())
		if err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := r.Execute(short, request("c1", rollback.FullWorkflow), nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		free("one that was given up")
		go func() { // refused while others wait for it
			_, err = r.Execute(ctx, request("c1", rollback.FullWorkflow), writing(extra))
		}()
		synctest.Wait()
		brief, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := r.Enter(brief, "w", ids()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		var blocked *rollback.BlockedError
		go func() { blocked = r.enters("w", "c1") }()
		synctest.Wait()
		admitted.Leave()
		synctest.Wait()
		if blocked != nil || !errors.As(err, &lost) {
			t.Errorf("%v, %v", blocked, err)
		}
		free("one that others have waited for")
		stop(r.Coordinator)
	})
}

// Cascade 4.1.3: a rollback of the whole workflow terminates it, for as long as it is kept:
// while it is under way, when it is finished, in the next life.
func TestCascade413FullWorkflowStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		hold := make(chan struct{})
		r.world.hold["c1"] = hold
		q := request("c1", rollback.FullWorkflow)
		r.execute(q)
		stopped := func(when string) {
			t.Helper()
			if got := r.enters("w"); got == nil || !got.Stopped || got.Rollback != q.ID {
				t.Errorf("%s: %v", when, got)
			}
			if got := r.enters("another"); got != nil {
				t.Errorf("%s: another: %v", when, got)
			}
		}
		life := func() {
			t.Helper()
			stop(r.Coordinator)
			r.open()
			if err := r.Load(ctx); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		stopped("under way")
		close(hold)
		r.wait(q.ID)
		stopped("finished")
		synctest.Wait()
		life()
		stopped("in the next life, before its start")
		r.start()
		// A narrower one that comes and goes changes nothing.
		r.run(request("c1", rollback.Single))
		stopped("after another rollback")
		time.Sleep(keep - time.Hour)
		stopped("as long as it is kept")
		time.Sleep(2 * time.Hour)
		if got := r.enters("w"); got != nil {
			t.Errorf("forgotten: %v", got)
		}
		life()
		if got := r.enters("w"); got != nil {
			t.Errorf("forgotten, in the next life: %v", got)
		}
		stop(r.Coordinator)
	})
}

// P6: an error about what has led to a call keeps it from beginning, and nothing else.
func TestUnknownParentsAreNoAdmission(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.start()
	failing := func(yield func(string, error) bool) { yield("", errDead) }
	if admitted, err := r.Enter(ctx, "w", failing); err != nil {
		t.Errorf("without a rollback it is not asked for: %v", err)
	} else {
		admitted.Leave()
	}
	hold := make(chan struct{})
	defer close(hold)
	r.world.hold["c1"] = hold
	r.execute(request("c1", rollback.Single))
	if _, err := r.Enter(ctx, "w", failing); !errors.Is(err, errDead) {
		t.Errorf("%v", err)
	}
	r.st.mu.Lock()
	close(r.st.dead)
	r.st.mu.Unlock()
	if err := r.Load(ctx); err != nil { // scans do not die here, reads do
		return
	}
	t.Error("locks that cannot be read are none")
}

// Many agents go on while a rollback begins: what has begun is undone, and nothing else has
// begun.
func TestNothingBeginsBehindAPlan(t *testing.T) {
	for range 20 {
		r := newRig(t)
		r.made("0", checkpoint.Restore, execution.Completed)
		r.start()
		hold := make(chan struct{})
		r.world.hold["c0"] = hold
		var wg sync.WaitGroup
		begun := make(chan struct{}, 1000)
		for i := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for n, parent := 0, "0"; n < 100; n++ {
					admitted, err := r.Enter(ctx, "w", ids(parent))
					if blocked := (*rollback.BlockedError)(nil); errors.As(err, &blocked) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					id := fmt.Sprint(i, "-", n)
					r.ledger.mu.Lock()
					r.made(id, checkpoint.Restore, execution.Completed, parent)
					r.ledger.mu.Unlock()
					admitted.Leave()
					parent = id
					begun <- struct{}{}
				}
			}()
		}
		for range 5 {
			<-begun
		}
		q := request("c0", rollback.SubDAG)
		r.execute(q)
		wg.Wait()
		close(hold)
		b := r.wait(q.ID)
		if b.Status != rollback.Completed || len(b.Steps) != len(r.ledger.tokens) || len(r.world.effects) != len(b.Steps) {
			t.Fatalf("%s, %d steps, %d undone, %d checkpoints", b.Status, len(b.Steps), len(r.world.effects), len(r.ledger.tokens))
		}
	}
}

// A call enters and leaves at no cost that could be measured beside its commit.
func BenchmarkEnter(b *testing.B) {
	r := newRig(b)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			admitted, err := r.Enter(ctx, "w", ids())
			if err != nil {
				b.Error(err)
				return
			}
			admitted.Leave()
		}
	})
}

// Cascade 4.1.3: a call is refused because of accepted rollbacks alone. One that has met a lock before it was known that
// the rollback is not accepted waits for that, and begins.
func TestLockOfWhatIsNotAccepted(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	h := r.hook()
	var says func() error
	h.full = func() bool {
		says = r.Meets("w")
		return true
	}
	r.start()
	q := request("c1", rollback.FullWorkflow)
	q.Operator = "op"
	if _, err := r.Execute(ctx, q, nil); !errors.Is(err, rollback.ErrStore) {
		t.Fatal(err)
	}
	if err := says(); err != nil {
		t.Error(err)
	}
}
