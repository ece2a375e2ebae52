package ect

import (
	"math"
	"strconv"
)

// The limits of the extensions. The drafts' SHOULD is held always.
const (
	maxExt      = 4096
	maxExtDepth = 5
)

// Ext reads the extension members of a token, by their names in the cascade
// vocabulary whatever the token's own is.
type Ext struct {
	raw   string
	event Event
}

// JSON is the whole object as it was received, "" where there is none.
func (e Ext) JSON() string { return e.raw }

// Raw is the value of a member as JSON.
func (e Ext) Raw(m Member) (string, bool) {
	if e.raw == "" {
		return "", false
	}
	row, known := memberRow(string(m), e.event)
	var value string
	found := false
	s := scanner{s: e.raw}
	s.document(func(name string) bool {
		text, _, ok := s.raw()
		if r, is := memberRow(name, e.event); ok && !found && (name == string(m) || known && is && r == row) {
			value, found = text, true
		}
		return ok
	})
	return value, found
}

// Text is the value of a member that is a string.
func (e Ext) Text(m Member) (string, bool) {
	raw, _ := e.Raw(m)
	return unquote(raw)
}

func unquote(raw string) (string, bool) {
	s := scanner{s: raw}
	return s.text()
}

// Bool is the value of a member that is true or false.
func (e Ext) Bool(m Member) (value, ok bool) {
	raw, _ := e.Raw(m)
	return raw == "true", raw == "true" || raw == "false"
}

// Number is the value of a member that is a number.
func (e Ext) Number(m Member) (float64, bool) {
	raw, ok := e.Raw(m)
	if !ok || !isNumber(raw) {
		return 0, false
	}
	v, err := strconv.ParseFloat(raw, 64)
	return v, err == nil
}

func isNumber(raw string) bool { return raw != "" && (raw[0] == '-' || '0' <= raw[0] && raw[0] <= '9') }

// Int is the value of a member that is a whole number.
func (e Ext) Int(m Member) (int64, bool) {
	v, ok := e.Number(m)
	if !ok || v != math.Trunc(v) || math.Abs(v) > 1<<53 {
		return 0, false
	}
	return int64(v), true
}

// Texts is the value of a member that is a list of strings.
func (e Ext) Texts(m Member) ([]string, bool) {
	raw, _ := e.Raw(m)
	s := scanner{s: raw}
	list := []string{}
	ok := s.elements(func() bool {
		v, ok := s.text()
		list = append(list, v)
		return ok
	})
	return list, ok
}

// Outcome is what became of one agent in a rollback.
type Outcome struct {
	// Agent is its identity.
	Agent string
	// Status is completed, partial, escalated or failed.
	Status string
}

// Outcomes is the value of a member like cascade.cascaded.
func (e Ext) Outcomes(m Member) ([]Outcome, bool) {
	raw, _ := e.Raw(m)
	s := scanner{s: raw}
	list := []Outcome{}
	ok := s.elements(func() bool {
		var o Outcome
		ok := s.members(func(name string) (ok bool) {
			switch name {
			case "agent":
				o.Agent, ok = s.text()
			case "status":
				o.Status, ok = s.text()
			default:
				_, ok = s.value()
			}
			return ok
		})
		list = append(list, o)
		return ok
	})
	return list, ok
}

// lacks are the members of the event that are not there or have another type.
func (e Ext) lacks(v Vocabulary) []Member {
	i, ok := eventRows[string(e.event)]
	if !ok {
		return nil
	}
	var missing []Member
	for _, m := range eventTable[i].needs {
		if _, named := v.own(m); !named {
			continue
		}
		raw, _ := e.Raw(m)
		if !memberTable[memberRows[string(m)]].kind.fits(raw) {
			missing = append(missing, m)
		}
	}
	return missing
}

// fits reports whether the JSON is of this kind.
func (k kind) fits(raw string) bool {
	switch k {
	case textKind:
		return raw != "" && raw[0] == '"'
	case numberKind:
		return isNumber(raw)
	case boolKind:
		return raw == "true" || raw == "false"
	default:
		return raw != "" && raw[0] == '['
	}
}

// readExt takes the extensions of a token and holds their limits: the size as received,
// and the depth, where the object itself is one and every object or list in it one more.
func (s *scanner) readExt() (string, bool) {
	if s.peek() != '{' {
		return "", false
	}
	raw, depth, ok := s.raw()
	return raw, ok && len(raw) <= maxExt && depth <= maxExtDepth
}

// consistent holds that a member that is there under the names of two vocabularies has
// one value: else each reader would believe another one.
func (e Ext) consistent() bool {
	var values [len(memberTable)]string
	s := scanner{s: e.raw}
	return e.raw == "" || s.document(func(name string) bool {
		text, _, ok := s.raw()
		if i, known := memberRow(name, e.event); known {
			if values[i] != "" && !sameJSON(values[i], text) {
				return false
			}
			values[i] = text
		}
		return ok
	})
}
