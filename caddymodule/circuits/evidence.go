package circuits

import "context"

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
