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

	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/postgres"
)

// Each batch of a group gets its own verdict: where it lost, and to what.
func TestVerdictsOfAGroup(t *testing.T) {
	s := open(t, postgres.Options{})
	first, err := s.Commit(t.Context(), put("taken", "0"))
	if err != nil {
		t.Fatal(err)
	}
	release := lockLease(t, s)
	const callers = 40
	versions, errs := make([]store.Version, callers), make([]error, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			var writes []store.Write
			for j := range i % 7 {
				writes = append(writes, put(fmt.Sprint("key ", i, " ", j), "1"))
			}
			if i%3 == 0 {
				writes = append(writes, store.Write{Key: []byte("taken"), If: store.Absent(), Check: true})
			}
			writes = append(writes, put(fmt.Sprint("key ", i), "1"))
			versions[i], errs[i] = s.Commit(context.Background(), writes...)
		})
		if i == 0 {
			awaitGroup(t)
		}
	}
	awaitWaiting(t, s, callers)
	release()
	all.Wait()
	seen := make(map[store.Version]int)
	for i, err := range errs {
		e, found := s.Get(t.Context(), []byte(fmt.Sprint("key ", i)))
		if i%3 == 0 {
			var lost *store.Conflict
			if !errors.As(err, &lost) || lost.Index != i%7 || lost.Found == nil || string(lost.Found.Value) != "0" || lost.Found.Version != first {
				t.Errorf("batch %d: %#v, want to lose at %d", i, err, i%7)
			}
			if !errors.Is(found, store.ErrNotFound) {
				t.Errorf("batch %d has lost, and wrote: %v", i, found)
			}
			continue
		}
		if err != nil || found != nil || e.Version != versions[i] {
			t.Errorf("batch %d: version %d, %v; stored is %d, %v", i, versions[i], err, e.Version, found)
		}
		if other, twice := seen[versions[i]]; twice {
			t.Errorf("batches %d and %d have one version", other, i)
		}
		seen[versions[i]] = i
	}
}

// The planner takes the batches of a group for ten, however many there are. A join of them row by row would cost the
// square of their number: with 256 of them it took more than half of the time.
func TestNoStatementJoinsBatchesRowByRow(t *testing.T) {
	s := open(t, postgres.Options{})
	if _, err := s.Commit(t.Context(), put("key", "1")); err != nil {
		t.Fatal(err)
	}
	conn, looked := database(t), 0
	for _, text := range postgres.Prepared(schemaOf(), "channel") {
		if !strings.Contains(text, "unnest") {
			continue
		}
		looked++
		plan := planOf(t, conn, text, "costs off, verbose")
		for _, line := range plan {
			if strings.Contains(line, "Join Filter") && strings.Contains(line, "batch = ") ||
				strings.Contains(line, "SubPlan") && strings.Contains(line, "batch") && !strings.Contains(line, "hashed SubPlan") {
				t.Errorf("%s\n%s", line, strings.Join(plan, "\n"))
			}
		}
	}
	if looked != 3 {
		t.Errorf("%d statements", looked)
	}
}

// Notes of groups whose verdicts are known are deleted, many at a time. One that calls a group off stays: the
// group's transaction may still come.
func TestNotesAreDeleted(t *testing.T) {
	s := open(t, postgres.Options{})
	conn := database(t)
	notes := func(where string) (n int) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), "select count(*) from "+schemaOf()+".commits where "+where).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for n := range 300 {
		if _, err := s.Commit(t.Context(), put(fmt.Sprint("key ", n), "1")); err != nil {
			t.Fatal(err)
		}
		if n == 9 {
			exec(t, conn, "update "+schemaOf()+".commits set winners = null, versions = null where seq = 5")
		}
		if there := notes("winners is not null"); there > 65 {
			t.Fatalf("%d notes after %d commits", there, n+1)
		}
	}
	if notes("winners is null") != 1 {
		t.Error("the note that calls a group off was deleted")
	}
}

// Claims of a group find what is live, what has expired and is still there, and nothing.
func TestClaimsOfAGroup(t *testing.T) {
	var now atomic.Int64
	now.Store(time.Now().UnixMicro())
	s := open(t, postgres.Options{Now: func() time.Time { return time.UnixMicro(now.Load()) }})
	const callers = 40
	expired := func(i int) bool { return i%4 == 0 }
	live := func(i int) bool { return i%4 == 1 }
	over := func(i int) bool { return i%4 == 2 } // without a condition
	for i := range callers {
		before := put(fmt.Sprint("key ", i), "before")
		if expired(i) {
			before.Expires = time.UnixMicro(now.Load()).Add(time.Minute)
		}
		if expired(i) || live(i) || over(i) && i%8 == 2 {
			if _, err := s.Commit(t.Context(), before); err != nil {
				t.Fatal(err)
			}
		}
	}
	now.Add(time.Hour.Microseconds())
	release := lockLease(t, s)
	errs := make([]error, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			w := claim(fmt.Sprint("key ", i), "after")
			if over(i) {
				w.If = store.Condition{}
			}
			_, errs[i] = s.Commit(context.Background(), w)
		})
		if i == 0 {
			awaitGroup(t)
		}
	}
	awaitWaiting(t, s, callers)
	release()
	all.Wait()
	for i, err := range errs {
		want, lost := "after", (*store.Conflict)(nil)
		if live(i) {
			want = "before"
		}
		if live(i) != errors.As(err, &lost) || err != nil && (lost == nil || lost.Found == nil || string(lost.Found.Value) != "before") {
			t.Errorf("claim %d: %v", i, err)
		}
		if got := value(t, s, fmt.Sprint("key ", i)); got != want {
			t.Errorf("claim %d: %q is stored, want %q", i, got, want)
		}
	}
}
