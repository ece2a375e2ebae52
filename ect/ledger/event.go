package ledger

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Limits of an event, so that every entry fits into a value of every store.
const (
	// MaxPayload is the largest payload, in bytes.
	MaxPayload = 32 << 10
	// MaxName is the longest id, workflow, action or parent, in bytes.
	MaxName = 256
	// MaxIssuer is the longest issuer, in bytes.
	MaxIssuer = 2048
	// MaxParents is the largest number of parents.
	MaxParents = 100
	// maxLeaf is the longest encoding of an entry.
	maxLeaf = MaxPayload + MaxIssuer + 3*MaxName + MaxParents*(MaxName+fieldOverhead) + fixedOverhead
)

// Event is one thing that was decided.
type Event struct {
	// ID names the event (jti): once in its workflow, and once anywhere where it has none.
	// Of events that come at the same time the log holds to the second for signed ones.
	ID string
	// Workflow is the workflow's id (wid); it may be empty.
	Workflow string
	// Action says what was done (exec_act).
	Action string
	// Issuer is who says so (iss).
	Issuer string
	// Parents are the ids of the events that led to it.
	Parents []string
	// Time is when it happened, as the event itself tells (iat).
	Time time.Time
	// KeepUntil is the time before which the entry is never pruned; zero asks for
	// nothing beyond the retention of the log.
	KeepUntil time.Time
	// Payload is the event's token.
	Payload []byte
	// Unsigned says that Payload is what the log's Signer makes the token from. In an
	// Entry it says that no token could be made of it.
	Unsigned bool
	// Draft is Payload as the Signer takes it, where that is at hand: it is not
	// recorded, so that after a crash there is none.
	Draft any
}

// Entry is an event with its place in a log.
type Entry struct {
	Event
	// Log is the origin of the log that holds it.
	Log string
	// Index is its place, from 0.
	Index int64
	// Recorded is when it came into the tree. It never decreases with the index.
	Recorded time.Time
	// Leaf are the exact bytes that the tree's leaf hash is made of.
	Leaf []byte
}

// Errors of a log.
var (
	// ErrInvalid: the event breaks a limit.
	ErrInvalid = errors.New("ledger: invalid event")
	// ErrDuplicate: the workflow has an event with this id.
	ErrDuplicate = errors.New("ledger: an event with this id is recorded")
	// ErrNotFound: no such entry.
	ErrNotFound = errors.New("ledger: not found")
	// ErrWaiting: the event is recorded and has no place in the tree yet.
	ErrWaiting = errors.New("ledger: recorded, not yet in the tree")
	// ErrPruned: the entry's content was pruned; its hash is still in the tree.
	ErrPruned = errors.New("ledger: the entry was pruned")
	// ErrTampered: what the store holds is not what was written, or an older state of
	// it. The log takes nothing more.
	ErrTampered = errors.New("ledger: the log was altered")
	// ErrClosed: the log was closed.
	ErrClosed = errors.New("ledger: closed")
	// ErrRefused is wrapped by a Signer for an event of which it will never make a
	// token. The event goes into the tree as it is, marked as unsigned.
	ErrRefused = errors.New("ledger: the event cannot be signed")
	// ErrProof: a receipt, proof or head does not hold.
	ErrProof = errors.New("ledger: the proof does not hold")
)

func (e *Event) check() error {
	switch {
	case e.ID == "":
		return fmt.Errorf("%w: no id", ErrInvalid)
	case len(e.ID) > MaxName, len(e.Workflow) > MaxName, len(e.Action) > MaxName:
		return fmt.Errorf("%w: a name is longer than %d bytes", ErrInvalid, MaxName)
	case len(e.Issuer) > MaxIssuer:
		return fmt.Errorf("%w: the issuer is longer than %d bytes", ErrInvalid, MaxIssuer)
	case len(e.Parents) > MaxParents:
		return fmt.Errorf("%w: %d parents, at most %d", ErrInvalid, len(e.Parents), MaxParents)
	case len(e.Payload) == 0 || len(e.Payload) > MaxPayload:
		return fmt.Errorf("%w: payload of %d bytes, from 1 to %d", ErrInvalid, len(e.Payload), MaxPayload)
	case !encodable(e.Time) || !encodable(e.KeepUntil):
		return fmt.Errorf("%w: a time is out of range", ErrInvalid)
	}
	for _, p := range e.Parents {
		if p == "" || len(p) > MaxName {
			return fmt.Errorf("%w: a parent of %d bytes, from 1 to %d", ErrInvalid, len(p), MaxName)
		}
	}
	return nil
}

var (
	firstTime = time.Unix(0, math.MinInt64)
	lastTime  = time.Unix(0, math.MaxInt64)
)

// encodable reports whether t fits into nanoseconds since 1970, or is zero.
func encodable(t time.Time) bool {
	return t.IsZero() || t.After(firstTime) && t.Before(lastTime)
}
