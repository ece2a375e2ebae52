package load

import (
	"testing"
	"time"
)

// When a round is over, by its time and by the requests that it has made.
func TestOver(t *testing.T) {
	for _, c := range []struct {
		job     Job
		elapsed time.Duration
		number  int
		want    bool
	}{
		{Job{For: time.Second}, 0, 1, false},
		{Job{For: time.Second}, time.Second, 1, false},
		{Job{For: time.Second}, time.Second, 2, true},
		{Job{For: time.Second, Limit: 10}, 0, 10, false},
		{Job{For: time.Second, Limit: 10}, 0, 11, true},
		{Job{For: time.Second, Least: 10}, time.Second - 1, 11, false},
		{Job{For: time.Second, Least: 10}, time.Second, 10, false},
		{Job{For: time.Second, Least: 10}, time.Second, 11, true},
		{Job{For: time.Second, Least: 10}, overtime * time.Second, 10, true},
		{Job{For: time.Second, Least: 10, Limit: 5}, time.Second, 6, true},
	} {
		if got := c.job.over(c.elapsed, c.number); got != c.want {
			t.Errorf("%+v, request %d after %s: %t", c.job, c.number, c.elapsed, got)
		}
	}
}
