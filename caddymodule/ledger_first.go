package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// proofTime is how long a request waits until its tokens stand in the ledger's tree. The
// sequencer tries again meanwhile, with pauses that grow from 50 ms. It is that of the
// drafts' implementations.
const proofTime = 5 * time.Second

// reasonLedger is the reason of a 503 for tokens without a place in the ledger.
const reasonLedger = "ledger_unavailable"

// prove waits, at level L3, until the tokens that led to the call can be proven, and with
// them the checkpoint that tells of it, which an upstream may rely on as well. At other
// levels their commit is enough.
func (x *exchange) prove(ctx context.Context) error {
	s := &x.story
	if s.way == nil || !s.way.ledgerFirst || len(s.tokens.all) == 0 && s.forwarded == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, proofTime)
	defer cancel()
	err := s.way.evidence.Proven(ctx, s.tokens.all)
	if err == nil {
		err = s.way.evidence.ProvenID(ctx, s.call.Workflow, x.call.Checkpoint)
	}
	return err
}

// unproven ends a claimed call whose tokens have no place in the ledger: nothing was
// sent, so that its key is free again.
func (x *exchange) unproven(e *guard.Execution, why error) error {
	o := x.stillInDoubt(guard.Outcome{Verdict: guard.Released, Cause: guard.CauseNotSent})
	x.noted.outcome = o.Verdict
	unrecorded := x.settle(e, o, nil)
	x.settled(o, unrecorded)
	if unrecorded != nil {
		x.outcomeLost(unrecorded)
		return x.inDoubtAnswer(guard.CauseUnrecorded)
	}
	return x.refusedInDoubt(x.ledgerFailed(why))
}

// proveRetry holds, at level L3, that the tokens of a retry can be proven before it is
// answered from what is recorded.
func (x *exchange) proveRetry() error {
	s := &x.story
	if !s.way.ledgerFirst {
		return nil
	}
	ctx, cancel := context.WithTimeout(x.r.Context(), proofTime)
	defer cancel()
	err := s.way.evidence.Proven(ctx, s.tokens.all)
	if x.r.Context().Err() != nil {
		return x.gone()
	}
	if err != nil {
		return x.ledgerFailed(err)
	}
	return nil
}

func (x *exchange) ledgerFailed(why error) error {
	p := ledgerFailed(why)
	p.ExecutionID = x.call.Scope.ID
	return p
}

// ledgerFailed makes a problem of tokens that the ledger did not take in time (P4).
func ledgerFailed(why error) *problem.Problem {
	p := problem.New(problem.ECTUnavailable, "The ledger has not taken the token, and nothing goes on before it has.")
	p.Reason, p.Cause = reasonLedger, why
	return p
}

// enter takes the tokens of a request that is not guarded into the ledger, with what
// they are used for, before anybody relies on them (level L3). A use that no retry has
// again is recorded once nothing but the request is left to do: the advised retry after a
// 503 would else be refused, though nothing was sent (P4).
func (t *testimony) enter(r *http.Request, p *presented, use safeUse) error {
	ctx, cancel := context.WithTimeout(r.Context(), proofTime)
	defer cancel()
	var err error
	if use.once {
		if err = t.evidence.Enter(ctx, p.all, nil, use.Use); err == nil {
			err = t.evidence.Spend(ctx, p.own, use.Use)
		}
	} else {
		err = t.evidence.Enter(ctx, p.all, p.own, use.Use)
	}
	var refused *ect.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		return refusedToken(err)
	case r.Context().Err() != nil:
		return caddyhttp.Error(statusClientClosed, r.Context().Err())
	}
	return ledgerFailed(err)
}
