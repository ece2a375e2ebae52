package circuits

import (
	"context"
	"strings"
	"time"
)

// Evidence is what the failures of a call are known by. As text a breaker keeps it, and
// hands it on in its events, refusals and status.
type Evidence struct {
	// Checkpoint is the id of the token that announced the call; nothing is known of a
	// call without.
	Checkpoint string
	// Workflow is the id of the workflow that it stands in; it may be empty.
	Workflow string
}

// String is the text of e; empty without a checkpoint.
func (e Evidence) String() string {
	if e.Checkpoint == "" || e.Workflow == "" {
		return e.Checkpoint
	}
	return e.Checkpoint + "@" + e.Workflow
}

// ParseEvidence reads the text of an Evidence. Ids have no @ in them.
func ParseEvidence(text string) (e Evidence) {
	e.Checkpoint, e.Workflow, _ = strings.Cut(text, "@")
	return e
}

type evidenceKey struct{}

// WithEvidence lets the failures of a request tell what they are known by.
func WithEvidence(ctx context.Context, e Evidence) context.Context {
	if e.Checkpoint == "" {
		return ctx
	}
	return context.WithValue(ctx, evidenceKey{}, e)
}

// EvidenceOf is what WithEvidence has said, as text; empty if it has not.
func EvidenceOf(ctx context.Context) string {
	e, _ := ctx.Value(evidenceKey{}).(Evidence)
	return e.String()
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
