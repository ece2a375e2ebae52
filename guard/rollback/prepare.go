package rollback

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// DefaultPrepareTimeout is how long a participant may be silent in the first phase by default.
const DefaultPrepareTimeout = 10 * time.Second

// DefaultReservation is how long a prepared rollback is reserved by default.
const DefaultReservation = time.Minute

// reasonUnknown is the obstacle of a member of a group that nobody knows.
const reasonUnknown = "checkpoint-unknown"

// Prepared is the answer to a request to prepare a rollback (cascade 4.3.2, phase 1).
type Prepared struct {
	// Rollback is what would be done. Its State is Reserved, or that of the rollback if it was accepted already; Until
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
func (p *Prepared) Ready() bool { return p.Refusal == nil && len(p.Obstacles) == 0 }

// isOf reports whether a rollback that is reserved is the one that a request is about. A reason may be given later.
func (h *Rollback) isOf(r *Request) bool { return h.Checkpoint == r.Checkpoint && h.Scope == r.Scope }

// prepared is the answer that a reservation stands for.
func (h *Rollback) prepared(r *Request) *Prepared {
	return &Prepared{Rollback: h.planned(), request: *r}
}

// Prepare decides who may ask, verifies what is to be undone and makes the plan, and says what
// stands in the way (C-4.3.2-c to -e). It changes nothing. As long as the rollback is reserved,
// the same request gets the same answer.
func (c *Coordinator) Prepare(ctx context.Context, r Request) (*Prepared, error) {
	return c.prepare(ctx, r, c.discovered)
}

// prepare is Prepare with a way to make the plan.
func (c *Coordinator) prepare(ctx context.Context, r Request, plan func(context.Context, *Request) (*draft, error)) (*Prepared, error) {
	if err := cmp.Or(r.check(), r.checkID()); err != nil {
		return nil, err
	}
	if found, err := c.preparedAlready(ctx, &r); err == nil || !errors.Is(err, ErrUnknown) {
		return found, err
	}
	d, err := plan(ctx, &r)
	asked := r.rollback()
	refused, depended, conflict := (*refusal)(nil), (*DependedOnError)(nil), (*ConflictError)(nil)
	switch {
	case errors.As(err, &refused):
		asked.Workflow = refused.draft.Workflow
		return &Prepared{Rollback: asked, Refusal: refused.error, request: r}, nil
	case errors.As(err, &depended):
		return &Prepared{Rollback: asked, Refusal: depended, request: r}, nil
	case err != nil:
		return nil, err
	}
	d.State = Reserved
	p := &Prepared{Rollback: d.planned(), Obstacles: d.Plan.obstacles(), request: r}
	p.Rollback.markObstacles()
	shown := *d
	_, _, err = c.opposed(ctx, &r, &shown)
	switch {
	case errors.As(err, &conflict):
		p.Refusal = conflict
		return p, nil
	case err != nil:
		return nil, err
	}
	ids, err := c.changeable(ctx, d.Plan)
	if err != nil {
		return nil, err
	}
	unprepared, err := c.canUndo(ctx, d, append(ids, d.Plan.delegated()...), true)
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

// discovered is draft, after the configured participants were asked for what they have of the workflow
// (C-4.3.1-e): whoever asks may ask for it. Parts of a rollback leave that to its coordinator.
func (c *Coordinator) discovered(ctx context.Context, r *Request) (*draft, error) {
	d, err := c.draft(ctx, r)
	if err != nil || c.o.Discover == nil || r.Scope == Single || r.PartOf != "" || d.Workflow == "" {
		return d, err
	}
	within, cancel := context.WithTimeout(ctx, max(c.o.PrepareTimeout(), c.o.Reservation()))
	fresh, unreached, err := c.o.Discover(within, d.Workflow)
	cancel()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	if fresh {
		if d, err = c.draft(ctx, r); err != nil {
			return nil, err
		}
	}
	d.Plan.Unreached = unreached
	return d, nil
}

// preparedAlready is the answer of a rollback that is reserved or was accepted, or ErrUnknown.
func (c *Coordinator) preparedAlready(ctx context.Context, r *Request) (*Prepared, error) {
	accepted, err := c.again(ctx, r)
	if err == nil {
		return &Prepared{Rollback: accepted, request: *r}, nil
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
func (c *Coordinator) Prepared(ctx context.Context, id string) (*Prepared, error) {
	found, err := c.Get(ctx, id)
	if err == nil && !found.Prepared.IsZero() {
		return &Prepared{Rollback: found}, nil
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

// obstacles are the steps of a plan that are in vain, in their order, and the unknown members of
// its groups.
func (p *Plan) obstacles() (all []Obstacle) {
	for s := range p.all() {
		if s.Obstacle != "" {
			all = append(all, Obstacle{Checkpoint: s.Checkpoint, Agent: s.Agent, Reason: s.Obstacle})
		}
	}
	for _, id := range p.Missing {
		all = append(all, Obstacle{Checkpoint: id, Reason: reasonUnknown})
	}
	return append(all, p.Unreached...)
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
func (c *Coordinator) Reserve(ctx context.Context, p *Prepared, last time.Duration, extra ...store.Write) (*Prepared, error) {
	if p.draft == nil {
		return p, nil
	}
	if c.ending() {
		return nil, ErrStopping
	}
	d := p.draft
	unprepared, err := c.canUndo(ctx, d, d.Plan.delegated(), false)
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
	}, func(d *draft) (keep bool, err error) {
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

// maxTries bounds how often a conflicting commit is tried.
const maxTries = 20

// behindLock decides about a draft while new calls of its workflow wait and the admitted ones are recorded: no
// others come. A draft that those made obsolete is made anew; without one nothing is decided. commit records the
// decision, and is called again where another commit was first. Where it says keep, the lock stays with what the
// plan blocks: for last, or for as long as the rollback goes on.
func (c *Coordinator) behindLock(
	ctx context.Context, d *draft, last time.Duration, anew func() (*draft, error), commit func(*draft) (bool, error),
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
	over, err := c.fleet.announce(ctx, d.Workflow, scope)
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
		if keep, err = commit(d); !errors.Is(err, errAgain) {
			return err
		}
	}
	return fmt.Errorf("%w: others change it again and again", ErrStore)
}

// reserve commits a reservation, and ends those of others over which it takes precedence.
func (c *Coordinator) reserve(ctx context.Context, r *Request, d *draft, last time.Duration, extra []store.Write) (*Prepared, error) {
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
	v.State, v.Until, v.Request = Reserved, now.Add(last), r
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

// reservation reads the record of a prepared rollback. Until it ends, it holds back new calls that would follow from
// what it covers, and other rollbacks that it takes precedence over. ErrUnknown means that there is none.
func (c *Coordinator) reservation(ctx context.Context, n name) (*Rollback, error) {
	row, err := c.reservations.Get(ctx, keyOf(kindReserved, n))
	if err != nil {
		return nil, err
	}
	v := row.Record
	v.version = row.Version
	if v.Plan, err = readPlan(ctx, &c.reservedPlans, n, v); err != nil {
		// Its pieces end with it: it may be over by now.
		if _, gone := c.o.Store.Get(ctx, row.Key); errors.Is(gone, store.ErrNotFound) {
			return nil, ErrUnknown
		}
		return nil, err
	}
	return v, nil
}

// held is what a rollback takes over of the reservations of its workflow: its own, and those over
// which it takes precedence.
type held struct {
	own    *Rollback     // nil without one
	others []*Rollback   // that it takes precedence over
	ids    []string      // whose locks end
	writes []store.Write // that end them
}

func (h *held) end(c *Coordinator, v *Rollback) {
	n := c.name(v.ID)
	h.ids = append(h.ids, v.ID)
	h.writes = append(h.writes,
		store.Write{Key: keyOf(kindReserved, n), If: store.VersionIs(v.version), Delete: true},
		store.Write{Key: c.reservedKey(v, n), Delete: true},
	)
	for i := range v.Pieces {
		h.writes = append(h.writes, store.Write{Key: partKey(kindReservedPlan, n, i), Delete: true})
	}
}

// reserved compares a draft with the reservations of its workflow. It fails with
// *PlanChangedError where another plan was prepared, which ends that reservation, and with
// *ConflictError where another one takes precedence (cascade 4.3.4).
func (c *Coordinator) reserved(ctx context.Context, r *Request, d *draft) (h held, err error) {
	mine := d.precedence()
	own, err := c.reservation(ctx, c.name(r.ID))
	switch {
	case errors.Is(err, ErrUnknown):
	case err != nil:
		return h, err
	case !own.isOf(r):
		return h, ErrMismatch
	default:
		h.own, mine = own, own.precedence()
		h.end(c, own)
	}
	prepared := h.own == nil || bytes.Equal(h.own.Hash, d.Hash)
	if !prepared {
		if prepared, err = c.shrunk(ctx, h.own, d); err != nil {
			return h, err
		}
	}
	if !prepared || r.Planned != "" && r.Planned != string(d.Hash) {
		if h.own != nil {
			// Where another commit was first, it has ended already.
			if _, err := c.o.Store.Commit(ctx, h.writes...); err != nil && !errors.Is(refusedBy(err, nil), errAgain) {
				return h, refusedBy(err, nil)
			}
			c.locks.release(h.ids...)
			c.release(h.own, nil)
		}
		return h, &PlanChangedError{Hash: [32]byte(d.Hash)}
	}
	names, err := c.reservedBeside(ctx, d)
	if err != nil {
		return h, err
	}
	for _, n := range names {
		other, err := c.reservation(ctx, n)
		if errors.Is(err, ErrUnknown) || err == nil && other.ID == d.ID {
			continue
		}
		if err != nil {
			return h, err
		}
		switch {
		case d.sameWhole(other), !overlap(other.Plan, d.Plan):
		case comparePrecedence(other.precedence(), mine) <= 0:
			return h, &ConflictError{Winner: other.precedence().ID, kept: other.ID}
		default:
			h.end(c, other)
			h.others = append(h.others, other)
		}
	}
	return h, nil
}

// reservedBeside are the reservations of a draft's workflow, but for other parts of the same rollback:
// there are as many of them as it has calls here, and each of them would go past all others.
func (c *Coordinator) reservedBeside(ctx context.Context, d *draft) ([]name, error) {
	all := store.Prefix(c.workflowPrefix(kindReservedWorkflow, d.Workflow))
	ranges := []store.Range{all}
	if d.PartOf != "" {
		whole := store.Prefix(c.wholePrefix(&d.Rollback))
		ranges = []store.Range{{From: all.From, To: whole.From}, {From: whole.To, To: all.To}}
	}
	return c.names(ctx, ranges...)
}

// ended is called when the writes of h are committed.
func (c *Coordinator) ended(h *held) {
	c.locks.release(h.ids...)
	for _, other := range h.others {
		c.release(other, nil)
	}
}

// shrunk reports whether the plan is the reserved one, but for what other parts of the same
// rollback have undone meanwhile.
func (c *Coordinator) shrunk(ctx context.Context, v *Rollback, d *draft) (is bool, err error) {
	if !v.sameWhole(&d.Rollback) {
		return false, nil
	}
	now := *d.Plan
	now.Dependants = v.Plan.Dependants
	return now.like(v.Plan, func(was, now *PlanStep) bool {
		if now.What != Nothing || v.PartOf != "" || was.What == Nothing {
			return now.What == Nothing
		}
		// Nobody has said that there are other parts.
		by, failed := c.undoneBy(ctx, now.Checkpoint)
		err = cmp.Or(err, failed)
		return failed == nil && by != nil && v.sameWhole(by)
	}), err
}

// undoneBy is the rollback that has undone a checkpoint; nil where that is not known.
func (c *Coordinator) undoneBy(ctx context.Context, id string) (*Rollback, error) {
	m, _, err := c.mark(ctx, id)
	if err != nil {
		return nil, err
	}
	h, err := c.readHead(ctx, c.name(m.Rollback))
	if errors.Is(err, ErrUnknown) || errors.Is(err, errUnreadable) {
		return nil, nil
	}
	return h, err
}

// reservedKey is that of a reservation in the index by workflow. Parts of one whole have the same
// beginning.
func (c *Coordinator) reservedKey(h *Rollback, n name) []byte {
	return append(c.wholePrefix(h), n[:]...)
}

func (c *Coordinator) wholePrefix(h *Rollback) []byte {
	whole := c.o.Sealer.Index("rollback whole", h.PartOf+" "+h.Requester)
	return append(c.workflowPrefix(kindReservedWorkflow, h.Workflow), whole[:16]...)
}

// canUndo asks what the undo of some checkpoints of a plan depends on, all at once, whether it can be done.
func (c *Coordinator) canUndo(ctx context.Context, d *draft, ids []string, dry bool) ([]Obstacle, error) {
	c.mu.Lock()
	release := c.releases[d.ID]
	c.mu.Unlock()
	if release != nil && !dry { // it could end what is reserved now
		release.cancel()
		<-release.over
	}
	// What is prepared first is not reserved for longer than that.
	silence := c.o.PrepareTimeout()
	due := time.Now().Add(max(silence, c.o.Reservation()))
	all, over := context.WithDeadline(ctx, due)
	defer over()
	targets, stop := context.WithTimeout(ctx, silence)
	defer stop()
	q := &questions{ctx: all, targets: targets, due: due, silence: silence, to: map[informed]*waiting{}}
	if len(d.Plan.delegated()) > 0 {
		d.Precedence = d.precedence() // which participants are told: from now on, whatever its time will be
	}
	found, errs := make([]Obstacle, len(ids)), make([]error, len(ids))
	inParallel(c.o.Parallel, len(ids), func(i int) {
		cp := &d.checkpoints[ids[i]].token
		found[i] = Obstacle{Checkpoint: cp.ID, Agent: cp.Agent}
		found[i].Reason, errs[i] = c.askOne(ctx, d, cp, q, dry)
	})
	found = slices.DeleteFunc(found, func(o Obstacle) bool { return o.Reason == "" })
	for _, err := range errs {
		if err != nil {
			return found, err
		}
	}
	return found, ctx.Err()
}

// delegated are the checkpoints of the steps that participants undo.
func (p *Plan) delegated() (ids []string) {
	for s := range p.all() {
		if s.Way == checkpoint.Delegate.String() {
			ids = append(ids, s.Checkpoint)
		}
	}
	return ids
}

// questions are those of one prepare. Who is asked and does not answer for a time is silent; a part that
// waits for its turn says nothing of anybody.
type questions struct {
	ctx     context.Context // of all of them together, until due
	targets context.Context // of those about what is restored
	due     time.Time
	silence time.Duration
	mu      sync.Mutex
	to      map[informed]*waiting
}

// waiting is a participant that is asked for some parts.
type waiting struct {
	ctx    context.Context // ends when it is silent
	open   int             // parts that it has not answered
	silent *time.Timer     // runs while there are some
}

// begin asks a participant for one more part. The context ends when it has been silent for too long; end
// must be called once, and says whether it has answered.
func (q *questions) begin(who informed) (_ context.Context, end func(answered bool)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	w := q.to[who]
	if w == nil {
		of, cancel := context.WithCancel(q.ctx)
		w = &waiting{ctx: of, silent: time.AfterFunc(q.silence, cancel)}
		q.to[who] = w
	}
	if w.open++; w.open == 1 && w.ctx.Err() == nil {
		w.silent.Reset(q.silence)
	}
	return w.ctx, func(answered bool) {
		q.mu.Lock()
		defer q.mu.Unlock()
		switch w.open--; {
		case w.ctx.Err() != nil:
		case w.open == 0:
			w.silent.Stop()
		case answered:
			w.silent.Reset(q.silence)
		}
	}
}

func (c *Coordinator) askOne(ctx context.Context, d *draft, cp *Checkpoint, q *questions, dry bool) (string, error) {
	s, err := c.callStatus(ctx, cp, "", Ran)
	switch {
	case errors.Is(err, ErrStore):
		return "", err
	case err != nil || s.opened == nil || s.state != Ran:
		return "", nil // the step finds it out
	}
	t := undoTask{
		Rollback: d.ID, PartOf: d.partOf(), Step: cp.ID, Checkpoint: s.opened, Reason: d.Reason, Due: q.due,
		Quit: c.quit, Dry: dry, Precedence: d.Precedence, Foreign: s.foreign,
	}
	if s.opened.Snapshot.Way == checkpoint.Restore {
		m, damaged, err := c.mark(ctx, s.opened.Snapshot.Root())
		if err != nil || damaged || m.Doubt != "" || m.State == checkpoint.Undoing { // an undo may have changed it
			return "", err
		}
		obstacle, err := c.o.undoer.Prepare(q.targets, t)
		if err != nil && q.targets.Err() == nil { // what is not read in time is found out by the step
			return "", fmt.Errorf("%w: %w", ErrStore, err)
		}
		return obstacle, nil
	}
	asking, end := q.begin(informedOf(s.opened))
	if asking.Err() != nil {
		end(false)
		return string(ReasonUnreachable), nil
	}
	obstacle, err := c.o.undoer.Prepare(asking, t)
	end(err == nil && obstacle != string(ReasonUnreachable))
	if errors.Is(err, errQuit) {
		err = ErrStopping
	}
	return obstacle, err
}

// changeable are the checkpoints whose targets are compared with what their calls left (C-4.3.2-d, -e): a restore
// leaves alone what somebody has changed since. Of several changes of one target, the one that is undone first
// stands there.
func (c *Coordinator) changeable(ctx context.Context, p *Plan) (ids []string, err error) {
	seen, asked := map[string]bool{}, map[string]bool{}
	for _, level := range p.Levels {
		last, made := map[string]*PlanStep{}, map[string]time.Time{} // of a target, as lanes orders them
		for i := range level {
			s := &level[i]
			if s.Way != checkpoint.Restore.String() || s.What != Undo && s.What != Wait {
				continue
			}
			target, at, err := c.o.Checkpoints.Target(ctx, s.Checkpoint)
			switch {
			case errors.Is(err, checkpoint.ErrStore):
				return nil, fmt.Errorf("%w: %w", ErrStore, err)
			case err == nil && !seen[target] && (last[target] == nil || at.After(made[target])):
				last[target], made[target] = s, at
			}
		}
		for target, s := range last {
			seen[target], asked[s.Checkpoint] = true, s.What == Undo // else the call has not ended
		}
	}
	for s := range p.all() {
		if asked[s.Checkpoint] {
			ids = append(ids, s.Checkpoint)
		}
	}
	return ids, nil
}

// firstPhase asks the participants of a rollback that was not prepared (C-4.3.2-g). Who cannot
// prepare is not asked to execute.
func (c *Coordinator) firstPhase(ctx context.Context, r *Request, d *draft) error {
	if _, err := c.reservation(ctx, c.name(r.ID)); !errors.Is(err, ErrUnknown) {
		return err
	}
	ids, err := c.changeable(ctx, d.Plan)
	if err != nil {
		return err
	}
	unprepared, err := c.canUndo(ctx, d, append(ids, d.Plan.delegated()...), false)
	if err != nil {
		c.giveUp(ctx, d, nil)
		return err
	}
	plan := *d.Plan
	plan.Unprepared = map[string]string{}
	for _, o := range unprepared {
		plan.Unprepared[o.Checkpoint] = o.Reason
	}
	d.Plan = &plan
	return nil
}

// aborts reports whether nothing is undone, since somebody cannot prepare who is critical, or the
// policy wants all or nothing (C-4.3.2-h).
func (d *draft) aborts(r *Request) bool {
	for s := range d.Plan.all() {
		if obstacle := s.Obstacle != "" || d.Plan.Unprepared[s.Checkpoint] != ""; obstacle && (r.Whole || s.Critical != "") {
			return true
		}
	}
	return r.Whole && len(d.Plan.Missing)+len(d.Plan.Unreached) > 0
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
			return cmp.Or(c.mayShare(ctx, &r, h), ErrAccepted)
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
		ended.end(c, v) // on the condition that no execute has taken it
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
			t := undoTask{Rollback: id, PartOf: partOf, Step: ids[i], Reason: reason, Due: due, Quit: c.quit}
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

func (c *Coordinator) releaseOne(ctx context.Context, t undoTask) error {
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

// inParallel does something n times, so many at once.
func inParallel(most, n int, do func(i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(most, n) {
		wg.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}
