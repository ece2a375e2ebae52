package rollback

import (
	"context"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// What the coordinators of several gateways over one store agree on (ADR 0133). One member carries a rollback out: the
// one whose boot its head names. Once that is gone another one writes its own there. What keeps calls from beginning is
// read from the store: a claim is made on the condition that the fence of its workflow has not changed since.

// gone reports whether nothing more is written by another member with a boot. A record without one is of a
// gateway that had the store alone.
func (c *journal) gone(ctx context.Context, boot string) (bool, error) {
	if c.fleet == nil || boot == "" {
		return true, nil
	}
	gone, err := c.fleet.Gone(ctx, boot)
	return gone, unavailable(err)
}

// take makes this member the one that carries a rollback out, if the one that did is gone. mine reports whether
// it is this member; unless fresh, the steps may have changed since the rollback was read.
func (c *carrier) take(ctx context.Context, r *run) (mine, fresh bool, err error) {
	for fresh = true; ; fresh = false {
		boot := r.now().Boot
		if c.fleet == nil || boot == c.fleet.Boot() {
			return true, fresh, nil
		}
		if gone, err := c.gone(ctx, boot); err != nil || !gone {
			return false, fresh, err
		}
		err := c.change(ctx, r, func(h *Rollback, _ *store.Batch) error {
			h.Boot = c.fleet.Boot()
			return nil
		})
		if err != nil && !errors.As(err, new(*store.Conflict)) { // else another member was first, or it was sealed anew
			return false, fresh, err
		}
	}
}

// takeFailure makes this member the one that asks for the rollback of a recorded failure, if the one that did
// is gone. first says that nothing was taken up yet by this member, whose own it takes then, too.
func (c *journal) takeFailure(ctx context.Context, row store.Row[Failure], first bool) (mine bool, err error) {
	v := row.Record
	if c.fleet == nil {
		return true, nil
	}
	if v == nil || v.Boot == c.fleet.Boot() { // what cannot be read is said once
		return first, nil
	}
	if gone, err := c.gone(ctx, v.Boot); err != nil || !gone {
		return false, err
	}
	defer c.sealing.Enter()()
	v.Boot = c.fleet.Boot()
	_, err = c.o.Store.Commit(ctx, c.failed.Put(row.Key, v, store.VersionIs(row.Version), time.Time{}))
	if errors.As(err, new(*store.Conflict)) {
		return false, nil // another member was first
	}
	return err == nil, unavailable(err)
}

// follow keeps the head of a rollback that is carried out here as others change it, until ctx is done.
func (c *carrier) follow(ctx context.Context, r *run) {
	for c.fleet != nil && ctx.Err() == nil {
		changed, cancel := c.o.Store.Watch(keyOf(kindHead, r.name))
		r.mu.Lock()
		err := c.refresh(c.hard, r)
		r.mu.Unlock()
		var again <-chan time.Time
		if err != nil { // what has changed is not known
			changed, again = nil, time.After(longPause)
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
		}
		cancel()
	}
}
