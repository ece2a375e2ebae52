package evidence

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
)

// Circuit is a change of a circuit breaker, as evidence speaks of it (cascade 3.2.4).
type Circuit struct {
	// Event is ect.EventCircuitOpen, ect.EventCircuitHalfOpen or ect.EventCircuitClose.
	Event ect.Event
	// Downstream is the identity of the upstream, or its address where none is known.
	Downstream string
	// Workflow is that of the failure that opened it; it may be empty.
	Workflow string
	// Parents are the error that opened it, or its last opening; it may be empty.
	Parents []string
	// ErrorRate is that of the window when it opened, 0 to 1.
	ErrorRate float64
	// Window is how far back the rate looked.
	Window time.Duration
	// Cooldown is how long it is open; TotalCooldown the sum since it was closed.
	Cooldown, TotalCooldown time.Duration
	// Reason says why, in a word.
	Reason string
	// ErrorType is the type of the error that a call got; it may be empty.
	ErrorType string
}

// Circuit drafts the token of a change (cascade Figures 4 and 5).
func (w *Witness) Circuit(now time.Time, c *Circuit) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).Text(ect.MemberDownstreamAgent, c.Downstream)
	if c.Reason != "" {
		ext.Text(ect.MemberReason, c.Reason)
	}
	if c.ErrorType != "" {
		ext.Text(ect.MemberErrorType, c.ErrorType)
	}
	switch c.Event {
	case ect.EventCircuitClose:
		ext.Number(ect.MemberTotalCooldown, c.TotalCooldown.Seconds())
	default:
		ext.Number(ect.MemberErrorRate, c.ErrorRate).
			Number(ect.MemberWindow, c.Window.Seconds()).
			Number(ect.MemberCooldown, c.Cooldown.Seconds())
	}
	return w.issuer.Draft(now, ect.Claims{Audience: []string{w.Identity()}, Workflow: c.Workflow, Action: string(c.Event), Parents: c.Parents, Ext: ext})
}

// Attempt is a failure of an upstream that no call tells of: its call is not guarded, or
// has not failed with it.
type Attempt struct {
	// Downstream is the identity of the upstream, or its address where none is known.
	Downstream string
	// Cause is what happened, in a few words.
	Cause string
	// Checkpoint is that of the call; empty if it is not guarded. ID is AttemptID of it
	// then, and Workflow where it stands.
	Checkpoint, ID, Workflow string
}

// Attempt drafts the error of such a failure, so that there is one from which the opening
// of a breaker follows. It follows from the call's checkpoint.
func (w *Witness) Attempt(now time.Time, a *Attempt) (*ect.Draft, error) {
	var parents []string
	if a.Checkpoint != "" {
		parents = []string{a.Checkpoint}
	}
	return w.issuer.Draft(now, ect.Claims{
		Audience: []string{w.Identity()}, ID: a.ID, Workflow: a.Workflow, Action: string(ect.EventError), Parents: parents,
		Ext: new(ect.ExtBuilder).
			Text(ect.MemberSeverity, "error").
			Text(ect.MemberErrorType, "action_failed").
			Text(ect.MemberDescription, a.Cause).
			Text(ect.MemberDownstreamAgent, a.Downstream).
			Text(ect.MemberCheckpointID, a.Checkpoint).
			Bool(MemberAttempt, true),
	})
}

// AttemptID is the id of the error that is told of a failure at an upstream of a call
// with this checkpoint, where the call itself tells none.
func (e *Evidence) AttemptID(checkpoint, upstream string) string {
	return e.secretID("error of attempt", checkpoint+" "+upstream)
}

// ErrorID is the id of the error that is told of a call with this checkpoint, should it
// fail.
func (e *Evidence) ErrorID(checkpoint string) string {
	return e.secretID("error of node", e.NodeID(checkpoint))
}

// WorkflowOf waits for a token that the gateway has told or will tell, and returns the
// workflow that it stands in. It ends with ctx.
func (e *Evidence) WorkflowOf(ctx context.Context, id string) (string, error) {
	for {
		entries, err := e.log.Find(ctx, id)
		if len(entries) > 0 {
			return entries[0].Workflow, nil
		}
		if err != nil && !errors.Is(err, ledger.ErrNotFound) {
			return "", err
		}
		select {
		case <-time.After(findPause):
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// Known are those of the ids that are recorded in a workflow, or in none, in their order
// and each once.
func (e *Evidence) Known(ctx context.Context, workflow string, ids []string) ([]string, error) {
	var known []string
	for _, id := range ids {
		if id == "" || slices.Contains(known, id) {
			continue
		}
		_, ok, err := e.find(ctx, workflow, id)
		if err == nil && !ok && workflow != "" {
			_, ok, err = e.find(ctx, "", id)
		}
		if err != nil {
			return nil, err
		}
		if ok {
			known = append(known, id)
		}
	}
	return known, nil
}

// findPause is about how long an event takes to its place in the tree.
const findPause = 10 * time.Millisecond
