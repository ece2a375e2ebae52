package proxy

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// spikes hears of spikes and of their ends.
type spikes struct{ heard []bool }

func (s *spikes) Slow(_ string, is bool)        { s.heard = append(s.heard, is) }
func (s *spikes) Transition(breaker.Event)      {}
func (s *spikes) PermanentlyOpen(breaker.Event) {}
func (s *spikes) Dropped([]breaker.Status)      {}
func (s *spikes) Probe(context.Context, breaker.Key, time.Duration) (func(), time.Time, bool) {
	return nil, time.Time{}, true
}

// C-3.4.1-c, C-3.4.1-d: answers that are slow against what the last process knew of the upstream are a
// spike, which is reported once, as is its end.
func TestSpikesAreReported(t *testing.T) {
	c, err := Open(Settings{}, []string{"a:1", "b:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m, s := Join(), new(spikes)
	defer m.Leave()
	m.Listen(s)
	if m.RestoreLatency("gone:1", cascade.LatencyState{Baseline: time.Second}) {
		t.Error("an upstream of no transport is watched")
	}
	m.RestoreLatency("a:1", cascade.LatencyState{Baseline: 100 * time.Millisecond})
	now := time.Unix(1_800_000_000, 0)
	answers := func(upstream string, n int, took time.Duration) {
		for range n {
			now = now.Add(100 * time.Millisecond)
			m.pool.observe(upstream, now, took)
		}
	}
	answer := func(n int, took time.Duration) { answers("a:1", n, took) }
	answer(200, 110*time.Millisecond)
	answer(400, 290*time.Millisecond) // below three times the baseline
	if len(s.heard) != 0 {
		t.Errorf("without a spike: %v", s.heard)
	}
	answer(400, 2*time.Second)
	if !slices.Equal(s.heard, []bool{true}) {
		t.Errorf("of a spike: %v", s.heard)
	}
	m.RestoreLatency("a:1", cascade.LatencyState{}) // too late
	answer(1000, 110*time.Millisecond)
	if !slices.Equal(s.heard, []bool{true, false}) {
		t.Errorf("of its end: %v", s.heard)
	}
	if n := m.Answered()["a:1"]; n != 2000 {
		t.Errorf("%d answers are counted", n)
	}

	// What the last process knew counts for the first answers, which would be what is usual otherwise.
	s.heard = nil
	m.RestoreLatency("b:1", cascade.LatencyState{Baseline: 100 * time.Millisecond})
	answers("b:1", 250, 2*time.Second)
	if !slices.Equal(s.heard, []bool{true}) {
		t.Errorf("of a spike right after a restart: %v", s.heard)
	}
}
