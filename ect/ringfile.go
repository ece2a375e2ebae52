package ect

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// ErrBusy is returned where another process rotates the same key file at this moment.
var ErrBusy = errors.New("ect: another rotation of the key file is under way; try again")

var errChanged = errors.New("ect: the key file was changed by somebody else at the same moment")

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
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	text, err := r.MarshalText()
	if err != nil {
		return nil, err
	}
	tmp, err := writeBeside(path, text)
	if err != nil {
		return nil, err
	}
	defer os.Remove(tmp)
	// A link, unlike a rename, fails where the name is taken.
	if err := os.Link(tmp, path); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("key file %s: %w", path, fs.ErrExist)
		}
		return nil, err
	}
	return r, syncDir(dir)
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
	next, err := rotateFile(path, alg, now, keep)
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

func rotateFile(path string, alg Algorithm, now time.Time, keep time.Duration) (*ringKeys, error) {
	path, err := filepath.EvalSymlinks(path) // a link stays a link
	if err != nil {
		return nil, err
	}
	unlock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, err
	}
	defer unlock()
	// Who edits the file by hand knows nothing of the lock.
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	found, err := ParseRing(text)
	if err != nil {
		return nil, err
	}
	next, err := found.keys.Load().rotated(alg, now, keep)
	if err != nil {
		return nil, err
	}
	out, err := marshalKeys(next.all, "", true)
	if err != nil {
		return nil, err
	}
	tmp, err := writeBeside(path, out)
	if err != nil {
		return nil, err
	}
	defer os.Remove(tmp) // gone already, once it is renamed
	if again, err := os.ReadFile(path); err != nil {
		return nil, err
	} else if !bytes.Equal(again, text) {
		return nil, errChanged
	}
	if err := os.Rename(tmp, path); err != nil {
		return nil, err
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	// Nothing may be signed with a key that is not in the file.
	written, err := LoadRing(path)
	if err != nil {
		return nil, err
	}
	if written.keys.Load().signer.key.id != next.signer.key.id {
		return nil, errChanged
	}
	return next, nil
}

// writeBeside writes text into a new file in the directory of path, with mode 0600,
// syncs it and returns its name.
func writeBeside(path string, text []byte) (name string, err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".key-*") // CreateTemp makes it 0600
	if err != nil {
		return "", err
	}
	if _, err = tmp.Write(text); err == nil {
		err = tmp.Sync()
	}
	if closing := tmp.Close(); err == nil {
		err = closing
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
		return "", err
	}
	return tmp.Name(), nil
}

// lockFile takes the lock that rotations in other processes take too. It waits for
// nobody: a process that was stopped while it held the lock must not stop this one.
func lockFile(name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	taken, err := tryLock(f)
	if err == nil && !taken {
		err = ErrBusy
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// syncDir makes a new name durable. Where directories cannot be synced, the file
// system orders names itself or offers nothing better.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil && !errors.Is(err, errors.ErrUnsupported) && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrInvalid) {
		return err
	}
	return nil
}
