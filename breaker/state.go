package breaker

import "fmt"

// State is where a breaker stands. Its text is that of the circuits endpoint
// (cascade 3.2.3): closed, open, half_open.
type State uint8

const (
	Closed   State = iota // calls flow and are counted
	Open                  // every call is refused
	HalfOpen              // one probe decides
)

var stateNames = []string{"closed", "open", "half_open"}

func (s State) String() string { return nameOf(stateNames, int(s)) }

// MarshalText gives the state's name. It fails on a value that is no state.
func (s State) MarshalText() ([]byte, error) { return marshalName(stateNames, int(s), "state") }

// UnmarshalText reads a state's name.
func (s *State) UnmarshalText(text []byte) error {
	i, err := unmarshalName(stateNames, text, "state")
	*s = State(i)
	return err
}

// Mode is what an operator wants of a breaker. Its text is auto, observe,
// forced_open or forced_closed.
type Mode uint8

const (
	Auto         Mode = iota // the breaker decides
	Observe                  // the breaker decides, and refuses nobody
	ForcedOpen               // every call is refused
	ForcedClosed             // no call is refused; outcomes are counted
)

var modeNames = []string{"auto", "observe", "forced_open", "forced_closed"}

func (m Mode) String() string { return nameOf(modeNames, int(m)) }

// MarshalText gives the mode's name. It fails on a value that is no mode.
func (m Mode) MarshalText() ([]byte, error) { return marshalName(modeNames, int(m), "mode") }

// UnmarshalText reads a mode's name.
func (m *Mode) UnmarshalText(text []byte) error {
	i, err := unmarshalName(modeNames, text, "mode")
	*m = Mode(i)
	return err
}

// Reason is why a breaker changed its state.
type Reason string

// The reasons of transitions. Where several hold at once, the first in this order is
// given.
const (
	ErrorRate     Reason = "error_rate"    // more failures than the threshold
	Consecutive   Reason = "consecutive"   // that many failures in a row
	SlowCalls     Reason = "slow_calls"    // more slow answers than their threshold
	OverdueCalls  Reason = "overdue_calls" // more than the threshold, with calls that hang
	CooldownOver  Reason = "cooldown_over" // OPEN to HALF_OPEN
	ProbePassed   Reason = "probe_passed"  // HALF_OPEN to CLOSED
	ProbeFailed   Reason = "probe_failed"  // HALF_OPEN to OPEN
	ProbeTimedOut Reason = "probe_timeout" // HALF_OPEN to OPEN: the lease ran out
	ByOperator    Reason = "operator_mode" // SetMode
	StricterView  Reason = "stricter_view" // of a refusal, and no transition: a View
)

func nameOf(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("unknown(%d)", i)
}

func marshalName(names []string, i int, what string) ([]byte, error) {
	if i >= len(names) {
		return nil, fmt.Errorf("breaker: %d is no %s; it is one of %v", i, what, names)
	}
	return []byte(names[i]), nil
}

func unmarshalName(names []string, text []byte, what string) (int, error) {
	for i, name := range names {
		if string(text) == name {
			return i, nil
		}
	}
	return 0, fmt.Errorf("breaker: %q is no %s; it is one of %v", text, what, names)
}
