package badger

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	badgerdb "github.com/dgraph-io/badger/v4"
)

// disk is the part of the file system that makes things durable; tests replace it by one
// that fails.
type disk interface {
	// record writes a frame of the log at off and returns when it is durable.
	record(f *os.File, frame []byte, off int64) error
	// recordAtOnce is record in one call of the system, for files in dir; nil where the file system
	// is not known to make that durable.
	recordAtOnce(dir string) recordFunc
	// apply commits txn to Badger at ts. It is not durable there.
	apply(txn *badgerdb.Txn, ts uint64) error
	// write writes b at off.
	write(f *os.File, b []byte, off int64) error
	// sync returns when the contents of f are durable.
	sync(f *os.File) error
	// syncDir returns when the entries of dir are durable.
	syncDir(dir string) error
	// free is the free space for dir in bytes; ok is false if the system does not report it.
	free(dir string) (bytes uint64, ok bool)
}

// recordFunc is the form of disk.record.
type recordFunc func(f *os.File, frame []byte, off int64) error

type osDisk struct{}

func (d osDisk) record(f *os.File, frame []byte, off int64) error {
	if err := d.write(f, frame, off); err != nil {
		return err
	}
	return d.sync(f)
}

func (osDisk) recordAtOnce(dir string) recordFunc { return recordAtOnce(dir) }

func (osDisk) apply(txn *badgerdb.Txn, ts uint64) error { return txn.CommitAt(ts, nil) }

func (osDisk) write(f *os.File, b []byte, off int64) error {
	n, err := f.WriteAt(b, off)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return err
}

func (osDisk) sync(f *os.File) error { return syncData(f) }

func (osDisk) syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // directories cannot be synced there
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closeErr := d.Close(); err == nil {
		err = closeErr
	}
	return err
}

func (osDisk) free(dir string) (uint64, bool) { return freeSpace(dir) }

const (
	probeFrame = 1 << 10 // what one client commits
	probePairs = 15
	probeFor   = 10 * time.Millisecond
	// leastPairs are needed to prefer recordAtOnce. A disk that has no time for them gains nothing
	// from one call less.
	leastPairs = 8
)

// cheapestRecord measures both ways to make a frame durable in dir, and returns the cheaper one
// (ADR 0094). recordAtOnce has to save a tenth of the time in the median, and to win four of five
// pairs: on a busy machine medians alone differ by as much.
func cheapestRecord(d disk, dir string, logger *slog.Logger) recordFunc {
	atOnce := d.recordAtOnce(dir)
	if atOnce == nil {
		return d.record
	}
	two, one, err := probe(d, dir, atOnce)
	chosen := err == nil && len(two) >= leastPairs && median(one) <= median(two)*9/10 && 5*wins(one, two) >= 4*len(two)
	logger.Debug("how commits become durable", "dir", dir, "one_call", chosen, "measured", len(one),
		"median_of_two_calls", median(two), "median_of_one", median(one), "error", err)
	if chosen {
		return atOnce
	}
	return d.record
}

// wins counts the pairs in which a was shorter than b, which is as long.
func wins(a, b []time.Duration) (n int) {
	for i := range a {
		if a[i] < b[i] {
			n++
		}
	}
	return n
}

// probe returns how long record and atOnce took, in turns, for probeFor and one pair at most. It
// uses a file of its own: an error there says nothing about the log. The file is filled before, as
// the log's are.
func probe(d disk, dir string, atOnce recordFunc) (two, one []time.Duration, err error) {
	f, err := os.OpenFile(filepath.Join(dir, "probe"), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	if err := d.record(f, make([]byte, 2*probePairs*probeFrame), 0); err != nil {
		return nil, nil, err
	}
	frame, off := bytes.Repeat([]byte{0x55}, probeFrame), int64(0)
	measure := func(record recordFunc, took *[]time.Duration) {
		begun := time.Now()
		err = errors.Join(err, record(f, frame, off))
		*took, off = append(*took, time.Since(begun)), off+probeFrame
	}
	for begun := time.Now(); len(one) < probePairs && time.Since(begun) < probeFor && err == nil; {
		if len(one)%2 == 0 { // so that neither is always first
			measure(d.record, &two)
			measure(atOnce, &one)
		} else {
			measure(atOnce, &one)
			measure(d.record, &two)
		}
	}
	return two, one, err
}

// median is zero of none.
func median(of []time.Duration) time.Duration {
	if len(of) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(of))[len(of)/2]
}
