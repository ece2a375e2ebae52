package rollback_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// fails records that a call has failed, as the commit of its outcome does.
func (r *rig) fails(all ...rollback.Failure) error {
	r.t.Helper()
	for i := range all {
		all[i].By = gateway
	}
	b, err := r.Failed(all...)
	if err != nil {
		r.t.Fatal(err)
	}
	return b.Commit(ctx, r.st)
}

func (r *rig) wantRollback(of string, status rollback.Status, steps string) *rollback.Rollback {
	r.t.Helper()
	synctest.Wait()
	b, err := r.Get(ctx, r.RollbackOf(of))
	if err != nil {
		r.t.Fatal(err)
	}
	wantEnd(r.t, b, status, steps)
	if n := r.failures(); n != 0 {
		r.t.Errorf("%d failures are still recorded", n)
	}
	return b
}

func (r *rig) wantNoRollback(of string) {
	r.t.Helper()
	synctest.Wait()
	if b, err := r.Get(ctx, r.RollbackOf(of)); !errors.Is(err, rollback.ErrUnknown) {
		r.t.Errorf("%+v, %v", b, err)
	}
	if n := r.failures(); n != 0 {
		r.t.Errorf("%d failures are still recorded", n)
	}
}

// failures are those that stand in the store.
func (r *rig) failures() (n int) {
	r.t.Helper()
	for _, err := range r.mem.Scan(ctx, store.Prefix([]byte("ue"))) {
		if err != nil {
			r.t.Fatal(err)
		}
		n++
	}
	return n
}

// failed is a workflow in which 1 led to 2, which has failed after it had led to 3 and 4.
func failed(t testing.TB) *rig {
	r := newRig(t)
	r.onError = true
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Compensate, execution.Completed, "1")
	r.made("3", checkpoint.Restore, execution.Completed, "2")
	r.made("4", checkpoint.Restore, execution.Completed, "2")
	return r
}

const undoneOfTwo = "c4=completed c3=completed c2=completed"

// A-error-signaling-f: the error of a call rolls it back with what followed from it, in the
// gateway's own name and behind the error. What led to it stays.
func TestErrorRollsBackWhatFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := failed(t)
		r.start()
		if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}); err != nil {
			t.Fatal(err)
		}
		b := r.wantRollback("c2", rollback.Completed, undoneOfTwo)
		if b.Requester != gateway || b.Operator != "" || b.Scope != rollback.SubDAG || b.Reason != "on_error: the call has failed" {
			t.Errorf("%+v", b)
		}
		if r.recorded()["start "+b.ID+" error-2"] != 1 {
			t.Errorf("recorded %v", r.recorded())
		}
		r.wantCallStatus("1", execution.ResultUnavailable)
		r.wantCallStatus("2", execution.RolledBack)
		// P5: further errors, and the same one again, change nothing.
		sends := r.world.sends
		if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}, rollback.Failure{Checkpoint: "c2", Error: "error-9", Reporter: agent, Lineage: rollback.Ancestor}); err != nil {
			t.Fatal(err)
		}
		r.wantRollback("c2", rollback.Completed, undoneOfTwo)
		if r.world.sends != sends || r.recorded()["start "+b.ID+" error-9"] != 0 {
			t.Errorf("undone again: %v", r.recorded())
		}
	})
}

// P5: whatever dies between the outcome's commit and the end of the rollback, the call is rolled
// back once.
func TestErrorRollsBackOnceWhateverDies(t *testing.T) {
	for dies := range 40 {
		for _, lands := range []bool{false, true} {
			t.Run(fmt.Sprint(dies, lands), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := failed(t)
					r.start()
					r.st.mu.Lock()
					r.st.commits, r.st.dies, r.st.lands = 0, dies, lands
					r.st.mu.Unlock()
					err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"})
					synctest.Wait()
					stop(r.Coordinator)
					r.open()
					r.start()
					if err != nil && !lands {
						r.wantNoRollback("c2") // the outcome is not recorded either
						return
					}
					b := r.wantRollback("c2", rollback.Completed, undoneOfTwo)
					starts := 0
					for words, n := range r.recorded() {
						if strings.HasPrefix(words, "start ") {
							starts += n
						}
					}
					if starts != 1 || len(r.world.order) != 3 || r.recorded()["start "+b.ID+" error-2"] != 1 {
						t.Errorf("undone %v, recorded %v", r.world.order, r.recorded())
					}
				})
			})
		}
	}
}

// A store that does not answer is asked again.
func TestErrorWaitsForTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := failed(t)
		r.start()
		r.st.deaf.Store(true)
		if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		r.st.deaf.Store(false)
		time.Sleep(time.Minute)
		r.wantRollback("c2", rollback.Completed, undoneOfTwo)
	})
}

// What cannot be rolled back is left to a person, once, and so is an undo: nobody undoes undos.
func TestErrorThatRollsNothingBackIsEscalated(t *testing.T) {
	for name, spoil := range map[string]func(r *rig, f *rollback.Failure){
		"tampered": func(r *rig, _ *rollback.Failure) { r.ledger.tamper["c2"] = true },
		"unknown":  func(_ *rig, f *rollback.Failure) { f.Checkpoint = "c7" },
		"expired":  func(*rig, *rollback.Failure) {},
		"an undo":  func(_ *rig, f *rollback.Failure) { f.Undo = true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := failed(t)
				r.start()
				f := rollback.Failure{Checkpoint: "c2", Error: "error-2"}
				if spoil(r, &f); name == "expired" {
					time.Sleep(ttl + time.Second)
				}
				for range 2 {
					if err := r.fails(f); err != nil {
						t.Fatal(err)
					}
					r.wantNoRollback(f.Checkpoint)
				}
				if got := r.escalations(); len(got) != 1 || got[hitl.CauseError] != 1 || len(r.world.order) != 0 {
					t.Errorf("%v, undone %v", got, r.world.order)
				}
			})
		})
	}
}

// An undo that fails is escalated by its own rollback, and starts no other one.
func TestErrorOfARollbackStartsNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := failed(t)
		r.world.answers["c3"] = rollback.Result{Reason: rollback.ReasonRefused, Status: 409}
		r.start()
		if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}); err != nil {
			t.Fatal(err)
		}
		r.wantRollback("c2", rollback.Partial, "c4=completed c3=failed(refused) c2=completed")
		if page, err := r.List(ctx, "", 10); err != nil || len(page.Rollbacks) != 1 {
			t.Errorf("%d rollbacks, %v", len(page.Rollbacks), err)
		}
	})
}

// Section 4.3.4: another rollback of the same scope that was first goes on, and then this one.
func TestErrorDuringAnotherRollback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := failed(t)
		r.start()
		hold := make(chan struct{})
		r.world.hold["c3"] = hold
		first := r.execute(request("c3", rollback.SubDAG))
		if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		close(hold)
		r.wait(first.ID)
		r.wantRollback("c2", rollback.Completed, undoneOfTwo)
	})
}

// P3: an agent's error counts if the agent could ask for the rollback itself, or was called; and
// only for calls that errors roll back.
func TestErrorsOfAgentsThatCount(t *testing.T) {
	const called, other = "spiffe://example.com/called", "spiffe://example.com/other"
	for name, test := range map[string]struct {
		reporter string
		lineage  rollback.Lineage
		off      bool
		counts   bool
	}{
		"an ancestor":        {reporter: agent, lineage: rollback.Ancestor, counts: true},
		"who was called":     {reporter: called, lineage: rollback.Ancestor, counts: true},
		"somebody else":      {reporter: other, lineage: rollback.Ancestor},
		"of the workflow":    {reporter: other, lineage: rollback.Workflow, counts: true},
		"another policy":     {reporter: agent},
		"not on_error":       {reporter: agent, lineage: rollback.Ancestor, off: true},
		"called, not so set": {reporter: called, lineage: rollback.Ancestor, off: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.onError = !test.off
				r.made("1", checkpoint.Restore, execution.Completed)
				r.ledger.nodes = append(r.ledger.nodes, Node{ID: "later", Kind: ActionNode, Parents: []string{"1"}, By: other, Done: true})
				cp := r.ledger.tokens["c1"]
				cp.Audience = []string{gateway, called}
				r.ledger.tokens["c1"] = cp
				r.start()
				if err := r.fails(rollback.Failure{Checkpoint: "c1", Error: "e", Reporter: test.reporter, Lineage: test.lineage}); err != nil {
					t.Fatal(err)
				}
				if test.counts {
					r.wantRollback("c1", rollback.Completed, "c1=completed")
				} else {
					r.wantNoRollback("c1")
				}
				if len(r.escalations()) > 0 {
					t.Errorf("escalated: %v", r.escalations())
				}
			})
		})
	}
}

// Where every call fails a bounded number of rollbacks runs at once, and the others follow.
func TestErrorsWaitForTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		hold, n := make(chan struct{}), rollback.MaxFailures+10
		var all []rollback.Failure
		for i := range n {
			id := fmt.Sprint("n", i)
			r.made(id, checkpoint.Restore, execution.Completed)
			r.world.hold["c"+id] = hold
			all = append(all, rollback.Failure{Checkpoint: "c" + id, Error: "error"})
		}
		r.start()
		if err := r.fails(all...); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		page, err := r.List(ctx, "", 1000)
		if err != nil || len(page.Rollbacks) != rollback.MaxFailures || r.Waiting() != 10 || r.failures() != 10 {
			t.Fatalf("%d run, %d wait, %d are recorded, %v", len(page.Rollbacks), r.Waiting(), r.failures(), err)
		}
		close(hold)
		for i := range n {
			r.wantRollback(fmt.Sprint("cn", i), rollback.Completed, fmt.Sprintf("cn%d=completed", i))
		}
	})
}

// Who waits for another rollback, which itself may wait for people for hours, holds up no others.
func TestErrorsBehindARollbackThatWaitsHoldUpNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.onError = true
		r.made("1", checkpoint.Restore, execution.Completed)
		r.made("2", checkpoint.Restore, execution.Completed, "1")
		r.severe("c2", "")
		var behind []rollback.Failure
		for i := range rollback.MaxFailures {
			id := fmt.Sprint("n", i)
			r.made(id, checkpoint.Restore, execution.Completed, "1")
			behind = append(behind, rollback.Failure{Checkpoint: "c" + id, Error: "error"})
		}
		r.made("x", checkpoint.Restore, execution.Completed)
		r.start()
		first := r.execute(request("c1", rollback.SubDAG))
		e := r.question(first.ID)
		if err := r.fails(behind...); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := r.fails(rollback.Failure{Checkpoint: "cx", Error: "error"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if b, err := r.Get(ctx, r.RollbackOf("cx")); err != nil || b.Status != rollback.Completed {
			t.Fatalf("another call that has failed waits behind those that wait for people: %+v, %v", b, err)
		}
		if r.failures() != rollback.MaxFailures { // they have not been done with
			t.Errorf("%d are recorded", r.failures())
		}
		r.says(e, false)
		r.wait(first.ID)
		for _, f := range behind {
			r.wantRollback(f.Checkpoint, rollback.Completed, f.Checkpoint+"=completed")
		}
	})
}

// P8: what is recorded of an error is sealed, and sealed anew.
func TestP8ErrorsAreSealedAndResealed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := failed(t)
		if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}); err != nil { // not started
			t.Fatal(err)
		}
		next, err := r.ring.Rotated()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.ring.Adopt(next, nil, func(id uint32) error { return r.guard.UseKey(ctx, id) }); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Reseal(ctx); err != nil {
			t.Fatal(err)
		}
		n := 0
		for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("ue"))) {
			if n++; err != nil || strings.Contains(string(entry.Value)+string(entry.Key), "c2") || r.ring.KeyOf(entry.Value) != next.KeyIDs()[1] {
				t.Errorf("%q, %v", entry.Key, err)
			}
		}
		if n != 1 {
			t.Errorf("%d are recorded", n)
		}
		r.start()
		r.wantRollback("c2", rollback.Completed, undoneOfTwo)
	})
}

// A reservation that takes precedence is waited for, without asking all the time: it ends by itself,
// or is carried out.
func TestErrorDuringAReservation(t *testing.T) {
	for _, executed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := failed(t)
			r.start()
			q := request("c1", rollback.SubDAG)
			if !r.prepare(q).Ready() {
				t.Fatal("not prepared")
			}
			time.Sleep(time.Second) // it was first
			if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if executed {
				r.run(q)
			}
			reads := r.ledger.reads.Load()
			time.Sleep(2 * rollback.DefaultReservation)
			if more := r.ledger.reads.Load() - reads; more > 50 {
				t.Errorf("asked %d times", more)
			}
			r.wantRollback("c2", rollback.Completed, undoneOfTwo)
			if n := len(r.world.order); n != map[bool]int{false: 3, true: 4}[executed] {
				t.Errorf("%d undos", n)
			}
		})
	}
}
