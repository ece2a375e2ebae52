package caddymodule

import (
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
)

// countsPool has the counts of each store, by its path. Caddy makes a registry for every
// configuration, but counts outlive reloads: they last while a configuration names the store, or
// the store is open. Each configuration registers a collector that reads them.
var countsPool = caddy.NewUsagePool()

// acquireCounts returns the counts of the store at path. Each call needs a releaseCounts.
func acquireCounts(path string) *storeCounts {
	value, _, _ := countsPool.LoadOrNew(path, func() (caddy.Destructor, error) { // never fails
		return newStoreCounts(), nil
	})
	return value.(*storeCounts)
}

func releaseCounts(path string) {
	_, _ = countsPool.Delete(path) // its Destruct does not fail
}

// built is the version of this module if the build sets it with `-ldflags -X`, as xcaddy.Dockerfile does. Go
// itself records no version in a build from a directory.
var built string

// version returns the version of this module in the binary.
func version() string {
	if built != "" {
		return built
	}
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

// storeSnapshot is the state of an open store at one moment.
type storeSnapshot struct {
	// Opened is when it was opened.
	Opened time.Time
	// Healthy says whether the store responds.
	Healthy bool
	// BodyMemory is the shared memory for bodies that is in use, in bytes.
	BodyMemory int64
	// Doubts is nil if they could not be counted.
	Doubts *doubtReport
	// Report is nil without a StoreReporter.
	Report *admin.Report
	// Nodes is nil where one gateway has the store, and while the others are not known.
	Nodes *nodeReport
	// Ledger is nil if no configuration has an identity.
	Ledger *ledger.Head
	// Escalations is empty if they could not be counted.
	Escalations []escalationReport
	// Waiting is the age of the oldest pending escalation of each level; 0 without one.
	Waiting map[string]time.Duration
	// Unconfirmed is of how many escalations each participant has not confirmed what holds; nil if they
	// could not be counted.
	Unconfirmed map[string]int
	// Circuits are the breakers of the process.
	Circuits []breaker.Status
	// Cascades is nil until the store is open.
	Cascades *cascadeReport
	// Rollbacks is nil if rollbacks are not available.
	Rollbacks *rollbackReport
}

// escalationReport is the number of escalations of one level, in one state of their delivery, with one status.
type escalationReport struct {
	// Level, State and Status are fixed words.
	Level, State, Status string
	// N is their number.
	N int
}

type cascadeReport struct {
	// Open is the number of cascades that have not ended.
	Open int
	// Found counts them by pattern, and Dropped the events that were not looked at, since the store was
	// opened.
	Found   map[string]uint64
	Dropped uint64 // see Found
	// Exhausted has 1 or 0 for each resource, by guard and name.
	Exhausted map[[2]string]float64
	// Latencies are the p99 of each upstream and what is usual, by address.
	Latencies map[string]proxy.LatencyReport
}

type doubtReport struct {
	// N is their number.
	N int
	// OldestAge is how long ago the oldest began; zero if there is none.
	OldestAge time.Duration
}

// collector exposes storeCounts to the registry of one configuration: its own guards and
// actions, so that the configuration bounds the number of series, and the state of the
// store.
type collector struct {
	set            *storeCounts
	version, store string
	snapshot       func() *storeSnapshot

	mu      sync.Mutex
	guards  []*guard.Counts
	actions []*guard.ActionCounts
	pools   map[string]*bulkhead.Pool // by the guard's name
}

// newCollector makes a collector. snapshot is called at every collection and returns nil if
// the store is not open.
func newCollector(set *storeCounts, version, store string, snapshot func() *storeSnapshot) *collector {
	return &collector{set: set, version: version, store: store, snapshot: snapshot, pools: map[string]*bulkhead.Pool{}}
}

// Guard returns the counts of guards with this name, and exposes them from now on.
func (c *collector) Guard(name string) *guard.Counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.set.guard(name)
	if !slices.Contains(c.guards, g) {
		c.guards = append(c.guards, g)
	}
	return g
}

// Bulkhead returns the pool of guards with this name, and exposes it from now on. A new one has these
// settings.
func (c *collector) Bulkhead(name string, s bulkhead.Settings) *bulkhead.Pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.set.bulkhead(name, s)
	c.pools[name] = p
	return p
}

// Action returns the counts of this action of a guard, and exposes them from now on.
func (c *collector) Action(guard, name string) *guard.ActionCounts {
	g := c.Guard(guard)
	c.mu.Lock()
	defer c.mu.Unlock()
	a := g.Action(name)
	if !slices.Contains(c.actions, a) {
		c.actions = append(c.actions, a)
	}
	return a
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range families {
		ch <- f.desc
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	out := sink(ch)
	c.mu.Lock()
	guards, actions, pools := slices.Clone(c.guards), slices.Clone(c.actions), maps.Clone(c.pools)
	c.mu.Unlock()
	for _, g := range guards {
		name, passed, verified := g.Report()
		for reason, n := range passed {
			out.count(unguarded, n, name, reason.String())
		}
		for result, n := range verified {
			out.count(tokens, n, name, result)
		}
		calls, added := g.Times()
		for status, r := range calls {
			out.times(callSeconds, r, name, status)
		}
		out.times(overhead, added, name)
	}
	for _, a := range actions {
		out.action(a.Report())
	}
	for name, p := range pools {
		out.bulkhead(name, p.Status())
	}
	c.set.latency.Collect(ch)
	c.set.group.Collect(ch)
	for _, counts := range c.set.words {
		for _, one := range counts {
			one.Collect(ch)
		}
	}
	out.gauge(info, 1, c.version, c.store)
	out.snapshot(c.snapshot())
}

// sink receives the metrics of one collection.
type sink chan<- prometheus.Metric

func (s sink) send(f *Family, kind prometheus.ValueType, v float64, labels []string) {
	m, err := prometheus.NewConstMetric(f.desc, kind, v, labels...)
	if err != nil {
		// A name in the configuration that is not UTF-8 must not crash the process.
		m = prometheus.NewInvalidMetric(f.desc, err)
	}
	s <- m
}

func (s sink) count(f *Family, n uint64, labels ...string) {
	s.send(f, prometheus.CounterValue, float64(n), labels)
}

func (s sink) times(f *Family, r guard.TimesReport, labels ...string) {
	m, err := prometheus.NewConstHistogram(f.desc, r.Count, r.Sum, r.Buckets, labels...)
	if err != nil { // as in send
		m = prometheus.NewInvalidMetric(f.desc, err)
	}
	s <- m
}

func (s sink) gauge(f *Family, v float64, labels ...string) {
	s.send(f, prometheus.GaugeValue, v, labels)
}

func (s sink) action(a guard.ActionReport) {
	for verdict, n := range a.Executions {
		s.count(executions, n, a.Guard, a.Action, verdict.String())
	}
	s.gauge(running, float64(a.Running), a.Guard, a.Action)
	s.count(metricsReplays, a.Replays, a.Guard, a.Action)
	s.count(attaches, a.Attaches, a.Guard, a.Action)
	for evidence, n := range a.Recognized {
		s.count(recognized, n, a.Guard, a.Action, string(evidence))
	}
	s.count(cancels, a.CancelsKept, a.Guard, a.Action, "kept")
	s.count(cancels, a.CancelsPassed, a.Guard, a.Action, "passed_on")
	s.count(failOpen, a.FailOpen, a.Guard, a.Action)
	for result, n := range a.Probes {
		s.count(probes, n, a.Guard, a.Action, result.String())
	}
	for slug, n := range a.Problems {
		s.count(problems, n, a.Guard, a.Action, slug)
	}
}

func (s sink) bulkhead(guard string, now bulkhead.Status) {
	s.gauge(bulkheadPermits, float64(now.Settings.Total), guard)
	s.gauge(bulkheadInUse, float64(now.InUse), guard)
	s.gauge(bulkheadWaiting, float64(now.Waiting), guard)
	s.gauge(bulkheadWorkflows, float64(now.Workflows), guard)
	s.count(bulkheadGranted, now.Counts.Granted, guard)
	s.count(bulkheadWaits, now.Counts.Waits, guard)
	s.send(bulkheadWaited, prometheus.CounterValue, now.Counts.Waited.Seconds(), []string{guard})
	s.count(bulkheadLeft, now.Counts.Left, guard)
	s.send(bulkheadHeld, prometheus.CounterValue, now.Counts.Held.Seconds(), []string{guard})
	s.count(bulkheadRetries, now.Counts.Retries, guard)
	for reason, n := range now.Counts.Refused {
		s.count(bulkheadRefused, n, guard, bulkhead.Reason(reason).String())
	}
}

// database exposes the state of a store's database, if it has one.
func (s sink) database(d *admin.Database) {
	if d == nil {
		return
	}
	s.gauge(databaseLease, d.LeaseLeft)
	s.count(nodesRemoved, d.Removed)
	for state, n := range d.Connections {
		s.gauge(databaseConnections, float64(n), state)
	}
	s.count(databaseWaits, d.Waits)
	s.send(databaseWaited, prometheus.CounterValue, d.Waited, nil)
	if !d.Known {
		return
	}
	s.gauge(databaseRows, float64(d.Living), "living")
	s.gauge(databaseRows, float64(d.Dead), "dead")
	s.gauge(databaseOldest, d.OldestTransaction)
	s.gauge(databaseStandbys, float64(d.Standbys))
	if d.Lag != nil {
		s.gauge(databaseLag, *d.Lag)
	}
}

// snapshot exposes the state of the store. Unknown values are left out: zeros would mean
// that all is well.
func (s sink) snapshot(now *storeSnapshot) {
	if now == nil {
		s.gauge(storeHealthy, 0)
		return
	}
	healthy := 0.0
	if now.Healthy {
		healthy = 1
	}
	s.gauge(storeHealthy, healthy)
	s.gauge(bodyMemory, float64(now.BodyMemory))
	s.gauge(storeOpened, float64(now.Opened.UnixMilli())/1000)
	if now.Doubts != nil {
		s.gauge(inDoubt, float64(now.Doubts.N))
		s.gauge(inDoubtOldest, now.Doubts.OldestAge.Seconds())
	}
	if now.Report != nil {
		for part, bytes := range now.Report.Size {
			s.gauge(storeBytes, float64(bytes), part)
		}
		s.count(storeRefused, now.Report.Refused)
		s.database(now.Report.Database)
		if disk := now.Report.Disk; disk != nil {
			s.gauge(storeFree, float64(disk.Free))
			s.gauge(storeWatermark, float64(disk.Watermark()))
		}
	}
	if n := now.Nodes; n != nil {
		s.gauge(nodeInfo, 1, n.Name)
		s.gauge(nodesOpen, float64(n.Members))
		s.gauge(nodesDiffering, float64(n.Differing))
		s.gauge(nodesSeen, n.SeenAge.Seconds())
	}
	for _, r := range now.Escalations {
		s.gauge(escalations, float64(r.N), r.Level, r.State, r.Status)
	}
	for level, age := range now.Waiting {
		s.gauge(escalationOldest, age.Seconds(), level)
	}
	for participant, n := range now.Unconfirmed {
		s.gauge(holdsUnconfirmed, float64(n), participant)
	}
	for _, c := range now.Circuits {
		upstream, class := c.Key.Upstream, c.Key.Class
		s.gauge(circuitState, circuitStates[c.State], upstream, class)
		s.gauge(circuitErrors, c.ErrorRate, upstream, class)
		s.count(circuitOpenings, c.Openings, upstream, class)
		s.count(circuitRejected, c.Rejected, upstream, class)
	}
	if c := now.Cascades; c != nil {
		s.gauge(cascadesOpen, float64(c.Open))
		for pattern, n := range c.Found {
			s.count(cascadesFound, n, pattern)
		}
		s.count(cascadeDropped, c.Dropped)
		for of, is := range c.Exhausted {
			s.gauge(exhausted, is, of[0], of[1])
		}
		for upstream, l := range c.Latencies {
			if l.P99 > 0 {
				s.gauge(latencyP99, l.P99.Seconds(), upstream)
			}
			if l.Baseline > 0 {
				s.gauge(latencyBaseline, l.Baseline.Seconds(), upstream)
			}
		}
	}
	if r := now.Rollbacks; r != nil {
		s.gauge(rollbacksRunning, float64(r.Running))
		s.gauge(rollbackOldest, r.OldestAge.Seconds())
		s.gauge(rollbacksWaiting, float64(r.Waiting))
	}
	if l := now.Ledger; l != nil {
		s.gauge(ledgerEntries, float64(l.Size))
	}
}

// circuitStates are the states of breakers as the metric has them.
var circuitStates = map[breaker.State]float64{breaker.Closed: 0, breaker.HalfOpen: 1, breaker.Open: 2}

var _ prometheus.Collector = (*collector)(nil)

// Family is one metric family as it is exposed.
type Family struct {
	// Name is the full name.
	Name string
	// Type is counter, gauge or histogram.
	Type string
	// Help is the sentence that Prometheus shows.
	Help string
	// Labels are the names of its labels, in order.
	Labels []string

	desc *prometheus.Desc
}

// families are all that family has declared.
var families []*Family

func family(kind, name, help string, labels []string) *Family {
	name = "agent_guard_" + name
	f := &Family{Name: name, Type: kind, Help: help, Labels: labels, desc: prometheus.NewDesc(name, help, labels, nil)}
	families = append(families, f)
	return f
}

func counter(name, help string, labels ...string) *Family {
	return family("counter", name, help, labels)
}

func gauge(name, help string, labels ...string) *Family { return family("gauge", name, help, labels) }

func histogram(name, help string, labels ...string) *Family {
	return family("histogram", name, help, labels)
}

// The families. Label values are words of the configuration or of this program, so that
// their number is bounded. They never contain ids, paths or callers (P8).
var (
	executions     = counter("executions_total", "Executions that ended, by outcome.", "guard", "action", "outcome")
	running        = gauge("running", "Executions that are running now.", "guard", "action")
	metricsReplays = counter("replays_total", "Calls that were answered with a recorded result.", "guard", "action")
	recognized     = counter("recognized_total", "Calls that were recognised as retries, by the evidence.", "guard", "action", "evidence")
	cancels        = counter("cancellations_total", "Cancellations of running calls by notifications/cancelled: passed on to the upstream, or kept from it.", "guard", "action", "result")
	attaches       = counter("attaches_total", "Calls that were answered by an execution that was running already.", "guard", "action")
	problems       = counter("problems_total", "Calls that were answered with a problem of the gateway.", "guard", "action", "problem")
	failOpen       = counter("fail_open_total", "Calls that were forwarded unguarded because the store was unavailable.", "guard", "action")
	probes         = counter("probes_total", "Status probes, by result.", "guard", "action", "result")
	unguarded      = counter("unguarded_total", "Calls that are not guarded and were passed through.", "guard", "reason")

	callSeconds = histogram("call_duration_seconds",
		"Time of guarded calls, until the end of their answers, by what became of them.", "guard", "status")
	overhead = histogram("overhead_duration_seconds", "Time that the guard has added to executed calls: all until the outcome is recorded, without reading the request and the upstream's part.", "guard")

	tokens = counter("tokens_total", "Requests with Execution Context Tokens, by result of the verification.", "guard", "result")

	inDoubt        = gauge("in_doubt", "Executions that are in doubt now; counted up to 100000.")
	inDoubtOldest  = gauge("in_doubt_oldest_age_seconds", "Age of the oldest execution in doubt; 0 without one.")
	recoveredCount = counter("recovered_total", "Executions that an earlier process left open, by outcome.", "outcome")

	bodyMemory = gauge("body_memory_bytes", "Memory of the bodies of requests and answers, beyond the first 4 KiB of each.")

	storeHealthy   = gauge("store_healthy", "1 if the store is open and answers, else 0.")
	storeOpened    = gauge("store_opened_timestamp_seconds", "When the store was opened, in Unix time.")
	storeBytes     = gauge("store_bytes", "Bytes of the store on disk, by part.", "part")
	storeFree      = gauge("store_free_bytes", "Free bytes on the disk of the store.")
	storeWatermark = gauge("store_watermark", "0 if the disk has enough space, 1 if nothing new begins, 2 if nothing is recorded.")
	storeRefused   = counter("store_refused_total", "Commits that were refused for lack of disk space.")

	databaseLease = gauge("database_lease_seconds",
		"Seconds until the lease on the database ends unless it is renewed; negative once it has ended.")
	databaseConnections = gauge("database_connections",
		"Connections to the database for reading, by state: in_use, idle, and max, of how many there may be.", "state")
	databaseWaits    = counter("database_waits_total", "Reads that waited for a connection to the database, since the store was opened.")
	databaseWaited   = counter("database_wait_seconds_total", "Time that reads waited for a connection to the database.")
	databaseRows     = gauge("database_rows", "Rows of the store's entries, as the database estimates them: living, and dead ones that are not vacuumed yet.", "state")
	databaseOldest   = gauge("database_oldest_transaction_seconds", "Age of the oldest transaction in the database that the role may see.")
	databaseStandbys = gauge("database_standbys", "Standbys that are connected to the primary.")
	databaseLag      = gauge("database_standby_lag_seconds", "How far the last standby is behind; absent where the role may not see it.")

	nodeInfo       = gauge("node_info", "Always 1; its label is the name of this gateway among those that share the store.", "node")
	nodesOpen      = gauge("nodes", "Gateways that have the store open, with this one.")
	nodesDiffering = gauge("nodes_differing", "Other gateways over the store whose configuration differs from that of this one.")
	nodesSeen      = gauge("nodes_seen_age_seconds",
		"How long ago that gateway was heard of which has been silent the longest, by the database's clock.")
	nodesRemoved = counter("nodes_removed_total",
		"Gateways that this one has removed from the store, since they did not respond; since the store was opened.")

	commitSeconds = histogram("store_commit_duration_seconds", "Time that one group of batches took to become durable.")
	commitBatches = histogram("store_commit_batches", "Batches that became durable together, with one sync.")

	circuitState    = gauge("circuit_state", "State of the circuit breaker of an upstream: 0 closed, 1 half-open, 2 open.", "upstream", "class")
	circuitErrors   = gauge("circuit_error_ratio", "Share of failures in the breaker's window.", "upstream", "class")
	circuitOpenings = counter("circuit_openings_total", "Openings of the breaker since the process began.", "upstream", "class")
	circuitRejected = counter("circuit_rejected_total", "Calls that the breaker refused since the process began.", "upstream", "class")

	cascadesFound   = counter("cascades_total", "Failures that spread, by pattern, since the store was opened.", "pattern")
	cascadesOpen    = gauge("cascades_open", "Failures that spread, and have not ended.")
	cascadeDropped  = counter("cascade_events_dropped_total", "Events that were not looked at for cascades, since the store was opened.")
	exhausted       = gauge("exhausted", "1 while a resource is used up, of a guard or of the gateway; else 0.", "guard", "resource")
	latencyP99      = gauge("upstream_latency_seconds", "Time after which 99 of 100 good answers of an upstream began, lately.", "upstream")
	latencyBaseline = gauge("upstream_latency_usual_seconds", "What is usual for upstream_latency_seconds.", "upstream")

	bulkheadPermits   = gauge("bulkhead_permits", "Calls that may be at the upstream at a time.", "guard")
	bulkheadInUse     = gauge("bulkhead_in_use", "Calls that hold a permit of the bulkhead.", "guard")
	bulkheadWaiting   = gauge("bulkhead_waiting", "Calls that wait for a permit of the bulkhead.", "guard")
	bulkheadWorkflows = gauge("bulkhead_workflows", "Workflows that hold permits of the bulkhead or wait for them.", "guard")
	bulkheadGranted   = counter("bulkhead_granted_total", "Permits that the bulkhead has granted.", "guard")
	bulkheadWaits     = counter("bulkhead_waits_total", "Calls that had to wait for a permit of the bulkhead.", "guard")
	bulkheadWaited    = counter("bulkhead_wait_seconds_total", "Time that calls waited which then got a permit of the bulkhead.", "guard")
	bulkheadLeft      = counter("bulkhead_left_total", "Calls whose clients left while they waited for a permit of the bulkhead.", "guard")
	bulkheadHeld      = counter("bulkhead_held_seconds_total",
		"Time for which calls held permits of the bulkhead that they have returned.", "guard")
	bulkheadRetries = counter("bulkhead_retries_total", "Retries that were sent within the retry budgets of their workflows.", "guard")
	bulkheadRefused = counter("bulkhead_refused_total", "Calls that got no permit of the bulkhead, by reason.", "guard", "reason")

	ledgerEntries = gauge("ledger_entries", "Entries of the ledger's tree.")

	workflowsBegun = counter("workflows_begun_total", "Workflows whose start the gateway has recorded, since the process began.")
	workflowsEnded = counter("workflows_ended_total", "Workflows whose end the gateway has recorded, by status, since the process began.", "status")

	rollbacks        = counter("rollbacks_total", "Rollbacks that are finished, by status.", "status")
	rollbackSteps    = counter("rollback_steps_total", "Ended steps of rollbacks, by status.", "status")
	rollbacksRunning = gauge("rollbacks_running", "Rollbacks that are not finished.")
	rollbacksWaiting = gauge("rollbacks_waiting", "Errors because of which a rollback is to be asked for, or people, once it is their turn.")
	rollbackOldest   = gauge("rollback_oldest_age_seconds", "Age of the oldest unfinished rollback; 0 without one.")
	escalations      = gauge("escalations", "Escalations that are kept, by level, state of the delivery, and status of the decision; counted up to 100000.", "level", "state", "status")
	escalationOldest = gauge("escalation_oldest_age_seconds", "Age of the oldest escalation that nobody has decided; 0 without one.", "level")
	holdsUnconfirmed = gauge("holds_unconfirmed",
		"Escalations of which a participant has not confirmed what holds the workflow, by participant.", "participant")
	deliveries = counter("escalation_deliveries_total", "Attempts to deliver an escalation, by result.", "result")

	eventsDropped = counter("events_dropped_total", "Events that were dropped because handlers of events were too slow.")
	info          = gauge("info", "Always 1; its labels are the version of the plugin and the kind of store.", "version", "store")
)

// Families lists all families, in the order in which they are declared.
func Families() []*Family { return slices.Clone(families) }

type rollbackReport struct {
	// Running is how many rollbacks are not finished, and OldestAge how long ago the oldest
	// of them was requested; zero if there is none.
	Running   int
	OldestAge time.Duration
	// Waiting is how many errors wait for their rollback to be asked for.
	Waiting int
}

// stepCancelled is the status of a step whose call never ran.
const stepCancelled = "cancelled"

// counted has the values of the label of each family that counts what becomes of something in the store; "" is of a
// family without a label. Nothing else is counted.
var counted = map[*Family][]string{
	recoveredCount: {execution.InDoubt.String()},
	rollbacks:      {"completed", "partial", "escalated", "failed"},
	rollbackSteps:  {"completed", "partial", "escalated", "failed", stepCancelled},
	workflowsBegun: {""},
	workflowsEnded: {"success", "partial", "failed", "rolled_back", "escalated"},
	deliveries:     {"failed", "taken"},
	eventsDropped:  {""},
}

// storeCounts are all counts of one store. Guards and actions are looked up when a
// configuration is loaded, so that a request only adds and allocates nothing.
type storeCounts struct {
	mu      sync.Mutex
	guards  map[string]*guard.Counts
	pools   map[string]*bulkhead.Pool // by the guard's name
	latency prometheus.Histogram
	group   prometheus.Histogram

	words map[*Family]map[string]prometheus.Counter // as counted says

	commits    atomic.Uint64
	batches    atomic.Uint64
	commitTime atomic.Int64 // nanoseconds
}

func newStoreCounts() *storeCounts {
	words := map[*Family]map[string]prometheus.Counter{}
	for f, values := range counted {
		words[f] = map[string]prometheus.Counter{}
		vec := prometheus.NewCounterVec(prometheus.CounterOpts{Name: f.Name, Help: f.Help}, f.Labels)
		for _, value := range values {
			words[f][value] = vec.WithLabelValues([]string{value}[:len(f.Labels)]...)
		}
	}
	return &storeCounts{
		words: words, guards: map[string]*guard.Counts{}, pools: map[string]*bulkhead.Pool{},
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: commitSeconds.Name, Help: commitSeconds.Help,
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}),
		group: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: commitBatches.Name, Help: commitBatches.Help, Buckets: []float64{1, 2, 4, 8, 16, 32, 64, 128, 256},
		}),
	}
}

// Committed implements StoreObserver.
func (s *storeCounts) Committed(batches int, took time.Duration) {
	s.commits.Add(1)
	s.batches.Add(uint64(batches))
	s.commitTime.Add(int64(took))
	s.latency.Observe(took.Seconds())
	s.group.Observe(float64(batches))
}

// Destruct implements caddy.Destructor.
func (*storeCounts) Destruct() error { return nil }

// add counts n more of a family under one of its words.
func (s *storeCounts) add(f *Family, word string, n int) {
	if c := s.words[f][word]; c != nil {
		c.Add(float64(n))
	}
}

// bulkhead returns the pool of guards with this name.
func (s *storeCounts) bulkhead(name string, settings bulkhead.Settings) *bulkhead.Pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pools[name] == nil {
		s.pools[name] = bulkhead.New(settings)
	}
	return s.pools[name]
}

// guard returns the counts of guards with this name.
func (s *storeCounts) guard(name string) *guard.Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.guards[name] == nil {
		s.guards[name] = guard.NewCounts(name, api.Kinds())
	}
	return s.guards[name]
}
