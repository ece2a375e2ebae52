package e2e

import (
	"encoding/json"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
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

// Cascade 4.3.2, 4.3.4, P5: a coordinator that knows the draft alone asks for several checkpoints under
// one id, as in Figures 9 and 10. Each pair of both is a rollback with a result of its own, signed for
// that id and checkpoint; they are parts of one, and what one contains of another is undone once. The
// same pair gets the same result, in another life too; with other content it is refused.
func TestCascade434SeveralCheckpointsUnderOneID(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	setting := setup{app: trusting(t, a) + "\nrollback {\n coordinators " + a.issuer.Identity() + "\n}", site: "agent_proxy " + lab.addr + " {\n" + sagaActions + "\n}"}
	g := launch(t, setting)
	s := g.saga(a)
	root := s.do(charge(1))
	leaf := s.do(charge(2), root.checkpoint)
	beside := s.do(charge(3))
	id := rollbackID(1)
	pairs := []rollbackBody{
		{ID: id, Checkpoint: root.checkpoint, Scope: "sub_dag"}, {ID: id, Checkpoint: leaf.checkpoint, Scope: "sub_dag"}, {ID: id, Checkpoint: beside.checkpoint, Scope: "sub_dag"},
	}
	for _, b := range pairs {
		if doc := s.prepare(b, http.StatusOK); doc.Status != "prepared" || doc.ID != id || doc.Checkpoint != b.Checkpoint {
			t.Fatalf("%+v", doc)
		}
	}
	first := make([]reply, len(pairs))
	for i := len(pairs) - 1; i >= 0; i-- { // in reverse topological order
		first[i] = s.g.call(s.executing(rollbackBody{ID: id, Checkpoint: pairs[i].Checkpoint}, ""))
		doc := document[rollbackDoc](t, first[i])
		doc.want(t, "completed")
		signed, err := ect.ParseInsecure(doc.ECT)
		if err != nil {
			t.Fatal(err)
		}
		of, _ := signed.Ext().Text(ect.MemberRollbackID)
		checkpoint, _ := signed.Ext().Text(ect.MemberCheckpointID)
		if doc.ID != id || doc.Checkpoint != pairs[i].Checkpoint || of != id || checkpoint != doc.Checkpoint {
			t.Errorf("%s of %s, signed %s of %s", doc.ID, doc.Checkpoint, of, checkpoint)
		}
	}
	lab.arrived("POST /refunds", 3)
	same := func(when string) {
		t.Helper()
		for i, b := range pairs {
			if got := s.ask(b); got.status != first[i].status || got.body != first[i].body {
				t.Errorf("P5, %s: %d %s, first %d %s", when, got.status, got.body, first[i].status, first[i].body)
			}
			if got := s.look(id + "?checkpoint_id=" + b.Checkpoint); got.body != first[i].body {
				t.Errorf("%s, looked at: %d %s", when, got.status, got.body)
			}
			b.Scope = "single"
			s.ask(b).problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")
		}
	}
	same("at once")
	stop(t)
	setting.store = g.store
	s.g = launch(t, setting)
	same("after a restart")
	lab.arrived("POST /refunds", 3)

	// Later, and side by side, they are asked for in one request each.
	id = rollbackID(2)
	var asked []request
	for n := range 4 {
		asked = append(asked, s.asking(rollbackBody{ID: id, Checkpoint: s.do(charge(10 + n)).checkpoint}))
	}
	var wg sync.WaitGroup
	for _, r := range asked {
		wg.Go(func() {
			if got := s.g.call(r); got.status != http.StatusOK {
				t.Errorf("%d %s", got.status, got.body)
			}
		})
	}
	wg.Wait()
	lab.arrived("POST /refunds", 7)
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
