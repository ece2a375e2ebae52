package evidence

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/workflow"
)

// The boundaries of workflows (ATD "Workflow Boundary ECTs", ADR 0117). Each follows from its occasion,
// and so has its id: whoever records it a second time, after a crash or at another node, finds it
// recorded.

// memberNodeCount is how many nodes the plan of a workflow has.
const memberNodeCount ect.Member = "cascade.node_count"

// endID is the id of the gateway's workflow_complete: one for a workflow, beside those of rollbacks.
func (e *Evidence) endID(wid string) string { return e.secretID("workflow end", wid) }

// startID is the id of the gateway's workflow_start: one for a workflow.
func (e *Evidence) startID(wid string) string { return e.secretID("workflow start", wid) }

// workflowCompleteID is the id of the event that a rollback has ended its workflow.
func (e *Evidence) workflowCompleteID(id string) string { return e.secretID("workflow complete", id) }

// Begins reports whether a call would be the first of its workflow that anybody has recorded: there is
// neither a start of it, by an agent or by the gateway, nor an earlier call.
func (b *EventBuilder) Begins(ctx context.Context, wid string) (bool, error) {
	if _, known := b.e.begun.find(wid, ""); known {
		return false, nil
	}
	begun, err := b.e.log.Has(ctx, wid, b.e.startID(wid))
	if err == nil && !begun {
		begun, err = b.hasBegun(ctx, wid)
	}
	if err == nil && begun {
		b.e.begun.add(scope{wid, ""}, struct{}{})
	}
	return !begun, err
}

// hasBegun looks at the first entries of a workflow.
func (b *EventBuilder) hasBegun(ctx context.Context, wid string) (bool, error) {
	page, err := b.e.log.List(ctx, wid, "", ledger.MaxPage)
	if err != nil {
		return false, err
	}
	for i := range page.Entries {
		e := &page.Entries[i]
		if beginsWorkflow(e) || b.Own(e) && isCheckpoint(e) {
			return true, nil
		}
	}
	return page.Next != "", nil
}

// Guards reports whether an id is that of a checkpoint of a workflow for a call of this gateway: its own, or one
// that another made, and from which one of its own follows.
func (b *EventBuilder) Guards(ctx context.Context, wid, id string) (bool, error) {
	if id == "" {
		return false, nil
	}
	e, err := b.e.log.Known(ctx, wid, id)
	switch {
	case err != nil || e == nil || !isCheckpoint(e) || IsUnproven(e):
		return false, err
	case b.Own(e):
		return true, nil
	}
	page, err := b.e.log.Following(ctx, wid, id, "", ledger.MaxPage)
	return slices.ContainsFunc(page.Entries, func(e ledger.Entry) bool { return b.Own(&e) && isCheckpoint(&e) }), err
}

func beginsWorkflow(e *ledger.Entry) bool {
	event, _ := ect.ParseEvent(e.Action)
	return event == ect.EventWorkflowStart && !IsUnproven(e)
}

// WorkflowStart is what the gateway says of a workflow that begins with a call.
type WorkflowStart struct {
	// Checkpoint is that of the call, which the start follows from: so it is seen by who may see the
	// call, and by nobody else who uses the name of the workflow (P3).
	Checkpoint string
	// Name, Description and Nodes are those of the workflow's plan; empty without one.
	Name, Description string
	Nodes             int // see Name
}

// WorkflowStart drafts that a workflow begins with a call (ATD Figure "Workflow Start ECT").
func (b *EventBuilder) WorkflowStart(now time.Time, c *Call, s *WorkflowStart) (*ect.Draft, error) {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberWorkflowName, Printable(cmp.Or(s.Name, c.Workflow), maxReason)).
		Text(ect.MemberDescription, Printable(cmp.Or(s.Description, "begins with "+c.Action), maxReason)).
		Text(memberCaller, hex.EncodeToString(c.Caller[:]))
	if s.Nodes > 0 {
		ext.Int(memberNodeCount, int64(s.Nodes))
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.errorAudience(c.Issuer), ID: b.e.startID(c.Workflow), Workflow: c.Workflow,
		Action: string(ect.EventWorkflowStart), Parents: []string{s.Checkpoint}, Ext: ext,
	})
}

// WorkflowEnd is how a workflow has ended.
type WorkflowEnd struct {
	Workflow string
	// Start is the id of its workflow_start, or of its first call where there is none; empty if neither
	// is known. Name is the wf_id in it, and Began the time of the first entry, zero if unknown.
	Start, Name string
	Began       time.Time // see Start
	// Status is success, partial, failed, rolled_back or escalated.
	Status workflow.Status
}

// WorkflowEnd drafts the end of a workflow (ATD Figure "Workflow Complete ECT").
func (b *EventBuilder) WorkflowEnd(now time.Time, w *WorkflowEnd) (*ect.Draft, error) {
	var parents []string
	if w.Start != "" {
		parents = []string{w.Start}
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: []string{b.Identity()}, ID: b.e.endID(w.Workflow), Workflow: w.Workflow,
		Action: string(ect.EventWorkflowComplete), Parents: parents, Ext: w.ext(now),
	})
}

func (w *WorkflowEnd) ext(now time.Time) *ect.ExtBuilder {
	ext := new(ect.ExtBuilder).
		Text(ect.MemberWorkflowName, Printable(cmp.Or(w.Name, w.Workflow), maxReason)).
		Text(ect.MemberTerminalStatus, string(w.Status))
	if !w.Began.IsZero() {
		ext.Int(ect.MemberElapsed, max(0, int64(now.Sub(w.Began)/time.Second)))
	}
	return ext
}

// workflowComplete drafts that a rollback of the whole workflow has ended it (cascade 4.1.3). It follows
// from the workflow's start, if that is recorded, and from the rollback's result.
func (b *EventBuilder) workflowComplete(now time.Time, r *rollback.Rollback, began *WorkflowEnd) (*ect.Draft, error) {
	end := *began
	end.Status = workflow.Status(r.Status) // never more than the rollback achieved (P6)
	if r.Status == rollback.Completed {
		end.Status = "rolled_back"
	}
	parents := []string{b.e.rollbackCompleteID(r.ID)}
	if began.Start != "" {
		parents = append([]string{began.Start}, parents...)
	}
	return b.issuer.Draft(now, ect.Claims{
		Audience: b.rollbackAudience(r), ID: b.e.workflowCompleteID(r.ID), Workflow: r.Workflow,
		Action: string(ect.EventWorkflowComplete), Parents: parents, Ext: end.ext(now).Text(ect.MemberRollbackID, rollbackURN(r.AskedAs())),
	})
}

// Add reads one more entry of a workflow, in the order of recording: the first start counts.
func (w *WorkflowEnd) Add(e *ledger.Entry) {
	if w.Began.IsZero() || e.Time.Before(w.Began) {
		w.Began = e.Time
	}
	if w.Start == "" && beginsWorkflow(e) {
		w.Start = e.ID
		w.Name, _ = Extension(e).Text(ect.MemberWorkflowName)
	}
}

// spaceOpen begins the store's keys of workflows whose ends are waited for: a keyed hash of the id. The
// value is the id, sealed.
const spaceOpen = 'y'

// openTime is how long after its last call the end of a workflow is waited for.
const openTime = 90 * 24 * time.Hour

func (e *Evidence) openKey(wid string) []byte {
	hash := store.Index(e.sealer, "open workflow", wid)
	return append(append(make([]byte, 0, 1+hashed), spaceOpen), hash[:hashed]...)
}

// Opened returns the write that notes that the end of a workflow is waited for. Each claim of a call
// writes it again, so that nobody can record the end of a workflow in which a call has just begun.
func (e *Evidence) Opened(now time.Time, wid string) store.Write {
	key := e.openKey(wid)
	return store.Write{Key: key, Value: e.sealer.Seal(nil, []byte(wid), key), Expires: now.Add(openTime)}
}

// OpenSince is the version of that note; zero if the end is not waited for.
func (e *Evidence) OpenSince(ctx context.Context, wid string) (store.Version, error) {
	found, err := e.store.Get(ctx, e.openKey(wid))
	if errors.Is(err, store.ErrNotFound) {
		return 0, nil
	}
	return found.Version, err
}

// Closed returns the write that removes the note, on the condition that no call has begun since.
func (e *Evidence) Closed(wid string, since store.Version) store.Write {
	w := store.Write{Key: e.openKey(wid), Delete: true, If: store.Absent()}
	if since != 0 {
		w.If = store.VersionIs(since)
	}
	return w
}

// OpenWorkflows are the workflows whose ends are waited for, at most so many.
func (e *Evidence) OpenWorkflows(ctx context.Context, most int) (all []string, err error) {
	r := store.Prefix([]byte{spaceOpen})
	r.Limit = most
	for found, err := range e.store.Scan(ctx, r) {
		if err != nil {
			return all, err
		}
		wid, err := e.sealer.Open(nil, found.Value, found.Key)
		if err != nil {
			return all, fmt.Errorf("evidence: an open workflow: %w: %w", ledger.ErrTampered, err)
		}
		all = append(all, string(wid))
	}
	return all, nil
}
