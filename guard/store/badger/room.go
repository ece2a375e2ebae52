package badger

import (
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// room is how much of the disk is left to the store.
type room int32

const (
	roomEnough room = iota
	roomLow         // for what is under way
	roomNone        // for nothing
)

// floor is the free space in bytes under which nothing is written.
func (o Options) floor() int64 { return o.MinFree / 4 }

// lookAtDisk closes the store for writing while the disk is nearly full: Badger
// writes to mapped files, and there a full disk kills the process (P4).
func (s *Store) lookAtDisk() {
	if s.options.MinFree < 0 {
		return
	}
	free, ok := s.disk.free(s.dir)
	now := roomEnough
	switch {
	case ok && free < uint64(s.options.floor()):
		now = roomNone
	case ok && free < uint64(s.options.MinFree):
		now = roomLow
	}
	if room(s.room.Swap(int32(now))) == now {
		return
	}
	switch now {
	case roomNone:
		s.options.Logger.Error("disk is full, nothing more is recorded until space is freed",
			"dir", s.dir, "free", free, "needed", s.options.MinFree)
	case roomLow:
		s.options.Logger.Error("disk is nearly full, nothing new begins until space is freed",
			"dir", s.dir, "free", free, "needed", s.options.MinFree)
	default:
		s.options.Logger.Info("disk has space again", "dir", s.dir, "free", free)
	}
}

// admit returns ErrFull where the disk has no room for a batch such as this. The
// space between the mark and the floor is kept for outcomes: to refuse them would
// put every running execution in doubt (P6).
func (s *Store) admit(writes []store.Write) error {
	least := s.options.MinFree
	switch room(s.room.Load()) {
	case roomEnough:
		return nil
	case roomLow:
		if goesOn(writes) {
			return nil
		}
	case roomNone:
		least = s.options.floor()
	}
	return fmt.Errorf("%w: less than %d bytes free for %s", ErrFull, least, s.dir)
}

// goesOn reports whether writes change what stands there already, in little space.
func goesOn(writes []store.Write) bool {
	for i := range writes {
		if writes[i].Bulk && !writes[i].Delete {
			return false
		}
	}
	return !writes[0].If.Holds(nil) // only VersionIs refuses a key without an entry
}
