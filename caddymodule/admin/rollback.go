package admin

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strconv"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/router"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Rollbacks plans and carries out rollbacks. *rollback.Coordinator implements it.
type Rollbacks interface {
	// Plan returns what Execute would do. The error says why it would refuse.
	Plan(ctx context.Context, r rollback.Request) (*rollback.Rollback, error)
	// Execute accepts a rollback durably. The same id with the same content returns the
	// same rollback (P5).
	Execute(
		ctx context.Context, r rollback.Request, admit func(ctx context.Context, refused bool) ([]store.Write, error),
	) (*rollback.Rollback, error)
	// Get returns a rollback, or rollback.ErrUnknown.
	Get(ctx context.Context, id string) (*rollback.Rollback, error)
	// Wait returns a rollback once it is finished. With the error of ctx it returns the
	// rollback as it is.
	Wait(ctx context.Context, id string) (*rollback.Rollback, error)
	// List returns up to limit rollbacks after a cursor, the newest first.
	List(ctx context.Context, after string, limit int) (rollback.Page, error)
}

// RollbackRequest is the body of POST rollback.
type RollbackRequest struct {
	// RollbackID is a UUID, with or without urn:uuid:; repetitions of a request use the
	// same one. Without it every request is a new rollback.
	RollbackID string `json:"rollback_id,omitempty"`
	// CheckpointID is the checkpoint or group to roll back.
	CheckpointID string `json:"checkpoint_id"`
	// Scope is single, sub_dag or full_workflow.
	Scope string `json:"scope,omitempty"`
	// Cascade selects sub_dag instead of single if Scope is missing.
	Cascade bool `json:"cascade,omitempty"`
	// KeepDependants allows that completed actions which depend on undone ones stay.
	// Otherwise such a rollback is refused.
	KeepDependants bool `json:"keep_dependants,omitempty"`
	// Operator is the name of the operator, at most 256 bytes. It is recorded and logged.
	Operator string `json:"operator"`
	// Reason is the operator's reason, at most 512 bytes. It is recorded, logged, and sent
	// to agents.
	Reason string `json:"reason"`
	// DryRun returns the plan without changing or recording anything.
	DryRun bool `json:"dry_run,omitempty"`
}

// RollbackPage is a page of rollbacks. Its members are an API.
type RollbackPage struct {
	// Rollbacks are sorted by age, the newest first, without their steps.
	Rollbacks []*rollback.Rollback `json:"rollbacks"`
	// Unreadable counts those that cannot be read.
	Unreadable int `json:"unreadable,omitempty"`
	// Next is the value of `after` for the next page; empty after the last page.
	Next string `json:"next,omitempty"`
}

const (
	maxRollback         = 16 << 10
	maxRollbackOperator = 256
	maxRollbackReason   = 512
)

// namesOperator refuses a request that does not say who acts.
func namesOperator(operator, acts string) error {
	if operator == "" || len(operator) > maxRollbackOperator {
		return refuse(http.StatusBadRequest, "operator: say who %s, in at most %d bytes", acts, maxRollbackOperator)
	}
	return nil
}

func (d *RollbackRequest) request() (r rollback.Request, err error) {
	r = rollback.Request{
		Checkpoint: d.CheckpointID, Reason: d.Reason, Operator: d.Operator, ID: uuid.NewString(), KeepDependants: d.KeepDependants,
	}
	if d.CheckpointID == "" {
		return r, refuse(http.StatusBadRequest, "checkpoint_id: it is missing")
	}
	if err := namesOperator(d.Operator, "asks"); err != nil {
		return r, err
	}
	if d.Reason == "" && !d.DryRun || len(d.Reason) > maxRollbackReason {
		return r, refuse(http.StatusBadRequest, "reason: say why, in at most %d bytes", maxRollbackReason)
	}
	if id, err := uuid.Parse(d.CheckpointID); err == nil && len(d.CheckpointID) == len(id.String()) {
		r.Checkpoint = id.String() // the form of the ledger
	}
	var cascade *bool // nil if absent: then the scope alone decides
	if d.Cascade {
		cascade = &d.Cascade
	}
	if r.Scope, err = rollback.ParseScope(d.Scope, cascade); err == nil && d.RollbackID != "" {
		r.ID, err = router.ParseID(d.RollbackID)
	}
	return r, err
}

// coordinated makes a handler of one that needs the store's rollbacks.
func coordinated(serve handler) handler {
	return func(q *request) (any, error) {
		if q.Rollbacks() == nil {
			return nil, refuse(http.StatusNotFound,
				"the gateway over the store %s has no identity, and makes no checkpoints that could be rolled back: configure `identity`", q.Path())
		}
		answer, err := serve(q)
		if err != nil {
			return nil, refusal(err, http.StatusServiceUnavailable, rollbackPackages)
		}
		if doc, ok := answer.(*rollback.Rollback); ok {
			explain(q.Context(), q, doc)
		}
		return answer, nil
	}
}

// startRollback answers POST rollback. It does not wait for the end: clients poll.
func startRollback(q *request, d *RollbackRequest) (any, error) {
	wanted, err := d.request()
	if err != nil {
		return nil, err
	}
	if d.DryRun {
		planned, err := q.Rollbacks().Plan(q.Context(), wanted)
		if err != nil {
			return nil, err
		}
		return rollback.Shown(planned, wanted.ID), nil
	}
	accepted, err := q.Rollbacks().Execute(q.Context(), wanted, nil)
	if err != nil {
		return nil, err
	}
	return rollback.Shown(accepted, wanted.ID), nil
}

// showRollback answers GET rollback/{id}; on request it waits until the rollback is
// finished.
func showRollback(q *request) (any, error) {
	wait := min(q.age("wait"), rollback.LongestWait)
	if err := q.done(); err != nil {
		return nil, err
	}
	id, err := router.ParseID(q.name)
	if err != nil {
		return nil, err
	}
	found, err := q.Rollbacks().Get(q.Context(), id)
	if err != nil {
		return nil, err
	}
	if wait > 0 && found.State != rollback.Finished {
		ctx, cancel := context.WithTimeout(q.Context(), wait)
		defer cancel()
		later, err := q.Rollbacks().Wait(ctx, id)
		if err != nil && ctx.Err() == nil {
			return nil, err
		}
		if later != nil {
			found = later
		}
	}
	return rollbackDocument(found, id), nil
}

// rollbackDocument is the document of a rollback with the id by which operators name it.
func rollbackDocument(r *rollback.Rollback, id string) *rollback.Rollback {
	doc := rollback.Shown(r, id)
	if r.Named != "" {
		doc.KeptAs = r.ID
	}
	return doc
}

func listRollbacks(q *request) (any, error) {
	after, limit := q.one("after"), q.limit()
	if err := q.done(); err != nil {
		return nil, err
	}
	found, err := q.Rollbacks().List(q.Context(), after, limit)
	if err != nil {
		return nil, err
	}
	page := RollbackPage{Rollbacks: make([]*rollback.Rollback, 0, len(found.Rollbacks)), Unreadable: found.Unreadable, Next: found.Next}
	for _, one := range found.Rollbacks {
		page.Rollbacks = append(page.Rollbacks, rollbackDocument(one, one.ID))
	}
	return page, nil
}

var _ Rollbacks = (*rollback.Coordinator)(nil)

// Trial has the failed attempts of an undo that has not succeeded yet.
type Trial struct {
	// Attempts counts the failed requests of this process.
	Attempts int
	// Cause is why the last one failed.
	Cause string
}

// explain adds what only operators may see (P8): the call of each step, how it is undone,
// why it takes long, and the caller's name of the workflow.
func explain(ctx context.Context, st Store, doc *rollback.Rollback) {
	for i := range doc.Steps {
		step := &doc.Steps[i]
		if step.State == rollback.StepRunning {
			if t, ok := st.Trial(step.Checkpoint); ok {
				step.Attempts, step.LastCause = max(step.Attempts, t.Attempts), t.Cause
			}
		}
		call, result, record, err := callOf(ctx, st, step.Checkpoint)
		if err != nil {
			continue // a group, another gateway's, or expired
		}
		step.Way = rollback.Describe(call, result)
		step.Call = &rollback.CallDocument{
			Execution: call.Execution.Hex(), Action: call.Action, Method: call.Request.Method,
			Host: call.Request.Host, Path: call.Request.Path, Created: call.Created.UTC(),
		}
		if record != nil {
			step.Call.ExecutionID, step.Call.Created = record.ID, record.Created.UTC()
		}
	}
	doc.WorkflowName = (&names{st: st}).of(ctx, doc.Workflow, doc.Checkpoint)
}

// EscalationVote is the body of POST escalations/{id}/decision.
type EscalationVote struct {
	// Decision is approve or deny.
	Decision string `json:"decision"`
	// RequestHash or PlanHash is that of the proposal as it was shown.
	RequestHash string `json:"request_hash,omitempty"`
	PlanHash    string `json:"plan_hash,omitempty"` // see RequestHash
	// Operator is who decides, and Reason why, at most 256 and 512 bytes. A denial needs a reason.
	Operator string `json:"operator"`
	Reason   string `json:"reason,omitempty"` // see Operator
}

// EscalationQuestion is the body of POST escalations/{id}/ask.
type EscalationQuestion struct {
	// Operator is who asks, at most 256 bytes, and cannot approve.
	Operator string `json:"operator"`
}

func showEscalation(q *request) (any, error) {
	found, err := q.Escalations().Get(q.Context(), q.name)
	return seeEscalation(q, &found, err)
}

// seeEscalation is the answer about one escalation, or the error.
func seeEscalation(q *request, e *hitl.Escalation, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	e.WorkflowName = (&names{st: q}).of(q.Context(), e.Workflow, e.Links.Checkpoint)
	return e, nil
}

// decideEscalation answers POST escalations/{id}/decision. Who has the admin API has every role.
func decideEscalation(q *request, d *EscalationVote) (any, error) {
	if d.Decision != "approve" && d.Decision != "deny" {
		return nil, refuse(http.StatusBadRequest, "decision: it is %q; use approve or deny", d.Decision)
	}
	if err := namesOperator(d.Operator, "decides"); err != nil {
		return nil, err
	}
	switch {
	case len(d.Reason) > maxRollbackReason:
		return nil, refuse(http.StatusBadRequest, "reason: it has more than %d bytes", maxRollbackReason)
	case d.RequestHash != "" && d.PlanHash != "":
		return nil, refuse(http.StatusBadRequest, "request_hash and plan_hash: give the one that the escalation shows")
	}
	found, err := q.Escalations().Decide(q.Context(), q.name, hitl.Vote{
		By: operatorPrefix + d.Operator, Every: true, Approve: d.Decision == "approve", Hash: cmp.Or(d.RequestHash, d.PlanHash), Reason: d.Reason,
	})
	return seeEscalation(q, &found, err)
}

// operatorPrefix begins the names of who decides at the admin API.
const operatorPrefix = "operator:"

// askEscalation answers POST escalations/{id}/ask: the question whether the workflow may be
// resumed is asked again.
func askEscalation(q *request, d *EscalationQuestion) (any, error) {
	if err := namesOperator(d.Operator, "asks"); err != nil {
		return nil, err
	}
	found, err := q.Escalations().AskAgain(q.Context(), q.name, operatorPrefix+d.Operator, 0)
	return seeEscalation(q, &found, err)
}

func listEscalations(q *request) (any, error) {
	ctx, known := q.Context(), &names{st: q}
	filter := hitl.Filter{
		Workflow: q.one("workflow"), Level: q.level(), State: oneOf(&q.params, "state", hitl.States()), Status: oneOf(&q.params, "status", hitl.Statuses()),
	}
	after, limit := q.one("after"), q.limit()
	if err := q.done(); err != nil {
		return nil, err
	}
	var err error
	if filter.Workflow, err = escalatedAs(ctx, q, known.forms(ctx, filter.Workflow)); err != nil {
		return nil, err
	}
	found, err := q.Escalations().List(ctx, filter, after, limit)
	if err != nil {
		return nil, err
	}
	for i := range found.Escalations {
		e := &found.Escalations[i]
		e.WorkflowName = known.of(ctx, e.Workflow, e.Links.Checkpoint)
	}
	return found, nil
}

// escalatedAs returns the first of a workflow's names that has escalations.
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

// level parses a level, a number or its word; 0 matches any.
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

// oneOf parses a parameter that is one of some words; the zero value matches any.
func oneOf[T any](p *params, name string, all []T) (none T) {
	text := p.one(name)
	if text == "" {
		return none
	}
	for _, one := range all {
		if text == fmt.Sprint(one) {
			return one
		}
	}
	p.fail(name, fmt.Errorf("%q is no %s; there are %v", text, name, all))
	return none
}
