package template

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// value is what a placeholder stands for.
type value struct {
	text   string
	quoted bool // in JSON: neither a number nor a boolean
}

// isDocument reports that doc is JSON that all decoders read alike, but for members of
// the same name: RFC 8259 in valid UTF-8, without lone surrogates.
func isDocument(doc []byte) bool {
	return utf8.Valid(doc) && json.Valid(doc) && loneSurrogate(doc) < 0
}

// loneSurrogate finds an escape, in valid JSON, that stands for half a character. Many
// decoders replace all of them by one and the same character.
func loneSurrogate(doc []byte) int {
	for i := 0; i < len(doc); i++ {
		if doc[i] != '\\' {
			continue
		}
		at := i
		i++
		if doc[i] != 'u' {
			continue
		}
		high := unit(doc[i+1:])
		i += 4
		if !utf16.IsSurrogate(high) {
			continue
		}
		if !bytes.HasPrefix(doc[i+1:], []byte(`\u`)) || utf16.DecodeRune(high, unit(doc[i+3:])) == utf8.RuneError {
			return at
		}
		i += 6
	}
	return -1
}

// unit reads four hexadecimal digits.
func unit(digits []byte) rune {
	n, _ := strconv.ParseUint(string(digits[:4]), 16, 16) // valid JSON has them
	return rune(n)
}

// find gives the scalar at tokens in doc, for which isDocument holds. The error is
// ErrAbsent, ErrNotScalar or ErrAmbiguous.
func find(doc []byte, tokens []string) (value, error) {
	c := cursor{doc: doc}
	for _, token := range tokens {
		found, err := false, error(nil)
		switch c.next() {
		case '{':
			found, err = c.member(token)
		case '[':
			found = c.element(token)
		}
		if err != nil {
			return value{}, err
		}
		if !found {
			return value{}, ErrAbsent
		}
	}
	switch first := c.next(); first {
	case '{', '[':
		return value{}, ErrNotScalar
	case 'n':
		return value{}, ErrAbsent
	case '"':
		return value{text: c.text(), quoted: true}, nil
	}
	return value{text: string(c.skip())}, nil
}

// cursor goes over a document that is known to be valid.
type cursor struct {
	doc []byte
	i   int
}

// next gives the first byte of what comes after space.
func (c *cursor) next() byte {
	for c.doc[c.i] <= ' ' {
		c.i++
	}
	return c.doc[c.i]
}

// take goes past punctuation.
func (c *cursor) take() byte {
	b := c.next()
	c.i++
	return b
}

// skip goes past a value and gives it as written.
func (c *cursor) skip() []byte {
	first := c.next()
	from := c.i
	switch first {
	case '"':
		c.skipString()
	case '{', '[':
		for depth := 0; depth > 0 || c.i == from; {
			switch c.doc[c.i] {
			case '"':
				c.skipString()
				continue
			case '{', '[':
				depth++
			case '}', ']':
				depth--
			}
			c.i++
		}
	default:
		for c.i < len(c.doc) && bytes.IndexByte([]byte(" \t\r\n,]}"), c.doc[c.i]) < 0 {
			c.i++
		}
	}
	return c.doc[from:c.i]
}

func (c *cursor) skipString() {
	for c.i++; c.doc[c.i] != '"'; c.i++ {
		if c.doc[c.i] == '\\' {
			c.i++
		}
	}
	c.i++
}

// text takes a string and decodes it.
func (c *cursor) text() (s string) {
	_ = json.Unmarshal(c.skip(), &s) // a valid string into a string: no error is possible
	return s
}

// member goes to the value of a member of the object that begins here.
func (c *cursor) member(name string) (found bool, err error) {
	c.i++
	at := 0
	if c.next() == '}' {
		return false, nil
	}
	for {
		same := c.text() == name
		c.take() // colon
		if same && found {
			return false, ErrAmbiguous
		}
		if same {
			found, at = true, c.i
		}
		c.skip()
		if c.take() == '}' {
			c.i = at
			return found, nil
		}
	}
}

// element goes to an element of the array that begins here. "-" and what has leading
// zeros name none (RFC 6901, section 4).
func (c *cursor) element(token string) (found bool) {
	c.i++
	index, err := strconv.ParseUint(token, 10, 31)
	if err != nil || strconv.FormatUint(index, 10) != token || c.next() == ']' {
		return false
	}
	for ; index > 0; index-- {
		c.skip()
		if c.take() == ']' {
			return false
		}
	}
	return true
}

// checkDocument says where doc is not what isDocument wants, or has two members of one
// name in any object.
func checkDocument(doc []byte) *ParseError {
	var syntax *json.SyntaxError
	if err := json.Unmarshal(doc, new(json.RawMessage)); errors.As(err, &syntax) {
		// The offset is behind the byte that is wrong, or the end of the text.
		return bad(max(int(syntax.Offset)-1, 0), "%v", syntax)
	}
	for i := 0; i < len(doc); {
		r, size := utf8.DecodeRune(doc[i:])
		if r == utf8.RuneError && size == 1 {
			return bad(i, "invalid UTF-8")
		}
		i += size
	}
	if at := loneSurrogate(doc); at >= 0 {
		return bad(at, "half of a surrogate pair")
	}
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	type container struct {
		names  map[string]bool // nil in an array
		inside bool            // the next string is a value
	}
	var open []container
	for {
		from := int(d.InputOffset())
		token, err := d.Token()
		if err != nil {
			return nil // the end: the document is valid
		}
		top := len(open) - 1
		if s, ok := token.(string); ok && top >= 0 && open[top].names != nil && !open[top].inside {
			if open[top].names[s] {
				from += bytes.IndexByte(doc[from:], '"') // past comma and space
				return bad(from, "the name %q occurs twice in one object", s)
			}
			open[top].names[s], open[top].inside = true, true
			continue
		}
		switch token {
		case json.Delim('{'):
			open = append(open, container{names: make(map[string]bool)})
			continue
		case json.Delim('['):
			open = append(open, container{})
			continue
		case json.Delim('}'), json.Delim(']'):
			open = open[:top]
			top--
		}
		if top >= 0 {
			open[top].inside = false
		}
	}
}
