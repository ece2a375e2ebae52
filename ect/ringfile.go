package ect

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// ErrBusy is returned where another process rotates the same key file at this moment.
var ErrBusy = errors.New("ect: another rotation of the key file is under way; try again")

// LoadRing reads a ring from a file. A missing file is an fs.ErrNotExist.
func LoadRing(path string) (*Ring, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r, err := ParseRing(text)
	if err != nil {
		return nil, fmt.Errorf("key file %s: %w", path, err)
	}
	return r, nil
}

// CreateRing makes a ring with a fresh key and writes it to path with mode 0600, whole
// or not at all, and never over a file that is there.
func CreateRing(path string, alg Algorithm) (*Ring, error) {
	r, err := GenerateRing(alg)
	if err != nil {
		return nil, err
	}
	text, err := r.MarshalText()
	if err != nil {
		return nil, err
	}
	if err := durable.Create(path, text); err != nil {
		return nil, fmt.Errorf("key file %s: %w", path, err)
	}
	return r, nil
}

// Rotate puts a fresh key of the algorithm into the file at path, which holds this
// ring, and then signs with it. The key before loses its private part and is published
// for as long as keep says: the longest life of a token that it has signed. Keys that
// were replaced earlier are not published longer than that either.
//
// The file is replaced as a whole and is durable before the new key signs. A crash on
// the way leaves the old file, or the new one, whose key was not used yet.
func (r *Ring) Rotate(path string, alg Algorithm, now time.Time, keep time.Duration) (kid string, err error) {
	r.changing.Lock()
	defer r.changing.Unlock()
	var next *ringKeys
	err = durable.Edit(path, func(was []byte) ([]byte, error) {
		found, err := ParseRing(was)
		if err != nil {
			return nil, err
		}
		if next, err = found.keys.Load().rotated(alg, now, keep); err != nil {
			return nil, err
		}
		return marshalKeys(next.all, "", true)
	})
	if errors.Is(err, durable.ErrBusy) {
		err = ErrBusy
	}
	if err != nil {
		return "", fmt.Errorf("key file %s: %w", path, err)
	}
	r.keys.Store(next)
	return next.signer.key.id, nil
}

// Reload takes over the keys of another ring, which was read from the same file anew.
func (r *Ring) Reload(other *Ring) {
	r.changing.Lock()
	defer r.changing.Unlock()
	r.keys.Store(other.keys.Load())
}
