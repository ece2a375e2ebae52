package rollback

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Reasons of steps that are not those of an undo.
const (
	reasonTampered    = "checkpoint-tampered" // what was recorded is not what the token says
	reasonExpired     = "checkpoint-expired"  // its ttl was over when the rollback was asked for
	reasonMissing     = "missing"             // the group contains what nobody knows
	reasonMembers     = "members"             // some of what the group contains was not undone
	reasonUnavailable = "unavailable"         // the undo could not be carried on in time
	reasonBusy        = "busy"                // another rollback has left it half undone
	reasonPolicy      = "policy"              // it was not tried, since something critical cannot be undone
	// What people have not approved has their answer as its reason.
)

// stepOutcome is how a step has ended.
type stepOutcome struct {
	undoResult
	status    Status
	reason    string
	cancelled bool
	way       checkpoint.Way
	notBegun  bool              // its checkpoint's mark is not held by this step
	call      execution.Undoing // what is refused from now on, where it is completed
	token     Checkpoint
	asked     string // the escalation that has decided it; empty where it needs one of its own
}

func undone() stepOutcome { return stepOutcome{status: Completed} }

func escalated(reason string) stepOutcome { return stepOutcome{status: Escalated, reason: reason} }

func failed(reason string) stepOutcome { return stepOutcome{status: Failed, reason: reason} }

// runStep runs a step until it has ended. It is journaled before anything is sent, so that after
// a crash it resumes with the same task and sends nothing twice.
func (c *carrier) runStep(ctx context.Context, r *run, i int) error {
	step := r.step(i)
	if step.State == StepDone {
		return nil
	}
	if c.ending() && step.State == StepPending {
		return errShutdown
	}
	m, damaged, err := c.mark(ctx, step.Checkpoint)
	if err != nil {
		return err
	}
	cp, tampered, err := c.token(ctx, step.Checkpoint)
	if err != nil {
		return err
	}
	answer := r.refusal()
	end, err := func() (stepOutcome, error) {
		switch {
		case m.State == checkpoint.Undone:
			return undone(), nil
		case r.due.is() && step.State == StepPending:
			return escalated(string(reasonTimeout)), nil
		case r.plan.Unprepared[step.Checkpoint] != "" && step.State == StepPending:
			e := escalated(r.plan.Unprepared[step.Checkpoint])
			e.Unknown = r.planned[i].Way == checkpoint.Delegate.String() && r.reached(i)
			return e, nil
		case answer.Escalation != "" && step.State == StepPending && r.planned[i].Obstacle == "":
			e := escalated(answer.Answer)
			e.asked = answer.Escalation
			return e, nil
		case r.aborted() && step.State == StepPending && r.planned[i].Obstacle == "":
			return escalated(reasonPolicy), nil
		case damaged || tampered:
			return failed(reasonTampered), nil
		case m.State == checkpoint.Undoing && m.Rollback != r.id:
			return c.busyAt(ctx, r, step.Checkpoint, m)
		case step.What == gather:
			e := r.gather(cp.Parents)
			if e.status != Completed {
				return e, nil
			}
			// Nothing is sent for it. Its mark must begin all the same, and be journaled:
			// otherwise a rollback that gives way would leave it half undone forever.
			return e, c.begin(ctx, r, i, &m)
		case step.What == noUndo && !cp.Own:
			return undone(), nil // its own gateway has undone it, and has recorded that
		case step.What == Escalate:
			return c.irreversible(ctx, &cp), nil
		case step.What == expired:
			return c.expired(ctx, r, step.Checkpoint)
		case !cp.Own:
			if theirs, err := c.foreign(&cp); err != nil || theirs == nil {
				e := escalated(string(ReasonForeign))
				e.Unknown = step.State == StepRunning // P6: it may have been asked before a reload
				return e, err
			}
		}
		if err := c.begin(ctx, r, i, &m); err != nil {
			return stepOutcome{}, err
		}
		return c.undo(ctx, r, i, &cp)
	}()
	if err != nil {
		return err
	}
	if step.State == StepRunning && (end.reason == reasonTampered || end.reason == reasonExpired) {
		end.Unknown = true // P6: its undo may have been sent before what it needs was gone
	}
	end.token, end.notBegun = cp, r.step(i).State == StepPending
	return c.retry(r.id, "the outcome of a step", func(ctx context.Context) error { return c.record(ctx, r, i, end) })
}

// reached reports whether a step that is left out may be undone all the same (P6): a participant that
// is asked for a later one undoes with it what followed from that call there.
func (r *run) reached(i int) bool {
	if r.aborted() || r.refusal().Escalation != "" {
		return false
	}
	for _, s := range r.planned[i+1:] {
		if s.Way == checkpoint.Delegate.String() && r.plan.Unprepared[s.Checkpoint] == "" {
			return true
		}
	}
	return false
}

// irreversible is the end of the step of an irreversible call, with the known cause.
func (c *journal) irreversible(ctx context.Context, cp *Checkpoint) stepOutcome {
	e := escalated(string(reasonIrreversible))
	if !cp.Own {
		return e
	}
	if opened, err := c.o.Checkpoints.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires}); err == nil {
		e.Cause, _ = irreversible(opened)
	}
	return e
}

// begin journals the beginning of a step, with the checkpoint's mark, in one commit.
func (c *journal) begin(ctx context.Context, r *run, i int, m *checkpoint.Mark) error {
	step := r.step(i)
	ours := m.State == checkpoint.Undoing && m.Rollback == r.id
	if ours && step.State == StepRunning {
		return nil
	}
	now, err := c.now(ctx)
	if err != nil {
		return err
	}
	defer c.sealing.Enter()()
	b := new(store.Batch)
	if !ours {
		p, err := c.o.Checkpoints.Move(ctx, step.Checkpoint, *m, checkpoint.Step{To: checkpoint.Undoing, Rollback: r.id, Doubt: m.Doubt})
		if err != nil {
			return err
		}
		b.Join(p)
	}
	step.State, step.Begun = StepRunning, now
	b.Add(c.stepWrite(r.name, i, &step))
	if err := b.Commit(ctx, c.o.Store); err != nil {
		return unavailable(err)
	}
	r.setStep(i, &step)
	return nil
}

// undo does the work of a step that was begun.
func (c *carrier) undo(ctx context.Context, r *run, i int, cp *Checkpoint) (stepOutcome, error) {
	what, then := r.step(i).What, r.planned[i].Then
	for {
		recorded := Ran
		switch what {
		case block:
			recorded = NeverRan
		case Wait:
			recorded = InFlight
		}
		s, err := c.callStatus(ctx, cp, r.id, recorded)
		switch {
		case errors.Is(err, execution.ErrUnreadable) && r.due.is():
			// It does not heal by itself, and must not hold up later steps forever.
			e := failed(reasonUnavailable)
			e.Unknown = true
			return e, nil
		case errors.Is(err, ErrStore):
			return stepOutcome{}, err
		case errors.Is(err, checkpoint.ErrExpired):
			return c.expired(ctx, r, cp.ID)
		case err != nil:
			return failed(reasonTampered), nil
		case s.foreign && s.opened == nil: // another configuration came in between: look again
			return stepOutcome{}, fmt.Errorf("%w: who has made the checkpoint is not named any more", ErrStore)
		}
		switch s.state {
		case NeverRan:
			return stepOutcome{status: Completed, cancelled: true, call: s.call}, nil
		case InFlight:
			over, err := c.await(ctx, r, s.call.Key)
			if err != nil {
				return stepOutcome{}, err
			}
			if !over {
				return escalated(string(reasonTimeout)), nil
			}
			continue
		}
		switch {
		case !cp.Reversible || !s.opened.Snapshot.Reversible():
			return c.irreversible(ctx, cp), nil
		case then == expired:
			return c.expired(ctx, r, cp.ID)
		}
		return c.undoOnce(ctx, r, i, s)
	}
}

// await waits for a call in flight. It reports whether that is over; if not, the rollback's time
// is.
func (c *carrier) await(ctx context.Context, r *run, key execution.Key) (over bool, err error) {
	ctx, stop := c.until(ctx, r.due)
	defer stop()
	switch err = c.o.Guard.Await(ctx, key); {
	case err == nil:
		return true, nil
	case c.ending():
		return false, errShutdown
	case r.due.is():
		return false, nil
	}
	return false, unavailable(err)
}

// send undoes a call that ran. A doubt of another rollback goes on under that one's key: only so
// can it be sent again, or asked for. id is the checkpoint of the step, doubt the mark of the
// first attempt.
func (c *carrier) send(ctx context.Context, r *run, id string, s callSnapshot, doubt string) (stepOutcome, error) {
	brief := r.now()
	task := undoTask{
		Rollback: r.id, PartOf: brief.partOf(), Step: id, Checkpoint: s.opened, Reason: brief.Reason, Due: brief.Due,
		Quit: c.begins.Done(), Precedence: brief.precedence(), Foreign: s.foreign,
	}
	if doubt != "" && doubt != r.id {
		partOf, forgotten, err := c.earlier(ctx, doubt)
		if err != nil {
			return stepOutcome{}, err
		}
		task.Rollback, task.PartOf, task.Again, task.Forgotten = doubt, partOf, r.id, forgotten
	}
	result, err := c.o.undoer.Undo(ctx, task)
	switch {
	case err != nil && (ctx.Err() != nil || c.ending()):
		return stepOutcome{}, errShutdown
	case err != nil && r.due.is() && !errors.Is(err, execution.ErrUnrecorded): // else it is recorded as soon as this step can be
		e := failed(reasonUnavailable)
		e.Unknown = true
		return e, nil
	case err != nil:
		return stepOutcome{}, fmt.Errorf("undoing: %w", err)
	}
	e := stepOutcome{undoResult: result, status: Completed, way: s.opened.Snapshot.Way, call: s.call}
	if !result.Done {
		e.status, e.reason = statusOf(&result), string(result.Reason)
	}
	return e, nil
}

// earlier is what a rollback was a part of. forgotten says that neither it nor its keys are
// recorded any more.
func (c *journal) earlier(ctx context.Context, id string) (partOf string, forgotten bool, err error) {
	switch h, err := c.readHead(ctx, c.name(id)); {
	case errors.Is(err, ErrUnknown):
		return "", true, nil
	case err == nil:
		return h.partOf(), false, nil
	case errors.Is(err, errUnreadable):
		return "", false, nil
	default:
		return "", false, err
	}
}

// statusOf separates what a person must decide from what was tried and failed. An undo of unknown
// outcome is not known to have failed (P6).
func statusOf(r *undoResult) Status {
	switch r.Reason {
	case ReasonForeign, reasonIrreversible, ReasonChanged, reasonLost, reasonTimeout, reasonNoPostImage,
		reasonEscalated, reasonUnfilled, ReasonOtherUpstream,
		ReasonNoUpstream: // nothing was tried
		return Escalated
	case reasonPartial:
		return Partial
	case reasonUnexpected:
		if r.Unknown {
			return Escalated
		}
	}
	return Failed
}

// gather is the end of a group's step: that of its members.
func (r *run) gather(members []string) stepOutcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	done, failures, missing := 0, 0, 0
	for _, id := range members {
		i, known := r.index[id]
		switch {
		case !known:
			missing++
		case r.steps[i].Status == Completed:
			done++
		case r.steps[i].Status == Failed:
			failures++
		}
	}
	e := undone()
	switch {
	case done == len(members):
		return e
	case missing > 0:
		e.reason = reasonMissing
	default:
		e.reason = reasonMembers
	}
	switch {
	case done > 0:
		e.status = Partial
	case failures+missing > 0:
		e.status = Failed
	default:
		e.status = Escalated
	}
	return e
}

// The attempts of one execution have a checkpoint each and one effect together. It is undone once
// (P1): by the last attempt's records, and under the first one's mark and key.

// later is the status of the last attempt of a call, if that is later than s.
func (c *journal) later(ctx context.Context, s callSnapshot, found *execution.Recorded, rollback string) (_ callSnapshot, is bool, _ error) {
	id := found.Record.Checkpoint
	if id == "" {
		return s, false, nil
	}
	cp, tampered, err := c.token(ctx, id)
	if err != nil || tampered || !cp.Own {
		return s, false, err
	}
	running := found.Status == execution.RunningHere || found.Status == execution.RunningElsewhere
	opened, err := c.o.Checkpoints.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires, Rollback: rollback})
	switch {
	case errors.Is(err, checkpoint.ErrStore):
		return s, false, unavailable(err)
	case err != nil:
		s.state = InFlight // while it runs; then what is known of the earlier one has to do
		return s, running, nil
	}
	if snap := opened.Snapshot; snap.Execution != s.call.Key || snap.First == "" || snap.First != s.opened.Snapshot.Root() {
		return s, false, nil // another call has the key now
	}
	s.opened, s.call.Checkpoint, s.state = opened, cp.ID, Ran
	if running {
		s.state = InFlight
	}
	return s, true, nil
}

// undoOnce undoes the call of a step, unless another of its attempts was undone.
func (c *carrier) undoOnce(ctx context.Context, r *run, i int, s callSnapshot) (stepOutcome, error) {
	id := r.step(i).Checkpoint
	root := s.opened.Snapshot.Root()
	m, damaged, err := c.mark(ctx, root)
	switch {
	case err != nil:
		return stepOutcome{}, err
	case root == id:
		return c.send(ctx, r, id, s, m.Doubt)
	case damaged:
		return failed(reasonTampered), nil
	case m.State == checkpoint.Undone:
		e := undone()
		e.call = s.call
		return e, nil
	case m.State == checkpoint.Undoing && m.Rollback != r.id:
		return c.busyAt(ctx, r, root, m)
	case m.State != checkpoint.Undoing:
		if err := c.hold(ctx, r, i, root, m); err != nil {
			return stepOutcome{}, err
		}
	}
	return c.send(ctx, r, id, s, m.Doubt)
}

// hold takes the mark of the first attempt. The step is journaled with it, so that it is released
// however the step ends, also after a restart.
func (c *journal) hold(ctx context.Context, r *run, i int, root string, m checkpoint.Mark) error {
	step := r.step(i)
	step.Root = root
	defer c.sealing.Enter()()
	w := c.stepWrite(r.name, i, &step)
	r.setStep(i, &step) // before: it may land although the commit fails
	err := c.o.Checkpoints.Advance(ctx, root, m, checkpoint.Step{To: checkpoint.Undoing, Rollback: r.id, Doubt: m.Doubt}, w)
	return unavailable(err) // look again
}

// expired is the end of an expired checkpoint's step: that of the call, if another attempt of it
// was undone.
func (c *carrier) expired(ctx context.Context, r *run, id string) (stepOutcome, error) {
	root, err := c.o.Checkpoints.First(ctx, id)
	if err != nil {
		return stepOutcome{}, unavailable(err)
	}
	m, _, err := c.mark(ctx, root)
	switch {
	case err != nil:
		return stepOutcome{}, err
	case m.State == checkpoint.Undone:
		return undone(), nil
	case m.State == checkpoint.Undoing && m.Rollback != r.id:
		return c.busyAt(ctx, r, root, m)
	}
	return escalated(reasonExpired), nil
}

// busyAt waits until another rollback has left a checkpoint, then looks at the step again. The
// other one may in turn wait for another step of this one.
func (c *carrier) busyAt(ctx context.Context, r *run, id string, m checkpoint.Mark) (stepOutcome, error) {
	again := fmt.Errorf("%w: another rollback was at the checkpoint", ErrStore)
	moved, forget := c.o.Checkpoints.Watch(id)
	defer forget()
	for {
		ended, cancel, err := c.under(ctx, c.name(m.Rollback))
		if err != nil {
			return stepOutcome{}, err
		}
		defer cancel()
		if now, _, err := c.mark(ctx, id); err != nil || now != m {
			return stepOutcome{}, again
		}
		if ended == nil {
			e := failed(reasonBusy)
			e.Unknown = true
			return e, nil
		}
		select {
		case <-moved:
			return stepOutcome{}, again
		case <-ended:
		case <-r.due.Done():
			return escalated(string(reasonTimeout)), nil
		case <-c.begins.Done():
			return stepOutcome{}, errShutdown
		}
	}
}

// callSnapshot is the state of a checkpoint's call at one moment.
type callSnapshot struct {
	state NodeState
	// call names the call; without a key there is none to be recorded.
	call execution.Undoing
	// opened is the record from before the call; nil if it is gone.
	opened *checkpoint.Checkpoint
	// foreign says that somebody else has made the checkpoint; opened says whom to ask, and is nil for nobody.
	foreign bool
}

// callStatus finds the outcome of a checkpoint's call. Of a checkpoint that somebody else has made its agent is
// asked: such a call ran. recorded is the state by its tokens. A free key proves nothing, nor does one that another
// call has: keys are forgotten, and doubtful calls are run again. So a call never ran only if the checkpoint store
// has it as released, or its tokens say so and no result was recorded (P1, P6).
//
// The errors are those of checkpoint.Store.Open but ErrReleased, and ErrStore.
func (c *journal) callStatus(ctx context.Context, cp *Checkpoint, rollback string, recorded NodeState) (callSnapshot, error) {
	if !cp.Own {
		theirs, err := c.foreign(cp)
		return callSnapshot{state: Ran, opened: theirs, foreign: true}, err
	}
	s, err := c.readCallStatus(ctx, cp, rollback, recorded)
	if err != nil || s.state == InFlight || s.opened == nil || s.opened.Result != nil {
		return s, err
	}
	// The checkpoint was read before the execution. A call that ended in between has recorded for
	// its undo, or that it never ran, before it was over: read again.
	return c.readCallStatus(ctx, cp, rollback, recorded)
}

// readCallStatus is callStatus, but for a call that ends meanwhile.
func (c *journal) readCallStatus(ctx context.Context, cp *Checkpoint, rollback string, recorded NodeState) (callSnapshot, error) {
	s := callSnapshot{state: recorded, call: execution.Undoing{Checkpoint: cp.ID}}
	opened, err := c.o.Checkpoints.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires, Rollback: rollback})
	switch {
	case errors.Is(err, checkpoint.ErrReleased):
		return c.released(ctx, s)
	case errors.Is(err, checkpoint.ErrStore):
		return s, unavailable(err)
	case err != nil:
		return s, err
	}
	s.opened = opened
	snap := opened.Snapshot
	s.call.Key, s.call.Caller, s.call.Workflow, s.call.Action = snap.Execution, snap.Caller, snap.Workflow, snap.Action
	s.call.Method, s.call.Host, s.call.Path = snap.Request.Method, snap.Request.Host, snap.Request.Path
	if s.call.Key == (execution.Key{}) {
		if recorded == InFlight { // nothing that could be waited for
			s.state = Ran
		}
		return s, nil
	}
	found, err := c.o.Guard.Get(ctx, s.call.Key)
	switch {
	case err != nil && !errors.Is(err, execution.ErrUnknown):
		return s, unavailable(err)
	case err != nil || !found.Record.Announced(cp.ID): // the key is free, or another call's
		if err == nil {
			if later, is, err := c.later(ctx, s, &found, rollback); is || err != nil {
				return later, err
			}
		}
		// For a call in doubt, a result without a status says only whether others wrote
		// meanwhile.
		if recorded != NeverRan || opened.Result != nil && opened.Result.Status != 0 {
			s.state = Ran
		}
	case found.Status == execution.RunningHere || found.Status == execution.RunningElsewhere:
		s.state = InFlight
	default:
		s.state = Ran
	}
	return s, nil
}

// released is the status of a call that provably did not run.
func (c *journal) released(ctx context.Context, s callSnapshot) (callSnapshot, error) {
	s.state = NeverRan
	left, err := c.o.Checkpoints.Released(ctx, s.call.Checkpoint)
	switch {
	case errors.Is(err, checkpoint.ErrUnknown): // nothing names the call any more
		return s, nil
	case errors.Is(err, checkpoint.ErrStore):
		return s, unavailable(err)
	case err != nil:
		return s, err
	}
	s.call.Key, s.call.Caller, s.call.Workflow, s.call.Action = left.Execution, left.Caller, left.Workflow, left.Action
	s.call.Method, s.call.Host, s.call.Path = left.Method, left.Host, left.Path
	return s, nil
}

// mark reads the mark of a checkpoint. damaged says that it cannot be read.
func (c *journal) mark(ctx context.Context, id string) (m checkpoint.Mark, damaged bool, err error) {
	if m, err = c.o.Checkpoints.Mark(ctx, id); errors.Is(err, checkpoint.ErrTampered) {
		return m, true, nil
	}
	return m, false, unavailable(err)
}

// token finds the token of a checkpoint. tampered says that it is not the recorded one, or is
// missing.
func (c *journal) token(ctx context.Context, id string) (cp Checkpoint, tampered bool, err error) {
	cp, err = c.o.Ledger.Checkpoint(ctx, id)
	if errors.Is(err, checkpoint.ErrTampered) || errors.Is(err, ErrUnknown) {
		return cp, true, nil
	}
	return cp, false, unavailable(err)
}

// record writes the outcome of a step in one commit: the journal, the mark, the execution to
// refuse from now on, the evidence, and the escalation.
func (c *journal) record(ctx context.Context, r *run, i int, end stepOutcome) error {
	landed, err := c.reread(ctx, r, i)
	if landed || err != nil {
		return err
	}
	now, err := c.now(ctx)
	if err != nil {
		return err
	}
	step := r.step(i)
	step.State, step.Status, step.Cancelled, step.Ended = StepDone, end.status, end.cancelled, now
	step.Unknown, step.Reason, step.HTTPStatus, step.Attempts = end.Unknown, end.reason, end.Status, end.Attempts
	step.Before, step.After, step.Cause, step.Completion = end.Before, end.After, string(end.Cause), end.Completion

	defer c.sealing.Enter()()
	b := new(store.Batch)
	if err := c.outcomeWrites(ctx, r, &step, &end, b); err != nil {
		return b.Done(err)
	}
	b.Add(c.stepWrite(r.name, i, &step))
	err = c.commitStep(ctx, &end, b)
	if err = b.Done(err); err != nil {
		return unavailable(err)
	}
	r.setStep(i, &step)
	return nil
}

// outcomeWrites adds what belongs to the outcome besides the journal.
func (c *journal) outcomeWrites(ctx context.Context, r *run, step *Step, end *stepOutcome, b *store.Batch) error {
	if err := c.move(ctx, r, step, end, b); err != nil {
		return err
	}
	if end.Version != (checkpoint.Version{}) {
		// As long as a checkpoint of an earlier call may be compared with it.
		keep := step.Ended.Add(c.o.Keep)
		if keep.Before(end.token.Expires) {
			keep = end.token.Expires
		}
		p := c.o.Checkpoints.PutBack(end.Version, keep)
		b.Join(p)
	}
	brief := r.now().shown()
	token := ""
	if end.reason == reasonTampered { // cascade 4.2.3: an error is recorded
		t, err := c.o.Ledger.Erred(ctx, brief, step.Checkpoint, errorConstraint, "the checkpoint is not what was recorded")
		if err != nil {
			return unavailable(err)
		}
		token = record(b, t)
	}
	if step.Escalation = end.asked; end.asked != "" {
		// People have decided, and are not asked again.
	} else if o, needed := r.opening(brief, step, end); needed {
		o.Links.Error = token
		id, err := c.escalate(ctx, b, o)
		if err != nil {
			return err
		}
		step.Escalation = id
	}
	t, err := c.o.Ledger.Stepped(ctx, brief, step, end.way)
	if err != nil {
		return unavailable(err)
	}
	step.Token = record(b, t)
	return nil
}

// reread reports whether the step has ended already, by a commit whose answer was lost.
func (c *journal) reread(ctx context.Context, r *run, i int) (landed bool, err error) {
	row, err := c.steps.Get(ctx, partKey(kindStep, r.name, i))
	if errors.Is(err, ErrUnknown) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if row.Record.State != StepDone {
		return false, nil
	}
	step := r.step(i)
	r.setStep(i, step.recordedAs(row.Record))
	return true, nil
}

// move sets the checkpoint's mark to the step's outcome, and that of its call's first attempt if
// the step holds it.
func (c *journal) move(ctx context.Context, r *run, step *Step, end *stepOutcome, b *store.Batch) error {
	if step.Root != "" {
		m, damaged, err := c.mark(ctx, step.Root)
		if err != nil {
			return err
		}
		if !damaged && m.State == checkpoint.Undoing && m.Rollback == r.id {
			if err := c.moveMark(ctx, r, step.Root, m, step, end, b); err != nil {
				return err
			}
		}
	}
	m, damaged, err := c.mark(ctx, step.Checkpoint)
	if err != nil || damaged || end.notBegun && m.State == checkpoint.Undoing {
		return err // a step of another attempt may hold it
	}
	return c.moveMark(ctx, r, step.Checkpoint, m, step, end, b)
}

func (c *journal) moveMark(ctx context.Context, r *run, id string, m checkpoint.Mark, step *Step, end *stepOutcome, b *store.Batch) error {
	to := checkpoint.Escalated
	switch {
	case step.Status == Completed:
		to = checkpoint.Undone
	case step.Status == Failed && m.State != checkpoint.Active:
		to = checkpoint.Failed
	}
	others := m.State == checkpoint.Undoing && m.Rollback != r.id
	if m.State == to || m.State == checkpoint.Undone || others {
		return nil
	}
	doubt := m.Doubt
	switch {
	case end.Unknown:
		doubt = cmp.Or(m.Doubt, r.id)
	case end.way != 0: // it was tried, and what came of it is known
		doubt = ""
	}
	p, err := c.o.Checkpoints.Move(ctx, id, m, checkpoint.Step{To: to, Rollback: r.id, Doubt: doubt})
	if errors.Is(err, checkpoint.ErrStep) {
		return nil // as from escalated to escalated by another one
	}
	if err != nil {
		return err
	}
	b.Join(p)
	return nil
}

// commitStep commits the outcome. With it, late duplicates of undone calls are refused forever,
// and calls that never ran must not run any more.
func (c *journal) commitStep(ctx context.Context, end *stepOutcome, b *store.Batch) error {
	if end.status == Completed && end.call.Key != (execution.Key{}) {
		err := c.o.Guard.Undone(ctx, end.call, b.Writes()...)
		if !errors.Is(err, execution.ErrOtherCall) {
			return err
		}
	}
	_, err := c.o.Store.Commit(ctx, b.Writes()...)
	return err
}

// opening is the escalation of a step; needed is false if it needs none.
func (r *run) opening(brief *Rollback, step *Step, end *stepOutcome) (o hitl.Opening, needed bool) {
	o = hitl.Opening{
		Key: "rollback step " + r.id + " " + step.Checkpoint, Level: hitl.Approval, Workflow: brief.Workflow,
		Links: hitl.Links{Checkpoint: step.Checkpoint, Rollback: r.id},
	}
	if end.call.Key != (execution.Key{}) {
		o.Links.Execution = end.call.Key.Hex()
	}
	switch {
	case step.Status == Completed:
		return o, false
	case step.What == gather: // what it contains was escalated
		return o, false
	case step.Reason == string(reasonTimeout):
		return brief.timeoutOpening(), true
	case step.Reason == string(reasonIrreversible):
		o.Cause, o.Summary = hitl.CauseIrreversible, "The call cannot be undone by the gateway."
	case step.Reason == reasonTampered:
		o.Cause, o.Summary = hitl.CauseTampered, "The checkpoint is not what was recorded, and nothing is undone from it."
	case step.Reason == string(ReasonForeign):
		o.Cause, o.Summary = hitl.CauseIrreversible, "Somebody else has made the checkpoint; this gateway cannot undo its call."
	case step.Status == Escalated:
		o.Cause, o.Summary = hitl.CauseIrreversible, "The call was not undone: "+step.Reason+"."
		if step.Unknown {
			o.Summary = "Nobody knows whether the call was undone: " + step.Reason + "."
		}
	case step.Status == Partial:
		o.Cause, o.Summary = hitl.CauseRollbackPartial, "Only a part of the call was undone."
	default:
		o.Cause, o.Summary = hitl.CauseRollbackFailed, "The undo of the call has failed: "+step.Reason+"."
		if step.Unknown {
			o.Summary = "The undo of the call has failed, and nobody knows whether it had its effect: " + step.Reason + "."
		}
	}
	return o, true
}
