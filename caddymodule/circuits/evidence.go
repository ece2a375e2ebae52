package circuits

import (
	"context"
	"time"
)

type evidenceKey struct{}

// WithEvidence lets the failures of a request tell what they are known by: the id of a
// token, which the breaker hands on in its events, refusals and status.
func WithEvidence(ctx context.Context, id string) context.Context {
	if id == "" {
		return ctx
	}
	return context.WithValue(ctx, evidenceKey{}, id)
}

// EvidenceOf is what WithEvidence has said; empty if it has not.
func EvidenceOf(ctx context.Context) string {
	id, _ := ctx.Value(evidenceKey{}).(string)
	return id
}

type impatientKey struct{}

// Impatient says that the deadline of a request is its caller's and not the upstream's
// to meet: that it passes is no failure. Patience is how long the call may hang until it
// is one.
func Impatient(ctx context.Context, patience time.Duration) context.Context {
	return context.WithValue(ctx, impatientKey{}, patience)
}

// PatienceOf is what Impatient has said; false if it has not.
func PatienceOf(ctx context.Context) (time.Duration, bool) {
	d, ok := ctx.Value(impatientKey{}).(time.Duration)
	return d, ok
}
