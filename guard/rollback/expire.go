package rollback

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// expirePage is how many records get their expiry in one commit.
const expirePage = 64

// expireAll gives what stands of a finished rollback its expiry, after that of those that
// it has taken up, and that those have.
func (c *Coordinator) expireAll(ctx context.Context, n name, h *head) error {
	expires := h.Finished.Add(c.o.Keep)
	seen := map[string]bool{h.ID: true}
	for absorbed := slices.Clone(h.Absorbed); len(absorbed) > 0; {
		id := absorbed[0]
		absorbed = absorbed[1:]
		if seen[id] {
			continue
		}
		seen[id] = true
		n := c.name(id)
		other, _, err := c.readHead(ctx, n)
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err != nil {
			return err
		}
		absorbed = append(absorbed, other.Absorbed...)
		if err := c.expire(ctx, n, other, expires); err != nil {
			return err
		}
		c.mu.Lock()
		delete(c.runs, n)
		c.mu.Unlock()
	}
	return c.expire(ctx, n, h, expires)
}

// remains goes on with what stands of a rollback that cannot be read whole, with why. What
// an earlier life has left of a finished one may have expired in part, the head last.
func (c *Coordinator) remains(ctx context.Context, n name, why error) error {
	h, _, err := c.readHead(ctx, n)
	switch {
	case errors.Is(err, ErrUnknown):
		if _, err = c.o.Store.Commit(ctx, store.Write{Key: keyOf(kindOpen, n), Delete: true}); err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		return nil
	case err == nil && h.State == Finished:
		return c.expireAll(ctx, n, h)
	case err == nil && h.Halted: // the one that it gave way to takes it along
		return nil
	}
	c.log.Error("a rollback cannot be taken up again", "error", why)
	return nil
}

// expire gives all that stands of a rollback its expiry, the head last: so that it is
// found again where this is cut off. Each changes as it was read, or is read again.
func (c *Coordinator) expire(ctx context.Context, n name, h *head, at time.Time) error {
	for _, kind := range []byte{kindPlan, kindStep} {
		if err := c.expireRange(ctx, store.Prefix(keyOf(kind, n)), at); err != nil {
			return err
		}
	}
	keys := [][]byte{ageKey(h.Asked, n)}
	if h.Token != "" {
		keys = append(keys, c.tokenKey(h.Token))
	}
	if h.stops() {
		keys = append(keys, keyOf(kindStop, n))
	}
	for _, key := range append(keys, keyOf(kindHead, n)) {
		if err := c.expireRange(ctx, store.Range{From: key, To: append(bytes.Clone(key), 0)}, at); err != nil {
			return err
		}
	}
	_, err := c.o.Store.Commit(ctx, store.Write{Key: keyOf(kindOpen, n), Delete: true})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

func (c *Coordinator) expireRange(ctx context.Context, r store.Range, at time.Time) error {
	r.Limit = expirePage
	for {
		var batch []store.Write
		var last []byte
		for entry, err := range c.o.Store.Scan(ctx, r) {
			if err != nil {
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
			last = entry.Key
			if !entry.Expires.Equal(at) {
				batch = append(batch, store.Write{
					Key: entry.Key, If: store.VersionIs(entry.Version), Value: entry.Value, Expires: at,
				})
			}
		}
		if len(batch) > 0 {
			_, err := c.o.Store.Commit(ctx, batch...)
			if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
				continue // sealed anew meanwhile
			}
			if err != nil {
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
		}
		if last == nil {
			return nil
		}
		r.From = append(bytes.Clone(last), 0)
	}
}
