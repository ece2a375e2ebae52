//go:build unix

package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
)

// The statistics say how large the tables are, what waits to be vacuumed and what holds that up, and how
// many reads have waited for a connection.
func TestStats(t *testing.T) {
	o := postgres.Options{Schema: newSchema(), PoolSize: 2}
	s := open(t, o)
	var batch []store.Write
	for i := range 500 {
		batch = append(batch, store.Write{Key: fmt.Appendf(nil, "key%d", i), Value: make([]byte, 3000)})
	}
	if _, err := s.Commit(t.Context(), batch...); err != nil {
		t.Fatal(err)
	}
	// What it can still see is not vacuumed.
	other := database(t)
	exec(t, other, "begin isolation level repeatable read")
	exec(t, other, "select from "+o.Schema+".entries limit 1")
	for i := range batch {
		batch[i] = store.Write{Key: batch[i].Key, Delete: i%2 == 0, Value: []byte("short")}
	}
	if _, err := s.Commit(t.Context(), batch...); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	conn := database(t)
	await(t, func() bool { // the sessions report what they did when they end
		var dead int
		err := conn.QueryRow(t.Context(), "select n_dead_tup from pg_stat_user_tables where schemaname = $1 and relname = 'entries'", o.Schema).Scan(&dead)
		return err == nil && dead >= 500
	})
	s = open(t, o) // it asks at once, and then every minute
	await(t, func() bool { return !s.Stats().Server.Asked.IsZero() })
	got := s.Stats().Server
	if got.Living <= 0 || got.Dead < 500 || got.Rows <= 0 || got.Large < 500*3000 || got.Indexes <= 0 || got.Others <= 0 {
		t.Errorf("of 500 entries, all replaced or deleted: %+v", got)
	}
	if got.OldestTransaction <= 0 || got.Standbys != 0 || got.Lag != 0 {
		t.Errorf("beside an open transaction: %+v", got)
	}

	exec(t, other, "rollback")
	reading, stop := context.WithCancel(t.Context())
	defer stop()
	var readers sync.WaitGroup
	for range 8 {
		readers.Go(func() {
			for reading.Err() == nil {
				for _, err := range s.Scan(t.Context(), store.Range{Limit: 1}) { // each is a statement of its own
					if err != nil {
						t.Errorf("scan: %v", err)
					}
				}
			}
		})
	}
	await(t, func() bool { p := s.Stats().Pool; return p.Waits >= 2 && p.Waited > 0 && p.InUse > 0 })
	stop()
	readers.Wait()
	if got := s.Stats().Pool; got.Most != 2 || got.Open < 1 || got.Open > 2 || got.InUse != 0 {
		t.Errorf("the pool: %+v", got)
	}
}

// docs/fleet.md: gateways whose role owns nothing work with the grants that stand there, once a role that owns the schema
// has made the tables. Without them they are refused, with what to do.
func TestGrantsOfARoleWithoutOwnership(t *testing.T) {
	schema := newSchema()
	if err := open(t, postgres.Options{Schema: schema}).Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../../../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "```sql\n")
	grants, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		t.Fatal("docs/fleet.md has no grants")
	}
	conn := database(t)
	role := "gateway_" + schema
	exec(t, conn, "create role "+role+" login")
	o := postgres.Options{DSN: strings.Replace(server.DSN(), "user=postgres", "user="+role, 1), Schema: schema}
	if s, err := postgres.Open(t.Context(), o); err == nil {
		_ = s.Close()
		t.Fatal("a role without rights opens the store")
	} else if !strings.Contains(err.Error(), "the role may not do this") {
		t.Error(err)
	}
	exec(t, conn, strings.NewReplacer("agent_guard", schema, "gateway", role).Replace(grants))

	one, two := o, o
	one.Node, two.Node = "one", "two"
	a, b := join(t, one), join(t, two)
	for i := range 20 {
		key := fmt.Sprint("key", i)
		if _, err := a.Commit(t.Context(), claim(key, "1"), store.Write{Key: []byte(key + "-bulk"), Value: make([]byte, 100_000), Bulk: true, Expires: time.Now().Add(time.Hour)}); err != nil {
			t.Fatal(err)
		}
		lost := (*store.Conflict)(nil)
		if _, err := b.Commit(t.Context(), claim(key, "2")); !errors.As(err, &lost) || value(t, b, key) != "1" {
			t.Fatalf("%v, %q", err, value(t, b, key))
		}
		if _, err := b.Commit(t.Context(), store.Write{Key: []byte(key), Delete: true}); err != nil {
			t.Fatal(err)
		}
	}
	changed, cancel := a.Watch([]byte("watched"))
	defer cancel()
	if _, err := b.Commit(t.Context(), put("watched", "yes")); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(patience):
		t.Error("a change by the other gateway is not heard of")
	}
	if members, err := a.Members(t.Context()); err != nil || len(members) != 2 {
		t.Errorf("%d members, %v", len(members), err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}
