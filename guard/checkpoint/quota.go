package checkpoint

import (
	"context"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Quota bounds what stands of one workflow or one caller at a time, so that nobody can
// fill the store with checkpoints (cascade 6.3). A zero member is no bound. Living
// checkpoints are never given up for new ones (cascade 4.2.2). Who has no bound is not
// counted, so that a new one counts what is made from then on.
type Quota struct {
	// Count is the largest number of checkpoints.
	Count int
	// Bytes is the largest size of their snapshots, recorded credentials and results.
	// It is looked at before a call leaves; a large result is kept all the same.
	Bytes int64
}

// The words of a QuotaError.
const (
	OfWorkflow = "workflow"
	OfCaller   = "caller"
	OverCount  = "count"
	OverBytes  = "bytes"
	OverRate   = "rate"
)

// QuotaError refuses a checkpoint, and with it the call. Nothing was recorded.
type QuotaError struct {
	// Of is whose bound it is, OfWorkflow or OfCaller; Over says which, OverCount,
	// OverBytes or OverRate.
	Of, Over string
	// Most is the bound.
	Most int64
	// Retry is when, at the earliest, there is room again; zero where nothing that
	// stands expires.
	Retry time.Time
}

func (e *QuotaError) Error() string {
	switch e.Over {
	case OverRate:
		return fmt.Sprintf("checkpoint: the %s makes more than %d checkpoints in a minute", e.Of, e.Most)
	case OverCount:
		return fmt.Sprintf("checkpoint: the %s has %d checkpoints standing already", e.Of, e.Most)
	default:
		return fmt.Sprintf("checkpoint: the %s would have more than %d bytes of checkpoints", e.Of, e.Most)
	}
}

// bounds are what one scope is held to.
type bounds struct {
	of string
	Quota
	rate int
}

func (b bounds) none() bool { return b.Count <= 0 && b.Bytes <= 0 && b.rate <= 0 }

// of is what t holds a kind of scope to.
func (t *Terms) of(kind byte) bounds {
	if kind == kindWorkflow {
		return bounds{of: OfWorkflow, Quota: t.Workflow, rate: t.Rate}
	}
	return bounds{of: OfCaller, Quota: t.Caller}
}

// scopes are those that s counts in: with a bound of their own, so that nothing is written
// for the others.
func (v *Vault) scopes(s *Snapshot, counted func(kind byte) bool) []scope {
	var found []scope
	if counted(kindCaller) {
		found = append(found, scope{kind: kindCaller, hash: s.Caller})
	}
	if s.Workflow != "" && counted(kindWorkflow) {
		sum := v.sealer.Index("checkpoints of workflow", s.Workflow)
		found = append(found, scope{kind: kindWorkflow, hash: [16]byte(sum[:16])})
	}
	return found
}

// reservation is room for a checkpoint that waits for its commit.
type reservation struct {
	v     *Vault
	h     *Handle
	taken []room
}

// room is what was taken in one scope.
type room struct {
	u       *usage
	until   time.Time // expiry of the note that is written with it; zero without one
	counted bool      // u holds it already
	rated   bool      // the rate was drawn on
}

// reserve takes room for the checkpoint in all of its scopes, or in none.
func (v *Vault) reserve(ctx context.Context, h *Handle, t *Terms, now time.Time) (*reservation, error) {
	r := &reservation{v: v, h: h}
	for _, s := range h.scopes {
		u := v.usages.of(s)
		taken, err := u.reserve(ctx, v, h, t.of(s.kind), now)
		if err != nil {
			v.usages.giveBack(u)
			r.ended(err)
			return nil, err
		}
		r.taken = append(r.taken, taken)
	}
	return r, nil
}

// notes are the writes that tell a later life where to count.
func (r *reservation) notes() []store.Write {
	var writes []store.Write
	for _, t := range r.taken {
		if !t.until.IsZero() {
			writes = append(writes, store.Write{Key: t.u.scope.note(), Expires: t.until})
		}
	}
	return writes
}

// ended counts what came of the commit. What may have landed counts as if it had: less
// is admitted, never more.
func (r *reservation) ended(err error) {
	for _, t := range r.taken {
		t.ended(r.h, err)
		r.v.usages.giveBack(t.u)
	}
}

// charge changes what a standing checkpoint counts for.
func (v *Vault) charge(h Handle, n int, bytes int64) {
	for _, s := range h.scopes {
		if u := v.usages.known(s); u != nil {
			u.add(&h, n, bytes)
		}
	}
}
