package cascade_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/cascade"
)

// upstream makes latencies of an upstream, and counts the turns.
type upstream struct {
	*cascade.Latency
	*rand.Rand
	now               time.Time
	spiked, returned  int
	spikedAt, turnsAt time.Time
}

func newUpstream(usual time.Duration) *upstream {
	return &upstream{Latency: cascade.LatencyOf(usual), Rand: rand.New(rand.NewPCG(3, 4)), now: start}
}

// serve answers calls for some time, 20 a second, with the given median.
func (u *upstream) serve(long, median time.Duration) {
	for end := u.now.Add(long); u.now.Before(end); u.now = u.now.Add(50 * time.Millisecond) {
		switch u.Observe(u.now, time.Duration(float64(median)*math.Exp(u.NormFloat64()*0.4))) {
		case cascade.Spiked:
			u.spiked++
			u.spikedAt = u.now
		case cascade.Returned:
			u.returned++
			u.turnsAt = u.now
		}
	}
}

// cascade 3.4.1: a sudden increase over three times the baseline is found within seconds, the baseline stands
// still meanwhile, and its end is found.
func TestLatencySpike(t *testing.T) {
	u := newUpstream(0)
	u.serve(10*time.Minute, 200*time.Millisecond)
	if u.spiked != 0 || u.Usual() < 300*time.Millisecond || u.Usual() > time.Second || u.P99() == 0 {
		t.Fatalf("%v %d", u.Usual(), u.spiked)
	}
	before := u.now
	u.serve(5*time.Second, 2*time.Second)
	baseline := u.Usual()
	u.serve(20*time.Minute, 2*time.Second)
	if u.spiked != 1 || u.spikedAt.Sub(before) > 5*time.Second || u.Usual() != baseline || u.returned != 0 {
		t.Fatalf("%v %d %s", u.Usual(), u.spiked, u.spikedAt.Sub(before))
	}
	before = u.now
	u.serve(10*time.Minute, 200*time.Millisecond)
	if u.returned != 1 || u.turnsAt.Sub(before) > 2*time.Minute || u.Spiking() || u.spiked != 1 {
		t.Fatalf("%v %d", u.Usual(), u.returned)
	}
}

// A slow drift is learned, a level that lasts for an hour too, and few slow calls, or all of few calls, say
// nothing.
func TestLatencyWithoutSpike(t *testing.T) {
	u := newUpstream(0)
	for median := 200 * time.Millisecond; median < 2*time.Second; median += median / 50 {
		u.serve(time.Minute, median)
	}
	if u.spiked != 0 || u.Usual() < 2*time.Second {
		t.Errorf("drift: %v %d", u.Usual(), u.spiked)
	}
	u.serve(2*time.Hour, 20*time.Second)
	if u.spiked != 1 || u.returned != 1 || u.Usual() < 20*time.Second {
		t.Errorf("new level: %v %d %d", u.Usual(), u.spiked, u.returned)
	}

	u = newUpstream(400 * time.Millisecond)
	for range 100 {
		if u.Observe(u.now, time.Minute) != cascade.Steady {
			t.Error("100 calls are too few")
		}
	}
	u = newUpstream(400 * time.Millisecond)
	u.serve(20*time.Second, 200*time.Millisecond)
	for range 4 {
		if u.Observe(u.now, time.Minute) != cascade.Steady {
			t.Error("four calls are too few")
		}
	}

	u = newUpstream(0)
	u.serve(5*time.Minute, time.Millisecond)
	u.serve(5*time.Minute, 10*time.Millisecond)
	if u.spiked != 0 {
		t.Error("below the floor")
	}
}

// A clock that steps back does no harm.
func TestLatencyAfterAStepOfTheClock(t *testing.T) {
	u := newUpstream(0)
	u.serve(10*time.Minute, 200*time.Millisecond)
	usual := u.Usual()
	u.serve(time.Minute, 2*time.Second)
	u.now = start
	u.serve(5*time.Minute, 200*time.Millisecond)
	if u.spiked != 1 || u.returned != 1 || u.Usual() < usual/2 || u.Usual() > 2*usual {
		t.Errorf("%v, before it %v; %d %d", u.Usual(), usual, u.spiked, u.returned)
	}
}

func TestLatencyAllocatesNothing(t *testing.T) {
	u := newUpstream(time.Second)
	if n := testing.AllocsPerRun(5000, func() {
		u.now = u.now.Add(20 * time.Millisecond)
		u.Observe(u.now, 900*time.Millisecond)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkLatency(b *testing.B) {
	l := cascade.LatencyOf(time.Second)
	now := start
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Millisecond)
		l.Observe(now, 900*time.Millisecond)
	}
}
