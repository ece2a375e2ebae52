//go:build unix

package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/guard/store/storetest"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// server is the server of all tests. Those that stop it start it again.
var server *pgserver.Server

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		server, err = pgserver.Start()
		if errors.Is(err, pgserver.ErrMissing) {
			// go test shows the second line of a package that passes as "[no tests to run]".
			fmt.Printf("%v\ntesting: warning: no tests to run\n", err)
			return 0
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
		defer func() {
			if err := server.Remove(); err != nil {
				fmt.Println(err)
			}
		}()
		return m.Run()
	}())
}

var schemas atomic.Int64

// newSchema names a schema that no other test has.
func newSchema() string { return fmt.Sprintf("test_%d", schemas.Add(1)) }

// patience bounds the waiting of tests that fail.
const patience = time.Minute

func open(t *testing.T, o postgres.Options) *postgres.Store {
	t.Helper()
	if o.DSN == "" {
		o.DSN = server.DSN()
	}
	if o.Schema == "" {
		o.Schema = newSchema()
	}
	if 0 < o.StatementTimeout && o.StatementTimeout < time.Second { // the tables may take longer
		first, err := postgres.Open(t.Context(), postgres.Options{DSN: o.DSN, Schema: o.Schema})
		if err == nil {
			err = first.Close()
		}
		if err != nil {
			t.Fatalf("make the tables: %v", err)
		}
	}
	s, err := postgres.Open(t.Context(), o)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, store.ErrClosed) {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// database is a session of the test's own.
func database(t *testing.T) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func put(key, value string) store.Write {
	return store.Write{Key: []byte(key), Value: []byte(value)}
}

func claim(key, value string) store.Write {
	return store.Write{Key: []byte(key), Value: []byte(value), If: store.Absent()}
}

// value is what is stored under key; empty if there is nothing.
func value(t *testing.T, s store.Store, key string) string {
	t.Helper()
	e, err := s.Get(t.Context(), []byte(key))
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("get %q: %v", key, err)
	}
	return string(e.Value)
}

// emptied makes a schema, and returns its name and what empties it: that takes less time than
// another schema.
func emptied(t *testing.T) (schema string, empty func()) {
	t.Helper()
	schema = newSchema()
	if err := open(t, postgres.Options{Schema: schema}).Close(); err != nil {
		t.Fatal(err)
	}
	conn := database(t)
	return schema, func() { exec(t, conn, "delete from "+schema+".entries") }
}

func TestContract(t *testing.T) {
	schema, empty := emptied(t)
	storetest.Exercise(t, func(t *testing.T, now func() time.Time) store.Store {
		empty()
		return open(t, postgres.Options{Now: now, Schema: schema})
	})
}

func TestReopen(t *testing.T) {
	storetest.Reopen(t, func(t *testing.T, now func() time.Time) func() store.Store {
		schema := newSchema()
		return func() store.Store {
			return open(t, postgres.Options{Now: now, Schema: schema, Lease: 10 * time.Second})
		}
	})
}

// TestSeveralStoresOneDatabase: the histories of three stores over one database are linearizable.
func TestSeveralStoresOneDatabase(t *testing.T) {
	schema, empty := emptied(t)
	storetest.Concurrent(t, func(t *testing.T, now func() time.Time) store.Store {
		empty()
		var all []store.Store
		for range 3 {
			all = append(all, open(t, postgres.Options{Now: now, Schema: schema}))
		}
		return storetest.Any(all...)
	})
}

// The server's clock judges what has expired, not the gateway's.
func TestServersClock(t *testing.T) {
	s := open(t, postgres.Options{})
	now, err := s.Now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	gone, stays := put("gone", "1"), put("stays", "1")
	gone.Expires, stays.Expires = now, now.Add(time.Hour)
	if _, err := s.Commit(t.Context(), gone, stays); err != nil {
		t.Fatal(err)
	}
	if value(t, s, "gone") != "" || value(t, s, "stays") != "1" {
		t.Error("an entry is judged by another clock")
	}
	later, err := s.Now(t.Context())
	if err != nil || later.Before(now) || later.Sub(now) > patience {
		t.Errorf("now = %v after %v, %v", later, now, err)
	}
}

// One caller asks for the server's time when it is old, and the others go on with the one they know.
func TestOneAsksForTheTime(t *testing.T) {
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := open(t, postgres.Options{DSN: p.DSN()})
	if _, err := s.Now(t.Context()); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	held, asked := make(chan struct{}), make(chan error, 1)
	p.Judge(func([]byte) pgserver.Fate {
		once.Do(func() { close(held) })
		return pgserver.Hold
	})
	s.AgeClock(1500 * time.Millisecond)
	go func() {
		_, err := s.Now(context.Background())
		asked <- err
	}()
	<-held
	for n := 0; ; n++ {
		s.AgeClock(1500 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := s.Now(ctx)
		cancel()
		if err == nil {
			break
		}
		if n == 9 { // it takes a machine that stands still for half a second to fail once
			t.Fatalf("all ask for the time: %v", err)
		}
	}
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass })
	p.Release()
	if err := <-asked; err != nil {
		t.Error(err)
	}
}

// P1: a commit whose connection is lost behind the request is found to have landed, and not tried
// again; one that is lost before it is written once.
func TestConnectionLostAtCommit(t *testing.T) {
	for name, fate := range map[string]pgserver.Fate{"AfterTheRequest": pgserver.CutAfter, "BeforeTheRequest": pgserver.CutBefore} {
		t.Run(name, func(t *testing.T) {
			p, err := pgserver.NewProxy(server)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			s := open(t, postgres.Options{DSN: p.DSN()})
			before, err := s.Commit(t.Context(), put("other", "0"))
			if err != nil {
				t.Fatal(err)
			}
			var once atomic.Bool
			p.Judge(func(b []byte) pgserver.Fate {
				if bytes.Contains(b, []byte("claim of this call")) && !once.Swap(true) {
					return fate
				}
				return pgserver.Pass
			})
			v, err := s.Commit(t.Context(), claim("key", "claim of this call"), put("other", "1"))
			if err != nil || !once.Load() {
				t.Fatalf("commit = version %d, %v; want the verdict of the commit that was cut (cut %t)", v, err, once.Load())
			}
			e, err := s.Get(t.Context(), []byte("key"))
			if err != nil || e.Version != v {
				t.Fatalf("get = version %d, %v; want %d", e.Version, err, v)
			}
			var off int // groups that were called off, before the server came to carry them out
			if err := database(t).QueryRow(t.Context(), "select count(*) from "+schemaOf()+".commits where winners is null").Scan(&off); err != nil {
				t.Fatal(err)
			}
			if fate == pgserver.CutAfter && v != before+1 && off == 0 {
				t.Errorf("version %d follows %d: it was written twice", v, before)
			}
			var lost *store.Conflict
			if _, err := s.Commit(t.Context(), claim("key", "another")); !errors.As(err, &lost) || lost.Found.Version != v {
				t.Errorf("a second claim = %v, want a conflict with version %d", err, v)
			}
		})
	}
}

// A commit whose verdict cannot be found out in time is unknown. Before the store writes anything
// else it is settled, and cannot land afterwards.
func TestUnknownCommitDoesNotLandLater(t *testing.T) {
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := open(t, postgres.Options{DSN: p.DSN(), StatementTimeout: 100 * time.Millisecond})
	if _, err := s.Commit(t.Context(), put("key", "first")); err != nil {
		t.Fatal(err)
	}
	var holding atomic.Bool
	holding.Store(true)
	p.Judge(func([]byte) pgserver.Fate {
		if holding.Load() {
			return pgserver.Hold
		}
		return pgserver.Pass
	})
	begun := time.Now()
	if _, err := s.Commit(t.Context(), put("key", "late")); !errors.Is(err, store.ErrUnknown) {
		t.Fatalf("commit that the server has not got = %v, want ErrUnknown", err)
	}
	if took := time.Since(begun); took > patience {
		t.Errorf("it took %v", took)
	}
	holding.Store(false)
	v, err := s.Commit(t.Context(), put("key", "next"))
	for errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) { // a connection that was held
		v, err = s.Commit(t.Context(), put("key", "next"))
	}
	if err != nil {
		t.Fatal(err)
	}
	p.Release() // the server gets the late commit now
	awaitNoOther(t, s, v)
}

// awaitNoOther returns when no other session works, and checks that the entry under "key" is the
// one of version v.
func awaitNoOther(t *testing.T, s store.Store, v store.Version) {
	t.Helper()
	conn := database(t)
	for late := time.Now().Add(patience); ; {
		var busy int
		err := conn.QueryRow(t.Context(), "select count(*) from pg_stat_activity where pid <> pg_backend_pid() and backend_type = 'client backend' and state <> 'idle'").Scan(&busy)
		if err != nil {
			t.Fatal(err)
		}
		if busy == 0 {
			break
		}
		if time.Now().After(late) {
			t.Fatal("sessions stay busy")
		}
		<-time.After(10 * time.Millisecond)
	}
	if e, err := s.Get(t.Context(), []byte("key")); err != nil || e.Version != v || string(e.Value) != "next" {
		t.Fatalf("get = %q, version %d, %v; want \"next\", %d: a commit landed that had been settled", e.Value, e.Version, err, v)
	}
}

type groups struct {
	mu   sync.Mutex
	seen []int
}

func (g *groups) Committed(batches int, _ time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen = append(g.seen, batches)
}

// Commits that come while one is under way go together, and each gets its own verdict.
func TestGroupCommit(t *testing.T) {
	var seen groups
	s := open(t, postgres.Options{Observer: &seen})
	if _, err := s.Commit(t.Context(), put("taken", "0")); err != nil {
		t.Fatal(err)
	}
	release := lockLease(t, s)
	const callers = 100
	errs := make([]error, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			key := fmt.Sprint("key", i)
			if i%10 == 0 {
				key = "taken"
			}
			_, errs[i] = s.Commit(context.Background(), claim(key, "1"), put(fmt.Sprint("beside", i), "1"))
		})
		if i == 0 {
			awaitGroup(t) // of this one alone, so that all others wait for the next one
		}
	}
	awaitWaiting(t, s, callers)
	release()
	all.Wait()
	for i, err := range errs {
		var lost *store.Conflict
		if i%10 == 0 != errors.As(err, &lost) || err != nil && lost == nil {
			t.Errorf("caller %d: %v", i, err)
		}
		if _, err := s.Get(t.Context(), []byte(fmt.Sprint("beside", i))); (err == nil) == (i%10 == 0) {
			t.Errorf("caller %d: what is beside its claim: %v", i, err)
		}
	}
	if n := len(seen.seen); n > 3 {
		t.Errorf("%d transactions for %d concurrent commits: %v", n-1, callers, seen.seen)
	}
}

// Batches of one group that check and write the same keys have one order, and checks of one key need no
// statement of their own.
func TestChecksInAGroup(t *testing.T) {
	var seen groups
	s := open(t, postgres.Options{Observer: &seen})
	if _, err := s.Commit(t.Context(), put("other", "0")); err != nil {
		t.Fatal(err)
	}
	release := lockLease(t, s)
	check := store.Write{Key: []byte("key"), If: store.Absent(), Check: true}
	batches := [][]store.Write{
		{put("first of all", "1")},
		{put("a", "1"), check},
		{put("b", "1"), check},
		{put("a", "2"), check}, // in a later step than what is before it, and so is the claim
		{claim("key", "1")},
		{put("c", "1"), check},
		{put("d", "1"), {Key: []byte("a"), If: store.Absent(), Check: true}},
	}
	errs := make([]error, len(batches))
	var all sync.WaitGroup
	for i, batch := range batches {
		all.Go(func() { _, errs[i] = s.Commit(context.Background(), batch...) })
		if i == 0 {
			awaitGroup(t)
		} else {
			awaitWaiting(t, s, i+1)
		}
	}
	release()
	all.Wait()
	for i, won := range []bool{true, true, true, true, true, false, false} {
		var lost *store.Conflict
		if won && errs[i] != nil || !won && (!errors.As(errs[i], &lost) || lost.Index != 1 || lost.Found == nil) {
			t.Errorf("batch %d: %v, won %t", i, errs[i], won)
		}
	}
	if n := len(seen.seen); n > 4 {
		t.Errorf("%d transactions: %v", n, seen.seen)
	}
	if got := value(t, s, "key"); got != "1" {
		t.Errorf("%q is stored", got)
	}
}

// schemaOf is the schema of the store that was opened last.
func schemaOf() string { return fmt.Sprintf("test_%d", schemas.Load()) }

// lockLease holds the lock that every commit needs, until the returned function.
func lockLease(t *testing.T, _ store.Store) (release func()) {
	t.Helper()
	conn := database(t)
	exec(t, conn, "begin")
	exec(t, conn, "select from "+schemaOf()+".lease for update")
	return func() { exec(t, conn, "rollback") }
}

// awaitGroup returns when a group of commits waits for the lock of lockLease.
func awaitGroup(t *testing.T) {
	t.Helper()
	conn, waits := database(t), 0
	for late := time.Now().Add(patience); waits == 0; {
		err := conn.QueryRow(t.Context(), "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like 'select epoch from %' || $1 || '%for update'", schemaOf()).Scan(&waits)
		if err != nil || time.Now().After(late) {
			t.Fatalf("no group waits: %v", err)
		}
	}
}

// awaitWaiting returns when n commits have been queued: all goroutines are in Commit, and one group
// waits for the lock.
func awaitWaiting(t *testing.T, s *postgres.Store, n int) {
	t.Helper()
	for late := time.Now().Add(patience); s.Waiting() < n-1; {
		if time.Now().After(late) {
			t.Fatalf("%d commits wait, want %d", s.Waiting(), n-1)
		}
		<-time.After(time.Millisecond)
	}
}

// Deadlocks and serialization failures are tried again.
func TestTriedAgain(t *testing.T) {
	for _, state := range []string{"40001", "40P01"} {
		s := open(t, postgres.Options{})
		conn := database(t)
		schema := schemaOf()
		exec(t, conn, "create sequence "+schema+".tries")
		exec(t, conn, `create function `+schema+`.fail() returns trigger language plpgsql as $$
			begin
				if nextval('`+schema+`.tries') < 3 then raise exception using errcode = '`+state+`'; end if;
				return new;
			end $$`)
		exec(t, conn, "create trigger fail before insert on "+schema+".entries for each row execute function "+schema+".fail()")
		if _, err := s.Commit(t.Context(), claim("key", "1")); err != nil {
			t.Errorf("%s: %v", state, err)
		}
		if got := value(t, s, "key"); got != "1" {
			t.Errorf("%s: %q is stored", state, got)
		}
	}
}

// A lock that somebody holds, or a pool without a free connection, ends in an error that nothing
// was written, in time.
func TestLockHeld(t *testing.T) {
	s := open(t, postgres.Options{StatementTimeout: time.Second, PoolSize: 2})
	if _, err := s.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	conn := database(t)
	exec(t, conn, "begin")
	exec(t, conn, "lock table "+schemaOf()+".entries in access exclusive mode")
	begun := time.Now()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			var err error
			if i%2 == 0 {
				_, err = s.Commit(context.Background(), put("key", "2"))
			} else {
				_, err = s.Get(context.Background(), []byte("key"))
			}
			if !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("call %d beside a lock: %v, want ErrUnavailable", i, err)
			}
		})
	}
	all.Wait()
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	exec(t, conn, "rollback")
	if got := value(t, s, "key"); got != "1" {
		t.Errorf("%q is stored, want what was there before", got)
	}
}

// A server that is stopped, killed and started again loses nothing that was acknowledged, and needs
// no new opening.
func TestServerStopsAndComesBack(t *testing.T) {
	for name, end := range map[string]func() error{"Stopped": server.Stop, "Killed": server.Kill} {
		t.Run(name, func(t *testing.T) {
			s := open(t, postgres.Options{Lease: 10 * time.Second})
			var acknowledged sync.Map
			stop := make(chan struct{})
			var some atomic.Int64
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
						if v, err := s.Commit(context.Background(), claim(key, "1")); err == nil {
							acknowledged.Store(key, v)
							some.Add(1)
						} else if errors.As(err, new(*store.Conflict)) {
							t.Errorf("the first claim of %s: %v", key, err)
						} else if !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUnknown) {
							t.Errorf("claim: %v", err)
						}
					}
				})
			}
			await(t, func() bool { return some.Load() > 20 })
			if err := end(); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Get(t.Context(), []byte("x")); !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("get without a server: %v, want ErrUnavailable", err)
			}
			if err := server.Run(); err != nil {
				t.Fatal(err)
			}
			back := some.Load()
			await(t, func() bool { return some.Load() > back+20 })
			close(stop)
			all.Wait()
			acknowledged.Range(func(key, v any) bool {
				if e, err := s.Get(t.Context(), []byte(key.(string))); err != nil || e.Version != v {
					t.Errorf("%s was acknowledged as version %d, and is %d, %v", key, v, e.Version, err)
				}
				return true
			})
		})
	}
}

// P1, P2: a network that cuts connections at random, before a request, behind it, or between two,
// loses nothing that was acknowledged, and writes nothing twice.
func TestConnectionsCutAtRandom(t *testing.T) {
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := open(t, postgres.Options{DSN: p.DSN(), Lease: 10 * time.Second})
	var cuts atomic.Int64
	p.Judge(func(b []byte) pgserver.Fate {
		if !bytes.Contains(b, []byte("claim")) || rand.IntN(3) > 0 {
			return pgserver.Pass
		}
		cuts.Add(1)
		return []pgserver.Fate{pgserver.CutBefore, pgserver.CutAfter}[rand.IntN(2)]
	})
	const callers, claims, enough = 8, 20, 5 // cuts; in a group the commits of all callers are one request
	var all sync.WaitGroup
	for caller := range callers {
		all.Go(func() {
			for i := 0; i < claims || cuts.Load() < enough; i++ {
				key := fmt.Sprintf("%d-%d", caller, i)
				v, err := s.Commit(context.Background(), claim(key, "claim"), put("last", key))
				for errors.Is(err, store.ErrUnavailable) { // nothing was written
					v, err = s.Commit(context.Background(), claim(key, "claim"), put("last", key))
				}
				if errors.Is(err, store.ErrUnknown) {
					continue
				}
				if err != nil {
					t.Errorf("the only claim of %s: %v", key, err)
					continue
				}
				if e, err := s.Get(context.Background(), []byte(key)); err != nil || e.Version != v {
					t.Errorf("%s was acknowledged as version %d, and is %d, %v", key, v, e.Version, err)
				}
			}
		})
	}
	all.Wait()
}

// A server that takes everything and answers nothing holds nobody up for long, and what it was
// asked for counts as unknown, or as not written.
func TestServerHangs(t *testing.T) {
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := open(t, postgres.Options{DSN: p.DSN(), StatementTimeout: 100 * time.Millisecond})
	if _, err := s.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Hold })
	begun := time.Now()
	var all sync.WaitGroup
	for i := range 6 {
		all.Go(func() {
			var err error
			switch i % 3 {
			case 0:
				_, err = s.Commit(context.Background(), put("key", "2"))
			case 1:
				_, err = s.Get(context.Background(), []byte("key"))
			case 2:
				for _, err = range s.Scan(context.Background(), store.Range{}) {
				}
			}
			if !errors.Is(err, store.ErrUnavailable) && !(i%3 == 0 && errors.Is(err, store.ErrUnknown)) {
				t.Errorf("call %d: %v", i, err)
			}
		})
	}
	all.Wait()
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass })
	p.Release()
	await(t, func() bool {
		_, err := s.Commit(context.Background(), put("key", "3"))
		return err == nil
	})
	if got := value(t, s, "key"); got != "3" {
		t.Errorf("%q is stored", got)
	}
}

func await(t *testing.T, what func() bool) {
	t.Helper()
	for late := time.Now().Add(patience); !what(); {
		if time.Now().After(late) {
			t.Fatal("it does not happen")
		}
		<-time.After(5 * time.Millisecond)
	}
}

// One gateway at a time: a second one is refused while the first lives, and takes over at once when
// it closed, and soon when its sessions are gone. The first then writes nothing more.
func TestLease(t *testing.T) {
	schema := newSchema()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	first := open(t, postgres.Options{DSN: p.DSN(), Schema: schema, Lease: 10 * time.Second})
	if _, err := first.Commit(t.Context(), put("key", "first")); err != nil {
		t.Fatal(err)
	}
	second := postgres.Options{DSN: server.DSN(), Schema: schema, Lease: 10 * time.Second}
	if s, err := postgres.Open(t.Context(), second); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "another gateway") {
		if err == nil {
			_ = s.Close()
		}
		t.Fatalf("a second store = %v, want that another gateway has it", err)
	}
	// The first is cut off, as by a network that does not come back.
	p.Judge(func([]byte) pgserver.Fate { return pgserver.CutBefore })
	p.Cut()
	awaitSessions(t, schema, 0)
	taken := open(t, second)
	if got := value(t, taken, "key"); got != "first" {
		t.Errorf("%q was taken over", got)
	}
	if _, err := taken.Commit(t.Context(), put("key", "second")); err != nil {
		t.Fatal(err)
	}
	changed, cancel := first.Watch([]byte("key"))
	defer cancel()
	p.Judge(func([]byte) pgserver.Fate { return pgserver.Pass }) // it comes back
	if _, err := first.Commit(t.Context(), put("key", "late")); !errors.Is(err, store.ErrUnhealthy) {
		t.Errorf("a commit without the lease = %v, want ErrUnhealthy", err)
	}
	if _, err := first.Get(t.Context(), []byte("key")); !errors.Is(err, store.ErrUnhealthy) {
		t.Errorf("a read without the lease = %v, want ErrUnhealthy", err)
	}
	<-changed
	if got := value(t, taken, "key"); got != "second" {
		t.Errorf("%q is stored: the first wrote without the lease", got)
	}
	if err := taken.Close(); err != nil {
		t.Fatal(err)
	}
	if got := value(t, open(t, second), "key"); got != "second" {
		t.Errorf("%q after an orderly close", got)
	}
}

// A lease is renewed by the session that holds it, and if that is lost by a new one, which holds it
// as well.
func TestLeaseIsRenewed(t *testing.T) {
	schema := newSchema()
	s := open(t, postgres.Options{Schema: schema, Lease: 2 * time.Second, StatementTimeout: time.Second})
	conn := database(t)
	ends := func() (expires int64) {
		if err := conn.QueryRow(t.Context(), "select expires from "+schema+".members").Scan(&expires); err != nil {
			t.Fatal(err)
		}
		return expires
	}
	// The other tests' stores are closed: one session has an advisory lock.
	holder := func() (pid int) {
		err := conn.QueryRow(t.Context(), "select coalesce(max(pid), 0) from pg_locks where locktype = 'advisory'").Scan(&pid)
		if err != nil {
			t.Fatal(err)
		}
		return pid
	}
	first := holder()
	for range 2 {
		before, left := ends(), s.Stats().LeaseEnds
		await(t, func() bool { return ends() > before })
		await(t, func() bool { return s.Stats().LeaseEnds.After(left) })
	}
	if left := time.Until(s.Stats().LeaseEnds); left <= 0 || left > 2*time.Second {
		t.Errorf("the lease of 2s, just renewed, ends in %v", left)
	}
	if again := holder(); first == 0 || again != first {
		t.Errorf("the lease went from session %d to %d while nothing was lost", first, again)
	}
	exec(t, conn, "select pg_terminate_backend($1)", first)
	await(t, func() bool { again := holder(); return again != 0 && again != first })
	before := ends()
	await(t, func() bool { return ends() > before })
	if _, err := s.Commit(t.Context(), put("key", "1")); err != nil {
		t.Errorf("a commit after the session of the lease was lost: %v", err)
	}
}

// A holder that does not renew its lease, though its session lives, loses it when it ends by the
// server's clock.
func TestLeaseEndsByTheServersClock(t *testing.T) {
	schema := newSchema()
	first := open(t, postgres.Options{Schema: schema, Lease: time.Hour})
	second := postgres.Options{DSN: server.DSN(), Schema: schema, Lease: 10 * time.Second}
	if s, err := postgres.Open(t.Context(), second); err == nil {
		_ = s.Close()
		t.Fatal("two stores have one lease")
	}
	exec(t, database(t), "update "+schema+".members set expires = (extract(epoch from clock_timestamp()) * 1000000)::bigint")
	open(t, second)
	if _, err := first.Commit(t.Context(), put("key", "late")); !errors.Is(err, store.ErrUnhealthy) {
		t.Errorf("a commit after the lease = %v, want ErrUnhealthy", err)
	}
}

// A schema of a newer version, or with something else in it, is refused for good.
func TestSchemaRefused(t *testing.T) {
	conn := database(t)
	newer := newSchema()
	s := open(t, postgres.Options{Schema: newer})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	exec(t, conn, "insert into "+newer+".migrations (version) values (1000)")
	other := newSchema()
	exec(t, conn, "create schema "+other)
	exec(t, conn, "create table "+other+".invoices (id int)")
	for schema, want := range map[string]string{newer: "of version 1000", other: "holds other tables"} {
		s, err := postgres.Open(t.Context(), postgres.Options{DSN: server.DSN(), Schema: schema})
		if err == nil {
			_ = s.Close()
		}
		if err == nil || errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), want) {
			t.Errorf("open = %v, want an error with %q that does not pass by itself", err, want)
		}
	}
}

// Stores that are opened at the same time bring a schema to its version one after the other.
func TestMigrationsAtTheSameTime(t *testing.T) {
	schema := newSchema()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			s, err := postgres.Open(context.Background(), postgres.Options{DSN: server.DSN(), Schema: schema})
			if err != nil {
				t.Errorf("open: %v", err)
				return
			}
			if _, err := s.Commit(context.Background(), put("key", "1")); err != nil {
				t.Errorf("commit: %v", err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// What has expired is deleted, without waiting for what somebody has locked.
func TestSweep(t *testing.T) {
	schema := newSchema()
	now := time.Now().Add(-time.Hour)
	s := open(t, postgres.Options{Schema: schema, Now: func() time.Time { return now }}) // for it nothing has expired
	for i := range 3 {
		var batch []store.Write
		for j := range store.MaxBatch {
			w := put(fmt.Sprintf("%d-%d", i, j), "1")
			w.Expires = now.Add(time.Minute)
			batch = append(batch, w)
		}
		if _, err := s.Commit(t.Context(), batch...); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Commit(t.Context(), put("stays", "1")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	conn, other := database(t), database(t)
	exec(t, other, "begin")
	exec(t, other, "select from "+schema+".entries where key = '1-1' for update")
	open(t, postgres.Options{Schema: schema}) // it sweeps first
	left := func() (n int) {
		if err := conn.QueryRow(t.Context(), "select count(*) from "+schema+".entries").Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
	await(t, func() bool { return left() == 2 })
}

// planOf is the server's plan of a statement whose parameters it does not know; those that are not given are NULL.
func planOf(t *testing.T, conn *pgx.Conn, text, how string, given ...string) []string {
	t.Helper()
	exec(t, conn, "set plan_cache_mode = force_generic_plan")
	exec(t, conn, "set enable_seqscan = off")
	d, err := conn.Prepare(t.Context(), "of a plan", text)
	if err != nil {
		t.Fatal(err)
	}
	for len(given) < len(d.ParamOIDs) {
		given = append(given, "null")
	}
	rows, err := conn.Query(t.Context(), "explain ("+how+") execute \"of a plan\" ("+strings.Join(given, ", ")+")")
	if err != nil {
		t.Fatal(err)
	}
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(plan) < 2 {
		t.Fatalf("%d lines of a plan: %v", len(plan), err)
	}
	if err := conn.Deallocate(t.Context(), "of a plan"); err != nil {
		t.Fatal(err)
	}
	return plan
}

// A sweep reads what has expired, and not what has not: with a full store, that would be all of it, every ten
// seconds, by each gateway.
func TestSweepReadsWhatHasExpiredAlone(t *testing.T) {
	s := open(t, postgres.Options{})
	for i := range 4 {
		var batch []store.Write
		for j := range store.MaxBatch {
			w := put(fmt.Sprintf("%d-%d", i, j), "1")
			w.Expires = time.Now().Add(time.Hour)
			batch = append(batch, w)
		}
		if _, err := s.Commit(t.Context(), batch...); err != nil {
			t.Fatal(err)
		}
	}
	conn, looked := database(t), 0
	for _, text := range postgres.Prepared(schemaOf(), "channel") {
		if !strings.Contains(text, "order by expires limit") {
			continue
		}
		looked++
		plan := planOf(t, conn, text, "analyze, costs off, timing off", "1000")
		if whole := strings.Join(plan, "\n"); strings.Contains(whole, "Removed by Filter") {
			t.Errorf("it reads what has not expired:\n%s", whole)
		}
	}
	if looked != 1 {
		t.Errorf("%d statements sweep", looked)
	}
}

// Nothing of the DSN is in an error or in the log.
func TestDSNIsNotShown(t *testing.T) {
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for _, dsn := range []string{
		"postgres://secretrole:secretword@secrethost.invalid:1/secretbase",
		"postgres://secretrole:secretword@127.0.0.1:1/secretbase",
		strings.Replace(server.DSN(), "user=postgres", "user=secretrole password=secretword", 1),
		strings.Replace(server.DSN(), "dbname=postgres", "dbname=secretbase", 1),
		"host=secrethost.invalid user='secretrole password=secretword",
		"postgres://secretrole:secretword@secrethost.invalid:secretport/secretbase",
		"",
	} {
		s, err := postgres.Open(t.Context(), postgres.Options{DSN: dsn, Schema: newSchema(), Logger: logger})
		if err == nil {
			_ = s.Close()
			t.Errorf("a store was opened at %q", dsn)
			continue
		}
		if strings.Contains(err.Error()+log.String(), "secret") || strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("the error or the log has a part of the DSN: %v\n%s", err, log.String())
		}
	}
}

// Two DSNs of one database are one store, whoever logs in; another schema is another.
func TestName(t *testing.T) {
	name := func(dsn, schema string) string {
		t.Helper()
		got, err := postgres.Check(postgres.Options{DSN: dsn, Schema: schema})
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	a := name("postgres://one:secret@db.example.com:5432/main", "")
	if b := name("host=db.example.com user=two password=other dbname=main sslmode=disable", "agent_guard"); a != b {
		t.Errorf("%s and %s for one database", a, b)
	}
	for _, other := range []string{
		name("postgres://one@db.example.com:5432/other", ""), name("postgres://one@db.example.com:5433/main", ""),
		name("postgres://one@db.example.com:5432/main", "second"),
	} {
		if other == a {
			t.Errorf("%s names two stores", a)
		}
	}
	if strings.Contains(a, "example") || strings.Contains(a, "main") || !strings.HasPrefix(a, "postgres:agent_guard@") {
		t.Errorf("the name is %s", a)
	}
	for what, o := range map[string]postgres.Options{
		"schema":            {Schema: `a"; drop table x; --`},
		"pool_max_conns":    {PoolSize: 1},
		"statement_timeout": {StatementTimeout: time.Minute},
		"lease":             {Lease: time.Second},
		"node":              {Node: "gateway one"},
	} {
		o.DSN = server.DSN()
		if _, err := postgres.Check(o); err == nil || !strings.HasPrefix(err.Error(), what+":") {
			t.Errorf("a bad %s: %v", what, err)
		}
	}
	for in, want := range map[string]string{ // empty is taken
		"pool_max_conns=2": "", "pool_max_conns=1": "pool_max_conns: 1 connections", "pool_max_conns=0": "pool_max_conns: 0", "pool_max_conns=x": "pool_max_conns: 0",
		"statement_timeout=2000": "", "statement_timeout=2s": "", "statement_timeout=0": "statement_timeout: 0s", "statement_timeout=1min": "statement_timeout: 0s",
		"statement_timeout=8s": "statement_timeout: 8s", "statement_timeout=99": "statement_timeout: 99ms",
	} {
		_, err := postgres.Check(postgres.Options{DSN: server.DSN() + " " + in})
		if want == "" && err != nil || want != "" && (err == nil || !strings.HasPrefix(err.Error(), want)) {
			t.Errorf("%s in the DSN: %v", in, err)
		}
	}
}

// A new password is used for new connections, and another database is refused.
func TestSetDSN(t *testing.T) {
	s := open(t, postgres.Options{})
	if err := s.SetDSN(server.DSN() + " password=new"); err != nil {
		t.Error(err)
	}
	if err := s.SetDSN(strings.Replace(server.DSN(), "dbname=postgres", "dbname=secretbase", 1)); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("another database: %v", err)
	}
}
