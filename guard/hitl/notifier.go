package hitl

import (
	"context"
	"errors"
	"time"
)

// Notifier tells somebody of an escalation.
//
// It is told at least once: after a crash, a lost answer or a lease that ran out it gets
// the same escalation again, perhaps at another node. Escalation.ID is the message's id, by
// which a receiver tells repetitions. nil means that the message was taken. ErrRefused
// means that it never will be; a *LaterError says when to come again; after any other error
// it is tried again. The error's text is recorded and reported: nothing secret is in it (P8).
type Notifier interface {
	// Notify returns before ctx is done, soon after it at the latest.
	Notify(ctx context.Context, e Escalation) error
}

// NotifierFunc is a function as a Notifier.
type NotifierFunc func(ctx context.Context, e Escalation) error

// Notify implements Notifier.
func (f NotifierFunc) Notify(ctx context.Context, e Escalation) error { return f(ctx, e) }

// ErrRefused: the receiver does not take this message, now or later.
var ErrRefused = errors.New("hitl: refused for good")

// LaterError says that the receiver asks to be left alone for a while.
type LaterError struct {
	// After is how long. It is honoured from the backoff's own time up to an hour.
	After time.Duration
	// Err is what happened.
	Err error
}

func (e *LaterError) Error() string { return e.Err.Error() }
func (e *LaterError) Unwrap() error { return e.Err }
