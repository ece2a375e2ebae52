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

// workflowLocks block calls in this process whose consequences a plan could not know of. They
// cost a call two map reads and no write.
type workflowLocks struct {
	mu         sync.Mutex
	byWorkflow map[string][]*workflowLock // by workflow, or AttemptsScope
	admitted   map[*Admission]struct{}    // calls between their admission and their claim
}

// workflowLock blocks the calls that one rollback keeps from beginning.
type workflowLock struct {
	rollback, workflow string
	// decided is closed when the members below are known. Calls of the workflow wait for that.
	decided      chan struct{}
	attemptsOnly bool            // it blocks further attempts of one call
	stops        bool            // it blocks everything
	whole        bool            // it blocks everything for a while
	ids          map[string]bool // it blocks what follows from these
	reserved     bool            // it is that of a reservation
	until        time.Time       // of a reservation and one that stops: when it expires; zero is not yet known
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
func (c *Coordinator) Enter(ctx context.Context, workflow string, parents iter.Seq2[string, error]) (*Admission, error) {
	if workflow == "" {
		return nil, nil
	}
	for {
		// Register first, then read the locks: a later lock waits for this call.
		a, locks := c.locks.enter(workflow)
		held := new(heldUp)
		wait, err := blocked(locks, parents)
		if wait == nil && err == nil {
			if c.fleet == nil {
				return a, nil
			}
			held, err = c.fleet.admit(ctx, a, parents)
			if held == nil && err == nil {
				return a, nil
			}
		}
		a.Leave()
		if err != nil {
			return nil, err
		}
		select {
		case <-wait:
		case <-held.changed:
		case <-held.left:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if held.cancel != nil {
			held.cancel()
		}
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
func (c *Coordinator) scope(ctx context.Context, workflow, checkpoint string) (string, error) {
	if workflow != "" {
		return workflow, nil
	}
	root, err := c.o.Checkpoints.First(ctx, checkpoint)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrStore, err)
	}
	return AttemptsScope(root), nil
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
		if w.stops || w.whole || w.attemptsOnly {
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

func (l *workflowLocks) enter(workflow string) (*Admission, []*workflowLock) {
	v := &Admission{locks: l, workflow: workflow}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.admitted == nil {
		l.admitted = map[*Admission]struct{}{}
	}
	l.admitted[v] = struct{}{}
	if len(l.byWorkflow) == 0 {
		return v, nil
	}
	l.removeExpired(workflow)
	return v, slices.Clone(l.byWorkflow[workflow])
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
func (l *workflowLocks) lock(ctx context.Context, rollback, workflow string, reserved bool) (*workflowLock, error) {
	w := newWorkflowLock(rollback, workflow)
	w.reserved = reserved
	l.add(w)
	for _, left := range l.admissionsEnd(workflow) {
		select {
		case <-left:
		case <-ctx.Done():
			l.unlock(w)
			return nil, ctx.Err()
		}
	}
	return w, nil
}

func newWorkflowLock(rollback, workflow string) *workflowLock {
	return &workflowLock{
		rollback: rollback, workflow: workflow, decided: make(chan struct{}),
		attemptsOnly: strings.HasPrefix(workflow, attemptsPrefix),
	}
}

func (l *workflowLocks) add(w *workflowLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byWorkflow == nil {
		l.byWorkflow = map[string][]*workflowLock{}
	}
	for workflow := range l.byWorkflow {
		l.removeExpired(workflow)
	}
	l.byWorkflow[w.workflow] = append(l.byWorkflow[w.workflow], w)
}

// admissionsEnd are channels that are closed when the admitted calls of a workflow have left.
func (l *workflowLocks) admissionsEnd(workflow string) []<-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []<-chan struct{}
	for v := range l.admitted {
		if v.workflow != workflow {
			continue
		}
		if v.left == nil {
			v.left = make(chan struct{})
		}
		all = append(all, v.left)
	}
	return all
}

// setPlan sets what the lock will block.
func (l *workflowLocks) setPlan(w *workflowLock, scope Scope, p *Plan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.blockPlan(scope, p)
}

// decide lets waiting calls read the lock, once the rollback is accepted: no call is refused
// before.
func (l *workflowLocks) decide(w *workflowLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.decide()
}

func (w *workflowLock) decide() {
	select {
	case <-w.decided:
	default:
		close(w.decided)
	}
}

// blockPlan blocks what follows from the checkpoints in the plan's scope, their actions, and the
// actions that it passes.
func (w *workflowLock) blockPlan(scope Scope, p *Plan) {
	all := scope == FullWorkflow && !w.attemptsOnly
	w.stops, w.whole = all && !w.reserved, all && w.reserved
	if all || w.attemptsOnly {
		return
	}
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

// hold lets waiting calls read the lock of a reservation, and sets how long it lasts. It may end
// early or late with a clock that is set: execute looks at the present either way.
func (l *workflowLocks) hold(w *workflowLock, last time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w.until = time.Now().Add(last)
	w.decide()
}

// release removes the locks of reservations.
func (l *workflowLocks) release(ids ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for workflow := range l.byWorkflow {
		l.remove(workflow, func(w *workflowLock) bool { return w.reserved && slices.Contains(ids, w.rollback) })
	}
}

// unlock removes a lock and wakes the calls that wait for it.
func (l *workflowLocks) unlock(w *workflowLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remove(w.workflow, func(other *workflowLock) bool { return other == w })
	w.decide()
}

// ended removes the locks of a rollback that takes no more steps, or sets how long its workflow
// stays terminated.
func (l *workflowLocks) ended(h *Rollback, keep time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	over := func(w *workflowLock) bool { return w.rollback == h.ID && !w.stops && !w.reserved }
	if h.Workflow == "" { // there are as many as rollbacks under way
		for workflow := range l.byWorkflow {
			l.remove(workflow, over)
		}
		return
	}
	for _, w := range l.byWorkflow[h.Workflow] {
		if w.rollback == h.ID && w.stops {
			w.until = h.Finished.Add(keep)
		}
	}
	l.remove(h.Workflow, over)
}

// removeExpired removes locks whose rollback or reservation has expired, with mu held.
func (l *workflowLocks) removeExpired(workflow string) {
	l.remove(workflow, func(w *workflowLock) bool { return !w.until.IsZero() && !time.Now().Before(w.until) })
}

// remove removes locks of a workflow, with mu held.
func (l *workflowLocks) remove(workflow string, which func(*workflowLock) bool) {
	left := slices.DeleteFunc(slices.Clone(l.byWorkflow[workflow]), which)
	if len(left) == 0 {
		delete(l.byWorkflow, workflow)
		return
	}
	l.byWorkflow[workflow] = left
}

// lockKinds are the indexes of what keeps calls from beginning.
var lockKinds = []byte{kindStop, kindWorkflow, kindReservedWorkflow}

// Load restores the locks of unfinished rollbacks and terminated workflows, before the first call
// and Start. If it fails no call may begin: it could follow from what is being undone.
func (c *Coordinator) Load(ctx context.Context) error {
	if c.fleet != nil {
		return nil // they are read with each call that may meet them
	}
	for _, kind := range lockKinds {
		for entry, err := range c.o.Store.Scan(ctx, store.Prefix([]byte{space, kind})) {
			if err != nil {
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
			w, err := c.recordedLock(ctx, kind, nameIn(entry.Key))
			switch {
			case errors.Is(err, ErrUnknown):
			case errors.Is(err, errUnreadable): // nobody knows its workflow, and nobody carries it out
				c.log.Error("a rollback cannot be read; nothing is kept from beginning for it", "error", err)
			case err != nil:
				return err
			default:
				if kind == kindStop && !entry.Expires.IsZero() {
					w.until = entry.Expires
				}
				c.locks.add(w)
			}
		}
	}
	return nil
}

// recordedLock is what a rollback or a reservation that an index names keeps from beginning. ErrUnknown is nothing.
func (c *Coordinator) recordedLock(ctx context.Context, kind byte, n name) (*workflowLock, error) {
	var h *Rollback
	var err error
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
	scope, err := c.scope(ctx, h.Workflow, h.Checkpoint)
	if err != nil {
		return nil, err
	}
	w := newWorkflowLock(h.ID, scope)
	w.reserved, w.until = kind == kindReservedWorkflow, h.Until
	if kind == kindStop && h.State == Finished {
		w.until = h.Finished.Add(c.o.Keep)
	}
	w.blockPlan(h.Scope, h.Plan)
	w.decide()
	return w, nil
}
