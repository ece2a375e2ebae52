package guard

import (
	"context"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
)

// inWorkflow reports whether somebody has named the workflow of the call: a mere trace is none that
// begins and ends.
func inWorkflow(q *identified) bool {
	return q.facts.Workflow != "" && (q.tokens.workflow() != "" || q.r.Header.Get(HeaderWorkflowID) != "")
}

// beginWorkflow adds the start of the call's workflow to the drafts of its claim, if this is the first
// call of it and no agent has sent a start (ATD "Workflow Boundary ECTs"). In the same commit, it is
// recorded if the call is, and once: of two first calls the loser looks again.
func (s *callEvidence) beginWorkflow(
	ctx context.Context, q *identified, planned *plan.Descriptor, now time.Time, drafts []*ect.Draft,
) ([]*ect.Draft, error) {
	if s.begins = false; !inWorkflow(q) {
		return drafts, nil
	}
	starts := func(t *ect.Token) bool { return t.Event() == ect.EventWorkflowStart && t.Proven() }
	if slices.ContainsFunc(q.tokens.All, starts) || slices.ContainsFunc(s.ancestors, starts) {
		return drafts, nil
	}
	begins, err := q.policy.Events.Begins(ctx, q.facts.Workflow)
	if err != nil || !begins {
		return drafts, err
	}
	about := evidence.WorkflowStart{Checkpoint: s.call.Checkpoint}
	if planned != nil {
		about.Name, about.Description, about.Nodes = planned.WorkflowID, planned.Description, len(planned.Nodes)
	}
	start, err := q.policy.Events.WorkflowStart(now, &s.call, &about)
	if err != nil {
		return drafts, err
	}
	s.begins = true
	return append(drafts, start), nil
}
