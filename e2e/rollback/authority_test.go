package rollback

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Cascade 4.1.3 and 4.3.1: a whole workflow is rolled back by a coordinator only, siblings
// and all: one of the configuration; or whoever has begun it, as far as that is its own.
func TestCascade413FullWorkflow(t *testing.T) {
	a, b, boss := harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "boss")
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{
		App:  harness.Trusting(t, a, b, boss) + "\n rollback {\n coordinators " + boss.Issuer.Identity() + "\n }",
		Site: "agent_proxy " + lab.Addr + " {\n" + harness.SagaActions + "\n}",
	})
	s, other := g.Saga(a), g.Saga(b)
	other.Wid = s.Wid
	root := s.Do(harness.Charge(1))
	sibling := other.Do(harness.Charge(2)) // a beginning of b's own
	below := other.Do(harness.Charge(3), root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "full_workflow"}
	other.Ask(asked).Problem(t, http.StatusForbidden, "not-in-workflow")
	mine := asked
	mine.Checkpoint = sibling.Checkpoint
	other.Ask(mine).Problem(t, http.StatusForbidden, "coordinator-required")
	lab.Arrived("POST /refunds", 0)
	chief := g.Saga(boss)
	chief.Wid = s.Wid
	doc := chief.Back(asked)
	doc.Want(t, "completed")
	if len(doc.Steps) != 3 {
		t.Errorf("%+v", doc.Steps)
	}
	for _, step := range []harness.SagaStep{root, sibling, below} {
		lab.WantCharge(step.Id(t), "refunded")
	}

	// Who was first has begun it. What others do under the same id takes nothing from that,
	// and stays, unless it follows from what is undone.
	first, stranger := g.Saga(a), g.Saga(b)
	stranger.Wid = first.Wid
	root, sibling = first.Do(harness.Charge(6)), stranger.Do(harness.Charge(7))
	below = stranger.Do(harness.Charge(8), root.Checkpoint)
	doc = first.Back(harness.RollbackBody{Checkpoint: root.Checkpoint, Scope: "full_workflow"})
	doc.Want(t, "completed")
	if len(doc.Steps) != 2 || doc.Others != 1 {
		t.Errorf("%+v", doc)
	}
	lab.WantCharge(root.Id(t), "refunded")
	lab.WantCharge(below.Id(t), "refunded")
	lab.WantCharge(sibling.Id(t), "open")

	alone := g.Saga(a)
	one, second := alone.Do(harness.Charge(4)), alone.Do(harness.Charge(5))
	alone.Back(harness.RollbackBody{Checkpoint: one.Checkpoint, Scope: "full_workflow"}).Want(t, "completed")
	lab.WantCharge(second.Id(t), "refunded")
}

// ATD "Hierarchical Checkpoints": rolling back a group rolls back all that its par names.
func TestRollbackOfAGroup(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	one, two, three := s.Do(harness.Charge(1)), s.Do(harness.Charge(2)), s.Do(harness.Charge(3))
	g.SettledView(a, s.Wid, 9)
	group := a.Issue(ect.Claims{
		Workflow: s.Wid, Action: "checkpoint", Parents: []string{one.Checkpoint, two.Checkpoint}, Output: ect.Sum([]byte("both")),
		Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Int(ect.MemberTTL, 3600).
			Text(ect.MemberRollbackURI, "/.well-known/cascade/rollback").Text(ect.MemberTarget, "both").Text(ect.MemberDescription, "both"),
	})
	// It comes with a call, beside the call's own token.
	next := s.Calling(harness.Charge(4))
	next.Header[ect.FieldName] = group.Raw() + ", " + next.Header[ect.FieldName]
	if got := g.Call(next); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: group.ID()}).Terminal(t, http.StatusConflict, "depended-on") // by that call
	s.Back(harness.RollbackBody{Checkpoint: group.ID(), Keep: true}).Want(t, "completed")
	lab.WantCharge(one.Id(t), "refunded")
	lab.WantCharge(two.Id(t), "refunded")
	lab.WantCharge(three.Id(t), "open")
	lab.WantCharge("ch_4", "open")
}
