package table

import (
	"testing"
	"time"
)

// What neither this run nor idleness used, others did.
func TestOthers(t *testing.T) {
	begin := time.Now()
	before := work{at: begin, machine: time.Hour, ours: time.Minute}
	for _, c := range []struct {
		machine, ours time.Duration // used in 10 s on 2 cores
		want          float64
	}{
		{0, 0, 0},
		{20 * time.Second, 20 * time.Second, 0},
		{20 * time.Second, 10 * time.Second, 0.5},
		{20 * time.Second, 0, 1},
		{19 * time.Second, 20 * time.Second, 0}, // two clocks never agree
	} {
		after := work{at: begin.Add(10 * time.Second), machine: time.Hour + c.machine, ours: time.Minute + c.ours}
		if got := others(before, after, 2); got != c.want {
			t.Errorf("%v of which ours %v: %v, want %v", c.machine, c.ours, got, c.want)
		}
	}
	if got := others(work{}, work{}, 2); got != -1 {
		t.Errorf("a system that tells nothing: %v", got)
	}
}
