package evidence

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Enter records tokens of a request that has no commit of its own, and what those in own
// are used for, all in one commit. What is recorded already stays as it is. It returns
// once all of them stand in the tree under a signed head (level L3, synchronously).
//
// Without own the tokens are recorded, and stay good for any one use: see Spend.
//
// An *ect.Error says that one was used for something else; of any other error nothing is
// known.
func (e *Evidence) Enter(ctx context.Context, all, own []*ect.Token, use Use) error {
	if err := e.log.Admit(ctx); err != nil {
		return err
	}
	for {
		missing, unbound, err := e.lacks(ctx, all, own, use)
		if err != nil {
			return err
		}
		if len(missing)+len(unbound) == 0 {
			return e.Proven(ctx, all)
		}
		err = e.enter(ctx, missing, unbound, use)
		if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
			err = e.landed(ctx, lost.Key) // and look again
		}
		if err != nil {
			return err
		}
	}
}

// Spend records what tokens that have entered are used for, in one commit, or none of it.
// It waits for nothing behind that commit, so that ctx cannot end a use that stands.
//
// An *ect.Error says that one was used for something else. After any other error the use
// does not stand, unless it is a store.ErrUnknown.
func (e *Evidence) Spend(ctx context.Context, own []*ect.Token, use Use) error {
	for {
		_, unbound, err := e.lacks(ctx, nil, own, use)
		if err != nil || len(unbound) == 0 {
			return err
		}
		err = e.enter(ctx, nil, unbound, use)
		lost := (*store.Conflict)(nil)
		if !errors.As(err, &lost) {
			return err
		}
		if err := e.landed(ctx, lost.Key); err != nil {
			return err
		}
	}
}

// lacks are those of the tokens that the ledger lacks, and those of own whose use is not
// recorded.
func (e *Evidence) lacks(ctx context.Context, all, own []*ect.Token, use Use) (missing, unbound []*ect.Token, err error) {
	for _, t := range all {
		standing, err := e.Holds(ctx, t)
		switch {
		case err != nil:
			return nil, nil, err
		case standing == Other:
			return nil, nil, &ect.Error{Code: ect.CodeReplayed}
		case standing == Unused:
			missing = append(missing, t)
		}
	}
	for _, t := range own {
		standing, err := e.Recorded(ctx, t, use)
		switch {
		case err != nil:
			return nil, nil, err
		case standing == Other:
			return nil, nil, &ect.Error{Code: ect.CodeReplayed}
		case standing == Unused:
			unbound = append(unbound, t)
		}
	}
	return missing, unbound, nil
}

// enter is the commit of Enter and of Spend.
func (e *Evidence) enter(ctx context.Context, missing, unbound []*ect.Token, use Use) error {
	uses := make([]store.Write, 0, len(unbound))
	for _, t := range unbound {
		uses = append(uses, e.Bound(t, use, time.Time{}))
	}
	if len(missing) == 0 {
		_, err := e.store.Commit(ctx, uses...)
		return err
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return err
	}
	told, err := e.Tell(now, missing)
	if err != nil {
		return err
	}
	_, err = e.store.Commit(ctx, slices.Concat(told.Writes(), uses)...)
	return told.Done(err)
}

// landed waits until what a commit was lost to can be read: a commit that stands in the
// same group is lost to before that.
func (e *Evidence) landed(ctx context.Context, key []byte) error {
	changed, cancel := e.store.Watch(key)
	defer cancel()
	if _, err := e.store.Get(ctx, key); !errors.Is(err, store.ErrNotFound) {
		return err
	}
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Proven waits until recorded tokens stand in the tree under a signed head, so that a
// receipt of each can be had.
func (e *Evidence) Proven(ctx context.Context, tokens []*ect.Token) error {
	for _, t := range tokens {
		if err := e.ProvenID(ctx, t.Workflow(), t.NodeID()); err != nil {
			return err
		}
	}
	return nil
}

// ProvenID is Proven for what is recorded under an id of a workflow.
func (e *Evidence) ProvenID(ctx context.Context, workflow, id string) error {
	entry, err := e.log.Wait(ctx, workflow, id)
	if err == nil && entry.Unsigned {
		return ledger.ErrRefused
	}
	return err
}
