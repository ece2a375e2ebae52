package badger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// logSize is the size of a file of the log. The first one after opening is
	// smaller, so that opening need not wait for a disk.
	logSize      = 8 << 20
	firstLogSize = 1 << 20
	// maxSpare bounds the files that are kept to be used again, spareFor the time
	// after which a quiet store gives them back.
	maxSpare = 6
	spareFor = time.Minute
)

// wal is the store's own log: the only thing that is synced before a commit is
// answered. Every group is one frame, and the frames are numbered without a gap over
// all files. A file goes when Badger's tables have all that is in it; see keeper.
type wal struct {
	dir  string
	disk disk
	seal func(logRange) error // makes it durable which files there are

	// The committer's.
	current *logFile
	at      int64  // where the next frame goes
	seq     uint64 // of the last frame
	asked   bool   // for a next file

	need  chan struct{}    // a next file is wanted
	ready chan preparedLog // the answer

	mu      sync.Mutex
	files   []*logFile // those that the seal names, oldest first
	settled uint64     // the last frame of those that are gone
	spare   []*logFile
	busy    time.Time // when a file was last made
}

type preparedLog struct {
	file *logFile
	err  error
}

// logRange is what the seal knows of the log: every file from First to Last is there
// while the store is open, and all frames up to Settled are in Badger's tables.
type logRange struct {
	First   uint64 `json:"first"`
	Last    uint64 `json:"last"`
	Settled uint64 `json:"settled"`
}

// beginLog makes the log of this opening: one new file, numbered after those of old.
func beginLog(dir string, old logRange, seq uint64, d disk, seal func(logRange) error) (*wal, error) {
	w := &wal{
		dir: dir, disk: d, seal: seal, seq: seq, settled: seq, at: logFrames,
		need: make(chan struct{}, 1), ready: make(chan preparedLog, 1),
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := d.syncDir(filepath.Dir(dir)); err != nil {
		return nil, err
	}
	f, err := createLog(dir, old.Last+1, firstLogSize, d)
	if err != nil {
		return nil, err
	}
	w.current, w.files = f, []*logFile{f}
	if err := d.syncDir(dir); err != nil {
		return nil, err
	}
	if err := seal(w.ranged()); err != nil {
		return nil, err
	}
	return w, removeLogs(dir, w.ranged())
}

// removeLogs removes the files of the log that are outside of r: what a crash left
// behind between the seal and the removal, or before the seal.
func removeLogs(dir string, r logRange) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if n, ok := logNumber(e.Name()); !ok || n >= r.First && n <= r.Last {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// ranged is called with mu held, or before the log is shared.
func (w *wal) ranged() logRange {
	return logRange{First: w.files[0].number, Last: w.files[len(w.files)-1].number, Settled: w.settled}
}

// room makes sure that the next frame, of n bytes, fits into the current file. The
// error says that there is none, and that nothing was written.
func (w *wal) room(n int, failed <-chan struct{}) error {
	if !w.asked && w.at+int64(n) > w.current.size/2 {
		w.asked = true
		signal(w.need)
	}
	if w.at+int64(n) <= w.current.size {
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
		w.current, w.at = next.file, logFrames
		return nil
	case <-failed:
		return store.ErrUnhealthy
	}
}

// append writes b, which begins with room for the header, as the next frame, and
// returns when it is durable. After an error it is not known whether it is.
func (w *wal) append(b []byte, version store.Version) ([]byte, error) {
	b = endFrame(b, w.current.seed, w.seq+1, version)
	if err := w.disk.record(w.current.f, b, w.at); err != nil {
		return b, fmt.Errorf("writing the log: %w", err)
	}
	w.seq++
	w.at += int64(len(b))
	return b, nil
}

// prepare answers the wish for a next file.
func (w *wal) prepare() {
	f, err := w.make()
	w.ready <- preparedLog{file: f, err: err}
}

func (w *wal) make() (*logFile, error) {
	w.mu.Lock()
	w.busy = time.Now()
	number := w.files[len(w.files)-1].number + 1
	var spare *logFile
	if n := len(w.spare); n > 0 {
		spare, w.spare = w.spare[n-1], w.spare[:n-1]
	}
	w.mu.Unlock()
	var f *logFile
	var err error
	if spare != nil {
		f, err = spare.again(number, w.disk)
	} else {
		f, err = createLog(w.dir, number, logSize, w.disk)
	}
	if err != nil {
		return nil, err
	}
	if err := w.disk.syncDir(w.dir); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.files = append(w.files, f)
	// Before its first frame, so that its loss would be noticed.
	if err := w.seal(w.ranged()); err != nil {
		w.files = w.files[:len(w.files)-1]
		return nil, err
	}
	return f, nil
}

// applied notes that Badger had all frames up to seq at timestamp ts.
func (w *wal) applied(seq, ts uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.files {
		if f.full && f.applied == 0 && f.last <= seq {
			f.applied = ts
		}
	}
}

// waiting is how many bytes of full files there are, and when Badger had what is in
// the oldest of them; 0 is not yet.
func (w *wal) waiting() (size int64, applied uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.files {
		if f.full {
			size += f.size
		}
	}
	return size, w.files[0].applied
}

// done are the full files all of which is in Badger at ts.
func (w *wal) done(ts uint64) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n < len(w.files) && w.files[n].applied != 0 && w.files[n].applied <= ts {
		n++
	}
	return n
}

// drop forgets the n oldest files, all of which is durable elsewhere.
func (w *wal) drop(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	gone, settled := w.files[:n:n], w.settled
	w.files, w.settled = w.files[n:], gone[n-1].last
	if err := w.seal(w.ranged()); err != nil {
		w.files, w.settled = append(gone, w.files...), settled
		return err
	}
	for _, f := range gone {
		if f.size == logSize && len(w.spare) < maxSpare {
			w.spare = append(w.spare, f)
			continue
		}
		if err := f.remove(); err != nil {
			return err
		}
	}
	return nil
}

// rest gives the spare files back where none was needed of late.
func (w *wal) rest() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.busy) < spareFor {
		return nil
	}
	var err error
	for _, f := range w.spare {
		err = errors.Join(err, f.remove())
	}
	w.spare = nil
	return err
}

// close lets go of the files.
func (w *wal) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range append(w.files, w.spare...) {
		f.f.Close()
	}
}

// none is the range of a log without files, after one that ended with last.
func (r logRange) none(seq uint64) logRange {
	return logRange{First: r.Last + 1, Last: r.Last, Settled: seq}
}
