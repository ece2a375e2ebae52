package evidence

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

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
	// Reason is that of the rollback, as the body has it. It may be empty.
	Reason string
}

// requestTime is how long a token that asks is used: a verifier refuses one that was made
// longer ago than ect.MaxAge, however long it lives, and clocks differ.
const requestTime = 10 * time.Minute

// RequestID is the id of the token with which a rollback asks an agent to undo what stands
// behind a checkpoint: for some time the same, so that the agent knows a repetition by it.
// Later ones it knows by the rollback's id and the idempotency key.
func (e *Evidence) RequestID(rollback, checkpoint string, now time.Time) string {
	span := now.Unix() / int64(requestTime/time.Second)
	return e.secretID("rollback request", rollback+" "+checkpoint+" "+strconv.FormatInt(span, 10))
}

// Request returns the token that asks, as it stands in a header field. It is recorded
// before it is returned, and a repetition gets the very same token, also after a restart:
// agents that know a token by its bytes, as this gateway does, refuse anything else under
// its id. Before a verifier would refuse it for its age there is another one, with an id of
// its own.
func (w *Witness) Request(ctx context.Context, r *Request) (string, error) {
	now, err := w.e.store.Now(ctx)
	if err != nil {
		return "", err
	}
	// One that was made in the span before may be young enough still.
	before, err := w.asked(ctx, r.Workflow, w.e.RequestID(r.Rollback, r.Checkpoint, now.Add(-requestTime)))
	if err != nil && !errors.Is(err, ledger.ErrPruned) {
		return "", err
	}
	if token, err := ect.ParseInsecure(before); err == nil && now.Sub(token.IssuedAt()) < requestTime { // the gateway's own
		return before, nil
	}
	id := w.e.RequestID(r.Rollback, r.Checkpoint, now)
	for {
		if raw, err := w.asked(ctx, r.Workflow, id); err != nil || raw != "" {
			return raw, err
		}
		token, err := w.request(now, r, id)
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

// asked is the token that was recorded under an id; empty where there is none.
func (w *Witness) asked(ctx context.Context, workflow, id string) (string, error) {
	entry, err := w.e.log.Lookup(ctx, workflow, id)
	if errors.Is(err, ledger.ErrWaiting) {
		entry, err = w.e.log.Wait(ctx, workflow, id)
	}
	if errors.Is(err, ledger.ErrNotFound) {
		return "", nil
	}
	return string(entry.Payload), err
}

func (w *Witness) request(now time.Time, r *Request, id string) (*ect.Token, error) {
	reason := r.Reason
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "")
	}
	return w.issuer.Issue(now, ect.Claims{
		Audience: []string{r.Audience}, ID: id, Workflow: r.Workflow, Life: ect.MaxAge,
		Action: string(ect.EventRollbackRequest), Parents: []string{r.Checkpoint},
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberRollbackID, rollbackURN(r.Rollback)).
			Text(ect.MemberCheckpointID, r.Checkpoint).
			Text(ect.MemberReason, cmp.Or(reason, "rollback")).
			Bool(ect.MemberCascade, true),
	})
}
