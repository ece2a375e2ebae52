package breaker

import "time"

// Class is what came of a call, as far as the upstream's health is concerned. The
// caller classifies.
type Class uint8

const (
	// Neutral says nothing about the upstream: the client left, the call was refused
	// by ourselves, or nobody knows. It is the zero value, so that a deferred Done
	// with an empty Outcome is right on every exit path.
	Neutral Class = iota
	// Success is a whole answer that is good.
	Success
	// Failure is an upstream that cannot be reached, breaks, or answers with a fault.
	Failure
	// RateLimited is a refusal for too many calls (429): the upstream lives, so it is
	// in no rate; a probe that gets it has failed.
	RateLimited
	// InBand is a failure inside an answer that began well: an error in the body, an
	// error event of a stream, a truncated body. It counts as Failure does.
	InBand
)

var classNames = []string{"neutral", "success", "failure", "rate_limited", "in_band"}

func (c Class) String() string { return nameOf(classNames, int(c)) }

// Outcome is what a caller tells of a call that has ended.
type Outcome struct {
	Class Class
	// RetryAfter is how long the upstream asked not to be called; 0 if it did not. It
	// lengthens the cooldown, up to Settings.MaxRetryAfter.
	RetryAfter time.Duration
	// Cause names the failure for people, in a few words. It shows in events, refusals
	// and status, so it must hold no secret.
	Cause string
	// Evidence is the caller's reference to the failure, such as the id of an error
	// token. The breaker only hands it on.
	Evidence string
}
