package rollback

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// run is an unfinished rollback, with what its goroutines share.
type run struct {
	id       string
	name     name
	plan     *Plan
	levels   [][]int    // places in steps
	planned  []PlanStep // by place
	index    map[string]int
	launched bool // guarded by Coordinator.mu

	mu     sync.Mutex               // held while the head is changed
	head   atomic.Pointer[Rollback] // as it is recorded at present, with its plan and without its steps
	steps  []Step                   // guarded by mu
	joined signal                   // it gives way after its level
	asks   signal                   // it has asked people
	due    signal                   // its time is over
	done   signal                   // it takes no more steps: it is finished, or has given way
}

// signal is a context that ends when the signal is set.
type signal struct {
	context.Context
	set context.CancelFunc
}

func newSignal() (s signal) {
	s.Context, s.set = context.WithCancel(context.Background())
	return s
}

func (s signal) is() bool { return s.Err() != nil }

// until is ctx, which ends early with one of some signals, or when nothing new begins any more. stop frees it.
func (c *carrier) until(ctx context.Context, signals ...signal) (_ context.Context, stop context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	forget := []func() bool{context.AfterFunc(c.begins, cancel)}
	for _, s := range signals {
		forget = append(forget, context.AfterFunc(s, cancel))
	}
	return ctx, func() {
		for _, f := range forget {
			f()
		}
		cancel()
	}
}

func newRun(n name, h *Rollback) *run {
	r := &run{
		id: h.ID, name: n, plan: h.Plan, steps: h.Plan.begin(), planned: h.Plan.list(), index: map[string]int{},
		joined: newSignal(), asks: newSignal(), due: newSignal(), done: newSignal(),
	}
	r.levels = make([][]int, len(h.Plan.Levels))
	for i, step := range r.steps {
		r.index[step.Checkpoint] = i
		r.levels[step.Level] = append(r.levels[step.Level], i)
	}
	r.expiredLast()
	r.setHead(h)
	return r
}

// expiredLast puts the steps of expired checkpoints behind all others: nothing is sent for them, and another attempt of
// their call may be undone. Groups come behind what they contain.
func (r *run) expiredLast() {
	expired := func(i int) bool { return r.planned[i].What == expired || r.planned[i].Then == expired }
	group := func(i int) bool { return r.steps[i].What == gather }
	if !slices.ContainsFunc(slices.Concat(r.levels...), expired) {
		return
	}
	var last []int
	var sent, groups [][]int
	for _, level := range r.levels {
		var in [2][]int
		for _, i := range level {
			switch {
			case expired(i):
				last = append(last, i)
			case group(i):
				in[1] = append(in[1], i)
			default:
				in[0] = append(in[0], i)
			}
		}
		sent, groups = append(sent, in[0]), append(groups, in[1])
	}
	all := append(append(sent, last), groups...)
	r.levels = slices.DeleteFunc(all, func(level []int) bool { return len(level) == 0 })
}

// setHead takes a head, which does not change any more, and sets its signals; with mu held or before r is shared.
func (r *run) setHead(h *Rollback) {
	h.Plan = r.plan
	r.head.Store(h)
	if h.TimedOut {
		r.due.set()
	}
	if h.Joined != "" {
		r.joined.set()
	}
	if len(h.Questions) > 0 {
		r.asks.set()
	}
	if !h.open() {
		r.done.set()
	}
}

// publish takes a head that was recorded, with the run's mu held: at the end of the rollback the workflow is unlocked.
func (c *carrier) publish(r *run, h *Rollback) {
	if !h.open() {
		c.locks.ended(h, c.o.Keep)
	}
	r.setHead(h)
}

// refresh reads the head again, with the run's mu held: others may have changed it, or the answer to a commit was lost.
func (c *carrier) refresh(ctx context.Context, r *run) error {
	h, err := c.readHead(ctx, r.name)
	if err == nil && h.version != r.now().version {
		c.publish(r, h)
	}
	return err
}

// now is the rollback as it is recorded at present, which nobody may change.
func (r *run) now() *Rollback { return r.head.Load() }

// snapshot is the current state of the rollback.
func (r *run) snapshot() *Rollback {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.snapshotWith(r.now())
}

// snapshotWith is the current state with another head, with mu held.
func (r *run) snapshotWith(h *Rollback) *Rollback {
	b := h.shown()
	b.Steps = slices.Clone(r.steps)
	b.Escalations = slices.Clone(b.Escalations)
	known := map[string]bool{"": true}
	for _, id := range b.Escalations {
		known[id] = true
	}
	for i := range b.Steps {
		if id := b.Steps[i].Escalation; !known[id] {
			known[id] = true
			b.Escalations = append(b.Escalations, id)
		}
	}
	return b
}

func (r *run) step(i int) Step {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.steps[i]
}

func (r *run) setStep(i int, s *Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.steps[i] = *s
}

// change changes the head, in one commit with the batch. make gets a copy, and may be called
// again if somebody else changed the head meanwhile.
func (c *carrier) change(ctx context.Context, r *run, make func(h *Rollback, b *store.Batch) error) error {
	defer c.sealing.Enter()()
	r.mu.Lock()
	defer r.mu.Unlock()
	h := *r.now()
	b := new(store.Batch)
	if err := make(&h, b); err != nil {
		return b.Done(err)
	}
	head := c.headWrite(r.name, &h, store.VersionIs(h.version))
	version, err := c.o.Store.Commit(ctx, append([]store.Write{head}, b.Writes()...)...)
	if err = b.Done(err); err == nil {
		h.version = version
		c.publish(r, &h)
		return nil
	}
	_ = c.refresh(context.WithoutCancel(ctx), r)
	return unavailable(err)
}

// drive runs a rollback, from any state.
func (c *Coordinator) drive(r *run) {
	defer func() {
		if r.done.is() {
			c.releaseRest(r)
		}
		if r.done.is() && c.settleDown(r) == nil {
			c.mu.Lock()
			delete(c.runs, r.name)
			c.removals++
			c.mu.Unlock()
		}
	}()
	if r.done.is() {
		return
	}
	begins := r.now()
	// P6: record a deadline that passed while the process was down first.
	if c.overdue(r) != nil {
		return
	}
	under, over := c.until(c.hard, r.done)
	defer over()
	c.wg.Go(func() { c.watch(under, r, begins.Due) })
	c.wg.Go(func() { c.follow(under, r) })
	if c.waitBehind(r, begins.Behind) != nil {
		return
	}
	if r.aborted() && !c.consent(r, wholePlan, slices.Concat(r.levels...)) {
		return
	}
	for i, level := range r.levels {
		if !c.consent(r, i, level) {
			return
		}
		if r.joined.is() && !r.begun(level) {
			break // it finishes its level, in its next life too
		}
		if !c.level(r, level) {
			return
		}
	}
	if c.overdue(r) != nil {
		return
	}
	_ = c.retry(r.id, "its end", func(ctx context.Context) error {
		if r.done.is() {
			return nil
		}
		if r.joined.is() {
			return c.halt(ctx, r)
		}
		return c.finish(ctx, r)
	})
}

// releaseRest releases what participants have reserved for steps that were not begun: the rollback
// was aborted, its time is over, or it gave way.
func (c *Coordinator) releaseRest(r *run) {
	c.release(r.now(), func(id string) bool {
		why := r.plan.Unprepared[id]
		return r.step(r.index[id]).Begun.IsZero() && (why == "" || why == string(ReasonUnreachable))
	})
}

// waitBehind waits until other rollbacks take no more steps, or a wider one takes this one over.
func (c *carrier) waitBehind(r *run, behind []string) error {
	within, stop := c.until(c.hard, r.joined)
	defer stop()
	for _, id := range behind {
		for over := false; !over; {
			if err := c.retry(r.id, "another rollback", func(ctx context.Context) error {
				ended, cancel, err := c.under(ctx, c.name(id))
				if over = ended == nil; err != nil || over {
					return err
				}
				defer cancel()
				select {
				case <-ended:
				case <-within.Done():
				}
				return nil
			}); err != nil {
				return err
			}
			switch {
			case r.joined.is():
				return nil
			case c.ending():
				return errShutdown
			}
		}
	}
	return nil
}

// aborted reports that nothing is undone, and that nobody has approved a part of it.
func (r *run) aborted() bool {
	return r.now().Aborted && r.question(wholePlan).Answer != answerApproved
}

// question is what people were asked about a level; the zero value if nothing.
func (r *run) question(level int) question {
	return r.asked(func(q question) bool { return q.Level == level })
}

// refusal is the question whose answer ends the rollback; the zero value without one.
func (r *run) refusal() question {
	return r.asked(func(q question) bool { return q.Answer != "" && q.Answer != answerApproved })
}

func (r *run) asked(which func(question) bool) question {
	all := r.now().Questions
	if i := slices.IndexFunc(all, which); i >= 0 {
		return all[i]
	}
	return question{}
}

// consent asks people before a level with something of severity critical is carried out (ATD
// "Interaction with HITL", case 3), and before a part of a plan is whose rest cannot be (C-4.3.2-h),
// and waits for what they decide, in its next life too. It is false where the process ends.
func (c *carrier) consent(r *run, level int, places []int) bool {
	return c.retry(r.id, "what people decide", func(ctx context.Context) error {
		q := r.question(level)
		if q.Answer != "" || r.due.is() || r.refusal().Escalation != "" {
			return nil
		}
		if q.Escalation == "" {
			if r.joined.is() {
				return nil
			}
			asks, err := c.asksFor(ctx, r, level, places)
			if err != nil || len(asks) == 0 {
				return err
			}
			if err := c.ask(ctx, r, level, asks); err != nil {
				return err
			}
			q = r.question(level)
		}
		e, err := c.decision(r, q.Escalation)
		switch {
		case r.joined.is(): // the one that it gives way to asks for itself
			_, err := c.o.Escalations.Withdraw(ctx, q.Escalation)
			if errors.Is(err, hitl.ErrStore) || errors.Is(err, hitl.ErrUnreadable) {
				return err
			}
			return nil
		case err != nil:
			return err
		case e.Status == hitl.Pending: // the time of the rollback is over
			return nil
		case e.Status == hitl.Expired: // with that time, which is recorded first
			if err := c.overdue(r); err != nil || r.due.is() {
				return err
			}
		}
		answer := answerDenied
		if e.Status == hitl.Approved && e.Round == 0 { // later rounds only resume the workflow
			answer = answerApproved
		}
		if answer == answerApproved && level == wholePlan {
			same, err := c.unchanged(ctx, r)
			if err != nil {
				return err
			}
			if !same {
				answer = answerChanged
			}
		}
		return c.change(ctx, r, func(h *Rollback, _ *store.Batch) error {
			h.Questions = slices.Clone(h.Questions)
			for i := range h.Questions {
				if h.Questions[i].Level == level {
					h.Questions[i].Answer, h.Questions[i].Token = answer, e.Resolution
				}
			}
			return nil
		})
	}) == nil
}

// asksFor are the steps because of which people are asked: those of severity critical that a level
// is about to undo, or all that a part of the plan would undo.
func (c *journal) asksFor(ctx context.Context, r *run, level int, places []int) (asks []int, err error) {
	for _, i := range places {
		s := &r.planned[i]
		undoes := s.What == Undo || s.Then == Undo
		if !undoes || s.Obstacle != "" || r.plan.Unprepared[s.Checkpoint] != "" || level != wholePlan && !s.Review || r.step(i).State != StepPending {
			continue
		}
		m, _, err := c.mark(ctx, s.Checkpoint)
		if err != nil {
			return nil, err
		}
		if m.State != checkpoint.Undone { // another rollback has done it
			asks = append(asks, i)
		}
	}
	return asks, nil
}

// ask opens the escalation of a question, in the commit that records the question.
func (c *carrier) ask(ctx context.Context, r *run, level int, asks []int) error {
	now, err := c.now(ctx)
	if err != nil {
		return err
	}
	steps := r.planned
	first := &steps[asks[0]]
	hash := r.plan.Hash()
	o := hitl.Opening{
		Links: hitl.Links{Checkpoint: first.Checkpoint, Rollback: r.id, Error: first.Error},
		Key:   fmt.Sprintf("rollback question %s %d", r.id, level),
	}
	var text strings.Builder
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(&text, format+"\n", args...) } // never fails
	if level == wholePlan {
		o.Level, o.Cause, o.Proposal.Kind = hitl.Approval, hitl.CauseRollbackPartial, hitl.PartialRollback
		o.Links.Checkpoint, o.Links.Error = r.plan.Target, ""
		o.Summary = "A part of the rollback cannot be carried out, and `partial` is `never`."
		say("What can be undone is undone, and the rest stays as it is.")
		for i := range steps {
			s := &steps[i]
			switch why := cmp.Or(s.Obstacle, r.plan.Unprepared[s.Checkpoint]); {
			case why != "" && s.Critical != "":
				o.Cause, o.Summary = hitl.CauseCritical, "Something critical of the rollback cannot be undone."
				say("stays: checkpoint %s (%s; critical: %s)", s.Checkpoint, why, s.Critical)
			case why != "":
				say("stays: checkpoint %s (%s)", s.Checkpoint, why)
			case slices.Contains(asks, i):
				say("is undone: checkpoint %s (%s, %s)", s.Checkpoint, s.Way, r.step(i).Agent)
			}
		}
		for _, o := range r.plan.Unreached {
			say("is not known: what %s has of the workflow (%s)", o.Agent, o.Reason)
		}
	} else {
		o.Level, o.Cause, o.Proposal.Kind, o.Participants = hitl.Pause, hitl.CauseCritical, hitl.ContinueRollback, r.now().informs()
		o.Summary = "A rollback is about to undo what is of severity critical."
		say("Level %d of %d, and then the rest of the rollback, is carried out. Of severity critical in that level are", level+1, len(r.levels))
		for _, i := range asks {
			say("checkpoint %s (%s, %s)", steps[i].Checkpoint, steps[i].Way, r.step(i).Agent)
		}
	}
	o.Proposal.Text, o.Proposal.PlanHash = text.String(), hex.EncodeToString(hash[:])
	return c.change(ctx, r, func(h *Rollback, b *store.Batch) error {
		if o.Within = h.Due.Sub(now); o.Within <= 0 || h.Joined != "" {
			return fmt.Errorf("%w: its time is over, or another one has taken it over", ErrStore) // look again
		}
		switch o.Workflow = h.Workflow; { // by the names with which people decide
		case h.Operator != "":
			o.Requester = "operator:" + h.Operator
		case h.Requester != "":
			o.Requester = "issuer:" + h.Requester
		}
		id, err := c.escalateFor(ctx, b, h, o)
		h.Questions = append(slices.Clip(h.Questions), question{Level: level, Escalation: id})
		return err
	})
}

// decision waits until people have decided, the time of the rollback is over, or a wider one takes
// it over. A decision that nobody can make any more is a denial.
func (c *carrier) decision(r *run, id string) (e hitl.Escalation, err error) {
	ctx, stop := c.until(c.hard, r.due, r.joined)
	defer stop()
	e, err = c.o.Escalations.Wait(ctx, id)
	switch {
	case errors.Is(err, hitl.ErrNotFound):
		return hitl.Escalation{Status: hitl.Denied}, nil
	case err == nil:
		return e, nil
	case c.ending():
		return e, errShutdown
	case r.due.is() || r.joined.is():
		return hitl.Escalation{Status: hitl.Pending}, nil
	}
	return e, err
}

// unchanged reports whether the plan of a rollback that has begun nothing is still the accepted one.
func (c *journal) unchanged(ctx context.Context, r *run) (bool, error) {
	d, err := c.draft(ctx, r.now().Request)
	if errors.Is(err, ErrStore) {
		return false, err
	}
	if err != nil {
		return false, nil
	}
	// Calls that were under way then have ended as the plan says.
	return d.Plan.like(r.plan, func(was, now *PlanStep) bool {
		return was.What == Wait && was.Then == now.What && was.Obstacle == now.Obstacle
	}), nil
}

func (r *run) begun(places []int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(places, func(i int) bool { return r.steps[i].State != StepPending })
}

// level runs the steps of one level side by side, except those of one target. It reports whether
// all have ended.
func (c *carrier) level(r *run, places []int) bool {
	todo := slices.DeleteFunc(slices.Clone(places), func(i int) bool { return r.step(i).State == StepDone })
	var lanes [][]int
	if c.retry(r.id, "the order of its steps", func(ctx context.Context) (err error) {
		lanes, err = c.lanes(ctx, r, todo)
		return err
	}) != nil {
		return false
	}
	inParallel(c.o.Parallel, len(lanes), func(lane int) {
		for _, i := range lanes[lane] {
			if c.ending() || c.retry(r.id, "a step", func(ctx context.Context) error { return c.runStep(ctx, r, i) }) != nil {
				break // the next one is to come after it
			}
		}
	})
	return !slices.ContainsFunc(places, func(i int) bool { return r.step(i).State != StepDone })
}

// watch waits for the deadline of a rollback, until ctx is done.
func (c *carrier) watch(ctx context.Context, r *run, due time.Time) {
	for !r.due.is() {
		pause := longPause
		if now, err := c.now(c.hard); err == nil {
			pause = max(due.Sub(now), time.Millisecond)
		}
		if !sleep(ctx, pause) || c.overdue(r) != nil {
			return
		}
	}
}

// halt gives way to a wider rollback, and makes sure that it is known: the answer to its
// acceptance may have been lost.
func (c *Coordinator) halt(ctx context.Context, r *run) error {
	_, err := c.adopt(ctx, c.name(r.now().Joined))
	if errors.Is(err, ErrStore) && !errors.Is(err, errUnreadable) {
		return err
	}
	return c.change(ctx, r, func(h *Rollback, b *store.Batch) error {
		h.Halted = true
		b.Add(store.Write{Key: c.workflowKey(kindWorkflow, h.Workflow, r.name), Delete: true})
		return nil
	})
}

// settleDown sets the expiry of the records of a finished rollback and of those it absorbed.
// Before that the next start finds it as unfinished.
func (c *Coordinator) settleDown(r *run) error {
	h := r.now()
	if h.State != Finished {
		return nil // one that gave way is kept as long as the one that it gave way to
	}
	return c.retry(r.id, "its expiry", func(ctx context.Context) error { return c.expireAll(ctx, r.name, h) })
}

// lanes groups steps of one level that run one after the other: calls with the same target are
// undone with the last change first, since each undo is compared with what its own call left.
func (c *journal) lanes(ctx context.Context, r *run, places []int) (lanes [][]int, err error) {
	made, known := map[int]time.Time{}, map[string]int{}
	for _, i := range places {
		lane := len(lanes)
		if step := r.step(i); len(places) > 1 && (step.What == Undo || step.What == Wait) {
			target, when, err := c.o.Checkpoints.Target(ctx, step.Checkpoint)
			switch {
			case errors.Is(err, checkpoint.ErrStore):
				return nil, unavailable(err)
			case err == nil:
				if there, is := known[target]; is {
					lane = there
				}
				made[i], known[target] = when, lane
			}
		}
		if lane == len(lanes) {
			lanes = append(lanes, nil)
		}
		lanes[lane] = append(lanes[lane], i)
	}
	for _, lane := range lanes {
		slices.SortStableFunc(lane, func(a, b int) int { return made[b].Compare(made[a]) })
	}
	return lanes, nil
}

const (
	errorTimeout    = "timeout"
	errorConstraint = "constraint_violation"
)

// escalate opens an escalation in the commit of the batch: it is durable before anybody says
// "escalated" (A-basic-rollback-g). It returns its id.
func (c *journal) escalate(ctx context.Context, b *store.Batch, o hitl.Opening) (string, error) {
	p, err := c.o.Escalations.Prepare(ctx, o)
	if err != nil {
		return "", err
	}
	b.Join(p.Batch)
	return p.Escalation().ID, nil
}

// escalateFor opens an escalation of a rollback, whose head it changes.
func (c *journal) escalateFor(ctx context.Context, b *store.Batch, h *Rollback, o hitl.Opening) (string, error) {
	id, err := c.escalate(ctx, b, o)
	h.Escalations = append(slices.Clip(h.Escalations), id)
	return id, err
}

// timeoutOpening is the escalation of an overdue rollback.
func (h *Rollback) timeoutOpening() hitl.Opening {
	return hitl.Opening{
		Key: "rollback timeout " + h.ID, Level: hitl.Approval, Cause: hitl.CauseRollbackTimeout, Workflow: h.Workflow,
		Summary: "The rollback was not done within half of the time that its checkpoints stand.",
		Links:   hitl.Links{Checkpoint: h.Checkpoint, Rollback: h.ID},
	}
}

// overdue records once that the time of a rollback is over, if it is (ATD, "Rollback Timeout and
// Escalation"). Its state does not change.
func (c *carrier) overdue(r *run) error {
	return c.retry(r.id, "its timeout", func(ctx context.Context) error {
		now, err := c.now(ctx)
		if err != nil {
			return err
		}
		r.mu.Lock()
		// An undo may be given up because its time is over by this process's clock, which may be a
		// little ahead of the store's.
		gaveUp := slices.ContainsFunc(r.steps, func(s Step) bool { return s.Reason == string(reasonTimeout) })
		r.mu.Unlock()
		h := r.now()
		none := h.TimedOut || !h.open() || now.Before(h.Due) && !gaveUp
		if none {
			return nil
		}
		return c.change(ctx, r, func(h *Rollback, b *store.Batch) error {
			h.TimedOut = true
			t, err := c.o.Ledger.Erred(ctx, h.shown(), h.Checkpoint, errorTimeout, "rollback timeout: not done within half of the ttl")
			if err != nil {
				return unavailable(err)
			}
			token := record(b, t)
			o := h.timeoutOpening()
			o.Links.Error = token
			_, err = c.escalateFor(ctx, b, h, o)
			return err
		})
	})
}

// finish records the outcome of a rollback, once all its steps have ended.
func (c *carrier) finish(ctx context.Context, r *run) error {
	now, err := c.now(ctx)
	if err != nil {
		return err
	}
	crossed, err := c.o.Ledger.Crossed(ctx, r.snapshot())
	if err != nil {
		return unavailable(err)
	}
	return c.change(ctx, r, func(h *Rollback, b *store.Batch) error {
		if h.Joined != "" || !h.open() {
			return fmt.Errorf("%w: it has changed", ErrStore) // look again
		}
		// Not among the rollback's escalations, which who asked sees (P3).
		for _, w := range crossed[:min(len(crossed), maxCrossings)] {
			if _, err := c.escalate(ctx, b, hitl.Opening{
				Key: "boundary rollback " + h.ID + " " + w, Level: hitl.Approval, Cause: hitl.CauseBoundary, Workflow: w,
				Summary: "A rollback in another workflow ends at this one's boundary: something here follows from what it was to undo, and stays.",
				Links:   hitl.Links{Rollback: h.ID},
			}); err != nil {
				return err
			}
		}
		h.State, h.Finished = Finished, now
		h.Status, h.Unknown, h.Mixed = sumUp(r.plan, r.steps, len(r.plan.Unreached))
		h.Before, h.After = hashes(h.Checkpoint, r.steps)
		o := hitl.Opening{Workflow: h.Workflow, Links: hitl.Links{Checkpoint: h.Checkpoint, Rollback: h.ID}, Participants: h.informs()}
		switch h.Status {
		case Failed:
			o.Key, o.Level, o.Cause = "rollback failed "+h.ID, hitl.Stop, hitl.CauseRollbackFailed
			o.Summary = "The rollback has failed, and nothing was undone."
			if h.Unknown {
				o.Summary = "The rollback has failed, and of some of it nobody knows whether it was undone."
			}
		case Partial:
			o.Key, o.Level, o.Cause = "rollback partial "+h.ID, hitl.Pause, hitl.CauseRollbackPartial
			o.Summary = "The rollback has undone a part, and another part not."
			if h.Unknown {
				o.Summary = "The rollback has undone a part, and of another nobody knows whether it was undone."
			}
		case Completed, Escalated: // cascade 3.4.3; the others hold the workflow as it is
			agents := map[string]bool{}
			for i := range r.steps {
				if s := &r.steps[i]; s.What != noUndo && s.What != gather && !s.Cancelled && s.Agent != "" {
					agents[s.Agent] = true
				}
			}
			if len(agents) > manyAgents && h.PartOf == "" {
				o.Key, o.Level, o.Cause = "rollback reach "+h.ID, hitl.Pause, hitl.CauseReach
				o.Summary = fmt.Sprintf("The rollback is about calls of %d agents.", len(agents))
			}
		}
		if h.stops() { // nobody can resume the workflow, here or at participants, so that nothing holds it or proposes that
			o.Lifted, o.Participants = true, nil
		}
		if o.Key != "" {
			if _, err := c.escalateFor(ctx, b, h, o); err != nil {
				return err
			}
		}
		t, err := c.o.Ledger.Completed(ctx, r.snapshotWith(h))
		if err != nil {
			return unavailable(err)
		}
		h.Complete = record(b, t)
		b.Add(store.Write{Key: c.workflowKey(kindWorkflow, h.Workflow, r.name), Delete: true})
		return nil
	})
}

// sumUp combines the outcomes of all steps. It is never more than what is known (P6).
func sumUp(p *Plan, steps []Step, unreached int) (status Status, unknown, mixed bool) {
	undone, open, failed := 0, 0, 0
	unknown = unreached > 0 // what these have done
	for i := range steps {
		s := &steps[i]
		unknown = unknown || s.Unknown
		switch s.Status {
		case Completed:
			if !s.Cancelled && s.What != gather { // what a group contains counts by itself
				undone++
			}
		case Partial:
			if s.What != gather { // a delegate has undone a part of it
				undone++
			}
			failed++
		case Escalated:
			open++
		default:
			failed++
		}
	}
	failed += len(p.Missing) // nobody could look at these
	switch {
	case open+failed == 0 && !unknown:
		return Completed, false, false
	case open+failed == 0 && unreached > 0:
		return Partial, true, false
	case undone > 0:
		return Partial, unknown, true
	case failed > 0:
		return Failed, unknown, false
	}
	return Escalated, unknown, false
}

// hashes are those of the state before and after: of the target, else of the only step with any.
func hashes(target string, steps []Step) (before, after Hash) {
	n := 0
	for i := range steps {
		s := &steps[i]
		if s.Before == (Hash{}) && s.After == (Hash{}) {
			continue
		}
		if s.Checkpoint == target {
			return s.Before, s.After
		}
		n++
		before, after = s.Before, s.After
	}
	if n != 1 {
		return Hash{}, Hash{}
	}
	return before, after
}
