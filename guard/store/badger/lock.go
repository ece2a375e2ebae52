package badger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// lock takes the directory for this store alone. Badger has a lock of its own, but
// takes it too late: the directory is checked and repaired before Badger sees it,
// and that must not happen beside a running store.
func lock(dir string) (*os.File, error) {
	f, err := durable.Lock(filepath.Join(dir, "lock"))
	if errors.Is(err, durable.ErrBusy) {
		return nil, fmt.Errorf("%w: stop the process that has it open, "+
			"or give this one a directory of its own with `store badger <path>`", ErrLocked)
	}
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
	return f, nil
}
