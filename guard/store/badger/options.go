package badger

import (
	"log/slog"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
)

// Options are the settings of a store; the zero value is what production wants.
type Options struct {
	// Now is the clock by which expiries are judged; nil is time.Now.
	Now func() time.Time
	// Logger receives what an operator should know; nil is silence. Keys and
	// values are in no message.
	Logger *slog.Logger
	// BulkWindow is the width of a time partition of bulk values: their space
	// comes back at most this long after their expiry. Whole seconds; zero is
	// DefaultBulkWindow. It may change from one opening to the next.
	BulkWindow time.Duration
	// GroupWait is the longest time that a commit waits for others to share its
	// sync. It applies only while DefaultGroup or more commits come at a time, so
	// a single client never waits. Zero is DefaultGroupWait, negative is none.
	GroupWait time.Duration
	// MinFree is the free disk space in bytes under which nothing new begins:
	// Commit then takes only batches whose first write has a VersionIs condition
	// and that carry no bulk value, so that executions under way are settled
	// instead of becoming doubtful, and returns ErrFull for all others. Under a
	// quarter of it Commit returns ErrFull for every batch: there a write to
	// Badger's mapped files may kill the process, so the quarter is more than
	// Badger may need between two looks at the disk. Zero is DefaultMinFree,
	// negative is no limit.
	MinFree int64
	// MaxSize is the largest size of the whole directory in bytes, as the file
	// system counts them. Over it Commit refuses with ErrQuota what it refuses below
	// MinFree, until enough has expired. What is under way is settled, so the store
	// may come to be a little larger. Zero is no limit.
	MaxSize int64
	// VerifyEvery is the time between two checks of everything in Badger's
	// tables, for the blocks that decay while the store is open. Zero is
	// DefaultVerifyEvery, negative is never. They are also checked at Open or, if
	// they have not changed since an orderly close, right after it.
	VerifyEvery time.Duration
	// Observer is told of every group of commits; nil is nobody.
	Observer Observer
}

// Observer is told what a store does, for metrics. It must not wait.
type Observer interface {
	// Committed says that batches became durable together, and how long that took.
	Committed(batches int, took time.Duration)
}

// What the zero Options mean.
const (
	DefaultBulkWindow = time.Hour
	DefaultGroupWait  = 300 * time.Microsecond
	// DefaultMinFree is what Badger can come to need before it is told to stop: the
	// logs and tables of all memory tables, one of them on its way out and one of
	// them not yet removed; the value log, twice the size of its file; a compaction
	// of level 0 with the level below; and a margin for what others write to the
	// disk between two looks.
	DefaultMinFree     = memTableSize*(numMemTables+2) + 2*valueLogSize + levelZero + freeMargin
	DefaultVerifyEvery = 24 * time.Hour
	// DefaultGroup is the number of commits at a time from which on waiting for
	// more of them pays.
	DefaultGroup = 4
)

func (o Options) withDefaults() Options {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.BulkWindow == 0 {
		o.BulkWindow = DefaultBulkWindow
	}
	o.BulkWindow = max(o.BulkWindow.Truncate(time.Second), time.Second)
	if o.GroupWait == 0 {
		o.GroupWait = DefaultGroupWait
	}
	if o.MinFree == 0 {
		o.MinFree = DefaultMinFree
	}
	if o.VerifyEvery == 0 {
		o.VerifyEvery = DefaultVerifyEvery
	}
	return o
}

const (
	memTableSize = 16 << 20
	numMemTables = 2
	valueLogSize = 1 << 20
	// levelZero is a compaction of level 0: five tables are Badger's mark for it, and
	// the level below is about as large.
	levelZero  = 2 * 5 * memTableSize
	freeMargin = 64 << 20
	// valueThreshold is Badger's largest. No value of ours reaches it, so nothing
	// goes to the value log, whose sync errors Badger only logs (P2).
	valueThreshold = 1 << 20
)

// badgerOptions is the small-memory profile for one writer.
func badgerOptions(dir string, o Options, failed func(error)) badgerdb.Options {
	return badgerdb.DefaultOptions(dir).
		WithDetectConflicts(false).
		WithMemTableSize(memTableSize).
		WithNumMemtables(numMemTables).
		WithBlockCacheSize(16 << 20).
		WithIndexCacheSize(0). // indexes are mapped, not cached, while tables are not encrypted
		WithNumCompactors(2).
		WithCompression(options.None). // values are sealed above, so they do not shrink
		WithMetricsEnabled(false).
		WithValueLogFileSize(valueLogSize).
		WithValueThreshold(valueThreshold).
		WithNumVersionsToKeep(1).
		WithChecksumVerificationMode(options.OnBlockRead).
		WithLogger(logger{to: o.Logger, failed: failed})
}
