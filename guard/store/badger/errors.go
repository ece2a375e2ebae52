package badger

import (
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

var (
	// ErrLocked: another process, or this one, has the directory open. The text
	// does not name the directory: who opens it does.
	ErrLocked = errors.New("badger: directory is in use")
	// ErrCorrupt: what lies in the directory is not whole. Opening it would
	// forget executions, so it is refused (P1); the message says what to do.
	ErrCorrupt = errors.New("badger: store is damaged")
	// ErrFull: too little free disk space for this batch; nothing was written (P4).
	// Below Options.MinFree that holds for every batch that may begin something and
	// for every bulk value; an outcome without its result still fits. Below a
	// quarter of it nothing does.
	ErrFull = fmt.Errorf("badger: %w", store.ErrFull)
	// ErrQuota: the store has reached Options.MaxSize. It is an ErrFull, and refuses
	// what that refuses below Options.MinFree.
	ErrQuota = fmt.Errorf("%w: the store has reached its largest size", ErrFull)
)

func corrupt(dir, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %w; restore the whole directory from a backup "+
		"(calls executed since then are forgotten and would run again), or move it away to begin with an empty store that remembers no execution",
		ErrCorrupt, dir, fmt.Errorf(format, args...))
}
