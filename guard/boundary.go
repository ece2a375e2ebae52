package guard

import (
	"context"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// inWorkflow reports whether somebody has named the workflow of the call: a mere trace is none that
// begins and ends.
func inWorkflow(x *Call) bool {
	return x.evidence.call.Workflow != "" && (x.evidence.tokens.workflow() != "" || x.r.Header.Get(HeaderWorkflowID) != "")
}

// beginWorkflow adds the start of the call's workflow to the drafts of its claim, if this is the first
// call of it and no agent has sent a start (ATD "Workflow Boundary ECTs"). In the same commit, it is
// recorded if the call is, and once: of two first calls the loser looks again.
func beginWorkflow(ctx context.Context, x *Call, now time.Time, drafts []*ect.Draft) ([]*ect.Draft, error) {
	s := &x.evidence
	if s.begins = false; !inWorkflow(x) {
		return drafts, nil
	}
	starts := func(t *ect.Token) bool { return t.Event() == ect.EventWorkflowStart && t.Proven() }
	if slices.ContainsFunc(s.tokens.All, starts) || slices.ContainsFunc(s.ancestors, starts) {
		return drafts, nil
	}
	begins, err := s.policy.Events.Begins(ctx, s.call.Workflow)
	if err != nil || !begins {
		return drafts, err
	}
	about := evidence.WorkflowStart{Checkpoint: x.call.Checkpoint}
	if d := s.planned.plan; d != nil {
		about.Name, about.Description, about.Nodes = d.WorkflowID, d.Description, len(d.Nodes)
	}
	start, err := s.policy.Events.WorkflowStart(now, &s.call, &about)
	if err != nil {
		return drafts, err
	}
	s.begins = true
	return append(drafts, start), nil
}
