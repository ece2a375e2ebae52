package admin

import (
	"context"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// Trial is what is known of an undo that has not succeeded yet.
type Trial struct {
	// Attempts counts the requests of this life of the gateway that got no good answer.
	Attempts int
	// Cause is why the last one did not.
	Cause string
}

// explain adds what operators may know beyond those who ask over HTTP (P8): what each step
// is about, how it is undone, what holds it up, and what the caller calls the workflow.
func explain(ctx context.Context, st Store, doc *rollbackapi.Document) {
	for i := range doc.Steps {
		step := &doc.Steps[i]
		if step.State == rollback.StepRunning {
			if t, ok := st.Trial(step.CheckpointID); ok {
				step.Attempts, step.LastCause = max(step.Attempts, t.Attempts), t.Cause
			}
		}
		call, result, record, err := callOf(ctx, st, step.CheckpointID)
		if err != nil {
			continue // a group, another gateway's, or nothing that stands any more
		}
		step.Way = undo.Describe(call, result)
		step.Call = &rollbackapi.CallDocument{
			Execution: call.Execution.Hex(), Action: call.Action, Method: call.Request.Method,
			Host: call.Request.Host, Path: call.Request.Path, Created: utc(call.Created),
		}
		if record != nil {
			step.Call.ExecutionID, step.Call.Created = record.ID, utc(record.Created)
		}
	}
	doc.WorkflowName = (&names{st: st}).of(ctx, doc.Workflow, doc.CheckpointID)
}
