package caddymodule

import (
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbacks"
)

// rollbackLedger is the ledger as the coordinator of the engine's rollbacks needs it. It
// tells, and believes, as the latest configuration does; what it tells is kept for keep.
func (e *engine) rollbackLedger(keep time.Duration) *rollbacks.Ledger {
	return rollbacks.New(rollbacks.Options{Keep: keep, Voice: func() (rollbacks.Voice, bool) {
		way := e.latestWay()
		if way == nil {
			return rollbacks.Voice{}, false
		}
		return rollbacks.Voice{Evidence: way.evidence, Witness: way.witness, Verifier: way.verifier}, true
	}})
}
