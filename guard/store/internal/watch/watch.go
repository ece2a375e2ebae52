// Package watch is the in-process half of store.Store's Watch: channels by key
// that are closed when a commit touched the key.
package watch

import (
	"hash/maphash"
	"sync"
)

const shards = 64

// Keys holds the watches of one store. The zero value is not ready; see New.
type Keys struct {
	seed   maphash.Seed
	shards [shards]shard
}

type shard struct {
	mu   sync.Mutex
	keys map[string]map[*waiter]struct{}
}

type waiter struct {
	changed chan struct{}
}

// New returns an empty set of watches.
func New() *Keys {
	return &Keys{seed: maphash.MakeSeed()}
}

// Watch returns a channel that the next Wake of key closes. cancel forgets it and
// may be called more than once.
func (k *Keys) Watch(key []byte) (changed <-chan struct{}, cancel func()) {
	s := k.shard(key)
	name := string(key)
	w := &waiter{changed: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil {
		s.keys = make(map[string]map[*waiter]struct{})
	}
	if s.keys[name] == nil {
		s.keys[name] = make(map[*waiter]struct{})
	}
	s.keys[name][w] = struct{}{}
	return w.changed, func() { s.forget(name, w) }
}

// Wake closes the channels of all watches of key. The change must be readable
// before the call, or a waiter reads the old state and sleeps on.
func (k *Keys) Wake(key []byte) {
	s := k.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	waiters, ok := s.keys[string(key)]
	if !ok {
		return
	}
	for w := range waiters {
		close(w.changed)
	}
	delete(s.keys, string(key))
}

// WakeAll closes every channel, for a store that closes or fails.
func (k *Keys) WakeAll() {
	for i := range k.shards {
		s := &k.shards[i]
		s.mu.Lock()
		for _, waiters := range s.keys {
			for w := range waiters {
				close(w.changed)
			}
		}
		clear(s.keys)
		s.mu.Unlock()
	}
}

// Len is the number of watches that wait.
func (k *Keys) Len() int {
	n := 0
	for i := range k.shards {
		s := &k.shards[i]
		s.mu.Lock()
		for _, waiters := range s.keys {
			n += len(waiters)
		}
		s.mu.Unlock()
	}
	return n
}

func (k *Keys) shard(key []byte) *shard {
	return &k.shards[maphash.Bytes(k.seed, key)%shards]
}

func (s *shard) forget(name string, w *waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	waiters := s.keys[name]
	delete(waiters, w)
	if len(waiters) == 0 {
		delete(s.keys, name)
	}
}
