package spool

import "io"

// Write appends all of p or nothing. The error is ErrLimit (later, smaller
// writes may still fit), ErrClosed, or a *SpillError, after which every further
// Write fails alike.
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

// ReadFrom appends all that r gives, without a buffer in between while it goes
// to memory. It returns how many bytes were kept and the error of r or one of
// Write's. On ErrLimit the bytes up to the limit are kept.
func (s *Spool) ReadFrom(r io.Reader) (total int64, err error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	var scratch *block
	defer func() {
		if scratch != nil {
			blockPool.Put(scratch)
		}
	}()
	for {
		room := s.room()
		if room == 0 && scratch == nil {
			scratch = blockPool.Get().(*block)
		}
		var n int
		var rerr error
		if room > 0 {
			n, rerr, err = s.readInto(r, room)
		} else {
			p := scratch[:]
			if left := s.limit - s.size; s.limit > 0 && !s.ring {
				// One byte more than fits tells a body that ends here from
				// one that is too large.
				p = p[:min(blockSize, left+1)]
			}
			n, rerr = r.Read(p)
			over := s.limit > 0 && !s.ring && int64(n) > s.limit-s.size
			if over {
				n = int(s.limit - s.size)
			}
			if n > 0 {
				n, err = s.write(p[:n])
			}
			if err == nil && over {
				err = ErrLimit
			}
		}
		total += int64(n)
		switch {
		case err != nil:
			return total, err
		case rerr == io.EOF:
			return total, nil
		case rerr != nil:
			return total, rerr
		}
	}
}

// room is how many bytes can be read straight into memory at the present end; 0
// where they must go another way. The caller holds writing.
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
	n, rerr = r.Read(s.slot(s.size)[:room])
	return n, rerr, nil
}

// begin makes ready for n bytes at the end: limits, memory blocks, and in a ring
// the farewell to what they overwrite. After nil, end must follow.
func (s *Spool) begin(n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return ErrClosed
	case s.failed != nil:
		return s.failed
	case !s.ring && s.limit > 0 && int64(n) > s.limit-s.size:
		return ErrLimit
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
		err = ErrClosed
	default:
		s.size += int64(n)
	}
	s.unref()
	return err
}

// store puts p at the absolute offset off. Only the writer calls it, between
// begin and end.
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
					return &SpillError{err}
				}
				s.spill = sp
			}
			if err := s.spill.write(p[:n], off, pos-s.memory); err != nil {
				return &SpillError{err}
			}
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}
