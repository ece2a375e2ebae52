package guard

import (
	"encoding/binary"
	"errors"
	"time"
)

// errEncoding is the error of a record or head that opened but cannot be read: it
// was written by a newer build, or by a fault of ours. It is never "not found".
var errEncoding = errors.New("guard: a record in the store cannot be read by this build")

// encoder writes fields as tag, length, bytes. Zero values are left out.
type encoder struct{ b []byte }

func (e *encoder) bytes(tag byte, v []byte) {
	if len(v) == 0 {
		return
	}
	e.b = append(e.b, tag)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)))
	e.b = append(e.b, v...)
}

func (e *encoder) string(tag byte, v string) {
	if v == "" {
		return
	}
	e.b = append(e.b, tag)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)))
	e.b = append(e.b, v...)
}

// marked writes v after a valueMark, so that it is written where it is empty too.
func (e *encoder) marked(tag byte, v string) {
	e.b = append(e.b, tag)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)+1))
	e.b = append(e.b, valueMark)
	e.b = append(e.b, v...)
}

func (e *encoder) int(tag byte, v int64) {
	if v == 0 {
		return
	}
	var buf [binary.MaxVarintLen64]byte
	e.bytes(tag, binary.AppendVarint(buf[:0], v))
}

func (e *encoder) bool(tag byte, v bool) {
	if v {
		e.int(tag, 1)
	}
}

func (e *encoder) time(tag byte, v time.Time) {
	if !v.IsZero() {
		e.int(tag, v.UnixNano())
	}
}

// decoder reads what encoder wrote. The first fault stays in err and ends next.
type decoder struct {
	b     []byte
	tag   byte
	field []byte
	err   error
}

func (d *decoder) next() bool {
	if d.err != nil || len(d.b) == 0 {
		return false
	}
	d.tag = d.b[0]
	size, n := binary.Uvarint(d.b[1:])
	if n <= 0 || size > uint64(len(d.b)-1-n) {
		d.err = errEncoding
		return false
	}
	d.field = d.b[1+n:][:size]
	d.b = d.b[1+n+int(size):]
	return true
}

func (d *decoder) bytes() []byte   { return d.field }
func (d *decoder) string() string  { return string(d.field) }
func (d *decoder) time() time.Time { return time.Unix(0, d.int()) }

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.field)
	if n != len(d.field) || n <= 0 {
		d.err = errEncoding
	}
	return v
}

func (d *decoder) fill(dst []byte) {
	if copy(dst, d.field) != len(dst) || len(d.field) != len(dst) {
		d.err = errEncoding
	}
}

// marked reads a value behind its valueMark.
func (d *decoder) marked() string {
	if len(d.field) == 0 || d.field[0] != valueMark {
		d.err = errEncoding
		return ""
	}
	return string(d.field[1:])
}
