package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// pruneStep is the number of entries of one commit. An entry has four keys, and a
// commit of many would hold up the calls that share its sync.
const pruneStep = 42

// Prune takes away the entries that were recorded before a time and whose KeepUntil has
// passed, and returns how many. Their leaf hashes stay, so that the tree can be
// verified as before; their ids are free again. A note signed with the key of the heads
// says which they were, in the commit that takes them. Entries of the last, unfinished
// tile stay until it is full.
func (l *Log) Prune(ctx context.Context, before time.Time) (int, error) {
	l.pruning.Lock()
	defer l.pruning.Unlock()
	now, err := l.store.Now(ctx)
	if err != nil {
		return 0, err
	}
	total := 0
	for n := range l.now.Load().size >> tileHeight {
		pruned, younger, err := l.pruneTile(ctx, n, before, now)
		total += pruned
		if err != nil || younger {
			return total, err
		}
	}
	return total, nil
}

// pruneTile prunes what it may of one full tile. younger says that an entry in it was
// recorded too late, and so were all behind it.
func (l *Log) pruneTile(ctx context.Context, n int64, before, now time.Time) (pruned int, younger bool, err error) {
	m, version, err := l.pruned(ctx, n)
	if errors.Is(err, ErrTampered) {
		l.unprunable(n<<tileHeight, err)
		return 0, false, nil
	}
	if err != nil || m.count() == tileWidth || m.next > now.UnixNano() {
		return 0, false, err
	}
	known := m.next
	gone, younger, err := l.prunable(ctx, n, &m, before, now)
	if err != nil || len(gone) == 0 && m.next == known {
		return 0, younger, err
	}
	hashes, root, err := l.proved(ctx, n)
	if errors.Is(err, ErrTampered) {
		l.unprunable(n<<tileHeight, err)
		return 0, younger, nil
	}
	if err != nil {
		return 0, younger, err
	}
	m.root = root
	// What goes is vouched for ever after: it must be what the signed tree has.
	gone = slices.DeleteFunc(gone, func(p prunable) bool {
		if tlog.RecordHash(p.Leaf) == hashes[p.Index&(tileWidth-1)] {
			return false
		}
		l.unprunable(p.Index, fmt.Errorf("%w: it does not fit its stored hash", ErrTampered))
		m.next = 0
		return true
	})
	for first := true; first || len(gone) > 0; first = false {
		step := gone[:min(len(gone), pruneStep)]
		gone = gone[len(step):]
		if version, err = l.pruneCommit(ctx, n, m, version, step, len(gone) == 0); err != nil {
			return pruned, younger, err
		}
		for i := range step {
			m.set(step[i].Index)
		}
		pruned += len(step)
	}
	return pruned, younger, nil
}

// prunable lists the entries of a full tile that may go, and notes in its marks when
// the first of the others may. What does not open stays, and holds nothing up.
func (l *Log) prunable(ctx context.Context, n int64, m *marks, before, now time.Time) (gone []prunable, younger bool, err error) {
	r := l.entries(n<<tileHeight, 0)
	r.To = l.entryKey((n + 1) << tileHeight)
	damaged := false
	next := int64(math.MaxInt64)
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return nil, false, err
		}
		e, err := l.openEntry(found.Key, found.Value)
		if err == nil && e.Index != indexIn(found.Key) {
			err = fmt.Errorf("%w: entry %d stands at %d", ErrTampered, e.Index, indexIn(found.Key))
		}
		switch {
		case err != nil:
			l.unprunable(indexIn(found.Key), err)
			damaged = true
		case !e.Recorded.Before(before):
			younger = true
		case e.KeepUntil.After(now):
			next = min(next, e.KeepUntil.UnixNano())
		default:
			gone = append(gone, prunable{e, found.Version})
		}
	}
	if damaged || younger || m.count()+len(gone) == tileWidth {
		next = 0 // not all were looked at, or none is left
	}
	m.next = next
	return gone, younger, nil
}

// unprunable reports, once a life, what keeps an entry from being pruned: Verify names
// it, and a ring that is complete again may open it. pruning is held.
func (l *Log) unprunable(index int64, why error) {
	if l.kept[index] || len(l.kept) == maxFaults {
		return
	}
	if l.kept == nil {
		l.kept = make(map[int64]bool)
	}
	l.kept[index] = true
	l.options.Logger.Error("an entry of the ledger cannot be pruned and stays; the others go on",
		slog.Int64("entry", index), slog.Any("error", why))
}

// proved are the leaf hashes of a full tile and the root of the tree that ends with it,
// proved against the signed head.
func (l *Log) proved(ctx context.Context, n int64) ([]tlog.Hash, tlog.Hash, error) {
	s := l.now.Load()
	from := &tiles{ctx: ctx, on: l.shelf, state: s}
	reader := tlog.TileHashReader(tlog.Tree{N: s.size, Hash: s.root()}, from)
	indexes := make([]int64, tileWidth)
	for i := range indexes {
		indexes[i] = tlog.StoredHashIndex(0, n<<tileHeight+int64(i))
	}
	hashes, err := reader.ReadHashes(indexes)
	root := s.root()
	if end := (n + 1) << tileHeight; err == nil && end != s.size {
		root, err = tlog.TreeHash(end, reader)
	}
	if err != nil && from.failed == nil {
		err = fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return hashes, root, err
}

// prunable is an entry that may go, as it stands in the store.
type prunable struct {
	Entry
	version store.Version
}

func (l *Log) pruneCommit(ctx context.Context, n int64, m marks, version store.Version, step []prunable, last bool) (store.Version, error) {
	condition := store.Absent()
	if version != 0 {
		condition = store.VersionIs(version)
	}
	if !last {
		m.next = 0
	}
	batch := make([]store.Write, 0, 1+4*len(step))
	given := make(map[string]bool)
	for i := range step {
		e := &step[i]
		m.set(e.Index)
		batch = append(batch,
			// A store that has no room takes a batch that begins with what stands there
			// already: pruning is what makes room.
			store.Write{Key: l.entryKey(e.Index), Delete: true, If: store.VersionIs(e.version)},
			store.Write{Key: l.idKey(e.Workflow, e.ID), Delete: true},
		)
		if e.Workflow != "" {
			batch = append(batch, store.Write{Key: l.workflowKey(e.Workflow, l.id, e.Index), Delete: true})
			// It is for those that come at once: whoever comes later looks at what stands.
			if key := l.givenKey(e.ID); e.KeepUntil.IsZero() && !given[string(key)] {
				given[string(key)] = true
				batch = append(batch, store.Write{Key: key, Delete: true})
			}
		}
	}
	value, err := l.vouch(n, &m)
	if err != nil {
		return 0, err
	}
	batch = append(batch, store.Write{Key: l.prunedKey(n), If: condition, Value: value})
	return l.store.Commit(ctx, batch...)
}
