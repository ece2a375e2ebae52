package rollback_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Cascade 4.1.1 and 4.4.2: consequences first, and the trail of start, steps, complete.
func TestCascade411SubDAG(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Compensate, guard.Completed, "1")
	r.made("3", checkpoint.Restore, guard.InDoubt, "2")
	r.made("9", checkpoint.Restore, guard.Completed)
	r.start()
	q := request("c1", plan.SubDAG)
	b := r.run(q)
	wantEnd(t, b, rollback.Completed, "c3=completed c2=completed c1=completed")
	if got := strings.Join(r.world.order, " "); got != "c3 c2 c1" {
		t.Errorf("undone in the order %s", got)
	}
	for _, id := range []string{"1", "2", "3"} {
		r.standing(id, guard.RolledBack)
	}
	r.standing("9", guard.ResultUnavailable) // untouched
	want := map[string]int{
		"start " + q.ID + " error-1": 1, "complete " + q.ID + " completed": 1,
		"step " + q.ID + " c3 completed restore": 1, "step " + q.ID + " c2 completed compensate": 1, "step " + q.ID + " c1 completed restore": 1,
	}
	if got := r.said(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("told %v", got)
	}
	if b.Start == "" || b.Complete == "" || b.After != [32]byte{1} || b.Requester != agent || b.Steps[0].Agent != agent || len(b.Escalations) > 0 {
		t.Errorf("%+v", b)
	}
	if id, err := r.ByToken(ctx, q.Token); id != q.ID || err != nil {
		t.Errorf("by token: %s, %v", id, err)
	}
	if n := r.ledger.pending.Load(); n != 0 {
		t.Errorf("%d tellings were not told what came of them", n)
	}
}

// B-normative-k: a call that never ran is cancelled and not undone, and refused when it
// comes late; one whose key was claimed again is left alone.
func TestCancellationIsNotRollback(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Released)
	r.made("2", checkpoint.Irreversible, guard.Released, "1")
	r.made("3", checkpoint.Restore, guard.Released, "1")
	again := r.call("3")
	again.Checkpoint = "another"
	e, err := r.guard.Claim(ctx, again, guard.Finding{})
	if err != nil {
		t.Fatal(err)
	}
	r.start()
	b := r.run(request("c1", plan.SubDAG))
	wantEnd(t, b, rollback.Completed, "c3=completed(cancelled) c2=completed(cancelled) c1=completed(cancelled)")
	if r.world.sends != 0 {
		t.Errorf("%d undos were sent", r.world.sends)
	}
	r.standing("1", guard.RolledBack)
	r.standing("2", guard.RolledBack)
	r.standing("3", guard.RunningHere)
	if err := e.Settle(ctx, guard.Outcome{Verdict: guard.Completed}); err != nil {
		t.Fatal(err)
	}
}

// P1 and P6: a key that is free, or another call's, does not say that a call never ran. Of
// a call whose end nobody told of, the effect is undone.
func TestP6FreeKeyProvesNothing(t *testing.T) {
	for _, again := range []bool{false, true} {
		r := newRig(t)
		e, _ := r.claimed("1", checkpoint.Restore)
		if err := e.Settle(ctx, guard.Outcome{Verdict: guard.Released}); err != nil { // and nothing else says so
			t.Fatal(err)
		}
		if again {
			c := r.call("1")
			c.Checkpoint = "another"
			if e, err := r.guard.Claim(ctx, c, guard.Finding{}); err != nil {
				t.Fatal(err)
			} else if err := e.Settle(ctx, guard.Outcome{Verdict: guard.Completed}); err != nil {
				t.Fatal(err)
			}
		}
		r.start()
		wantEnd(t, r.run(request("c1", plan.Single)), rollback.Completed, "c1=completed")
		if len(r.world.order) != 1 {
			t.Errorf("undone %v", r.world.order)
		}
		if again {
			r.standing("1", guard.ResultUnavailable) // the other call's
		} else {
			r.standing("1", guard.RolledBack)
		}
	}
}

// Facts 5.1: a call in flight is waited for, then undone, or cancelled if it was released.
func TestInFlightIsWaitedFor(t *testing.T) {
	for _, v := range []guard.Verdict{guard.Completed, guard.InDoubt, guard.Released} {
		r := newRig(t)
		r.made("0", checkpoint.Restore, guard.Completed)
		e, h := r.claimed("1", checkpoint.Restore, "0")
		r.start()
		q := request("c0", plan.SubDAG)
		if b := r.execute(q); b.Steps[0].What != plan.Wait {
			t.Errorf("planned %+v", b.Steps)
		}
		r.settle("1", e, h, v)
		want := "c1=completed c0=completed"
		if v == guard.Released {
			want = "c1=completed(cancelled) c0=completed"
		}
		wantEnd(t, r.wait(q.ID), rollback.Completed, want)
		r.standing("1", guard.RolledBack)
	}
}

// P6: every way for a step not to be done, and what comes of the whole.
func TestP6StatusOfTheWhole(t *testing.T) {
	refused := undo.Result{Reason: undo.ReasonRefused, Status: 409}
	lost := undo.Result{Reason: undo.ReasonLost, Unknown: true}
	for name, test := range map[string]struct {
		ways    [2]checkpoint.Way
		answers map[string]undo.Result
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
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Compensate}, map[string]undo.Result{"c2": refused}, rollback.Partial,
			"c2=failed(refused) c1=completed", map[hitl.Cause]int{hitl.CauseRollbackFailed: 1, hitl.CauseRollbackPartial: 1}, false,
		},
		"all refused": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Restore}, map[string]undo.Result{"c1": refused, "c2": refused}, rollback.Failed,
			"c2=failed(refused) c1=failed(refused)", map[hitl.Cause]int{hitl.CauseRollbackFailed: 3}, false,
		},
		"lost": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Restore}, map[string]undo.Result{"c1": lost, "c2": lost}, rollback.Escalated,
			"c2=escalated(answer-lost) c1=escalated(answer-lost)", map[hitl.Cause]int{hitl.CauseIrreversible: 2}, true,
		},
		"done, with a hazard": {
			[2]checkpoint.Way{checkpoint.Restore, checkpoint.Restore}, map[string]undo.Result{"c2": {Done: true, Unknown: true}}, rollback.Partial,
			"c2=completed c1=completed", map[hitl.Cause]int{hitl.CauseRollbackPartial: 1}, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.made("1", test.ways[0], guard.Completed)
			r.made("2", test.ways[1], guard.Completed, "1")
			r.world.answers = test.answers
			r.start()
			b := r.run(request("c1", plan.SubDAG))
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
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed)
	r.made("3", checkpoint.Irreversible, guard.Completed)
	r.group("whole", "c1", "c2")
	r.group("broken", "whole", "c3")
	r.group("lacking", "c3", "gone")
	r.start()
	wantEnd(t, r.run(request("whole", plan.Single)), rollback.Completed, "c2=completed c1=completed whole=completed")
	wantEnd(t, r.run(request("broken", plan.Single)), rollback.Partial,
		"c3=escalated(irreversible) c2=completed c1=completed whole=completed broken=partial(members)")
	lacking := request("lacking", plan.Single)
	lacking.Operator = "ada"
	wantEnd(t, r.run(lacking), rollback.Failed, "c3=escalated(irreversible) lacking=failed(missing)")
}

// DESIGN: what another gateway has made cannot be undone here, and is escalated.
func TestForeignCheckpointsAreEscalated(t *testing.T) {
	r := newRig(t)
	r.action("1")
	r.known("c1", plan.Checkpoint, plan.Standing, rollback.Checkpoint{Reversible: true, Parents: []string{"1"}}, "1")
	r.start()
	wantEnd(t, r.run(request("c1", plan.Single)), rollback.Escalated, "c1=escalated(foreign)")
}

// Cascade 4.2.3: the target is verified before anything is touched, and an error is told.
func TestCascade423TargetIsVerified(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed)
	r.made("3", checkpoint.Restore, guard.Completed)
	r.ledger.tamper["c1"] = true
	cp := r.ledger.tokens["c2"]
	cp.Sum = [32]byte{9}
	r.ledger.tokens["c2"] = cp
	cp = r.ledger.tokens["c3"]
	cp.Expires = r.now()
	r.ledger.tokens["c3"] = cp
	r.start()
	for target, want := range map[string]error{"c1": checkpoint.ErrTampered, "c2": checkpoint.ErrTampered, "c3": checkpoint.ErrExpired} {
		q := request(target, plan.Single)
		if _, err := r.Plan(ctx, q); !errors.Is(err, want) {
			t.Errorf("%s planned: %v", target, err)
		}
		if _, err := r.Execute(ctx, q); !errors.Is(err, want) {
			t.Errorf("%s: %v", target, err)
		}
		if n := r.said()["error "+q.ID+" "+target+" constraint_violation"]; n != 1 {
			t.Errorf("%s: told %d errors", target, n)
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
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed, "1")
	cp := r.ledger.tokens["c2"]
	cp.Sum = [32]byte{9}
	r.ledger.tokens["c2"] = cp
	r.start()
	b := r.run(request("c1", plan.SubDAG))
	wantEnd(t, b, rollback.Partial, "c2=failed(checkpoint-tampered) c1=completed")
	if r.escalations()[hitl.CauseTampered] != 1 || r.said()["error "+b.ID+" c2 constraint_violation"] != 1 {
		t.Errorf("%v, %v", r.escalations(), r.said())
	}
}

// P3 and C-4.1.3-e: who may ask, and that strangers learn nothing.
func TestP3WhoMayAsk(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.start()
	ask := func(target string, scope plan.Scope, change func(*rollback.Request)) error {
		q := request(target, scope)
		change(&q)
		_, err := r.Plan(ctx, q)
		return err
	}
	stranger := func(q *rollback.Request) { q.By = "stranger" }
	coordinator := func(q *rollback.Request) { q.By, q.Coordinator = "stranger", true }
	operator := func(q *rollback.Request) { q.By, q.Operator = "", "ada" }
	own := func(*rollback.Request) {}
	if a, b := ask("c1", plan.Single, stranger), ask("none", plan.Single, stranger); a != rollback.ErrNotInWorkflow || b != a {
		t.Errorf("strangers get %v and %v", a, b)
	}
	for _, privileged := range []func(*rollback.Request){coordinator, operator} {
		if err := ask("none", plan.Single, privileged); !errors.Is(err, rollback.ErrCheckpointUnknown) {
			t.Errorf("unknown: %v", err)
		}
		if err := ask("c1", plan.FullWorkflow, privileged); err != nil {
			t.Errorf("the whole workflow: %v", err)
		}
	}
	if err := ask("c1", plan.FullWorkflow, own); err != nil {
		t.Errorf("the initiator: %v", err)
	}
	// A root that somebody else makes takes nothing from who was first.
	r.ledger.nodes = append(r.ledger.nodes, plan.Node{ID: "x", Kind: plan.Action, By: "another", Start: 1})
	if err := ask("c1", plan.FullWorkflow, own); err != nil {
		t.Errorf("the initiator, besides others: %v", err)
	}
	r.ledger.nodes = append(r.ledger.nodes, plan.Node{ID: "y", Kind: plan.Action, By: "another", Start: -1})
	var scope *plan.ScopeError
	if err := ask("c1", plan.FullWorkflow, own); !errors.As(err, &scope) {
		t.Errorf("who was not first: %v", err)
	}
	unnamed := func(q *rollback.Request) { q.Unnamed = true }
	if err := ask("c1", plan.Single, unnamed); !errors.Is(err, rollback.ErrUnnamed) {
		t.Errorf("a token that names nothing: %v", err)
	}
	if err := ask("c1", plan.Single, func(q *rollback.Request) { q.Unnamed, q.By = true, "stranger" }); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("a stranger's: %v", err)
	}
	r.ledger.nodes = append(r.ledger.nodes, plan.Node{ID: "e1", Kind: plan.Event, Parents: []string{"c1"}}, plan.Node{ID: "ex", Kind: plan.Event, Parents: []string{"x"}})
	for id, want := range map[string]error{"e1": nil, "ex": rollback.ErrUnnamed} {
		if err := ask("c1", plan.Single, func(q *rollback.Request) { q.Unnamed, q.Error = true, id }); !errors.Is(err, want) {
			t.Errorf("for the error %s: %v", id, err)
		}
	}
	if err := ask("1", plan.Single, own); !errors.Is(err, rollback.ErrNotInWorkflow) {
		t.Errorf("no checkpoint: %v", err)
	}
	for name, bad := range map[string]func(*rollback.Request){
		"urn": func(q *rollback.Request) { q.ID = "urn:uuid:" + q.ID }, "none": func(q *rollback.Request) { q.ID = "" },
		"reason":     func(q *rollback.Request) { q.Reason = strings.Repeat("x", 513) },
		"checkpoint": func(q *rollback.Request) { q.Checkpoint = "" },
	} {
		q := request("c1", plan.Single)
		bad(&q)
		if _, err := r.Execute(ctx, q); !errors.Is(err, rollback.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// ATD, "Partial Rollback and Blast Radius Containment": refused before anything is done.
func TestATDDependedOn(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.action("beside")
	r.made("2", checkpoint.Restore, guard.Completed, "1")
	last := &r.ledger.nodes[len(r.ledger.nodes)-1]
	last.Guards = append(last.Guards, "beside")
	r.action("later", "beside")
	r.start()
	before := r.st.commits
	var depended *plan.DependedOnError
	if _, err := r.Execute(ctx, request("c1", plan.SubDAG)); !errors.As(err, &depended) || r.st.commits != before {
		t.Errorf("%v, %d commits", err, r.st.commits-before)
	}
}

// C-4.3.2: a dry run says what would be done, and touches nothing.
func TestPlanTouchesNothing(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Irreversible, guard.Completed, "1")
	before := r.st.commits
	q := request("c1", plan.SubDAG)
	q.ID = ""
	b, err := r.Plan(ctx, q)
	if err != nil || len(b.Steps) != 2 || b.Steps[0].What != plan.Escalate || b.State != "" || b.Due.Sub(b.Asked) != ttl/2 {
		t.Errorf("%+v, %v", b, err)
	}
	if r.st.commits != before || r.ledger.pending.Load() != 0 {
		t.Error("something was recorded")
	}
}

// A rider that loses keeps the rollback from being accepted.
func TestRidersLandWithTheAcceptance(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Restore, guard.Completed)
	r.start()
	rider := store.Write{Key: []byte("z"), If: store.Absent(), Value: []byte("used")}
	q := request("c1", plan.Single)
	r.execute(q, rider)
	r.execute(q, rider) // the same again is answered, and commits nothing
	r.wait(q.ID)
	var lost *store.Conflict
	other := request("c1", plan.Single)
	if _, err := r.Execute(ctx, other, rider); !errors.As(err, &lost) {
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
	r.made("1", checkpoint.Restore, guard.Completed)
	r.made("2", checkpoint.Restore, guard.Completed)
	r.start()
	q := request("c1", plan.Single)
	first := r.run(q)
	for name, change := range map[string]func(*rollback.Request){
		"checkpoint": func(q *rollback.Request) { q.Checkpoint = "c2" },
		"scope":      func(q *rollback.Request) { q.Scope = plan.SubDAG },
		"requester":  func(q *rollback.Request) { q.By = "stranger" },
		"id":         func(q *rollback.Request) { q.ID = request("c1", plan.Single).ID },
	} {
		other := q
		change(&other)
		if _, err := r.Execute(ctx, other); !errors.Is(err, rollback.ErrMismatch) {
			t.Errorf("another %s: %v", name, err)
		}
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
		r.made(id, checkpoint.Restore, guard.Completed)
	}
	r.start()
	for i := range 7 {
		ids = append(ids, r.run(request(fmt.Sprint("c", i), plan.Single)).ID)
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
		r.made(fmt.Sprint(i), checkpoint.Restore, guard.Completed, []string{"0"}[:min(i, 1)]...)
	}
	r.start()
	asked := make(chan string)
	r.undoer.asked = asked
	q := request("c0", plan.SubDAG)
	q.Reason = "a secret reason"
	r.execute(q)
	<-asked
	next, err := r.ring.Rotated()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.ring.Adopt(next, nil, func(id uint32) error { return r.guard.UseKey(ctx, id) }); err != nil {
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
