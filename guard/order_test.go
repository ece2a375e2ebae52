package guard_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/breaker/bulkhead"
	"github.com/agent-guard/caddy-agent-guard/breaker/jsontime"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// inOrder runs a test of calls that the parents in their tokens order. Calls to /slow take three
// seconds.
func inOrder(t *testing.T, test func(b *trust)) {
	t.Helper()
	trusting(t, ect.L2, func(b *trust) {
		b.config.Policy = guard.Policy{Order: guard.OrderPar}
		b.begin()
		b.answer = func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/slow":
				<-time.After(3 * time.Second)
			case "/fails":
				w.WriteHeader(http.StatusUnprocessableEntity)
			case "/doubt":
				w.WriteHeader(http.StatusBadGateway)
			}
		}
		test(b)
	})
}

// in makes a token of the agent a in a workflow.
func (b *trust) in(wid string, parents ...string) *ect.Token {
	b.Helper()
	return b.token(b.agents["a"], ect.Claims{Workflow: wid, Parents: parents})
}

// held compares a refusal: the id of what the call waits for, its state, and whether for good.
func (b *trust) held(w *httptest.ResponseRecorder, of *ect.Token, state string, final bool) {
	b.Helper()
	var doc struct {
		Type, Reason string
		Dependencies []problem.Dependency
		Safe         bool `json:"safe_new_key"`
	}
	b.check(json.Unmarshal(w.Body.Bytes(), &doc))
	retry := w.Header().Get("Retry-After")
	if w.Code != http.StatusConflict || doc.Type != problem.BasePath+"dependency-not-done" || !doc.Safe || len(doc.Dependencies) != 1 || (doc.Reason == "final") != final || (retry == "") != final {
		b.Fatalf("%d %s, Retry-After %q", w.Code, w.Body, retry)
	}
	if d := doc.Dependencies[0]; d.Task != of.ID() || strings.TrimSpace(d.State+" "+d.Detail) != state || d.Final != final || d.Action != "charge_card" {
		b.Errorf("%+v, want %s: %s, for good: %v", d, of.ID(), state, final)
	}
}

// A-topological-order-b, -c: a call whose token names a call that is not done is refused before anything of it
// is recorded, and goes through when that is done. What does not depend on it is not held up, and what was
// executed is replayed, whatever has become of its parents.
func TestParOrder(t *testing.T) {
	inOrder(t, func(b *trust) {
		wid := uuid.NewString()
		first, beside := b.in(wid), b.in(wid)
		second := b.in(wid, first.ID())
		over := make(chan string)
		go func() { over <- b.uses("POST /slow", "", "", first.Raw()) }()
		synctest.Wait()
		b.held(b.send("POST /pay", "", "", second.Raw()), first, "running", false)
		b.held(b.send("POST /pay", "", "", second.Raw()), first, "running", false) // no key was burned, no token used up
		b.want(b.uses("POST /pay", "", "", beside.Raw()), "200 executed")
		b.want(<-over, "200 executed")
		b.was(2)
		b.want(b.uses("POST /pay", "", "", second.Raw()), "200 executed")
		third := b.in(wid, second.ID(), beside.ID())
		b.want(b.uses("POST /pay", "", "", third.Raw()), "200 executed")

		b.check(b.evidence.Append(b.Context(), time.Now(), []*ect.Token{b.failure(wid, second.ID())}))
		b.want(b.uses("POST /pay", "", "", third.Raw()), "200 replayed")
		b.held(b.send("POST /pay", "", "", b.in(wid, second.ID()).Raw()), second, "failed", true)
		b.was(4)
	})
}

// P6: what is in doubt is not done, and what has failed never will be. So it is after a restart, and what
// was not executed can be made again.
func TestParOrderAfterFailures(t *testing.T) {
	inOrder(t, func(b *trust) {
		wid := uuid.NewString()
		failed, doubt := b.in(wid), b.in(wid)
		b.want(b.uses("POST /fails", "", "", failed.Raw()), "422 executed")
		b.want(b.uses("POST /doubt", "", "", doubt.Raw()), "502 in_doubt")
		for range 2 {
			b.held(b.send("POST /pay", "", "", b.in(wid, failed.ID()).Raw()), failed, "failed", true)
			b.held(b.send("POST /pay", "", "", b.in(wid, doubt.ID()).Raw()), doubt, "failed in_doubt", false)
			b.check(b.evidence.Close(context.Background()))
			b.begin()
		}
		// What undoes a failed call waits for nothing (ADR 0125).
		undone := b.in(wid)
		w := b.send("POST /fails", "", "", undone.Raw())
		undo := b.token(b.agents["a"], ect.Claims{Workflow: wid, Action: "rollback_start", Parents: []string{undone.ID()}, Ext: new(ect.ExtBuilder).
			Text(ect.MemberRollbackID, "urn:uuid:"+uuid.NewString()).Text(ect.MemberCheckpointID, w.Header().Get("Execution-Checkpoint")).
			Text(ect.MemberScope, "single").Text(ect.MemberReason, "it has failed")})
		b.want(b.uses("POST /refund", "", "", undo.Raw()), "200 executed")
		// What is no call of the gateway's is done, as the token says that follows from it.
		look := b.in(wid)
		b.want(b.uses("GET /balance", "", "", look.Raw()), "200")
		b.want(b.uses("POST /pay", "", "", look.Raw(), b.in(wid, look.ID()).Raw()), "200 executed")
	})
}

// P4: where the ledger does not say what has become of the parents, nothing is forwarded.
func TestParOrderFailsClosed(t *testing.T) {
	inOrder(t, func(b *trust) {
		wid := uuid.NewString()
		first := b.in(wid)
		b.want(b.uses("POST /pay", "", "", first.Raw()), "200 executed")
		second := b.in(wid, first.ID())
		b.disk.damaged.Store(true)
		w := b.send("POST /pay", "k", "", second.Raw())
		b.disk.damaged.Store(false)
		if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "store-unavailable") || b.disk.unread.Load() == 0 {
			t.Errorf("%d %s, %d scans", w.Code, w.Body, b.disk.unread.Load())
		}
		b.was(1)
		b.want(b.uses("POST /pay", "k", "", second.Raw()), "200 executed")
	})
}

const trip = `{"wf_id": "trip", "nodes": [{"id": "hold"}, {"id": "flight"}, {"id": "hotel"}, {"id": "charge"}],
	"edges": [{"from": "hold", "to": "flight"}, {"from": "hold", "to": "hotel"}, {"from": "flight", "to": "charge"}, {"from": "hotel", "to": "charge"}]}`

// follows gives a workflow a plan.
func (b *trust) follows(wid, text string) {
	b.Helper()
	d, err := plan.Parse([]byte(text))
	b.check(err)
	_, _, err = b.engine.Plans.Put(b.Context(), plan.Putting{Workflow: wid, By: "operator", Plan: d})
	b.check(err)
}

// node makes a call of a node, which its token's action names. The parents are tokens that it follows from.
func (b *trust) node(wid, node, path string, parents ...string) *httptest.ResponseRecorder {
	b.Helper()
	return b.send("POST "+path, "", "", b.token(b.agents["a"], ect.Claims{Workflow: wid, Action: node, Parents: parents}).Raw())
}

// holds compares a refusal by the plan: what the node waits for, with its state, and for good or not.
func (b *trust) holds(w *httptest.ResponseRecorder, final bool, want ...string) {
	b.Helper()
	var doc struct {
		Type, Reason string
		Dependencies []problem.Dependency
	}
	b.check(json.Unmarshal(w.Body.Bytes(), &doc))
	var got []string
	for _, d := range doc.Dependencies {
		got = append(got, strings.TrimSpace(d.Node+" "+d.State+" "+d.Detail))
	}
	if w.Code != http.StatusConflict || doc.Type != problem.BasePath+"dependency-not-done" || !slices.Equal(got, want) || (doc.Reason == "final") != final || (w.Header().Get("Retry-After") == "") != final {
		b.Fatalf("%d %s, want %q (for good: %v)", w.Code, w.Body, want, final)
	}
}

// ran holds that a call was executed.
func (b *trust) ran(w *httptest.ResponseRecorder) {
	b.Helper()
	if status := w.Header().Get("Execution-Status"); status != "executed" || w.Code >= 300 {
		b.Fatalf("%d %s: %s", w.Code, status, w.Body)
	}
}

// A-topological-order-a, -b, -c: where a workflow has a plan, a call of a node is refused until all before it are
// done, whatever its tokens say, and nodes that do not depend on each other run side by side. So it is after a
// restart; and other workflows are not concerned.
func TestPlanOrder(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		b.answer = func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				<-time.After(3 * time.Second)
			}
		}
		wid := uuid.NewString()
		b.follows(wid, trip)
		b.holds(b.node(wid, "charge", "/x"), false, "flight pending", "hotel pending")
		b.holds(b.node(wid, "flight", "/x"), false, "hold pending")
		b.ran(b.node(uuid.NewString(), "charge", "/x"))
		b.was(1)
		b.ran(b.node(wid, "hold", "/x"))
		var all sync.WaitGroup
		begun := time.Now()
		for _, node := range []string{"flight", "hotel"} {
			all.Go(func() { b.ran(b.node(wid, node, "/slow")) })
		}
		synctest.Wait()
		b.holds(b.node(wid, "charge", "/x"), false, "flight running", "hotel running")
		all.Wait()
		if took := time.Since(begun).Round(time.Second); took != 3*time.Second {
			t.Errorf("side by side they took %v", took)
		}
		b.check(b.evidence.Close(b.Context()))
		b.begin()
		b.ran(b.node(wid, "charge", "/x"))
		b.was(5)
	})
}

// P6: a node in doubt is not done; when somebody has found out, what comes after it goes on. One that has failed
// holds all that comes after it for good, and what comes after that.
func TestPlanOrderAfterFailures(t *testing.T) {
	inOrder(t, func(b *trust) {
		wid := uuid.NewString()
		b.follows(wid, trip)
		b.ran(b.node(wid, "hold", "/x"))
		if w := b.node(wid, "flight", "/doubt"); w.Header().Get("Execution-Status") != "in_doubt" {
			b.Fatalf("%d %v", w.Code, w.Header())
		}
		b.ran(b.node(wid, "hotel", "/x"))
		b.holds(b.node(wid, "charge", "/x"), false, "flight failed in_doubt")

		wid = uuid.NewString()
		b.follows(wid, trip)
		if w := b.node(wid, "hold", "/fails"); w.Code != http.StatusUnprocessableEntity {
			b.Fatalf("%d %s", w.Code, w.Body)
		}
		b.holds(b.node(wid, "hotel", "/x"), true, "hold failed")
		b.holds(b.node(wid, "charge", "/x"), true, "flight pending", "hotel pending")
		b.was(4)
	})
}

// Where plans are observed, the plan refuses nothing.
func TestPlanOrderObserved(t *testing.T) {
	inOrder(t, func(b *trust) {
		b.begin().Plans.Observed = true
		wid := uuid.NewString()
		b.follows(wid, trip)
		b.ran(b.node(wid, "charge", "/x"))
	})
}

// P5: while a rollback undoes what a node of the plan follows from, no call of the node begins, though no token of
// it names that; and when it is undone, the node waits for good.
func TestPlanOrderBesideARollback(t *testing.T) {
	undoing(t, func(b *saga) {
		b.follows(b.wid, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}, {"id": "c"}], "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "c"}]}`)
		act := func(node, route, body string, after ...string) step {
			return b.attempt(b.token(b.agents["a"], ect.Claims{Workflow: b.wid, Action: node, Parents: after}), route, body)
		}
		first := act("a", "POST /charges", "{}")
		if second := act("b", "PUT /plain/y", "new", first.checkpoint); second.Code != http.StatusCreated {
			b.Fatalf("%d %s", second.Code, second.Body)
		}
		id, hold := uuid.NewString(), newGate()
		b.on("DELETE /plain/y", b.waits(hold))
		b.check(b.begun(id, first, rollback.SubDAG))
		<-hold.arrived // of b the ledger says nothing yet
		if c := act("c", "POST /mail", ""); c.Code != http.StatusConflict || !strings.Contains(c.Body.String(), "workflow-paused") {
			b.Errorf("%d %s", c.Code, c.Body)
		}
		close(hold.open)
		b.ended(id, "completed")
		b.holds(act("c", "POST /mail", "").ResponseRecorder, true, "b rolled_back")
		b.had("charged ch_1", "/plain/y is new", "deleted /plain/y", "refunded ch_1")
	})
}

// P5: a rollback that begins and ends while a call is about to be claimed keeps it out as well.
func TestPlanOrderUntilTheClaim(t *testing.T) {
	undoing(t, func(b *saga) {
		b.follows(b.wid, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}], "edges": [{"from": "a", "to": "b"}]}`)
		act := func(node, route, body string) step {
			return b.attempt(b.token(b.agents["a"], ect.Claims{Workflow: b.wid, Action: node}), route, body)
		}
		first := act("a", "POST /charges", "{}")
		hold := newGate()
		b.on("GET /docs/x", b.waits(hold)) // the state before the call
		late := make(chan step)
		go func() { late <- act("b", "PUT /docs/x", "v1") }()
		<-hold.arrived
		b.back("completed", first)
		close(hold.open)
		b.holds((<-late).ResponseRecorder, true, "a rolled_back")
		b.had("charged ch_1", "refunded ch_1")
	})
}

// Of two first calls that one start has led to, one brings a plan and the other none: whichever comes to its claim
// later looks again, so that no call of a plan's part runs outside of it, and no plan begins behind a call.
func TestFirstCallsRaceForAPlan(t *testing.T) {
	undoing(t, func(b *saga) {
		d, err := plan.Parse([]byte(`{"wf_id": "w", "nodes": [{"id": "a"}]}`))
		b.check(err)
		for _, late := range []string{"a", "b"} { // a has offered a plan, b makes a call that is no node of it
			wid := uuid.NewString()
			_, _, err := b.engine.Plans.Put(b.Context(), plan.Putting{Workflow: wid, Issuer: b.agents["a"].Identity(), By: "a", Plan: d})
			b.check(err)
			start := b.token(b.agents["b"], ect.Claims{Workflow: wid, Action: "workflow_start", Ext: new(ect.ExtBuilder).Text(ect.MemberWorkflowName, "x").Text(ect.MemberDescription, "y")})
			b.check(b.evidence.Append(b.Context(), time.Now(), []*ect.Token{start}))
			call := func(agent, action, path string) step {
				token := b.token(b.agents[agent], ect.Claims{Workflow: wid, Action: action, Parents: []string{start.ID()}})
				return b.attempt(token, "PUT "+path, "v1")
			}
			calls := map[string]func(path string) step{
				"a": func(path string) step { return call("a", "a", path) },
				"b": func(path string) step { return call("b", "other", path) },
			}
			early := map[string]string{"a": "b", "b": "a"}[late]
			hold := newGate()
			b.on("GET /docs/"+late+wid, b.waits(hold)) // the state before the call
			second := make(chan step)
			go func() { second <- calls[late]("/docs/" + late + wid) }()
			<-hold.arrived
			if s := calls[early]("/docs/" + early + wid); s.Code != http.StatusCreated {
				b.Fatalf("the first: %d %s", s.Code, s.Body)
			}
			close(hold.open)
			s := <-second
			switch begun, err := b.engine.Plans.Offered(b.Context(), wid, b.agents["a"].Identity()); {
			case err != nil:
				b.Error(err)
			case late == "b" && (s.Code != http.StatusUnprocessableEntity || begun.Begun.IsZero()):
				b.Errorf("behind a call under a plan: %d %s", s.Code, s.Body)
			case late == "a" && (s.Code != http.StatusCreated || !begun.Begun.IsZero()):
				b.Errorf("behind a call without a plan: %d %s, %+v", s.Code, s.Body, begun)
			}
		}
	})
}

// A-resource-claim-format-a, A-checkpoint-placement-policy-f: what a plan says of a node is applied to its calls: the
// time that they may take, and the header with what they need. A request that names its node is guarded, whatever
// its method, since it would never be done otherwise.
func TestNodesHaveTheirNeeds(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		var hints []string
		b.answer = func(_ http.ResponseWriter, r *http.Request) {
			hints = append(hints, r.Header.Get("Resource-Hints"))
			select {
			case <-time.After(10 * time.Second):
			case <-r.Context().Done():
			}
		}
		wid := uuid.NewString()
		b.follows(wid, `{"wf_id": "w", "nodes": [{"id": "a", "resource_hints": {"priority": "high", "timeout_s": 4, "cpu": "0.5", "memory_mb": 4096}},
			{"id": "b", "constraints": {"atd.resource_gpu": "2", "atd.resource_network_mbps": 100, "atd.resource_timeout_s": 900}}, {"id": "c"}]}`)
		for _, c := range []struct {
			node, status string
			takes        time.Duration
		}{{"a", "in_doubt", 4 * time.Second}, {"b", "executed", 10 * time.Second}, {"c", "executed", 10 * time.Second}} {
			begun := time.Now()
			w := b.node(wid, c.node, "/x")
			if took := time.Since(begun).Round(time.Second); took != c.takes || w.Header().Get("Execution-Status") != c.status {
				t.Errorf("%s took %v: %d %v %s", c.node, took, w.Code, w.Header(), w.Body)
			}
		}
		if want := []string{`priority=high, timeout_s=4, cpu="0.5", memory_mb=4096`, `timeout_s=900, gpu="2", network_mbps=100`, ""}; !slices.Equal(hints, want) {
			t.Errorf("%q, want %q", hints, want)
		}

		wid = uuid.NewString()
		b.follows(wid, `{"wf_id": "w", "nodes": [{"id": "look"}, {"id": "pay"}], "edges": [{"from": "look", "to": "pay"}]}`)
		b.holds(b.node(wid, "pay", "/x"), false, "look pending")
		look := func(c ect.Claims) *httptest.ResponseRecorder {
			b.Helper()
			c.Workflow = wid
			return b.send("GET /balance", "", "", b.token(b.agents["a"], c).Raw())
		}
		if w := look(ect.Claims{Action: "look"}); w.Code != http.StatusOK || w.Header().Get("Execution-Status") != "" {
			t.Errorf("%d %v", w.Code, w.Header())
		}
		b.holds(b.node(wid, "pay", "/x"), false, "look pending")
		b.ran(look(ect.Claims{Action: "read", Ext: new(ect.ExtBuilder).Text(evidence.MemberNode, "look")}))
		b.ran(b.node(wid, "pay", "/x"))
	})
}

// A-optional-declarative-workflow-format-d: before a call of a node with hitl_required is sent a person is asked, once it
// could begin. The same call goes through when that is approved, and another one is another question.
func TestNodeIsApproved(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		wid := uuid.NewString()
		b.follows(wid, `{"wf_id": "w", "nodes": [{"id": "hold"}, {"id": "charge", "hitl_required": true}], "edges": [{"from": "hold", "to": "charge"}]}`)
		b.holds(b.node(wid, "charge", "/x"), false, "hold pending")
		b.ran(b.node(wid, "hold", "/x"))
		asked := func(w *httptest.ResponseRecorder) hitl.Escalation {
			b.Helper()
			var doc struct {
				Type string
				ID   string `json:"escalation_id"`
			}
			b.check(json.Unmarshal(w.Body.Bytes(), &doc))
			if w.Code != http.StatusConflict || doc.Type != problem.BasePath+"approval-required" {
				b.Fatalf("%d %s", w.Code, w.Body)
			}
			e, err := b.engine.Escalations.Get(b.Context(), doc.ID)
			b.check(err)
			return e
		}
		token := b.token(b.agents["a"], ect.Claims{Workflow: wid, Action: "charge"}).Raw()
		e := asked(b.send("POST /x", "", "", token))
		if again := asked(b.send("POST /x", "", "", token)); again.ID != e.ID || !strings.Contains(e.Summary, `the node "charge" of its workflow's plan`) {
			t.Errorf("%s and %s: %s", e.ID, again.ID, e.Summary)
		}
		b.was(1)
		_, err := b.engine.Escalations.Decide(b.Context(), e.ID, hitl.Vote{By: "operator:ann", Every: true, Approve: true, Hash: e.Proposal.Hash(), Reason: "seen"})
		b.check(err)
		b.ran(b.send("POST /x", "", "", token))
		if other := asked(b.node(wid, "charge", "/x")); other.ID == e.ID {
			t.Error("one approval is good for two calls")
		}
		b.was(2)
	})
}

// A-priority-levels-b: a call waits for the bulkhead in the class that the plan gives its node, whatever its own
// token claims.
func TestNodesWaitInTheirClass(t *testing.T) {
	trusting(t, ect.L2, func(b *trust) {
		b.withBulkhead(bulkhead.Settings{Total: 1, PerWorkflow: 1, Wait: jsontime.Duration(time.Hour)})
		b.begin()
		var came []string
		b.answer = func(_ http.ResponseWriter, r *http.Request) {
			came = append(came, r.URL.Path)
			<-time.After(3 * time.Second)
		}
		wid := uuid.NewString()
		b.follows(wid, `{"wf_id": "w", "nodes": [{"id": "first"}, {"id": "low", "resource_hints": {"priority": "low"}}, {"id": "none"}, {"id": "critical", "resource_hints": {"priority": "critical"}}]}`)
		var all sync.WaitGroup
		for _, node := range []string{"first", "low", "none", "critical"} {
			token := b.token(b.agents["a"], ect.Claims{Workflow: wid, Action: node, Ext: new(ect.ExtBuilder).Text("atd.resource_priority", "high")})
			all.Go(func() { b.ran(b.send("POST /"+node, "", "", token.Raw())) })
			synctest.Wait()
		}
		all.Wait()
		if want := []string{"/first", "/critical", "/none", "/low"}; !slices.Equal(came, want) {
			t.Errorf("%q, want %q", came, want)
		}
	})
}
