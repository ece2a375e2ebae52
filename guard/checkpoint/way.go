package checkpoint

import "fmt"

// Way is how a call can be undone. It is decided before the call leaves.
type Way uint8

// The ways.
const (
	// Restore: what stood there before is put back.
	Restore Way = 1 + iota
	// Compensate: another request takes the effect back.
	Compensate
	// Delegate: the agent that was called undoes it itself.
	Delegate
	// Irreversible: only a person can help (cascade 4.2.1).
	Irreversible
)

// String is the word of the configuration and of answers.
func (w Way) String() string {
	switch w {
	case Restore:
		return "restore"
	case Compensate:
		return "compensate"
	case Delegate:
		return "delegate"
	case Irreversible:
		return "irreversible"
	default:
		return "unknown"
	}
}

// ParseWay reads the words of Way.String.
func ParseWay(word string) (Way, error) {
	for w := Restore; w <= Irreversible; w++ {
		if w.String() == word {
			return w, nil
		}
	}
	return 0, fmt.Errorf("%q is no way to undo a call; use restore, compensate, delegate or irreversible", word)
}

// Reason says why a call cannot be undone. It is a fixed word and nothing of the call's.
type Reason string

// The reasons.
const (
	// ReasonDeclared: the action is configured so.
	ReasonDeclared Reason = "declared"
	// ReasonNoAction: no configured action matches the call.
	ReasonNoAction Reason = "no-action"
	// ReasonNoImage: what stood there could not be fetched.
	ReasonNoImage Reason = "no-image"
	// ReasonChanged: somebody else has changed what stood there while the call ran, so that
	// nobody knows what is the call's own.
	ReasonChanged Reason = "changed-meanwhile"
	// ReasonNotCreated: nothing was seen there before the call, and its answer does not say
	// that it has created something, so that it must not be deleted.
	ReasonNotCreated Reason = "not-created"
	// ReasonAbsent: a value that the undo needs is not there.
	ReasonAbsent Reason = "absent-value"
	// ReasonMethod: what a call with this method has done cannot be put back.
	ReasonMethod Reason = "method"
	// ReasonTooLarge: what the undo needs is larger than what is kept.
	ReasonTooLarge Reason = "too-large"
	// ReasonUnkept: the store had no room for what the undo needs of the answer.
	ReasonUnkept Reason = "not-kept"
)
