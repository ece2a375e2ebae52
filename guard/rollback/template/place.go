package template

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// place is where a placeholder stands.
type place uint8

const (
	pathSegment place = iota
	pairValue         // of a query or a form
	headerValue
	jsonText  // between quotes
	jsonValue // outside of quotes
)

var placeWords = [...]string{
	pathSegment: "a path segment", pairValue: "a value of a query or form", headerValue: "a header value",
	jsonText: "text in JSON", jsonValue: "a JSON value",
}

func (p place) String() string { return placeWords[p] }

// sample is what stands for a value at load.
func (p place) sample() string {
	if p == jsonValue {
		// Next to anything else than space and punctuation null is invalid, where a
		// digit might make a longer number.
		return "null"
	}
	return "x"
}

// appendValue writes v as the place needs it. The error is ErrEmpty or ErrUnfit.
func (p place) appendValue(dst []byte, v value) ([]byte, error) {
	switch p {
	case pathSegment:
		if v.text == "" {
			return nil, ErrEmpty
		}
		if v.text == "." || v.text == ".." || strings.ContainsFunc(v.text, ambiguousInPath) {
			return nil, ErrUnfit
		}
		return appendEscaped(dst, v.text), nil
	case pairValue:
		return appendEscaped(dst, v.text), nil
	case headerValue:
		if v.text == "" {
			return nil, ErrEmpty
		}
		if strings.Trim(v.text, " \t") != v.text || strings.ContainsFunc(v.text, isControl) {
			return nil, ErrUnfit
		}
		return append(dst, v.text...), nil
	}
	if !utf8.ValidString(v.text) {
		return nil, ErrUnfit
	}
	if p == jsonValue && !v.quoted {
		return append(dst, v.text...), nil
	}
	quoted := quote(v.text)
	if p == jsonText {
		quoted = quoted[1 : len(quoted)-1]
	}
	return append(dst, quoted...), nil
}

// ambiguousInPath are characters that some servers resolve though they are encoded.
func ambiguousInPath(r rune) bool { return r == '/' || r == '\\' || r < ' ' || r == 0x7f }

// isControl leaves out the tab, which fields may hold (RFC 9110, section 5.5).
func isControl(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }

// appendEscaped percent-encodes all but RFC 3986's unreserved characters.
func appendEscaped(dst []byte, s string) []byte {
	const digits = "0123456789ABCDEF"
	for i := range len(s) {
		if c := s[i]; isAlphanumeric(c) || strings.IndexByte("-._~", c) >= 0 {
			dst = append(dst, c)
		} else {
			dst = append(dst, '%', digits[c>>4], digits[c&15])
		}
	}
	return dst
}

// quote writes s, which is valid UTF-8, as a JSON string.
func quote(s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string into memory: no error is possible
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
