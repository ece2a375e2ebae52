package rollback

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Longest members of a Request, in bytes.
const (
	maxText   = 512
	maxReason = 512
)

func (r *Request) check() error {
	switch {
	case r.Checkpoint == "":
		return fmt.Errorf("%w: no checkpoint is named", ErrInvalid)
	case len(r.Reason) > maxReason:
		return fmt.Errorf("%w: a reason of %d bytes, at most %d", ErrInvalid, len(r.Reason), maxReason)
	}
	for what, text := range map[string]string{
		"checkpoint": r.Checkpoint, "urgency": r.Urgency, "token": r.Token, "error": r.Error, "operator": r.Operator,
	} {
		if len(text) > maxText {
			return fmt.Errorf("%w: %s of %d bytes, at most %d", ErrInvalid, what, len(text), maxText)
		}
	}
	return nil
}

func (r *Request) checkID() error {
	if id, err := uuid.Parse(r.ID); err != nil || id.String() != r.ID {
		return fmt.Errorf("%w: the id is no UUID in its canonical form", ErrInvalid)
	}
	return nil
}

// rollback is what is asked for, before anything is known of it.
func (r *Request) rollback() *Rollback {
	b := &Rollback{
		ID: r.ID, Checkpoint: r.Checkpoint, Scope: r.Scope, Reason: r.Reason, Urgency: r.Urgency, Operator: r.Operator,
		State:   reserved,
		Journal: Journal{Named: r.Named, Token: r.Token, Content: r.content(), PartOf: r.PartOf, Precedence: r.Precedence},
	}
	if r.Operator == "" {
		b.Requester = r.By
	}
	return b
}

// unknown is the error about a missing checkpoint: strangers get the same as for others'
// checkpoints.
func (r *Request) unknown() error {
	if r.Operator != "" || r.Coordinator {
		return ErrCheckpointUnknown
	}
	return ErrNotInWorkflow
}

// Plan shows what Execute would do, or why it would be refused. It changes nothing; the request
// needs no id.
func (c *Coordinator) Plan(ctx context.Context, r Request) (*Rollback, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	d, err := c.unopposed(ctx, &r, c.discovered)
	if refused := (*refusal)(nil); errors.As(err, &refused) {
		return nil, refused.error
	}
	if err != nil {
		return nil, err
	}
	shown := d.planned()
	shown.State = Planned
	shown.markObstacles()
	return shown, nil
}

// preparation is the answer to a request to prepare a rollback (cascade 4.3.2, phase 1).
type preparation struct {
	// Rollback is what would be done. Its State is reserved, or that of the rollback if it was accepted already; Until
	// is when the reservation ends, and zero without one. Without a plan it has no more than what was asked for.
	Rollback *Rollback
	// Refusal says why there is no plan, or none that may be carried out: checkpoint.ErrTampered,
	// checkpoint.ErrExpired, *DependedOnError or *ConflictError. It is nil otherwise.
	Refusal error
	// Obstacles are the steps of the plan that are known to be in vain.
	Obstacles []Obstacle

	request Request
	draft   *draft // that can be reserved; nil where nothing is to be
}

// Obstacle says why a checkpoint cannot be undone.
type Obstacle struct {
	// Agent is the identity behind the call; empty if it is not known.
	Agent string `json:"agent,omitempty"`
	// Status is cannot_prepare, or prepared in the list of all agents; empty before it is shown.
	Status string `json:"status"`
	// Reason is a fixed word.
	Reason string `json:"reason,omitempty"`
	// Checkpoint is empty where a participant does not say which checkpoints it has.
	Checkpoint string `json:"checkpoint_id,omitempty"`
}

// Ready reports whether everything can be undone, as far as that is known before it is tried.
func (p *preparation) Ready() bool { return p.Refusal == nil && len(p.Obstacles) == 0 }

// isOf reports whether a rollback that is reserved is the one that a request is about. A reason may be given later.
func (h *Rollback) isOf(r *Request) bool { return h.Checkpoint == r.Checkpoint && h.Scope == r.Scope }

// prepared is the answer that a reservation stands for.
func (h *Rollback) prepared(r *Request) *preparation {
	return &preparation{Rollback: h.planned(), request: *r}
}

// Prepare decides who may ask, verifies what is to be undone and makes the plan, and says what
// stands in the way (C-4.3.2-c to -e). It changes nothing. As long as the rollback is reserved,
// the same request gets the same answer.
func (c *Coordinator) Prepare(ctx context.Context, r Request) (*preparation, error) {
	return c.prepare(ctx, r, c.discovered)
}

// prepare is Prepare with a way to make the plan.
func (c *Coordinator) prepare(ctx context.Context, r Request, plan func(context.Context, *Request) (*draft, error)) (*preparation, error) {
	if err := cmp.Or(r.check(), r.checkID()); err != nil {
		return nil, err
	}
	if found, err := c.preparedAlready(ctx, &r); err == nil || !errors.Is(err, ErrUnknown) {
		return found, err
	}
	d, err := c.unopposed(ctx, &r, plan)
	asked := r.rollback()
	refused, depended, conflict := (*refusal)(nil), (*DependedOnError)(nil), (*ConflictError)(nil)
	switch {
	case errors.As(err, &refused):
		asked.Workflow = refused.draft.Workflow
		return &preparation{Rollback: asked, Refusal: refused.error, request: r}, nil
	case errors.As(err, &depended):
		return &preparation{Rollback: asked, Refusal: depended, request: r}, nil
	case err != nil && !errors.As(err, &conflict):
		return nil, err
	}
	d.State = reserved
	p := &preparation{Rollback: d.planned(), Obstacles: d.Plan.obstacles(), request: r}
	p.Rollback.markObstacles()
	if conflict != nil {
		p.Refusal = conflict
		return p, nil
	}
	ids, err := c.changeable(ctx, d.Plan)
	if err != nil {
		return nil, err
	}
	unprepared, err := c.canUndo(ctx, d, ids, true)
	if errors.As(err, &conflict) {
		p.Refusal = conflict
		unprepared = slices.DeleteFunc(unprepared, func(o Obstacle) bool { return !slices.Contains(ids, o.Checkpoint) })
	} else if err != nil {
		return nil, err
	}
	if p.Obstacles = append(p.Obstacles, unprepared...); p.Ready() {
		p.draft = d
	}
	return p, nil
}

// preparedAlready is the answer of a rollback that is reserved or was accepted, or ErrUnknown.
func (c *Coordinator) preparedAlready(ctx context.Context, r *Request) (*preparation, error) {
	accepted, err := c.again(ctx, r)
	if err == nil {
		return &preparation{Rollback: accepted, request: *r}, nil
	}
	if !errors.Is(err, ErrUnknown) {
		return nil, err
	}
	v, err := c.reservation(ctx, c.name(r.ID))
	switch {
	case err != nil:
		return nil, err
	case !v.isOf(r) || v.Request.KeepDependants != r.KeepDependants:
		return nil, ErrMismatch
	}
	if err := c.mayShare(ctx, r, v); err != nil {
		return nil, err
	}
	return v.prepared(r), nil
}

// Prepared returns a rollback that is reserved, or was accepted after it was prepared; else
// ErrUnknown.
func (c *Coordinator) Prepared(ctx context.Context, id string) (*preparation, error) {
	found, err := c.Get(ctx, id)
	if err == nil && !found.Prepared.IsZero() {
		return &preparation{Rollback: found}, nil
	}
	if err == nil || !errors.Is(err, ErrUnknown) {
		return nil, errors.Join(err, ErrUnknown)
	}
	v, err := c.reservation(ctx, c.name(id))
	if err != nil {
		return nil, err
	}
	return v.prepared(&Request{}), nil
}

// markObstacles says of the steps that are known to be in vain how they would end.
func (b *Rollback) markObstacles() {
	for i, s := range b.Plan.list() {
		if step := &b.Steps[i]; s.Obstacle != "" && (s.What == Undo || s.What == Escalate) {
			step.What, step.Reason, step.Cause = Escalate, s.Obstacle, s.Cause
			step.Unknown = s.Obstacle == string(reasonUnfilled)
		}
	}
}

// Reserve reserves what was prepared for some time, durably, and returns the answer to the
// request; extra is written in the same commit. Where something stands in the way, or it is
// reserved already, it changes nothing. The plan is made anew if it is not that of now.
func (c *Coordinator) Reserve(ctx context.Context, p *preparation, last time.Duration, extra ...store.Write) (*preparation, error) {
	if p.draft == nil {
		return p, nil
	}
	if c.ending() {
		return nil, ErrStopping
	}
	d := p.draft
	unprepared, err := c.canUndo(ctx, d, nil, false)
	if err != nil || len(unprepared) > 0 {
		c.giveUp(ctx, d, unprepared)
		p.Obstacles, p.draft = unprepared, nil
		if conflict := (*ConflictError)(nil); errors.As(err, &conflict) {
			p.Refusal, err = conflict, nil
		}
		return p, err
	}
	done := p
	err = c.behindLock(ctx, d, last, func() (*draft, error) {
		anew, err := c.prepare(ctx, p.request, c.draft)
		if err != nil {
			return nil, err
		}
		if p, done = anew, anew; p.draft != nil {
			p.draft.Precedence = d.Precedence
		}
		return p.draft, nil
	}, func(d *draft, _ *workflowLock) (keep bool, err error) {
		if done, err = c.preparedAlready(ctx, &p.request); err == nil || !errors.Is(err, ErrUnknown) {
			return false, err
		}
		done, err = c.reserve(ctx, &p.request, d, last, extra)
		return err == nil || errors.Is(err, store.ErrUnknown), err
	})
	if conflict := (*ConflictError)(nil); errors.As(err, &conflict) {
		p.Refusal, p.draft = conflict, nil
		done, err = p, nil
	}
	if err != nil || done.Rollback.Until.IsZero() {
		c.giveUp(ctx, d, nil)
	}
	return done, err
}

// Execute accepts a rollback durably and returns at once: it goes on by itself. The same id with
// the same content gives the same rollback (P5), whatever became of its checkpoints.
//
// admit is called once for a rollback that is not accepted yet, when its requester is known to be one who may ask for
// it, and before anything is recorded; nil admits all. Its writes are part of the accepting commit; if the condition
// of one fails, the error is its *store.Conflict and nothing is accepted. refused says that the target does not
// verify: then nothing is accepted, and only the error is recorded (cascade 4.2.3).
//
// The plan is the one of before admit if nothing that it depends on has changed since; otherwise it is made again.
func (c *Coordinator) Execute(
	ctx context.Context, r Request, admit func(ctx context.Context, refused bool) ([]store.Write, error),
) (*Rollback, error) {
	if err := cmp.Or(r.check(), r.checkID()); err != nil {
		return nil, err
	}
	if found, err := c.acceptedAlready(ctx, &r); err == nil || !errors.Is(err, ErrUnknown) {
		return found, err
	}
	if c.ending() {
		return nil, ErrStopping
	}
	// Calls of the workflow are only held up for authorized requesters, whom drafting finds out.
	d, err := c.unopposed(ctx, &r, c.discovered)
	refused := (*refusal)(nil)
	if err != nil && !errors.As(err, &refused) {
		return nil, err
	}
	var extra []store.Write
	if admit != nil {
		if extra, err = admit(ctx, refused != nil); err != nil {
			return nil, err
		}
	}
	if refused != nil {
		return nil, c.refuse(ctx, refused)
	}
	if err := c.firstPhase(ctx, &r, d); err != nil {
		return nil, err
	}
	var accepted *Rollback
	err = c.behindLock(ctx, d, 0, func() (*draft, error) {
		anew, err := c.draft(ctx, &r)
		if errors.As(err, &refused) {
			return nil, c.refuse(ctx, refused)
		}
		if err == nil {
			anew.Plan.Unprepared, anew.Plan.Unreached, anew.Precedence = d.Plan.Unprepared, d.Plan.Unreached, d.Precedence
		}
		return anew, err
	}, func(d *draft, lock *workflowLock) (keep bool, err error) {
		if accepted, err = c.acceptedAlready(ctx, &r); err == nil || !errors.Is(err, ErrUnknown) {
			return false, err
		}
		made, err := c.accept(ctx, &r, d, extra)
		if err == nil && made == nil {
			made, err = c.adopt(ctx, c.name(r.ID))
		}
		if err == nil {
			accepted = made.snapshot()
			return true, nil
		}
		if errors.Is(err, errAgain) {
			return false, err
		}
		// It may have landed all the same. Then it goes on, whether or not its requester asks again (P5).
		ctx, n := context.WithoutCancel(ctx), c.name(r.ID)
		h, there := c.readHead(ctx, n)
		keep = there == nil && (h.open() || h.stops()) || there != nil && !errors.Is(there, ErrUnknown)
		if there == nil && errors.Is(err, store.ErrUnknown) && bytes.Equal(h.Content, d.Content) {
			if landed, failed := c.adopt(ctx, n); failed == nil {
				accepted, err = landed.snapshot(), nil
			}
		}
		if keep && err != nil {
			c.goOnUntil("whether it was accepted", func(ctx context.Context) error { return c.found(ctx, n, lock) })
		}
		return keep, err
	})
	if err != nil {
		c.giveUp(ctx, d, nil)
	}
	return accepted, err
}

// found lets a rollback go on of which nobody knew whether it was accepted; its lock ends where it was not.
func (c *Coordinator) found(ctx context.Context, n name, lock *workflowLock) error {
	_, err := c.adopt(ctx, n)
	if errors.Is(err, ErrUnknown) {
		c.locks.remove(func(w *workflowLock) bool { return w == lock })
	}
	if errors.Is(err, ErrUnknown) || errors.Is(err, errUnreadable) { // nobody carries it out
		return nil
	}
	return err
}

// again finds the rollback of an earlier identical request, or returns ErrUnknown.
func (c *Coordinator) again(ctx context.Context, r *Request) (*Rollback, error) {
	n := c.name(r.ID)
	h, err := c.readHead(ctx, n)
	if errors.Is(err, ErrUnknown) && r.Token != "" {
		// Cascade 4.3.4: one token asks for one rollback.
		id, found := c.byToken(ctx, r.Token)
		switch {
		case errors.Is(found, ErrUnknown):
		case found != nil:
			return nil, found
		case id != r.ID:
			return nil, ErrMismatch
		default: // it was accepted between the two looks (P5)
			h, err = c.readHead(ctx, n)
		}
	}
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(h.Content, r.content()) || r.Planned != "" && r.Planned != string(h.Hash) {
		return nil, ErrMismatch
	}
	if err := c.mayShare(ctx, r, h); err != nil {
		return nil, err
	}
	if h.open() { // one whose acceptance landed and was not answered
		if _, err := c.adopt(ctx, n); err != nil {
			return nil, err
		}
	}
	return c.Get(ctx, r.ID)
}

// mayShare decides whether a request may have the rollback of an earlier one: another requester must be
// allowed to ask for the checkpoint himself. Two gateways of one rollback ask a third for the same part.
func (c *journal) mayShare(ctx context.Context, r *Request, first *Rollback) error {
	if first.askedBy(r) {
		return nil
	}
	_, err := c.draft(ctx, r)
	if errors.As(err, new(*refusal)) || errors.As(err, new(*DependedOnError)) { // of the plan, which the first one has
		return nil
	}
	return err
}

// acceptedAlready is again for a request to execute. The token of another requester than the first is
// recorded, since his own result names it.
func (c *Coordinator) acceptedAlready(ctx context.Context, r *Request) (*Rollback, error) {
	found, err := c.again(ctx, r)
	if err != nil || r.By == "" || r.By == found.Requester || r.Token == "" {
		return found, err
	}
	defer c.sealing.Enter()()
	expires := found.Due.Add(c.o.Keep)
	if end := found.Finished.Add(c.o.Keep); expires.Before(end) {
		expires = end
	}
	if _, err := c.o.Store.Commit(ctx, c.askers.Put(c.askerKey(r.ID, r.By), &r.Token, store.Condition{}, expires)); err != nil {
		return nil, unavailable(err)
	}
	return found, nil
}

// AskedWith returns the id of the token by which somebody else than the requester has asked for a rollback
// too; empty where he has not.
func (c *journal) AskedWith(ctx context.Context, id, asker string) (string, error) {
	row, err := c.askers.Get(ctx, c.askerKey(id, asker))
	switch {
	case errors.Is(err, ErrUnknown):
		return "", nil
	case err != nil:
		return "", err
	}
	return *row.Record, nil
}

// refuse records a failed verification of the target, and returns its error.
func (c *journal) refuse(ctx context.Context, refused *refusal) error {
	d := refused.draft
	t, err := c.o.Ledger.Erred(ctx, &d.Rollback, d.Checkpoint, errorConstraint, refused.why)
	if err != nil {
		return unavailable(err)
	}
	b := new(store.Batch)
	record(b, t)
	if err := b.Commit(ctx, c.o.Store); err != nil {
		return unavailable(err)
	}
	return refused.error
}

// maxTries bounds how often a conflicting commit is tried.
const maxTries = 20

// errAgain: another commit was first; read again.
var errAgain = errors.New("rollback: somebody else was first")

// behindLock decides about a draft while new calls of its workflow wait and the admitted ones are recorded: no
// others come. A draft that those made obsolete is made anew; without one nothing is decided. commit records the
// decision, and is called again where another commit was first. Where it says keep, the lock stays with what the
// plan blocks: for last, or for as long as the rollback goes on.
func (c *Coordinator) behindLock(
	ctx context.Context, d *draft, last time.Duration, anew func() (*draft, error),
	commit func(*draft, *workflowLock) (bool, error),
) error {
	scope, err := c.scope(ctx, d.Workflow, d.Checkpoint)
	if err != nil {
		return err
	}
	lock, err := c.locks.lock(ctx, d.ID, scope, last > 0)
	if err != nil {
		return err
	}
	keep := false
	defer func() {
		if keep && c.fleet == nil { // else it is read from the store
			c.locks.decide(lock, last)
		} else {
			c.locks.unlock(lock)
		}
	}()
	over, err := c.announce(ctx, d.Workflow, scope)
	if err != nil {
		return err
	}
	defer over()
	if !c.current(ctx, d) {
		if d, err = anew(); err != nil || d == nil {
			return err
		}
	}
	c.locks.block(lock, d)
	c.deciding.Lock()
	defer c.deciding.Unlock()
	for range maxTries {
		if keep, err = commit(d, lock); !errors.Is(err, errAgain) {
			return err
		}
	}
	return fmt.Errorf("%w: others change it again and again", ErrStore)
}

// reserve commits a reservation, and ends those of others over which it takes precedence.
func (c *Coordinator) reserve(ctx context.Context, r *Request, d *draft, last time.Duration, extra []store.Write) (*preparation, error) {
	fence, err := c.fence(ctx, d.Workflow)
	if err != nil {
		return nil, err
	}
	_, held, err := c.opposed(ctx, r, d)
	if err != nil {
		return nil, err
	}
	now, err := c.now(ctx)
	if err != nil {
		return nil, err
	}
	v := new(Rollback)
	*v = d.Rollback
	v.State, v.Until, v.Request = reserved, now.Add(last), r
	v.Behind, v.Absorbed = nil, nil
	if fence.Expires.Before(v.Until) {
		fence.Expires = v.Until
	}
	defer c.sealing.Enter()()
	n := c.name(r.ID)
	pieces, err := writePlan(&c.reservedPlans, n, d.Plan, v.Until)
	if err != nil {
		return nil, err
	}
	v.Pieces = len(pieces)
	own := c.reservations.Put(keyOf(kindReserved, n), v, store.Absent(), v.Until)
	writes := append([]store.Write{own, fence, {Key: c.reservedKey(&d.Rollback, n), Expires: v.Until}}, pieces...)
	writes = append(writes, held.writes...)
	if _, err := c.o.Store.Commit(ctx, append(writes, extra...)...); err != nil {
		return nil, refusedBy(err, extra)
	}
	c.ended(&held)
	return v.prepared(r), nil
}

// accept decides and commits, holding the lock on acceptance. Others may read the new head before accept returns and
// carry the rollback out, whose run is returned then; nil means that it may have ended, too.
func (c *Coordinator) accept(ctx context.Context, r *Request, d *draft, extra []store.Write) (*run, error) {
	if d.Aborted = d.aborts(r); d.Aborted {
		d.Request = r
	}
	fence, err := c.fence(ctx, d.Workflow)
	if err != nil {
		return nil, err
	}
	joins, held, err := c.opposed(ctx, r, d)
	if err != nil {
		return nil, err
	}
	if held.own != nil {
		d.Prepared, d.Precedence = held.own.Asked, held.own.Precedence
	}
	defer c.sealing.Enter()()
	for _, other := range joins {
		other.mu.Lock()
		defer other.mu.Unlock()
		if h := other.now(); !h.open() || h.Joined != "" {
			return nil, errAgain
		}
	}
	d.State, d.Boot = Executing, c.fleet.Boot()
	fence.Expires = d.Due.Add(c.o.Keep)
	b := new(store.Batch)
	n := c.name(d.ID)
	if err := c.acceptanceWrites(ctx, r, d, n, b); err != nil {
		return nil, b.Done(err)
	}
	writes := append([]store.Write{c.headWrite(n, &d.Rollback, store.Absent()), fence}, b.Writes()...)
	writes = append(writes, held.writes...)
	heads := make([]Rollback, len(joins))
	for i, other := range joins {
		heads[i] = *other.now()
		heads[i].Joined = d.ID
		writes = append(writes, c.headWrite(other.name, &heads[i], store.VersionIs(heads[i].version)))
	}
	_, removals := c.known(n)
	version, err := c.o.Store.Commit(ctx, append(writes, extra...)...)
	if err = b.Done(err); err != nil {
		for _, other := range joins { // sealed anew, or changed by another node
			_ = c.refresh(ctx, other)
		}
		return nil, refusedBy(err, extra)
	}
	for i, other := range joins {
		heads[i].version = version
		c.publish(other, &heads[i])
	}
	c.ended(&held)
	d.version = version
	return c.enlist(newRun(n, &d.Rollback), removals), nil
}

// acceptanceWrites adds the records of a new rollback besides its head.
func (c *journal) acceptanceWrites(ctx context.Context, r *Request, d *draft, n name, b *store.Batch) error {
	if len(d.Plan.Unreached) > 0 { // who has not said what he has may go on with it: what holds the workflow reaches him
		if err := c.informConfigured(d.Plan, func(agent string) bool {
			return slices.ContainsFunc(d.Plan.Unreached, func(o Obstacle) bool { return o.Agent == agent })
		}); err != nil {
			return err
		}
	}
	pieces, err := writePlan(&c.plans, n, d.Plan, time.Time{})
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
	t, err := c.o.Ledger.Started(ctx, d.planned(), parents)
	if err != nil {
		return unavailable(err)
	}
	d.Start = record(b, t)
	b.Add(pieces...)
	b.Add(
		store.Write{Key: ageKey(d.Asked, n)},
		store.Write{Key: keyOf(kindOpen, n)},
		store.Write{Key: c.workflowKey(kindWorkflow, d.Workflow, n)},
	)
	if d.stops() {
		b.Add(store.Write{Key: c.workflowKey(kindStop, d.Workflow, n)})
		if to := d.informs(); len(to) > 0 { // here the lock stops it
			if _, err := c.escalate(ctx, b, hitl.Opening{
				Key: "rollback terminates " + d.ID, Level: hitl.Stop, Cause: hitl.CauseOther, Workflow: d.Workflow,
				Summary: "A rollback of the whole workflow has ended it, also at its participants.",
				Links:   hitl.Links{Checkpoint: d.Checkpoint, Rollback: d.ID}, Notice: true, Lifted: true, Final: true, Participants: to,
			}); err != nil {
				return err
			}
		}
	}
	if r.Token != "" {
		b.Add(c.tokens.Put(c.tokenKey(r.Token), &d.ID, store.Absent(), time.Time{}))
	}
	return nil
}

// refusedBy is the conflict of an extra write, or errAgain if another commit was first.
func refusedBy(err error, extra []store.Write) error {
	lost := (*store.Conflict)(nil)
	switch {
	case !errors.As(err, &lost):
		return unavailable(err)
	case store.Lost(err, extra):
		return lost
	}
	return errAgain
}

// Release ends the reservation of a rollback at once, here and at its participants; extra is
// written in the same commit. Where nothing is reserved, or who asks is not the first to have prepared
// it, it changes nothing. The error is ErrAccepted if an execute was faster, which goes on, and
// ErrMismatch for another rollback.
func (c *Coordinator) Release(ctx context.Context, r Request, extra ...store.Write) error {
	if err := cmp.Or(r.check(), r.checkID()); err != nil {
		return err
	}
	n := c.name(r.ID)
	for range maxTries {
		h, err := c.readHead(ctx, n)
		switch {
		case err == nil && bytes.Equal(h.Content, r.content()):
			return cmp.Or(c.mayShare(ctx, &r, h), errAccepted)
		case err == nil:
			return ErrMismatch
		case !errors.Is(err, ErrUnknown):
			return err
		}
		v, err := c.reservation(ctx, n)
		switch {
		case errors.Is(err, ErrUnknown): // P3: who could not have prepared it learns nothing
			_, err = c.draft(ctx, &r)
			if errors.As(err, new(*refusal)) || errors.As(err, new(*DependedOnError)) {
				return nil
			}
			return err
		case err != nil:
			return err
		case !v.isOf(&r):
			return ErrMismatch
		case r.Unnamed && r.Error == "":
			return ErrUnnamed
		case !v.askedBy(&r): // the first one may still carry it out
			return c.mayShare(ctx, &r, v)
		}
		var ended held
		ended.end(&c.journal, v) // on the condition that no execute has taken it
		_, err = c.o.Store.Commit(ctx, append(ended.writes, extra...)...)
		if err == nil {
			c.locks.release(r.ID)
			c.release(v, nil)
			return nil
		}
		if err = refusedBy(err, extra); !errors.Is(err, errAgain) {
			return err
		}
	}
	return fmt.Errorf("%w: others change it again and again", ErrStore)
}

// releasing is a release on its way to the participants.
type releasing struct {
	cancel context.CancelFunc
	over   chan struct{}
}

// giveUp releases what participants may have reserved for a rollback that does not come, but for
// those that could not prepare: unless it was reserved or accepted all the same, or nobody knows.
func (c *Coordinator) giveUp(ctx context.Context, d *draft, unprepared []Obstacle) {
	ctx = context.WithoutCancel(ctx) // its requester may have left
	n := c.name(d.ID)
	if _, err := c.reservation(ctx, n); !errors.Is(err, ErrUnknown) {
		return
	}
	if _, err := c.readHead(ctx, n); !errors.Is(err, ErrUnknown) {
		return
	}
	c.release(&d.Rollback, func(id string) bool {
		return !slices.ContainsFunc(unprepared, func(o Obstacle) bool {
			return o.Checkpoint == id && o.Reason != string(ReasonUnreachable) // else only its answer may be lost
		})
	})
}

// release tells the participants of a plan, those for which is true, that they are not asked to
// execute. It goes on by itself; what it does not reach in the time of a prepare ends by itself, as
// after a crash.
func (c *Coordinator) release(h *Rollback, which func(id string) bool) {
	ids := h.Plan.delegated()
	if which != nil {
		ids = slices.DeleteFunc(ids, func(id string) bool { return !which(id) })
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(ids) == 0 || c.stopping || c.releases[h.ID] != nil {
		return
	}
	due := time.Now().Add(c.o.PrepareTimeout())
	ctx, cancel := context.WithDeadline(c.hard, due)
	r := &releasing{cancel, make(chan struct{})}
	c.releases[h.ID] = r
	id, partOf, reason := h.ID, h.partOf(), h.Reason
	c.wg.Go(func() {
		inParallel(c.o.Parallel, len(ids), func(i int) {
			t := undoTask{Rollback: id, PartOf: partOf, Step: ids[i], Reason: reason, Due: due, Quit: c.begins.Done()}
			if err := c.releaseOne(ctx, t); err != nil {
				c.log.Info("what a participant has reserved ends by itself", "rollback", id, "error", err)
			}
		})
		cancel()
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.releases, id)
		close(r.over)
	})
}

func (c *journal) releaseOne(ctx context.Context, t undoTask) error {
	cp, err := c.verified(ctx, t.Step)
	if err != nil || cp.ID == "" {
		return err
	}
	s, err := c.callStatus(ctx, &cp, "", Ran)
	if err != nil || s.opened == nil {
		return err
	}
	t.Checkpoint, t.Foreign = s.opened, s.foreign
	return c.o.undoer.Release(ctx, t)
}
