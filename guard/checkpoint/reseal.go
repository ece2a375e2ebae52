package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	resealPage  = 256 // ordinary values that are looked at in one snapshot
	resealBatch = 64  // and sealed anew in one commit
	piecesPage  = 16  // pieces that are looked at in one snapshot
)

// Resealed tells what a Reseal has done.
type Resealed struct {
	// Seen counts the values that were looked at, Resealed those that were sealed anew.
	Seen, Resealed int
	// Damaged are those that do not open with the key that they name. They stay as they
	// are; Open says ErrTampered of them.
	Damaged int
}

// Reseal seals anew, with the newest key, what was sealed with an older one: snapshots,
// results, their pieces, credentials and marks. Hashes do not change, since they are of
// the plain bytes. Afterwards nothing of the vault needs an older key.
//
// It goes beside the traffic, whose commits win, and may be stopped at any moment: the
// next one passes quickly over what was done. It comes before guard.Guard.Reseal, which
// notes the older keys as not needed any more.
func (v *Vault) Reseal(ctx context.Context) (Resealed, error) {
	ids := v.sealer.KeyIDs()
	r := &resealer{v: v, newest: ids[len(ids)-1]}
	if err := v.writers.wait(ctx); err != nil {
		return r.done, err
	}
	for _, kind := range []byte{kindSnapshot, kindResult, kindCredential, kindMark} {
		if err := r.walk(ctx, kind, resealPage, r.ordinary); err != nil {
			return r.done, err
		}
	}
	return r.done, r.walk(ctx, kindPiece, piecesPage, r.pieces)
}

type resealer struct {
	v      *Vault
	newest uint32
	done   Resealed
}

// walk hands what is sealed with an older key to commit, a page at a time.
func (r *resealer) walk(ctx context.Context, kind byte, page int, commit func(context.Context, []store.Entry) error) error {
	at := store.Prefix([]byte{spaceCheckpoint, kind})
	at.Limit = page
	for more := true; more; {
		n := 0
		more = false
		var older []store.Entry
		for entry, err := range r.v.store.Scan(ctx, at) {
			switch {
			case err == nil && r.v.sealer.KeyOf(entry.Value) < r.newest:
				older = append(older, entry)
			case errors.Is(err, store.ErrDamaged):
				r.done.Damaged++
				more = true // it ends the scan, but not the walk
			case err != nil:
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
			n++
			at.From = append(bytes.Clone(entry.Key), 0)
		}
		more = more || n == page
		r.done.Seen += n
		if err := commit(ctx, older); err != nil {
			return err
		}
	}
	return nil
}

// anew makes the write that seals an entry with the newest key.
func (r *resealer) anew(entry store.Entry) (store.Write, bool) {
	plain, err := r.v.sealer.Open(nil, entry.Value, entry.Key)
	if err != nil {
		r.done.Damaged++
		return store.Write{}, false
	}
	return store.Write{Key: entry.Key, Value: r.v.sealer.Seal(nil, plain, entry.Key), Expires: entry.Expires}, true
}

// ordinary seals values anew, unless they have changed since: whoever changed one has
// sealed it with the newest key.
func (r *resealer) ordinary(ctx context.Context, entries []store.Entry) error {
	var batch []store.Write
	for _, entry := range entries {
		if w, ok := r.anew(entry); ok {
			w.If = store.VersionIs(entry.Version)
			batch = append(batch, w)
		}
	}
	for len(batch) > 0 {
		step := batch[:min(len(batch), resealBatch)]
		// A nearly full store takes batches that begin with a change of what is there,
		// since those are outcomes. This can wait: it begins with a write that asks for
		// nothing.
		first := store.Write{Key: []byte{spaceCheckpoint, 'r'}, If: store.Absent(), Delete: true}
		_, err := r.v.store.Commit(ctx, append([]store.Write{first}, step...)...)
		lost := (*store.Conflict)(nil)
		switch {
		case err == nil:
			r.done.Resealed += len(step)
			batch = batch[len(step):]
		case errors.As(err, &lost) && lost.Index > 0:
			batch = slices.Delete(batch, lost.Index-1, lost.Index)
		default:
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
	}
	return nil
}

// pieces seals pieces anew. Bulk values have no conditions and need none: what stands
// under their keys is written once. One that goes meanwhile may come back, and goes
// with its ttl.
func (r *resealer) pieces(ctx context.Context, entries []store.Entry) error {
	for _, entry := range entries {
		w, ok := r.anew(entry)
		if !ok {
			continue
		}
		w.Bulk = true
		if _, err := r.v.store.Commit(ctx, w); err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		r.done.Resealed++
	}
	return nil
}
