package proxy

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
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

// C-3.4.1-c, C-3.4.1-d: answers that are slow against what is usual of the upstream are a spike, which is reported
// once, as is its end. What is usual outlives the transports of one configuration.
func TestSpikesAreReported(t *testing.T) {
	c, err := Open(Settings{}, []string{"a:1", "b:1"}, false)
	if err != nil {
		t.Fatal(err)
	}
	m, s := Join(), new(spikes)
	defer m.Leave()
	m.Listen(s)
	now := time.Unix(1_800_000_000, 0)
	answer := func(n int, took time.Duration) {
		for range n {
			now = now.Add(100 * time.Millisecond)
			m.pool.observe("a:1", now, took)
		}
	}
	answer(400, 110*time.Millisecond)
	next, err := Open(Settings{}, []string{"a:1"}, false) // a reload
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	defer next.Close()
	answer(400, 290*time.Millisecond) // below three times the baseline
	if len(s.heard) != 0 {
		t.Errorf("without a spike: %v", s.heard)
	}
	answer(400, 2*time.Second)
	if !slices.Equal(s.heard, []bool{true}) {
		t.Errorf("of a spike: %v", s.heard)
	}
	answer(1000, 110*time.Millisecond)
	if !slices.Equal(s.heard, []bool{true, false}) {
		t.Errorf("of its end: %v", s.heard)
	}
	if n := m.Answered()["a:1"]; n != 2200 {
		t.Errorf("%d answers are counted", n)
	}
}
