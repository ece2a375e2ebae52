package badger

import (
	"sync/atomic"
	"time"
)

// Stats counts what a store did since it was opened.
type Stats struct {
	// Batches that landed, and the writes in them.
	Batches, Writes uint64
	// Conflicts are batches whose condition did not hold.
	Conflicts uint64
	// Commits are frames of the log, each with one sync; Batches over Commits is
	// what group commit gains.
	Commits uint64
	// Applied are the writes that went on to Badger; the others were overwritten
	// or deleted before.
	Applied uint64
	// BulkSyncs are syncs of files of bulk values.
	BulkSyncs uint64
	// Bytes of keys and ordinary values, and bytes of bulk values, that landed.
	Bytes, BulkBytes uint64
	// Segments of bulk values dropped whole after their expiry.
	Dropped uint64
	// Full counts the batches refused for want of disk space.
	Full uint64
	// Reclaimed counts the rounds of compaction that were run for the space of what
	// is dead, and ReclaimedBytes what they gave back; LastReclaim is when the last
	// of them ended.
	Reclaimed, ReclaimedBytes uint64
	LastReclaim               time.Time
	// Space is what the store takes of the disk.
	Space Space
	// Free is what the disk has left, in bytes; FreeKnown is false where the system
	// does not tell. Room is what the store still takes for it: RoomLow too where it
	// has reached MaxSize. MinFree and MaxSize are the options.
	Free             uint64
	FreeKnown        bool
	Room             Room
	MinFree, MaxSize int64
	// Healthy is false once the store has closed itself; Err says why.
	Healthy bool
	// Verifying is true while tables from before this opening are yet to be read.
	Verifying bool
}

type counters struct {
	batches, writes, conflicts, commits, applied, bulkSyncs, bytes, bulkBytes, dropped, full atomic.Uint64
	reclaimed, reclaimedBytes                                                                atomic.Uint64
	lastReclaim                                                                              atomic.Int64 // Unix nanoseconds
}

// Stats returns the counts of this moment, and what was last measured. It touches no
// file.
func (s *Store) Stats() Stats {
	c, l := &s.counters, s.limits.Load()
	now := Stats{
		Batches:   c.batches.Load(),
		Writes:    c.writes.Load(),
		Conflicts: c.conflicts.Load(),
		Commits:   c.commits.Load(),
		Applied:   c.applied.Load(),
		BulkSyncs: c.bulkSyncs.Load(),
		Bytes:     c.bytes.Load(),
		BulkBytes: c.bulkBytes.Load(),
		Dropped:   c.dropped.Load(),
		Full:      c.full.Load(),

		Reclaimed:      c.reclaimed.Load(),
		ReclaimedBytes: c.reclaimedBytes.Load(),

		Free:      s.free.Load(),
		FreeKnown: s.freeKnown.Load(),
		Room:      Room(s.room.Load()),
		MinFree:   l.minFree,
		MaxSize:   l.maxSize,
		Healthy:   s.unhealthy() == nil,
		Verifying: !s.vetting.done.Load(),
	}
	if at := c.lastReclaim.Load(); at != 0 {
		now.LastReclaim = time.Unix(0, at)
	}
	if s.over.Load() && now.Room == RoomEnough {
		now.Room = RoomLow
	}
	if space := s.space.Load(); space != nil {
		now.Space = *space
	}
	return now
}
