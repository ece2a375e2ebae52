package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Quota bounds the checkpoints of one workflow or one caller at a time, so that nobody can fill
// the store with them (cascade 6.3). Zero is no bound. Living checkpoints are never given up for
// new ones (cascade 4.2.2). Without a bound nothing is counted, so a new bound counts from its
// beginning on.
type Quota struct {
	// Count is the largest number of checkpoints.
	Count int
	// Bytes is the largest size of their snapshots, recorded credentials and results. It is
	// checked before a call leaves; a large result is kept all the same.
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
	// Of is OfWorkflow or OfCaller; Over is the exceeded bound: OverCount, OverBytes or OverRate.
	Of, Over string
	// Most is the bound.
	Most int64
	// Retry is the earliest time at which there is room again; zero if nothing expires.
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

// bounds are the bounds of one scope.
type bounds struct {
	of string
	Quota
	rate int
}

func (b bounds) none() bool { return b.Count <= 0 && b.Bytes <= 0 && b.rate <= 0 }

// of returns the bounds of a kind of scope.
func (t *Terms) of(kind byte) bounds {
	if kind == kindWorkflow {
		return bounds{of: OfWorkflow, Quota: t.Workflow, rate: t.Rate}
	}
	return bounds{of: OfCaller, Quota: t.Caller}
}

// scopes are the bounded ones in which s counts. Nothing is written for the others.
func (v *Store) scopes(s *Snapshot, counted func(kind byte) bool) []scope {
	var found []scope
	if counted(kindCaller) {
		found = append(found, scope{kind: kindCaller, hash: s.Caller})
	}
	if s.Workflow != "" && counted(kindWorkflow) {
		sum := store.Index(v.sealer, "checkpoints of workflow", s.Workflow)
		found = append(found, scope{kind: kindWorkflow, hash: [16]byte(sum[:16])})
	}
	return found
}

// marks are facts about a workflow or a caller besides its checkpoints.
type marks struct {
	loaded bool      // noted is known
	noted  time.Time // until when the store says that the index may hold something
	ready  time.Time // when the bucket of the rate is full again

	allowance store.Allowance // where several gateways share the store
}

type usage = store.Usage[marks]

// reservation is room for a checkpoint that waits for its commit.
type reservation struct {
	v     *Store
	h     *Handle
	taken []room
}

type room struct {
	u        *usage
	scope    scope
	until    time.Time     // expiry of the note that is written with it; zero without one
	interval time.Duration // by which the bucket of the rate is full later
}

// reserve takes room for the checkpoint in all of its scopes, or in none.
func (v *Store) reserve(ctx context.Context, h *Handle, t *Terms, now time.Time) (*reservation, error) {
	r := &reservation{v: v, h: h}
	for _, s := range h.scopes {
		u := v.usages.Enter(s)
		taken, err := v.take(ctx, u, s, h, t.of(s.kind), now)
		if err != nil {
			v.usages.Leave(u)
			r.ended(err)
			return nil, err
		}
		r.taken = append(r.taken, taken)
	}
	return r, nil
}

// notes are the writes that say, after a restart, where to count.
func (r *reservation) notes() []store.Write {
	var writes []store.Write
	for _, t := range r.taken {
		if !t.until.IsZero() {
			writes = append(writes, store.Write{Key: t.scope.note(), Expires: t.until})
		}
	}
	return writes
}

// ended counts the result of the commit. A commit that may have landed counts as landed.
func (r *reservation) ended(err error) {
	for _, t := range r.taken {
		t.u.Lock()
		switch {
		case err == nil && !t.until.IsZero():
			t.u.State.noted = t.until
		case err != nil && !errors.Is(err, store.ErrUnknown):
			t.u.Add(-1, -r.h.charge, r.h.created, r.h.expires)
			t.u.State.ready = t.u.State.ready.Add(-t.interval)
		}
		t.u.Unlock()
		r.v.usages.Leave(t.u)
	}
}

// charge changes the size that a living checkpoint counts for.
func (v *Store) charge(h Handle, n int, bytes int64) {
	for _, s := range h.scopes {
		if u := v.usages.Known(s); u != nil {
			u.Lock()
			u.Add(n, bytes, h.created, h.expires)
			u.Unlock()
		}
	}
}

// take takes room for the checkpoint in one scope, or returns a QuotaError.
func (v *Store) take(ctx context.Context, u *usage, s scope, h *Handle, b bounds, now time.Time) (room, error) {
	u.Lock()
	defer u.Unlock()
	if err := v.count(ctx, u, s, b.rate); err != nil {
		return room{}, err
	}
	retry, taken, ready := u.Expire(now), room{u: u, scope: s}, u.State.ready
	if b.rate > 0 {
		taken.interval = time.Minute / time.Duration(b.rate)
		ready = later(ready, now).Add(taken.interval)
	}
	if v.caps != nil && (b.Count > 0 || b.Bytes > 0) {
		if over, err := v.raise(ctx, u, s, h, b, now); over != nil || err != nil {
			if err == nil {
				err = over
			}
			return room{}, err
		}
	}
	switch {
	case b.Count > 0 && u.N >= b.Count:
		return room{}, &QuotaError{Of: b.of, Over: OverCount, Most: int64(b.Count), Retry: retry}
	case b.Bytes > 0 && u.Bytes+h.charge > b.Bytes:
		return room{}, &QuotaError{Of: b.of, Over: OverBytes, Most: b.Bytes, Retry: retry}
	case b.rate > 0 && ready.Sub(now) > time.Minute:
		return room{}, &QuotaError{Of: b.of, Over: OverRate, Most: int64(b.rate), Retry: ready.Add(-time.Minute)}
	}
	u.State.ready = ready
	u.Add(1, h.charge, h.created, h.expires)
	if u.State.noted.Before(h.expires) {
		taken.until = h.expires.Add(h.expires.Sub(h.created) / 4) // so that few have to write it
	}
	return taken, nil
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// raise has this member have one more checkpoint of a scope, within the limit of all members. over says that it may
// not.
func (v *Store) raise(ctx context.Context, u *usage, s scope, h *Handle, b bounds, now time.Time) (over *QuotaError, err error) {
	stands, need := int64(0), store.Amount{N: 1, Bytes: h.charge}
	full, err := v.caps.Admit(ctx, &u.State.allowance, now, &store.CapRequest{
		Key: s.key(kindCaps), Limit: store.Amount{N: b.Count, Bytes: b.Bytes}, Need: need,
		Mine: func() store.Amount { return store.Amount{N: u.N, Bytes: u.Bytes} },
		Count: func(add func(string, store.Amount)) error {
			stands = 0
			for entry, err := range v.store.Scan(ctx, store.Prefix(s.prefix())) {
				if err != nil {
					return err
				}
				var a account
				if err := store.Decode(entry.Value, &a); err != nil {
					return err
				}
				stands += a.Bytes
				add(a.Boot, store.Amount{N: 1, Bytes: a.Bytes})
			}
			return nil
		},
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if full == nil {
		return nil, nil
	}
	over = &QuotaError{Of: b.of, Over: OverCount, Most: int64(b.Count), Retry: now.Add(fullTime)}
	if b.Count <= 0 || b.Bytes > 0 && stands+need.Bytes > b.Bytes {
		over.Over, over.Most = OverBytes, b.Bytes
	}
	return over, nil
}

// fullTime is when a call that found no room at any gateway may come again: others may give back what they do not use.
const fullTime = time.Second

// capsChanged gives back what this member does not use of a scope, if another one has found nothing left.
func (v *Store) capsChanged(key []byte) {
	if len(key) != len(scope{}.key(kindCaps)) { // any of them: who needs it asks again
		return
	}
	s := scope{kind: key[2], hash: [16]byte(key[3:])}
	go func() {
		ctx := context.Background()
		if asked, err := v.caps.Asked(ctx, key); err != nil || !asked {
			return
		}
		u := v.usages.Enter(s) // also of one that was forgotten, whose cap stands
		defer v.usages.Leave(u)
		u.Lock()
		defer u.Unlock()
		_ = v.caps.GiveBack(ctx, &u.State.allowance, key, store.Amount{N: u.N, Bytes: u.Bytes})
	}()
}

// boot is what this member's checkpoints are counted by; empty where one gateway has the store.
func (v *Store) boot() string {
	if v.caps == nil {
		return ""
	}
	return v.caps.Boot()
}

// count reads once what a scope has. It first reads whether the index may hold anything: for most
// workflows it does not, and a scan would cost much more.
func (v *Store) count(ctx context.Context, u *usage, s scope, rate int) error {
	if !u.State.loaded {
		entry, err := v.store.Get(ctx, s.note())
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		u.State.loaded, u.State.noted, u.Counted = true, entry.Expires, err != nil
	}
	if u.Counted {
		return nil
	}
	var made []time.Time
	err := u.Count(ctx, v.store, s.prefix(), func(entry store.Entry) error {
		var a account
		err := store.Decode(entry.Value, &a)
		if err == nil && (v.caps == nil || a.Boot == v.caps.Boot()) { // alone it has what members have made, too
			u.Add(1, a.Bytes, a.Created, entry.Expires)
			made = append(made, a.Created)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	if rate > 0 {
		slices.SortFunc(made, time.Time.Compare)
		for _, at := range made {
			u.State.ready = later(u.State.ready, at).Add(time.Minute / time.Duration(rate))
		}
	}
	return nil
}

// account is what an index entry says, so that counting opens no snapshot. It has no data of a
// caller.
type account struct {
	Created time.Time `cbor:"1,keyasint"`
	Bytes   int64     `cbor:"2,keyasint"`
	Boot    string    `cbor:"3,keyasint,omitempty"` // of the member of a shared store that has made it; empty otherwise
}
