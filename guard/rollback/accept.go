package rollback

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Execute accepts a rollback durably, and returns at once: it goes on by itself. The same
// id with the same content gives the same rollback (P5), whatever became of its
// checkpoints since. riders land in the accepting commit, and only there; where the
// condition of one does not hold the error is its *store.Conflict, and nothing is
// accepted.
func (c *Coordinator) Execute(ctx context.Context, r Request, riders ...store.Write) (*Rollback, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := r.checkID(); err != nil {
		return nil, err
	}
	if found, err := c.again(ctx, &r); err == nil || !errors.Is(err, ErrUnknown) {
		return found, err
	}
	if c.ending() {
		return nil, ErrStopping
	}
	d, err := c.judge(ctx, &r)
	if err != nil {
		return nil, err
	}
	scope, err := c.scope(ctx, d.Workflow, r.Checkpoint)
	if err != nil {
		return nil, err
	}
	b, err := c.bars.raise(ctx, r.ID, scope)
	if err != nil {
		return nil, err
	}
	return c.decide(ctx, &r, b, riders)
}

// judge is draft, and tells that the target does not verify.
func (c *Coordinator) judge(ctx context.Context, r *Request) (*draft, error) {
	d, err := c.draft(ctx, r)
	if refused := (*refusal)(nil); errors.As(err, &refused) {
		return nil, c.refuse(ctx, refused)
	}
	return d, err
}

// decide accepts a rollback or refuses it, behind its bar. The plan is made anew: calls
// that were inside when the bar was raised are recorded now, and no others have come.
func (c *Coordinator) decide(ctx context.Context, r *Request, b *bar, riders []store.Write) (*Rollback, error) {
	keep := false
	defer func() {
		if keep {
			c.bars.settle(b)
		} else {
			c.bars.lower(b)
		}
	}()
	d, err := c.judge(ctx, r)
	if err != nil {
		return nil, err
	}
	c.bars.plan(b, d.Scope, d.Plan)
	c.accepting.Lock()
	defer c.accepting.Unlock()
	for range maxTries {
		if found, err := c.again(ctx, r); err == nil || !errors.Is(err, ErrUnknown) {
			return found, err
		}
		accepted, err := c.accept(ctx, r, d, riders)
		if err == nil {
			keep = true
			return accepted.whole(), nil
		}
		if !errors.Is(err, errAgain) {
			// It may have landed all the same, and will go on.
			h, _, there := c.readHead(context.WithoutCancel(ctx), c.name(r.ID))
			keep = there == nil && (h.open() || h.stops()) || there != nil && !errors.Is(there, ErrUnknown)
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: others change it again and again", ErrStore)
}

// maxTries bounds how often a commit is tried that others have overtaken.
const maxTries = 20

// errAgain: somebody else was first; look again.
var errAgain = errors.New("rollback: somebody else was first")

// again finds the rollback that was asked for before, or says ErrUnknown.
func (c *Coordinator) again(ctx context.Context, r *Request) (*Rollback, error) {
	n := c.name(r.ID)
	h, _, err := c.readHead(ctx, n)
	if errors.Is(err, ErrUnknown) && r.Token != "" {
		// Cascade 4.3.4: one token asks for one rollback.
		id, found := c.ByToken(ctx, r.Token)
		switch {
		case errors.Is(found, ErrUnknown):
		case found != nil:
			return nil, found
		case id != r.ID:
			return nil, ErrMismatch
		default: // it was accepted between the two looks (P5)
			h, _, err = c.readHead(ctx, n)
		}
	}
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(h.Content, r.content()) {
		return nil, ErrMismatch
	}
	if h.open() { // one whose acceptance landed and was not answered
		if _, err := c.adopt(ctx, n); err != nil {
			return nil, err
		}
	}
	return c.Get(ctx, r.ID)
}

// refuse tells that the verification of the target has failed, and returns why.
func (c *Coordinator) refuse(ctx context.Context, refused *refusal) error {
	d := refused.draft
	t, err := c.o.Ledger.Erred(ctx, d.head.rollback(), d.Checkpoint, errorConstraint, refused.why)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	g := new(cargo)
	g.tell(t)
	if len(g.writes) == 0 {
		return errors.Join(g.done(nil), refused.error)
	}
	_, err = c.o.Store.Commit(ctx, g.writes...)
	if err = g.done(err); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return refused.error
}

// rivals are the rollbacks of a workflow that take steps.
func (c *Coordinator) rivals(ctx context.Context, workflow string) ([]*run, error) {
	var all []*run
	for entry, err := range c.o.Store.Scan(ctx, store.Prefix(c.workflowPrefix(workflow))) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		r, err := c.adopt(ctx, nameIn(entry.Key))
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !r.halted.is() {
			all = append(all, r)
		}
	}
	return all, nil
}

// maxJoins bounds how many others give way in one commit, whose size is bounded (store.MaxBatch).
const maxJoins = 256

// meet decides between the draft and those that were there first (cascade 4.3.4). It
// returns those that give way.
func (d *draft) meet(rivals []*run) (joins []*run, err error) {
	d.Behind, d.Absorbed = nil, nil
	for _, r := range rivals {
		if r.id == d.ID { // accepted since: whoever asks for it finds it
			continue
		}
		r.mu.Lock()
		there, joined := r.rolling(), r.head.Joined != ""
		r.mu.Unlock()
		if !d.Asked.After(there.Asked) { // a clock that went back gives no precedence
			d.Asked = there.Asked.Add(time.Nanosecond)
		}
		comes := plan.Rolling{Rollback: plan.Rollback{ID: d.ID, Scope: d.Scope, Asked: d.Asked}, Plan: d.Plan}
		switch plan.Meet(there, comes) {
		case plan.Apart:
			continue
		case plan.Refused:
			if !joined { // else the one that it gives way to decides
				return nil, &ConflictError{Winner: r.id}
			}
		case plan.Joined: // those beyond the bound go on to their end instead
			if !joined && len(joins) < maxJoins {
				joins = append(joins, r)
				d.Absorbed = append(d.Absorbed, r.id)
			}
		}
		d.Behind = append(d.Behind, r.id)
	}
	return joins, nil
}

// accept decides and commits, with the lock on acceptance held.
func (c *Coordinator) accept(ctx context.Context, r *Request, d *draft, riders []store.Write) (*run, error) {
	fence := store.Write{Key: c.fenceKey(d.Workflow), If: store.Absent()}
	found, err := c.o.Store.Get(ctx, fence.Key)
	switch {
	case err == nil:
		fence.If = store.VersionIs(found.Version)
	case !errors.Is(err, store.ErrNotFound):
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	rivals, err := c.rivals(ctx, d.Workflow)
	if err != nil {
		return nil, err
	}
	joins, err := d.meet(rivals)
	if err != nil {
		return nil, err
	}
	c.sealing.RLock()
	defer c.sealing.RUnlock()
	for _, other := range joins {
		other.mu.Lock()
		defer other.mu.Unlock()
		if !other.head.open() || other.head.Joined != "" {
			return nil, errAgain
		}
	}
	d.State = Executing
	fence.Expires = d.Due.Add(c.o.Keep)
	g := new(cargo)
	n := c.name(d.ID)
	if err := c.lade(ctx, r, d, n, g); err != nil {
		return nil, g.done(err)
	}
	own, err := c.headWrite(n, &d.head, store.Absent())
	if err != nil {
		return nil, g.done(err)
	}
	batch := append([]store.Write{own, fence}, g.writes...)
	heads := make([]head, len(joins))
	for i, other := range joins {
		heads[i] = other.head
		heads[i].Joined = d.ID
		w, err := c.headWrite(other.name, &heads[i], store.VersionIs(other.version))
		if err != nil {
			return nil, g.done(err)
		}
		batch = append(batch, w)
	}
	version, err := c.o.Store.Commit(ctx, append(batch, riders...)...)
	if err = g.done(err); err != nil {
		for _, other := range joins { // sealed anew, or changed by another node
			if h, version, err := c.readHead(ctx, other.name); err == nil {
				other.head, other.version = *h, version
				other.told()
			}
		}
		if err = refusedBy(err, riders); !errors.Is(err, store.ErrUnknown) {
			return nil, err
		}
		// It may have landed. Then it goes on, whether or not its requester asks again (P5).
		if h, _, readErr := c.readHead(context.WithoutCancel(ctx), n); readErr != nil || !bytes.Equal(h.Content, d.Content) {
			return nil, err
		}
		landed, readErr := c.adopt(context.WithoutCancel(ctx), n)
		if readErr != nil {
			return nil, err
		}
		return landed, nil
	}
	for i, other := range joins {
		other.head, other.version = heads[i], version
		other.told()
	}
	accepted := newRun(n, &d.head, version, &d.planned)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runs[n] = accepted
	c.launch(accepted)
	return accepted, nil
}

// lade takes along what is recorded of a new rollback besides its head.
func (c *Coordinator) lade(ctx context.Context, r *Request, d *draft, n name, g *cargo) error {
	pieces, err := c.planWrites(n, &d.planned)
	if err != nil {
		return err
	}
	d.Pieces = len(pieces)
	parents := []string{}
	switch {
	case r.Error != "":
		parents = append(parents, r.Error)
	case r.Token != "":
		parents = append(parents, r.Token)
	}
	t, err := c.o.Ledger.Started(ctx, d.rollback(), parents)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	d.Start = g.tell(t)
	g.writes = append(append(g.writes, pieces...),
		store.Write{Key: ageKey(d.Asked, n)},
		store.Write{Key: keyOf(kindOpen, n)},
		store.Write{Key: c.workflowKey(d.Workflow, n)},
	)
	if d.stops() {
		g.writes = append(g.writes, store.Write{Key: keyOf(kindStop, n)})
	}
	if r.Token != "" {
		g.writes = append(g.writes, c.sealed(c.tokenKey(r.Token), []byte(d.ID), store.Absent()))
	}
	return nil
}

// refusedBy tells a rider that has lost from somebody else who was first.
func refusedBy(err error, riders []store.Write) error {
	lost := (*store.Conflict)(nil)
	if !errors.As(err, &lost) {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	for i := range riders {
		if bytes.Equal(riders[i].Key, lost.Key) {
			return lost
		}
	}
	return errAgain
}
