package badger

import (
	"encoding/binary"
	"errors"
	"hash/crc32"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// A frame is what one group writes to the log: all that its winners change, or
// nothing. Numbers are big endian.
//
//	bytes 0-3    magic
//	bytes 4-7    CRC-32C of what follows, begun with the seed of the file
//	bytes 8-15   number of the frame, one more than that of the frame before
//	bytes 16-23  the highest version in it
//	bytes 24-27  length of the changes
//	bytes 28-31  zero
//	then         the changes, and zeros up to a multiple of frameAlign
//
// A change is a byte (deletes or not), two bytes length of the key, four bytes length
// of the value, the key and the value, both as Badger will have them.
const (
	frameMagic  = 0x61676631 // "agf1"
	frameHeader = 32
	frameAlign  = 8
	// maxFrame bounds the changes of one group. A single batch that store.Check
	// admits, with small bulk values only, is smaller.
	maxFrame = 6 << 20

	changeHeader = 7
	changePut    = 1
	changeDelete = 2
)

var errFrame = errors.New("a frame has an unknown form")

// frame is a frame as it was read.
type frame struct {
	seq     uint64
	version store.Version
	changes []byte
	size    int // in the file
}

// beginFrame makes room for the header.
func beginFrame(b []byte) []byte { return append(b[:0], make([]byte, frameHeader)...) }

// appendChange adds a change; a nil value deletes.
func appendChange(b, key, value []byte) []byte {
	kind := byte(changePut)
	if value == nil {
		kind = changeDelete
	}
	b = append(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	b = append(b, key...)
	return append(b, value...)
}

// endFrame fills in the header of b, which begins with room for it.
func endFrame(b []byte, seed uint32, seq uint64, version store.Version) []byte {
	length := len(b) - frameHeader
	for len(b)%frameAlign != 0 {
		b = append(b, 0)
	}
	binary.BigEndian.PutUint32(b, frameMagic)
	binary.BigEndian.PutUint64(b[8:], seq)
	binary.BigEndian.PutUint64(b[16:], uint64(version))
	binary.BigEndian.PutUint32(b[24:], uint32(length))
	binary.BigEndian.PutUint32(b[4:], crc32.Update(seed, castagnoli, b[8:frameHeader+length]))
	return b
}

// readFrame reads the frame at the begin of b; ok is false where none is whole.
func readFrame(b []byte, seed uint32) (f frame, ok bool) {
	if len(b) < frameHeader || binary.BigEndian.Uint32(b) != frameMagic {
		return frame{}, false
	}
	end := frameHeader + uint64(binary.BigEndian.Uint32(b[24:]))
	size := (end + frameAlign - 1) / frameAlign * frameAlign
	if size > uint64(len(b)) ||
		crc32.Update(seed, castagnoli, b[8:end]) != binary.BigEndian.Uint32(b[4:]) {
		return frame{}, false
	}
	return frame{
		seq:     binary.BigEndian.Uint64(b[8:]),
		version: store.Version(binary.BigEndian.Uint64(b[16:])),
		changes: b[frameHeader:end:end],
		size:    int(size),
	}, true
}

// each hands every change of the frame to do; they share its memory.
func (f *frame) each(do func(key, value []byte)) error {
	for b := f.changes; len(b) > 0; {
		if len(b) < changeHeader {
			return errFrame
		}
		key, value := int(binary.BigEndian.Uint16(b[1:])), int(binary.BigEndian.Uint32(b[3:]))
		end := changeHeader + key + value
		if end > len(b) {
			return errFrame
		}
		switch {
		case b[0] == changePut && value >= headerSize:
			do(b[changeHeader:changeHeader+key:changeHeader+key], b[changeHeader+key:end:end])
		case b[0] == changeDelete && value == 0:
			do(b[changeHeader:changeHeader+key:changeHeader+key], nil)
		default:
			return errFrame
		}
		b = b[end:]
	}
	return nil
}
