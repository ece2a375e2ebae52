package badger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

const (
	// maxHandles bounds the open segment files.
	maxHandles = 32
	// sweepGrace keeps a segment a little longer than its entries live, for reads
	// that found an entry alive and are about to fetch its value.
	sweepGrace = time.Minute
)

// bodies are the bulk values: append-only files by time of expiry, beside Badger,
// because there the space of expired values comes back only by rewriting the rest.
type bodies struct {
	dir    string
	window time.Duration
	disk   disk

	// writing is held by an append from the choice of its files to their sync, and
	// by a sweep while it renames, so that no value goes into a dropped file.
	writing sync.Mutex
	created bool // since the directory was last synced; guarded by writing

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

// bulkValue is one value to append; append fills in where it lies.
type bulkValue struct {
	key, value []byte
	expires    time.Time
	at         pointer
}

// syncError says that what is durable is no longer known.
type syncError struct{ error }

func (e syncError) Unwrap() error { return e.error }

// append makes values durable and fills in their pointers; syncs is called before
// each sync. Any error but a syncError leaves the files usable: what was written of
// the values is garbage that no pointer names.
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

// writeAll writes values to their files and returns these, pinned. It is called with
// writing held.
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
	var buf []byte
	for _, v := range values {
		offset := uint64(h.size) + uint64(len(buf))
		var sum uint32
		buf, sum = appendSegment(buf, v.key, v.value)
		v.at = pointer{segment: end, offset: offset, length: uint32(len(v.value)), sum: sum}
	}
	if err := b.disk.write(h.f, buf, h.size); err != nil {
		// The next append overwrites what came through; giving the space back at
		// once matters where the disk is full, and changes nothing if it fails.
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

// handle is called with mu held.
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

// evict closes the longest unused files over the bound, with mu held. A read that
// still has one meets os.ErrClosed and opens it anew.
func (b *bodies) evict() {
	for len(b.handles) > maxHandles {
		var oldest int64
		var found *handle
		for end, h := range b.handles {
			// The newest was opened for a caller who has not used it yet.
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

// read returns the value that p names. What is missing or altered is ErrDamaged.
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

// sweep drops the segments whose entries have all expired by now. It returns how
// many there were.
func (b *bodies) sweep(now time.Time) (dropped int, err error) {
	names, err := b.retire(now.Add(-sweepGrace).Unix())
	for _, name := range names {
		// Freeing a large file takes time that no commit should wait for.
		if removeErr := os.Remove(filepath.Join(b.dir, name)); removeErr != nil && err == nil {
			err = removeErr
		}
	}
	return len(names), err
}

// retire renames the segments that end at or before end, and lists them together
// with those that a crash left renamed.
func (b *bodies) retire(end int64) (names []string, err error) {
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
		b.forget(segment)
		if err := os.Rename(filepath.Join(b.dir, name), filepath.Join(b.dir, name+droppedSuffix)); err != nil {
			return names, err
		}
		names = append(names, name+droppedSuffix)
	}
	return names, nil
}

func (b *bodies) forget(end int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.handles[end]; h != nil {
		h.f.Close()
		delete(b.handles, end)
	}
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
