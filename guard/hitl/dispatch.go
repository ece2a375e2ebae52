package hitl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// errRefused: the receiver will never accept this message.
var errRefused = errors.New("hitl: refused for good")

// laterError says that the receiver wants no attempts for a while.
type laterError struct {
	// After is how long, bounded by the backoff's own time and an hour.
	After time.Duration
	Err   error
}

func (e *laterError) Error() string { return e.Err.Error() }
func (e *laterError) Unwrap() error { return e.Err }

// Delivery is how escalations are delivered; zero fields but Notify take their default.
type Delivery struct {
	// Notify notifies somebody of an escalation. It returns before ctx is done, or soon after.
	//
	// It is called at least once: after a crash, a lost answer or an expired lease it gets the same
	// escalation again, perhaps on another node. Escalation.ID is the message's id, by which a
	// receiver recognises repetitions. nil means that the message was accepted, errRefused that it
	// never will be; a *laterError says when to try again; after any other error it is tried again.
	// The error's text is recorded and reported: it must hold nothing secret (P8).
	Notify func(context.Context, Escalation) error
	// Attempt is how long one attempt may take, default 30 s.
	Attempt time.Duration
	// Concurrent is how many attempts run at once, default 4.
	Concurrent int
	// Poll is the longest time between two reads of the store, default 1 min. It bounds the delay
	// after another node opened an escalation and died before delivering it.
	Poll time.Duration
	// OnAttempt, if any, gets each attempt whose outcome was recorded: the current escalation,
	// and why the attempt failed, or nil. An Undeliverable one needs an operator. It is called
	// concurrently.
	OnAttempt func(Escalation, error)
	// OnError, if any, gets local errors: the store is unavailable, or an escalation cannot be
	// read. It is called concurrently.
	OnError func(error)
}

const (
	firstWait      = time.Second      // after the first failed attempt; it doubles each time
	longestWait    = 5 * time.Minute  // between two attempts
	longestLater   = time.Hour        // that a receiver may ask for
	storePause     = 5 * time.Second  // after the store failed
	recordPatience = 10 * time.Second // for recording an outcome, also while ending
	duePage        = 8                // due entries that are taken before the next look for higher levels
)

// dispatcher is one run of Deliver.
type dispatcher struct {
	escalations *Store
	o           Delivery
	ended       chan struct{} // an attempt has, and its next one is due sooner than its lease was
}

// Deliver delivers escalations, the highest level first, and ends those that nobody decides in time, until ctx is
// done, the store is closed, or this member is gone. Running attempts end with ctx, and their leases are released
// before it returns. All state is in the store, so that it resumes after a restart.
//
// Several may deliver from one store, also on several nodes: one delivers an escalation at a
// time. Before an attempt it commits a lease, by the store's clock, for twice the longest
// attempt. If it dies, another one takes over when the lease ends, or once its member is gone, and the message
// may be sent twice.
func (d *Store) Deliver(ctx context.Context, o Delivery) {
	o.Attempt = cmp.Or(o.Attempt, 30*time.Second)
	o.Concurrent = cmp.Or(o.Concurrent, 4)
	o.Poll = cmp.Or(o.Poll, time.Minute)
	if o.OnAttempt == nil {
		o.OnAttempt = func(Escalation, error) {}
	}
	if o.OnError == nil {
		o.OnError = func(error) {}
	}
	c := &dispatcher{escalations: d, o: o, ended: make(chan struct{}, 1)}
	var attempts sync.WaitGroup
	defer attempts.Wait()
	slots := make(chan struct{}, c.o.Concurrent)
	fleet.Job{
		Fleet: c.escalations.fleet, News: c.escalations.changed, Wake: c.ended, Retry: storePause, Failed: c.o.OnError,
		Do: func(ctx context.Context, left bool) (time.Duration, error) {
			if left {
				if err := c.succeed(ctx); err != nil {
					return 0, err
				}
			}
			wait, err := c.round(ctx, slots, &attempts)
			return max(wait, 1), err
		},
	}.Run(ctx)
}

// succeed makes due what members were about to deliver that are gone.
func (c *dispatcher) succeed(ctx context.Context) error {
	d := c.escalations
	if d.fleet == nil {
		return nil
	}
	now, err := d.now(ctx)
	if err != nil {
		return err
	}
	for entry, err := range d.store.Scan(ctx, store.Prefix([]byte{space, kindUndelivered})) {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStore, err)
		}
		at, id := placeIn(entry.Key)
		if !at.After(now) {
			continue // due as it is
		}
		_, err = d.update(ctx, id, func(e *Escalation, now time.Time) (*Escalation, error) {
			if !e.due() || e.Boot == "" {
				return nil, nil
			}
			if gone, err := d.fleet.Gone(ctx, e.Boot); !gone || err != nil {
				return nil, err
			}
			next := *e
			next.NextAttempt, next.Boot = now, ""
			return &next, nil
		})
		if err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrUnreadable) {
			return err
		}
	}
	return nil
}

// round begins attempts for what is due, and returns the time until the next is.
func (c *dispatcher) round(ctx context.Context, slots chan struct{}, attempts *sync.WaitGroup) (time.Duration, error) {
	for {
		deadline, err := c.escalations.expireDue(ctx)
		if err != nil {
			return 0, err
		}
		due, wait, err := c.due(ctx)
		if err != nil || len(due) == 0 {
			return min(wait, deadline), err
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

// due returns the index entries of the highest level with any due, or the time until one is.
func (c *dispatcher) due(ctx context.Context) (names [][]byte, wait time.Duration, err error) {
	now, err := c.escalations.now(ctx)
	if err != nil {
		return nil, 0, err
	}
	wait = c.o.Poll
	for l := Stop; l >= Pause; l-- {
		r := store.Prefix(undelivered(l))
		r.Limit = duePage
		for entry, err := range c.escalations.store.Scan(ctx, r) {
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

// attempt notifies, and records the outcome. started is before the lease's commit, so that a slow
// commit shortens the attempt and not the lease's margin.
func (c *dispatcher) attempt(ctx context.Context, started time.Time, leased *Escalation) {
	limited, cancel := context.WithDeadline(ctx, started.Add(c.o.Attempt))
	defer cancel()
	err := limited.Err()
	if err == nil {
		err = c.o.Notify(limited, *leased)
	}
	cut := err != nil && ctx.Err() != nil
	// The outcome is recorded even while the dispatcher ends.
	recording, done := context.WithTimeout(context.WithoutCancel(ctx), recordPatience)
	defer done()
	recorded, problem := c.settle(recording, leased, err, cut)
	switch {
	case problem != nil:
		c.o.OnError(fmt.Errorf("what came of telling of escalation %s is not recorded, so it may be told again: %w", leased.ID, problem))
	case recorded != nil && !cut:
		c.o.OnAttempt(*recorded, err)
	}
}

// take leases the escalation of an index entry: this dispatcher alone delivers it, until its NextAttempt. It returns
// nil if that is not to be delivered now, or another dispatcher was faster.
func (c *dispatcher) take(ctx context.Context, name []byte) (*Escalation, error) {
	d := c.escalations
	due, id := placeIn(name)
	leased, err := d.update(ctx, id, func(e *Escalation, now time.Time) (*Escalation, error) {
		if !e.due() || !e.NextAttempt.Equal(due) {
			return nil, nil
		}
		next := *e
		next.Attempts++
		next.NextAttempt = now.Add(2 * c.o.Attempt)
		next.Boot = d.fleet.Boot()
		return &next, nil
	})
	switch {
	case errors.Is(err, ErrUnreadable):
		c.o.OnError(err)
		return nil, c.postpone(ctx, name)
	case errors.Is(err, ErrNotFound), err == nil && leased == nil:
		// Another one has taken it or dealt with it. If the entry went with that, this deletes
		// nothing; if it did not, it would be due forever.
		return nil, c.commit(ctx, store.Write{Key: name, Delete: true})
	}
	return leased, err
}

// postpone defers an unreadable escalation, so that it stays reported and blocks nothing.
func (c *dispatcher) postpone(ctx context.Context, name []byte) error {
	now, err := c.escalations.now(ctx)
	if err != nil {
		return err
	}
	_, id := placeIn(name)
	later := appendPlace(name[:len(name)-placeSize:len(name)-placeSize], now.Add(longestWait), id)
	return c.commit(ctx, store.Write{Key: name, Delete: true}, store.Write{Key: later})
}

func (c *dispatcher) commit(ctx context.Context, batch ...store.Write) error {
	if _, err := c.escalations.store.Commit(ctx, batch...); err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	return nil
}

// settle records the outcome of an attempt. cut says that the dispatcher ended it. It returns nil
// if the outcome does not matter any more.
func (c *dispatcher) settle(ctx context.Context, leased *Escalation, outcome error, cut bool) (*Escalation, error) {
	settled, err := c.escalations.update(ctx, uuid.MustParse(leased.ID), func(e *Escalation, now time.Time) (*Escalation, error) {
		// A delivery counts whoever has the lease, but for another role that is asked by now; a failure
		// only from its holder.
		if !e.due() || e.Round != leased.Round || outcome != nil && !e.NextAttempt.Equal(leased.NextAttempt) {
			return nil, nil
		}
		next := *e
		if next.Boot = ""; cut {
			next.NextAttempt = now
		} else {
			conclude(&next, now, outcome)
		}
		return &next, nil
	})
	if errors.Is(err, ErrNotFound) {
		return nil, nil
	}
	return settled, err
}

func conclude(e *Escalation, now time.Time, outcome error) {
	if outcome == nil {
		e.State, e.Changed, e.NextAttempt, e.LastError = Notified, now, time.Time{}, ""
		return
	}
	e.LastError = shorten(outcome.Error(), maxError)
	if errors.Is(outcome, errRefused) {
		e.State, e.Changed, e.NextAttempt = Undeliverable, now, time.Time{}
		return
	}
	e.NextAttempt = now.Add(waitAfter(e.Attempts, outcome))
}

// waitAfter is the time between a failed attempt with this number and the next.
func waitAfter(attempts int, outcome error) time.Duration {
	wait := min(firstWait<<min(attempts-1, 16), longestWait)
	var later *laterError
	if errors.As(outcome, &later) {
		wait = max(wait, min(later.After, longestLater))
	}
	return wait
}
