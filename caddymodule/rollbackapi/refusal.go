package rollbackapi

import (
	"errors"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// maxDependants is how many dependants a problem names.
const maxDependants = 20

// problem says what went wrong in the words of problems.
func (q *question) problem(err error) error {
	if err == nil || q.r.Context().Err() != nil {
		return err
	}
	return Refusal(err)
}

// Refusal is an error of a rollback as a problem.
func Refusal(err error) *problem.Problem {
	var known *problem.Problem
	if errors.As(err, &known) {
		return known
	}
	var refusal *ect.Error
	if errors.As(err, &refusal) {
		p := problem.New(problem.ECTInvalid, refusal.Detail())
		p.Status, p.Reason, p.Cause = refusal.Status(), string(refusal.Code), refusal.Unwrap()
		return p
	}
	var conflict *rollback.ConflictError
	var depended *plan.DependedOnError
	var scope *plan.ScopeError
	var large *plan.TooManyError
	var cycle *plan.CycleError
	switch {
	case errors.Is(err, rollback.ErrNotInWorkflow):
		return notInWorkflow()
	case errors.Is(err, rollback.ErrUnnamed):
		p := problem.New(problem.ECTInvalid, "The token names neither the checkpoint, in par or in cascade.checkpoint_id, nor in par an error that follows from it, which AERR requires.")
		p.Status, p.Reason = (&ect.Error{Code: ect.CodeParents}).Status(), string(ect.CodeParents)
		return p
	case errors.Is(err, rollback.ErrMismatch):
		return problem.New(problem.RollbackMismatch, "What is recorded under this id is another rollback.")
	case errors.Is(err, rollback.ErrCheckpointUnknown):
		return problem.New(problem.CheckpointUnknown, "No checkpoint has this id.")
	case errors.Is(err, checkpoint.ErrTampered):
		p := problem.New(problem.CheckpointTampered, "What is kept of the checkpoint is not what was recorded.")
		p.Cause = err // an operator has to see it
		return p
	case errors.Is(err, checkpoint.ErrExpired):
		return problem.New(problem.CheckpointExpired, "The time for which it was kept is over.")
	case errors.As(err, &conflict):
		p := problem.New(problem.RollbackConflict, "The other rollback has a wider scope, or was asked for earlier.")
		p.ConflictingRollback = urn(conflict.Winner)
		return p
	case errors.As(err, &depended):
		p := problem.New(problem.CannotPrepare, "Completed actions that are not undone depend on what would be.")
		p.Reason, p.Dependants = "depended-on", depended.Dependants[:min(len(depended.Dependants), maxDependants)]
		return p
	case errors.As(err, &large):
		p := problem.New(problem.CannotPrepare, "The workflow is too large to be planned for.")
		p.Reason = "too-large"
		return p
	case errors.As(err, &cycle):
		p := problem.New(problem.CannotPrepare, "What is recorded of the workflow follows from itself.")
		p.Reason, p.Cause = "cycle", err // verified tokens cannot: an operator has to see it
		return p
	case errors.As(err, &scope):
		return problem.New(problem.CoordinatorRequired, "The scope full_workflow needs the authority of a coordinator.")
	case errors.Is(err, rollback.ErrInvalid):
		return problem.New(problem.ParameterInvalid, "The request for a rollback breaks a rule.")
	case errors.Is(err, rollback.ErrStopping):
		return problem.New(problem.ShuttingDown, "Nothing was begun.")
	}
	p := problem.New(problem.StoreUnavailable, "The gateway's store, or its ledger, does not answer. Nothing new was begun.")
	p.Cause = err
	return p
}

// notInWorkflow is the one answer for what is unknown and what is others' (C-6.1-c, P3).
func notInWorkflow() *problem.Problem {
	return problem.New(problem.NotInWorkflow, "Nothing of it is known for the identity that asks.")
}

func badParameter(detail string) error { return problem.New(problem.ParameterInvalid, detail) }

func urn(id string) string { return "urn:uuid:" + id }
