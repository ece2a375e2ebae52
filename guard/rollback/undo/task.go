package undo

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// Task is one checkpoint to undo, for one rollback. The same Task goes on where an
// earlier one was cut off.
type Task struct {
	// Rollback is the rollback's id, a UUID in its canonical form.
	Rollback string
	// Again is the id of a later rollback that takes up what Rollback has left in doubt;
	// empty for the first. What is sent still has the ids of Rollback: only so can the
	// upstream tell that it is the same.
	Again string
	// Forgotten says that Rollback is not remembered any more: its key may have been in use,
	// though it is free.
	Forgotten bool
	// Step is the checkpoint that the rollback names, where that is another attempt of the
	// call than Checkpoint.
	Step string
	// Checkpoint is what was read and verified.
	Checkpoint *checkpoint.Checkpoint
	// Reason is told to delegates.
	Reason string
	// Due is when the rollback must be done: nothing is sent after it. What came of what
	// was sent before is still asked once. The zero time is never.
	Due time.Time
	// Quit is closed when the process is about to end: a request under way is waited for,
	// and none is sent after a pause. Nil is never.
	Quit <-chan struct{}
}

var (
	// ErrTask: a Task is not whole.
	ErrTask = errors.New("undo: no task")
	// ErrQuit: the process ends. The same Task goes on later.
	ErrQuit = errors.New("undo: the process ends")
)

func (t *Task) check() error {
	switch {
	case t.Rollback == "" || strings.Contains(t.Rollback+t.Again, "/"):
		return fmt.Errorf("%w: the rollback's id is empty or has a slash", ErrTask)
	case t.Checkpoint == nil || t.Checkpoint.Snapshot == nil:
		return fmt.Errorf("%w: without a checkpoint", ErrTask)
	}
	return nil
}

// Result is what came of an undo.
type Result struct {
	// Done says that the effect is gone: proven, or by the contract of the answer.
	Done bool
	// Unknown says that nobody knows whether the undo had its effect, or whether there is one
	// to be undone. Never with Done.
	Unknown bool
	// Reason is a fixed word that says why it is not done; empty where it is.
	Reason Reason
	// Cause is why it is ReasonIrreversible, as the checkpoint knows it; empty otherwise.
	Cause checkpoint.Reason
	// Status is that of the last answer to the undo; 0 without one.
	Status int
	// Attempts counts how often the undo itself was sent. Of earlier lives of the gateway
	// it counts what they have recorded: at least one where they left it in doubt.
	Attempts int
	// Before and After are salted SHA-256 hashes of the bodies that stood there before and
	// after the undo: equal for equal bodies under one Task.Rollback, and nowhere else. Zero where nothing stood there, where it was not looked at (After without
	// Verify), and for what is not restored.
	Before, After [32]byte
}

// Reason says why an undo is not done. It is a fixed word.
type Reason string

// The reasons.
const (
	ReasonIrreversible  Reason = "irreversible"   // it cannot be undone
	ReasonChanged       Reason = "changed-since"  // somebody has changed it after the call
	ReasonRefused       Reason = "refused"        // 409: it has failed for good
	ReasonUnauthorized  Reason = "unauthorized"   // 401 or 403
	ReasonUnexpected    Reason = "unexpected"     // an answer that the contract does not know
	ReasonLost          Reason = "answer-lost"    // no answer that tells, and it may have had its effect
	ReasonUnreachable   Reason = "unreachable"    // no answer, and nothing was sent
	ReasonTimeout       Reason = "timeout"        // not done when the rollback was due
	ReasonUnfilled      Reason = "template"       // the request cannot be made of what was recorded
	ReasonNoUpstream    Reason = "no-upstream"    // the configuration does not lead there any more
	ReasonNoCredentials Reason = "no-credentials" // the recorded credentials are gone, or for another server
	ReasonOtherUpstream Reason = "other-upstream" // the configuration leads elsewhere than the recorded credentials may go
	ReasonPartial       Reason = "partial"        // the delegate has undone a part
	ReasonEscalated     Reason = "escalated"      // the delegate has left it to a person
	ReasonUnverified    Reason = "unverified"     // after it, something else stands there
	ReasonNoPostImage   Reason = "no-image"       // what stood there is not known
)
