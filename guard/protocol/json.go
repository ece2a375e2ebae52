package protocol

import (
	"encoding/json"
	"iter"
	"strings"
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
	o := make(object, 0, 8)
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
	return o, true
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
	for _, name := range names {
		seen := false
		for i := range o {
			if !strings.EqualFold(o[i].name, name) {
				continue
			}
			if seen || o[i].name != name {
				return false
			}
			seen = true
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

// skip is the index behind the value that begins at i of a valid JSON text.
func skip(text []byte, i int) int {
	depth := 0
	for ; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; text[i] != '"'; i++ {
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
			for i+1 < len(text) && !strings.ContainsRune(" \t\n\r,:]}", rune(text[i+1])) {
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
	var s string
	if json.Unmarshal(text, &s) != nil {
		return ""
	}
	return s
}

func number(text []byte) bool { return text[0] == '-' || '0' <= text[0] && text[0] <= '9' }
