package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// state is a log as it is in the store at one moment. It does not change.
type state struct {
	*tree
	head     Head
	version  store.Version // of the head; 0 where there is none
	recorded time.Time     // of the last entry
}

// loadAttempts bounds how often a read starts over because the log moved on under it.
const loadAttempts = 10

// load reads the state of the log and checks it against its signed head.
func (s *shelf) load(ctx context.Context) (*state, error) {
	var err error
	for range loadAttempts {
		var found *state
		var moved bool
		if found, moved, err = s.tryLoad(ctx); err == nil || !moved {
			return found, err
		}
	}
	return nil, err
}

// tryLoad also reports whether another process moved the log on meanwhile, so that
// what was read does not fit together.
func (s *shelf) tryLoad(ctx context.Context) (found *state, moved bool, err error) {
	head, version, err := s.storedHead(ctx)
	if err != nil {
		return nil, false, err
	}
	found, err = s.build(ctx, head)
	if err == nil {
		err = s.nothingAbove(ctx, head.Size)
	}
	if err == nil {
		found.version = version
		return found, false, nil
	}
	_, after, headErr := s.storedHead(ctx)
	return nil, headErr == nil && after != version, err
}

// storedHead is the head that stands in the store; the zero version says none.
func (s *shelf) storedHead(ctx context.Context) (Head, store.Version, error) {
	found, err := s.store.Get(ctx, s.headKey())
	if errors.Is(err, store.ErrNotFound) {
		return Head{Origin: s.origin}, 0, nil
	}
	if err != nil {
		return Head{}, 0, err
	}
	head, err := ParseHead(found.Value, s.origin, s.keys)
	if err != nil {
		return Head{}, 0, fmt.Errorf("%w: the signed head: %w", ErrTampered, err)
	}
	return head, found.Version, nil
}

// build makes the tree of head from the unfinished tiles.
func (s *shelf) build(ctx context.Context, head Head) (*state, error) {
	found := &state{head: head}
	var edge [][]tlog.Hash
	first := head.Size &^ (tileWidth - 1)
	bottom := make([]tlog.Hash, 0, tileWidth)
	for i := first; i < head.Size; i++ {
		e, err := s.read(ctx, s.id, i)
		if errors.Is(err, store.ErrNotFound) {
			return nil, fmt.Errorf("%w: entry %d is missing", ErrTampered, i)
		}
		if err != nil {
			return nil, err
		}
		bottom = append(bottom, tlog.RecordHash(e.Leaf))
		found.recorded = e.Recorded
	}
	for level := 0; head.Size>>(level*tileHeight) != 0; level++ {
		if level == 0 {
			edge = append(edge, bottom)
			continue
		}
		n := head.Size >> (level * tileHeight)
		width := int(n & (tileWidth - 1))
		if width == 0 {
			edge = append(edge, nil)
			continue
		}
		hashes, err := s.storedTile(ctx, level, n>>tileHeight)
		if err != nil {
			return nil, err
		}
		if len(hashes) != width {
			return nil, fmt.Errorf("%w: tile %d of level %d has %d hashes instead of %d", ErrTampered, n>>tileHeight, level, len(hashes), width)
		}
		edge = append(edge, hashes)
	}
	found.tree = restore(edge)
	if found.recorded.IsZero() && head.Size > 0 {
		e, err := s.read(ctx, s.id, head.Size-1)
		switch {
		case err == nil:
			found.recorded = e.Recorded
		case !errors.Is(err, store.ErrNotFound): // pruned: long ago
			return nil, err
		}
	}
	if head.Note != nil && found.root() != head.Root {
		return nil, fmt.Errorf("%w: the entries do not fit the signed head of size %d", ErrTampered, head.Size)
	}
	return found, nil
}

// nothingAbove holds that no entry stands behind the end of the tree.
func (s *shelf) nothingAbove(ctx context.Context, size int64) error {
	for e, err := range s.store.Scan(ctx, s.entries(size, 1)) {
		if err != nil {
			return err
		}
		return fmt.Errorf("%w: entry %d stands behind the signed head of size %d", ErrTampered, indexIn(e.Key), size)
	}
	return nil
}

// entries is the range of the entries from an index on.
func (s *shelf) entries(from int64, limit int) store.Range {
	r := store.Prefix(logKey(spaceEntry, s.id, 0))
	r.From, r.Limit = s.entryKey(from), limit
	return r
}

// contains holds that the tree grew out of the one of an earlier head.
func (s *state) contains(ctx context.Context, on *shelf, known *Head) error {
	if known.Origin != on.origin {
		return fmt.Errorf("%w: a head of the log %q", ErrProof, known.Origin)
	}
	if known.Size > s.size {
		return fmt.Errorf("%w: it has %d entries and had %d", ErrTampered, s.size, known.Size)
	}
	root, err := s.rootAt(ctx, on, known.Size)
	if err != nil {
		return err
	}
	if root != known.Root {
		return fmt.Errorf("%w: its first %d entries are not those of the head of that size", ErrTampered, known.Size)
	}
	return nil
}

// rootAt is the root that the tree had at an earlier size.
func (s *state) rootAt(ctx context.Context, on *shelf, size int64) (tlog.Hash, error) {
	if size == s.size {
		return s.root(), nil
	}
	return tlog.TreeHash(size, s.hashes(ctx, on))
}

// current is a state of at least that size, where there is one. What another process
// moved, and what this one did a moment ago, is in the store before it is at hand.
func (l *Log) current(ctx context.Context, size int64) (*state, error) {
	s := l.now.Load()
	if size <= s.size {
		return s, nil
	}
	head, _, err := l.storedHead(ctx)
	if err != nil || head.Size < size {
		return s, err
	}
	if now := l.now.Load(); size <= now.size {
		return now, nil
	}
	found, err := l.load(ctx)
	if err != nil {
		return nil, err
	}
	return found, found.contains(ctx, l.shelf, &s.head)
}
