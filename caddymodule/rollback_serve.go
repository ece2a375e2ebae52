package caddymodule

import (
	"errors"
	"net/http"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// serveRollback answers the paths on which agents ask for rollbacks and look at them. It
// reports false for other paths. They are no calls: nothing is guarded there.
func (h *Handler) serveRollback(w http.ResponseWriter, r *http.Request) bool {
	if h.app == nil || !rollbackapi.Handles(r) {
		return false
	}
	if rollbackapi.Allowed(w, r) {
		h.answered(w, r, h.askRollback(w, r))
	}
	return true
}

func (h *Handler) askRollback(w http.ResponseWriter, r *http.Request) error {
	e, err := h.app.acquire()
	if err != nil {
		return err
	}
	defer func() { _ = e.release() }() // closing the store logs its own errors
	way, err := h.app.testimony()
	if err != nil {
		return err
	}
	c := e.rollbacks.coordinator()
	if way == nil || c == nil {
		http.Error(w, "This gateway has no identity, and so no checkpoints that could be rolled back.", http.StatusNotFound)
		return nil
	}
	o := h.app.rollbackOptions()
	return rollbackapi.New(rollbackapi.Options{
		Coordinator: c, Tokens: &rollbackTokens{e: e, way: way, keep: e.rollbacks.keep},
		Ask:   func(r *http.Request) (*rollbackapi.Asker, error) { return h.rollbackAsker(e, way, r) },
		Read:  func(r *http.Request) (graph.Reader, error) { return h.reader(e, way, r) },
		Limit: &e.rollbacks.limit, Rate: o.Rate, Lineage: plan.Lineage(o.Lineage), Coordinators: o.Coordinators,
		Wait: time.Duration(o.Wait), Waits: e.waits, Logger: h.app.ctx.Slogger(),
	}).Serve(w, r)
}

// rollbackOptions are those of the configuration, or the defaults.
func (a *App) rollbackOptions() Rollback {
	if a.Rollback != nil {
		return *a.Rollback
	}
	var o Rollback
	_ = o.provision() // nothing is wrong with the defaults
	return o
}

// rollbackAsker is who asks for a rollback: a verified token, and nothing else, is good for
// that (cascade 6.1). A certificate counts besides, as the token's verification has it.
func (h *Handler) rollbackAsker(e *engine, way *testimony, r *http.Request) (*rollbackapi.Asker, error) {
	if way.verifier == nil {
		p := problem.New(problem.ECTInvalid, "This gateway believes nobody's tokens, since no `trust` is configured: only operators can roll back here.")
		p.Reason = "untrusted"
		return nil, p
	}
	tokens, err := way.verify(r)
	if err == nil {
		// Who may ask for a rollback, its lineage says.
		err = way.checkTelling(r.Context(), &tokens, ect.EventRollbackRequest)
	}
	h.counts.Token(tokenResult(&tokens, err))
	if err != nil {
		if refusal := (*ect.Error)(nil); errors.As(err, &refusal) {
			return nil, err
		}
		return nil, refusedToken(err)
	}
	switch len(tokens.own) {
	case 0:
		caller, err := h.caller(e.guard, r, &tokens)
		if err != nil {
			return nil, err
		}
		if caller == anonymous {
			return nil, problem.New(problem.AuthenticationRequired, "Ask for a rollback with a signed token of the workflow.")
		}
		return nil, &ect.Error{Code: ect.CodeMissing}
	case 1:
		return &rollbackapi.Asker{Token: tokens.own[0], All: tokens.all, Late: tokens.late}, nil
	}
	p := problem.New(problem.ECTInvalid, "Several tokens ask at once; send the one that asks, and at most what led to it.")
	p.Reason = "several"
	return nil, p
}
