// Package fleet has what gateways over one store have in common: who is there, and the background work of each, which
// takes over what a member leaves unfinished that is gone.
package fleet

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Fleet is one gateway's view of the members of a shared store. A nil Fleet is that of a gateway that has its store
// alone.
type Fleet struct {
	store.Shared
	boot string   // of this member
	gone sync.Map // boots that are known to be gone: that stays so
}

// Of returns the fleet of a store; nil if one gateway has it.
func Of(st store.Store) *Fleet {
	shared, is := st.(store.Shared)
	if !is {
		return nil
	}
	return &Fleet{Shared: shared, boot: shared.Self().Boot}
}

// Boot is that of this member; empty without a fleet.
func (f *Fleet) Boot() string {
	if f == nil {
		return ""
	}
	return f.boot
}

// Gone reports whether the member with a boot has been removed: it writes nothing more, and others may take over what
// it has left. What names no boot is of a gateway that had the store alone, and is gone.
func (f *Fleet) Gone(ctx context.Context, boot string) (bool, error) {
	if _, known := f.gone.Load(boot); known || boot == "" {
		return true, nil
	}
	gone, err := f.Shared.Gone(ctx, boot)
	if gone && err == nil {
		f.gone.Store(boot, nil)
	}
	return gone && err == nil, err
}

// First reports whether this member is the one that has joined first, so that another one is when that is gone: it
// does what one of them has to do. Without a fleet it is.
func (f *Fleet) First(ctx context.Context) (bool, error) {
	if f == nil {
		return true, nil
	}
	members, err := f.Members(ctx)
	if err == nil && len(members) == 0 { // this one was removed
		err = store.ErrUnhealthy
	}
	if err != nil {
		return false, err
	}
	first := slices.MinFunc(members, func(a, b store.Member) int {
		return cmp.Or(a.Joined.Compare(b.Joined), cmp.Compare(a.Boot, b.Boot))
	})
	return first.Boot == f.boot, nil
}

// Follow is store.Shared's; without a fleet nobody else writes.
func (f *Fleet) Follow(prefix []byte, changed func(key []byte)) (cancel func()) {
	if f == nil {
		return func() {}
	}
	return f.Shared.Follow(prefix, changed)
}

// out reports whether this member itself has been removed: the others take over what it has left.
func (f *Fleet) out(ctx context.Context) bool {
	out, err := f.Gone(ctx, f.boot)
	// A store that is lost or closed says no more, and Left stays closed.
	return out && err == nil || errors.Is(err, store.ErrUnhealthy) || errors.Is(err, store.ErrClosed)
}

// Left returns a channel that is closed when a member has been removed since the call, or earlier; nil without a
// fleet.
func (f *Fleet) Left() <-chan struct{} {
	if f == nil {
		return nil
	}
	return f.Shared.Left()
}
