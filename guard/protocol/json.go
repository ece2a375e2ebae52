package protocol

import (
	"bytes"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
)

// member is a member of an object: its decoded name and the text of its value.
type member struct {
	name  string
	value []byte
}

// object has the members of an object in their order.
type object []member

// objectOf reads the members of a valid JSON text. It reports whether the text is an object.
func objectOf(text []byte) (object, bool) {
	if len(text) == 0 || text[0] != '{' {
		return nil, false
	}
	return membersOf(make(object, 0, 4), text), true
}

// membersOf appends the members of a valid JSON object.
func membersOf(o object, text []byte) object {
	for i := space(text, 1); text[i] != '}'; i = space(text, i) {
		if text[i] == ',' {
			i = space(text, i+1)
		}
		end := skip(text, i)
		name := unquote(text[i:end])
		i = space(text, space(text, end)+1) // the colon
		end = skip(text, i)
		o = append(o, member{name, text[i:end]})
		i = end
	}
	return o
}

// elements yields the elements of a valid JSON array.
func elements(text []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for i := space(text, 1); text[i] != ']'; i = space(text, i) {
			if text[i] == ',' {
				i = space(text, i+1)
			}
			end := skip(text, i)
			if !yield(text[i:end]) {
				return
			}
			i = end
		}
	}
}

// get returns the value of the first member of this name, or nil.
func (o object) get(name string) []byte {
	for i := range o {
		if o[i].name == name {
			return o[i].value
		}
	}
	return nil
}

// clear reports whether each of the names is there at most once, and in no other case. Some servers
// take the last of two, some the first, and those of Go's encoding/json any case.
func (o object) clear(names []string) bool {
	for i := range o {
		is := o[i].name
		for _, name := range names {
			switch {
			case is == name:
				if slices.ContainsFunc(o[:i], func(m member) bool { return m.name == name }) {
					return false
				}
			case strings.EqualFold(is, name):
				return false
			}
		}
	}
	return true
}

// space is the index of the first byte from i on that is not white space.
func space(text []byte, i int) int {
	for text[i] == ' ' || text[i] == '\t' || text[i] == '\n' || text[i] == '\r' {
		i++
	}
	return i
}

// skip is the index behind the value that begins at i of a valid JSON text; of what is cut off, behind
// its end.
func skip(text []byte, i int) int {
	depth := 0
	for ; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
			continue
		case '}', ']':
			depth--
		case ' ', '\t', '\n', '\r', ',', ':':
			continue
		default:
			for i+1 < len(text) && strings.IndexByte(" \t\n\r,:]}", text[i+1]) < 0 {
				i++
			}
		}
		if depth == 0 {
			return i + 1
		}
	}
	return i
}

// unquote decodes a JSON string; anything else gives an empty text.
func unquote(text []byte) string {
	if len(text) < 2 || text[0] != '"' {
		return ""
	}
	special := func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }
	if inner := text[1 : len(text)-1]; text[len(text)-1] == '"' && !bytes.ContainsFunc(inner, special) {
		if i := slices.IndexFunc(usual, func(name string) bool { return name == string(inner) }); i >= 0 {
			return usual[i] // without a copy
		}
		return string(inner)
	}
	var s string
	if json.Unmarshal(text, &s) != nil {
		return ""
	}
	return s
}

// usual are the words of most messages.
var usual = []string{"jsonrpc", "2.0", "id", "method", "params", "name", "arguments", "_meta", "uri", "tools/call", "ping", "tools/list", "resources/read"}

func number(text []byte) bool { return text[0] == '-' || '0' <= text[0] && text[0] <= '9' }

// canonical appends a valid JSON text in the form of RFC 8785. ok is false where that form does not
// say exactly what the text says.
func canonical(to, text []byte) (_ []byte, ok bool) {
	switch c := text[0]; {
	case c == '{':
		o, _ := objectOf(text)
		return canonicalObject(to, o)
	case c == '[':
		next := byte('[')
		for element := range elements(text) {
			if to, ok = canonical(append(to, next), element); !ok {
				return nil, false
			}
			next = ','
		}
		if next == '[' {
			to = append(to, next)
		}
		return append(to, ']'), true
	case c == '"':
		s := unquote(text)
		if strings.ContainsRune(s, '\ufffd') && bytes.Contains(bytes.ToLower(text), []byte(`\ud`)) {
			return nil, false // half a pair
		}
		return canonicalString(to, s), true
	case number(text):
		f, err := strconv.ParseFloat(string(text), 64)
		form, _ := json.Marshal(f + 0) // as ECMAScript writes it
		digits := strings.TrimLeft(strings.Map(func(c rune) rune {
			if c < '0' || c > '9' {
				return -1
			}
			return c
		}, strings.FieldsFunc(string(text), func(c rune) bool { return c == 'e' || c == 'E' })[0]), "0")
		if f == 0 {
			form = []byte{'0'}
		}
		// A double has any 15 digits; with more, the text must be the one that it is written as.
		exact := len(digits) <= 15 && (f != 0 || digits == "") || string(text) == string(form)
		return append(to, form...), err == nil && exact
	}
	return append(to, text...), true
}

// canonicalObject appends the members in the order of their names in UTF-16.
func canonicalObject(to []byte, o object) (_ []byte, ok bool) {
	o = slices.Clone(o)
	slices.SortStableFunc(o, func(a, b member) int {
		return slices.Compare(utf16.Encode([]rune(a.name)), utf16.Encode([]rune(b.name)))
	})
	to = append(to, '{')
	for i, m := range o {
		if i > 0 {
			if m.name == o[i-1].name {
				return nil, false
			}
			to = append(to, ',')
		}
		to = append(canonicalString(to, m.name), ':')
		if to, ok = canonical(to, m.value); !ok {
			return nil, false
		}
	}
	return append(to, '}'), true
}

func canonicalString(to []byte, s string) []byte {
	const short = "\b\t\n\f\r"
	to = append(to, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			to = append(to, '\\', c)
		case c >= ' ':
			to = append(to, c)
		case strings.IndexByte(short, c) >= 0:
			to = append(to, '\\', "btnfr"[strings.IndexByte(short, c)])
		default:
			to = fmt.Appendf(to, "\\u%04x", c)
		}
	}
	return append(to, '"')
}
