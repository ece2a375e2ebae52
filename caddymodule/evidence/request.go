package evidence

import (
	"context"
	"errors"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// Request is what a rollback of the gateway's asks of another agent.
type Request struct {
	// Rollback is the rollback's id, Checkpoint that of the call to be undone.
	Rollback, Checkpoint string
	// Workflow is the id of the workflow as WorkflowID gives it; it may be empty.
	Workflow string
	// Audience is who is asked.
	Audience string
}

// RequestID is the id of the token with which a rollback asks an agent to undo what stands
// behind a checkpoint: always the same, so that the agent knows a repetition by it.
func (e *Evidence) RequestID(rollback, checkpoint string) string {
	return e.secretID("rollback request", rollback+" "+checkpoint)
}

// Request returns the token that asks, as it stands in a header field. It is recorded
// before it is returned, and a repetition gets the very same token, also after a restart:
// agents that know a token by its bytes, as this gateway does, take nothing else for a
// repetition. It is good for the longest life that a token may have, as a rollback goes on
// for hours.
func (w *Witness) Request(ctx context.Context, r *Request) (string, error) {
	id := w.e.RequestID(r.Rollback, r.Checkpoint)
	for {
		entry, err := w.e.log.Lookup(ctx, r.Workflow, id)
		if errors.Is(err, ledger.ErrWaiting) {
			entry, err = w.e.log.Wait(ctx, r.Workflow, id)
		}
		if err == nil {
			return string(entry.Payload), nil
		}
		if !errors.Is(err, ledger.ErrNotFound) {
			return "", err
		}
		token, err := w.request(ctx, r, id)
		if err != nil {
			return "", err
		}
		switch err := w.e.Append(ctx, token.Expires(), []*ect.Token{token}); {
		case err == nil:
			return token.Raw(), nil
		case !errors.Is(err, ledger.ErrDuplicate): // else somebody has asked at the same time
			return "", err
		}
	}
}

func (w *Witness) request(ctx context.Context, r *Request, id string) (*ect.Token, error) {
	now, err := w.e.store.Now(ctx)
	if err != nil {
		return nil, err
	}
	return w.issuer.Issue(now, ect.Claims{
		Audience: []string{r.Audience}, ID: id, Workflow: r.Workflow, Life: ect.MaxLife,
		Action: string(ect.EventRollbackRequest), Parents: []string{r.Checkpoint},
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberRollbackID, r.Rollback).
			Text(ect.MemberCheckpointID, r.Checkpoint).
			Text(ect.MemberReason, "rollback").
			Bool(ect.MemberCascade, true),
	})
}
