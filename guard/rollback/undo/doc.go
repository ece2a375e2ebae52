// Package undo takes back one call, in the way that was decided before the call left: by
// putting back what stood there (restore), by another request (compensate), or by asking
// the agent that was called (delegate).
//
// The request of an undo that changes something runs through the guard, under the key
// (rollback, checkpoint), so that it too is sent at most once: after a crash the same
// Task goes on from what was recorded. Requests that only look are not guarded.
//
// # Compensate and delegate
//
// Answers are read by the contract of MicroProfile LRA (ADR 0035). What is not listed is
// ReasonUnexpected: of unknown effect, and sent again by another rollback only, under the
// same key.
//
//	2xx            done, but where the body says that it has failed; of a delegate where
//	               it says so in the words of one of the drafts, or nothing at all
//	202            under way: asked for at Location, else by the status request, else sent
//	               again with the same key after a while
//	410            it is gone already: done
//	409            it has failed for good: ReasonRefused
//	401, 403       ReasonUnauthorized
//	405, 411, 413, 414, 415, 421, 426, 431, 501
//	               turned away before anything was done: ReasonUnexpected, without effect
//	425, 429       not executed: sent again later
//	408, other 5xx in doubt: asked for, else sent again later
//	no answer      in doubt, or sent again later where not a byte was sent
//
// What is in doubt is asked for by the status request: 202 says wait, 404 says that
// nothing has arrived. Without one it is sent again under the same key, since
// compensations are idempotent by contract, or, with OnLost Escalate, left to a person.
//
// # Restore
//
// The target is read first and compared with what stood there before and after the call,
// by existence and by the bytes of the body: nobody but the upstream knows which
// differences mean nothing. What stands there as it was before is done and nothing is
// sent; what somebody has changed since is left alone unless OnChanged is Overwrite. Then
// the old state is written with the condition that nobody has changed it in between.
// Where the answer to that is lost, the target itself says what came of it.
package undo
