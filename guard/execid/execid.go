// Package execid reads execution ids: the caller's names for one intended
// effect, as they arrive in Idempotency-Key and fields like it.
package execid

import (
	"errors"
	"strings"
)

// MaxLen is the greatest length of an execution id in bytes, after unquoting.
const MaxLen = 255

// What can be wrong with an id. The texts go to callers as the detail of a 400
// problem: they say what is wrong and what would be right, and never repeat the
// value, which may be a secret (P8).
var (
	// ErrMissing: the request has no such field.
	ErrMissing = errors.New("the field with the execution id is missing; send it once, with one id")
	// ErrRepeated: the field came on more than one line.
	ErrRepeated = errors.New("the field with the execution id was sent more than once; send exactly one field line")
	// ErrList: an unquoted value holds a comma, so that it may be two values
	// which something on the way has joined.
	ErrList = errors.New("the execution id looks like a comma-separated list; send one id, or put it in double quotes if the comma belongs to it")
	// ErrEmpty: nothing is left after trimming and unquoting.
	ErrEmpty = errors.New("the execution id is empty; send 1 to 255 visible ASCII characters")
	// ErrTooLong: more than MaxLen bytes.
	ErrTooLong = errors.New("the execution id is too long; at most 255 characters are allowed, quotes not counted")
	// ErrCharacter: a space, a control character or something outside ASCII.
	ErrCharacter = errors.New("the execution id holds a character that is not allowed; use visible ASCII characters only, without spaces")
	// ErrUnterminated: the closing double quote is missing.
	ErrUnterminated = errors.New("the quoted execution id does not end; close it with a double quote, or leave both quotes away")
	// ErrEscape: a backslash before something else than a quote or a backslash.
	ErrEscape = errors.New(`the quoted execution id has a bad escape; after a backslash only a double quote or a backslash may follow`)
	// ErrTrailing: parameters, a further list member or other text follows.
	ErrTrailing = errors.New("something follows the closing quote of the execution id; send the quoted id alone, without parameters or further values")
)

// ParseHeader gives the id that the field lines of one header carry. There must
// be exactly one line. A structured-field String (RFC 9651, section 3.3.3) and
// the raw form that most clients send name one and the same id; otherwise a
// client that changes its library between two attempts would run twice (P1).
// The error is one of this package's.
func ParseHeader(lines []string) (id string, err error) {
	switch len(lines) {
	case 0:
		return "", ErrMissing
	case 1:
	default:
		return "", ErrRepeated
	}
	v := strings.Trim(lines[0], " \t")
	if strings.HasPrefix(v, `"`) {
		id, err = unquote(v[1:])
		if err != nil {
			return "", err
		}
	} else {
		id = v
		if strings.IndexByte(id, ',') >= 0 {
			return "", ErrList
		}
	}
	if err := Check(id); err != nil {
		return "", err
	}
	return id, nil
}

// Check says whether id, already unquoted and from whatever source, is 1 to
// MaxLen bytes of visible ASCII (0x21 to 0x7e). The error is one of this
// package's.
func Check(id string) error {
	if id == "" {
		return ErrEmpty
	}
	if len(id) > MaxLen {
		return ErrTooLong
	}
	for i := range len(id) {
		if id[i] < 0x21 || id[i] > 0x7e {
			return ErrCharacter
		}
	}
	return nil
}

// unquote reads the rest of a structured-field String after its opening quote.
func unquote(v string) (string, error) {
	end := strings.IndexAny(v, `"\`)
	if end >= 0 && v[end] == '"' {
		if end != len(v)-1 {
			return "", ErrTrailing
		}
		return v[:end], nil
	}
	var b strings.Builder
	for i := 0; i < len(v); i++ {
		switch c := v[i]; c {
		case '"':
			if i != len(v)-1 {
				return "", ErrTrailing
			}
			return b.String(), nil
		case '\\':
			i++
			if i == len(v) {
				return "", ErrUnterminated
			}
			if v[i] != '"' && v[i] != '\\' {
				return "", ErrEscape
			}
			b.WriteByte(v[i])
		default:
			b.WriteByte(c)
		}
	}
	return "", ErrUnterminated
}
