// Package stat is the little statistics that a table of short rounds needs.
package stat

import (
	"math"
	"slices"
	"time"
)

// Spread sums a few measurements up: the middle one, and the outermost.
type Spread struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

// Of is the spread of values. Of none it is zero.
func Of(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	return Spread{Median: middle(sorted), Low: sorted[0], High: sorted[len(sorted)-1]}
}

// Median is the middle of values, or the mean of the two in the middle; 0 of none.
func Median(values []float64) float64 { return Of(values).Median }

func middle(sorted []float64) float64 {
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

// Ratios divides the subjects by their references, pair by pair. Pairs without a
// finite quotient are left out.
func Ratios(subjects, references []float64) []float64 {
	var all []float64
	for i := range min(len(subjects), len(references)) {
		q := subjects[i] / references[i]
		if !math.IsNaN(q) && !math.IsInf(q, 0) {
			all = append(all, q)
		}
	}
	return all
}

// Percentile is the smallest of values that at least p percent of them do not
// exceed (nearest rank); 0 of none. It sorts values.
func Percentile(values []time.Duration, p float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	rank := int(math.Ceil(p / 100 * float64(len(values))))
	return values[min(max(rank, 1), len(values))-1]
}
