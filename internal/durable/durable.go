// Package durable writes small files atomically: keys, sets of keys, heads of a log. After
// a crash a file has its old or its new content. The new content is on disk when a function
// returns without an error.
package durable

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// errChanged is returned if the file was changed concurrently.
var errChanged = errors.New("the file was changed by somebody else at the same moment; try again")

// ErrBusy is returned while another process edits the same file or holds the same lock.
var ErrBusy = errors.New("somebody else changes the file at this moment; try again")

// Private is the mode of files that hold secrets.
const Private fs.FileMode = 0o600

// Create writes a new file with mode Private, and its directory with 0700 where that is
// missing. It never writes over a file that is there: that is an fs.ErrExist, and the other
// file is whole and durable if Create has made it.
func Create(path string, text []byte) error {
	dir := filepath.Dir(path)
	if err := makeDir(dir); err != nil {
		return err
	}
	tmp, err := writeBeside(path, text, Private)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	// A link, unlike a rename, fails where the name is taken.
	if err := os.Link(tmp, path); err != nil {
		if errors.Is(err, fs.ErrExist) {
			if err := syncDir(dir); err != nil { // P1: its maker may have died before that, and callers use the file
				return err
			}
			return fs.ErrExist
		}
		return err
	}
	return syncDir(dir)
}

// Load reads the key file at path, and parses it. A missing file is an fs.ErrNotExist.
func Load[T any](path string, parse func(text []byte) (T, error)) (loaded T, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return loaded, err
	}
	if loaded, err = parse(text); err != nil {
		err = fmt.Errorf("key file %s: %w", path, err)
	}
	return loaded, err
}

// makeDir makes a directory and its parents, durably.
func makeDir(dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if err := makeDir(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(parent)
}

// Write creates or replaces a file.
func Write(path string, text []byte, mode fs.FileMode) error {
	return replace(path, text, mode, func() error { return nil })
}

// Swap replaces a file whose content is was, nil for a missing file. The error is errChanged
// if the content is another one.
func Swap(path string, was, text []byte, mode fs.FileMode) error {
	return replace(path, text, mode, func() error {
		now, err := os.ReadFile(path)
		if err != nil && !(was == nil && errors.Is(err, fs.ErrNotExist)) {
			return err
		}
		if !bytes.Equal(now, was) {
			return errChanged
		}
		return nil
	})
}

// tries is how often Edit starts over after a concurrent change.
const tries = 3

// Edit replaces an existing file by what edit makes of its content, with mode Private. It
// does not wait: while another process edits the file, the error is ErrBusy. Other writers
// do not take that lock: after a concurrent change edit is called again with the new
// content, and after a few times the error is errChanged. A symbolic link stays one.
func Edit(path string, edit func(was []byte) ([]byte, error)) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	lock, err := Lock(path + ".lock")
	if err != nil {
		return err
	}
	defer lock.Close()
	var next []byte
	for range tries {
		var was []byte
		if was, err = os.ReadFile(path); err != nil {
			return err
		}
		if next, err = edit(was); err != nil {
			return err
		}
		if err = Swap(path, was, next, Private); !errors.Is(err, errChanged) {
			break
		}
	}
	if err != nil {
		return err
	}
	// The content that edit saw must not be used if it is not in the file.
	if now, err := os.ReadFile(path); err != nil {
		return err
	} else if !bytes.Equal(now, next) {
		return errChanged
	}
	return nil
}

// Lock locks the file of that name for this process. It does not wait: a process that hangs
// with the lock must not stop others. If it is taken the error is ErrBusy. Closing the file
// releases the lock, and so does the end of the process.
func Lock(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, Private)
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
	return f, nil
}

// replace renames a new file to path once check has passed.
func replace(path string, text []byte, mode fs.FileMode, check func() error) error {
	tmp, err := writeBeside(path, text, mode)
	if err != nil {
		return err
	}
	defer os.Remove(tmp) // gone already, once it is renamed
	if err := check(); err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// writeBeside writes text into a new file in the directory of path, syncs it and returns
// its name.
func writeBeside(path string, text []byte, mode fs.FileMode) (name string, err error) {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // it makes it 0600
	if err != nil {
		return "", err
	}
	if _, err = tmp.Write(text); err == nil && mode != Private {
		err = tmp.Chmod(mode)
	}
	if err == nil {
		err = tmp.Sync() // the name must not lead to less after a power failure
	}
	if closing := tmp.Close(); err == nil {
		err = closing
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
		return "", fmt.Errorf("writing beside %s: %w", path, err)
	}
	return tmp.Name(), nil
}

// syncDir makes a new name durable. Errors of systems that cannot sync directories are
// ignored.
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
