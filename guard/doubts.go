package guard

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// MaxDoubts is the number up to which Doubts counts.
const MaxDoubts = 100_000

// Doubts counts the executions in doubt, up to MaxDoubts, and says when the oldest
// was claimed; the zero time without one. It reads index keys only, from the oldest on.
//
// An execution whose outcome the store did not take is not among them before the
// store is opened anew: until then its index entry says that it runs.
func (g *Guard) Doubts(ctx context.Context) (n int, oldest time.Time, err error) {
	prefix := []byte{spaceState, byte(StateInDoubt)}
	within := store.Prefix(prefix)
	within.Limit = MaxDoubts
	for entry, err := range g.store.Scan(ctx, within) {
		if err != nil {
			return 0, time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
		if n == 0 {
			created := binary.BigEndian.Uint64(entry.Key[len(prefix):])
			oldest = time.Unix(0, int64(created))
		}
		n++
	}
	return n, oldest, nil
}
