//go:build unix

package guard

import (
	"fmt"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// P6, ADR 0137 on PostgreSQL: who restores a target notices those that write to it at other gateways, also of one that is
// gone.
func TestFleetWritesOnPostgreSQL(t *testing.T) {
	server := pgserver.Test(t)
	if server == nil {
		return
	}
	schemas := 0
	on := func(t *testing.T, test func(*testing.T, joins)) {
		schemas++
		schema := fmt.Sprint("s", schemas)
		test(t, func(t *testing.T, name string) (store.Shared, func()) {
			m, err := postgres.Join(t.Context(), postgres.Options{DSN: server.DSN(), Schema: schema, Node: name})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = m.Close() })
			return m, func() { _ = m.Close() }
		})
	}
	t.Run("calls", func(t *testing.T) { on(t, seesWrites) })
	t.Run("undos", func(t *testing.T) { on(t, seesUndos) })
	t.Run("at once", func(t *testing.T) { on(t, seesOneOfTwo) })
	seesWhoIsGone(t, on, map[string]func(b *writer, c *execution.Call){"it is undone": undone, "it runs again": runsAgain})
	t.Run("undos of who is gone", func(t *testing.T) { on(t, seesUndosOfWhoIsGone) })
}
