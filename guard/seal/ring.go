// Package seal keeps what a caller sent and got unreadable at rest (P8).
//
// A Ring holds two kinds of keys. The index key turns callers and execution ids
// into the store's keys; it is made with the store and never changes, so that a
// retry finds its execution for as long as that is kept. Sealing keys encrypt
// values; the newest seals, all of them open. They rotate while the ring is in use.
package seal

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// ErrOpen is returned for a sealed value that was altered, stands under another
// name than it was sealed for, or was sealed with a key that the ring does not hold.
var ErrOpen = errors.New("seal: the value does not open: altered, misplaced, or sealed with another key")

// Ring seals and opens values and derives the store's keys. It is safe for
// concurrent use.
type Ring struct {
	index    [keySize]byte
	keys     atomic.Pointer[keySet] // so that nobody who seals or opens waits for a rotation
	changing sync.Mutex             // held while another set is made and put in its place
	macs     sync.Pool              // of *macState
}

// keySet is what a rotation replaces. It never changes.
type keySet struct {
	newest  uint32
	sealing map[uint32]*sealingKey
}

// macState is what deriving takes, so that it allocates nothing.
type macState struct {
	mac hash.Hash
	in  []byte
	out [sha256.Size]byte
}

type sealingKey struct {
	raw     [keySize]byte
	created time.Time // zero where nobody has noted it
	aead    *xaes
}

// Generate makes a ring of fresh random keys.
func Generate() *Ring {
	var index [keySize]byte
	_, _ = rand.Read(index[:]) // never fails
	return newRing(index, &keySet{newest: 1, sealing: map[uint32]*sealingKey{1: freshKey()}})
}

// freshKey makes a random sealing key. Its time is written with whole seconds.
func freshKey() *sealingKey {
	var raw [keySize]byte
	_, _ = rand.Read(raw[:])
	return newKey(raw, time.Now().UTC().Truncate(time.Second))
}

func newKey(raw [keySize]byte, created time.Time) *sealingKey {
	return &sealingKey{raw: raw, created: created, aead: newXAES(raw)}
}

func newRing(index [keySize]byte, keys *keySet) *Ring {
	r := &Ring{index: index}
	r.keys.Store(keys)
	r.macs.New = func() any { return &macState{mac: hmac.New(sha256.New, r.index[:]), in: make([]byte, 0, 512)} }
	return r
}

// Key describes a sealing key and shows nothing of it.
type Key struct {
	// ID is its number. Higher ones are newer.
	ID uint32
	// Created is when it was made; zero where that is not known.
	Created time.Time
	// Newest marks the one that seals.
	Newest bool
}

// Keys lists the sealing keys, the newest last.
func (r *Ring) Keys() []Key {
	keys := r.keys.Load()
	var all []Key
	for _, id := range slices.Sorted(maps.Keys(keys.sealing)) {
		all = append(all, Key{ID: id, Created: keys.sealing[id].created, Newest: id == keys.newest})
	}
	return all
}

// KeyIDs lists the ids of the sealing keys, the newest last.
func (r *Ring) KeyIDs() []uint32 { return slices.Sorted(maps.Keys(r.keys.Load().sealing)) }

// KeyOf is the id of the key under which a value is sealed; 0, which no key has, for
// what is too short to be one.
func (*Ring) KeyOf(sealed []byte) uint32 {
	if len(sealed) < Overhead {
		return 0
	}
	return binary.BigEndian.Uint32(sealed)
}

// Overhead is the number of bytes by which a sealed value is longer than the plain one.
const Overhead = 4 + nonceSize + tagSize

// Seal appends the sealed plaintext to dst. name is the place of the value, usually
// its key in the store: it opens there only.
func (r *Ring) Seal(dst, plaintext, name []byte) []byte {
	keys := r.keys.Load()
	dst = binary.BigEndian.AppendUint32(dst, keys.newest)
	return keys.sealing[keys.newest].aead.seal(dst, plaintext, name)
}

// Open appends the plain value to dst, or returns ErrOpen.
func (r *Ring) Open(dst, sealed, name []byte) ([]byte, error) {
	if len(sealed) < Overhead {
		return nil, ErrOpen
	}
	key, ok := r.keys.Load().sealing[binary.BigEndian.Uint32(sealed)]
	if !ok {
		return nil, ErrOpen
	}
	plain, err := key.aead.open(dst, sealed[4:4+nonceSize], sealed[4+nonceSize:], name)
	if err != nil {
		return nil, ErrOpen
	}
	return plain, nil
}

// Index derives 32 bytes from parts under the index key: the same for the same
// parts and domain, and telling nothing of them to who lacks the key. Parts are
// length-prefixed, so that no two lists of parts run into each other.
func (r *Ring) Index(domain string, parts ...string) [32]byte {
	m := r.macs.Get().(*macState)
	defer r.macs.Put(m)
	m.mac.Reset()
	m.in = appendPart(m.in[:0], domain)
	for _, part := range parts {
		m.in = appendPart(m.in, part)
	}
	m.mac.Write(m.in)
	m.mac.Sum(m.out[:0])
	return m.out
}

func appendPart(b []byte, part string) []byte {
	b = binary.AppendUvarint(b, uint64(len(part)))
	return append(b, part...)
}
