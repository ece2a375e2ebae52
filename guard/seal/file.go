package seal

import (
	"errors"
	"fmt"
	"os"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// ErrBusy is returned where another process rotates the same file at this moment.
var ErrBusy = errors.New("seal: another rotation of the key file is under way; try again")

// Load reads the ring from a file. A missing file is an fs.ErrNotExist.
func Load(path string) (*Ring, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("key file %s: %w", path, err)
	}
	return r, nil
}

// Create makes a fresh ring and writes it to path with mode 0600, whole or not at
// all, and never over a file that is there: that file's store would be lost.
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
// then seals with it. What others have added to the file meanwhile is taken over;
// nothing is ever taken out of it. It returns the new key's id.
//
// The file is replaced as a whole and is durable before before is called with the
// id; r seals with the new key only after before has returned nil. A crash or an
// error on the way leaves either the old file, or one with a key more that is not
// used yet.
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
	if err := before(next.newest); err != nil {
		return 0, err
	}
	r.keys.Store(next)
	return next.newest, nil
}

// RotateFile is Rotate for a ring that is not in use here. Gateways that use it take
// the new key over when their configuration is loaded again.
func RotateFile(path string) (uint32, error) {
	r, err := Load(path)
	if err != nil {
		return 0, err
	}
	return r.Rotate(path, func(uint32) error { return nil })
}

// rotated is the keys of r and of a file that says text, and a new one.
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
