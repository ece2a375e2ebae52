package seal

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// ErrIndex is returned for a ring with another index key: it belongs to another
// store, and would find no execution of this one.
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

// Rotated is a copy of the ring with one more sealing key, which is its newest. The
// ring itself seals as before.
func (r *Ring) Rotated() (*Ring, error) {
	next, err := r.keys.Load().rotated()
	if err != nil {
		return nil, err
	}
	return newRing(r.index, next), nil
}

// Adopt makes the sealing keys of other, a later reading of this ring, those of r.
// Keys that other lacks are gone then, so the ids in needed are those that it must
// have; r's newest is always one of them. Where the newest changes, before is called
// with it: r seals with it only after before has returned nil. Adopt reports whether
// anything changed.
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
	for _, id := range append(slices.Clone(needed), ours.newest) {
		if theirs.sealing[id] == nil {
			missing.IDs = append(missing.IDs, id)
		}
	}
	if len(missing.IDs) > 0 {
		slices.Sort(missing.IDs)
		missing.IDs = slices.Compact(missing.IDs)
		return false, &missing
	}
	if ours.newest != theirs.newest {
		if err := before(theirs.newest); err != nil {
			return false, err
		}
	}
	changed := !slices.Equal(r.KeyIDs(), other.KeyIDs())
	r.keys.Store(theirs)
	return changed, nil
}

// agree returns an error where two sets hold different keys of one number: then one
// of them was made beside the other, and neither may be given up.
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
	all := &keySet{newest: max(k.newest, other.newest), sealing: maps.Clone(k.sealing)}
	maps.Copy(all.sealing, other.sealing)
	return all
}

// rotated is the set with one more key.
func (k *keySet) rotated() (*keySet, error) {
	if k.newest == math.MaxUint32 {
		return nil, errors.New("seal: the numbers of sealing keys are used up")
	}
	next := &keySet{newest: k.newest + 1, sealing: maps.Clone(k.sealing)}
	next.sealing[next.newest] = freshKey()
	return next, nil
}
