package rollback_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// hashOf is the hash of what was prepared, as Request.Planned.
func hashOf(p *rollback.Prepared) string {
	sum := p.Rollback.Plan.Hash()
	return string(sum[:])
}

func (r *rig) prepare(q rollback.Request) *rollback.Prepared {
	r.t.Helper()
	p, err := r.Prepare(ctx, q)
	if err == nil {
		p, err = r.Reserve(ctx, p, rollback.DefaultReservation)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// obstacles are the reasons of what was prepared.
func obstacles(p *rollback.Prepared) (all []string) {
	for _, o := range p.Obstacles {
		all = append(all, o.Checkpoint+"="+o.Reason)
	}
	return all
}

// Cascade 4.3.2: prepare plans and changes nothing but its reservation, which holds back what
// would follow from the plan, over a restart too, and ends by itself. Execute runs that plan.
func TestCascade432Prepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.made("2", checkpoint.Compensate, execution.Completed, "1")
		r.made("9", checkpoint.Restore, execution.Completed)
		r.start()
		q := request("c1", rollback.SubDAG)
		first := r.prepare(q)
		if !first.Ready() || first.Rollback.State != rollback.Reserved || first.Rollback.Until.Sub(r.now()) != rollback.DefaultReservation || len(first.Rollback.Steps) != 2 {
			t.Fatalf("%+v", first)
		}
		if got := first.Rollback.Plan.Levels; got[0][0].Way != "compensate" || got[1][0].Way != "restore" {
			t.Errorf("%+v", got)
		}
		check := func(when string) {
			t.Helper()
			if got := r.enters("w", "2"); got == nil || got.Stopped || got.Rollback != q.ID {
				t.Errorf("%s: %v", when, got)
			}
			if r.enters("w", "9") != nil || r.enters("another", "2") != nil {
				t.Errorf("%s: what does not follow from the plan is blocked", when)
			}
			again := r.prepare(q)
			if again.Rollback.Until != first.Rollback.Until || again.Rollback.Plan.Hash() != first.Rollback.Plan.Hash() || !again.Rollback.Asked.Equal(first.Rollback.Asked) {
				t.Errorf("%s: %+v, first %+v", when, again, first)
			}
			if _, err := r.Get(ctx, q.ID); !errors.Is(err, rollback.ErrUnknown) {
				t.Errorf("%s: it is a rollback already: %v", when, err)
			}
		}
		check("at once")
		stop(r.Coordinator)
		r.open()
		if err := r.Load(ctx); err != nil {
			t.Fatal(err)
		}
		r.start()
		check("after a restart")
		if n := len(r.recorded()); n != 0 || r.world.sends != 0 {
			t.Errorf("%d records, %d undos", n, r.world.sends)
		}

		time.Sleep(rollback.DefaultReservation)
		if got := r.enters("w", "2"); got != nil {
			t.Errorf("afterwards: %v", got)
		}
		if _, err := r.Prepared(ctx, q.ID); !errors.Is(err, rollback.ErrUnknown) {
			t.Errorf("afterwards: %v", err)
		}
		// It is judged anew, and executed.
		r.made("3", checkpoint.Restore, execution.Completed, "2")
		second := r.prepare(q)
		if second.Rollback.Until.Equal(first.Rollback.Until) || second.Rollback.Plan.Hash() == first.Rollback.Plan.Hash() {
			t.Errorf("%+v", second)
		}
		q.Planned = hashOf(second)
		done := r.run(q)
		wantEnd(t, done, rollback.Completed, "c3=completed c2=completed c1=completed")
		if !done.Prepared.Equal(second.Rollback.Asked) || hashOf(&rollback.Prepared{Rollback: done}) != q.Planned {
			t.Errorf("%+v", done)
		}
		if got := r.enters("w", "2"); got != nil {
			t.Errorf("when it is finished: %v", got)
		}
		if p, err := r.Prepare(ctx, q); err != nil || !p.Ready() || p.Rollback.Status != rollback.Completed || !p.Rollback.Until.IsZero() {
			t.Errorf("prepared again: %+v, %v", p, err)
		}
		q.Planned = hashOf(first)
		if _, err := r.Execute(ctx, q, nil); !errors.Is(err, rollback.ErrMismatch) {
			t.Errorf("the same id for another plan: %v", err)
		}
	})
}

// A reservation of a whole workflow pauses it, and does not end it.
func TestCascade432PreparedWorkflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		q := request("c1", rollback.FullWorkflow)
		q.Coordinator = true
		r.prepare(q)
		for range 2 {
			if got := r.enters("w"); got == nil || got.Stopped {
				t.Errorf("%v", got)
			}
			stop(r.Coordinator)
			r.open()
			if err := r.Load(ctx); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(rollback.DefaultReservation)
		if got := r.enters("w"); got != nil {
			t.Errorf("afterwards: %v", got)
		}
	})
}

// C-4.3.2-e: every reason why something cannot be prepared. Nothing is reserved then.
func TestCascade432CannotPrepare(t *testing.T) {
	for name, test := range map[string]struct {
		make func(r *rig, q *rollback.Request)
		want []string
	}{
		"irreversible": {func(r *rig, _ *rollback.Request) {
			r.made("2", checkpoint.Irreversible, execution.Completed, "1")
		}, []string{"c2=irreversible"}},
		"in flight and irreversible": {func(r *rig, _ *rollback.Request) {
			r.claimed("2", checkpoint.Irreversible, "1")
		}, []string{"c2=irreversible"}},
		"tampered": {func(r *rig, _ *rollback.Request) {
			r.made("2", checkpoint.Restore, execution.Completed, "1")
			r.ledger.tamper["c2"] = true
		}, []string{"c2=checkpoint-tampered"}},
		"foreign": {func(r *rig, _ *rollback.Request) {
			r.known("c2", CheckpointNode, rollback.Ran, rollback.Checkpoint{Reversible: true, Parents: []string{"1"}})
		}, []string{"c2=foreign"}},
		"unknown": {func(r *rig, q *rollback.Request) {
			r.made("2", checkpoint.Restore, execution.Completed)
			r.group("g", "c1", "c2", "c7")
			q.Checkpoint, q.Coordinator = "g", true
		}, []string{"c7=checkpoint-unknown"}},
		"expired": {func(r *rig, _ *rollback.Request) {
			r.made("2", checkpoint.Restore, execution.Completed, "1")
			for i := range r.ledger.nodes {
				if n := &r.ledger.nodes[i]; n.ID == "c2" {
					n.Expires = r.now()
				}
			}
		}, []string{"c2=checkpoint-expired"}},
		"nothing in the way": {func(r *rig, _ *rollback.Request) {
			r.made("2", checkpoint.Irreversible, execution.Released, "1")
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, execution.Completed)
			q := request("c1", rollback.SubDAG)
			test.make(r, &q)
			r.start()
			p := r.prepare(q)
			if got := obstacles(p); !slices.Equal(got, test.want) || p.Ready() != (test.want == nil) {
				t.Errorf("%q, want %q: %+v", got, test.want, p)
			}
			if reserved := !p.Rollback.Until.IsZero(); reserved != p.Ready() || (r.enters("w", "1") != nil) != reserved {
				t.Errorf("reserved %v: %+v", reserved, p)
			}
		})
	}
}

// What refuses a rollback as a whole refuses to prepare it, and nothing is recorded.
func TestCascade432Refused(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.start()
	alone := request("c1", rollback.Single)
	alone.KeepDependants = false
	depended := (*rollback.DependedOnError)(nil)
	if p := r.prepare(alone); !errors.As(p.Refusal, &depended) || p.Ready() || p.Rollback.Plan != nil {
		t.Errorf("%+v", p)
	}
	r.ledger.tamper["c2"] = true
	if p := r.prepare(request("c2", rollback.Single)); !errors.Is(p.Refusal, checkpoint.ErrTampered) {
		t.Errorf("%+v", p)
	}
	stranger := request("c1", rollback.SubDAG)
	stranger.By = "spiffe://example.com/stranger"
	if _, err := r.Prepare(ctx, stranger); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("a stranger: %v", err)
	}
	if n := len(r.recorded()); n != 0 {
		t.Errorf("%d records", n)
	}
}

// Settled: another state since prepare is refused with the new hash, and prepared anew.
func TestPlanChanged(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	e, h := r.claimed("2", checkpoint.Restore, "1")
	r.start()
	q := request("c1", rollback.SubDAG)
	before := r.prepare(q).Rollback.Plan.Hash()
	r.settle("2", e, h, execution.Completed)
	_, err := r.Execute(ctx, q, nil)
	changed := (*rollback.PlanChangedError)(nil)
	if !errors.As(err, &changed) || changed.Hash == before {
		t.Fatalf("%v", err)
	}
	if got := r.enters("w", "1"); got != nil {
		t.Errorf("it is reserved still: %v", got)
	}
	now := r.prepare(q)
	if now.Rollback.Plan.Hash() != changed.Hash {
		t.Errorf("%x, and then %x", changed.Hash, now.Rollback.Plan.Hash())
	}
	// Who names the plan of before gets nothing else, reserved or not.
	for range 2 {
		stale := q
		stale.Planned = string(before[:])
		if _, err := r.Execute(ctx, stale, nil); !errors.As(err, &changed) {
			t.Errorf("%v", err)
		}
	}
	if r.world.sends != 0 {
		t.Errorf("%d undos", r.world.sends)
	}
	q.Planned = string(changed.Hash[:])
	wantEnd(t, r.run(q), rollback.Completed, "c2=completed c1=completed")
}

// What changes nothing of the plan does not change its hash: neither a call elsewhere in the
// workflow, nor time.
func TestPlanUnchanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		q := request("c1", rollback.SubDAG)
		r.prepare(q)
		r.made("9", checkpoint.Restore, execution.Completed)
		time.Sleep(rollback.DefaultReservation / 2)
		wantEnd(t, r.run(q), rollback.Completed, "c1=completed")
	})
}

// C-4.3.2-d, -e: prepare compares the present state where a restore would. What was changed since cannot be
// prepared, and nothing is reserved; executed alone, the rest is undone, or nothing.
func TestPrepareComparesThePresentState(t *testing.T) {
	for _, whole := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, execution.Completed)
			r.made("2", checkpoint.Restore, execution.Completed, "1")
			r.start()
			r.world.changed = map[string]rollback.Reason{"c2": rollback.ReasonChanged}
			q := request("c1", rollback.SubDAG)
			q.Whole = whole
			p := r.prepare(q)
			if p.Ready() || !p.Rollback.Until.IsZero() || len(p.Obstacles) != 1 || p.Obstacles[0].Checkpoint != "c2" || p.Obstacles[0].Reason != "changed-since" {
				t.Errorf("%+v", p)
			}
			r.execute(q)
			status, want := rollback.Partial, "c2=escalated(changed-since) c1=completed"
			if whole {
				r.says(r.question(q.ID), false)
				status, want = rollback.Escalated, "c2=escalated(changed-since) c1=escalated(denied)"
			}
			done := r.wait(q.ID)
			wantEnd(t, done, status, want)
			if done.Unknown || r.world.effects["c2"] != nil {
				t.Errorf("%+v, %v", done, r.world.effects)
			}
			stop(r.Coordinator)
		})
	}
}

// A reservation is for its checkpoint and scope, and for all who may ask for it (ADR 0110).
func TestReservationOfAnother(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.start()
	q := request("c1", rollback.SubDAG)
	first := r.prepare(q)
	for name, change := range map[string]func(q *rollback.Request){
		"scope":    func(q *rollback.Request) { q.Scope = rollback.Single },
		"stranger": func(q *rollback.Request) { q.By = "spiffe://example.com/stranger" },
	} {
		other, want := q, rollback.ErrMismatch
		if change(&other); name == "stranger" {
			want = rollback.ErrNotInWorkflow // P3
		}
		if _, err := r.Prepare(ctx, other); !errors.Is(err, want) {
			t.Errorf("prepare, %s: %v", name, err)
		}
		if _, err := r.Execute(ctx, other, nil); !errors.Is(err, want) {
			t.Errorf("execute, %s: %v", name, err)
		}
	}
	for _, change := range []func(q *rollback.Request){
		func(q *rollback.Request) { q.By, q.Coordinator = "spiffe://example.com/other", true },
		func(q *rollback.Request) { q.Operator = "ada" },
	} {
		other := q
		change(&other)
		if p, err := r.Prepare(ctx, other); err != nil || !p.Rollback.Until.Equal(first.Rollback.Until) {
			t.Errorf("%+v, %v", p, err)
		}
	}
	reasoned := q
	reasoned.Reason = "said later"
	wantEnd(t, r.run(reasoned), rollback.Completed, "c1=completed")
}

// Cascade 4.3.4: of two that are prepared the wider goes before, then the earlier; the loser is
// told who won. What does not overlap does not meet.
func TestCascade434Reservations(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.made("9", checkpoint.Restore, execution.Completed)
	r.start()
	lost := func(err error, to rollback.Request) {
		t.Helper()
		conflict := (*rollback.ConflictError)(nil)
		if !errors.As(err, &conflict) || conflict.Winner != to.ID {
			t.Errorf("%v, want a conflict with %s", err, to.ID)
		}
	}
	narrow := request("c2", rollback.Single)
	r.prepare(narrow)
	second := request("c2", rollback.Single)
	lost(r.prepare(second).Refusal, narrow)
	_, err := r.Execute(ctx, second, nil)
	lost(err, narrow)
	if p := r.prepare(request("c9", rollback.Single)); !p.Ready() || p.Rollback.Until.IsZero() {
		t.Errorf("%+v", p)
	}
	wide := request("c1", rollback.SubDAG)
	if p := r.prepare(wide); !p.Ready() || p.Rollback.Until.IsZero() {
		t.Errorf("%+v", p)
	}
	if _, err := r.Prepared(ctx, narrow.ID); !errors.Is(err, rollback.ErrUnknown) {
		t.Errorf("the narrower one is reserved still: %v", err)
	}
	_, err = r.Execute(ctx, narrow, nil)
	lost(err, wide)
	wantEnd(t, r.run(wide), rollback.Completed, "c2=completed c1=completed")
	if got := r.enters("w", "1"); got != nil {
		t.Errorf("when it is finished: %v", got)
	}
}

// Many prepare what overlaps at once, in any order: in the end one of them holds it. One that was
// asked for earlier may end the reservation of a later one (cascade 4.3.4).
func TestCascade434PreparedAtOnce(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.start()
	const many = 8
	asked := make(chan string, many)
	for range many {
		go func() {
			q := request("c1", rollback.SubDAG)
			p, err := r.Prepare(ctx, q)
			if err == nil {
				_, err = r.Reserve(ctx, p, rollback.DefaultReservation)
			}
			if err != nil {
				t.Error(err)
			}
			asked <- q.ID
		}()
	}
	ids := make([]string, many)
	for i := range ids {
		ids[i] = <-asked
	}
	holds := 0
	for _, id := range ids {
		p, err := r.Prepared(ctx, id)
		switch {
		case err == nil && p.Ready():
			holds++
		case !errors.Is(err, rollback.ErrUnknown):
			t.Errorf("%s: %+v %v", id, p, err)
		}
	}
	if holds != 1 {
		t.Errorf("%d hold it", holds)
	}
}

// The process dies at any commit of prepare and execute, which lands or does not: what is
// reserved is reserved whole, nothing is undone twice, and the rollback can be carried out.
func TestCrashInBothPhases(t *testing.T) {
	for dies := 0; ; dies++ {
		over := false
		for _, lands := range []bool{false, true} {
			t.Run(fmt.Sprint(dies, lands), func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				r.made("2", checkpoint.Compensate, execution.Completed, "1")
				r.start()
				r.st.mu.Lock()
				r.st.dies, r.st.lands = r.st.commits+dies, lands
				r.st.mu.Unlock()
				q := request("c1", rollback.SubDAG)
				// A life that has died may go on for a moment: it has a coordinator of its own.
				try := func(c *rollback.Coordinator, q rollback.Request) error {
					p, err := c.Prepare(ctx, q)
					if err == nil {
						p, err = c.Reserve(ctx, p, rollback.DefaultReservation)
					}
					if err != nil {
						return err
					}
					if !p.Ready() {
						return p.Refusal
					}
					q.Planned = hashOf(p)
					if _, err = c.Execute(ctx, q, nil); err == nil {
						_, err = c.Wait(ctx, q.ID)
					}
					return err
				}
				ended, c := make(chan error, 1), r.Coordinator
				go func() { ended <- try(c, q) }()
				select {
				case err := <-ended:
					over = err == nil && !r.st.gone()
				case <-r.st.dead:
				}
				stop(r.Coordinator)
				r.open()
				if err := r.Load(ctx); err != nil {
					t.Fatal(err)
				}
				r.start()
				if err := try(r.Coordinator, q); err != nil {
					t.Fatal(err)
				}
				wantEnd(t, r.wait(q.ID), rollback.Completed, "c2=completed c1=completed")
				for id, keys := range r.world.effects {
					if len(keys) != 1 {
						t.Errorf("%s was undone %d times", id, len(keys))
					}
				}
				if got := r.enters("w", "1"); got != nil {
					t.Errorf("it is held back for ever: %v", got)
				}
			})
		}
		if over {
			return
		}
		if dies > 100 {
			t.Fatal("it never ends")
		}
	}
}

// A use of a token that another request has taken refuses the reservation.
func TestReservationWithWrites(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.start()
	p, err := r.Prepare(ctx, request("c1", rollback.SubDAG))
	if err != nil {
		t.Fatal(err)
	}
	extra := store.Write{Key: []byte("zz " + uuid.NewString()), If: store.Absent(), Value: []byte("x")}
	if _, err := r.mem.Commit(ctx, extra); err != nil {
		t.Fatal(err)
	}
	lost := (*store.Conflict)(nil)
	if _, err := r.Reserve(ctx, p, time.Minute, extra); !errors.As(err, &lost) || string(lost.Key) != string(extra.Key) {
		t.Errorf("%v", err)
	}
	if got := r.enters("w", "1"); got != nil {
		t.Errorf("it is reserved: %v", got)
	}
}

// Who has prepared a rollback releases it: what was held back goes on at once, over a restart too,
// the participants are told, and the same prepare is judged anew.
func TestRelease(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Delegate, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.start()
	r.undoer.releases = make(chan string, 10)
	q := request("c1", rollback.SubDAG)
	if err := r.Release(ctx, q); err != nil {
		t.Errorf("nothing is reserved: %v", err)
	}
	first := r.prepare(q)
	for name, change := range map[string]func(q *rollback.Request){
		"scope":     func(q *rollback.Request) { q.Scope = rollback.Single },
		"requester": func(q *rollback.Request) { q.By, q.Coordinator = "spiffe://example.com/other", true },
		"operator":  func(q *rollback.Request) { q.Operator = "ada" },
	} {
		other := q
		change(&other)
		if err := r.Release(ctx, other); errors.Is(err, rollback.ErrMismatch) != (name == "scope") || name != "scope" && err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	stranger := request("c1", rollback.SubDAG)
	stranger.By = "spiffe://example.com/stranger"
	if err := r.Release(ctx, stranger); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("a stranger: %v", err)
	}
	if r.enters("w", "1") == nil {
		t.Fatal("others have released it")
	}
	lost := store.Write{Key: []byte("zz"), If: store.VersionIs(1), Value: []byte("x")}
	if err := r.Release(ctx, q, lost); !errors.As(err, new(*store.Conflict)) || r.enters("w", "1") == nil {
		t.Errorf("with a write that is refused: %v", err)
	}
	if err := r.Release(ctx, q); err != nil {
		t.Fatal(err)
	}
	if id := <-r.undoer.releases; id != "c1" {
		t.Errorf("%s is released", id)
	}
	if got := r.enters("w", "1"); got != nil {
		t.Errorf("it is held back still: %v", got)
	}
	if err := r.Release(ctx, q); err != nil {
		t.Errorf("again: %v", err)
	}
	r.restart()
	if err := r.Load(ctx); err != nil {
		t.Fatal(err)
	}
	if got := r.enters("w", "1"); got != nil {
		t.Errorf("after a restart: %v", got)
	}
	if second := r.prepare(q); second.Rollback.Asked.Equal(first.Rollback.Asked) || second.Rollback.Until.IsZero() {
		t.Errorf("%+v, first %+v", second, first)
	}
	wantEnd(t, r.run(q), rollback.Completed, "c2=completed c1=completed")
	if err := r.Release(ctx, q); !errors.Is(err, rollback.ErrAccepted) {
		t.Errorf("afterwards: %v", err)
	}
}

// A release and an execute at once: the execute goes on to its end, or is prepared and executed
// after the release; nothing is undone twice, and nothing stays reserved.
func TestReleaseRacesExecute(t *testing.T) {
	for range 20 {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		q := request("c1", rollback.SubDAG)
		r.prepare(q)
		released := make(chan error, 1)
		go func() { released <- r.Release(ctx, q) }()
		r.execute(q)
		if err := <-released; err != nil && !errors.Is(err, rollback.ErrAccepted) {
			t.Fatal(err)
		}
		wantEnd(t, r.wait(q.ID), rollback.Completed, "c1=completed")
		if n := len(r.world.effects["c1"]); n != 1 {
			t.Errorf("undone %d times", n)
		}
		if _, err := r.Prepared(ctx, q.ID); err == nil {
			if err := r.Release(ctx, q); !errors.Is(err, rollback.ErrAccepted) {
				t.Errorf("%v", err)
			}
		}
		if got := r.enters("w", "1"); got != nil {
			t.Errorf("held back: %v", got)
		}
	}
}
