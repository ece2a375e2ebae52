package evidence

import (
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// RollbackAgents says what became of the agents behind the steps of a finished rollback, as
// its token tells: of each but the one behind the target, and which of all were not wholly
// rolled back.
func RollbackAgents(r *rollback.Rollback) (others []ect.Outcome, failed []string) { return agentsOf(r) }
