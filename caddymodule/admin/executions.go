package admin

import (
	"context"
	"errors"
	"net/http"

	"github.com/agent-guard/caddy-agent-guard/guard"
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

// show answers GET executions/{key}.
func (a *API) show(name string) handler {
	return func(r *http.Request, st Store, p *params) (any, error) {
		if err := p.done(); err != nil {
			return nil, err
		}
		key, err := st.Guard().Expand(r.Context(), name)
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

// unavailable is a store's own error, that did not come through the guard.
func unavailable(err error) error {
	return refuse(http.StatusServiceUnavailable, "the store is unavailable: %v", err)
}
