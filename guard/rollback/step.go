package rollback

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// Reasons of steps that are not those of an undo.
const (
	reasonTampered    = "checkpoint-tampered" // what was recorded is not what the token says
	reasonExpired     = "checkpoint-expired"  // its ttl was over when the rollback was asked for
	reasonForeign     = "foreign"             // another gateway or agent has made it
	reasonMissing     = "missing"             // the group contains what nobody knows
	reasonMembers     = "members"             // some of what the group contains was not undone
	reasonUnavailable = "unavailable"         // the undo could not be carried on in time
	reasonBusy        = "busy"                // another rollback has left it half undone
)

// ended is how a step has ended.
type ended struct {
	undo.Result
	status    Status
	reason    string
	cancelled bool
	way       checkpoint.Way
	unbegun   bool          // its checkpoint's mark is not held by this step
	call      guard.Undoing // what is refused from now on, where it is completed
	token     Checkpoint
}

func undone() ended { return ended{status: Completed} }

func escalated(reason string) ended { return ended{status: Escalated, reason: reason} }

func failed(reason string) ended { return ended{status: Failed, reason: reason} }

// take takes a step until it has ended. It is journaled before anything is sent, so that
// after a crash at any point it is taken up, and nothing is sent twice: what was begun is
// asked for again with the same task.
func (c *Coordinator) take(ctx context.Context, r *run, i int) error {
	step := r.step(i)
	if step.State == StepDone {
		return nil
	}
	if c.ending() && step.State == StepPending {
		return errCut
	}
	m, damaged, err := c.mark(ctx, step.Checkpoint)
	if err != nil {
		return err
	}
	cp, tampered, err := c.token(ctx, step.Checkpoint)
	if err != nil {
		return err
	}
	end, err := func() (ended, error) {
		switch {
		case m.State == checkpoint.Undone:
			return undone(), nil
		case r.due.is() && step.State == StepPending:
			return escalated(string(undo.ReasonTimeout)), nil
		case damaged || tampered:
			return failed(reasonTampered), nil
		case m.State == checkpoint.Undoing && m.Rollback != r.id:
			return c.busyAt(ctx, r, step.Checkpoint, m)
		case step.What == plan.Gather:
			e := r.gather(cp.Parents)
			if e.status != Completed {
				return e, nil
			}
			// Nothing is sent for it. Its mark needs a beginning all the same, and one that is
			// journaled: otherwise a rollback that gives way leaves it half undone for ever.
			return e, c.begin(ctx, r, i, &m)
		case step.What == plan.Escalate:
			return c.irreversible(ctx, &cp), nil
		case step.What == plan.Expired:
			return c.expired(ctx, r, step.Checkpoint)
		case !cp.Own:
			return escalated(reasonForeign), nil
		}
		if err := c.begin(ctx, r, i, &m); err != nil {
			return ended{}, err
		}
		return c.undo(ctx, r, i, &cp)
	}()
	if err != nil {
		return err
	}
	if step.State == StepRunning && (end.reason == reasonTampered || end.reason == reasonExpired) {
		end.Unknown = true // P6: its undo may have been sent before what it needs was gone
	}
	end.token, end.unbegun = cp, r.step(i).State == StepPending
	return c.insist(r, "the outcome of a step", func(ctx context.Context) error { return c.record(ctx, r, i, end) })
}

// irreversible is how the step of a call ends that cannot be undone, with what is known of
// the cause.
func (c *Coordinator) irreversible(ctx context.Context, cp *Checkpoint) ended {
	e := escalated(string(undo.ReasonIrreversible))
	if !cp.Own {
		return e
	}
	if opened, err := c.o.Vault.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires}); err == nil {
		e.Cause, _ = undo.Irreversible(opened)
	}
	return e
}

// begin journals that a step is taken, with the checkpoint's mark, in one commit.
func (c *Coordinator) begin(ctx context.Context, r *run, i int, m *checkpoint.Mark) error {
	step := r.step(i)
	ours := m.State == checkpoint.Undoing && m.Rollback == r.id
	if ours && step.State == StepRunning {
		return nil
	}
	c.sealing.RLock()
	defer c.sealing.RUnlock()
	g := new(cargo)
	if !ours {
		p, err := c.o.Vault.Move(ctx, step.Checkpoint, *m, checkpoint.Step{To: checkpoint.Undoing, Rollback: r.id, Doubt: m.Doubt})
		if err != nil {
			return err
		}
		g.add(p.Writes(), p.Done)
	}
	step.State = StepRunning
	w, err := c.stepWrite(r.name, i, &step)
	if err != nil {
		return g.done(err)
	}
	_, err = c.o.Store.Commit(ctx, append(g.writes, w)...)
	if err = g.done(err); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	r.setStep(i, &step)
	return nil
}

// undo does what a step that was begun asks for.
func (c *Coordinator) undo(ctx context.Context, r *run, i int, cp *Checkpoint) (ended, error) {
	what, then := r.step(i).What, r.then[i]
	for {
		told := plan.Standing
		switch what {
		case plan.Block:
			told = plan.NeverRan
		case plan.Wait:
			told = plan.InFlight
		}
		s, err := c.call(ctx, cp, r.id, told)
		switch {
		case errors.Is(err, guard.ErrUnreadable) && r.due.is():
			// It does not heal by itself, and must not hold up what comes after it for ever.
			e := failed(reasonUnavailable)
			e.Unknown = true
			return e, nil
		case errors.Is(err, ErrStore):
			return ended{}, err
		case errors.Is(err, checkpoint.ErrExpired):
			return c.expired(ctx, r, cp.ID)
		case err != nil:
			return failed(reasonTampered), nil
		}
		switch s.state {
		case plan.NeverRan:
			return ended{status: Completed, cancelled: true, call: s.call}, nil
		case plan.InFlight:
			over, err := c.await(ctx, r, s.call.Key)
			if err != nil {
				return ended{}, err
			}
			if !over {
				return escalated(string(undo.ReasonTimeout)), nil
			}
			continue
		}
		switch {
		case !cp.Reversible || !s.opened.Snapshot.Reversible():
			return c.irreversible(ctx, cp), nil
		case then == plan.Expired:
			return c.expired(ctx, r, cp.ID)
		}
		return c.once(ctx, r, i, s)
	}
}

// await waits for a call in flight. It reports whether that is over; if not, the time of
// the rollback is.
func (c *Coordinator) await(ctx context.Context, r *run, key guard.Key) (over bool, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- c.o.Guard.Await(ctx, key) }()
	select {
	case err = <-ended:
		if err != nil {
			return false, fmt.Errorf("%w: %w", ErrStore, err)
		}
		return true, nil
	case <-r.due.c:
	case <-c.quit:
		err = errCut
	}
	stop()
	<-ended
	return false, err
}

// send lets the Undoer undo a call that ran. What another rollback has left in doubt goes on
// under that one's key: only so can it be sent again, or asked for (DESIGN, "Checkpoints and
// rollback"). id is the checkpoint of the step, doubt what the mark of the first attempt says.
func (c *Coordinator) send(ctx context.Context, r *run, id string, s sight, doubt string) (ended, error) {
	brief := r.brief()
	task := undo.Task{Rollback: r.id, Step: id, Checkpoint: s.opened, Reason: brief.Reason, Due: brief.Due, Quit: c.quit}
	if doubt != "" && doubt != r.id {
		forgotten, err := c.forgotten(ctx, doubt)
		if err != nil {
			return ended{}, err
		}
		task.Rollback, task.Again, task.Forgotten = doubt, r.id, forgotten
	}
	result, err := c.o.Undoer.Undo(ctx, task)
	switch {
	case err != nil && (ctx.Err() != nil || c.ending()):
		return ended{}, errCut
	case err != nil && r.due.is():
		e := failed(reasonUnavailable)
		e.Unknown = true
		return e, nil
	case err != nil:
		return ended{}, fmt.Errorf("undoing: %w", err)
	}
	e := ended{Result: result, status: Completed, way: s.opened.Snapshot.Way, call: s.call}
	if !result.Done {
		e.status, e.reason = statusOf(&result), string(result.Reason)
	}
	return e, nil
}

// forgotten reports that nothing is known of a rollback any more, nor of the keys that it had.
func (c *Coordinator) forgotten(ctx context.Context, id string) (bool, error) {
	switch _, _, err := c.readHead(ctx, c.name(id)); {
	case errors.Is(err, ErrUnknown):
		return true, nil
	case err == nil, errors.Is(err, ErrUnreadable):
		return false, nil
	default:
		return false, err
	}
}

// statusOf tells what a person has to decide from what was tried and has failed. An answer
// from which nobody knows what came of the undo is not known to have failed (P6).
func statusOf(r *undo.Result) Status {
	switch r.Reason {
	case undo.ReasonIrreversible, undo.ReasonChanged, undo.ReasonLost, undo.ReasonTimeout, undo.ReasonNoPostImage,
		undo.ReasonEscalated, undo.ReasonUnfilled, undo.ReasonOtherUpstream:
		return Escalated
	case undo.ReasonPartial:
		return Partial
	case undo.ReasonUnexpected:
		if r.Unknown {
			return Escalated
		}
	}
	return Failed
}

// gather is how the step of a group ends: as what it contains has.
func (r *run) gather(members []string) ended {
	r.mu.Lock()
	defer r.mu.Unlock()
	done, failures, missing := 0, 0, 0
	for _, id := range members {
		i, known := r.index[id]
		switch {
		case !known:
			missing++
		case r.steps[i].Status == Completed:
			done++
		case r.steps[i].Status == Failed:
			failures++
		}
	}
	e := undone()
	switch {
	case done == len(members):
		return e
	case missing > 0:
		e.reason = reasonMissing
	default:
		e.reason = reasonMembers
	}
	switch {
	case done > 0:
		e.status = Partial
	case failures+missing > 0:
		e.status = Failed
	default:
		e.status = Escalated
	}
	return e
}
