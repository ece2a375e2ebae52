package admin

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// The health of a store.
const (
	// HealthOK: it answers.
	HealthOK = "ok"
	// HealthClosed: it closed itself after a failed sync. Only a restart cures that.
	HealthClosed = "closed"
	// HealthUnknown: it does not answer.
	HealthUnknown = "unknown"
)

// maxCounted is up to which number the executions of a state are counted.
const maxCounted = 10_000

// StoreStatus is how a store is.
type StoreStatus struct {
	// Path names the store.
	Path string `json:"path"`
	// Health is ok, closed or unknown.
	Health string `json:"health"`
	// Problem is what is wrong, where it is not ok.
	Problem string `json:"problem,omitempty"`
	// Node is the gateway that the store belongs to.
	Node string `json:"node"`
	// Boot is the present life of that gateway.
	Boot string `json:"boot"`
	// Executions are the numbers of executions by state; left out where they cannot
	// be counted.
	Executions map[string]Count `json:"executions,omitempty"`
	// Quota is what one caller may hold, by the latest configuration; left out where
	// nothing bounds it.
	Quota *Quota `json:"quota,omitempty"`
	// Store is what the store tells of itself; left out where it cannot.
	Store *Report `json:"store,omitempty"`
}

// Count is how many executions there are in a state.
type Count struct {
	// Count is their number.
	Count int `json:"count"`
	// AtLeast says that there are more: the counting stops at 10,000.
	AtLeast bool `json:"at_least,omitempty"`
	// Oldest is when the first of them was claimed.
	Oldest time.Time `json:"oldest,omitzero"`
	// OldestAge are the seconds since.
	OldestAge int64 `json:"oldest_age,omitempty"`
}

// store answers GET store. A store that is not well is no reason for an error: it is
// what was asked.
func (a *API) store(r *http.Request, st Store, p *params) (any, error) {
	if err := p.done(); err != nil {
		return nil, err
	}
	status := StoreStatus{
		Path: st.Path(), Health: HealthOK, Node: st.Guard().Node(), Boot: st.Guard().Boot(),
		Quota: st.Quota(), Store: st.Report(),
	}
	var err error
	if status.Executions, err = count(r.Context(), st); err != nil {
		if r.Context().Err() != nil {
			return nil, unavailable(err)
		}
		status.Problem, status.Health = err.Error(), HealthUnknown
		if errors.Is(err, store.ErrUnhealthy) {
			status.Health = HealthClosed
		}
	}
	if status.Problem == "" && status.Store != nil {
		status.Problem = status.Store.shortage()
	}
	return status, nil
}

// count counts the executions by state.
func count(ctx context.Context, st Store) (map[string]Count, error) {
	now, err := st.Now(ctx)
	if err != nil {
		return nil, err
	}
	tally, err := st.Guard().Tally(ctx, maxCounted)
	if err != nil {
		return nil, err
	}
	counts := make(map[string]Count, len(tally))
	for _, state := range guard.States() {
		c := tally[state]
		counts[state.String()] = Count{Count: c.N, AtLeast: c.More, Oldest: utc(c.Oldest), OldestAge: age(now, c.Oldest)}
	}
	return counts, nil
}

func age(now, then time.Time) int64 {
	if then.IsZero() {
		return 0
	}
	return int64(max(now.Sub(then), 0) / time.Second)
}
