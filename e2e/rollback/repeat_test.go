package rollback

import (
	"encoding/json"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P5: the same rollback id gives the same answer, however often it is asked, by whom of
// those who may, and in another life of the gateway a day later.
func TestP5SameAnswer(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	setting := harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + lab.Addr + " {\n" + harness.SagaActions + "\n}"}
	g := harness.Launch(t, setting)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	s.Do(harness.Charge(2), root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Cascade: true}
	first := s.Ask(asked)
	harness.Document[harness.RollbackDoc](t, first).Want(t, "completed")
	same := func(when string) {
		t.Helper()
		for range 2 {
			if got := s.Ask(asked); got.Status != first.Status || got.Body != first.Body {
				t.Errorf("P5, %s: %d %s, first %d %s", when, got.Status, got.Body, first.Status, first.Body)
			}
		}
	}
	same("at once")
	other := asked
	other.Cascade = false
	s.Ask(other).Problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")

	harness.Stop(t)
	setting.Store = g.Store
	s.G = harness.Launch(t, setting)
	same("after a restart")
	g.Store.Pass(25 * time.Hour)
	same("a day later")
	lab.Arrived("POST /refunds", 2)
}

// Cascade 4.3.2, 4.3.4, P5: a coordinator that knows the draft alone asks for several checkpoints under
// one id, as in Figures 9 and 10. Each pair of both is a rollback with a result of its own, signed for
// that id and checkpoint; they are parts of one, and what one contains of another is undone once. The
// same pair gets the same result, in another life too; with other content it is refused.
func TestCascade434SeveralCheckpointsUnderOneID(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	setting := harness.Setup{App: harness.Trusting(t, a) + "\nrollback {\n coordinators " + a.Issuer.Identity() + "\n}", Site: "agent_proxy " + lab.Addr + " {\n" + harness.SagaActions + "\n}"}
	g := harness.Launch(t, setting)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	leaf := s.Do(harness.Charge(2), root.Checkpoint)
	beside := s.Do(harness.Charge(3))
	id := harness.RollbackID(1)
	pairs := []harness.RollbackBody{
		{ID: id, Checkpoint: root.Checkpoint, Scope: "sub_dag"}, {ID: id, Checkpoint: leaf.Checkpoint, Scope: "sub_dag"}, {ID: id, Checkpoint: beside.Checkpoint, Scope: "sub_dag"},
	}
	for _, b := range pairs {
		if doc := s.Prepare(b, http.StatusOK); doc.Status != "prepared" || doc.ID != id || doc.Checkpoint != b.Checkpoint {
			t.Fatalf("%+v", doc)
		}
	}
	first := make([]harness.Reply, len(pairs))
	for i := len(pairs) - 1; i >= 0; i-- { // in reverse topological order
		first[i] = s.G.Call(s.Executing(harness.RollbackBody{ID: id, Checkpoint: pairs[i].Checkpoint}, ""))
		doc := harness.Document[harness.RollbackDoc](t, first[i])
		doc.Want(t, "completed")
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
	lab.Arrived("POST /refunds", 3)
	same := func(when string) {
		t.Helper()
		for i, b := range pairs {
			if got := s.Ask(b); got.Status != first[i].Status || got.Body != first[i].Body {
				t.Errorf("P5, %s: %d %s, first %d %s", when, got.Status, got.Body, first[i].Status, first[i].Body)
			}
			if got := s.Look(id + "?checkpoint_id=" + b.Checkpoint); got.Body != first[i].Body {
				t.Errorf("%s, looked at: %d %s", when, got.Status, got.Body)
			}
			b.Scope = "single"
			s.Ask(b).Problem(t, http.StatusUnprocessableEntity, "rollback-mismatch")
		}
	}
	same("at once")
	harness.Stop(t)
	setting.Store = g.Store
	s.G = harness.Launch(t, setting)
	same("after a restart")
	lab.Arrived("POST /refunds", 3)

	// Later, and side by side, they are asked for in one request each.
	id = harness.RollbackID(2)
	var asked []harness.Request
	for n := range 4 {
		asked = append(asked, s.Asking(harness.RollbackBody{ID: id, Checkpoint: s.Do(harness.Charge(10 + n)).Checkpoint}))
	}
	var wg sync.WaitGroup
	for _, r := range asked {
		wg.Go(func() {
			if got := s.G.Call(r); got.Status != http.StatusOK {
				t.Errorf("%d %s", got.Status, got.Body)
			}
		})
	}
	wg.Wait()
	lab.Arrived("POST /refunds", 7)
}

// P5: many who ask at once for one rollback get one rollback.
func TestP5AskedAtOnce(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(1))
	for _, got := range g.Calls(8, s.Asking(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint})) {
		if got.Status >= 300 {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	s.Finished(harness.RollbackID(1)).Want(t, "completed")
	lab.Arrived("POST /refunds", 1)
}

// Cascade 4.3.4: of two rollbacks that overlap the wider goes on, then the earlier; the
// other is refused with its id.
func TestCascade434Overlap(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	leaf := s.Do(harness.Charge(2), root.Checkpoint)
	hold := harness.NewGate(t)
	lab.On("POST /refunds", 1, harness.RestWaits(hold))
	s.Begun(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Cascade: true})
	harness.Wait(t, hold.Arrived, "the first refund")
	for n, b := range []harness.RollbackBody{
		{ID: harness.RollbackID(2), Checkpoint: leaf.Checkpoint},
		{ID: harness.RollbackID(3), Checkpoint: root.Checkpoint, Cascade: true},
	} {
		got := s.Ask(b)
		got.Problem(t, http.StatusConflict, "rollback-conflict")
		var doc struct {
			Conflicting string `json:"conflicting_rollback_id"`
		}
		if err := json.Unmarshal([]byte(got.Body), &doc); err != nil || doc.Conflicting != harness.RollbackID(1) {
			t.Errorf("%d: %s", n, got.Body)
		}
	}
	hold.Open()
	s.Finished(harness.RollbackID(1)).Want(t, "completed")
	lab.Arrived("POST /refunds", 2)
}

// A narrower rollback that is under way finishes its level and joins the wider one, whose
// result it has from then on.
func TestCascade434Joins(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	leaf := s.Do(harness.Charge(2), root.Checkpoint)
	hold := harness.NewGate(t)
	lab.On("POST /refunds", 1, harness.RestWaits(hold))
	s.Begun(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: leaf.Checkpoint})
	harness.Wait(t, hold.Arrived, "the refund")
	s.Begun(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: root.Checkpoint, Cascade: true})
	hold.Open()
	s.Finished(harness.RollbackID(2)).Want(t, "completed")
	s.Finished(harness.RollbackID(1)).Want(t, "completed")
	lab.WantEffects("charged ch_1", "charged ch_2", "refunded ch_2", "refunded ch_1")
	lab.Arrived("POST /refunds", 2)
}
