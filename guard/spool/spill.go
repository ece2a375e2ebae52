package spool

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"io"
	"os"
)

// file is what a spill needs of the operating system's file.
type file interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// spill is the encrypted part of a spool. Its key lives only here and ends with
// it, so that nothing can be read from the disk afterwards (P8).
type spill struct {
	f     file
	key   cipher.Block
	enc   cipher.Stream // keystream of the writer, standing at encAt
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

// write encrypts p and stores it at pos of the file. off is its absolute offset
// in the stream: it counts the keystream, so that a ring, which writes the same
// positions again and again, never uses a piece of it twice. p is not changed.
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

// createTemp makes a file that nobody else can open: mode 0600, and its name is
// gone before the first byte is written.
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
