package rollback_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// severe makes a call one of severity critical, for which an agent's error may be the reason.
func (r *rig) severe(id, err string) {
	for i := range r.ledger.nodes {
		if n := &r.ledger.nodes[i]; n.ID == id {
			if n.Severity = "critical"; err != "" {
				n.Severity, n.Error = "", err
			}
		}
	}
}

// question waits until people are asked about a rollback, in a bubble.
func (r *rig) question(id string) hitl.Escalation {
	r.t.Helper()
	synctest.Wait()
	b, err := r.Get(ctx, id)
	if err != nil || b.Waits == "" || !slices.Contains(b.Escalations, b.Waits) {
		r.t.Fatalf("nobody is asked: %+v, %v", b, err)
	}
	e, err := r.escalationStore.Get(ctx, b.Waits)
	if err != nil {
		r.t.Fatal(err)
	}
	return e
}

// says decides as somebody on what is shown.
func (r *rig) says(e hitl.Escalation, approve bool) {
	r.t.Helper()
	vote := hitl.Vote{By: "operator:ann", Every: true, Approve: approve, Hash: e.Proposal.Hash(), Reason: "seen"}
	if _, err := r.escalationStore.Decide(ctx, e.ID, vote); err != nil {
		r.t.Fatal(err)
	}
}

// chain is three calls, one after the other; the second is of severity critical.
func chain(t testing.TB) *rig {
	r := newRig(t)
	r.made("1", checkpoint.Restore, execution.Completed)
	r.made("2", checkpoint.Restore, execution.Completed, "1")
	r.made("3", checkpoint.Restore, execution.Completed, "2")
	r.severe("c2", "")
	return r
}

// ATD "Interaction with HITL", case 3: a cascade pauses before the level with what is of severity
// critical, at level 1 and bound to its plan, in its next life too. Approved, it goes on; denied, all
// that was not undone stays, and nobody is asked again; what nobody decides in time is over with the
// rollback.
func TestCriticalNodesWaitForPeople(t *testing.T) {
	for name, test := range map[string]struct {
		decide func(t *testing.T, r *rig, e hitl.Escalation, late func())
		status rollback.Status
		steps  string
		others map[hitl.Cause]int // further escalations
	}{
		"approved": {
			func(_ *testing.T, r *rig, e hitl.Escalation, _ func()) { r.says(e, true) },
			rollback.Completed, "c3=completed c2=completed c1=completed", nil,
		},
		"approved in another life": {
			func(_ *testing.T, r *rig, e hitl.Escalation, _ func()) {
				stop(r.Coordinator)
				r.says(e, true)
				r.restart()
			},
			rollback.Completed, "c3=completed c2=completed c1=completed", nil,
		},
		"denied": {
			func(_ *testing.T, r *rig, e hitl.Escalation, _ func()) { r.says(e, false) },
			rollback.Partial, "c3=completed c2=escalated(denied) c1=escalated(denied)", map[hitl.Cause]int{hitl.CauseRollbackPartial: 1},
		},
		"denied, and resumed": {
			func(t *testing.T, r *rig, e hitl.Escalation, _ func()) {
				stop(r.Coordinator)
				r.says(e, false)
				again, err := r.escalationStore.AskAgain(ctx, e.ID, "operator:bob", 0)
				if err != nil || again.Proposal.Kind != hitl.Resume {
					t.Errorf("%+v, %v", again, err)
				}
				r.says(again, true) // which resumes the workflow, and not the rollback
				r.restart()
			},
			rollback.Partial, "c3=completed c2=escalated(denied) c1=escalated(denied)", map[hitl.Cause]int{hitl.CauseRollbackPartial: 1},
		},
		"nobody decides": {
			func(_ *testing.T, _ *rig, _ hitl.Escalation, late func()) { late() },
			rollback.Partial, "c3=completed c2=escalated(timeout) c1=escalated(timeout)",
			map[hitl.Cause]int{hitl.CauseRollbackPartial: 1, hitl.CauseRollbackTimeout: 1},
		},
		"the process is down": {
			func(_ *testing.T, r *rig, _ hitl.Escalation, late func()) {
				stop(r.Coordinator)
				late()
				r.restart()
			},
			rollback.Partial, "c3=completed c2=escalated(timeout) c1=escalated(timeout)",
			map[hitl.Cause]int{hitl.CauseRollbackPartial: 1, hitl.CauseRollbackTimeout: 1},
		},
		"approved, and not made in time": {
			func(_ *testing.T, r *rig, e hitl.Escalation, late func()) {
				stop(r.Coordinator)
				r.says(e, true)
				late()
				r.restart()
			},
			rollback.Partial, "c3=completed c2=escalated(timeout) c1=escalated(timeout)",
			map[hitl.Cause]int{hitl.CauseRollbackPartial: 1, hitl.CauseRollbackTimeout: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := chain(t)
				r.start()
				q := request("c1", rollback.SubDAG)
				b := r.execute(q)
				e := r.question(q.ID)
				hash := b.Plan.Hash()
				if e.Level != hitl.Pause || e.Cause != hitl.CauseCritical || !e.Held || e.Proposal.Kind != hitl.ContinueRollback || e.Links.Checkpoint != "c2" ||
					e.Proposal.Hash() != fmt.Sprintf("%x", hash) || e.Links.Rollback != q.ID || e.Deadline.Sub(b.Due).Abs() > time.Second ||
					!strings.Contains(e.Proposal.Text, "c2") || strings.Contains(e.Proposal.Text, "c1") || e.Requester != "issuer:"+agent {
					t.Errorf("%+v", e)
				}
				if got := strings.Join(r.world.order, " "); got != "c3" {
					t.Errorf("undone before the decision: %s", got)
				}
				r.restart()
				if again := r.question(q.ID); again.ID != e.ID {
					t.Errorf("another life asks again: %+v", again)
				}
				vote := hitl.Vote{By: e.Requester, Every: true, Approve: true, Hash: e.Proposal.Hash()}
				if _, err := r.escalationStore.Decide(ctx, e.ID, vote); !errors.Is(err, hitl.ErrOwn) {
					t.Errorf("who asked has approved: %v", err)
				}
				vote = hitl.Vote{By: "operator:ann", Every: true, Approve: true, Hash: "another"}
				if _, err := r.escalationStore.Decide(ctx, e.ID, vote); !errors.Is(err, hitl.ErrHash) {
					t.Errorf("another plan was approved: %v", err)
				}
				test.decide(t, r, e, func() { time.Sleep(ttl) })
				end := r.wait(q.ID)
				wantEnd(t, end, test.status, test.steps)
				if end.Waits != "" {
					t.Errorf("it waits for %s", end.Waits)
				}
				want := map[hitl.Cause]int{hitl.CauseCritical: 1}
				for cause, n := range test.others {
					want[cause] = n
				}
				if got := r.escalations(); fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("escalations %v, want %v", got, want)
				}
				for i := range end.Steps {
					if s := &end.Steps[i]; s.Reason == "denied" && s.Escalation != e.ID {
						t.Errorf("%s names %q, and %s has decided it", s.Checkpoint, s.Escalation, e.ID)
					}
				}
				stop(r.Coordinator)
			})
		})
	}
}

// The table of proposals in docs/people.md, which has all kinds: no proposal says more than its approval does. A
// question whose workflow a rollback has ended proposes nothing, since nobody can resume it.
func TestProposalsSayWhatTheyDo(t *testing.T) {
	part := func(t *testing.T) *rig {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.made("2", checkpoint.Irreversible, execution.Completed, "1")
		return r
	}
	call := func(r *rig) { // one that asks people, in the workflow that a rollback is about to hold
		r.world.answers["c1"] = rollback.Result{Reason: rollback.ReasonRefused, Status: 409}
		o := hitl.Opening{Key: "call", Level: hitl.Approval, Cause: hitl.CauseCall, Workflow: "w", Requester: "user:bob", Within: time.Hour, Summary: "A call waits."}
		o.Proposal = hitl.Proposal{Kind: hitl.RunCall, Text: "POST /pay unless", RequestHash: "sha-256:1"}
		if _, err := r.escalationStore.Open(ctx, o); err != nil {
			t.Error(err)
		}
	}
	kinds := proposalKinds(t)
	refused := func(r *rig) { r.world.answers["c1"] = rollback.Result{Reason: rollback.ReasonRefused, Status: 409} }
	for name, test := range map[string]struct {
		make     func(t *testing.T) *rig
		spoil    func(r *rig)
		scope    rollback.Scope
		cause    hitl.Cause
		proposal hitl.ProposalKind
		before   rollback.Status // of the rollback before the approval; none is that it waits
		after    rollback.Status
		goesOn   bool // new calls begin after the approval
	}{
		"partial":                   {func(t *testing.T) *rig { return behind(t, 2) }, refused, rollback.SubDAG, hitl.CauseRollbackPartial, hitl.Resume, rollback.Partial, rollback.Partial, true},
		"partial, whole":            {func(t *testing.T) *rig { return behind(t, 2) }, refused, rollback.FullWorkflow, hitl.CauseRollbackPartial, "", rollback.Partial, rollback.Partial, false},
		"failed":                    {func(t *testing.T) *rig { return behind(t, 2) }, refused, rollback.Single, hitl.CauseRollbackFailed, hitl.Resume, rollback.Failed, rollback.Failed, true},
		"many agents":               {func(t *testing.T) *rig { return behind(t, 4) }, nil, rollback.SubDAG, hitl.CauseReach, hitl.Resume, rollback.Completed, rollback.Completed, true},
		"many agents, whole":        {func(t *testing.T) *rig { return behind(t, 4) }, nil, rollback.FullWorkflow, hitl.CauseReach, "", rollback.Completed, rollback.Completed, false},
		"a part that can be undone": {part, nil, rollback.SubDAG, hitl.CauseRollbackPartial, hitl.PartialRollback, "", rollback.Partial, false},
		"a call beside a hold":      {func(t *testing.T) *rig { return behind(t, 2) }, call, rollback.SubDAG, hitl.CauseCall, hitl.RunCall, rollback.Partial, rollback.Partial, false},
		"before what is vital":      {func(t *testing.T) *rig { return chain(t) }, nil, rollback.SubDAG, hitl.CauseCritical, hitl.ContinueRollback, "", rollback.Completed, true},
	} {
		delete(kinds, string(test.proposal))
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := test.make(t)
				if test.spoil != nil {
					test.spoil(r)
				}
				r.start()
				target := "c0"
				if r.ledger.tokens["c0"].ID == "" || test.scope == rollback.Single {
					target = "c1"
				}
				q := request(target, test.scope)
				q.Whole = test.proposal == hitl.PartialRollback
				r.execute(q)
				if synctest.Wait(); test.before != "" {
					if b := r.wait(q.ID); b.Status != test.before {
						t.Fatalf("%+v", b)
					}
				}
				all := r.opened()
				at := slices.IndexFunc(all, func(e hitl.Escalation) bool { return e.Cause == test.cause && e.Proposal.Kind == test.proposal })
				if at < 0 {
					t.Fatalf("%+v", all)
				}
				for i := range all { // each says that it ends its own hold only
					if all[i].Proposal.Kind == hitl.Resume && !strings.Contains(all[i].Proposal.Text, "unless") {
						t.Errorf("%+v", all[i])
					}
					if i != at && all[i].Held && test.goesOn {
						r.says(all[i], true)
					}
				}
				r.says(all[at], true)
				if end := r.wait(q.ID); end.Status != test.after {
					t.Errorf("%+v", end)
				}
				held, _, err := r.escalationStore.Blocks(ctx, "w")
				stopped := r.enters("w")
				if err != nil || (held == nil && stopped == nil) != test.goesOn || held != nil && test.proposal == "" {
					t.Errorf("held by %+v %v, stopped %+v", held, err, stopped)
				}
				stop(r.Coordinator)
			})
		})
	}
	for kind := range kinds {
		t.Errorf("the table has no proposal of the kind %q", kind)
	}
}

// proposalKinds are the kinds of proposals that the code declares. docs/people.md has a row for each.
func proposalKinds(t *testing.T) map[string]bool {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../hitl/decision.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/people.md")
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]bool{"": true}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, is := n.(*ast.ValueSpec)
		if !is {
			return true
		}
		if of, is := spec.Type.(*ast.Ident); !is || of.Name != "ProposalKind" {
			return false
		}
		kind := strings.Trim(spec.Values[0].(*ast.BasicLit).Value, `"`)
		if kinds[kind] = true; !strings.Contains(string(page), "| `"+kind+"` | ") {
			t.Errorf("docs/people.md has no row for the proposal %q", kind)
		}
		return false
	})
	if len(kinds) < 5 {
		t.Fatalf("%v", kinds)
	}
	return kinds
}

// Nobody is asked about what was asked for, about what cannot be undone anyhow, and about what has
// no effect any more.
func TestNobodyIsAskedInVain(t *testing.T) {
	for name, test := range map[string]struct {
		change func(r *rig)
		scope  rollback.Scope
		status rollback.Status
		steps  string
	}{
		"the target": {func(r *rig) { r.severe("c2", ""); r.severe("c1", "e") }, rollback.Single, rollback.Completed, "c1=completed"},
		"undone already": {func(r *rig) {
			r.severe("c2", "")
			r.severe("c2", "e")
			wantEnd(r.t, r.run(request("c2", rollback.Single)), rollback.Completed, "c2=completed")
		}, rollback.SubDAG, rollback.Completed, "c2=completed c1=completed"},
		"irreversible": {func(r *rig) {
			r.made("4", checkpoint.Irreversible, execution.Completed, "2")
		}, rollback.SubDAG, rollback.Partial, "c4=escalated(irreversible) c2=completed c1=completed"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				r.made("2", checkpoint.Restore, execution.Completed, "1")
				r.start()
				test.change(r)
				wantEnd(t, r.run(request("c1", test.scope)), test.status, test.steps)
				if n := r.escalations()[hitl.CauseCritical]; n != 0 {
					t.Errorf("people were asked %d times", n)
				}
				stop(r.Coordinator)
			})
		})
	}
}

// Nor about what another rollback has undone since the plan was made.
func TestNobodyIsAskedForWhatAnotherHasUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Restore, execution.Completed)
		r.made("2", checkpoint.Restore, execution.Completed, "1")
		r.severe("c2", "")
		r.start()
		release := make(chan struct{})
		r.world.hold["c2"] = release
		first, second := request("c2", rollback.SubDAG), request("c1", rollback.SubDAG)
		first.PartOf, second.PartOf = "whole", "whole" // so that the second waits for the first
		r.execute(first)
		synctest.Wait()
		if b := r.execute(second); b.Plan.Levels[0][0].What != rollback.Undo || !b.Plan.Levels[0][0].Review {
			t.Fatalf("%+v", b.Plan)
		}
		close(release)
		wantEnd(t, r.wait(second.ID), rollback.Completed, "c2=completed c1=completed")
		if got := r.escalations(); len(got) > 0 {
			t.Errorf("%v", got)
		}
		stop(r.Coordinator)
	})
}

// Cascade 4.3.4: a wider rollback takes over one that waits for people. What they were asked is
// withdrawn, and the wider one asks for itself.
func TestWiderOneWithdrawsAQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := chain(t)
		r.start()
		narrow, wide := request("c1", rollback.SubDAG), request("c1", rollback.FullWorkflow)
		wide.Operator = "ada"
		r.execute(narrow)
		e := r.question(narrow.ID)
		r.execute(wide)
		asked := r.question(wide.ID)
		if got, err := r.escalationStore.Get(ctx, e.ID); err != nil || got.Status != hitl.Withdrawn || got.Held || asked.ID == e.ID || asked.Requester != "operator:ada" {
			t.Errorf("%+v, %v; %+v", got, err, asked)
		}
		r.says(asked, true)
		wantEnd(t, r.wait(narrow.ID), rollback.Completed, "c3=completed c2=completed c1=completed")
		stop(r.Coordinator)
	})
}

// C-4.3.2-h: where a part may not be undone by itself, people are asked for exactly that: nothing is
// undone before they have approved, nor if they deny, nor if it is another plan by then.
func TestPartialRollbacksWaitForPeople(t *testing.T) {
	type change = func(t *testing.T, r *rig, e hitl.Escalation, late func())
	approve := func(_ *testing.T, r *rig, e hitl.Escalation, _ func()) { r.says(e, true) }
	for name, test := range map[string]struct {
		critical bool // the irreversible one is
		decide   change
		cause    hitl.Cause
		status   rollback.Status
		steps    string
	}{
		"by the policy, approved": {false, approve, hitl.CauseRollbackPartial, rollback.Partial, "c2=completed c3=escalated(irreversible) c1=completed"},
		"critical, approved":      {true, approve, hitl.CauseCritical, rollback.Partial, "c2=completed c3=escalated(irreversible) c1=completed"},
		"approved in another life": {true, func(_ *testing.T, r *rig, e hitl.Escalation, _ func()) {
			stop(r.Coordinator)
			r.says(e, true)
			r.restart()
		}, hitl.CauseCritical, rollback.Partial, "c2=completed c3=escalated(irreversible) c1=completed"},
		"denied": {
			true, func(_ *testing.T, r *rig, e hitl.Escalation, _ func()) { r.says(e, false) }, hitl.CauseCritical,
			rollback.Escalated, "c2=escalated(denied) c3=escalated(irreversible) c1=escalated(denied)",
		},
		"nobody decides": {
			true, func(_ *testing.T, _ *rig, _ hitl.Escalation, late func()) { late() }, hitl.CauseCritical,
			rollback.Escalated, "c2=escalated(timeout) c3=escalated(timeout) c1=escalated(timeout)",
		},
		"another plan by then": {true, func(_ *testing.T, r *rig, e hitl.Escalation, _ func()) {
			r.ledger.mu.Lock()
			r.action("late", "2")
			r.ledger.mu.Unlock()
			r.says(e, true)
		}, hitl.CauseCritical, rollback.Escalated, "c2=escalated(plan-changed) c3=escalated(irreversible) c1=escalated(plan-changed)"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.made("1", checkpoint.Restore, execution.Completed)
				r.made("3", checkpoint.Irreversible, execution.Completed, "1")
				r.made("2", checkpoint.Restore, execution.Completed, "1")
				for i := range r.ledger.nodes {
					r.ledger.nodes[i].Critical = test.critical && r.ledger.nodes[i].ID == "c3"
				}
				r.start()
				q := request("c1", rollback.SubDAG)
				q.Whole = !test.critical
				b := r.execute(q)
				e := r.question(q.ID)
				hash := b.Plan.Hash()
				if e.Level != hitl.Approval || e.Cause != test.cause || e.Held || e.Proposal.Kind != hitl.PartialRollback || e.Proposal.Hash() != fmt.Sprintf("%x", hash) ||
					!strings.Contains(e.Proposal.Text, "is undone: checkpoint c2") || !strings.Contains(e.Proposal.Text, "stays: checkpoint c3 (irreversible") {
					t.Errorf("%+v", e)
				}
				if len(r.world.order) > 0 {
					t.Errorf("%v was undone", r.world.order)
				}
				test.decide(t, r, e, func() { time.Sleep(ttl) })
				wantEnd(t, r.wait(q.ID), test.status, test.steps)
				if test.status == rollback.Escalated && len(r.world.order) > 0 {
					t.Errorf("%v was undone", r.world.order)
				}
				stop(r.Coordinator)
			})
		})
	}
}

// An approval covers a call that was under way when it was asked for, and has ended as the plan says.
func TestPartialRollbackOfACallThatHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.made("1", checkpoint.Irreversible, execution.Completed)
		running, handle := r.claimed("2", checkpoint.Restore, "1")
		r.start()
		q := request("c1", rollback.SubDAG)
		r.execute(q)
		e := r.question(q.ID)
		r.settle("2", running, handle, execution.Completed)
		r.says(e, true)
		wantEnd(t, r.wait(q.ID), rollback.Partial, "c2=completed c1=escalated(irreversible)")
		stop(r.Coordinator)
	})
}

// P5: whatever dies while people are asked, and whether or not the last commit landed: they are asked
// once, nothing is undone before they approve, and nothing twice.
func TestCrashWhilePeopleDecide(t *testing.T) {
	for dies := range 40 {
		for _, lands := range []bool{false, true} {
			over := false
			synctest.Test(t, func(t *testing.T) {
				r := chain(t)
				r.start()
				r.st.mu.Lock()
				r.st.commits, r.st.dies, r.st.lands = 0, dies, lands
				r.st.mu.Unlock()
				q := request("c1", rollback.SubDAG)
				_, _ = r.Execute(ctx, q, nil)
				lives := func() bool { // a life in which it goes on
					synctest.Wait()
					if !r.st.gone() {
						return true
					}
					stop(r.Coordinator)
					r.open()
					r.start()
					r.execute(q)
					return false
				}
				lives()
				e := r.question(q.ID)
				if got := strings.Join(r.world.order, " "); got != "c3" {
					t.Errorf("died at %d, landed %t: undone before the decision: %s", dies, lands, got)
				}
				_, err := r.escalationStore.Decide(ctx, e.ID, hitl.Vote{By: "operator:ann", Every: true, Approve: true, Hash: e.Proposal.Hash()})
				if !lives() && err != nil {
					if _, err := r.escalationStore.Decide(ctx, e.ID, hitl.Vote{By: "operator:ann", Every: true, Approve: true, Hash: e.Proposal.Hash()}); err != nil && !errors.Is(err, hitl.ErrDecided) {
						t.Fatal(err)
					}
				}
				wantEnd(t, r.wait(q.ID), rollback.Completed, "c3=completed c2=completed c1=completed")
				over = r.st.dies > 0 && !r.st.gone()
				if got := r.escalations(); fmt.Sprint(got) != fmt.Sprint(map[hitl.Cause]int{hitl.CauseCritical: 1}) {
					t.Errorf("died at %d, landed %t: %v", dies, lands, got)
				}
				for id, keys := range r.world.effects {
					if len(keys) != 1 {
						t.Errorf("died at %d, landed %t: %s was undone under %v", dies, lands, id, keys)
					}
				}
				stop(r.Coordinator)
			})
			if over && lands {
				return // it did not come to this commit
			}
		}
	}
}

// Those that wait for people do not hold up other rollbacks because of errors.
func TestQuestionsHoldUpNoOtherFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.onError = true
		r.start()
		for i := range rollback.MaxFailures + 1 {
			first, second := fmt.Sprint("a", i), fmt.Sprint("b", i)
			r.made(first, checkpoint.Restore, execution.Completed)
			r.made(second, checkpoint.Restore, execution.Completed, first)
			r.severe("c"+second, "")
		}
		for i := range rollback.MaxFailures + 1 {
			if err := r.Failed(rollback.Failure{Checkpoint: fmt.Sprint("ca", i), By: gateway}).Commit(ctx, r.mem); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if n := r.escalations()[hitl.CauseCritical]; n != rollback.MaxFailures+1 || r.Waiting() != 0 {
			t.Errorf("%d questions, and %d wait", n, r.Waiting())
		}
		stop(r.Coordinator)
	})
}
