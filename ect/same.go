package ect

import (
	"slices"
	"strconv"
	"strings"
)

// sameJSON reports whether two values, which a scanner has taken before, mean the same.
// Writers that agree on a value need not agree on the order of its members, on white
// space, escapes, or the form of a number.
func sameJSON(a, b string) bool { return a == b || canonicalJSON(a) == canonicalJSON(b) }

func canonicalJSON(v string) string {
	s := scanner{s: v}
	return string(s.canonical(make([]byte, 0, len(v))))
}

// canonical takes a value and appends the one text that all with its meaning have. It is
// for comparing only, and no JSON.
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

// appendNumber writes a number as its digits, without zeros around them, and a power of
// ten. It rounds nothing: what is the same to one reader only is not the same.
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
			return append(dst, v...) // no reader can do anything with it
		}
	}
	if negative {
		dst = append(dst, '-')
	}
	exponent += int64(len(digits) - len(short) - len(fraction))
	return strconv.AppendInt(append(append(dst, short...), 'e'), exponent, 10)
}
