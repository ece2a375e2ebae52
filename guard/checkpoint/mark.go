package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// State is the state of a checkpoint's undo.
type State uint8

// The states of an undo.
const (
	// Active: no undo has begun. The state of a checkpoint without a mark.
	Active State = iota
	// Undoing: a rollback is undoing it.
	Undoing
	// Undone: it was undone, and is never undone again.
	Undone
	// Failed: an undo failed for good. Another rollback may try.
	Failed
	// Escalated: a person has to look. Another rollback may try.
	Escalated
)

// String is the word used in answers and logs.
func (s State) String() string {
	switch s {
	case Active:
		return "standing"
	case Undoing:
		return "undoing"
	case Undone:
		return "undone"
	case Failed:
		return "failed"
	case Escalated:
		return "escalated"
	default:
		return "unknown"
	}
}

// steps are the allowed changes of the state.
var steps = map[State][]State{
	Active: {Undoing, Escalated},
	// Back to Active: the rollback gave way before it sent anything.
	Undoing: {Undone, Failed, Escalated, Active},
	// Undone without another Undoing: a person has done it.
	Failed:    {Undoing, Undone, Escalated},
	Escalated: {Undoing, Undone, Failed},
}

// Mark is the record of a checkpoint's undo. It outlives the snapshot.
type Mark struct {
	State State `cbor:"1,keyasint"`
	// Rollback is the id of the rollback that set the state; empty for Active.
	Rollback string `cbor:"2,keyasint"`
	// At is when the state was set, by the store's clock.
	At time.Time `cbor:"3,keyasint"`
	// Doubt is the id of the rollback under whose key an undo was sent that may have had its
	// effect; empty without one. The next attempt uses the same key.
	Doubt string `cbor:"4,keyasint,omitempty"`

	version store.Version // zero where nothing stands
	expires time.Time
}

const maxRollback = 512

// check reports whether a stored mark is one: an unreadable mark must not pass for a missing one (P5).
func (m *Mark) check() error {
	if m.State < Undoing || m.State > Escalated || m.Rollback == "" {
		return errEncoding
	}
	return nil
}

// Mark reads the state of a checkpoint's undo; Active also for an unknown id. ErrTampered means
// that the mark cannot be read.
func (v *Store) Mark(ctx context.Context, id string) (Mark, error) {
	return v.markOf(ctx, v.name(id))
}

func (v *Store) markOf(ctx context.Context, n name) (Mark, error) {
	row, err := v.undos.Get(ctx, v.undos.Key(n[:]))
	if err != nil || row.Record == nil {
		return Mark{}, err
	}
	m := *row.Record
	m.version, m.expires = row.Version, row.Expires
	return m, nil
}

// Watch returns a channel that is closed when the mark of a checkpoint may have changed, at any gateway over the
// store. cancel frees it.
func (v *Store) Watch(id string) (changed <-chan struct{}, cancel func()) {
	n := v.name(id)
	return v.store.Watch(v.undos.Key(n[:]))
}

// Step is a change of a Mark.
type Step struct {
	To State
	// Rollback is the id of the rollback that takes the step.
	Rollback string
	// Keep is until when the mark is kept: as long as the execution key, at least. Zero is
	// forever. A mark is never kept shorter than before, nor than the snapshot.
	Keep time.Time
	// Doubt is the mark's new Doubt.
	Doubt string
}

// Move makes the write of a step, conditional on the mark found, for the commit of whatever else
// belongs to the step. ErrStep means that the step is not allowed. With Undone the credentials go
// in the same commit.
//
// The batch must be ended; its error is ErrChanged if another rollback was first.
func (v *Store) Move(ctx context.Context, id string, found Mark, step Step) (*store.Batch, error) {
	if err := found.may(step); err != nil {
		return nil, err
	}
	n := v.name(id)
	now, err := v.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	keep, err := v.keepMark(ctx, n, found, step.Keep)
	if err != nil {
		return nil, err
	}
	b := v.batch(ErrChanged, nil) // before anything is sealed
	key := v.undos.Key(n[:])
	if step.To == Active {
		b.Add(store.Write{Key: key, If: found.version.Unchanged(), Delete: true})
	} else {
		m := &Mark{State: step.To, Rollback: step.Rollback, At: now, Doubt: step.Doubt}
		b.Add(v.undos.Put(key, m, found.version.Unchanged(), keep))
	}
	if step.To == Undone {
		b.Add(store.Write{Key: v.credentials.Key(n[:]), Delete: true})
	}
	return b, nil
}

// Advance takes a step in its own commit, with extra writes.
func (v *Store) Advance(ctx context.Context, id string, found Mark, step Step, extra ...store.Write) error {
	moved, err := v.Move(ctx, id, found, step)
	if err != nil {
		return err
	}
	b := store.NewBatch(extra...)
	b.Join(moved)
	if err = b.Commit(ctx, v.store); err != nil && !errors.Is(err, ErrChanged) {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return err
}

func (m *Mark) may(step Step) error {
	if step.Rollback == "" || len(step.Rollback) > maxRollback {
		return fmt.Errorf("%w: a rollback id of %d bytes, from 1 to %d", errInvalid, len(step.Rollback), maxRollback)
	}
	if len(step.Doubt) > maxRollback || step.To == Active && m.Doubt != "" {
		return fmt.Errorf("%w: what is in doubt stays so", ErrStep)
	}
	if m.State == Undoing && m.Rollback != step.Rollback {
		return fmt.Errorf("%w: another rollback is at it", ErrStep)
	}
	for _, to := range steps[m.State] {
		if to == step.To {
			return nil
		}
	}
	return fmt.Errorf("%w: from %s to %s", ErrStep, m.State, step.To)
}

func (v *Store) keepMark(ctx context.Context, n name, found Mark, keep time.Time) (time.Time, error) {
	if keep.IsZero() || found.version != 0 && found.expires.IsZero() {
		return time.Time{}, nil
	}
	row, err := v.snapshots.Get(ctx, v.snapshots.Key(n[:]))
	if errors.Is(err, store.ErrDamaged) {
		return time.Time{}, nil // how long it is kept is not known
	}
	if err != nil && !errors.Is(err, ErrTampered) {
		return time.Time{}, err
	}
	return later(keep, later(found.expires, row.Expires)), nil
}

// Resource is a URL of an upstream, which has versions.
type Resource struct {
	Upstream, Host, Path, Query string
}

// Resource is the resource that the call changed.
func (s *Snapshot) Resource() Resource {
	return Resource{s.Upstream, s.Request.Host, s.Request.Path, s.Request.Query}
}

// Version says that an undo put back an earlier version of a resource: the state under Tag is the
// one under Origin, and only undos have written in between. Both are strong entity tags. The zero
// Version says nothing.
type Version struct {
	Resource    Resource
	Tag, Origin string
}

func (v *Store) versionKey(r Resource, tag string) []byte {
	hash := store.Index(v.sealer, "version", r.Upstream, r.Host, r.Path, r.Query, tag)
	return v.versions.Key(hash[:])
}

// Origin returns the version that undos put back as the one with this tag; the tag itself if no
// undo made it, or the record cannot be read. The error is ErrStore.
func (v *Store) Origin(ctx context.Context, r Resource, tag string) (string, error) {
	row, err := v.versions.Get(ctx, v.versionKey(r, tag))
	switch {
	case err != nil && !errors.Is(err, ErrTampered): // of what cannot be read it is as if somebody else had written (P6)
		return "", err
	case row.Record == nil:
		return tag, nil
	}
	return *row.Record, nil
}

// PutBack makes the write of a Version, for the commit that ends its undo. It is kept until
// expires. The batch must be ended.
func (v *Store) PutBack(version Version, expires time.Time) *store.Batch {
	b := v.batch(nil, nil) // before anything is sealed
	b.Add(v.versions.Put(v.versionKey(version.Resource, version.Tag), &version.Origin, store.Condition{}, expires))
	return b
}
