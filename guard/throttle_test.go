package guard

import (
	"testing"
	"time"
)

// What happens often is told of at once, then once in a while, with its number.
func TestStretch(t *testing.T) {
	var s throttle
	at := time.Unix(1_700_000_000, 0)
	for i, step := range []struct {
		after time.Duration
		want  uint64
	}{
		{0, 1}, {0, 0}, {reportEvery - 1, 0}, {1, 3}, {reportEvery, 1}, {time.Second, 0}, {reportEvery, 2},
		{-time.Hour, 1}, {time.Second, 0}, // the clock was set back
	} {
		at = at.Add(step.after)
		if got := s.due(at); got != step.want {
			t.Errorf("step %d: %d, want %d", i, got, step.want)
		}
	}
}
