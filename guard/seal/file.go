package seal

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	tmp, err := r.writeBeside(path)
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
	next, err := r.rotateFile(path)
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

func (r *Ring) rotateFile(path string) (*keySet, error) {
	path, err := filepath.EvalSymlinks(path) // a link stays a link
	if err != nil {
		return nil, err
	}
	unlock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, err
	}
	defer unlock()
	// Whoever edits the file by hand knows nothing of the lock.
	for range 3 {
		next, err := r.replaceFile(path)
		if !errors.Is(err, errChanged) {
			return next, err
		}
	}
	return nil, errChanged
}

var errChanged = errors.New("seal: the file was changed by somebody else at the same moment")

// replaceFile writes the keys of the file and of r, and a new one, in the file's
// place. errChanged says that the file is another one than was read, or became so.
func (r *Ring) replaceFile(path string) (*keySet, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
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
	next, err := ours.union(theirs).rotated()
	if err != nil {
		return nil, err
	}
	tmp, err := newRing(r.index, next).writeBeside(path)
	if err != nil {
		return nil, err
	}
	defer os.Remove(tmp) // gone already, once it is renamed
	if now, err := os.ReadFile(path); err != nil {
		return nil, err
	} else if !bytes.Equal(now, text) {
		return nil, errChanged
	}
	if err := os.Rename(tmp, path); err != nil {
		return nil, err
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	// Nothing may be sealed with a key that is not in the file.
	written, err := Load(path)
	if err != nil {
		return nil, err
	}
	if key := written.keys.Load().sealing[next.newest]; key == nil || key.raw != next.sealing[next.newest].raw {
		return nil, errChanged
	}
	return next, nil
}

// writeBeside writes the ring into a new file in the directory of path, with mode
// 0600, syncs it and returns its name.
func (r *Ring) writeBeside(path string) (name string, err error) {
	text, err := r.MarshalText()
	if err != nil {
		return "", err
	}
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
