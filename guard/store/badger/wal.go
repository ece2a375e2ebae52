package badger

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// logSize is the size of a log file. The first one after opening is smaller, so that
	// opening is quick.
	logSize      = 8 << 20
	firstLogSize = 1 << 20
	// maxSpare bounds the files that are kept for reuse, spareFor the time after which an
	// idle store removes them.
	maxSpare = 6
	spareFor = time.Minute
)

// wal is the write-ahead log: the only file synced before a commit is answered. Every group
// is one frame; frames are numbered without a gap over all files. A file is dropped when
// Badger's tables have all of it; see logCleaner.
type wal struct {
	dir  string
	disk disk
	save func(logRange) error // makes the list of files durable

	// Used by the committer alone.
	current *logFile
	at      int64  // where the next frame goes
	seq     uint64 // of the last frame
	asked   bool   // whether the next file was asked for

	need  chan struct{}    // a next file is wanted
	ready chan preparedLog // the answer

	mu       sync.Mutex
	files    []*logFile // those that the manifest lists, oldest first
	settled  uint64     // the last frame of those that are gone
	spare    []*logFile
	lastMade time.Time // when a file was last made
}

type preparedLog struct {
	file *logFile
	err  error
}

// logRange is the manifest's list of log files: every file from First to Last exists while
// the store is open, and all frames up to Settled are in Badger's tables.
type logRange struct {
	First   uint64 `json:"first"`
	Last    uint64 `json:"last"`
	Settled uint64 `json:"settled"`
}

// beginLog makes the log of this opening: one new file, numbered after the old ones.
func beginLog(dir string, old logRange, seq uint64, d disk, save func(logRange) error) (*wal, error) {
	w := &wal{
		dir: dir, disk: d, save: save, seq: seq, settled: seq, at: logFrames,
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
	if err := save(w.currentRange()); err != nil {
		return nil, err
	}
	return w, removeLogs(dir, w.currentRange())
}

// removeLogs removes the files of the log outside of r, which a crash left before or after
// the manifest was written.
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

// currentRange is the range of the present files. The caller holds mu, or the log is not
// shared yet.
func (w *wal) currentRange() logRange {
	return logRange{First: w.files[0].number, Last: w.files[len(w.files)-1].number, Settled: w.settled}
}

// ensureSpace makes sure that the next frame, of n bytes, fits into the current file. After
// an error nothing was written.
func (w *wal) ensureSpace(n int, failed <-chan struct{}) error {
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

// append writes b, which begins with room for the header, as the next frame and returns
// when it is durable. After an error it may be durable or not.
func (w *wal) append(b []byte, version store.Version) ([]byte, error) {
	b = endFrame(b, w.current.seed, w.seq+1, version)
	if err := w.disk.record(w.current.f, b, w.at); err != nil {
		return b, fmt.Errorf("writing the log: %w", err)
	}
	w.seq++
	w.at += int64(len(b))
	return b, nil
}

func (w *wal) nextFile() (*logFile, error) {
	w.mu.Lock()
	w.lastMade = time.Now()
	number := w.files[len(w.files)-1].number + 1
	var spare *logFile
	if n := len(w.spare); n > 0 {
		spare, w.spare = w.spare[n-1], w.spare[:n-1]
	}
	w.mu.Unlock()
	var f *logFile
	var err error
	if spare != nil {
		f, err = spare.reuse(number, w.disk)
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
	// Before its first frame, so that the loss of the file would be noticed.
	if err := w.save(w.currentRange()); err != nil {
		w.files = w.files[:len(w.files)-1]
		return nil, err
	}
	return f, nil
}

// applied records that Badger has all frames up to seq at timestamp ts.
func (w *wal) applied(seq, ts uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.files {
		if f.full && f.applied == 0 && f.last <= seq {
			f.applied = ts
		}
	}
}

// fullFiles is the size of the full files in bytes, and the timestamp at which Badger had
// the oldest of them; 0 is not yet.
func (w *wal) fullFiles() (size int64, applied uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.files {
		if f.full {
			size += f.size
		}
	}
	return size, w.files[0].applied
}

// droppable counts the oldest files that are completely in Badger at ts.
func (w *wal) droppable(ts uint64) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n < len(w.files) && w.files[n].applied != 0 && w.files[n].applied <= ts {
		n++
	}
	return n
}

// drop drops the n oldest files, whose contents are durable elsewhere.
func (w *wal) drop(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	gone, settled := w.files[:n:n], w.settled
	w.files, w.settled = w.files[n:], gone[n-1].last
	if err := w.save(w.currentRange()); err != nil {
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

// removeSpare removes the spare files if none was needed recently.
func (w *wal) removeSpare() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.lastMade) < spareFor {
		return nil
	}
	var err error
	for _, f := range w.spare {
		err = errors.Join(err, f.remove())
	}
	w.spare = nil
	return err
}

// close closes the files.
func (w *wal) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range append(w.files, w.spare...) {
		f.f.Close()
	}
}

// A log file is filled with zeros before it is used: a sync costs less if neither the
// file's size nor its blocks change. A file whose frames are no longer needed is reused
// under another number. Each use has a seed of its own in the header, so that no frame of
// an earlier use passes its checksum.
//
//	bytes 0-3    magic
//	bytes 4-7    CRC-32C of bytes 8 to 31, the seed
//	bytes 8-15   number of the file
//	bytes 16-23  random
//	bytes 24-31  size of the file
//	from logFrames on, frames
const (
	logMagic  = 0x61676c31 // "agl1"
	logHead   = 32
	logFrames = 4096 // apart from the header, whose sector is never rewritten
	logSuffix = ".wal"
)

type logFile struct {
	f      *os.File
	number uint64
	size   int64
	seed   uint32

	// Of a full file; guarded by the log's lock.
	full    bool
	last    uint64 // the last frame in it
	applied uint64 // a timestamp at which Badger had it; 0 is not yet
}

func logName(number uint64) string { return fmt.Sprintf("%012d%s", number, logSuffix) }

func logNumber(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, logSuffix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n, err == nil
}

var errLogHeader = errors.New("header is garbled")

// createLog makes an empty log file; its name is not durable yet. After an error the file
// is removed.
func createLog(dir string, number uint64, size int64, d disk) (l *logFile, err error) {
	f, err := os.OpenFile(filepath.Join(dir, logName(number)), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	l = &logFile{f: f, size: size}
	zeros := make([]byte, 1<<20)
	for at := int64(0); at < size && err == nil; at += int64(len(zeros)) {
		err = d.write(f, zeros[:min(int64(len(zeros)), size-at)], at)
	}
	if err == nil {
		err = l.begin(number, d)
	}
	if err != nil {
		return nil, errors.Join(err, l.remove())
	}
	return l, nil
}

// reuse makes a log file of one that is no longer needed.
func (l *logFile) reuse(number uint64, d disk) (*logFile, error) {
	name := l.f.Name()
	next := filepath.Join(filepath.Dir(name), logName(number))
	l.f.Close() // some systems rename no open file
	if err := os.Rename(name, next); err != nil {
		return nil, errors.Join(err, os.Remove(name))
	}
	f, err := os.OpenFile(next, os.O_RDWR, 0)
	if err != nil {
		return nil, errors.Join(err, os.Remove(next))
	}
	renamed := &logFile{f: f, size: l.size}
	if err := renamed.begin(number, d); err != nil {
		return nil, errors.Join(err, renamed.remove())
	}
	return renamed, nil
}

// begin writes the header and makes the file durable.
func (l *logFile) begin(number uint64, d disk) error {
	head := make([]byte, logHead)
	binary.BigEndian.PutUint32(head, logMagic)
	binary.BigEndian.PutUint64(head[8:], number)
	rand.Read(head[16:24])
	binary.BigEndian.PutUint64(head[24:], uint64(l.size))
	l.number, l.seed = number, crc32.Checksum(head[8:], castagnoli)
	binary.BigEndian.PutUint32(head[4:], l.seed)
	if err := d.write(l.f, head, 0); err != nil {
		return err
	}
	return d.sync(l.f)
}

func (l *logFile) remove() error {
	l.f.Close()
	return os.Remove(l.f.Name())
}

// readLog returns the contents of a file of the log and its seed.
func readLog(dir string, number uint64) (content []byte, seed uint32, err error) {
	content, err = os.ReadFile(filepath.Join(dir, logName(number)))
	if err != nil {
		return nil, 0, err
	}
	if len(content) < logFrames || binary.BigEndian.Uint32(content) != logMagic {
		return nil, 0, errLogHeader
	}
	seed = crc32.Checksum(content[8:logHead], castagnoli)
	if binary.BigEndian.Uint32(content[4:]) != seed ||
		binary.BigEndian.Uint64(content[8:]) != number ||
		binary.BigEndian.Uint64(content[24:]) != uint64(len(content)) {
		return nil, 0, errLogHeader
	}
	return content, seed, nil
}

// framesIn calls do for the frames of a file in order, and returns the offset after the
// last one. A frame that is not whole ends the file, since the last one may be torn; a
// whole one after it is proof of damage.
func framesIn(content []byte, seed uint32, do func(at int, f frame) error) (end int, err error) {
	at := logFrames
	for {
		f, ok := readFrame(content[at:], seed)
		if !ok {
			break
		}
		if err := do(at, f); err != nil {
			return at, err
		}
		at += f.size
	}
	magic := binary.BigEndian.AppendUint32(nil, frameMagic)
	for next := at; ; {
		found := bytes.Index(content[next:], magic)
		if found < 0 {
			return at, nil
		}
		next += found
		if _, ok := readFrame(content[next:], seed); ok && next%frameAlign == 0 {
			return at, fmt.Errorf("damaged at byte %d, with a whole frame behind it", at)
		}
		next++
	}
}

// A frame holds all changes of one group, and is replayed whole or not at all. Numbers are
// big endian.
//
//	bytes 0-3    magic
//	bytes 4-7    CRC-32C of what follows, begun with the seed of the file
//	bytes 8-15   number of the frame, one more than that of the frame before
//	bytes 16-23  the highest version in it
//	bytes 24-27  length of the changes
//	bytes 28-31  zero
//	then         the changes, and zeros up to a multiple of frameAlign
//
// A change is a byte (deletes or not), two bytes length of the key, four bytes length of
// the value, the key and the value, both as Badger will have them.
const (
	frameMagic  = 0x61676631 // "agf1"
	frameHeader = 32
	frameAlign  = 8
	// maxFrame bounds the changes of one group. A single batch that store.Check
	// admits, with small bulk values only, is smaller.
	maxFrame = 6 << 20

	changeHeader = 7
	changePut    = 1
	changeDelete = 2
)

var errFrame = errors.New("a frame has an unknown form")

// frame is a frame as it was read.
type frame struct {
	seq     uint64
	version store.Version
	changes []byte
	size    int // in the file
}

// beginFrame reserves the header.
func beginFrame(b []byte) []byte { return append(b[:0], make([]byte, frameHeader)...) }

// appendChange adds a change; a nil value deletes.
func appendChange(b []byte, key string, value []byte) []byte {
	kind := byte(changePut)
	if value == nil {
		kind = changeDelete
	}
	b = append(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	b = append(b, key...)
	return append(b, value...)
}

// endFrame fills in the header of b, which begins with room for it.
func endFrame(b []byte, seed uint32, seq uint64, version store.Version) []byte {
	length := len(b) - frameHeader
	for len(b)%frameAlign != 0 {
		b = append(b, 0)
	}
	binary.BigEndian.PutUint32(b, frameMagic)
	binary.BigEndian.PutUint64(b[8:], seq)
	binary.BigEndian.PutUint64(b[16:], uint64(version))
	binary.BigEndian.PutUint32(b[24:], uint32(length))
	binary.BigEndian.PutUint32(b[4:], crc32.Update(seed, castagnoli, b[8:frameHeader+length]))
	return b
}

// readFrame reads the frame at the beginning of b; ok is false if it is not whole.
func readFrame(b []byte, seed uint32) (f frame, ok bool) {
	if len(b) < frameHeader || binary.BigEndian.Uint32(b) != frameMagic {
		return frame{}, false
	}
	end := frameHeader + uint64(binary.BigEndian.Uint32(b[24:]))
	size := (end + frameAlign - 1) / frameAlign * frameAlign
	if size > uint64(len(b)) ||
		crc32.Update(seed, castagnoli, b[8:end]) != binary.BigEndian.Uint32(b[4:]) {
		return frame{}, false
	}
	return frame{
		seq:     binary.BigEndian.Uint64(b[8:]),
		version: store.Version(binary.BigEndian.Uint64(b[16:])),
		changes: b[frameHeader:end:end],
		size:    int(size),
	}, true
}

// each calls do for every change of the frame; key and value share its memory.
func (f *frame) each(do func(key, value []byte)) error {
	for b := f.changes; len(b) > 0; {
		if len(b) < changeHeader {
			return errFrame
		}
		key, value := int(binary.BigEndian.Uint16(b[1:])), int(binary.BigEndian.Uint32(b[3:]))
		end := changeHeader + key + value
		if end > len(b) {
			return errFrame
		}
		switch {
		case b[0] == changePut && value >= headerSize:
			do(b[changeHeader:changeHeader+key:changeHeader+key], b[changeHeader+key:end:end])
		case b[0] == changeDelete && value == 0:
			do(b[changeHeader:changeHeader+key:changeHeader+key], nil)
		default:
			return errFrame
		}
		b = b[end:]
	}
	return nil
}

// recovery is what the log of the previous opening holds.
type recovery struct {
	logRange
	seq     uint64        // of the last frame
	version store.Version // the highest

	// The place of the last frame.
	file uint64
	at   int64
	size int
}

// readWholeLog reads the log and changes nothing. Every frame but the last was synced
// before the next one was written, so anything but a torn end is damage (P1, P2).
func readWholeLog(dir string, r logRange) (recovery, error) {
	found := recovery{logRange: r, seq: r.Settled}
	for n := r.First; n <= r.Last; n++ {
		name := filepath.Join(filepath.Base(dir), logName(n))
		content, seed, err := readLog(dir, n)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return found, fmt.Errorf("%s is missing", name)
		case err != nil:
			return found, fmt.Errorf("%s: %w", name, err)
		}
		_, err = framesIn(content, seed, func(at int, f frame) error {
			if f.seq != found.seq+1 {
				return fmt.Errorf("frame %d follows frame %d", f.seq, found.seq)
			}
			found.seq, found.version = f.seq, max(found.version, f.version)
			found.file, found.at, found.size = n, int64(at), f.size
			return f.each(func(_, _ []byte) {})
		})
		if err != nil {
			return found, fmt.Errorf("%s: %w", name, err)
		}
	}
	return found, nil
}

// rewriteLastFrame makes the last frame durable: its sync may never have happened, or may have
// failed, and then a second sync of the same pages would report success. So it is written again.
func (r *recovery) rewriteLastFrame(dir string, d disk) error {
	if r.size == 0 {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(dir, logName(r.file)), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, r.size)
	if _, err := f.ReadAt(b, r.at); err != nil {
		return err
	}
	return d.record(f, b, r.at)
}

// replay applies the log to Badger. Badger's tables have everything up to the marker m,
// since layers are applied in order. Values in segments up to it may be missing, or be in the page
// cache only: those files are not synced with the tables. Like the last frame they are written
// again. It reports whether Badger was changed.
func (r *recovery) replay(dir string, a *applier, m marker) (changed bool, err error) {
	l := newLayer()
	flush := func() error {
		changed = true
		err := a.apply(l)
		l = newLayer()
		return err
	}
	var again []*bulkValue
	size := 0 // of again
	writeAgain := func() error {
		err := a.bodies.writeAgain(again, a.countBulkSync)
		again, size = again[:0], 0
		return err
	}
	for n := r.First; n <= r.Last; n++ {
		content, seed, err := readLog(dir, n)
		if err != nil {
			return changed, err
		}
		_, err = framesIn(content, seed, func(_ int, f frame) error {
			var failure error
			err := f.each(func(key, value []byte) {
				wanted := f.seq > m.seq
				if !wanted && failure == nil {
					var there *bulkValue
					if there, wanted, failure = a.lacks(key, value); there != nil {
						again, size = append(again, there), size+len(there.value)
					}
				}
				if wanted {
					l.put(string(key), value)
				}
			})
			l.seq, l.version = f.seq, f.version
			if err = errors.Join(err, failure); err == nil && size >= maxLayer {
				err = writeAgain()
			}
			if err == nil && l.size >= maxLayer {
				err = flush()
			}
			return err
		})
		if err != nil {
			return changed, err
		}
	}
	err = writeAgain()
	if err == nil && (len(l.values) > 0 || l.seq > m.seq) {
		err = flush()
	}
	return changed, err
}

// lacks reports whether Badger points to value and its file does not have it. If the file has it,
// it returns where.
func (a *applier) lacks(key, value []byte) (there *bulkValue, lacks bool, err error) {
	if !apart(value) {
		return nil, false, nil
	}
	txn := a.db.NewTransactionAt(a.ts, false)
	defer txn.Discard()
	raw, err := lookUp(txn, key)
	if err != nil || raw == nil {
		return nil, false, err
	}
	stored, err := decode(raw)
	if err != nil {
		return nil, false, err
	}
	logged, err := decode(value)
	if err != nil || stored.version != logged.version || !stored.bulk {
		return nil, false, err // overwritten since, or in Badger itself
	}
	at := readPointer(stored.value)
	found, err := a.bodies.read(at, key[1:])
	if err != nil {
		return nil, true, nil // also where the disk cannot read it: the log has it
	}
	return &bulkValue{key: string(key[1:]), value: found, at: at}, false, nil
}
