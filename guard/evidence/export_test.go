package evidence

import (
	"context"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// What the tests look into.

var (
	CallerName    = callerName
	ErrNoIdentity = errNoIdentity
)

func (e *Evidence) IndexIDs(event *ledger.Event) []string { return e.indexIDs(event) }

func (e *Evidence) IsRecorded(ctx context.Context, workflow, id string) (bool, error) {
	return e.log.Has(ctx, workflow, id)
}

func (e *Evidence) RollbackStartID(id string) string { return e.rollbackStartID(id) }

func (e *Evidence) RollbackStepID(id, checkpoint string) string {
	return e.rollbackStepID(id, checkpoint)
}

func (e *Evidence) RollbackCompleteID(id string) string { return e.rollbackCompleteID(id) }

func (e *Evidence) WorkflowCompleteID(id string) string { return e.workflowCompleteID(id) }

func (e *Evidence) RequestID(rollback, checkpoint string, body ect.Hash, now time.Time) string {
	return e.requestID(&Request{Rollback: rollback, Checkpoint: checkpoint, Phase: "execute", Input: body}, now)
}

// LimitLive bounds the records of live workflows.
func (e *Evidence) LimitLive(most int) { e.live.most = most }

// LiveRecords is how many records live workflows have.
func (e *Evidence) LiveRecords() int { return e.live.records }

// EventsOf are the events of drafts.
func EventsOf(drafts ...*ect.Draft) (events []ledger.Event) {
	for _, d := range drafts {
		events = append(events, ledger.Event{
			ID: d.ID(), Workflow: d.Workflow(), Action: d.Action(), Issuer: d.Issuer(), Parents: d.Parents(), Time: d.IssuedAt(),
			Payload: []byte(d.Payload()), Header: []byte("{}"), Parsed: d,
		})
	}
	return events
}

// LiveRecorded adds events to what follows the ledger, as their commit does.
func (e *Evidence) LiveRecorded(events []ledger.Event) { e.live.recorded(events, nil) }

const MemberStatus = memberStatus

func (b *EventBuilder) RollbackStart(now time.Time, r *rollback.Rollback, parent string) (*ect.Draft, error) {
	return b.rollbackStart(now, r, parent)
}

func (b *EventBuilder) RollbackStep(now time.Time, r *rollback.Rollback, s *rollback.Step) (*ect.Draft, error) {
	return b.rollbackStep(now, r, s)
}

func (b *EventBuilder) Compensate(now time.Time, r *rollback.Rollback, s *rollback.Step) (*ect.Draft, error) {
	return b.compensate(now, r, s)
}

func (b *EventBuilder) RollbackComplete(now time.Time, r *rollback.Rollback) (*ect.Draft, error) {
	return b.rollbackComplete(now, r)
}

func (b *EventBuilder) RollbackError(now time.Time, r *rollback.Rollback, checkpoint, errorType, why string) (*ect.Draft, error) {
	return b.rollbackError(now, r, checkpoint, errorType, why)
}
