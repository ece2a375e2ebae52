// Package spool keeps the bytes of one request or response body: first in pooled
// memory, beyond that in an unlinked temporary file under a key that exists only
// in memory (P8). It is written once, front to back, and can be read at any
// place by many at the same time, also while it is being written.
package spool

import (
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
)

// DefaultMemory is how many bytes of a body stay in memory unless Options say
// otherwise.
const DefaultMemory = 1 << 20

var (
	// ErrLimit: the body would become larger than Options.Limit.
	ErrLimit = errors.New("spool: body larger than its limit")
	// ErrGone: a ring has overwritten the bytes at this offset.
	ErrGone = errors.New("spool: bytes already overwritten")
	// ErrClosed: the spool, or this reader of it, was closed before.
	ErrClosed = errors.New("spool: closed")

	errOffset = errors.New("spool: negative offset")
)

// SpillError tells that the temporary file could not be made, written or read:
// no space left, no such directory, an I/O error. It is the machine's fault and
// never the body's, unlike ErrLimit.
type SpillError struct{ Err error }

func (e *SpillError) Error() string { return fmt.Sprintf("spool: temporary file: %v", e.Err) }

// Unwrap gives the error of the file system.
func (e *SpillError) Unwrap() error { return e.Err }

// Options of a spool. The zero value holds any number of bytes, the first MiB of
// them in memory.
type Options struct {
	// Memory is how many bytes stay in memory. 0 means DefaultMemory, a negative
	// value none at all.
	Memory int64
	// Limit is the largest size in bytes, in a ring the number of bytes that can
	// be read back. 0 or less: no limit.
	Limit int64
	// Dir is the directory of the temporary file; "" is os.TempDir().
	Dir string
	// Ring lets bytes beyond Limit overwrite the oldest instead of failing. It
	// has no meaning without a Limit.
	Ring bool

	create func(dir string) (file, error)
}

// Spool is an append-only run of bytes. It belongs to its maker, who must Close
// it. All methods are safe for concurrent use.
type Spool struct {
	limit, memory int64
	dir           string
	ring          bool
	create        func(dir string) (file, error)

	// writing is held over a whole Write. The bytes themselves are stored
	// without mu: nobody reads outside [low, size).
	writing sync.Mutex

	mu     sync.RWMutex
	size   int64 // bytes ever written
	low    int64 // first offset that a ring still has
	refs   int   // owner, readers, and the write in progress
	closed bool  // by the owner
	failed error // the first error of the file, which stays

	small  *smallBlock
	blocks []*block
	inline [DefaultMemory / blockSize]*block
	spill  *spill
}

// New makes an empty spool.
func New(o Options) *Spool {
	s := &Spool{limit: max(o.Limit, 0), memory: o.Memory, dir: o.Dir, create: o.create, refs: 1}
	if s.memory == 0 {
		s.memory = DefaultMemory
	}
	s.memory = max(s.memory, 0)
	s.ring = o.Ring && s.limit > 0
	if s.create == nil {
		s.create = createTemp
	}
	s.blocks = s.inline[:0]
	return s
}

// Size is the number of bytes ever written, in a ring those that are gone too.
func (s *Spool) Size() int64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.size
}

// place maps an absolute offset to its position in the address space and tells
// how many bytes follow there without a seam.
func (s *Spool) place(off int64) (pos, room int64) {
	pos, room = off, math.MaxInt64
	if s.ring {
		pos = off % s.limit
		room = s.limit - pos
	}
	if pos < s.memory {
		room = min(room, s.memory-pos)
	}
	return pos, room
}

// ReadAt reads what is there at off: fewer bytes than asked for, with io.EOF, at
// the present end. Other errors are ErrGone, ErrClosed and *SpillError.
func (s *Spool) ReadAt(p []byte, off int64) (int, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return 0, ErrClosed
	}
	return s.load(p, off)
}

// load is ReadAt for those who hold mu and a reference.
func (s *Spool) load(p []byte, off int64) (n int, err error) {
	switch {
	case off < 0:
		return 0, errOffset
	case off < s.low:
		return 0, ErrGone
	case off >= s.size:
		return 0, io.EOF
	}
	if left := s.size - off; int64(len(p)) > left {
		p, err = p[:left], io.EOF
	}
	for n < len(p) {
		pos, room := s.place(off)
		q := p[n:]
		q = q[:min(room, int64(len(q)))]
		if pos < s.memory {
			q = q[:copy(q, s.slot(pos))]
		} else if err := s.spill.read(q, off, pos-s.memory); err != nil {
			return n, &SpillError{err}
		}
		n, off = n+len(q), off+int64(len(q))
	}
	return n, err
}

// Bytes gives everything written so far without copying, if it lies in one piece:
// up to 64 KiB (or Options.Memory), and never in a ring. The bytes must not be
// changed, and not be used after Close.
func (s *Spool) Bytes() (p []byte, ok bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	switch {
	case s.closed || s.ring:
		return nil, false
	case s.size == 0:
		return nil, true
	case s.size > s.memory || s.size > blockSize:
		return nil, false
	}
	return s.slot(0)[:s.size:s.size], true
}

// Close ends the owner's use. Memory and file are given back once the readers
// are closed too. A second Close does nothing.
func (s *Spool) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	return s.unref()
}

// unref drops one reference; the last one gives everything back. The caller
// holds mu.
func (s *Spool) unref() error {
	s.refs--
	if s.refs > 0 {
		return nil
	}
	s.release()
	if s.spill == nil {
		return nil
	}
	err := s.spill.close()
	s.spill = nil
	if err != nil {
		return &SpillError{err}
	}
	return nil
}
