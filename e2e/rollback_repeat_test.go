package e2e

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"
)

// P5: the same rollback id gives the same answer, however often it is asked, by whom of
// those who may, and in another life of the gateway a day later.
func TestP5SameAnswer(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	setting := setup{app: trusting(t, a), site: "agent_proxy " + lab.addr + " {\n" + sagaActions + "\n}"}
	g := launch(t, setting)
	s := g.saga(a)
	root := s.do(charge(1))
	s.do(charge(2), root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true}
	first := s.ask(asked)
	document[rollbackDoc](t, first).want(t, "completed")
	same := func(when string) {
		t.Helper()
		for range 2 {
			if got := s.ask(asked); got.status != first.status || got.body != first.body {
				t.Errorf("P5, %s: %d %s, first %d %s", when, got.status, got.body, first.status, first.body)
			}
		}
	}
	same("at once")
	other := asked
	other.Cascade = false
	s.ask(other).problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")

	stop(t)
	setting.store = g.store
	s.g = launch(t, setting)
	same("after a restart")
	g.store.pass(25 * time.Hour)
	same("a day later")
	lab.arrived("POST /refunds", 2)
}

// P5: many who ask at once for one rollback get one rollback.
func TestP5AskedAtOnce(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	step := s.do(charge(1))
	for _, got := range g.calls(8, s.asking(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint})) {
		if got.status >= 300 {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	s.finished(rollbackID(1)).want(t, "completed")
	lab.arrived("POST /refunds", 1)
}

// Cascade 4.3.4: of two rollbacks that overlap the wider goes on, then the earlier; the
// other is refused with its id.
func TestCascade434Overlap(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	leaf := s.do(charge(2), root.checkpoint)
	hold := newGate(t)
	lab.on("POST /refunds", 1, restWaits(hold))
	s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true})
	wait(t, hold.arrived, "the first refund")
	for n, b := range []rollbackBody{
		{ID: rollbackID(2), Checkpoint: leaf.checkpoint},
		{ID: rollbackID(3), Checkpoint: root.checkpoint, Cascade: true},
	} {
		got := s.ask(b)
		got.problem(t, http.StatusConflict, "rollback-conflict")
		var doc struct {
			Conflicting string `json:"conflicting_rollback_id"`
		}
		if err := json.Unmarshal([]byte(got.body), &doc); err != nil || doc.Conflicting != rollbackID(1) {
			t.Errorf("%d: %s", n, got.body)
		}
	}
	hold.open()
	s.finished(rollbackID(1)).want(t, "completed")
	lab.arrived("POST /refunds", 2)
}

// A narrower rollback that is under way finishes its level and joins the wider one, whose
// result it has from then on.
func TestCascade434Joins(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	leaf := s.do(charge(2), root.checkpoint)
	hold := newGate(t)
	lab.on("POST /refunds", 1, restWaits(hold))
	s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: leaf.checkpoint})
	wait(t, hold.arrived, "the refund")
	s.begun(rollbackBody{ID: rollbackID(2), Checkpoint: root.checkpoint, Cascade: true})
	hold.open()
	s.finished(rollbackID(2)).want(t, "completed")
	s.finished(rollbackID(1)).want(t, "completed")
	lab.wantEffects("charged ch_1", "charged ch_2", "refunded ch_2", "refunded ch_1")
	lab.arrived("POST /refunds", 2)
}
