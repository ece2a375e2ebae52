package cascade

import (
	"math/bits"
	"sync"
	"time"
)

// Turn is what one call has changed.
type Turn uint8

const (
	// Steady is no change.
	Steady Turn = iota
	// Spiked is the begin of a spike.
	Spiked
	// Returned is its end.
	Returned
)

const (
	// factor is how many times its baseline the p99 must be (cascade 3.4.1).
	factor = 3
	// samples is the fewest calls in the window that say anything.
	samples = 200
	// floor is the lowest p99 that counts.
	floor = 250 * time.Millisecond
	// window is the shortest time that one p99 is about. It lasts until there are enough samples, but
	// for at most ten times as long.
	window = 30 * time.Second

	octave    = 8 // steps in which latencies double
	steps     = 40 * octave
	smoothing = 0.2 // share of a window in the baseline
	fewest    = 5   // slow calls that make a spike
	// A level that lasts for so long is no spike any more.
	accepted = time.Hour
)

// histogram counts calls by their latency, in steps of an eighth of an octave of microseconds.
type histogram struct {
	counts [steps]uint32
	total  int
}

func step(d time.Duration) int {
	us := uint64(max(d/time.Microsecond, 1))
	n := bits.Len64(us) - 1 // us is from 2^n
	return min(n*octave+int((us<<3>>n)&(octave-1)), steps-1)
}

// p99 is the upper end of the step in which it lies.
func (h *histogram) p99() time.Duration {
	left := h.total / 100
	for i := steps - 1; i >= 0; i-- {
		if left -= int(h.counts[i]); left < 0 {
			return time.Duration((uint64(octave+i%octave+1) << (i / octave)) >> 3 * uint64(time.Microsecond))
		}
	}
	return 0
}

// Latency finds sudden increases in the latency of one upstream address: a p99 above three times its
// moving average, which stands still meanwhile. A slow drift raises the average, and is no spike. The zero
// value is ready. Its methods may be called from any goroutine, and allocate nothing.
type Latency struct {
	mu          sync.Mutex
	usual       time.Duration // the moving average of the p99; 0 if unknown
	spiking     bool          // the p99 is above it, since then
	since       time.Time     // see spiking
	now, before histogram
	over        int // calls above the limit in both
	begun       time.Time
}

func (l *Latency) limit() time.Duration {
	return max(factor*l.usual, floor)
}

// Observe counts a call that has ended, or that is known to have taken so long already.
func (l *Latency) Observe(now time.Time, took time.Duration) Turn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.begun.IsZero() || now.Before(l.begun) {
		l.begun = now
	}
	turn := Steady
	if age := now.Sub(l.begun); age >= window && l.now.total >= samples || age >= 10*window {
		turn = l.close(now)
	}
	i := step(took)
	l.now.counts[i]++
	l.now.total++
	if l.usual == 0 || i <= step(l.limit()) {
		return turn
	}
	l.over++
	n := l.now.total + l.before.total
	if l.spiking || n < samples || l.over < fewest || 100*l.over <= n {
		return turn
	}
	l.spiking, l.since = true, now
	return Spiked
}

// close ends a window. A spike ends where the p99 is nearer to the baseline than to the limit.
func (l *Latency) close(now time.Time) Turn {
	turn := Steady
	p99, enough := l.now.p99(), l.now.total >= samples
	switch {
	case !l.spiking && enough && l.usual == 0:
		l.usual = p99
	case !l.spiking && enough:
		l.usual += time.Duration(smoothing * float64(p99-l.usual))
	case l.spiking && l.now.total >= samples/10 && l.now.total > 0:
		high := (1 + factor) / 2 * l.usual
		back := p99 <= max(high, floor)
		if lasts := now.Sub(l.since) >= accepted; back || lasts && enough {
			if !back {
				l.usual = p99
			}
			l.spiking, l.since = false, time.Time{}
			turn = Returned
		}
	}
	l.before = l.now
	l.now = histogram{}
	l.over = 0
	for _, c := range l.before.counts[step(l.limit())+1:] {
		l.over += int(c)
	}
	l.begun = now
	return turn
}

// Usual is the baseline: the moving average of the p99, or 0 until the first window has ended.
func (l *Latency) Usual() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usual
}

// P99 is the p99 of the last calls; 0 if there are too few.
func (l *Latency) P99() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.now.total < samples {
		if l.before.total < samples {
			return 0
		}
		return l.before.p99()
	}
	return l.now.p99()
}
