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

	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// BarredError refuses a call that must not begin: it follows from what is being undone, or
// its workflow was terminated.
type BarredError struct {
	// Rollback is the id of the rollback.
	Rollback string
	// Stopped says that the workflow is terminated (cascade 4.1.3): nothing begins there any
	// more. Otherwise the call may be tried again when the rollback is finished.
	Stopped bool
}

// Error implements error.
func (e *BarredError) Error() string {
	if e.Stopped {
		return fmt.Sprintf("rollback: the workflow is terminated by rollback %s", e.Rollback)
	}
	return fmt.Sprintf("rollback: what the call follows from is being undone by rollback %s", e.Rollback)
}

// bars keep calls from beginning that a plan could not know of (plan, "Prepare and
// execute"), in this process. They cost a call two looks into a map and no write.
type bars struct {
	mu     sync.Mutex
	up     map[string][]*bar   // by workflow, or by what Alone makes
	inside map[*visit]struct{} // calls between their admission and their claim
}

// bar is what one rollback keeps from beginning.
type bar struct {
	rollback, workflow string
	// decided is closed when what stands below is known. Calls of the workflow wait for that.
	decided chan struct{}
	alone   bool            // it is about the attempts of one call
	stops   bool            // everything is kept from beginning
	ids     map[string]bool // what follows from these is
	until   time.Time       // of one that stops: when it is forgotten; zero is not yet known
}

// visit is a call that is inside.
type visit struct {
	workflow string
	left     chan struct{} // closed when it has left; nil while nobody waits for that
}

// Enter admits a call of a workflow that follows from parents. leave is called when its
// claim's commit has ended, in whatever way: a rollback whose request came meanwhile waits
// for that, so that its plan has the call. The error is a *BarredError, or that of ctx,
// since a call waits while a rollback of its workflow is being decided about. parents is
// read only where there is a rollback in the workflow; an error in it is returned.
//
// Only what would claim is to be admitted: what is recorded is answered. Of a call without a
// workflow only further attempts are barred: workflow is what Alone makes for them, and
// empty for a first one.
func (c *Coordinator) Enter(ctx context.Context, workflow string, parents iter.Seq2[string, error]) (leave func(), err error) {
	if workflow == "" {
		return func() {}, nil
	}
	b := &c.bars
	for {
		// It is inside before it looks: whoever raises another bar afterwards waits for it.
		v, up := b.enter(workflow)
		leave = func() { b.leave(v) }
		if len(up) == 0 {
			return leave, nil
		}
		wait, err := barred(up, parents)
		if wait == nil && err == nil {
			return leave, nil
		}
		leave()
		if err != nil {
			return nil, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Alone stands in the place of a workflow for the attempts of a call that has none, by the
// checkpoint of the first (checkpoint.Vault.First).
func Alone(root string) string { return alonePrefix + root }

const alonePrefix = "\x00" // no workflow begins so

// scope is the workflow of a rollback, or what stands in its place.
func (c *Coordinator) scope(ctx context.Context, workflow, checkpoint string) (string, error) {
	if workflow != "" {
		return workflow, nil
	}
	root, err := c.o.Vault.First(ctx, checkpoint)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrStore, err)
	}
	return Alone(root), nil
}

// barred says whether a call must not begin, or what has to be waited for before that is
// known.
func barred(up []*bar, parents iter.Seq2[string, error]) (wait <-chan struct{}, err error) {
	var narrow []*bar
	for _, one := range up {
		select {
		case <-one.decided:
		default:
			wait = one.decided
			continue
		}
		if one.stops || one.alone {
			return nil, &BarredError{Rollback: one.rollback, Stopped: one.stops}
		}
		narrow = append(narrow, one)
	}
	if wait != nil || len(narrow) == 0 {
		return wait, nil
	}
	for id, err := range parents {
		if err != nil {
			return nil, err
		}
		for _, one := range narrow {
			if one.ids[id] {
				return nil, &BarredError{Rollback: one.rollback}
			}
		}
	}
	return nil, nil
}

func (b *bars) enter(workflow string) (*visit, []*bar) {
	v := &visit{workflow: workflow}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.inside == nil {
		b.inside = map[*visit]struct{}{}
	}
	b.inside[v] = struct{}{}
	if len(b.up) == 0 {
		return v, nil
	}
	b.forget(workflow)
	return v, slices.Clone(b.up[workflow])
}

func (b *bars) leave(v *visit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.inside, v)
	if v.left != nil {
		close(v.left)
		v.left = nil
	}
}

// raise holds up new calls of a workflow until the bar is settled or lowered, and returns
// once those that were inside have left.
func (b *bars) raise(ctx context.Context, rollback, workflow string) (*bar, error) {
	one := newBar(rollback, workflow)
	b.put(one)
	for _, left := range b.visitors(workflow) {
		select {
		case <-left:
		case <-ctx.Done():
			b.lower(one)
			return nil, ctx.Err()
		}
	}
	return one, nil
}

func newBar(rollback, workflow string) *bar {
	return &bar{
		rollback: rollback, workflow: workflow, decided: make(chan struct{}),
		alone: strings.HasPrefix(workflow, alonePrefix),
	}
}

func (b *bars) put(one *bar) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.up == nil {
		b.up = map[string][]*bar{}
	}
	b.up[one.workflow] = append(b.up[one.workflow], one)
}

// visitors are the calls of a workflow that are inside: channels that are closed when they
// have left.
func (b *bars) visitors(workflow string) []<-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []<-chan struct{}
	for v := range b.inside {
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

// plan says what a raised bar will keep from beginning.
func (b *bars) plan(one *bar, scope plan.Scope, p *plan.Plan) {
	b.mu.Lock()
	defer b.mu.Unlock()
	one.keep(scope, p)
}

// settle lets calls find the bar as it was planned. It comes when the rollback is accepted:
// nobody is told before that a workflow has ended.
func (b *bars) settle(one *bar) {
	b.mu.Lock()
	defer b.mu.Unlock()
	one.settle()
}

func (one *bar) settle() {
	select {
	case <-one.decided:
	default:
		close(one.decided)
	}
}

// keep is what the bar of a rollback keeps from beginning: what follows from its
// checkpoints, from the actions that these were made for, and from those that it passes.
func (one *bar) keep(scope plan.Scope, p *plan.Plan) {
	if one.stops = scope == plan.FullWorkflow && !one.alone; one.stops || one.alone {
		return
	}
	one.ids = map[string]bool{}
	for _, level := range p.Levels {
		for _, s := range level {
			one.ids[s.Checkpoint] = true
			for _, id := range s.Actions {
				one.ids[id] = true
			}
		}
	}
	for _, id := range p.Passed {
		one.ids[id] = true
	}
}

// lower takes a bar away, and lets those go on that wait for it.
func (b *bars) lower(one *bar) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drop(one.workflow, func(other *bar) bool { return other == one })
	one.settle()
}

// ended takes the bars of a rollback away that takes no more steps, or says how long its
// workflow stays stopped.
func (b *bars) ended(h *head, keep time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	over := func(one *bar) bool { return one.rollback == h.ID && !one.stops }
	if h.Workflow == "" { // there are as many as rollbacks under way
		for workflow := range b.up {
			b.drop(workflow, over)
		}
		return
	}
	for _, one := range b.up[h.Workflow] {
		if one.rollback == h.ID && one.stops {
			one.until = h.Finished.Add(keep)
		}
	}
	b.drop(h.Workflow, over)
}

// forget takes away the stop of a workflow whose rollback is forgotten, with mu held.
func (b *bars) forget(workflow string) {
	b.drop(workflow, func(one *bar) bool { return !one.until.IsZero() && !time.Now().Before(one.until) })
}

// drop takes bars of a workflow away, with mu held.
func (b *bars) drop(workflow string, which func(*bar) bool) {
	left := slices.DeleteFunc(slices.Clone(b.up[workflow]), which)
	if len(left) == 0 {
		delete(b.up, workflow)
		return
	}
	b.up[workflow] = left
}

// Load finds what earlier lives have barred. It comes before the first call, and so before
// Start. Where it fails nothing may begin: it could follow from what is being undone.
func (c *Coordinator) Load(ctx context.Context) error {
	for _, kind := range []byte{kindStop, kindOpen} {
		for entry, err := range c.o.Store.Scan(ctx, store.Prefix([]byte{space, kind})) {
			if err == nil {
				err = c.restore(ctx, kind == kindStop, entry)
			}
			if err != nil {
				return fmt.Errorf("%w: %w", ErrStore, err)
			}
		}
	}
	return nil
}

// restore puts the bar of a rollback up that an index names.
func (c *Coordinator) restore(ctx context.Context, stop bool, entry store.Entry) error {
	n := nameIn(entry.Key)
	h, _, err := c.readHead(ctx, n)
	if errors.Is(err, ErrUnknown) {
		return nil
	}
	if errors.Is(err, ErrUnreadable) { // nobody knows its workflow, and nobody carries it out
		c.log.Error("a rollback cannot be read; nothing is kept from beginning for it", "error", err)
		return nil
	}
	if err != nil || stop != h.stops() || !stop && !h.open() {
		return err
	}
	scope, err := c.scope(ctx, h.Workflow, h.Checkpoint)
	if err != nil {
		return err
	}
	one := newBar(h.ID, scope)
	one.until = entry.Expires
	var p *plan.Plan
	if !stop {
		r, err := c.load(ctx, n)
		if errors.Is(err, ErrUnreadable) {
			return nil // Start says so; nobody carries it out
		}
		if err != nil {
			return err
		}
		p = r.plan
	} else if one.until.IsZero() && h.State == Finished {
		one.until = h.Finished.Add(c.o.Keep)
	}
	c.bars.put(one)
	c.bars.plan(one, h.Scope, p)
	c.bars.settle(one)
	return nil
}
