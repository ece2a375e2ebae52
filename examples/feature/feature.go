// Package feature is a feature of which package guard knows nothing: a maintenance window. While it is open, no call
// begins; retries of what has run are answered all the same. The store has a row of each call that runs, so that who
// opens the window sees when the last one has ended. docs/extend.md explains it.
package feature

import (
	"context"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// maintained is the problem of a call that comes while the window is open.
var maintained = problem.Kind{
	Slug: "maintenance", Status: http.StatusServiceUnavailable, Title: "The service is being maintained",
	SafeNewKey: true, RetryAfter: time.Minute,
}

// rows begins the keys of the rows. Capital letters are free for features; the guard's own keys begin with small ones.
const rows = "Maintenance "

// kept is how long a row stays that a crash has left.
const kept = 24 * time.Hour

// Maintenance is a guard.Gate and a guard.Part.
type Maintenance struct{ end atomic.Pointer[time.Time] }

// Open opens the window until that time, and Close closes it.
func (m *Maintenance) Open(end time.Time) { m.end.Store(&end) }

// Close closes the window.
func (m *Maintenance) Close() { m.end.Store(nil) }

// Admit implements guard.Gate.
func (m *Maintenance) Admit(context.Context, *guard.Request) (leave func(), err error) {
	end := m.end.Load()
	if end == nil || !time.Now().Before(*end) {
		return nil, nil
	}
	p := problem.New(maintained, "Nothing was forwarded.")
	p.RetryAfter = time.Until(*end)
	return nil, p
}

// Claim implements guard.Part.
func (m *Maintenance) Claim(_ context.Context, call *guard.Request, commit *store.Batch) error {
	commit.Add(store.Write{Key: row(call), Value: []byte(call.Caller()), Expires: time.Now().Add(kept)})
	return nil
}

// Settle implements guard.Part.
func (m *Maintenance) Settle(_ context.Context, call *guard.Request, _ execution.Outcome, commit *store.Batch) {
	commit.Add(store.Write{Key: row(call), Delete: true})
}

func row(call *guard.Request) []byte {
	key := call.Key()
	return append([]byte(rows), key[:]...)
}

// Running counts the calls that have not ended.
func Running(ctx context.Context, st store.Store) (n int, err error) {
	for _, err := range st.Scan(ctx, store.Prefix([]byte(rows))) {
		if err != nil {
			return 0, err
		}
		n++
	}
	return n, nil
}
