package stat_test

import (
	"slices"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/bench/stat"
)

func TestOf(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   stat.Spread
	}{
		{nil, stat.Spread{}},
		{[]float64{3}, stat.Spread{Median: 3, Low: 3, High: 3}},
		{[]float64{9, 1, 2}, stat.Spread{Median: 2, Low: 1, High: 9}},
		{[]float64{4, 1, 2, 100}, stat.Spread{Median: 3, Low: 1, High: 100}},
	} {
		before := slices.Clone(c.values)
		if got := stat.Of(c.values); got != c.want {
			t.Errorf("Of(%v) = %v, want %v", c.values, got, c.want)
		}
		if !slices.Equal(before, c.values) {
			t.Errorf("Of has reordered %v", before)
		}
	}
}

// The ratio is taken within each round: a machine that became slower in the middle
// of the run does not change it.
func TestRatiosArePairwise(t *testing.T) {
	reference := []float64{100, 100, 10, 10, 0}
	subject := []float64{50, 50, 5, 5, 7}
	got := stat.Of(stat.Ratios(subject, reference))
	if got != (stat.Spread{Median: 0.5, Low: 0.5, High: 0.5}) {
		t.Errorf("got %v", got)
	}
}

func TestPercentile(t *testing.T) {
	var all []time.Duration
	for i := range 200 {
		all = append(all, time.Duration(200-i)) // 200 ... 1
	}
	for p, want := range map[float64]time.Duration{0: 1, 50: 100, 99: 198, 99.9: 200, 100: 200} {
		if got := stat.Percentile(slices.Clone(all), p); got != want {
			t.Errorf("p%v is %d, want %d", p, got, want)
		}
	}
	if got := stat.Percentile(nil, 99); got != 0 {
		t.Errorf("of none: %v", got)
	}
}
