package rollback

import (
	"context"
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Words of errors that are told.
const (
	errorTimeout    = "timeout"
	errorConstraint = "constraint_violation"
)

// escalate opens an escalation in the commit of the cargo: it is durable before anybody
// says "escalated" (A-basic-rollback-g). It returns its id.
func (c *Coordinator) escalate(ctx context.Context, g *cargo, o hitl.Opening) (string, error) {
	p, err := c.o.Desk.Prepare(ctx, o)
	if err != nil {
		return "", err
	}
	g.add(p.Writes(), p.Done)
	return p.Escalation().ID, nil
}

// timeoutOpening is the escalation of a rollback whose time is over.
func (h *head) timeoutOpening() hitl.Opening {
	return hitl.Opening{
		Key: "rollback timeout " + h.ID, Level: hitl.Pause, Cause: hitl.CauseRollbackTimeout, Workflow: h.Workflow,
		Summary: "The rollback was not done within half of the time that its checkpoints stand.",
		Links:   hitl.Links{Checkpoint: h.Checkpoint, Rollback: h.ID},
	}
}

// overdue records, once, that the time of a rollback is over, if it is (ATD, "Rollback
// Timeout and Escalation"). Its state stays what it is.
func (c *Coordinator) overdue(r *run) error {
	return c.insist(r, "its timeout", func(ctx context.Context) error {
		now, err := c.now(ctx)
		if err != nil {
			return err
		}
		r.mu.Lock()
		none := r.head.TimedOut || !r.head.open() || now.Before(r.head.Due) && !r.gaveUp()
		r.mu.Unlock()
		if none {
			return nil
		}
		return c.change(ctx, r, func(h *head, g *cargo) error {
			h.TimedOut = true
			brief := h.rollback()
			brief.Plan = r.plan
			t, err := c.o.Ledger.Erred(ctx, brief, h.Checkpoint, errorTimeout, "rollback timeout: not done within half of the ttl")
			if err != nil {
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
			token := g.tell(t)
			o := h.timeoutOpening()
			o.Links.Error = token
			id, err := c.escalate(ctx, g, o)
			h.Escalations = append(h.Escalations[:len(h.Escalations):len(h.Escalations)], id)
			return err
		})
	})
}

// gaveUp reports whether an undo was given up because its time was over by the clock of this
// process, which may be a little ahead of the store's. mu is held.
func (r *run) gaveUp() bool {
	return slices.ContainsFunc(r.steps, func(s Step) bool { return s.Reason == string(undo.ReasonTimeout) })
}

// finish records what came of a rollback, once all its steps have ended.
func (c *Coordinator) finish(ctx context.Context, r *run) error {
	now, err := c.now(ctx)
	if err != nil {
		return err
	}
	return c.change(ctx, r, func(h *head, g *cargo) error {
		if h.Joined != "" || !h.open() {
			return fmt.Errorf("%w: it has changed", ErrStore) // look again
		}
		h.State, h.Finished = Finished, now
		h.Status, h.Unknown, h.Mixed = sumUp(r.plan, r.steps)
		before, after := hashes(h.Checkpoint, r.steps)
		h.Before, h.After = some(before), some(after)
		o := hitl.Opening{Workflow: h.Workflow, Links: hitl.Links{Checkpoint: h.Checkpoint, Rollback: h.ID}}
		switch h.Status {
		case Failed:
			o.Key, o.Level, o.Cause = "rollback failed "+h.ID, hitl.Stop, hitl.CauseRollbackFailed
			o.Summary = "The rollback has failed, and nothing was undone."
			if h.Unknown {
				o.Summary = "The rollback has failed, and of some of it nobody knows whether it was undone."
			}
		case Partial:
			o.Key, o.Level, o.Cause = "rollback partial "+h.ID, hitl.Pause, hitl.CauseRollbackPartial
			o.Summary = "The rollback has undone a part, and another part not."
			if h.Unknown {
				o.Summary = "The rollback has undone a part, and of another nobody knows whether it was undone."
			}
		}
		if o.Key != "" {
			id, err := c.escalate(ctx, g, o)
			if err != nil {
				return err
			}
			h.Escalations = append(h.Escalations[:len(h.Escalations):len(h.Escalations)], id)
		}
		t, err := c.o.Ledger.Completed(ctx, r.wholeOf(h))
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		h.Complete = g.tell(t)
		g.writes = append(g.writes, store.Write{Key: c.workflowKey(h.Workflow, r.name), Delete: true})
		return nil
	})
}

// sumUp says what came of all steps together. It is never more than what is known (P6).
func sumUp(p *plan.Plan, steps []Step) (status Status, unknown, mixed bool) {
	undone, open, failed := 0, 0, 0
	for i := range steps {
		s := &steps[i]
		unknown = unknown || s.Unknown
		switch s.Status {
		case Completed:
			if !s.Cancelled && s.What != plan.Gather { // what a group contains counts by itself
				undone++
			}
		case Partial:
			if s.What != plan.Gather { // a delegate has undone a part of it
				undone++
			}
			failed++
		case Escalated:
			open++
		default:
			failed++
		}
	}
	failed += len(p.Missing) // nobody could look at these
	switch {
	case open+failed == 0 && !unknown:
		return Completed, false, false
	case undone > 0:
		return Partial, unknown, true
	case failed > 0:
		return Failed, unknown, false
	}
	return Escalated, unknown, false
}

// hashes are those of the state before and after: of the target, else of the only step
// that has any.
func hashes(target string, steps []Step) (before, after [32]byte) {
	n := 0
	for i := range steps {
		s := &steps[i]
		if s.Before == [32]byte{} && s.After == [32]byte{} {
			continue
		}
		if s.Checkpoint == target {
			return s.Before, s.After
		}
		n++
		before, after = s.Before, s.After
	}
	if n != 1 {
		return [32]byte{}, [32]byte{}
	}
	return before, after
}
