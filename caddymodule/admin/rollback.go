package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Rollbacks are the rollbacks over a store. *rollback.Coordinator is one.
type Rollbacks interface {
	// Plan shows what Execute would do.
	Plan(ctx context.Context, r rollback.Request) (*rollback.Rollback, error)
	// Execute accepts a rollback, which goes on by itself. The same id with the same
	// content gives the same rollback (P5).
	Execute(ctx context.Context, r rollback.Request, riders ...store.Write) (*rollback.Rollback, error)
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
	// Cascade says, where Scope is missing, sub_dag and not single.
	Cascade bool `json:"cascade,omitempty"`
	// Operator says who asks: 256 bytes at most. It is recorded and logged.
	Operator string `json:"operator"`
	// Reason says why: 512 bytes at most. It is recorded, logged, and told to agents.
	Reason string `json:"reason"`
	// DryRun shows the plan, and nothing is touched or recorded.
	DryRun bool `json:"dry_run,omitempty"`
}

// RollbackPage is a part of a listing of rollbacks.
type RollbackPage struct {
	// Rollbacks, the newest first, without their steps.
	Rollbacks []*rollbackapi.Document `json:"rollbacks"`
	// Unreadable counts those that stand there and cannot be read.
	Unreadable int `json:"unreadable,omitempty"`
	// Next is what `after` takes to go on; empty after the last page.
	Next string `json:"next,omitempty"`
}

const (
	maxRollback         = 16 << 10
	maxRollbackOperator = 256
	maxRollbackReason   = 512
)

// read decodes strictly: a misspelled member must not be a rollback without it.
func (d *RollbackRequest) read(from io.Reader) error {
	decoder := json.NewDecoder(io.LimitReader(from, maxRollback))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(d)
	if err == nil {
		if _, err = decoder.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		err = errors.New("something stands behind it")
	}
	return refuse(http.StatusBadRequest, `the request is no {"checkpoint_id": "...", "operator": "...", "reason": "..."}: %v`, err)
}

// request checks what is asked for.
func (d *RollbackRequest) request() (r rollback.Request, err error) {
	r = rollback.Request{Checkpoint: d.CheckpointID, Reason: d.Reason, Operator: d.Operator, ID: uuid.NewString()}
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
	if r.Scope, err = rollbackapi.ParseScope(d.Scope, d.cascade()); err == nil && d.RollbackID != "" {
		r.ID, err = rollbackapi.ParseID(d.RollbackID)
	}
	return r, err
}

// cascade is nil where it is not said, as a scope alone leaves it.
func (d *RollbackRequest) cascade() *bool {
	if d.Cascade {
		return &d.Cascade
	}
	return nil
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
			return nil, rollbackRefusal(err)
		}
		if doc, ok := answer.(*rollbackapi.Document); ok {
			explain(r.Context(), st, doc)
		}
		return answer, nil
	}
}

// rollbackRefusal is an error of a rollback with its status.
func rollbackRefusal(err error) error {
	if api := (caddy.APIError{}); errors.As(err, &api) {
		return api
	}
	var known *problem.Problem
	switch {
	case errors.As(err, &known):
		return refuse(known.Kind().Status, "%s", known.Detail)
	case errors.Is(err, rollback.ErrUnknown):
		return refuse(http.StatusNotFound, "%s", plainly(err))
	case errors.Is(err, rollback.ErrCursor):
		return refuse(http.StatusBadRequest, "%s", plainly(err))
	}
	return refuse(rollbackapi.Refusal(err).Kind().Status, "%s", plainly(err))
}

// plainly is an error without the names of packages, which are of no use to an operator.
func plainly(err error) string {
	text := err.Error()
	for _, prefix := range []string{"rollback: ", "plan: ", "checkpoint: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	return text
}

// rollback answers POST rollback. It does not wait for the end: whoever asks looks at it.
func (a *API) rollback(r *http.Request, all Rollbacks, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	var d RollbackRequest
	if err := d.read(r.Body); err != nil {
		return nil, err
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
		doc := rollbackapi.Describe(planned, wanted.ID)
		doc.State = rollbackapi.Planned
		return doc, nil
	}
	accepted, err := all.Execute(r.Context(), wanted)
	if err != nil {
		return nil, err
	}
	return rollbackapi.Describe(accepted, wanted.ID), nil
}

// showRollback answers GET rollback/{id}, once it is finished where that is waited for.
func (a *API) showRollback(name string) handler {
	return coordinated(func(r *http.Request, all Rollbacks, p *params) (any, error) {
		wait := min(p.age("wait"), rollbackapi.LongestWait)
		if err := p.done(); err != nil {
			return nil, err
		}
		id, err := rollbackapi.ParseID(name)
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
		return rollbackapi.Describe(found, id), nil
	})
}

// listRollbacks answers GET rollbacks.
func (a *API) listRollbacks(r *http.Request, all Rollbacks, p *params) (any, error) {
	after, limit := p.one("after"), p.limit()
	if err := p.done(); err != nil {
		return nil, err
	}
	found, err := all.List(r.Context(), after, limit)
	if err != nil {
		return nil, err
	}
	page := RollbackPage{Rollbacks: make([]*rollbackapi.Document, 0, len(found.Rollbacks)), Unreadable: found.Unreadable, Next: found.Next}
	for _, one := range found.Rollbacks {
		page.Rollbacks = append(page.Rollbacks, rollbackapi.Describe(one, one.ID))
	}
	return page, nil
}

var _ Rollbacks = (*rollback.Coordinator)(nil)
