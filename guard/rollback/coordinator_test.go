package rollback_test

import (
	"bytes"
	"context"
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

// Cascade 4.1.1 and 4.4.2: consequences first, and the trail of start, steps, complete.
func TestCascade411SubDAG(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Compensate, execution.Completed, "1")
	r.made("3", checkpoint.Restore, execution.InDoubt, "2")
	r.made("9", checkpoint.Restore, execution.Completed)
	r.start()
	q := request("c1", rollback.SubDAG)
	b := r.run(q)
	wantEnd(t, b, rollback.Completed, "c3=completed c2=completed c1=completed")
	if got := strings.Join(r.world.order, " "); got != "c3 c2 c1" {
		t.Errorf("undone in the order %s", got)
	}
	for _, id := range []string{"1", "2", "3"} {
		r.wantCallStatus(id, execution.RolledBack)
	}
	r.wantCallStatus("9", execution.ResultUnavailable) // untouched
	want := map[string]int{
		"start " + q.ID + " error-1": 1, "complete " + q.ID + " completed": 1,
		"step " + q.ID + " c3 completed restore": 1, "step " + q.ID + " c2 completed compensate": 1, "step " + q.ID + " c1 completed restore": 1,
	}
	if got := r.recorded(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("recorded %v", got)
	}
	if b.Start == "" || b.Complete == "" || b.After != [32]byte{1} || b.Requester != agent || b.Steps[0].Agent != agent || len(b.Escalations) > 0 {
		t.Errorf("%+v", b)
	}
	if id, err := r.ByToken(ctx, q.Token); id != q.ID || err != nil {
		t.Errorf("by token: %s, %v", id, err)
	}
	if n := r.ledger.pending.Load(); n != 0 {
		t.Errorf("%d records were not notified of their commit", n)
	}
}

// B-normative-k: a call that never ran is cancelled and not undone, and refused when it
// comes late; one whose key was claimed again is left alone.
func TestCancellationIsNotRollback(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Released)
	r.made("2", checkpoint.Irreversible, execution.Released, "1")
	r.made("3", checkpoint.Restore, execution.Released, "1")
	again := r.call("3")
	again.Checkpoint = "another"
	e, err := r.guard.Claim(ctx, again, execution.Finding{})
	if err != nil {
		t.Fatal(err)
	}
	r.start()
	b := r.run(request("c1", rollback.SubDAG))
	wantEnd(t, b, rollback.Completed, "c3=completed(cancelled) c2=completed(cancelled) c1=completed(cancelled)")
	if r.world.sends != 0 {
		t.Errorf("%d undos were sent", r.world.sends)
	}
	r.wantCallStatus("1", execution.RolledBack)
	r.wantCallStatus("2", execution.RolledBack)
	r.wantCallStatus("3", execution.RunningHere)
	if err := e.Settle(ctx, execution.Outcome{Verdict: execution.Completed}); err != nil {
		t.Fatal(err)
	}
}

// P1 and P6: a key that is free, or another call's, does not say that a call never ran. Of
// a call whose end is not recorded, the effect is undone.
func TestP6FreeKeyProvesNothing(t *testing.T) {
	for _, again := range []bool{false, true} {
		r := newRig(t)
		e, _ := r.claimed("1", checkpoint.Restore)
		if err := e.Settle(ctx, execution.Outcome{Verdict: execution.Released}); err != nil { // and nothing else says so
			t.Fatal(err)
		}
		if again {
			c := r.call("1")
			c.Checkpoint = "another"
			if e, err := r.guard.Claim(ctx, c, execution.Finding{}); err != nil {
				t.Fatal(err)
			} else if err := e.Settle(ctx, execution.Outcome{Verdict: execution.Completed}); err != nil {
				t.Fatal(err)
			}
		}
		r.start()
		wantEnd(t, r.run(request("c1", rollback.Single)), rollback.Completed, "c1=completed")
		if len(r.world.order) != 1 {
			t.Errorf("undone %v", r.world.order)
		}
		if again {
			r.wantCallStatus("1", execution.ResultUnavailable) // the other call's
		} else {
			r.wantCallStatus("1", execution.RolledBack)
		}
	}
}

// Facts 5.1: a call in flight is waited for, then undone, or cancelled if it was released.
func TestInFlightIsWaitedFor(t *testing.T) {
	for _, v := range []execution.Verdict{execution.Completed, execution.InDoubt, execution.Released} {
		r := newRig(t)
		r.made("0", checkpoint.Restore, execution.Completed)
		e, h := r.claimed("1", checkpoint.Restore, "0")
		r.start()
		q := request("c0", rollback.SubDAG)
		if b := r.execute(q); b.Steps[0].What != rollback.Wait {
			t.Errorf("planned %+v", b.Steps)
		}
		r.settle("1", e, h, v)
		want := "c1=completed c0=completed"
		if v == execution.Released {
			want = "c1=completed(cancelled) c0=completed"
		}
		wantEnd(t, r.wait(q.ID), rollback.Completed, want)
		r.wantCallStatus("1", execution.RolledBack)
	}
}

// P6: every way for a step not to be done, and what comes of the whole.
func TestP6StatusOfTheWhole(t *testing.T) {
	refused := rollback.Result{Reason: rollback.ReasonRefused, Status: 409}
	lost := rollback.Result{Reason: rollback.ReasonLost, Unknown: true}
	for name, test := range map[string]struct {
		ways    [2]checkpoint.Way
		answers map[string]rollback.Result
		status  rollback.Status
		steps   string
		causes  map[hitl.Cause]int
		unknown bool
	}{
		"irreversible alone": {
			[2]checkpoint.Way{checkpoint.Irreversible, checkpoint.Irreversible}, nil, rollback.Escalated,
			"c2=escalated(irreversible) c1=escalated(irreversible)", map[hitl.Cause]int{hitl.CauseIrreversible: 2}, false,
		},
		"irreversible in part": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Irreversible}, nil, rollback.Partial,
			"c2=escalated(irreversible) c1=completed", map[hitl.Cause]int{hitl.CauseIrreversible: 1, hitl.CauseRollbackPartial: 1}, false,
		},
		"refused in part, and the others go on": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Compensate}, map[string]rollback.Result{"c2": refused}, rollback.Partial,
			"c2=failed(refused) c1=completed", map[hitl.Cause]int{hitl.CauseRollbackFailed: 1, hitl.CauseRollbackPartial: 1}, false,
		},
		"all refused": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Restore}, map[string]rollback.Result{"c1": refused, "c2": refused}, rollback.Failed,
			"c2=failed(refused) c1=failed(refused)", map[hitl.Cause]int{hitl.CauseRollbackFailed: 3}, false,
		},
		"lost": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Restore}, map[string]rollback.Result{"c1": lost, "c2": lost}, rollback.Escalated,
			"c2=escalated(answer-lost) c1=escalated(answer-lost)", map[hitl.Cause]int{hitl.CauseIrreversible: 2}, true,
		},
		"done, with a hazard": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Restore}, map[string]rollback.Result{"c2": {Done: true, Unknown: true}}, rollback.Partial,
			"c2=completed c1=completed", map[hitl.Cause]int{hitl.CauseRollbackPartial: 1}, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.made("1", test.ways[0], execution.Completed)
			r.made("2", test.ways[1], execution.Completed, "1")
			r.world.answers = test.answers
			r.start()
			b := r.run(request("c1", rollback.SubDAG))
			wantEnd(t, b, test.status, test.steps)
			n := 0
			for _, count := range test.causes {
				n += count
			}
			if got := r.escalations(); fmt.Sprint(got) != fmt.Sprint(test.causes) || len(b.Escalations) != n {
				t.Errorf("escalated %v, named %d", got, len(b.Escalations))
			}
			if b.Unknown != test.unknown || b.Mixed != (b.Status == rollback.Partial) {
				t.Errorf("unknown %v, mixed %v", b.Unknown, b.Mixed)
			}
			for i := range b.Steps {
				if e := b.Steps[i].Escalation; (e == "") != (b.Steps[i].Status == rollback.Completed) {
					t.Errorf("step %+v", b.Steps[i])
				}
			}
		})
	}
}

// ATD, "Hierarchical Checkpoints": a group is done when what it contains is, and P6: not
// where nobody knows a part of it.
func TestATDGroups(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed)
	r.made("3", checkpoint.Irreversible, execution.Completed)
	r.group("whole", "c1", "c2")
	r.group("broken", "whole", "c3")
	r.group("lacking", "c3", "gone")
	r.start()
	wantEnd(t, r.run(request("whole", rollback.Single)), rollback.Completed, "c2=completed c1=completed whole=completed")
	wantEnd(t, r.run(request("broken", rollback.Single)), rollback.Partial,
		"c3=escalated(irreversible) c2=completed c1=completed whole=completed broken=partial(members)")
	lacking := request("lacking", rollback.Single)
	lacking.Operator = "ada"
	wantEnd(t, r.run(lacking), rollback.Failed, "c3=escalated(irreversible) lacking=failed(missing)")
}

// What another gateway has made cannot be undone here, and is escalated.
func TestForeignCheckpointsAreEscalated(t *testing.T) {
	r := newRig(t)
	r.action("1")
	r.known("c1", CheckpointNode, rollback.Ran, rollback.Checkpoint{Reversible: true, Parents: []string{"1"}}, "1")
	r.start()
	wantEnd(t, r.run(request("c1", rollback.Single)), rollback.Escalated, "c1=escalated(foreign)")
}

// Cascade 4.2.3: the target is verified before anything is touched, and an error is recorded.
func TestCascade423TargetIsVerified(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed)
	r.made("3", checkpoint.Restore, execution.Completed)
	r.ledger.tamper["c1"] = true
	cp := r.ledger.tokens["c2"]
	cp.Sum = [32]byte{9}
	r.ledger.tokens["c2"] = cp
	cp = r.ledger.tokens["c3"]
	cp.Expires = r.now()
	r.ledger.tokens["c3"] = cp
	r.start()
	for target, want := range map[string]error{"c1": checkpoint.ErrTampered, "c2": checkpoint.ErrTampered, "c3": checkpoint.ErrExpired} {
		q := request(target, rollback.Single)
		if _, err := r.Plan(ctx, q); !errors.Is(err, want) {
			t.Errorf("%s planned: %v", target, err)
		}
		if _, err := r.Execute(ctx, q, nil); !errors.Is(err, want) {
			t.Errorf("%s: %v", target, err)
		}
		if n := r.recorded()["error "+q.ID+" "+target+" constraint_violation"]; n != 1 {
			t.Errorf("%s: recorded %d errors", target, n)
		}
		if _, err := r.Get(ctx, q.ID); !errors.Is(err, rollback.ErrUnknown) {
			t.Errorf("%s: recorded: %v", target, err)
		}
	}
	if r.world.sends != 0 {
		t.Error("something was sent")
	}
}

// Cascade 4.2.3 and C-6.3-d: each checkpoint is verified when it is its turn.
func TestCascade423StepsAreVerified(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	cp := r.ledger.tokens["c2"]
	cp.Sum = [32]byte{9}
	r.ledger.tokens["c2"] = cp
	r.start()
	b := r.run(request("c1", rollback.SubDAG))
	wantEnd(t, b, rollback.Partial, "c2=failed(checkpoint-tampered) c1=completed")
	if r.escalations()[hitl.CauseTampered] != 1 || r.recorded()["error "+b.ID+" c2 constraint_violation"] != 1 {
		t.Errorf("%v, %v", r.escalations(), r.recorded())
	}
}

// Cascade 4.2.3: a snapshot that the store reports as damaged ends its step and escalates, and does
// not hold up the others.
func TestCascade423DamagedSnapshotEndsItsStep(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	name := r.ring.Index("checkpoint", "c2")
	r.st.rotten.Store("kb" + string(name[:]))
	r.start()
	b := r.run(request("c1", rollback.SubDAG))
	wantEnd(t, b, rollback.Partial, "c2=failed(checkpoint-tampered) c1=completed")
	if r.escalations()[hitl.CauseTampered] != 1 {
		t.Errorf("%v", r.escalations())
	}
}

// P3 and C-4.1.3-e: who may ask, and that strangers learn nothing.
func TestP3WhoMayAsk(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.start()
	ask := func(target string, scope rollback.Scope, change func(*rollback.Request)) error {
		q := request(target, scope)
		change(&q)
		_, err := r.Plan(ctx, q)
		return err
	}
	stranger := func(q *rollback.Request) { q.By = "stranger" }
	coordinator := func(q *rollback.Request) { q.By, q.Coordinator = "stranger", true }
	operator := func(q *rollback.Request) { q.By, q.Operator = "", "ada" }
	own := func(*rollback.Request) {}
	if a, b := ask("c1", rollback.Single, stranger), ask("none", rollback.Single, stranger); a != rollback.ErrNotInWorkflow || b != a {
		t.Errorf("strangers get %v and %v", a, b)
	}
	for _, privileged := range []func(*rollback.Request){coordinator, operator} {
		if err := ask("none", rollback.Single, privileged); !errors.Is(err, rollback.ErrCheckpointUnknown) {
			t.Errorf("unknown: %v", err)
		}
		if err := ask("c1", rollback.FullWorkflow, privileged); err != nil {
			t.Errorf("the whole workflow: %v", err)
		}
	}
	if err := ask("c1", rollback.FullWorkflow, own); err != nil {
		t.Errorf("the initiator: %v", err)
	}
	// A root that somebody else makes takes nothing from who was first.
	r.ledger.nodes = append(r.ledger.nodes, Node{ID: "x", Kind: ActionNode, By: "another"})
	if err := ask("c1", rollback.FullWorkflow, own); err != nil {
		t.Errorf("the initiator, besides others: %v", err)
	}
	r.ledger.nodes = slices.Insert(r.ledger.nodes, 0, Node{ID: "y", Kind: ActionNode, By: "another"})
	var scope *rollback.ScopeError
	if err := ask("c1", rollback.FullWorkflow, own); !errors.As(err, &scope) {
		t.Errorf("who was not first: %v", err)
	}
	unnamed := func(q *rollback.Request) { q.Unnamed = true }
	if err := ask("c1", rollback.Single, unnamed); !errors.Is(err, rollback.ErrUnnamed) {
		t.Errorf("a token that names nothing: %v", err)
	}
	if err := ask("c1", rollback.Single, func(q *rollback.Request) { q.Unnamed, q.By = true, "stranger" }); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("a stranger's: %v", err)
	}
	r.ledger.nodes = append(r.ledger.nodes, Node{ID: "e1", Kind: EventNode, Parents: []string{"c1"}}, Node{ID: "ex", Kind: EventNode, Parents: []string{"x"}})
	for id, want := range map[string]error{"e1": nil, "ex": rollback.ErrUnnamed} {
		if err := ask("c1", rollback.Single, func(q *rollback.Request) { q.Unnamed, q.Error = true, id }); !errors.Is(err, want) {
			t.Errorf("for the error %s: %v", id, err)
		}
	}
	if err := ask("1", rollback.Single, own); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("no checkpoint: %v", err)
	}
	for name, bad := range map[string]func(*rollback.Request){
		"urn": func(q *rollback.Request) { q.ID = "urn:uuid:" + q.ID }, "none": func(q *rollback.Request) { q.ID = "" },
		"reason":     func(q *rollback.Request) { q.Reason = strings.Repeat("x", 513) },
		"checkpoint": func(q *rollback.Request) { q.Checkpoint = "" },
	} {
		q := request("c1", rollback.Single)
		bad(&q)
		if _, err := r.Execute(ctx, q, nil); !errors.Is(err, rollback.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// ATD, "Partial Rollback and Blast Radius Containment": refused before anything is done.
func TestATDDependedOn(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.action("beside")
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	last := &r.ledger.nodes[len(r.ledger.nodes)-1]
	last.Guards = append(last.Guards, "beside")
	r.action("later", "beside")
	r.start()
	before := r.st.commits
	for _, scope := range []rollback.Scope{rollback.SubDAG, rollback.Single} {
		q := request("c1", scope)
		q.KeepDependants = false
		var depended *rollback.DependedOnError
		if _, err := r.Execute(ctx, q, nil); !errors.As(err, &depended) || r.st.commits != before {
			t.Errorf("%s: %v, %d commits", scope, err, r.st.commits-before)
		}
	}
	q := request("c1", rollback.SubDAG)
	if b := r.execute(q); len(b.Plan.Dependants) != 1 {
		t.Errorf("%+v", b.Plan)
	}
	q.KeepDependants = false
	if _, err := r.Execute(ctx, q, nil); !errors.Is(err, rollback.ErrMismatch) {
		t.Errorf("another request under the same id: %v", err)
	}
}

// P6: what follows and was not looked at may be completed.
func TestDependantsBeyondWhatWasRead(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.ledger.more = true
	r.start()
	q := request("c1", rollback.Single)
	q.KeepDependants = false
	var depended *rollback.DependedOnError
	if _, err := r.Execute(ctx, q, nil); !errors.As(err, &depended) {
		t.Errorf("%v", err)
	}
	if b := r.execute(request("c1", rollback.Single)); b.State == "" {
		t.Errorf("%+v", b)
	}
}

// C-4.3.2: a dry run says what would be done, and touches nothing.
func TestPlanTouchesNothing(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Irreversible, execution.Completed, "1")
	before := r.st.commits
	q := request("c1", rollback.SubDAG)
	q.ID = ""
	b, err := r.Plan(ctx, q)
	if err != nil || len(b.Steps) != 2 || b.Steps[0].What != rollback.Escalate || b.State != rollback.Planned || b.Due.Sub(b.Asked) != ttl/2 {
		t.Errorf("%+v, %v", b, err)
	}
	if r.st.commits != before || r.ledger.pending.Load() != 0 {
		t.Error("something was recorded")
	}
}

// An extra write that conflicts keeps the rollback from being accepted.
func TestExtraWritesLandWithTheAcceptance(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.start()
	extra := store.Write{Key: []byte("z"), If: store.Absent(), Value: []byte("used")}
	q := request("c1", rollback.Single)
	r.execute(q, extra)
	r.execute(q, extra) // the same again is answered, and commits nothing
	r.wait(q.ID)
	var lost *store.Conflict
	other := request("c1", rollback.Single)
	if _, err := r.Execute(ctx, other, writing(extra)); !errors.As(err, &lost) {
		t.Errorf("%v", err)
	}
	if _, err := r.Get(ctx, other.ID); !errors.Is(err, rollback.ErrUnknown) {
		t.Errorf("accepted: %v", err)
	}
	if _, err := r.ByToken(ctx, other.Token); !errors.Is(err, rollback.ErrUnknown) {
		t.Errorf("its token: %v", err)
	}
}

// C-4.3.4-d: the id, and the token that asks, stand for one content.
func TestCascade434SameIDOtherContent(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed)
	r.start()
	q := request("c1", rollback.Single)
	first := r.run(q)
	for name, change := range map[string]func(*rollback.Request){
		"checkpoint": func(q *rollback.Request) { q.Checkpoint = "c2" },
		"scope":      func(q *rollback.Request) { q.Scope = rollback.SubDAG },
		"id":         func(q *rollback.Request) { q.ID = request("c1", rollback.Single).ID },
	} {
		other := q
		change(&other)
		if _, err := r.Execute(ctx, other, nil); !errors.Is(err, rollback.ErrMismatch) {
			t.Errorf("another %s: %v", name, err)
		}
	}
	stranger := q
	stranger.By = "stranger"
	if _, err := r.Execute(ctx, stranger, nil); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("P3: %v", err)
	}
	retried := q
	retried.Token, retried.Error = "a fresh token", ""
	if b := r.execute(retried); b.Complete != first.Complete {
		t.Errorf("%+v", b)
	}
	if len(r.world.order) != 1 {
		t.Errorf("undone %v", r.world.order)
	}
}

// A listing shows the newest first, page by page.
func TestListIsByAge(t *testing.T) {
	r := newRig(t)
	var ids []string
	for i := range 7 {
		id := fmt.Sprint(i)
		r.made(id, checkpoint.Restore, execution.Completed)
	}
	r.start()
	for i := range 7 {
		ids = append(ids, r.run(request(fmt.Sprint("c", i), rollback.Single)).ID)
	}
	slices.Reverse(ids)
	var got []string
	for after := ""; ; {
		page, err := r.List(ctx, after, 3)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range page.Rollbacks {
			got = append(got, b.ID)
			if b.Status != rollback.Completed || b.Plan != nil {
				t.Errorf("%+v", b)
			}
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if !slices.Equal(got, ids) {
		t.Errorf("%v, want %v", got, ids)
	}
	if _, err := r.List(ctx, "?", 1); !errors.Is(err, rollback.ErrCursor) {
		t.Errorf("%v", err)
	}
	if _, err := r.Get(ctx, "none"); !errors.Is(err, rollback.ErrUnknown) {
		t.Errorf("%v", err)
	}
}

// P8: nothing of a rollback is readable in the store, and all of it is sealed anew when the
// keys rotate, also while it goes on.
func TestP8JournalIsSealedAndResealed(t *testing.T) {
	r := newRig(t)
	for i := range 5 {
		r.made(fmt.Sprint(i), checkpoint.Restore, execution.Completed, []string{"0"}[:min(i, 1)]...)
	}
	r.start()
	asked := make(chan string)
	r.undoer.asked = asked
	q := request("c0", rollback.SubDAG)
	q.Reason = "a secret reason"
	r.execute(q)
	<-asked
	next, err := r.ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.ring.Adopt(next, nil, func(id uint32) error { return r.guard.Keys().Hold(ctx, id) }); err != nil {
		t.Fatal(err)
	}
	if n, err := r.Reseal(ctx); err != nil || n == 0 {
		t.Errorf("resealed %d, %v", n, err)
	}
	go func() {
		for range asked {
		}
	}()
	b := r.wait(q.ID)
	close(asked)
	if b.Status != rollback.Completed {
		t.Errorf("%s %s", b.Status, ends(b))
	}
	for entry, err := range r.mem.Scan(ctx, store.Prefix([]byte("u"))) {
		if err != nil || strings.Contains(string(entry.Value)+string(entry.Key), "secret") || strings.Contains(string(entry.Key), q.ID[:8]) {
			t.Errorf("readable: %q, %v", entry.Key, err)
		}
		if strings.ContainsRune("hpst", rune(entry.Key[1])) && r.ring.KeyOf(entry.Value) != next.KeyIDs()[1] {
			t.Errorf("%q is under an older key", entry.Key[:2])
		}
	}
}

// retried is call id, in doubt after its first attempt, that was run again: its
// attempts have the checkpoints "c"+id and "d"+id, which stand for ttls. between may be nil.
func (r *rig) retried(id string, between func(), ttls [2]time.Duration) {
	r.t.Helper()
	r.retrying(id, between, ttls)()
}

// retrying is retried, but the last attempt runs until end is called.
func (r *rig) retrying(id string, between func(), ttls [2]time.Duration) (end func()) {
	r.t.Helper()
	first := ""
	for n, name := range []string{"c" + id, "d" + id} {
		if n > 0 && between != nil {
			between()
		}
		c := r.call(id)
		c.Checkpoint = name
		found, err := r.guard.LookUp(ctx, c.Key, c.Fingerprint)
		if err != nil {
			r.t.Fatal(err)
		}
		s := checkpoint.Snapshot{
			ID: name, Workflow: "w", Caller: r.guard.Caller(agent), Execution: c.Key, Action: "update",
			Way: checkpoint.Compensate, First: first, Request: checkpoint.Request{Method: "PUT", Path: "/" + id},
		}
		p, err := r.checkpoints.Prepare(ctx, s, nil, checkpoint.Terms{TTL: ttls[n]})
		if err != nil {
			r.t.Fatal(err)
		}
		e, err := r.guard.Claim(ctx, c, found, p.Batch)
		if err != nil {
			r.t.Fatal(err)
		}
		verdict := execution.InDoubt
		if n > 0 {
			verdict = execution.Completed
		}
		cp := rollback.Checkpoint{Own: true, Sum: p.Sum(), Reversible: true, Parents: []string{id}}
		r.known(name, CheckpointNode, rollback.Ran, cp, id)
		node := &r.ledger.nodes[len(r.ledger.nodes)-1]
		node.Expires = r.now().Add(ttls[n])
		cp = r.ledger.tokens[name]
		cp.TTL, cp.Expires = ttls[n], node.Expires
		r.ledger.tokens[name] = cp
		end = func() {
			p, err := r.checkpoints.Record(ctx, p.Handle(), checkpoint.Result{Status: 200})
			if err != nil {
				r.t.Fatal(err)
			}
			if err := e.Settle(ctx, execution.Outcome{Verdict: verdict, Status: 200, Whole: true}, p.Batch); err != nil {
				r.t.Fatal(err)
			}
		}
		if n == 0 {
			end()
		}
		first = "c" + id
	}
	r.action(id)
	return end
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
				r.world.answers["c1"] = rollback.Result{Unknown: true, Reason: rollback.ReasonUnexpected, Status: 303}
				r.start()
				var seen []rollback.Task
				r.undoer.seen = func(task rollback.Task) { seen = append(seen, task) }
				first, second := request(c.targets[0], rollback.Single), request(c.targets[1], rollback.Single)
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
				r.world.answers["c1"] = rollback.Result{Reason: rollback.ReasonRefused, Status: 409}
				r.run(request("c1", rollback.Single)) // now it is known that there was no effect
				third := request("d1", rollback.Single)
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
				q := request("d1", rollback.Single)
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
				m, err := r.checkpoints.Mark(ctx, "c1")
				if err != nil || m.State == checkpoint.Undoing || m.Doubt != q.ID {
					t.Errorf("the first is %s, with doubt %q, %v", m.State, m.Doubt, err)
				}
				stop(r.Coordinator)
			})
		})
	}
}

// An attempt whose ttl is over is completed with the call, where that is undone by another one
// in time: nobody is asked to undo it by hand.
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
						r.run(request(c.before, rollback.Single))
					}
					time.Sleep(c.after)
					r.made("0", checkpoint.Compensate, execution.Completed)
					if c.follow {
						r.made("2", checkpoint.Compensate, execution.Completed, "d1")
					}
					q := request("c0", rollback.FullWorkflow)
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
					if notified := r.escalations(); len(notified) > 0 {
						t.Errorf("people are notified of %v", notified)
					}
					stop(r.Coordinator)
				})
			})
		}
	}
}

// So it is where the ttl of the last attempt is over while that runs: nothing is undone before it has ended.
func TestExpiredAttemptOfARunningCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		end := r.retrying("1", nil, [2]time.Duration{ttl, 50 * time.Minute})
		r.ledger.nodes[len(r.ledger.nodes)-2].State = rollback.InFlight
		hold := make(chan struct{})
		r.world.hold["c1"] = hold
		asked := make(chan string, 4)
		r.undoer.asked = asked
		r.start()
		time.Sleep(51 * time.Minute)
		q := request("c1", rollback.FullWorkflow)
		q.Operator = "op"
		r.execute(q)
		synctest.Wait()
		if len(asked) > 0 {
			t.Error("undone while it runs")
		}
		end()
		synctest.Wait()
		close(hold)
		if b := r.wait(q.ID); b.Status != rollback.Completed || len(r.escalations()) > 0 {
			t.Errorf("%s: %s", b.Status, ends(b))
		}
		stop(r.Coordinator)
	})
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
		r.made("A", checkpoint.Compensate, execution.Completed)
		r.made("B", checkpoint.Compensate, execution.Completed)
		r.group("g1", "da", "cb", "cB")
		r.group("g2", "db", "ca", "cA")
		hold := map[string]chan struct{}{}
		for _, id := range []string{"ca", "cb", "cA", "cB"} {
			hold[id] = make(chan struct{})
			r.world.hold[id] = hold[id]
		}
		r.start()
		first, second := request("g1", rollback.Single), request("g2", rollback.Single)
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
		q := request("c1", rollback.Single)
		r.execute(q)
		<-asked
		stop(r.Coordinator)
		time.Sleep(2 * time.Hour)
		r.open()
		r.undoer.seen = func(task rollback.Task) {
			if s := task.Checkpoint.Snapshot; s.ID != "d1" || task.Rollback != q.ID {
				t.Errorf("undone by %s", s.ID)
			}
		}
		r.start()
		wantEnd(t, r.wait(q.ID), rollback.Completed, "c1=completed")
		stop(r.Coordinator)
	})
}

// Cascade 4.3.4: who waits for a rollback is told of its end when that is recorded, also where he has looked between its
// commit and the answer to it, and the store takes nothing after that.
func TestWaitLooksBeforeTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		release := make(chan struct{})
		r.undoer.seen = func(rollback.Task) { <-release }
		r.start()
		ending := func(batch []store.Write) {
			if slices.ContainsFunc(batch, func(w store.Write) bool { return bytes.HasPrefix(w.Key, []byte("uw")) && w.Delete }) {
				time.Sleep(time.Second)
				r.st.refuses.Store(true)
			}
		}
		r.st.landed.Store(&ending)
		q := request("c1", rollback.Single)
		r.execute(q)
		time.AfterFunc(time.Second, func() { close(release) })
		within, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if b, err := r.Wait(within, q.ID); err != nil {
			t.Errorf("%s: %v", b.State, err)
		}
		stop(r.Coordinator)
	})
}
