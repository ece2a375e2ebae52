package rollback

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// lanes parts steps of one level into those that are taken one after the other: what has
// changed the same target is undone with the last change first, since each undo is held
// against what its own call has left.
func (c *Coordinator) lanes(ctx context.Context, r *run, places []int) ([][]int, error) {
	type change struct {
		place int
		made  time.Time
	}
	lanes := make([][]change, 0, len(places))
	known := map[string]int{}
	for _, i := range places {
		step := r.step(i)
		lane := len(lanes)
		one := change{place: i}
		if len(places) > 1 && (step.What == plan.Undo || step.What == plan.Wait) {
			name, made, err := c.o.Vault.Target(ctx, step.Checkpoint)
			switch {
			case errors.Is(err, checkpoint.ErrStore):
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			case err == nil:
				one.made = made
				if there, shared := known[name]; shared {
					lane = there
				}
				known[name] = lane
			}
		}
		if lane == len(lanes) {
			lanes = append(lanes, nil)
		}
		lanes[lane] = append(lanes[lane], one)
	}
	ordered := make([][]int, len(lanes))
	for n, lane := range lanes {
		slices.SortStableFunc(lane, func(a, b change) int { return b.made.Compare(a.made) })
		for _, one := range lane {
			ordered[n] = append(ordered[n], one.place)
		}
	}
	return ordered, nil
}
