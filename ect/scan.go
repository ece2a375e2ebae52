package ect

import (
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// maxNesting is how deep the JSON of a token may nest. The extensions, which are the
// deepest claim that means anything, have a limit of their own far below it.
const maxNesting = 32

// scanner reads JSON once, by hand, and refuses what two readers may understand in two
// ways: equal names in one object, invalid UTF-8, lone surrogates. A token that means
// one thing to the guard and another to the ledger would be worth nothing.
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

// peek is the next byte, 0 at the end.
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

// members reads an object. member is called with the scanner before each value and has
// to take it.
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

// elements reads an array.
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

// value takes any value and says how deep it nests: 0 a scalar, else one more than its
// deepest part.
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

// raw takes any value and gives it as written.
func (s *scanner) raw() (text string, depth int, ok bool) {
	from := s.i
	depth, ok = s.value()
	return s.s[from:s.i], depth, ok
}

// number takes a number and gives it as written.
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

// text takes a string and gives what it means; a part of the input where nothing in it
// is escaped.
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

// unescape goes on where text met the first backslash; begin is what comes before.
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
	switch c {
	case '"', '\\', '/':
		return rune(c), true
	case 'b':
		return '\b', true
	case 'f':
		return '\f', true
	case 'n':
		return '\n', true
	case 'r':
		return '\r', true
	case 't':
		return '\t', true
	case 'u':
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
	return 0, false
}

func (s *scanner) hex4() (r rune, ok bool) {
	if len(s.s)-s.i < 4 {
		return 0, false
	}
	for range 4 {
		c := s.s[s.i]
		s.i++
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

// names are the member names of one object. Few are compared one by one.
type names struct {
	few  [16]string
	n    int
	many map[string]struct{}
}

// add reports false for a name that is there.
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
