package ect

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// FileOptions are the settings of a FileSource. Only Path is required.
type FileOptions struct {
	// Path is a file with a JSON Web Key Set.
	Path string
	// Owner is whose the keys are that do not say so themselves; those that do must be
	// within it. The zero Owner bounds nothing.
	Owner Owner
	// Look is how long nobody looks whether the file has changed; one second if zero.
	Look time.Duration
	// Changed is told of every reading but the first: the new set, or why the old one
	// stays in use. It may be nil.
	Changed func(*Set, error)
}

// FileSource is a file of public keys. When the file changes it is read again, at the
// next use of a key. A file that is gone or broken changes nothing: the keys that were
// read stay, and Changed is told.
type FileSource struct {
	o       FileOptions
	current atomic.Pointer[fileState]
	reading sync.Mutex // held by who looks at the file; others go on with what is there
}

// fileState is what one look at the file has given. It never changes.
type fileState struct {
	set     *Set
	retired *retirees
	sum     [sha256.Size]byte // of the text
	info    os.FileInfo
	looked  time.Time
	// unsure: the file had just been written when it was read, so that a further
	// write may not show in its time.
	unsure bool
}

// NewFileSource reads the file. One of which no key can be used is an error.
func NewFileSource(o FileOptions) (*FileSource, error) {
	if o.Look == 0 {
		o.Look = time.Second
	}
	s := &FileSource{o: o}
	next, err := s.read()
	if err != nil {
		return nil, err
	}
	s.current.Store(next)
	return s, nil
}

// Set is what the file held when it was last read.
func (s *FileSource) Set() *Set { return s.current.Load().set }

// Keys implements Source.
func (s *FileSource) Keys(_ context.Context, kid string) ([]*Key, error) {
	s.look()
	return s.current.Load().set.byID[kid], nil
}

// Retired implements Archive, for what this process has seen.
func (s *FileSource) Retired(kid string) []*Key { return s.current.Load().retired.retired(kid) }

// look reads the file again where it has changed.
func (s *FileSource) look() {
	now := time.Now()
	if was := s.current.Load(); now.Sub(was.looked) < s.o.Look || !s.reading.TryLock() {
		return
	}
	defer s.reading.Unlock()
	was := s.current.Load()
	if now.Sub(was.looked) < s.o.Look {
		return
	}
	info, err := os.Stat(s.o.Path)
	if err == nil && !was.unsure && os.SameFile(info, was.info) && info.Size() == was.info.Size() && info.ModTime().Equal(was.info.ModTime()) {
		same := *was
		same.looked = now
		s.current.Store(&same)
		return
	}
	next, err := s.read()
	if err != nil {
		same := *was
		same.looked = now
		s.current.Store(&same)
		s.tell(nil, err)
		return
	}
	if next.sum == was.sum {
		next.set, next.retired = was.set, was.retired
		s.current.Store(next)
		return
	}
	next.retired = was.retired.replace(was.set, next.set)
	s.current.Store(next)
	s.tell(next.set, nil)
}

func (s *FileSource) tell(set *Set, err error) {
	if s.o.Changed != nil {
		s.o.Changed(set, err)
	}
}

func (s *FileSource) read() (*fileState, error) {
	f, err := os.Open(s.o.Path)
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxKeySet+1))
	if err != nil {
		return nil, fmt.Errorf("ect: keys: %w", err)
	}
	set, err := ParseSet(text, s.o.Owner)
	if err != nil {
		return nil, fmt.Errorf("keys in %s: %w", s.o.Path, err)
	}
	if err := set.usable(); err != nil {
		return nil, fmt.Errorf("keys in %s: %w", s.o.Path, err)
	}
	now := time.Now()
	return &fileState{set: set, sum: sha256.Sum256(text), info: info, looked: now, unsure: now.Sub(info.ModTime()) < 2*time.Second}, nil
}
