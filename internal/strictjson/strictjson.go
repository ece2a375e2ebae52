// Package strictjson reads JSON in one pass and refuses what two readers may understand differently:
// equal names in one object, invalid UTF-8, lone surrogates. What the guard reads of a token or a plan
// must mean the same to everybody who reads its record.
package strictjson

import (
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// MaxNesting is how deep a value may nest, far above the limit of extensions of tokens.
const MaxNesting = 32

// Scanner reads a text from a place on. Each method consumes what it reads. Where one returns ok
// false, At is where the text is none of what was expected.
type Scanner struct {
	JSON string // the text
	At   int    // the place of the next byte

	// Fault is why a text is refused that is JSON to other readers; zero if it is none. Name is the member that it is
	// about, or in whose value it is; empty where a name itself is no valid Unicode.
	Fault Fault
	Name  string // see Fault; before a fault the innermost member that is being read
}

// Fault is what two readers may understand differently, or what takes too much of one.
type Fault uint8

// The faults.
const (
	// TwiceNamed: a name stands twice in one object.
	TwiceNamed Fault = 1 + iota
	// NotUnicode: a text is no valid UTF-8, or has a lone surrogate.
	NotUnicode
	// TooDeep: a value nests deeper than MaxNesting.
	TooDeep
)

// Space consumes white space.
func (s *Scanner) Space() {
	for s.At < len(s.JSON) {
		switch s.JSON[s.At] {
		case ' ', '\t', '\n', '\r':
			s.At++
		default:
			return
		}
	}
}

func (s *Scanner) take(c byte) bool {
	if s.At < len(s.JSON) && s.JSON[s.At] == c {
		s.At++
		return true
	}
	return false
}

// Peek returns the next byte, 0 at the end.
func (s *Scanner) Peek() byte {
	if s.At < len(s.JSON) {
		return s.JSON[s.At]
	}
	return 0
}

// Document reads one object and nothing behind it.
func (s *Scanner) Document(member func(name string) bool) bool {
	s.Space()
	if !s.Members(member) {
		return false
	}
	s.Space()
	return s.At == len(s.JSON)
}

// Members reads an object. member is called before each value and has to consume it.
func (s *Scanner) Members(member func(name string) bool) bool {
	if !s.take('{') {
		return false
	}
	s.Space()
	if s.take('}') {
		return true
	}
	var seen Names
	for outer := s.Name; ; {
		s.Space()
		s.Name = ""
		name, ok := s.Text()
		if !ok {
			return false
		}
		s.Name = name
		if !seen.Add(name) {
			s.Fault = TwiceNamed
			return false
		}
		s.Space()
		if !s.take(':') {
			return false
		}
		s.Space()
		if !member(name) {
			return false
		}
		s.Space()
		if s.take('}') {
			s.Name = outer
			return true
		}
		if !s.take(',') {
			return false
		}
	}
}

// Elements reads an array. element is called before each value and has to consume it.
func (s *Scanner) Elements(element func() bool) bool {
	if !s.take('[') {
		return false
	}
	s.Space()
	if s.take(']') {
		return true
	}
	for {
		s.Space()
		if !element() {
			return false
		}
		s.Space()
		if s.take(']') {
			return true
		}
		if !s.take(',') {
			return false
		}
	}
}

// Value consumes any value. depth is 0 for a scalar, else one more than its deepest part.
func (s *Scanner) Value() (depth int, ok bool) { return s.nested(MaxNesting) }

func (s *Scanner) nested(room int) (depth int, ok bool) {
	inner := 0
	child := func() bool {
		d, ok := s.nested(room - 1)
		inner = max(inner, d)
		return ok
	}
	switch c := s.Peek(); {
	case (c == '{' || c == '[') && room == 0:
		s.Fault = TooDeep
		return 0, false
	case c == '{':
		ok = s.Members(func(string) bool { return child() })
		return inner + 1, ok
	case c == '[':
		ok = s.Elements(child)
		return inner + 1, ok
	case c == '"':
		_, ok = s.Text()
		return 0, ok
	case c == 't':
		return 0, s.word("true")
	case c == 'f':
		return 0, s.word("false")
	case c == 'n':
		return 0, s.word("null")
	default:
		_, ok = s.Number()
		return 0, ok
	}
}

func (s *Scanner) word(w string) bool {
	if strings.HasPrefix(s.JSON[s.At:], w) {
		s.At += len(w)
		return true
	}
	return false
}

// Raw consumes any value and returns it as written.
func (s *Scanner) Raw() (text string, depth int, ok bool) {
	from := s.At
	depth, ok = s.Value()
	return s.JSON[from:s.At], depth, ok
}

// Number consumes a number and returns it as written.
func (s *Scanner) Number() (string, bool) {
	from := s.At
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
	return s.JSON[from:s.At], true
}

func (s *Scanner) digits() bool {
	from := s.At
	for c := s.Peek(); '0' <= c && c <= '9'; c = s.Peek() {
		s.At++
	}
	return s.At > from
}

// Text consumes a string and returns its meaning, without a copy if nothing is escaped.
func (s *Scanner) Text() (string, bool) {
	if !s.take('"') {
		return "", false
	}
	from, ascii := s.At, true
	for s.At < len(s.JSON) {
		switch c := s.JSON[s.At]; {
		case c == '"':
			v := s.JSON[from:s.At]
			s.At++
			return v, ascii || s.unicode(utf8.ValidString(v))
		case c == '\\':
			return s.unescape(s.JSON[from:s.At])
		case c < ' ':
			return "", false
		case c >= utf8.RuneSelf:
			ascii = false
		}
		s.At++
	}
	return "", false
}

// unescape continues text at the first backslash; begin is what stands before it.
func (s *Scanner) unescape(begin string) (string, bool) {
	out := append(make([]byte, 0, len(begin)+64), begin...)
	for s.At < len(s.JSON) {
		c := s.JSON[s.At]
		s.At++
		switch {
		case c == '"':
			return string(out), s.unicode(utf8.Valid(out))
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

// unicode notes the fault of a text that is no valid Unicode.
func (s *Scanner) unicode(valid bool) bool {
	if !valid {
		s.Fault = NotUnicode
	}
	return valid
}

// escape reads what follows a backslash.
func (s *Scanner) escape() (rune, bool) {
	if s.At == len(s.JSON) {
		return 0, false
	}
	c := s.JSON[s.At]
	s.At++
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
		return 0, s.unicode(false)
	}
	low, ok := s.hex4()
	r = utf16.DecodeRune(r, low)
	return r, ok && s.unicode(r != utf8.RuneError)
}

func (s *Scanner) hex4() (rune, bool) {
	if len(s.JSON)-s.At < 4 {
		return 0, false
	}
	v, err := strconv.ParseUint(s.JSON[s.At:s.At+4], 16, 16)
	s.At += 4
	return rune(v), err == nil
}

// Names are the member names of one object. Few are compared one by one.
type Names struct {
	few  [16]string
	n    int
	many map[string]struct{}
}

// Add returns false for a name that is present.
func (u *Names) Add(name string) bool {
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

// AppendText writes a JSON string. Invalid UTF-8 becomes U+FFFD.
func AppendText(b []byte, v string) []byte {
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

// Same reports whether two scanned values mean the same: neither the order of members
// nor white space, escapes or the form of a number matter.
func Same(a, b string) bool { return a == b || canonicalJSON(a) == canonicalJSON(b) }

func canonicalJSON(v string) string {
	s := Scanner{JSON: v}
	return string(s.Canonical(make([]byte, 0, len(v))))
}

// Canonical consumes a value, which has to be one that Value takes, and appends the one text of its
// meaning: compact, members by name, numbers as significant digits and a power of ten.
func (s *Scanner) Canonical(dst []byte) []byte {
	switch c := s.Peek(); {
	case c == '{':
		type member struct{ name, value string }
		var all []member
		s.Members(func(name string) bool {
			all = append(all, member{name, string(s.Canonical(nil))})
			return true
		})
		slices.SortFunc(all, func(a, b member) int { return strings.Compare(a.name, b.name) })
		dst = append(dst, '{')
		for i, m := range all {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(append(AppendText(dst, m.name), ':'), m.value...)
		}
		return append(dst, '}')
	case c == '[':
		dst = append(dst, '[')
		first := len(dst)
		s.Elements(func() bool {
			if len(dst) > first {
				dst = append(dst, ',')
			}
			dst = s.Canonical(dst)
			return true
		})
		return append(dst, ']')
	case c == '"':
		v, _ := s.Text()
		return AppendText(dst, v)
	case c == '-' || '0' <= c && c <= '9':
		v, _ := s.Number()
		return appendNumber(dst, v)
	default:
		v, _, _ := s.Raw()
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
