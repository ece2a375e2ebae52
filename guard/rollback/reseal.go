package rollback

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	resealPage  = 128
	resealBatch = 32
)

// Reseal seals anew, with the newest key, what stands under older ones, and returns how
// many records. It goes beside the traffic, whose commits win, may be stopped anywhere and
// starts over; it comes before guard.Guard.Reseal. What does not open is left, and is the
// error, as ErrUnreadable: then the older keys must not be given up.
func (c *Coordinator) Reseal(ctx context.Context) (int, error) {
	ids := c.o.Sealer.KeyIDs()
	newest := ids[len(ids)-1]
	// Who sealed before this commits before this.
	c.sealing.Lock()
	//lint:ignore SA2001 to have waited is all
	c.sealing.Unlock()
	total, damaged := 0, 0
	for _, kind := range []byte{kindHead, kindPlan, kindStep, kindToken} {
		r := store.Prefix([]byte{space, kind})
		r.Limit = resealPage
		for more := true; more; {
			seen := 0
			var batch []store.Write
			for entry, err := range c.o.Store.Scan(ctx, r) {
				if err != nil {
					return total, fmt.Errorf("%w: %w", ErrStore, err)
				}
				seen++
				r.From = append(bytes.Clone(entry.Key), 0)
				if c.o.Sealer.KeyOf(entry.Value) == newest {
					continue
				}
				plain, err := c.open(entry)
				if err != nil {
					damaged++
					continue
				}
				w := c.sealed(entry.Key, plain, store.VersionIs(entry.Version))
				w.Expires = entry.Expires
				batch = append(batch, w)
			}
			more = seen == r.Limit
			for part := range slices.Chunk(batch, resealBatch) {
				n, err := c.resealCommit(ctx, part)
				total += n
				if err != nil {
					return total, err
				}
			}
		}
	}
	if damaged > 0 {
		return total, fmt.Errorf("%w: %d of them", ErrUnreadable, damaged)
	}
	return total, nil
}

// resealCommit leaves out what was changed meanwhile: it was sealed then.
func (c *Coordinator) resealCommit(ctx context.Context, changes []store.Write) (int, error) {
	// A nearly full store takes batches that begin with a change of what is there. This
	// can wait, so it begins with a write that asks for nothing.
	batch := append([]store.Write{{Key: []byte{space, '-'}, If: store.Absent(), Delete: true}}, changes...)
	for len(batch) > 1 {
		_, err := c.o.Store.Commit(ctx, batch...)
		var lost *store.Conflict
		switch {
		case err == nil:
			return len(batch) - 1, nil
		case errors.As(err, &lost) && lost.Index > 0:
			batch = slices.Delete(batch, lost.Index, lost.Index+1)
		default:
			return 0, fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
	return 0, nil
}
