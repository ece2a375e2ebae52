package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// layoutVersion is the version of the keys and records that this build writes.
const layoutVersion = "1"

// Errors of Open that say what to do.
var (
	// ErrWrongKey: the store was sealed with another key ring.
	ErrWrongKey = errors.New("guard: the key does not belong to this store: give the key that was made with the store; " +
		"without it no recorded execution can be found, and retries would run again")
	// ErrLayout: the store was written by a build that this one does not know.
	ErrLayout = errors.New("guard: the store was written by another version of the gateway")
)

func metaKey(name string) []byte { return append([]byte{spaceMeta}, name...) }

// Fresh reports whether nothing was ever kept in st, so that a new key may be made
// for it. A store that holds anything needs the key that it was made with.
func Fresh(ctx context.Context, st store.Store) (bool, error) {
	for _, err := range st.Scan(ctx, store.Range{Limit: 1}) {
		return false, err
	}
	return true, nil
}

// identify checks the store's key and layout and reads the node's id, or writes
// them into a fresh store.
func (g *Guard) identify(ctx context.Context) error {
	check := metaKey("key")
	entry, err := g.store.Get(ctx, check)
	if errors.Is(err, store.ErrNotFound) {
		return g.christen(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	layout, err := g.store.Get(ctx, metaKey("layout"))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	if string(layout.Value) != layoutVersion {
		return fmt.Errorf("%w: layout %q, this build knows %q", ErrLayout, layout.Value, layoutVersion)
	}
	if id := g.sealer.KeyOf(entry.Value); !slices.Contains(g.sealer.KeyIDs(), id) {
		return fmt.Errorf("%w: it is sealing key %d", ErrMissingKey, id)
	}
	plain, err := g.sealer.Open(nil, entry.Value, check)
	if err != nil || string(plain) != g.keyCheck() {
		return ErrWrongKey
	}
	if err := g.checkKeys(ctx); err != nil {
		return err
	}
	node, err := g.store.Get(ctx, metaKey("node"))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	g.node = string(node.Value)
	return nil
}

// keyCheck ties the index key to the sealed marker: a ring with the right sealing
// key and another index key would find no execution.
func (g *Guard) keyCheck() string {
	sum := g.sealer.Index("key check")
	return string(sum[:])
}

func (g *Guard) christen(ctx context.Context) error {
	fresh, err := Fresh(ctx, g.store)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	if !fresh {
		return fmt.Errorf("%w: it holds data without a key check", ErrLayout)
	}
	g.node = "node-" + g.boot
	check := metaKey("key")
	ids := g.sealer.KeyIDs()
	_, err = g.store.Commit(ctx,
		store.Write{Key: check, If: store.Absent(), Value: g.sealer.Seal(nil, []byte(g.keyCheck()), check)},
		store.Write{Key: metaKey("layout"), If: store.Absent(), Value: []byte(layoutVersion)},
		store.Write{Key: metaKey("node"), If: store.Absent(), Value: []byte(g.node)},
		store.Write{Key: metaKey(keysName), If: store.Absent(), Value: encodeUses([]KeyUse{{ID: ids[len(ids)-1]}})},
	)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// Recovery counts what an earlier life of this node left behind.
type Recovery struct {
	// InDoubt: it may have been sent when the process died.
	InDoubt int
	// Released: it was claimed and not sent.
	Released int
	// Unrecorded: it may have been sent, and the store had no room to say so. It is
	// in doubt all the same; the next opening records it.
	Unrecorded int
}

// recover settles the open records of other lives of this node. It runs once, when
// the store is opened; a reload of the configuration keeps the same life.
func (g *Guard) recover(ctx context.Context) (Recovery, error) {
	var done Recovery
	for _, state := range []State{StateClaimed, StateSending} {
		var keys []Key
		for entry, err := range g.store.Scan(ctx, store.Prefix([]byte{spaceState, byte(state)})) {
			if err != nil {
				return done, fmt.Errorf("%w: %w", ErrStore, err)
			}
			keys = append(keys, Key(entry.Key[len(entry.Key)-len(Key{}):]))
		}
		for _, key := range keys {
			if err := g.recoverOne(ctx, key, &done); err != nil {
				return done, err
			}
		}
	}
	return done, nil
}

func (g *Guard) recoverOne(ctx context.Context, key Key, done *Recovery) error {
	record, version, err := g.load(ctx, key)
	if err != nil || record == nil || record.Node != g.node || record.Boot == g.boot {
		return err
	}
	var next *Record
	count := &done.Released
	switch record.State {
	case StateClaimed:
	case StateSending:
		now, err := g.store.Now(ctx)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		doubt := *record
		doubt.State, doubt.Cause, doubt.Settled = StateInDoubt, CauseDied, now
		next, count = &doubt, &done.InDoubt
	default:
		return nil
	}
	_, err = g.store.Commit(ctx, g.put(key, record, next, store.VersionIs(version))...)
	if errors.Is(err, store.ErrFull) {
		// What has no owner counts as in doubt (standing). A full disk must not keep
		// everything else from flowing (P4).
		done.Unrecorded++
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	*count++
	return nil
}
