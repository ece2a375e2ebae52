//go:build !windows

package harness

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// closed waits until nobody has the embedded store of that directory open. Caddy does not
// wait for the last handlers of a configuration that it stops, and they hold the store.
func closed(t *testing.T, dir string) {
	t.Helper()
	lock, err := os.Open(filepath.Join(dir, "lock"))
	if errors.Is(err, fs.ErrNotExist) {
		return // it was never opened
	}
	if err != nil {
		t.Error(err)
		return
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_SH); err != nil {
		t.Errorf("waiting for the store to be closed: %v", err)
	}
}
