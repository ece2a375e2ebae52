package rollback

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Coordinator takes requests for rollbacks and carries them out. It is safe for
// concurrent use. Only one is to be open on a store of this process.
type Coordinator struct {
	o   Options
	log *slog.Logger

	// sealing is held for reading from before a value is sealed until its commit, so that
	// Reseal can wait for those that were sealed with an older key. It is taken before the
	// locks of runs: who waits for it behind Reseal must hold nobody up.
	sealing sync.RWMutex
	// accepting is held by whoever decides about a new rollback.
	accepting sync.Mutex
	// bars keep calls from beginning that follow from what is undone.
	bars bars

	mu       sync.Mutex
	runs     map[name]*run // those that are not finished, as far as they were met
	started  bool
	stopping bool
	wg       sync.WaitGroup

	quit chan struct{} // closed when nothing new begins
	hard context.Context
	cut  context.CancelFunc // ends the steps that are under way
}

// defaultParallel is how many steps of a level run at once where nothing is said.
const defaultParallel = 8

// Open makes the coordinator of a store. It fails where Options lack something.
func Open(o Options) (*Coordinator, error) {
	for what, missing := range map[string]bool{
		"store": o.Store == nil, "sealer": o.Sealer == nil, "guard": o.Guard == nil, "vault": o.Vault == nil,
		"desk": o.Desk == nil, "ledger": o.Ledger == nil, "undoer": o.Undoer == nil, "time to keep": o.Keep <= 0,
	} {
		if missing {
			return nil, fmt.Errorf("rollback: no %s is given", what)
		}
	}
	if o.Parallel <= 0 {
		o.Parallel = defaultParallel
	}
	c := &Coordinator{o: o, log: o.Logger, runs: map[name]*run{}, quit: make(chan struct{})}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.hard, c.cut = context.WithCancel(context.Background())
	return c, nil
}

// Start goes on with every rollback that is not finished. It returns once they were
// found; calling it again is harmless.
func (c *Coordinator) Start(ctx context.Context) error {
	c.mu.Lock()
	if c.stopping {
		c.mu.Unlock()
		return ErrStopping
	}
	c.mu.Unlock()
	var names []name
	for entry, err := range c.o.Store.Scan(ctx, store.Prefix([]byte{space, kindOpen})) {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		names = append(names, nameIn(entry.Key))
	}
	for _, n := range names {
		r, err := c.adopt(ctx, n)
		switch {
		case errors.Is(err, ErrUnreadable), errors.Is(err, ErrUnknown):
			// One that is damaged must not keep the others from going on.
			if err := c.remains(ctx, n, err); err != nil {
				c.log.Warn("what is left of a rollback cannot be given its expiry", "error", err) // the next start does
			}
		case err != nil:
			return err
		default:
			c.enlist(r) // finished ones too, whose records have no expiry yet
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.started = true
	for _, r := range c.runs {
		c.launch(r)
	}
	return nil
}

// adopt returns the rollback that is under way, from the store if it is not known yet.
func (c *Coordinator) adopt(ctx context.Context, n name) (*run, error) {
	if r := c.known(n); r != nil {
		return r, nil
	}
	r, err := c.load(ctx, n)
	if err != nil {
		return nil, err
	}
	if r.done.is() {
		return r, nil
	}
	return c.enlist(r), nil
}

// enlist makes a rollback known, unless it is, and lets it go on; it returns the one that
// is known.
func (c *Coordinator) enlist(r *run) *run {
	c.mu.Lock()
	defer c.mu.Unlock()
	if other := c.runs[r.name]; other != nil {
		return other
	}
	c.runs[r.name] = r
	c.launch(r) // nobody else does where the answer to its acceptance was lost
	return r
}

func (c *Coordinator) known(n name) *run {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runs[n]
}

// launch lets a rollback run, with mu held.
func (c *Coordinator) launch(r *run) {
	if !c.started || c.stopping || r.launched {
		return
	}
	r.launched = true
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		c.drive(r)
	}()
}

// Stop begins nothing new and waits for the steps that are under way. When ctx ends they
// are cut off, and go on in the next life from what was journaled.
func (c *Coordinator) Stop(ctx context.Context) error {
	c.mu.Lock()
	if !c.stopping {
		c.stopping = true
		close(c.quit)
	}
	c.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		defer close(idle)
		c.wg.Wait()
	}()
	var err error
	select {
	case <-idle:
	case <-ctx.Done():
		err = ctx.Err()
		c.cut()
		<-idle
	}
	c.cut()
	return err
}

// ending reports whether nothing new may begin.
func (c *Coordinator) ending() bool {
	select {
	case <-c.quit:
		return true
	default:
		return false
	}
}

// now is the store's clock.
func (c *Coordinator) now(ctx context.Context) (time.Time, error) {
	now, err := c.o.Store.Now(ctx)
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return now.Round(0).UTC(), nil
}

// How long to wait before what the store or the ledger did not take is tried again.
const (
	firstPause = 50 * time.Millisecond
	longPause  = 10 * time.Second
)

// errCut: the process ends before it is done. The next life goes on.
var errCut = errors.New("rollback: cut off by the end of the process")

// insist does something until it succeeds or the process ends.
func (c *Coordinator) insist(r *run, what string, do func(ctx context.Context) error) error {
	for pause := firstPause; ; pause = min(2*pause, longPause) {
		err := do(c.hard)
		if err == nil || errors.Is(err, errCut) {
			return err
		}
		if c.ending() {
			return errCut
		}
		c.log.Warn("a rollback waits for the store or the ledger", "rollback", r.id, "what", what, "error", err)
		select {
		case <-time.After(pause):
		case <-c.quit:
			return errCut
		}
	}
}
