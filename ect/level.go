package ect

// Level is the assurance that a token gives. Higher is more.
type Level uint8

// The levels of the draft.
const (
	// L1 is unsigned JSON: a record that says so of itself.
	L1 Level = iota + 1
	// L2 is a signed token.
	L2
	// L3 is a signed token that stands in an audit ledger.
	L3
)

func (l Level) String() string {
	switch l {
	case L1:
		return "L1"
	case L2:
		return "L2"
	case L3:
		return "L3"
	}
	return "none"
}
