package hitl

import (
	"context"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// MaxCount is how many escalations are counted at most, the newest.
const MaxCount = 100_000

// Counts are how many escalations there are of each level and state.
type Counts map[Level]map[State]int

// Count counts all escalations, up to MaxCount. It opens none.
func (d *Desk) Count(ctx context.Context) (Counts, error) {
	counts := Counts{}
	for l := Pause; l <= Stop; l++ {
		counts[l] = map[State]int{}
		for _, s := range States() {
			counts[l][s] = 0
		}
	}
	r := store.Prefix([]byte{space, kindAge})
	r.Reverse, r.Limit = true, MaxCount
	for entry, err := range d.store.Scan(ctx, r) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if len(entry.Value) < 2 {
			continue
		}
		if of, known := counts[Level(entry.Value[0])]; known {
			of[State(entry.Value[1])]++
		}
	}
	return counts, nil
}
