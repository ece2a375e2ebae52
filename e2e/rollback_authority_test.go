package e2e

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// Cascade 4.1.3 and 4.3.1: a whole workflow is rolled back by a coordinator only, siblings
// and all: one of the configuration; or whoever has begun it, as far as that is its own.
func TestCascade413FullWorkflow(t *testing.T) {
	a, b, boss := newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "boss")
	lab := newRestLab(t)
	g := launch(t, setup{
		app:  trusting(t, a, b, boss) + "\n rollback {\n coordinators " + boss.issuer.Identity() + "\n }",
		site: "agent_proxy " + lab.addr + " {\n" + sagaActions + "\n}",
	})
	s, other := g.saga(a), g.saga(b)
	other.wid = s.wid
	root := s.do(charge(1))
	sibling := other.do(charge(2)) // a beginning of b's own
	below := other.do(charge(3), root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "full_workflow"}
	other.ask(asked).problem(t, http.StatusForbidden, "not-in-workflow")
	mine := asked
	mine.Checkpoint = sibling.checkpoint
	other.ask(mine).problem(t, http.StatusForbidden, "coordinator-required")
	lab.arrived("POST /refunds", 0)
	chief := g.saga(boss)
	chief.wid = s.wid
	doc := chief.back(asked)
	doc.want(t, "completed")
	if len(doc.Steps) != 3 {
		t.Errorf("%+v", doc.Steps)
	}
	for _, step := range []sagaStep{root, sibling, below} {
		lab.wantCharge(step.id(t), "refunded")
	}

	// Who was first has begun it. What others do under the same id takes nothing from that,
	// and stays, unless it follows from what is undone.
	first, stranger := g.saga(a), g.saga(b)
	stranger.wid = first.wid
	root, sibling = first.do(charge(6)), stranger.do(charge(7))
	below = stranger.do(charge(8), root.checkpoint)
	doc = first.back(rollbackBody{Checkpoint: root.checkpoint, Scope: "full_workflow"})
	doc.want(t, "completed")
	if len(doc.Steps) != 2 || doc.Others != 1 {
		t.Errorf("%+v", doc)
	}
	lab.wantCharge(root.id(t), "refunded")
	lab.wantCharge(below.id(t), "refunded")
	lab.wantCharge(sibling.id(t), "open")

	alone := g.saga(a)
	one, second := alone.do(charge(4)), alone.do(charge(5))
	alone.back(rollbackBody{Checkpoint: one.checkpoint, Scope: "full_workflow"}).want(t, "completed")
	lab.wantCharge(second.id(t), "refunded")
}

// ATD "Hierarchical Checkpoints": rolling back a group rolls back all that its par names.
func TestRollbackOfAGroup(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	one, two, three := s.do(charge(1)), s.do(charge(2)), s.do(charge(3))
	g.settledView(a, s.wid, 9)
	group := a.issue(ect.Claims{
		Workflow: s.wid, Action: "checkpoint", Parents: []string{one.checkpoint, two.checkpoint}, Output: ect.Sum([]byte("both")),
		Ext: new(ect.ExtBuilder).Bool(ect.MemberReversible, true).Int(ect.MemberTTL, 3600).
			Text(ect.MemberRollbackURI, "/.well-known/cascade/rollback").Text(ect.MemberTarget, "both").Text(ect.MemberDescription, "both"),
	})
	// It comes with a call, beside the call's own token.
	next := s.calling(charge(4))
	next.header[ect.FieldName] = group.Raw() + ", " + next.header[ect.FieldName]
	if got := g.call(next); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: group.ID()}).terminal(t, http.StatusConflict, "depended-on") // by that call
	s.back(rollbackBody{Checkpoint: group.ID(), Keep: true}).want(t, "completed")
	lab.wantCharge(one.id(t), "refunded")
	lab.wantCharge(two.id(t), "refunded")
	lab.wantCharge(three.id(t), "open")
	lab.wantCharge("ch_4", "open")
}
