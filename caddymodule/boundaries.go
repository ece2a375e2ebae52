package caddymodule

import (
	"container/heap"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/option"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
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
	// nextTurn is how much later each further gateway of a fleet looks at a workflow. That an end is recorded once does
	// not depend on it.
	nextTurn = 5 * time.Second
)

// Who says that a workflow has ended.
const (
	endedByPlan    = "plan"
	endedByIdle    = "idle"
	endedByRequest = "request"
)

func checkIdle(idle caddy.Duration) error {
	if err := option.CheckDuration(idle); err != nil {
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
	job
	e    *engine
	wake chan struct{}

	mu      sync.Mutex
	changed map[string]bool // workflows in which something was recorded
	dropped atomic.Bool     // a workflow is not followed

	// Only the goroutine uses these: those that are followed, those of them that are to be read at some time, the
	// first one first, and the idle time that this was found with.
	open map[string]*openWorkflow
	due  dueWorkflows
	with time.Duration

	fleet   *fleet.Fleet // nil where one gateway has the store; only the goroutine uses these, too
	node    string
	members []store.Member // as they were last looked at
}

// openWorkflow is a workflow whose end is awaited.
type openWorkflow struct {
	wid     string
	last    time.Time // when something was recorded
	unread  bool      // something was recorded since it was read
	over    bool      // nobody waits for its end any more; it is known so that it is not read too often
	planned bool      // it may have a plan, which says when it ends
	either  bool      // that plan is only observed: it ends by time, too
	next    time.Time // it is not read before
	due     time.Time // when it is to be read
	place   int       // among those that are to be read; -1 if it is none
}

// dueWorkflows is a heap of workflows by the time when they are to be read.
type dueWorkflows []*openWorkflow

func (d dueWorkflows) Len() int           { return len(d) }
func (d dueWorkflows) Less(i, j int) bool { return d[i].due.Before(d[j].due) }
func (d dueWorkflows) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].place, d[j].place = i, j
}

func (d *dueWorkflows) Push(o any) {
	o.(*openWorkflow).place = len(*d)
	*d = append(*d, o.(*openWorkflow))
}

func (d *dueWorkflows) Pop() any {
	last := len(*d) - 1
	o := (*d)[last]
	(*d)[last], *d, o.place = nil, (*d)[:last], -1
	return o
}

// startBoundaries makes the watch. It begins with the first configuration.
func startBoundaries(e *engine) {
	w := &boundaryWatch{
		e: e, wake: make(chan struct{}, 1), changed: map[string]bool{}, open: map[string]*openWorkflow{},
	}
	if w.fleet = fleet.Of(e.calls.Store); w.fleet != nil {
		w.node = w.fleet.Self().Node
	}
	e.boundaries = w
	w.job = startJob(w.work().Run)
}

// placed takes an event of the ledger, of this or another gateway, and does not wait.
func (w *boundaryWatch) placed(e *ledger.Event) {
	if e.Workflow == "" {
		return
	}
	if w.idle() > 0 || w.e.calls.Plans.Has(e.Workflow) {
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

// work is the job of the watch.
func (w *boundaryWatch) work() fleet.Job {
	resumed := false
	look := func(ctx context.Context, left bool) (time.Duration, error) {
		if left {
			resumed = false
			w.whoIsThere(ctx)
		}
		resumed = resumed || w.resume(ctx)
		w.take()
		w.endDue(ctx, w.idle())
		return 0, nil
	}
	return fleet.Job{Fleet: w.fleet, Wake: w.wake, Every: openTick, Do: look}
}

// whoIsThere reads which gateways share the store.
func (w *boundaryWatch) whoIsThere(ctx context.Context) {
	if w.fleet == nil {
		return
	}
	if members, err := w.fleet.Members(ctx); err == nil {
		w.members = members
	}
}

// turn is how much later than the first this gateway looks at a workflow: the others have their turns at other
// workflows.
func (w *boundaryWatch) turn(wid string) time.Duration {
	if w.fleet == nil {
		return 0
	}
	hash := func(node string) uint64 {
		sum := sha256.Sum256([]byte(node + "\x00" + wid))
		return binary.BigEndian.Uint64(sum[:])
	}
	own, before := hash(w.node), 0
	for i := range w.members {
		if node := w.members[i].Node; node != w.node && hash(node) < own {
			before++
		}
	}
	return time.Duration(before) * nextTurn
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
		if planned := w.e.calls.Plans.Has(wid); w.open[wid] == nil && (planned || w.idle() > 0) {
			o := &openWorkflow{ // its entries say when something happened
				wid: wid, unread: true, planned: planned, place: -1, next: time.Now().Add(w.turn(wid)),
			}
			w.open[wid] = o
			w.schedule(o)
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
			o = &openWorkflow{wid: wid, place: -1}
			w.open[wid] = o
		}
		o.last, o.unread, o.over, o.planned = time.Now(), true, false, w.e.calls.Plans.Has(wid)
		w.schedule(o)
	}
	if w.dropped.Swap(false) {
		w.e.logger.Warn("some workflows are not followed until their ends: there are too many at a time", zap.Int("most", maxOpen))
	}
}

// schedule finds out when a workflow is to be read. It costs no look at the others.
func (w *boundaryWatch) schedule(o *openWorkflow) {
	turn := w.turn(o.wid)
	switch {
	case o.over, o.planned && o.unread:
		if o.due = o.next; turn > 0 && o.due.Before(o.last.Add(turn)) {
			o.due = o.last.Add(turn)
		}
	case (!o.planned || o.either) && w.with > 0:
		if o.due = o.last.Add(w.with + turn); o.due.Before(o.next) {
			o.due = o.next
		}
	default:
		if o.place >= 0 {
			heap.Remove(&w.due, o.place)
		}
		return
	}
	if o.place >= 0 {
		heap.Fix(&w.due, o.place)
	} else {
		heap.Push(&w.due, o)
	}
}

// endDue looks at the workflows that may have ended.
func (w *boundaryWatch) endDue(ctx context.Context, idle time.Duration) {
	if idle != w.with {
		w.with = idle
		for _, o := range w.open {
			w.schedule(o)
		}
	}
	for len(w.due) > 0 && ctx.Err() == nil {
		o, now := w.due[0], time.Now()
		if now.Before(o.due) {
			return
		}
		if o.over {
			heap.Remove(&w.due, o.place)
			delete(w.open, o.wid)
			continue
		}
		o.unread = false
		on, err := w.endOne(ctx, o.wid, o, idle)
		o.next = time.Now().Add(max(readEvery, 10*time.Since(now)))
		switch final := (*problem.Problem)(nil); {
		case errors.As(err, &final): // it is too large, and grows
			w.e.logger.Warn("the end of a workflow is not recorded", zap.String("workflow", o.wid), zap.String("reason", final.Detail))
			on = false
		case err != nil:
			if ctx.Err() == nil {
				w.e.logger.Warn("whether a workflow has ended cannot be recorded; it is tried again", zap.String("workflow", o.wid), zap.Error(err))
			}
			on, o.unread, o.next = true, true, time.Now().Add(retryEnd)
		}
		o.over = !on
		w.schedule(o)
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
	if since, err := policy.Evidence.OpenSince(ctx, wid); err != nil || since == 0 { // nobody waits for its end
		return false, err
	}
	end, found, err := all.End(ctx, wid)
	if err != nil || !found || end.Since == 0 { // nobody waits for its end
		return false, err
	}
	now, err := w.e.calls.Store.Now(ctx)
	if err != nil {
		return false, err
	}
	o.planned, o.either = end.Planned, policy.Plans.Observed
	quiet, by := now.Sub(end.Last), endedByIdle
	if end.Planned && o.either && idle > 0 && end.Status == workflow.StatusRunning { // nothing has to be as planned
		end.Planned, end.Status = false, end.Abandoned
	}
	if o.last.IsZero() {
		o.last = time.Now().Add(-quiet)
	}
	switch {
	case end.Recorded == workflow.ByGateway, end.Recorded == workflow.ByAgent && !end.Planned: // somebody has said so
		_, err = w.e.calls.Store.Commit(ctx, policy.Evidence.Closed(wid, end.Since))
	case end.Status == workflow.StatusRunning: // what is open is recorded when it ends
		if !end.Planned { // nor a plan that is only observed
			o.last = time.Now()
		}
		return end.Planned || idle > 0, nil
	case !end.Planned && idle == 0: // nobody ends it
	case !end.Planned && quiet < idle:
		o.last = time.Now().Add(-quiet)
		return true, nil
	default:
		if end.Planned {
			by = endedByPlan
		}
		_, err = endWorkflow(ctx, w.e, policy, &end, nil, by)
	}
	if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) || errors.Is(err, evidence.ErrEndedMeanwhile) {
		o.unread = true
		return true, nil
	}
	return false, err
}

// endWorkflow records the end of a workflow, with an agent's own token of it, or nil.
func endWorkflow(ctx context.Context, e *engine, policy *tokenPolicy, end *evidence.End, stated *ect.Token, by string) (id string, err error) {
	now, err := e.calls.Store.Now(ctx)
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
		default: // what came with a call, and others can read, ends nothing
			if status, err := policy.Evidence.UseStatus(ctx, stated, errorUse); err != nil || status != evidence.Same {
				return "", errors.Join(err, &ect.Error{Code: ect.CodeReplayed})
			}
		}
	}
	batch, err := policy.Evidence.NewBatch(now, tokens, draft)
	if err != nil {
		return "", err
	}
	batch.Add(policy.Evidence.Closed(end.Workflow, end.Since))
	for _, t := range tokens {
		batch.Add(policy.Evidence.UseWrites(t, errorUse, time.Time{})...)
	}
	err = batch.Commit(ctx, e.calls.Store)
	if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
		for _, t := range tokens {
			if status, failed := policy.Evidence.UseStatus(ctx, t, errorUse); failed != nil || status == evidence.Other {
				return "", errors.Join(failed, &ect.Error{Code: ect.CodeReplayed}) // it was used for a call
			}
		}
		if err := store.AwaitGroup(ctx); err != nil {
			return "", err
		}
		return "", evidence.ErrEndedMeanwhile
	}
	if err != nil {
		return "", err
	}
	e.counts.add(workflowsEnded, string(end.Status), 1)
	e.logger.Info("a workflow has ended", zap.String("workflow", end.Workflow), zap.String("status", string(end.Status)), zap.String("by", by))
	e.emit(eventWorkflowEnded, map[string]any{"status": string(end.Status), "by": by})
	return draft.ID(), nil
}
