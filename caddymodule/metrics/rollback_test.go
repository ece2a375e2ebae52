package metrics_test

import (
	"testing"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
)

// Rollbacks and their steps are counted by the words of their statuses, and by no others.
func TestRollbacksAreCounted(t *testing.T) {
	set := metrics.NewSet()
	r := registered(t, metrics.NewCollector(set, "v1", "badger", func() *metrics.Snapshot { return nil }))
	before := len(series(t, r))
	for _, status := range []string{"completed", "completed", "partial", "another"} {
		set.Rollback(status)
	}
	for _, status := range []string{"failed", metrics.StepCancelled, "another"} {
		set.RollbackStep(status)
	}
	after := series(t, r)
	for name, want := range map[string]float64{
		`agent_guard_rollbacks_total{status="completed"}`: 2, `agent_guard_rollbacks_total{status="partial"}`: 1,
		`agent_guard_rollbacks_total{status="failed"}`: 0, `agent_guard_rollback_steps_total{status="failed"}`: 1,
		`agent_guard_rollback_steps_total{status="cancelled"}`: 1, `agent_guard_rollback_steps_total{status="completed"}`: 0,
	} {
		if got, there := after[name]; !there || got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	if len(after) != before {
		t.Errorf("%d series of %d", len(after), before)
	}
}
