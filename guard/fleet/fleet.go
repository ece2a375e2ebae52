// Package fleet has what gateways over one store have in common: who is there, and the background work of each, which
// takes over what a member leaves unfinished that is gone.
package fleet

import (
	"context"
	"errors"
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
// it has left.
func (f *Fleet) Gone(ctx context.Context, boot string) (bool, error) {
	if _, known := f.gone.Load(boot); known {
		return true, nil
	}
	gone, err := f.Shared.Gone(ctx, boot)
	if gone && err == nil {
		f.gone.Store(boot, nil)
	}
	return gone && err == nil, err
}

// Follow is store.Shared's; without a fleet nobody else writes.
func (f *Fleet) Follow(prefix []byte, changed func(key []byte)) (cancel func()) {
	if f == nil {
		return func() {}
	}
	return f.Shared.Follow(prefix, changed)
}

// Out reports whether this member itself has been removed: the others take over what it has left.
func (f *Fleet) Out(ctx context.Context) bool {
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
