package memory

import (
	"context"
	"iter"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Scan implements store.Store. It copies the range first, so that the caller may
// commit while it ranges.
func (s *Store) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		entries, err := s.snapshot(ctx, r)
		for _, e := range entries {
			if err := ctx.Err(); err != nil {
				yield(store.Entry{}, err)
				return
			}
			if !yield(e, nil) {
				return
			}
		}
		if err != nil {
			yield(store.Entry{}, err)
		}
	}
}

func (s *Store) snapshot(ctx context.Context, r store.Range) ([]store.Entry, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return nil, store.ErrClosed
	}
	from, _ := s.find(r.From)
	to := len(s.entries)
	if len(r.To) > 0 {
		to, _ = s.find(r.To)
	}
	if from >= to {
		return nil, nil
	}
	now := s.now()
	var found []store.Entry
	for i := range to - from {
		at := from + i
		if r.Reverse {
			at = to - 1 - i
		}
		if expired(&s.entries[at], now) {
			continue
		}
		found = append(found, clone(s.entries[at]))
		if r.Limit > 0 && len(found) == r.Limit {
			break
		}
	}
	return slices.Clip(found), nil
}
