//go:build unix

package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
	"github.com/agent-guard/caddy-agent-guard/internal/pgserver"
)

// readsThrough is a store behind a proxy. From the call of count on it has the sizes of the statements that a key with
// a mark is sent with, and asks judge about each, with its number from 1.
type readsThrough struct {
	*postgres.Store
	proxy *pgserver.Proxy
	count func()
	mu    sync.Mutex
	sizes []int
}

func openReads(t *testing.T, o postgres.Options, mark string, judge func(n int) pgserver.Fate) *readsThrough {
	t.Helper()
	p, err := pgserver.NewProxy(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	o.DSN = p.DSN()
	r := &readsThrough{Store: open(t, o), proxy: p}
	r.count = func() { p.Judge(r.judged(mark, judge)) }
	return r
}

func (r *readsThrough) judged(mark string, judge func(n int) pgserver.Fate) func([]byte) pgserver.Fate {
	return func(b []byte) pgserver.Fate {
		if b[0] != 'B' || !bytes.Contains(b, []byte(mark)) { // the values of a statement
			return pgserver.Pass
		}
		r.mu.Lock()
		r.sizes = append(r.sizes, len(b))
		n := len(r.sizes)
		r.mu.Unlock()
		return judge(n)
	}
}

func (r *readsThrough) statements() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]int(nil), r.sizes...)
}

func passed(int) pgserver.Fate { return pgserver.Pass }

// got is what a Get returned.
type got struct {
	store.Entry
	err error
}

// getAll begins to get all keys at once, and returns where the answers come.
func getAll(ctx context.Context, s store.Store, keys ...string) (answers []chan got) {
	for _, key := range keys {
		c := make(chan got, 1)
		answers = append(answers, c)
		go func() {
			e, err := s.Get(ctx, []byte(key))
			c <- got{e, err}
		}()
	}
	return answers
}

func awaitReads(t *testing.T, s *postgres.Store, running, waiting int) {
	t.Helper()
	await(t, func() bool {
		r, w := s.Reads()
		return r == running && w == waiting
	})
}

// Gets that wait go together, and each is answered for itself: what is there, what is not, what has expired, what
// several ask for, and what is too large to go with others. Who was answered owns the value.
func TestReadsShareStatements(t *testing.T) {
	now := time.Now().Truncate(time.Microsecond)
	s := openReads(t, postgres.Options{Now: func() time.Time { return now }, StatementTimeout: 7 * time.Second}, "read-", passed)
	want := map[string]store.Write{
		"read-empty":   put("read-empty", ""),
		"read-expires": {Key: []byte("read-expires"), Value: []byte("soon"), Expires: now.Add(time.Microsecond)},
		"read-gone":    {Key: []byte("read-gone"), Value: []byte("late"), Expires: now},
		"read-limit":   {Key: []byte("read-limit"), Value: bytes.Repeat([]byte("l"), 16<<10)},
		"read-over":    {Key: []byte("read-over"), Value: bytes.Repeat([]byte("o"), 16<<10+1)},
		"read-large":   {Key: []byte("read-large"), Value: bytes.Repeat([]byte("L"), store.MaxBulk), Bulk: true, Expires: now.Add(time.Hour)},
	}
	for i := range 40 {
		key := fmt.Sprint("read-", i)
		want[key] = put(key, "value of "+key)
	}
	versions := make(map[string]store.Version)
	for key, w := range want {
		v, err := s.Commit(t.Context(), w)
		if err != nil {
			t.Fatal(err)
		}
		versions[key] = v
	}
	delete(want, "read-gone")
	var keys []string
	for i := range 250 { // 40 of them there, some for several
		keys = append(keys, fmt.Sprint("read-", i/2*2%200))
	}
	keys = append(keys, "read-empty", "read-expires", "read-gone", "read-limit", "read-over", "read-large", "read-over", "read-none", "read-\x00")
	s.count()
	release := s.HoldReads()
	answers := getAll(context.Background(), s, keys...)
	await(t, func() bool { _, waiting := s.Reads(); return waiting == len(keys) })
	release()
	for i, key := range keys {
		a := <-answers[i]
		w, there := want[key]
		switch {
		case !there:
			if !errors.Is(a.err, store.ErrNotFound) {
				t.Errorf("%q: %v, want ErrNotFound", key, a.err)
			}
			continue
		case a.err != nil:
			t.Errorf("%q: %v", key, a.err)
			continue
		}
		if string(a.Key) != key || !bytes.Equal(a.Value, w.Value) || a.Value == nil || a.Version != versions[key] || !a.Expires.Equal(w.Expires) {
			t.Errorf("%q: %q, %d bytes, version %d, expires %v", key, a.Key, len(a.Value), a.Version, a.Expires)
		}
		clear(a.Value) // others still have theirs
	}
	// 259 keys are two statements, for at most 256 go together; three callers read a large value alone.
	if n := len(s.statements()); n != 5 {
		t.Errorf("%d statements", n)
	}
	awaitReads(t, s.Store, 0, 0)
}

// A caller that leaves is answered at once, wherever its Get is, and takes nobody with it.
func TestReaderLeaves(t *testing.T) {
	for _, where := range []string{"waits", "is in a group", "is alone"} {
		t.Run(where, func(t *testing.T) {
			s := openReads(t, postgres.Options{}, "read-", func(n int) pgserver.Fate {
				if where != "waits" && n == 1 {
					return pgserver.Hold
				}
				return pgserver.Pass
			})
			if _, err := s.Commit(t.Context(), put("stays", "1")); err != nil {
				t.Fatal(err)
			}
			s.count()
			s.GroupReads(1, time.Hour)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			release := func() {}
			if where != "is alone" {
				release = s.HoldReads()
			}
			leaves := getAll(ctx, s, "read-leaves")[0]
			awaitReads(t, s.Store, 1, map[string]int{"waits": 1, "is in a group": 1}[where])
			if where == "is in a group" {
				stays := getAll(t.Context(), s, "stays")[0]
				awaitReads(t, s.Store, 1, 2)
				release()
				await(t, func() bool { return len(s.statements()) == 1 })
				leave()
				if a := <-leaves; !errors.Is(a.err, context.Canceled) {
					t.Errorf("who leaves: %v", a.err)
				}
				select {
				case a := <-stays:
					t.Errorf("who stays, before the answer: %v", a.err)
				default:
				}
				s.proxy.Release()
				if a := <-stays; a.err != nil || string(a.Value) != "1" || len(s.statements()) != 1 {
					t.Errorf("who stays: %q, %v after %d statements", a.Value, a.err, len(s.statements()))
				}
				return
			}
			if where == "is alone" {
				await(t, func() bool { return len(s.statements()) == 1 })
			}
			stays := getAll(t.Context(), s, "stays")[0]
			awaitReads(t, s.Store, 1, map[string]int{"waits": 2, "is alone": 1}[where])
			leave()
			if a := <-leaves; !errors.Is(a.err, context.Canceled) {
				t.Errorf("who leaves: %v", a.err)
			}
			release()
			if a := <-stays; a.err != nil || string(a.Value) != "1" {
				t.Errorf("who stays: %q, %v", a.Value, a.err)
			}
			s.proxy.Release()
			if n := len(s.statements()); where == "waits" && n != 0 {
				t.Errorf("%d statements for a caller that has left", n)
			}
			awaitReads(t, s.Store, 0, 0)
		})
	}
}

// A statement that takes long holds up no other: it may be on a connection that hangs.
func TestSlowReadHoldsUpNobody(t *testing.T) {
	for _, group := range []bool{false, true} {
		s := openReads(t, postgres.Options{StatementTimeout: 7 * time.Second}, "read-slow", func(n int) pgserver.Fate { return pgserver.Hold })
		if _, err := s.Commit(t.Context(), put("other", "1")); err != nil {
			t.Fatal(err)
		}
		s.count()
		s.GroupReads(1, 50*time.Millisecond)
		release := func() {}
		if group {
			release = s.HoldReads()
		}
		slow := getAll(t.Context(), s, "read-slow")[0]
		if group {
			awaitReads(t, s.Store, 1, 1)
			release()
		}
		await(t, func() bool { return len(s.statements()) == 1 })
		if got := value(t, s, "other"); got != "1" {
			t.Errorf("beside a slow one: %q", got)
		}
		select {
		case a := <-slow:
			t.Errorf("the slow one: %v", a.err)
		default:
		}
		awaitReads(t, s.Store, 0, 0)
		s.proxy.Release()
		if a := <-slow; !errors.Is(a.err, store.ErrNotFound) {
			t.Errorf("the slow one: %v", a.err)
		}
		awaitReads(t, s.Store, 0, 0)
	}
}

// A group whose connection is lost is read again on another; a server that never answers is given up in time.
func TestReadsLoseTheirConnection(t *testing.T) {
	for name, fate := range map[string]pgserver.Fate{"before": pgserver.CutBefore, "after": pgserver.CutAfter, "hangs": pgserver.Hold} {
		t.Run(name, func(t *testing.T) {
			o := postgres.Options{StatementTimeout: 7 * time.Second}
			if fate == pgserver.Hold {
				o.StatementTimeout = 500 * time.Millisecond
			}
			s := openReads(t, o, "read-", func(n int) pgserver.Fate {
				if n == 1 || fate == pgserver.Hold {
					return fate
				}
				return pgserver.Pass
			})
			var keys []string
			for i := range 20 {
				keys = append(keys, fmt.Sprint("read-", i))
			}
			if _, err := s.Commit(t.Context(), put("read-1", "1")); err != nil {
				t.Fatal(err)
			}
			s.count()
			begun, release := time.Now(), s.HoldReads()
			answers := getAll(t.Context(), s, keys...)
			await(t, func() bool { _, waiting := s.Reads(); return waiting == len(keys) })
			release()
			for i, key := range keys {
				a := <-answers[i]
				switch {
				case fate == pgserver.Hold:
					if !errors.Is(a.err, store.ErrUnavailable) {
						t.Errorf("%s: %v", key, a.err)
					}
				case key == "read-1":
					if a.err != nil || string(a.Value) != "1" {
						t.Errorf("%s: %q, %v", key, a.Value, a.err)
					}
				case !errors.Is(a.err, store.ErrNotFound):
					t.Errorf("%s: %v", key, a.err)
				}
			}
			if took := time.Since(begun); took > 10*time.Second {
				t.Errorf("it took %v", took)
			}
			if n := len(s.statements()); fate != pgserver.Hold && n != 2 {
				t.Errorf("%d statements", n)
			}
			s.proxy.Release()
			awaitReads(t, s.Store, 0, 0)
		})
	}
}

// Those whose rows had come when the connection was lost have their answers; it is read again for the others.
func TestReadsLoseTheirConnectionBetweenRows(t *testing.T) {
	s := openReads(t, postgres.Options{StatementTimeout: 7 * time.Second}, "read-", passed)
	var keys []string
	var batch []store.Write
	for i := range 60 {
		keys = append(keys, fmt.Sprintf("read-%02d", i))
		batch = append(batch, store.Write{Key: []byte(keys[i]), Value: bytes.Repeat([]byte{byte(i)}, 10<<10)})
	}
	if _, err := s.Commit(t.Context(), batch...); err != nil {
		t.Fatal(err)
	}
	conn, schema := database(t), schemaOf()
	exec(t, conn, "create sequence "+schema+".once")
	exec(t, conn, "create function "+schema+`.value(key bytea, value bytea) returns bytea language plpgsql as $$
		begin
			if key = 'read-50' and nextval('`+schema+`.once') = 1 then perform pg_terminate_backend(pg_backend_pid()); end if;
			return value;
		end $$`)
	exec(t, conn, "alter table "+schema+".entries rename to kept")
	exec(t, conn, "create view "+schema+".entries as select key, "+schema+".value(key, value) as value, version, expires from "+schema+".kept")
	s.count()
	release := s.HoldReads()
	answers := getAll(t.Context(), s, keys...)
	await(t, func() bool { _, waiting := s.Reads(); return waiting == len(keys) })
	release()
	for i, key := range keys {
		if a := <-answers[i]; a.err != nil || !bytes.Equal(a.Value, batch[i].Value) {
			t.Errorf("%s: %d bytes, %v", key, len(a.Value), a.err)
		}
	}
	if sizes := s.statements(); len(sizes) != 2 || sizes[1] > sizes[0]/2 {
		t.Errorf("statements of %v bytes", sizes)
	}
	awaitReads(t, s.Store, 0, 0)
}

// Who waits for a statement is answered in time, whatever holds it up.
func TestReadWaitsNoLonger(t *testing.T) {
	s := open(t, postgres.Options{StatementTimeout: 100 * time.Millisecond})
	release, begun := s.HoldReads(), time.Now()
	answers := getAll(t.Context(), s, "key", "key")
	for _, c := range answers {
		if a := <-c; !errors.Is(a.err, store.ErrUnavailable) {
			t.Errorf("get: %v", a.err)
		}
	}
	if took := time.Since(begun); took < time.Second || took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	release()
	awaitReads(t, s, 0, 0)
}

// A server that is killed beneath readers answers each in time, and all again when it is back.
func TestServerIsKilledBeneathReads(t *testing.T) {
	s := open(t, postgres.Options{})
	if _, err := s.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var served, refused atomic.Int64
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				begun := time.Now()
				e, err := s.Get(context.Background(), []byte("key"))
				switch {
				case err == nil && string(e.Value) == "1":
					served.Add(1)
				case errors.Is(err, store.ErrUnavailable):
					refused.Add(1)
					<-time.After(time.Millisecond)
				default:
					t.Errorf("%q, %v", e.Value, err)
				}
				if took := time.Since(begun); took > 10*time.Second {
					t.Errorf("it took %v", took)
				}
			}
		})
	}
	await(t, func() bool { return served.Load() > 100 })
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return refused.Load() > 0 })
	if err := server.Run(); err != nil {
		t.Fatal(err)
	}
	back := served.Load()
	await(t, func() bool { return served.Load() > back+100 })
	close(stop)
	all.Wait()
	awaitReads(t, s, 0, 0)
}

// Close refuses Gets that wait, and ends those under way, alone or in a group.
func TestCloseWhileReadsWait(t *testing.T) {
	s := openReads(t, postgres.Options{StatementTimeout: 7 * time.Second}, "read-", func(int) pgserver.Fate { return pgserver.Hold })
	s.count()
	s.GroupReads(1, time.Hour)
	answers := getAll(t.Context(), s, "read-alone")
	await(t, func() bool { return len(s.statements()) == 1 })
	answers = append(answers, getAll(t.Context(), s, "read-1", "read-2")...)
	awaitReads(t, s.Store, 1, 2)
	s.HoldReads()() // they go, beside the first one
	await(t, func() bool { return len(s.statements()) == 2 })
	answers = append(answers, getAll(t.Context(), s, "read-3", "read-4")...)
	awaitReads(t, s.Store, 2, 2)
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	for i, c := range answers {
		if a := <-c; !errors.Is(a.err, store.ErrClosed) {
			t.Errorf("get %d: %v, want ErrClosed", i, a.err)
		}
	}
	s.proxy.Release()
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(t.Context(), []byte("read-1")); !errors.Is(err, store.ErrClosed) {
		t.Errorf("after that: %v", err)
	}
	awaitReads(t, s.Store, 0, 0)
}

// A member that was removed reads nothing more, also for those that waited.
func TestRemovedWhileReadsWait(t *testing.T) {
	s := open(t, postgres.Options{})
	release := s.HoldReads()
	answer := getAll(t.Context(), s, "key")[0]
	await(t, func() bool { _, waiting := s.Reads(); return waiting == 1 })
	s.Lose()
	release()
	if got := <-answer; !errors.Is(got.err, store.ErrUnhealthy) {
		t.Errorf("get: %v", got.err)
	}
}

// Keys of a group are looked up in the index, whether the table was full or empty when the statement was planned.
func TestReadsUseTheIndex(t *testing.T) {
	s := open(t, postgres.Options{})
	var text string
	for _, prepared := range postgres.Prepared(schemaOf(), "channel") {
		if strings.Contains(prepared, "any($1::bytea[])") && strings.HasPrefix(prepared, "select key, case") {
			text = prepared
		}
	}
	for _, full := range []bool{false, true} {
		if full {
			for i := range 10 {
				var batch []store.Write
				for j := range store.MaxBatch {
					batch = append(batch, put(fmt.Sprint("key ", i, " ", j), strings.Repeat("v", 100)))
				}
				if _, err := s.Commit(t.Context(), batch...); err != nil {
					t.Fatal(err)
				}
			}
			exec(t, database(t), "analyze "+schemaOf()+".entries")
		}
		plan := strings.Join(planOf(t, database(t), text, "costs off"), "\n")
		if !strings.Contains(plan, "Index Cond: (key = ANY ($1))") || strings.Contains(plan, "Seq Scan") {
			t.Errorf("full %t:\n%s", full, plan)
		}
	}
}
