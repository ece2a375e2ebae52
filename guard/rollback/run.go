package rollback

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// run is a rollback that is not finished, and what its goroutines share.
type run struct {
	id       string
	name     name
	plan     *plan.Plan
	levels   [][]int        // places in steps
	roots    map[int]string // of places, their first attempts; nil where no ttl is over
	then     []plan.What    // what the plan says of each step after a wait
	index    map[string]int
	launched bool // guarded by Coordinator.mu

	mu      sync.Mutex
	head    head
	version store.Version
	steps   []Step
	stepped chan struct{} // closed, and made anew, where a step has ended

	joined signal // it gives way after its level
	due    signal // its time is over
	halted signal // it takes no more steps
	done   signal // it is finished, or has given way
}

// signal is a channel that is closed once.
type signal struct {
	once sync.Once
	c    chan struct{}
}

func newSignal() signal { return signal{c: make(chan struct{})} }

func (s *signal) set() { s.once.Do(func() { close(s.c) }) }

func (s *signal) is() bool {
	select {
	case <-s.c:
		return true
	default:
		return false
	}
}

func newRun(n name, h *head, version store.Version, p *planned) *run {
	r := &run{
		id: h.ID, name: n, plan: p.Plan, head: *h, version: version,
		stepped: make(chan struct{}), joined: newSignal(), due: newSignal(), halted: newSignal(), done: newSignal(),
	}
	r.steps, r.levels = p.steps()
	r.index = make(map[string]int, len(r.steps))
	for _, level := range p.Plan.Levels {
		for _, s := range level {
			r.index[s.Checkpoint] = len(r.then)
			r.then = append(r.then, s.Then)
		}
	}
	r.told()
	return r
}

// told sets the signals that the head gives, with mu held or before anybody else knows r.
func (r *run) told() {
	if r.head.TimedOut {
		r.due.set()
	}
	if r.head.Joined != "" {
		r.joined.set()
	}
	if !r.head.open() {
		r.halted.set()
		r.done.set()
	}
}

// told is that of the run, with its mu held. Whoever waits for the end finds the bar gone.
func (c *Coordinator) told(r *run) {
	if !r.head.open() {
		c.bars.ended(&r.head, c.o.Keep)
	}
	r.told()
}

// brief is the rollback without its steps, for evidence of a part of it.
func (r *run) brief() *Rollback {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.head.rollback()
	b.Plan = r.plan
	return b
}

// whole is all that is known of the rollback.
func (r *run) whole() *Rollback {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.wholeOf(&r.head)
}

// wholeOf is what whole would be with another head, with mu held.
func (r *run) wholeOf(h *head) *Rollback {
	b := h.rollback()
	b.Plan, b.Steps = r.plan, slices.Clone(r.steps)
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
	if s.State == StepDone {
		close(r.stepped)
		r.stepped = make(chan struct{})
	}
}

// nextEnd is closed when the next step has ended.
func (r *run) nextEnd() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stepped
}

// rolling is what precedence is judged by. It was journaled, so that it has begun.
func (r *run) rolling() plan.Rolling {
	return plan.Rolling{
		Rollback: plan.Rollback{ID: r.id, Scope: r.head.Scope, Asked: r.head.Asked}, Plan: r.plan, Executing: true,
	}
}

// change brings the head to another state, in one commit with what rides along. make is
// given a copy, and may be called again where somebody else changed the head meanwhile.
func (c *Coordinator) change(ctx context.Context, r *run, make func(h *head, g *cargo) error) error {
	c.sealing.RLock()
	defer c.sealing.RUnlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	h := r.head
	g := new(cargo)
	if err := make(&h, g); err != nil {
		return g.done(err)
	}
	w, err := c.headWrite(r.name, &h, store.VersionIs(r.version))
	if err != nil {
		return g.done(err)
	}
	version, err := c.o.Store.Commit(ctx, append([]store.Write{w}, g.writes...)...)
	if err = g.done(err); err == nil {
		r.head, r.version = h, version
		c.told(r)
		return nil
	}
	// Another one may have changed it, or this commit has landed and its answer was lost.
	fresh, version, readErr := c.readHead(context.WithoutCancel(ctx), r.name)
	if readErr == nil {
		r.head, r.version = *fresh, version
		c.told(r)
	}
	return fmt.Errorf("%w: %w", ErrStore, err)
}

// drive carries a rollback out, from wherever it is.
func (c *Coordinator) drive(r *run) {
	defer func() {
		if r.done.is() && c.settleDown(r) == nil {
			c.mu.Lock()
			delete(c.runs, r.name)
			c.mu.Unlock()
		}
	}()
	if r.done.is() {
		return
	}
	r.mu.Lock()
	due, behind := r.head.Due, r.head.Behind
	r.mu.Unlock()
	// P6: what the time was over for while nobody was there is said before anything else.
	if c.overdue(r) != nil {
		return
	}
	ended := make(chan struct{})
	defer close(ended)
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		c.watch(r, due, ended)
	}()
	if c.waitBehind(r, behind) != nil {
		return
	}
	if c.insist(r, "the attempts of its calls", func(ctx context.Context) error { return c.arrange(ctx, r) }) != nil {
		return
	}
	for _, level := range r.levels {
		if r.joined.is() && !r.begun(level) {
			break // DESIGN: it finishes its level, in its next life too
		}
		if !c.level(r, level) {
			return
		}
	}
	if c.overdue(r) != nil {
		return
	}
	_ = c.insist(r, "its end", func(ctx context.Context) error {
		if r.done.is() {
			return nil
		}
		if r.joined.is() {
			return c.halt(ctx, r)
		}
		return c.finish(ctx, r)
	})
}

// waitBehind waits for those that come first.
func (c *Coordinator) waitBehind(r *run, behind []string) error {
	for _, id := range behind {
		other := c.known(c.name(id))
		if other == nil {
			continue // finished
		}
		select {
		case <-other.halted.c:
		case <-r.joined.c:
			return nil
		case <-c.quit:
			return errCut
		}
	}
	return nil
}

// begun reports whether a step of a level has begun.
func (r *run) begun(places []int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(places, func(i int) bool { return r.steps[i].State != StepPending })
}

// level takes the steps of one level side by side, but for those of one target. It reports
// whether all have ended.
func (c *Coordinator) level(r *run, places []int) bool {
	var todo []int
	for _, i := range places {
		if r.step(i).State != StepDone {
			todo = append(todo, i)
		}
	}
	var lanes [][]int
	if c.insist(r, "the order of its steps", func(ctx context.Context) (err error) {
		lanes, err = c.lanes(ctx, r, todo)
		return err
	}) != nil {
		return false
	}
	next := make(chan []int)
	var wg sync.WaitGroup
	for range min(c.o.Parallel, len(lanes)) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for lane := range next {
				for _, i := range lane {
					if c.insist(r, "a step", func(ctx context.Context) error { return c.take(ctx, r, i) }) != nil {
						break // the next one is to come after it
					}
				}
			}
		}()
	}
	for _, lane := range lanes {
		if c.ending() {
			break
		}
		next <- lane
	}
	close(next)
	wg.Wait()
	for _, i := range places {
		if r.step(i).State != StepDone {
			return false
		}
	}
	return true
}

// watch waits for the time of a rollback to be over.
func (c *Coordinator) watch(r *run, due time.Time, ended <-chan struct{}) {
	for !r.due.is() {
		pause := longPause
		if now, err := c.now(c.hard); err == nil {
			pause = max(due.Sub(now), time.Millisecond)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ended:
		case <-r.halted.c:
		case <-c.quit:
		}
		timer.Stop()
		if r.halted.is() || c.ending() {
			return
		}
		select {
		case <-ended:
			return
		default:
		}
		if c.overdue(r) != nil {
			return
		}
	}
}

// halt gives way to a wider rollback, and sees to it that this one is known: the answer to
// its acceptance may have been lost.
func (c *Coordinator) halt(ctx context.Context, r *run) error {
	_, err := c.adopt(ctx, c.name(r.wider()))
	if errors.Is(err, ErrStore) && !errors.Is(err, ErrUnreadable) {
		return err
	}
	return c.change(ctx, r, func(h *head, g *cargo) error {
		h.Halted = true
		g.writes = append(g.writes, store.Write{Key: c.workflowKey(h.Workflow, r.name), Delete: true})
		return nil
	})
}

// settleDown gives what stands of a finished rollback its expiry, and of those that it has
// taken up. Before, it is found as unfinished at the next start.
func (c *Coordinator) settleDown(r *run) error {
	r.mu.Lock()
	h := r.head
	r.mu.Unlock()
	if h.State != Finished {
		return nil // one that gave way is kept as long as the one that it gave way to
	}
	return c.insist(r, "its expiry", func(ctx context.Context) error { return c.expireAll(ctx, r.name, &h) })
}
