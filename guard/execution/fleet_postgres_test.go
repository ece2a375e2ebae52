//go:build unix

package execution_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// P4, ADR 0137 on PostgreSQL: the open executions of a caller are as many as the limit at all gateways together, and
// never one more, also where all meet it at once, and where some of them leave.
func TestFleetQuotaOnPostgreSQL(t *testing.T) {
	server := pgserver.Test(t)
	if server == nil {
		return
	}
	schemas := 0
	shared := func(t *testing.T) backend {
		schemas++
		schema := fmt.Sprint("s", schemas)
		join := func(name string) (store.Shared, func()) {
			m, err := postgres.Join(ctx, postgres.Options{DSN: server.DSN(), Schema: schema, Node: name})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = m.Close() })
			return m, func() { _ = m.Close() }
		}
		// A member hears of the others in 100 ms at most.
		return backend{&fleet{t: t, ring: newFleet(t).ring}, join, func(d time.Duration) { <-time.After(min(d, 200*time.Millisecond)) }}
	}
	t.Run("whatever becomes of them", func(t *testing.T) { quotaOfOpenExecutions(t, shared(t), 3, 60) })
	for n := range 3 {
		t.Run(fmt.Sprint("at once ", n), func(t *testing.T) { quotaAtOnce(t, shared(t), 100) })
	}
}
