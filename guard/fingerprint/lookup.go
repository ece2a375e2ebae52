package fingerprint

import (
	"errors"
	"io"
	"strings"
	"sync"
)

// maxValue is the longest string that Lookup gives, in bytes.
const maxValue = 64 << 10

// Why a Lookup that could read the body has no answer. The texts name no content
// of the body.
var (
	// ErrNotJSON: the body is not JSON: invalid as of RFC 8259, invalid UTF-8,
	// lone surrogates, or nested more than 512 deep.
	ErrNotJSON = errors.New("the body is not valid JSON")
	// ErrNotScalar: the value is an object, an array, true or false.
	ErrNotScalar = errors.New("the value is neither a string nor a number")
	// ErrAmbiguous: a name on the way occurs twice in its object, so that the
	// upstream may see another value than we do.
	ErrAmbiguous = errors.New("the value's name occurs more than once in its object")
	// ErrValueTooLong: the string is longer than 64 KiB.
	ErrValueTooLong = errors.New("the value is too long")
)

// finder looks for one value in a document; it is pooled.
type finder struct {
	src     source
	scratch []byte
	tokens  []string
	value   string
	found   bool
	err     error
}

var finders = sync.Pool{New: func() any { return new(finder) }}

// Lookup gives the string, or the number as it is written, at p in a JSON body of
// size bytes. An empty body, an absent value and null are not found. The errors
// are the four of this package and, if the body cannot be read, its own.
// Like Sum it reads the body in one pass, wholly, and does not hold it.
func Lookup(body io.ReaderAt, size int64, p Pointer) (value string, found bool, err error) {
	if size == 0 {
		return "", false, nil
	}
	f := finders.Get().(*finder)
	defer f.free()
	f.src.reset(body, size)
	f.tokens = p.tokens
	ok := f.walk(0, true) && f.src.space() == 0 && !f.src.more()
	switch {
	case f.src.err != nil:
		return "", false, f.src.err
	case f.err != nil:
		return "", false, f.err
	case !ok:
		return "", false, ErrNotJSON
	}
	return f.value, f.found, nil
}

func (f *finder) free() {
	f.src.reset(nil, 0)
	f.tokens, f.value, f.found, f.err = nil, "", false, nil
	if cap(f.scratch) > maxKept {
		f.scratch = nil
	}
	finders.Put(f)
}

// walk takes the next value. on: the tokens before depth led here.
func (f *finder) walk(depth int, on bool) (ok bool) {
	hit := on && depth == len(f.tokens)
	switch f.src.space() {
	case '{':
		f.src.i++
		return f.scalar(!hit) && depth < maxDepth && f.object(depth, on)
	case '[':
		f.src.i++
		return f.scalar(!hit) && depth < maxDepth && f.array(depth, on)
	case '"':
		f.src.i++
		if !hit {
			f.scratch, ok = f.src.skipText(f.scratch)
			return ok
		}
		done := false
		if f.scratch, done, ok = f.src.text(f.scratch[:0], maxValue+1); ok && !done {
			f.err = ErrValueTooLong
		}
		f.value, f.found = string(f.scratch), true
		return ok && done
	case 't':
		return f.scalar(!hit) && f.src.literal("true")
	case 'f':
		return f.scalar(!hit) && f.src.literal("false")
	case 'n':
		return f.src.literal("null")
	default:
		tok, ok := f.src.number()
		if ok && hit {
			f.value, f.found = string(tok), true
		}
		return ok
	}
}

// scalar notes that the value looked for is none, unless ok.
func (f *finder) scalar(ok bool) bool {
	if !ok {
		f.err = ErrNotScalar
	}
	return ok
}

func (f *finder) array(depth int, on bool) bool {
	want := int64(-1)
	if on {
		if i, ok := index(f.tokens[depth]); ok {
			want = i
		}
	}
	if f.src.space() == ']' {
		f.src.i++
		return true
	}
	for i := int64(0); ; i++ {
		if !f.walk(depth+1, i == want) {
			return false
		}
		switch f.src.space() {
		case ',':
			f.src.i++
		case ']':
			f.src.i++
			return true
		default:
			return false
		}
	}
}

func (f *finder) object(depth int, on bool) bool {
	if f.src.space() == '}' {
		f.src.i++
		return true
	}
	seen := false
	for {
		if f.src.space() != '"' {
			return false
		}
		f.src.i++
		match, ok := f.name(depth, on)
		if !ok || f.src.space() != ':' {
			return false
		}
		f.src.i++
		if match && seen {
			f.err = ErrAmbiguous
			return false
		}
		seen = seen || match
		if !f.walk(depth+1, match) {
			return false
		}
		switch f.src.space() {
		case ',':
			f.src.i++
		case '}':
			f.src.i++
			return true
		default:
			return false
		}
	}
}

// name takes a member's name and reports whether it is the next token.
func (f *finder) name(depth int, on bool) (match, ok bool) {
	rest := ""
	if on {
		rest = f.tokens[depth]
	}
	for done := false; !done; {
		if f.scratch, done, ok = f.src.text(f.scratch[:0], 1<<10); !ok {
			return false, false
		}
		on = on && strings.HasPrefix(rest, string(f.scratch))
		if on {
			rest = rest[len(f.scratch):]
		}
	}
	return on && rest == "", true
}
