package rollback

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// sight is what is known of the call of a checkpoint at one moment.
type sight struct {
	state plan.State
	// call names the call; without a key there is none to be recorded.
	call guard.Undoing
	// opened is what was recorded before the call; nil where that is gone.
	opened *checkpoint.Checkpoint
}

// call looks what became of the call of a checkpoint of this gateway. told is the state
// that its tokens tell. A free key proves nothing, nor does one that another call has:
// keys are forgotten, and doubtful calls are run again. So a call never ran only where the
// vault has it as released, or its tokens tell so and no result was recorded (P1, P6).
//
// The errors are those of Vault.Open but ErrReleased, and ErrStore.
func (c *Coordinator) call(ctx context.Context, cp *Checkpoint, rollback string, told plan.State) (sight, error) {
	s, err := c.glance(ctx, cp, rollback, told)
	if err != nil || s.state == plan.InFlight || s.opened == nil || s.opened.Result != nil {
		return s, err
	}
	// The checkpoint was read before the execution. A call that has ended in between has left
	// there what its undo needs, or that it never ran: once it is over, that stands there.
	return c.glance(ctx, cp, rollback, told)
}

// glance is call, but for a call that ends meanwhile.
func (c *Coordinator) glance(ctx context.Context, cp *Checkpoint, rollback string, told plan.State) (sight, error) {
	s := sight{state: told, call: guard.Undoing{Checkpoint: cp.ID}}
	opened, err := c.o.Vault.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires, Rollback: rollback})
	switch {
	case errors.Is(err, checkpoint.ErrReleased):
		return c.released(ctx, s)
	case errors.Is(err, checkpoint.ErrStore):
		return s, fmt.Errorf("%w: %w", ErrStore, err)
	case err != nil:
		return s, err
	}
	s.opened = opened
	snap := opened.Snapshot
	s.call.Key, s.call.Caller, s.call.Workflow, s.call.Action = snap.Execution, snap.Caller, snap.Workflow, snap.Action
	s.call.Method, s.call.Host, s.call.Path = snap.Request.Method, snap.Request.Host, snap.Request.Path
	if s.call.Key == (guard.Key{}) {
		if told == plan.InFlight { // nothing that could be waited for
			s.state = plan.Standing
		}
		return s, nil
	}
	found, err := c.o.Guard.Look(ctx, s.call.Key)
	switch {
	case err != nil && !errors.Is(err, guard.ErrUnknown):
		return s, fmt.Errorf("%w: %w", ErrStore, err)
	case err != nil || !found.Record.Announced(cp.ID): // the key is free, or another call's
		if err == nil {
			if later, is, err := c.later(ctx, s, &found, rollback); is || err != nil {
				return later, err
			}
		}
		// Of a call in doubt a result without a status says only whether others wrote beside it.
		if told != plan.NeverRan || opened.Result != nil && opened.Result.Status != 0 {
			s.state = plan.Standing
		}
	case found.Standing == guard.RunningHere || found.Standing == guard.RunningElsewhere:
		s.state = plan.InFlight
	default:
		s.state = plan.Standing
	}
	return s, nil
}

// released is the sight of a call that was proven not to have run.
func (c *Coordinator) released(ctx context.Context, s sight) (sight, error) {
	s.state = plan.NeverRan
	left, err := c.o.Vault.Released(ctx, s.call.Checkpoint)
	switch {
	case errors.Is(err, checkpoint.ErrUnknown): // nothing names the call any more
		return s, nil
	case errors.Is(err, checkpoint.ErrStore):
		return s, fmt.Errorf("%w: %w", ErrStore, err)
	case err != nil:
		return s, err
	}
	s.call.Key, s.call.Caller, s.call.Workflow, s.call.Action = left.Execution, left.Caller, left.Workflow, left.Action
	s.call.Method, s.call.Host, s.call.Path = left.Method, left.Host, left.Path
	return s, nil
}

// mark reads how far the undo of a checkpoint has come. damaged says that it stands there
// and cannot be read.
func (c *Coordinator) mark(ctx context.Context, id string) (m checkpoint.Mark, damaged bool, err error) {
	m, err = c.o.Vault.Mark(ctx, id)
	switch {
	case errors.Is(err, checkpoint.ErrTampered):
		return m, true, nil
	case err != nil:
		return m, false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return m, false, nil
}

// token finds the token of a checkpoint. tampered says that it is not what was recorded,
// or is not there.
func (c *Coordinator) token(ctx context.Context, id string) (cp Checkpoint, tampered bool, err error) {
	cp, err = c.o.Ledger.Checkpoint(ctx, id)
	switch {
	case errors.Is(err, checkpoint.ErrTampered), errors.Is(err, ErrUnknown):
		return cp, true, nil
	case err != nil:
		return cp, false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return cp, false, nil
}
