// Package body keeps the bodies of requests and answers (Spool), and compares requests by a hash of their meaning
// (Fingerprint): a key that is reused for another request is detected (422), and a retry that is only encoded
// differently is recognised.
package body

import (
	"bytes"
	"cmp"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/problem"
)

// Reading says how the body of a request is read.
type Reading struct {
	Limit       int64   // length of the longest body, in bytes
	Budget      *Budget // bound of the memory for it; nil is none
	Incremental bool    // the client wants it to be forwarded while it comes, so that it is refused
	OneMessage  bool    // it is that of a unary gRPC call
}

// Read reads the body of r to its end. wanted, if not nil, is shown the start: if it returns false and more is to come,
// the body is left as if nothing was read, and whole is nil. The caller must Close it. took is the time that the client
// has taken to send it. An error is a *problem.Problem, or what r.Body says: the client broke off, or sent a malformed
// body.
func Read(
	r *http.Request, how Reading, wanted func(start []byte) bool,
) (whole *Spool, took time.Duration, err error) {
	if r.ContentLength > how.Limit {
		return nil, 0, tooLarge(how.Limit)
	}
	s := NewSpool(SpoolOptions{Limit: how.Limit, Budget: how.Budget})
	if r.Body == nil || r.Body == http.NoBody {
		return s, 0, nil
	}
	if how.Incremental {
		p := problem.New(problem.StreamRefused,
			"It asks to be forwarded while it comes (Incremental), and a guarded call is read whole.")
		p.Status = http.StatusNotImplemented // RFC 10036, section 4.1
		return nil, 0, p
	}
	defer func(begun time.Time) {
		took = time.Since(begun)
		if whole == nil {
			_ = s.Close()
		}
	}(time.Now())
	from := io.Reader(r.Body)
	if how.OneMessage {
		from = &oneMessage{Reader: from}
	}
	if wanted != nil {
		n, err := s.readSome(from)
		if err != nil && err != io.EOF {
			return nil, 0, s.unread(err)
		}
		if start, _ := s.Bytes(); !wanted(start) && err == nil && n != r.ContentLength {
			r.Body = struct {
				io.Reader
				io.Closer
			}{io.MultiReader(bytes.NewReader(bytes.Clone(start)), r.Body), r.Body}
			return nil, 0, nil
		}
	}
	if _, err := s.readFrom(from); err != nil {
		return nil, 0, s.unread(err)
	}
	return s, 0, nil
}

func tooLarge(limit int64) error {
	return problem.New(problem.BodyTooLarge, fmt.Sprintf("This route takes bodies of at most %d bytes.", limit))
}

// unread is the refusal of a body that could not be read, or err where only the client knows why.
func (s *Spool) unread(err error) error {
	var spill *spillError
	var max *http.MaxBytesError
	switch {
	case errors.Is(err, errLimit):
		return tooLarge(s.limit)
	case errors.As(err, &max): // by request_body
		return tooLarge(max.Limit)
	case errors.Is(err, errSecondMessage):
		return problem.New(problem.StreamRefused,
			"It is a gRPC call that is declared unary and sends more than one message.")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return problem.New(problem.BodyTimeout, fmt.Sprintf("%d bytes of it have come. Nothing was forwarded.", s.Size()))
	case errors.As(err, &spill):
		return problem.New(problem.StoreUnavailable, "The request's body could not be kept.").Because(err)
	}
	return err
}

// oneMessage reads the body of a unary gRPC call. A second message makes it a stream, whose caller may wait for an
// answer before ending it: waiting for the end could take forever.
type oneMessage struct {
	io.Reader
	prefix [5]byte // of the message: whether it is compressed, and its length
	read   int     // of the prefix
	left   uint32  // of the message
}

var errSecondMessage = errors.New("more than one message")

func (m *oneMessage) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	rest := p[:n]
	if m.read < len(m.prefix) {
		took := copy(m.prefix[m.read:], rest)
		m.read += took
		rest = rest[took:]
		if m.read < len(m.prefix) {
			return n, err
		}
		m.left = binary.BigEndian.Uint32(m.prefix[1:])
	}
	if len(rest) > int(m.left) {
		return n, errSecondMessage
	}
	m.left -= uint32(len(rest))
	return n, err
}

// PutInto makes the spool the body of r, which is about to be forwarded.
func (s *Spool) PutInto(r *http.Request) {
	r.Header.Del("Expect") // the body is here
	r.TransferEncoding, r.ContentLength, r.Body = nil, s.Size(), http.NoBody
	if r.ContentLength > 0 {
		r.Body = s.NewReader()
	}
}

// defaultMemory is how many bytes of a body stay in memory unless SpoolOptions say otherwise.
const defaultMemory = 1 << 20

var (
	// errLimit: the body would become larger than SpoolOptions.Limit.
	errLimit = errors.New("spool: body larger than its limit")
	// ErrGone: a ring has overwritten the bytes at this offset.
	ErrGone = errors.New("spool: bytes already overwritten")
	// errClosed: the spool, or this reader of it, was closed before.
	errClosed = errors.New("spool: closed")

	errOffset = errors.New("spool: negative offset")
)

// spillError is a failure to create, write or read the temporary file: no space left, no such
// directory, an I/O error. Unlike errLimit it does not depend on the body.
type spillError struct{ Err error }

func (e *spillError) Error() string { return fmt.Sprintf("spool: temporary file: %v", e.Err) }

// Unwrap returns the error of the file system.
func (e *spillError) Unwrap() error { return e.Err }

// SpoolOptions of a spool. The zero value has no limit and keeps the first MiB in memory.
type SpoolOptions struct {
	// Memory is how many bytes stay in memory. 0 means 1 MiB, a negative value none at all.
	Memory int64
	// Limit is the largest size in bytes, in a ring the number of bytes that can be read back. 0 or less: no limit.
	Limit int64
	// Dir is the directory of the temporary file; "" is os.TempDir().
	Dir string
	// Ring lets bytes beyond Limit overwrite the oldest ones. It is ignored without a Limit.
	Ring bool

	// Budget bounds the memory of this and other spools together. nil is no bound.
	Budget *Budget

	create func(dir string) (file, error)
}

// Spool buffers one body: first in pooled memory, beyond that in an unlinked temporary file, encrypted under a key that
// exists only in memory (P8). A body is written once, in order, and can be read at any offset by many readers at once,
// also while it is being written. Its owner must Close it. All methods are safe for concurrent use.
type Spool struct {
	limit, memory int64 // memory decreases when the budget is used up
	budget        *Budget
	starved       bool // the budget was used up
	dir           string
	ring          bool
	create        func(dir string) (file, error)

	// writing is held during a Write. The bytes are stored without mu: readers stay within [low, size).
	writing sync.Mutex

	mu     sync.RWMutex
	size   int64 // bytes ever written
	low    int64 // first offset that a ring still has
	refs   int   // owner, readers, and the write in progress
	closed bool  // by the owner
	failed error // the first error of the file; permanent

	small  *smallBlock
	blocks []*block
	inline [defaultMemory / blockSize]*block
	spill  *spill
}

// NewSpool makes an empty spool.
func NewSpool(o SpoolOptions) *Spool {
	s := new(Spool)
	s.Init(o)
	return s
}

// Init makes an empty spool of the zero value.
func (s *Spool) Init(o SpoolOptions) {
	s.limit, s.memory, s.budget, s.dir, s.create, s.refs = max(o.Limit, 0), o.Memory, o.Budget, o.Dir, o.create, 1
	if s.memory == 0 {
		s.memory = defaultMemory
	}
	s.memory = max(s.memory, 0)
	s.ring = o.Ring && s.limit > 0
	if s.create == nil {
		s.create = createTemp
	}
	s.blocks = s.inline[:0]
}

// Size is the number of bytes ever written, overwritten ones included.
func (s *Spool) Size() int64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.size
}

// place maps an absolute offset to its position in the address space, and
// returns how many contiguous bytes follow there.
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

// ReadAt implements io.ReaderAt. At the present end it returns fewer bytes and
// io.EOF. Other errors are ErrGone, errClosed and *spillError.
func (s *Spool) ReadAt(p []byte, off int64) (int, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return 0, errClosed
	}
	return s.load(p, off)
}

// load is ReadAt with mu and a reference held.
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
			return n, &spillError{err}
		}
		n, off = n+len(q), off+int64(len(q))
	}
	return n, err
}

// Bytes returns everything written so far without copying, if it is contiguous: up to 64 KiB (or
// SpoolOptions.Memory), and never in a ring. Do not change the bytes, nor use them after Close.
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

// Close ends the owner's use. Memory and file are released once the readers are
// closed too. A second Close does nothing.
func (s *Spool) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	return s.unref()
}

// unref drops one reference; the last one releases everything. The caller holds mu.
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
		return &spillError{err}
	}
	return nil
}

// Write appends all of p or nothing. The error is errLimit (later, smaller writes may still fit),
// errClosed, or a *spillError, after which every further Write fails alike.
func (s *Spool) Write(p []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.write(p)
}

func (s *Spool) write(p []byte) (int, error) {
	n := len(p)
	if err := s.begin(n); err != nil {
		return 0, err
	}
	off := s.size
	if s.ring && int64(n) > s.limit {
		off += int64(n) - s.limit
		p = p[int64(n)-s.limit:]
	}
	err := s.store(p, off)
	if err = s.end(n, err); err != nil {
		return 0, err
	}
	return n, nil
}

// readFrom reads r to its end, directly into memory while that suffices. It returns how many bytes were kept and the
// error of r or one of Write's. On errLimit the bytes up to the limit are kept.
func (s *Spool) readFrom(r io.Reader) (total int64, err error) {
	for {
		n, err := s.readSome(r)
		if total += n; err == io.EOF {
			return total, nil
		} else if err != nil {
			return total, err
		}
	}
}

// readSome is readFrom for one Read of r; at its end the error is io.EOF.
func (s *Spool) readSome(r io.Reader) (int64, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if room := s.room(); room > 0 {
		n, rerr, err := s.readInto(r, room)
		return int64(n), cmp.Or(err, rerr)
	}
	scratch := s.scratch()
	defer giveScratch(scratch)
	p := scratch
	if left := s.limit - s.size; s.limit > 0 && !s.ring {
		// One byte more than fits distinguishes a body that ends here from one that is too large.
		p = p[:min(int64(len(p)), left+1)]
	}
	n, rerr := r.Read(p)
	over := s.limit > 0 && !s.ring && int64(n) > s.limit-s.size
	if over {
		n = int(s.limit - s.size)
	}
	var err error
	if n > 0 {
		n, err = s.write(p[:n])
	}
	if err == nil && over {
		err = errLimit
	}
	return int64(n), cmp.Or(err, rerr)
}

// room is how many bytes can be read directly into memory at the present end; 0 if they go into the file. The caller
// holds writing.
func (s *Spool) room() int64 {
	room := s.memory - s.size
	if s.limit > 0 {
		room = min(room, s.limit-s.size)
	}
	if s.ring || room <= 0 {
		return 0
	}
	if s.size < smallSize {
		return min(room, smallSize-s.size)
	}
	return min(room, blockSize-s.size%blockSize)
}

// readInto reads once from r into the memory at the end. The caller holds writing.
func (s *Spool) readInto(r io.Reader, room int64) (n int, rerr, err error) {
	if err := s.begin(int(room)); err != nil {
		return 0, nil, err
	}
	defer func() {
		if err = s.end(n, nil); err != nil {
			n = 0
		}
	}()
	if room = min(room, s.memory-s.size); room <= 0 {
		return 0, nil, nil // the budget is used up
	}
	n, rerr = r.Read(s.slot(s.size)[:room])
	return n, rerr, nil
}

// scratch is the buffer for bytes that go into the file. It is small if the budget is used up, since it is held for as
// long as the body stalls.
func (s *Spool) scratch() []byte {
	if s.starved {
		return smallPool.Get().(*smallBlock)[:]
	}
	return blockPool.Get().(*block)[:]
}

func giveScratch(p []byte) {
	switch cap(p) {
	case smallSize:
		smallPool.Put((*smallBlock)(p[:smallSize]))
	case blockSize:
		blockPool.Put((*block)(p[:blockSize]))
	}
}

// begin prepares the append of n bytes: it checks the limit, gets memory blocks, and in a ring drops what they
// overwrite. After nil, end must follow.
func (s *Spool) begin(n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return errClosed
	case s.failed != nil:
		return s.failed
	case !s.ring && s.limit > 0 && int64(n) > s.limit-s.size:
		return errLimit
	}
	end := s.size + int64(n)
	if s.ring {
		s.low = max(s.low, end-s.limit)
		end = min(end, s.limit)
	}
	s.grow(min(end, s.memory))
	s.refs++
	return nil
}

// end publishes n bytes, or the failure to store them.
func (s *Spool) end(n int, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		// Offsets of the failed write may be on disk already. Writing other
		// bytes there would use the same keystream twice (P8): no more writes.
		s.failed = err
	case s.closed:
		err = errClosed
	default:
		s.size += int64(n)
	}
	s.unref()
	return err
}

// store puts p at the absolute offset off. Only the writer calls it, between begin and end.
func (s *Spool) store(p []byte, off int64) error {
	for len(p) > 0 {
		pos, room := s.place(off)
		n := int(min(room, int64(len(p))))
		if pos < s.memory {
			n = copy(s.slot(pos), p[:n])
		} else {
			if s.spill == nil {
				sp, err := newSpill(s.create, s.dir)
				if err != nil {
					return &spillError{err}
				}
				s.spill = sp
			}
			if err := s.spill.write(p[:n], off, pos-s.memory); err != nil {
				return &spillError{err}
			}
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// reader reads a spool front to back and keeps its bytes alive.
type reader struct {
	mu  sync.Mutex
	s   *Spool // nil when closed
	off int64
}

// NewReader gives a reader from offset 0. It ends with io.EOF at the end that the spool has at that moment; after
// further writes it goes on. Until it is closed the bytes stay readable through it, also after the spool's own Close:
// an HTTP transport may read a request body after the handler has returned. On a closed spool the reader is closed from
// the start. Its methods are safe for concurrent use.
func (s *Spool) NewReader() io.ReadCloser {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return &reader{}
	}
	s.refs++
	return &reader{s: s}
}

func (r *reader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.s == nil {
		return 0, errClosed
	}
	if len(p) == 0 {
		return 0, nil
	}
	r.s.mu.RLock()
	n, err := r.s.load(p, r.off)
	r.s.mu.RUnlock()
	r.off += int64(n)
	if n > 0 && err == io.EOF {
		err = nil
	}
	return n, err
}

func (r *reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.s
	if s == nil {
		return nil
	}
	r.s = nil
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unref()
}

const (
	// smallSize suffices for most request bodies.
	smallSize = 4 << 10
	blockSize = 64 << 10
)

type (
	smallBlock [smallSize]byte
	block      [blockSize]byte
)

var (
	smallPool = sync.Pool{New: func() any { return new(smallBlock) }}
	blockPool = sync.Pool{New: func() any { return new(block) }}
)

// Budget bounds the memory of the bodies of many spools together. Each keeps its first 4 KiB in any case; what does not
// fit beyond that goes into its file at once. A nil Budget is no bound. It is safe for concurrent use.
type Budget struct{ limit, used atomic.Int64 }

// NewBudget makes a budget of limit bytes.
func NewBudget(limit int64) *Budget {
	b := new(Budget)
	b.SetLimit(limit)
	return b
}

// SetLimit changes the limit in bytes. Memory over it is released when its spool is closed.
func (b *Budget) SetLimit(limit int64) { b.limit.Store(limit) }

// Used is the number of bytes in use.
func (b *Budget) Used() int64 { return b.used.Load() }

// take takes a block, if there is room for one.
func (b *Budget) take() bool {
	if b == nil {
		return true
	}
	if b.used.Add(blockSize) > b.limit.Load() {
		b.used.Add(-blockSize)
		return false
	}
	return true
}

func (b *Budget) give(blocks int) {
	if b != nil && blocks > 0 {
		b.used.Add(-int64(blocks) * blockSize)
	}
}

// grow provides memory up to position end, or as far as the budget allows: later positions are in the file from then
// on. A body that outgrows its small block moves to a whole one, so that up to 64 KiB are contiguous; the small block
// is kept until the release, because Bytes may have returned it. The caller holds writing and mu.
func (s *Spool) grow(end int64) {
	if end <= 0 {
		return
	}
	if end <= smallSize && len(s.blocks) == 0 {
		if s.small == nil {
			s.small = smallPool.Get().(*smallBlock)
		}
		return
	}
	for int64(len(s.blocks))*blockSize < end {
		if !s.budget.take() {
			s.starve()
			return
		}
		b := blockPool.Get().(*block)
		if len(s.blocks) == 0 && s.small != nil {
			copy(b[:], s.small[:])
		}
		s.blocks = append(s.blocks, b)
	}
}

// starve ends the memory at its present size. Nothing is in the file yet, since memory is filled first, so that no byte
// changes its position.
func (s *Spool) starve() {
	s.starved = true
	if len(s.blocks) > 0 {
		s.memory = int64(len(s.blocks)) * blockSize
		return
	}
	s.memory = min(s.memory, smallSize)
	if s.small == nil {
		s.small = smallPool.Get().(*smallBlock)
	}
}

// slot is the memory from pos to the end of its block. The caller holds mu, or is
// the writer between begin and end, and pos was provided by grow.
func (s *Spool) slot(pos int64) []byte {
	if len(s.blocks) == 0 {
		return s.small[pos:]
	}
	b, from := s.blocks[pos/blockSize], pos%blockSize
	return b[from:min(blockSize, from+s.memory-pos)]
}

// release gives the blocks back to their pools. Nobody may hold a reference.
func (s *Spool) release() {
	s.budget.give(len(s.blocks))
	for i, b := range s.blocks {
		blockPool.Put(b)
		s.blocks[i] = nil
	}
	s.blocks = nil
	if s.small != nil {
		smallPool.Put(s.small)
		s.small = nil
	}
}

// file is what a spill needs of the operating system's file.
type file interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// spill is the encrypted part of a spool. Its key is kept here only, so that
// nothing can be read from the disk afterwards (P8).
type spill struct {
	f     file
	key   cipher.Block
	enc   cipher.Stream // keystream of the writer, at encAt
	encAt int64
}

func newSpill(create func(string) (file, error), dir string) (*spill, error) {
	var key [32]byte
	rand.Read(key[:]) // never fails
	block, err := aes.NewCipher(key[:])
	clear(key[:])
	if err != nil {
		return nil, err
	}
	f, err := create(dir)
	if err != nil {
		return nil, err
	}
	return &spill{f: f, key: block, encAt: -1}, nil
}

// write encrypts p and stores it at pos of the file. off is its absolute offset in the stream and selects the
// keystream, so that a ring, which writes the same positions repeatedly, never uses a part of it twice. p is not
// changed.
func (s *spill) write(p []byte, off, pos int64) error {
	scratch := blockPool.Get().(*block)
	defer blockPool.Put(scratch)
	if s.encAt != off {
		s.enc = s.keystream(off)
	}
	for len(p) > 0 {
		c := scratch[:min(blockSize, len(p))]
		s.enc.XORKeyStream(c, p[:len(c)])
		if _, err := s.f.WriteAt(c, pos); err != nil {
			return err
		}
		p, off, pos = p[len(c):], off+int64(len(c)), pos+int64(len(c))
	}
	s.encAt = off
	return nil
}

// read fills p from pos of the file, which holds the stream from off on.
func (s *spill) read(p []byte, off, pos int64) error {
	if n, err := s.f.ReadAt(p, pos); n < len(p) {
		clear(p[:n])
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	s.keystream(off).XORKeyStream(p, p)
	return nil
}

// keystream is AES-CTR from the byte at off of the stream on.
func (s *spill) keystream(off int64) cipher.Stream {
	var iv [aes.BlockSize]byte
	binary.BigEndian.PutUint64(iv[8:], uint64(off/aes.BlockSize))
	st := cipher.NewCTR(s.key, iv[:])
	if skip := off % aes.BlockSize; skip > 0 {
		st.XORKeyStream(iv[:skip], iv[:skip])
	}
	return st
}

func (s *spill) close() error { return s.f.Close() }

// createTemp makes a file that no other process can open: mode 0600, and its name
// is removed before the first byte is written.
func createTemp(dir string) (file, error) {
	f, err := os.CreateTemp(dir, "agent-guard-*.spool")
	if err != nil {
		return nil, err
	}
	if os.Remove(f.Name()) != nil {
		// Some systems do not remove open files.
		return removeOnClose{f}, nil
	}
	return f, nil
}

type removeOnClose struct{ *os.File }

func (f removeOnClose) Close() error {
	err := f.File.Close()
	if e := os.Remove(f.Name()); err == nil {
		err = e
	}
	return err
}
