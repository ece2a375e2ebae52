package guard_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// member is a gateway of a fleet, with a ledger and signing keys of its own.
func (b *trust) member(st store.Store) *trust {
	b.Helper()
	n := &trust{bed: b.bed.node(st), agents: b.agents, sources: b.sources, level: b.level}
	var err error
	n.ring, err = ect.GenerateRing(ect.ES256)
	b.check(err)
	policy := n.policy(st)
	n.guard, err = guard.New(n.config)
	b.check(err)
	policy.Engine = n.engine
	return n
}

// inFleet runs a test of two gateways whose calls are ordered. Calls to /slow take three seconds.
func inFleet(t *testing.T, test func(b, one, two *trust, first *memory.Member)) {
	t.Helper()
	inOrder(t, func(b *trust) {
		first := b.disk.Join("one")
		test(b, b.member(first), b.member(b.disk.Join("two")), first)
	})
}

// A-topological-order-a, -b: a plan that was put at one gateway binds the calls at all of them, and what is done at one of
// them is done for all, at once: a call at another one is refused as long as it runs, and no longer.
func TestFleetPlanOrder(t *testing.T) {
	inFleet(t, func(b, one, two *trust, _ *memory.Member) {
		wid := uuid.NewString()
		b.ran(two.node(uuid.NewString(), "charge", "/x")) // it knows of no plan
		one.follows(wid, trip)
		two.holds(two.node(wid, "charge", "/x"), false, "flight pending", "hotel pending")
		two.holds(two.node(wid, "flight", "/x"), false, "hold pending")
		if w := two.node(wid, "sleep", "/x"); w.Code != http.StatusUnprocessableEntity {
			t.Errorf("what is no node of the plan: %d %s", w.Code, w.Body)
		}
		b.was(1)
		one.ran(one.node(wid, "hold", "/x"))
		two.ran(two.node(wid, "flight", "/x"))
		over := make(chan *httptest.ResponseRecorder)
		go func() { over <- one.node(wid, "hotel", "/slow") }()
		synctest.Wait()
		two.holds(two.node(wid, "charge", "/x"), false, "hotel running")
		one.ran(<-over)
		two.ran(two.node(wid, "charge", "/x"))
		b.was(5)
	})
}

// What ran at a gateway that is gone is not done: what comes after it does not begin at another one.
func TestFleetPlanOfAGoneGateway(t *testing.T) {
	inFleet(t, func(b, one, two *trust, first *memory.Member) {
		wid := uuid.NewString()
		one.follows(wid, trip)
		b.ran(one.node(wid, "hold", "/x"))
		b.ran(two.node(wid, "flight", "/x"))
		over := make(chan *httptest.ResponseRecorder)
		go func() { over <- one.node(wid, "hotel", "/slow") }()
		synctest.Wait()
		first.Remove()
		two.holds(two.node(wid, "charge", "/x"), false, "hotel running")
		<-over
		two.holds(two.node(wid, "charge", "/x"), false, "hotel running")
		b.was(3)
	})
}

// held is a member whose next commit of something recorded waits.
type held struct {
	*memory.Member
	mu   sync.Mutex
	gate *gate
}

func (h *held) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	h.mu.Lock()
	g := h.gate
	if !slices.ContainsFunc(batch, func(w store.Write) bool { return w.Place != nil }) {
		g = nil
	}
	if g != nil {
		h.gate = nil
	}
	h.mu.Unlock()
	if g != nil {
		g.pass()
	}
	return h.Member.Commit(ctx, batch...)
}

// raced makes a call at one gateway up to its claim, does something else, and then lets it go on.
func (h *held) raced(call func() *httptest.ResponseRecorder, other func()) *httptest.ResponseRecorder {
	g := newGate()
	h.mu.Lock()
	h.gate = g
	h.mu.Unlock()
	late := make(chan *httptest.ResponseRecorder)
	go func() { late <- call() }()
	<-g.arrived
	other()
	close(g.open)
	return <-late
}

// actions counts what is recorded in a workflow, by action.
func (b *trust) actions(wid string) map[string]int {
	b.Helper()
	page, err := b.evidence.Log().List(b.Context(), wid, "", ledger.MaxPage)
	b.check(err)
	all := map[string]int{}
	for _, e := range page.Entries {
		all[e.Action]++
	}
	return all
}

// Two first calls at two gateways: whichever claims later looks again. The workflow has one start and begins once under its
// plan, and both calls run, also where they are of the same node.
func TestFleetFirstCalls(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		first := &held{Member: b.disk.Join("one")}
		one, two := b.member(first), b.member(b.disk.Join("two"))
		for _, planned := range []bool{true, false} {
			wid := uuid.NewString()
			if planned {
				two.follows(wid, trip)
			}
			before := b.calls.Load()
			w := first.raced(func() *httptest.ResponseRecorder { return one.node(wid, "hold", "/x") }, func() { two.ran(two.node(wid, "hold", "/x")) })
			one.ran(w)
			if n := b.calls.Load() - before; n != 2 {
				t.Errorf("%d calls have run", n)
			}
			if got := one.actions(wid); got["workflow_start"] != 1 || got["checkpoint"] != 2 {
				t.Errorf("planned %v: recorded are %v", planned, got)
			}
			of, err := one.engine.Plans.Of(b.Context(), wid, nil)
			b.check(err)
			if planned && (of == nil || of.Begun.IsZero() || of.First == w.Header().Get("Execution-Checkpoint")) {
				t.Errorf("the plan: %+v", of)
			}
		}
	})
}

// P4: a call is admitted under the plan of its workflow, wherever that was put before its claim: one that has no place in it
// does not run, and one under a plan that was replaced is admitted anew.
func TestFleetPlanIsPutBeforeTheClaim(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		first := &held{Member: b.disk.Join("one")}
		one, two := b.member(first), b.member(b.disk.Join("two"))
		wid := uuid.NewString()
		w := first.raced(func() *httptest.ResponseRecorder { return one.node(wid, "sleep", "/x") }, func() { two.follows(wid, trip) })
		if w.Code != http.StatusUnprocessableEntity {
			t.Errorf("no node of the plan: %d %s", w.Code, w.Body)
		}
		w = first.raced(func() *httptest.ResponseRecorder { return one.node(wid, "hold", "/x") }, func() {
			d, err := plan.Parse([]byte(strings.ReplaceAll(trip, `"hold"`, `"reserve"`)))
			b.check(err)
			_, _, err = two.engine.Plans.Put(b.Context(), plan.Putting{Workflow: wid, By: "operator", Plan: d, Replaces: []string{"*"}})
			b.check(err)
		})
		if w.Code != http.StatusUnprocessableEntity {
			t.Errorf("a node of a plan that was replaced: %d %s", w.Code, w.Body)
		}
		b.was(0)
		one.ran(one.node(wid, "reserve", "/x"))
		two.ran(two.node(wid, "flight", "/x"))
	})
}

// Of two first calls of a part at two gateways, one brings an offered plan and the other none: whichever comes to its claim
// later looks again.
func TestFleetFirstCallsRaceForAPlan(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		d, err := plan.Parse([]byte(`{"wf_id": "w", "nodes": [{"id": "a"}]}`))
		b.check(err)
		first := &held{Member: b.disk.Join("one")}
		one, two := b.member(first), b.member(b.disk.Join("two"))
		for _, late := range []string{"a", "b"} { // a has offered a plan, b makes a call that is no node of it
			wid := uuid.NewString()
			_, _, err := two.engine.Plans.Put(b.Context(), plan.Putting{Workflow: wid, Issuer: b.agents["a"].Identity(), By: "a", Plan: d})
			b.check(err)
			start := b.token(b.agents["b"], ect.Claims{Workflow: wid, Action: "workflow_start", Ext: new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "x").Text(ect.MemberDescription, "y")})
			b.check(two.evidence.Append(b.Context(), time.Now(), []*ect.Token{start}))
			call := func(at *trust, agent, action string) *httptest.ResponseRecorder {
				token := b.token(b.agents[agent], ect.Claims{Workflow: wid, Action: action, Parents: []string{start.ID()}})
				return at.send("POST /x", "", "", token.Raw())
			}
			calls := map[string]func(at *trust) *httptest.ResponseRecorder{
				"a": func(at *trust) *httptest.ResponseRecorder { return call(at, "a", "a") },
				"b": func(at *trust) *httptest.ResponseRecorder { return call(at, "b", "other") },
			}
			early := map[string]string{"a": "b", "b": "a"}[late]
			w := first.raced(func() *httptest.ResponseRecorder { return calls[late](one) }, func() { two.ran(calls[early](two)) })
			begun, err := one.engine.Plans.Offered(b.Context(), wid, b.agents["a"].Identity())
			switch {
			case err != nil:
				t.Error(err)
			case late == "b" && (w.Code != http.StatusUnprocessableEntity || begun.Begun.IsZero()):
				t.Errorf("behind a call under a plan: %d %s", w.Code, w.Body)
			case late == "a" && (w.Code != http.StatusOK || !begun.Begun.IsZero()):
				t.Errorf("behind a call without a plan: %d %s, %+v", w.Code, w.Body, begun)
			}
		}
	})
}
