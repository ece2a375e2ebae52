package rollback_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
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

// hooked is a store in which something happens behind a read, and that may not tell what
// became of a commit.
type hooked struct {
	store.Store
	mu      sync.Mutex
	read    func(key []byte)               // after a Get
	unknown func(batch []store.Write) bool // a commit that lands, and nobody is told
	full    func() bool                    // a commit that does not land; set before the start
}

func (h *hooked) Get(ctx context.Context, key []byte) (store.Entry, error) {
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

// P6: a call that ends between the look at its checkpoint and that at its execution is
// undone by what its answer has left, or is not undone at all if it never ran.
func TestP6CallEndsBetweenTwoLooks(t *testing.T) {
	for verdict, want := range map[guard.Verdict]string{
		guard.Completed: "c1=completed", guard.Released: "c1=completed(cancelled)",
	} {
		r := newRig(t)
		h := r.hook()
		e, handle := r.claimed("1", checkpoint.Compensate)
		q := request("c1", plan.Single)
		r.execute(q)
		var once sync.Once
		h.set(func(key []byte) {
			if bytes.HasPrefix(key, []byte("ka")) { // where the result of a call stands
				once.Do(func() { r.settle("1", e, handle, verdict) })
			}
		}, nil)
		r.undoer.seen = func(task undo.Task) {
			if task.Checkpoint.Result == nil {
				t.Errorf("verdict %d: to be undone without what the answer has left", verdict)
			}
		}
		r.start()
		wantEnd(t, r.wait(q.ID), rollback.Completed, want)
		if n := len(r.world.order); n != 0 && verdict == guard.Released {
			t.Errorf("an undo was sent of a call that never ran")
		}
	}
}

// accepting reports whether a batch accepts a rollback: it begins with a new head.
func accepting(batch []store.Write) bool {
	return bytes.HasPrefix(batch[0].Key, []byte("uh")) && batch[0].If.Holds(nil)
}

// P5: an acceptance that has landed goes on, also if the store could not tell so, and
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
			narrow, wide := request("c3", plan.Single), request("c1", plan.SubDAG)
			_, err := r.Execute(ctx, narrow)
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

// Sealing anew waits for those who have sealed, who wait for those who change the head.
func TestResealBesideAnAcceptance(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed, "1")
	r.made("3", checkpoint.Restore, guard.Completed, "1")
	at, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.ledger.telling = func(words []string) {
		if words[0] == "step" {
			once.Do(func() { close(at); <-goOn })
		}
	}
	r.start()
	narrow := request("c3", plan.Single)
	r.execute(narrow)
	<-at // a step is sealed and not committed
	sealed, accepted := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(sealed)
		if _, err := r.Reseal(ctx); err != nil {
			t.Error(err)
		}
	}()
	wide := request("c1", plan.SubDAG)
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
		}
	}
	return n
}

// One that joined one that joined another goes with that one in the end.
func TestJoinedOnesExpireTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, asked, release := branches(t)
		r.start()
		narrow, wide, widest := request("c3", plan.Single), request("c2", plan.SubDAG), request("c1", plan.FullWorkflow)
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

// A process that ends while records get their expiry, and comes back when some of them
// are gone, takes up the others, and leaves nothing for ever.
func TestStartAfterAHalfExpiry(t *testing.T) {
	for dies := 1; ; dies++ {
		over := false
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Restore, guard.Completed)
			r.made("2", checkpoint.Restore, guard.Completed)
			r.start()
			r.st.mu.Lock()
			r.st.commits, r.st.dies = 0, dies
			r.st.mu.Unlock()
			q := request("c1", plan.Single)
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

// DESIGN, "Checkpoints and rollback": only a lost answer may be sent again, with the same
// key. Another rollback of a checkpoint whose undo is in doubt goes on under the key of
// the first one, also when that one has joined it and after a restart, and takes one of
// its own when it is known that the first had no effect.
func TestDoubtfulUndoGoesOnUnderItsKey(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Compensate, guard.Completed)
	r.start()
	answer := func(a undo.Result) {
		r.world.mu.Lock()
		defer r.world.mu.Unlock()
		r.world.answers["c1"] = a
	}
	try := func(under string) string {
		t.Helper()
		q := request("c1", plan.Single)
		var mu sync.Mutex
		tasks := map[string]bool{}
		r.undoer.seen = func(task undo.Task) {
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
	answer(undo.Result{Unknown: true, Reason: undo.ReasonLost})
	first := try("")
	try(first)
	r.restart()
	try(first)
	answer(undo.Result{Reason: undo.ReasonRefused, Status: 409})
	try(first)
	answer(undo.Result{Unknown: true, Reason: undo.ReasonTimeout})
	second := try("")
	answer(undo.Result{Done: true, Status: 200})
	try(second)
}

// P6: of an undo that an earlier life has begun, and that cannot be asked for any more, it
// is not known what came of it.
func TestP6BegunAndNotReadableAnyMore(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	asked := make(chan string, 1)
	r.undoer.asked, r.undoer.block = asked, true
	r.start()
	q := request("c1", plan.Single)
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
		r.made("1", checkpoint.Compensate, guard.Completed)
		asked := make(chan string, 1)
		r.undoer.asked, r.undoer.block = asked, true
		r.start()
		q := request("c1", plan.Single)
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
// beyond what one commit can tell go on to their end first.
func TestManyGiveWay(t *testing.T) {
	r := newRig(t)
	hold := make(chan struct{})
	const many, bound = 300, 256
	for i := range many {
		id := fmt.Sprint(i)
		r.made(id, checkpoint.Compensate, guard.Completed)
		r.world.hold["c"+id] = hold
	}
	r.start()
	var narrow []string
	for i := range many {
		narrow = append(narrow, r.execute(request(fmt.Sprint("c", i), plan.Single)).ID)
	}
	wide := request("c0", plan.FullWorkflow)
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
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Compensate, guard.Completed)
		r.made("2", checkpoint.Compensate, guard.Completed, "1")
		q := request("c1", plan.SubDAG)
		r.execute(q)
		key := r.call("2").Key
		if _, err := r.mem.Commit(ctx, store.Write{Key: append([]byte{'x'}, key[:]...), Value: []byte("spoilt")}); err != nil {
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
