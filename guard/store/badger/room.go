package badger

import (
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Room is how much of the disk is left to the store.
type Room int32

// The rooms.
const (
	RoomEnough Room = iota // for everything
	RoomLow                // for what is under way
	RoomNone               // for nothing
)

// String is the form for operators.
func (r Room) String() string {
	switch r {
	case RoomNone:
		return "none"
	case RoomLow:
		return "low"
	default:
		return "enough"
	}
}

// limits are the options that may change while the store is open.
type limits struct{ minFree, maxSize int64 }

// floor is the free space in bytes under which nothing is written.
func (l limits) floor() int64 { return max(l.minFree/4, 0) }

func (o Options) limits() *limits { return &limits{minFree: o.MinFree, maxSize: o.MaxSize} }

// SetLimits changes Options.MinFree and Options.MaxSize, with effect at once.
func (s *Store) SetLimits(minFree, maxSize int64) {
	s.limits.Store(Options{MinFree: minFree, MaxSize: maxSize}.withDefaults().limits())
	s.lookAtDisk()
}

// lookAtDisk closes the store for writing while the disk is nearly full: Badger
// writes to mapped files, and there a full disk kills the process (P4).
func (s *Store) lookAtDisk() {
	s.looking.Lock()
	defer s.looking.Unlock()
	s.reserve()
	free, ok := s.disk.free(s.dir)
	s.lookAtFree(free, ok)
	s.lookAtSize()
}

func (s *Store) lookAtFree(free uint64, ok bool) {
	s.free.Store(free)
	s.freeKnown.Store(ok)
	l := s.limits.Load()
	now := RoomEnough
	switch {
	case !ok || l.minFree < 0:
	case free < uint64(l.floor()):
		now = RoomNone
	case free < uint64(l.minFree):
		now = RoomLow
	}
	if Room(s.room.Swap(int32(now))) == now {
		return
	}
	switch now {
	case RoomNone:
		s.options.Logger.Error("disk is full, nothing more is recorded until space is freed",
			"dir", s.dir, "free", free, "needed", l.minFree)
	case RoomLow:
		s.options.Logger.Error("disk is nearly full, nothing new begins until space is freed",
			"dir", s.dir, "free", free, "needed", l.minFree)
	default:
		s.options.Logger.Info("disk has space again", "dir", s.dir, "free", free)
	}
}

// lookAtSize closes the store for what is new while it is larger than it may be. Its
// size is measured now and then; in between it is taken to grow by what was written,
// ordinary values twice: to a log and to a table.
func (s *Store) lookAtSize() {
	if s.space.Load() == nil {
		s.measure()
	}
	most := s.limits.Load().maxSize
	if most <= 0 {
		s.over.Store(false)
		return
	}
	const step = 1 << 20
	grown := int64(2*s.counters.bytes.Load() + s.counters.bulkBytes.Load())
	size := s.size.Load() + grown - s.grown.Load()
	if size > most && grown-s.grown.Load() >= step {
		size = s.measure().Total
	}
	was := s.over.Load()
	// A little below it before new things begin, so that the store does not open
	// and close with every call.
	now := size > most || was && size > most-most/32
	if now == was {
		return
	}
	s.over.Store(now)
	if now {
		s.options.Logger.Error("store has reached its largest size, nothing new begins until something expires",
			"dir", s.dir, "size", size, "max_size", most)
	} else {
		s.options.Logger.Info("store is below its largest size again", "dir", s.dir, "size", size, "max_size", most)
	}
}

// admit returns the error of a batch that must not be queued: for want of space, or
// since what its conditions rest on is not what was stored.
func (s *Store) admit(writes []store.Write) error {
	if err := s.hasRoom(writes); err != nil {
		s.counters.full.Add(1)
		return err
	}
	if s.vetting.done.Load() {
		return nil
	}
	for i := range writes {
		if writes[i].If.None() {
			continue
		}
		name := userKey(writes[i].Key)
		if err := s.vet(name, name); err != nil {
			return notWritten(err)
		}
	}
	return nil
}

// hasRoom returns ErrFull where the disk has no room for a batch such as this, and
// ErrQuota where the store has none. The space between the mark and the floor is kept
// for outcomes: to refuse them would put every running execution in doubt (P6).
func (s *Store) hasRoom(writes []store.Write) error {
	l := s.limits.Load()
	least := l.minFree
	switch Room(s.room.Load()) {
	case RoomEnough:
		if s.over.Load() && !goesOn(writes) {
			return fmt.Errorf("%w of %d bytes: %s", ErrQuota, l.maxSize, s.dir)
		}
		return nil
	case RoomLow:
		if goesOn(writes) {
			return nil
		}
	case RoomNone:
		least = l.floor()
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
