package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

const (
	// maxOpen is how many workflows are followed until their ends.
	maxOpen = 100_000
	// openTick is how often workflows are looked at in which nothing has happened for long enough, or that
	// could not be read.
	openTick = time.Second
	// longestIdle is less than the time after which nobody waits for the end of a workflow any more.
	longestIdle = 30 * 24 * time.Hour
	// endTime bounds one reading of a workflow.
	endTime = 30 * time.Second
	// readEvery is the least time between two readings of one. A workflow that takes long to read is read
	// less often.
	readEvery = 100 * time.Millisecond
	// retryEnd is when one that could not be read is read again.
	retryEnd = 5 * time.Second
)

// Who says that a workflow has ended.
const (
	endedByPlan    = "plan"
	endedByIdle    = "idle"
	endedByRequest = "request"
)

func checkIdle(idle caddy.Duration) error {
	if err := checkDuration(idle); err != nil {
		return err
	}
	if d := time.Duration(idle); d != 0 && d < time.Second || d > longestIdle {
		return fmt.Errorf("%v is out of range; it must be between 1s and 720h", d)
	}
	return nil
}

// boundaryWatch records the ends of workflows, on its own goroutine: nothing that it does delays a call. Which
// ends are awaited is in the store, so that a restart finds them again (ADR 0117).
type boundaryWatch struct {
	e     *engine
	begin func() // starts the work
	stop  context.CancelFunc
	ended chan struct{}
	wake  chan struct{}

	mu      sync.Mutex
	changed map[string]bool // workflows in which something was recorded
	dropped atomic.Bool     // a workflow is not followed

	open map[string]*openWorkflow // only the goroutine uses it
}

// openWorkflow is a workflow whose end is awaited.
type openWorkflow struct {
	last    time.Time // when something was recorded
	unread  bool      // something was recorded since it was read
	planned bool      // it may have a plan, which says when it ends
	next    time.Time // it is not read before
}

// startBoundaries makes the watch. It begins with the first configuration.
func startBoundaries(e *engine) {
	w := &boundaryWatch{
		e: e, ended: make(chan struct{}), wake: make(chan struct{}, 1), changed: map[string]bool{},
		open: map[string]*openWorkflow{},
	}
	e.boundaries = w
	running, stop := context.WithCancel(context.Background())
	w.stop = stop
	begun := make(chan struct{})
	w.begin = sync.OnceFunc(func() { close(begun) })
	go func() {
		defer close(w.ended)
		select { // waits for the first configuration
		case <-begun:
			w.run(running)
		case <-running.Done():
		}
	}()
}

// placed takes an event of the ledger, on the sequencer's goroutine.
func (w *boundaryWatch) placed(e *ledger.Event) {
	if e.Workflow != "" && (w.idle() > 0 || w.e.plans.Has(e.Workflow)) {
		w.follow(e.Workflow)
	}
}

// follow has a workflow looked at. It never waits.
func (w *boundaryWatch) follow(wid string) {
	w.mu.Lock()
	if w.changed[wid] || len(w.changed) < maxOpen {
		w.changed[wid] = true
	} else {
		w.dropped.Store(true)
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// idle is the idle time after which a workflow ends by the latest configuration; 0 is never.
func (w *boundaryWatch) idle() time.Duration {
	if a := w.e.activeConfigs.latest(); a != nil {
		return time.Duration(a.WorkflowIdle)
	}
	return 0
}

func (w *boundaryWatch) run(ctx context.Context) {
	tick := time.NewTicker(openTick)
	defer tick.Stop()
	for resumed := false; ; {
		resumed = resumed || w.resume(ctx)
		select {
		case <-w.wake:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		w.take()
		w.end(ctx, w.idle())
	}
}

// resume follows the workflows whose ends were awaited when the last process ended.
func (w *boundaryWatch) resume(ctx context.Context) bool {
	policy := w.e.latestPolicy()
	if policy == nil {
		return false
	}
	open, err := policy.Evidence.OpenWorkflows(ctx, maxOpen)
	if err != nil && ctx.Err() == nil {
		w.e.logger.Warn("the workflows that have not ended cannot be read; those are followed in which something happens", zap.Error(err))
	}
	for _, wid := range open {
		if planned := w.e.plans.Has(wid); w.open[wid] == nil && (planned || w.idle() > 0) {
			w.open[wid] = &openWorkflow{unread: true, planned: planned} // its entries say when something happened
		}
	}
	return err == nil || errors.Is(err, ledger.ErrTampered)
}

// take follows the workflows in which something was recorded.
func (w *boundaryWatch) take() {
	w.mu.Lock()
	changed := w.changed
	w.changed = make(map[string]bool)
	w.mu.Unlock()
	for wid := range changed {
		o := w.open[wid]
		if o == nil && len(w.open) >= maxOpen {
			w.dropped.Store(true)
			continue
		}
		if o == nil {
			o = new(openWorkflow)
			w.open[wid] = o
		}
		o.last, o.unread, o.planned = time.Now(), true, w.e.plans.Has(wid)
	}
	if w.dropped.Swap(false) {
		w.e.logger.Warn("some workflows are not followed until their ends: there are too many at a time", zap.Int("most", maxOpen))
	}
}

// end looks at the workflows that may have ended.
func (w *boundaryWatch) end(ctx context.Context, idle time.Duration) {
	for wid, o := range w.open {
		now := time.Now()
		if ctx.Err() != nil {
			return
		}
		if due := o.planned && o.unread || !o.planned && idle > 0 && now.Sub(o.last) >= idle; !due || now.Before(o.next) {
			continue
		}
		o.unread = false
		on, err := w.endOne(ctx, wid, o, idle)
		o.next = time.Now().Add(max(readEvery, 10*time.Since(now)))
		switch final := (*api.Problem)(nil); {
		case errors.As(err, &final): // it is too large, and grows
			w.e.logger.Warn("the end of a workflow is not recorded", zap.String("workflow", wid), zap.String("reason", final.Detail))
			delete(w.open, wid)
		case errors.Is(err, ledger.ErrWaiting): // which the ledger reports, once for all of them
			o.unread, o.next = true, time.Now().Add(retryEnd)
		case err != nil && ctx.Err() == nil:
			w.e.logger.Warn("whether a workflow has ended cannot be recorded; it is tried again", zap.String("workflow", wid), zap.Error(err))
			o.unread, o.next = true, time.Now().Add(retryEnd)
		case err == nil && !on:
			delete(w.open, wid)
		}
	}
}

// endOne records the end of a workflow, if it has one. on says that it is still to be followed.
func (w *boundaryWatch) endOne(ctx context.Context, wid string, o *openWorkflow, idle time.Duration) (on bool, err error) {
	all := storeView{w.e}.Workflows()
	policy := w.e.latestPolicy()
	if all == nil || policy == nil {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	end, found, err := all.End(ctx, wid)
	if err != nil || !found || end.Since == 0 { // nobody waits for its end
		return false, err
	}
	now, err := w.e.store.Now(ctx)
	if err != nil {
		return false, err
	}
	o.planned = end.Planned
	quiet, by := now.Sub(end.Last), endedByIdle
	if o.last.IsZero() {
		o.last = time.Now().Add(-quiet)
	}
	switch {
	case end.Recorded == workflow.ByGateway, end.Recorded == workflow.ByAgent && !end.Planned: // somebody has said so
		_, err = w.e.store.Commit(ctx, policy.Evidence.Closed(wid, end.Since))
	case end.Status == workflow.StatusRunning: // what is open is recorded when it ends
		if !end.Planned {
			o.last = time.Now()
		}
		return end.Planned || idle > 0, nil
	case !end.Planned && idle == 0: // nobody ends it
		return false, nil
	case !end.Planned && quiet < idle:
		o.last = time.Now().Add(-quiet)
		return true, nil
	default:
		if end.Planned {
			by = endedByPlan
		}
		_, err = endWorkflow(ctx, w.e, policy, &end, nil, by)
	}
	if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) || errors.Is(err, api.ErrEndedMeanwhile) {
		o.unread = true
		return true, nil
	}
	return false, err
}

// endWorkflow records the end of a workflow, with an agent's own token of it, or nil.
func endWorkflow(ctx context.Context, e *engine, policy *tokenPolicy, end *api.End, stated *ect.Token, by string) (id string, err error) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return "", err
	}
	draft, err := policy.Events.WorkflowEnd(now, &end.WorkflowEnd)
	if err != nil {
		return "", err
	}
	var tokens []*ect.Token
	if stated != nil {
		switch status, err := policy.Evidence.LedgerStatus(ctx, stated); {
		case err != nil:
			return "", err
		case status == evidence.Other:
			return "", &ect.Error{Code: ect.CodeReplayed}
		case status == evidence.Unused:
			tokens = append(tokens, stated)
		}
	}
	batch, err := policy.Evidence.NewBatch(now, tokens, draft)
	if err != nil {
		return "", err
	}
	batch.Add(policy.Evidence.Closed(end.Workflow, end.Since))
	for _, t := range tokens {
		batch.Add(policy.Evidence.UseWrite(t, errorUse, time.Time{}))
	}
	err = batch.Commit(ctx, e.store)
	if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
		for _, t := range tokens {
			if status, failed := policy.Evidence.UseStatus(ctx, t, errorUse); failed != nil || status == evidence.Other {
				return "", errors.Join(failed, &ect.Error{Code: ect.CodeReplayed}) // it was used for a call
			}
		}
		if err := store.AwaitGroup(ctx); err != nil {
			return "", err
		}
		return "", api.ErrEndedMeanwhile
	}
	if err != nil {
		return "", err
	}
	if i := slices.Index(workflowStatuses, string(end.Status)); i >= 0 {
		e.counts.workflowsEnded[i].Add(1)
	}
	e.logger.Info("a workflow has ended", zap.String("workflow", end.Workflow), zap.String("status", string(end.Status)), zap.String("by", by))
	e.emit(eventWorkflowEnded, map[string]any{"status": string(end.Status), "by": by})
	return draft.ID(), nil
}
