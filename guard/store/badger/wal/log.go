// Package wal is the write-ahead log of the embedded store: groups of changes, each durable
// when Append returns, until their owner has them elsewhere. What a group holds is its
// owner's business.
//
// ADR 0148 says why it exists beside the libraries for this.
package wal

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// fileSize is the size of a file in bytes. The first one after opening is smaller, so that
	// opening is quick.
	fileSize  = 8 << 20
	firstSize = 1 << 20
	// maxSpare bounds the files that are kept for reuse, spareFor the time after which an
	// idle log removes them.
	maxSpare = 6
	spareFor = time.Minute
)

// Disk are the calls of the file system that make things durable. Tests let them fail.
type Disk struct {
	// Record writes a frame at off and returns when it is durable.
	Record func(f *os.File, frame []byte, off int64) error
	// Write writes b at off.
	Write func(f *os.File, b []byte, off int64) error
	// Sync returns when the contents of f are durable.
	Sync func(f *os.File) error
	// SyncDir returns when the entries of dir are durable.
	SyncDir func(dir string) error
}

// Range is the owner's durable list of files: every file from First to Last exists while the
// log is open, and all frames up to Settled are durable elsewhere.
type Range struct {
	First   uint64 `json:"first"`
	Last    uint64 `json:"last"`
	Settled uint64 `json:"settled"`
}

// Log is an open log. Every group is one frame; frames are numbered without a gap over all
// files. EnsureSpace and Append are for one goroutine at a time.
type Log struct {
	dir  string
	disk Disk
	save func(Range) error // makes the list of files durable

	// Used by the appender alone.
	current *file
	at      int64  // where the next frame goes
	seq     uint64 // of the last frame
	asked   bool   // whether the next file was asked for

	need  chan struct{} // a next file is wanted
	ready chan prepared // the answer

	closing sync.Once
	stop    chan struct{}
	working sync.WaitGroup

	mu       sync.Mutex
	files    []*file // those that the list has, oldest first
	settled  uint64  // the last frame of those that are gone
	spare    []*file
	lastMade time.Time // when a file was last made
}

type prepared struct {
	file *file
	err  error
}

// Begin makes the log of this opening in dir: one new file, numbered after the old ones,
// which are removed. Its first frame follows frame seq. save makes the list of files durable.
func Begin(dir string, old Range, seq uint64, d Disk, save func(Range) error) (*Log, error) {
	w := &Log{
		dir: dir, disk: d, save: save, seq: seq, settled: seq, at: firstFrame,
		need: make(chan struct{}, 1), ready: make(chan prepared, 1), stop: make(chan struct{}),
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := d.SyncDir(filepath.Dir(dir)); err != nil {
		return nil, err
	}
	f, err := create(dir, old.Last+1, firstSize, d)
	if err != nil {
		return nil, err
	}
	w.current, w.files = f, []*file{f}
	if err := d.SyncDir(dir); err != nil {
		return nil, err
	}
	if err := save(w.list()); err != nil {
		return nil, err
	}
	if err := removeOthers(dir, w.list()); err != nil {
		return nil, err
	}
	w.working.Go(w.work)
	return w, nil
}

// removeOthers removes the files outside of r, which a crash left before or after the list
// was saved.
func removeOthers(dir string, r Range) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if n, ok := numberOf(e.Name()); !ok || n >= r.First && n <= r.Last {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// list is the range of the present files. The caller holds mu, or the log is not shared.
func (w *Log) list() Range {
	return Range{First: w.files[0].number, Last: w.files[len(w.files)-1].number, Settled: w.settled}
}

// Finish ends a log whose owner has every frame durably elsewhere: its files are removed once
// the owner has saved that there are none.
func (w *Log) Finish(save func(Range) error) error {
	w.Close()
	last := w.list().Last
	none := Range{First: last + 1, Last: last, Settled: w.seq}
	if err := save(none); err != nil {
		return err
	}
	return removeOthers(w.dir, none)
}

// EnsureSpace makes sure that a frame of n bytes fits into the current file, or returns
// store.ErrUnhealthy once failed is closed. After an error nothing was written.
func (w *Log) EnsureSpace(n int, failed <-chan struct{}) error {
	end := w.at + int64(n+frameAlign)
	if !w.asked && end > w.current.size/2 {
		w.asked = true
		w.need <- struct{}{} // has room: nothing else was asked for
	}
	if end <= w.current.size {
		return nil
	}
	select {
	case next := <-w.ready:
		w.asked = false
		if next.err != nil {
			return fmt.Errorf("making a file of the log: %w", next.err)
		}
		w.mu.Lock()
		w.current.full, w.current.last = true, w.seq
		w.mu.Unlock()
		w.current, w.at = next.file, firstFrame
		return nil
	case <-failed:
		return store.ErrUnhealthy
	}
}

// Append writes b, which BeginFrame began, as the next frame and returns its number when it
// is durable. After an error it may be durable or not. version is kept with it.
func (w *Log) Append(b []byte, version store.Version) (seq uint64, err error) {
	b = endFrame(b, w.current.seed, w.seq+1, version)
	if err := w.disk.Record(w.current.f, b, w.at); err != nil {
		return 0, fmt.Errorf("writing the log: %w", err)
	}
	w.seq++
	w.at += int64(len(b))
	return w.seq, nil
}

// work makes the next file when one is wanted, and removes the spare ones that were not.
func (w *Log) work() {
	tick := time.NewTicker(spareFor)
	defer tick.Stop()
	for {
		select {
		case <-w.need:
			f, err := w.nextFile()
			w.ready <- prepared{file: f, err: err}
		case <-tick.C:
			w.removeSpare()
		case <-w.stop:
			return
		}
	}
}

func (w *Log) nextFile() (*file, error) {
	w.mu.Lock()
	w.lastMade = time.Now()
	number := w.files[len(w.files)-1].number + 1
	var spare *file
	if n := len(w.spare); n > 0 {
		spare, w.spare = w.spare[n-1], w.spare[:n-1]
	}
	w.mu.Unlock()
	var f *file
	var err error
	if spare != nil {
		f, err = spare.reuse(number, w.disk)
	} else {
		f, err = create(w.dir, number, fileSize, w.disk)
	}
	if err != nil {
		return nil, err
	}
	if err := w.disk.SyncDir(w.dir); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.files = append(w.files, f)
	// Before its first frame, so that the loss of the file would be noticed.
	if err := w.save(w.list()); err != nil {
		w.files = w.files[:len(w.files)-1]
		return nil, err
	}
	return f, nil
}

// Applied records that the owner has all frames up to seq elsewhere at its timestamp ts.
func (w *Log) Applied(seq, ts uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.files {
		if f.full && f.applied == 0 && f.last <= seq {
			f.applied = ts
		}
	}
}

// Droppable counts the oldest files that the owner had completely at its timestamp ts. full is
// the size of all full files in bytes, applied the timestamp at which the owner had the oldest
// of them; 0 is not yet.
func (w *Log) Droppable(ts uint64) (n int, full int64, applied uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n < len(w.files) && w.files[n].applied != 0 && w.files[n].applied <= ts {
		n++
	}
	for _, f := range w.files {
		if f.full {
			full += f.size
		}
	}
	return n, full, w.files[0].applied
}

// Drop drops the n oldest files, whose contents are durable elsewhere.
func (w *Log) Drop(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	gone, settled := w.files[:n:n], w.settled
	w.files, w.settled = w.files[n:], gone[n-1].last
	if err := w.save(w.list()); err != nil {
		w.files, w.settled = append(gone, w.files...), settled
		return err
	}
	for _, f := range gone {
		if f.size == fileSize && len(w.spare) < maxSpare {
			w.spare = append(w.spare, f)
			continue
		}
		if err := f.remove(); err != nil {
			return err
		}
	}
	return nil
}

// removeSpare removes the spare files if none was needed recently. One that cannot be removed
// is removed at the next opening.
func (w *Log) removeSpare() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.lastMade) < spareFor {
		return
	}
	for _, f := range w.spare {
		_ = f.remove()
	}
	w.spare = nil
}

// Close closes the files, and leaves them. It may be called again.
func (w *Log) Close() {
	w.closing.Do(func() { close(w.stop) })
	w.working.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range append(w.files, w.spare...) {
		f.f.Close()
	}
}

// Found is what the log of an earlier opening holds.
type Found struct {
	Range
	Seq     uint64        // of the last frame
	Version store.Version // the highest

	last     Frame  // the last frame; none where its size is zero
	lastFile uint64 // the number of its file
}

// Read reads the log and changes nothing. Every frame but the last was synced before the next
// one was written, so anything but a torn end is damage (P1, P2), as is what check refuses.
func Read(dir string, r Range, check func(f Frame) error) (Found, error) {
	found := Found{Range: r, Seq: r.Settled}
	err := found.frames(dir, func(n uint64, f Frame) error {
		if f.Seq != found.Seq+1 {
			return fmt.Errorf("frame %d follows frame %d", f.Seq, found.Seq)
		}
		found.Seq, found.Version = f.Seq, max(found.Version, f.Version)
		found.last, found.lastFile = f, n
		return check(f)
	})
	found.last.Contents = nil
	return found, err
}

// frames calls do for every frame in order, with the number of its file.
func (r Found) frames(dir string, do func(file uint64, f Frame) error) error {
	for n := r.First; n <= r.Last; n++ {
		_, err := readFile(filepath.Join(dir, nameOf(n)), func(f Frame) error { return do(n, f) })
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(filepath.Base(dir), nameOf(n)), err)
		}
	}
	return nil
}

// Replay calls do for every frame in order. Before that it makes the last one durable.
func (r Found) Replay(dir string, d Disk, do func(f Frame) error) error {
	if err := r.confirm(dir, d); err != nil {
		return err
	}
	return r.frames(dir, func(_ uint64, f Frame) error { return do(f) })
}

// confirm writes the last frame again: its sync may never have happened, or may have failed,
// and then a second sync of the same pages would report success.
func (r Found) confirm(dir string, d Disk) error {
	if r.last.size == 0 {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(dir, nameOf(r.lastFile)), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, r.last.size)
	if _, err := f.ReadAt(b, r.last.At); err != nil {
		return err
	}
	return d.Record(f, b, r.last.At)
}
