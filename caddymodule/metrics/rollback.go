package metrics

import (
	"slices"
	"sync/atomic"
	"time"
)

// RollbackReport is how the rollbacks are.
type RollbackReport struct {
	// Running is how many are not finished, OldestAge how long ago the oldest of them was
	// asked for; zero without one.
	Running   int
	OldestAge time.Duration
}

// StepCancelled is the status of a step whose call never ran: this is no rollback.
const StepCancelled = "cancelled"

// The words that are counted. They are those of the package rollback.
var (
	rollbackStatuses = []string{"completed", "partial", "escalated", "failed"}
	stepStatuses     = append(slices.Clone(rollbackStatuses), StepCancelled)
)

// rollbackCounts count rollbacks and their steps, by status.
type rollbackCounts struct {
	finished [4]atomic.Uint64
	steps    [5]atomic.Uint64
}

// Rollback counts a rollback that is finished.
func (s *Set) Rollback(status string) {
	if i := slices.Index(rollbackStatuses, status); i >= 0 {
		s.rollbacks.finished[i].Add(1)
	}
}

// RollbackStep counts a step that is done.
func (s *Set) RollbackStep(status string) {
	if i := slices.Index(stepStatuses, status); i >= 0 {
		s.rollbacks.steps[i].Add(1)
	}
}

func (c *rollbackCounts) collect(out sink) {
	for i, status := range rollbackStatuses {
		out.count(rollbacks, c.finished[i].Load(), status)
	}
	for i, status := range stepStatuses {
		out.count(rollbackSteps, c.steps[i].Load(), status)
	}
}
