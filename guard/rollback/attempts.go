package rollback

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// The attempts of one execution have a checkpoint each, and one effect between them. That is
// undone once (P1): by what is known of the last attempt, and under the mark and the key of
// the first, which whoever undoes one of them holds.

// later is the sight of the last attempt of a call that has a later one than s.
func (c *Coordinator) later(ctx context.Context, s sight, found *guard.Recorded, rollback string) (_ sight, is bool, _ error) {
	id := found.Record.Checkpoint
	if id == "" {
		return s, false, nil
	}
	cp, tampered, err := c.token(ctx, id)
	if err != nil || tampered || !cp.Own {
		return s, false, err
	}
	opened, err := c.o.Vault.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires, Rollback: rollback})
	switch {
	case errors.Is(err, checkpoint.ErrStore):
		return s, false, fmt.Errorf("%w: %w", ErrStore, err)
	case err != nil:
		return s, false, nil // what is known of the earlier one has to do
	}
	if snap := opened.Snapshot; snap.Execution != s.call.Key || snap.First == "" || snap.First != s.opened.Snapshot.Root() {
		return s, false, nil // another call has the key now
	}
	s.opened, s.call.Checkpoint, s.state = opened, cp.ID, plan.Standing
	if found.Standing == guard.RunningHere || found.Standing == guard.RunningElsewhere {
		s.state = plan.InFlight
	}
	return s, true, nil
}

// once undoes the call of a step, unless another of its attempts was undone.
func (c *Coordinator) once(ctx context.Context, r *run, i int, s sight) (ended, error) {
	id := r.step(i).Checkpoint
	root := s.opened.Snapshot.Root()
	m, damaged, err := c.mark(ctx, root)
	switch {
	case err != nil:
		return ended{}, err
	case root == id:
		return c.send(ctx, r, id, s, m.Doubt)
	case damaged:
		return failed(reasonTampered), nil
	case m.State == checkpoint.Undone:
		e := undone()
		e.call = s.call
		return e, nil
	case m.State == checkpoint.Undoing && m.Rollback != r.id:
		return c.busyAt(ctx, r, root, m)
	case m.State != checkpoint.Undoing:
		if err := c.hold(ctx, r, i, root, m); err != nil {
			return ended{}, err
		}
	}
	return c.send(ctx, r, id, s, m.Doubt)
}

// hold takes the mark of the first attempt. The step is journaled with it, so that it is let
// go however the step ends, in another life too.
func (c *Coordinator) hold(ctx context.Context, r *run, i int, root string, m checkpoint.Mark) error {
	step := r.step(i)
	step.root = root
	c.sealing.RLock()
	defer c.sealing.RUnlock()
	w, err := c.stepWrite(r.name, i, &step)
	if err != nil {
		return err
	}
	r.setStep(i, &step) // before, as it may land and not be told
	err = c.o.Vault.Advance(ctx, root, m, checkpoint.Step{To: checkpoint.Undoing, Rollback: r.id, Doubt: m.Doubt}, w)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err) // look again
	}
	return nil
}

// expired is how the step of a checkpoint ends whose ttl is over: as the call has, where
// another attempt of it was undone.
func (c *Coordinator) expired(ctx context.Context, r *run, id string) (ended, error) {
	root, err := c.o.Vault.First(ctx, id)
	if err != nil {
		return ended{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	m, _, err := c.mark(ctx, root)
	switch {
	case err != nil:
		return ended{}, err
	case m.State == checkpoint.Undone:
		return undone(), nil
	case m.State == checkpoint.Undoing && m.Rollback != r.id:
		return c.busyAt(ctx, r, root, m)
	}
	return escalated(reasonExpired), nil
}

// lapses reports that nothing is sent for a step, since the ttl of its checkpoint is over.
func (r *run) lapses(i int) bool {
	what := r.step(i).What
	return what == plan.Expired || what == plan.Wait && r.then[i] == plan.Expired
}

// arrange puts steps whose ttl is over behind those of other attempts of their calls, which
// may undo them. What the plan says of the others' order stays.
func (c *Coordinator) arrange(ctx context.Context, r *run) error {
	places := slices.Concat(r.levels...)
	if !slices.ContainsFunc(places, r.lapses) {
		return nil
	}
	roots, last := map[int]string{}, map[string]int{}
	for _, i := range places {
		step := r.step(i)
		if step.What != plan.Undo && step.What != plan.Wait && step.What != plan.Expired {
			continue
		}
		root, err := c.o.Vault.First(ctx, step.Checkpoint)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		roots[i] = root
		if !r.lapses(i) {
			last[root] = max(last[root], step.Level)
		}
	}
	levels := make([][]int, len(r.levels))
	for _, i := range places {
		level := r.step(i).Level
		if r.lapses(i) {
			level = max(level, last[roots[i]])
		}
		levels[level] = append(levels[level], i)
	}
	r.levels, r.roots = levels, roots
	return nil
}

// busyAt waits until a rollback that is at a checkpoint has left it. Then the step is looked
// at again. The other one may wait for this one in its turn, with another of its steps.
func (c *Coordinator) busyAt(ctx context.Context, r *run, id string, m checkpoint.Mark) (ended, error) {
	again := fmt.Errorf("%w: another rollback was at the checkpoint", ErrStore)
	for {
		other := c.known(c.name(m.Rollback))
		gone := other == nil || other.halted.is()
		var stepped <-chan struct{}
		if !gone {
			stepped = other.nextEnd()
		}
		if now, _, err := c.mark(ctx, id); err != nil || now != m {
			return ended{}, again
		}
		if gone {
			e := failed(reasonBusy)
			e.Unknown = true
			return e, nil
		}
		select {
		case <-stepped:
		case <-other.halted.c:
		case <-r.due.c:
			return escalated(string(undo.ReasonTimeout)), nil
		case <-c.quit:
			return ended{}, errCut
		}
	}
}
