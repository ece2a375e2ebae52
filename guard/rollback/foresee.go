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
	if s.What != plan.Undo && s.What != plan.Escalate {
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
	if errors.Is(err, checkpoint.ErrTampered) {
		s.What, s.Reason = plan.Escalate, reasonTampered
	}
	if err != nil {
		return
	}
	switch cause, irreversible := undo.Irreversible(opened); {
	case cause == checkpoint.ReasonChanged:
		s.What, s.Reason = plan.Escalate, string(undo.ReasonChanged)
	case irreversible:
		s.What, s.Reason, s.Cause = plan.Escalate, string(undo.ReasonIrreversible), string(cause)
	case undo.Lacks(opened):
		s.What, s.Reason, s.Unknown = plan.Escalate, string(undo.ReasonUnfilled), true
	}
}
