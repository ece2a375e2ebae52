package rollback

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// precedence decides between two rollbacks (cascade 4.3.4). Parts of a rollback at other gateways
// have that of the whole, so that all of them decide in the same way.
type precedence struct {
	// ID is the rollback's id, which is unique.
	ID string `json:"rollback_id"`
	// Scope is how far it goes.
	Scope Scope `json:"scope"`
	// Asked is when it was recorded, by the clock of its coordinator's store and not the requester's.
	Asked time.Time `json:"asked"`
}

// comparePrecedence is negative if a takes precedence over b, positive if b does over a, and zero
// only if they are the same. The wider scope wins, then the earlier time, then the lower id. An
// unknown scope is the narrowest.
func comparePrecedence(a, b precedence) int {
	return cmp.Or(
		cmp.Compare(b.Scope.breadth(), a.Scope.breadth()),
		a.Asked.Compare(b.Asked),
		cmp.Compare(a.ID, b.ID),
	)
}

// conflictResolution is what comes of two rollbacks.
type conflictResolution string

// What can come of them. Who loses gets 409 rollback-conflict with the winner's id.
const (
	// noConflict: they have no checkpoint in common, and both go on.
	noConflict conflictResolution = "no conflict"
	// newcomerRefused: the new one loses.
	newcomerRefused conflictResolution = "refused"
	// earlierJoins: the earlier one loses. It finishes its level, then the new one starts, whose
	// result becomes that of both.
	earlierJoins conflictResolution = "joins"
	// newcomerWaits: the earlier one goes on to its end, and then the new one starts. To break
	// off would leave a checkpoint to nobody.
	newcomerWaits conflictResolution = "waits"
)

// resolveConflict says what comes of two different rollbacks when one of them was accepted
// first. comparePrecedence decides, but nothing that was accepted is left half done.
//
// The earlier one joins a wider one whose plan has all of its checkpoints, for which they are
// undone then. Where the wider plan lacks some of them, as the sub-DAG of one checkpoint does
// that the other's group contains, the wider one waits. So does one of the same scope that was
// asked for earlier.
func resolveConflict(there, comes *Rollback) conflictResolution {
	switch {
	case !overlap(there.Plan, comes.Plan):
		return noConflict
	case comparePrecedence(there.precedence(), comes.precedence()) <= 0:
		return newcomerRefused
	case there.precedence().Scope.breadth() < comes.precedence().Scope.breadth() && len(comes.Plan.lacks(there.Plan)) == 0:
		return earlierJoins
	}
	return newcomerWaits
}

// unopposed makes the plan of a request that is not accepted yet. It fails with the draft where something else in the
// workflow takes precedence.
func (c *Coordinator) unopposed(
	ctx context.Context, r *Request, plan func(context.Context, *Request) (*draft, error),
) (*draft, error) {
	d, err := plan(ctx, r)
	if err != nil {
		return nil, err
	}
	shown := *d // the conflicts are resolved once more when it is accepted
	_, _, err = c.opposed(ctx, r, &shown)
	return d, err
}

// opposed compares a draft with all else that is accepted or reserved in its workflow (cascade 4.3.4). It returns the
// rollbacks that give way to it, and the reservations that it takes over; the error says what it must not go past.
func (c *Coordinator) opposed(ctx context.Context, r *Request, d *draft) (joins []*run, h held, err error) {
	others, err := c.conflicting(ctx, d.Workflow)
	if err != nil {
		return nil, h, err
	}
	if joins, err = d.resolveConflicts(others); err != nil {
		return nil, h, err
	}
	h, err = c.reserved(ctx, r, d)
	return joins, h, err
}

// conflicting are the unfinished rollbacks of a workflow, which may conflict.
func (c *Coordinator) conflicting(ctx context.Context, workflow string) ([]*run, error) {
	var all []*run
	names, err := c.names(ctx, store.Prefix(c.workflowPrefix(kindWorkflow, workflow)))
	for _, n := range names {
		r, err := c.adopt(ctx, n)
		if errors.Is(err, ErrUnknown) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !r.done.is() {
			all = append(all, r)
		}
	}
	return all, err
}

// maxJoins bounds how many others give way in one commit, whose size is bounded (store.MaxBatch).
const maxJoins = 256

// resolveConflicts decides between the draft and earlier rollbacks (cascade 4.3.4). It returns
// those that give way.
func (d *draft) resolveConflicts(others []*run) (joins []*run, err error) {
	d.Behind, d.Absorbed = nil, nil
	for _, r := range others {
		if r.id == d.ID { // accepted since: whoever asks for it finds it
			continue
		}
		there := r.now()
		if !d.Asked.After(there.Asked) { // a clock that went back gives no precedence
			d.Asked = there.Asked.Add(time.Nanosecond)
		}
		resolution := resolveConflict(there, &d.Rollback)
		if resolution != noConflict && d.sameWhole(there) || there.PartOf != "" && resolution == earlierJoins {
			resolution = newcomerWaits // a part has a result of its own
		}
		switch resolution {
		case noConflict:
			continue
		case newcomerRefused:
			if there.Joined == "" { // else the one that it gives way to decides
				return nil, &ConflictError{Winner: there.precedence().ID, kept: r.id}
			}
		case earlierJoins: // those beyond the bound go on to their end instead
			if there.Joined == "" && len(joins) < maxJoins {
				joins = append(joins, r)
				d.Absorbed = append(d.Absorbed, r.id)
			}
		}
		d.Behind = append(d.Behind, r.id)
	}
	return joins, nil
}

// fence is the write by which rollbacks of a workflow are decided one after the other.
func (c *journal) fence(ctx context.Context, workflow string) (store.Write, error) {
	w := store.Write{Key: c.fenceKey(workflow), If: store.Absent()}
	found, err := c.o.Store.Get(ctx, w.Key)
	switch {
	case err == nil:
		w.If = store.VersionIs(found.Version)
		w.Expires = found.Expires
	case !errors.Is(err, store.ErrNotFound):
		return w, unavailable(err)
	}
	return w, nil
}

// reservation reads the record of a prepared rollback. Until it ends, it holds back new calls that would follow from
// what it covers, and other rollbacks that it takes precedence over. ErrUnknown means that there is none.
func (c *journal) reservation(ctx context.Context, n name) (*Rollback, error) {
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

func (h *held) end(c *journal, v *Rollback) {
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
		h.end(&c.journal, own)
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
		return h, &planChangedError{Hash: [32]byte(d.Hash)}
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
			h.end(&c.journal, other)
			h.others = append(h.others, other)
		}
	}
	return h, nil
}

// reservedBeside are the reservations of a draft's workflow, but for other parts of the same rollback:
// there are as many of them as it has calls here, and each of them would go past all others.
func (c *journal) reservedBeside(ctx context.Context, d *draft) ([]name, error) {
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
func (c *journal) shrunk(ctx context.Context, v *Rollback, d *draft) (is bool, err error) {
	if !v.sameWhole(&d.Rollback) {
		return false, nil
	}
	now := *d.Plan
	now.Dependants = v.Plan.Dependants
	is = now.like(v.Plan, func(was, now *PlanStep) bool {
		if now.What != noUndo || v.PartOf != "" || was.What == noUndo {
			return now.What == noUndo
		}
		// Nobody has said that there are other parts.
		by, failed := c.undoneBy(ctx, now.Checkpoint)
		err = cmp.Or(err, failed)
		return failed == nil && by != nil && v.sameWhole(by)
	})
	return is, err // which it has set
}

// undoneBy is the rollback that has undone a checkpoint; nil where that is not known.
func (c *journal) undoneBy(ctx context.Context, id string) (*Rollback, error) {
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
func (c *journal) reservedKey(h *Rollback, n name) []byte {
	return append(c.wholePrefix(h), n[:]...)
}

func (c *journal) wholePrefix(h *Rollback) []byte {
	whole := c.o.Sealer.Index("rollback whole", h.PartOf+" "+h.Requester)
	return append(c.workflowPrefix(kindReservedWorkflow, h.Workflow), whole[:16]...)
}
