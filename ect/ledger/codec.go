package ledger

import (
	"encoding/binary"
	"errors"
	"time"
)

// errEncoding: the bytes were written by a newer build, or by a fault of ours.
var errEncoding = errors.New("ledger: an entry that this build cannot read")

// encodingVersion begins every encoded event and leaf.
const encodingVersion = 1

// The fields, in the order in which they are written. Zero values are left out.
const (
	tagIndex     = 1
	tagRecorded  = 2
	tagID        = 3
	tagWorkflow  = 4
	tagAction    = 5
	tagIssuer    = 6
	tagParent    = 7 // once for each
	tagTime      = 8
	tagKeepUntil = 9
	tagUnsigned  = 10
	tagPayload   = 11
)

const (
	fieldOverhead = 1 + 2  // a tag and a length below 16 KiB
	fixedOverhead = 1 << 8 // version, numbers, and the tags and lengths of single fields
)

func appendField(b []byte, tag byte, v string) []byte {
	if v == "" {
		return b
	}
	b = append(b, tag)
	b = binary.AppendUvarint(b, uint64(len(v)))
	return append(b, v...)
}

func appendInt(b []byte, tag byte, v int64) []byte {
	if v == 0 {
		return b
	}
	var buf [binary.MaxVarintLen64]byte
	n := binary.PutVarint(buf[:], v)
	return append(append(b, tag, byte(n)), buf[:n]...)
}

func appendTime(b []byte, tag byte, t time.Time) []byte {
	if t.IsZero() {
		return b
	}
	return appendInt(b, tag, t.UnixNano())
}

// encode appends e as an event that waits.
func (e *Event) encode(b []byte) []byte {
	return e.encodeFields(append(b, encodingVersion))
}

// encodeLeaf appends e as the entry at index.
func (e *Event) encodeLeaf(b []byte, index int64, recorded time.Time) []byte {
	b = append(b, encodingVersion)
	b = appendInt(b, tagIndex, index)
	b = appendTime(b, tagRecorded, recorded)
	return e.encodeFields(b)
}

func (e *Event) encodeFields(b []byte) []byte {
	b = appendField(b, tagID, e.ID)
	b = appendField(b, tagWorkflow, e.Workflow)
	b = appendField(b, tagAction, e.Action)
	b = appendField(b, tagIssuer, e.Issuer)
	for _, p := range e.Parents {
		b = appendField(b, tagParent, p)
	}
	b = appendTime(b, tagTime, e.Time)
	b = appendTime(b, tagKeepUntil, e.KeepUntil)
	if e.Unsigned {
		b = appendInt(b, tagUnsigned, 1)
	}
	b = append(b, tagPayload)
	b = binary.AppendUvarint(b, uint64(len(e.Payload)))
	return append(b, e.Payload...)
}

// decode reads what encode or encodeLeaf wrote and nothing else: fields stand in
// their order, and each once but for the parents. The entry does not share leaf's
// memory except for Leaf itself and Payload.
func decode(leaf []byte) (Entry, error) {
	e := Entry{Leaf: leaf}
	if len(leaf) == 0 || leaf[0] != encodingVersion {
		return e, errEncoding
	}
	b, last := leaf[1:], byte(0)
	for len(b) > 0 {
		tag := b[0]
		size, n := binary.Uvarint(b[1:])
		if n <= 0 || size > uint64(len(b)-1-n) || tag < last || tag == last && tag != tagParent {
			return e, errEncoding
		}
		field := b[1+n:][:size]
		b, last = b[1+n+int(size):], tag
		if !e.set(tag, field) {
			return e, errEncoding
		}
	}
	if last != tagPayload || e.ID == "" {
		return e, errEncoding
	}
	return e, nil
}

func (e *Entry) set(tag byte, field []byte) bool {
	ok := true
	number := func() int64 {
		v, n := binary.Varint(field)
		ok = n == len(field) && n > 0
		return v
	}
	switch tag {
	case tagIndex:
		e.Index = number()
	case tagRecorded:
		e.Recorded = time.Unix(0, number())
	case tagID:
		e.ID = string(field)
	case tagWorkflow:
		e.Workflow = string(field)
	case tagAction:
		e.Action = string(field)
	case tagIssuer:
		e.Issuer = string(field)
	case tagParent:
		e.Parents = append(e.Parents, string(field))
	case tagTime:
		e.Time = time.Unix(0, number())
	case tagKeepUntil:
		e.KeepUntil = time.Unix(0, number())
	case tagUnsigned:
		e.Unsigned = number() == 1
		ok = ok && e.Unsigned
	case tagPayload:
		e.Payload = field
	default:
		return false
	}
	return ok
}
