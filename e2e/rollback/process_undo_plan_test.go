//go:build unix

package rollback

import (
	"fmt"
	"net/http"
	"os"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P5: what a gateway undoes through another one is no task of the plan that the other one has for the workflow, so
// nothing that the plan says holds it up, whether the other gateway verifies tokens or not (ADR 0125). A call of
// an agent is such an undo if its own token proves it, and a stranger's is not.
func TestProcessUndoThroughAPlannedGateway(t *testing.T) {
	t.Parallel() // its gateways are processes
	b, stranger := harness.NewAgent(t, "b"), harness.NewAgent(t, "stranger")
	c := harness.LayStar(t, b, stranger)
	c.Sites[2].App = "identity " + harness.StarIdentity(2) // it trusts nobody
	way := func(n int, match, identity string) string {
		return fmt.Sprintf("@g%d %s\n agent_proxy @g%d %s {\n name g%d\n %s\n %s\n }", n, match, n, c.Sites[n].Addr, n, identity, harness.SagaActions)
	}
	c.Before(0, way(1, "not header X-Way 2", "identity "+harness.StarIdentity(1)), way(2, "header X-Way 2", ""))
	c.Begin()
	s := c.Saga
	file := c.Sites[1].Path("plan.json")
	if err := os.WriteFile(file, []byte(`{"wf_id": "w", "nodes": [{"id": "charge"}, {"id": "ship"}, {"id": "refund"}], "edges": [{"from": "ship", "to": "refund"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		c.Sites[i+1].Operate(t, "workflows", "put", s.Wid, file).Says(t)
	}
	for i := range 2 {
		r := harness.Charge(i + 1)
		r.Header = harness.Headers{"X-Way": fmt.Sprint(i + 1)}
		step := s.Do(r)
		doc := s.Back(harness.RollbackBody{ID: harness.RollbackID(i + 1), Checkpoint: step.Checkpoint, Scope: "single"})
		if doc.Want(t, "completed"); t.Failed() {
			t.Fatalf("through gateway %d: %+v", i+1, doc)
		}
		c.Lab.WantCharge(step.Id(t), "refunded")
	}

	// At the second gateway: an agent compensates its own call.
	inner := c.Sites[1].Gateway(t)
	call := func(by *harness.Agent, action string, ext *ect.ExtBuilder, parents ...string) harness.Reply {
		return inner.Call(harness.With(by.Issue(ect.Claims{Audience: []string{harness.StarIdentity(1)}, Workflow: s.Wid, Action: action, Ext: ext, Parents: parents}), harness.Request{Path: "/refunds", Body: `{"charge":"none"}`}))
	}
	start := func(checkpoint string) *ect.ExtBuilder {
		return new(ect.ExtBuilder).Text(ect.MemberRollbackID, "urn:uuid:"+uuid.NewString()).Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberScope, "single").Text(ect.MemberReason, "a test")
	}
	own := inner.Call(harness.With(b.Issue(ect.Claims{Audience: []string{harness.StarIdentity(1)}, Workflow: s.Wid, Action: "charge"}), harness.Charge(3)))
	checkpoint := own.Header.Get("Execution-Checkpoint")
	if own.Status != http.StatusCreated || checkpoint == "" {
		t.Fatalf("%d %s", own.Status, own.Body)
	}
	call(b, "refund", nil).Problem(t, http.StatusConflict, "dependency-not-done")
	call(b, "give back", nil).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	if got := call(b, "rollback_start", start(checkpoint), checkpoint); got.Header.Get("Execution-Status") != "executed" {
		t.Errorf("its own: %d %s", got.Status, got.Body)
	}
	if got := call(stranger, "rollback_start", start(checkpoint), checkpoint); got.Status != http.StatusForbidden {
		t.Errorf("a stranger: %d %s", got.Status, got.Body)
	}
}
