package jsonx

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Object has the members of an object in their order, also those of equal names.
type Object []Member

// Member is a member of an object: its decoded name and the text of its value.
type Member struct {
	Name  string
	Value []byte
}

// ObjectOf reads the members of a valid JSON text without space around it. It reports whether the text is
// an object.
func ObjectOf(text []byte) (Object, bool) {
	if len(text) == 0 || text[0] != '{' {
		return nil, false
	}
	return AppendMembers(make(Object, 0, 4), text), true
}

// AppendMembers appends the members of a valid JSON object.
func AppendMembers(o Object, text []byte) Object {
	for i := space(text, 1); text[i] != '}'; i = space(text, i) {
		if text[i] == ',' {
			i = space(text, i+1)
		}
		end := Skip(text, i)
		name := Unquote(text[i:end])
		i = space(text, space(text, end)+1) // the colon
		end = Skip(text, i)
		o = append(o, Member{name, text[i:end]})
		i = end
	}
	return o
}

// Elements yields the elements of a valid JSON array.
func Elements(text []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for i := space(text, 1); text[i] != ']'; i = space(text, i) {
			if text[i] == ',' {
				i = space(text, i+1)
			}
			end := Skip(text, i)
			if !yield(text[i:end]) {
				return
			}
			i = end
		}
	}
}

// Get returns the value of the first member of this name, or nil.
func (o Object) Get(name string) []byte {
	for i := range o {
		if o[i].Name == name {
			return o[i].Value
		}
	}
	return nil
}

// Clear reports whether each of the names is there at most once, and in no other case. Some servers
// take the last of two, some the first, and those of Go's encoding/json any case.
func (o Object) Clear(names []string) bool {
	for i := range o {
		is := o[i].Name
		for _, name := range names {
			switch {
			case is == name:
				if slices.ContainsFunc(o[:i], func(m Member) bool { return m.Name == name }) {
					return false
				}
			case strings.EqualFold(is, name):
				return false
			}
		}
	}
	return true
}

// Distinct reports whether no two names are equal; as says in which form they are compared.
func (o Object) Distinct(as func(name string) string) bool {
	seen := make(map[string]bool, len(o))
	for _, m := range o {
		seen[as(m.Name)] = true
	}
	return len(seen) == len(o)
}

// space is the index of the first byte from i on that is not white space.
func space(text []byte, i int) int {
	for text[i] == ' ' || text[i] == '\t' || text[i] == '\n' || text[i] == '\r' {
		i++
	}
	return i
}

// Skip is the index behind the value that begins at i of a valid JSON text; of what is cut off, behind
// its end.
func Skip(text []byte, i int) int {
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

// Unquote decodes a JSON string; anything else gives an empty text.
func Unquote(text []byte) string {
	if len(text) < 2 || text[0] != '"' {
		return ""
	}
	special := func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }
	if inner := text[1 : len(text)-1]; text[len(text)-1] == '"' && !bytes.ContainsFunc(inner, special) {
		return string(inner)
	}
	var s string
	if json.Unmarshal(text, &s) != nil {
		return ""
	}
	return s
}

// IsNumber reports whether a valid JSON text is a number.
func IsNumber[T text](json T) bool {
	return len(json) > 0 && (json[0] == '-' || '0' <= json[0] && json[0] <= '9')
}

// Pointer names one place in a JSON document (RFC 6901), by the decoded tokens on the way to it. The zero
// Pointer is the whole document.
type Pointer []string

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
		return nil, nil
	case !utf8.ValidString(s):
		return nil, errPointerUTF8
	case s[0] == '#':
		return nil, fmt.Errorf("JSON pointer %q is in URI form: leave the '#' away", s)
	case s[0] != '/':
		return nil, fmt.Errorf("JSON pointer %q must be empty or begin with '/'", s)
	}
	tokens := strings.Split(s[1:], "/")
	for i, t := range tokens {
		if strings.Contains(strings.NewReplacer("~0", "", "~1", "").Replace(t), "~") {
			return nil, fmt.Errorf("JSON pointer %q: '~' must be followed by 0 (for '~') or 1 (for '/')", s)
		}
		tokens[i] = unescape.Replace(t)
	}
	return tokens, nil
}

// ParsePointers parses JSON pointers to members of a document.
func ParsePointers(texts []string) ([]Pointer, error) {
	var pointers []Pointer
	for _, text := range texts {
		p, err := ParsePointer(text)
		if err != nil {
			return nil, err
		}
		if text == "" {
			return nil, errors.New("an empty JSON pointer is the whole body; name a member of it")
		}
		pointers = append(pointers, p)
	}
	return pointers, nil
}

// String gives the pointer as ParsePointer reads it.
func (p Pointer) String() string {
	var b strings.Builder
	for _, t := range p {
		b.WriteByte('/')
		b.WriteString(escape.Replace(t))
	}
	return b.String()
}

// Index reads a token as an array index. RFC 6901 allows no leading zeros; "-" is
// the element after the last one, which never exists.
func Index(token string) (i int64, ok bool) {
	at, err := strconv.ParseUint(token, 10, 63)
	return int64(at), err == nil && (token == "0" || token[0] != '0')
}

// ErrAmbiguous: a name in the path occurs twice in its object, so that the upstream may read another value.
var ErrAmbiguous = errors.New("the value's name occurs more than once in its object")

// In is the value at the pointer in a valid JSON text, as it is written there; nil if there is none. The
// error is ErrAmbiguous.
func (p Pointer) In(text []byte) ([]byte, error) {
	text = bytes.TrimSpace(text)
	for _, token := range p {
		at, isIndex := Index(token)
		value := text
		text = nil
		switch value[0] {
		case '{':
			for _, m := range AppendMembers(nil, value) {
				if m.Name == token && text != nil {
					return nil, ErrAmbiguous
				} else if m.Name == token {
					text = m.Value
				}
			}
		case '[':
			for element := range Elements(value) {
				if at--; isIndex && at == -1 {
					text = element
					break
				}
			}
		}
		if text == nil {
			return nil, nil
		}
	}
	return text, nil
}

// Same reports whether two scanned values mean the same: neither the order of members
// nor white space, escapes or the form of a number matter.
func Same(a, b string) bool { return a == b || Canonical(a) == Canonical(b) }

// Canonical is the one text of what a scanned value means: compact, members by name, numbers as
// AppendNumber has them.
func Canonical(value string) string {
	exact := writer{strings.Compare, "", func(to, number []byte) ([]byte, bool) { return AppendNumber(to, number), true }}
	text, _ := exact.value(make([]byte, 0, len(value)), []byte(value))
	return string(text)
}

// AppendCanonical appends an object in the form of RFC 8785. ok is false where two texts that servers may
// read differently have one form: a name twice, a number that no double has, half a surrogate pair.
func (o Object) AppendCanonical(to []byte) (_ []byte, ok bool) {
	byUTF16 := func(a, b string) int {
		return slices.Compare(utf16.Encode([]rune(a)), utf16.Encode([]rune(b)))
	}
	return (&writer{byUTF16, shortEscaped, appendDouble}).object(to, o)
}

// writer writes one form of all texts of a value.
type writer struct {
	compare func(a, b string) int                             // orders names
	short   string                                            // of appendText
	number  func(to, number []byte) (text []byte, exact bool) // appends a number
}

// value appends a valid JSON text.
func (w *writer) value(to, text []byte) (_ []byte, ok bool) {
	switch c := text[0]; {
	case c == '{':
		return w.object(to, AppendMembers(nil, text))
	case c == '[':
		next := byte('[')
		for element := range Elements(text) {
			if to, ok = w.value(append(to, next), element); !ok {
				return nil, false
			}
			next = ','
		}
		if next == '[' {
			to = append(to, next)
		}
		return append(to, ']'), true
	case c == '"':
		return appendText(to, Unquote(text), w.short), loneSurrogate(text) < 0
	case IsNumber(text):
		return w.number(to, text)
	}
	return append(to, text...), true
}

func (w *writer) object(to []byte, o Object) (_ []byte, ok bool) {
	o = slices.Clone(o)
	slices.SortStableFunc(o, func(a, b Member) int { return w.compare(a.Name, b.Name) })
	to = append(to, '{')
	for i, m := range o {
		if i > 0 {
			if m.Name == o[i-1].Name {
				return nil, false
			}
			to = append(to, ',')
		}
		if to, ok = w.value(append(appendText(to, m.Name, w.short), ':'), m.Value); !ok {
			return nil, false
		}
	}
	return append(to, '}'), true
}

// appendDouble appends a number as ECMAScript writes it. exact is false where that is another number.
func appendDouble(to, text []byte) (_ []byte, exact bool) {
	f, err := strconv.ParseFloat(string(text), 64)
	form := []byte{'0'}
	if f != 0 {
		form, _ = json.Marshal(f)
	}
	mantissa, _, _ := strings.Cut(strings.ToLower(string(text)), "e")
	digits := strings.TrimLeft(strings.NewReplacer("-", "", ".", "").Replace(mantissa), "0")
	// A double has any 15 digits; with more, the text must be the one that it is written as.
	exact = len(digits) <= 15 && (f != 0 || digits == "") || string(text) == string(form)
	return append(to, form...), exact && err == nil
}

// AppendNumber appends the one text of the value that tok, a valid JSON number,
// stands for: an optional minus, the digits without zeros at either end, "e" and
// the exponent. It is exact for every length of digits and exponent, and takes no
// more memory than tok. Zero is "0", whatever its sign and exponent.
func AppendNumber(dst, tok []byte) []byte {
	start := len(dst)
	if tok[0] == '-' {
		dst = append(dst, '-')
		tok = tok[1:]
	}
	var exp []byte
	if i := bytes.IndexAny(tok, "eE"); i >= 0 {
		tok, exp = tok[:i], tok[i+1:]
	}
	var frac int64
	first := len(dst)
	if i := bytes.IndexByte(tok, '.'); i >= 0 {
		frac = int64(len(tok) - i - 1)
		dst = append(dst, tok[:i]...)
		tok = tok[i+1:]
	}
	dst = append(dst, tok...)
	digits := bytes.TrimLeft(dst[first:], "0")
	if len(digits) == 0 {
		return append(dst[:start], '0')
	}
	dst = dst[:first+copy(dst[first:], digits)]
	short := bytes.TrimRight(dst[first:], "0")
	shift := int64(len(dst)-first-len(short)) - frac
	dst = append(dst[:first+len(short)], 'e')
	return appendExponent(dst, exp, shift)
}

// appendExponent appends exp + shift in decimal. exp may have more digits than
// any integer type; |shift| is at most the length of a number.
func appendExponent(dst, exp []byte, shift int64) []byte {
	neg := false
	if len(exp) > 0 && (exp[0] == '-' || exp[0] == '+') {
		neg = exp[0] == '-'
		exp = exp[1:]
	}
	exp = bytes.TrimLeft(exp, "0")
	if len(exp) <= 18 {
		var e int64
		for _, c := range exp {
			e = e*10 + int64(c-'0')
		}
		if neg {
			e = -e
		}
		return strconv.AppendInt(dst, e+shift, 10)
	}
	// At least 10^18 in size: shift changes neither the sign nor, but for a
	// carry, more than the last digits.
	if neg {
		dst = append(dst, '-')
		shift = -shift
	}
	from := len(dst)
	dst = append(append(dst, '0'), exp...)
	carry := shift
	for i := len(dst) - 1; carry != 0; i-- {
		v := int64(dst[i]-'0') + carry
		d := v % 10
		if d < 0 {
			d += 10
		}
		dst[i] = byte('0' + d)
		carry = (v - d) / 10
	}
	return dst[:from+copy(dst[from:], bytes.TrimLeft(dst[from:], "0"))]
}
