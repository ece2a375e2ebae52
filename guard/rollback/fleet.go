package rollback

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// gateways is what the coordinators of several gateways over one store agree on (ADR 0133). It is nil where one
// gateway has the store.
//
// One member carries a rollback out: the one whose boot its head names. Once that is gone another one writes
// its own there. What keeps calls from beginning is read from the store: a claim is made on the condition that
// the fence of its workflow has not changed since.
type gateways struct {
	*Coordinator
	members *fleet.Fleet
	fences  *store.Fences

	mu    sync.Mutex
	plans map[name]*workflowLock // of accepted rollbacks, which do not change
}

// maxPlans is how many locks of rollbacks at other members are remembered.
const maxPlans = 256

func gatewaysOf(c *Coordinator) *gateways {
	members := fleet.Of(c.o.Store)
	if members == nil {
		return nil
	}
	return &gateways{
		Coordinator: c, members: members,
		fences: store.FollowFences(members, []byte{space, kindFence}), plans: map[name]*workflowLock{},
	}
}

// boot is that of this member; empty where one gateway has the store.
func (f *gateways) boot() string {
	if f == nil {
		return ""
	}
	return f.members.Boot()
}

// gone reports whether nothing more is written by the member with a boot. A record without one is of a
// gateway that had the store alone.
func (f *gateways) gone(ctx context.Context, boot string) (bool, error) {
	if boot == "" {
		return true, nil
	}
	gone, err := f.members.Gone(ctx, boot)
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return gone, nil
}

// take makes this member the one that carries a rollback out, if the one that did is gone. mine reports whether
// it is this member; unless fresh, the steps may have changed since the rollback was read.
func (f *gateways) take(ctx context.Context, r *run) (mine, fresh bool, err error) {
	for fresh = true; ; fresh = false {
		boot := r.now().Boot
		if boot == f.boot() {
			return true, fresh, nil
		}
		if gone, err := f.gone(ctx, boot); err != nil || !gone {
			return false, fresh, err
		}
		err := f.change(ctx, r, func(h *Rollback, _ *store.Batch) error {
			h.Boot = f.boot()
			return nil
		})
		if err != nil && !errors.As(err, new(*store.Conflict)) { // else another member was first, or it was sealed anew
			return false, fresh, err
		}
	}
}

// takeFailure makes this member the one that asks for the rollback of a recorded failure, if the one that did
// is gone. first says that nothing was taken up yet by this member, whose own it takes then, too.
func (f *gateways) takeFailure(ctx context.Context, row store.Row[Failure], first bool) (mine bool, err error) {
	v := row.Record
	if v == nil { // it cannot be read, which is said once
		return first, nil
	}
	if v.Boot == f.boot() {
		return first, nil
	}
	if gone, err := f.gone(ctx, v.Boot); err != nil || !gone {
		return false, err
	}
	defer f.sealing.Enter()()
	v.Boot = f.boot()
	_, err = f.o.Store.Commit(ctx, f.failed.Put(row.Key, v, store.VersionIs(row.Version), time.Time{}))
	if errors.As(err, new(*store.Conflict)) {
		return false, nil // another member was first
	}
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return true, nil
}

// follow keeps the head of a rollback that is carried out here as others change it, until ctx is done.
func (f *gateways) follow(ctx context.Context, r *run) {
	for ctx.Err() == nil {
		changed, cancel := f.o.Store.Watch(keyOf(kindHead, r.name))
		r.mu.Lock()
		err := f.refresh(f.hard, r)
		r.mu.Unlock()
		var again <-chan time.Time
		if err != nil { // what has changed is not known
			changed, again = nil, time.After(longPause)
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
		}
		cancel()
	}
}

// The decision about a rollback at one member, and the claims at all of them: the decision is announced first,
// which changes the fence. From then on no claim is made that was admitted before, new calls of the workflow wait,
// and the plan has what was claimed. The acceptance changes the fence too, and the end of the decision.

// announce has the calls of a workflow wait at all members, and returns when everything that they have claimed
// before is known here. over ends that.
func (f *gateways) announce(ctx context.Context, workflow, scope string) (over func(), err error) {
	if f == nil {
		return func() {}, nil
	}
	now, err := f.now(ctx)
	if err != nil {
		return nil, err
	}
	fence := store.Write{Key: f.fenceKey(workflow), Expires: now.Add(f.o.Keep)}
	nonce := uuid.New()
	decision := store.Write{
		Key: append(f.workflowPrefix(kindDeciding, scope), nonce[:]...), Value: []byte(f.boot()), Expires: fence.Expires,
	}
	over = func() {
		decision := store.Write{Key: decision.Key, Delete: true}
		f.goOnUntil("the end of a decision", func(ctx context.Context) error {
			_, err := f.o.Store.Commit(ctx, decision, fence)
			f.fences.Forget(fence.Key)
			return err
		})
	}
	_, err = f.o.Store.Commit(ctx, decision, fence)
	f.fences.Forget(fence.Key)
	if err == nil {
		err = f.members.CatchUp(ctx)
	} else if !errors.Is(err, store.ErrUnknown) {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if err != nil {
		over()
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return over, nil
}

// goOnUntil does something at once, and where that fails again and again in the background: calls wait for it.
// With the member's end they wait no longer.
func (f *gateways) goOnUntil(what string, do func(ctx context.Context) error) {
	if do(f.hard) == nil {
		return
	}
	f.Coordinator.mu.Lock()
	defer f.Coordinator.mu.Unlock()
	if !f.stopping {
		f.wg.Go(func() { _ = f.retry("", what, do) })
	}
}

// heldUp is what a call waits for while a member decides about a rollback of its workflow.
type heldUp struct {
	changed, left <-chan struct{}
	cancel        func()
}

// admit looks whether the rollbacks at all members let a call begin. held is not nil where that is being decided.
func (f *gateways) admit(ctx context.Context, a *Admission, parents iter.Seq2[string, error]) (held *heldUp, err error) {
	workflow, attempts := a.workflow, strings.HasPrefix(a.workflow, attemptsPrefix)
	if attempts {
		workflow = ""
	}
	key := f.fenceKey(workflow)
	if !attempts {
		if at, open := f.fences.Open(key); open {
			a.fence = at
			return nil, nil
		}
	}
	held = &heldUp{left: f.members.Left()}
	held.changed, held.cancel = f.o.Store.Watch(key)
	at, err := f.fences.Read(ctx, key)
	deciding := false
	if err == nil {
		deciding, err = f.deciding(ctx, a.workflow)
	}
	if deciding {
		out := false
		if out, err = f.members.Gone(ctx, f.boot()); !out && err == nil {
			return held, nil
		}
		if out { // nothing that it admits could be claimed
			err = store.ErrUnhealthy
		}
	}
	held.cancel()
	var locks []*workflowLock
	if err == nil {
		locks, err = f.locksOf(ctx, workflow, a.workflow)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	case len(locks) > 0:
		if _, err := blocked(locks, parents); err != nil {
			return nil, err
		}
	case !attempts:
		f.fences.Pass(at)
	}
	a.fence = at
	return nil, nil
}

// deciding reports whether a member decides about a rollback. One that is gone does not.
func (f *gateways) deciding(ctx context.Context, scope string) (bool, error) {
	for entry, err := range f.o.Store.Scan(ctx, store.Prefix(f.workflowPrefix(kindDeciding, scope))) {
		if err != nil {
			return false, err
		}
		boot := string(entry.Value)
		if gone, err := f.gone(ctx, boot); err != nil || !gone {
			return err == nil, err
		}
	}
	return false, nil
}

// locksOf are what keeps calls of a workflow, or the attempts of a call without one, from beginning.
func (f *gateways) locksOf(ctx context.Context, workflow, scope string) (locks []*workflowLock, err error) {
	for _, kind := range lockKinds {
		names, err := f.names(ctx, store.Prefix(f.workflowPrefix(kind, workflow)))
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			w, err := f.lockOf(ctx, kind, n)
			if errors.Is(err, ErrUnknown) || errors.Is(err, errUnreadable) {
				continue // it is over, or nobody carries it out
			}
			if err != nil {
				return nil, err
			}
			if w.workflow == scope {
				locks = append(locks, w)
			}
		}
	}
	return locks, nil
}

// lockOf is lock, for a call that may meet it. What it has read of accepted rollbacks it remembers.
func (f *gateways) lockOf(ctx context.Context, kind byte, n name) (*workflowLock, error) {
	f.mu.Lock()
	w := f.plans[n]
	f.mu.Unlock()
	if w != nil && kind == kindWorkflow {
		return w, nil // its index says that it is not finished
	}
	w, err := f.recordedLock(ctx, kind, n)
	if err != nil || kind != kindWorkflow {
		return w, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.plans) >= maxPlans {
		clear(f.plans)
	}
	f.plans[n] = w
	return w, nil
}
