package guard

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Recorded is one execution as those see it who did not send it: operators, and
// callers who ask what became of it.
type Recorded struct {
	Key Key
	Finding
}

// Errors of Expand.
var (
	// ErrUnknown: no execution is recorded under this key.
	ErrUnknown = errors.New("guard: no such execution")
	// ErrAmbiguous: more than one key begins like this.
	ErrAmbiguous = errors.New("guard: more than one execution's key begins like this; give more digits")
	// ErrKeyForm: the text is no key.
	ErrKeyForm = errors.New("guard: a key has 4 to 64 hexadecimal digits")
)

// minPrefix is the smallest number of digits that Expand takes.
const minPrefix = 4

// Look returns what is recorded under key, whatever the fingerprint, or ErrUnknown.
func (g *Guard) Look(ctx context.Context, key Key) (Recorded, error) {
	record, _, err := g.load(ctx, key)
	if err != nil {
		return Recorded{}, err
	}
	if record == nil {
		return Recorded{}, ErrUnknown
	}
	found, err := g.Find(ctx, key, record.Fingerprint)
	if err != nil {
		return Recorded{}, err
	}
	switch found.Standing {
	case Free, Mismatch: // it was released in between, and perhaps used anew
		return Recorded{}, ErrUnknown
	case RunningHere:
		found.Record = record
	}
	return Recorded{Key: key, Finding: found}, nil
}

// Expand returns the one recorded key that begins with the hexadecimal digits of
// prefix. Where there is none, keys count that are free and were resolved once.
func (g *Guard) Expand(ctx context.Context, prefix string) (Key, error) {
	if len(prefix) < minPrefix || len(prefix) > 2*keySize {
		return Key{}, ErrKeyForm
	}
	from, err := hex.DecodeString(prefix + strings.Repeat("0", len(prefix)%2))
	if err != nil {
		return Key{}, ErrKeyForm
	}
	to, err := hex.DecodeString(prefix + strings.Repeat("f", len(prefix)%2))
	if err != nil {
		return Key{}, ErrKeyForm
	}
	key, err := g.expand(ctx, spaceRecord, from, to, keyIn)
	if errors.Is(err, ErrUnknown) {
		key, err = g.expand(ctx, spaceResolved, from, to, func(name []byte) Key { return Key(name[1 : 1+keySize]) })
	}
	return key, err
}

// expand returns the one key between from and to in a space of the store.
func (g *Guard) expand(ctx context.Context, space byte, from, to []byte, keyOf func(name []byte) Key) (Key, error) {
	r := store.Range{From: append([]byte{space}, from...), To: store.Prefix(append([]byte{space}, to...)).To}
	var key Key
	found := false
	for entry, err := range g.store.Scan(ctx, r) {
		if err != nil {
			return Key{}, fmt.Errorf("%w: %w", ErrStore, err)
		}
		next := keyOf(entry.Key)
		if found && next != key {
			return Key{}, ErrAmbiguous
		}
		key, found = next, true
	}
	if !found {
		return Key{}, ErrUnknown
	}
	return key, nil
}

// ByID returns the executions that caller has named id: more than one where it used
// the id for several methods, paths or guards; of more than a thousand that are
// settled, some. What another caller has named so is not found, and takes no other way
// than what nobody has (P3).
func (g *Guard) ByID(ctx context.Context, caller CallerHash, id string) ([]Recorded, error) {
	mine := func(r *Record) bool { return r.Caller == caller && r.ID == shorten(id, maxRecordedID) }
	prefix := g.idPrefix(caller, id)
	settled, err := g.keysUnder(ctx, prefix)
	if err != nil {
		return nil, err
	}
	open, err := g.openKeys(ctx, func(f *Flight) bool { return f.caller == caller && f.id == id })
	if err != nil {
		return nil, err
	}
	// Once more: what was open may have been settled before it was met there. What was
	// in doubt may be run again, so the first look is needed too.
	since, err := g.keysUnder(ctx, prefix)
	if err != nil {
		return nil, err
	}
	keys := slices.Concat(settled, open, since)
	var all []Recorded
	seen := make(map[Key]bool, len(keys))
	for _, key := range keys {
		if seen[key] {
			continue
		}
		seen[key] = true
		found, err := g.Look(ctx, key)
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if mine(found.Record) {
			all = append(all, found)
		}
	}
	return all, nil
}

// Knows reports whether an execution of caller is recorded that has come to an end, or
// runs here. One that was released is not.
func (g *Guard) Knows(ctx context.Context, caller CallerHash) (bool, error) {
	if g.flights.of(caller) {
		return true, nil
	}
	r := store.Prefix(callerPrefix(caller))
	r.Limit = 1
	for _, err := range g.store.Scan(ctx, r) {
		if err != nil {
			return false, fmt.Errorf("%w: %w", ErrStore, err)
		}
		return true, nil
	}
	return false, nil
}

// maxNamed is the largest number of settled executions that ByID returns.
const maxNamed = 1000

// keysUnder lists the keys in an index whose entries begin with prefix, up to maxNamed.
func (g *Guard) keysUnder(ctx context.Context, prefix []byte) ([]Key, error) {
	var keys []Key
	r := store.Prefix(prefix)
	r.Limit = maxNamed
	for entry, err := range g.store.Scan(ctx, r) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		keys = append(keys, keyIn(entry.Key))
	}
	return keys, nil
}

// openKeys lists the keys of executions that have not come to an end, by the index
// by state: those that run here and pass the filter, and all others.
func (g *Guard) openKeys(ctx context.Context, here func(*Flight) bool) ([]Key, error) {
	var keys []Key
	for _, state := range []State{StateClaimed, StateSending} {
		for entry, err := range g.store.Scan(ctx, store.Prefix([]byte{spaceState, byte(state)})) {
			if err != nil {
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			}
			key := keyIn(entry.Key)
			if f := g.flights.find(key); f == nil || here(f) {
				keys = append(keys, key)
			}
		}
	}
	return keys, nil
}
