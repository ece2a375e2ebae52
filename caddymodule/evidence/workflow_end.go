package evidence

import (
	"cmp"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Beginning is how a workflow began.
type Beginning struct {
	// Start is the id of the token that tells of it; empty without one.
	Start string
	// Name is what that token calls the workflow (wf_id); empty where it does not.
	Name string
	// At is when; zero where nobody knows.
	At time.Time
}

// WorkflowCompleteID is the id of what tells that a rollback has ended its workflow.
func (e *Evidence) WorkflowCompleteID(id string) string { return e.secretID("workflow complete", id) }

// WorkflowComplete drafts that a rollback of the whole workflow has ended it (cascade
// 4.1.3, ATD "Workflow Boundary ECTs"). It follows from the workflow's start, where
// somebody has told of that, and from the rollback's result.
func (w *Witness) WorkflowComplete(now time.Time, r *rollback.Rollback, began Beginning) (*ect.Draft, error) {
	parents := []string{w.e.RollbackCompleteID(r.ID)}
	if began.Start != "" {
		parents = append([]string{began.Start}, parents...)
	}
	ext := new(ect.ExtBuilder).
		Text(ect.MemberWorkflowName, plain(cmp.Or(began.Name, r.Workflow), maxReason)).
		Text(ect.MemberTerminalStatus, terminal(r.Status))
	if !began.At.IsZero() {
		ext.Int(ect.MemberElapsed, max(0, int64(now.Sub(began.At)/time.Second)))
	}
	return w.issuer.Draft(now, ect.Claims{
		Audience: w.hearers(r), ID: w.e.WorkflowCompleteID(r.ID), Workflow: r.Workflow,
		Action: string(ect.EventWorkflowComplete), Parents: parents, Ext: ext.Text(ect.MemberRollbackID, rollbackURN(r.ID)),
	})
}

// terminal is the word for how a workflow has ended (ATD "Workflow Boundary ECTs"). It says
// no more than what came of the rollback (P6).
func terminal(s rollback.Status) string {
	if s == rollback.Completed {
		return "rolled_back"
	}
	return string(s)
}
