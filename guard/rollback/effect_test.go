package rollback_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/template"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// summaries are what people are told.
func (r *rig) summaries() (all []string) {
	r.t.Helper()
	page, err := r.desk.List(ctx, hitl.Filter{}, "", 1000)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range page.Escalations {
		all = append(all, e.Summary)
	}
	return all
}

// P6: what came of an undo is told as far as it is known, to who asked and to people: no
// rollback claims that nothing was undone where nobody knows.
func TestP6EffectIsToldAsFarAsKnown(t *testing.T) {
	for name, c := range map[string]struct {
		answer  undo.Result
		status  rollback.Status
		step    string
		mixed   bool
		doubt   bool
		nothing bool // it is told that nothing was undone
	}{
		"no sense":           {undo.Result{Reason: undo.ReasonUnexpected, Status: 303, Unknown: true}, rollback.Escalated, "c1=escalated(unexpected)", false, true, false},
		"turned away":        {undo.Result{Reason: undo.ReasonUnexpected, Status: 405}, rollback.Failed, "c1=failed(unexpected)", false, false, true},
		"call in doubt":      {undo.Result{Reason: undo.ReasonUnfilled, Unknown: true}, rollback.Escalated, "c1=escalated(template)", false, true, false},
		"refused":            {undo.Result{Reason: undo.ReasonRefused, Status: 409}, rollback.Failed, "c1=failed(refused)", false, false, true},
		"refused afterwards": {undo.Result{Reason: undo.ReasonRefused, Status: 409, Unknown: true}, rollback.Failed, "c1=failed(refused)", false, true, false},
		"a part":             {undo.Result{Reason: undo.ReasonPartial, Status: 200, Unknown: true}, rollback.Partial, "c1=partial(partial)", true, true, false},
		"left to a person":   {undo.Result{Reason: undo.ReasonEscalated, Status: 200}, rollback.Escalated, "c1=escalated(escalated)", false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.made("1", checkpoint.Delegate, guard.Completed)
			r.world.answers["c1"] = c.answer
			r.start()
			b := r.run(request("c1", plan.Single))
			wantEnd(t, b, c.status, c.step)
			if b.Unknown != c.answer.Unknown || b.Mixed != c.mixed || b.Steps[0].Unknown != c.answer.Unknown {
				t.Errorf("unknown %v, mixed %v; of the step %v", b.Unknown, b.Mixed, b.Steps[0].Unknown)
			}
			m, err := r.vault.Mark(ctx, "c1")
			if err != nil || (m.Doubt == b.ID) != c.doubt || (m.Doubt == "") == c.doubt {
				t.Errorf("the mark's doubt is %q, %v", m.Doubt, err)
			}
			told := r.summaries()
			has := func(part string) bool {
				return slices.ContainsFunc(told, func(s string) bool { return strings.Contains(strings.ToLower(s), part) })
			}
			if len(told) == 0 || has("nothing was undone") != c.nothing || has("nobody knows") != c.answer.Unknown {
				t.Errorf("people are told %q", told)
			}
		})
	}
}

// Another rollback says under whose key the first has sent its undo, and its own id.
func TestTakesUpADoubt(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Compensate, guard.Completed)
	r.world.answers["c1"] = undo.Result{Reason: undo.ReasonUnexpected, Status: 303, Unknown: true}
	r.start()
	seen := make(chan undo.Task, 2)
	r.undoer.seen = func(task undo.Task) { seen <- task }
	first, second := r.run(request("c1", plan.Single)), r.run(request("c1", plan.Single))
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
	needs := undo.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/refunds/{response.json./id}"}}
	enough := undo.Spec{Guard: "default", Compensate: &template.Spec{Method: "POST", URL: "/refunds/{execution.id}"}}
	for _, c := range []struct {
		spec undo.Spec
		what plan.What
	}{{needs, plan.Escalate}, {enough, plan.Undo}} {
		r := newRig(t)
		r.spec = c.spec.Encode()
		e, h := r.claimed("1", checkpoint.Compensate)
		if err := e.Settle(ctx, guard.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost}); err != nil {
			t.Fatal(err)
		}
		_ = r.vault.Release(h).Done(errDead) // nothing is recorded of the answer
		r.ledger.nodes[len(r.ledger.nodes)-1].State = plan.Standing
		q := request("c1", plan.Single)
		q.ID = ""
		b, err := r.Plan(ctx, q)
		if err != nil || b.Steps[0].What != c.what || b.Steps[0].Unknown != (c.what == plan.Escalate) {
			t.Errorf("%+v, %v", b.Steps, err)
		}
	}
}

// A step that is irreversible says why, as far as its checkpoint knows, before and after.
func TestIrreversibleStepsSayWhy(t *testing.T) {
	r := newRig(t)
	r.made("1", checkpoint.Irreversible, guard.Completed)
	q := request("c1", plan.Single)
	b, err := r.Plan(ctx, q)
	if err != nil || b.Steps[0].Reason != "irreversible" || b.Steps[0].Cause != "declared" {
		t.Errorf("foreseen: %+v, %v", b.Steps, err)
	}
	r.start()
	b = r.run(q)
	wantEnd(t, b, rollback.Escalated, "c1=escalated(irreversible)")
	r.restart()
	if b, err = r.Get(ctx, q.ID); err != nil || b.Steps[0].Cause != "declared" {
		t.Errorf("recorded: %+v, %v", b.Steps, err)
	}
}
