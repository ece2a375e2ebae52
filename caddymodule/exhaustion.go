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

// readings are how much of each resource is used now (cascade 3.4.1).
func (w *cascadeWatch) readings(a *App) (all []cascade.Reading) {
	for _, h := range a.guards.list() {
		if h.pool != nil {
			s := h.pool.Status()
			all = append(all,
				cascade.Reading{Pool: h.Name, Resource: "permits", Used: float64(s.InUse), Limit: float64(s.Settings.Total)},
				cascade.Reading{Pool: h.Name, Resource: "queue", Refused: s.Counts.Refused[bulkhead.QueueFull]})
		}
		if p := h.proxy.Load(); p != nil {
			_, open, limit := p.Upstreams()
			all = append(all, cascade.Reading{Pool: h.Name, Resource: "connections", Used: float64(open), Limit: float64(limit)})
		}
	}
	if limit := debug.SetMemoryLimit(-1); limit > 0 && limit != math.MaxInt64 { // GOMEMLIMIT
		used := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		metrics.Read(used)
		all = append(all, cascade.Reading{Resource: "memory", Used: float64(used[0].Value.Uint64() - used[1].Value.Uint64()), Limit: float64(limit)})
	}
	if reporter, ok := w.e.opener.(StoreReporter); ok {
		disk := reporter.ReportDisk(w.e.store)
		all = append(all, cascade.Reading{Resource: "disk", Full: disk != nil && disk.Watermark != DiskEnough})
	}
	counts := w.e.counts
	return append(all, cascade.Reading{Resource: "store", Ops: counts.commits.Load(), Took: time.Duration(counts.commitTime.Load())})
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
	for _, s := range w.exhaustion.Exhausted() {
		r.Exhausted[[2]string{s.Pool, s.Resource}] = 1
	}
	return r
}

// exhausted gives the detector what has been exhausted since the readings before, and what is not any more.
func (w *cascadeWatch) exhausted(now time.Time, readings []cascade.Reading) {
	for _, s := range w.exhaustion.Update(w.settings.full, readings) {
		if s.Active {
			w.e.logger.Warn("a resource is exhausted", zap.String("resource", s.Resource), zap.String("guard", s.Pool))
		} else {
			w.e.logger.Info("a resource is no longer exhausted", zap.String("resource", s.Resource), zap.String("guard", s.Pool))
		}
		w.detector.Signal(now, s)
	}
}
