package seal

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// ErrBusy is returned while another process rotates the same file.
var ErrBusy = errors.New("seal: another rotation of the key file is under way; try again")

// Load reads the ring from a file. A missing file is an fs.ErrNotExist.
func Load(path string) (*Ring, error) { return durable.Load(path, Parse) }

// Create makes a fresh ring and writes it to path with mode 0600, atomically. An
// existing file is an fs.ErrExist: replacing it would lose its store.
func Create(path string) (*Ring, error) {
	r := Generate()
	text, err := r.MarshalText()
	if err != nil {
		return nil, err
	}
	if err := durable.Create(path, text); err != nil {
		return nil, fmt.Errorf("key file %s: %w", path, err)
	}
	return r, nil
}

// Rotate adds a fresh sealing key to the file at path, which holds this ring, and
// then seals with it. Keys that others added to the file meanwhile are taken over; no
// key is removed from it. It returns the new key's id.
//
// The file is replaced atomically. Once it is durable, before is called with the id; r
// seals with the new key only after before has returned nil. A crash or an error leaves
// either the old file or one with an additional key that is not used yet.
//
// If the key that seals was chosen (Use), the new one only opens, from before that call on.
func (r *Ring) Rotate(path string, before func(newest uint32) error) (uint32, error) {
	r.changing.Lock()
	defer r.changing.Unlock()
	var next *keySet
	err := durable.Edit(path, func(was []byte) (text []byte, err error) {
		if next, err = r.rotated(was); err != nil {
			return nil, err
		}
		return newRing(r.index, next).MarshalText()
	})
	if errors.Is(err, durable.ErrBusy) {
		err = ErrBusy
	}
	if err != nil {
		return 0, fmt.Errorf("key file %s: %w", path, err)
	}
	if next.chosen {
		r.keys.Store(next)
	}
	if err := before(next.newest); err != nil {
		return 0, err
	}
	r.keys.Store(next)
	return next.newest, nil
}

// rotated is the union of the keys of r and of a file with that text, and a new key.
func (r *Ring) rotated(text []byte) (*keySet, error) {
	found, err := Parse(text)
	if err != nil {
		return nil, err
	}
	if found.index != r.index {
		return nil, ErrIndex
	}
	ours, theirs := r.keys.Load(), found.keys.Load()
	if err := ours.agree(theirs); err != nil {
		return nil, err
	}
	return ours.union(theirs).rotated()
}

// ErrIndex is returned for a ring with another index key: it belongs to another store,
// and would not find this store's executions.
var ErrIndex = errors.New("seal: the key ring has another index key, so it belongs to another store")

// MissingError is returned for a ring without sealing keys that are still needed.
type MissingError struct {
	// IDs are the keys that it lacks.
	IDs []uint32
}

func (e *MissingError) Error() string {
	ids := make([]string, len(e.IDs))
	for i, id := range e.IDs {
		ids[i] = strconv.FormatUint(uint64(id), 10)
	}
	return "seal: the key ring lacks sealing key " + strings.Join(ids, ", ") + ", under which values are sealed"
}

// Rotated is a copy of the ring with an additional sealing key, the newest. The ring
// itself does not change.
func (r *Ring) Rotated() (*Ring, error) {
	next, err := r.keys.Load().rotated()
	if err != nil {
		return nil, err
	}
	return newRing(r.index, next), nil
}

// ErrRefused: the keys of another ring are not to be used.
var ErrRefused = errors.New("seal: the key ring is refused")

// Adopt replaces the sealing keys of r by those of other, the ring as it was read again.
// other must have the key that seals and those in needed, else the error is a *MissingError.
// If the newest key changes, before is called with its id: r seals with it only after
// before has returned nil. Adopt reports whether anything changed.
//
// If the key that seals was chosen (Use), it stays, and before is called whenever the keys change: r then
// opens with those of both rings, and goes on so if before fails with another error than ErrRefused.
func (r *Ring) Adopt(other *Ring, needed []uint32, before func(newest uint32) error) (bool, error) {
	if r.index != other.index {
		return false, ErrIndex
	}
	r.changing.Lock()
	defer r.changing.Unlock()
	ours, theirs := r.keys.Load(), other.keys.Load()
	if err := ours.agree(theirs); err != nil {
		return false, err
	}
	var missing MissingError
	for _, id := range append(slices.Clone(needed), ours.seals) {
		if theirs.sealing[id] == nil {
			missing.IDs = append(missing.IDs, id)
		}
	}
	if len(missing.IDs) > 0 {
		slices.Sort(missing.IDs)
		missing.IDs = slices.Compact(missing.IDs)
		return false, &missing
	}
	same := func(*sealingKey, *sealingKey) bool { return true } // they agree
	changed := !maps.EqualFunc(ours.sealing, theirs.sealing, same)
	if ours.chosen && changed {
		r.keys.Store(ours.union(theirs))
	}
	if changed && (ours.chosen || ours.newest != theirs.newest) {
		if err := before(theirs.newest); err != nil {
			if errors.Is(err, ErrRefused) {
				r.keys.Store(ours)
			}
			return false, err
		}
	}
	next := *theirs
	if next.seals, next.chosen = theirs.newest, ours.chosen; ours.chosen {
		next.seals = ours.seals
	}
	r.keys.Store(&next)
	return changed, nil
}

// agree returns an error if two sets have different keys with one number: they were made
// independently, and neither may be dropped.
func (k *keySet) agree(other *keySet) error {
	for id, key := range other.sealing {
		if ours := k.sealing[id]; ours != nil && ours.raw != key.raw {
			return fmt.Errorf("seal: sealing key %d is another one in the ring that is in use; "+
				"two rotations were made apart from each other: give the later one another number", id)
		}
	}
	return nil
}

// union is all keys of both sets, which must agree.
func (k *keySet) union(other *keySet) *keySet {
	all := *k
	all.newest, all.sealing = max(k.newest, other.newest), maps.Clone(k.sealing)
	if !all.chosen {
		all.seals = all.newest
	}
	maps.Copy(all.sealing, other.sealing)
	return &all
}

// rotated is the set with one more key.
func (k *keySet) rotated() (*keySet, error) {
	if k.newest == math.MaxUint32 {
		return nil, errors.New("seal: the numbers of sealing keys are used up")
	}
	next := *k
	next.newest, next.sealing = k.newest+1, maps.Clone(k.sealing)
	if !next.chosen {
		next.seals = next.newest
	}
	next.sealing[next.newest] = freshKey()
	return &next, nil
}
