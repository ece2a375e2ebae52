package badger

import (
	"fmt"
	"os"
	"path/filepath"
)

// lock takes the directory for this store alone. Badger has a lock of its own, but
// takes it too late: the directory is checked and repaired before Badger sees it,
// and that must not happen beside a running store.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	taken, err := tryLock(f)
	switch {
	case err != nil:
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	case !taken:
		f.Close()
		return nil, fmt.Errorf("%w: stop the process that has it open, "+
			"or give this one a directory of its own with `store badger <path>`", ErrLocked)
	}
	return f, nil
}
