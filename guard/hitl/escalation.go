package hitl

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Level says how much is held until a human has decided (ATD, Interaction with HITL).
type Level uint8

// The levels.
const (
	// Pause holds the workflow before its next step.
	Pause Level = 1 + iota
	// Approval holds the one step that needs it.
	Approval
	// Stop holds the workflow until a human lifts it.
	Stop
)

// String is the word used in documents and logs.
func (l Level) String() string {
	switch l {
	case Pause:
		return "pause"
	case Approval:
		return "approval"
	case Stop:
		return "stop"
	default:
		return fmt.Sprintf("level_%d", uint8(l))
	}
}

// Cause is why an escalation was opened. The set is closed when one is opened and open
// when one is read: a newer build may know more.
type Cause string

// The causes.
const (
	// CauseIrreversible: what is to be undone cannot be (cascade 4.2.1).
	CauseIrreversible Cause = "irreversible_rollback"
	// CauseRollbackFailed: a rollback ended as failed (ATD, HITL case 2).
	CauseRollbackFailed Cause = "rollback_failed"
	// CauseRollbackTimeout: a rollback was not done within half of the checkpoint's ttl.
	CauseRollbackTimeout Cause = "rollback_timeout"
	// CauseRollbackPartial: a rollback undid a part.
	CauseRollbackPartial Cause = "rollback_partial"
	// CauseBreakerOpen: an upstream does not come back (ATD, HITL case 4).
	CauseBreakerOpen Cause = "breaker_permanently_open"
	// CauseTampered: a checkpoint is not what was recorded.
	CauseTampered Cause = "checkpoint_tampered"
	// CauseBoundary: a failure would cross into another workflow (cascade 3.3.2).
	CauseBoundary Cause = "workflow_boundary"
	// CauseQuota: somebody asks for more than a quota allows, again and again.
	CauseQuota Cause = "quota"
	// CauseOther: the summary says it.
	CauseOther Cause = "other"
)

// Causes lists the causes that an escalation may be opened with.
func Causes() []Cause {
	return []Cause{
		CauseIrreversible, CauseRollbackFailed, CauseRollbackTimeout, CauseRollbackPartial, CauseBreakerOpen,
		CauseTampered, CauseBoundary, CauseQuota, CauseOther,
	}
}

// State is where an escalation stands. 4 and 5 are left for decided and expired.
type State uint8

// The states.
const (
	// Open: nobody was told yet. Such an escalation never expires.
	Open State = 1 + iota
	// Notified: the notifier has taken it.
	Notified
	// Undeliverable: the notifier refused it for good, or did not take it in time. It
	// needs a human as much as before.
	Undeliverable
)

// States lists the states, in the order in which they are documented.
func States() []State { return []State{Open, Notified, Undeliverable} }

// String is the word used in documents and logs.
func (s State) String() string {
	switch s {
	case Open:
		return "open"
	case Notified:
		return "notified"
	case Undeliverable:
		return "undeliverable"
	default:
		return fmt.Sprintf("state_%d", uint8(s))
	}
}

// Links lead from an escalation to what it is about. All are optional. Longer ones than
// 2,048 bytes are cut.
type Links struct {
	// Checkpoint and Error are ids of tokens, Rollback is a rollback's id.
	Checkpoint, Rollback, Error string
	// Execution is the hash that names an execution, as operators see it.
	Execution string
	// Upstream is an upstream's address.
	Upstream string
}

// Opening is what somebody asks a human to look at. It holds nothing secret: it is sent
// to the notifier as it is (P8).
type Opening struct {
	// Key names the occasion, say a rollback id and a checkpoint: the same key is the
	// same escalation, for as long as that is kept. It is not stored.
	Key string
	// Level is Pause, Approval or Stop.
	Level Level
	// Cause is one of Causes.
	Cause Cause
	// Summary is a sentence for people; it is cut at 1,024 bytes.
	Summary string
	// Workflow and Caller may be empty; they are cut at 2,048 bytes. Caller is the name by
	// which operators know it, never a credential.
	Workflow, Caller string
	Links            Links
}

// ErrOpening: what was to be opened is not complete.
var ErrOpening = errors.New("hitl: the escalation cannot be opened")

func (o *Opening) check() error {
	switch {
	case o.Key == "":
		return fmt.Errorf("%w: key is empty; it names the occasion", ErrOpening)
	case o.Level < Pause || o.Level > Stop:
		return fmt.Errorf("%w: level is %d; use 1 (pause), 2 (approval) or 3 (stop)", ErrOpening, o.Level)
	case !slices.Contains(Causes(), o.Cause):
		return fmt.Errorf("%w: cause is %q; use one of %q", ErrOpening, o.Cause, Causes())
	case o.Summary == "":
		return fmt.Errorf("%w: summary is empty; write a sentence for whoever has to decide", ErrOpening)
	}
	return nil
}

// Escalation is what is recorded of an Opening. It is sealed in the store.
type Escalation struct {
	// ID is a UUID. It follows from the key of the opening and the store's index key, so
	// that it is known before the commit and tells nothing of the key. A key that is opened
	// again after its escalation has expired has the same id.
	ID               string
	Level            Level
	Cause            Cause
	Summary          string
	Workflow, Caller string
	Links            Links
	State            State
	// Opened and Changed are when it was opened, and when its state last changed.
	Opened, Changed time.Time
	Delivery        Delivery

	unknown []byte // fields of a newer build, which are written back as they are
}

// Delivery is what became of telling somebody.
type Delivery struct {
	// Attempts counts the attempts that were begun.
	Attempts int
	// LastError is why the last one that failed did, at most 512 bytes; empty once one
	// succeeded.
	LastError string
	// Next is when the next attempt is due; zero where none is. While one runs it is when
	// somebody else may begin another, because this one must have been lost.
	Next time.Time
}
