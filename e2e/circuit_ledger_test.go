package e2e

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// circuitsView is what the page of breakers tells.
type circuitsView struct {
	Circuits []struct {
		Downstream  string  `json:"downstream_agent"`
		State       string  `json:"state"`
		ErrorRate   float64 `json:"error_rate"`
		Window      float64 `json:"window_s"`
		LastFailure string  `json:"last_failure_ect"`
		Remaining   int64   `json:"cooldown_remaining_s"` // Figure 3: a whole number
		Upstream    string  `json:"upstream"`
		Opened      string  `json:"open_ect"`
		Cause       string  `json:"last_cause"`
		Rejected    uint64  `json:"rejected"`

		WorkflowThreshold float64 `json:"workflow_threshold"`
	}
}

// cascade 3.2.3 and 3.2.4: an upstream that fails is seen at the endpoint, and each
// change of its breaker is a token that follows from the error that caused it.
func TestCircuitIsToldAndSeen(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n breaker {\n consecutive 2\n cooldown 10h\n downstream " + u.addr + " spiffe://example.com/agent/b\n }\n }"})
	u.on("/down", status(503, ""))
	wid := uuid.NewString()
	for range 2 {
		g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/down"}))
	}
	if got := g.call(request{method: "GET", path: "/.well-known/cascade/circuits"}); got.status != http.StatusUnauthorized {
		t.Errorf("without a credential: %d", got.status)
	}
	var seen circuitsView
	for deadline := time.Now().Add(patience); ; {
		seen = document[circuitsView](t, g.get(a, "circuits"))
		if len(seen.Circuits) == 1 && seen.Circuits[0].Opened != "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", seen)
		}
	}
	c := seen.Circuits[0]
	if c.State != "open" || c.Downstream != "spiffe://example.com/agent/b" || c.Upstream != u.addr || c.ErrorRate != 1 ||
		c.Window != 60 || c.Remaining < 35_000 || c.Cause == "" {
		t.Errorf("%+v", c)
	}
	// Two tokens, with checkpoint, node and error each, and the opening.
	view := g.settledView(a, wid, 9)
	kinds := map[string]string{}
	for _, n := range view.Nodes {
		kinds[n.JTI] = n.Event
	}
	if kinds[c.Opened] != "circuit_breaker_open" || kinds[c.LastFailure] != "error" {
		t.Errorf("%+v\n%+v", c, view)
	}
	if !view.follows(c.Opened, c.LastFailure) || len(view.Nodes) != 9 {
		t.Errorf("the opening does not follow from the one error of its call: %+v", view)
	}

	halfOpen(t, u.addr)
	if got := g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/works"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	for _, path := range []string{"/.well-known/cascade/circuits", "/.well-known/aerr/circuits", "/aerr/circuits"} {
		got := g.call(with(a.issue(ect.Claims{Action: "look"}), request{method: "GET", path: path + "?state=closed"}))
		if closed := document[circuitsView](t, got); len(closed.Circuits) != 1 || closed.Circuits[0].State != "closed" {
			t.Errorf("%s: %+v", path, closed)
		}
	}
	// What follows from the opening: three nodes of the call that closed it, and two.
	view = g.settledView(a, wid, 14)
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
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n" + tripping + "\n}"})
	u.on("/down", status(503, ""))
	storm, later := uuid.NewString(), uuid.NewString()
	began := map[string]*ect.Token{storm: a.issue(ect.Claims{Workflow: storm}), later: a.issue(ect.Claims{Workflow: later})}
	for _, token := range began {
		if got := g.call(with(token, request{path: "/works"})); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	for range 2 {
		g.call(request{method: "GET", path: "/down"})
	}
	for range 5 {
		next := a.issue(ect.Claims{Workflow: storm, Parents: []string{began[storm].ID()}})
		g.call(with(next, request{path: "/works"})).refusedSaying(t, "The circuit breaker of "+u.addr+" is open: status 503.")
	}
	next := a.issue(ect.Claims{Workflow: later, Parents: []string{began[later].ID()}})
	g.call(with(next, request{path: "/works"})).refusedSaying(t, "The circuit breaker of "+u.addr+" is open: status 503.")
	// They are told in their order: what was told of the first workflow stands there
	// when the second has its own.
	for _, wid := range []string{later, storm} {
		view := g.settledView(a, wid, 5) // two of the call, two of its refusals, and the token
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
	if got := u.arrivals("/works"); got != 2 {
		t.Errorf("the upstream has seen %d calls", got)
	}
}

// cascade 3.3.2: workflows that somebody makes up whom nobody has verified do not keep
// others from being told.
func TestMadeUpWorkflowsDoNotHideRejections(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n" + tripping + "\n}"})
	u.on("/down", status(503, ""))
	wid := uuid.NewString()
	first := a.issue(ect.Claims{Workflow: wid})
	g.call(with(first, request{path: "/works"})).want(t, 201, "arrival 1", "executed")
	for range 2 {
		g.call(request{method: "GET", path: "/down"})
	}
	for n := range 1100 { // more than are told
		id := strconv.Itoa(n)
		if got := g.call(request{path: "/works", id: id, header: headers{"Workflow-Id": "made-up-" + id}}); got.status != 503 {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	next := a.issue(ect.Claims{Workflow: wid, Parents: []string{first.ID()}})
	g.call(with(next, request{path: "/works"})).refusedSaying(t, "The circuit breaker of "+u.addr+" is open: status 503.")
	// Token, checkpoint and node of the first call; two of the refusal of the second, whose token is nowhere.
	events := 0
	view := g.settledView(a, wid, 5)
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
	here, there := newUpstream(t), newUpstream(t)
	a, b, ops := newAgent(t, "a"), newAgent(t, "b"), newAgent(t, "ops")
	g := launch(t, setup{app: trusting(t, a, b, ops), badger: true, site: "@there path /there/*\n" +
		"agent_proxy @there " + there.addr + " {\n name there\n" + tripping + "\n}\n" +
		"agent_proxy " + here.addr + " {\n operators issuer:spiffe://example.com/agent/ops\n" + tripping + "\n}"})
	there.on("/there/down", status(503, ""))
	g.call(request{method: "GET", path: "/here"}) // so that there is a breaker
	wid := uuid.NewString()
	for range 2 {
		g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/there/down"}))
	}
	g.settledView(a, wid, 9) // with the opening
	for _, tt := range []struct {
		who  *agent
		path string
		want []string
	}{
		{ops, "circuits", []string{here.addr, there.addr}},
		{ops, "circuits?wid=" + wid, []string{there.addr}},
		{ops, "circuits?state=open", []string{there.addr}},
		{a, "circuits", []string{here.addr}},
		{a, "circuits?wid=" + wid, []string{there.addr}},
		{a, "circuits?state=open", nil},
		{b, "circuits", []string{here.addr}},
	} {
		var got []string
		for _, c := range document[circuitsView](t, g.get(tt.who, tt.path)).Circuits {
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
		g.get(b, "circuits?wid="+id).problem(t, http.StatusNotFound, "workflow-unknown")
	}
	for _, h := range []headers{nil, {"Authorization": "Bearer made-up"}, {"Cookie": "a=b"}} {
		g.call(request{method: "GET", path: "/.well-known/cascade/circuits", header: h}).problem(t, http.StatusUnauthorized, "authentication-required")
	}
}

// opening is the opening of an upstream's breaker, once it is told.
func (g *gateway) opening(a *agent, upstream string) (opened, failure string) {
	g.t.Helper()
	eventually(g.t, "the opening is told", func() bool {
		for _, c := range document[circuitsView](g.t, g.get(a, "circuits")).Circuits {
			if c.Upstream == upstream {
				opened, failure = c.Opened, c.LastFailure
			}
		}
		return opened != ""
	})
	return opened, failure
}

// cascade 3.2.4: also a failure that its call tells nothing of has an error, in the
// workflow of the call and behind its checkpoint: one, from which the opening follows.
// What came of the call is for its own node to say.
func TestOpeningsOfCallsThatComplete(t *testing.T) {
	for name, test := range map[string]struct {
		site, path string
		calls      int
	}{
		"in band": {"agent_proxy UP {\n" + strings.Replace(tripping, "{", "{\nin_band json /error", 1) + "\n}", "/fault", 2},
		"rescued by load balancing": {"agent_proxy DEAD UP {\nlb_policy first\nlb_retries 1\nfail_duration 1m\n" +
			strings.Replace(tripping, "consecutive 2", "consecutive 1", 1) + "\n}", "/works", 1},
	} {
		t.Run(name, func(t *testing.T) {
			u, a, failing := newUpstream(t), newAgent(t, "a"), ""
			u.on("/fault", func(w http.ResponseWriter, _ *arrival) {
				w.Header().Set("Content-Type", "application/json")
				_, _ = w.Write([]byte(`{"error":{"code":1}}`))
			})
			if failing = u.addr; test.calls == 1 {
				failing = freeAddress(t)
			}
			g := launch(t, setup{app: trusting(t, a), badger: true, site: strings.NewReplacer("UP", u.addr, "DEAD", failing).Replace(test.site)})
			wid := uuid.NewString()
			var last *ect.Token
			var checkpoint string
			for range test.calls {
				last = a.issue(ect.Claims{Workflow: wid})
				got := g.call(with(last, request{path: test.path}))
				if got.status/100 != 2 {
					t.Fatalf("%d %s", got.status, got.body)
				}
				checkpoint = got.header.Get("Execution-Checkpoint")
			}
			opened, failure := g.opening(a, failing)
			// The token, a checkpoint and a node for each call; the error, and the opening.
			view := g.settledView(a, wid, 3*test.calls+2)
			events := map[string][]string{}
			for _, n := range view.Nodes {
				events[n.Event] = append(events[n.Event], n.JTI)
			}
			if got := events["error"]; len(got) != 1 || got[0] != failure {
				t.Errorf("the errors are %v, and the last failure is %s: %+v", got, failure, view)
			}
			if !view.follows(opened, failure) || !view.follows(failure, checkpoint) {
				t.Errorf("%s does not follow from %s, and that from %s: %+v", opened, failure, checkpoint, view.Edges)
			}
			if state := view.state(last.ID()); state != "done" {
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
		"with an identity":         {"agent_proxy UP {\n" + strings.Replace(tripping, "{", "{\ndownstream UP "+identity, 1) + "\n}", identity, identity},
		"behind it":                {"agent_guard\nroute {\nreverse_proxy UP {\ntransport agent_guard {\nBREAKER\n}\n}\n}", bare, "UP"},
		"behind, with an identity": {"agent_guard\nroute {\nreverse_proxy UP {\ntransport agent_guard {\n" + strings.Replace(tripping, "{", "{\ndownstream UP "+identity, 1) + "\n}\n}\n}", identity, identity},
	} {
		t.Run(name, func(t *testing.T) {
			u, a := newUpstream(t), newAgent(t, "a")
			named := strings.NewReplacer("UP", u.addr, "BREAKER", tripping)
			g := launch(t, setup{app: trusting(t, a), site: named.Replace(test.site)})
			u.on("/down", status(503, ""))
			for range 2 {
				g.call(request{method: "GET", path: "/down"})
			}
			for _, method := range []string{"GET", "POST"} {
				for _, h := range []headers{nil, {"Authorization": "Bearer made-up"}} {
					g.call(request{method: method, path: "/x", id: "k", header: h}).
						refusedSaying(t, "The circuit breaker of "+test.anonymous+" is open.")
				}
				g.call(with(a.issue(ect.Claims{Action: "look"}), request{method: method, path: "/x"})).
					refusedSaying(t, "The circuit breaker of "+named.Replace(test.verified)+" is open: status 503.")
			}
		})
	}
}

// An upstream that fails calls which are not guarded has an error of its own.
func TestCircuitOfUnguardedCalls(t *testing.T) {
	u, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + u.addr + " {\n" + tripping + "\n}"})
	u.on("/down", status(503, ""))
	for range 2 {
		g.call(request{method: "GET", path: "/down"})
	}
	for deadline := time.Now().Add(patience); ; {
		seen := document[circuitsView](t, g.get(a, "circuits"))
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
	u := newUpstream(t)
	g := start(t, "agent_proxy %s {\n"+tripping+"\n}", u.addr)
	for i := range 5 {
		g.call(request{path: "/a", id: "impatient-" + strconv.Itoa(i), header: headers{"Request-Timeout": "1ns"}})
	}
	// Some of them may have reached the upstream before their time was over.
	if got := g.call(request{path: "/a", id: "k"}); got.status != 201 || got.header.Get("Execution-Status") != "executed" {
		t.Errorf("%d %s %s", got.status, got.header.Get("Execution-Status"), got.body)
	}
}

// cascade 3.3.1: a call ends before its caller gives up.
func TestCallersDeadline(t *testing.T) {
	u, hold := newUpstream(t), newGate(t)
	defer hold.open()
	u.on("/slow", func(http.ResponseWriter, *arrival) { hold.pass() })
	g := start(t, "agent_proxy %s", u.addr)
	var got reply
	for id := 2; u.arrivals("/slow") == 0; id *= 2 { // seconds, in which the call has to leave
		got = g.call(request{path: "/slow", id: strconv.Itoa(id), header: headers{"Request-Timeout": strconv.Itoa(id)}})
	}
	got.problem(t, http.StatusConflict, "in-doubt")
}
