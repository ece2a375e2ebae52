package fingerprint

import (
	"errors"
	"io"
)

// windowSize is how much of a body is looked at in one piece where it does not
// lie in memory. It is at least twice as large as anything that must be seen in
// one piece: a number, an escape, the headers of a part.
const windowSize = 64 << 10

var errSize = errors.New("fingerprint: the size of the body is negative, or there is none")

// bytesHolder is a body that may lie in memory in one piece, as a spool's does.
type bytesHolder interface {
	Bytes() (p []byte, ok bool)
}

// source is a moving window over a body.
type source struct {
	win  []byte // what can be seen
	i    int    // the next byte of win
	r    io.ReaderAt
	off  int64 // of the first byte of r that is not in win yet
	size int64
	err  error // read error; the end of the body is none
	buf  *[windowSize]byte
}

func (s *source) reset(r io.ReaderAt, size int64) {
	*s = source{r: r, size: size, buf: s.buf}
	if size < 0 || (r == nil && size > 0) {
		s.size, s.err = 0, errSize
		return
	}
	if h, ok := r.(bytesHolder); ok {
		if p, ok := h.Bytes(); ok && int64(len(p)) >= size {
			s.win, s.off = p[:size], size
		}
	}
}

// fill makes more bytes seen. The bytes from i on stay and move to the front. It
// reports whether there were more; s.err tells whether it was for an error.
func (s *source) fill() bool {
	if s.off >= s.size || s.err != nil {
		return false
	}
	if s.buf == nil {
		s.buf = new([windowSize]byte)
	}
	n := copy(s.buf[:], s.win[s.i:])
	s.i = 0
	room := s.buf[n:]
	room = room[:min(int64(len(room)), s.size-s.off)]
	s.win = s.buf[:n]
	if len(room) == 0 {
		return false
	}
	m, err := s.r.ReadAt(room, s.off)
	s.off += int64(m)
	s.win = s.buf[:n+m]
	if m < len(room) {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		s.err = err
		return false
	}
	return true
}

// need makes n bytes seen, or as many as there are left.
func (s *source) need(n int) {
	for len(s.win)-s.i < n && s.fill() {
	}
}

// more reports whether there is a next byte, and makes it seen.
func (s *source) more() bool {
	return s.i < len(s.win) || s.fill()
}

// space skips JSON white space and gives the next byte without taking it; 0 at
// the end, which is no byte of valid JSON.
func (s *source) space() byte {
	for {
		for s.i < len(s.win) {
			switch c := s.win[s.i]; c {
			case ' ', '\t', '\n', '\r':
				s.i++
			default:
				return c
			}
		}
		if !s.fill() {
			return 0
		}
	}
}
