package spool

import (
	"io"
	"sync"
)

// reader reads a spool front to back and keeps its bytes alive.
type reader struct {
	mu  sync.Mutex
	s   *Spool // nil when closed
	off int64
}

// NewReader gives a reader from offset 0. It ends with io.EOF at the end that the
// spool has at that moment; after further writes it goes on. Until it is closed
// the bytes stay readable through it, also after the spool's own Close: an HTTP
// transport may read a request body after the handler has returned. On a closed
// spool the reader is closed from the start. Its methods are safe for concurrent
// use.
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
		return 0, ErrClosed
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
