package fingerprint

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Pointer names one place in a JSON document (RFC 6901). The zero Pointer is the
// whole document. A Pointer does not change.
type Pointer struct{ tokens []string }

var (
	errPointerUTF8 = errors.New("JSON pointer is not valid UTF-8")
	unescape       = strings.NewReplacer("~1", "/", "~0", "~")
	escape         = strings.NewReplacer("~", "~0", "/", "~1")
)

// ParsePointer reads a JSON pointer: "" for the whole document, else a "/" before
// every member name or array index, with "~1" for "/" and "~0" for "~" in names.
// The URI form ("#/a") is refused.
func ParsePointer(s string) (Pointer, error) {
	switch {
	case s == "":
		return Pointer{}, nil
	case !utf8.ValidString(s):
		return Pointer{}, errPointerUTF8
	case s[0] == '#':
		return Pointer{}, fmt.Errorf("JSON pointer %q is in URI form: leave the '#' away", s)
	case s[0] != '/':
		return Pointer{}, fmt.Errorf("JSON pointer %q must be empty or begin with '/'", s)
	}
	tokens := strings.Split(s[1:], "/")
	for i, t := range tokens {
		for j := range len(t) {
			if t[j] == '~' && (j+1 == len(t) || (t[j+1] != '0' && t[j+1] != '1')) {
				return Pointer{}, fmt.Errorf("JSON pointer %q: '~' must be followed by 0 (for '~') or 1 (for '/')", s)
			}
		}
		tokens[i] = unescape.Replace(t)
	}
	return Pointer{tokens}, nil
}

// String gives the pointer as ParsePointer reads it.
func (p Pointer) String() string {
	var b strings.Builder
	for _, t := range p.tokens {
		b.WriteByte('/')
		b.WriteString(escape.Replace(t))
	}
	return b.String()
}

// index reads a token as an array index. RFC 6901 allows no leading zeros; "-" is
// the element after the last one, which never exists.
func index(token string) (i int64, ok bool) {
	if token == "" || len(token) > 18 || (token[0] == '0' && token != "0") {
		return 0, false
	}
	for j := range len(token) {
		c := token[j]
		if c < '0' || c > '9' {
			return 0, false
		}
		i = i*10 + int64(c-'0')
	}
	return i, true
}
