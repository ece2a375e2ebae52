package admin

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Rollbacks are the rollbacks over a store. *rollback.Coordinator is one.
type Rollbacks interface {
	// Plan shows what Execute would do, or why it would not.
	Plan(ctx context.Context, r rollback.Request) (*rollback.Rollback, error)
	// Execute accepts a rollback durably. The same id with the same content gives the same
	// rollback (P5).
	Execute(ctx context.Context, r rollback.Request, extra ...store.Write) (*rollback.Rollback, error)
	// Get returns a rollback, or rollback.ErrUnknown.
	Get(ctx context.Context, id string) (*rollback.Rollback, error)
	// Wait returns a rollback once it is finished, or as it is with ctx's error.
	Wait(ctx context.Context, id string) (*rollback.Rollback, error)
	// List returns up to limit rollbacks, the newest first, from where after says.
	List(ctx context.Context, after string, limit int) (rollback.Page, error)
}

// RollbackRequest is what POST rollback takes.
type RollbackRequest struct {
	// RollbackID is a UUID, with or without urn:uuid:; the same for every repetition.
	// Without it there is a new one with each request.
	RollbackID string `json:"rollback_id,omitempty"`
	// CheckpointID is the checkpoint or group to go back to.
	CheckpointID string `json:"checkpoint_id"`
	// Scope is single, sub_dag or full_workflow.
	Scope string `json:"scope,omitempty"`
	// Cascade means sub_dag instead of single if Scope is missing.
	Cascade bool `json:"cascade,omitempty"`
	// KeepDependants says that completed actions which depend on what is undone stay as they
	// are. Without it a rollback that would leave some is refused.
	KeepDependants bool `json:"keep_dependants,omitempty"`
	// Operator says who asks: 256 bytes at most. It is recorded and logged.
	Operator string `json:"operator"`
	// Reason says why: 512 bytes at most. It is recorded, logged, and sent to agents.
	Reason string `json:"reason"`
	// DryRun shows the plan, and changes and records nothing.
	DryRun bool `json:"dry_run,omitempty"`
}

// RollbackPage is a part of a listing of rollbacks.
type RollbackPage struct {
	// Rollbacks, the newest first, without their steps.
	Rollbacks []*api.Document `json:"rollbacks"`
	// Unreadable counts those that cannot be read.
	Unreadable int `json:"unreadable,omitempty"`
	// Next is what `after` takes to go on; empty after the last page.
	Next string `json:"next,omitempty"`
}

const (
	maxRollback         = 16 << 10
	maxRollbackOperator = 256
	maxRollbackReason   = 512
)

func (d *RollbackRequest) request() (r rollback.Request, err error) {
	r = rollback.Request{
		Checkpoint: d.CheckpointID, Reason: d.Reason, Operator: d.Operator, ID: uuid.NewString(), KeepDependants: d.KeepDependants,
	}
	switch {
	case d.CheckpointID == "":
		return r, refuse(http.StatusBadRequest, "checkpoint_id: it is missing")
	case d.Operator == "" || len(d.Operator) > maxRollbackOperator:
		return r, refuse(http.StatusBadRequest, "operator: say who asks, in at most %d bytes", maxRollbackOperator)
	case d.Reason == "" && !d.DryRun || len(d.Reason) > maxRollbackReason:
		return r, refuse(http.StatusBadRequest, "reason: say why, in at most %d bytes", maxRollbackReason)
	}
	if id, err := uuid.Parse(d.CheckpointID); err == nil && len(d.CheckpointID) == len(id.String()) {
		r.Checkpoint = id.String() // as the ledger has it
	}
	var cascade *bool // nil where it is not said, as a scope alone leaves it
	if d.Cascade {
		cascade = &d.Cascade
	}
	if r.Scope, err = api.ParseScope(d.Scope, cascade); err == nil && d.RollbackID != "" {
		r.ID, err = api.ParseID(d.RollbackID)
	}
	return r, err
}

// coordinated calls serve with the rollbacks over a store.
func coordinated(serve func(r *http.Request, all Rollbacks, p *params) (any, error)) handler {
	return func(r *http.Request, st Store, p *params) (any, error) {
		all := st.Rollbacks()
		if all == nil {
			return nil, refuse(http.StatusNotFound,
				"the gateway over the store %s has no identity, and makes no checkpoints that could be rolled back: configure `identity`", st.Path())
		}
		answer, err := serve(r, all, p)
		if err != nil {
			return nil, refusal(err, http.StatusServiceUnavailable, rollbackPackages)
		}
		if doc, ok := answer.(*api.Document); ok {
			explain(r.Context(), st, doc)
		}
		return answer, nil
	}
}

// startRollback answers POST rollback. It does not wait for the end: whoever asks looks at it.
func startRollback(r *http.Request, all Rollbacks, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	var d RollbackRequest
	if err := decode(r.Body, maxRollback, &d); err != nil {
		return nil, refuse(http.StatusBadRequest, `the request is no {"checkpoint_id": "...", "operator": "...", "reason": "..."}: %v`, err)
	}
	wanted, err := d.request()
	if err != nil {
		return nil, err
	}
	if d.DryRun {
		planned, err := all.Plan(r.Context(), wanted)
		if err != nil {
			return nil, err
		}
		doc := api.Describe(planned, wanted.ID)
		doc.State = api.Planned
		return doc, nil
	}
	accepted, err := all.Execute(r.Context(), wanted)
	if err != nil {
		return nil, err
	}
	return api.Describe(accepted, wanted.ID), nil
}

// showRollback answers GET rollback/{id}, once it is finished where that is waited for.
func showRollback(r *http.Request, all Rollbacks, p *params) (any, error) {
	wait := min(p.age("wait"), api.LongestWait)
	if err := p.done(); err != nil {
		return nil, err
	}
	id, err := api.ParseID(p.name)
	if err != nil {
		return nil, err
	}
	found, err := all.Get(r.Context(), id)
	if err != nil {
		return nil, err
	}
	if wait > 0 && found.State != rollback.Finished {
		ctx, cancel := context.WithTimeout(r.Context(), wait)
		defer cancel()
		later, err := all.Wait(ctx, id)
		if err != nil && ctx.Err() == nil {
			return nil, err
		}
		if later != nil {
			found = later
		}
	}
	return api.Describe(found, id), nil
}

func listRollbacks(r *http.Request, all Rollbacks, p *params) (any, error) {
	after, limit := p.one("after"), p.limit()
	if err := p.done(); err != nil {
		return nil, err
	}
	found, err := all.List(r.Context(), after, limit)
	if err != nil {
		return nil, err
	}
	page := RollbackPage{Rollbacks: make([]*api.Document, 0, len(found.Rollbacks)), Unreadable: found.Unreadable, Next: found.Next}
	for _, one := range found.Rollbacks {
		page.Rollbacks = append(page.Rollbacks, api.Describe(one, one.ID))
	}
	return page, nil
}

var _ Rollbacks = (*rollback.Coordinator)(nil)

// Trial is the state of an undo that has not succeeded yet.
type Trial struct {
	// Attempts counts the requests of this process that got no good answer.
	Attempts int
	// Cause is why the last one did not.
	Cause string
}

// explain adds what operators may know beyond those who ask over HTTP (P8): what each step
// is about, how it is undone, what holds it up, and what the caller calls the workflow.
func explain(ctx context.Context, st Store, doc *api.Document) {
	for i := range doc.Steps {
		step := &doc.Steps[i]
		if step.State == rollback.StepRunning {
			if t, ok := st.Trial(step.CheckpointID); ok {
				step.Attempts, step.LastCause = max(step.Attempts, t.Attempts), t.Cause
			}
		}
		call, result, record, err := callOf(ctx, st, step.CheckpointID)
		if err != nil {
			continue // a group, another gateway's, or nothing that stands any more
		}
		step.Way = rollback.Describe(call, result)
		step.Call = &api.CallDocument{
			Execution: call.Execution.Hex(), Action: call.Action, Method: call.Request.Method,
			Host: call.Request.Host, Path: call.Request.Path, Created: call.Created.UTC(),
		}
		if record != nil {
			step.Call.ExecutionID, step.Call.Created = record.ID, record.Created.UTC()
		}
	}
	doc.WorkflowName = (&names{st: st}).of(ctx, doc.Workflow, doc.CheckpointID)
}

// Escalations is what GET escalations answers. Its members are an API.
type Escalations struct {
	// Escalations, the newest first.
	Escalations []Escalation `json:"escalations"`
	// Unreadable counts those that cannot be opened.
	Unreadable int `json:"unreadable,omitempty"`
	// Next is where the list goes on; absent at its end.
	Next string `json:"next,omitempty"`
}

// Escalation is something that only a person can decide. Its members are an API.
type Escalation struct {
	// ID names it.
	ID string `json:"id"`
	// Level is 1 (pause), 2 (approval) or 3 (stop), LevelName the word.
	Level     uint8  `json:"level"`
	LevelName string `json:"level_name"` // see Level
	// State is open, notified or undeliverable.
	State string `json:"state"`
	// Cause is a fixed word, Summary a sentence.
	Cause   string `json:"cause"`
	Summary string `json:"summary"` // see Cause
	// Workflow and Caller are whose it is.
	Workflow string `json:"workflow,omitempty"`
	Caller   string `json:"caller,omitempty"` // see Workflow
	// WorkflowName is what its caller calls the workflow, where that is another name.
	WorkflowName string `json:"workflow_name,omitempty"`
	// Links lead to what it is about.
	Links EscalationLinks `json:"links"`
	// Opened and Changed are when it was opened, and when its state last changed.
	Opened  time.Time `json:"opened"`
	Changed time.Time `json:"changed"` // see Opened
	// Attempts counts how often somebody was to be told, and LastError is why the last
	// attempt failed, if it did.
	Attempts  int    `json:"attempts"`
	LastError string `json:"last_error,omitempty"` // see Attempts
	// NextAttempt is when the next one is due; absent where none is.
	NextAttempt time.Time `json:"next_attempt,omitzero"`
}

// EscalationLinks lead from an escalation to what it is about.
type EscalationLinks struct {
	// Checkpoint and Error are ids of tokens, Rollback is a rollback's id.
	Checkpoint string `json:"checkpoint,omitempty"`
	Rollback   string `json:"rollback,omitempty"` // see Checkpoint
	Error      string `json:"error,omitempty"`    // see Checkpoint
	// Execution is the hash that names an execution.
	Execution string `json:"execution,omitempty"`
	// Upstream is an upstream's address.
	Upstream string `json:"upstream,omitempty"`
}

func listEscalations(r *http.Request, st Store, p *params) (any, error) {
	filter, after, limit := hitl.Filter{Workflow: p.one("workflow"), Level: p.level(), State: p.escalationState()}, p.one("after"), p.limit()
	if err := p.done(); err != nil {
		return nil, err
	}
	known := &names{st: st}
	var err error
	if filter.Workflow, err = escalatedAs(r.Context(), st, known.forms(r.Context(), filter.Workflow)); err != nil {
		return nil, err
	}
	found, err := st.Escalations().List(r.Context(), filter, after, limit)
	if err != nil {
		return nil, err
	}
	page := Escalations{Escalations: make([]Escalation, 0, len(found.Escalations)), Unreadable: found.Unreadable, Next: found.Next}
	for i := range found.Escalations {
		e := viewEscalation(&found.Escalations[i])
		e.WorkflowName = known.of(r.Context(), e.Workflow, e.Links.Checkpoint)
		page.Escalations = append(page.Escalations, e)
	}
	return page, nil
}

// escalatedAs is the first of the forms of a workflow's id under which there are escalations.
func escalatedAs(ctx context.Context, st Store, forms []string) (string, error) {
	for _, form := range forms {
		page, err := st.Escalations().List(ctx, hitl.Filter{Workflow: form}, "", 1)
		if err != nil {
			return "", err
		}
		if len(page.Escalations) > 0 || page.Unreadable > 0 || page.Next != "" {
			return form, nil
		}
	}
	return append(forms, "")[0], nil
}

func viewEscalation(e *hitl.Escalation) Escalation {
	return Escalation{
		ID: e.ID, Level: uint8(e.Level), LevelName: e.Level.String(), State: e.State.String(),
		Cause: string(e.Cause), Summary: e.Summary, Workflow: e.Workflow, Caller: e.Caller, Links: EscalationLinks(e.Links),
		Opened: e.Opened, Changed: e.Changed,
		Attempts: e.Delivery.Attempts, LastError: e.Delivery.LastError, NextAttempt: e.Delivery.Next,
	}
}

// level is a level, by its number or its word; 0 is any.
func (p *params) level() hitl.Level {
	text := p.one("level")
	if text == "" {
		return 0
	}
	for l := hitl.Pause; l <= hitl.Stop; l++ {
		if text == l.String() || text == strconv.Itoa(int(l)) {
			return l
		}
	}
	p.fail("level", fmt.Errorf("%q is no level; there are 1 (pause), 2 (approval) and 3 (stop)", text))
	return 0
}

// escalationState is a state of an escalation; 0 is any.
func (p *params) escalationState() hitl.State {
	text := p.one("state")
	if text == "" {
		return 0
	}
	for _, s := range hitl.States() {
		if text == s.String() {
			return s
		}
	}
	p.fail("state", fmt.Errorf("%q is no state; there are %v", text, hitl.States()))
	return 0
}
