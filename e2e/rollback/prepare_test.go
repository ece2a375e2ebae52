package rollback

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// C-4.3.2-a to -d, -g, C-4.3.1-c, -d: two phases. The first touches nothing, and holds back what
// would follow from the plan, over a restart too; the second carries out the plan of the first.
func TestCascade432TwoPhases(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	setting := harness.Setup{App: harness.Trusting(t, a), Site: lab.Site()}
	g := harness.Launch(t, setting)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	leaf := s.Do(harness.Charge(2), root.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	first := s.Prepare(asked, http.StatusOK)
	if first.Status != "prepared" || first.State != "prepared" || first.PlanHash == "" || first.Until == "" || len(first.Steps) != 2 ||
		first.Steps[0].Checkpoint != leaf.Checkpoint || first.Steps[1].Checkpoint != root.Checkpoint || len(first.Irreversible) > 0 {
		t.Errorf("%+v", first)
	}
	for _, agent := range first.Agents {
		if agent.Status != "prepared" {
			t.Errorf("%+v", first.Agents)
		}
	}
	held := func(when string) {
		t.Helper()
		s.Try(harness.Charge(3), leaf.Checkpoint).Problem(t, http.StatusConflict, "workflow-paused")
		if again := s.Prepare(asked, http.StatusOK); again.Until != first.Until || again.PlanHash != first.PlanHash {
			t.Errorf("%s: %+v, first %+v", when, again, first)
		}
		if shown := harness.Document[harness.PreparedDoc](t, s.Look(harness.RollbackID(1))); shown.Status != "prepared" || shown.PlanHash != first.PlanHash {
			t.Errorf("%s: %+v", when, shown)
		}
	}
	held("at once")
	s.Do(harness.Charge(4)) // which does not follow from it
	harness.Stop(t)
	setting.Store = g.Store
	g = harness.Launch(t, setting)
	s.G = g
	held("after a restart")
	lab.Arrived("POST /refunds", 0)

	other := asked
	other.ID = harness.RollbackID(2)
	if doc := s.Prepare(other, http.StatusConflict); doc.Status != "cannot_prepare" || doc.Code != "conflict" || doc.Conflicting != harness.RollbackID(1) {
		t.Errorf("%+v", doc)
	}
	s.Ask(other).Problem(t, http.StatusConflict, "rollback-conflict")

	done := harness.Document[harness.RollbackDoc](t, g.Call(s.Executing(asked, first.PlanHash)))
	done.Want(t, "completed")
	if done.Scope != "sub_dag" || len(done.Steps) != 2 {
		t.Errorf("%+v", done)
	}
	s.Do(harness.Charge(3), root.Checkpoint)
	lab.Arrived("POST /refunds", 2)
}

// C-4.3.2-e: who cannot prepare says so with its reason, and reserves nothing. A dry run says the
// same of what could be prepared.
func TestCascade432CannotPrepare(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}

	r := s.Asking(asked)
	r.Body = r.Body[:len(r.Body)-1] + `,"dry_run":true}`
	got := g.Call(r)
	dry := harness.Document[harness.PreparedDoc](t, got)
	if got.Status != http.StatusOK || dry.Status != "prepared" || dry.State != "planned" || dry.Until != "" || dry.PlanHash == "" {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	mail := s.Do(harness.Request{Path: "/mail"}, root.Checkpoint) // nothing was reserved
	doc := s.Prepare(asked, http.StatusConflict)
	if doc.Status != "cannot_prepare" || doc.Until != "" || len(doc.Irreversible) != 1 || doc.Irreversible[0] != mail.Checkpoint || doc.PlanHash == dry.PlanHash {
		t.Errorf("%+v", doc)
	}
	if len(doc.Agents) != 1 || doc.Agents[0].Status != "cannot_prepare" || doc.Agents[0].Reason != "irreversible" {
		t.Errorf("%+v", doc.Agents)
	}
	alone := asked
	alone.Scope = "single"
	if doc := s.Prepare(alone, http.StatusConflict); doc.Code != "depended-on" || len(doc.Dependants) == 0 {
		t.Errorf("%+v", doc)
	}
	if got := s.Look(harness.RollbackID(1)); got.Status != http.StatusForbidden {
		t.Errorf("what could not be prepared is known: %d %s", got.Status, got.Body)
	}
	s.Do(harness.Charge(2), root.Checkpoint)
	lab.Arrived("POST /refunds", 0)
}

// Settled: what was prepared and is another plan by now is not carried out, and prepared anew.
func TestCascade432PlanChanged(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	hold := harness.NewGate(t)
	lab.On("POST /charges", 1, harness.RestWaits(hold))
	under := make(chan harness.SagaStep, 1)
	call := s.Calling(harness.Charge(2), root.Checkpoint)
	go func() { under <- harness.SagaStep{Checkpoint: "", Reply: g.Call(call)} }()
	harness.Wait(t, hold.Arrived, "the second charge")
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	first := s.Prepare(asked, http.StatusOK)
	hold.Open()
	harness.Wait(t, under, "its answer")
	var now harness.PreparedDoc
	for _, hash := range []string{first.PlanHash, strings.Repeat("0", 64)} { // zeros are a hash like any other
		got := g.Call(s.Executing(asked, hash))
		got.Problem(t, http.StatusConflict, "plan-changed")
		now = s.Prepare(asked, http.StatusOK)
		var changed struct {
			PlanHash string `json:"plan_hash"`
		}
		if err := json.Unmarshal([]byte(got.Body), &changed); err != nil || changed.PlanHash == hash || changed.PlanHash != now.PlanHash {
			t.Errorf("%s, then %s, then %s", hash, changed.PlanHash, now.PlanHash)
		}
	}
	lab.Arrived("POST /refunds", 0)
	harness.Document[harness.RollbackDoc](t, g.Call(s.Executing(asked, now.PlanHash))).Want(t, "completed")
	lab.Arrived("POST /refunds", 2)
}

// C-4.3.2-d, -e: a resource that somebody has changed since the call is not prepared, neither by itself nor behind
// other changes of the same rollback; nothing is undone before people have decided. Several changes of one resource
// are prepared as long as the last one stands there.
func TestCascade432ChangedSince(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Charge(1))
	edit := s.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	s.Do(harness.Put("/docs/x", `{"n":3}`), edit.Checkpoint)
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	if doc := s.Prepare(asked, http.StatusOK); doc.Status != "prepared" {
		t.Errorf("%+v", doc)
	}
	asked.Phase = "release"
	s.Prepare(asked, http.StatusOK)
	asked.Phase = ""
	lab.Write("/docs/x", `{"n":4}`)
	doc := s.Prepare(asked, http.StatusConflict)
	if doc.Status != "cannot_prepare" || len(doc.Agents) != 1 || doc.Agents[0].Reason != "changed-since" {
		t.Errorf("%+v", doc)
	}
	s.Waits(asked)
	lab.WantCharge(root.Id(t), "open")
	lab.WantDoc("/docs/x", `{"n":4}`)
}

// A reservation whose requester never comes back ends by itself.
func TestCascade432ReservationEnds(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab := harness.NewRestLab(t)
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + "\nrollback {\n reservation 1s\n}", Site: lab.Site()})
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	s.Prepare(asked, http.StatusOK)
	harness.Eventually(t, "a call that follows begins", func() bool { return s.Try(harness.Charge(2), root.Checkpoint).Status < 300 })
	if doc := s.Prepare(asked, http.StatusOK); len(doc.Steps) != 2 {
		t.Errorf("%+v", doc)
	}
}
