// Package seal keeps what a caller sent and got unreadable at rest (P8).
//
// A Ring holds two kinds of keys. The index key turns callers and execution ids
// into the store's keys; it is made with the store and never changes, so that a
// retry finds its execution for as long as that is kept. Sealing keys encrypt
// values; the newest seals, all of them open.
package seal

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"maps"
	"slices"
	"sync"
)

// ErrOpen is returned for a sealed value that was altered, stands under another
// name than it was sealed for, or was sealed with a key that the ring does not hold.
var ErrOpen = errors.New("seal: the value does not open: altered, misplaced, or sealed with another key")

// Ring seals and opens values and derives the store's keys. It is safe for
// concurrent use.
type Ring struct {
	index   [keySize]byte
	newest  uint32
	sealing map[uint32]*sealingKey
	macs    sync.Pool // of *macState
}

// macState is what deriving takes, so that it allocates nothing.
type macState struct {
	mac hash.Hash
	in  []byte
	out [sha256.Size]byte
}

type sealingKey struct {
	raw  [keySize]byte
	aead *xaes
}

// Generate makes a ring of fresh random keys.
func Generate() *Ring {
	var index, sealing [keySize]byte
	_, _ = rand.Read(index[:]) // never fails
	_, _ = rand.Read(sealing[:])
	return newRing(index, 1, map[uint32][keySize]byte{1: sealing})
}

func newRing(index [keySize]byte, newest uint32, sealing map[uint32][keySize]byte) *Ring {
	r := &Ring{index: index, newest: newest, sealing: make(map[uint32]*sealingKey, len(sealing))}
	for id, key := range sealing {
		r.sealing[id] = &sealingKey{raw: key, aead: newXAES(key)}
	}
	r.macs.New = func() any { return &macState{mac: hmac.New(sha256.New, r.index[:]), in: make([]byte, 0, 512)} }
	return r
}

// ringFile is the text of a ring. Binary members are standard base64.
type ringFile struct {
	Version int          `json:"version"`
	Index   []byte       `json:"index"`
	Newest  uint32       `json:"newest"`
	Sealing []sealingRow `json:"sealing"`
}

type sealingRow struct {
	ID  uint32 `json:"id"`
	Key []byte `json:"key"`
}

// MarshalText writes the ring as the JSON that Parse reads.
func (r *Ring) MarshalText() ([]byte, error) {
	f := ringFile{Version: 1, Index: r.index[:], Newest: r.newest}
	for _, id := range slices.Sorted(maps.Keys(r.sealing)) {
		f.Sealing = append(f.Sealing, sealingRow{ID: id, Key: r.sealing[id].raw[:]})
	}
	text, err := json.MarshalIndent(f, "", "\t")
	return append(text, '\n'), err
}

// Parse reads a ring: the JSON of MarshalText, or the standard base64 of 32 random
// bytes (`openssl rand -base64 32`), from which both keys are derived. Errors say
// what is wrong and never show key material.
func Parse(text []byte) (*Ring, error) {
	text = bytes.TrimSpace(text)
	if len(text) == 0 {
		return nil, errors.New("seal: the key is empty; give the key ring's JSON or 32 random bytes in base64")
	}
	if text[0] != '{' {
		return derive(text)
	}
	var f ringFile
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return nil, errors.New("seal: the key ring is not the JSON that the gateway wrote")
	}
	switch {
	case f.Version != 1:
		return nil, fmt.Errorf("seal: key ring of version %d; this build reads version 1", f.Version)
	case len(f.Index) != keySize:
		return nil, fmt.Errorf("seal: the index key has %d bytes, it needs %d", len(f.Index), keySize)
	}
	sealing := make(map[uint32][keySize]byte, len(f.Sealing))
	for _, row := range f.Sealing {
		if len(row.Key) != keySize {
			return nil, fmt.Errorf("seal: sealing key %d has %d bytes, it needs %d", row.ID, len(row.Key), keySize)
		}
		if _, twice := sealing[row.ID]; twice || row.ID > f.Newest {
			return nil, fmt.Errorf("seal: sealing key %d stands twice or is newer than the newest", row.ID)
		}
		sealing[row.ID] = [keySize]byte(row.Key)
	}
	if _, ok := sealing[f.Newest]; !ok {
		return nil, fmt.Errorf("seal: the newest sealing key, %d, is missing", f.Newest)
	}
	return newRing([keySize]byte(f.Index), f.Newest, sealing), nil
}

func derive(text []byte) (*Ring, error) {
	secret, err := base64.StdEncoding.DecodeString(string(text))
	if err != nil || len(secret) != keySize {
		return nil, errors.New("seal: the key is neither a key ring's JSON nor 32 bytes in standard base64; make one with `openssl rand -base64 32`")
	}
	part := func(info string) [keySize]byte {
		key, err := hkdf.Key(sha256.New, secret, nil, "agent-guard "+info, keySize)
		if err != nil {
			panic("seal: " + err.Error()) // the length is a constant that HKDF allows
		}
		return [keySize]byte(key)
	}
	return newRing(part("index"), 1, map[uint32][keySize]byte{1: part("sealing 1")}), nil
}

// Overhead is the number of bytes by which a sealed value is longer than the plain one.
const Overhead = 4 + nonceSize + tagSize

// Seal appends the sealed plaintext to dst. name is the place of the value, usually
// its key in the store: it opens there only.
func (r *Ring) Seal(dst, plaintext, name []byte) []byte {
	dst = binary.BigEndian.AppendUint32(dst, r.newest)
	return r.sealing[r.newest].aead.seal(dst, plaintext, name)
}

// Open appends the plain value to dst, or returns ErrOpen.
func (r *Ring) Open(dst, sealed, name []byte) ([]byte, error) {
	if len(sealed) < Overhead {
		return nil, ErrOpen
	}
	key, ok := r.sealing[binary.BigEndian.Uint32(sealed)]
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
