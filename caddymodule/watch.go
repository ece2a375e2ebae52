package caddymodule

import (
	"context"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// How an engine is looked at.
const (
	lookEvery    = time.Second     // for changes that are told as events
	doubtsEvery  = 5 * time.Second // at the doubts, at most
	lookPatience = 5 * time.Second
)

// watch is what an engine knows of its own state over time.
type watch struct {
	opened    time.Time
	recovered guard.Recovery // told of once
	stop      chan struct{}
	done      sync.WaitGroup

	mu     sync.Mutex
	looked time.Time // at the doubts
	doubts *metrics.Doubts
	// escalations are counted with them; nil where they could not be
	escalations []metrics.EscalationReport
	counting    chan struct{} // closed when the look that is under way is over; nil without one
}

// snapshot is the state of the engine at this moment; its doubts may be some seconds
// old, since counting them reads the store.
func (e *engine) snapshot() *metrics.Snapshot {
	now := &metrics.Snapshot{Opened: e.watch.opened, Healthy: e.healthy(), Doubts: e.doubts()}
	e.watch.mu.Lock()
	now.Escalations = e.watch.escalations // counted with the doubts
	e.watch.mu.Unlock()
	if reporter, ok := e.opener.(StoreReporter); ok {
		report := reporter.ReportStore(e.store)
		now.Report, now.Disk = &report, reporter.ReportDisk(e.store)
	}
	now.Ledger, now.Circuits, now.Rollbacks = e.archive.report(), e.circuitReport(), e.rollbackReport()
	return now
}

// healthy reports that the store answers.
func (e *engine) healthy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	_, err := e.store.Now(ctx)
	return err == nil
}

// doubts counts the executions in doubt, or returns nil where that cannot be done. A
// store that hangs is read by one look at a time, and for each scrape not for long.
func (e *engine) doubts() *metrics.Doubts {
	w := &e.watch
	w.mu.Lock()
	if w.doubts != nil && time.Since(w.looked) < doubtsEvery {
		defer w.mu.Unlock()
		return w.doubts
	}
	over := w.counting
	if over == nil {
		over = make(chan struct{})
		w.counting = over
		go e.lookAtDoubts(over)
	}
	w.mu.Unlock()
	late := time.NewTimer(lookPatience)
	defer late.Stop()
	select {
	case <-over:
	case <-late.C:
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.doubts
}

// lookAtDoubts notes the doubts, and that the look is over.
func (e *engine) lookAtDoubts(over chan<- struct{}) {
	found, escalations := e.countDoubts(), e.countEscalations()
	w := &e.watch
	w.mu.Lock()
	w.doubts, w.escalations, w.looked, w.counting = found, escalations, time.Now(), nil
	w.mu.Unlock()
	close(over)
}

func (e *engine) countDoubts() *metrics.Doubts {
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	n, oldest, err := e.guard.Doubts(ctx)
	if err != nil {
		return nil
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return nil
	}
	found := &metrics.Doubts{N: n}
	if n > 0 {
		found.OldestAge = max(0, now.Sub(oldest))
	}
	return found
}

// tellRecovered tells once what the last process had left open: at the opening itself
// nobody listens yet.
func (e *engine) tellRecovered() {
	e.watch.mu.Lock()
	found := e.watch.recovered
	e.watch.recovered = guard.Recovery{}
	e.watch.mu.Unlock()
	if found != (guard.Recovery{}) {
		e.emit(eventRecovered, map[string]any{"in_doubt": found.InDoubt, "released": found.Released})
	}
}

// startWatch begins to look for changes of the store's state.
func (e *engine) startWatch(found guard.Recovery) {
	e.watch.opened, e.watch.recovered, e.watch.stop = time.Now(), found, make(chan struct{})
	e.watch.done.Go(func() {
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		was := state{healthy: true}
		for {
			select {
			case <-e.watch.stop:
				return
			case <-tick.C:
				was = e.tellChanges(was)
			}
		}
	})
}

func (e *engine) stopWatch() {
	close(e.watch.stop)
	e.watch.done.Wait()
}

// state is what changes of are told.
type state struct {
	healthy   bool
	watermark metrics.Watermark
}

// tellChanges emits what is not as it was, and returns what is.
func (e *engine) tellChanges(was state) state {
	is := state{healthy: e.healthy()}
	if was.healthy && !is.healthy {
		e.emit(eventStoreUnhealthy, nil)
	}
	reporter, ok := e.opener.(StoreReporter)
	if !ok {
		return is
	}
	disk := reporter.ReportDisk(e.store)
	if disk == nil {
		is.watermark = was.watermark
		return is
	}
	is.watermark = disk.Watermark
	switch {
	case is.watermark > was.watermark:
		e.emit(eventDiskLow, map[string]any{"free_bytes": disk.Free, "watermark": int(is.watermark)})
	case is.watermark == metrics.DiskEnough && was.watermark != metrics.DiskEnough:
		e.emit(eventDiskRecovered, map[string]any{"free_bytes": disk.Free})
	}
	return is
}
