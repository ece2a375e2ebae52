//go:build unix

package e2e

import (
	"slices"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// wantTree holds that the ledger, proved, shows the tree of cascade 4.4.2: the request, the
// rollback's start as its child, and below that a compensate or rollback_complete for each
// step and one rollback_complete for the whole.
func (c *crashRollback) wantTree(s *crashSaga) {
	c.t.Helper()
	var tokens []*ect.Unverified
	c.site.exported(c.t, func(token *ect.Unverified) {
		if token.Workflow() == s.wid {
			tokens = append(tokens, token)
		}
	})
	children := func(parent string, event ect.Event) (all []*ect.Unverified) {
		for _, token := range tokens {
			if token.Event() == event && slices.Contains(token.Parents(), parent) {
				all = append(all, token)
			}
		}
		return all
	}
	var starts []*ect.Unverified
	for _, token := range tokens {
		if token.Event() == ect.EventRollbackStart {
			starts = append(starts, token)
		}
	}
	if len(starts) != 1 {
		c.t.Fatalf("cascade 4.4.1: %d starts of one rollback", len(starts))
	}
	if got := len(children(starts[0].ID(), ect.EventCompensate)); got != 2 {
		c.t.Errorf("cascade 4.4.2: %d compensations, want 2", got)
	}
	if got := len(children(starts[0].ID(), ect.EventRollbackComplete)); got != 3 {
		c.t.Errorf("cascade 4.4.2: %d ends of restorations and of the whole, want 3", got)
	}
}
