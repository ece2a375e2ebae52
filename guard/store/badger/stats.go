package badger

import "sync/atomic"

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
}

type counters struct {
	batches, writes, conflicts, commits, applied, bulkSyncs, bytes, bulkBytes, dropped, full atomic.Uint64
}

// Stats returns the counts of this moment.
func (s *Store) Stats() Stats {
	c := &s.counters
	return Stats{
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
	}
}
