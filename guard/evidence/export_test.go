package evidence

import (
	"context"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// What the tests look into.

var CallerName = callerName

func (e *Evidence) IndexIDs(event *ledger.Event) []string { return e.indexIDs(event) }

func (e *Evidence) IsRecorded(ctx context.Context, workflow, id string) (bool, error) {
	return e.isRecorded(ctx, workflow, id)
}

func (e *Evidence) RollbackStartID(id string) string { return e.rollbackStartID(id) }

func (e *Evidence) RollbackStepID(id, checkpoint string) string {
	return e.rollbackStepID(id, checkpoint)
}

func (e *Evidence) RollbackCompleteID(id string) string { return e.rollbackCompleteID(id) }

func (e *Evidence) WorkflowCompleteID(id string) string { return e.workflowCompleteID(id) }

func (e *Evidence) RequestID(rollback, checkpoint string, now time.Time) string {
	return e.requestID(&Request{Rollback: rollback, Checkpoint: checkpoint}, now)
}

// LimitLive bounds the records of live workflows.
func (e *Evidence) LimitLive(most int) { e.live.most = most }

// LiveRecords is how many records live workflows have.
func (e *Evidence) LiveRecords() int { return e.live.records }
