package ect

import (
	"encoding/base64"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// maxNesting is how deep the JSON of a token may nest, far above the limit of extensions.
const maxNesting = 32

// scanner reads JSON in one pass and refuses what two readers may understand differently:
// equal names in one object, invalid UTF-8, lone surrogates. A token must mean the same
// to the guard and to the ledger.
type scanner struct {
	s string
	i int
}

func (s *scanner) space() {
	for s.i < len(s.s) {
		switch s.s[s.i] {
		case ' ', '\t', '\n', '\r':
			s.i++
		default:
			return
		}
	}
}

func (s *scanner) take(c byte) bool {
	if s.i < len(s.s) && s.s[s.i] == c {
		s.i++
		return true
	}
	return false
}

// peek returns the next byte, 0 at the end.
func (s *scanner) peek() byte {
	if s.i < len(s.s) {
		return s.s[s.i]
	}
	return 0
}

// document reads one object and nothing behind it.
func (s *scanner) document(member func(name string) bool) bool {
	s.space()
	if !s.members(member) {
		return false
	}
	s.space()
	return s.i == len(s.s)
}

// members reads an object. member is called before each value and has to consume it.
func (s *scanner) members(member func(name string) bool) bool {
	if !s.take('{') {
		return false
	}
	s.space()
	if s.take('}') {
		return true
	}
	var seen names
	for {
		s.space()
		name, ok := s.text()
		if !ok || !seen.add(name) {
			return false
		}
		s.space()
		if !s.take(':') {
			return false
		}
		s.space()
		if !member(name) {
			return false
		}
		s.space()
		if s.take('}') {
			return true
		}
		if !s.take(',') {
			return false
		}
	}
}

// elements reads an array. element is called before each value and has to consume it.
func (s *scanner) elements(element func() bool) bool {
	if !s.take('[') {
		return false
	}
	s.space()
	if s.take(']') {
		return true
	}
	for {
		s.space()
		if !element() {
			return false
		}
		s.space()
		if s.take(']') {
			return true
		}
		if !s.take(',') {
			return false
		}
	}
}

// value consumes any value. depth is 0 for a scalar, else one more than its deepest part.
func (s *scanner) value() (depth int, ok bool) { return s.nested(maxNesting) }

func (s *scanner) nested(room int) (depth int, ok bool) {
	inner := 0
	child := func() bool {
		d, ok := s.nested(room - 1)
		inner = max(inner, d)
		return ok
	}
	switch c := s.peek(); {
	case (c == '{' || c == '[') && room == 0:
		return 0, false
	case c == '{':
		ok = s.members(func(string) bool { return child() })
		return inner + 1, ok
	case c == '[':
		ok = s.elements(child)
		return inner + 1, ok
	case c == '"':
		_, ok = s.text()
		return 0, ok
	case c == 't':
		return 0, s.word("true")
	case c == 'f':
		return 0, s.word("false")
	case c == 'n':
		return 0, s.word("null")
	default:
		_, ok = s.number()
		return 0, ok
	}
}

func (s *scanner) word(w string) bool {
	if strings.HasPrefix(s.s[s.i:], w) {
		s.i += len(w)
		return true
	}
	return false
}

// raw consumes any value and returns it as written.
func (s *scanner) raw() (text string, depth int, ok bool) {
	from := s.i
	depth, ok = s.value()
	return s.s[from:s.i], depth, ok
}

// number consumes a number and returns it as written.
func (s *scanner) number() (string, bool) {
	from := s.i
	s.take('-')
	if !s.take('0') && !s.digits() {
		return "", false
	}
	if s.take('.') && !s.digits() {
		return "", false
	}
	if s.take('e') || s.take('E') {
		if !s.take('+') {
			s.take('-')
		}
		if !s.digits() {
			return "", false
		}
	}
	return s.s[from:s.i], true
}

func (s *scanner) digits() bool {
	from := s.i
	for c := s.peek(); '0' <= c && c <= '9'; c = s.peek() {
		s.i++
	}
	return s.i > from
}

// text consumes a string and returns its meaning, without a copy if nothing is escaped.
func (s *scanner) text() (string, bool) {
	if !s.take('"') {
		return "", false
	}
	from, ascii := s.i, true
	for s.i < len(s.s) {
		switch c := s.s[s.i]; {
		case c == '"':
			v := s.s[from:s.i]
			s.i++
			return v, ascii || utf8.ValidString(v)
		case c == '\\':
			return s.unescape(s.s[from:s.i])
		case c < ' ':
			return "", false
		case c >= utf8.RuneSelf:
			ascii = false
		}
		s.i++
	}
	return "", false
}

// unescape continues text at the first backslash; begin is what stands before it.
func (s *scanner) unescape(begin string) (string, bool) {
	out := append(make([]byte, 0, len(begin)+64), begin...)
	for s.i < len(s.s) {
		c := s.s[s.i]
		s.i++
		switch {
		case c == '"':
			return string(out), utf8.Valid(out)
		case c < ' ':
			return "", false
		case c != '\\':
			out = append(out, c)
		default:
			r, ok := s.escape()
			if !ok {
				return "", false
			}
			out = utf8.AppendRune(out, r)
		}
	}
	return "", false
}

// escape reads what follows a backslash.
func (s *scanner) escape() (rune, bool) {
	if s.i == len(s.s) {
		return 0, false
	}
	c := s.s[s.i]
	s.i++
	if c != 'u' {
		n := strings.IndexByte(`"\/bfnrt`, c)
		if n < 0 {
			return 0, false
		}
		return rune("\"\\/\b\f\n\r\t"[n]), true
	}
	r, ok := s.hex4()
	if !ok || !utf16.IsSurrogate(r) {
		return r, ok
	}
	if !s.take('\\') || !s.take('u') {
		return 0, false
	}
	low, ok := s.hex4()
	r = utf16.DecodeRune(r, low)
	return r, ok && r != utf8.RuneError
}

func (s *scanner) hex4() (rune, bool) {
	if len(s.s)-s.i < 4 {
		return 0, false
	}
	v, err := strconv.ParseUint(s.s[s.i:s.i+4], 16, 16)
	s.i += 4
	return rune(v), err == nil
}

// names are the member names of one object. Few are compared one by one.
type names struct {
	few  [16]string
	n    int
	many map[string]struct{}
}

// add returns false for a name that is present.
func (u *names) add(name string) bool {
	if u.many == nil && u.n < len(u.few) {
		for _, other := range u.few[:u.n] {
			if other == name {
				return false
			}
		}
		u.few[u.n] = name
		u.n++
		return true
	}
	if u.many == nil {
		u.many = make(map[string]struct{}, 2*len(u.few))
		for _, other := range u.few {
			u.many[other] = struct{}{}
		}
	}
	if _, taken := u.many[name]; taken {
		return false
	}
	u.many[name] = struct{}{}
	return true
}

const hexDigits = "0123456789abcdef"

// appendText writes a JSON string. Invalid UTF-8 becomes U+FFFD.
func appendText(b []byte, v string) []byte {
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
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
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

func appendTexts(b []byte, vs []string) []byte {
	b = append(b, '[')
	for i, v := range vs {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendText(b, v)
	}
	return append(b, ']')
}

// sameJSON reports whether two scanned values mean the same: neither the order of members
// nor white space, escapes or the form of a number matter.
func sameJSON(a, b string) bool { return a == b || canonicalJSON(a) == canonicalJSON(b) }

func canonicalJSON(v string) string {
	s := scanner{s: v}
	return string(s.canonical(make([]byte, 0, len(v))))
}

// canonical consumes a value and appends the one text of its meaning, which is for
// comparing only and is no JSON.
func (s *scanner) canonical(dst []byte) []byte {
	switch c := s.peek(); {
	case c == '{':
		type member struct{ name, value string }
		var all []member
		s.members(func(name string) bool {
			all = append(all, member{name, string(s.canonical(nil))})
			return true
		})
		slices.SortFunc(all, func(a, b member) int { return strings.Compare(a.name, b.name) })
		dst = append(dst, '{')
		for _, m := range all {
			dst = append(appendText(dst, m.name), ':')
			dst = append(append(dst, m.value...), ',')
		}
		return append(dst, '}')
	case c == '[':
		dst = append(dst, '[')
		s.elements(func() bool {
			dst = append(s.canonical(dst), ',')
			return true
		})
		return append(dst, ']')
	case c == '"':
		v, _ := s.text()
		return appendText(dst, v)
	case isNumber(s.s[s.i:]):
		v, _ := s.number()
		return appendNumber(dst, v)
	default:
		v, _, _ := s.raw()
		return append(dst, v...)
	}
}

// appendNumber writes the significant digits and a power of ten. It rounds nothing:
// numbers that are equal to some readers only are not the same.
func appendNumber(dst []byte, v string) []byte {
	plain, negative := strings.CutPrefix(v, "-")
	mantissa, power := plain, ""
	if i := strings.IndexAny(plain, "eE"); i >= 0 {
		mantissa, power = plain[:i], plain[i+1:]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	short := strings.TrimRight(digits, "0")
	if short == "" {
		return append(dst, '0')
	}
	exponent := int64(0)
	if power != "" {
		var err error
		if exponent, err = strconv.ParseInt(power, 10, 32); err != nil {
			return append(dst, v...) // out of every range
		}
	}
	if negative {
		dst = append(dst, '-')
	}
	exponent += int64(len(digits) - len(short) - len(fraction))
	return strconv.AppendInt(append(append(dst, short...), 'e'), exponent, 10)
}

// strict64 refuses bits that no octet uses: a signature must not have two spellings.
var strict64 = base64.RawURLEncoding.Strict()

// decode64 reads base64url without padding. The standard decoder skips line breaks.
func decode64(v string) ([]byte, bool) {
	if strings.ContainsAny(v, "\r\n") {
		return nil, false
	}
	b, err := strict64.DecodeString(v)
	return b, err == nil
}
