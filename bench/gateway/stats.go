package gateway

import (
	"encoding/json"
	"net/http"
	"runtime/metrics"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

func init() {
	caddy.RegisterModule(Admin{})
}

const statsPath = "/bench/stats"

// Stats is what a gateway's process has done.
type Stats struct {
	Goroutines int `json:"goroutines"`
	// Heap are the bytes of living and not yet swept objects, GCs the number of
	// collections.
	Heap int64 `json:"heap"`
	GCs  int64 `json:"gcs"`
	// Allocs are the allocations so far, small ones that share a block included, and
	// AllocBytes their bytes.
	Allocs     int64 `json:"allocs"`
	AllocBytes int64 `json:"alloc_bytes"`
	// Work is the processor time so far, as exact as the system has it; zero where it
	// does not say.
	Work time.Duration `json:"work"`
	// Opening is how long the store took to open.
	Opening time.Duration `json:"opening"`
	// Store are the store's counters; zero without one.
	Store badger.Stats `json:"store"`
	// Committing is how long groups of commits have taken so far, each until it was durable, one
	// after another; zero without a store.
	Committing time.Duration `json:"committing"`
}

// commitMetric is what the product itself says of its commits.
const commitMetric = "agent_guard_store_commit_duration_seconds"

// Admin serves Stats, and waits for the ledger, on Caddy's admin endpoint.
type Admin struct{}

// CaddyModule returns the Caddy module information.
func (Admin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.bench", New: func() caddy.Module { return new(Admin) }}
}

// Routes are the paths that are served.
func (Admin) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		{Pattern: statsPath, Handler: caddy.AdminHandlerFunc(serveStats)},
	}
}

func serveStats(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(readStats())
}

func readStats() Stats {
	samples := []metrics.Sample{
		{Name: "/sched/goroutines:goroutines"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/gc/cycles/total:gc-cycles"},
		{Name: "/gc/heap/allocs:objects"},
		{Name: "/gc/heap/tiny/allocs:objects"},
		{Name: "/gc/heap/allocs:bytes"},
	}
	metrics.Read(samples)
	s := Stats{
		Goroutines: int(samples[0].Value.Uint64()),
		Heap:       int64(samples[1].Value.Uint64()),
		GCs:        int64(samples[2].Value.Uint64()),
		Allocs:     int64(samples[3].Value.Uint64() + samples[4].Value.Uint64()),
		AllocBytes: int64(samples[5].Value.Uint64()),
		Work:       workSoFar(),
	}
	if o := opened.Load(); o != nil {
		s.Opening, s.Store = o.took, o.store.Stats()
		if seconds, err := metric(commitMetric); err == nil { // none before the first
			s.Committing = time.Duration(seconds * float64(time.Second))
		}
	}
	return s
}

var _ caddy.AdminRouter = Admin{}
