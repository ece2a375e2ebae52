package ledger

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// marks says which entries of a full tile were pruned.
type marks struct {
	bits [tileWidth / 64]uint64
	// next is when the first of the others may go, in nanoseconds; 0 is not known.
	next int64
}

const marksSize = tileWidth/8 + 8

func (m *marks) has(index int64) bool {
	i := index & (tileWidth - 1)
	return m.bits[i/64]>>(i%64)&1 == 1
}

func (m *marks) set(index int64) {
	i := index & (tileWidth - 1)
	m.bits[i/64] |= 1 << (i % 64)
}

func (m *marks) count() int {
	n := 0
	for _, b := range m.bits {
		n += bits.OnesCount64(b)
	}
	return n
}

func (m *marks) encode() []byte {
	b := make([]byte, 0, marksSize)
	for _, v := range m.bits {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	return binary.BigEndian.AppendUint64(b, uint64(m.next))
}

// pruned reads the marks of a tile; the zero version says that there are none.
func (s *shelf) pruned(ctx context.Context, n int64) (marks, store.Version, error) {
	var m marks
	found, err := s.store.Get(ctx, s.prunedKey(n))
	if errors.Is(err, store.ErrNotFound) {
		return m, 0, nil
	}
	if err != nil {
		return m, 0, err
	}
	if len(found.Value) != marksSize {
		return m, 0, fmt.Errorf("%w: the marks of what was pruned of tile %d", ErrTampered, n)
	}
	for i := range m.bits {
		m.bits[i] = binary.BigEndian.Uint64(found.Value[8*i:])
	}
	m.next = int64(binary.BigEndian.Uint64(found.Value[tileWidth/8:]))
	return m, found.Version, nil
}

// pruneStep is the number of entries of one commit. An entry has four keys, and a
// commit of many would hold up the calls that share its sync.
const pruneStep = 42

// Prune takes away the entries that were recorded before a time and whose KeepUntil has
// passed, and returns how many. Their leaf hashes stay, so that the tree can be
// verified as before; their ids are free again. Entries of the last, unfinished tile
// stay until it is full.
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
	if err != nil || m.count() == tileWidth || m.next > now.UnixNano() {
		return 0, false, err
	}
	known := m.next
	m.next = math.MaxInt64
	r := l.entries(n<<tileHeight, 0)
	r.To = l.entryKey((n + 1) << tileHeight)
	var gone []prunable
	for found, err := range l.store.Scan(ctx, r) {
		if err != nil {
			return 0, false, err
		}
		e, err := l.openEntry(found.Key, found.Value)
		switch {
		case err != nil:
			return 0, false, err
		case e.Index != indexIn(found.Key):
			return 0, false, fmt.Errorf("%w: entry %d stands at %d", ErrTampered, e.Index, indexIn(found.Key))
		case !e.Recorded.Before(before):
			younger = true
		case e.KeepUntil.After(now):
			m.next = min(m.next, e.KeepUntil.UnixNano())
		default:
			gone = append(gone, prunable{e, found.Version})
		}
	}
	if younger || m.count()+len(gone) == tileWidth {
		m.next = 0 // not all were looked at, or none is left
	}
	if len(gone) == 0 && m.next == known {
		return 0, younger, nil
	}
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
	batch = append(batch, store.Write{Key: l.prunedKey(n), If: condition, Value: m.encode()})
	return l.store.Commit(ctx, batch...)
}
