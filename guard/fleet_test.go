package guard_test

import (
	"context"
	"log/slog"
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
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// node is a gateway of a fleet, with the bed's configuration and keys, in front of the same upstream.
func (b *bed) node(st store.Store) *bed {
	b.Helper()
	n := &bed{T: b.T, disk: b.disk, ring: b.ring, config: b.config}
	engine, _, err := guard.OpenEngine(b.Context(), st, b.ring, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	var end context.CancelFunc
	engine.Waits, end = context.WithCancel(b.Context())
	over := new(atomic.Bool)
	n.config.Host = guard.Ending(b.config.Host, over)
	b.Cleanup(func() {
		end()
		over.Store(true)
		if gone, _ := st.(store.Shared).Gone(context.Background(), engine.Executions.Boot()); gone {
			<-time.After(2 * time.Second) // what waits for its return ends
		}
		_ = engine.Executions.Close(context.Background()) // one that was removed cannot write
	})
	n.engine, n.config.Open = engine, engine.Open
	if n.guard, err = guard.New(n.config); err != nil {
		b.Fatal(err)
	}
	return n
}

// nodes are two of them.
func (b *bed) nodes() (one, two *bed, first *memory.Member) {
	first = b.disk.Join("one")
	return b.node(first), b.node(b.disk.Join("two")), first
}

// "Attach" over nodes: a retry at another node waits for the execution, and gets its answer from its beginning while
// it comes, the first byte within 250 ms of the owner's; what it gets where the answer breaks off is what those at
// the owner get (P6).
func TestAttachAtAnotherNode(t *testing.T) {
	for name, c := range map[string]struct {
		action guard.Action
		end    func()
		body   string
		cut    bool
		next   string // what a later retry reads
	}{
		"whole":           {guard.Action{}, whole, "abc", false, "abc"},
		"cut":             {guard.Action{}, cut, "abc", true, "Cause: answer_truncated"},
		"past a deadline": {guard.Action{Policy: guard.Policy{Deadline: jsontime.Duration(25 * time.Second)}}, whole, "ab", true, "Cause: deadline"},
		"not kept":        {guard.Action{Policy: guard.Policy{MaxResult: 2}}, whole, "abc", false, "result-unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := acting(t, c.action, pieces(c.end, "a", "b", "c"))
				one, two, _ := b.nodes()
				var all sync.WaitGroup
				owner := one.begin(&all)
				synctest.Wait()
				early, another := two.begin(&all), two.begin(&all)
				<-time.After(15 * time.Second)
				late, came := two.begin(&all), time.Now()
				all.Wait()
				if after := early.first.Sub(owner.first); after > 250*time.Millisecond {
					t.Errorf("the first byte comes %v after that of the owner", after)
				}
				if after := late.first.Sub(came); after > 250*time.Millisecond {
					t.Errorf("who comes later has the first byte after %v", after)
				}
				owner.saw(t, "executed", c.body, c.cut)
				for _, follower := range []*reader{early, another, late} {
					follower.saw(t, "attached", c.body, c.cut)
				}
				w := httptest.NewRecorder()
				two.serve(w, two.post(""))
				if !strings.Contains(w.Body.String(), c.next) {
					t.Errorf("a retry got %d %s", w.Code, w.Body)
				}
				b.was(1)
			})
		})
	}
}

// What all calls get that wait for an answer which is not kept, they get on other nodes, too.
func TestAnswersThatAreNotKeptAtAnotherNode(t *testing.T) {
	for name, c := range map[string]struct {
		answer             http.HandlerFunc
		owner, other, next string
	}{
		"released": {says(429, "slow down"), "429 executed slow down", "429 attached slow down", "200 executed charge 2"},
		"in doubt": {says(502, "bad"), "502 in_doubt bad final", "502 in_doubt bad final", "409 in_doubt in-doubt in_doubt final"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := acting(t, guard.Action{}, c.answer)
				one, two, _ := b.nodes()
				var all sync.WaitGroup
				all.Go(func() { one.sees(one.post(""), c.owner) })
				synctest.Wait()
				for range 3 {
					all.Go(func() { two.sees(two.post(""), c.other) })
				}
				all.Wait()
				b.was(1)
				two.sees(two.post(""), c.next)
			})
		})
	}
}

// P6: where the owner is gone in the middle of the answer, those who follow at another node are cut; where nothing has
// come of it, they learn of the doubt. Nobody runs the call again.
func TestOwnerIsGoneWhileOthersFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := acting(t, guard.Action{}, pieces(whole, "a", "b"))
		one, two, first := b.nodes()
		var all sync.WaitGroup
		one.begin(&all)
		synctest.Wait()
		follower := two.begin(&all)
		<-time.After(15 * time.Second)
		first.Remove()
		all.Wait()
		follower.saw(t, "attached", "a", true)
		two.sees(two.post(""), "409 in_doubt in-doubt in_doubt final")
		b.was(1)
	})
	synctest.Test(t, func(t *testing.T) {
		b := acting(t, guard.Action{}, says(200, "done"))
		one, two, first := b.nodes()
		var all sync.WaitGroup
		one.begin(&all)
		synctest.Wait()
		for range 3 {
			all.Go(func() { two.sees(two.post(""), "409 in_doubt in-doubt in_doubt final") })
		}
		synctest.Wait()
		began := time.Now()
		first.Remove()
		synctest.Wait()
		took(t, began, 0)
		all.Wait()
		b.was(1)
	})
}

// The wait limit holds for an execution of another node as well, and its answer can be asked for there.
func TestWaitForAnotherNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := answering(acting(t, guard.Action{}, says(201, "done")))
		b.config.AttachWait = jsontime.Duration(3 * time.Second)
		one, two, _ := b.nodes()
		b.engine, b.guard = two.engine, two.guard // of whose executions its endpoint says something
		var all sync.WaitGroup
		began := time.Now()
		all.Go(func() { one.serve(httptest.NewRecorder(), one.post("ann")) })
		synctest.Wait()
		two.sees(two.post("ann"), "409 refused in-progress running again")
		took(t, began, 3*time.Second)
		two.asks("k", "200 /charges running 0")
		two.sees(two.about("k/output"), "409 refused in-progress running again")
		two.sees(two.about("k/output?wait=60s"), "201 attached done")
		took(t, began, 10*time.Second)
		all.Wait()
		b.was(1)
	})
}

// P1: a retry without a key that comes to another node, since its client has given the first one up, gets the answer of
// the call that runs there; the next equal call is meant.
func TestRetryWithoutAKeyAtAnotherNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, slowly)
		b.config.MissingID = guard.MissingRecognize
		one, two, _ := b.nodes()
		keyless := func() *http.Request {
			r := b.post("ann")
			r.Header.Del("Idempotency-Key")
			return r
		}
		var all sync.WaitGroup
		ctx, leave := context.WithCancel(b.Context())
		all.Go(func() { one.serve(httptest.NewRecorder(), keyless().WithContext(ctx)) })
		<-time.After(3 * time.Second)
		leave()
		two.do(keyless(), "200 attached charge 1")
		all.Wait()
		one.do(keyless(), "200 executed charge 2")
		b.was(2)
	})
}

// P6: a gateway that was removed from the store while a call ran gives its client the doubt, and settles it once it is a
// member again, unless somebody has done that before: an answer is evidence.
func TestOutcomeOfARemovedOwner(t *testing.T) {
	for name, c := range map[string]struct {
		answer  http.HandlerFunc
		resolve bool // an operator settles the doubt first
		next    string
	}{
		"executed":           {says(201, "done"), false, "201 replayed done"},
		"not executed":       {says(429, "slow down"), false, "200 executed charge 2"},
		"in doubt":           {says(502, "bad"), false, "409 in_doubt in-doubt in_doubt final"},
		"an operator before": {says(201, "done"), true, "409 refused result-unavailable completed final"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := acting(t, guard.Action{}, c.answer)
				first := b.disk.Join("one")
				one, two := b.node(first), b.node(b.disk.Join("two"))
				var current atomic.Pointer[guard.Engine]
				current.Store(one.engine)
				one.config.Open = func() (*guard.Engine, func(), error) { return current.Load().Open() }
				var err error
				if one.guard, err = guard.New(one.config); err != nil {
					t.Fatal(err)
				}
				var all sync.WaitGroup
				owner := one.begin(&all)
				<-time.After(3 * time.Second)
				first.Remove()
				current.Store(b.node(b.disk.Join("one")).engine)
				all.Wait()
				if !owner.gone {
					t.Errorf("the owner's client has seen the end of %d %q", owner.Code, owner.Body)
				}
				if c.resolve {
					page, err := two.engine.Executions.List(t.Context(), execution.Filter{}, "", 1)
					if err != nil || len(page.Executions) != 1 {
						t.Fatalf("%+v, %v", page, err)
					}
					err = two.engine.Executions.SettleDoubt(t.Context(), page.Executions[0], execution.Resolution{By: execution.ByOperator, Applied: true, Operator: "eve", Reason: "seen"})
					if err != nil {
						t.Fatal(err)
					}
				}
				for _, f := range one.engine.Executions.Fenced() {
					none := func(*execution.Record, *execution.Resolution) *store.Batch { return nil }
					if err := current.Load().Executions.SettleFenced(t.Context(), &f, none); err != nil {
						t.Fatal(err)
					}
				}
				<-time.After(5 * time.Second)
				two.sees(two.post(""), c.next)
			})
		})
	}
}
