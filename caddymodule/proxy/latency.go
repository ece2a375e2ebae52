package proxy

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// maxLatencies bounds the upstreams whose latencies are watched. Those of an address that the
// configuration does not name come and go.
const maxLatencies = 1024

// latencies are those of the process's upstreams, by address (cascade 3.4.1).
type latencies struct {
	of atomic.Pointer[map[string]*answers] // replaced as a whole, so that reading takes no lock

	mu sync.Mutex // held while it is replaced
}

// answers are the good answers of an upstream: how long they took to begin, and how many they were.
type answers struct {
	cascade.Latency
	n atomic.Uint64
}

// observe takes the latency of an answer.
func (p *pool) observe(upstream string, now time.Time, took time.Duration) {
	l := p.latencies.get(upstream)
	if l == nil {
		return
	}
	l.n.Add(1)
	if turn := l.Observe(now, took); turn != cascade.Steady {
		if m := p.listener(); m != nil {
			m.hook.Slow(upstream, turn == cascade.Spiked)
		}
	}
}

func (s *latencies) get(upstream string) *answers {
	if all := s.of.Load(); all != nil {
		if l := (*all)[upstream]; l != nil {
			return l
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.all()
	if l := next[upstream]; l != nil {
		return l
	}
	if len(next) >= maxLatencies {
		return nil
	}
	l := new(answers)
	next[upstream] = l
	s.of.Store(&next)
	return l
}

// all is a copy of those that are there. mu is held.
func (s *latencies) all() map[string]*answers {
	next := map[string]*answers{}
	if all := s.of.Load(); all != nil {
		maps.Copy(next, *all)
	}
	return next
}

// LatencyReport is the latency of an upstream; zero where it is unknown.
type LatencyReport struct {
	// P99 is that of the present window, Baseline what is usual.
	P99, Baseline time.Duration
}

// LatencyReports returns the latencies of the upstreams, by address.
func (m *Member) LatencyReports() map[string]LatencyReport {
	all := map[string]LatencyReport{}
	if of := m.pool.latencies.of.Load(); of != nil {
		for upstream, l := range *of {
			all[upstream] = LatencyReport{l.P99(), l.Usual()}
		}
	}
	return all
}

// Answered returns how many good answers each upstream has begun, by address.
func (m *Member) Answered() map[string]uint64 {
	all := map[string]uint64{}
	if of := m.pool.latencies.of.Load(); of != nil {
		for upstream, l := range *of {
			all[upstream] = l.n.Load()
		}
	}
	return all
}

// keysOf are the keys of the breakers that stand before a downstream: an identity, or an address.
func (m *Member) keysOf(downstream string) (keys []breaker.Key) {
	for _, s := range m.pool.registry.Status() {
		if s.Key.Class != undoClass && (s.Key.Upstream == downstream || m.Downstream(s.Key.Upstream) == downstream) {
			keys = append(keys, s.Key)
		}
	}
	return keys
}

// ShareProbes has the breakers before a downstream probe as one, or each for itself again
// (breaker.Registry.ShareProbes), with those of other processes too.
func (m *Member) ShareProbes(downstream string, share bool) {
	m.pool.mu.Lock()
	if share {
		m.pool.shared[downstream] = true
	} else {
		delete(m.pool.shared, downstream)
	}
	m.pool.mu.Unlock()
	m.pool.registry.ShareProbes(share, m.keysOf(downstream)...)
}

// Trip opens the closed breakers before a downstream for a cooldown, and returns their upstreams.
func (m *Member) Trip(downstream string) (opened []string) {
	for _, key := range m.keysOf(downstream) {
		if b := m.pool.registry.Find(key); b != nil && b.Trip(breaker.ByCascade) {
			opened = append(opened, key.Upstream)
		}
	}
	return opened
}
