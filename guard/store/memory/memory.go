// Package memory is the reference store: the contract of package store in a few
// lines, for tests. Nothing survives the process, so promise P2 does not hold on it.
//
// It starts no goroutine and does no I/O, so that it lives inside testing/synctest.
package memory

import (
	"bytes"
	"context"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Options are the settings of a memory store; the zero value is ready.
type Options struct {
	// Now is the clock by which expiries are judged; nil is time.Now.
	Now func() time.Time
}

// Store keeps everything in memory. Make one with New.
type Store struct {
	now     func() time.Time
	watches *store.Watchers

	mu      sync.RWMutex
	entries []store.Entry // by key, expired ones included until they are overwritten
	version store.Version
	closed  bool
	fleet   fleet
}

var _ store.Store = (*Store)(nil)

// New returns an empty store.
func New(o Options) *Store {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Store{now: o.Now, watches: store.NewWatchers()}
}

// Get implements store.Store.
func (s *Store) Get(ctx context.Context, key []byte) (store.Entry, error) {
	if err := ctx.Err(); err != nil {
		return store.Entry{}, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return store.Entry{}, store.ErrClosed
	}
	found := s.living(key, s.now())
	if found == nil {
		return store.Entry{}, store.ErrNotFound
	}
	return clone(*found), nil
}

// Commit implements store.Store.
func (s *Store) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	version, _, err := s.commit(ctx, batch)
	return version, err
}

// commit is Commit. It returns the keys that were written, also those that sequences have made.
func (s *Store) commit(ctx context.Context, batch []store.Write) (version store.Version, written [][]byte, err error) {
	if err := store.Check(batch); err != nil {
		return 0, nil, err
	}
	if err := ctx.Err(); err != nil {
		return 0, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, nil, store.ErrClosed
	}
	now := s.now()
	if err := s.lost(batch, now); err != nil {
		return 0, nil, err
	}
	made, err := s.assemble(batch, now)
	if err != nil {
		return 0, nil, store.NotAssembled(err)
	}
	put := func(w *store.Write) {
		s.put(w)
		s.watches.Wake(w.Key) // whoever reads then waits for mu
		written = append(written, bytes.Clone(w.Key))
	}
	s.version++
	version = s.version
	for i := range batch {
		if !batch[i].Check && batch[i].Place == nil {
			put(&batch[i])
		}
	}
	for _, m := range made {
		s.version++
		for i := range m.writes {
			put(&m.writes[i])
		}
		if m.done != nil {
			m.done(s.version, nil)
		}
	}
	return version, written, nil
}

// made is what a sequence has made of the places of a batch.
type made struct {
	writes []store.Write
	done   func(store.Version, error)
}

// lost finds the first write whose condition does not hold; nil for none.
func (s *Store) lost(batch []store.Write, now time.Time) error {
	for i := range batch {
		if batch[i].If.None() {
			continue
		}
		found := s.living(batch[i].Key, now)
		if batch[i].If.Holds(found) {
			continue
		}
		lost := &store.Conflict{Index: i, Key: bytes.Clone(batch[i].Key)}
		if found != nil {
			e := clone(*found)
			lost.Found = &e
		}
		return lost
	}
	return nil
}

// assemble has the sequences make what the batch adds to them.
func (s *Store) assemble(batch []store.Write, now time.Time) (all []made, err error) {
	places := map[*store.Sequence][]*store.Place{}
	var sequences []*store.Sequence
	for i := range batch {
		if p := batch[i].Place; p != nil {
			if places[p.In] == nil {
				sequences = append(sequences, p.In)
			}
			places[p.In] = append(places[p.In], p)
		}
	}
	for _, in := range sequences {
		var m made
		if m.writes, m.done, err = in.Assemble(places[in], now); err == nil {
			all = append(all, m)
			if s.lost(m.writes, now) != nil {
				err = store.ErrOvertaken
			}
		}
		if err != nil {
			break
		}
	}
	if err == nil {
		return all, nil
	}
	for _, m := range all {
		if m.done != nil {
			m.done(0, err)
		}
	}
	return nil, err
}

func (s *Store) put(w *store.Write) {
	i, ok := s.find(w.Key)
	switch {
	case w.Delete && ok:
		s.entries = slices.Delete(s.entries, i, i+1)
	case w.Delete:
	default:
		e := clone(store.Entry{Key: w.Key, Value: w.Value, Version: s.version, Expires: w.Expires.Round(0)})
		if ok {
			s.entries[i] = e
		} else {
			s.entries = slices.Insert(s.entries, i, e)
		}
	}
}

// Watch implements store.Store.
func (s *Store) Watch(key []byte) (changed <-chan struct{}, cancel func()) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		gone := make(chan struct{})
		close(gone)
		return gone, func() {}
	}
	return s.watches.Watch(key)
}

// Now implements store.Store.
func (s *Store) Now(context.Context) (time.Time, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return time.Time{}, store.ErrClosed
	}
	return s.now(), nil
}

// Close implements store.Store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return store.ErrClosed
	}
	s.closed, s.entries = true, nil
	s.watches.WakeAll()
	return nil
}

// find returns where key stands, or would stand.
func (s *Store) find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(s.entries, key, func(e store.Entry, key []byte) int {
		return bytes.Compare(e.Key, key)
	})
}

func (s *Store) living(key []byte, now time.Time) *store.Entry {
	i, ok := s.find(key)
	if !ok || expired(&s.entries[i], now) {
		return nil
	}
	return &s.entries[i]
}

func expired(e *store.Entry, now time.Time) bool {
	return !e.Expires.IsZero() && !now.Before(e.Expires)
}

func clone(e store.Entry) store.Entry {
	e.Key, e.Value = bytes.Clone(e.Key), bytes.Clone(e.Value)
	return e
}

// Scan implements store.Store. It copies the range first, so that the caller may
// commit while it ranges.
func (s *Store) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	return func(yield func(store.Entry, error) bool) {
		entries, err := s.snapshot(ctx, r)
		for _, e := range entries {
			if err := ctx.Err(); err != nil {
				yield(store.Entry{}, err)
				return
			}
			if !yield(e, nil) {
				return
			}
		}
		if err != nil {
			yield(store.Entry{}, err)
		}
	}
}

func (s *Store) snapshot(ctx context.Context, r store.Range) ([]store.Entry, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return nil, store.ErrClosed
	}
	from, _ := s.find(r.From)
	to := len(s.entries)
	if len(r.To) > 0 {
		to, _ = s.find(r.To)
	}
	if from >= to {
		return nil, nil
	}
	now := s.now()
	var found []store.Entry
	for i := range to - from {
		at := from + i
		if r.Reverse {
			at = to - 1 - i
		}
		if expired(&s.entries[at], now) {
			continue
		}
		found = append(found, clone(s.entries[at]))
		if r.Limit > 0 && len(found) == r.Limit {
			break
		}
	}
	return slices.Clip(found), nil
}
