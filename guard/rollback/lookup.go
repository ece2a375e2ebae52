package rollback

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Get returns a rollback, or ErrUnknown. One that has given way to a wider one has that
// one's result.
func (c *Coordinator) Get(ctx context.Context, id string) (*Rollback, error) {
	r, err := c.look(ctx, c.name(id))
	if err != nil {
		return nil, err
	}
	own := r.whole()
	for r.gaveWay() {
		wider, err := c.look(ctx, c.name(r.wider()))
		if err != nil {
			return nil, err
		}
		r = wider
		own.follow(r.whole())
	}
	return own, nil
}

// look finds a rollback in memory, else in the store.
func (c *Coordinator) look(ctx context.Context, n name) (*run, error) {
	if r := c.known(n); r != nil {
		return r, nil
	}
	return c.load(ctx, n)
}

func (r *run) gaveWay() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.head.Halted
}

func (r *run) wider() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.head.Joined
}

// follow takes the result of the wider rollback.
func (b *Rollback) follow(wider *Rollback) {
	b.State, b.Status, b.Finished, b.Due = wider.State, wider.Status, wider.Finished, wider.Due
	b.TimedOut = b.TimedOut || wider.TimedOut
	b.Plan, b.Steps, b.Unknown, b.Mixed = wider.Plan, wider.Steps, wider.Unknown, wider.Mixed
	b.Complete, b.Before, b.After = wider.Complete, wider.Before, wider.After
	b.Escalations = append(b.Escalations[:len(b.Escalations):len(b.Escalations)], wider.Escalations...)
}

// ByToken returns the id of the rollback that a token has asked for, or ErrUnknown.
func (c *Coordinator) ByToken(ctx context.Context, jti string) (string, error) {
	entry, err := c.o.Store.Get(ctx, c.tokenKey(jti))
	if errors.Is(err, store.ErrNotFound) {
		return "", ErrUnknown
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrStore, err)
	}
	id, err := c.open(entry)
	return string(id), err
}

// Wait returns the rollback once it is finished. When ctx ends before, or the process does,
// it returns it as it is then, with ctx's error or ErrStopping.
func (c *Coordinator) Wait(ctx context.Context, id string) (*Rollback, error) {
	for next := id; ; {
		r, err := c.look(ctx, c.name(next))
		if err != nil {
			return nil, err
		}
		select {
		case <-r.done.c:
			if !r.gaveWay() {
				return c.Get(ctx, id)
			}
			next = r.wider()
			continue
		default:
		}
		if c.known(r.name) == nil { // from the store: nobody carries it out here, yet
			if r, err = c.adopt(ctx, r.name); err != nil {
				return nil, err
			}
		}
		select {
		case <-r.done.c:
		case <-ctx.Done():
			return c.sofar(ctx, id, ctx.Err())
		case <-c.quit:
			return c.sofar(ctx, id, ErrStopping)
		}
	}
}

// sofar is the rollback as it is, with an error.
func (c *Coordinator) sofar(ctx context.Context, id string, why error) (*Rollback, error) {
	r, err := c.Get(context.WithoutCancel(ctx), id)
	if err != nil {
		return nil, err
	}
	return r, why
}

// Page is a part of a listing.
type Page struct {
	// Rollbacks, the newest first, without their plans and steps.
	Rollbacks []*Rollback
	// Unreadable counts those that stand there and do not open.
	Unreadable int
	// Next is where the next page begins, empty after the last one.
	Next string
}

// MaxPage is the largest number of rollbacks on a page.
const MaxPage = 1000

// List returns up to limit rollbacks from where after says; empty is the beginning. One
// that has given way to a wider one is shown as it was then, and names the other.
func (c *Coordinator) List(ctx context.Context, after string, limit int) (Page, error) {
	limit = min(max(limit, 1), MaxPage)
	prefix := []byte{space, kindAge}
	r := store.Prefix(prefix)
	r.Reverse, r.Limit = true, limit+1
	if after != "" {
		place, err := base64.RawURLEncoding.DecodeString(after)
		if err != nil || len(place) != placeSize {
			return Page{}, ErrCursor
		}
		r.To = append(bytes.Clone(prefix), place...)
	}
	var keys [][]byte
	for entry, err := range c.o.Store.Scan(ctx, r) {
		if err != nil {
			return Page{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
		keys = append(keys, entry.Key)
	}
	var page Page
	if len(keys) > limit {
		keys = keys[:limit]
		page.Next = base64.RawURLEncoding.EncodeToString(keys[limit-1][len(prefix):])
	}
	for _, key := range keys {
		h, _, err := c.readHead(ctx, nameIn(key))
		switch {
		case errors.Is(err, ErrUnknown):
		case errors.Is(err, ErrUnreadable):
			page.Unreadable++
		case err != nil:
			return Page{}, err
		default:
			page.Rollbacks = append(page.Rollbacks, h.rollback())
		}
	}
	return page, nil
}
