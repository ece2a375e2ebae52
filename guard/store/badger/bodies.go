package badger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
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
	// maxHandles bounds the open segment files.
	maxHandles = 32
	// sweepGrace keeps a segment a little longer than its entries, for reads that found an
	// entry and are about to fetch its value.
	sweepGrace = time.Minute
	// maxScratch is the largest buffer of a write that is kept for the next one, in bytes.
	maxScratch = 1 << 20
)

// bodies are the bulk values, in append-only files by time of expiry: Badger reclaims space
// only by rewriting the live values.
type bodies struct {
	dir    string
	window time.Duration
	disk   disk

	// writing is held by an append from the choice of its files to their sync, and by a
	// sweep while it renames, so that no value goes to a dropped file.
	writing sync.Mutex
	created bool   // since the directory was last synced; guarded by writing
	scratch []byte // guarded by writing

	mu      sync.Mutex // guards what follows
	handles map[int64]*handle
	clock   uint64 // of uses
	closed  bool
}

type handle struct {
	f      *os.File
	used   uint64
	pinned bool  // an append is under way; not to be closed
	dirty  bool  // written and not synced; not to be closed
	size   int64 // where the next append goes; the appender's
}

func openBodies(dir string, window time.Duration, d disk) (*bodies, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	// Both: a crash may have come between the creation of a file and its sync.
	for _, name := range []string{filepath.Dir(dir), dir} {
		if err := d.syncDir(name); err != nil {
			return nil, err
		}
	}
	return &bodies{dir: dir, window: window, disk: d, handles: make(map[int64]*handle)}, nil
}

// bulkValue is a value to append; append fills in its place.
type bulkValue struct {
	key     string
	value   []byte
	expires time.Time
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

// writeAll writes values to their files and returns the files, pinned. The caller holds writing.
func (b *bodies) writeAll(values []*bulkValue) (written []*handle, err error) {
	bySegment := make(map[int64][]*bulkValue)
	for _, v := range values {
		end := partition(v.expires, b.window)
		bySegment[end] = append(bySegment[end], v)
	}
	for end, values := range bySegment {
		h, err := b.forAppend(end)
		if err != nil {
			return written, err
		}
		written = append(written, h)
		if err := b.write(h, end, values); err != nil {
			return written, err
		}
	}
	return written, nil
}

func (b *bodies) write(h *handle, end int64, values []*bulkValue) error {
	size := 0
	for _, v := range values {
		size += segmentHeader + len(v.key) + len(v.value)
	}
	buf := b.scratch[:0]
	if cap(buf) < size {
		buf = make([]byte, 0, size)
	}
	if b.scratch = buf; size > maxScratch {
		b.scratch = nil // do not keep the memory of one large write
	}
	for _, v := range values {
		offset := uint64(h.size) + uint64(len(buf))
		var sum uint32
		buf, sum = appendSegment(buf, v.key, v.value)
		v.at = pointer{segment: end, offset: offset, length: uint32(len(v.value)), sum: sum}
	}
	if err := b.disk.write(h.f, buf, h.size); err != nil {
		// The next append overwrites what was written. Truncating gives space back to a
		// full disk, and may fail.
		_ = h.f.Truncate(h.size)
		return fmt.Errorf("writing bulk values: %w", err)
	}
	h.size += int64(len(buf))
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
	b.clock++
	if h := b.handles[end]; h != nil {
		h.used = b.clock
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
	h := &handle{f: f, used: b.clock, size: info.Size()}
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
			if h.pinned || h.dirty || h.used == b.clock {
				continue
			}
			if found == nil || h.used < found.used {
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

// read returns the value at p, or store.ErrDamaged if it is missing or altered.
func (b *bodies) read(p pointer, key []byte) ([]byte, error) {
	for {
		b.mu.Lock()
		h, err := b.handle(p.segment, os.O_RDWR)
		b.mu.Unlock()
		switch {
		case errors.Is(err, store.ErrClosed):
			return nil, err
		case err != nil:
			return nil, fmt.Errorf("%w: %w", store.ErrDamaged, err)
		}
		value, err := readSegment(h.f, p, key)
		switch {
		case errors.Is(err, os.ErrClosed):
			continue
		case err != nil:
			return nil, fmt.Errorf("%w: %w", store.ErrDamaged, err)
		}
		return value, nil
	}
}

// sweep removes the segments whose entries have all expired by now, and returns their number.
func (b *bodies) sweep(now time.Time) (dropped int, err error) {
	names, err := b.renameExpired(now.Add(-sweepGrace).Unix())
	for _, name := range names {
		// Freeing a large file takes time, and commits must not wait for it.
		if removeErr := os.Remove(filepath.Join(b.dir, name)); removeErr != nil && err == nil {
			err = removeErr
		}
	}
	return len(names), err
}

// renameExpired renames the segments that end at or before end, and lists them with those
// that a crash left renamed.
func (b *bodies) renameExpired(end int64) (names []string, err error) {
	b.writing.Lock()
	defer b.writing.Unlock()
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		name := e.Name()
		if strings.HasSuffix(name, droppedSuffix) {
			names = append(names, name)
			continue
		}
		segment, ok := segmentEnd(name)
		if !ok || segment > end {
			continue
		}
		b.mu.Lock()
		if h := b.handles[segment]; h != nil {
			h.f.Close()
			delete(b.handles, segment)
		}
		b.mu.Unlock()
		if err := os.Rename(filepath.Join(b.dir, name), filepath.Join(b.dir, name+droppedSuffix)); err != nil {
			return names, err
		}
		names = append(names, name+droppedSuffix)
	}
	return names, nil
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

// Small bulk values are written to their files after their commit. The log keeps them until
// the files are synced: see logCleaner.

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

// markUnsynced notes that a segment may be in the page cache only.
func (b *bodies) markUnsynced(segment int64) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	h, err := b.forAppend(segment)
	if err != nil {
		return err
	}
	b.mu.Lock()
	h.dirty = true
	b.mu.Unlock()
	b.unpin([]*handle{h})
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

// A segment holds the bulk values of one time partition. It is read by pointers from Badger
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

func segmentName(end int64) string { return strconv.FormatInt(end, 10) + segmentSuffix }

func segmentEnd(name string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok {
		return 0, false
	}
	end, err := strconv.ParseInt(digits, 10, 64)
	return end, err == nil
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

// readSegment reads the value at p and checks that it belongs to key.
func readSegment(f *os.File, p pointer, key []byte) ([]byte, error) {
	b := make([]byte, segmentHeader+len(key)+int(p.length))
	if _, err := f.ReadAt(b, int64(p.offset)); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("segment %d ends inside the value", p.segment)
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
		return nil, fmt.Errorf("segment %d holds something else at %d", p.segment, p.offset)
	case crc32.Checksum(b[segmentHeader:], castagnoli) != p.sum:
		return nil, fmt.Errorf("checksum does not match in segment %d at %d", p.segment, p.offset)
	}
	return value[:len(value):len(value)], nil
}
