// Package metrics counts what guards do and shows it to Prometheus.
//
// Caddy makes a registry for every configuration, so counts live apart from them: a
// Set belongs to a store and lasts as long as anything uses that store, and each
// configuration registers a Collector that reads it. The handles of a Set are looked
// up when a configuration is loaded; a request adds to them and allocates nothing.
package metrics

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// Set is all that is counted over one store. Make one with NewSet.
type Set struct {
	mu      sync.Mutex
	guards  map[string]*Guard
	latency prometheus.Histogram
	group   prometheus.Histogram

	recovered [2]atomic.Uint64 // in doubt, released
	dropped   atomic.Uint64
	rollbacks rollbackCounts

	deliveries [2]atomic.Uint64 // of escalations: failed, taken
}

// NewSet makes a set in which nothing is counted yet.
func NewSet() *Set {
	return &Set{
		guards: map[string]*Guard{},
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: nameCommitSeconds, Help: helpCommitSeconds,
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}),
		group: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: nameCommitBatches, Help: helpCommitBatches,
			Buckets: []float64{1, 2, 4, 8, 16, 32, 64, 128, 256},
		}),
	}
}

// Committed counts a group of batches that became durable together.
func (s *Set) Committed(batches int, took time.Duration) {
	s.latency.Observe(took.Seconds())
	s.group.Observe(float64(batches))
}

// Recovered counts what an earlier life of the process had left open.
func (s *Set) Recovered(r guard.Recovery) {
	s.recovered[0].Add(uint64(r.InDoubt))
	s.recovered[1].Add(uint64(r.Released))
}

// EventDropped counts an event that no handler was asked about.
func (s *Set) EventDropped() { s.dropped.Add(1) }

var deliveryNames = [2]string{"failed", "taken"}

// EscalationTold counts an attempt to tell somebody of an escalation.
func (s *Set) EscalationTold(taken bool) {
	i := 0
	if taken {
		i = 1
	}
	s.deliveries[i].Add(1)
}

// guard returns the counts of the guards of this name.
func (s *Set) guard(name string) *Guard {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.guards[name]
	if g == nil {
		g = &Guard{name: name}
		s.guards[name] = g
	}
	return g
}

// Reason says why a call is not guarded.
type Reason uint8

// The reasons.
const (
	Safe    Reason = iota // its method changes nothing
	Exempt                // the configuration says so
	Upgrade               // it leaves HTTP
	GRPC                  // it is a gRPC call, and its action is not unary
	reasons
)

var reasonNames = [reasons]string{"safe", "exempt", "upgrade", "grpc"}

// Guard counts for all guards of one name over one store. The zero value is ready.
type Guard struct {
	name      string
	unguarded [reasons]atomic.Uint64
	tokens    sync.Map // what came of verifying -> *atomic.Uint64

	mu      sync.Mutex
	actions []*Action
}

// Unguarded counts a call that was passed through.
func (g *Guard) Unguarded(r Reason) { g.unguarded[r].Add(1) }

// Tokens shows that tokens are verified, before any was.
func (g *Guard) Tokens() { g.tokens.LoadOrStore("verified", new(atomic.Uint64)) }

// Token counts the tokens of a request that were verified or refused. result is a word
// of this program: verified, unavailable, or the code of the refusal. Empty is nothing
// to count.
func (g *Guard) Token(result string) {
	if result == "" {
		return
	}
	n, ok := g.tokens.Load(result)
	if !ok {
		n, _ = g.tokens.LoadOrStore(result, new(atomic.Uint64))
	}
	n.(*atomic.Uint64).Add(1)
}

// action returns the counts of the action of this name.
func (g *Guard) action(name string) *Action {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, a := range g.actions {
		if a.name == name {
			return a
		}
	}
	a := &Action{guard: g.name, name: name}
	for _, k := range problem.Kinds() {
		a.slugs = append(a.slugs, k.Slug)
	}
	a.problems = make([]atomic.Uint64, len(a.slugs))
	g.actions = append(g.actions, a)
	return a
}
