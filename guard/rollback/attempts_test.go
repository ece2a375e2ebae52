package rollback_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// retried is call id, in doubt after its first attempt, that was run again: its
// attempts have the checkpoints "c"+id and "d"+id, which stand for ttls. between may be nil.
func (r *rig) retried(id string, between func(), ttls [2]time.Duration) {
	r.t.Helper()
	first := ""
	for n, name := range []string{"c" + id, "d" + id} {
		if n > 0 && between != nil {
			between()
		}
		c := r.call(id)
		c.Checkpoint = name
		found, err := r.guard.Find(ctx, c.Key, c.Fingerprint)
		if err != nil {
			r.t.Fatal(err)
		}
		s := checkpoint.Snapshot{
			ID: name, Workflow: "w", Caller: r.guard.Caller(agent), Execution: c.Key, Action: "update",
			Way: checkpoint.Compensate, First: first, Request: checkpoint.Request{Method: "PUT", Path: "/" + id},
		}
		p, err := r.vault.Prepare(ctx, s, nil, checkpoint.Terms{TTL: ttls[n]})
		if err != nil {
			r.t.Fatal(err)
		}
		e, err := r.guard.Claim(ctx, c, found, p.Writes()...)
		if err = p.Done(err); err != nil {
			r.t.Fatal(err)
		}
		verdict := guard.InDoubt
		if n > 0 {
			verdict = guard.Completed
		}
		cp := rollback.Checkpoint{Own: true, Sum: p.Sum(), Reversible: true, Parents: []string{id}}
		r.known(name, plan.Checkpoint, plan.Standing, cp, id)
		node := &r.ledger.nodes[len(r.ledger.nodes)-1]
		node.Expires = r.now().Add(ttls[n])
		cp = r.ledger.tokens[name]
		cp.TTL, cp.Expires = ttls[n], node.Expires
		r.ledger.tokens[name] = cp
		p, err = r.vault.Record(ctx, p.Handle(), checkpoint.Result{Status: 200}, 0)
		if err != nil {
			r.t.Fatal(err)
		}
		if err := p.Done(e.Settle(ctx, guard.Outcome{Verdict: verdict, Status: 200, Whole: true}, p.Writes()...)); err != nil {
			r.t.Fatal(err)
		}
		first = "c" + id
	}
	r.action(id)
}

var dayEach = [2]time.Duration{ttl, ttl}

// P1: an undo of one attempt that was left in doubt goes on under its key by another one, also
// where it is forgotten what the doubt was about; and what is known of the whole counts.
func TestP1DoubtIsThatOfAllAttempts(t *testing.T) {
	for name, c := range map[string]struct {
		targets   [2]string
		forgotten bool
	}{
		"the last, then the first": {[2]string{"d1", "c1"}, false},
		"the first, then the last": {[2]string{"c1", "d1"}, false},
		"it was forgotten":         {[2]string{"c1", "d1"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.retried("1", nil, [2]time.Duration{300 * ttl, 300 * ttl})
				r.world.answers["c1"] = undo.Result{Unknown: true, Reason: undo.ReasonUnexpected, Status: 303}
				r.start()
				var seen []undo.Task
				r.undoer.seen = func(task undo.Task) { seen = append(seen, task) }
				first, second := request(c.targets[0], plan.Single), request(c.targets[1], plan.Single)
				r.run(first)
				if c.forgotten {
					time.Sleep(keep + time.Hour)
				}
				r.run(second)
				if len(seen) != 2 {
					t.Fatalf("%d tries", len(seen))
				}
				again := seen[1]
				if again.Rollback != first.ID || again.Again != second.ID || again.Forgotten != c.forgotten || again.Step != c.targets[1] {
					t.Errorf("under %s (first %t), again %t, forgotten %t, for %s",
						again.Rollback, again.Rollback == first.ID, again.Again == second.ID, again.Forgotten, again.Step)
				}
				r.world.answers["c1"] = undo.Result{Reason: undo.ReasonRefused, Status: 409}
				r.run(request("c1", plan.Single)) // now it is known that there was no effect
				third := request("d1", plan.Single)
				r.run(third)
				if last := seen[len(seen)-1]; last.Rollback != third.ID || last.Again != "" {
					t.Errorf("what was refused is in doubt: %+v", last)
				}
				stop(r.Coordinator)
			})
		})
	}
}

// The attempts of a call do not stay held by a rollback that has ended, however its step has:
// in another life too, in which what the undo needs is gone.
func TestAttemptsAreLetGo(t *testing.T) {
	for name, spoil := range map[string]func(r *rig){
		"tampered": func(r *rig) {
			r.ledger.mu.Lock()
			defer r.ledger.mu.Unlock()
			r.ledger.tamper["d1"] = true
		},
		"purged": nil, // time does it
		"unreadable": func(r *rig) {
			key := r.call("1").Key
			if _, err := r.mem.Commit(ctx, store.Write{Key: append([]byte{'x'}, key[:]...), Value: []byte("spoilt")}); err != nil {
				r.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.retried("1", nil, dayEach)
				asked := make(chan string, 1)
				r.undoer.asked, r.undoer.block = asked, true
				r.start()
				q := request("d1", plan.Single)
				r.execute(q)
				<-asked
				stop(r.Coordinator)
				if spoil != nil {
					spoil(r)
				} else {
					time.Sleep(2 * ttl)
				}
				r.open()
				r.start()
				if b := r.wait(q.ID); !b.Unknown || b.Status == rollback.Completed {
					t.Errorf("%s: %s", b.Status, ends(b))
				}
				m, err := r.vault.Mark(ctx, "c1")
				if err != nil || m.State == checkpoint.Undoing || m.Doubt != q.ID {
					t.Errorf("the first is %s, with doubt %q, %v", m.State, m.Doubt, err)
				}
				stop(r.Coordinator)
			})
		})
	}
}

// An attempt whose ttl is over is completed with the call, where that is undone by another one
// in time: nobody is told to undo it by hand.
func TestExpiredAttemptGoesWithItsCall(t *testing.T) {
	long, short := [2]time.Duration{2 * ttl, ttl}, [2]time.Duration{ttl, 2 * ttl}
	for name, c := range map[string]struct {
		ttls   [2]time.Duration
		pause  time.Duration // between the attempts
		after  time.Duration // until it is rolled back
		follow bool          // something follows from the last one
		before string        // a rollback before the ttl ends
	}{
		"the first":                         {dayEach, 23 * time.Hour, 2 * time.Hour, false, ""},
		"the first, and something follows":  {dayEach, 23 * time.Hour, 2 * time.Hour, true, ""},
		"the first is gone":                 {short, time.Hour, 40 * time.Hour, false, ""},
		"the first is gone, and it follows": {short, time.Hour, 40 * time.Hour, true, ""},
		"the last":                          {long, 0, ttl + time.Hour, false, ""},
		"the last, and something follows":   {long, 0, ttl + time.Hour, true, ""},
		"the last, undone before":           {long, 0, ttl + time.Hour, false, "c1"},
		"the first, undone before":          {short, 0, ttl + time.Hour, false, "d1"},
	} {
		for _, crash := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t)
					r.retried("1", func() { time.Sleep(c.pause) }, c.ttls)
					r.start()
					if c.before != "" {
						r.run(request(c.before, plan.Single))
					}
					time.Sleep(c.after)
					r.made("0", checkpoint.Compensate, guard.Completed)
					if c.follow {
						r.made("2", checkpoint.Compensate, guard.Completed, "d1")
					}
					q := request("c0", plan.FullWorkflow)
					q.Operator = "op"
					if crash {
						asked := make(chan string, 4)
						r.undoer.asked, r.undoer.block = asked, true
						r.execute(q)
						synctest.Wait()
						r.restart()
					} else {
						r.execute(q)
					}
					b := r.wait(q.ID)
					if b.Status != rollback.Completed || b.Mixed {
						t.Errorf("%s: %s", b.Status, ends(b))
					}
					if n := len(r.world.effects["c1"]); n != 1 {
						t.Errorf("undone %d times", n)
					}
					if told := r.escalations(); len(told) > 0 {
						t.Errorf("people are told %v", told)
					}
					stop(r.Coordinator)
				})
			})
		}
	}
}

// Two rollbacks that name different attempts of the same calls wait for each other's steps, and
// not for each other's ends.
func TestAttemptsOfTwoRollbacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.retried("a", nil, dayEach)
		r.retried("b", nil, dayEach)
		// These have the targets of a and b, by their paths, and are undone before them.
		time.Sleep(time.Second)
		r.made("A", checkpoint.Compensate, guard.Completed)
		r.made("B", checkpoint.Compensate, guard.Completed)
		r.group("g1", "da", "cb", "cB")
		r.group("g2", "db", "ca", "cA")
		hold := map[string]chan struct{}{}
		for _, id := range []string{"ca", "cb", "cA", "cB"} {
			hold[id] = make(chan struct{})
			r.world.hold[id] = hold[id]
		}
		r.start()
		first, second := request("g1", plan.Single), request("g2", plan.Single)
		r.execute(first)
		r.execute(second)
		for _, id := range []string{"cA", "cB", "ca", "cb"} {
			synctest.Wait()
			close(hold[id])
		}
		began := time.Now()
		for _, q := range []rollback.Request{first, second} {
			if b := r.wait(q.ID); b.Status != rollback.Completed {
				t.Errorf("%s: %s", b.Status, ends(b))
			}
		}
		if took := time.Since(began); took > time.Minute {
			t.Errorf("after %v", took)
		}
		for _, id := range []string{"ca", "cb"} {
			if n := len(r.world.effects[id]); n != 1 {
				t.Errorf("%s was undone %d times", id, n)
			}
		}
		stop(r.Coordinator)
	})
}

// P1: what was begun goes on by what is known of the last attempt, though its ttl has ended
// in between.
func TestP1BegunBeforeTheLastExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.retried("1", nil, [2]time.Duration{2 * ttl, ttl})
		asked := make(chan string, 1)
		r.undoer.asked, r.undoer.block = asked, true
		r.start()
		time.Sleep(ttl - time.Hour)
		q := request("c1", plan.Single)
		r.execute(q)
		<-asked
		stop(r.Coordinator)
		time.Sleep(2 * time.Hour)
		r.open()
		r.undoer.seen = func(task undo.Task) {
			if s := task.Checkpoint.Snapshot; s.ID != "d1" || task.Rollback != q.ID {
				t.Errorf("undone by %s", s.ID)
			}
		}
		r.start()
		wantEnd(t, r.wait(q.ID), rollback.Completed, "c1=completed")
		stop(r.Coordinator)
	})
}
