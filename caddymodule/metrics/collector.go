package metrics

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// StoreReport is how a store is, as far as it can tell.
type StoreReport struct {
	// Bytes is what the store takes on disk, by part. Parts are words of the
	// store's own.
	Bytes map[string]uint64
	// Refused counts the commits that were refused for want of disk space.
	Refused uint64
}

// DiskReport is what a store knows of its disk.
type DiskReport struct {
	// Free is the free space in bytes.
	Free uint64
	// Watermark says what the store still takes.
	Watermark Watermark
}

// Watermark says what a store still takes, by the space that its disk has left (P4).
type Watermark uint8

// The watermarks.
const (
	DiskEnough Watermark = iota // everything
	DiskLow                     // outcomes of what is running; nothing new begins
	DiskFull                    // nothing
)

// Snapshot is what is known of an open store at one moment.
type Snapshot struct {
	// Opened is when it was opened.
	Opened time.Time
	// Healthy says whether it answers.
	Healthy bool
	// Doubts is nil where they could not be counted.
	Doubts *Doubts
	// Report is nil where the store does not tell.
	Report *StoreReport
	// Disk is nil where the store does not know.
	Disk *DiskReport
	// Ledger is nil where no configuration has an identity.
	Ledger *LedgerReport
	// Escalations are how many there are; none where they could not be counted.
	Escalations []EscalationReport
	// Circuits are the breakers of the process.
	Circuits []CircuitReport
	// Rollbacks is nil where nothing can be rolled back.
	Rollbacks *RollbackReport
}

// EscalationReport is how many escalations there are of one level in one state.
type EscalationReport struct {
	// Level and State are words of the program.
	Level, State string
	// N is their number.
	N int
}

// CircuitReport is how one circuit breaker is.
type CircuitReport struct {
	// Upstream is its address, Class read or write where they are apart, else empty.
	Upstream, Class string
	// State is 0 for closed, 1 for half-open, 2 for open.
	State int
	// ErrorRate is that of the window, 0 to 1.
	ErrorRate float64
	// Openings and Rejected count since the process began.
	Openings, Rejected uint64
}

// LedgerReport is how the ledger is.
type LedgerReport struct {
	// Entries is the size of the tree.
	Entries int64
	// Backlog is the number of events that wait for their place in it, and Age how
	// long the oldest of them has waited.
	Backlog int
	Age     time.Duration
	// Unsigned counts the events that went into the tree without a token, Retries the
	// moves that failed and were tried again, since the store was opened.
	Unsigned, Retries int64
}

// Doubts are the executions in doubt.
type Doubts struct {
	// N is their number.
	N int
	// OldestAge is how long ago the oldest began; zero without one.
	OldestAge time.Duration
}

// Collector shows a Set to the registry of one configuration: what its guards and
// actions count, and how the store is. What only other configurations name is not
// shown, so that the number of series is bounded by the configuration.
type Collector struct {
	set            *Set
	version, store string
	look           func() *Snapshot

	mu      sync.Mutex
	guards  []*Guard
	actions []*Action
}

// NewCollector makes a Collector of set. version and store are for agent_guard_info.
// look is asked at every collection; nil is no open store.
func NewCollector(set *Set, version, store string, look func() *Snapshot) *Collector {
	return &Collector{set: set, version: version, store: store, look: look}
}

// Guard returns what guards of this name count, and shows it from now on.
func (c *Collector) Guard(name string) *Guard {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.set.guard(name)
	if !slices.Contains(c.guards, g) {
		c.guards = append(c.guards, g)
	}
	return g
}

// Action returns what this action of a guard counts, and shows it from now on.
func (c *Collector) Action(guard, name string) *Action {
	g := c.Guard(guard)
	c.mu.Lock()
	defer c.mu.Unlock()
	a := g.action(name)
	if !slices.Contains(c.actions, a) {
		c.actions = append(c.actions, a)
	}
	return a
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range families {
		if f.desc != nil {
			ch <- f.desc
		}
	}
	c.set.latency.Describe(ch)
	c.set.group.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	out := sink(ch)
	c.mu.Lock()
	guards, actions := slices.Clone(c.guards), slices.Clone(c.actions)
	c.mu.Unlock()
	for _, g := range guards {
		for r, name := range reasonNames {
			out.count(unguarded, g.unguarded[r].Load(), g.name, name)
		}
		g.tokens.Range(func(result, n any) bool {
			out.count(tokens, n.(*atomic.Uint64).Load(), g.name, result.(string))
			return true
		})
	}
	for _, a := range actions {
		out.action(a)
	}
	for i, v := range []guard.Verdict{guard.InDoubt, guard.Released} {
		out.count(recovered, c.set.recovered[i].Load(), v.String())
	}
	c.set.rollbacks.collect(out)
	c.set.latency.Collect(ch)
	c.set.group.Collect(ch)
	for i, result := range deliveryNames {
		out.count(deliveries, c.set.deliveries[i].Load(), result)
	}
	out.count(eventsDropped, c.set.dropped.Load())
	out.gauge(info, 1, c.version, c.store)
	out.snapshot(c.look())
}

// sink takes the metrics of one collection.
type sink chan<- prometheus.Metric

func (s sink) send(f *Family, kind prometheus.ValueType, v float64, labels []string) {
	m, err := prometheus.NewConstMetric(f.desc, kind, v, labels...)
	if err != nil {
		// A name of the configuration that is no UTF-8 must not take the process down.
		m = prometheus.NewInvalidMetric(f.desc, err)
	}
	s <- m
}

func (s sink) count(f *Family, n uint64, labels ...string) {
	s.send(f, prometheus.CounterValue, float64(n), labels)
}

func (s sink) gauge(f *Family, v float64, labels ...string) {
	s.send(f, prometheus.GaugeValue, v, labels)
}

func (s sink) action(a *Action) {
	for i, v := range outcomes {
		s.count(executions, a.executed[i].Load(), a.guard, a.name, v.String())
	}
	s.gauge(running, float64(a.running.Load()), a.guard, a.name)
	s.count(replays, a.replays.Load(), a.guard, a.name)
	s.count(attaches, a.attaches.Load(), a.guard, a.name)
	s.count(failOpen, a.failOpen.Load(), a.guard, a.name)
	for i, result := range evidenceNames {
		s.count(probes, a.probes[i].Load(), a.guard, a.name, result)
	}
	for i, slug := range a.slugs {
		s.count(problems, a.problems[i].Load(), a.guard, a.name, slug)
	}
}

// snapshot shows how the store is. What is not known is not shown: a zero would say
// that all is well.
func (s sink) snapshot(now *Snapshot) {
	if now == nil {
		s.gauge(storeHealthy, 0)
		return
	}
	healthy := 0.0
	if now.Healthy {
		healthy = 1
	}
	s.gauge(storeHealthy, healthy)
	s.gauge(storeOpened, float64(now.Opened.UnixMilli())/1000)
	if now.Doubts != nil {
		s.gauge(inDoubt, float64(now.Doubts.N))
		s.gauge(inDoubtOldest, now.Doubts.OldestAge.Seconds())
	}
	if now.Report != nil {
		for part, bytes := range now.Report.Bytes {
			s.gauge(storeBytes, float64(bytes), part)
		}
		s.count(storeRefused, now.Report.Refused)
	}
	if disk := now.Disk; disk != nil {
		s.gauge(storeFree, float64(disk.Free))
		s.gauge(storeWatermark, float64(disk.Watermark))
	}
	for _, r := range now.Escalations {
		s.gauge(escalations, float64(r.N), r.Level, r.State)
	}
	for _, c := range now.Circuits {
		s.gauge(circuitState, float64(c.State), c.Upstream, c.Class)
		s.gauge(circuitErrors, c.ErrorRate, c.Upstream, c.Class)
		s.count(circuitOpenings, c.Openings, c.Upstream, c.Class)
		s.count(circuitRejected, c.Rejected, c.Upstream, c.Class)
	}
	if r := now.Rollbacks; r != nil {
		s.gauge(rollbacksRunning, float64(r.Running))
		s.gauge(rollbackOldest, r.OldestAge.Seconds())
	}
	if l := now.Ledger; l != nil {
		s.gauge(ledgerEntries, float64(l.Entries))
		s.gauge(ledgerBacklog, float64(l.Backlog))
		s.gauge(ledgerAge, l.Age.Seconds())
		s.count(ledgerUnsigned, uint64(l.Unsigned))
		s.count(ledgerRetries, uint64(l.Retries))
	}
}

var _ prometheus.Collector = (*Collector)(nil)
