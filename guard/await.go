package guard

import (
	"context"
	"errors"
)

// Await returns when nothing runs under key any more, here or on another node, or
// with ctx's error when that ends first. It holds nothing and starts nothing that
// outlasts it.
func (g *Guard) Await(ctx context.Context, key Key) error {
	for {
		over, err := g.awaitChange(ctx, key)
		if over || err != nil {
			return err
		}
	}
}

// awaitChange waits until what runs under key may have ended.
func (g *Guard) awaitChange(ctx context.Context, key Key) (over bool, err error) {
	changed, cancel := g.store.Watch(recordKey(key)) // before the look, so that no change is slept through
	defer cancel()
	found, err := g.Look(ctx, key)
	switch {
	case errors.Is(err, ErrUnknown):
		return true, nil
	case err != nil:
		return false, err
	case found.Standing == RunningHere:
		changed = found.Flight.Done()
	case found.Standing != RunningElsewhere:
		return true, nil
	}
	select {
	case <-changed:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}
