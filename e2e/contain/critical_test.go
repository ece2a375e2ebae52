package contain

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// criticalActions are SagaActions whose charges are of severity critical, and mail critical.
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

// C-4.3.2-h: what is critical is decided when the call is sent, for its action, and by the tokens of
// agents; a later configuration changes none of it. Nothing else is critical.
func TestCascade432Critical(t *testing.T) {
	a, lab := harness.NewAgent(t, "a"), harness.NewRestLab(t)
	setting := harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + lab.Addr + " {" + criticalActions + "\n}"}
	g := harness.Launch(t, setting)
	s := g.Saga(a)
	root := s.Do(harness.Put("/docs/x", "1"))
	charged, mail := s.Do(harness.Charge(1), root.Checkpoint), s.Do(harness.Request{Path: "/mail"}, root.Checkpoint)
	plain, failed := s.Do(harness.Put("/docs/plain", "1"), root.Checkpoint), s.Do(harness.Put("/docs/failed", "1"), root.Checkpoint)
	urgent := harness.With(a.Issue(ect.Claims{
		Workflow: s.Wid, Parents: []string{root.Checkpoint}, Ext: new(ect.ExtBuilder).Text("atd.resource_priority", "critical"),
	}), harness.Put("/docs/urgent", "1"))
	first := g.Call(urgent).Header.Get("Execution-Checkpoint")
	s.Errs("critical", failed.Checkpoint)
	s.Errs("error", plain.Checkpoint)
	harness.Stop(t)
	setting.Store, setting.Site = g.Store, lab.Site() // which says nothing of it any more
	s.G = harness.Launch(t, setting)
	doc := s.Prepare(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}, http.StatusConflict)
	want := map[string]string{
		root.Checkpoint: "target", charged.Checkpoint: "severity", mail.Checkpoint: "action", first: "priority",
		failed.Checkpoint: "severity", plain.Checkpoint: "",
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
