package rollback

import (
	"testing"
	"time"
)

// What goes on is counted, with the time since which the oldest of it does; what has ended is not.
func TestUnfinishedRollbacksAreCounted(t *testing.T) {
	begun := time.Unix(1_700_000_000, 0)
	c := &Coordinator{runs: map[name]*run{}}
	if n, _ := c.Unfinished(); n != 0 {
		t.Errorf("%d of none", n)
	}
	for i := range 3 {
		head := Rollback{State: Executing, Asked: begun.Add(time.Duration(i) * time.Minute)}
		head.Plan = new(Plan)
		if i == 2 { // a part, of one that was asked for elsewhere long before
			head.Precedence = precedence{ID: "whole", Asked: begun.Add(-time.Hour)}
		}
		r := newRun(name{byte(i)}, &head)
		if c.runs[r.name] = r; i == 0 {
			r.done.set()
		}
	}
	if n, oldest := c.Unfinished(); n != 2 || !oldest.Equal(begun.Add(time.Minute)) {
		t.Errorf("%d, the oldest since %v", n, oldest)
	}
}
