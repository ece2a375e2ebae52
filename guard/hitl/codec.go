package hitl

import (
	"encoding/binary"
	"errors"
	"strings"
	"time"
	"unicode/utf8"
)

// errEncoding is the error of a record that opened but cannot be read: a fault of ours,
// since newer builds only add fields.
var errEncoding = errors.New("hitl: the encoding of an escalation is broken")

// Longest recorded forms, in bytes. They keep a record far below store.MaxValue.
const (
	maxSummary = 1024
	maxText    = 2048
	maxError   = 512
)

// shorten cuts s to at most that many bytes and leaves no half of a character.
func shorten(s string, most int) string {
	if len(s) > most {
		s = s[:most]
		for len(s) > 0 {
			if r, n := utf8.DecodeLastRuneInString(s); r != utf8.RuneError || n != 1 {
				break
			}
			s = s[:len(s)-1]
		}
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// The tags of an escalation's fields. A tag is never used again for something else;
// readers keep what they do not know. 32 and up are left for decisions. The id is not a
// field: it is in the record's name.
const (
	tagLevel = 1 + iota
	tagCause
	tagSummary
	tagWorkflow
	tagCaller
	tagCheckpoint
	tagRollback
	tagError
	tagExecution
	tagUpstream
	tagState
	tagOpened
	tagChanged
	tagAttempts
	tagLastError
	tagNext
)

// encode appends tag, length, bytes for each field that is not zero.
func (e *Escalation) encode(b []byte) []byte {
	b = appendInt(b, tagLevel, int64(e.Level))
	b = appendText(b, tagCause, string(e.Cause))
	b = appendText(b, tagSummary, e.Summary)
	b = appendText(b, tagWorkflow, e.Workflow)
	b = appendText(b, tagCaller, e.Caller)
	b = appendText(b, tagCheckpoint, e.Links.Checkpoint)
	b = appendText(b, tagRollback, e.Links.Rollback)
	b = appendText(b, tagError, e.Links.Error)
	b = appendText(b, tagExecution, e.Links.Execution)
	b = appendText(b, tagUpstream, e.Links.Upstream)
	b = appendInt(b, tagState, int64(e.State))
	b = appendTime(b, tagOpened, e.Opened)
	b = appendTime(b, tagChanged, e.Changed)
	b = appendInt(b, tagAttempts, int64(e.Delivery.Attempts))
	b = appendText(b, tagLastError, e.Delivery.LastError)
	b = appendTime(b, tagNext, e.Delivery.Next)
	return append(b, e.unknown...)
}

func appendText(b []byte, tag byte, v string) []byte {
	if v == "" {
		return b
	}
	b = binary.AppendUvarint(append(b, tag), uint64(len(v)))
	return append(b, v...)
}

func appendInt(b []byte, tag byte, v int64) []byte {
	if v == 0 {
		return b
	}
	var buf [binary.MaxVarintLen64]byte
	return appendText(b, tag, string(binary.AppendVarint(buf[:0], v)))
}

func appendTime(b []byte, tag byte, v time.Time) []byte {
	if v.IsZero() {
		return b
	}
	return appendInt(b, tag, v.UnixNano())
}

// decode reads what encode wrote, but for the id.
func decode(b []byte) (*Escalation, error) {
	e := new(Escalation)
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagLevel:
			e.Level = Level(d.small())
		case tagCause:
			e.Cause = Cause(d.field)
		case tagSummary:
			e.Summary = string(d.field)
		case tagWorkflow:
			e.Workflow = string(d.field)
		case tagCaller:
			e.Caller = string(d.field)
		case tagCheckpoint:
			e.Links.Checkpoint = string(d.field)
		case tagRollback:
			e.Links.Rollback = string(d.field)
		case tagError:
			e.Links.Error = string(d.field)
		case tagExecution:
			e.Links.Execution = string(d.field)
		case tagUpstream:
			e.Links.Upstream = string(d.field)
		case tagState:
			e.State = State(d.small())
		case tagOpened:
			e.Opened = d.time()
		case tagChanged:
			e.Changed = d.time()
		case tagAttempts:
			e.Delivery.Attempts = int(d.int())
		case tagLastError:
			e.Delivery.LastError = string(d.field)
		case tagNext:
			e.Delivery.Next = d.time()
		default:
			e.unknown = append(e.unknown, d.raw...)
		}
	}
	if d.err == nil && (e.Level == 0 || e.State == 0 || e.Delivery.Attempts < 0) {
		d.err = errEncoding
	}
	return e, d.err
}

// decoder walks over the fields. The first fault stays in err and ends next.
type decoder struct {
	b     []byte
	tag   byte
	field []byte
	raw   []byte // the field with its tag and length
	err   error
}

func (d *decoder) next() bool {
	if d.err != nil || len(d.b) == 0 {
		return false
	}
	size, n := binary.Uvarint(d.b[1:])
	if n <= 0 || size > uint64(len(d.b)-1-n) {
		d.err = errEncoding
		return false
	}
	end := 1 + n + int(size)
	d.tag, d.raw, d.field, d.b = d.b[0], d.b[:end], d.b[1+n:end], d.b[end:]
	return true
}

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.field)
	if n != len(d.field) || n <= 0 {
		d.err = errEncoding
	}
	return v
}

// small reads a level or a state.
func (d *decoder) small() uint8 {
	v := d.int()
	if v < 0 || v > 255 {
		d.err = errEncoding
	}
	return uint8(v)
}

func (d *decoder) time() time.Time { return time.Unix(0, d.int()).UTC() }
