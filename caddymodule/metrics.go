package caddymodule

import (
	"errors"
	"runtime/debug"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// StoreObserver is told what a store does, as far as the store can tell.
type StoreObserver interface {
	// Committed says that batches became durable together, and how long that took.
	Committed(batches int, took time.Duration)
}

// ObservedOpener is what a StoreOpener implements whose stores tell an observer.
type ObservedOpener interface {
	// ObserveStore names who is told. It is called before OpenStore.
	ObserveStore(o StoreObserver)
}

// StoreReporter is what a StoreOpener implements whose stores can tell how they are.
type StoreReporter interface {
	// ReportStore tells of a store that OpenStore has returned. It is asked at every
	// scrape.
	ReportStore(st store.Store) metrics.StoreReport
	// ReportDisk tells of the disk of such a store, or returns nil where nothing is
	// known. It is asked every second, and must not wait.
	ReportDisk(st store.Store) *metrics.DiskReport
}

// countsPool holds what is counted over each store, by its path, for as long as a
// configuration names the store or the store is open. Counts go on over reloads.
var countsPool = caddy.NewUsagePool()

// pooledCounts is a Set in the pool.
type pooledCounts struct{ *metrics.Set }

// Destruct implements caddy.Destructor.
func (pooledCounts) Destruct() error { return nil }

// acquireCounts returns the counts over the store at path. Each call needs a release.
func acquireCounts(path string) *metrics.Set {
	value, _, _ := countsPool.LoadOrNew(path, func() (caddy.Destructor, error) { // never fails
		return pooledCounts{metrics.NewSet()}, nil
	})
	return value.(pooledCounts).Set
}

func releaseCounts(path string) {
	_, _ = countsPool.Delete(path) // its Destruct does not fail
}

// provisionMetrics takes the counts of the app's store and shows them to the registry
// of its configuration. Where that does not take them, guarding goes on all the same.
func (a *App) provisionMetrics() {
	a.counts, a.counting = acquireCounts(a.spec.path), true
	kind := "unknown"
	if mod, ok := a.spec.opener.(caddy.Module); ok {
		kind = mod.CaddyModule().ID.Name()
	}
	a.collector = metrics.NewCollector(a.counts, version(), kind, a.snapshot)
	registry := a.ctx.GetMetricsRegistry()
	if registry == nil {
		return
	}
	if err := registry.Register(a.collector); err != nil && !errors.As(err, new(prometheus.AlreadyRegisteredError)) {
		a.logger.Warn("the metrics of agent_guard cannot be shown", zap.Error(err))
	}
}

// version is that of this module in the binary.
func version() string {
	const path = "github.com/agent-guard/caddy-agent-guard"
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, mod := range append(build.Deps, &build.Main) {
		if mod.Path == path && mod.Version != "" {
			return mod.Version
		}
	}
	return "unknown"
}

// snapshot looks at the store, if it is open. It opens nothing.
//
// Any configuration may have opened it: after a reload that fails late, Caddy's admin
// endpoint shows the registry of the configuration that was given up.
func (a *App) snapshot() *metrics.Snapshot {
	e := engines.peek(a.spec.path)
	if e == nil {
		return nil
	}
	defer func() { _ = e.release() }() // closing the store logs its own errors
	return e.snapshot()
}

var errNotOpen = errors.New("agent_guard: the store is not open")

// peek returns the engine over the store at path with a reference of its own, or nil
// where it is not open.
func (p *enginePool) peek(path string) *engine {
	p.mu.Lock()
	defer p.mu.Unlock()
	value, _, err := p.pool.LoadOrNew(path, func() (caddy.Destructor, error) { return nil, errNotOpen })
	if err != nil {
		return nil
	}
	return value.(*engine)
}
