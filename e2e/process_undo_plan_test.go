//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P5: what a gateway undoes through another one is no task of the plan that the other one has for the workflow, so
// nothing that the plan says holds it up, whether the other gateway verifies tokens or not (ADR 0125). A call of
// an agent is such an undo if its own token proves it, and a stranger's is not.
func TestProcessUndoThroughAPlannedGateway(t *testing.T) {
	t.Parallel() // its gateways are processes
	b, stranger := newAgent(t, "b"), newAgent(t, "stranger")
	c := layStar(t, b, stranger)
	c.sites[2].app = "identity " + starIdentity(2) // it trusts nobody
	way := func(n int, match, identity string) string {
		return fmt.Sprintf("@g%d %s\n agent_proxy @g%d %s {\n name g%d\n %s\n %s\n }", n, match, n, c.sites[n].addr, n, identity, sagaActions)
	}
	c.before(0, way(1, "not header X-Way 2", "identity "+starIdentity(1)), way(2, "header X-Way 2", ""))
	c.begin()
	s := c.saga
	file := c.sites[1].path("plan.json")
	if err := os.WriteFile(file, []byte(`{"wf_id": "w", "nodes": [{"id": "charge"}, {"id": "ship"}, {"id": "refund"}], "edges": [{"from": "ship", "to": "refund"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		c.sites[i+1].operate(t, "workflows", "put", s.wid, file).says(t)
	}
	for i := range 2 {
		r := charge(i + 1)
		r.header = headers{"X-Way": fmt.Sprint(i + 1)}
		step := s.do(r)
		doc := s.back(rollbackBody{ID: rollbackID(i + 1), Checkpoint: step.checkpoint, Scope: "single"})
		if doc.want(t, "completed"); t.Failed() {
			t.Fatalf("through gateway %d: %+v", i+1, doc)
		}
		c.lab.wantCharge(step.id(t), "refunded")
	}

	// At the second gateway: an agent compensates its own call.
	inner := c.sites[1].gateway(t)
	call := func(by *agent, action string, ext *ect.ExtBuilder, parents ...string) reply {
		return inner.call(with(by.issue(ect.Claims{Audience: []string{starIdentity(1)}, Workflow: s.wid, Action: action, Ext: ext, Parents: parents}), request{path: "/refunds", body: `{"charge":"none"}`}))
	}
	start := func(checkpoint string) *ect.ExtBuilder {
		return new(ect.ExtBuilder).Text(ect.MemberRollbackID, "urn:uuid:"+uuid.NewString()).Text(ect.MemberCheckpointID, checkpoint).Text(ect.MemberScope, "single").Text(ect.MemberReason, "a test")
	}
	own := inner.call(with(b.issue(ect.Claims{Audience: []string{starIdentity(1)}, Workflow: s.wid, Action: "charge"}), charge(3)))
	checkpoint := own.header.Get("Execution-Checkpoint")
	if own.status != http.StatusCreated || checkpoint == "" {
		t.Fatalf("%d %s", own.status, own.body)
	}
	call(b, "refund", nil).problem(t, http.StatusConflict, "dependency-not-done")
	call(b, "give back", nil).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	if got := call(b, "rollback_start", start(checkpoint), checkpoint); got.header.Get("Execution-Status") != "executed" {
		t.Errorf("its own: %d %s", got.status, got.body)
	}
	if got := call(stranger, "rollback_start", start(checkpoint), checkpoint); got.status != http.StatusForbidden {
		t.Errorf("a stranger: %d %s", got.status, got.body)
	}
}
