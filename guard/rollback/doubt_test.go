package rollback_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
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
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// hooked is a store in which something happens behind a read, and that may not say what
// became of a commit.
type hooked struct {
	store.Store
	mu      sync.Mutex
	read    func(key []byte)               // after a Get
	unknown func(batch []store.Write) bool // a commit that lands, and the answer is lost
	full    func() bool                    // a commit that does not land; set before the start
	fails   func(key []byte) bool          // a Get that is not answered; set before the start
}

func (h *hooked) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if h.fails != nil && h.fails(key) {
		return store.Entry{}, store.ErrUnavailable
	}
	entry, err := h.Store.Get(ctx, key)
	h.mu.Lock()
	read := h.read
	h.mu.Unlock()
	if read != nil {
		read(key)
	}
	return entry, err
}

func (h *hooked) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	h.mu.Lock()
	unknown := h.unknown
	h.mu.Unlock()
	if h.full != nil && h.full() {
		return 0, store.ErrFull
	}
	version, err := h.Store.Commit(ctx, batch...)
	if err == nil && unknown != nil && unknown(batch) {
		return 0, store.ErrUnknown
	}
	return version, err
}

func (h *hooked) set(read func(key []byte), unknown func(batch []store.Write) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.read, h.unknown = read, unknown
}

func (r *rig) hook() *hooked {
	h := &hooked{Store: r.mem}
	r.st.Store = h
	return h
}

// P6: a call that ends between the read of its checkpoint and that at its execution is
// undone by what its answer has left, or is not undone at all if it never ran.
func TestP6CallEndsBetweenTwoLooks(t *testing.T) {
	for verdict, want := range map[execution.Verdict]string{
		execution.Completed: "c1=completed", execution.Released: "c1=completed(cancelled)",
	} {
		r := newRig(t)
		h := r.hook()
		e, handle := r.claimed("1", checkpoint.Compensate)
		q := request("c1", rollback.Single)
		r.execute(q)
		var once sync.Once
		h.set(func(key []byte) {
			if bytes.HasPrefix(key, []byte("ka")) { // where the result of a call stands
				once.Do(func() { r.settle("1", e, handle, verdict) })
			}
		}, nil)
		r.undoer.seen = func(task rollback.Task) {
			if task.Checkpoint.Result == nil {
				t.Errorf("verdict %d: to be undone without what the answer has left", verdict)
			}
		}
		r.start()
		wantEnd(t, r.wait(q.ID), rollback.Completed, want)
		if n := len(r.world.order); n != 0 && verdict == execution.Released {
			t.Errorf("an undo was sent of a call that never ran")
		}
	}
}

// accepting reports whether a batch accepts a rollback: it begins with a new head.
func accepting(batch []store.Write) bool {
	return bytes.HasPrefix(batch[0].Key, []byte("uh")) && batch[0].If.Holds(nil)
}

// P5: an acceptance that has landed goes on, also if the answer was lost, and
// holds nobody up who comes after it.
func TestP5AcceptedAndNotTold(t *testing.T) {
	for _, deaf := range []bool{false, true} { // the store does not answer at once afterwards
		synctest.Test(t, func(t *testing.T) {
			r, _, release := branches(t)
			defer release()
			r.undoer.asked = nil
			release()
			h := r.hook()
			r.start()
			h.set(nil, func(batch []store.Write) bool {
				if deaf {
					r.st.deaf.Store(true)
				}
				return accepting(batch)
			})
			narrow, wide := request("c3", rollback.Single), request("c1", rollback.SubDAG)
			_, err := r.Execute(ctx, narrow, nil)
			if deaf != (err != nil) {
				t.Fatalf("deaf %t: %v", deaf, err)
			}
			r.st.deaf.Store(false)
			h.set(nil, nil)
			r.execute(wide)
			within, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			for _, q := range []rollback.Request{narrow, wide} {
				b, err := r.Wait(within, q.ID)
				if err != nil {
					t.Fatalf("%s: %v", q.Scope, err)
				}
				if b.Status != rollback.Completed {
					t.Errorf("%s: %s", q.Scope, b.Status)
				}
			}
			stop(r.Coordinator)
		})
	}
}

// P5: where nobody could find out at once whether an acceptance has landed, it goes on as soon as the store is there
// again, and one that has not landed keeps no call from beginning.
func TestP5AcceptedAndNobodyAsksAgain(t *testing.T) {
	for _, scope := range []rollback.Scope{rollback.SubDAG, rollback.FullWorkflow} {
		for _, lands := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				h := r.hook()
				var accepts atomic.Bool
				h.full = func() bool {
					r.st.deaf.Store(accepts.Load())
					return accepts.Load() && !lands
				}
				r.start()
				h.set(nil, func([]store.Write) bool { return accepts.Load() })
				accepts.Store(true)
				q := request("c1", scope)
				q.Operator = "op"
				if _, err := r.Execute(ctx, q, nil); !errors.Is(err, rollback.ErrStore) {
					t.Fatal(err)
				}
				accepts.Store(false)
				time.Sleep(time.Minute)
				if r.enters("w", "1") == nil {
					t.Error("a call begins that may follow from what is undone")
				}
				r.st.deaf.Store(false)
				time.Sleep(time.Minute)
				synctest.Wait()
				if n := len(r.world.effects["c1"]); lands != (n == 1) {
					t.Errorf("%s, landed %t: undone %d times", scope, lands, n)
				}
				if blocked := r.enters("w", "1"); (blocked != nil) != (lands && scope == rollback.FullWorkflow) {
					t.Errorf("%s, landed %t: %v", scope, lands, blocked)
				}
				stop(r.Coordinator)
			})
		}
	}
}

// P5: an acceptance that has landed goes on where its plan cannot be read at once: the answer to it was lost, or another
// rollback has ended meanwhile, so that it may have, too.
func TestP5AcceptedAndNotRead(t *testing.T) {
	for _, lost := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, execution.Completed)
			r.made("2", checkpoint.Restore, execution.Completed)
			h := r.hook()
			var fail atomic.Bool
			h.fails = func(key []byte) bool { return bytes.HasPrefix(key, []byte("up")) && fail.CompareAndSwap(true, false) }
			release := make(chan struct{})
			r.undoer.seen = func(task rollback.Task) {
				if task.Step == "c1" {
					<-release
				}
			}
			r.start()
			r.execute(request("c1", rollback.Single))
			landed := func(batch []store.Write) {
				if accepting(batch) {
					close(release)
					time.Sleep(time.Minute)
					fail.Store(true)
				}
			}
			if lost {
				h.set(nil, func(batch []store.Write) bool {
					if accepting(batch) {
						fail.Store(true)
					}
					return accepting(batch)
				})
				close(release)
			} else {
				r.st.landed.Store(&landed)
			}
			if _, err := r.Execute(ctx, request("c2", rollback.Single), nil); !errors.Is(err, rollback.ErrStore) {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if n := len(r.world.effects["c2"]); n != 1 {
				t.Errorf("lost %t: undone %d times", lost, n)
			}
			stop(r.Coordinator)
		})
	}
}

// Sealing anew waits for those who have sealed, who wait for those who change the head.
func TestResealBesideAnAcceptance(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.made("3", checkpoint.Restore, execution.Completed, "1")
	at, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.ledger.beforeRecord = func(words []string) {
		if words[0] == "step" {
			once.Do(func() { close(at); <-goOn })
		}
	}
	r.start()
	narrow := request("c3", rollback.Single)
	r.execute(narrow)
	<-at // a step is sealed and not committed
	sealed, accepted := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(sealed)
		if _, err := r.Reseal(ctx); err != nil {
			t.Error(err)
		}
	}()
	wide := request("c1", rollback.SubDAG)
	go func() {
		defer close(accepted)
		r.execute(wide) // changes the head of the narrower one
	}()
	time.AfterFunc(200*time.Millisecond, func() { close(goOn) })
	for _, done := range []chan struct{}{accepted, sealed} {
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			panic("they wait for each other") // and so would the end of the test
		}
	}
	r.wait(wide.ID)
}

// unexpired counts what stands of rollbacks and would stand for ever.
func (r *rig) unexpired() int {
	r.t.Helper()
	n := 0
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("u"))) {
		if err != nil {
			r.t.Fatal(err)
		}
		if entry.Expires.IsZero() {
			n++
			r.t.Logf("%q stands for ever", entry.Key)
		}
	}
	return n
}

// One that joined one that joined another goes with that one in the end.
func TestJoinedOnesExpireTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, asked, release := branches(t)
		r.start()
		narrow, wide, widest := request("c3", rollback.Single), request("c2", rollback.SubDAG), request("c1", rollback.FullWorkflow)
		widest.Operator = "op"
		r.execute(narrow)
		<-asked
		r.execute(wide)
		r.execute(widest)
		release()
		wantEnd(t, r.wait(narrow.ID), rollback.Completed, "c9=completed c3=completed c2=completed c1=completed")
		r.wait(widest.ID)
		if err := r.Stop(ctx); err != nil {
			t.Fatal(err)
		}
		if n := r.unexpired(); n > 0 {
			t.Errorf("%d records stand for ever", n)
		}
	})
}

// The records of a finished rollback get their expiry in one commit, as far as they are few.
func TestExpiryIsOneCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.start()
		r.st.mu.Lock()
		r.st.commits = 0
		r.st.mu.Unlock()
		r.execute(request("c1", rollback.Single))
		synctest.Wait()
		stop(r.Coordinator)
		// The acceptance, the begin of the step, the undoer's two, the step's and the rollback's end.
		if r.st.commits != 6+1 || r.unexpired() > 0 {
			t.Errorf("%d commits, and %d records stand for ever", r.st.commits, r.unexpired())
		}
	})
}

// A process that ends while records get their expiry, and comes back when some of them
// are gone, takes up the others, and leaves nothing for ever.
func TestStartAfterAHalfExpiry(t *testing.T) {
	for dies := 1; ; dies++ {
		over := false
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, execution.Completed)
			r.made("2", checkpoint.Restore, execution.Completed)
			r.start()
			r.st.mu.Lock()
			r.st.commits, r.st.dies = 0, dies
			r.st.mu.Unlock()
			q := request("c1", rollback.Single)
			r.execute(q)
			synctest.Wait()
			over = !r.st.gone()
			stop(r.Coordinator)
			time.Sleep(keep + time.Hour)
			r.restart()
			synctest.Wait()
			if n := r.unexpired(); n > 0 {
				t.Errorf("died at commit %d: %d records stand for ever", dies, n)
			}
			stop(r.Coordinator)
		})
		if over {
			return
		}
	}
}

// Only a lost answer may be sent again, with the same
// key. Another rollback of a checkpoint whose undo is in doubt goes on under the key of
// the first one, also when that one has joined it and after a restart, and takes one of
// its own when it is known that the first had no effect.
func TestDoubtfulUndoGoesOnUnderItsKey(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Compensate, execution.Completed)
	r.start()
	answer := func(a rollback.Result) {
		r.world.mu.Lock()
		defer r.world.mu.Unlock()
		r.world.answers["c1"] = a
	}
	try := func(under string) string {
		t.Helper()
		q := request("c1", rollback.Single)
		var mu sync.Mutex
		tasks := map[string]bool{}
		r.undoer.seen = func(task rollback.Task) {
			mu.Lock()
			defer mu.Unlock()
			tasks[task.Rollback] = true
		}
		r.run(q)
		if under == "" {
			under = q.ID
		}
		if len(tasks) != 1 || !tasks[under] {
			t.Errorf("undone as %v, not as %s", tasks, under)
		}
		return q.ID
	}
	answer(rollback.Result{Unknown: true, Reason: rollback.ReasonLost})
	first := try("")
	try(first)
	r.restart()
	try(first)
	answer(rollback.Result{Reason: rollback.ReasonRefused, Status: 409})
	try(first)
	answer(rollback.Result{Unknown: true, Reason: rollback.ReasonTimeout})
	second := try("")
	answer(rollback.Result{Done: true, Status: 200})
	try(second)
}

// P6: of an undo that an earlier life has begun, and that cannot be asked for any more, it
// is not known what came of it.
func TestP6BegunAndNotReadableAnyMore(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	asked := make(chan string, 1)
	r.undoer.asked, r.undoer.block = asked, true
	r.start()
	q := request("c1", rollback.Single)
	r.execute(q)
	<-asked
	r.ledger.mu.Lock()
	r.ledger.tamper["c1"] = true
	r.ledger.mu.Unlock()
	r.restart()
	b := r.wait(q.ID)
	wantEnd(t, b, rollback.Failed, "c1=failed(checkpoint-tampered)")
	if !b.Unknown || !b.Steps[0].Unknown {
		t.Error("nothing is said of the undo that may have been sent")
	}
}

// The end of the process does not wait for an undo that is tried again and again until it
// is due.
func TestStopDoesNotWaitForAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Compensate, execution.Completed)
		asked := make(chan string, 1)
		r.undoer.asked, r.undoer.block = asked, true
		r.start()
		q := request("c1", rollback.Single)
		r.execute(q)
		<-asked
		began := time.Now()
		if err := r.Stop(ctx); err != nil || time.Since(began) > time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		r.open()
		r.start()
		wantEnd(t, r.wait(q.ID), rollback.Completed, "c1=completed")
		stop(r.Coordinator)
	})
}

// Cascade 4.3.4: a wide rollback is accepted however many narrow ones are under way. Those
// beyond what one commit can hold go on to their end first.
func TestManyGiveWay(t *testing.T) {
	r := newRig(t)
	hold := make(chan struct{})
	const many, bound = 300, 256
	for i := range many {
		id := fmt.Sprint(i)
		r.made(id, checkpoint.Compensate, execution.Completed)
		r.world.hold["c"+id] = hold
	}
	r.start()
	var narrow []string
	for i := range many {
		narrow = append(narrow, r.execute(request(fmt.Sprint("c", i), rollback.Single)).ID)
	}
	wide := request("c0", rollback.FullWorkflow)
	wide.Operator = "op"
	r.execute(wide)
	close(hold)
	if b := r.wait(wide.ID); b.Status != rollback.Completed || len(b.Steps) != many {
		t.Errorf("%s, with %d steps", b.Status, len(b.Steps))
	}
	joined := 0
	for _, id := range narrow {
		b := r.wait(id)
		if b.Status != rollback.Completed {
			t.Errorf("%s: %s", id, b.Status)
		}
		if b.Joined != "" {
			joined++
		}
	}
	if joined != bound {
		t.Errorf("%d gave way, and %d fit into a commit", joined, bound)
	}
	if len(r.world.order) != many {
		t.Errorf("undone %d times", len(r.world.order))
	}
}

// ATD, "Rollback Timeout and Escalation": an execution that cannot be read any more holds
// its rollback up until that is due, and not for ever.
func TestUnreadableExecutionEndsWhenDue(t *testing.T) {
	for name, spoil := range map[string]func(r *rig, record []byte) error{
		"altered": func(r *rig, record []byte) error {
			_, err := r.mem.Commit(ctx, store.Write{Key: record, Value: []byte("spoilt")})
			return err
		},
		"damaged": func(r *rig, record []byte) error {
			r.st.rotten.Store(string(record))
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) { endsWhenDue(t, spoil) })
	}
}

func endsWhenDue(t *testing.T, spoil func(r *rig, record []byte) error) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Compensate, execution.Completed)
		r.made("2", checkpoint.Compensate, execution.Completed, "1")
		q := request("c1", rollback.SubDAG)
		r.execute(q)
		key := r.call("2").Key
		if err := spoil(r, append([]byte{'x'}, key[:]...)); err != nil {
			t.Fatal(err)
		}
		r.start()
		b := r.wait(q.ID)
		wantEnd(t, b, rollback.Failed, "c2=failed(unavailable) c1=escalated(timeout)")
		if !b.Steps[0].Unknown || b.Steps[1].Unknown {
			t.Error("what is not known is not said")
		}
		stop(r.Coordinator)
	})
}

// P6: an answer that comes when the rollback is due already, and that the store does not take at once, is not lost.
func TestP6LateAnswerIsRecordedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Compensate, execution.Completed)
		hold := make(chan struct{})
		r.world.hold["c1"] = hold
		r.start()
		q := request("c1", rollback.Single)
		time.Sleep(time.Until(r.execute(q).Due) + time.Minute)
		r.st.refuses.Store(true)
		close(hold)
		time.Sleep(time.Minute)
		r.st.refuses.Store(false)
		wantEnd(t, r.wait(q.ID), rollback.Completed, "c1=completed")
		stop(r.Coordinator)
	})
}

// summaries are what people read.
func (r *rig) summaries() (all []string) {
	r.t.Helper()
	page, err := r.escalationStore.List(ctx, hitl.Filter{}, "", 1000)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range page.Escalations {
		all = append(all, e.Summary)
	}
	return all
}

// P6: what came of an undo is reported as far as it is known, to who asked and to people: no
// rollback claims that nothing was undone where nobody knows.
func TestP6EffectIsToldAsFarAsKnown(t *testing.T) {
	for name, c := range map[string]struct {
		answer  rollback.Result
		status  rollback.Status
		step    string
		mixed   bool
		doubt   bool
		nothing bool // it is reported that nothing was undone
	}{
		"no sense":           {rollback.Result{Reason: rollback.ReasonUnexpected, Status: 303, Unknown: true}, rollback.Escalated, "c1=escalated(unexpected)", false, true, false},
		"turned away":        {rollback.Result{Reason: rollback.ReasonUnexpected, Status: 405}, rollback.Failed, "c1=failed(unexpected)", false, false, true},
		"call in doubt":      {rollback.Result{Reason: rollback.ReasonUnfilled, Unknown: true}, rollback.Escalated, "c1=escalated(template)", false, true, false},
		"refused":            {rollback.Result{Reason: rollback.ReasonRefused, Status: 409}, rollback.Failed, "c1=failed(refused)", false, false, true},
		"refused afterwards": {rollback.Result{Reason: rollback.ReasonRefused, Status: 409, Unknown: true}, rollback.Failed, "c1=failed(refused)", false, true, false},
		"a part":             {rollback.Result{Reason: rollback.ReasonPartial, Status: 200, Unknown: true}, rollback.Partial, "c1=partial(partial)", true, true, false},
		"left to a person":   {rollback.Result{Reason: rollback.ReasonEscalated, Status: 200}, rollback.Escalated, "c1=escalated(escalated)", false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Delegate, execution.Completed)
			r.world.answers["c1"] = c.answer
			r.start()
			b := r.run(request("c1", rollback.Single))
			wantEnd(t, b, c.status, c.step)
			if b.Unknown != c.answer.Unknown || b.Mixed != c.mixed || b.Steps[0].Unknown != c.answer.Unknown {
				t.Errorf("unknown %v, mixed %v; of the step %v", b.Unknown, b.Mixed, b.Steps[0].Unknown)
			}
			m, err := r.checkpoints.Mark(ctx, "c1")
			if err != nil || (m.Doubt == b.ID) != c.doubt || (m.Doubt == "") == c.doubt {
				t.Errorf("the mark's doubt is %q, %v", m.Doubt, err)
			}
			notified := r.summaries()
			has := func(part string) bool {
				return slices.ContainsFunc(notified, func(s string) bool { return strings.Contains(strings.ToLower(s), part) })
			}
			if len(notified) == 0 || has("nothing was undone") != c.nothing || has("nobody knows") != c.answer.Unknown {
				t.Errorf("people are notified of %q", notified)
			}
		})
	}
}

// Another rollback says under whose key the first has sent its undo, and its own id.
func TestTakesUpADoubt(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Compensate, execution.Completed)
	r.world.answers["c1"] = rollback.Result{Reason: rollback.ReasonUnexpected, Status: 303, Unknown: true}
	r.start()
	seen := make(chan rollback.Task, 2)
	r.undoer.seen = func(task rollback.Task) { seen <- task }
	first, second := r.run(request("c1", rollback.Single)), r.run(request("c1", rollback.Single))
	if task := <-seen; task.Rollback != first.ID || task.Again != "" {
		t.Errorf("first %s as %s, again %q", first.ID, task.Rollback, task.Again)
	}
	if task := <-seen; task.Rollback != first.ID || task.Again != second.ID {
		t.Errorf("second %s as %s, again %q", second.ID, task.Rollback, task.Again)
	}
}

// A dry run does not promise an undo that nobody can send: the answer to the call was lost,
// and with it what the request needs of it.
func TestPlanSaysWhatACallInDoubtLacks(t *testing.T) {
	needs := rollback.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/refunds/{response.json./id}"}}
	enough := rollback.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/refunds/{execution.id}"}}
	for _, c := range []struct {
		spec rollback.Spec
		what rollback.What
	}{{needs, rollback.Escalate}, {enough, rollback.Undo}} {
		r := newRig(t)
		r.spec = c.spec.Encode()
		e, h := r.claimed("1", checkpoint.Compensate)
		if err := e.Settle(ctx, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost}); err != nil {
			t.Fatal(err)
		}
		_ = r.checkpoints.Release(h).Done(errDead) // nothing is recorded of the answer
		r.ledger.nodes[len(r.ledger.nodes)-1].State = rollback.Ran
		q := request("c1", rollback.Single)
		q.ID = ""
		b, err := r.Plan(ctx, q)
		if err != nil || b.Steps[0].What != c.what || b.Steps[0].Unknown != (c.what == rollback.Escalate) {
			t.Errorf("%+v, %v", b.Steps, err)
		}
	}
}

// A step that is irreversible says why, as far as its checkpoint knows, before and after.
func TestIrreversibleStepsSayWhy(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Irreversible, execution.Completed)
	q := request("c1", rollback.Single)
	b, err := r.Plan(ctx, q)
	if err != nil || b.Steps[0].Reason != "irreversible" || b.Steps[0].Cause != "declared" {
		t.Errorf("predicted: %+v, %v", b.Steps, err)
	}
	r.start()
	b = r.run(q)
	wantEnd(t, b, rollback.Escalated, "c1=escalated(irreversible)")
	r.restart()
	if b, err = r.Get(ctx, q.ID); err != nil || b.Steps[0].Cause != "declared" {
		t.Errorf("recorded: %+v, %v", b.Steps, err)
	}
}

// mixed is a workflow with every kind of step.
func mixed(t *testing.T) *rig {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Compensate, execution.Completed, "1")
	r.made("3", checkpoint.Irreversible, execution.Completed, "1")
	r.made("4", checkpoint.Restore, execution.Released, "1")
	r.made("5", checkpoint.Restore, execution.InDoubt, "2")
	r.made("6", checkpoint.Delegate, execution.Completed, "2")
	r.group("g", "c1", "c2")
	r.world.answers["c6"] = rollback.Result{Reason: rollback.ReasonRefused, Status: 409}
	return r
}

const mixedEnds = "c6=failed(refused) c5=completed c4=completed(cancelled) c3=escalated(irreversible) c2=completed c1=completed g=completed"

// leftBehind is all that a rollback leaves behind, but for times and ids of tokens.
func (r *rig) leftBehind(q rollback.Request) string {
	r.t.Helper()
	b, err := r.Get(ctx, q.ID)
	if err != nil {
		r.t.Fatal(err)
	}
	recorded := r.recorded()
	var evidence []string
	for words, n := range recorded {
		evidence = append(evidence, fmt.Sprint(n, " ", strings.ReplaceAll(words, q.ID, "")))
	}
	slices.Sort(evidence)
	var marks []string
	for _, s := range b.Steps {
		m, err := r.checkpoints.Mark(ctx, s.Checkpoint)
		if err != nil {
			r.t.Fatal(err)
		}
		marks = append(marks, fmt.Sprint(s.Checkpoint, " ", m.State, " begun ", !s.Begun.IsZero(), " after ", s.Earlier))
		if s.Begun.Before(b.Asked) && !s.Begun.IsZero() || s.Ended.Before(s.Begun) {
			r.t.Errorf("%s begun at %s and ended at %s", s.Checkpoint, s.Begun, s.Ended)
		}
	}
	var effects []string
	for id, keys := range r.world.effects {
		effects = append(effects, fmt.Sprint(id, " ", len(keys)))
	}
	slices.Sort(effects)
	var calls []string
	for _, id := range []string{"1", "2", "3", "4", "5", "6"} {
		c := r.call(id)
		found, err := r.guard.LookUp(ctx, c.Key, c.Fingerprint)
		if err != nil {
			r.t.Fatal(err)
		}
		calls = append(calls, fmt.Sprint(id, " ", found.Status))
	}
	unexpired := 0
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("u"))) {
		if err != nil {
			r.t.Fatal(err)
		}
		if entry.Expires.IsZero() {
			unexpired++
		}
	}
	return fmt.Sprint(b.State, b.Status, b.Mixed, b.Unknown, len(b.Escalations), "\n", ends(b), "\n", evidence, "\n", marks, "\n", effects,
		"\n", calls, "\n", slices.Sorted(maps.Keys(r.escalations())), r.escalations(), "\nwithout expiry: ", unexpired)
}

// through carries a rollback out whatever dies, and returns what it leaves behind.
func (r *rig) through(q rollback.Request) string {
	r.t.Helper()
	if _, err := r.Execute(ctx, q, nil); err != nil && !r.st.gone() {
		r.t.Fatal(err)
	}
	if r.st.dies >= 0 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if !r.st.gone() {
				_, _ = r.Wait(ctx, q.ID)
			}
		}()
		select {
		case <-r.st.dead:
		case <-done:
		}
		stop(r.Coordinator)
		<-done
		r.open()
		r.start()
		if _, err := r.Execute(ctx, q, nil); err != nil { // the client asks again
			r.t.Fatal(err)
		}
	}
	r.wait(q.ID)
	if err := r.Stop(ctx); err != nil { // and what comes after the end
		r.t.Fatal(err)
	}
	return r.leftBehind(q)
}

// P5: after an end of the process between any two
// commits, whether or not the last one landed, the rollback goes on by itself, and leaves
// behind what an undisturbed one does: no step undone twice, none lost.
func TestP5KilledBetweenAnyTwoCommits(t *testing.T) {
	r := mixed(t)
	r.start()
	r.st.commits = 0
	want := r.through(request("g", rollback.SubDAG))
	all := r.st.commits
	b, err := r.List(ctx, "", 1)
	if err != nil || len(b.Rollbacks) != 1 || !strings.Contains(want, mixedEnds) || !strings.Contains(want, "begun true") || b.Rollbacks[0].Status != rollback.Partial || all < 20 {
		t.Fatalf("undisturbed, with %d commits: %s, %v", all, want, err)
	}
	for dies := range all {
		for _, lands := range []bool{false, true} {
			t.Run(fmt.Sprint(dies, lands), func(t *testing.T) {
				r := mixed(t)
				r.start()
				r.st.mu.Lock()
				r.st.commits, r.st.dies, r.st.lands = 0, dies, lands
				r.st.mu.Unlock()
				if got := r.through(request("g", rollback.SubDAG)); got != want {
					t.Errorf("got\n%s\nwant\n%s", got, want)
				}
			})
		}
	}
}

// The same with several deaths in a row.
func TestP5KilledAgainAndAgain(t *testing.T) {
	r := mixed(t)
	r.start()
	want := r.through(request("g", rollback.SubDAG))
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 6))
		r := mixed(t)
		q := request("g", rollback.SubDAG)
		for range 6 {
			r.st.mu.Lock()
			r.st.commits, r.st.dies, r.st.lands = 0, rnd.IntN(8), rnd.IntN(2) == 0
			r.st.mu.Unlock()
			if err := r.Start(ctx); err != nil && !r.st.gone() {
				t.Fatal(err)
			}
			if _, err := r.Execute(ctx, q, nil); err == nil {
				select {
				case <-r.st.dead:
				case <-finished(r, q.ID):
				}
			}
			stop(r.Coordinator)
			r.open()
		}
		r.start()
		if got := r.through(q); got != want {
			t.Fatalf("seed %d: got\n%s\nwant\n%s", seed, got, want)
		}
	}
}

func finished(r *rig, id string) <-chan struct{} {
	done := make(chan struct{})
	c := r.Coordinator
	go func() {
		defer close(done)
		_, _ = c.Wait(ctx, id)
	}()
	return done
}

// A stopped coordinator begins nothing, and says so.
func TestStopBeginsNothingNew(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.start()
	asked, hold := make(chan string, 10), make(chan struct{})
	r.undoer.asked, r.world.hold["c2"] = asked, hold
	q := request("c1", rollback.SubDAG)
	r.execute(q)
	if id := <-asked; id != "c2" {
		t.Errorf("begun with %s", id)
	}
	stopped := make(chan error)
	go func() { stopped <- r.Stop(ctx) }()
	if _, err := r.Wait(ctx, q.ID); !errors.Is(err, rollback.ErrStopping) {
		t.Errorf("waiting: %v", err)
	}
	close(hold)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if _, err := r.Execute(ctx, request("c1", rollback.Single), nil); !errors.Is(err, rollback.ErrStopping) {
		t.Errorf("executing: %v", err)
	}
	b, err := r.Get(ctx, q.ID)
	if err != nil || ends(b) != "c2=completed c1=" {
		t.Errorf("%s, %v", ends(b), err)
	}
	r.open()
	r.start()
	wantEnd(t, r.wait(q.ID), rollback.Completed, "c2=completed c1=completed")
	if len(r.world.order) != 2 {
		t.Errorf("undone %v", r.world.order)
	}
}
