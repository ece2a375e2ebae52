// Package seal encrypts at rest what callers sent and received (P8).
//
// A Ring holds two kinds of keys. The index key turns callers and execution ids
// into the store's keys; it is made with the store and never changes, so that a
// retry finds its execution for as long as that is kept. Sealing keys encrypt
// values: the newest one seals, or the one that was chosen (Use), and all of them open.
// They rotate while the ring is in use.
package seal

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// ErrOpen is returned for a sealed value that was altered, is under another name than
// it was sealed for, or was sealed with a key that the ring does not have.
var ErrOpen = errors.New("seal: the value does not open: altered, misplaced, or sealed with another key")

// Ring seals and opens values and derives the store's keys. It is safe for concurrent use.
type Ring struct {
	index    [keySize]byte
	keys     atomic.Pointer[keySet] // so that nobody who seals or opens waits for a rotation
	changing sync.Mutex             // held while another set is made and put in its place
	macs     sync.Pool              // of *macState
}

// keySet is immutable; a rotation replaces it.
type keySet struct {
	newest  uint32
	seals   uint32 // the newest, unless it was chosen
	chosen  bool   // by Use
	sealing map[uint32]*sealingKey
}

// macState is pooled, so that Index allocates nothing.
type macState struct {
	mac hash.Hash
	in  []byte
	out [sha256.Size]byte
}

type sealingKey struct {
	raw     [keySize]byte
	created time.Time // zero if unknown
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
	if !keys.chosen {
		keys.seals = keys.newest
	}
	r.keys.Store(keys)
	r.macs.New = func() any { return &macState{mac: hmac.New(sha256.New, r.index[:]), in: make([]byte, 0, 512)} }
	return r
}

// Key describes a sealing key without its secret.
type Key struct {
	// ID is its number. Higher ones are newer.
	ID uint32
	// Created is when it was made; zero if unknown.
	Created time.Time
	// Seals marks the one that seals.
	Seals bool
}

// Keys lists the sealing keys by their ids.
func (r *Ring) Keys() []Key {
	keys := r.keys.Load()
	var all []Key
	for _, id := range slices.Sorted(maps.Keys(keys.sealing)) {
		all = append(all, Key{ID: id, Created: keys.sealing[id].created, Seals: id == keys.seals})
	}
	return all
}

// KeyIDs lists the ids of the sealing keys, the one that seals last.
func (r *Ring) KeyIDs() []uint32 {
	keys := r.keys.Load()
	ids := slices.Sorted(maps.Keys(keys.sealing))
	at := slices.Index(ids, keys.seals)
	return append(slices.Delete(ids, at, at+1), keys.seals)
}

// Check is the same for two keys only if they are one; empty for an id that the ring does not have. It
// reveals nothing of the key.
func (r *Ring) Check(id uint32) string {
	key := r.keys.Load().sealing[id]
	if key == nil {
		return ""
	}
	check, err := hkdf.Key(sha256.New, key.raw[:], nil, "agent-guard check", 16)
	if err != nil {
		panic("seal: " + err.Error()) // the length is a constant that HKDF allows
	}
	return hex.EncodeToString(check)
}

// Use makes a key seal from now on, and keeps those that come later from doing so until they are used as
// well. An older key than the one that was used last changes nothing. It returns false if the ring does not
// have the key.
func (r *Ring) Use(id uint32) bool {
	r.changing.Lock()
	defer r.changing.Unlock()
	keys := *r.keys.Load()
	if keys.sealing[id] == nil {
		return false
	}
	if !keys.chosen || id > keys.seals {
		keys.seals, keys.chosen = id, true
		r.keys.Store(&keys)
	}
	return true
}

// KeyOf is the id of the key under which a value is sealed; 0, which no key has, for
// what is too short to be one.
func (*Ring) KeyOf(sealed []byte) uint32 {
	if len(sealed) < overhead {
		return 0
	}
	return binary.BigEndian.Uint32(sealed)
}

// overhead is the number of bytes by which a sealed value is longer than the plain one.
const overhead = 4 + nonceSize + tagSize

// Seal appends the sealed plaintext to dst. name is usually the value's key in the store.
// The value opens under the same name only.
func (r *Ring) Seal(dst, plaintext, name []byte) []byte {
	keys := r.keys.Load()
	dst = binary.BigEndian.AppendUint32(dst, keys.seals)
	return keys.sealing[keys.seals].aead.seal(dst, plaintext, name)
}

// Open appends the plaintext to dst. With sealed[:0] it is opened where it stands, which saves
// memory, and sealed is gone. The error is ErrOpen.
func (r *Ring) Open(dst, sealed, name []byte) ([]byte, error) {
	if len(sealed) < overhead {
		return nil, ErrOpen
	}
	key, ok := r.keys.Load().sealing[binary.BigEndian.Uint32(sealed)]
	if !ok {
		return nil, ErrOpen
	}
	text := sealed[4+nonceSize:]
	if cap(dst) > 0 && &dst[:1][0] == &sealed[0] {
		dst = text[:0]
	}
	plain, err := key.aead.open(dst, sealed[4:4+nonceSize], text, name)
	if err != nil {
		return nil, ErrOpen
	}
	return plain, nil
}

// Index derives 32 bytes from domain and parts under the index key: a keyed hash, which
// reveals nothing without the key. Parts are length-prefixed, so that different lists of
// parts never have the same encoding.
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

const (
	keySize   = 32
	nonceSize = 24
	tagSize   = 16
)

// xaes is XAES-256-GCM (C2SP): AES-256-GCM under a key derived from the first half
// of a 192-bit nonce. Random nonces of plain GCM wear a key out after 2^32 records,
// which a busy gateway writes in weeks; these do not.
type xaes struct {
	block cipher.Block
	k1    [aes.BlockSize]byte
	// current is the derived key that seals now: deriving one for every value would
	// cost more than the sealing.
	current atomic.Pointer[derived]
}

// derived is AES-256-GCM under the key that the first half of a nonce gives.
type derived struct {
	half [12]byte
	aead cipher.AEAD
	used atomic.Uint32
}

// maxUses is how many values are sealed under one derived key. The other half of
// their nonces is random: after 2^24 of them the chance that two are equal is 2^-49.
const maxUses = 1 << 24

func newXAES(key [keySize]byte) *xaes {
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic("seal: " + err.Error()) // 32 bytes are always a key
	}
	x := &xaes{block: block}
	block.Encrypt(x.k1[:], x.k1[:])
	var msb byte
	for i := len(x.k1) - 1; i >= 0; i-- {
		x.k1[i], msb = x.k1[i]<<1|msb, x.k1[i]>>7
	}
	x.k1[len(x.k1)-1] ^= msb * 0x87
	return x
}

func (x *xaes) aead(nonce []byte) cipher.AEAD {
	var key [keySize]byte
	for half := range 2 {
		part := key[half*aes.BlockSize:][:aes.BlockSize]
		part[1], part[2] = byte(half+1), 'X'
		copy(part[4:], nonce[:12])
		for i, b := range x.k1 {
			part[i] ^= b
		}
		x.block.Encrypt(part, part)
	}
	block, err := aes.NewCipher(key[:])
	if err != nil {
		panic("seal: " + err.Error())
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic("seal: " + err.Error())
	}
	return aead
}

// seal appends a random nonce and the sealed plaintext to dst.
func (x *xaes) seal(dst, plaintext, data []byte) []byte {
	d := x.current.Load()
	if d == nil || d.used.Add(1) > maxUses {
		var nonce [nonceSize]byte
		_, _ = rand.Read(nonce[:]) // never fails
		d = &derived{half: [12]byte(nonce[:12]), aead: x.aead(nonce[:])}
		d.used.Store(1)
		x.current.Store(d)
	}
	dst = append(dst, d.half[:]...)
	at := len(dst)
	dst = append(dst, make([]byte, nonceSize-len(d.half))...)
	_, _ = rand.Read(dst[at:])
	return d.aead.Seal(dst, dst[at:], plaintext, data)
}

func (x *xaes) open(dst, nonce, sealed, data []byte) ([]byte, error) {
	aead := cipher.AEAD(nil)
	if d := x.current.Load(); d != nil && string(d.half[:]) == string(nonce[:12]) {
		aead = d.aead
	} else {
		aead = x.aead(nonce)
	}
	return aead.Open(dst, nonce[12:nonceSize], sealed, data)
}

// ringFile is the text of a ring. Binary members are standard base64.
type ringFile struct {
	Version int          `json:"version"`
	Index   []byte       `json:"index"`
	Newest  uint32       `json:"newest"`
	Sealing []sealingRow `json:"sealing"`
}

type sealingRow struct {
	ID      uint32 `json:"id"`
	Created string `json:"created,omitempty"` // RFC 3339
	Key     []byte `json:"key"`
}

// MarshalText returns the ring, secrets included, as the JSON that Parse reads.
func (r *Ring) MarshalText() ([]byte, error) {
	keys := r.keys.Load()
	f := ringFile{Version: 1, Index: r.index[:], Newest: keys.newest}
	for _, id := range slices.Sorted(maps.Keys(keys.sealing)) {
		row := sealingRow{ID: id, Key: keys.sealing[id].raw[:]}
		if created := keys.sealing[id].created; !created.IsZero() {
			row.Created = created.Format(time.RFC3339)
		}
		f.Sealing = append(f.Sealing, row)
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
	keys := &keySet{newest: f.Newest, sealing: make(map[uint32]*sealingKey, len(f.Sealing))}
	for _, row := range f.Sealing {
		if err := keys.add(row); err != nil {
			return nil, err
		}
	}
	if keys.sealing[f.Newest] == nil {
		return nil, fmt.Errorf("seal: the newest sealing key, %d, is missing", f.Newest)
	}
	return newRing([keySize]byte(f.Index), keys), nil
}

// add reads one row into a set that is being made.
func (k *keySet) add(row sealingRow) error {
	if len(row.Key) != keySize {
		return fmt.Errorf("seal: sealing key %d has %d bytes, it needs %d", row.ID, len(row.Key), keySize)
	}
	if row.ID == 0 {
		return errors.New("seal: a sealing key has no id; they are numbered from 1")
	}
	if k.sealing[row.ID] != nil || row.ID > k.newest {
		return fmt.Errorf("seal: sealing key %d stands twice or is newer than the newest", row.ID)
	}
	var created time.Time
	if row.Created != "" {
		at, err := time.Parse(time.RFC3339, row.Created)
		if created = at.UTC(); err != nil || created.Year() < 1 || created.Year() > 9999 { // which could not be written again
			return fmt.Errorf("seal: the time at which sealing key %d was created is not in the form of RFC 3339", row.ID)
		}
	}
	k.sealing[row.ID] = newKey([keySize]byte(row.Key), created)
	return nil
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
	sealing := newKey(part("sealing 1"), time.Time{})
	return newRing(part("index"), &keySet{newest: 1, sealing: map[uint32]*sealingKey{1: sealing}}), nil
}
