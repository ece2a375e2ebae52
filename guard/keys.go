package guard

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// ErrMissingKey: values in the store are sealed with a key that the ring lacks.
var ErrMissingKey = errors.New("guard: the key ring lacks a sealing key under which values stand in this store: " +
	"put it back into the ring; without it what it sealed is unreadable")

// KeyUse is a sealing key under which values may stand in the store.
type KeyUse struct {
	ID uint32
	// Until is when the last of them expires; zero where that is not known, or never.
	Until time.Time
}

// The store notes which sealing keys it needs, so that a ring without one of them is
// refused before anything is lost: each key before its first use, with the time at
// which it is needed no more once everything else was re-sealed.
const keysName = "keys"

const keyUseSize = 4 + 8

func encodeUses(uses []KeyUse) []byte {
	var b []byte
	for _, use := range uses {
		b = binary.BigEndian.AppendUint32(b, use.ID)
		var until int64
		if !use.Until.IsZero() {
			until = use.Until.UnixNano()
		}
		b = binary.BigEndian.AppendUint64(b, uint64(until))
	}
	return b
}

func decodeUses(b []byte) ([]KeyUse, error) {
	if len(b)%keyUseSize != 0 {
		return nil, errEncoding
	}
	var uses []KeyUse
	for row := range slices.Chunk(b, keyUseSize) {
		use := KeyUse{ID: binary.BigEndian.Uint32(row)}
		if until := int64(binary.BigEndian.Uint64(row[4:])); until != 0 {
			use.Until = time.Unix(0, until)
		}
		uses = append(uses, use)
	}
	return uses, nil
}

// KeysInUse lists the sealing keys that the store needs, by id. The newest is one of
// them.
func (g *Guard) KeysInUse(ctx context.Context) ([]KeyUse, error) {
	uses, _, err := g.keyUses(ctx)
	if err != nil {
		return nil, err
	}
	now, err := g.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return slices.DeleteFunc(uses, func(use KeyUse) bool {
		return !use.Until.IsZero() && !now.Before(use.Until)
	}), nil
}

// keyUses reads the note, and the condition on which it may be replaced.
func (g *Guard) keyUses(ctx context.Context) ([]KeyUse, store.Condition, error) {
	entry, err := g.store.Get(ctx, metaKey(keysName))
	if errors.Is(err, store.ErrNotFound) {
		// Written before there was a note: any key may have been used.
		var uses []KeyUse
		for _, id := range g.sealer.KeyIDs() {
			uses = append(uses, KeyUse{ID: id})
		}
		return uses, store.Absent(), nil
	}
	if err != nil {
		return nil, store.Condition{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	uses, err := decodeUses(entry.Value)
	if err != nil {
		return nil, store.Condition{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return uses, store.VersionIs(entry.Version), nil
}

// changeUses replaces the note by what change makes of it, whoever else writes it.
func (g *Guard) changeUses(ctx context.Context, change func([]KeyUse) []KeyUse) error {
	for {
		uses, unchanged, err := g.keyUses(ctx)
		if err != nil {
			return err
		}
		next := encodeUses(change(slices.Clone(uses)))
		if string(next) == string(encodeUses(uses)) && !unchanged.Holds(nil) {
			return nil
		}
		_, err = g.store.Commit(ctx, store.Write{Key: metaKey(keysName), If: unchanged, Value: next})
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		return nil
	}
}

// UseKey notes durably that values may be sealed with a key from now on. Whoever
// gives the sealer a new newest key calls it before the first value is sealed so.
func (g *Guard) UseKey(ctx context.Context, id uint32) error {
	return g.changeUses(ctx, func(uses []KeyUse) []KeyUse { return with(uses, KeyUse{ID: id}) })
}

// with is the list with this entry for its key.
func with(uses []KeyUse, new KeyUse) []KeyUse {
	uses = slices.DeleteFunc(uses, func(use KeyUse) bool { return use.ID == new.ID })
	uses = append(uses, new)
	slices.SortFunc(uses, func(a, b KeyUse) int { return cmp.Compare(a.ID, b.ID) })
	return uses
}

// checkKeys refuses a sealer that lacks a key that the store needs, and notes its
// newest as used.
func (g *Guard) checkKeys(ctx context.Context) error {
	uses, err := g.KeysInUse(ctx)
	if err != nil {
		return err
	}
	held := g.sealer.KeyIDs()
	for _, use := range uses {
		if !slices.Contains(held, use.ID) {
			return fmt.Errorf("%w: it is sealing key %d", ErrMissingKey, use.ID)
		}
	}
	return g.UseKey(ctx, held[len(held)-1])
}

// writers counts the commits under way that carry sealed values, so that re-sealing
// can wait for those whose values were sealed with an older key. Whoever seals for
// the store enters before, and leaves after the commit.
type writers struct {
	current atomic.Pointer[gate]

	mu    sync.Mutex
	older []*gate // not known to be empty
}

func newWriters() *writers {
	w := new(writers)
	w.current.Store(new(gate))
	return w
}

// enter returns the gate to leave. It never waits.
func (w *writers) enter() *gate {
	for {
		if g := w.current.Load(); g.enter() {
			return g
		}
		// It was shut, so another one has taken its place.
	}
}

// turn waits until all those have left that had entered before it. Others enter
// meanwhile.
func (w *writers) turn(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.older = append(w.older, w.current.Swap(new(gate)))
	for len(w.older) > 0 {
		if w.older[0].drain(ctx) > 0 {
			return ctx.Err()
		}
		w.older = w.older[1:]
	}
	return nil
}
