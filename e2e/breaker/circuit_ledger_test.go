package breaker

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// cascade 3.2.3 and 3.2.4: an upstream that fails is seen at the endpoint, and each
// change of its breaker is a token that follows from the error that caused it.
func TestCircuitIsToldAndSeen(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n breaker {\n consecutive 2\n cooldown 10h\n downstream " + u.Addr + " spiffe://example.com/agent/b\n }\n }"})
	u.On("/down", harness.Status(503, ""))
	wid := uuid.NewString()
	for range 2 {
		g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/down"}))
	}
	if got := g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/circuits"}); got.Status != http.StatusUnauthorized {
		t.Errorf("without a credential: %d", got.Status)
	}
	var seen harness.CircuitsView
	for deadline := time.Now().Add(harness.Patience); ; {
		seen = harness.Document[harness.CircuitsView](t, g.Get(a, "circuits"))
		if len(seen.Circuits) == 1 && seen.Circuits[0].Opened != "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", seen)
		}
	}
	c := seen.Circuits[0]
	if c.State != "open" || c.Downstream != "spiffe://example.com/agent/b" || c.Upstream != u.Addr || c.ErrorRate != 1 ||
		c.Window != 60 || c.Remaining < 35_000 || c.Cause == "" {
		t.Errorf("%+v", c)
	}
	// Two tokens, with checkpoint, node and error each, and the opening.
	view := g.SettledView(a, wid, 9)
	kinds := map[string]string{}
	for _, n := range view.Nodes {
		kinds[n.JTI] = n.Event
	}
	if kinds[c.Opened] != "circuit_breaker_open" || kinds[c.LastFailure] != "error" {
		t.Errorf("%+v\n%+v", c, view)
	}
	if !view.Follows(c.Opened, c.LastFailure) || len(view.Nodes) != 9 {
		t.Errorf("the opening does not follow from the one error of its call: %+v", view)
	}

	harness.HalfOpen(t, u.Addr)
	if got := g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/works"})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	for _, path := range []string{"/.well-known/cascade/circuits", "/.well-known/aerr/circuits", "/aerr/circuits"} {
		got := g.Call(harness.With(a.Issue(ect.Claims{Action: "look"}), harness.Request{Method: "GET", Path: path + "?state=closed"}))
		if closed := harness.Document[harness.CircuitsView](t, got); len(closed.Circuits) != 1 || closed.Circuits[0].State != "closed" {
			t.Errorf("%s: %+v", path, closed)
		}
	}
	// What follows from the opening: three nodes of the call that closed it, and two.
	view = g.SettledView(a, wid, 14)
	for _, n := range view.Nodes {
		kinds[n.JTI] = n.Event
	}
	var follow []string
	for _, e := range view.Edges {
		if e.From == c.Opened {
			follow = append(follow, kinds[e.To])
		}
	}
	slices.Sort(follow)
	if want := []string{"circuit_breaker_close", "circuit_breaker_half_open"}; !slices.Equal(follow, want) {
		t.Errorf("%v follow from the opening, want %v: %+v", follow, want, view)
	}
}

// cascade 3.3.2: a gateway is the boundary of its workflows. What a breaker rejects of a
// workflow is told to it, once until the breaker changes its state.
func TestRejectionsAreToldOnce(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" + harness.Tripping + "\n}"})
	u.On("/down", harness.Status(503, ""))
	storm, later := uuid.NewString(), uuid.NewString()
	began := map[string]*ect.Token{storm: a.Issue(ect.Claims{Workflow: storm}), later: a.Issue(ect.Claims{Workflow: later})}
	for _, token := range began {
		if got := g.Call(harness.With(token, harness.Request{Path: "/works"})); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	for range 2 {
		g.Call(harness.Request{Method: "GET", Path: "/down"})
	}
	for range 5 {
		next := a.Issue(ect.Claims{Workflow: storm, Parents: []string{began[storm].ID()}})
		g.Call(harness.With(next, harness.Request{Path: "/works"})).RefusedSaying(t, "The circuit breaker of "+u.Addr+" is open: status 503.")
	}
	next := a.Issue(ect.Claims{Workflow: later, Parents: []string{began[later].ID()}})
	g.Call(harness.With(next, harness.Request{Path: "/works"})).RefusedSaying(t, "The circuit breaker of "+u.Addr+" is open: status 503.")
	// They are told in their order: what was told of the first workflow stands there
	// when the second has its own.
	for _, wid := range []string{later, storm} {
		view := g.SettledView(a, wid, 5) // two of the call, two of its refusals, and the token
		var rejections, linked int
		for _, n := range view.Nodes {
			if n.Event == "circuit_breaker_open" {
				rejections++
				for _, e := range view.Edges {
					if e.From == began[wid].ID() && e.To == n.JTI {
						linked++
					}
				}
			}
		}
		if rejections != 1 || linked != 1 {
			t.Errorf("%d rejections, %d behind the token that led to them: %+v", rejections, linked, view)
		}
	}
	if got := u.Arrivals("/works"); got != 2 {
		t.Errorf("the upstream has seen %d calls", got)
	}
}

// cascade 3.3.2: workflows that somebody makes up whom nobody has verified do not keep
// others from being told.
func TestMadeUpWorkflowsDoNotHideRejections(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" + harness.Tripping + "\n}"})
	u.On("/down", harness.Status(503, ""))
	wid := uuid.NewString()
	first := a.Issue(ect.Claims{Workflow: wid})
	g.Call(harness.With(first, harness.Request{Path: "/works"})).Want(t, 201, "arrival 1", "executed")
	for range 2 {
		g.Call(harness.Request{Method: "GET", Path: "/down"})
	}
	for n := range 1100 { // more than are told
		id := strconv.Itoa(n)
		if got := g.Call(harness.Request{Path: "/works", Id: id, Header: harness.Headers{"Workflow-Id": "made-up-" + id}}); got.Status != 503 {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	next := a.Issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}})
	g.Call(harness.With(next, harness.Request{Path: "/works"})).RefusedSaying(t, "The circuit breaker of "+u.Addr+" is open: status 503.")
	// Token, checkpoint and node of the first call; two of the refusal of the second, whose token is nowhere.
	events := 0
	view := g.SettledView(a, wid, 5)
	for _, n := range view.Nodes {
		if n.Event == "circuit_breaker_open" {
			events++
		}
	}
	if events != 1 {
		t.Errorf("told %d times: %+v", events, view)
	}
}

// cascade 6.2 and ATD "Circuit Breaker State Leakage": operators see all breakers,
// callers those behind the guard that they ask and those that have failed a workflow of
// theirs, and a credential that nobody has verified is nobody.
func TestWhoSeesCircuits(t *testing.T) {
	here, there := harness.NewUpstream(t), harness.NewUpstream(t)
	a, b, ops := harness.NewAgent(t, "a"), harness.NewAgent(t, "b"), harness.NewAgent(t, "ops")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b, ops), Badger: true, Site: "@there path /there/*\n" +
		"agent_proxy @there " + there.Addr + " {\n name there\n" + harness.Tripping + "\n}\n" +
		"agent_proxy " + here.Addr + " {\n operators issuer:spiffe://example.com/agent/ops\n" + harness.Tripping + "\n}"})
	there.On("/there/down", harness.Status(503, ""))
	g.Call(harness.Request{Method: "GET", Path: "/here"}) // so that there is a breaker
	wid := uuid.NewString()
	for range 2 {
		g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/there/down"}))
	}
	g.SettledView(a, wid, 9) // with the opening
	for _, tt := range []struct {
		who  *harness.Agent
		path string
		want []string
	}{
		{ops, "circuits", []string{here.Addr, there.Addr}},
		{ops, "circuits?wid=" + wid, []string{there.Addr}},
		{ops, "circuits?state=open", []string{there.Addr}},
		{a, "circuits", []string{here.Addr}},
		{a, "circuits?wid=" + wid, []string{there.Addr}},
		{a, "circuits?state=open", nil},
		{b, "circuits", []string{here.Addr}},
	} {
		var got []string
		for _, c := range harness.Document[harness.CircuitsView](t, g.Get(tt.who, tt.path)).Circuits {
			got = append(got, c.Upstream)
		}
		slices.Sort(got)
		slices.Sort(tt.want)
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s sees %v, want %v", tt.path, got, tt.want)
		}
	}
	// Others' workflows and none are the same.
	for _, id := range []string{wid, uuid.NewString()} {
		g.Get(b, "circuits?wid="+id).Problem(t, http.StatusNotFound, "workflow-unknown")
	}
	for _, h := range []harness.Headers{nil, {"Authorization": "Bearer made-up"}, {"Cookie": "a=b"}} {
		g.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/circuits", Header: h}).Problem(t, http.StatusUnauthorized, "authentication-required")
	}
}

// cascade 3.2.4: also a failure that its call tells nothing of has an error, in the
// workflow of the call and behind its checkpoint: one, from which the opening follows.
// What came of the call is for its own node to say.
func TestOpeningsOfCallsThatComplete(t *testing.T) {
	for name, test := range map[string]struct {
		site, path string
		calls      int
	}{
		"in band": {"agent_proxy UP {\n" + strings.Replace(harness.Tripping, "{", "{\nin_band json /error", 1) + "\n}", "/fault", 2},
		"rescued by load balancing": {"agent_proxy DEAD UP {\nlb_policy first\nlb_retries 1\nfail_duration 1m\n" +
			strings.Replace(harness.Tripping, "consecutive 2", "consecutive 1", 1) + "\n}", "/works", 1},
	} {
		t.Run(name, func(t *testing.T) {
			u, a, failing := harness.NewUpstream(t), harness.NewAgent(t, "a"), ""
			u.On("/fault", func(w http.ResponseWriter, _ *harness.Arrival) {
				w.Header().Set("Content-Type", "application/json")
				_, _ = w.Write([]byte(`{"error":{"code":1}}`))
			})
			if failing = u.Addr; test.calls == 1 {
				failing = harness.FreeAddress(t)
			}
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: strings.NewReplacer("UP", u.Addr, "DEAD", failing).Replace(test.site)})
			wid := uuid.NewString()
			var last *ect.Token
			var checkpoint string
			for range test.calls {
				last = a.Issue(ect.Claims{Workflow: wid})
				got := g.Call(harness.With(last, harness.Request{Path: test.path}))
				if got.Status/100 != 2 {
					t.Fatalf("%d %s", got.Status, got.Body)
				}
				checkpoint = got.Header.Get("Execution-Checkpoint")
			}
			opened, failure := g.Opening(a, failing)
			// The token, a checkpoint and a node for each call; the error, and the opening.
			view := g.SettledView(a, wid, 3*test.calls+2)
			events := map[string][]string{}
			for _, n := range view.Nodes {
				events[n.Event] = append(events[n.Event], n.JTI)
			}
			if got := events["error"]; len(got) != 1 || got[0] != failure {
				t.Errorf("the errors are %v, and the last failure is %s: %+v", got, failure, view)
			}
			if !view.Follows(opened, failure) || !view.Follows(failure, checkpoint) {
				t.Errorf("%s does not follow from %s, and that from %s: %+v", opened, failure, checkpoint, view.Edges)
			}
			if state := view.State(last.ID()); state != "done" {
				t.Errorf("the call is %s", state)
			}
		})
	}
}

// cascade 6.2: what a refusal tells of an upstream is for whom the gateway knows, whether
// the call is guarded or not, before the claim and behind it; the identity that the
// configuration gives an upstream is for everybody.
func TestWhatARefusalTells(t *testing.T) {
	const bare, identity = "the upstream", "spiffe://example.com/agent/b"
	for name, test := range map[string]struct {
		site, anonymous, verified string
	}{
		"before the claim":         {"agent_proxy UP {\nBREAKER\n}", bare, "UP"},
		"with an identity":         {"agent_proxy UP {\n" + strings.Replace(harness.Tripping, "{", "{\ndownstream UP "+identity, 1) + "\n}", identity, identity},
		"behind it":                {"agent_guard\nroute {\nreverse_proxy UP {\ntransport agent_guard {\nBREAKER\n}\n}\n}", bare, "UP"},
		"behind, with an identity": {"agent_guard\nroute {\nreverse_proxy UP {\ntransport agent_guard {\n" + strings.Replace(harness.Tripping, "{", "{\ndownstream UP "+identity, 1) + "\n}\n}\n}", identity, identity},
	} {
		t.Run(name, func(t *testing.T) {
			u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
			named := strings.NewReplacer("UP", u.Addr, "BREAKER", harness.Tripping)
			g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: named.Replace(test.site)})
			u.On("/down", harness.Status(503, ""))
			for range 2 {
				g.Call(harness.Request{Method: "GET", Path: "/down"})
			}
			for _, method := range []string{"GET", "POST"} {
				for _, h := range []harness.Headers{nil, {"Authorization": "Bearer made-up"}} {
					g.Call(harness.Request{Method: method, Path: "/x", Id: "k", Header: h}).
						RefusedSaying(t, "The circuit breaker of "+test.anonymous+" is open.")
				}
				g.Call(harness.With(a.Issue(ect.Claims{Action: "look"}), harness.Request{Method: method, Path: "/x"})).
					RefusedSaying(t, "The circuit breaker of "+named.Replace(test.verified)+" is open: status 503.")
			}
		})
	}
}

// An upstream that fails calls which are not guarded has an error of its own.
func TestCircuitOfUnguardedCalls(t *testing.T) {
	u, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + u.Addr + " {\n" + harness.Tripping + "\n}"})
	u.On("/down", harness.Status(503, ""))
	for range 2 {
		g.Call(harness.Request{Method: "GET", Path: "/down"})
	}
	for deadline := time.Now().Add(harness.Patience); ; {
		seen := harness.Document[harness.CircuitsView](t, g.Get(a, "circuits"))
		if len(seen.Circuits) == 1 && seen.Circuits[0].Opened != "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", seen)
		}
	}
}

// What callers wait for opens no breaker: anybody could cut an upstream off from all.
func TestImpatientCallersOpenNothing(t *testing.T) {
	u := harness.NewUpstream(t)
	g := harness.Start(t, "agent_proxy %s {\n"+harness.Tripping+"\n}", u.Addr)
	for i := range 5 {
		g.Call(harness.Request{Path: "/a", Id: "impatient-" + strconv.Itoa(i), Header: harness.Headers{"Request-Timeout": "1ns"}})
	}
	// Some of them may have reached the upstream before their time was over.
	if got := g.Call(harness.Request{Path: "/a", Id: "k"}); got.Status != 201 || got.Header.Get("Execution-Status") != "executed" {
		t.Errorf("%d %s %s", got.Status, got.Header.Get("Execution-Status"), got.Body)
	}
}

// cascade 3.3.1: a call ends before its caller gives up.
func TestCallersDeadline(t *testing.T) {
	u, hold := harness.NewUpstream(t), harness.NewGate(t)
	defer hold.Open()
	u.On("/slow", func(http.ResponseWriter, *harness.Arrival) { hold.Pass() })
	g := harness.Start(t, "agent_proxy %s", u.Addr)
	var got harness.Reply
	for id := 2; u.Arrivals("/slow") == 0; id *= 2 { // seconds, in which the call has to leave
		got = g.Call(harness.Request{Path: "/slow", Id: strconv.Itoa(id), Header: harness.Headers{"Request-Timeout": strconv.Itoa(id)}})
	}
	got.Problem(t, http.StatusConflict, "in-doubt")
}
