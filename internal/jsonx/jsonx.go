// Package jsonx reads and writes JSON where encoding/json is not exact enough. It has a strict reader
// ([Scanner]), a view of a text that is known to be valid ([Object]), places in a text ([Pointer]), and the
// one text of a value ([Canonical], [AppendCanonical]). None of them rounds a number.
package jsonx

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// text is what JSON is read from.
type text interface{ ~string | ~[]byte }

// Escape decodes the escape that json begins with. size is its length in bytes, both halves of a surrogate
// pair together; 0 if it is no escape, or not all of it, and -1 for half of a pair, which many readers replace
// by one and the same character.
func Escape[T text](json T) (r rune, size int) {
	if len(json) < 2 || json[0] != '\\' {
		return 0, 0
	}
	if json[1] != 'u' {
		n := strings.IndexByte(`"\/bfnrt`, json[1])
		if n < 0 {
			return 0, 0
		}
		return rune("\"\\/\b\f\n\r\t"[n]), 2
	}
	r, ok := unit(json)
	if !ok {
		return 0, 0
	}
	if !utf16.IsSurrogate(r) {
		return r, unitSize
	}
	low, ok := unit(json[unitSize:])
	if r = utf16.DecodeRune(r, low); !ok || r == utf8.RuneError {
		return r, -1
	}
	return r, 2 * unitSize
}

const unitSize = len(`\u0000`)

// unit decodes \uXXXX at the beginning of json.
func unit[T text](json T) (r rune, ok bool) {
	if len(json) < unitSize || json[0] != '\\' || json[1] != 'u' {
		return 0, false
	}
	for i := 2; i < unitSize; i++ {
		c := json[i]
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// loneSurrogate is the place of an escape of half a surrogate pair in valid JSON, or -1.
func loneSurrogate(json []byte) int {
	for i := 0; i < len(json); i++ {
		if json[i] != '\\' {
			continue
		}
		_, size := Escape(json[i:])
		if size < 0 {
			return i
		}
		i += size - 1
	}
	return -1
}

// Valid reports whether all readers take a text for the same JSON, apart from equal names in one object: it
// is valid JSON (RFC 8259) and UTF-8, and has no lone surrogates.
func Valid(text []byte) bool {
	return utf8.Valid(text) && json.Valid(text) && loneSurrogate(text) < 0
}

// NumberSize is the length of the number that json begins with, 0 if there is none.
func NumberSize[T text](json T) int {
	i := 0
	if len(json) > 0 && json[0] == '-' {
		i++
	}
	from := i
	if i < len(json) && json[i] == '0' {
		i++
	} else {
		i = digits(json, i)
	}
	if i == from {
		return 0
	}
	if i < len(json) && json[i] == '.' {
		from = i + 1
		if i = digits(json, from); i == from {
			return 0
		}
	}
	if i < len(json) && (json[i] == 'e' || json[i] == 'E') {
		if i++; i < len(json) && (json[i] == '+' || json[i] == '-') {
			i++
		}
		from = i
		if i = digits(json, from); i == from {
			return 0
		}
	}
	return i
}

// digits is the place behind the digits that begin at i.
func digits[T text](json T, i int) int {
	for i < len(json) && '0' <= json[i] && json[i] <= '9' {
		i++
	}
	return i
}

// AppendText writes a string. Invalid UTF-8 becomes U+FFFD, and control characters become \u and four digits.
func AppendText(b []byte, v string) []byte { return appendText(b, v, "") }

// appendText writes the control characters in short, which is shortEscaped or empty, with one letter each.
func appendText(b []byte, v, short string) []byte {
	const hexDigits = "0123456789abcdef"
	b = append(b, '"')
	from := 0
	for i := 0; i < len(v); {
		c := v[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		size := 1
		if c >= utf8.RuneSelf {
			var r rune
			if r, size = utf8.DecodeRuneInString(v[i:]); r != utf8.RuneError || size > 1 {
				i += size
				continue
			}
		}
		b = append(b, v[from:i]...)
		switch at := strings.IndexByte(short, c); {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case at >= 0:
			b = append(b, '\\', "btnfr"[at])
		case c >= utf8.RuneSelf:
			b = utf8.AppendRune(b, utf8.RuneError)
		default:
			b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
		i += size
		from = i
	}
	b = append(b, v[from:]...)
	return append(b, '"')
}

// shortEscaped are the control characters that RFC 8785 writes with one letter.
const shortEscaped = "\b\t\n\f\r"

// AppendTexts writes an array of strings.
func AppendTexts(b []byte, vs []string) []byte {
	b = append(b, '[')
	for i, v := range vs {
		if i > 0 {
			b = append(b, ',')
		}
		b = AppendText(b, v)
	}
	return append(b, ']')
}

// ErrTrailing says that something stands behind a value.
var ErrTrailing = errors.New("something stands behind it")

// Decode decodes one JSON value strictly: it refuses members that into does not have, since a misspelled one
// must not be ignored, and whatever stands behind the value (ErrTrailing).
func Decode(from io.Reader, into any) error {
	d := json.NewDecoder(from)
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return ErrTrailing
	}
	return nil
}
