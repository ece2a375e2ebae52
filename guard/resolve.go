package guard

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Applied settles a doubtful execution with the evidence that it was executed. With
// an answer, that becomes the result; without one the result is unavailable. The
// answer's body is at most 256 KiB; a larger one is not kept.
//
// ErrTaken says that the execution is not in doubt any more: look it up again.
func (g *Guard) Applied(ctx context.Context, key Key, found Finding, answer *Head, body []byte) error {
	now, err := g.store.Now(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	record := *found.Record
	record.State, record.Settled = StateCompleted, now
	// Pieces are named by their claim: these are not the lost execution's own.
	record.Claim = newClaim()
	var tail []byte
	if answer != nil && len(body) <= pieceSize {
		recording := newRecording(pieceSize)
		defer recording.drop()
		recording.Start(answer.Status, answer.Header)
		recording.Write(body)
		var none pieces
		if tail, err = none.rest(recording, &record); err == nil {
			record.Result.Expires = now.Add(record.KeepResult)
		}
	}
	err = g.apply(ctx, key, found, &record, tail)
	if tail != nil && errors.Is(err, ErrStore) {
		// The answer did not fit; that the call was executed is what must be kept.
		record.Result = StoredResult{}
		err = g.apply(ctx, key, found, &record, nil)
	}
	return err
}

func (g *Guard) apply(ctx context.Context, key Key, found Finding, record *Record, tail []byte) error {
	defer g.writers.enter().leave()
	batch := g.put(key, found.Record, record, store.VersionIs(found.version))
	if tail != nil {
		name := pieceKey(key, record.Claim, headPiece)
		batch = append(batch, store.Write{
			Key: name, Value: g.sealer.Seal(nil, tail, name), Expires: record.Result.Expires, Bulk: true,
		})
	}
	if _, err := g.store.Commit(ctx, batch...); err != nil {
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			return ErrTaken
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}
