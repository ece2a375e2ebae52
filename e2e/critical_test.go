package e2e

import (
	"net/http"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// criticalActions are sagaActions whose charges are of severity critical, and mail critical.
const criticalActions = `
	action doc {
		match path /docs/*
		restore
	}
	action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
		}
		severity critical
	}
	action mail {
		match path /mail
		irreversible
		critical
	}`

// errs reports an error of a checkpoint.
func (s *saga) errs(severity, checkpoint string) string {
	s.t.Helper()
	token := s.a.issue(ect.Claims{
		Workflow: s.wid, Action: "error", Parents: []string{checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, severity).
				Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberDescription, "wrong amount"),
	})
	got := s.g.call(request{path: "/.well-known/cascade/errors", reader: nothing{}, header: map[string]string{ect.FieldName: token.Raw()}})
	if got.status != http.StatusCreated {
		s.t.Fatalf("%d %s", got.status, got.body)
	}
	return token.ID()
}

// waitingDoc is a rollback that waits for people: its document, and what they are asked.
type waitingDoc struct {
	rollbackDoc
	Waits    string `json:"waits_for"`
	PlanHash string `json:"plan_hash"`
}

// waits asks for a rollback that waits for people.
func (s *saga) waits(b rollbackBody) waitingDoc {
	s.t.Helper()
	s.begun(b)
	var doc waitingDoc
	eventuallyWithin(s.t, patience, "a question to people", func() bool {
		doc = document[waitingDoc](s.t, s.look(b.ID))
		return doc.Waits != "" || doc.Status != ""
	})
	if doc.Waits == "" || !slices.Contains(doc.Escalations, doc.Waits) || doc.State != "executing" {
		s.t.Fatalf("nobody is asked: %+v", doc)
	}
	return doc
}

// C-4.3.2-h: what is critical is decided when the call is sent, for its action, and by the tokens of
// agents; a later configuration changes none of it. Nothing else is critical.
func TestCascade432Critical(t *testing.T) {
	a, lab := newAgent(t, "a"), newRestLab(t)
	setting := setup{app: trusting(t, a), site: "agent_proxy " + lab.addr + " {" + criticalActions + "\n}"}
	g := launch(t, setting)
	s := g.saga(a)
	root := s.do(put("/docs/x", "1"))
	charged, mail := s.do(charge(1), root.checkpoint), s.do(request{path: "/mail"}, root.checkpoint)
	plain, failed := s.do(put("/docs/plain", "1"), root.checkpoint), s.do(put("/docs/failed", "1"), root.checkpoint)
	urgent := with(a.issue(ect.Claims{
		Workflow: s.wid, Parents: []string{root.checkpoint}, Ext: new(ect.ExtBuilder).Text("atd.resource_priority", "critical"),
	}), put("/docs/urgent", "1"))
	first := g.call(urgent).header.Get("Execution-Checkpoint")
	s.errs("critical", failed.checkpoint)
	s.errs("error", plain.checkpoint)
	stop(t)
	setting.store, setting.site = g.store, lab.site() // which says nothing of it any more
	s.g = launch(t, setting)
	doc := s.prepare(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}, http.StatusConflict)
	want := map[string]string{
		root.checkpoint: "target", charged.checkpoint: "severity", mail.checkpoint: "action", first: "priority",
		failed.checkpoint: "severity", plain.checkpoint: "",
	}
	for _, step := range doc.Steps {
		if word, known := want[step.Checkpoint]; !known || step.Critical != word || step.Review != (word == "severity") {
			t.Errorf("%s: %q, reviewed: %t, want %q", step.Checkpoint, step.Critical, step.Review, word)
		}
		delete(want, step.Checkpoint)
	}
	if len(want) > 0 {
		t.Errorf("there are no steps for %v", want)
	}
}
