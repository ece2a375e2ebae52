package hitl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// lease is an escalation that this courier alone delivers, until its Delivery.Next.
type lease struct {
	id         uuid.UUID
	escalation *Escalation
	version    store.Version
}

// take leases the escalation of an index entry. It returns nil where that is not to be
// delivered now, or somebody else was faster.
func (c *Courier) take(ctx context.Context, name []byte) (*lease, error) {
	due, id := placeIn(name)
	old, version, err := c.desk.read(ctx, id)
	switch {
	case errors.Is(err, ErrUnreadable):
		c.o.Troubled(err)
		return nil, c.postpone(ctx, name)
	case err != nil && !errors.Is(err, ErrNotFound):
		return nil, err
	case err != nil || !old.due() || !old.Delivery.Next.Equal(due):
		// Somebody else has taken it or dealt with it. Where the entry went with that, this
		// deletes nothing; where it did not, it would be due for ever.
		return nil, c.commit(ctx, store.Write{Key: name, Delete: true})
	}
	now, err := c.desk.now(ctx)
	if err != nil {
		return nil, err
	}
	e := *old
	e.Delivery.Attempts++
	e.Delivery.Next = now.Add(2 * c.o.Attempt)
	version, err = c.desk.store.Commit(ctx, c.desk.put(id, old, &e, store.VersionIs(version))...)
	var lost *store.Conflict
	if errors.As(err, &lost) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return &lease{id, &e, version}, nil
}

// postpone puts off what cannot be read, so that it stays reported and is in nobody's way.
func (c *Courier) postpone(ctx context.Context, name []byte) error {
	now, err := c.desk.now(ctx)
	if err != nil {
		return err
	}
	_, id := placeIn(name)
	later := appendPlace(name[:len(name)-placeSize:len(name)-placeSize], now.Add(c.o.Longest), id)
	return c.commit(ctx, store.Write{Key: name, Delete: true}, store.Write{Key: later})
}

func (c *Courier) commit(ctx context.Context, batch ...store.Write) error {
	if _, err := c.desk.store.Commit(ctx, batch...); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// settle records the outcome of an attempt. cut says that the courier ended it. It returns
// nil where that matters no more.
func (c *Courier) settle(ctx context.Context, l *lease, outcome error, cut bool) (*Escalation, error) {
	until := l.escalation.Delivery.Next
	for old, version := l.escalation, l.version; ; {
		now, err := c.desk.now(ctx)
		if err != nil {
			return nil, err
		}
		e := *old
		if cut {
			e.Delivery.Next = now
		} else {
			c.conclude(&e, now, outcome)
		}
		_, err = c.desk.store.Commit(ctx, c.desk.put(l.id, old, &e, store.VersionIs(version))...)
		var lost *store.Conflict
		if err == nil {
			return &e, nil
		}
		if !errors.As(err, &lost) {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		old, version, err = c.desk.read(ctx, l.id)
		if errors.Is(err, ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		// That it was delivered holds whoever has the lease; a failure is the holder's to tell.
		if !old.due() || outcome != nil && !old.Delivery.Next.Equal(until) {
			return nil, nil
		}
	}
}

// conclude changes e by the outcome of its attempt.
func (c *Courier) conclude(e *Escalation, now time.Time, outcome error) {
	if outcome == nil {
		e.State, e.Changed, e.Delivery.Next, e.Delivery.LastError = Notified, now, time.Time{}, ""
		return
	}
	e.Delivery.LastError = shorten(outcome.Error(), maxError)
	end := e.Opened.Add(c.o.MaxAge)
	if errors.Is(outcome, ErrRefused) || c.o.MaxAge > 0 && !now.Before(end) {
		e.State, e.Changed, e.Delivery.Next = Undeliverable, now, time.Time{}
		return
	}
	e.Delivery.Next = now.Add(c.wait(e.Delivery.Attempts, outcome))
	if c.o.MaxAge > 0 && e.Delivery.Next.After(end) {
		e.Delivery.Next = end // the last one
	}
}

// wait is the time between the attempt with this number, which failed, and the next.
func (c *Courier) wait(attempts int, outcome error) time.Duration {
	wait := c.o.First
	for i := 1; i < attempts && wait < c.o.Longest; i++ {
		wait *= 2
	}
	wait = min(wait, c.o.Longest)
	var later *LaterError
	if errors.As(outcome, &later) {
		wait = max(wait, min(later.After, longestLater))
	}
	return wait
}
