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
	// Size are the bytes that the store takes of the disk, by part.
	Size map[string]uint64 `json:"size_bytes,omitempty"`
	// Dead are the bytes of expired and replaced records that compaction can give back.
	Dead int64 `json:"dead_bytes"`
	// Reclaimed are the bytes that compactions for their sake have given back.
	Reclaimed uint64 `json:"reclaimed_bytes"`
	// MaxSize is the largest size of the store in bytes, 0 without a limit.
	MaxSize int64 `json:"max_size_bytes,omitempty"`
	// Verifying is true while what was there before this opening is still read.
	Verifying bool `json:"verifying"`
	// Disk is left out where the system does not tell.
	Disk *Disk `json:"disk,omitempty"`
	// Refused are the batches that were refused for want of disk space.
	Refused uint64 `json:"refused_disk_full"`
}

// Disk is what is left of a store's disk.
type Disk struct {
	// Free are the free bytes.
	Free uint64 `json:"free_bytes"`
	// MinFree are the free bytes below which nothing new begins.
	MinFree int64 `json:"min_free_bytes"`
	// Takes says what the store takes for it: everything, outcomes, or nothing.
	Takes string `json:"takes"`
}

// What a store takes, by the space that its disk has left (P4).
const (
	// TakesEverything: there is enough.
	TakesEverything = "everything"
	// TakesOutcomes: nothing new begins, what is running can end.
	TakesOutcomes = "outcomes"
	// TakesNothing: what is running ends in doubt.
	TakesNothing = "nothing"
)

// Quota is what one caller may hold in a store at a time; a zero member is no bound.
type Quota struct {
	// OpenExecutions is the largest number of executions that run or are in doubt.
	OpenExecutions int `json:"open_executions,omitempty"`
	// StoredBytes is the largest size of records and answers.
	StoredBytes int64 `json:"stored_bytes,omitempty"`
}

// shortage says what is wrong where the store does not take everything.
func (r *Report) shortage() string {
	switch {
	case r.Disk == nil || r.Disk.Takes == TakesEverything:
		return ""
	case r.MaxSize > 0 && int64(r.Disk.Free) >= r.Disk.MinFree:
		return "the store has reached max_size: guarded calls get 503 until enough has expired"
	default:
		return "the disk is nearly full: guarded calls get 503 until there is space"
	}
}
