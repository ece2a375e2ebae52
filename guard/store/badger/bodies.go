package badger

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// maxHandles bounds the open segment files.
	maxHandles = 32
	// sweepGrace keeps a segment a little longer than its entries, for reads that found an
	// entry and are about to fetch its value.
	sweepGrace = time.Minute
	// maxScratch is the largest buffer of a write that is kept for the next one, in bytes.
	maxScratch = 1 << 20
)

// bodies are the values that are stored apart from Badger, in append-only files by time of
// expiry: Badger reclaims space only by rewriting the live values, and writes every value
// again with each of its levels.
type bodies struct {
	dir      string
	window   time.Duration
	keptSize int64
	disk     disk

	// writing is held by an append from the choice of its files to their sync, and by a
	// sweep while it renames, so that no value goes to a dropped file.
	writing sync.Mutex
	created bool   // since the directory was last synced; guarded by writing
	scratch []byte // guarded by writing
	kept    int64  // the newest kept segment, where values without an expiry go; guarded by writing

	clock atomic.Uint64 // of uses

	mu      sync.RWMutex // guards what follows
	handles map[int64]*handle
	closed  bool
}

type handle struct {
	f      *os.File
	used   atomic.Uint64
	pinned bool  // an append is under way; not to be closed
	dirty  bool  // written and not synced; not to be closed
	size   int64 // where the next append goes; the appender's
}

func openBodies(dir string, window time.Duration, keptSize int64, d disk) (*bodies, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	// Both: a crash may have come between the creation of a file and its sync.
	for _, name := range []string{filepath.Dir(dir), dir} {
		if err := d.syncDir(name); err != nil {
			return nil, err
		}
	}
	b := &bodies{dir: dir, window: window, keptSize: keptSize, disk: d, kept: firstKept, handles: make(map[int64]*handle)}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if segment, ok := segmentEnd(e.Name()); ok && isKept(segment) {
			b.kept = max(b.kept, segment)
		}
	}
	return b, err
}

// bulkValue is a value to append; append fills in its place.
type bulkValue struct {
	key     string
	value   []byte
	expires time.Time // zero is never
	at      pointer
}

// syncError means that the state of the disk is unknown.
type syncError struct{ error }

func (e syncError) Unwrap() error { return e.error }

// append makes values durable and fills in their pointers; syncs is called before each sync.
// After any error but a syncError the files are usable: no pointer leads to what was written.
func (b *bodies) append(values []*bulkValue, syncs func()) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	written, err := b.writeAll(values)
	defer b.unpin(written)
	if err != nil {
		return err
	}
	return b.sync(written, syncs)
}

// writeAll writes values to their files and returns the files, pinned. After an error the next
// append overwrites all that was written. The caller holds writing.
func (b *bodies) writeAll(values []*bulkValue) (written []*handle, err error) {
	bySegment := make(map[int64][]*bulkValue)
	for _, v := range values {
		end := int64(keepForEver)
		if !v.expires.IsZero() {
			end = partition(v.expires, b.window)
		}
		bySegment[end] = append(bySegment[end], v)
	}
	if values := bySegment[keepForEver]; len(values) > 0 {
		end, err := b.keptForAppend()
		if err != nil {
			return nil, err
		}
		// As they are read, and as they die: in the order of their keys.
		slices.SortFunc(values, func(v, w *bulkValue) int { return strings.Compare(v.key, w.key) })
		bySegment[end] = values
		delete(bySegment, keepForEver)
	}
	before := make(map[*handle]int64, len(bySegment))
	for end, values := range bySegment {
		h, err := b.forAppend(end)
		if err == nil {
			written = append(written, h)
			before[h] = h.size
			err = b.write(h, end, values)
		}
		if err != nil {
			for h, size := range before {
				// Truncating gives space back to a full disk, and may fail.
				h.size = size
				_ = h.f.Truncate(size)
			}
			return written, err
		}
	}
	return written, nil
}

// keptForAppend returns the kept segment for a layer's values: the newest, or the next one where
// that is full. The caller holds writing.
func (b *bodies) keptForAppend() (int64, error) {
	h, err := b.forAppend(b.kept)
	if err != nil {
		return 0, err
	}
	b.unpin([]*handle{h})
	if h.size >= b.keptSize {
		b.kept++
	}
	return b.kept, nil
}

// fullKept lists the kept segments that no value goes to any more.
func (b *bodies) fullKept() (full []int64) {
	b.writing.Lock()
	newest := b.kept
	b.writing.Unlock()
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return nil // looked for again in a minute
	}
	for _, e := range entries {
		if segment, ok := segmentEnd(e.Name()); ok && isKept(segment) && segment < newest {
			full = append(full, segment)
		}
	}
	return full
}

// write appends values to one file, in pieces of about maxScratch bytes.
func (b *bodies) write(h *handle, end int64, values []*bulkValue) error {
	buf := b.scratch[:0]
	for i, v := range values {
		offset := uint64(h.size) + uint64(len(buf))
		var sum uint32
		buf, sum = appendSegment(buf, v.key, v.value)
		v.at = pointer{segment: end, offset: offset, length: uint32(len(v.value)), sum: sum}
		if i < len(values)-1 && len(buf) < maxScratch {
			continue
		}
		if err := b.disk.write(h.f, buf, h.size); err != nil {
			return fmt.Errorf("writing bulk values: %w", err)
		}
		h.size += int64(len(buf))
		buf = buf[:0]
	}
	if b.scratch = buf; cap(buf) > 2*maxScratch {
		b.scratch = nil // do not keep the memory of one large write
	}
	b.mu.Lock()
	h.dirty = true
	b.mu.Unlock()
	return nil
}

// forAppend returns the segment's handle, pinned.
func (b *bodies) forAppend(end int64) (*handle, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h, err := b.handle(end, os.O_RDWR)
	if errors.Is(err, fs.ErrNotExist) {
		b.created = true
		h, err = b.handle(end, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	}
	if err != nil {
		return nil, fmt.Errorf("opening a segment of bulk values: %w", err)
	}
	h.pinned = true
	return h, nil
}

func (b *bodies) unpin(handles []*handle) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range handles {
		h.pinned = false
	}
	b.evict()
}

// handle returns the open segment. The caller holds mu.
func (b *bodies) handle(end int64, flags int) (*handle, error) {
	if b.closed {
		return nil, store.ErrClosed
	}
	if h := b.handles[end]; h != nil {
		h.used.Store(b.clock.Add(1))
		return h, nil
	}
	f, err := os.OpenFile(filepath.Join(b.dir, segmentName(end)), flags, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	h := &handle{f: f, size: info.Size()}
	h.used.Store(b.clock.Add(1))
	b.handles[end] = h
	b.evict()
	return h, nil
}

// evict closes the least recently used files over the bound. A read that still has one gets
// os.ErrClosed and opens it anew. The caller holds mu.
func (b *bodies) evict() {
	for len(b.handles) > maxHandles {
		var oldest int64
		var found *handle
		for end, h := range b.handles {
			// The newest was opened for a caller that has not used it yet.
			if h.pinned || h.dirty || h.used.Load() == b.clock.Load() {
				continue
			}
			if found == nil || h.used.Load() < found.used.Load() {
				oldest, found = end, h
			}
		}
		if found == nil {
			return
		}
		found.f.Close()
		delete(b.handles, oldest)
	}
}

// forRead returns the open segment.
func (b *bodies) forRead(segment int64) (*handle, error) {
	b.mu.RLock()
	h := b.handles[segment]
	b.mu.RUnlock()
	if h != nil {
		h.used.Store(b.clock.Add(1))
		return h, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.handle(segment, os.O_RDWR)
}

// read returns the value at p, or store.ErrDamaged if it is missing or altered. Where the system
// does not let it be read, now or at all, the error is the system's.
func (b *bodies) read(p pointer, key []byte) ([]byte, error) {
	for {
		h, err := b.forRead(p.segment)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("%w: %w", store.ErrDamaged, err)
		case err != nil:
			return nil, err
		}
		value, err := readSegment(h.f, p, key)
		if !errors.Is(err, os.ErrClosed) {
			return value, err
		}
	}
}

// drop removes segments, and returns their number.
func (b *bodies) drop(which func(segment int64) bool) (dropped int, err error) {
	names, err := b.rename(which)
	for _, name := range names {
		// Freeing a large file takes time, and commits must not wait for it.
		if removeErr := os.Remove(filepath.Join(b.dir, name)); removeErr != nil && err == nil {
			err = removeErr
		}
	}
	return len(names), err
}

// rename renames the segments to drop, and lists them with those that a crash left renamed. Where
// a reader holds a file, Windows does not rename it; the others go all the same.
func (b *bodies) rename(which func(segment int64) bool) (names []string, err error) {
	b.writing.Lock()
	defer b.writing.Unlock()
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return nil, err
	}
	var failed []error
	for _, e := range entries {
		name := e.Name()
		if strings.HasSuffix(name, droppedSuffix) {
			names = append(names, name)
			continue
		}
		segment, ok := segmentEnd(name)
		if !ok || !which(segment) {
			continue
		}
		b.mu.Lock()
		if h := b.handles[segment]; h != nil {
			h.f.Close()
			delete(b.handles, segment)
		}
		// With mu, or a read opens it in between, and an append goes to what is removed.
		err := os.Rename(filepath.Join(b.dir, name), filepath.Join(b.dir, name+droppedSuffix))
		b.mu.Unlock()
		if err != nil {
			failed = append(failed, err)
			continue
		}
		names = append(names, name+droppedSuffix)
	}
	return names, errors.Join(failed...)
}

func (b *bodies) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for _, h := range b.handles {
		h.f.Close()
	}
	clear(b.handles)
}

// Ordinary values, and small bulk values, are written to their files after their commit. The
// log keeps them until the files are synced: see logCleaner.

// stage writes values and fills in their pointers. They are durable after syncStaged.
func (b *bodies) stage(values []*bulkValue, syncs func()) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	written, err := b.writeAll(values)
	if err == nil && len(b.unsynced()) > maxHandles/2 {
		err = b.sync(b.unsynced(), syncs)
	}
	b.unpin(written)
	return err
}

// syncStaged makes staged values durable.
func (b *bodies) syncStaged(syncs func()) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	return b.sync(b.unsynced(), syncs)
}

// writeAgain writes values in their places, where the same bytes may be in the page cache only:
// after a sync that failed another one would not write them. They are durable after syncStaged.
func (b *bodies) writeAgain(values []*bulkValue, syncs func()) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	slices.SortFunc(values, func(v, w *bulkValue) int { // few syncs, for any number of segments
		return cmp.Or(cmp.Compare(v.at.segment, w.at.segment), cmp.Compare(v.at.offset, w.at.offset))
	})
	for _, v := range values {
		h, err := b.forAppend(v.at.segment)
		if err != nil {
			return err
		}
		b.mu.Lock()
		h.dirty = true
		b.mu.Unlock()
		b.scratch, _ = appendSegment(b.scratch[:0], v.key, v.value)
		err = b.disk.write(h.f, b.scratch, int64(v.at.offset))
		if err == nil && len(b.unsynced()) > maxHandles/2 {
			err = b.sync(b.unsynced(), syncs)
		}
		b.unpin([]*handle{h})
		if err != nil {
			return fmt.Errorf("writing bulk values again: %w", err)
		}
	}
	return nil
}

func (b *bodies) unsynced() (dirty []*handle) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, h := range b.handles {
		if h.dirty {
			dirty = append(dirty, h)
		}
	}
	return dirty
}

// sync syncs files and, if one was created, the directory. The caller holds writing.
func (b *bodies) sync(files []*handle, syncs func()) error {
	for _, h := range files {
		syncs()
		if err := b.disk.sync(h.f); err != nil {
			return syncError{fmt.Errorf("syncing bulk values: %w", err)}
		}
		b.mu.Lock()
		h.dirty = false
		b.mu.Unlock()
	}
	if b.created {
		if err := b.disk.syncDir(b.dir); err != nil {
			return syncError{fmt.Errorf("syncing the directory of bulk values: %w", err)}
		}
		b.created = false
	}
	return nil
}

// A segment holds the values of one time partition. It is read by pointers from Badger
// only, so what a crash left at its end does no harm.
//
//	bytes 0-3    magic
//	bytes 4-7    length of the key
//	bytes 8-11   length of the value
//	bytes 12-15  CRC-32C of key and value
//	then         key, value
const (
	segmentMagic  = 0x61676231 // "agb1"
	segmentHeader = 16
	segmentSuffix = ".seg"
	droppedSuffix = ".dropped"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// partition is the end of the window that expires falls into, Unix seconds. The segment is
// named by it, so the window may change between openings.
func partition(expires time.Time, window time.Duration) int64 {
	seconds, width := expires.Unix(), int64(window/time.Second)
	start := seconds - ((seconds%width)+width)%width
	return start + width
}

// Values without an expiry go to kept segments, which are numbered from firstKept on. They are
// deleted when nothing points to them any more, the newest never, so no number is used twice.
const (
	keepForEver = math.MinInt64 // the segment of a value until it has one
	firstKept   = math.MinInt64 + 1
	keptPrefix  = "kept-"
)

func isKept(segment int64) bool { return segment < math.MinInt64/2 }

func segmentName(segment int64) string {
	if isKept(segment) {
		return keptPrefix + strconv.FormatInt(segment-math.MinInt64, 10) + segmentSuffix
	}
	return strconv.FormatInt(segment, 10) + segmentSuffix
}

// segmentEnd returns the segment of a name.
func segmentEnd(name string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok {
		return 0, false
	}
	number, kept := strings.CutPrefix(digits, keptPrefix)
	segment, err := strconv.ParseInt(number, 10, 64)
	if kept {
		segment += math.MinInt64
	}
	return segment, err == nil && isKept(segment) == kept
}

func appendSegment(b []byte, key string, value []byte) (_ []byte, sum uint32) {
	from := len(b) + segmentHeader
	b = binary.BigEndian.AppendUint32(b, segmentMagic)
	b = binary.BigEndian.AppendUint32(b, uint32(len(key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	b = binary.BigEndian.AppendUint32(b, 0)
	b = append(append(b, key...), value...)
	sum = crc32.Checksum(b[from:], castagnoli)
	binary.BigEndian.PutUint32(b[from-4:], sum)
	return b, sum
}

// readSegment reads the value at p and checks that it belongs to key, else it is ErrDamaged.
func readSegment(f *os.File, p pointer, key []byte) ([]byte, error) {
	b := make([]byte, segmentHeader+len(key)+int(p.length))
	if _, err := f.ReadAt(b, int64(p.offset)); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%w: segment %d ends inside the value", store.ErrDamaged, p.segment)
		}
		return nil, err
	}
	value := b[segmentHeader+len(key):]
	switch {
	case binary.BigEndian.Uint32(b) != segmentMagic,
		binary.BigEndian.Uint32(b[4:]) != uint32(len(key)),
		!bytes.Equal(b[segmentHeader:segmentHeader+len(key)], key),
		binary.BigEndian.Uint32(b[8:]) != p.length,
		binary.BigEndian.Uint32(b[12:]) != p.sum:
		return nil, fmt.Errorf("%w: segment %d holds something else at %d", store.ErrDamaged, p.segment, p.offset)
	case crc32.Checksum(b[segmentHeader:], castagnoli) != p.sum:
		return nil, fmt.Errorf("%w: checksum does not match in segment %d at %d", store.ErrDamaged, p.segment, p.offset)
	}
	return value[:len(value):len(value)], nil
}

// segmentFacts are what was found whole in a segment: everything before end. A crash or a full disk leaves gaps that
// nothing points to; what lies behind one is read by its pointer.
type segmentFacts struct {
	size int64 // when it was read; what lies behind is newer
	end  int64
}

// has reports whether a value with a key of so many bytes lies where whole values were found.
func (f segmentFacts) has(p pointer, key int) bool { return p.end(key) <= f.end }

// check reads all segments, in their order on the disk, until stop is closed.
func (b *bodies) check(stop <-chan struct{}) map[int64]segmentFacts {
	found := make(map[int64]segmentFacts)
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return found
	}
	for _, e := range entries {
		segment, ok := segmentEnd(e.Name())
		if !ok {
			continue
		}
		found[segment] = segmentFacts{size: math.MaxInt64} // unless it opens, each of its values is read
		f, err := os.Open(filepath.Join(b.dir, e.Name()))
		if err != nil {
			continue
		}
		if info, err := f.Stat(); err == nil {
			found[segment] = checkSegment(f, info.Size(), stop)
		}
		f.Close()
	}
	return found
}

// checkSegment reads the first size bytes of a segment.
func checkSegment(f io.ReaderAt, size int64, stop <-chan struct{}) (facts segmentFacts) {
	facts.size = size
	_ = walkSegment(f, 0, size, stop, func(at int64, record []byte) error {
		if at > facts.end {
			return errGap
		}
		facts.end = at + int64(len(record))
		return nil
	})
	return facts
}

var errGap = errors.New("nothing whole")

// walk calls do with the place and the key of each whole value of a segment, from a place on.
func (b *bodies) walk(segment, from int64, stop <-chan struct{}, do func(at int64, key []byte) error) error {
	f, err := os.Open(filepath.Join(b.dir, segmentName(segment)))
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return walkSegment(f, from, info.Size(), stop, func(at int64, record []byte) error {
		key := record[segmentHeader:][:binary.BigEndian.Uint32(record[4:])]
		return do(at, key)
	})
}

// walkSegment calls do for each whole value of a segment, until it returns an error. It rests for
// longer than it works, so that calls do not notice it.
func walkSegment(f io.ReaderAt, from, size int64, stop <-chan struct{}, do func(at int64, record []byte) error) error {
	piece := make([]byte, min(checkPiece, max(size-from, 0)))
	for at := from; at < size; {
		begun := time.Now()
		b := piece[:min(size-at, checkPiece)]
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
		last := at+int64(len(b)) == size
		used := 0
		for used < len(b) {
			length := wholeValue(b[used:])
			if length > 0 {
				if err := do(at+int64(used), b[used:used+length]); err != nil {
					return err
				}
				used += length
				continue
			}
			if !last && used > checkPiece-maxSegmentValue {
				break // it may go on in the next piece
			}
			used++
			if next := bytes.Index(b[used:], segmentMagicBytes); next >= 0 {
				used += next
			} else {
				used = max(used, len(b)-len(segmentMagicBytes)+1)
			}
		}
		at += int64(used)
		if at >= size {
			break
		}
		select {
		case <-stop:
			return errClosing
		case <-time.After(3 * time.Since(begun)):
		}
	}
	return nil
}

const (
	maxSegmentValue = segmentHeader + store.MaxKey + store.MaxBulk
	checkPiece      = 2 * maxSegmentValue
)

var segmentMagicBytes = binary.BigEndian.AppendUint32(nil, segmentMagic)

// wholeValue is the length in the segment of the value at the beginning of b, 0 if that is none
// or not whole.
func wholeValue(b []byte) int {
	if len(b) < segmentHeader || binary.BigEndian.Uint32(b) != segmentMagic {
		return 0
	}
	key, value := binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	if key > store.MaxKey || value > store.MaxBulk || segmentHeader+int(key+value) > len(b) {
		return 0
	}
	end := segmentHeader + int(key+value)
	if crc32.Checksum(b[segmentHeader:end], castagnoli) != binary.BigEndian.Uint32(b[12:]) {
		return 0
	}
	return end
}
