package hitl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// CourierOptions are the settings of a Courier; zero fields take their default.
type CourierOptions struct {
	// First is the wait after the first attempt that failed, default 1 s. It doubles with
	// each one.
	First time.Duration
	// Longest is the longest such wait, default 5 min.
	Longest time.Duration
	// MaxAge is how long after its opening an escalation is tried; then it is Undeliverable.
	// The default is for ever. There is always one attempt.
	MaxAge time.Duration
	// Attempt is how long one attempt may take, default 30 s.
	Attempt time.Duration
	// Concurrent is how many attempts run at once, default 4.
	Concurrent int
	// Poll is the longest time between two looks at the store, default 1 min. It bounds
	// how late it is found what another node opened and did not live to deliver.
	Poll time.Duration
	// Attempted, if any, hears of each attempt whose outcome was recorded: the escalation
	// as it now is, and why the attempt failed, or nil. One that is Undeliverable now
	// needs an operator's eye. It is called concurrently.
	Attempted func(Escalation, error)
	// Troubled, if any, hears what went wrong here: the store is unavailable, or an
	// escalation cannot be read. It is called concurrently.
	Troubled func(error)
}

const (
	longestLater   = time.Hour        // that a receiver may ask for
	storePause     = 5 * time.Second  // after the store failed
	recordPatience = 10 * time.Second // for recording an outcome, also while ending
	duePage        = 8                // due entries that are taken before the next look for higher levels
)

// Courier takes escalations to a Notifier until somebody was told of each, the highest
// level first. All that it knows is in the store, so that it goes on where the last one
// ended.
//
// Of several couriers over one store, on whatever nodes, one delivers an escalation at a
// time: before an attempt its lease is committed, by the store's clock, for twice as long
// as the attempt may take. Whoever dies in an attempt is succeeded when the lease ends, and
// then the message may go out twice.
type Courier struct {
	desk     *Desk
	notifier Notifier
	o        CourierOptions
	ended    chan struct{} // an attempt has, and its next one is due sooner than its lease was
}

// NewCourier makes the courier of a desk. Run makes it work, once.
func NewCourier(d *Desk, n Notifier, o CourierOptions) *Courier {
	orElse := func(v *time.Duration, otherwise time.Duration) {
		if *v <= 0 {
			*v = otherwise
		}
	}
	orElse(&o.First, time.Second)
	orElse(&o.Longest, 5*time.Minute)
	o.Longest = max(o.First, o.Longest)
	orElse(&o.Attempt, 30*time.Second)
	orElse(&o.Poll, time.Minute)
	if o.Concurrent <= 0 {
		o.Concurrent = 4
	}
	if o.Attempted == nil {
		o.Attempted = func(Escalation, error) {}
	}
	if o.Troubled == nil {
		o.Troubled = func(error) {}
	}
	return &Courier{desk: d, notifier: n, o: o, ended: make(chan struct{}, 1)}
}

// Run delivers what is due, until ctx is done, or the store is closed or closes itself.
// Attempts under way end with ctx, and their leases are given back; it returns when all
// that is done.
func (c *Courier) Run(ctx context.Context) {
	var attempts sync.WaitGroup
	defer attempts.Wait()
	slots := make(chan struct{}, c.o.Concurrent)
	for ctx.Err() == nil {
		news := c.desk.changed() // before the look, so that nothing is slept through
		wait, err := c.round(ctx, slots, &attempts)
		if errors.Is(err, store.ErrClosed) {
			return
		}
		if err != nil {
			if ctx.Err() == nil {
				c.o.Troubled(err)
			}
			if errors.Is(err, store.ErrUnhealthy) {
				return
			}
			c.pause(ctx) // not even news are worth a look now
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-news:
		case <-c.ended:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

func (c *Courier) pause(ctx context.Context) {
	select {
	case <-time.After(storePause):
	case <-ctx.Done():
	}
}

// round begins attempts for what is due, and returns how long nothing will be.
func (c *Courier) round(ctx context.Context, slots chan struct{}, attempts *sync.WaitGroup) (time.Duration, error) {
	for {
		due, wait, err := c.due(ctx)
		if err != nil || len(due) == 0 {
			return wait, err
		}
		for _, name := range due {
			select {
			case slots <- struct{}{}: // before the lease, which must not run out in a queue
			case <-ctx.Done():
				return 0, ctx.Err()
			}
			started := time.Now()
			taken, err := c.take(ctx, name)
			if err != nil || taken == nil {
				<-slots
				if err != nil {
					return 0, err
				}
				continue
			}
			attempts.Go(func() {
				c.attempt(ctx, started, taken)
				<-slots
				select {
				case c.ended <- struct{}{}:
				default: // it is told already
				}
			})
		}
	}
}

// due returns the index entries of the highest level of which any are due, or else how
// long none will be.
func (c *Courier) due(ctx context.Context) (names [][]byte, wait time.Duration, err error) {
	now, err := c.desk.now(ctx)
	if err != nil {
		return nil, 0, err
	}
	wait = c.o.Poll
	for l := Stop; l >= Pause; l-- {
		r := store.Prefix(undelivered(l))
		r.Limit = duePage
		for entry, err := range c.desk.store.Scan(ctx, r) {
			if err != nil {
				return nil, 0, fmt.Errorf("%w: %w", ErrStore, err)
			}
			at, _ := placeIn(entry.Key)
			if left := at.Sub(now); left > 0 {
				wait = min(wait, left)
				break
			}
			names = append(names, entry.Key)
		}
		if len(names) > 0 {
			return names, 0, nil
		}
	}
	return nil, wait, nil
}

// attempt tells the notifier, and records what came of it. started is before the lease
// was committed, so that a slow commit shortens the attempt and not the lease's margin.
func (c *Courier) attempt(ctx context.Context, started time.Time, l *lease) {
	limited, cancel := context.WithDeadline(ctx, started.Add(c.o.Attempt))
	defer cancel()
	err := limited.Err()
	if err == nil {
		err = c.notifier.Notify(limited, *l.escalation)
	}
	cut := err != nil && ctx.Err() != nil
	// What was sent is recorded even while the courier ends.
	recording, done := context.WithTimeout(context.WithoutCancel(ctx), recordPatience)
	defer done()
	recorded, problem := c.settle(recording, l, err, cut)
	switch {
	case problem != nil:
		c.o.Troubled(fmt.Errorf("what came of telling of escalation %s is not recorded, so it may be told again: %w", l.escalation.ID, problem))
	case recorded != nil && !cut:
		c.o.Attempted(*recorded, err)
	}
}
