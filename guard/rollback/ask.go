package rollback

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
)

// DefaultPrepareTimeout is how long a participant may be silent in the first phase by default.
const DefaultPrepareTimeout = 10 * time.Second

// DefaultReservation is how long a prepared rollback is reserved by default.
const DefaultReservation = time.Minute

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
	unprepared, err := c.canUndo(ctx, d, ids, false)
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

// canUndo asks the targets that a plan restores, and then its participants, whether all of it can be done. Targets that
// do not answer take nothing of the time in which participants may prepare.
func (c *Coordinator) canUndo(ctx context.Context, d *draft, targets []string, dry bool) (found []Obstacle, err error) {
	delegated := d.Plan.delegated()
	if len(delegated) > 0 {
		d.Precedence = d.precedence() // which participants are told: from now on, whatever its time will be
	}
	for _, ids := range [][]string{targets, delegated} {
		some, err := c.askAll(ctx, d, ids, dry)
		if found = append(found, some...); err != nil {
			return found, err
		}
	}
	return found, nil
}

// askAll asks at once what the undo of some checkpoints of a plan depends on.
func (c *Coordinator) askAll(ctx context.Context, d *draft, ids []string, dry bool) ([]Obstacle, error) {
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

// changeable are the checkpoints whose targets are compared with what their calls left (C-4.3.2-d, -e): a restore
// leaves alone what somebody has changed since. Of several changes of one target, the one that is undone first
// stands there.
func (c *journal) changeable(ctx context.Context, p *Plan) (ids []string, err error) {
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
				return nil, unavailable(err)
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

func (c *carrier) askOne(ctx context.Context, d *draft, cp *Checkpoint, q *questions, dry bool) (string, error) {
	s, err := c.callStatus(ctx, cp, "", Ran)
	switch {
	case errors.Is(err, ErrStore):
		return "", err
	case err != nil || s.opened == nil || s.state != Ran:
		return "", nil // the step finds it out
	}
	t := undoTask{
		Rollback: d.ID, PartOf: d.partOf(), Step: cp.ID, Checkpoint: s.opened, Reason: d.Reason, Due: q.due,
		Quit: c.begins.Done(), Dry: dry, Precedence: d.Precedence, Foreign: s.foreign,
	}
	if s.opened.Snapshot.Way == checkpoint.Restore {
		m, damaged, err := c.mark(ctx, s.opened.Snapshot.Root())
		if err != nil || damaged || m.Doubt != "" || m.State == checkpoint.Undoing { // an undo may have changed it
			return "", err
		}
		obstacle, err := c.o.undoer.Prepare(q.targets, t)
		if err != nil && q.targets.Err() == nil { // what is not read in time is found out by the step
			return "", unavailable(err)
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
