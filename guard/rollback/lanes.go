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
// against what its own call has left. An attempt whose ttl is over comes after the others of
// its call.
func (c *Coordinator) lanes(ctx context.Context, r *run, places []int) ([][]int, error) {
	type change struct {
		place int
		made  time.Time
	}
	lanes := make([][]change, 0, len(places))
	known := map[string]int{}
	for _, i := range places {
		step := r.step(i)
		one := change{place: i}
		var shared []string
		if root := r.roots[i]; root != "" {
			shared = append(shared, "attempts of "+root)
		}
		if len(places) > 1 && (step.What == plan.Undo || step.What == plan.Wait) {
			name, made, err := c.o.Vault.Target(ctx, step.Checkpoint)
			switch {
			case errors.Is(err, checkpoint.ErrStore):
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			case err == nil:
				one.made = made
				shared = append(shared, "target "+name)
			}
		}
		lane := -1
		for _, name := range shared {
			there, is := known[name]
			switch {
			case !is || there == lane:
			case lane < 0:
				lane = there
			default: // it has something in common with both
				lanes[lane] = append(lanes[lane], lanes[there]...)
				lanes[there] = nil
				for other, at := range known {
					if at == there {
						known[other] = lane
					}
				}
			}
		}
		if lane < 0 {
			lane = len(lanes)
			lanes = append(lanes, nil)
		}
		lanes[lane] = append(lanes[lane], one)
		for _, name := range shared {
			known[name] = lane
		}
	}
	ordered := make([][]int, 0, len(lanes))
	for _, lane := range lanes {
		slices.SortStableFunc(lane, func(a, b change) int {
			switch last := r.lapses(a.place); {
			case last == r.lapses(b.place):
				return b.made.Compare(a.made)
			case last: // another attempt may undo it
				return 1
			default:
				return -1
			}
		})
		var inOrder []int
		for _, one := range lane {
			inOrder = append(inOrder, one.place)
		}
		if len(inOrder) > 0 {
			ordered = append(ordered, inOrder)
		}
	}
	return ordered, nil
}
