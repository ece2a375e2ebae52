package fleet

import (
	"context"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Job is work in the background: a look for something to do, again and again. It ends with its context, when the store
// is closed, and when this member has been removed from its fleet.
type Job struct {
	// Do looks once. left says that a member may have been removed since the last look that succeeded; it is true at
	// the first one. wait is the longest time until the next look; zero is Every.
	Do func(ctx context.Context, left bool) (wait time.Duration, err error)
	// Every is the longest time between two looks. Zero waits until something else causes one.
	Every time.Duration
	// Retry is the pause after a look that has failed. Nothing but the end shortens it. Zero is one second.
	Retry time.Duration
	// Wake has a signal when there may be something to do.
	Wake <-chan struct{}
	// News returns a channel that is closed when there may be something to do. It is called before each look.
	News func() <-chan struct{}
	// Fleet causes a look whenever a member has been removed; nil for none.
	Fleet *Fleet
	// Failed gets the error of a look, unless the job ends with it; nil drops it.
	Failed func(err error)
}

// Every is a job that does something every interval, first when one is over.
func Every(interval time.Duration, do func(ctx context.Context)) Job {
	return Job{Every: interval, Do: func(ctx context.Context, first bool) (time.Duration, error) {
		if !first {
			do(ctx)
		}
		return 0, nil
	}}
}

// Start runs the job on a goroutine of its own. stop ends it, and waits until it has ended.
func (j Job) Start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		j.Run(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// Run runs the job until it ends.
func (j Job) Run(ctx context.Context) {
	members, left := j.Fleet.Left(), true
	for {
		wake, news := j.Wake, (<-chan struct{})(nil)
		if j.News != nil {
			news = j.News() // before the look, so that nothing is missed
		}
		wait, err := j.Do(ctx, left)
		switch {
		case ctx.Err() != nil, errors.Is(err, store.ErrClosed), errors.Is(err, store.ErrUnhealthy):
			return
		case err != nil:
			if j.Failed != nil {
				j.Failed(err)
			}
			wake, news = nil, nil
			if wait = j.Retry; wait == 0 {
				wait = time.Second
			}
		default:
			left = false
			if wait == 0 {
				wait = j.Every
			}
		}
		if !j.await(ctx, wait, wake, news, members) {
			return
		}
		select {
		case <-members:
			if j.Fleet.out(ctx) {
				return
			}
			members, left = j.Fleet.Left(), true
		default:
		}
	}
}

// await waits until the next look is due; it is false if there is none.
func (j Job) await(ctx context.Context, wait time.Duration, causes ...<-chan struct{}) bool {
	var over <-chan time.Time
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-over:
	case <-causes[0]:
	case <-causes[1]:
	case <-causes[2]:
	case <-ctx.Done():
		return false
	}
	return true
}
