package guard_test

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// counted is a store that counts what is read from it and written to it.
type counted struct {
	store.Store
	reads, scanned, written atomic.Int64
}

func (c *counted) Get(ctx context.Context, key []byte) (store.Entry, error) {
	c.reads.Add(1)
	return c.Store.Get(ctx, key)
}

func (c *counted) Scan(ctx context.Context, r store.Range) iter.Seq2[store.Entry, error] {
	c.reads.Add(1)
	return func(yield func(store.Entry, error) bool) {
		for e, err := range c.Store.Scan(ctx, r) {
			c.scanned.Add(1)
			if !yield(e, err) {
				return
			}
		}
	}
}

func (c *counted) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	c.written.Add(int64(len(batch)))
	return c.Store.Commit(ctx, batch...)
}

func (c *counted) total() [3]int64 {
	return [3]int64{c.reads.Load(), c.scanned.Load(), c.written.Load()}
}

// besideEscalations is a guard in front of a function, over a store with so many pending
// escalations: half of them hold a workflow, half have a call of somebody that waits.
func besideEscalations(t testing.TB, under store.Store, pending int) (*counted, *guard.Handler) {
	t.Helper()
	t.Cleanup(func() {
		if err := under.Close(); err != nil {
			t.Error(err)
		}
	})
	st := &counted{Store: under}
	ring := seal.Generate()
	engine, _, err := guard.OpenEngine(t.Context(), st, ring, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	batch := new(store.Batch)
	for i := range pending {
		o := hitl.Opening{
			Key: fmt.Sprint(i), Level: hitl.Pause, Cause: hitl.CauseRollbackPartial, Summary: "A test.",
			Workflow: evidence.WorkflowID(fmt.Sprint("held-", i)),
		}
		if i%2 == 0 {
			o.Level, o.Cause, o.Proposal, o.Requester = hitl.Approval, hitl.CauseCall, hitl.Proposal{Kind: hitl.RunCall, RequestHash: "sha-256:0"}, fmt.Sprint("user:", i)
		}
		p, err := engine.Escalations.Prepare(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if batch.Join(p.Batch); i%100 < 99 && i < pending-1 {
			continue
		}
		if err := batch.Commit(t.Context(), st); err != nil {
			t.Fatal(err)
		}
		batch = new(store.Batch)
	}
	// A new process, which has read them from the store.
	if engine, _, err = guard.OpenEngine(t.Context(), st, ring, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	h, err := guard.New(guard.Config{Open: engine.Open, Next: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
	})})
	if err != nil {
		t.Fatal(err)
	}
	return st, h
}

// callIn makes call n in a workflow, and returns its status.
func callIn(h *guard.Handler, n int, workflow string) int {
	r := httptest.NewRequest(http.MethodPost, "/charges", strings.NewReader(`{"amount":10}`))
	r.Header.Set("Idempotency-Key", fmt.Sprint("k-", n))
	r.Header.Set("Authorization", "Bearer one")
	r.Header.Set("Workflow-Id", workflow)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code
}

// However much waits for people, a call of a workflow that nobody holds reads and writes as much as
// where nothing does. One that is held is refused.
func TestCallsBesideEscalations(t *testing.T) {
	var want [3]int64
	many := 10_000
	if raced {
		many = 2000
	}
	for _, pending := range []int{0, many} {
		st, h := besideEscalations(t, memory.New(memory.Options{}), pending)
		before := st.total()
		for n := range 10 {
			if got := callIn(h, n, "untouched"); got != http.StatusCreated {
				t.Fatalf("%d", got)
			}
		}
		got := st.total()
		for i := range got {
			got[i] -= before[i]
		}
		if pending == 0 {
			want = got
		} else if got != want {
			t.Errorf("%d pending: 10 calls make %d reads with %d entries of scans, and %d writes; want %d", pending, got[0], got[1], got[2], want)
		} else if got := callIn(h, 11, "held-1"); got != http.StatusConflict {
			t.Errorf("a call of a workflow that is held: %d", got)
		}
	}
	t.Logf("10 calls make %d reads with %d entries of scans, and %d writes", want[0], want[1], want[2])
}

// An approval is good for the time that there was to decide, once more, and for no longer than the key
// is kept. A call that comes later is refused for good, and not asked anew under its id: who approved
// it meant then. Under another id it is another question.
func TestApprovedAndNotMadeInTime(t *testing.T) {
	for name, c := range map[string]struct {
		after   time.Duration
		keep    time.Duration // of the key; 0 is longer than the approval
		want    int
		problem string
	}{
		"in time":                    {59 * time.Minute, 0, http.StatusCreated, ""},
		"too late":                   {time.Hour, 0, http.StatusForbidden, "approval-denied"},
		"while the key is kept":      {9 * time.Minute, 10 * time.Minute, http.StatusCreated, ""},
		"after the key's own time":   {10 * time.Minute, 10 * time.Minute, http.StatusForbidden, "approval-denied"},
		"much later, before the end": {20 * time.Hour, 0, http.StatusForbidden, "approval-denied"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBed(t, func(_ int64, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) })
				b.config.Actions = []*guard.Action{{Name: "default", Policy: guard.Policy{Approve: &guard.Approve{Within: jsontime.Duration(time.Hour)}, RetainResult: jsontime.Duration(c.keep), RetainKey: jsontime.Duration(c.keep)}}}
				b.start()
				call := func(id string) *httptest.ResponseRecorder {
					r, w := b.post("one"), httptest.NewRecorder()
					r.Header.Set("Idempotency-Key", id)
					b.serve(w, r)
					return w
				}
				says := func(w *httptest.ResponseRecorder) (doc struct {
					Type, Detail string
					Escalation   string `json:"escalation_id"`
				}) {
					t.Helper()
					if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
						t.Fatalf("%d %s: %v", w.Code, w.Body, err)
					}
					return doc
				}
				asked := says(call("k"))
				time.Sleep(30 * time.Minute) // the approval's own time counts
				e, err := b.engine.Escalations.Get(t.Context(), asked.Escalation)
				if err == nil {
					_, err = b.engine.Escalations.Decide(t.Context(), e.ID, hitl.Vote{By: "operator:ann", Every: true, Approve: true, Hash: e.Proposal.Hash(), Reason: "seen"})
				}
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(c.after)
				b.start() // another process
				got := call("k")
				if got.Code != c.want {
					t.Fatalf("%d %s", got.Code, got.Body)
				}
				if c.problem == "" {
					b.was(1)
					return
				}
				for range 2 {
					if doc := says(got); !strings.HasSuffix(doc.Type, "/"+c.problem) || doc.Escalation != asked.Escalation || !strings.Contains(doc.Detail, "not made in time") {
						t.Errorf("%+v", doc)
					}
					time.Sleep(time.Minute)
					got = call("k")
				}
				if doc := says(call("other")); !strings.HasSuffix(doc.Type, "/approval-required") || doc.Escalation == asked.Escalation {
					t.Errorf("another id: %+v", doc)
				}
				b.was(0)
			})
		})
	}
}

// BenchmarkCallBesideEscalations is a call of a workflow that nobody holds, over a store on disk.
func BenchmarkCallBesideEscalations(b *testing.B) {
	for _, pending := range []int{0, 10_000} {
		b.Run(fmt.Sprint(pending, "-pending"), func(b *testing.B) {
			st, err := badger.Open(b.TempDir(), badger.Options{})
			if err != nil {
				b.Fatal(err)
			}
			_, h := besideEscalations(b, st, pending)
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				if got := callIn(h, n, "untouched"); got != http.StatusCreated {
					b.Fatal(got)
				}
			}
		})
	}
}

// A call without a key that people are asked about is the same call when it comes again: it is asked about once,
// runs once under the id that was approved, and an equal call after it is another question.
func TestApprovalsWithoutAKey(t *testing.T) {
	for _, count := range []string{"", "1"} {
		synctest.Test(t, func(t *testing.T) {
			b := recognizing(t, charge)
			b.config.Policy = guard.Policy{Approve: &guard.Approve{Within: jsontime.Duration(time.Hour)}}
			b.start()
			call := func(count string) (id, escalation string) {
				w := httptest.NewRecorder()
				b.serve(w, b.keyless(count))
				if w.Code == http.StatusOK {
					return w.Header().Get("Execution-Id"), w.Body.String()
				}
				var doc struct {
					Escalation string `json:"escalation_id"`
				}
				if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil || doc.Escalation == "" {
					t.Fatalf("%d %s: %v", w.Code, w.Body, err)
				}
				return w.Header().Get("Execution-Id"), doc.Escalation
			}
			decide := func(escalation string, approve bool) {
				t.Helper()
				e, err := b.engine.Escalations.Get(t.Context(), escalation)
				if err == nil {
					_, err = b.engine.Escalations.Decide(t.Context(), e.ID, hitl.Vote{By: "operator:ann", Every: true, Approve: approve, Hash: e.Proposal.Hash(), Reason: "seen"})
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			id, asked := call("")
			for range 5 {
				time.Sleep(9 * time.Minute)
				if again, same := call(count); again != id || same != asked {
					t.Errorf("asked anew: %s %s, after %s %s", again, same, id, asked)
				}
			}
			b.was(0)
			decide(asked, true)
			time.Sleep(59 * time.Minute)
			if ran, answer := call(count); ran != id || answer != "charge 1" {
				t.Errorf("%s: %s", ran, answer)
			}
			second, another := call("")
			if second == id || another == asked || another == "charge 1" {
				t.Errorf("an equal call after it is %s: %s", second, another)
			}
			decide(another, false)
			if again, same := call(""); again != second || same != another {
				t.Errorf("the denied one is %s: %s", again, same)
			}
			time.Sleep(10 * time.Minute)
			if third, fresh := call(""); third == second || fresh == another {
				t.Errorf("after the window: %s: %s", third, fresh)
			}
			b.was(1)
			time.Sleep(time.Hour)
		})
	}
}

// Equal calls without a key that are all meant are a question each, and each runs once when it was approved.
func TestApprovalsOfEqualCallsWithoutAKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := recognizing(t, charge)
		b.config.Policy = guard.Policy{Approve: &guard.Approve{}}
		b.start()
		b.disk.takes = time.Second // so that all three are there at once
		three := func(escalations map[string]bool) (ids map[string]int) {
			ids = map[string]int{}
			var all sync.WaitGroup
			var mu sync.Mutex
			for range 3 {
				all.Go(func() {
					w := httptest.NewRecorder()
					b.serve(w, b.keyless(""))
					var doc struct {
						Escalation string `json:"escalation_id"`
					}
					_ = json.Unmarshal(w.Body.Bytes(), &doc) // else it has run
					mu.Lock()
					defer mu.Unlock()
					escalations[doc.Escalation], ids[w.Header().Get("Execution-Id")] = true, w.Code
				})
			}
			all.Wait()
			return ids
		}
		asked := map[string]bool{}
		first := three(asked)
		if second := three(asked); len(first) != 3 || len(asked) != 3 || !maps.Equal(second, first) {
			t.Fatalf("%v, then %v: %v", first, second, asked)
		}
		for id := range asked {
			e, err := b.engine.Escalations.Get(t.Context(), id)
			if err == nil {
				_, err = b.engine.Escalations.Decide(t.Context(), id, hitl.Vote{By: "operator:ann", Every: true, Approve: true, Hash: e.Proposal.Hash(), Reason: "seen"})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		b.was(0)
		for id, status := range three(map[string]bool{}) {
			if status != http.StatusOK || first[id] == 0 {
				t.Errorf("%s: %d, after %v", id, status, first)
			}
		}
		b.was(3)
		time.Sleep(time.Hour)
	})
}
