package checkpoint

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"time"
)

// errEncoding is the error of what opened but cannot be read: written by a newer
// build, or by a fault of ours.
var errEncoding = errors.New("checkpoint: a record in the store cannot be read by this build")

// saltSize is the number of random bytes before the fields of a snapshot or a result,
// so that their hash tells nothing to who can guess the fields.
const saltSize = 32

func salted(size int) encoder {
	e := encoder{make([]byte, saltSize, saltSize+size)}
	_, _ = rand.Read(e.b) // never fails
	return e
}

func unsalted(b []byte) (decoder, error) {
	if len(b) < saltSize {
		return decoder{}, errEncoding
	}
	return decoder{b: b[saltSize:]}, nil
}

// encoder writes fields as tag, length, bytes, as the guard's records are. Zero values
// are left out.
type encoder struct{ b []byte }

// field writes v where it is empty too.
func field[T ~string | ~[]byte](e *encoder, tag byte, v T) {
	e.b = append(e.b, tag)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)))
	e.b = append(e.b, v...)
}

func (e *encoder) bytes(tag byte, v []byte) {
	if len(v) > 0 {
		field(e, tag, v)
	}
}

func (e *encoder) string(tag byte, v string) {
	if v != "" {
		field(e, tag, v)
	}
}

func (e *encoder) int(tag byte, v int64) {
	if v != 0 {
		var buf [binary.MaxVarintLen64]byte
		field(e, tag, binary.AppendVarint(buf[:0], v))
	}
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

// header writes each name, and behind it its values, which may be empty.
func (e *encoder) header(name, value byte, h map[string][]string) {
	for _, k := range slices.Sorted(maps.Keys(h)) {
		field(e, name, k)
		for _, v := range h[k] {
			field(e, value, v)
		}
	}
}

// decoder reads what encoder wrote. The first fault stays in err and ends next.
type decoder struct {
	b     []byte
	tag   byte
	field []byte
	name  string // of the header field whose values come
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

func (d *decoder) string() string  { return string(d.field) }
func (d *decoder) bool() bool      { return d.int() != 0 }
func (d *decoder) time() time.Time { return time.Unix(0, d.int()) }

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.field)
	if n != len(d.field) || n <= 0 {
		d.err = errEncoding
	}
	return v
}

func (d *decoder) fill(dst []byte) {
	if len(d.field) != len(dst) {
		d.err = errEncoding
		return
	}
	copy(dst, d.field)
}

func (d *decoder) headerName(h *map[string][]string) {
	if *h == nil {
		*h = map[string][]string{}
	}
	d.name = d.string()
	(*h)[d.name] = nil
}

func (d *decoder) headerValue(h map[string][]string) {
	if h == nil {
		d.err = errEncoding
		return
	}
	h[d.name] = append(h[d.name], d.string())
}

// sub reads a field that is fields itself.
func (d *decoder) sub(read func(*decoder)) {
	inner := decoder{b: d.field}
	read(&inner)
	if inner.err != nil {
		d.err = inner.err
	}
}
