package admin

// Report is what a store tells of itself: what it did since it was opened.
type Report struct {
	// Commits are transactions, each with one sync.
	Commits uint64 `json:"commits"`
	// Batches are what landed in them.
	Batches uint64 `json:"batches"`
	// Writes are the single writes in those.
	Writes uint64 `json:"writes"`
	// RecordsPerSync is Batches over Commits.
	RecordsPerSync float64 `json:"records_per_sync"`
	// Conflicts are batches that lost to another.
	Conflicts uint64 `json:"conflicts"`
	// Bytes are the bytes of records that were written.
	Bytes uint64 `json:"bytes_written"`
	// BodyBytes are the bytes of result bodies that were written.
	BodyBytes uint64 `json:"body_bytes_written"`
	// BodySyncs are the syncs of files of result bodies.
	BodySyncs uint64 `json:"body_syncs"`
	// Dropped are the files of result bodies that were dropped after their expiry.
	Dropped uint64 `json:"segments_dropped"`
	// Refused are the batches that were refused for want of disk space.
	Refused uint64 `json:"refused_disk_full"`
}
