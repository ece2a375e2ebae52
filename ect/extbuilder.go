package ect

import (
	"errors"
	"fmt"
	"math"
	"strconv"
)

// ExtBuilder collects the extension members of a token to be issued, by their names in
// the cascade vocabulary. The zero builder is empty and usable.
type ExtBuilder struct {
	values  []byte
	members []extMember
	err     error
}

type extMember struct {
	member   Member
	from, to int // its value
}

// add notes the value that stands at the end of the buffer.
func (b *ExtBuilder) add(m Member, from int) *ExtBuilder {
	for _, other := range b.members {
		if other.member == m {
			b.fail(fmt.Errorf("ect: the extension %s is set twice", m))
		}
	}
	b.members = append(b.members, extMember{m, from, len(b.values)})
	return b
}

func (b *ExtBuilder) fail(err error) {
	if b.err == nil {
		b.err = err
	}
}

// Text sets a string.
func (b *ExtBuilder) Text(m Member, v string) *ExtBuilder {
	from := len(b.values)
	b.values = appendText(b.values, v)
	return b.add(m, from)
}

// Bool sets true or false.
func (b *ExtBuilder) Bool(m Member, v bool) *ExtBuilder {
	from := len(b.values)
	b.values = strconv.AppendBool(b.values, v)
	return b.add(m, from)
}

// Int sets a whole number.
func (b *ExtBuilder) Int(m Member, v int64) *ExtBuilder {
	from := len(b.values)
	b.values = strconv.AppendInt(b.values, v, 10)
	return b.add(m, from)
}

// Number sets a number.
func (b *ExtBuilder) Number(m Member, v float64) *ExtBuilder {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		b.fail(fmt.Errorf("ect: the extension %s is not a number", m))
		v = 0
	}
	from := len(b.values)
	b.values = strconv.AppendFloat(b.values, v, 'g', -1, 64)
	return b.add(m, from)
}

// Texts sets a list of strings.
func (b *ExtBuilder) Texts(m Member, vs []string) *ExtBuilder {
	from := len(b.values)
	b.values = appendTexts(b.values, vs)
	return b.add(m, from)
}

// Outcomes sets a list like cascade.cascaded.
func (b *ExtBuilder) Outcomes(m Member, list []Outcome) *ExtBuilder {
	from := len(b.values)
	b.values = append(b.values, '[')
	for i, o := range list {
		if i > 0 {
			b.values = append(b.values, ',')
		}
		b.values = appendText(append(b.values, `{"agent":`...), o.Agent)
		b.values = appendText(append(b.values, `,"status":`...), o.Status)
		b.values = append(b.values, '}')
	}
	b.values = append(b.values, ']')
	return b.add(m, from)
}

// JSON sets any value, given as JSON.
func (b *ExtBuilder) JSON(m Member, raw string) *ExtBuilder {
	s := scanner{s: raw}
	s.space()
	value, depth, ok := s.raw()
	if s.space(); !ok || s.i != len(raw) {
		b.fail(fmt.Errorf("ect: the value of the extension %s is not JSON", m))
		value = "null"
	}
	if depth+1 > maxExtDepth {
		b.fail(errExtSize)
	}
	from := len(b.values)
	b.values = append(b.values, value...)
	return b.add(m, from)
}

var errExtSize = errors.New("ect: the extensions are over 4096 bytes or nest deeper than 5")

// encode appends the object. Where it would be too large, lists that may be cut lose
// elements from their end, the longest first; cut says so.
func (b *ExtBuilder) encode(dst []byte, v Vocabulary) (out []byte, cut bool, err error) {
	if b.err != nil {
		return dst, false, b.err
	}
	begin := len(dst)
	members := b.members
	for {
		dst = append(dst[:begin], '{')
		for _, m := range members {
			if len(dst) > begin+1 {
				dst = append(dst, ',')
			}
			dst = append(appendText(dst, v.Member(m.member)), ':')
			dst = append(dst, b.values[m.from:m.to]...)
		}
		dst = append(dst, '}')
		if len(dst)-begin <= maxExt {
			break
		}
		if members = b.shorten(members, len(dst)-begin-maxExt); members == nil {
			return dst, false, errExtSize
		}
		cut = true
	}
	return dst, cut, b.distinct(v)
}

// distinct holds that no two members have one name in the vocabulary.
func (b *ExtBuilder) distinct(v Vocabulary) error {
	if v == Cascade {
		return nil // where add has seen to it
	}
	var seen names
	for _, m := range b.members {
		if !seen.add(v.Member(m.member)) {
			return fmt.Errorf("ect: the extension %s is set twice", v.Member(m.member))
		}
	}
	return nil
}

// shorten gives the members with the longest list that may be cut shorter by excess
// bytes, or by half where that is more, so that another one becomes the longest before it
// is empty. Without such a list it gives nil. The builder keeps its own.
func (b *ExtBuilder) shorten(members []extMember, excess int) []extMember {
	longest, size := -1, 2
	for i, m := range members {
		row, ok := memberRows[string(m.member)]
		if ok && memberTable[row].cut && b.values[m.from] == '[' && m.to-m.from > size {
			longest, size = i, m.to-m.from
		}
	}
	if longest < 0 {
		return nil
	}
	m := members[longest]
	list := string(b.values[m.from:m.to])
	excess = min(excess, (len(list)+1)/2)
	s := scanner{s: list}
	keep := 1
	s.elements(func() bool {
		_, ok := s.value()
		if s.i+1 <= len(list)-excess {
			keep = s.i
		}
		return ok
	})
	from := len(b.values)
	b.values = append(append(b.values, list[:keep]...), ']')
	shorter := append([]extMember(nil), members...)
	shorter[longest].from, shorter[longest].to = from, len(b.values)
	return shorter
}
