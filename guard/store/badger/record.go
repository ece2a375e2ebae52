package badger

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Keys in Badger carry one byte in front that tells users' keys from our own, and
// keeps the former clear of the prefix that Badger reserves for itself.
const (
	userSpace   = 'k'
	afterUser   = userSpace + 1
	markerSpace = 'm'
)

func userKey(key []byte) []byte {
	k := make([]byte, 1+len(key))
	k[0] = userSpace
	copy(k[1:], key)
	return k
}

// A value in Badger is a header and then the user's value, or a pointer to it.
//
//	byte 0      flags
//	bytes 1-8   version, big endian
//	bytes 9-16  expiry, Unix seconds; with bytes 17-20, nanoseconds
//
// The version stands here because batches of one group share Badger's timestamp.
const (
	headerSize = 21

	flagExpires = 1 << 0
	flagBulk    = 1 << 1
	// flagInline marks a bulk value that stands here itself: in the log and the
	// overlay, not in Badger.
	flagInline = 1 << 2
	knownFlags = flagExpires | flagBulk | flagInline
)

type record struct {
	version store.Version
	expires time.Time
	bulk    bool   // value is a pointer
	value   []byte // the user's value, or the pointer
}

// putHeader writes everything but the version, which only the committer knows.
func putHeader(b []byte, expires time.Time, flags byte) {
	b[0] |= flags
	if !expires.IsZero() {
		b[0] |= flagExpires
		binary.BigEndian.PutUint64(b[9:], uint64(expires.Unix()))
		binary.BigEndian.PutUint32(b[17:], uint32(expires.Nanosecond()))
	}
}

func putVersion(b []byte, v store.Version) {
	binary.BigEndian.PutUint64(b[1:], uint64(v))
}

var errRecord = errors.New("record has an unknown form")

// decode reads a value of Badger; the record shares its memory.
func decode(b []byte) (record, error) {
	if len(b) < headerSize || b[0]&^knownFlags != 0 {
		return record{}, errRecord
	}
	r := record{
		version: store.Version(binary.BigEndian.Uint64(b[1:])),
		bulk:    b[0]&(flagBulk|flagInline) == flagBulk,
		value:   b[headerSize:],
	}
	if b[0]&flagExpires != 0 {
		r.expires = time.Unix(int64(binary.BigEndian.Uint64(b[9:])), int64(binary.BigEndian.Uint32(b[17:])))
	}
	if r.bulk && len(r.value) != pointerSize {
		return record{}, errRecord
	}
	return r, nil
}

func (r *record) living(now time.Time) bool {
	return r.expires.IsZero() || now.Before(r.expires)
}

// pointer says where a bulk value lies.
type pointer struct {
	segment int64 // the end of its time partition, Unix seconds
	offset  uint64
	length  uint32 // of the value
	sum     uint32 // CRC-32C of key and value
}

const pointerSize = 24

func (p pointer) put(b []byte) {
	binary.BigEndian.PutUint64(b, uint64(p.segment))
	binary.BigEndian.PutUint64(b[8:], p.offset)
	binary.BigEndian.PutUint32(b[16:], p.length)
	binary.BigEndian.PutUint32(b[20:], p.sum)
}

func readPointer(b []byte) pointer {
	return pointer{
		segment: int64(binary.BigEndian.Uint64(b)),
		offset:  binary.BigEndian.Uint64(b[8:]),
		length:  binary.BigEndian.Uint32(b[16:]),
		sum:     binary.BigEndian.Uint32(b[20:]),
	}
}
