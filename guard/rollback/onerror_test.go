package rollback_test

import (
	"errors"
	"fmt"
	"slices"
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
	return r.Failed(all...).Commit(ctx, r.st)
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

// P3: an agent's error counts if the agent could ask for the rollback itself, or was called. It rolls
// back calls that are set so, and for others people are asked, once.
func TestErrorsOfAgentsThatCount(t *testing.T) {
	const called, other = "spiffe://example.com/called", "spiffe://example.com/other"
	for name, test := range map[string]struct {
		reporter string
		lineage  rollback.Lineage
		off      bool
		mail     bool // cannot be undone, so that the commit of the error has asked
		counts   bool
		asks     bool
	}{
		"an ancestor":               {reporter: agent, lineage: rollback.Ancestor, counts: true},
		"who was called":            {reporter: called, lineage: rollback.Ancestor, counts: true},
		"somebody else":             {reporter: other, lineage: rollback.Ancestor},
		"of the workflow":           {reporter: other, lineage: rollback.Workflow, counts: true},
		"another policy":            {reporter: agent},
		"not on_error":              {reporter: agent, lineage: rollback.Ancestor, off: true, asks: true},
		"called, not so set":        {reporter: called, lineage: rollback.Ancestor, off: true, asks: true},
		"somebody else, not so set": {reporter: other, lineage: rollback.Ancestor, off: true},
		"irreversible":              {reporter: agent, lineage: rollback.Ancestor, off: true, mail: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.onError = !test.off
				way := checkpoint.Restore
				if test.mail {
					way = checkpoint.Irreversible
				}
				r.made("1", way, execution.Completed)
				r.ledger.nodes = append(r.ledger.nodes, Node{ID: "later", Kind: ActionNode, Parents: []string{"1"}, By: other, Done: true})
				cp := r.ledger.tokens["c1"]
				cp.Audience = []string{gateway, called}
				r.ledger.tokens["c1"] = cp
				r.start()
				if err := r.fails(rollback.Failure{Checkpoint: "c1", Error: "e", Reporter: test.reporter, Lineage: test.lineage, Asks: hitl.CauseFailed}); err != nil {
					t.Fatal(err)
				}
				if test.counts {
					r.wantRollback("c1", rollback.Completed, "c1=completed")
				} else {
					r.wantNoRollback("c1")
				}
				if all := r.opened(); (len(all) == 1) != test.asks || test.asks && (all[0].Workflow != "w" || all[0].Caller != "issuer:"+test.reporter || all[0].Links.Error != "e") {
					t.Errorf("escalated: %+v", all)
				}
			})
		})
	}
}

// A-error-signaling-f: of an agent's error that cannot be looked at any more, since what is recorded of
// the call is damaged or too much, people decide, once. Of a call that nobody knows they hear nothing.
func TestErrorOfAnAgentOverADamagedLedger(t *testing.T) {
	for name, test := range map[string]struct {
		damage func(l *ledger)
		asks   int
	}{
		"its checkpoint":                {func(l *ledger) { l.tamper["c1"] = true }, 1},
		"what it depends on":            {func(l *ledger) { l.graphErr = checkpoint.ErrTampered }, 1},
		"too large":                     {func(l *ledger) { l.graphErr = &rollback.TooManyError{What: "nodes", Count: 2, Limit: 1} }, 1},
		"its checkpoint, and too large": {func(l *ledger) { l.broken = map[string]error{"c1": &rollback.TooManyError{What: "workflows"}} }, 1},
		"not known":                     {func(l *ledger) { delete(l.tokens, "c1") }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := failed(t)
				test.damage(r.ledger)
				r.start()
				for range 2 {
					if err := r.fails(rollback.Failure{Checkpoint: "c1", Error: "e", Reporter: agent, Lineage: rollback.Ancestor, Asks: hitl.CauseFailed}); err != nil {
						t.Fatal(err)
					}
					r.wantNoRollback("c1")
				}
				if all := r.opened(); len(all) != test.asks || r.failures() != 0 || test.asks > 0 && all[0].Cause != hitl.CauseError {
					t.Errorf("%d records, %+v", r.failures(), all)
				}
			})
		})
	}
}

// What the ledger holds up, for whatever reason and for however long, takes no turn of others.
func TestErrorsThatAreHeldUpTakeNoTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := failed(t)
		r.start()
		r.ledger.broken = map[string]error{}
		var all []rollback.Failure
		for i := range rollback.MaxFailures {
			id := fmt.Sprint("held", i)
			r.ledger.tokens[id], r.ledger.broken[id] = r.ledger.tokens["c1"], errors.New("a part of the ledger cannot be read")
			all = append(all, rollback.Failure{Checkpoint: id, Error: "e", Reporter: agent})
		}
		if err := r.fails(all...); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := r.fails(rollback.Failure{Checkpoint: "c2", Error: "error-2"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		page, err := r.List(ctx, "", 10)
		if err != nil || len(page.Rollbacks) != 1 || page.Rollbacks[0].Status != rollback.Completed || r.failures() != rollback.MaxFailures {
			t.Errorf("%+v, %v: %d are recorded", page, err, r.failures())
		}
		r.ledger.mu.Lock()
		r.ledger.broken = nil
		r.ledger.mu.Unlock()
		time.Sleep(time.Minute)
		if r.failures() != 0 {
			t.Errorf("%d are left", r.failures())
		}
	})
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
		if _, err := r.ring.Adopt(next, nil, func(id uint32) error { return r.guard.Keys().Hold(ctx, id) }); err != nil {
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

// opened are the escalations, the newest first.
func (r *rig) opened() []hitl.Escalation {
	r.t.Helper()
	synctest.Wait()
	if n := r.failures(); n != 0 {
		r.t.Errorf("%d failures are still recorded", n)
	}
	page, err := r.escalationStore.List(ctx, hitl.Filter{}, "", 1000)
	if err != nil {
		r.t.Fatal(err)
	}
	return page.Escalations
}

// asking is a failure that rolls nothing back.
func asking(id, workflow, caller string) rollback.Failure {
	return rollback.Failure{Checkpoint: "c" + id, Error: "error-" + id, Asks: hitl.CauseFailed, Workflow: workflow, Caller: caller}
}

func (r *rig) failsWith(all ...rollback.Failure) {
	r.t.Helper()
	for _, f := range all {
		if err := r.fails(f); err != nil {
			r.t.Fatal(err)
		}
	}
}

// approves says that somebody has seen to an escalation.
func (r *rig) approves(e hitl.Escalation) {
	r.t.Helper()
	if _, err := r.escalationStore.Decide(ctx, e.ID, hitl.Vote{By: "operator:ann", Roles: []string{e.RequiredRole, hitl.DefaultRole}, Approve: true, Hash: e.Proposal.Hash()}); err != nil {
		r.t.Fatal(err)
	}
}

// A-error-signaling-f: a call that fails and is not rolled back is escalated: once for its workflow and
// cause until people have decided, however often the agent tries. It holds nothing.
func TestFailureAsksPeople(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		r.failsWith(asking("1", "w", "user:bob"))
		all := r.opened()
		if len(all) != 1 {
			t.Fatalf("%+v", all)
		}
		want := hitl.Links{Checkpoint: "c1", Error: "error-1"}
		if e := all[0]; e.Level != hitl.Approval || e.Cause != hitl.CauseFailed || e.Workflow != "w" || e.Caller != "user:bob" || e.Links != want || e.Held || e.Proposal.Kind != "" {
			t.Errorf("%+v", e)
		}
		for i := range 200 { // a flood, and the same one again
			r.failsWith(asking(fmt.Sprint(i), "w", "user:bob"), asking("1", "w", "user:bob"))
		}
		irreversible := asking("2", "w", "user:bob")
		irreversible.Asks = hitl.CauseIrreversible
		r.failsWith(irreversible, irreversible, asking("3", "v", "user:bob"))
		if all = r.opened(); len(all) != 3 {
			t.Fatalf("%d escalations, want one for each cause and workflow", len(all))
		}
		pending := slices.DeleteFunc(slices.Clone(all), func(e hitl.Escalation) bool { return e.Status != hitl.Pending || e.Workflow != "w" })
		if len(pending) != 1 || pending[0].Cause != hitl.CauseIrreversible { // one failure is one question (ADR 0127)
			t.Errorf("pending: %+v", pending)
		}
		r.restart()
		r.failsWith(asking("4", "w", "user:bob"))
		if all = r.opened(); len(all) != 3 {
			t.Errorf("%d escalations after a restart", len(all))
		}
		// Decided, it is another question.
		for round := range 3 {
			for _, e := range all {
				if e.Status == hitl.Pending && e.Workflow == "w" {
					r.approves(e)
				}
			}
			r.failsWith(asking(fmt.Sprint("later", round), "w", "user:bob"), asking(fmt.Sprint("more", round), "w", "user:bob"))
			if all = r.opened(); len(all) != 4+round {
				t.Errorf("round %d: %d escalations", round, len(all))
			}
		}
	})
}

// Nobody is flooded: a caller whose calls fail in workflow after workflow causes only so many
// escalations that nobody has decided, and callers whom nobody has verified count as one. Others have
// theirs.
func TestFailuresThatAskAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start()
		for _, caller := range []string{"user:bob", ""} {
			for i := range 3 * rollback.MaxFailed {
				r.failsWith(asking(fmt.Sprint(caller, i), fmt.Sprint("w", caller, i), caller))
			}
		}
		all := r.opened()
		if len(all) != 2*rollback.MaxFailed {
			t.Fatalf("%d escalations", len(all))
		}
		r.failsWith(asking("1", "of ann", "user:ann"))
		if all = r.opened(); len(all) != 2*rollback.MaxFailed+1 {
			t.Fatalf("%d escalations, one of them of another caller", len(all))
		}
		r.approves(all[slices.IndexFunc(all, func(e hitl.Escalation) bool { return e.Caller == "user:bob" })])
		r.failsWith(asking("x", "of bob", "user:bob"), asking("y", "of bob too", "user:bob"))
		if all = r.opened(); len(all) != 2*rollback.MaxFailed+2 {
			t.Errorf("%d escalations after one was decided", len(all))
		}
	})
}

// P5: whatever dies between the outcome's commit and the escalation, people are asked once.
func TestFailureAsksOnceWhateverDies(t *testing.T) {
	for dies := range 4 {
		for _, lands := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				r.start()
				r.st.mu.Lock()
				r.st.commits, r.st.dies, r.st.lands = 0, dies, lands
				r.st.mu.Unlock()
				err := r.fails(asking("1", "w", ""))
				synctest.Wait()
				stop(r.Coordinator)
				r.open()
				r.start()
				want := 1
				if err != nil && !lands { // the outcome is not recorded either
					want = 0
				}
				if all := r.opened(); len(all) != want {
					t.Errorf("dies at %d, lands %v: %d escalations, want %d", dies, lands, len(all), want)
				}
			})
		}
	}
}

// People are asked also where an earlier question cannot be read, and where nobody can count the agents.
func TestFailureAsksPeopleOverDamage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start()
		r.failsWith(asking("not known", "w", ""))
		first := r.opened()
		if len(first) != 1 {
			t.Fatalf("%+v", first)
		}
		var records [][]byte
		for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("he"))) {
			if err != nil {
				t.Fatal(err)
			}
			records = append(records, entry.Key)
		}
		if len(records) != 1 {
			t.Fatalf("%d records", len(records))
		}
		if _, err := r.mem.Commit(ctx, store.Write{Key: records[0], Value: []byte("damaged")}); err != nil {
			t.Fatal(err)
		}
		r.failsWith(asking("1", "w", ""), asking("2", "w", ""))
		if all := r.opened(); len(all) != 1 || all[0].ID == first[0].ID {
			t.Errorf("%+v", all)
		}
	})
}

// C-3.4.3-d, C-2-c: an error whose call more than three agents have acted in or after pauses the
// workflow, once, until people have looked; then it may again.
func TestErrorThatReachesManyAgents(t *testing.T) {
	for agents := 3; agents <= 5; agents++ {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("0", checkpoint.Restore, execution.Completed)
			r.made("1", checkpoint.Restore, execution.Completed, "0")
			after := "c1"
			r.ledger.nodes = append(r.ledger.nodes, Node{ID: "settled", Kind: ActionNode, Parents: []string{after}, By: gateway, Own: true, Done: true})
			for i := 1; i < agents; i++ { // beside the agent that has called; the gateway is none
				id := fmt.Sprint("of ", i)
				r.ledger.nodes = append(r.ledger.nodes,
					Node{ID: id, Kind: ActionNode, Parents: []string{after}, By: fmt.Sprint("agent-", i), Done: true},
					Node{ID: "beside " + id, Kind: ActionNode, Parents: []string{"0"}, By: fmt.Sprint("beside-", i), Done: true})
				after = id
			}
			r.start()
			for i := range 3 {
				f := asking("1", "w", "user:bob")
				f.Error = fmt.Sprint("error-", i)
				r.failsWith(f)
			}
			var reach []hitl.Escalation
			if all := r.opened(); len(all) != 1 {
				t.Errorf("%d agents: %d escalations for one failure", agents, len(all))
			}
			for _, e := range r.opened() {
				if e.Cause == hitl.CauseReach {
					reach = append(reach, e)
				}
			}
			if agents <= 3 {
				if len(reach) != 0 {
					t.Errorf("%d agents: %+v", agents, reach)
				}
				return
			}
			if len(reach) != 1 || reach[0].Level != hitl.Pause || !reach[0].Held || !strings.Contains(reach[0].Summary, fmt.Sprint(agents, " agents")) {
				t.Fatalf("%d agents: %+v", agents, reach)
			}
			r.approves(reach[0])
			f := asking("1", "w", "user:bob")
			f.Error = "error-later"
			r.failsWith(f)
			synctest.Wait()
			if got := r.escalations()[hitl.CauseReach]; got != 2 {
				t.Errorf("%d after the workflow has gone on", got)
			}
		})
	}
}

// One failure is one question (ADR 0127): while people are asked about a failure that spreads in a workflow,
// its calls that fail ask nothing of their own, but those that cannot be undone. What holds the workflow takes
// the place of that question.
func TestFailureOfASpreadingOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("0", checkpoint.Restore, execution.Completed)
		r.start()
		spreads := func(workflow string) {
			if _, err := r.escalationStore.Open(ctx, hitl.Opening{
				Key: "cascade " + workflow, Level: hitl.Approval, Cause: hitl.CauseReach, Workflow: workflow, Summary: "A failure spreads.",
			}); err != nil {
				t.Fatal(err)
			}
		}
		spreads("w")
		irreversible := asking("3", "w", "user:bob")
		irreversible.Asks = hitl.CauseIrreversible
		r.failsWith(asking("1", "w", "user:bob"), asking("2", "w", "user:bob"), asking("4", "v", "user:bob"), irreversible)
		synctest.Wait()
		if got := r.escalations(); got[hitl.CauseReach] != 1 || got[hitl.CauseFailed] != 1 || got[hitl.CauseIrreversible] != 1 {
			t.Errorf("%v, of which the failed call is that of another workflow", got)
		}
		spreads("u")
		for i := range 5 {
			r.ledger.nodes = append(r.ledger.nodes, Node{ID: fmt.Sprint("of ", i), Kind: ActionNode, Parents: []string{"c0"}, By: fmt.Sprint("agent-", i), Done: true})
		}
		r.failsWith(asking("0", "u", "user:bob"))
		synctest.Wait()
		page, err := r.escalationStore.List(ctx, hitl.Filter{Workflow: "u", Status: hitl.Pending}, "", 10)
		if err != nil || len(page.Escalations) != 1 || !page.Escalations[0].Held {
			t.Errorf("%+v %v", page.Escalations, err)
		}
	})
}

// behind makes calls of so many agents, one after the other.
func behind(t testing.TB, agents int) *rig {
	r := newRig(t)
	parents := []string{}
	for i := range agents {
		id := fmt.Sprint(i)
		r.made(id, checkpoint.Restore, execution.Completed, parents...)
		cp := r.ledger.tokens["c"+id]
		cp.Agent = fmt.Sprint("agent-", i)
		r.ledger.tokens["c"+id] = cp
		parents = []string{id}
	}
	return r
}

// C-3.4.3-d: a rollback that is about calls of more than three agents goes on as it was asked for; with
// its end the workflow is paused until people have looked, once for a rollback.
func TestRollbackOfManyAgents(t *testing.T) {
	for _, test := range []struct {
		name   string
		agents int
		spoil  func(r *rig, q *rollback.Request)
		status rollback.Status
		want   map[hitl.Cause]int
	}{
		{"three", 3, nil, rollback.Completed, nil},
		{"four", 4, nil, rollback.Completed, map[hitl.Cause]int{hitl.CauseReach: 1}},
		{"a part of a rollback that is asked for elsewhere", 4, func(_ *rig, q *rollback.Request) { q.PartOf = "other" }, rollback.Completed, nil},
		{"one of them is another's call again", 4, func(r *rig, _ *rollback.Request) {
			cp := r.ledger.tokens["c3"]
			cp.Agent = "agent-1"
			r.ledger.tokens["c3"] = cp
		}, rollback.Completed, nil},
		{"partial, which pauses as it is", 4, func(r *rig, _ *rollback.Request) {
			r.world.answers["c2"] = rollback.Result{Reason: rollback.ReasonRefused, Status: 409}
		}, rollback.Partial, map[hitl.Cause]int{hitl.CauseRollbackPartial: 1, hitl.CauseRollbackFailed: 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := behind(t, test.agents)
				q := request("c0", rollback.SubDAG)
				if test.spoil != nil {
					test.spoil(r, &q)
				}
				r.start()
				b := r.run(q)
				if again := r.run(q); b.Status != test.status || again.Status != test.status {
					t.Fatalf("%+v", b)
				}
				if got := r.escalations(); fmt.Sprint(got) != fmt.Sprint(test.want) && len(got)+len(test.want) > 0 {
					t.Errorf("%v, want %v", got, test.want)
				}
				held, _, err := r.escalationStore.Blocks(ctx, "w")
				if err != nil || (held != nil && held.Cause == hitl.CauseReach) != (test.want[hitl.CauseReach] > 0) {
					t.Errorf("held by %+v, %v", held, err)
				}
				if test.want[hitl.CauseReach] == 0 {
					return
				}
				if held.Level != hitl.Pause || held.Links.Rollback != b.ID || len(b.Escalations) != 1 || b.Escalations[0] != held.ID {
					t.Errorf("%+v, %+v", held, b.Escalations)
				}
				r.approves(*held) // and that is it
				r.restart()
				if held, _, err := r.escalationStore.Blocks(ctx, "w"); held != nil || err != nil || r.escalations()[hitl.CauseReach] != 1 {
					t.Errorf("%+v, %v, %v", held, err, r.escalations())
				}
			})
		})
	}
}

// Each refused error of a reporter finds a place among those that wait, as many as may.
func TestRefusedErrorsWaitSideBySide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.ledger.elsewhere = map[string][]string{"last": {"its"}, "late": {"late"}}
		refused := func(named string) {
			t.Helper()
			if err := r.Refused(ctx, rollback.Failure{Named: []string{named}, Workflow: "w", Reporter: "b"}); err != nil {
				t.Fatal(err)
			}
		}
		for i := range rollback.MaxRefused - 1 { // nobody looks at them yet
			refused(fmt.Sprint("unknown ", i))
		}
		refused("last")
		refused("late")
		if n := r.failures(); n != rollback.MaxRefused {
			t.Errorf("%d wait", n)
		}
		r.start()
		synctest.Wait()
		if all := r.escalations(); all[hitl.CauseBoundary] != 1 || r.failures() != 0 {
			t.Errorf("%v, and %d wait", all, r.failures())
		}
		refused("late")
		synctest.Wait()
		if all := r.escalations(); all[hitl.CauseBoundary] != 2 || r.failures() != 0 {
			t.Errorf("%v, and %d wait", all, r.failures())
		}
	})
}
