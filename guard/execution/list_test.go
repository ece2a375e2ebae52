package execution_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// listed collects all pages of a listing.
func (r *rig) listed(f execution.Filter, limit int) []execution.Recorded {
	r.t.Helper()
	var all []execution.Recorded
	for after := ""; ; {
		page, err := r.List(ctx, f, after, limit)
		if err != nil {
			r.t.Fatal(err)
		}
		if len(page.Executions) > limit {
			r.t.Fatalf("%d executions on a page of %d", len(page.Executions), limit)
		}
		all = append(all, page.Executions...)
		if page.Next == "" {
			return all
		}
		after = page.Next
	}
}

// A listing by any filter, in pages of any size, is what a look at every single
// execution gives, the youngest first.
func TestListIsWhatAFullReadGives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(7, 7))
		r := newRig(t)
		begun := time.Now()
		var calls []*execution.Call
		for i := range 120 {
			c := r.call(fmt.Sprint(i))
			c.Scope.Caller = fmt.Sprint("user:", rnd.IntN(3))
			c.Scope.Guard = []string{"default", "other"}[rnd.IntN(2)]
			c.Key = r.Key(c.Scope)
			c.Action = []string{"charge", "refund"}[rnd.IntN(2)]
			c.Workflow = []string{"", "w-1", "w-2"}[rnd.IntN(3)]
			c.Checkpoint = fmt.Sprint("c-", i/2)
			e := r.claim(c)
			switch rnd.IntN(4) {
			case 0: // runs on
			case 1:
				r.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
			default:
				r.settle(e, answered(e, []byte("x")))
			}
			calls = append(calls, c)
			if rnd.IntN(3) > 0 { // several are of the same moment
				time.Sleep(time.Second)
			}
		}
		caller := r.Caller("user:1")
		filters := map[string]execution.Filter{
			"all":                              {},
			"in doubt":                         {States: []execution.State{execution.StateInDoubt}},
			"running":                          {States: []execution.State{execution.StateSending}},
			"done":                             {States: []execution.State{execution.StateCompleted}, Action: "refund"},
			"caller":                           {Caller: caller[:]},
			"doubts of a caller in a workflow": {Caller: caller[:], Workflow: "w-1", States: []execution.State{execution.StateInDoubt}},
			"workflow":                         {Workflow: "w-2"},
			"guard":                            {Guard: "other", Method: "POST"},
			"nobody":                           {Method: "PUT"},
			"without a method":                 {NotMethod: "POST"},
			"without another method":           {NotMethod: "PUT", Action: "refund"},
			"id":                               {ID: "17"},
			"id of a caller":                   {ID: "18", Caller: caller[:]},
			"beginning of a caller":            {Caller: caller[:4]},
			"id of the beginning of a caller":  {ID: "18", Caller: caller[:4]},
			"id of another caller":             {ID: "19", Caller: caller[:]},
			"checkpoint":                       {Checkpoint: "c-3"},
			"two names of a workflow":          {Workflow: "w-1", OrWorkflows: []string{"w-0", "w-2"}},
			"time":                             {From: begun.Add(10 * time.Second), To: begun.Add(40 * time.Second)},
		}
		for name, f := range filters {
			want := map[execution.Key]bool{}
			for _, c := range calls {
				found, err := r.Get(ctx, c.Key)
				if err != nil {
					t.Fatal(err)
				}
				record := found.Record
				if (len(f.States) == 0 || slices.Contains(f.States, record.State)) &&
					(f.Action == "" || f.Action == record.Action) && (f.Guard == "" || f.Guard == record.Guard) &&
					(f.Method == "" || f.Method == record.Method) && (f.Workflow == "" || f.Workflow == record.Workflow || slices.Contains(f.OrWorkflows, record.Workflow)) &&
					(f.NotMethod == "" || f.NotMethod != record.Method) && (f.ID == "" || f.ID == record.ID) &&
					(f.Checkpoint == "" || f.Checkpoint == record.Checkpoint) &&
					bytes.HasPrefix(record.Caller[:], f.Caller) &&
					!record.Created.Before(f.From) && (f.To.IsZero() || record.Created.Before(f.To)) {
					want[c.Key] = true
				}
			}
			for _, limit := range []int{1, 7, 1000} {
				got := r.listed(f, limit)
				if len(got) != len(want) {
					t.Errorf("%s, pages of %d: %d executions, want %d", name, limit, len(got), len(want))
				}
				for i, found := range got {
					if !want[found.Key] {
						t.Errorf("%s: %v does not belong here", name, found.Key)
					}
					delete(want, found.Key)
					if i > 0 && found.Record.Created.After(got[i-1].Record.Created) {
						t.Errorf("%s: not the youngest first", name)
					}
				}
				for _, found := range got {
					want[found.Key] = true
				}
			}
		}
	})
}

// What has expired is on no page, and an execution whose owner is gone is listed as
// in doubt.
func TestListFollowsTimeAndDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		done, running := r.call("done"), r.call("running")
		e := r.claim(done)
		r.settle(e, answered(e, nil))
		r.claim(running)
		if n := len(r.listed(execution.Filter{}, 10)); n != 2 {
			t.Fatalf("%d executions, want 2", n)
		}
		r.restart()
		got := r.listed(execution.Filter{States: []execution.State{execution.StateInDoubt}}, 10)
		if len(got) != 1 || got[0].Key != running.Key || got[0].State() != execution.StateInDoubt {
			t.Fatalf("in doubt: %+v", got)
		}
		time.Sleep(31 * 24 * time.Hour)
		if got := r.listed(execution.Filter{}, 10); len(got) != 1 || got[0].Key != running.Key {
			t.Fatalf("after all keys have expired: %+v", got)
		}
	})
}

func TestListRefusesAForeignCursor(t *testing.T) {
	r := newRig(t)
	for _, cursor := range []string{"x", "AAAA", strings.Repeat("A", 53)} {
		if _, err := r.List(ctx, execution.Filter{}, cursor, 10); !errors.Is(err, execution.ErrCursor) {
			t.Errorf("%q: %v", cursor, err)
		}
	}
}

// P3: by id a caller finds its own executions, running and settled, and nobody else's.
func TestP3ByIDFindsOnesOwn(t *testing.T) {
	r := newRig(t)
	make := func(caller, path, id string) *execution.Call {
		c := r.call(id)
		c.Scope.Caller, c.Scope.Path = caller, path
		c.Key = r.Key(c.Scope)
		return c
	}
	done, running := make("user:ada", "/a", "1"), make("user:ada", "/b", "1")
	foreign, other := make("user:eve", "/a", "1"), make("user:ada", "/a", "2")
	for _, c := range []*execution.Call{done, foreign, other} {
		e := r.claim(c)
		r.settle(e, answered(e, nil))
	}
	r.claim(running)
	r.claim(make("user:eve", "/b", "1"))

	found, err := r.ByID(ctx, r.Caller("user:ada"), "1")
	if err != nil || len(found) != 2 {
		t.Fatalf("%+v, %v", found, err)
	}
	statuses := map[execution.Key]execution.Status{}
	for _, f := range found {
		statuses[f.Key] = f.Status
		if f.Record == nil {
			t.Errorf("%v without a record", f.Key)
		}
	}
	if statuses[done.Key] != execution.Replayable || statuses[running.Key] != execution.RunningHere {
		t.Errorf("%v", statuses)
	}
	if found, err := r.ByID(ctx, r.Caller("user:bob"), "1"); err != nil || len(found) != 0 {
		t.Errorf("another caller finds %+v, %v", found, err)
	}
	r.restart()
	if found, err := r.ByID(ctx, r.Caller("user:ada"), "1"); err != nil || len(found) != 2 {
		t.Errorf("after a restart: %+v, %v", found, err)
	}
}

// onScan runs what a test says before a scan.
type onScan struct {
	*memory.Store
	before func()
}

func (s *onScan) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	s.before()
	return s.Store.Scan(ctx, r)
}

// An execution that is settled, or run again, while it is looked for is found all the
// same, whichever index it moves from.
func TestByIDFindsWhatMoves(t *testing.T) {
	for name, move := range map[string]func(r *rig, c *execution.Call, e *execution.Execution){
		"settled": func(r *rig, c *execution.Call, e *execution.Execution) { r.settle(e, answered(e, nil)) },
		"run again": func(r *rig, c *execution.Call, _ *execution.Execution) {
			if _, err := r.Claim(ctx, c, r.find(c)); err != nil {
				r.t.Error(err)
			}
		},
	} {
		for at := 1; at <= 5; at++ {
			r := newRig(t)
			scans := 0
			st := &onScan{Store: r.mem, before: func() { scans++ }}
			g, _, err := execution.Open(ctx, st, r.ring)
			if err != nil {
				t.Fatal(err)
			}
			r.Guard = g
			c := r.call("1")
			e := r.claim(c)
			if name == "run again" {
				r.settle(e, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
			}
			scans = 0
			st.before = func() {
				if scans++; scans == at {
					move(r, c, e)
				}
			}
			if found, err := r.ByID(ctx, r.Caller(c.Scope.Caller), "1"); err != nil || len(found) != 1 {
				t.Errorf("%s at scan %d: %d found, %v", name, at, len(found), err)
			}
		}
	}
}

func TestExpandNamesOneKey(t *testing.T) {
	r := newRig(t)
	var keys []execution.Key
	for i := range 300 {
		c := r.call(fmt.Sprint(i))
		r.claim(c)
		keys = append(keys, c.Key)
	}
	for _, key := range keys[:20] {
		for _, n := range []int{15, 16, 64} {
			if got, err := r.Expand(ctx, key.Hex()[:n]); err != nil || got != key {
				t.Errorf("%d digits: %v, %v", n, got, err)
			}
		}
	}
	for text, want := range map[string]error{
		"abc": execution.ErrKeyForm, "ghij": execution.ErrKeyForm, keys[0].Hex() + "00": execution.ErrKeyForm,
		"00000000000000000000": execution.ErrUnknown,
	} {
		if _, err := r.Expand(ctx, text); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", text, err, want)
		}
	}
	if _, err := r.Get(ctx, execution.Key{}); !errors.Is(err, execution.ErrUnknown) {
		t.Errorf("nothing looked up: %v", err)
	}
}

// The index of a caller is in no order of age, so each look at it is at all of it: a page
// of one needs no more of them than a large one.
func TestListOfACallerReadsItsIndexOnce(t *testing.T) {
	r := newRig(t)
	for i := range 300 {
		c := r.call(fmt.Sprint(i))
		r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
	}
	scans := 0
	g, _, err := execution.Open(ctx, &onScan{r.mem, func() { scans++ }}, r.ring)
	if err != nil {
		t.Fatal(err)
	}
	caller := g.Caller("user:ada")
	scans = 0
	page, err := g.List(ctx, execution.Filter{Caller: caller[:], Action: "nothing of the kind"}, "", 1)
	if err != nil || len(page.Executions) != 0 || page.Next != "" {
		t.Fatal(page, err)
	}
	if scans != 2 { // the caller's, and that of what runs
		t.Errorf("%d scans", scans)
	}
}

// A caller is known while a call of its runs or is recorded, and by nothing else.
func TestKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		c := r.call("k")
		caller := r.Caller(c.Scope.Caller)
		knows := func(want bool) {
			t.Helper()
			if known, err := r.Knows(ctx, caller); known != want || err != nil {
				t.Errorf("%v %v, want %v", known, err, want)
			}
			if known, err := r.Knows(ctx, r.Caller("somebody else")); known || err != nil {
				t.Errorf("somebody else: %v %v", known, err)
			}
		}
		knows(false)
		e := r.claim(c)
		knows(true)
		r.settle(e, execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent})
		knows(false)
		r.settle(r.claim(c), execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost})
		knows(true)
	})
}

// The executions in doubt are counted, those that run or ended otherwise are not, and
// the oldest is the one that was claimed first.
func TestDoubts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		expect := func(n int, oldest time.Time) {
			t.Helper()
			got, at, err := r.Doubts(ctx)
			if err != nil || got != n || !at.Equal(oldest) {
				t.Fatalf("%d doubts, the oldest of %v (%v), want %d of %v", got, at, err, n, oldest)
			}
		}
		expect(0, time.Time{})
		claimed := time.Now()
		r.claim(r.call("running"))
		var began [3]time.Time
		for i := range began {
			time.Sleep(time.Minute)
			began[i] = time.Now()
			e := r.claim(r.call(fmt.Sprint("doubt ", i)))
			time.Sleep(time.Second)
			if err := e.Settle(ctx, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost}); err != nil {
				t.Fatal(err)
			}
			expect(i+1, began[0])
		}
		if err := r.claim(r.call("released")).Settle(ctx, execution.Outcome{Verdict: execution.Released, Cause: execution.CauseNotSent}); err != nil {
			t.Fatal(err)
		}
		expect(3, began[0])

		first := r.call("doubt 0")
		if err := r.SettleDoubt(ctx, execution.Recorded{Key: first.Key, Finding: r.status(first, execution.Doubtful)}, execution.Resolution{By: execution.ByProbe, Applied: true}); err != nil {
			t.Fatal(err)
		}
		expect(2, began[1])

		// What was running when the process died is in doubt from its claim on.
		r.restart()
		expect(3, claimed)
	})
}

// What cannot be read is not zero.
func TestDoubtsOfAClosedStore(t *testing.T) {
	r := newRig(t)
	if err := r.mem.Close(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := r.Doubts(ctx); !errors.Is(err, execution.ErrStore) || !errors.Is(err, store.ErrClosed) {
		t.Errorf("%d, %v", n, err)
	}
}

// A record that stands there and cannot be read is told from a store that does not
// answer: only there an earlier call is certain.
func TestUnreadableRecord(t *testing.T) {
	r := newRig(t)
	c := r.call("a")
	if err := r.claim(c).Settle(ctx, execution.Outcome{Verdict: execution.InDoubt, Cause: execution.CauseLost}); err != nil {
		t.Fatal(err)
	}
	name := append([]byte{'x'}, c.Key[:]...)
	if _, err := r.mem.Commit(ctx, store.Write{Key: name, Value: []byte("not what was sealed")}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.LookUp(ctx, c.Key, c.Fingerprint); !errors.Is(err, execution.ErrStore) || !errors.Is(err, execution.ErrUnreadable) {
		t.Errorf("an altered record: %v", err)
	}
	if err := r.mem.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.LookUp(ctx, c.Key, c.Fingerprint); !errors.Is(err, execution.ErrStore) || errors.Is(err, execution.ErrUnreadable) {
		t.Errorf("a closed store: %v", err)
	}
}
