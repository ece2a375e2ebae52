package hitl

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	resealPage  = 256
	resealBatch = 32
)

// Reseal seals anew, with the newest key, what stands under older ones, and returns how
// many escalations. It may be stopped anywhere and starts over. Those that do not open are
// left, and are the error, as ErrUnreadable: then the older keys must not be given up.
//
// An escalation that was prepared under an older key and is committed after the walk is
// sealed anew by its Courier.
func (d *Desk) Reseal(ctx context.Context) (int, error) {
	ids := d.sealer.KeyIDs()
	newest := ids[len(ids)-1]
	r := store.Prefix([]byte{space, kindRecord})
	r.Limit = resealPage
	total, damaged := 0, 0
	for more := true; more; {
		var batch []store.Write
		n := 0
		for entry, err := range d.store.Scan(ctx, r) {
			if err != nil {
				return total, fmt.Errorf("%w: %w", ErrStore, err)
			}
			n++
			r.From = append(entry.Key[:len(entry.Key):len(entry.Key)], 0)
			if d.sealer.KeyOf(entry.Value) == newest {
				continue
			}
			plain, err := d.sealer.Open(nil, entry.Value, entry.Key)
			if err != nil {
				damaged++
				continue
			}
			batch = append(batch, store.Write{
				Key: entry.Key, If: store.VersionIs(entry.Version), Expires: entry.Expires,
				Value: d.sealer.Seal(nil, plain, entry.Key),
			})
		}
		more = n == r.Limit
		for len(batch) > 0 {
			part := batch[:min(len(batch), resealBatch)]
			batch = batch[len(part):]
			n, err := d.resealCommit(ctx, part)
			total += n
			if err != nil {
				return total, err
			}
		}
	}
	if damaged > 0 {
		return total, fmt.Errorf("%w: %d of them", ErrUnreadable, damaged)
	}
	return total, nil
}

// resealCommit leaves out what was changed meanwhile: it was sealed then.
func (d *Desk) resealCommit(ctx context.Context, changes []store.Write) (int, error) {
	// A nearly full store takes batches that begin with a change of what is there. This
	// can wait, so it begins with a write that asks for nothing.
	batch := append([]store.Write{{Key: []byte{space, '-'}, If: store.Absent(), Delete: true}}, changes...)
	for len(batch) > 1 {
		_, err := d.store.Commit(ctx, batch...)
		var lost *store.Conflict
		switch {
		case err == nil:
			return len(batch) - 1, nil
		case errors.As(err, &lost) && lost.Index > 0:
			batch = append(batch[:lost.Index], batch[lost.Index+1:]...)
		default:
			return 0, fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
	return 0, nil
}
