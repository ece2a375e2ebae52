//go:build unix

package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// P1, P2: a primary dies under load, and its synchronous standby is promoted. The store finds it by
// itself; nothing that was acknowledged is lost, and nothing is written twice.
func TestStandbyIsPromoted(t *testing.T) {
	primary, err := pgserver.Start("synchronous_commit=on", "wal_level=replica", "max_wal_senders=4", "max_connections=40")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = primary.Remove() }) // it is dead already
	standby, err := primary.Standby("max_connections=40")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := standby.Remove(); err != nil {
			t.Error(err)
		}
	})
	conn, err := pgx.Connect(t.Context(), primary.DSN())
	if err != nil {
		t.Fatal(err)
	}
	exec(t, conn, "alter system set synchronous_standby_names = '*'")
	exec(t, conn, "select pg_reload_conf()")
	await(t, func() bool {
		var n int
		err := conn.QueryRow(t.Context(), "select count(*) from pg_stat_replication where sync_state = 'sync'").Scan(&n)
		return err == nil && n == 1
	})

	// The standby is named first: it takes no writes, so it is passed over.
	dsn := "host=" + standby.Dir() + "," + primary.Dir() + " port=5432,5432 user=postgres dbname=postgres"
	s := open(t, postgres.Options{DSN: dsn, Lease: 10 * time.Second})
	// The statistics know the standby; how far it is behind, if the role may see that.
	exec(t, conn, "create role guard login")
	exec(t, conn, "grant create on database postgres to guard")
	_ = conn.Close(t.Context())
	plain := open(t, postgres.Options{DSN: strings.Replace(primary.DSN(), "user=postgres", "user=guard", 1), Schema: newSchema()})
	await(t, func() bool { return !s.Stats().Server.Asked.IsZero() && !plain.Stats().Server.Asked.IsZero() })
	if got := s.Stats().Server; got.Standbys != 1 || got.Lag < 0 {
		t.Errorf("the standby: %+v", got)
	}
	if got := plain.Stats().Server; got.Standbys != 1 || got.Lag >= 0 {
		t.Errorf("the standby, for a role that may not see it: %+v", got)
	}
	if err := plain.Close(); err != nil {
		t.Fatal(err)
	}
	var acknowledged sync.Map
	var some atomic.Int64
	stop := make(chan struct{})
	var all sync.WaitGroup
	for w := range 4 {
		all.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				key := fmt.Sprintf("%d-%d", w, i)
				v, err := s.Commit(context.Background(), claim(key, "1"))
				switch {
				case err == nil:
					acknowledged.Store(key, v)
					some.Add(1)
				case errors.As(err, new(*store.Conflict)):
					t.Errorf("the first claim of %s: %v", key, err)
				case !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUnknown):
					t.Errorf("claim: %v", err)
				}
			}
		})
	}
	await(t, func() bool { return some.Load() > 50 })
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), []byte("x")); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("get without a primary: %v, want ErrUnavailable", err)
	}
	if err := standby.Promote(); err != nil {
		t.Fatal(err)
	}
	back := some.Load()
	await(t, func() bool { return some.Load() > back+50 })
	close(stop)
	all.Wait()
	n := 0
	acknowledged.Range(func(key, v any) bool {
		n++
		if e, err := s.Get(t.Context(), []byte(key.(string))); err != nil || e.Version != v {
			t.Errorf("%s was acknowledged as version %d, and is %d, %v", key, v, e.Version, err)
		}
		return true
	})
	if n < 100 {
		t.Errorf("%d claims were acknowledged", n)
	}
}

// P4: a server that has no connection left for what needs a new one refuses that in time; what has its
// connection goes on, and the rest as soon as there are some.
func TestServerHasNoConnectionLeft(t *testing.T) {
	small, err := pgserver.Start("max_connections=12", "superuser_reserved_connections=0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := small.Remove(); err != nil {
			t.Error(err)
		}
	})
	s := open(t, postgres.Options{DSN: small.DSN(), StatementTimeout: time.Second})
	if _, err := s.Commit(t.Context(), put("key", "1")); err != nil { // it has its connection now
		t.Fatal(err)
	}
	var taken []*pgx.Conn
	for len(taken) < 20 {
		conn, err := pgx.Connect(t.Context(), small.DSN())
		if err != nil {
			break
		}
		taken = append(taken, conn)
	}
	if len(taken) == 20 {
		t.Fatal("the server has more connections than it may")
	}
	if _, err := postgres.Open(t.Context(), postgres.Options{DSN: small.DSN(), Schema: newSchema()}); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "no connection left") {
		t.Errorf("open without a connection: %v", err)
	}
	if _, err := s.Commit(t.Context(), put("key", "2")); err != nil {
		t.Errorf("a commit on the connection that is there: %v", err)
	}
	// The pool has one idle connection at most; many readers at once need more, and are served or refused.
	begun := time.Now()
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if _, err := s.Get(context.Background(), []byte("key")); err != nil && !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("get: %v", err)
			}
		})
	}
	all.Wait()
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	for _, conn := range taken {
		_ = conn.Close(t.Context())
	}
	await(t, func() bool {
		e, err := s.Get(context.Background(), []byte("key"))
		return err == nil && string(e.Value) == "2"
	})
}

// P4: serialization failures, deadlocks and a full disk that do not end are given up in time; nothing was
// written, or that is unknown. When they have ended, the store goes on.
func TestFailuresThatDoNotEnd(t *testing.T) {
	for _, state := range []string{"40001", "40P01", "53100"} {
		s := open(t, postgres.Options{StatementTimeout: 200 * time.Millisecond})
		conn, schema := database(t), schemaOf()
		exec(t, conn, "create sequence "+schema+".tries")
		exec(t, conn, `create function `+schema+`.fail() returns trigger language plpgsql as $$
			begin perform nextval('`+schema+`.tries'); raise exception using errcode = '`+state+`'; end $$`)
		exec(t, conn, "create trigger fail before insert on "+schema+".entries for each row execute function "+schema+".fail()")
		begun := time.Now()
		_, err := s.Commit(t.Context(), claim("key", "1"))
		switch {
		case state == "53100": // disk full
			if !errors.Is(err, store.ErrFull) {
				t.Errorf("%s: %v, want ErrFull", state, err)
			}
		case !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUnknown):
			t.Errorf("%s: %v, want ErrUnavailable or ErrUnknown", state, err)
		}
		unknown := errors.Is(err, store.ErrUnknown) // a try was under way when the time was over: on a slow machine
		var tries int
		if err := conn.QueryRow(t.Context(), "select last_value from "+schema+".tries").Scan(&tries); err != nil || tries > 300 { // one each 5 ms at most
			t.Errorf("%s: %d tries, %v", state, tries, err)
		}
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("%s: it took %v", state, took)
		}
		exec(t, conn, "drop trigger fail on "+schema+".entries")
		if got := value(t, s, "key"); got != "" && !unknown {
			t.Errorf("%s: %q is stored", state, got)
		}
		var lost *store.Conflict
		if _, err := s.Commit(t.Context(), claim("key", "2")); err != nil && (!errors.As(err, &lost) || !unknown) {
			t.Errorf("%s: when it is over: %v", state, err)
		}
	}
}
