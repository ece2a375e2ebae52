package rollback

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// BlockedError refuses a call that must not begin: it follows from what is being undone, or its
// workflow was terminated.
type BlockedError struct {
	// Rollback is the id of the rollback.
	Rollback string
	// Stopped says that the workflow is terminated (cascade 4.1.3) and nothing begins there any
	// more. Otherwise the call may be tried again after the rollback.
	Stopped bool
}

// Error implements error.
func (e *BlockedError) Error() string {
	if e.Stopped {
		return fmt.Sprintf("rollback: the workflow is terminated by rollback %s", e.Rollback)
	}
	return fmt.Sprintf("rollback: what the call follows from is being undone by rollback %s", e.Rollback)
}

// workflowLocks keep calls from beginning whose consequences a plan could not know of. They are in memory, and cost
// a call two map reads and no write. Where several gateways share a store, only the locks of what is being decided
// here are: the others are read from the records, which say the same (see carrier.admit).
type workflowLocks struct {
	mu         sync.Mutex
	byScope    map[string][]*workflowLock
	admitted   map[*Admission]struct{} // calls between their admission and their claim
	remembered map[name]*workflowLock  // read from the records of accepted rollbacks of a shared store
}

// workflowLock blocks the calls that one rollback keeps from beginning.
type workflowLock struct {
	rollback string
	scope    string // the workflow, or AttemptsScope
	reserved bool   // it is that of a reservation
	// decided is closed when what follows is known. Calls of the workflow wait for that.
	decided chan struct{}
	stops   bool            // it blocks everything, and the workflow is terminated
	whole   bool            // it blocks everything for a while
	ids     map[string]bool // it blocks what follows from these
	until   time.Time       // of a reservation and one that stops: when it expires; zero is not yet known
}

// Admission is a call between its admission and its claim. Nil is one that no rollback can hold up.
type Admission struct {
	locks    *workflowLocks
	workflow string
	left     chan struct{} // closed when it has left; nil while nobody waits

	fence store.Fence
}

// Leave ends the admission. Calling it twice is harmless.
func (a *Admission) Leave() {
	if a != nil {
		a.locks.leave(a)
	}
}

// Fence is what the claim's commit is bound to (store.Bind): no rollback has come in between at another gateway.
func (a *Admission) Fence() store.Fence {
	if a == nil {
		return store.Fence{}
	}
	return a.fence
}

// Enter admits a call of a workflow that follows from parents. Admission.Leave must be called when its
// claim's commit has ended: a rollback requested meanwhile waits for that, so that its plan has
// the call. The error is a *BlockedError, or that of ctx, since a call waits while a rollback of
// its workflow is being decided. parents is read only if the workflow has a rollback; an error in
// it is returned.
//
// Only calls that would claim are admitted; recorded ones are answered. Of a call without a
// workflow only further attempts can be blocked: workflow is their AttemptsScope, and empty for a
// first attempt.
func (c *carrier) Enter(ctx context.Context, workflow string, parents iter.Seq2[string, error]) (*Admission, error) {
	if workflow == "" {
		return nil, nil
	}
	for {
		// Register first, then read the locks: a later lock waits for this call.
		a, locks := c.locks.enter(workflow)
		wait, err := blocked(locks, parents)
		var left <-chan struct{}
		cancel := func() {}
		if wait == nil && err == nil && c.fleet != nil {
			wait, left, cancel, err = c.admit(ctx, a, parents)
		}
		if wait == nil && err == nil {
			return a, nil
		}
		a.Leave()
		if err == nil {
			select {
			case <-wait:
			case <-left:
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		cancel()
		if err != nil {
			return nil, err
		}
	}
}

// AttemptsScope replaces the workflow for the attempts of a call that has none. root is the
// checkpoint of the first attempt (checkpoint.Store.First).
func AttemptsScope(root string) string { return attemptsPrefix + root }

const attemptsPrefix = "\x00" // no workflow begins so

// scope is what a rollback locks: its workflow, or the attempts of a call without one.
func (c *journal) scope(ctx context.Context, workflow, checkpoint string) (string, error) {
	if workflow != "" {
		return workflow, nil
	}
	root, err := c.o.Checkpoints.First(ctx, checkpoint)
	return AttemptsScope(root), unavailable(err)
}

// blocked says whether a call must not begin, or what to wait for to know it.
func blocked(locks []*workflowLock, parents iter.Seq2[string, error]) (wait <-chan struct{}, err error) {
	var partial []*workflowLock
	for _, w := range locks {
		select {
		case <-w.decided:
		default:
			wait = w.decided
			continue
		}
		if w.stops || w.whole {
			return nil, &BlockedError{Rollback: w.rollback, Stopped: w.stops}
		}
		partial = append(partial, w)
	}
	if wait != nil || len(partial) == 0 {
		return wait, nil
	}
	for id, err := range parents {
		if err != nil {
			return nil, err
		}
		for _, w := range partial {
			if w.ids[id] {
				return nil, &BlockedError{Rollback: w.rollback}
			}
		}
	}
	return nil, nil
}

func (l *workflowLocks) enter(scope string) (a *Admission, locks []*workflowLock) {
	a = &Admission{locks: l, workflow: scope}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.admitted == nil {
		l.admitted = map[*Admission]struct{}{}
	}
	l.admitted[a] = struct{}{}
	for _, w := range l.byScope[scope] {
		if !w.expired() {
			locks = append(locks, w)
		}
	}
	return a, locks
}

func (l *workflowLocks) leave(v *Admission) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.admitted, v)
	if v.left != nil {
		close(v.left)
		v.left = nil
	}
}

// lock holds up new calls of a workflow until the lock is decided or removed, and returns once
// the admitted ones have claimed.
func (l *workflowLocks) lock(ctx context.Context, rollback, scope string, reserved bool) (*workflowLock, error) {
	w := &workflowLock{rollback: rollback, scope: scope, reserved: reserved, decided: make(chan struct{})}
	for _, left := range l.add(w) {
		select {
		case <-left:
		case <-ctx.Done():
			l.unlock(w)
			return nil, ctx.Err()
		}
	}
	return w, nil
}

// add returns channels that are closed when the calls of the workflow have left that were admitted before.
func (l *workflowLocks) add(w *workflowLock) (admitted []<-chan struct{}) {
	l.remove((*workflowLock).expired)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byScope == nil {
		l.byScope = map[string][]*workflowLock{}
	}
	l.byScope[w.scope] = append(l.byScope[w.scope], w)
	for a := range l.admitted {
		if a.workflow != w.scope {
			continue
		}
		if a.left == nil {
			a.left = make(chan struct{})
		}
		admitted = append(admitted, a.left)
	}
	return admitted
}

// block sets what the lock will block: what follows from the checkpoints in the plan's scope, their actions, and the
// actions that it passes. Of a call without a workflow it blocks further attempts.
func (w *workflowLock) block(scope Scope, p *Plan) {
	switch attempts := strings.HasPrefix(w.scope, attemptsPrefix); {
	case scope == FullWorkflow && !attempts && !w.reserved:
		w.stops = true
	case scope == FullWorkflow, attempts:
		w.whole = true
	default:
		w.ids = map[string]bool{}
		for _, s := range append(p.list(), p.Elsewhere...) {
			w.ids[s.Checkpoint] = true
			for _, id := range s.Actions {
				w.ids[id] = true
			}
		}
		for _, id := range p.Passed {
			w.ids[id] = true
		}
	}
}

// block sets what a lock will block, before it is decided.
func (l *workflowLocks) block(w *workflowLock, d *draft) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.block(d.Scope, d.Plan)
}

// decide lets waiting calls read the lock, once the rollback is accepted or reserved: no call is refused before.
// last is how long that of a reservation blocks. It may end early or late with a clock that is set: execute looks at
// the present either way.
func (l *workflowLocks) decide(w *workflowLock, last time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last > 0 {
		w.until = time.Now().Add(last)
	}
	close(w.decided)
}

// unlock removes a lock that was not decided, and wakes the calls that wait for it. It blocks none that have met it.
func (l *workflowLocks) unlock(w *workflowLock) {
	l.remove(func(other *workflowLock) bool { return other == w })
	w.stops, w.whole, w.ids = false, false, nil
	close(w.decided)
}

// release removes the locks of reservations.
func (l *workflowLocks) release(ids ...string) {
	l.remove(func(w *workflowLock) bool { return w.reserved && slices.Contains(ids, w.rollback) })
}

// ended removes the locks of a rollback that takes no more steps, or sets how long its workflow
// stays terminated.
func (l *workflowLocks) ended(h *Rollback, keep time.Duration) {
	l.remove(func(w *workflowLock) bool {
		ends := w.rollback == h.ID && !w.reserved
		if ends && w.stops {
			w.until = h.Finished.Add(keep)
		}
		return ends && !w.stops
	})
}

func (w *workflowLock) expired() bool { return !w.until.IsZero() && !time.Now().Before(w.until) }

// remove removes locks.
func (l *workflowLocks) remove(which func(*workflowLock) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for scope, locks := range l.byScope {
		if locks = slices.DeleteFunc(locks, which); len(locks) == 0 {
			delete(l.byScope, scope)
		} else {
			l.byScope[scope] = locks
		}
	}
}

// Load restores the locks of unfinished rollbacks and terminated workflows, before the first call
// and Start. If it fails no call may begin: it could follow from what is being undone.
func (c *carrier) Load(ctx context.Context) error {
	if c.fleet != nil {
		return nil // they are read with each call that may meet them
	}
	locks, err := c.recordedLocks(ctx, func(kind byte) []byte { return []byte{space, kind} })
	for _, w := range locks {
		c.locks.add(w)
	}
	return err
}

// recordedLocks are what the rollbacks and reservations that some indexes name keep from beginning. prefix begins an
// index.
func (c *carrier) recordedLocks(ctx context.Context, prefix func(kind byte) []byte) (all []*workflowLock, err error) {
	for _, kind := range []byte{kindStop, kindWorkflow, kindReservedWorkflow} {
		var entries []store.Entry
		for entry, err := range c.o.Store.Scan(ctx, store.Prefix(prefix(kind))) {
			if err != nil {
				return nil, unavailable(err)
			}
			entries = append(entries, entry)
		}
		for _, entry := range entries {
			w, err := c.recordedLock(ctx, kind, nameIn(entry.Key))
			switch {
			case errors.Is(err, ErrUnknown): // it is over
			case errors.Is(err, errUnreadable): // nobody knows its workflow, and nobody carries it out
				if c.fleet == nil { // else each call reads it again
					c.log.Error("a rollback cannot be read; nothing is kept from beginning for it", "error", err)
				}
			case err != nil:
				return nil, err
			default:
				if !entry.Expires.IsZero() {
					w.until = entry.Expires
				}
				all = append(all, w)
			}
		}
	}
	return all, nil
}

// recordedLock is what a rollback or a reservation that an index names keeps from beginning. ErrUnknown is nothing.
// What a member of a shared store has read of an accepted rollback it remembers: that does not change, and its index
// says that it is not finished.
func (c *carrier) recordedLock(ctx context.Context, kind byte, n name) (w *workflowLock, err error) {
	if c.fleet != nil && kind == kindWorkflow {
		c.locks.mu.Lock()
		w = c.locks.remembered[n]
		c.locks.mu.Unlock()
		if w != nil {
			return w, nil
		}
	}
	var h *Rollback
	if kind == kindReservedWorkflow {
		h, err = c.reservation(ctx, n)
	} else if h, err = c.readHead(ctx, n); err == nil && kind == kindWorkflow {
		if !h.open() {
			return nil, ErrUnknown
		}
		h.Plan, err = readPlan(ctx, &c.plans, n, h)
	}
	if err != nil {
		return nil, err
	}
	w = &workflowLock{rollback: h.ID, reserved: kind == kindReservedWorkflow, decided: make(chan struct{})}
	if w.scope, err = c.scope(ctx, h.Workflow, h.Checkpoint); err != nil {
		return nil, err
	}
	if kind == kindStop && h.State == Finished {
		w.until = h.Finished.Add(c.o.Keep)
	}
	w.block(h.Scope, h.Plan)
	close(w.decided)
	if c.fleet != nil && kind == kindWorkflow {
		c.locks.remember(n, w)
	}
	return w, nil
}

func (l *workflowLocks) remember(n name, w *workflowLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remembered == nil || len(l.remembered) >= maxRemembered {
		l.remembered = map[name]*workflowLock{}
	}
	l.remembered[n] = w
}

// maxRemembered is how many locks of rollbacks of a shared store are remembered.
const maxRemembered = 256

// The decision about a rollback at one member, and the claims at all of them: the decision is announced first,
// which changes the fence. From then on no claim is made that was admitted before, new calls of the workflow wait,
// and the plan has what was claimed. The acceptance changes the fence too, and the end of the decision.

// announce has the calls of a workflow wait at all members, and returns when everything that they have claimed
// before is known here. over ends that.
func (c *Coordinator) announce(ctx context.Context, workflow, scope string) (over func(), err error) {
	if c.fleet == nil {
		return func() {}, nil
	}
	now, err := c.now(ctx)
	if err != nil {
		return nil, err
	}
	fence := store.Write{Key: c.fenceKey(workflow), Expires: now.Add(c.o.Keep)}
	nonce := uuid.New()
	decision := store.Write{
		Key: append(c.workflowPrefix(kindDeciding, scope), nonce[:]...), Value: []byte(c.fleet.Boot()), Expires: fence.Expires,
	}
	over = func() {
		decision := store.Write{Key: decision.Key, Delete: true}
		c.goOnUntil("the end of a decision", func(ctx context.Context) error {
			_, err := c.o.Store.Commit(ctx, decision, fence)
			c.fences.Forget(fence.Key)
			return err
		})
	}
	_, err = c.o.Store.Commit(ctx, decision, fence)
	c.fences.Forget(fence.Key)
	if err == nil {
		err = c.fleet.CatchUp(ctx)
	} else if !errors.Is(err, store.ErrUnknown) {
		return nil, unavailable(err)
	}
	if err != nil {
		over()
		return nil, unavailable(err)
	}
	return over, nil
}

// goOnUntil does something at once, and where that fails again and again in the background: calls wait for it.
// With the member's end they wait no longer.
func (c *Coordinator) goOnUntil(what string, do func(ctx context.Context) error) {
	if do(c.hard) == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stopping {
		c.wg.Go(func() { _ = c.retry("", what, do) })
	}
}

// admit looks whether the rollbacks at all members let a call begin. Where that is being decided, it is to look
// again once changed or left is closed, and then to call cancel.
func (c *carrier) admit(
	ctx context.Context, a *Admission, parents iter.Seq2[string, error],
) (changed, left <-chan struct{}, cancel func(), err error) {
	workflow, attempts := a.workflow, strings.HasPrefix(a.workflow, attemptsPrefix)
	if attempts {
		workflow = ""
	}
	key := c.fenceKey(workflow)
	if !attempts {
		if at, open := c.fences.Open(key); open {
			a.fence = at
			return nil, nil, func() {}, nil
		}
	}
	left = c.fleet.Left()
	changed, cancel = c.o.Store.Watch(key)
	at, err := c.fences.Read(ctx, key)
	deciding := false
	if err == nil {
		deciding, err = c.beingDecided(ctx, a.workflow)
	}
	if deciding {
		out := false
		if out, err = c.fleet.Gone(ctx, c.fleet.Boot()); !out && err == nil {
			return changed, left, cancel, nil
		}
		if out { // nothing that it admits could be claimed
			err = store.ErrUnhealthy
		}
	}
	cancel()
	none := func() {}
	if err != nil {
		return nil, nil, none, unavailable(err)
	}
	locks, err := c.recordedLocks(ctx, func(kind byte) []byte { return c.workflowPrefix(kind, workflow) })
	if err != nil {
		return nil, nil, none, err
	}
	locks = slices.DeleteFunc(locks, func(w *workflowLock) bool { return w.scope != a.workflow })
	if _, err := blocked(locks, parents); err != nil {
		return nil, nil, none, err
	}
	if len(locks) == 0 && !attempts {
		c.fences.Pass(at)
	}
	a.fence = at
	return nil, nil, none, nil
}

// beingDecided reports whether a member decides about a rollback. One that is gone does not.
func (c *journal) beingDecided(ctx context.Context, scope string) (bool, error) {
	for entry, err := range c.o.Store.Scan(ctx, store.Prefix(c.workflowPrefix(kindDeciding, scope))) {
		if err != nil {
			return false, err
		}
		boot := string(entry.Value)
		if gone, err := c.gone(ctx, boot); err != nil || !gone {
			return err == nil, err
		}
	}
	return false, nil
}
