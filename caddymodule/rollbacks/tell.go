package rollbacks

import (
	"context"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// telling is evidence on its way into a commit, with the id of its token.
type telling struct {
	*evidence.Telling // nil where the ledger holds the token already
	id                string
}

var _ rollback.Telling = telling{}

// ID implements rollback.Telling.
func (t telling) ID() string { return t.id }

// tell makes a token for a commit. One that was told before, in whatever life, is not told
// again: the commit goes on without it.
func (l *Ledger) tell(ctx context.Context, workflow string, id func(*evidence.Evidence) string,
	draft func(*Voice, time.Time) (*ect.Draft, error),
) (rollback.Telling, error) {
	return l.tellBehind(ctx, workflow, id, func(v *Voice, now time.Time) ([]*ect.Token, []*ect.Draft, error) {
		d, err := draft(v, now)
		return nil, []*ect.Draft{d}, err
	})
}

// tellBehind is tell for a token that takes others along: tokens that it follows from, and
// drafts that follow from it.
func (l *Ledger) tellBehind(ctx context.Context, workflow string, id func(*evidence.Evidence) string,
	draft func(*Voice, time.Time) ([]*ect.Token, []*ect.Draft, error),
) (rollback.Telling, error) {
	v, err := l.voice()
	if err != nil {
		return nil, err
	}
	t := telling{id: id(v.Evidence)}
	if told, err := v.Evidence.Told(ctx, workflow, t.id); err != nil || told {
		return t, err
	}
	now, err := v.Evidence.Now(ctx)
	if err != nil {
		return nil, err
	}
	tokens, drafts, err := draft(v, now)
	if err != nil {
		return nil, err
	}
	t.Telling, err = v.Evidence.Tell(now.Add(l.o.Keep), tokens, drafts...)
	return t, err
}

// Started tells that a rollback was accepted. The first of parents that is known is what it
// follows from, else the checkpoint (cascade 4.4.1).
//
// What the ledger holds is known, and so is a verified token that Evidence.Seen was told
// of: that is recorded with the start. So the token that asks for a rollback is in the
// workflow only once the rollback is accepted.
func (l *Ledger) Started(ctx context.Context, r *rollback.Rollback, parents []string) (rollback.Telling, error) {
	return l.tellBehind(ctx, r.Workflow, func(e *evidence.Evidence) string { return e.RollbackStartID(r.ID) },
		func(v *Voice, now time.Time) ([]*ect.Token, []*ect.Draft, error) {
			parent, tokens, err := v.cause(ctx, r, parents)
			if err != nil {
				return nil, nil, err
			}
			d, err := v.Witness.RollbackStart(now, r, parent)
			return tokens, []*ect.Draft{d}, err
		})
}

// maxTaken is how many tokens a start takes along besides the one that it follows from.
const maxTaken = ledger.MaxEvents - 2

// cause is what a rollback follows from, with what is to be recorded for that.
func (v *Voice) cause(ctx context.Context, r *rollback.Rollback, parents []string) (string, []*ect.Token, error) {
	for _, id := range parents {
		known, err := v.Evidence.Known(ctx, r.Workflow, []string{id})
		if err != nil {
			return "", nil, err
		}
		if len(known) > 0 {
			return known[0], nil, nil
		}
		presented, err := v.Evidence.Presented(ctx, r.Workflow, id, maxTaken)
		if err != nil {
			return "", nil, err
		}
		if len(presented) > 0 {
			return id, presented, nil
		}
	}
	return r.Checkpoint, nil, nil
}

// Stepped tells what came of a step: compensate where a compensation was sent, else
// rollback_complete (cascade Figure 13).
func (l *Ledger) Stepped(ctx context.Context, r *rollback.Rollback, s *rollback.Step, way checkpoint.Way) (rollback.Telling, error) {
	return l.tell(ctx, r.Workflow, func(e *evidence.Evidence) string { return e.RollbackStepID(r.ID, s.Checkpoint) },
		func(v *Voice, now time.Time) (*ect.Draft, error) {
			if way == checkpoint.Compensate && s.Attempts > 0 {
				return v.Witness.Compensate(now, r, s)
			}
			return v.Witness.RollbackStep(now, r, s)
		})
}

// Completed tells what came of a rollback, and that with one of the whole workflow this has
// ended (cascade 4.1.3, ATD "Workflow Boundary ECTs").
func (l *Ledger) Completed(ctx context.Context, r *rollback.Rollback) (rollback.Telling, error) {
	return l.tellBehind(ctx, r.Workflow, func(e *evidence.Evidence) string { return e.RollbackCompleteID(r.ID) },
		func(v *Voice, now time.Time) ([]*ect.Token, []*ect.Draft, error) {
			d, err := v.Witness.RollbackComplete(now, r)
			if err != nil || r.Scope != plan.FullWorkflow || r.Workflow == "" {
				return nil, []*ect.Draft{d}, err
			}
			began, err := v.beginning(ctx, r.Workflow)
			if err != nil {
				return nil, nil, err
			}
			end, err := v.Witness.WorkflowComplete(now, r, began)
			return nil, []*ect.Draft{d, end}, err
		})
}

// beginning is how a workflow began: by a start that somebody has told of, else with the
// first that is recorded of it. It is looked for among the first entries only: a workflow
// may have grown by now beyond what a plan can be made for.
func (v *Voice) beginning(ctx context.Context, wid string) (began evidence.Beginning, err error) {
	page, err := v.Evidence.Log().List(ctx, wid, "", ledger.MaxPage)
	if err != nil {
		return began, err
	}
	for i := range page.Entries {
		e := &page.Entries[i]
		if began.At.IsZero() || e.Time.Before(began.At) {
			began.At = e.Time
		}
		if event, _ := ect.ParseEvent(e.Action); event != ect.EventWorkflowStart || began.Start != "" {
			continue
		}
		began.Start = e.ID
		if t, err := ect.ParseInsecure(string(e.Payload)); err == nil {
			began.Name, _ = t.Ext().Text(ect.MemberWorkflowName)
		}
	}
	return began, nil
}

// Erred tells an error of a rollback, once for each checkpoint and type.
func (l *Ledger) Erred(ctx context.Context, r *rollback.Rollback, checkpointID, errorType, why string) (rollback.Telling, error) {
	return l.tell(ctx, r.Workflow, func(e *evidence.Evidence) string { return e.RollbackErrorID(r.ID, checkpointID, errorType) },
		func(v *Voice, now time.Time) (*ect.Draft, error) {
			return v.Witness.RollbackError(now, r, checkpointID, errorType, why)
		})
}
