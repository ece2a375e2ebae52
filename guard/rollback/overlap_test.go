package rollback_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// P5 and cascade 4.3.4: one id asked for by many at once runs once, and all get the same.
func TestP5OneExecutionOfManyRequests(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.start()
	q := request("c1", rollback.SubDAG)
	var wg sync.WaitGroup
	for range 20 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if _, err := r.Execute(ctx, q, nil); err != nil {
				t.Error(err)
			} else if b := r.wait(q.ID); ends(b) != "c2=completed c1=completed" {
				t.Error(ends(b))
			}
		}()
	}
	wg.Wait()
	for words, n := range r.recorded() {
		if n != 1 {
			t.Errorf("recorded %d times: %s", n, words)
		}
	}
	if len(r.world.order) != 2 {
		t.Errorf("undone %v", r.world.order)
	}
}

// The graph of a workflow is built once for an accepted rollback, unless what its plan depends
// on changes while its requester is admitted: then it is built again, and decides.
func TestDraftedOnce(t *testing.T) {
	wait := func(d time.Duration) func(*rig) { return func(*rig) { <-time.After(d) } }
	for name, test := range map[string]struct {
		meanwhile func(r *rig)
		graphs    int64
		ends      string
		err       error
	}{
		"nothing":                   {func(*rig) {}, 1, "c2=completed c1=completed", nil},
		"later":                     {wait(time.Hour), 1, "c2=completed c1=completed", nil},
		"recorded":                  {func(r *rig) { r.made("3", checkpoint.Restore, execution.Completed, "2") }, 2, "c3=completed c2=completed c1=completed", nil},
		"undone":                    {func(r *rig) { r.run(request("c2", rollback.Single)) }, 3, "c2=completed c1=completed", nil},
		"unknown":                   {func(r *rig) { r.ledger.versionErr = errDead }, 2, "c2=completed c1=completed", nil},
		"altered":                   {func(r *rig) { r.ledger.tamper["c1"] = true }, 2, "", checkpoint.ErrTampered},
		"altered beside the target": {func(r *rig) { r.ledger.tamper["c2"] = true }, 2, "c2=failed(checkpoint-tampered) c1=completed", nil},
		"expired":                   {wait(ttl), 2, "", checkpoint.ErrExpired},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				r.made("2", checkpoint.Restore, execution.Completed, "1")
				r.start()
				graphs, asked := r.ledger.reads.Load(), 0
				b, err := r.Execute(ctx, request("c1", rollback.SubDAG), func(_ context.Context, refused bool) ([]store.Write, error) {
					if asked++; refused {
						t.Error("refused before anything has changed")
					}
					test.meanwhile(r)
					return nil, nil
				})
				if !errors.Is(err, test.err) || asked != 1 {
					t.Fatalf("%v, want %v; asked %d times", err, test.err, asked)
				}
				if got := r.ledger.reads.Load() - graphs; got != test.graphs {
					t.Errorf("%d graphs were built, want %d", got, test.graphs)
				}
				if test.err == nil {
					if b = r.wait(b.ID); ends(b) != test.ends {
						t.Errorf("%s, want %s", ends(b), test.ends)
					}
				}
				stop(r.Coordinator)
			})
		})
	}
}

// Who is not admitted gets that error, and nothing is recorded: not of a rollback that would be accepted, nor of one
// whose target does not verify.
func TestNotAdmitted(t *testing.T) {
	for _, altered := range []bool{false, true} {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		r.ledger.tamper["c1"] = altered
		before := r.st.commits
		_, err := r.Execute(ctx, request("c1", rollback.Single), func(_ context.Context, refused bool) ([]store.Write, error) {
			if refused != altered {
				t.Errorf("refused: %t", refused)
			}
			return nil, errDead
		})
		if !errors.Is(err, errDead) || r.st.commits != before {
			t.Errorf("%v, %d commits", err, r.st.commits-before)
		}
	}
}

// P5: the same answer 24 hours later and after a restart, and nothing runs again; it is
// forgotten when it has been kept long enough.
func TestP5SameAnswerADayLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		q := request("c1", rollback.Single)
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
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.made("3", checkpoint.Restore, execution.Completed, "2")
	r.made("9", checkpoint.Restore, execution.Completed)
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
	wide := request("c1", rollback.SubDAG)
	r.execute(wide)
	<-asked
	for _, q := range []rollback.Request{request("c2", rollback.Single), request("c2", rollback.SubDAG), request("c1", rollback.SubDAG)} {
		var lost *rollback.ConflictError
		if _, err := r.Execute(ctx, q, nil); !errors.As(err, &lost) || lost.Winner != wide.ID {
			t.Errorf("%s of %s: %v", q.Scope, q.Checkpoint, err)
		}
		if _, err := r.Plan(ctx, q); !errors.As(err, &lost) {
			t.Errorf("planned: %v", err)
		}
	}
	// P5: it does not conflict with itself, for those who ask for it at the same moment.
	if _, err := r.Plan(ctx, wide); err != nil {
		t.Errorf("planned again: %v", err)
	}
	wantEnd(t, r.run(request("c9", rollback.Single)), rollback.Completed, "c9=completed")
	release()
	wantEnd(t, r.wait(wide.ID), rollback.Completed, "c3=completed c2=completed c1=completed")
	wantEnd(t, r.run(request("c2", rollback.SubDAG)), rollback.Completed, "c3=completed c2=completed")
}

// A narrower rollback that executes finishes its level, then joins
// the wider one; its own id answers with the wider one's result, after a restart too.
func TestNarrowerJoinsWider(t *testing.T) {
	for _, again := range []bool{false, true} {
		r, asked, release := branches(t)
		r.start()
		narrow, wide := request("c2", rollback.SubDAG), request("c1", rollback.FullWorkflow)
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
		if n := r.recorded()["complete "+narrow.ID+" completed"]; n != 0 {
			t.Errorf("the narrower one recorded %d times that it is complete", n)
		}
	}
}

// Cascade 4.3.4: a wider one that lacks a part of what has begun waits for its end.
func TestWiderOneQueues(t *testing.T) {
	r, asked, release := branches(t)
	r.group("g", "c3", "c9")
	r.start()
	group, wide := request("g", rollback.Single), request("c3", rollback.SubDAG)
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
			r.made(fmt.Sprint(i), checkpoint.Restore, execution.Completed, parents...)
		}
		r.start()
		var wg sync.WaitGroup
		var mu sync.Mutex
		accepted := map[string]bool{}
		var winners []string
		for i := range 24 {
			q := request(fmt.Sprint("c", i%6), []rollback.Scope{rollback.Single, rollback.SubDAG, rollback.FullWorkflow}[i%3])
			wg.Add(1)
			go func() {
				defer wg.Done()
				_, err := r.Execute(ctx, q, nil)
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

// Cascade 4.3.4: whoever meets a rollback between its acceptance and the answer to that shares its run. A second run
// would undo beside the first one, and nobody would be told of its end.
func TestCascade434MetBeforeTheAnswer(t *testing.T) {
	for _, over := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, execution.Completed)
			r.made("2", checkpoint.Restore, execution.Completed, "1")
			asked, release := make(chan struct{}, 9), make(chan struct{})
			r.undoer.seen = func(rollback.Task) { asked <- struct{}{}; <-release }
			if over {
				close(release)
			}
			r.start()
			q := request("c1", rollback.SubDAG)
			met := func(batch []store.Write) {
				if accepting(batch) && over {
					wantEnd(t, r.wait(q.ID), rollback.Completed, "c2=completed c1=completed")
				} else if accepting(batch) {
					short, cancel := context.WithTimeout(ctx, time.Second)
					defer cancel()
					_, _ = r.Wait(short, q.ID)
					<-asked
				}
			}
			r.st.landed.Store(&met)
			r.execute(q)
			if !over {
				synctest.Wait()
				close(release)
			}
			wantEnd(t, r.wait(q.ID), rollback.Completed, "c2=completed c1=completed")
			if n := len(asked); over && n != 2 || !over && n != 1 {
				t.Errorf("over %t: asked %d times", over, n)
			}
			for id, keys := range r.world.effects {
				if len(keys) != 1 {
					t.Errorf("%s undone under %v", id, keys)
				}
			}
		})
	}
}

// ATD, "Rollback Timeout and Escalation": not done within half of the ttl, it is recorded once
// and escalated; what was not begun is left to a person, and the end says what is known.
func TestATDTimeout(t *testing.T) {
	for name, down := range map[string]bool{"in time": false, "while the process was down": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				r.made("2", checkpoint.Restore, execution.Completed, "1")
				r.made("3", checkpoint.Restore, execution.Completed, "2")
				r.start()
				r.undoer.block = true
				r.world.answers["c3"] = rollback.Result{Reason: rollback.ReasonTimeout}
				q := request("c1", rollback.SubDAG)
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
				if !b.TimedOut || r.recorded()["error "+q.ID+" c1 timeout"] != 1 || r.escalations()[hitl.CauseRollbackTimeout] != 1 {
					t.Errorf("timed out %v; %v; %v", b.TimedOut, r.recorded(), r.escalations())
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
// timeout is recorded all the same.
func TestATDTimeoutOfTheLastTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		r.world.answers["c1"] = rollback.Result{Reason: rollback.ReasonTimeout}
		q := request("c1", rollback.Single)
		b := r.run(q)
		wantEnd(t, b, rollback.Escalated, "c1=escalated(timeout)")
		if !b.Finished.Before(b.Due) || !b.TimedOut || r.recorded()["error "+q.ID+" c1 timeout"] != 1 || r.escalations()[hitl.CauseRollbackTimeout] != 1 {
			t.Errorf("%+v; %v; %v", b, r.recorded(), r.escalations())
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
		q := request("c1", rollback.Single)
		r.execute(q)
		b := r.wait(q.ID)
		wantEnd(t, b, rollback.Escalated, "c1=escalated(timeout)")
		r.settle("1", e, h, execution.Completed)
		r.wantCallStatus("1", execution.ResultUnavailable)
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
		r.made(fmt.Sprint(i), checkpoint.Restore, execution.Completed, names...)
	}
	r.start()
	r.st.mu.Lock()
	r.st.commits = 0
	r.st.mu.Unlock()
	b := r.run(request("c0", rollback.SubDAG))
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
	if reads := r.ledger.tokenReads.Load(); reads > 3*n {
		t.Errorf("%d reads of tokens", reads)
	}
}

// P5 and cascade 4.3.4: rollbacks that overlap in every order, over processes that die at
// any commit, all come to their end; each checkpoint is undone once, and nothing of them
// stands for ever.
func TestP5OverlapsAndDeaths(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 34))
			r := overlapping(t)
			asked := anyOf(rnd)
			for range 12 {
				r.st.mu.Lock()
				r.st.commits, r.st.dies, r.st.lands = 0, rnd.IntN(25), rnd.IntN(2) == 0
				r.st.mu.Unlock()
				if err := r.Start(ctx); err != nil && !r.st.gone() {
					t.Fatal(err)
				}
				for _, i := range rnd.Perm(len(asked))[:3] {
					var lost *rollback.ConflictError
					if _, err := r.Execute(ctx, asked[i], nil); err != nil && !errors.As(err, &lost) && !r.st.gone() {
						t.Fatal(err)
					}
					if rnd.IntN(2) == 0 {
						synctest.Wait()
					}
				}
				synctest.Wait()
				stop(r.Coordinator)
				r.open()
			}
			r.start()
			time.Sleep(time.Minute)
			synctest.Wait()
			r.allCompleted(seed)
			stop(r.Coordinator)
		})
		if t.Failed() {
			return
		}
	}
}

// The same where the store refuses commits, or takes them and the answer is lost.
func TestP5OverlapsOverAnUnsureStore(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 43))
			r := overlapping(t)
			h := r.hook()
			var mu sync.Mutex
			sometimes := func() bool {
				mu.Lock()
				defer mu.Unlock()
				return rnd.IntN(6) == 0
			}
			h.full, h.unknown = sometimes, func([]store.Write) bool { return sometimes() }
			r.start()
			for _, q := range anyOf(rand.New(rand.NewPCG(seed, 44))) {
				for range 3 {
					var lost *rollback.ConflictError
					if _, err := r.Execute(ctx, q, nil); err == nil || errors.As(err, &lost) {
						break
					}
				}
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			r.allCompleted(seed)
			stop(r.Coordinator)
		})
		if t.Failed() {
			return
		}
	}
}

// overlapping is a workflow in which many rollbacks conflict.
func overlapping(t *testing.T) *rig {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.made("3", checkpoint.Compensate, execution.Completed, "2")
	r.made("4", checkpoint.Compensate, execution.Completed, "2")
	r.made("5", checkpoint.Restore, execution.Released, "1")
	r.group("g", "c2", "c3")
	return r
}

// anyOf are rollbacks of it.
func anyOf(rnd *rand.Rand) (asked []rollback.Request) {
	for range 6 {
		target := []string{"c1", "c2", "c3", "c4", "c5", "g"}[rnd.IntN(6)]
		q := request(target, []rollback.Scope{rollback.Single, rollback.SubDAG, rollback.FullWorkflow}[rnd.IntN(3)])
		q.Operator = "op"
		asked = append(asked, q)
	}
	return asked
}

// allCompleted wants that all have come to their end, once.
func (r *rig) allCompleted(seed uint64) {
	t := r.t
	t.Helper()
	page, err := r.List(ctx, "", 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range page.Rollbacks {
		if whole, err := r.Get(ctx, b.ID); err != nil || whole.State != rollback.Finished || whole.Status != rollback.Completed {
			t.Errorf("seed %d: %s of %s: %v, %v", seed, b.Scope, b.Checkpoint, err, fmt.Sprintf("%+v", whole))
		}
	}
	for id, keys := range r.world.effects {
		if len(keys) != 1 {
			t.Errorf("seed %d: %s was undone under %v", seed, id, keys)
		}
	}
	if n := r.unexpired(); n > 0 {
		t.Errorf("seed %d: %d records stand for ever", seed, n)
	}
}
