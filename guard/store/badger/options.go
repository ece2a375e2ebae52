package badger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// Options are the settings of a store; the zero value is good for production.
type Options struct {
	// Now is the clock for expiries; nil is time.Now.
	Now func() time.Time
	// Logger receives messages for operators, without keys or values (P8); nil logs nothing.
	Logger *slog.Logger
	// BulkWindow is the width of a time partition of bulk values and of large ones that expire:
	// their space comes back at most this long after their expiry. Whole seconds; zero is
	// an hour. It may change from one opening to the next.
	BulkWindow time.Duration
	// GroupWait is the longest time that a commit waits for others to share its
	// sync. It applies only while four or more commits come at a time, so
	// a single client never waits. Zero is 300 µs, negative is none.
	GroupWait time.Duration
	// MinFree is the free disk space in bytes under which nothing new begins: Commit then takes
	// only batches whose first write has a VersionIs condition and that carry no bulk value, so
	// that running executions are completed instead of left in doubt, and returns store.ErrFull
	// for all others. Under a quarter of it Commit refuses every batch: a write to Badger's
	// mapped files on a full disk kills the process, so the quarter is more than Badger may need
	// between two checks. Zero is the most that Badger may need, negative is no limit.
	MinFree int64
	// MaxSize is the largest size of the whole directory in bytes, as the file system counts
	// them. Over it Commit refuses what it refuses below MinFree, until enough has expired.
	// Running executions are completed, so the store may grow a little larger. Zero is no limit.
	MaxSize int64
	// VerifyEvery is the time between two checks of all of Badger's tables and segments, which
	// find what decays while the store is open. Zero is 24 hours, negative is never. Open
	// checks them too or, if they have not changed since an orderly close, defers the check
	// until right after it.
	VerifyEvery time.Duration
	// Absent are the prefixes of keys that are often asked for while they are absent: records that
	// a call is about to make, and what is deleted soon after it was written. A filter in memory,
	// of at most 28 MB (while it is replaced, twice that), saves most of these look-ups.
	Absent []string
	// mostAbsent is maxFiltered; smaller in tests.
	mostAbsent int64
	// keptSize is the size of a kept segment in bytes, from which on the next one begins; zero is
	// 64 MiB. Smaller in tests.
	keptSize int64
	// Observer is called for every group of commits; nil is none.
	Observer Observer
}

// Observer receives measurements for metrics. It must not block.
type Observer interface {
	// Committed says that batches became durable together, and how long that took.
	Committed(batches int, took time.Duration)
}

// What the zero Options mean.
const (
	defaultBulkWindow = time.Hour
	defaultKeptSize   = 64 << 20
	defaultGroupWait  = 300 * time.Microsecond
	// defaultMinFree is the most that Badger may need after commits were stopped: the logs
	// and tables of all memory tables, one of them being flushed and one not yet removed;
	// the value log, twice the size of its file; a compaction of level 0 with the level
	// below; and a margin for what other programs write between two checks.
	defaultMinFree     = memTableSize*(numMemTables+2) + 2*valueLogSize + levelZero + freeMargin
	defaultVerifyEvery = 24 * time.Hour
	// defaultGroup is the number of concurrent commits from which on waiting for more pays.
	defaultGroup = 4
	// manyCommits is the number of concurrent commits from which on a leader waits in one piece.
	manyCommits = 8
)

func (o Options) withDefaults() Options {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.BulkWindow == 0 {
		o.BulkWindow = defaultBulkWindow
	}
	o.BulkWindow = max(o.BulkWindow.Truncate(time.Second), time.Second)
	if o.keptSize == 0 {
		o.keptSize = defaultKeptSize
	}
	if o.GroupWait == 0 {
		o.GroupWait = defaultGroupWait
	}
	if o.MinFree == 0 {
		o.MinFree = defaultMinFree
	}
	if o.VerifyEvery == 0 {
		o.VerifyEvery = defaultVerifyEvery
	}
	return o
}

const (
	memTableSize = 16 << 20
	numMemTables = 2
	valueLogSize = 1 << 20
	// levelZero is the size of a compaction of level 0: Badger starts it at five tables,
	// and the level below is about as large.
	levelZero  = 2 * 5 * memTableSize
	freeMargin = 64 << 20
	// valueThreshold is Badger's largest, which no value of ours reaches: sync errors of
	// Badger's value log are only logged (P2).
	valueThreshold = 1 << 20
)

// badgerOptions is the small-memory profile for one writer.
func badgerOptions(dir string, o Options, failed func(error)) badgerdb.Options {
	opts := badgerdb.DefaultOptions(dir)
	// Each of two compactions builds up to 13 tables at once, and takes twice a table's size for
	// each. Tables that double from level to level took 400 MB in a store of 10 GB.
	opts.TableSizeMultiplier = 1
	return opts.
		WithDetectConflicts(false).
		WithMemTableSize(memTableSize).
		WithNumMemtables(numMemTables).
		WithBlockCacheSize(0). // blocks are mapped, and neither compressed nor encrypted
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

var (
	// errLocked: another process, or this one, has the directory open. The caller adds the
	// directory.
	errLocked = errors.New("badger: directory is in use")
	// errCorrupt: the store is damaged. Opening it would forget executions, so it is
	// refused (P1).
	errCorrupt = errors.New("badger: store is damaged")
	// errFull: too little free disk space for this batch; nothing was written (P4). See
	// Options.MinFree.
	errFull = fmt.Errorf("badger: %w", store.ErrFull)
	// errQuota: the store has reached Options.MaxSize. It wraps errFull, and refuses the
	// same batches as below Options.MinFree.
	errQuota = fmt.Errorf("%w: the store has reached its largest size", errFull)
)

func corrupt(dir, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %w; restore the whole directory from a backup "+
		"(calls executed since then are forgotten and would run again), or move it away to begin with an empty store that remembers no execution",
		errCorrupt, dir, fmt.Errorf(format, args...))
}

// lock takes the directory for this store alone. Badger's own lock comes too late: the
// directory is checked and repaired before Badger opens it.
func lock(dir string) (*os.File, error) {
	f, err := durable.Lock(filepath.Join(dir, "lock"))
	if errors.Is(err, durable.ErrBusy) {
		return nil, fmt.Errorf("%w: stop the process that has it open, "+
			"or give this one a directory of its own with `store badger <path>`", errLocked)
	}
	if err != nil {
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
	return f, nil
}

// logger passes Badger's messages to slog. Badger's info messages only help in debugging.
type logger struct {
	to *slog.Logger
	// failed is called when a write or sync of a table or of Badger's manifest fails. Badger
	// retries, but the second sync of a file reports success whatever became of the first.
	failed func(error)
}

// flushFailed begins Badger's message, the only sign of that failure.
const flushFailed = "error flushing memtable to disk"

func (l logger) Errorf(format string, args ...any) {
	if strings.HasPrefix(format, flushFailed) {
		l.failed(fmt.Errorf("badger: "+format, args...))
	}
	l.log(slog.LevelError, format, args)
}
func (l logger) Warningf(format string, args ...any) { l.log(slog.LevelWarn, format, args) }
func (l logger) Infof(format string, args ...any)    { l.log(slog.LevelDebug, format, args) }

// Debugf drops the message: Badger writes several for every commit.
func (l logger) Debugf(string, ...any) {}

func (l logger) log(level slog.Level, format string, args []any) {
	if l.to.Enabled(context.Background(), level) {
		l.to.Log(context.Background(), level, strings.TrimSpace(fmt.Sprintf(format, args...)), "component", "badger")
	}
}
