package rollback

import (
	"errors"
	"fmt"
)

// Errors of a Coordinator. Others that it returns as they are: checkpoint.ErrTampered and
// checkpoint.ErrExpired of the target, *plan.DependedOnError, *plan.ScopeError.
var (
	// ErrInvalid: the request breaks a rule; the message says which.
	ErrInvalid = errors.New("rollback: invalid request")
	// ErrUnknown: no rollback has this id, or it is not kept any more.
	ErrUnknown = errors.New("rollback: no such rollback")
	// ErrNotInWorkflow: the requester may not ask for this checkpoint, or there is none. The
	// two are not told apart (P3).
	ErrNotInWorkflow = errors.New("rollback: not in the workflow of the checkpoint, or not among its ancestors")
	// ErrCheckpointUnknown: there is no such checkpoint. Only operators and coordinators
	// are told.
	ErrCheckpointUnknown = errors.New("rollback: no such checkpoint")
	// ErrUnnamed: the token that asks names neither the checkpoint nor an error that follows
	// from it. Only who may ask for the checkpoint is told.
	ErrUnnamed = errors.New("rollback: the token names neither the checkpoint nor an error that follows from it")
	// ErrMismatch: the id, or the token that asks, was used for another rollback.
	ErrMismatch = errors.New("rollback: the id or the token was used for another request")
	// ErrStore: the store, or who tells of workflows, did not answer. Nothing was begun (P4).
	ErrStore = errors.New("rollback: the store is unavailable")
	// ErrStopping: the process is about to end and begins nothing new.
	ErrStopping = errors.New("rollback: shutting down")
	// ErrUnreadable: a record of a rollback stands there and cannot be read. It comes with
	// ErrStore.
	ErrUnreadable = errors.New("rollback: the record cannot be read")
	// ErrCursor: the text does not say where a page begins.
	ErrCursor = errors.New("rollback: this is not where a page begins; give what an earlier page named as the next")
)

// ConflictError refuses a rollback that overlaps with another one, which takes
// precedence (cascade 4.3.4).
type ConflictError struct {
	// Winner is the id of the other one.
	Winner string
}

// Error implements error.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("rollback: rollback %s is under way and takes precedence", e.Winner)
}
