package caddymodule

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// runningCalls knows which calls have not told yet what came of them. A failure opens a
// breaker a moment before its call tells of it, if it does: an upstream that was tried
// in vain, and a fault in an answer, need not be failures of the call.
type runningCalls struct {
	mu   sync.Mutex
	ends map[string]chan struct{} // by checkpoint
}

// begin says that a call runs. One without a checkpoint tells nothing.
func (r *runningCalls) begin(checkpoint string) {
	if checkpoint == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ends == nil {
		r.ends = map[string]chan struct{}{}
	}
	r.ends[checkpoint] = make(chan struct{})
}

// end says that a call has told what came of it.
func (r *runningCalls) end(checkpoint string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if end := r.ends[checkpoint]; end != nil {
		close(end)
		delete(r.ends, checkpoint)
	}
}

// wait waits for the end of a call, if it runs, until ctx ends.
func (r *runningCalls) wait(ctx context.Context, checkpoint string) {
	r.mu.Lock()
	end := r.ends[checkpoint]
	r.mu.Unlock()
	if end == nil {
		return
	}
	select {
	case <-end:
	case <-ctx.Done():
	}
}

// circuitErrorTime is how long the opening of a breaker waits for the end of the call
// that caused it. A call that runs on, such as a stream, has told nothing by then, and
// would fail for another reason.
const circuitErrorTime = 2 * time.Second

// awaitCall waits for the call that has caused a change.
func (e *engine) awaitCall(ctx context.Context, ev breaker.Event) {
	ctx, cancel := context.WithTimeout(ctx, circuitErrorTime)
	defer cancel()
	e.running.wait(ctx, circuits.ParseEvidence(ev.Evidence).Checkpoint)
}

// failureOf is the id of the error that has opened a breaker, and sets the workflow that
// it stands in. Where its call has told of none, it is drafted: in the workflow of the
// call and behind its checkpoint, if it was guarded.
func (e *engine) failureOf(ctx context.Context, way *testimony, now time.Time, c *evidence.Circuit, ev breaker.Event) (string, []*ect.Draft, error) {
	failure := evidence.Attempt{Downstream: c.Downstream, Cause: cmp.Or(ev.Cause, string(ev.Reason))}
	if of := circuits.ParseEvidence(ev.Evidence); of.Checkpoint != "" {
		attempt := way.evidence.AttemptID(of.Checkpoint, ev.Key.String())
		known, err := way.evidence.Known(ctx, of.Workflow, []string{way.evidence.ErrorID(of.Checkpoint), attempt, of.Checkpoint})
		if err != nil {
			return "", nil, err
		}
		if len(known) > 0 { // else it stands in another store
			c.Workflow = of.Workflow
			if known[0] != of.Checkpoint {
				return known[0], nil, nil
			}
			failure.Checkpoint, failure.ID, failure.Workflow = of.Checkpoint, attempt, of.Workflow
		}
	}
	draft, err := way.witness.Attempt(now, &failure)
	if err != nil {
		return "", nil, err
	}
	return draft.ID(), []*ect.Draft{draft}, nil
}

// lastFailure is the id of the error that tells of a breaker's last failure; empty where
// none does.
func (t *testimony) lastFailure(ctx context.Context, s *breaker.Status) string {
	of := circuits.ParseEvidence(s.Evidence)
	if t == nil || of.Checkpoint == "" {
		return ""
	}
	ids := []string{t.evidence.ErrorID(of.Checkpoint), t.evidence.AttemptID(of.Checkpoint, s.Key.String())}
	if known, err := t.evidence.Known(ctx, of.Workflow, ids); err == nil && len(known) > 0 {
		return known[0]
	}
	return ""
}
