package jsonx

import (
	"cmp"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// maxNesting is far above the limit of extensions of tokens.
const maxNesting = 32

// Scanner reads a text in one pass from a place on, and refuses what two readers may understand
// differently: equal names in one object, invalid UTF-8, lone surrogates. What the guard reads of a token
// or a plan must mean the same to everybody who reads its record. Each method consumes what it reads.
// Where one returns ok false, At is where the text is none of what was expected.
type Scanner struct {
	JSON  string // the text
	At    int    // the place of the next byte
	Depth int    // how deep a value may nest; 0 is 32

	// These say why a text is refused that is JSON to other readers.
	TwiceNamed bool // a name stands twice in one object
	NotUnicode bool // a text is no valid UTF-8, or has a lone surrogate
	TooDeep    bool // a value nests deeper than Depth
	// Name is the member that the refusal is about, or in whose value it is; empty where a name itself is no
	// valid Unicode. Before, it is the innermost member that is being read.
	Name string
}

// space consumes white space.
func (s *Scanner) space() {
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

// Whole reads one value and nothing behind it. value has to consume it.
func (s *Scanner) Whole(value func() bool) bool {
	s.space()
	if !value() {
		return false
	}
	s.space()
	return s.At == len(s.JSON)
}

// Document reads one object and nothing behind it.
func (s *Scanner) Document(member func(name string) bool) bool {
	return s.Whole(func() bool { return s.Members(member) })
}

// Texts reads an array of at most so many strings.
func (s *Scanner) Texts(most int) ([]string, bool) {
	list := []string{}
	ok := s.Elements(func() bool {
		v, ok := s.Text()
		list = append(list, v)
		return ok && len(list) <= most
	})
	return list, ok
}

// Members reads an object. member is called before each value and has to consume it.
func (s *Scanner) Members(member func(name string) bool) bool {
	if !s.take('{') {
		return false
	}
	s.space()
	if s.take('}') {
		return true
	}
	var seen names
	for outer := s.Name; ; {
		s.space()
		s.Name = ""
		from := s.At
		name, ok := s.Text()
		if !ok {
			return false
		}
		s.Name = name
		if !seen.add(name) {
			s.At, s.TwiceNamed = from, true
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

// Value consumes any value. depth is 0 for a scalar, else one more than its deepest part.
func (s *Scanner) Value() (depth int, ok bool) { return s.nested(cmp.Or(s.Depth, maxNesting)) }

func (s *Scanner) nested(room int) (depth int, ok bool) {
	inner := 0
	child := func() bool {
		d, ok := s.nested(room - 1)
		inner = max(inner, d)
		return ok
	}
	switch c := s.Peek(); {
	case (c == '{' || c == '[') && room == 0:
		s.TooDeep = true
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
	s.At += NumberSize(s.JSON[from:])
	return s.JSON[from:s.At], s.At > from
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
			return v, ascii || s.unicode(utf8.ValidString(v), from)
		case c == '\\':
			return s.unescape(from)
		case c < ' ':
			return "", false
		case c >= utf8.RuneSelf:
			ascii = false
		}
		s.At++
	}
	return "", false
}

// unescape continues a text that begins at from at its first backslash.
func (s *Scanner) unescape(from int) (text string, ok bool) {
	for ; s.At < len(s.JSON) && s.JSON[s.At] != '"'; s.At++ {
		if s.JSON[s.At] == '\\' {
			s.At++
		}
	}
	if s.At >= len(s.JSON) {
		s.At = len(s.JSON)
		return "", false
	}
	s.At++
	quoted := []byte(s.JSON[from-1 : s.At])
	if json.Unmarshal(quoted, &text) != nil {
		return "", false
	}
	if at := loneSurrogate(quoted); at >= 0 {
		return "", s.unicode(false, from-1+at)
	}
	return text, s.unicode(utf8.Valid(quoted), from)
}

// unicode notes the fault of a text that is no valid Unicode.
func (s *Scanner) unicode(valid bool, at int) bool {
	if !valid {
		s.At, s.NotUnicode = at, true
	}
	return valid
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
