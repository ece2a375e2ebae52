package e2e

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
)

// Cascade 4.1.1 and 4.1.3: a sub-DAG is undone in reverse topological order; what does not
// follow from the checkpoint stays.
func TestCascade411Order(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	before := s.do(charge(1))
	root := s.do(put("/docs/x", `{"n":2}`))
	middle := s.do(charge(2), root.checkpoint)
	leaf := s.do(put("/docs/y", `{"n":2}`), middle.checkpoint)
	last := s.do(charge(3), leaf.checkpoint)
	s.back(rollbackBody{Checkpoint: root.checkpoint, Scope: "sub_dag"}).want(t, "completed")
	lab.wantEffects("charged ch_1", "changed /docs/x", "charged ch_2", "created /docs/y", "charged ch_3",
		"refunded "+last.id(t), "deleted /docs/y", "refunded "+middle.id(t), "changed /docs/x")
	lab.wantDoc("/docs/x", `{"n":1}`)
	lab.wantCharge(before.id(t), "open")
}

// Scope single, the default: consequences stay.
func TestCascade413Single(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	next := s.do(charge(2), root.checkpoint)
	s.back(rollbackBody{Checkpoint: root.checkpoint}).want(t, "completed")
	lab.wantCharge(root.id(t), "refunded")
	lab.wantCharge(next.id(t), "open")
	// `cascade` asks for the rest too; what is undone stays undone.
	s.back(rollbackBody{Checkpoint: root.checkpoint, Cascade: true}).want(t, "completed")
	lab.wantCharge(next.id(t), "refunded")
	lab.arrived("POST /refunds", 2)
}

// A barrier stands between levels: what comes before is not undone while what follows from
// it is being undone.
func TestCascade411Barrier(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	s.do(charge(2), root.checkpoint)
	hold := newGate(t)
	lab.on("POST /refunds", 1, restWaits(hold))
	s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true})
	wait(t, hold.arrived, "the first refund")
	lab.wantCharge(root.id(t), "open")
	lab.arrived("POST /refunds", 1)
	hold.open()
	s.finished(rollbackID(1)).want(t, "completed")
	lab.wantCharge(root.id(t), "refunded")
}

// Cascade 4.2.1: an irreversible action is escalated and recorded, never skipped, and the
// others are undone.
func TestCascade421Irreversible(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	mail := s.do(request{path: "/mail"}, root.checkpoint)
	doc := s.back(rollbackBody{Checkpoint: mail.checkpoint})
	doc.want(t, "escalated", "irreversible")
	if len(doc.Escalations) == 0 {
		t.Errorf("%+v", doc)
	}
	lab.arrived("POST /mail", 1)
	doc = s.back(rollbackBody{Checkpoint: root.checkpoint, Cascade: true})
	if doc.Status == "completed" {
		t.Errorf("P6: %+v", doc)
	}
}

// A call in flight is waited for, then undone.
func TestRollbackWaitsForACallInFlight(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	hold := newGate(t)
	lab.on("POST /charges", 1, restWaits(hold))
	late := g.begin(s.calling(charge(2), root.checkpoint))
	wait(t, hold.arrived, "the second charge")
	s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true})
	lab.arrived("POST /refunds", 0)
	hold.open()
	late.answer()
	s.finished(rollbackID(1)).want(t, "completed")
	lab.wantEffects("charged ch_1", "charged ch_2", "refunded ch_2", "refunded ch_1")
}

// Facts 7.4, empty and hanging: the undo of a call that never ran succeeds and blocks the
// late call. This is cancellation, not rollback (architecture brief).
func TestRollbackOfACallThatNeverRan(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	lab.down()
	r := s.calling(charge(1))
	refused := g.call(r)
	checkpoint := refused.header.Get("Execution-Checkpoint")
	if refused.status != http.StatusBadGateway || checkpoint == "" {
		t.Fatalf("%d %v %s", refused.status, refused.header, refused.body)
	}
	doc := s.back(rollbackBody{Checkpoint: checkpoint})
	doc.want(t, "completed")
	lab.up()
	g.call(r).terminal(t, http.StatusConflict, "rolled-back")
	lab.wantEffects()
}

// A late duplicate of what was undone is refused, also under another token.
func TestRollbackRefusesLateDuplicates(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	r := s.calling(charge(1))
	r.id = "order-7"
	first := g.call(r)
	s.back(rollbackBody{Checkpoint: first.header.Get("Execution-Checkpoint")}).want(t, "completed")
	g.call(r).terminal(t, http.StatusConflict, "rolled-back")
	again := s.calling(charge(1))
	again.id = "order-7"
	g.call(again).terminal(t, http.StatusConflict, "rolled-back")
	lab.wantEffects("charged ch_1", "refunded ch_1")
}

// DESIGN "Checkpoints and rollback": undo traffic passes open breakers.
func TestRollbackPassesAnOpenBreaker(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	root := s.do(put("/docs/x", `{"n":2}`))
	s.do(charge(1), root.checkpoint)
	force(t, lab.addr, breaker.ForcedOpen)
	t.Cleanup(func() { force(t, lab.addr, breaker.ForcedClosed) })
	s.try(charge(2)).problem(t, http.StatusServiceUnavailable, "circuit-open")
	s.back(rollbackBody{Checkpoint: root.checkpoint, Cascade: true}).want(t, "completed")
	lab.wantDoc("/docs/x", `{"n":1}`)
	lab.wantCharge("ch_1", "refunded")
}

// What a call has left is read also where the breaker has opened meanwhile: else a call
// that has run could not be undone.
func TestRollbackOfACallDuringWhichTheBreakerOpened(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	hold := newGate(t)
	lab.on("PUT /docs/x", 1, restWaits(hold))
	late := g.begin(s.calling(put("/docs/x", `{"n":2}`)))
	wait(t, hold.arrived, "the call")
	force(t, lab.addr, breaker.ForcedOpen)
	t.Cleanup(func() { force(t, lab.addr, breaker.ForcedClosed) })
	hold.open()
	got := late.answer()
	s.back(rollbackBody{Checkpoint: got.header.Get("Execution-Checkpoint")}).want(t, "completed")
	lab.wantDoc("/docs/x", `{"n":1}`)
}
