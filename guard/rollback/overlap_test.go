package rollback_test

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// P5 and cascade 4.3.4: one id asked for by many at once runs once, and all get the same.
func TestP5OneExecutionOfManyRequests(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed, "1")
	r.start()
	q := request("c1", plan.SubDAG)
	var wg sync.WaitGroup
	for range 20 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if _, err := r.Execute(ctx, q); err != nil {
				t.Error(err)
			} else if b := r.wait(q.ID); ends(b) != "c2=completed c1=completed" {
				t.Error(ends(b))
			}
		}()
	}
	wg.Wait()
	for words, n := range r.said() {
		if n != 1 {
			t.Errorf("told %d times: %s", n, words)
		}
	}
	if len(r.world.order) != 2 {
		t.Errorf("undone %v", r.world.order)
	}
}

// P5: the same answer 24 hours later and after a restart, and nothing runs again; it is
// forgotten when it has been kept long enough.
func TestP5SameAnswerADayLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, guard.Completed)
		r.start()
		q := request("c1", plan.Single)
		first := r.run(q)
		for range 2 {
			time.Sleep(25 * time.Hour)
			r.restart()
			b := r.execute(q)
			if b.Finished != first.Finished || b.Complete != first.Complete || ends(b) != ends(first) || b.After != first.After {
				t.Errorf("%+v\nfirst\n%+v", b, first)
			}
			if len(r.world.order) != 1 {
				t.Errorf("undone %v", r.world.order)
			}
		}
		time.Sleep(keep)
		if _, err := r.Get(ctx, q.ID); !errors.Is(err, rollback.ErrUnknown) {
			t.Errorf("kept: %v", err)
		}
		if page, err := r.List(ctx, "", 10); err != nil || len(page.Rollbacks) > 0 {
			t.Errorf("listed: %+v, %v", page, err)
		}
		stop(r.Coordinator)
	})
}

// branches is a workflow with a chain of three, whose undo of c3 is held up.
func branches(t testing.TB) (r *rig, asked chan string, release func()) {
	r = newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed, "1")
	r.made("3", checkpoint.Restore, guard.Completed, "2")
	r.made("9", checkpoint.Restore, guard.Completed)
	hold := make(chan struct{})
	r.world.hold["c3"] = hold
	asked = make(chan string, 100)
	r.undoer.asked = asked
	return r, asked, sync.OnceFunc(func() { close(hold) })
}

// Cascade 4.3.4: the loser is refused with the winner's id; who has nothing in common goes on.
func TestCascade434Refused(t *testing.T) {
	r, asked, release := branches(t)
	r.start()
	defer release()
	wide := request("c1", plan.SubDAG)
	r.execute(wide)
	<-asked
	for _, q := range []rollback.Request{request("c2", plan.Single), request("c2", plan.SubDAG), request("c1", plan.SubDAG)} {
		var lost *rollback.ConflictError
		if _, err := r.Execute(ctx, q); !errors.As(err, &lost) || lost.Winner != wide.ID {
			t.Errorf("%s of %s: %v", q.Scope, q.Checkpoint, err)
		}
		if _, err := r.Plan(ctx, q); !errors.As(err, &lost) {
			t.Errorf("planned: %v", err)
		}
	}
	// P5: it is no rival of itself, for those who ask for it at the same moment.
	if _, err := r.Plan(ctx, wide); err != nil {
		t.Errorf("planned again: %v", err)
	}
	wantEnd(t, r.run(request("c9", plan.Single)), rollback.Completed, "c9=completed")
	release()
	wantEnd(t, r.wait(wide.ID), rollback.Completed, "c3=completed c2=completed c1=completed")
	wantEnd(t, r.run(request("c2", plan.SubDAG)), rollback.Completed, "c3=completed c2=completed")
}

// DESIGN, "Settled here": a narrower rollback that executes finishes its level, then joins
// the wider one; its own id answers with the wider one's result, after a restart too.
func TestNarrowerJoinsWider(t *testing.T) {
	for _, again := range []bool{false, true} {
		r, asked, release := branches(t)
		r.start()
		narrow, wide := request("c2", plan.SubDAG), request("c1", plan.FullWorkflow)
		wide.Operator = "ada"
		r.execute(narrow)
		<-asked
		b := r.execute(wide)
		if b.State != rollback.Executing {
			t.Errorf("%+v", b)
		}
		if b, err := r.Get(ctx, narrow.ID); err != nil || b.Joined != wide.ID {
			t.Errorf("%+v, %v", b, err)
		}
		release()
		if again {
			r.restart()
		}
		steps := "c9=completed c3=completed c2=completed c1=completed"
		wantEnd(t, r.wait(narrow.ID), rollback.Completed, steps)
		wantEnd(t, r.wait(wide.ID), rollback.Completed, steps)
		r.restart()
		b = r.execute(narrow)
		wantEnd(t, b, rollback.Completed, steps)
		if b.ID != narrow.ID || b.Joined != wide.ID || b.Checkpoint != "c2" {
			t.Errorf("%+v", b)
		}
		for id, keys := range r.world.effects {
			if len(keys) != 1 {
				t.Errorf("%s undone under %v", id, keys)
			}
		}
		if n := r.said()["complete "+narrow.ID+" completed"]; n != 0 {
			t.Errorf("the narrower one told %d times that it is complete", n)
		}
	}
}

// Cascade 4.3.4: a wider one that lacks a part of what has begun waits for its end.
func TestWiderOneQueues(t *testing.T) {
	r, asked, release := branches(t)
	r.group("g", "c3", "c9")
	r.start()
	group, wide := request("g", plan.Single), request("c3", plan.SubDAG)
	r.execute(group)
	<-asked
	r.execute(wide)
	select {
	case <-finished(r, wide.ID):
		t.Error("it did not wait")
	default:
	}
	release()
	wantEnd(t, r.wait(wide.ID), rollback.Completed, "c3=completed")
	wantEnd(t, r.wait(group.ID), rollback.Completed, "c9=completed c3=completed g=completed")
	if b, err := r.Get(ctx, group.ID); err != nil || b.Joined != "" {
		t.Errorf("%+v, %v", b, err)
	}
}

// Cascade 4.3.4: of many that overlap and come at once, everything is undone once, and who
// was refused was refused by one that overlaps.
func TestCascade434ManyAtOnce(t *testing.T) {
	for range 10 {
		r := newRig(t)
		for i := range 6 {
			var parents []string
			if i > 0 {
				parents = append(parents, fmt.Sprint(i-1))
			}
			r.made(fmt.Sprint(i), checkpoint.Restore, guard.Completed, parents...)
		}
		r.start()
		var wg sync.WaitGroup
		var mu sync.Mutex
		accepted := map[string]bool{}
		var winners []string
		for i := range 24 {
			q := request(fmt.Sprint("c", i%6), []plan.Scope{plan.Single, plan.SubDAG, plan.FullWorkflow}[i%3])
			wg.Add(1)
			go func() {
				defer wg.Done()
				_, err := r.Execute(ctx, q)
				mu.Lock()
				defer mu.Unlock()
				var lost *rollback.ConflictError
				switch {
				case err == nil:
					accepted[q.ID] = true
				case errors.As(err, &lost):
					winners = append(winners, lost.Winner)
				default:
					t.Error(err)
				}
			}()
		}
		wg.Wait()
		for _, id := range winners {
			if !accepted[id] {
				t.Errorf("%s has won and was not accepted", id)
			}
		}
		for id := range accepted {
			if b := r.wait(id); b.Status != rollback.Completed {
				t.Errorf("%s: %s", b.Status, ends(b))
			}
		}
		for id, keys := range r.world.effects {
			if len(keys) != 1 {
				t.Errorf("%s undone under %v", id, keys)
			}
		}
	}
}

// ATD, "Rollback Timeout and Escalation": not done within half of the ttl, it is told once
// and escalated; what was not begun is left to a person, and the end says what is known.
func TestATDTimeout(t *testing.T) {
	for name, down := range map[string]bool{"in time": false, "while the process was down": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, guard.Completed)
				r.made("2", checkpoint.Restore, guard.Completed, "1")
				r.made("3", checkpoint.Restore, guard.Completed, "2")
				r.start()
				r.undoer.block = true
				r.world.answers["c3"] = undo.Result{Reason: undo.ReasonTimeout}
				q := request("c1", plan.SubDAG)
				b := r.execute(q)
				if b.Due.Sub(b.Asked) != ttl/2 {
					t.Errorf("due %v after", b.Due.Sub(b.Asked))
				}
				synctest.Wait()
				if down {
					stop(r.Coordinator)
					time.Sleep(ttl/2 + time.Second)
					r.restart()
				}
				b = r.wait(q.ID)
				if end := b.Finished.Sub(b.Asked); end < ttl/2 || end > ttl/2+time.Minute {
					t.Errorf("finished after %v", end)
				}
				wantEnd(t, b, rollback.Escalated, "c3=escalated(timeout) c2=escalated(timeout) c1=escalated(timeout)")
				if !b.TimedOut || r.said()["error "+q.ID+" c1 timeout"] != 1 || r.escalations()[hitl.CauseRollbackTimeout] != 1 {
					t.Errorf("timed out %v; %v; %v", b.TimedOut, r.said(), r.escalations())
				}
				if len(b.Escalations) != 1 || b.Steps[2].Escalation != b.Escalations[0] {
					t.Errorf("%v", b.Escalations)
				}
				stop(r.Coordinator)
			})
		})
	}
}

// An undo is given up when no other try would end in time, which is a little earlier: the
// timeout is told all the same.
func TestATDTimeoutOfTheLastTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, guard.Completed)
		r.start()
		r.world.answers["c1"] = undo.Result{Reason: undo.ReasonTimeout}
		q := request("c1", plan.Single)
		b := r.run(q)
		wantEnd(t, b, rollback.Escalated, "c1=escalated(timeout)")
		if !b.Finished.Before(b.Due) || !b.TimedOut || r.said()["error "+q.ID+" c1 timeout"] != 1 || r.escalations()[hitl.CauseRollbackTimeout] != 1 {
			t.Errorf("%+v; %v; %v", b, r.said(), r.escalations())
		}
		stop(r.Coordinator)
	})
}

// A call that does not end holds a rollback up for as long as that may take, and no longer.
func TestATDTimeoutOfACallInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		e, h := r.claimed("1", checkpoint.Restore)
		r.start()
		q := request("c1", plan.Single)
		r.execute(q)
		b := r.wait(q.ID)
		wantEnd(t, b, rollback.Escalated, "c1=escalated(timeout)")
		r.settle("1", e, h, guard.Completed)
		r.standing("1", guard.ResultUnavailable)
		stop(r.Coordinator)
	})
}

// C-4.1.1-d, a thousand nodes: what follows is undone before what it follows from, by a
// walk of all that follows from each, and no step costs more for there being others.
func TestThousandNodesInOrder(t *testing.T) {
	const n = 1000
	r := newRig(t)
	rnd := rand.New(rand.NewPCG(41, 1))
	parents := make([][]int, n)
	for i := range n {
		var names []string
		for range min(i, 1+rnd.IntN(2)) {
			p := i - 1 - rnd.IntN(min(i, 30))
			if !slices.Contains(parents[i], p) {
				parents[i], names = append(parents[i], p), append(names, fmt.Sprint(p))
			}
		}
		r.made(fmt.Sprint(i), checkpoint.Restore, guard.Completed, names...)
	}
	r.start()
	r.st.mu.Lock()
	r.st.commits = 0
	r.st.mu.Unlock()
	b := r.run(request("c0", plan.SubDAG))
	if b.Status != rollback.Completed || len(b.Steps) != n {
		t.Fatalf("%s, %d steps", b.Status, len(b.Steps))
	}
	place := map[string]int{}
	for i, id := range r.world.order {
		place[id] = i
	}
	if len(place) != n || len(r.world.order) != n {
		t.Fatalf("undone %d, %d times", len(place), len(r.world.order))
	}
	for i := range n {
		for _, p := range parents[i] {
			if cmp.Compare(place[fmt.Sprint("c", i)], place[fmt.Sprint("c", p)]) >= 0 {
				t.Fatalf("%d was undone after %d, from which it follows", i, p)
			}
		}
	}
	if err := r.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if perStep := float64(r.st.commits) / n; perStep > 5 {
		t.Errorf("%.1f commits a step", perStep)
	}
	if looks := r.ledger.looks.Load(); looks > 3*n {
		t.Errorf("%d looks at tokens", looks)
	}
}
