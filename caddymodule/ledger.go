package caddymodule

import (
	"context"
	"crypto/sha256"
	"errors"
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// serveLedger answers the paths of the ledger, of workflows and of errors. It reports
// false for other paths.
func (h *Handler) serveLedger(w http.ResponseWriter, r *http.Request) bool {
	if h.app == nil || !graph.Handles(r) {
		return false
	}
	h.answered(w, r, h.askLedger(w, r))
	return true
}

// answered answers with what went wrong, if anything did.
func (h *Handler) answered(w http.ResponseWriter, r *http.Request, err error) {
	if err == nil || r.Context().Err() != nil {
		return
	}
	var p *problem.Problem
	if !errors.As(err, &p) {
		errors.As(storeClosed(err), &p)
	}
	if p.Kind() == problem.AuthenticationRequired {
		w.Header().Set("WWW-Authenticate", h.challenge())
	}
	h.refuseUnguarded(w, p)
}

func (h *Handler) askLedger(w http.ResponseWriter, r *http.Request) error {
	e, err := h.app.acquire()
	if err != nil {
		return err
	}
	defer func() { _ = e.release() }() // closing the store logs its own errors
	way, err := h.app.testimony()
	if err != nil {
		return err
	}
	if way == nil {
		http.Error(w, "This gateway has no identity, and so no ledger.", http.StatusNotFound)
		return nil
	}
	who, err := h.reader(e, way, r)
	if err != nil {
		return err
	}
	return way.graph(e).Serve(w, r, who)
}

// graph answers of what is recorded.
func (t *testimony) graph(e *engine) *graph.Server {
	return graph.New(graph.Options{
		Log: t.evidence.Log(), HeadKey: t.evidence.HeadKey(), Identities: []string{t.witness.Identity()}, Own: t.witness.Own,
		Verify: t.verifyErrors, Record: func(ctx context.Context, tokens []*ect.Token) error { return t.record(ctx, e, tokens) },
		Verified: t.verified, Undos: e.vault, Execution: e.standing, Waits: e.waits,
		Called: func(ctx context.Context, caller [16]byte) (bool, error) { return e.guard.Knows(ctx, caller) },
	})
}

// graphOnly is what the ledger itself can say of a graph.
func (t *testimony) graphOnly() *graph.Server {
	return graph.New(graph.Options{Log: t.evidence.Log(), Identities: []string{t.witness.Identity()}, Own: t.witness.Own})
}

// verified reports whether a token has a signature of the gateway's, whatever its age.
func (t *testimony) verified(ctx context.Context, raw string) error {
	token, err := ect.ParseInsecure(raw)
	if err != nil {
		return err
	}
	_, err = t.itself.Verify(ctx, raw, ect.Presentation{Now: token.IssuedAt()})
	return err
}

// standing tells how a guarded call stands; nothing where no record of it is kept.
func (e *engine) standing(ctx context.Context, key guard.Key) (state string, status int, err error) {
	found, err := e.guard.Look(ctx, key)
	if errors.Is(err, guard.ErrUnknown) {
		return "", 0, nil
	}
	if err != nil {
		return "", 0, err
	}
	return found.State().String(), found.Record.Status, nil
}

// reader is who asks, as callers are told apart. Tokens of a POST are what is told, and
// speak for themselves.
func (h *Handler) reader(e *engine, way *testimony, r *http.Request) (graph.Reader, error) {
	who, _, err := h.asker(e, way, r)
	return who, err
}

// asker is the reader, and the name that it has as a caller.
func (h *Handler) asker(e *engine, way *testimony, r *http.Request) (who graph.Reader, caller string, err error) {
	var tokens presented
	if r.Method != http.MethodPost {
		if tokens, err = h.verifyQuestion(way, r); err != nil {
			return who, "", err
		}
		if err := way.spend(&tokens, r); err != nil {
			return who, "", err
		}
	}
	if caller, err = h.caller(e.guard, r, &tokens); err != nil {
		return who, "", err
	}
	return graph.Reader{
		Issuer: tokens.issuer(), Caller: h.inEvidence(e.guard, caller, r.Host),
		Anonymous: caller == anonymous, Credential: caller != anonymous && !verifiedHere(caller),
	}, caller, nil
}

// verifyErrors verifies what agents tell of.
func (t *testimony) verifyErrors(r *http.Request, raws []string) ([]*ect.Token, error) {
	if t.verifier == nil {
		return nil, &ect.Error{Code: ect.CodeKeyID} // nobody is trusted
	}
	return t.verifier.VerifyAll(r.Context(), raws, ect.Presentation{Now: time.Now(), Peer: peer(r), DAG: t.evidence.GraphOf(raws[0])})
}

// admitTime is how long errors of agents wait while the ledger is far behind.
const admitTime = 5 * time.Second

// toldOf is what a token is used for that only tells of something.
var toldOf = evidence.Use(sha256.Sum256([]byte("agent_guard errors")))

// record takes tokens of agents into the ledger. They can be used for nothing else.
func (t *testimony) record(ctx context.Context, e *engine, tokens []*ect.Token) error {
	admitted, cancel := context.WithTimeout(ctx, admitTime)
	defer cancel()
	if err := t.evidence.Log().Admit(admitted); err != nil {
		return err
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return err
	}
	telling, err := t.evidence.Tell(now, tokens)
	if err != nil {
		return err
	}
	for _, token := range tokens {
		telling.Ride(t.evidence.Bound(token, toldOf, time.Time{}))
	}
	_, err = e.store.Commit(ctx, telling.Writes()...)
	err = telling.Done(err)
	if lost := (*store.Conflict)(nil); errors.As(err, &lost) {
		for _, token := range tokens {
			standing, failed := t.evidence.Recorded(ctx, token, toldOf)
			if failed != nil {
				return failed
			}
			if standing == evidence.Other {
				return &ect.Error{Code: ect.CodeReplayed} // it was used for a call
			}
		}
	}
	if err == nil {
		e.logger.Info("agents have told of errors", zap.Int("count", len(tokens)), zap.String("issuer", tokens[0].Issuer()))
	}
	return err
}
