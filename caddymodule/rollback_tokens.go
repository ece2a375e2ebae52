package caddymodule

import (
	"context"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/graph"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// rollbackTokens are the tokens of a gateway for those who ask for rollbacks.
type rollbackTokens struct {
	e    *engine
	way  *testimony
	keep time.Duration // how long a rollback is kept
}

// Recorded implements rollbackapi.Tokens. Requests that change nothing record no use of
// their tokens, and upstreams get to see them: such a token asks for nothing any more.
func (t *rollbackTokens) Recorded(ctx context.Context, token *ect.Token, use evidence.Use) (evidence.Standing, error) {
	standing, err := t.way.evidence.Recorded(ctx, token, use)
	if err == nil && standing == evidence.Unused && t.way.evidence.Taken(token, use, time.Now()) == evidence.Other {
		standing = evidence.Other
	}
	return standing, err
}

// Enter implements rollbackapi.Tokens.
func (t *rollbackTokens) Enter(ctx context.Context, all []*ect.Token) error {
	ctx, cancel := context.WithTimeout(ctx, proofTime)
	defer cancel()
	err := t.way.evidence.Enter(ctx, all, nil, evidence.Use{})
	if refused := (*ect.Error)(nil); err == nil || errors.As(err, &refused) {
		return err
	}
	for _, failed := range []error{store.ErrFull, store.ErrUnhealthy, store.ErrClosed, store.ErrUnknown} {
		if errors.Is(err, failed) {
			return err // which is told as what it is: the token is well
		}
	}
	return ledgerFailed(err)
}

// Bound implements rollbackapi.Tokens. It is kept as long as the rollback is, so that the
// same token finds it, and can ask for no other.
func (t *rollbackTokens) Bound(ctx context.Context, token *ect.Token, use evidence.Use) (store.Write, error) {
	now, err := t.e.store.Now(ctx)
	return t.way.evidence.Bound(token, use, now.Add(t.keep)), err
}

// Bind implements rollbackapi.Tokens.
func (t *rollbackTokens) Bind(ctx context.Context, token *ect.Token, use evidence.Use) error {
	for {
		standing, err := t.way.evidence.Recorded(ctx, token, use)
		switch {
		case err != nil || standing == evidence.Same:
			return err
		case standing == evidence.Other:
			return &ect.Error{Code: ect.CodeReplayed}
		}
		bound, err := t.Bound(ctx, token, use)
		if err != nil {
			return err
		}
		_, err = t.e.store.Commit(ctx, bound)
		if lost := (*store.Conflict)(nil); !errors.As(err, &lost) {
			return err
		}
		select {
		case <-time.After(lostPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Event implements rollbackapi.Tokens.
func (t *rollbackTokens) Event(ctx context.Context, workflow, id string) (ect.Event, bool, error) {
	log := t.way.evidence.Log()
	entry, err := log.Lookup(ctx, workflow, id)
	if errors.Is(err, ledger.ErrWaiting) {
		entry, err = log.Wait(ctx, workflow, id)
	}
	switch {
	case errors.Is(err, ledger.ErrNotFound):
		return "", false, nil
	case errors.Is(err, ledger.ErrPruned):
		return "", true, nil
	case err != nil:
		return "", false, err
	case graph.NobodysWord(&entry):
		return "", true, nil
	}
	event, _ := ect.ParseEvent(entry.Action)
	return event, true, nil
}

// Mine implements rollbackapi.Tokens.
func (t *rollbackTokens) Mine(ctx context.Context, workflow, id string, who graph.Reader) (bool, error) {
	return t.way.graph(t.e).TakesPart(ctx, workflow, id, who)
}

// Raw implements rollbackapi.Tokens.
func (t *rollbackTokens) Raw(ctx context.Context, workflow, id string) (string, error) {
	entry, err := t.way.evidence.Log().Wait(ctx, workflow, id)
	if err != nil {
		return "", err
	}
	if entry.Unsigned {
		return "", ledger.ErrRefused
	}
	return string(entry.Payload), nil
}

// Result implements rollbackapi.Tokens.
func (t *rollbackTokens) Result(ctx context.Context, r *rollback.Rollback, request string, v ect.Vocabulary) (string, error) {
	now, err := t.e.store.Now(ctx)
	if err != nil {
		return "", err
	}
	token, err := t.way.witness.RollbackResult(now, r, request, v)
	if err != nil {
		return "", err
	}
	return token.Raw(), nil
}

var _ rollbackapi.Tokens = (*rollbackTokens)(nil)
