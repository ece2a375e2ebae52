package caddymodule

import (
	"math"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// slowStore is how long the store's commits must take on average, over a look, to count as exhausted.
const slowStore = 500 * time.Millisecond

// commitTimes are how many commits a store has made, and how long they took together.
type commitTimes struct {
	n    uint64
	took time.Duration
}

// exhausted returns the resources that are used up now (cascade 3.4.1).
func (w *cascadeWatch) exhausted(a *App) map[cascade.Signal]bool {
	now := map[cascade.Signal]bool{}
	full := func(guard, resource string) {
		now[cascade.Signal{Kind: cascade.Full, Pool: guard, Resource: resource}] = true
	}
	refused := map[string]uint64{}
	for _, h := range a.guards.list() {
		if h.pool != nil {
			s := h.pool.Status()
			if float64(s.InUse) >= w.settings.full*float64(s.Settings.Total) {
				full(h.Name, "permits")
			}
			refused[h.Name] = s.Counts.Refused[bulkhead.QueueFull]
			if before, known := w.refused[h.Name]; known && refused[h.Name] > before {
				full(h.Name, "queue")
			}
		}
		if p := h.proxy.Load(); p != nil {
			if _, open, limit := p.Upstreams(); limit > 0 && float64(open) >= w.settings.full*float64(limit) {
				full(h.Name, "connections")
			}
		}
	}
	w.refused = refused
	if limit := debug.SetMemoryLimit(-1); limit > 0 && limit != math.MaxInt64 { // GOMEMLIMIT
		used := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		metrics.Read(used)
		if float64(used[0].Value.Uint64()-used[1].Value.Uint64()) >= w.settings.full*float64(limit) {
			full("", "memory")
		}
	}
	if reporter, ok := w.e.opener.(StoreReporter); ok {
		if disk := reporter.ReportDisk(w.e.store); disk != nil && disk.Watermark != DiskEnough {
			full("", "disk")
		}
	}
	commits := commitTimes{w.e.counts.commits.Load(), time.Duration(w.e.counts.commitTime.Load())}
	if n := commits.n - w.commits.n; n > 0 && (commits.took-w.commits.took)/time.Duration(n) >= slowStore {
		full("", "store")
	}
	w.commits = commits
	return now
}

// resources are the names of what belongs to no guard.
var resources = []string{"memory", "disk", "store"}

// report returns what is counted of cascades, for metrics.
func (w *cascadeWatch) report() *cascadeReport {
	r := &cascadeReport{
		Open: w.detector.Stats().Findings, Found: map[string]uint64{}, Dropped: w.dropped.Load(),
		Exhausted: map[[2]string]float64{}, Latencies: w.e.circuits.LatencyReports(),
	}
	for i, pattern := range cascadePatterns {
		r.Found[string(pattern)] = w.found[i].Load()
	}
	for _, name := range resources {
		r.Exhausted[[2]string{"", name}] = 0
	}
	for guard := range w.at().pools {
		for _, name := range []string{"permits", "queue", "connections"} {
			r.Exhausted[[2]string{guard, name}] = 0
		}
	}
	if full := w.full.Load(); full != nil {
		for s := range *full {
			r.Exhausted[[2]string{s.Pool, s.Resource}] = 1
		}
	}
	return r
}

// signal gives the detector what has begun and ended since the last look.
func (w *cascadeWatch) signal(now time.Time, full map[cascade.Signal]bool) {
	before := map[cascade.Signal]bool{}
	if last := w.full.Load(); last != nil {
		before = *last
	}
	w.full.Store(&full)
	for s := range full {
		if !before[s] {
			w.e.logger.Warn("a resource is exhausted", zap.String("resource", s.Resource), zap.String("guard", s.Pool))
			s.Active = true
			w.detector.Signal(now, s)
		}
	}
	for s := range before {
		if !full[s] {
			w.e.logger.Info("a resource is no longer exhausted", zap.String("resource", s.Resource), zap.String("guard", s.Pool))
			w.detector.Signal(now, s)
		}
	}
}
