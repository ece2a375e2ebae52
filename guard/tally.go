package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Count is how many executions there are of one kind.
type Count struct {
	N int
	// More says that there are more than N: the counting stopped there.
	More bool
	// Oldest is when the first of them was claimed; the zero time without one.
	Oldest time.Time
}

func (c *Count) add(created time.Time) {
	if c.N == 0 || created.Before(c.Oldest) {
		c.Oldest = created
	}
	c.N++
}

// Tally counts the executions in each state, up to most of each, by the index. One
// whose owner is gone counts as in doubt, as List has it.
func (g *Guard) Tally(ctx context.Context, most int) (map[State]Count, error) {
	all := make(map[State]Count, len(States()))
	var orphans []time.Time
	for _, state := range States() {
		var c Count
		r := store.Prefix([]byte{spaceState, byte(state)})
		r.Limit = most + 1
		for entry, err := range g.store.Scan(ctx, r) {
			if err != nil {
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			}
			if c.N == most {
				c.More = true
				break
			}
			created := time.Unix(0, createdIn(entry.Key))
			if state.Open() && g.flights.find(keyIn(entry.Key)) == nil {
				is, err := g.stateOf(ctx, keyIn(entry.Key))
				switch {
				case err != nil:
					return nil, err
				case is == StateInDoubt:
					orphans = append(orphans, created)
					continue
				case is != state: // it has ended in between
					continue
				}
			}
			c.add(created)
		}
		all[state] = c
	}
	doubts := all[StateInDoubt]
	for _, created := range orphans {
		doubts.add(created)
	}
	all[StateInDoubt] = doubts
	return all, nil
}

// stateOf is the state as a listing shows it; zero where nothing is recorded.
func (g *Guard) stateOf(ctx context.Context, key Key) (State, error) {
	found, err := g.Look(ctx, key)
	if errors.Is(err, ErrUnknown) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return found.State(), nil
}

// Node is the name of this gateway, kept with its store.
func (g *Guard) Node() string { return g.node }

// Boot is the name of this life of the gateway.
func (g *Guard) Boot() string { return g.boot }
