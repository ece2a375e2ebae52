package evidence

import (
	"context"
	"errors"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// spaceLedger begins all keys of the ledger (package ect/ledger).
const spaceLedger = 'l'

// Begun reports whether the store holds a ledger.
func Begun(ctx context.Context, st store.Store) (bool, error) {
	for _, err := range st.Scan(ctx, store.Range{From: []byte{spaceLedger}, To: []byte{spaceLedger + 1}, Limit: 1}) {
		return err == nil, err
	}
	return false, nil
}

// CallOf is a recorded call as evidence speaks of it. Its workflow and what led to it
// are those of its checkpoint, as far as that is in the ledger. One that waits for its
// place is waited for a moment only: where the disk is full, or its event is damaged, it
// may never get there.
func (e *Evidence) CallOf(ctx context.Context, key guard.Key, r *guard.Record) Call {
	c := Call{Key: key, Caller: r.Caller, Action: r.Action, Workflow: WorkflowID(r.Workflow)}
	for _, workflow := range []string{c.Workflow, NamedWorkflowID(r.Workflow)} {
		entry, err := e.log.Lookup(ctx, workflow, r.Checkpoint)
		if errors.Is(err, ledger.ErrWaiting) {
			c.Workflow = workflow
			waits, cancel := context.WithTimeout(ctx, placeTime)
			entry, err = e.log.Wait(waits, workflow, r.Checkpoint)
			cancel()
		}
		if err == nil {
			c.Workflow, c.Parents = workflow, entry.Parents
			break
		}
	}
	return c
}

// placeTime is how long a checkpoint may take to its place in the tree.
const placeTime = 2 * time.Second

// TellDeath tells of an execution that is in doubt, unless that was told before.
func (e *Evidence) TellDeath(ctx context.Context, w *Witness, key guard.Key, r *guard.Record) error {
	c := e.CallOf(ctx, key, r)
	_, err := e.log.Lookup(ctx, c.Workflow, e.NodeID(r.Checkpoint))
	if !errors.Is(err, ledger.ErrNotFound) {
		if err == nil || errors.Is(err, ledger.ErrWaiting) || errors.Is(err, ledger.ErrPruned) {
			return nil
		}
		return err
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return err
	}
	drafts, err := w.Outcome(now, &c, &Outcome{Checkpoint: r.Checkpoint, Verdict: guard.InDoubt, Cause: r.Cause, Status: r.Status})
	if err != nil {
		return err
	}
	return e.Append(ctx, now.Add(r.KeepResult), nil, drafts...)
}
