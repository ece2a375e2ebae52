package caddymodule

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// resealRetry is how long a pass that failed, on a full disk for instance, waits for
// the next attempt.
const resealRetry = time.Minute

// resealing is the engine's one job that moves values to the newest sealing key.
type resealing struct {
	wake  chan struct{} // a pass is wanted
	stop  context.CancelFunc
	ended chan struct{}
	last  atomic.Pointer[resealStatus]
}

// resealStatus tells how far a pass has come.
type resealStatus struct {
	// Key is the sealing key to which values are moved.
	Key uint32 `json:"key"`
	// Seen counts the values that were looked at, Resealed those that were sealed
	// anew, Damaged those that do not open.
	Seen     int `json:"seen"`
	Resealed int `json:"resealed"` // see Seen
	Damaged  int `json:"damaged"`  // see Seen
	// Left is what stands under older keys, as far as was looked.
	Left []keyLeft `json:"left"`
	// Started and Finished are its times; Finished is absent while it runs, and
	// where it failed.
	Started  time.Time `json:"started"`
	Finished time.Time `json:"finished,omitzero"` // see Started
	// Done says that everything was looked at.
	Done bool `json:"done"`
	// Err is why it stopped; it will be tried again.
	Err string `json:"error,omitempty"`
}

// keyLeft is what stands under an older key.
type keyLeft struct {
	// ID is the key's.
	ID uint32 `json:"id"`
	// Records could not be moved: damaged, or running on another node.
	Records int `json:"records"`
	// Results are pieces of answers, which are left to expire.
	Results int `json:"results"`
	// Until is when the last of it expires; absent where some of it does not.
	Until time.Time `json:"until,omitzero"`
}

// startResealing starts the job, and a pass where the store holds records under an
// older key, as after a crash in the middle of one.
func (e *engine) startResealing(ctx context.Context) {
	job := &e.resealing
	job.wake, job.ended = make(chan struct{}, 1), make(chan struct{})
	if uses, err := e.guard.KeysInUse(ctx); err == nil {
		ids := e.ring.KeyIDs()
		for _, use := range uses {
			if use.ID < ids[len(ids)-1] && use.Until.IsZero() {
				e.reseal()
			}
		}
	}
	ctx, job.stop = context.WithCancel(context.Background())
	go e.keepResealed(ctx)
}

// reseal asks for a pass. One that runs is finished first.
func (e *engine) reseal() {
	select {
	case e.resealing.wake <- struct{}{}:
	default:
	}
}

// end stops the job and waits until it has let go of the store.
func (r *resealing) end() {
	r.stop()
	<-r.ended
}

func (e *engine) keepResealed(ctx context.Context) {
	defer close(e.resealing.ended)
	var retry <-chan time.Time
	for {
		select {
		case <-e.resealing.wake:
		case <-retry:
		case <-ctx.Done():
			return
		}
		retry = nil
		if !e.resealOnce(ctx) {
			retry = time.After(resealRetry)
		}
	}
}

// resealOnce makes one pass. It reports false where another attempt may help.
func (e *engine) resealOnce(ctx context.Context) bool {
	ids := e.ring.KeyIDs()
	e.logger.Info("re-sealing started", zap.Uint32("key", ids[len(ids)-1]))
	err := e.resealArchive(ctx)
	if errors.Is(err, errSealedLedger) && !e.joined() {
		e.archive.unsealed.Store(true) // the configuration that opens it comes, and asks again
		return true
	}
	if err == nil { // also without an identity: what was made with one needs its key
		_, err = e.vault.Reseal(ctx)
	}
	if err == nil {
		err = e.resealRollbacks(ctx)
	}
	if err != nil && ctx.Err() == nil {
		e.logger.Warn("re-sealing the ledger, the checkpoints and the rollbacks failed", zap.Error(err))
		e.resealing.last.Store(&resealStatus{Key: ids[len(ids)-1], Left: []keyLeft{}, Started: time.Now(), Err: err.Error()})
		return errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrUnhealthy)
	}
	if err := e.keepCircuits(ctx); err != nil && ctx.Err() == nil {
		e.logger.Warn("the states of the circuit breakers stay under an older key", zap.Error(err))
	}
	if err := e.resealEscalations(ctx); err != nil && ctx.Err() == nil {
		e.logger.Warn("the escalations stay under an older key", zap.Error(err))
		e.resealing.last.Store(&resealStatus{Key: ids[len(ids)-1], Left: []keyLeft{}, Started: time.Now(), Err: err.Error()})
		return errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrUnhealthy)
	}
	p, err := e.guard.Reseal(ctx, func(p guard.ResealProgress) { e.resealing.last.Store(newResealStatus(p)) })
	status := newResealStatus(p)
	fields := []zap.Field{
		zap.Uint32("key", p.Key), zap.Int("seen", p.Seen), zap.Int("resealed", p.Resealed), zap.Int("damaged", p.Damaged),
	}
	if len(status.Left) > 0 {
		fields = append(fields, zap.Any("left", status.Left))
	}
	if err == nil {
		status.Done = true
		e.resealing.last.Store(status)
		e.logger.Info("re-sealing finished", append(fields, zap.Duration("took", p.Finished.Sub(p.Started)))...)
		return true
	}
	status.Err = err.Error()
	e.resealing.last.Store(status)
	if ctx.Err() != nil {
		return true
	}
	e.logger.Warn("re-sealing failed", append(fields, zap.Error(err))...)
	return errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrUnhealthy)
}

func newResealStatus(p guard.ResealProgress) *resealStatus {
	s := &resealStatus{
		Key: p.Key, Seen: p.Seen, Resealed: p.Resealed, Damaged: p.Damaged,
		Left: []keyLeft{}, Started: p.Started, Finished: p.Finished,
	}
	for id, left := range p.Left {
		s.Left = append(s.Left, keyLeft{ID: id, Records: left.Records, Results: left.Results, Until: left.Until})
	}
	slices.SortFunc(s.Left, func(a, b keyLeft) int { return cmp.Compare(a.ID, b.ID) })
	return s
}
