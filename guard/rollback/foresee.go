package rollback

import (
	"context"
	"errors"

	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// foresee says of a step that would undo something whether that is known to be in vain: what
// came of its call may have left it for a person. What cannot be found out now is left to
// the step itself.
func (c *Coordinator) foresee(ctx context.Context, s *Step) {
	if s.What != plan.Undo {
		return
	}
	cp, err := c.o.Ledger.Checkpoint(ctx, s.Checkpoint)
	if err == nil && !cp.Own {
		s.What, s.Reason = plan.Escalate, reasonForeign
	}
	if err != nil || !cp.Own {
		return
	}
	opened, err := c.o.Vault.Open(ctx, cp.ID, checkpoint.Want{Sum: cp.Sum, Expires: cp.Expires})
	switch {
	case errors.Is(err, checkpoint.ErrTampered):
		s.What, s.Reason = plan.Escalate, reasonTampered
	case err == nil && opened.Result != nil && opened.Result.Reason != "":
		s.What, s.Reason = plan.Escalate, string(undo.ReasonIrreversible)
		if opened.Result.Reason == checkpoint.ReasonChanged {
			s.Reason = string(undo.ReasonChanged)
		}
	case err == nil && undo.Lacks(opened):
		s.What, s.Reason, s.Unknown = plan.Escalate, string(undo.ReasonUnfilled), true
	}
}
