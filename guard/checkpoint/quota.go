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
	overBytes  = "bytes"
	OverRate   = "rate"
)

// QuotaError refuses a checkpoint, and with it the call. Nothing was recorded.
type QuotaError struct {
	// Of is OfWorkflow or OfCaller; Over is the exceeded bound: OverCount, overBytes or OverRate.
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
func (v *Store) scopes(s *Snapshot, counted func(kind byte) bool) []store.Holder {
	var found []store.Holder
	if counted(kindCaller) {
		found = append(found, store.HolderOf(kindCaller, s.Caller))
	}
	if s.Workflow != "" && counted(kindWorkflow) {
		sum := store.Index(v.sealer, "checkpoints of workflow", s.Workflow)
		found = append(found, store.HolderOf(kindWorkflow, [16]byte(sum[:16])))
	}
	return found
}

// marks are facts about a workflow or a caller besides its checkpoints.
type marks struct {
	loaded bool        // noted is known
	noted  time.Time   // until when the store says that the index may hold something
	made   []time.Time // creation times of the checkpoints found in the store
	ready  time.Time   // when the bucket of the rate is full again
}

type held = store.Held[marks]

// reservation is room for a checkpoint that waits for its commit.
type reservation struct {
	v     *Store
	h     *Handle
	taken []room
}

type room struct {
	u        *held
	until    time.Time     // expiry of the note that is written with it; zero without one
	interval time.Duration // by which the bucket of the rate is full later
}

// reserve takes room for the checkpoint in all of its scopes, or in none.
func (v *Store) reserve(ctx context.Context, h *Handle, t *Terms, now time.Time) (*reservation, error) {
	r := &reservation{v: v, h: h}
	for _, s := range h.scopes {
		u := v.held.Enter(s)
		taken, err := v.take(ctx, u, h, t.of(s[0]), now)
		if err != nil {
			v.held.Leave(u)
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
			writes = append(writes, store.Write{Key: noteKey(t.u.Holder), Expires: t.until})
		}
	}
	return writes
}

// ended counts the result of the commit. A commit that may have landed counts as landed.
func (r *reservation) ended(err error) {
	aside := store.Amount{N: 1, Bytes: r.h.charge}
	for _, t := range r.taken {
		landed := err == nil || errors.Is(err, store.ErrUnknown)
		t.u.Lock()
		if err == nil && !t.until.IsZero() {
			t.u.State.noted = t.until
		}
		if !landed {
			t.u.State.ready = t.u.State.ready.Add(-t.interval)
		}
		t.u.Unlock()
		if landed {
			t.u.Add(aside, r.h.created, r.h.expires)
		}
		t.u.Release(aside)
		r.v.held.Leave(t.u)
	}
}

// changed counts what a living checkpoint has more, or that there may be less.
func (v *Store) changed(h Handle, more int64) {
	for _, s := range h.scopes {
		u := v.held.Known(s)
		if more > 0 {
			u.Add(store.Amount{Bytes: more}, h.created, h.expires)
		}
		u.Less()
	}
}

// take takes room for the checkpoint in one scope, or returns a QuotaError.
func (v *Store) take(ctx context.Context, u *held, h *Handle, b bounds, now time.Time) (room, error) {
	if err := v.held.Count(ctx, u, now); err != nil {
		return room{}, err
	}
	need := store.Amount{N: 1, Bytes: h.charge}
	full, err := v.held.Take(ctx, u, store.Request{
		Now: now, Limit: store.Amount{N: b.Count, Bytes: b.Bytes}, Need: need,
	})
	if full != nil {
		over := &QuotaError{Of: b.of, Over: OverCount, Most: int64(b.Count), Retry: full.Retry}
		if b.Count <= 0 || full.Stands.N < b.Count && b.Bytes > 0 && full.Stands.Bytes+need.Bytes > b.Bytes {
			over.Over, over.Most = overBytes, b.Bytes
		}
		err = over
	}
	if err != nil {
		return room{}, err
	}
	taken := room{u: u}
	if err := taken.draw(b, now); err != nil {
		u.Release(need) // not Drop: whoever exceeds the rate must not make this member ask the others
		return room{}, err
	}
	u.Lock()
	defer u.Unlock()
	if u.State.noted.Before(h.expires) {
		taken.until = h.expires.Add(h.expires.Sub(h.created) / 4) // so that few have to write it
	}
	return taken, nil
}

// draw draws on the rate.
func (r *room) draw(b bounds, now time.Time) error {
	r.u.Lock()
	defer r.u.Unlock()
	m := &r.u.State
	made := m.made
	if m.made = nil; b.rate <= 0 {
		return nil
	}
	r.interval = time.Minute / time.Duration(b.rate)
	for _, at := range made {
		m.ready = later(m.ready, at).Add(r.interval)
	}
	ready := later(m.ready, now).Add(r.interval)
	if ready.Sub(now) > time.Minute {
		return &QuotaError{Of: b.of, Over: OverRate, Most: int64(b.rate), Retry: ready.Add(-time.Minute)}
	}
	m.ready = ready
	return nil
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// read counts what the index has of a scope. It first reads whether that may hold anything: for most workflows it does
// not, and a scan would cost much more.
func (v *Store) read(ctx context.Context, h *held, add store.Stands) error {
	m, first := &h.State, !h.State.loaded
	if first {
		entry, err := v.store.Get(ctx, noteKey(h.Holder))
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		if m.noted, m.made = entry.Expires, nil; err != nil {
			m.loaded = true
			return nil
		}
	}
	for entry, err := range v.store.Scan(ctx, store.Prefix(scopePrefix(h.Holder))) {
		if err != nil {
			return err
		}
		var a account
		if err := store.Decode(entry.Value, &a); err != nil {
			return err
		}
		add(a.Boot, store.Amount{N: 1, Bytes: a.Bytes}, a.Created, entry.Expires)
		if first && (v.held.Boot() == "" || a.Boot == v.held.Boot()) {
			m.made = append(m.made, a.Created)
		}
	}
	if m.loaded = true; first {
		slices.SortFunc(m.made, time.Time.Compare)
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
