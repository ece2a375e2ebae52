package badger

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Commit implements store.Store. It returns after the sync of the transaction that
// carries the batch (P2).
func (s *Store) Commit(ctx context.Context, writes ...store.Write) (store.Version, error) {
	if err := store.Check(writes); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if err := s.admit(writes); err != nil {
		return 0, err
	}
	b := newBatch(writes, s.options.Now())
	if !s.committer.commitAlone(b) {
		if err := s.queue.put(b); err != nil {
			return 0, err
		}
	}
	<-b.done
	version, err := b.version, b.err
	if err == nil && b.lost >= 0 {
		version, err = 0, s.conflict(b)
	}
	b.release()
	return version, err
}

// conflict tells the loser what stands there.
func (s *Store) conflict(b *batch) error {
	lost := &store.Conflict{Index: b.lost, Key: bytes.Clone(b.writes[b.lost].Key)}
	if b.found == nil {
		return lost
	}
	e, err := s.entry(lost.Key, b.found, time.Time{})
	if err != nil {
		return fmt.Errorf("badger: batch refused, what stands in its way cannot be read: %w", err)
	}
	lost.Found = &e
	return lost
}
