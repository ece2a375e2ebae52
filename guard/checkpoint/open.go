package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"
)

// Want is what the reader of a checkpoint knows of it from elsewhere.
type Want struct {
	// Sum is the out_hash of the checkpoint's token. It is always compared.
	Sum [32]byte
	// Result is the hash of the result; zero where it is not known.
	Result [32]byte
	// Expires is when the token's ttl ends; zero where it is not known. It tells what
	// has been purged from what has never been.
	Expires time.Time
	// Rollback is the id of a rollback that reads on what it began to undo before the
	// ttl ended, by this or by the first attempt of the call. It may do so for another half
	// of the ttl.
	Rollback string
}

// Checkpoint is a checkpoint that was read and verified.
type Checkpoint struct {
	Snapshot *Snapshot
	// Result is nil while the call runs, and where its outcome was never recorded.
	Result *Result
	Mark   Mark
	// Handle serves to record a result later, as where a doubt is settled.
	Handle Handle
}

// Open reads a checkpoint and verifies it against want (cascade 4.2.3). It fails closed:
// ErrUnknown, ErrExpired, ErrReleased, ErrTampered, or ErrStore where nothing is known.
func (v *Vault) Open(ctx context.Context, id string, want Want) (*Checkpoint, error) {
	n := v.name(id)
	now, err := v.store.Now(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	at, expires, err := v.part(ctx, n, kindSnapshot)
	if err != nil {
		return nil, err
	}
	result, _, err := v.part(ctx, n, kindResult) // afterwards, as it may be released now
	switch {
	case err != nil:
		return nil, err
	case result != nil && result.released:
		return nil, ErrReleased
	case at == nil && !want.Expires.IsZero() && !now.Before(want.Expires):
		return nil, ErrExpired
	case at == nil:
		return nil, ErrUnknown
	}
	plain, err := v.verified(ctx, n, kindSnapshot, at, want.Sum)
	if errors.Is(err, ErrTampered) {
		if now, _, _ := v.part(ctx, n, kindResult); now != nil && now.released {
			return nil, ErrReleased // between two looks, and its pieces with it
		}
	}
	if err != nil {
		return nil, err
	}
	c := new(Checkpoint)
	if c.Snapshot, err = decodeSnapshot(plain); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTampered, err)
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
		scopes: v.scopes(c.Snapshot, func(kind byte) bool { return bytes.IndexByte(at.counted, kind) >= 0 }),
		charge: charge(c.Snapshot, plain), part: *at,
	}
	c.Handle.part.inline = nil
	c.Handle.left = c.Snapshot.left()
	return c, nil
}

// begun reports whether a rollback has begun to undo the call of a checkpoint, by that or by
// another attempt of it.
func (v *Vault) begun(ctx context.Context, c *Checkpoint, rollback string) (bool, error) {
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

// Before is what stood there before the call of a checkpoint, for the checkpoint of a
// further attempt of that call. It is as the store has it: what the new one is made of is
// verified by its own token. The errors are ErrUnknown, also for a call that is undone in
// another way, ErrTampered and ErrStore.
func (v *Vault) Before(ctx context.Context, id string) (*Image, error) {
	s, err := v.standing(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case s.Way != Restore || s.Image == nil:
		return nil, ErrUnknown
	}
	return s.Image, nil
}

// First is the checkpoint of the first attempt of a call, as Snapshot.First has it for the
// attempt after the one whose checkpoint is named; itself where it has gone or cannot be
// read. The error is ErrStore.
func (v *Vault) First(ctx context.Context, id string) (string, error) {
	s, err := v.standing(ctx, id)
	switch {
	case err == nil:
		return s.Root(), nil
	case errors.Is(err, ErrUnknown), errors.Is(err, ErrTampered):
		return id, nil
	}
	return "", err
}

// standing is a snapshot as the store has it.
func (v *Vault) standing(ctx context.Context, id string) (*Snapshot, error) {
	n := v.name(id)
	at, _, err := v.part(ctx, n, kindSnapshot)
	if err != nil {
		return nil, err
	}
	if at == nil {
		return nil, ErrUnknown
	}
	plain, err := v.join(ctx, n, kindSnapshot, at)
	if err != nil {
		return nil, err
	}
	s, err := decodeSnapshot(plain)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return s, nil
}

// result reads the result that stands at a part; nil where there is none.
func (v *Vault) result(ctx context.Context, n name, at *part, want [32]byte) (*Result, error) {
	if at == nil {
		if want != [32]byte{} {
			return nil, fmt.Errorf("%w: its result is not there", ErrTampered)
		}
		return nil, nil
	}
	if want == [32]byte{} {
		want = at.sum
	}
	plain, err := v.verified(ctx, n, kindResult, at, want)
	if err != nil {
		return nil, err
	}
	r, err := decodeResult(plain)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	return r, nil
}

func (v *Vault) verified(ctx context.Context, n name, kind byte, at *part, want [32]byte) ([]byte, error) {
	if at.sum != want {
		return nil, fmt.Errorf("%w: it has another one", ErrTampered)
	}
	return v.join(ctx, n, kind, at)
}
