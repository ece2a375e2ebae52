package badger

import (
	"errors"
	"fmt"
)

var (
	// ErrLocked: another process, or this one, has the directory open.
	ErrLocked = errors.New("badger: directory is in use")
	// ErrCorrupt: what lies in the directory is not whole. Opening it would
	// forget executions, so it is refused (P1); the message says what to do.
	ErrCorrupt = errors.New("badger: store is damaged")
	// ErrFull: too little free disk space; nothing was written (P4).
	ErrFull = errors.New("badger: disk is full")
)

func corrupt(dir, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %w; restore the whole directory from a backup, "+
		"or move it away to begin with an empty store that remembers no execution",
		ErrCorrupt, dir, fmt.Errorf(format, args...))
}
