package admin

import (
	"context"
	"errors"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// defaultPage is the size of a page where none is asked for.
const defaultPage = 50

// list answers GET executions.
func (a *API) list(r *http.Request, st Store, p *params) (any, error) {
	now, err := st.Now(r.Context())
	if err != nil {
		return nil, unavailable(err)
	}
	filter, after, limit := p.filter(now), p.one("after"), p.limit()
	if err := p.done(); err != nil {
		return nil, err
	}
	if forms := (&names{st: st}).forms(r.Context(), filter.Workflow); len(forms) > 1 {
		filter.OrWorkflows = forms[1:]
	}
	if err := narrow(r.Context(), st, &filter); err != nil {
		return nil, err
	}
	found, err := st.Guard().List(r.Context(), filter, after, limit)
	if err != nil {
		return nil, err
	}
	page := Page{Executions: make([]Execution, 0, len(found.Executions)), Next: found.Next}
	for i := range found.Executions {
		page.Executions = append(page.Executions, view(&found.Executions[i], now))
	}
	return page, nil
}

// narrow bounds the listing of a checkpoint's execution by when that was claimed, where the
// vault knows it: else all that is recorded would be looked through.
func narrow(ctx context.Context, st Store, f *guard.Filter) error {
	if f.Checkpoint == "" || f.Method == undo.Method {
		return nil
	}
	f.NotMethod = undo.Method // its undos have the checkpoint's id too
	_, _, record, err := callOf(ctx, st, f.Checkpoint)
	if errors.Is(err, guard.ErrUnknown) || err == nil && record == nil {
		return nil
	}
	if err != nil {
		return err
	}
	if at := record.Created; at.After(f.From) {
		f.From = at
	}
	if end := record.Created.Add(1); f.To.IsZero() || end.Before(f.To) {
		f.To = end
	}
	return nil
}

// show answers GET executions/{key}, which may be the id of a checkpoint or an execution.
func (a *API) show(name string) handler {
	return func(r *http.Request, st Store, p *params) (any, error) {
		if err := p.done(); err != nil {
			return nil, err
		}
		key, err := find(r.Context(), st, name)
		if err != nil {
			return nil, err
		}
		return look(r.Context(), st, key)
	}
}

// look is all that operators may see of the execution key. A free key is known by
// what was decided about it.
func look(ctx context.Context, st Store, key guard.Key) (*Execution, error) {
	now, err := st.Now(ctx)
	if err != nil {
		return nil, unavailable(err)
	}
	x := Execution{Key: key.Hex(), State: StateFree}
	found, err := st.Guard().Look(ctx, key)
	switch {
	case err == nil:
		x = view(&found, now)
		x.WorkflowID = workflowID(ctx, st, found.Record)
	case !errors.Is(err, guard.ErrUnknown):
		return nil, err
	}
	decided, decidedErr := st.Guard().Resolutions(ctx, key)
	if decidedErr != nil {
		return nil, decidedErr
	}
	if err != nil && len(decided) == 0 {
		return nil, err
	}
	for _, d := range decided {
		x.Resolutions = append(x.Resolutions, Resolution{
			At: utc(d.At), Applied: d.Applied, Operator: d.Operator, Reason: d.Reason,
			Cause: string(d.Cause), Action: d.Action,
		})
	}
	return &x, nil
}

// workflowID is the UUID of the workflow of an execution, where its name is none.
func workflowID(ctx context.Context, st Store, record *guard.Record) string {
	if record.Checkpoint == "" {
		return "" // no token knows it
	}
	id := evidence.WorkflowID(record.Workflow)
	if call, _, _, err := callOf(ctx, st, record.Checkpoint); err == nil && call.Workflow != "" {
		id = call.Workflow
	}
	if id == record.Workflow {
		return ""
	}
	return id
}

// unavailable is a store's own error, that did not come through the guard.
func unavailable(err error) error {
	return refuse(http.StatusServiceUnavailable, "the store is unavailable: %v", err)
}
