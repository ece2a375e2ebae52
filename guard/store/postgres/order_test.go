//go:build unix

package postgres_test

import (
	"bytes"
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// What a process holds that is stopped in the middle of a transaction of several round trips, the server takes from it
// by itself, long before the time that a scan may take.
func TestStoppedWithALockOfItsOwn(t *testing.T) {
	for what, c := range map[string]struct {
		before string // the statement that does not come any more
		table  string
		act    func(t *testing.T, ctx context.Context, o postgres.Options, conn *pgx.Conn, stop func())
	}{
		"joins": {"select boot, node", "lease", func(t *testing.T, ctx context.Context, o postgres.Options, _ *pgx.Conn, stop func()) {
			stop()
			_, _ = postgres.Join(ctx, o)
		}},
		"leaves": {"with gone as", "lease", func(t *testing.T, _ context.Context, o postgres.Options, _ *pgx.Conn, stop func()) {
			m := join(t, o)
			stop()
			_ = m.Close()
		}},
		"removes another": {"with gone as", "lease", func(t *testing.T, ctx context.Context, o postgres.Options, conn *pgx.Conn, stop func()) {
			join(t, o)
			stop()
			exec(t, conn, `insert into `+o.Schema+`.members (boot, node, holder, lock, session, joined, seen, expires, read, about)
				values ('gone', 'gone', 'a test', 1, false, 0, 0, 0, 0, '{}')`)
			<-ctx.Done()
		}},
		"migrates": {"insert into", "migrations", func(t *testing.T, ctx context.Context, o postgres.Options, _ *pgx.Conn, stop func()) {
			stop()
			_, _ = postgres.Join(ctx, o)
		}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			conn := database(t)
			schema := migrated(t, conn, len(postgres.Migrations("")))
			if what == "migrates" {
				schema = migrated(t, conn, 2)
			}
			p, err := pgserver.NewProxy(server)
			if err != nil {
				t.Fatal(err)
			}
			var wanted, stopped atomic.Bool
			reached := make(chan struct{})
			p.Judge(func(text []byte) pgserver.Fate {
				if wanted.Load() && bytes.Contains(text, []byte(c.before)) && stopped.CompareAndSwap(false, true) {
					close(reached)
				}
				if stopped.Load() {
					return pgserver.Hold
				}
				return pgserver.Pass
			})
			ctx, cancel := context.WithCancel(t.Context())
			over := make(chan struct{})
			go func() {
				defer close(over)
				c.act(t, ctx, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a", Lease: time.Hour}, conn, func() { wanted.Store(true) })
			}()
			defer func() { // before a is closed
				cancel()
				p.Close()
				<-over
			}()
			select {
			case <-reached:
			case <-time.After(patience):
				t.Fatal("it is not reached")
			}
			other := database(t)
			exec(t, other, "set statement_timeout = '30s'") // and a scan has a minute
			exec(t, other, "begin")
			exec(t, other, "lock table "+schema+"."+c.table+" in access exclusive mode")
		})
	}
}

// A session that nobody works in does not hold up commits, also one that the server does not end by itself: behind a
// pooler, or where the server thinks that it works, since the rest of what its client says has not come, or what the
// client was told is not read. Nothing of it stands in the table of members, as while a process joins.
func TestSilentSessionHoldsUpNobody(t *testing.T) {
	lock := func(schema string) string { return "select from " + schema + ".lease where one for update" }
	for what, hold := range map[string]func(t *testing.T, conn *pgx.Conn, schema string){
		"idle": func(t *testing.T, conn *pgx.Conn, schema string) {
			exec(t, conn, "begin")
			exec(t, conn, lock(schema))
		},
		"half of a request": func(t *testing.T, conn *pgx.Conn, schema string) {
			pipeline := conn.PgConn().StartPipeline(t.Context())
			pipeline.SendQueryParams("begin", nil, nil, nil, nil)
			pipeline.SendQueryParams(lock(schema), nil, nil, nil, nil)
			if err := pipeline.Flush(); err != nil {
				t.Fatal(err)
			}
		},
		"an answer that is not read": func(t *testing.T, conn *pgx.Conn, schema string) {
			pipeline := conn.PgConn().StartPipeline(t.Context())
			pipeline.SendQueryParams("begin", nil, nil, nil, nil)
			pipeline.SendQueryParams(lock(schema), nil, nil, nil, nil)
			pipeline.SendQueryParams("select repeat('x', 1 << 20) from generate_series(1, 64)", nil, nil, nil, nil)
			if err := pipeline.Sync(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			conn := database(t)
			schema := migrated(t, conn, len(postgres.Migrations("")))
			a := join(t, postgres.Options{Schema: schema, Node: "a", StatementTimeout: time.Second, Lease: time.Hour})
			silent, err := pgx.Connect(t.Context(), server.DSN())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = silent.PgConn().Conn().Close() }()
			hold(t, silent, schema)
			pid := silent.PgConn().PID()
			await(t, func() (holds bool) {
				err := conn.QueryRow(t.Context(), "select exists (select from pg_locks where pid = $1 and granted and mode = 'RowShareLock')", pid).Scan(&holds)
				if err != nil {
					t.Fatal(err)
				}
				return holds
			})
			await(t, func() bool {
				_, err := a.Commit(t.Context(), put("key", "value"))
				return err == nil
			})
		})
	}
}

// A session that works goes on, however slow it is, also while others give up waiting for it, or join.
func TestSlowSessionIsNotEnded(t *testing.T) {
	const held = 4711
	for what, work := range map[string]string{
		"computes":         "do $$ begin while not pg_try_advisory_lock(4711) loop perform pg_sleep(0.01); end loop; end $$",
		"waits for a lock": "select pg_advisory_lock(4711)",
	} {
		t.Run(what, func(t *testing.T) { // one after the other, since they have one lock
			conn, slow := database(t), database(t)
			schema := migrated(t, conn, len(postgres.Migrations("")))
			a := join(t, postgres.Options{Schema: schema, Node: "a", StatementTimeout: time.Second, Lease: time.Hour})
			exec(t, conn, "select pg_advisory_lock($1)", held)
			exec(t, slow, "begin")
			exec(t, slow, "select from "+schema+".lease where one for update")
			done := make(chan error, 1)
			go func() {
				_, err := slow.Exec(context.Background(), work)
				done <- err
			}()
			for range 3 { // longer than a client may be silent
				if _, err := a.Commit(t.Context(), put("key", "value")); err == nil {
					t.Error("it was not held up")
				}
			}
			if m, err := postgres.Join(t.Context(), postgres.Options{DSN: server.DSN(), Schema: schema, Node: "b", StatementTimeout: time.Second}); err == nil {
				_ = m.Close()
				t.Error("it has joined")
			}
			exec(t, conn, "select pg_advisory_unlock($1)", held)
			if err := <-done; err != nil {
				t.Errorf("the work: %v", err)
			}
			exec(t, slow, "commit")
		})
	}
}
