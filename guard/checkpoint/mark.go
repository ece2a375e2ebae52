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
	State State
	// Rollback is the id of the rollback that set the state; empty for Active.
	Rollback string
	// At is when the state was set, by the store's clock.
	At time.Time
	// Doubt is the id of the rollback under whose key an undo was sent that may have had its
	// effect; empty without one. The next attempt uses the same key.
	Doubt string

	version store.Version // zero where nothing stands
	expires time.Time
}

const (
	tagMarkState = 1 + iota
	tagMarkRollback
	tagMarkAt
	tagMarkDoubt
)

const maxRollback = 512

func (m *Mark) encode() []byte {
	var e store.Encoder
	e.Int(tagMarkState, int64(m.State))
	e.String(tagMarkRollback, m.Rollback)
	e.Time(tagMarkAt, m.At)
	e.String(tagMarkDoubt, m.Doubt)
	return e.B
}

func decodeMark(b []byte) (Mark, error) {
	var m Mark
	state := int64(-1)
	d := store.Decoder{B: b, Broken: errEncoding}
	for d.Next() {
		switch d.Tag {
		case tagMarkState:
			state = d.Int()
		case tagMarkRollback:
			m.Rollback = string(d.Field)
		case tagMarkAt:
			m.At = d.Time()
		case tagMarkDoubt:
			m.Doubt = string(d.Field)
		}
	}
	// An unreadable mark must not pass for a missing one (P5).
	if d.Err == nil && (state < int64(Undoing) || state > int64(Escalated) || m.Rollback == "") {
		d.Err = errEncoding
	}
	m.State = State(state)
	return m, d.Err
}

// Mark reads the state of a checkpoint's undo; Active also for an unknown id. ErrTampered means
// that the mark cannot be read.
func (v *Store) Mark(ctx context.Context, id string) (Mark, error) {
	return v.markOf(ctx, v.name(id))
}

func (v *Store) markOf(ctx context.Context, n name) (Mark, error) {
	key := keyOf(kindMark, n)
	entry, err := v.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return Mark{}, nil
	}
	if err != nil {
		return Mark{}, unread(err)
	}
	plain, err := v.sealer.Open(nil, entry.Value, key)
	if err != nil {
		return Mark{}, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	m, err := decodeMark(plain)
	if err != nil {
		return Mark{}, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	m.version, m.expires = entry.Version, entry.Expires
	return m, nil
}

// Watch returns a channel that is closed when the mark of a checkpoint may have changed, at any gateway over the
// store. cancel frees it.
func (v *Store) Watch(id string) (changed <-chan struct{}, cancel func()) {
	return v.store.Watch(keyOf(kindMark, v.name(id)))
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
	w := store.Write{Key: keyOf(kindMark, n), If: store.Absent(), Expires: keep}
	if found.version != 0 {
		w.If = store.VersionIs(found.version)
	}
	if step.To == Active {
		w.Delete = true
	} else {
		m := Mark{State: step.To, Rollback: step.Rollback, At: now, Doubt: step.Doubt}
		w.Value = v.sealer.Seal(nil, m.encode(), w.Key)
	}
	b.Add(w)
	if step.To == Undone {
		b.Add(store.Write{Key: keyOf(kindCredential, n), Delete: true})
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
		return fmt.Errorf("%w: a rollback id of %d bytes, from 1 to %d", ErrInvalid, len(step.Rollback), maxRollback)
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
	entry, err := v.store.Get(ctx, keyOf(kindSnapshot, n))
	if errors.Is(err, store.ErrDamaged) {
		return time.Time{}, nil // how long it is kept is not known
	}
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	for _, least := range []time.Time{found.expires, entry.Expires} {
		if keep.Before(least) {
			keep = least
		}
	}
	return keep, nil
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
	return keyOf(kindVersion, store.Index(v.sealer, "version", r.Upstream, r.Host, r.Path, r.Query, tag))
}

// Origin returns the version that undos put back as the one with this tag; the tag itself if no
// undo made it, or the record cannot be read. The error is ErrStore.
func (v *Store) Origin(ctx context.Context, r Resource, tag string) (string, error) {
	key := v.versionKey(r, tag)
	entry, err := v.store.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrDamaged) {
		return tag, nil
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrStore, err)
	}
	origin, err := v.sealer.Open(nil, entry.Value, key)
	if err != nil {
		return tag, nil // it is then as if somebody else had written (P6)
	}
	return string(origin), nil
}

// PutBack makes the write of a Version, for the commit that ends its undo. It is kept until
// expires. The batch must be ended.
func (v *Store) PutBack(version Version, expires time.Time) *store.Batch {
	b := v.batch(nil, nil) // before anything is sealed
	key := v.versionKey(version.Resource, version.Tag)
	b.Add(store.Write{Key: key, Value: v.sealer.Seal(nil, []byte(version.Origin), key), Expires: expires})
	return b
}
