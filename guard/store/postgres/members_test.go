//go:build unix

package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// join opens the store of a schema as one of several gateways.
func join(t *testing.T, o postgres.Options) postgres.Member {
	t.Helper()
	if o.DSN == "" {
		o.DSN = server.DSN()
	}
	m, err := postgres.Join(t.Context(), o)
	if err != nil {
		t.Fatalf("join: %v", err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil && !errors.Is(err, store.ErrClosed) {
			t.Errorf("close: %v", err)
		}
	})
	return m
}

// awaitGone returns when b finds that the member of this boot is gone.
func awaitGone(t *testing.T, b store.Shared, boot string) {
	t.Helper()
	await(t, func() bool {
		gone, err := b.Gone(t.Context(), boot)
		if err != nil {
			t.Fatal(err)
		}
		return gone
	})
}

func TestMembers(t *testing.T) { testMembers(t, server.DSN()) }

// All that members promise holds behind a pooler that hands the server's sessions on after each transaction: the
// feed is read without notifications, and leases alone say who lives.
func TestMembersBehindAPooler(t *testing.T) {
	p, err := pgserver.NewPooler(server)
	if errors.Is(err, pgserver.ErrNoPooler) {
		t.Log(err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Remove(); err != nil {
			t.Error(err)
		}
	})
	testMembers(t, p.DSN())
	schema := newSchema()
	join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a"})
	var session bool
	if err := database(t).QueryRow(t.Context(), "select session from "+schema+".members").Scan(&session); err != nil || session {
		t.Errorf("behind the pooler the member says that it has a session of its own: %v, %v", session, err)
	}
	// Each session of the server that the pooler has, as often as it takes to get it.
	pool, err := pgxpool.New(t.Context(), p.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for range 50 {
		var channels int
		if err := pool.QueryRow(t.Context(), "select count(*) from pg_listening_channels()").Scan(&channels); err != nil || channels != 0 {
			t.Fatalf("a session that others get listens to %d channels: %v", channels, err)
		}
	}
}

func testMembers(t *testing.T, dsn string) {
	conn := database(t)
	storetest.Members(t, func(t *testing.T, now func() time.Time) storetest.Fleet {
		schema := newSchema()
		return storetest.Fleet{
			Join: func(node string) store.Shared {
				return join(t, postgres.Options{DSN: dsn, Schema: schema, Node: node, Lease: 10 * time.Second, Now: now})
			},
			Remove: func(m store.Shared) { // again and again: it may renew its lease in between
				await(t, func() bool {
					tag, err := conn.Exec(t.Context(), "update "+schema+".members set expires = 0 where boot = $1", m.Self().Boot)
					if err != nil {
						t.Fatal(err)
					}
					return tag.RowsAffected() == 0
				})
			},
		}
	})
}

// awaitSessions returns when the server has the sessions of n members: it notices a while after a connection was cut
// that one is gone.
func awaitSessions(t *testing.T, schema string, n int) {
	t.Helper()
	conn := database(t)
	await(t, func() bool {
		has := -1
		err := conn.QueryRow(t.Context(), "select count(*) from "+schema+".members m where exists (select from pg_locks l where "+
			"l.locktype = 'advisory' and l.objsubid = 1 and (l.classid::bigint << 32 | l.objid::bigint) = m.lock)").Scan(&has)
		if err != nil {
			t.Fatal(err)
		}
		return has == n
	})
}

// A name has one member at a time: another process with it waits, joins at once when the first has
// closed, and soon when its sessions are gone; the first then writes nothing more.
func TestOneMemberOfANode(t *testing.T) {
	schema := newSchema()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	first := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a", Lease: time.Hour})
	other := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour}) // at once
	again := postgres.Options{DSN: server.DSN(), Schema: schema, Node: "a", Lease: time.Hour}
	if m, err := postgres.Join(t.Context(), again); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), `has the name "a"`) {
		if err == nil {
			_ = m.Close()
		}
		t.Fatalf("a second member of one name = %v", err)
	}
	p.Judge(func([]byte) pgserver.Fate { return pgserver.CutBefore })
	p.Cut()
	awaitSessions(t, schema, 1) // that of the other
	second := join(t, again)
	awaitGone(t, other, first.Self().Boot)
	if _, err := second.Commit(t.Context(), put("key", "second")); err != nil {
		t.Fatal(err)
	}
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass })
	if _, err := first.Commit(t.Context(), put("key", "late")); !errors.Is(err, store.ErrUnhealthy) {
		t.Errorf("a commit of the first = %v, want ErrUnhealthy", err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if got := value(t, join(t, again), "key"); got != "second" {
		t.Errorf("%q is stored", got)
	}
}

// A store that was opened for one gateway alone admits no members, and the other way round.
func TestAloneOrShared(t *testing.T) {
	schema := newSchema()
	alone := postgres.Options{DSN: server.DSN(), Schema: schema, Lease: time.Hour}
	shared := postgres.Options{DSN: server.DSN(), Schema: schema, Lease: time.Hour, Node: "a"}
	s := open(t, alone)
	if _, err := postgres.Join(t.Context(), shared); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a member beside a gateway alone: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	join(t, shared)
	if _, err := postgres.Open(t.Context(), alone); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a gateway alone beside a member: %v", err)
	}
	if _, err := postgres.Join(t.Context(), alone); err == nil || errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "node:") {
		t.Errorf("a member without a name: %v", err)
	}
	if _, err := postgres.Open(t.Context(), shared); err == nil || errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "node:") {
		t.Errorf("a gateway alone with a name: %v", err)
	}
}

// A member whose process was killed, or whose network was cut, is removed by the others long before its
// lease ends: its session is gone.
func TestMemberIsCutOff(t *testing.T) {
	schema := newSchema()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	a := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a", Lease: time.Hour})
	b := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour})
	if _, err := a.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	left := b.Left()
	p.Judge(func([]byte) pgserver.Fate { return pgserver.CutBefore })
	p.Cut()
	<-left
	awaitGone(t, b, a.Self().Boot)
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass })
	await(t, func() bool {
		_, err := a.Get(t.Context(), []byte("key")) // it finds out without a commit
		return errors.Is(err, store.ErrUnhealthy)
	})
	<-a.Left()
	if err := a.CatchUp(t.Context()); !errors.Is(err, store.ErrUnhealthy) {
		t.Errorf("it catches up: %v", err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	again := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a", Lease: time.Hour})
	if _, err := again.Commit(t.Context(), put("key", "2")); err != nil {
		t.Errorf("after it was opened again: %v", err)
	}
}

// A process that was stopped in the middle of a transaction keeps the lock that puts all commits in order. It holds
// the others up until its lease has ended, and no longer: its session is ended, and it is removed. So it is for a
// process that takes its name over.
func TestMemberIsStoppedInACommit(t *testing.T) {
	for _, node := range []string{"a", "b"} {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			conn, stopped, schema := database(t), database(t), newSchema()
			o := postgres.Options{DSN: server.DSN(), Schema: schema, Node: node, StatementTimeout: time.Second, Lease: 2 * time.Second}
			living := join(t, o)
			if node == "a" {
				if err := living.Close(); err != nil {
					t.Fatal(err)
				}
			}
			// What is left of the process: its transaction, and its row, which may be removed from now on.
			exec(t, stopped, "begin")
			exec(t, stopped, "select from "+schema+".lease where one for update")
			exec(t, conn, `insert into `+schema+`.members (boot, node, holder, lock, session, joined, seen, expires, read, about)
				values ('stopped', 'a', 'a test', 1, false, 0, 0, 0, 0, '{}')`)
			if node == "a" {
				await(t, func() (joined bool) {
					m, err := postgres.Join(t.Context(), o)
					if err == nil {
						living = m
						t.Cleanup(func() { _ = m.Close() })
					}
					return err == nil
				})
			}
			awaitGone(t, living, "stopped")
			if _, err := living.Commit(t.Context(), put("key", "value")); err != nil {
				t.Error(err)
			}
			if _, err := stopped.Exec(t.Context(), "commit"); err == nil {
				t.Error("the session of the stopped process was not ended")
			}
		})
	}
}

// Whoever removes a member may wait for the order of commits as long as a commit does, and renews its own lease before.
func TestRenewedBeforeItRemoves(t *testing.T) {
	schema := newSchema()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	m := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a", Lease: time.Hour})
	var renewed atomic.Int64
	removes := make(chan int64, 1)
	p.Judge(func(text []byte) pgserver.Fate {
		if bytes.Contains(text, []byte("of this test")) { // what it says of itself goes with the lease
			renewed.Add(1)
		}
		if bytes.Contains(text, []byte("select epoch from")) {
			select {
			case removes <- renewed.Load():
			default:
			}
		}
		return pgserver.Pass
	})
	m.Describe(store.About{Version: "of this test"})
	await(t, func() bool { return renewed.Load() > 0 })
	before := renewed.Load()
	exec(t, database(t), "insert into "+schema+".members (boot, node, holder, lock, session, joined, seen, expires, read, about) "+
		"values ('gone', 'gone', 'a test', 1, false, 0, 0, 0, 0, '{}')")
	select {
	case n := <-removes:
		if n <= before {
			t.Error("its lease is as old as when it looked")
		}
	case <-time.After(patience):
		t.Fatal("nobody removes it")
	}
}

// A member whose session is gone at two looks stays if it has renewed its lease in between: it has had
// another session.
func TestMemberThatRenewsStays(t *testing.T) {
	schema := newSchema()
	// Without a session of its own b renews its lease at each look, and so that of a.
	b := join(t, postgres.Options{DSN: withoutSession(t), Schema: schema, Node: "b", Lease: time.Hour})
	conn := database(t)
	exec(t, conn, `create function `+schema+`.renew() returns trigger language plpgsql as $$
		begin
			update `+schema+`.members set expires = expires + 1 where node = 'a';
			return null;
		end $$`)
	exec(t, conn, "create trigger renew after update on "+schema+".members for each row when (new.node = 'b') execute function "+schema+".renew()")
	exec(t, conn, `insert into `+schema+`.members (boot, node, holder, lock, session, joined, seen, expires, read, about)
		select 'boot of a', 'a', 'a', 1, true, joined, seen, expires, read, about from `+schema+`.members`)
	var first int64
	await(t, func() bool { // b has looked several times
		var expires int64
		if err := conn.QueryRow(t.Context(), "select coalesce(max(expires), 0) from "+schema+".members where node = 'a'").Scan(&expires); err != nil {
			t.Fatal(err)
		}
		if expires == 0 {
			t.Fatal("it was removed")
		}
		if first == 0 {
			first = expires
		}
		return expires >= first+2
	})
	exec(t, conn, "drop trigger renew on "+schema+".members")
	awaitGone(t, b, "boot of a")
}

// A member that was stopped, as by SIGSTOP, keeps its sessions, and is removed when its lease has ended.
// What it had on its way comes too late.
func TestMemberIsStopped(t *testing.T) {
	schema := newSchema()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	a := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a", Lease: 2 * time.Second, StatementTimeout: time.Second})
	b := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour})
	if _, err := a.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Hold })
	late := make(chan error, 1)
	go func() {
		_, err := a.Commit(context.Background(), put("key", "late"))
		late <- err
	}()
	awaitGone(t, b, a.Self().Boot)
	if _, err := b.Commit(t.Context(), put("key", "2")); err != nil {
		t.Fatal(err)
	}
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass })
	p.Release()
	if err := <-late; err == nil || errors.As(err, new(*store.Conflict)) {
		t.Errorf("the commit that was on its way: %v", err)
	}
	await(t, func() bool {
		_, err := a.Commit(t.Context(), put("key", "later"))
		return errors.Is(err, store.ErrUnhealthy)
	})
	if got := value(t, b, "key"); got != "2" {
		t.Errorf("%q is stored", got)
	}
}

// A commit whose transaction waits for its place when its member is removed is not written, and what
// Gone says is final.
func TestRemovedWhileACommitWaits(t *testing.T) {
	schema := newSchema()
	a := join(t, postgres.Options{Schema: schema, Node: "a", Lease: time.Hour})
	b := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour})
	conn := database(t)
	for i := range 20 {
		exec(t, conn, "begin")
		exec(t, conn, "select from "+schema+".lease for update")
		done := make(chan error, 1)
		key := fmt.Sprint("key", i)
		go func() {
			_, err := a.Commit(context.Background(), put(key, "late"))
			done <- err
		}()
		awaitGroup(t)
		removed := i%2 == 1
		if removed {
			exec(t, conn, "delete from "+schema+".members where node = 'a'")
		}
		exec(t, conn, "commit")
		err := <-done
		if removed {
			if !errors.Is(err, store.ErrUnhealthy) || value(t, b, key) != "" {
				t.Fatalf("round %d: %v, and %q is stored", i, err, value(t, b, key))
			}
			awaitGone(t, b, a.Self().Boot)
			if err := a.Close(); err != nil {
				t.Fatal(err)
			}
			a = join(t, postgres.Options{Schema: schema, Node: "a", Lease: time.Hour})
		} else if err != nil || value(t, b, key) != "late" {
			t.Fatalf("round %d: %v, and %q is stored", i, err, value(t, b, key))
		}
	}
}

// A member is not removed in the middle of its commit: whoever finds it gone reads all that it has written.
func TestNotRemovedDuringACommit(t *testing.T) {
	schema := newSchema()
	a := join(t, postgres.Options{Schema: schema, Node: "a", Lease: time.Hour})
	b := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour})
	conn, other := database(t), database(t)
	const held = 77
	exec(t, conn, `create function `+schema+`.wait() returns trigger language plpgsql as $$
		begin
			perform pg_advisory_xact_lock_shared(77);
			return new;
		end $$`)
	exec(t, conn, "create trigger wait before insert on "+schema+".entries for each row execute function "+schema+".wait()")
	exec(t, conn, "select pg_advisory_lock($1)", held)
	done := make(chan error, 1)
	go func() {
		_, err := a.Commit(context.Background(), put("key", "in time"))
		done <- err
	}()
	lockWaits := func(what string, args ...any) (n int) {
		if err := other.QueryRow(t.Context(), "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and "+what, args...).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	await(t, func() bool { return lockWaits("wait_event = 'advisory'") > 0 })
	await(t, func() bool {
		exec(t, other, "update "+schema+".members set expires = 0 where node = 'a'") // again: it may renew its lease
		gone, err := b.Gone(t.Context(), a.Self().Boot)
		if err != nil || gone {
			t.Fatalf("it is gone: %t, %v, and its commit is under way", gone, err)
		}
		return lockWaits("query like 'select epoch from %' || $1 || '%for update'", schema) > 0
	})
	exec(t, conn, "select pg_advisory_unlock($1)", held)
	if err := <-done; err != nil {
		t.Errorf("the commit that was first: %v", err)
	}
	awaitGone(t, b, a.Self().Boot)
	if got := value(t, b, "key"); got != "in time" {
		t.Errorf("%q is stored", got)
	}
}

// withoutSession is a DSN by which sessions are what they are behind a pooler in transaction mode: what a
// process knows of its session is another's, and nothing is notified.
func withoutSession(t *testing.T) string {
	t.Helper()
	schema, conn := newSchema(), database(t)
	exec(t, conn, "create schema "+schema)
	exec(t, conn, "create function "+schema+".pg_backend_pid() returns int language sql as 'select 0'")
	exec(t, conn, "create function "+schema+".pg_notify(text, text) returns void language sql as 'select null::void'")
	return server.DSN() + " search_path=" + schema + ",pg_catalog"
}

// Behind a pooler the lease alone says who is there, and the feed is polled.
func TestMembersWithoutSessions(t *testing.T) {
	schema, dsn := newSchema(), withoutSession(t)
	short := postgres.Options{DSN: dsn, Schema: schema, Lease: 3 * time.Second, StatementTimeout: time.Second}
	short.Node = "a"
	a := join(t, short)
	b := join(t, postgres.Options{DSN: dsn, Schema: schema, Node: "b", Lease: time.Hour})
	conn := database(t)
	var sessions int
	if err := conn.QueryRow(t.Context(), "select count(*) from "+schema+".members where session").Scan(&sessions); err != nil || sessions != 0 {
		t.Fatalf("%d members have a session, %v", sessions, err)
	}
	changed, cancel := b.Watch([]byte("key"))
	defer cancel()
	if _, err := a.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	<-changed
	// a ends without a word: its row stays as it is.
	exec(t, conn, "create table "+schema+".kept as select * from "+schema+".members where node = 'a'")
	left := b.Left()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	<-left
	exec(t, conn, "insert into "+schema+".members select * from "+schema+".kept")
	var over bool
	left = b.Left()
	<-left
	if err := conn.QueryRow(t.Context(), "select expires <= extract(epoch from clock_timestamp()) * 1000000 from "+schema+".kept").Scan(&over); err != nil || !over {
		t.Errorf("it was removed before its lease had ended (%v)", err)
	}
	join(t, short)
}

// The feed has a row for a commit where somebody reads it, and rows that all have read are deleted.
func TestFeedIsSmall(t *testing.T) {
	schema := newSchema()
	a := join(t, postgres.Options{Schema: schema, Node: "a", Lease: time.Hour})
	conn := database(t)
	rows := func() (n int) {
		if err := conn.QueryRow(t.Context(), "select count(*) from "+schema+".feed").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	write := func(n int) {
		for i := range n {
			if _, err := a.Commit(t.Context(), put(fmt.Sprint("key", i), "1")); err != nil {
				t.Fatal(err)
			}
		}
	}
	write(10)
	if n := rows(); n != 1 {
		t.Errorf("%d rows for a member alone, want that of its joining", n)
	}
	b := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour})
	write(10)
	if n := rows(); n != 12 {
		t.Errorf("%d rows for two members and 10 commits, want 12", n)
	}
	a.PruneFeed()
	if n := rows(); n < 10 {
		t.Errorf("%d rows are left, and not all have read them", n)
	}
	for _, m := range []postgres.Member{a, b} {
		if err := m.CatchUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		m.Describe(store.About{Version: "2"}) // with it goes how far it has read
	}
	await(t, func() bool {
		a.PruneFeed()
		return rows() == 1
	})
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	before := rows()
	write(10)
	if n := rows(); n != before {
		t.Errorf("%d rows for a member that is alone again, want %d", n, before)
	}
}

// Every commit notifies the others, and they still read the feed only now and then: a commit must not cost as many
// readings as there are members. Who reads it all the time anyhow is not notified, until less is written.
func TestFeedIsReadNowAndThen(t *testing.T) {
	schema := newSchema()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	a := join(t, postgres.Options{Schema: schema, Node: "a", Lease: time.Hour})
	b := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "b", Lease: time.Hour})
	boot := []byte(b.Self().Boot)
	var seen sync.Map
	b.Follow([]byte("key"), func(key []byte) { seen.Store(string(key), true) })
	awaitSeen := func(key string) {
		t.Helper()
		await(t, func() bool {
			_, there := seen.Load(key)
			return there
		})
	}
	var readings atomic.Int64
	var listens atomic.Value
	listens.Store("listen")
	p.Judge(func(text []byte) pgserver.Fate {
		switch {
		case bytes.Contains(text, []byte("unlisten agent_guard")):
			listens.Store("unlisten")
		case bytes.Contains(text, []byte("listen agent_guard")):
			listens.Store("listen")
		case bytes.Contains(text, boot):
			readings.Add(1)
		}
		return pgserver.Pass
	})
	const commits = 300
	begun := time.Now()
	for i := range commits {
		if _, err := a.Commit(t.Context(), put(fmt.Sprint("key", i), "1")); err != nil {
			t.Fatal(err)
		}
	}
	awaitSeen(fmt.Sprint("key", commits-1))
	n, took := readings.Load(), time.Since(begun)
	if most := int64(took/(10*time.Millisecond) + 3*(took/time.Second) + 15); n > most { // a look, each second, is 3 at most
		t.Errorf("the feed was read %d times in %v for %d commits, want %d at most", n, took, commits, most)
	}

	// Many rows at a time, whatever the speed of this machine.
	conn := database(t)
	many := func() {
		exec(t, conn, "begin")
		exec(t, conn, "select from "+schema+".lease where one for update")
		exec(t, conn, "insert into "+schema+".feed select nextval('"+schema+".feed_seq'), 'c', 0, false, array['other'::bytea] from generate_series(1, 60)")
		exec(t, conn, "commit")
	}
	await(t, func() bool {
		many()
		return b.Busy()
	})
	if listens.Load() != "unlisten" {
		t.Error("it is notified of each commit while it reads all the time")
	}
	if _, err := a.Commit(t.Context(), put("key while it is busy", "1")); err != nil {
		t.Fatal(err)
	}
	awaitSeen("key while it is busy")
	await(t, func() bool { return !b.Busy() })
	if listens.Load() != "listen" {
		t.Error("nothing notifies it")
	}
	if _, err := a.Commit(t.Context(), put("key after that", "1")); err != nil {
		t.Fatal(err)
	}
	awaitSeen("key after that")
}

// A member that is far behind reports that anything may have changed; one whose database was set back
// writes nothing more.
func TestFeedIsLost(t *testing.T) {
	schema := newSchema()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	a := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: "a", Lease: time.Hour})
	b := join(t, postgres.Options{Schema: schema, Node: "b", Lease: time.Hour})
	var mu sync.Mutex
	var seen []string
	a.Follow([]byte("key"), func(key []byte) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, fmt.Sprintf("%q %t", key, key == nil))
	})
	known := func() []string {
		if err := a.CatchUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(seen)
	}
	var hold atomic.Bool
	hold.Store(true)
	p.Judge(func(text []byte) pgserver.Fate {
		if hold.Load() {
			return pgserver.Hold
		}
		return pgserver.Pass
	})
	for i := range 5 {
		if _, err := b.Commit(t.Context(), put(fmt.Sprint("key", i), "1")); err != nil {
			t.Fatal(err)
		}
	}
	conn := database(t)
	exec(t, conn, "delete from "+schema+".feed where seq < (select max(seq) from "+schema+".feed)")
	hold.Store(false)
	p.Release()
	if got := known(); !slices.Contains(got, `"" true`) || got[len(got)-1] != `"key4" false` {
		t.Errorf("%q were reported, want a nil key for what was lost, and then key4", got)
	}
	keys := make([]store.Write, 0, store.MaxBatch)
	for i := range store.MaxBatch {
		keys = append(keys, put(fmt.Sprint("other", i), ""))
	}
	if _, err := b.Commit(t.Context(), append(keys[1:], put("key", "1"))...); err != nil {
		t.Fatal(err)
	}
	if got := known(); got[len(got)-1] != `"key" false` {
		t.Errorf("%q were reported of a large commit", got)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	known()
	exec(t, conn, "delete from "+schema+".feed") // as it was before they joined
	await(t, func() bool {
		_, err := a.Get(t.Context(), []byte("key"))
		return errors.Is(err, store.ErrUnhealthy)
	})
}

// P1: of three members, on a network that cuts connections at random, none loses what was acknowledged
// or writes it twice, and each knows what the others have written.
func TestMembersCutAtRandom(t *testing.T) {
	schema := newSchema()
	var members []postgres.Member
	var seen [3]sync.Map
	for i, node := range []string{"a", "b", "c"} {
		p, err := pgserver.NewProxy(server)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		m := join(t, postgres.Options{DSN: p.DSN(), Schema: schema, Node: node, Lease: time.Hour})
		m.Follow([]byte("claim"), func(key []byte) { seen[i].Store(string(key), true) })
		var n atomic.Int64
		p.Judge(func(text []byte) pgserver.Fate {
			if !bytes.Contains(text, []byte("claim")) && !bytes.Contains(text, []byte("feed")) {
				return pgserver.Pass
			}
			switch n.Add(1) % 7 {
			case 3:
				return pgserver.CutBefore
			case 5:
				return pgserver.CutAfter
			}
			return pgserver.Pass
		})
		members = append(members, m)
	}
	const claims = 15
	var won [3]sync.Map
	var all sync.WaitGroup
	for i, m := range members {
		all.Go(func() {
			for n := range claims {
				key := fmt.Sprint("claim", n)
				_, err := m.Commit(context.Background(), claim(key, "1"))
				for errors.Is(err, store.ErrUnavailable) {
					_, err = m.Commit(context.Background(), claim(key, "1"))
				}
				switch {
				case err == nil:
					won[i].Store(key, true)
				case errors.Is(err, store.ErrUnknown):
					won[i].Store(key, false)
				case !errors.As(err, new(*store.Conflict)):
					t.Errorf("claim: %v", err)
				}
			}
		})
	}
	all.Wait()
	for n := range claims {
		key := fmt.Sprint("claim", n)
		sure, maybe := 0, 0
		for i := range members {
			if is, ok := won[i].Load(key); ok && is.(bool) {
				sure++
			} else if ok {
				maybe++
			}
		}
		if sure > 1 || sure+maybe == 0 {
			t.Errorf("%s was won %d times, and %d are unknown", key, sure, maybe)
		}
	}
	for i, m := range members {
		await(t, func() bool { return m.CatchUp(t.Context()) == nil })
		for n := range claims {
			key := fmt.Sprint("claim", n)
			if _, mine := won[i].Load(key); mine {
				continue
			}
			if _, ok := seen[i].Load(key); !ok {
				t.Errorf("%s does not know of %s", m.Self().Node, key)
			}
		}
	}
}

// A job of a member that was removed ends.
func TestJobOfARemovedMemberEnds(t *testing.T) {
	m, err := postgres.Join(t.Context(), postgres.Options{DSN: server.DSN(), Schema: newSchema(), Node: "a", Lease: postgres.DefaultLease})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	m.Lose()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	looks := 0
	fleet.Job{Fleet: fleet.Of(m), Do: func(context.Context, bool) (time.Duration, error) { looks++; return 0, nil }}.Run(ctx)
	if looks > 3 {
		t.Errorf("%d looks in 2 s", looks)
	}
}
