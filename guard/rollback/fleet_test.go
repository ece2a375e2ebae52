package rollback_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
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

// join is another gateway over the store of r, as a member. Nothing is started.
func (r *rig) join(node string) *rig {
	r.t.Helper()
	other := &rig{t: r.t, mem: r.mem, ring: r.ring, world: r.world, ledger: r.ledger, node: node}
	other.open()
	return other
}

// leaves ends a member: it stops, and is removed.
func (r *rig) leaves() {
	stop(r.Coordinator)
	_ = r.guard.Close(ctx) // the store may be dead
	r.member.Remove()
}

// pair are two gateways over one store, both started, with calls 1 and 2 of workflow w, where 2 follows from 1, and
// 9, which does not.
func pair(t testing.TB) (a, b *rig) {
	r := newRig(t)
	a, b = r.join("a"), r.join("b")
	a.made("1", checkpoint.Restore, execution.Completed)
	a.made("2", checkpoint.Restore, execution.Completed, "1")
	a.made("9", checkpoint.Restore, execution.Completed)
	a.start()
	b.start()
	return a, b
}

// admits is the admission of a call at a gateway.
func (r *rig) admits(parents ...string) *rollback.Admission {
	r.t.Helper()
	in, err := r.Enter(ctx, "w", ids(parents...))
	if err != nil {
		r.t.Fatal(err)
	}
	return in
}

// claims makes the claim of a call that was admitted, which must be a new one.
func (r *rig) claims(id string, in *rollback.Admission) error {
	r.t.Helper()
	defer in.Leave()
	e, err := r.guard.Claim(ctx, r.call(id), execution.Finding{}, store.Bind(nil, in.Fence()))
	if err == nil {
		err = e.Settle(ctx, execution.Outcome{Verdict: execution.Completed})
	}
	return err
}

// ADR 0133: a rollback that was accepted at one gateway holds up calls at the others from its commit on, and as
// long as it is under way; what a call was admitted to before is not claimed any more.
func TestFleetHoldsUpCallsFromTheCommitOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		hold := make(chan struct{})
		a.world.hold["c2"] = hold
		before, other := b.admits("2"), b.admits("9")
		if err := b.claims("3", other); err != nil {
			t.Fatalf("nothing is in the way: %v", err)
		}
		q := request("c1", rollback.SubDAG)
		a.execute(q)
		if err := b.claims("4", before); !errors.Is(err, store.ErrFenced) {
			t.Errorf("claimed behind the rollback: %v", err)
		}
		for _, r := range []*rig{a, b} {
			if got := r.enters("w", "2"); got == nil || got.Rollback != q.ID || got.Stopped {
				t.Errorf("%s: %v", r.node, got)
			}
			if got := r.enters("w", "9"); got != nil {
				t.Errorf("%s, beside it: %v", r.node, got)
			}
			if got := r.enters("another", "2"); got != nil {
				t.Errorf("%s, elsewhere: %v", r.node, got)
			}
		}
		if err := b.claims("4", b.admits("9")); err != nil {
			t.Errorf("beside it: %v", err)
		}
		close(hold)
		if end := b.wait(q.ID); end.Status != rollback.Completed || ends(end) != "c2=completed c1=completed" {
			t.Errorf("%+v", end)
		}
		synctest.Wait()
		for _, r := range []*rig{a, b} {
			if got := r.enters("w", "2"); got != nil {
				t.Errorf("%s, at its end: %v", r.node, got)
			}
			stop(r.Coordinator)
		}
	})
}

// While it is decided at one gateway, new calls of the workflow wait at all of them; if that gateway is removed in
// the middle they go on.
func TestFleetWaitsForADecision(t *testing.T) {
	for _, removed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			a, b := pair(t)
			deciding, hold := make(chan struct{}), make(chan struct{})
			a.world.hold["c2"] = hold
			a.ledger.beforeRecord = func(words []string) {
				if words[0] == "start" {
					<-deciding
				}
			}
			inside := b.admits("2")
			q := request("c1", rollback.SubDAG)
			var failed error
			asked := make(chan struct{})
			go func() { defer close(asked); _, failed = a.Execute(ctx, q, nil) }()
			synctest.Wait()
			if err := b.claims("3", inside); !errors.Is(err, store.ErrFenced) {
				t.Errorf("claimed while it is decided: %v", err)
			}
			brief, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if _, err := b.Enter(brief, "w", ids("9")); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("it did not wait: %v", err)
			}
			var blocked *rollback.BlockedError
			came := false
			go func() { blocked, came = b.enters("w", "2"), true }()
			synctest.Wait()
			if came {
				t.Error("it did not wait")
			}
			if removed {
				a.member.Remove()
				synctest.Wait()
				if !came || blocked != nil {
					t.Errorf("behind a gateway that is gone: came %t, %v", came, blocked)
				}
				if err := b.claims("4", b.admits("2")); err != nil {
					t.Errorf("behind a gateway that is gone: %v", err)
				}
			}
			close(deciding)
			<-asked
			synctest.Wait()
			if removed != (failed != nil) || !came || !removed && (blocked == nil || blocked.Rollback != q.ID) {
				t.Errorf("removed %t: %v; came %t, %v", removed, failed, came, blocked)
			}
			close(hold)
			if removed { // and nothing of it is there
				if _, err := b.Get(ctx, q.ID); !errors.Is(err, rollback.ErrUnknown) {
					t.Error(err)
				}
			} else if end := b.wait(q.ID); end.Status != rollback.Completed {
				t.Errorf("%+v", end)
			}
			stop(a.Coordinator)
			stop(b.Coordinator)
		})
	}
}

// A gateway that is gone itself does not wait for a decision: nothing that it admits could be claimed.
func TestFleetRemovedWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t)
		deciding := make(chan struct{})
		a.ledger.beforeRecord = func(words []string) {
			if words[0] == "start" {
				<-deciding
			}
		}
		asked := make(chan error)
		go func() {
			_, err := a.Execute(ctx, request("c1", rollback.SubDAG), nil)
			asked <- err
		}()
		synctest.Wait()
		var refused error
		go func() { _, refused = b.Enter(ctx, "w", ids("9")) }()
		synctest.Wait()
		if refused != nil {
			t.Fatalf("it did not wait: %v", refused)
		}
		b.member.Remove()
		synctest.Wait()
		if !errors.Is(refused, store.ErrUnhealthy) {
			t.Errorf("%v", refused)
		}
		close(deciding)
		if err := <-asked; err != nil {
			t.Error(err)
		}
		stop(a.Coordinator)
		stop(b.Coordinator)
	})
}

// Calls of many agents go on at two gateways while a rollback begins at one of them: what has begun is undone,
// and nothing else has begun.
func TestFleetNothingBeginsBehindAPlan(t *testing.T) {
	for range 10 {
		r := newRig(t)
		a, b := r.join("a"), r.join("b")
		a.made("0", checkpoint.Restore, execution.Completed)
		a.start()
		b.start()
		hold := make(chan struct{})
		r.world.hold["c0"] = hold
		var wg sync.WaitGroup
		begun, fenced := make(chan string, 10_000), make(chan struct{}, 10_000)
		for i := range 8 {
			at := []*rig{a, b}[i%2]
			wg.Go(func() {
				for n, parent := 0, "0"; n < 60; {
					in, err := at.Enter(ctx, "w", ids(parent))
					if blocked := (*rollback.BlockedError)(nil); errors.As(err, &blocked) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					id := fmt.Sprint(i, "-", n)
					r.ledger.mu.Lock()
					at.fence = in.Fence()
					if at.begins(id, parent) {
						parent = id
						n++
						begun <- at.node
					} else {
						fenced <- struct{}{}
					}
					r.ledger.mu.Unlock()
					in.Leave()
				}
			})
		}
		for nodes := map[string]int{}; nodes["a"] < 3 || nodes["b"] < 3; {
			nodes[<-begun]++
		}
		q := request("c0", rollback.SubDAG)
		b.execute(q)
		wg.Wait()
		close(hold)
		end := a.wait(q.ID)
		if end.Status != rollback.Completed || len(end.Steps) != len(r.ledger.tokens) || len(r.world.effects) != len(end.Steps) {
			t.Fatalf("%s, %d steps, %d undone, %d checkpoints, %d fenced", end.Status, len(end.Steps), len(r.world.effects), len(r.ledger.tokens), len(fenced))
		}
		stop(a.Coordinator)
		stop(b.Coordinator)
	}
}

// begins is made, for a call that was admitted. It reports whether the call has begun.
func (r *rig) begins(id, parent string) bool {
	r.t.Helper()
	c := r.call(id)
	p, err := r.checkpoints.Prepare(ctx, checkpoint.Snapshot{
		ID: "c" + id, Workflow: "w", Caller: r.guard.Caller(agent), Execution: c.Key, Action: "update", Way: checkpoint.Restore,
		Request: checkpoint.Request{Method: "PUT", Path: "/" + id},
	}, nil, checkpoint.Terms{TTL: ttl})
	if err != nil {
		r.t.Error(err)
		return false
	}
	e, err := r.guard.Claim(ctx, c, execution.Finding{}, store.Bind(p.Batch, r.fence))
	if errors.Is(err, store.ErrFenced) {
		return false
	}
	if err != nil {
		r.t.Error(err)
		return false
	}
	r.action(id, parent)
	cp := rollback.Checkpoint{Own: true, Sum: p.Sum(), Reversible: true, Parents: []string{id}}
	r.known("c"+id, CheckpointNode, rollback.InFlight, cp, id)
	r.settle(id, e, p.Handle(), execution.Completed)
	return true
}

// Cascade 4.1.3: a rollback of the whole workflow at one gateway ends it at all of them, also those that open
// later, for as long as it is kept, and also where that gateway has stopped since.
func TestFleetStops(t *testing.T) {
	for _, alone := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, execution.Completed)
			at := r
			if !alone {
				at = r.join("a")
			}
			at.start()
			q := request("c1", rollback.FullWorkflow)
			at.run(q)
			synctest.Wait()
			if alone {
				stop(r.Coordinator)
			}
			b := r.join("b")
			if err := b.Load(ctx); err != nil {
				t.Fatal(err)
			}
			b.start()
			if got := b.enters("w"); got == nil || !got.Stopped || got.Rollback != q.ID {
				t.Errorf("alone %t: %v", alone, got)
			}
			if got := b.enters("another"); got != nil {
				t.Errorf("another: %v", got)
			}
			time.Sleep(keep - time.Hour)
			if got := b.enters("w"); got == nil {
				t.Error("forgotten too soon")
			}
			time.Sleep(2 * time.Hour)
			if got := b.enters("w"); got != nil {
				t.Errorf("not forgotten: %v", got)
			}
			stop(at.Coordinator)
			stop(b.Coordinator)
		})
	}
}

// P5: one id asked for at two gateways by many at once runs once, and all get the same.
func TestFleetOneExecutionOfManyRequests(t *testing.T) {
	a, b := pair(t)
	q := request("c1", rollback.SubDAG)
	var wg sync.WaitGroup
	for i := range 20 {
		at := []*rig{a, b}[i%2]
		wg.Go(func() {
			if _, err := at.Execute(ctx, q, nil); err != nil {
				t.Error(err)
			} else if end := at.wait(q.ID); ends(end) != "c2=completed c1=completed" {
				t.Error(ends(end))
			}
		})
	}
	wg.Wait()
	for words, n := range a.recorded() {
		if n != 1 {
			t.Errorf("recorded %d times: %s", n, words)
		}
	}
	if len(a.world.order) != 2 {
		t.Errorf("undone %v", a.world.order)
	}
}

// A gateway that opens leaves alone what a living one carries out, shows it, and takes it over once that is gone.
func TestFleetTakesOverWhatIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		a := r.join("a")
		a.made("1", checkpoint.Restore, execution.Completed)
		a.made("2", checkpoint.Restore, execution.Completed, "1")
		a.start()
		a.undoer.block = true // it is at the undo of c2 until it stops
		q := request("c1", rollback.SubDAG)
		a.execute(q)
		synctest.Wait()
		b := r.join("b")
		b.start()
		synctest.Wait()
		if r.world.sends != 0 {
			t.Fatalf("%d requests beside the gateway that carries it out", r.world.sends)
		}
		if got, err := b.Get(ctx, q.ID); err != nil || got.State != rollback.Executing || got.Steps[0].State != rollback.StepRunning {
			t.Errorf("%+v, %v", got, err)
		}
		if got := b.execute(q); got.State != rollback.Executing {
			t.Errorf("asked again: %+v", got)
		}
		a.member.Remove() // it does not know, and is at the undo still
		end := b.wait(q.ID)
		wantEnd(t, end, rollback.Completed, "c2=completed c1=completed")
		stop(a.Coordinator)
		synctest.Wait()
		if again, err := b.Get(ctx, q.ID); err != nil || again.Complete != end.Complete {
			t.Errorf("%+v, %v", again, err)
		}
		stop(b.Coordinator)
	})
}

// P5: whatever commit of a gateway is its last, whether or not it landed, another one carries the rollback to its
// end, and leaves behind what an undisturbed one does: no step undone twice, none lost.
func TestFleetRemovedBetweenAnyTwoCommits(t *testing.T) {
	r := mixed(t)
	a := r.join("a")
	a.start()
	a.st.commits = 0
	want := a.through(request("g", rollback.SubDAG))
	all := a.st.commits
	if !strings.Contains(want, mixedEnds) || all < 20 {
		t.Fatalf("undisturbed, with %d commits: %s", all, want)
	}
	for dies := range all {
		for _, lands := range []bool{false, true} {
			t.Run(fmt.Sprint(dies, lands), func(t *testing.T) {
				r := mixed(t)
				a, b := r.join("a"), r.join("b")
				a.start()
				b.start()
				a.st.mu.Lock()
				a.st.commits, a.st.dies, a.st.lands = 0, dies, lands
				a.st.mu.Unlock()
				q := request("g", rollback.SubDAG)
				if _, err := a.Execute(ctx, q, nil); err != nil && !a.st.gone() {
					t.Fatal(err)
				}
				<-a.st.dead
				a.member.Remove()
				if _, err := b.Execute(ctx, q, nil); err != nil { // the client asks again, at the other one
					t.Fatal(err)
				}
				b.wait(q.ID)
				for b.unexpired() > 0 { // what comes after the end
					<-time.After(time.Millisecond)
				}
				stop(a.Coordinator)
				if err := b.Stop(ctx); err != nil {
					t.Fatal(err)
				}
				if got := b.leftBehind(q); got != want {
					t.Errorf("got\n%s\nwant\n%s", got, want)
				}
			})
		}
	}
}

// P5 and cascade 4.3.4: rollbacks that overlap in every order at two gateways, which are removed at any commit
// and come back, all come to their end; each checkpoint is undone once, and nothing of them stands for ever.
func TestFleetOverlapsAndRemovals(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 133))
			r := overlapping(t)
			all := []*rig{r.join("a"), r.join("b")}
			asked := anyOf(rnd)
			for range 12 {
				for _, at := range all {
					at.st.mu.Lock()
					at.st.commits, at.st.dies, at.st.lands = 0, rnd.IntN(60), rnd.IntN(2) == 0
					at.st.mu.Unlock()
					if err := at.Start(ctx); err != nil && !at.st.gone() {
						t.Fatal(err)
					}
				}
				for _, i := range rnd.Perm(len(asked))[:4] {
					var lost *rollback.ConflictError
					at := all[rnd.IntN(2)]
					brief, cancel := context.WithTimeout(ctx, time.Second) // another one may die that decides
					if _, err := at.Execute(brief, asked[i], nil); err != nil && !errors.As(err, &lost) && !at.st.gone() && brief.Err() == nil {
						t.Fatal(err)
					}
					cancel()
					if rnd.IntN(2) == 0 {
						synctest.Wait()
					}
				}
				synctest.Wait()
				for _, at := range all {
					if at.st.gone() {
						at.leaves()
						at.open()
					}
				}
			}
			for _, at := range all {
				at.leaves()
				at.open()
				at.start()
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			all[1].allCompleted(seed)
			for _, at := range all {
				stop(at.Coordinator)
			}
		})
		if t.Failed() {
			return
		}
	}
}

// What another member brings to its end, while this one looks at what a member has left that is gone, keeps its expiry.
func TestFleetTakesUpWhatHasEnded(t *testing.T) {
	for dies := range 12 {
		for nth := int64(1); nth < 6; nth++ {
			synctest.Test(t, func(t *testing.T) {
				r, asked, release := branches(t)
				stop(r.Coordinator)
				a := r.join("a")
				a.undoer.asked = asked
				a.start()
				narrow, wide := request("c2", rollback.SubDAG), request("c1", rollback.FullWorkflow)
				wide.Operator = "ada"
				a.execute(narrow)
				<-asked
				a.execute(wide)
				a.st.mu.Lock()
				a.st.commits, a.st.dies = 0, dies+1
				a.st.mu.Unlock()
				release()
				synctest.Wait()
				a.leaves()
				b := r.join("b")
				var heads atomic.Int64
				read := func(key []byte) {
					if bytes.HasPrefix(key, []byte("uh")) && heads.Add(1) == nth {
						c := r.join("c")
						c.start()
						synctest.Wait()
						c.leaves()
					}
				}
				b.st.read.Store(&read)
				if again, err := b.Execute(ctx, narrow, nil); err != nil || again.ID != narrow.ID {
					t.Errorf("%+v, %v", again, err)
				}
				b.leaves()
				c := r.join("c")
				c.start()
				synctest.Wait()
				c.allCompleted(uint64(dies))
				stop(c.Coordinator)
			})
		}
	}
}

// Cascade 4.3.4: a narrower rollback at one gateway gives way to a wider one at another, and answers with its
// result at both; a conflicting one is refused.
func TestFleetNarrowerJoinsWider(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, release := branches(t)
		stop(r.Coordinator)
		a, b := r.join("a"), r.join("b")
		asked := make(chan string, 100)
		a.undoer.asked = asked
		a.start()
		b.start()
		narrow, wide := request("c2", rollback.SubDAG), request("c1", rollback.FullWorkflow)
		wide.Operator = "ada"
		a.execute(narrow)
		<-asked
		var lost *rollback.ConflictError
		if _, err := b.Execute(ctx, request("c2", rollback.Single), nil); !errors.As(err, &lost) || lost.Winner != narrow.ID {
			t.Errorf("%v", err)
		}
		b.execute(wide)
		synctest.Wait()
		release()
		const steps = "c9=completed c3=completed c2=completed c1=completed"
		for _, at := range []*rig{a, b} {
			wantEnd(t, at.wait(narrow.ID), rollback.Completed, steps)
			wantEnd(t, at.wait(wide.ID), rollback.Completed, steps)
		}
		for id, keys := range r.world.effects {
			if len(keys) != 1 {
				t.Errorf("%s undone under %v", id, keys)
			}
		}
		if got := r.world.effects["c2"]; len(got) != 1 || got[0] != wide.ID+"c2" {
			t.Errorf("the narrower one went on after its level: c2 is undone under %v", got)
		}
		stop(a.Coordinator)
		stop(b.Coordinator)
	})
}

// Cascade 4.3.2: what was prepared at one gateway holds calls at all, and is carried out, released, or ends by itself
// at another one.
func TestFleetReservations(t *testing.T) {
	for _, name := range []string{"executed", "released", "expired"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := pair(t)
				before := b.admits("2")
				q := request("c1", rollback.SubDAG)
				p, err := a.Prepare(ctx, q)
				if err == nil {
					p, err = a.Reserve(ctx, p, time.Minute)
				}
				if err != nil || p.Rollback.Until.IsZero() {
					t.Fatalf("%+v, %v", p, err)
				}
				if err := b.claims("3", before); !errors.Is(err, store.ErrFenced) {
					t.Errorf("claimed behind it: %v", err)
				}
				for _, at := range []*rig{a, b} {
					if got := at.enters("w", "2"); got == nil || got.Rollback != q.ID {
						t.Errorf("%s: %v", at.node, got)
					}
				}
				again, err := b.Prepare(ctx, q)
				if err != nil || !again.Rollback.Until.Equal(p.Rollback.Until) {
					t.Errorf("prepared again: %+v, %v", again, err)
				}
				switch name {
				case "executed":
					b.run(q)
				case "released":
					if err := b.Release(ctx, q); err != nil {
						t.Error(err)
					}
				default:
					time.Sleep(time.Hour)
				}
				synctest.Wait()
				for _, at := range []*rig{a, b} {
					if got := at.enters("w", "2"); got != nil {
						t.Errorf("%s, after its end: %v", at.node, got)
					}
				}
				stop(a.Coordinator)
				stop(b.Coordinator)
			})
		})
	}
}

// A failure is handled by the gateway that has recorded it; by another one once that is gone.
func TestFleetFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.onError = true
		a, b := r.join("a"), r.join("b")
		a.onError = true
		a.made("1", checkpoint.Restore, execution.Completed)
		b.start()
		batch := a.Failed(rollback.Failure{Checkpoint: "c1", By: gateway}) // it is not started, and does not come to it
		if err := batch.Commit(ctx, a.member); err != nil {
			t.Fatal(err)
		}
		c := r.join("c")
		c.start()
		synctest.Wait()
		if _, err := b.Get(ctx, b.RollbackOf("c1")); !errors.Is(err, rollback.ErrUnknown) {
			t.Errorf("asked for beside a living gateway: %v", err)
		}
		a.leaves()
		time.Sleep(time.Second)
		synctest.Wait()
		wantEnd(t, b.wait(b.RollbackOf("c1")), rollback.Completed, "c1=completed")
		if len(r.world.order) != 1 {
			t.Errorf("undone %v", r.world.order)
		}
		left := slices.Collect(func(yield func(string) bool) {
			for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("ue"))) {
				if err != nil || !yield(string(entry.Key)) {
					return
				}
			}
		})
		if len(left) > 0 {
			t.Errorf("%d failures are left", len(left))
		}
		stop(b.Coordinator)
		stop(c.Coordinator)
	})
}
