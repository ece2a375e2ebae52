package rollback

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Coordinator accepts requests for rollbacks and runs them. It is safe for concurrent use. A
// process may open one per store.
type Coordinator struct {
	carrier

	// The mutexes are taken in this order (TestMutexesAreTakenInOneOrder), so that no two goroutines wait for each
	// other for ever. deciding is held while a new rollback, or one of a bounded number of escalations, is decided.
	// Then comes run.mu, held while the head of a rollback changes; an acceptance takes those of the rollbacks that
	// give way, in the order of their names. While mu or that of locks is held nothing else is taken or awaited.
	deciding sync.Mutex

	mu       sync.Mutex
	runs     map[name]*run // those that are not finished, as far as they were met; only enlist adds to it
	removals uint64        // counts those that were taken out of runs
	started  bool
	stopping bool
	failures [][]byte              // keys of recorded failures that wait for their turn
	handling int                   // goroutines that handle them
	behind   map[string][][]byte   // keys of failures that wait for the end of a rollback
	releases map[string]*releasing // by the rollback whose participants are told
	wg       sync.WaitGroup
}

// carrier carries out the runs of rollbacks, for as long as its coordinator is open.
type carrier struct {
	journal
	locks  workflowLocks   // block calls that follow from what is undone
	begins context.Context // ends when nothing new begins any more
	end    context.CancelFunc
	hard   context.Context    // of the steps that are under way
	cut    context.CancelFunc // of hard
}

// journal has what is recorded of rollbacks and of what they undo, and drafts further ones from that.
type journal struct {
	o   Options
	log *slog.Logger
	tables
	// sealing is entered from before a value is sealed until its commit, so that Reseal can wait for values sealed
	// with an older key.
	sealing store.Writers
	fleet   *fleet.Fleet  // nil where one gateway has the store
	fences  *store.Fences // see fleet
}

const defaultParallel = 8

// Open makes the coordinator of a store. It fails if Options lack something.
func Open(o Options) (*Coordinator, error) {
	for what, missing := range map[string]bool{
		"store": o.Store == nil, "sealer": o.Sealer == nil, "guard": o.Guard == nil, "checkpoint store": o.Checkpoints == nil,
		"escalation store": o.Escalations == nil, "ledger": o.Ledger == nil, "sender": o.Sender == nil && o.undoer == nil, "time to keep": o.Keep <= 0,
	} {
		if missing {
			return nil, fmt.Errorf("rollback: no %s is given", what)
		}
	}
	if o.undoer == nil {
		o.undoer = newUndoer(undoerOptions{Guard: o.Guard, Checkpoints: o.Checkpoints, Sender: o.Sender, Keep: o.Keep})
	}
	if o.Parallel <= 0 {
		o.Parallel = defaultParallel
	}
	orElse := func(configured func() time.Duration, otherwise time.Duration) func() time.Duration {
		return func() time.Duration {
			if configured != nil {
				if d := configured(); d > 0 {
					return d
				}
			}
			return otherwise
		}
	}
	o.PrepareTimeout, o.Reservation = orElse(o.PrepareTimeout, DefaultPrepareTimeout), orElse(o.Reservation, DefaultReservation)
	c := &Coordinator{
		carrier: carrier{journal: journal{o: o, log: cmp.Or(o.Logger, slog.New(slog.DiscardHandler)), tables: newTables(&o)}},
		runs:    map[name]*run{}, behind: map[string][][]byte{}, releases: map[string]*releasing{},
	}
	c.begins, c.end = context.WithCancel(context.Background())
	c.hard, c.cut = context.WithCancel(context.Background())
	if c.fleet = fleet.Of(o.Store); c.fleet != nil {
		c.fences = store.FollowFences(c.fleet, []byte{space, kindFence})
	}
	return c, nil
}

// Start resumes every unfinished rollback, but for those that another gateway carries out. It returns
// once they were found; calling it again is harmless.
func (c *Coordinator) Start(ctx context.Context) error {
	c.mu.Lock()
	stopping, started := c.stopping, c.started
	c.mu.Unlock()
	if stopping {
		return ErrStopping
	}
	if err := c.resume(ctx); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fleet != nil && !started && !c.stopping {
		c.wg.Go(func() { c.succeed(c.begins) })
	}
	return nil
}

// succeed takes over what members leave unfinished that are gone, until the coordinator stops.
func (c *Coordinator) succeed(ctx context.Context) {
	fleet.Job{
		Fleet: c.fleet,
		Do:    func(context.Context, bool) (time.Duration, error) { return 0, c.resume(c.hard) },
		Failed: func(err error) {
			c.log.Warn("what other gateways have left unfinished cannot be taken over; it is tried again", "error", err)
		},
	}.Run(ctx)
}

// resume takes up what nobody carries out.
func (c *Coordinator) resume(ctx context.Context) error {
	names, err := c.names(ctx, store.Prefix([]byte{space, kindOpen}))
	if err != nil {
		return err
	}
	for _, n := range names {
		r, err := c.adopt(ctx, n)
		switch {
		case errors.Is(err, errUnreadable), errors.Is(err, ErrUnknown):
			// A damaged rollback must not keep the others from going on.
			if err := c.cleanUp(ctx, n, err); err != nil {
				c.log.Warn("what is left of a rollback cannot be given its expiry", "error", err) // the next start does
			}
		case err != nil:
			return err
		default:
			if mine, _, err := c.take(ctx, r); err != nil {
				return err
			} else if !mine {
				continue
			}
			c.enlist(r, 0) // finished ones too, whose records have no expiry yet
		}
	}
	c.mu.Lock()
	first := !c.started
	c.started = true
	for _, r := range c.runs {
		c.launch(r)
	}
	c.mu.Unlock()
	var failures [][]byte // those because of which nothing was asked for yet
	for row, err := range c.failed.All(ctx) {
		if err != nil && !errors.Is(err, errUnreadable) {
			return err
		}
		mine, err := c.takeFailure(ctx, row, first)
		if err != nil {
			return err
		}
		if mine {
			failures = append(failures, row.Key)
		}
	}
	c.takeUp(failures...)
	return nil
}

// adopt returns the running rollback, from the store if it is not known yet. Unless another gateway carries
// it out, it runs here from then on.
func (c *Coordinator) adopt(ctx context.Context, n name) (*run, error) {
	for {
		r, removals := c.known(n)
		if r != nil {
			return r, nil
		}
		r, err := c.load(ctx, n)
		if err != nil || r.done.is() {
			return r, err
		}
		mine, fresh, err := c.take(ctx, r)
		if err != nil || !mine && fresh {
			return r, err
		}
		if !fresh {
			continue
		}
		if r := c.enlist(r, removals); r != nil {
			return r, nil
		}
	}
}

// enlist registers a rollback, unless it is known, and runs it; it returns the known one. removals is
// removals before it was read: it is nil where that has changed, since it may have ended since.
func (c *Coordinator) enlist(r *run, removals uint64) *run {
	c.mu.Lock()
	defer c.mu.Unlock()
	if other := c.runs[r.name]; other != nil {
		return other
	}
	if removals != c.removals && !r.done.is() {
		return nil
	}
	c.runs[r.name] = r
	c.launch(r) // nobody else does where the answer to its acceptance was lost
	return r
}

// known is a rollback as it was met here, or nil, and Coordinator.removals.
func (c *Coordinator) known(n name) (r *run, removals uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runs[n], c.removals
}

// launch lets a rollback run, with mu held.
func (c *Coordinator) launch(r *run) {
	if !c.started || c.stopping || r.launched {
		return
	}
	r.launched = true
	c.wg.Go(func() { c.drive(r) })
}

// Stop begins nothing new and waits for the running steps. When ctx ends they are cancelled, and
// resumed from the journal after a restart.
func (c *Coordinator) Stop(ctx context.Context) error {
	c.mu.Lock()
	if !c.stopping {
		c.stopping = true
		c.end()
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

func (c *carrier) ending() bool { return c.begins.Err() != nil }

func (c *journal) now(ctx context.Context) (time.Time, error) {
	now, err := c.o.Store.Now(ctx)
	return now.Round(0).UTC(), unavailable(err)
}

// The waits between two tries of a failed write to the store or the ledger.
const (
	firstPause = 50 * time.Millisecond
	longPause  = 10 * time.Second
)

// errShutdown: shutting down; the rollback is resumed after a restart.
var errShutdown = errors.New("rollback: cut off by the end of the process")

// retry repeats something for a rollback, or for all where id is empty, until it succeeds or the process shuts down.
func (c *carrier) retry(id, what string, do func(ctx context.Context) error) error {
	for pause := firstPause; ; pause = min(2*pause, longPause) {
		err := do(c.hard)
		if err == nil || errors.Is(err, errShutdown) {
			return err
		}
		if c.ending() {
			return errShutdown
		}
		c.log.Warn("a rollback waits for the store or the ledger", "rollback", id, "what", what, "error", err)
		if !sleep(c.begins, pause) {
			return errShutdown
		}
	}
}

// sleep pauses; it is false where ctx ends first.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Resolve returns the id under which a rollback of a checkpoint is kept here that is asked for under
// id: the two together name it (cascade 4.3.4). That is id for the first checkpoint, and for each
// further one an id that is made of both and that nobody can guess. It may be another one once what
// was kept has ended.
func (c *journal) Resolve(ctx context.Context, id, checkpoint string) (string, error) {
	first, err := c.keptFor(ctx, id)
	if err != nil || first == checkpoint {
		return id, err
	}
	sum := store.Index(c.o.Sealer, "rollback of a further checkpoint", id, checkpoint)
	further := uuid.UUID(sum[:16])
	further[6], further[8] = further[6]&0x0f|0x80, further[8]&0x3f|0x80 // RFC 9562, version 8
	if first == "" {
		if there, err := c.keptFor(ctx, further.String()); err != nil || there == "" {
			return id, err
		}
	}
	return further.String(), nil
}

// keptFor is the checkpoint of the rollback with an id, accepted or reserved; empty without one.
func (c *journal) keptFor(ctx context.Context, id string) (string, error) {
	h, err := c.readHead(ctx, c.name(id))
	if errors.Is(err, ErrUnknown) {
		h, err = c.reservation(ctx, c.name(id))
	}
	switch {
	case errors.Is(err, ErrUnknown):
		return "", nil
	case err != nil:
		return "", err
	}
	return h.Checkpoint, nil
}

// Get returns a rollback, or ErrUnknown. One that gave way to a wider one has its result.
func (c *Coordinator) Get(ctx context.Context, id string) (*Rollback, error) {
	r, err := c.find(ctx, c.name(id))
	if err != nil {
		return nil, err
	}
	own := r.snapshot()
	for r.now().Halted {
		wider, err := c.find(ctx, c.name(r.now().Joined))
		if err != nil {
			return nil, err
		}
		r = wider
		own.follow(r.snapshot())
	}
	return own, nil
}

func (c *Coordinator) find(ctx context.Context, n name) (*run, error) {
	if r, _ := c.known(n); r != nil {
		return r, nil
	}
	return c.load(ctx, n)
}

// follow takes the result of the wider rollback.
func (b *Rollback) follow(wider *Rollback) {
	b.State, b.Status, b.Finished, b.Due = wider.State, wider.Status, wider.Finished, wider.Due
	b.TimedOut = b.TimedOut || wider.TimedOut
	b.Plan, b.Steps, b.Unknown, b.Mixed = wider.Plan, wider.Steps, wider.Unknown, wider.Mixed
	b.Complete, b.Before, b.After = wider.Complete, wider.Before, wider.After
	b.Escalations = append(slices.Clip(b.Escalations), wider.Escalations...)
}

// byToken returns the id of the rollback that a token asked for, or ErrUnknown.
func (c *journal) byToken(ctx context.Context, jti string) (string, error) {
	row, err := c.tokens.Get(ctx, c.tokenKey(jti))
	if err != nil {
		return "", err
	}
	return *row.Record, nil
}

// Wait returns the rollback once it is finished. If ctx or the process ends first, it returns the
// current state with ctx's error or ErrStopping.
func (c *Coordinator) Wait(ctx context.Context, id string) (*Rollback, error) {
	for next := c.name(id); ; {
		changed, cancel := c.o.Store.Watch(keyOf(kindHead, next))
		r, err := c.adopt(ctx, next) // unless another gateway carries it out, this one does from now on
		if err != nil {
			cancel()
			return nil, err
		}
		switch h := r.now(); {
		case h.State == Finished:
			cancel()
			return c.Get(ctx, id)
		case h.Halted:
			next = c.name(h.Joined)
		default:
			select {
			case <-changed:
			case <-r.done.Done(): // changed may have been before that
			case <-ctx.Done():
				err = ctx.Err()
			case <-c.begins.Done():
				err = ErrStopping
			}
		}
		cancel()
		if err != nil {
			return c.unfinished(ctx, id, err)
		}
	}
}

// under returns a channel that is closed when a rollback may have ended, or may be carried out by somebody else;
// nil if it takes no more steps. cancel frees it.
func (c *journal) under(ctx context.Context, n name) (ended <-chan struct{}, cancel func(), err error) {
	ended, cancel = c.o.Store.Watch(keyOf(kindHead, n))
	h, err := c.readHead(ctx, n)
	if err == nil && h.open() {
		return ended, cancel, nil
	}
	cancel()
	if errors.Is(err, ErrUnknown) || errors.Is(err, errUnreadable) {
		err = nil
	}
	return nil, func() {}, err
}

// unfinished is the current state of the rollback, with an error.
func (c *Coordinator) unfinished(ctx context.Context, id string, why error) (*Rollback, error) {
	r, err := c.Get(context.WithoutCancel(ctx), id)
	if err != nil {
		return nil, err
	}
	return r, why
}

// Page is a part of a listing.
type Page struct {
	// Rollbacks, the newest first, without their plans and steps.
	Rollbacks []*Rollback
	// Unreadable counts records that do not open.
	Unreadable int
	// Next is where the next page begins; empty after the last.
	Next string
}

// maxPage is the largest number of rollbacks on a page.
const maxPage = 1000

// List returns up to limit rollbacks from after on; empty is the beginning. One that gave way to
// a wider one is shown as it was then, and names the other.
func (c *journal) List(ctx context.Context, after string, limit int) (Page, error) {
	limit = min(max(limit, 1), maxPage)
	prefix := []byte{space, kindAge}
	r := store.Prefix(prefix)
	r.Reverse, r.Limit = true, limit+1
	if after != "" {
		place, err := base64.RawURLEncoding.DecodeString(after)
		if err != nil || len(place) != placeSize {
			return Page{}, ErrCursor
		}
		r.To = append(bytes.Clone(prefix), place...)
	}
	var keys [][]byte
	for entry, err := range c.o.Store.Scan(ctx, r) {
		if err != nil {
			return Page{}, unavailable(err)
		}
		keys = append(keys, entry.Key)
	}
	var page Page
	if len(keys) > limit {
		keys = keys[:limit]
		page.Next = base64.RawURLEncoding.EncodeToString(keys[limit-1][len(prefix):])
	}
	for _, key := range keys {
		h, err := c.readHead(ctx, nameIn(key))
		switch {
		case errors.Is(err, ErrUnknown):
		case errors.Is(err, errUnreadable):
			page.Unreadable++
		case err != nil:
			return Page{}, err
		default:
			page.Rollbacks = append(page.Rollbacks, h.shown())
		}
	}
	return page, nil
}
