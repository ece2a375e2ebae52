package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// preparedDoc is the answer to a request to prepare.
type preparedDoc struct {
	rollbackDoc
	PlanHash     string `json:"plan_hash"`
	Until        string `json:"reserved_until"`
	Code         string `json:"reason_code"`
	Conflicting  string `json:"conflicting_rollback_id"`
	Irreversible []string
	Agents       []struct{ Agent, Status, Reason, Checkpoint string }
}

// prepare asks for phase 1 of a rollback, as cascade Figure 9 does.
func (s *saga) prepare(b rollbackBody, status int) preparedDoc {
	s.t.Helper()
	r := s.asking(b)
	r.path += "/prepare"
	got := s.g.call(r)
	if got.status != status {
		s.t.Fatalf("prepare: %d %s", got.status, got.body)
	}
	var doc preparedDoc
	if err := json.Unmarshal([]byte(got.body), &doc); err != nil {
		s.t.Fatalf("%v: %s", err, got.body)
	}
	return doc
}

// executing is phase 2 of a rollback, as cascade Figure 10 has it, for one plan.
func (s *saga) executing(b rollbackBody, hash string) request {
	s.t.Helper()
	text, err := json.Marshal(map[string]string{"rollback_id": b.ID, "checkpoint_id": b.Checkpoint, "phase": "execute", "plan_hash": hash})
	if err != nil {
		s.t.Fatal(err)
	}
	token := s.a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_start", Parents: []string{b.Checkpoint}})
	return with(token, request{path: "/.well-known/cascade/rollback", body: string(text)})
}

// C-4.3.2-a to -d, -g, C-4.3.1-c, -d: two phases. The first touches nothing, and holds back what
// would follow from the plan, over a restart too; the second carries out the plan of the first.
func TestCascade432TwoPhases(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	setting := setup{app: trusting(t, a), site: lab.site()}
	g := launch(t, setting)
	s := g.saga(a)
	root := s.do(charge(1))
	leaf := s.do(charge(2), root.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	first := s.prepare(asked, http.StatusOK)
	if first.Status != "prepared" || first.State != "prepared" || first.PlanHash == "" || first.Until == "" || len(first.Steps) != 2 ||
		first.Steps[0].Checkpoint != leaf.checkpoint || first.Steps[1].Checkpoint != root.checkpoint || len(first.Irreversible) > 0 {
		t.Errorf("%+v", first)
	}
	for _, agent := range first.Agents {
		if agent.Status != "prepared" {
			t.Errorf("%+v", first.Agents)
		}
	}
	held := func(when string) {
		t.Helper()
		s.try(charge(3), leaf.checkpoint).problem(t, http.StatusConflict, "workflow-paused")
		if again := s.prepare(asked, http.StatusOK); again.Until != first.Until || again.PlanHash != first.PlanHash {
			t.Errorf("%s: %+v, first %+v", when, again, first)
		}
		if shown := document[preparedDoc](t, s.look(rollbackID(1))); shown.Status != "prepared" || shown.PlanHash != first.PlanHash {
			t.Errorf("%s: %+v", when, shown)
		}
	}
	held("at once")
	s.do(charge(4)) // which does not follow from it
	stop(t)
	setting.store = g.store
	g = launch(t, setting)
	s.g = g
	held("after a restart")
	lab.arrived("POST /refunds", 0)

	other := asked
	other.ID = rollbackID(2)
	if doc := s.prepare(other, http.StatusConflict); doc.Status != "cannot_prepare" || doc.Code != "conflict" || doc.Conflicting != rollbackID(1) {
		t.Errorf("%+v", doc)
	}
	s.ask(other).problem(t, http.StatusConflict, "rollback-conflict")

	done := document[rollbackDoc](t, g.call(s.executing(asked, first.PlanHash)))
	done.want(t, "completed")
	if done.Scope != "sub_dag" || len(done.Steps) != 2 {
		t.Errorf("%+v", done)
	}
	s.do(charge(3), root.checkpoint)
	lab.arrived("POST /refunds", 2)
}

// C-4.3.2-e: who cannot prepare says so with its reason, and reserves nothing. A dry run says the
// same of what could be prepared.
func TestCascade432CannotPrepare(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}

	r := s.asking(asked)
	r.body = r.body[:len(r.body)-1] + `,"dry_run":true}`
	got := g.call(r)
	dry := document[preparedDoc](t, got)
	if got.status != http.StatusOK || dry.Status != "prepared" || dry.State != "planned" || dry.Until != "" || dry.PlanHash == "" {
		t.Errorf("%d %s", got.status, got.body)
	}
	mail := s.do(request{path: "/mail"}, root.checkpoint) // nothing was reserved
	doc := s.prepare(asked, http.StatusConflict)
	if doc.Status != "cannot_prepare" || doc.Until != "" || len(doc.Irreversible) != 1 || doc.Irreversible[0] != mail.checkpoint || doc.PlanHash == dry.PlanHash {
		t.Errorf("%+v", doc)
	}
	if len(doc.Agents) != 1 || doc.Agents[0].Status != "cannot_prepare" || doc.Agents[0].Reason != "irreversible" {
		t.Errorf("%+v", doc.Agents)
	}
	alone := asked
	alone.Scope = "single"
	if doc := s.prepare(alone, http.StatusConflict); doc.Code != "depended-on" || len(doc.Dependants) == 0 {
		t.Errorf("%+v", doc)
	}
	if got := s.look(rollbackID(1)); got.status != http.StatusForbidden {
		t.Errorf("what could not be prepared is known: %d %s", got.status, got.body)
	}
	s.do(charge(2), root.checkpoint)
	lab.arrived("POST /refunds", 0)
}

// Settled: what was prepared and is another plan by now is not carried out, and prepared anew.
func TestCascade432PlanChanged(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	hold := newGate(t)
	lab.on("POST /charges", 1, restWaits(hold))
	under := make(chan sagaStep, 1)
	call := s.calling(charge(2), root.checkpoint)
	go func() { under <- sagaStep{"", g.call(call)} }()
	wait(t, hold.arrived, "the second charge")
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	first := s.prepare(asked, http.StatusOK)
	hold.open()
	wait(t, under, "its answer")
	var now preparedDoc
	for _, hash := range []string{first.PlanHash, strings.Repeat("0", 64)} { // zeros are a hash like any other
		got := g.call(s.executing(asked, hash))
		got.problem(t, http.StatusConflict, "plan-changed")
		now = s.prepare(asked, http.StatusOK)
		var changed struct {
			PlanHash string `json:"plan_hash"`
		}
		if err := json.Unmarshal([]byte(got.body), &changed); err != nil || changed.PlanHash == hash || changed.PlanHash != now.PlanHash {
			t.Errorf("%s, then %s, then %s", hash, changed.PlanHash, now.PlanHash)
		}
	}
	lab.arrived("POST /refunds", 0)
	document[rollbackDoc](t, g.call(s.executing(asked, now.PlanHash))).want(t, "completed")
	lab.arrived("POST /refunds", 2)
}

// C-4.3.2-d, -e: a resource that somebody has changed since the call is not prepared, neither by itself nor behind
// other changes of the same rollback; nothing is undone before people have decided. Several changes of one resource
// are prepared as long as the last one stands there.
func TestCascade432ChangedSince(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	lab.write("/docs/x", `{"n":1}`)
	root := s.do(charge(1))
	edit := s.do(put("/docs/x", `{"n":2}`), root.checkpoint)
	s.do(put("/docs/x", `{"n":3}`), edit.checkpoint)
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	if doc := s.prepare(asked, http.StatusOK); doc.Status != "prepared" {
		t.Errorf("%+v", doc)
	}
	asked.Phase = "release"
	s.prepare(asked, http.StatusOK)
	asked.Phase = ""
	lab.write("/docs/x", `{"n":4}`)
	doc := s.prepare(asked, http.StatusConflict)
	if doc.Status != "cannot_prepare" || len(doc.Agents) != 1 || doc.Agents[0].Reason != "changed-since" {
		t.Errorf("%+v", doc)
	}
	s.waits(asked)
	lab.wantCharge(root.id(t), "open")
	lab.wantDoc("/docs/x", `{"n":4}`)
}

// A reservation whose requester never comes back ends by itself.
func TestCascade432ReservationEnds(t *testing.T) {
	a := newAgent(t, "a")
	lab := newRestLab(t)
	g := launch(t, setup{app: trusting(t, a) + "\nrollback {\n reservation 1s\n}", site: lab.site()})
	s := g.saga(a)
	root := s.do(charge(1))
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	s.prepare(asked, http.StatusOK)
	eventually(t, "a call that follows begins", func() bool { return s.try(charge(2), root.checkpoint).status < 300 })
	if doc := s.prepare(asked, http.StatusOK); len(doc.Steps) != 2 {
		t.Errorf("%+v", doc)
	}
}
