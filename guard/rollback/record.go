package rollback

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// record brings the outcome of a step on disk, in one commit: the journal, the mark, the
// execution that is refused from now on, the evidence, and what a person has to look at.
func (c *Coordinator) record(ctx context.Context, r *run, i int, end ended) error {
	landed, err := c.reread(ctx, r, i)
	if landed || err != nil {
		return err
	}
	now, err := c.now(ctx)
	if err != nil {
		return err
	}
	step := r.step(i)
	step.State, step.Status, step.Cancelled, step.Ended = StepDone, end.status, end.cancelled, now
	step.Unknown, step.Reason, step.HTTPStatus, step.Attempts = end.Unknown, end.reason, end.Status, end.Attempts
	step.Before, step.After, step.Cause = end.Before, end.After, string(end.Cause)

	c.sealing.RLock()
	defer c.sealing.RUnlock()
	g := new(cargo)
	if err := c.stow(ctx, r, &step, &end, g); err != nil {
		return g.done(err)
	}
	w, err := c.stepWrite(r.name, i, &step)
	if err != nil {
		return g.done(err)
	}
	g.writes = append(g.writes, w)
	err = c.commitStep(ctx, &end, g)
	if err = g.done(err); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	r.setStep(i, &step)
	return nil
}

// stow takes along what belongs to the outcome besides the journal.
func (c *Coordinator) stow(ctx context.Context, r *run, step *Step, end *ended, g *cargo) error {
	if err := c.move(ctx, r, step, end, g); err != nil {
		return err
	}
	brief := r.brief()
	token := ""
	if end.reason == reasonTampered { // cascade 4.2.3: an error is told
		t, err := c.o.Ledger.Erred(ctx, brief, step.Checkpoint, errorConstraint, "the checkpoint is not what was recorded")
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		token = g.tell(t)
	}
	if o, needed := r.opening(brief, step, end); needed {
		o.Links.Error = token
		id, err := c.escalate(ctx, g, o)
		if err != nil {
			return err
		}
		step.Escalation = id
	}
	t, err := c.o.Ledger.Stepped(ctx, brief, step, end.way)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	step.Token = g.tell(t)
	return nil
}

// reread tells whether the step has ended already, by a commit whose answer was lost.
func (c *Coordinator) reread(ctx context.Context, r *run, i int) (landed bool, err error) {
	entry, err := c.o.Store.Get(ctx, partKey(kindStep, r.name, i))
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	plain, err := c.open(entry)
	if err != nil {
		return false, err
	}
	step := r.step(i)
	if err := step.decode(plain); err != nil {
		return false, unreadable(err)
	}
	if step.State == StepDone {
		r.setStep(i, &step)
	}
	return step.State == StepDone, nil
}

// move takes the checkpoint's mark to where the step has ended, and with it that of the
// first attempt of its call, if the step holds that.
func (c *Coordinator) move(ctx context.Context, r *run, step *Step, end *ended, g *cargo) error {
	if step.root != "" {
		m, damaged, err := c.mark(ctx, step.root)
		if err != nil {
			return err
		}
		if !damaged && m.State == checkpoint.Undoing && m.Rollback == r.id {
			if err := c.moveMark(ctx, r, step.root, m, step, end, g); err != nil {
				return err
			}
		}
	}
	m, damaged, err := c.mark(ctx, step.Checkpoint)
	if err != nil || damaged || end.unbegun && m.State == checkpoint.Undoing {
		return err // a step of another attempt may hold it
	}
	return c.moveMark(ctx, r, step.Checkpoint, m, step, end, g)
}

func (c *Coordinator) moveMark(ctx context.Context, r *run, id string, m checkpoint.Mark, step *Step, end *ended, g *cargo) error {
	to := checkpoint.Escalated
	switch {
	case step.Status == Completed:
		to = checkpoint.Undone
	case step.Status == Failed && m.State != checkpoint.Standing:
		to = checkpoint.Failed
	}
	others := m.State == checkpoint.Undoing && m.Rollback != r.id
	if m.State == to || m.State == checkpoint.Undone || others {
		return nil
	}
	doubt := m.Doubt
	switch {
	case end.Unknown:
		doubt = cmp.Or(m.Doubt, r.id)
	case end.way != 0: // it was tried, and what came of it is known
		doubt = ""
	}
	p, err := c.o.Vault.Move(ctx, id, m, checkpoint.Step{To: to, Rollback: r.id, Doubt: doubt})
	if errors.Is(err, checkpoint.ErrStep) {
		return nil // as from escalated to escalated by another one
	}
	if err != nil {
		return err
	}
	g.add(p.Writes(), p.Done)
	return nil
}

// commitStep commits the outcome. With it, late duplicates of what was undone are refused
// for ever, and what never ran must not run any more.
func (c *Coordinator) commitStep(ctx context.Context, end *ended, g *cargo) error {
	if end.status == Completed && end.call.Key != (guard.Key{}) {
		err := c.o.Guard.Undone(ctx, end.call, g.writes...)
		if !errors.Is(err, guard.ErrOtherCall) {
			return err
		}
	}
	_, err := c.o.Store.Commit(ctx, g.writes...)
	return err
}

// opening is what a person has to look at after a step; needed is false after others.
func (r *run) opening(brief *Rollback, step *Step, end *ended) (o hitl.Opening, needed bool) {
	o = hitl.Opening{
		Key: "rollback step " + r.id + " " + step.Checkpoint, Level: hitl.Approval, Workflow: brief.Workflow,
		Links: hitl.Links{Checkpoint: step.Checkpoint, Rollback: r.id},
	}
	if end.call.Key != (guard.Key{}) {
		o.Links.Execution = end.call.Key.Hex()
	}
	switch {
	case step.Status == Completed:
		return o, false
	case step.What == plan.Gather: // what it contains was escalated
		return o, false
	case step.Reason == string(undo.ReasonTimeout):
		h := head{ID: r.id, Checkpoint: brief.Checkpoint, Workflow: brief.Workflow}
		return h.timeoutOpening(), true
	case step.Reason == string(undo.ReasonIrreversible):
		o.Cause, o.Summary = hitl.CauseIrreversible, "The call cannot be undone by the gateway."
	case step.Reason == reasonTampered:
		o.Cause, o.Summary = hitl.CauseTampered, "The checkpoint is not what was recorded, and nothing is undone from it."
	case step.Reason == reasonForeign:
		o.Cause, o.Summary = hitl.CauseIrreversible, "Somebody else has made the checkpoint; this gateway cannot undo its call."
	case step.Status == Escalated:
		o.Cause, o.Summary = hitl.CauseIrreversible, "The call was not undone: "+step.Reason+"."
		if step.Unknown {
			o.Summary = "Nobody knows whether the call was undone: " + step.Reason + "."
		}
	case step.Status == Partial:
		o.Cause, o.Summary = hitl.CauseRollbackPartial, "Only a part of the call was undone."
	default:
		o.Cause, o.Summary = hitl.CauseRollbackFailed, "The undo of the call has failed: "+step.Reason+"."
		if step.Unknown {
			o.Summary = "The undo of the call has failed, and nobody knows whether it had its effect: " + step.Reason + "."
		}
	}
	return o, true
}
