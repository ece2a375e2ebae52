//go:build unix

package crash

import (
	"errors"
	"slices"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// expect notes what the ledger must tell of a call.
func (r *crashRun) expect(a harness.ProcAnswer, outcome string) error {
	checkpoint := a.Header.Get("Execution-Checkpoint")
	if checkpoint == "" {
		return errors.New("the answer names no checkpoint")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checkpoints[checkpoint] = outcome
	return nil
}

// verifyLedger holds that the ledger is as it was written, and says of every call what
// its caller was told: evidence and state are one commit.
func (r *crashRun) verifyLedger() {
	recorded := harness.LedgersOf(r.t, r.sites...)
	for checkpoint, want := range r.checkpoints {
		got := recorded.Outcomes[checkpoint]
		completed := 0
		for _, outcome := range got {
			if outcome == "completed" {
				completed++
			}
		}
		switch {
		case !recorded.Checkpoints[checkpoint]:
			r.t.Errorf("P2: the checkpoint %s is not in the ledger", checkpoint)
		case !slices.Contains(got, want) || want != "completed" && completed > 0 || completed > 1:
			r.t.Errorf("of %s the ledger says %q, its caller has seen %q", checkpoint, got, want)
		}
	}
	for checkpoint, got := range recorded.Outcomes {
		if len(got) == 0 {
			r.t.Errorf("no outcome is recorded of %s", checkpoint)
		}
	}
	r.t.Logf("%d entries in the ledger", recorded.Entries)
}
