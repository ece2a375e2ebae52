package graph_test

import (
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// A-node-states-f and P6: what the tokens of a rollback make of the checkpoints that it
// has undone, and of those that it has not, whatever is said of the rollback as a whole.
func TestStatesOfARollback(t *testing.T) {
	g := newTeller(t)
	var checkpoints []string
	for key := range byte(4) {
		c, id := g.claim(key+1, flow)
		g.settle(c, evidence.Outcome{Checkpoint: id, Verdict: guard.Completed, Status: 200})
		checkpoints = append(checkpoints, id)
	}
	r := &rollback.Rollback{
		ID: uuid.NewString(), Checkpoint: checkpoints[0], Workflow: flow, Scope: plan.SubDAG, Reason: "it was wrong",
		Status: rollback.Partial, Mixed: true, Steps: []rollback.Step{
			{Checkpoint: checkpoints[0], Agent: gateway, Status: rollback.Completed, Attempts: 1},
			{Checkpoint: checkpoints[1], Agent: alice, Status: rollback.Completed},
			{Checkpoint: checkpoints[2], Agent: alice, Status: rollback.Failed},
			{Checkpoint: checkpoints[3], Agent: bob, Status: rollback.Escalated},
		},
	}
	must := func(d *ect.Draft, err error) *ect.Draft {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	now := time.Now()
	want := func(what string, states ...string) {
		t.Helper()
		var doc workflowDoc
		g.get("workflows/"+flow, asCaller).read(http.StatusOK, &doc)
		for i, id := range checkpoints {
			at := slices.IndexFunc(doc.Nodes, func(n nodeDoc) bool { return n.JTI == id })
			if at < 0 {
				t.Fatalf("%s: there is no %s", what, id)
			}
			n := doc.Nodes[at]
			if got := n.State + " " + n.Detail; got != states[i] {
				t.Errorf("%s: checkpoint %d is %q, want %q", what, i, got, states[i])
			}
			for _, task := range n.Guards {
				of := doc.Nodes[slices.IndexFunc(doc.Nodes, func(n nodeDoc) bool { return n.JTI == task })]
				if got := of.State + " " + of.Detail; got != states[i] {
					t.Errorf("%s: the call of checkpoint %d is %q, want %q", what, i, got, states[i])
				}
			}
		}
	}
	start := must(g.witness.RollbackStart(now, r, checkpoints[0]))
	r.Start = start.ID()
	g.tell(start)
	want("asked for", "done rollback_requested", "done ", "done ", "done ")
	g.tell(
		must(g.witness.Compensate(now, r, &r.Steps[0])), must(g.witness.RollbackStep(now, r, &r.Steps[1])),
		must(g.witness.RollbackStep(now, r, &r.Steps[2])), must(g.witness.RollbackStep(now, r, &r.Steps[3])),
	)
	after := []string{"rolled_back ", "rolled_back ", "done rollback_failed", "escalated compensation_required"}
	want("every step told", after...)
	// An error of the rollback is none of the call, which was done.
	g.tell(must(g.witness.RollbackError(now, r, checkpoints[2], "timeout", "The rollback was not done in time.")))
	g.tell(must(g.witness.RollbackComplete(now, r)))
	want("the whole told", after...)

	// Another one, which puts right what the first has not.
	again := *r
	again.ID, again.Checkpoint, again.Status, again.Start = uuid.NewString(), checkpoints[2], rollback.Completed, ""
	again.Steps = []rollback.Step{{Checkpoint: checkpoints[2], Agent: alice, Status: rollback.Completed}}
	start = must(g.witness.RollbackStart(now, &again, checkpoints[2]))
	again.Start = start.ID()
	g.tell(start)
	want("asked for again", "rolled_back ", "rolled_back ", "done rollback_requested", "escalated compensation_required")
	g.tell(must(g.witness.RollbackStep(now, &again, &again.Steps[0])), must(g.witness.RollbackComplete(now, &again)))
	want("undone", "rolled_back ", "rolled_back ", "rolled_back ", "escalated compensation_required")
}
