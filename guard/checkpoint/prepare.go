package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Bounds of what is kept.
const (
	// MaxImage is the size of the largest body kept of the request, of the answer and of each
	// image, in bytes. A call that needs more cannot be undone, and its checkpoint says so.
	MaxImage = 1 << 20
	// MinTTL and MaxTTL bound the lifetime of a checkpoint.
	MinTTL = time.Second
	MaxTTL = 366 * 24 * time.Hour

	maxID          = 512
	maxName        = 4 << 10
	maxFields      = 32 << 10 // of the request and the image, besides their bodies
	maxUndo        = 96 << 10
	maxCredentials = 32 << 10
)

// Terms are the terms of a checkpoint.
type Terms struct {
	// TTL is its least lifetime, from MinTTL to MaxTTL.
	TTL time.Duration
	// Workflow and Caller bound the checkpoints of one workflow and of one caller.
	Workflow, Caller Quota
	// Rate is how many checkpoints a workflow may make in a minute, all at once if it made none
	// before; 0 is no bound.
	Rate int
	// Place names where the undo goes and how. By it Places and Reversible find what a
	// configuration took away; empty if the undo needs no configuration.
	Place string
}

func (t *Terms) check() error {
	if t.TTL < MinTTL || t.TTL > MaxTTL {
		return fmt.Errorf("%w: a ttl of %v, from %v to %v", errInvalid, t.TTL, MinTTL, MaxTTL)
	}
	return nil
}

func (s *Snapshot) check() error {
	switch {
	case s.ID == "" || len(s.ID) > maxID:
		return fmt.Errorf("%w: an id of %d bytes, from 1 to %d", errInvalid, len(s.ID), maxID)
	case len(s.First) > maxID:
		return fmt.Errorf("%w: a first attempt's id of %d bytes, at most %d", errInvalid, len(s.First), maxID)
	case max(len(s.Workflow), len(s.Action), len(s.Upstream)) > maxName:
		return fmt.Errorf("%w: a workflow, action or upstream of more than %d bytes", errInvalid, maxName)
	case s.Way < Restore || s.Way > Irreversible:
		return fmt.Errorf("%w: %d is no way to undo a call", errInvalid, s.Way)
	case s.Reversible() == (s.Reason != ""):
		return fmt.Errorf("%w: a reason is needed where a call cannot be undone, and only there", errInvalid)
	}
	return nil
}

// Handle names a checkpoint, with what is needed to record its result.
type Handle struct {
	name             name
	created, expires time.Time // expires is when the last of it goes
	scopes           []store.Holder
	charge           int64
	part             part
	left             []byte // what stays if the call never runs
}

// Prepare makes the writes that record a checkpoint in the claim's commit, before the call leaves
// (P2). credentials, if any, are kept apart until the ttl ends or the call is undone: they are
// not in its hash. If the undo needs something too large, the checkpoint is irreversible:
// Pending.Snapshot shows it.
//
// A *QuotaError means that the workflow or the caller has too many already. The batch must be
// ended; its error is errTaken if a checkpoint has this id.
func (v *Store) Prepare(ctx context.Context, s Snapshot, credentials map[string][]string, t Terms) (*Pending, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	now, err := v.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	s.Created, s.Expires = now, now.Add(t.TTL)
	s.Credentials = 0
	for name, values := range credentials {
		s.Credentials += len(name) + len(strings.Join(values, ""))
	}
	s.fit()
	plain := s.encode()
	p := &Pending{snapshot: &s, handle: Handle{
		// It stays while a rollback that began in time may run, so that it can be resumed after a
		// crash (cascade 6.3: not purged under a running rollback).
		name: v.name(s.ID), created: now, expires: s.Expires.Add(t.TTL / 2),
		scopes: v.scopes(&s, func(kind byte) bool { return !t.of(kind).none() }),
		charge: charge(&s, len(plain)), part: *split(plain),
	}}
	h := &p.handle
	for _, scope := range h.scopes {
		h.part.Counted = append(h.part.Counted, scope[0])
	}
	p.sum = h.part.Sum
	held, err := v.reserve(ctx, h, &t, now)
	if err != nil {
		return nil, err
	}
	h.left = s.left()
	p.Batch = v.batch(errTaken, held.ended)
	p.Add(v.snapshots.Put(v.snapshots.Key(h.name[:]), &h.part, store.Absent(), h.expires))
	p.Add(v.putPieces(h.name, kindSnapshot, &h.part, plain, h.expires)...)
	if s.Credentials > 0 {
		p.Add(v.credentials.Put(v.credentials.Key(h.name[:]), &credentials, store.Condition{}, s.Expires))
	}
	if t.Place != "" && s.Reversible() {
		key := append(v.place(t.Place).prefix(), h.name[:]...)
		p.Add(store.Write{Key: key, Value: []byte{0}, Expires: s.Expires})
	}
	p.Add(h.accounts(v, h.charge)...)
	p.Add(held.notes()...)
	h.part.Inline = nil // only where it stands is needed from now on
	return p, nil
}

// charge is the size of a checkpoint for quotas, in bytes: its snapshot, its credentials, and a
// result that is not large.
func charge(s *Snapshot, size int) int64 { return int64(size + s.Credentials + inlineMost) }

// fit makes s irreversible if its undo needs something too large, and drops what an irreversible
// one does not need.
func (s *Snapshot) fit() {
	body, image := len(s.Request.Body), 0
	if s.Image != nil {
		image = len(s.Image.Body)
	}
	rest := s.Request.rest() + s.Image.rest()
	if s.Reversible() && (max(body, image) > MaxImage || rest > maxFields || len(s.Undo) > maxUndo || s.Credentials > maxCredentials) {
		s.Way, s.Reason = Irreversible, ReasonTooLarge
	}
	if !s.Reversible() {
		r := &s.Request
		s.Image, s.Undo, s.Credentials, r.Message = nil, nil, 0, Message{}
		r.Method, r.Host, r.Path, r.Query = cut(r.Method), cut(r.Host), cut(r.Path), cut(r.Query)
	}
}

// mostShown is how much of a long text an irreversible checkpoint shows.
const mostShown = 1024

func cut(s string) string { return s[:min(len(s), mostShown)] }

// accounts are the index entries by which quotas are counted.
func (h *Handle) accounts(v *Store, bytes int64) []store.Write {
	writes := make([]store.Write, 0, len(h.scopes))
	for _, s := range h.scopes {
		writes = append(writes, store.Write{
			Key: accountKey(s, h.name), Value: store.Encode(nil, account{h.created, bytes, v.held.Boot()}), Expires: h.expires,
		})
	}
	return writes
}

// Want is what the reader of a checkpoint knows of it from elsewhere.
type Want struct {
	// Sum is the out_hash of the checkpoint's token. It is always compared.
	Sum [32]byte
	// Result is the hash of the result; zero if unknown.
	Result [32]byte
	// Expires is when the token's ttl ends; zero if unknown. It distinguishes a purged checkpoint
	// from one that never was.
	Expires time.Time
	// Rollback is the id of a rollback that began to undo the call before the ttl ended, by this
	// or the first attempt. It may read the checkpoint for another half of the ttl.
	Rollback string
}

// Checkpoint is a checkpoint that was read and verified.
type Checkpoint struct {
	Snapshot *Snapshot
	// Result is nil while the call runs, and if its outcome was never recorded.
	Result *Result
	Mark   Mark
	// Handle serves to record a result later, when a doubt is settled.
	Handle Handle
}

// Open reads a checkpoint and verifies it against want (cascade 4.2.3). It fails closed:
// ErrUnknown, ErrExpired, ErrReleased, ErrTampered, or ErrStore where nothing is known.
func (v *Store) Open(ctx context.Context, id string, want Want) (*Checkpoint, error) {
	n := v.name(id)
	now, err := v.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	at, expires, err := v.head(ctx, &v.snapshots, n)
	if err != nil {
		return nil, err
	}
	result, _, err := v.head(ctx, &v.results, n) // afterwards, as it may be released now
	switch {
	case err != nil:
		return nil, err
	case result != nil && result.Released:
		return nil, ErrReleased
	case at == nil && !want.Expires.IsZero() && !now.Before(want.Expires):
		return nil, ErrExpired
	case at == nil:
		return nil, ErrUnknown
	}
	c := new(Checkpoint)
	c.Snapshot, err = v.snapshot(ctx, n, at, want.Sum)
	if errors.Is(err, ErrTampered) {
		if now, _, _ := v.head(ctx, &v.results, n); now != nil && now.Released {
			return nil, ErrReleased // between two looks, and its pieces with it
		}
	}
	if err != nil {
		return nil, err
	}
	if c.Mark, err = v.Mark(ctx, id); err != nil {
		return nil, err
	}
	if !now.Before(c.Snapshot.Expires) {
		switch begun, err := v.begun(ctx, c, want.Rollback); {
		case err != nil:
			return nil, err
		case !begun:
			return nil, ErrExpired
		}
	}
	if c.Result, err = v.result(ctx, n, result, want.Result); err != nil {
		return nil, err
	}
	c.Handle = Handle{
		name: n, created: c.Snapshot.Created, expires: expires,
		scopes: v.scopes(c.Snapshot, func(kind byte) bool { return bytes.IndexByte(at.Counted, kind) >= 0 }),
		charge: charge(c.Snapshot, at.Size), part: *at,
	}
	c.Handle.part.Inline = nil
	c.Handle.left = c.Snapshot.left()
	return c, nil
}

// begun reports whether a rollback has begun to undo the call of a checkpoint, by this or another
// attempt.
func (v *Store) begun(ctx context.Context, c *Checkpoint, rollback string) (bool, error) {
	ours := func(m Mark) bool { return rollback != "" && m.State == Undoing && m.Rollback == rollback }
	if ours(c.Mark) || rollback == "" || c.Snapshot.First == "" {
		return ours(c.Mark), nil
	}
	m, err := v.Mark(ctx, c.Snapshot.First)
	if errors.Is(err, ErrTampered) {
		return false, nil
	}
	return ours(m), err
}

// Before is the state before the call of a checkpoint, for the checkpoint of a further attempt.
// It is not verified: the new checkpoint has its own token. The errors are ErrUnknown, also for a
// call that is undone in another way, ErrTampered and ErrStore.
func (v *Store) Before(ctx context.Context, id string) (*Image, error) {
	s, err := v.stored(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case s.Way != Restore || s.Image == nil:
		return nil, ErrUnknown
	}
	return s.Image, nil
}

// First is the checkpoint of the first attempt of the named checkpoint's call, for Snapshot.First
// of the next attempt; the named one if that is gone or unreadable. The error is ErrStore.
func (v *Store) First(ctx context.Context, id string) (string, error) {
	s, err := v.stored(ctx, id)
	switch {
	case err == nil:
		return s.Root(), nil
	case errors.Is(err, ErrUnknown), errors.Is(err, ErrTampered):
		return id, nil
	}
	return "", err
}

func (v *Store) stored(ctx context.Context, id string) (*Snapshot, error) {
	n := v.name(id)
	at, _, err := v.head(ctx, &v.snapshots, n)
	switch {
	case err != nil:
		return nil, err
	case at == nil:
		return nil, ErrUnknown
	}
	return v.snapshot(ctx, n, at, at.Sum)
}

// snapshot reads the snapshot of a head, and compares its hash.
func (v *Store) snapshot(ctx context.Context, n name, at *part, want [32]byte) (*Snapshot, error) {
	plain, err := v.join(ctx, n, kindSnapshot, at, want)
	if err != nil {
		return nil, err
	}
	s, err := decodeSnapshot(plain)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return s, nil
}

// result reads the result of a head, nil without one, and compares its hash if it is known.
func (v *Store) result(ctx context.Context, n name, at *part, want [32]byte) (*Result, error) {
	switch {
	case at == nil && want != [32]byte{}:
		return nil, fmt.Errorf("%w: its result is not there", ErrTampered)
	case at == nil:
		return nil, nil
	case want == [32]byte{}:
		want = at.Sum
	}
	r := new(Result)
	plain, err := v.join(ctx, n, kindResult, at, want)
	if err != nil {
		return nil, err
	}
	if err := unsalted(plain, r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return r, nil
}

// Peek shows the records of a checkpoint's call and its end to people. They are not verified
// against the token, so nothing may be undone from them. result is nil while the call runs. Of a
// call that never ran, call is what Released has left.
//
// It reads also after the ttl. The errors are ErrUnknown, ErrTampered and ErrStore.
func (v *Store) Peek(ctx context.Context, id string) (call *Snapshot, result *Result, err error) {
	n := v.name(id)
	call, err = v.stored(ctx, id)
	if err != nil && !errors.Is(err, ErrUnknown) {
		return nil, nil, err
	}
	end, _, endErr := v.head(ctx, &v.results, n)
	if endErr != nil {
		return nil, nil, endErr
	}
	if end != nil && end.Released {
		left, err := v.Released(ctx, id)
		if err != nil {
			return nil, nil, err
		}
		return &Snapshot{
			ID: id, Workflow: left.Workflow, Caller: left.Caller, Execution: left.Execution, Action: left.Action,
			Request: Request{Method: left.Method, Host: left.Host, Path: left.Path},
		}, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	result, err = v.result(ctx, n, end, [32]byte{})
	return call, result, err
}

// Disturbed reports that the result of a call says ReasonChanged, for the checkpoint of a further
// attempt. The errors are those of Before.
func (v *Store) Disturbed(ctx context.Context, id string) (bool, error) {
	n := v.name(id)
	at, _, err := v.head(ctx, &v.results, n)
	if err != nil || at == nil || at.Released {
		return false, err
	}
	r, err := v.result(ctx, n, at, [32]byte{})
	return r != nil && r.Reason == ReasonChanged, err
}

// Released is what is left of a checkpoint whose call never ran: enough to keep the call from
// running later (architecture brief: cancellation). Long texts are cut.
type Released struct {
	// Execution is the call's key, Caller the hash of its caller.
	Execution execution.Key        `cbor:"1,keyasint"`
	Caller    execution.CallerHash `cbor:"2,keyasint"` // see Execution
	// Workflow, Action, Method, Host and Path are as in the snapshot.
	Workflow string `cbor:"3,keyasint,omitempty"`
	Action   string `cbor:"4,keyasint,omitempty"` // see Workflow
	Method   string `cbor:"5,keyasint,omitempty"` // see Workflow
	Host     string `cbor:"6,keyasint,omitempty"` // see Workflow
	Path     string `cbor:"7,keyasint,omitempty"` // see Workflow
}

// mostLeft bounds a text that is left, in bytes.
const mostLeft = 256

func short(s string) string { return s[:min(len(s), mostLeft)] }

func (s *Snapshot) left() []byte {
	return store.Encode(make([]byte, 0, 256), &Released{
		Execution: s.Execution, Caller: s.Caller, Workflow: short(s.Workflow), Action: short(s.Action),
		Method: short(s.Request.Method), Host: short(s.Request.Host), Path: short(s.Request.Path),
	})
}

// Released returns what is left of a checkpoint for which Open returns ErrReleased; otherwise
// ErrUnknown.
func (v *Store) Released(ctx context.Context, id string) (r Released, err error) {
	at, _, err := v.head(ctx, &v.results, v.name(id))
	switch {
	case err != nil:
		return r, err
	case at == nil || !at.Released || len(at.Inline) == 0:
		return r, ErrUnknown
	}
	if err := store.Decode(at.Inline, &r); err != nil {
		return Released{}, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return r, nil
}

// place is the keyed hash of a Place of Terms.
type place [16]byte

func (v *Store) place(of string) place {
	sum := store.Index(v.sealer, "place", of)
	return place(sum[:len(place{})])
}

func (p place) prefix() []byte {
	return append(append(make([]byte, 0, 2+len(p)+len(name{})), spaceCheckpoint, kindPlace), p[:]...)
}

// Place is where the undo of some checkpoints goes.
type Place struct {
	// Sample is the snapshot of one of them.
	Sample *Snapshot
	at     place
}

// Places lists where the undos of reversible calls go, by one checkpoint of each place. A place
// without a readable one is left out.
func (v *Store) Places(ctx context.Context) ([]Place, error) {
	at := store.Prefix([]byte{spaceCheckpoint, kindPlace})
	at.Limit = 1
	var all []Place
	for {
		key, err := v.first(ctx, at)
		if err != nil || key == nil {
			return all, err
		}
		p, n, ok := placeKey(key)
		if !ok {
			return all, fmt.Errorf("%w: a key of %d bytes", ErrTampered, len(key))
		}
		s, err := v.sample(ctx, n)
		if err != nil {
			return all, err
		}
		if s != nil {
			all = append(all, Place{s, p})
			at.From = store.Prefix(p.prefix()).To
		} else {
			at.From = append(key, 0)
		}
	}
}

func (v *Store) first(ctx context.Context, at store.Range) ([]byte, error) {
	for entry, err := range v.store.Scan(ctx, at) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		return bytes.Clone(entry.Key), nil
	}
	return nil, nil
}

// sample is the snapshot of that name; nil if it is gone or unreadable.
func (v *Store) sample(ctx context.Context, n name) (s *Snapshot, err error) {
	at, _, err := v.head(ctx, &v.snapshots, n)
	if err == nil && at != nil {
		s, err = v.snapshot(ctx, n, at, at.Sum)
	}
	if errors.Is(err, ErrTampered) {
		return nil, nil
	}
	return s, err
}

// Reversible counts the checkpoints of a place whose calls can still be undone, and says when the
// last of them expires.
func (v *Store) Reversible(ctx context.Context, p Place) (count int, last time.Time, err error) {
	for entry, err := range v.store.Scan(ctx, store.Prefix(p.at.prefix())) {
		if err != nil {
			return count, last, fmt.Errorf("%w: %w", ErrStore, err)
		}
		_, n, ok := placeKey(entry.Key)
		if !ok {
			return count, last, fmt.Errorf("%w: a key of %d bytes", ErrTampered, len(entry.Key))
		}
		stands, err := v.stands(ctx, n)
		if err != nil {
			return count, last, err
		}
		if stands {
			count++
			if entry.Expires.After(last) {
				last = entry.Expires
			}
		}
	}
	return count, last, nil
}

// stands reports whether the call of a checkpoint may have had its effect and was not undone.
func (v *Store) stands(ctx context.Context, n name) (bool, error) {
	at, _, err := v.head(ctx, &v.snapshots, n)
	if err != nil && !errors.Is(err, ErrTampered) || at == nil && err == nil {
		return false, err
	}
	if end, _, err := v.head(ctx, &v.results, n); err == nil && end != nil && end.Released {
		return false, nil
	}
	mark, err := v.markOf(ctx, n)
	if err != nil && !errors.Is(err, ErrTampered) {
		return false, err
	}
	return mark.State != Undone, nil
}

func placeKey(key []byte) (p place, n name, ok bool) {
	if len(key) != 2+len(p)+len(n) {
		return p, n, false
	}
	copy(p[:], key[2:])
	copy(n[:], key[2+len(p):])
	return p, n, true
}
