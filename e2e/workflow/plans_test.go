package workflow

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// plannedGateway is a gateway with the agents a, who begins workflows, b, who is a stranger, and c, a coordinator.
type plannedGateway struct {
	*harness.Gateway
	t        *testing.T
	upstream *harness.Upstream
	a, b, c  *harness.Agent
	d        *harness.Agent // an operator
}

const plannedSite = ` {
	operators issuer:spiffe://example.com/agent/d
	action hold_budget {
		match path /hold
	}
	action mail {
		match path /mail
	}
	action pay {
		match path /pay
	}
	action doc {
		match path /docs/*
		restore
	}
}`

func newPlannedGateway(t *testing.T, options string) *plannedGateway {
	t.Helper()
	p := &plannedGateway{t: t, upstream: harness.NewUpstream(t), a: harness.NewAgent(t, "a"), b: harness.NewAgent(t, "b"), c: harness.NewAgent(t, "c"), d: harness.NewAgent(t, "d")}
	p.Gateway = harness.Launch(t, harness.Setup{
		App:  harness.Trusting(t, p.a, p.b, p.c, p.d) + "\nrollback {\n coordinators spiffe://example.com/agent/c\n}\n" + options,
		Site: "agent_proxy " + p.upstream.Addr + plannedSite, Badger: true,
	})
	return p
}

// put sends a plan, with a token that is bound to it.
func (p *plannedGateway) put(by *harness.Agent, wid, text string, header map[string]string) harness.Reply {
	p.t.Helper()
	r := harness.Request{Method: http.MethodPut, Path: "/.well-known/cascade/workflows/" + wid, Body: text, Header: map[string]string{"Content-Type": harness.PlanType}}
	for name, value := range header {
		r.Header[name] = value
	}
	if by != nil {
		r = harness.With(by.Issue(ect.Claims{Workflow: wid, Action: "plan", Input: ect.Sum([]byte(text))}), r)
	}
	return p.Call(r)
}

// plan reads the plan of a workflow.
func (p *plannedGateway) plan(by *harness.Agent, wid, query string) harness.Reply {
	p.t.Helper()
	return p.Call(harness.With(by.Issue(ect.Claims{Action: "look"}), harness.Request{
		Method: http.MethodGet, Path: "/.well-known/cascade/workflows/" + wid + query, Header: map[string]string{"Accept": harness.PlanType},
	}))
}

// act makes a call in a workflow.
func (p *plannedGateway) act(by *harness.Agent, wid, action, path string, header map[string]string) harness.Reply {
	p.t.Helper()
	r := harness.Request{Path: path, Header: map[string]string{}}
	for name, value := range header {
		r.Header[name] = value
	}
	return p.Call(harness.With(by.Issue(ect.Claims{Workflow: wid, Action: action}), r))
}

// shownPlan is a plan in the page of a workflow.
type shownPlan struct {
	Version string
	Nodes   []struct{ ID, State string }
	Others  []string
}

func (p *plannedGateway) shown(wid string) shownPlan {
	p.t.Helper()
	return harness.Document[struct{ Plan shownPlan }](p.t, p.Get(p.a, "workflows/"+wid)).Plan
}

// A-optional-a, A-optional-c, A-media-type-a, A-topological-order-f: a plan is put and read, with its
// version as its ETag; what is wrong with one is said whole, and changes nothing.
func TestPlanIsPut(t *testing.T) {
	p := newPlannedGateway(t, "")
	wid := uuid.NewString()
	if got := p.put(nil, wid, harness.TripPlan, nil); got.Status != http.StatusUnauthorized {
		t.Errorf("nobody: %d %s", got.Status, got.Body)
	}
	got := p.put(p.a, wid, harness.TripPlan, map[string]string{"Content-Type": "text/plain"})
	if got.Problem(t, http.StatusUnsupportedMediaType, "media-type-unsupported"); !strings.Contains(got.Header.Get("Accept"), harness.PlanType) {
		t.Errorf("Accept: %q", got.Header.Get("Accept"))
	}
	wrong := document422(t, p.put(p.a, wid, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b", "hitl_required": "yes"}], "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}, {"from": "a", "to": "a"}, {"from": "a", "to": "x"}]}`, nil))
	if text := fmt.Sprint(wrong); !strings.Contains(text, "{b hitl_required ") || !strings.Contains(text, "edges[3]") {
		t.Errorf("%v", wrong)
	}
	wrong = document422(t, p.put(p.a, wid, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}], "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]}`, nil))
	if len(wrong) != 1 || fmt.Sprint(wrong[0].Cycle) != "[a b]" {
		t.Errorf("a cycle: %v", wrong)
	}
	r := harness.Request{Method: http.MethodPut, Path: "/.well-known/cascade/workflows/" + wid, Body: harness.TripPlan, Header: map[string]string{"Content-Type": harness.PlanType}}
	p.Call(harness.With(p.a.Issue(ect.Claims{Workflow: wid, Input: ect.Sum([]byte("another"))}), r)).RefusedFor(t, http.StatusForbidden, "inp_hash")
	p.Call(harness.With(p.a.Issue(ect.Claims{Workflow: uuid.NewString(), Input: ect.Sum([]byte(harness.TripPlan))}), r)).RefusedFor(t, http.StatusForbidden, "wid")
	p.put(p.c, wid, strings.Repeat(" ", 8<<20+1), nil).Problem(t, http.StatusRequestEntityTooLarge, "body-too-large")
	if got := p.plan(p.a, wid, ""); got.Status != http.StatusNotFound {
		t.Errorf("nothing was put yet: %d %s", got.Status, got.Body)
	}

	got = p.put(p.c, wid, harness.TripPlan, map[string]string{"Content-Type": "application/json; charset=utf-8"})
	first := got.Header.Get("ETag")
	doc := harness.Document[struct {
		Version  string
		InForce  bool `json:"in_force"`
		Warnings []struct{ Node, Problem string }
	}](t, got)
	// mail is shared by two nodes, and nothing undoes hold_budget (A-optional-e).
	if got.Status != http.StatusCreated || first != `"`+doc.Version+`"` || !doc.InForce || len(doc.Warnings) != 2 || doc.Warnings[1].Node != "hold" {
		t.Errorf("%d %s %s", got.Status, first, got.Body)
	}
	if got := p.put(p.c, wid, harness.TripPlan, nil); got.Status != http.StatusOK || got.Header.Get("ETag") != first {
		t.Errorf("the same once more: %d %s", got.Status, got.Body)
	}
	other := strings.Replace(harness.TripPlan, `"reversible": true`, `"reversible": false`, 1)
	p.put(p.c, wid, other, nil).Problem(t, http.StatusPreconditionRequired, "plan-exists")
	p.put(p.c, wid, other, map[string]string{"If-Match": `"another"`}).Problem(t, http.StatusPreconditionFailed, "plan-replaced")
	p.put(p.c, wid, other, map[string]string{"If-None-Match": "*"}).Problem(t, http.StatusPreconditionFailed, "plan-replaced")
	got = p.put(p.c, wid, other, map[string]string{"If-Match": `"another", ` + first})
	second := got.Header.Get("ETag")
	if got.Status != http.StatusOK || second == first {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	now, before := p.plan(p.c, wid, ""), p.plan(p.c, wid, "?version="+strings.Trim(first, `"`))
	if now.Status != 200 || now.Header.Get("ETag") != second || now.Header.Get("Content-Type") != harness.PlanType || !strings.Contains(now.Body, `"reversible":false`) ||
		before.Status != 200 || before.Header.Get("ETag") != first || strings.Contains(before.Body, `"reversible":false`) {
		t.Errorf("%d %v %s\n%d %v %s", now.Status, now.Header, now.Body, before.Status, before.Header, before.Body)
	}
	same := p.Call(harness.With(p.c.Issue(ect.Claims{Action: "look"}), harness.Request{Method: http.MethodGet, Path: "/.well-known/cascade/workflows/" + wid,
		Header: map[string]string{"Accept": harness.PlanType, "If-None-Match": second}}))
	if same.Status != http.StatusNotModified || same.Header.Get("ETag") != second || same.Body != "" {
		t.Errorf("%d %v %s", same.Status, same.Header, same.Body)
	}
	// P3: for a stranger it is as if there were none.
	none, foreign := p.plan(p.b, uuid.NewString(), ""), p.plan(p.b, wid, "")
	if none.Status != http.StatusNotFound || foreign.Status != none.Status || foreign.Body != none.Body {
		t.Errorf("%d %s, %d %s", none.Status, none.Body, foreign.Status, foreign.Body)
	}
	schema := p.Call(harness.Request{Method: http.MethodGet, Path: "/.well-known/cascade/atd-workflow.schema.json"})
	if schema.Status != 200 || schema.Header.Get("Content-Type") != "application/schema+json" || !strings.Contains(schema.Body, "hitl_required") {
		t.Errorf("%d %s", schema.Status, schema.Body)
	}
}

type planProblem struct {
	Node, Member, Problem string
	Cycle                 []string
}

func document422(t *testing.T, r harness.Reply) []planProblem {
	t.Helper()
	r.Problem(t, http.StatusUnprocessableEntity, "plan-invalid")
	r.Status = http.StatusOK
	return harness.Document[struct{ Problems []planProblem }](t, r).Problems
}

// A-optional-b: a call is the node that its token names, or else its header, or else what it does. One
// that is none, or could be several, is not forwarded, and its key stays free.
func TestWhichNodeACallIs(t *testing.T) {
	p := newPlannedGateway(t, "")
	wid := uuid.NewString()
	if got := p.put(p.c, wid, harness.TripPlan, nil); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	key := func(id string, header map[string]string) map[string]string {
		all := map[string]string{"Idempotency-Key": id}
		for name, value := range header {
			all[name] = value
		}
		return all
	}
	p.act(p.a, wid, "other", "/other", key("k1", nil)).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	p.act(p.a, wid, "hold_budget", "/hold", key("k1", map[string]string{"Workflow-Node": "gone"})).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	p.act(p.a, wid, "mail", "/mail", key("k1", nil)).Problem(t, http.StatusUnprocessableEntity, "node-ambiguous")
	p.act(p.a, wid, "hold_budget", "/hold", key("k1", map[string]string{"Workflow-Node": "no node"})).Problem(t, http.StatusBadRequest, "workflow-id-invalid")
	if n := p.upstream.Total(); n != 0 {
		t.Errorf("%d calls were forwarded", n)
	}
	mail := key("k1", map[string]string{"Workflow-Node": "mail-2"})
	first := p.act(p.a, wid, "mail", "/mail", mail)
	if first.Status != http.StatusCreated || first.Header.Get("Execution-Status") != "executed" {
		t.Fatalf("the key is not free: %d %s", first.Status, first.Body)
	}
	if sent := p.upstream.Last("/mail").Header.Get("Workflow-Node"); sent != "mail-2" {
		t.Errorf("the next gateway is told %q", sent)
	}
	// A retry is the same node; under the same key another node is another call (P1).
	if again := p.act(p.a, wid, "mail", "/mail", mail); again.Header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %v", again.Status, again.Header)
	}
	p.act(p.a, wid, "mail", "/mail", key("k1", map[string]string{"Workflow-Node": "mail-1"})).Problem(t, http.StatusUnprocessableEntity, "fingerprint-mismatch")
	// Without a key, a call for another node is no retry of the first, though nothing else differs.
	for _, node := range []string{"mail-1", "mail-2"} {
		if got := p.act(p.a, wid, "mail", "/mail", map[string]string{"Workflow-Node": node}); got.Header.Get("Execution-Status") != "executed" {
			t.Errorf("%s: %d %v", node, got.Status, got.Header)
		}
	}
	token := p.a.Issue(ect.Claims{Workflow: wid, Action: "mail", Ext: new(ect.ExtBuilder).Text("atd.node", "hold")})
	if got := p.Call(harness.With(token, harness.Request{Path: "/mail", Header: map[string]string{"Workflow-Node": "pay"}})); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := fmt.Sprint(p.shown(wid).Nodes); got != "[{hold done} {mail-1 done} {mail-2 done} {pay pending}]" {
		t.Error(got)
	}
	// Who sees all of the workflow sees its plan, too; who has no part in it sees none (P3).
	if got := p.plan(p.a, wid, ""); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := p.plan(p.b, wid, ""); got.Status != http.StatusNotFound {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	// The workflow stays with the plan that it has begun with.
	p.put(p.c, wid, strings.Replace(harness.TripPlan, "mail-2", "mail-3", 1), map[string]string{"If-Match": "*"}).Problem(t, http.StatusConflict, "plan-in-force")
}

// Calls without tokens are the node that Workflow-Node names, or that is called like their action, and the
// gateway's own tokens say which: also while they run.
func TestNodesOfCallsWithoutTokens(t *testing.T) {
	p := newPlannedGateway(t, "")
	begun, done := make(chan struct{}), make(chan struct{})
	p.upstream.On("/pay", func(w http.ResponseWriter, _ *harness.Arrival) {
		close(begun)
		<-done
		w.WriteHeader(http.StatusCreated)
	})
	// Without a wid of its own a coordinator's token is good for the workflows of callers without tokens.
	got := p.Call(harness.With(p.c.Issue(ect.Claims{Action: "plan", Input: ect.Sum([]byte(harness.TripPlan))}), harness.Request{
		Method: http.MethodPut, Path: "/.well-known/cascade/workflows/nightly", Body: harness.TripPlan, Header: map[string]string{"Content-Type": harness.PlanType},
	}))
	wid := harness.Document[struct{ Wid string }](t, got).Wid
	call := func(path, node string) harness.Reply {
		return p.Call(harness.Request{Path: path, Header: map[string]string{"X-Api-Key": "ada", "Workflow-Id": "nightly", "Workflow-Node": node}})
	}
	if got := call("/hold", ""); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := call("/mail", "mail-2"); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	call("/mail", "").Problem(t, http.StatusUnprocessableEntity, "node-ambiguous")
	// A retry without a key is recognised as one for its own node only.
	for node, want := range map[string]string{"mail-2": "replayed", "mail-1": "executed"} {
		if got := p.Call(harness.Request{Path: "/mail", Header: map[string]string{
			"X-Api-Key": "ada", "Workflow-Id": "nightly", "Workflow-Node": node, "X-Stainless-Retry-Count": "1",
		}}); got.Header.Get("Execution-Status") != want {
			t.Errorf("a retry of %s: %d %v", node, got.Status, got.Header)
		}
	}
	running := make(chan harness.Reply)
	go func() { running <- call("/pay", "") }()
	<-begun
	page := func() string {
		r := harness.Request{Method: http.MethodGet, Path: "/.well-known/cascade/workflows/nightly", Header: map[string]string{"X-Api-Key": "ada"}}
		return fmt.Sprint(harness.Document[struct{ Plan shownPlan }](t, p.Call(r)).Plan.Nodes)
	}
	if got := page(); got != "[{hold done} {mail-1 done} {mail-2 done} {pay running}]" {
		t.Errorf("%s: %s", wid, got)
	}
	close(done)
	if got := <-running; got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := page(); got != "[{hold done} {mail-1 done} {mail-2 done} {pay done}]" {
		t.Error(got)
	}
}

// Who may put a plan (P3): the agent that begins the workflow, before its first call, in a way that shows
// nothing to strangers and binds nobody else's workflow; afterwards coordinators only, who hear what does
// not fit.
func TestWhoMayPutAPlan(t *testing.T) {
	p := newPlannedGateway(t, "")
	mine, theirs := uuid.NewString(), uuid.NewString()
	if got := p.put(p.a, mine, harness.TripPlan, nil); got.Status != http.StatusCreated || !strings.Contains(got.Body, `"in_force": false`) {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	if got := p.plan(p.a, mine, ""); got.Status != http.StatusOK {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	// b begins another workflow; a offers a plan for it, and for one that nobody has.
	if got := p.act(p.b, theirs, "other", "/other", nil); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	used, free := p.put(p.a, theirs, harness.TripPlan, nil), p.put(p.a, uuid.NewString(), harness.TripPlan, nil)
	if used.Status != free.Status || used.Status != http.StatusCreated {
		t.Errorf("a sees that the workflow is there: %d %s, %d %s", used.Status, used.Body, free.Status, free.Body)
	}
	if got := p.act(p.b, theirs, "other", "/other", nil); got.Status != http.StatusCreated {
		t.Errorf("a's plan binds b: %d %s", got.Status, got.Body)
	}
	// It binds a's own calls alone, and none where a joins in later.
	p.act(p.a, theirs, "else", "/else", nil).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	joined := p.b.Issue(ect.Claims{Workflow: theirs, Action: "other"})
	for _, token := range []*ect.Token{joined, p.a.Issue(ect.Claims{Workflow: theirs, Action: "else", Parents: []string{joined.ID()}})} {
		if got := p.Call(harness.With(token, harness.Request{Path: "/other"})); got.Status != http.StatusCreated {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	if got := p.act(p.b, theirs, "other", "/other", nil); got.Status != http.StatusCreated {
		t.Errorf("a's plan binds b: %d %s", got.Status, got.Body)
	}
	p.put(p.b, theirs, harness.TripPlan, nil).Problem(t, http.StatusForbidden, "plan-refused")

	// a's own is in force from its first call on, for who takes part in that.
	p.act(p.a, mine, "other", "/other", nil).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	first := p.a.Issue(ect.Claims{Workflow: mine, Action: "hold_budget"})
	if got := p.Call(harness.With(first, harness.Request{Path: "/hold"})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	p.Call(harness.With(p.b.Issue(ect.Claims{Workflow: mine, Action: "other", Parents: []string{first.ID()}}), harness.Request{Path: "/other"})).Problem(t, http.StatusUnprocessableEntity, "node-unknown")

	// An operator of the site may as well, at once.
	elsewhere := uuid.NewString()
	if got := p.put(p.d, elsewhere, harness.TripPlan, nil); got.Status != http.StatusCreated || !strings.Contains(got.Body, `"in_force": true`) {
		t.Errorf("%d %s", got.Status, got.Body)
	}

	// A plan that comes late says what it does not fit, and holds for what comes. Retries of calls of
	// before are answered as ever (P1).
	before := map[string]string{"Idempotency-Key": "before"}
	if got := p.act(p.b, theirs, "other", "/other", before); got.Header.Get("Execution-Status") != "executed" {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	got := p.put(p.c, theirs, harness.TripPlan, nil)
	doc := harness.Document[struct {
		Misfits []struct{ Task, Problem string }
	}](t, got)
	if got.Status != http.StatusCreated || len(doc.Misfits) != 6 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := p.act(p.b, theirs, "other", "/other", before); got.Header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	p.act(p.b, theirs, "other", "/other", nil).Problem(t, http.StatusUnprocessableEntity, "node-unknown")

	// It holds for calls, too, that are being prepared while it is put.
	busy := uuid.NewString()
	p.upstream.On("/docs/x", func(w http.ResponseWriter, a *harness.Arrival) {
		if a.Method == http.MethodGet { // the gateway keeps what it is to restore
			if got := p.put(p.c, busy, harness.TripPlan, nil); got.Status != http.StatusCreated {
				t.Errorf("%d %s", got.Status, got.Body)
			}
		}
	})
	p.Call(harness.With(p.b.Issue(ect.Claims{Workflow: busy, Action: "other"}), harness.Request{Method: http.MethodPut, Path: "/docs/x", Body: "1"})).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	p.upstream.Arrived("/docs/x", 1)

	// Nor does it fit what was done in another order.
	late := uuid.NewString()
	p.act(p.b, late, "pay", "/pay", nil)
	p.act(p.b, late, "hold_budget", "/hold", nil)
	if got := p.put(p.c, late, harness.TripPlan, nil); !strings.Contains(got.Body, "it began before hold was done, which comes before it") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	// That is the order of the ledger, whatever an agent's clock says.
	ordered := uuid.NewString()
	p.act(p.b, ordered, "hold_budget", "/hold", nil)
	early, err := p.b.Issuer.Issue(time.Now().Add(-10*time.Second), ect.Claims{Audience: []string{harness.GatewayIdentity}, Workflow: ordered, Action: "pay"})
	if err != nil {
		t.Fatal(err)
	}
	p.Call(harness.With(early, harness.Request{Path: "/pay"}))
	if got := p.put(p.c, ordered, harness.TripPlan, nil); got.Status != http.StatusCreated || strings.Contains(got.Body, "misfits") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// A-node-states-a: who has put a plan sees its page and follows it before the first call; others see no such workflow
// (P3). To a coordinator that sees none of the calls it shows no states (P6).
func TestPlanHasAPageBeforeItsFirstCall(t *testing.T) {
	p := newPlannedGateway(t, "")
	for name, by := range map[string]*harness.Agent{"initiator": p.a, "coordinator": p.c} {
		wid := uuid.NewString()
		if got := p.put(by, wid, harness.TripPlan, nil); got.Status != http.StatusCreated {
			t.Fatalf("%s: %d %s", name, got.Status, got.Body)
		}
		page := harness.Document[evidence.Workflow](t, p.Get(by, "workflows/"+wid))
		if page.ID != wid || page.Plan == nil || len(page.Plan.Nodes) != 4 || page.Plan.Nodes[0].State != "pending" || len(page.Nodes) != 0 || page.Truncated {
			t.Errorf("%s: %+v", name, page)
		}
		look := harness.With(by.Issue(ect.Claims{Action: "look"}), harness.Request{Path: "/.well-known/cascade/workflows/" + wid})
		s := p.Follow(look, "text/event-stream", "")
		if event, _, doc := s.Next(); event != "workflow" || doc.Plan == nil {
			t.Fatalf("%s: %s %+v", name, event, doc)
		}
		p.Get(p.b, "workflows/"+wid).Problem(t, http.StatusNotFound, "workflow-unknown")
		if got := p.act(p.a, wid, "hold_budget", "/hold", nil); got.Status != http.StatusCreated {
			t.Fatalf("%s: %d %s", name, got.Status, got.Body)
		}
		event, _, doc := s.Next()
		for event == "" {
			event, _, doc = s.Next()
		}
		if by == p.c && !doc.Truncated {
			t.Errorf("%s: %s %+v", name, event, doc)
		}
		if by == p.a && len(doc.Nodes) == 0 {
			t.Errorf("%s: %s %+v", name, event, doc)
		}
	}
}

// Who may not put a plan is refused by the header, before anything of the body has come; of who may a few are received
// at a time.
func TestPlansAreReceivedAFewAtATime(t *testing.T) {
	p := newPlannedGateway(t, "")
	begin := func(by *harness.Agent, c ect.Claims) net.Conn {
		conn, token := p.Dial(), ""
		if by != nil {
			token = ect.FieldName + ": " + by.Issue(c).Raw() + "\r\n"
		}
		if _, err := io.WriteString(conn, "PUT /.well-known/cascade/workflows/slow HTTP/1.1\r\nHost: "+p.Addr+"\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"+token+"\r\n"); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	bound := ect.Sum([]byte("a plan"))
	for name, c := range map[string]struct {
		by     *harness.Agent
		claims ect.Claims
		want   string
	}{
		"nobody":            {nil, ect.Claims{}, "401"},
		"a token without":   {p.b, ect.Claims{Action: "plan", Input: bound}, "403"},
		"of another":        {p.b, ect.Claims{Action: "plan", Workflow: uuid.NewString(), Input: bound}, "403"},
		"bound to no body":  {p.c, ect.Claims{Action: "plan"}, "403"},
		"nobody with names": {harness.NewAgent(t, "e"), ect.Claims{Action: "plan", Input: bound}, "403"},
	} {
		conn := begin(c.by, c.claims)
		_ = conn.SetReadDeadline(time.Now().Add(harness.Patience))
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.Contains(line, c.want) {
			t.Errorf("%s: %q %v", name, line, err)
		}
		_ = conn.Close()
	}
	var senders []net.Conn
	for range 4 {
		senders = append(senders, begin(p.c, ect.Claims{Action: "plan", Input: bound}))
	}
	wid := uuid.NewString()
	harness.Eventually(t, "all places of c are taken", func() bool {
		if p.put(p.c, wid, harness.TripPlan, nil).Status == http.StatusTooManyRequests {
			return true
		}
		senders = append(senders, begin(p.c, ect.Claims{Action: "plan", Input: bound})) // this may have had the place of one of them
		return false
	})
	for _, by := range []*harness.Agent{p.a, p.d} { // which keeps nobody else from it
		if got := p.put(by, uuid.NewString(), harness.TripPlan, nil); got.Status != http.StatusCreated {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	for _, conn := range senders {
		_ = conn.Close()
	}
	harness.Eventually(t, "there is a place again", func() bool { return p.put(p.c, wid, harness.TripPlan, nil).Status < 300 })
}

// A plan of the configuration holds for a workflow whose first call comes with a start that names it: also
// after a reload without it. plan_mode observed forwards what is no node.
func TestPlanOfTheConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(file, []byte(harness.TripPlan), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlannedGateway(t, "plan "+file)
	wid, other := uuid.NewString(), uuid.NewString()
	begin := func(wid, action string, after ...string) harness.Reply {
		start := p.a.Issue(harness.EventOf("workflow_start", ect.Cascade, wid, nil))
		r := harness.With(p.a.Issue(ect.Claims{Workflow: wid, Action: action, Parents: append(after, start.ID())}), harness.Request{Path: "/x"})
		r.Header[ect.FieldName] = start.Raw() + ", " + r.Header[ect.FieldName]
		return p.Call(r)
	}
	begin(wid, "other").Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	if got := begin(wid, "hold_budget"); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	p.act(p.a, wid, "other", "/other", nil).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	// A start that comes later than the first call is another agent's word about what is under way. Where nothing
	// links the two, it begins something of its own.
	first := p.b.Issue(ect.Claims{Workflow: other, Action: "other"})
	if got := p.Call(harness.With(first, harness.Request{Path: "/other"})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	begin(other, "else").Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	if got := begin(other, "else", first.ID()); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}

	version := p.shown(wid).Version
	reload := func(options string) {
		t.Helper()
		if err := harness.LoadConfig(strings.Replace(p.Config("agent_proxy "+p.upstream.Addr+plannedSite), "plan "+file, options, 1)); err != nil {
			t.Fatal(err)
		}
		harness.Replaced(t)
	}
	reload("")
	p.act(p.a, wid, "other", "/other", nil).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
	reload("plan_mode observed")
	if got := p.act(p.a, wid, "other", "/other", nil); got.Status != http.StatusCreated {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if shown := p.shown(wid); shown.Version != version || len(shown.Others) != 1 || shown.Nodes[0].State != "done" {
		t.Errorf("%+v", shown)
	}
}

// A change of a plan and the workflow's first call race: the call runs under the plan of before, which then
// stays, or not at all, since it is no node of the new one. Then many first calls at once run under one plan.
func TestPlansAndFirstCallsRace(t *testing.T) {
	p := newPlannedGateway(t, "")
	renamed := strings.Replace(strings.ReplaceAll(harness.TripPlan, `"hold"`, `"keep"`), "hold_budget", "keep_budget", 1)
	calls := 0
	for range 12 {
		wid := uuid.NewString()
		if got := p.put(p.c, wid, harness.TripPlan, nil); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		changed := make(chan harness.Reply, 1)
		go func() { changed <- p.put(p.c, wid, renamed, map[string]string{"If-Match": "*"}) }()
		called := p.act(p.a, wid, "hold_budget", "/hold", nil)
		change := <-changed
		switch {
		case called.Status == http.StatusCreated && change.Status == http.StatusConflict:
			calls++
			p.act(p.a, wid, "keep_budget", "/hold", nil).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
		case called.Status == http.StatusUnprocessableEntity && change.Status == http.StatusOK:
			if got := p.act(p.a, wid, "keep_budget", "/hold", nil); got.Status != http.StatusCreated {
				t.Errorf("%d %s", got.Status, got.Body)
			} else {
				calls++
			}
		default:
			t.Fatalf("%d %s and %d %s", called.Status, called.Body, change.Status, change.Body)
		}
	}
	p.upstream.Arrived("/hold", calls)

	wid := uuid.NewString()
	if got := p.put(p.c, wid, harness.TripPlan, nil); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	answers := make(chan harness.Reply)
	for range 20 {
		r := harness.With(p.a.Issue(ect.Claims{Workflow: wid, Action: "hold_budget"}), harness.Request{Path: "/hold"})
		go func() { answers <- p.Call(r) }()
	}
	for range 20 {
		if got := <-answers; got.Status != http.StatusCreated {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	p.upstream.Arrived("/hold", calls+20)
}

// At level L3 a start can be in the ledger before the first call, which does not bring it again, and which another
// agent can make.
func TestPlanOfARecordedStart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(file, []byte(harness.TripPlan), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlannedGateway(t, "plan "+file+harness.Level3)
	wid := uuid.NewString()
	start := p.a.Issue(harness.EventOf("workflow_start", ect.Cascade, wid, nil))
	if got := p.Call(harness.With(start, harness.Request{Method: http.MethodGet, Path: "/look"})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	call := func(by *harness.Agent, action string, after ...string) harness.Reply {
		return p.Call(harness.With(by.Issue(ect.Claims{Workflow: wid, Action: action, Parents: after}), harness.Request{Path: "/x"}))
	}
	if got := call(p.c, "other"); got.Status != http.StatusCreated { // nothing links it to the start
		t.Errorf("%d %s", got.Status, got.Body)
	}
	between := p.b.Issue(ect.Claims{Workflow: wid, Action: "think", Parents: []string{start.ID()}})
	if got := p.Call(harness.With(between, harness.Request{Method: http.MethodGet, Path: "/look"})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	for _, after := range []string{start.ID(), between.ID()} {
		call(p.a, "other", after).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
		call(p.b, "other", after).Problem(t, http.StatusUnprocessableEntity, "node-unknown")
		if got := call(p.b, "hold_budget", after); got.Status != http.StatusCreated {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	if got := p.shown(wid); len(got.Nodes) != 4 || got.Nodes[0].State != "done" {
		t.Errorf("%+v", got)
	}
}

// P3: who uses the name of a workflow that needs no proof is bound by the plan that an operator has put for it, and
// has states of its own in it: calls of strangers let nothing begin, fail nothing, are seen by nobody, and take
// nothing away from what others see.
func TestStrangersUnderAPlansName(t *testing.T) {
	p := newPlannedGateway(t, "")
	p.upstream.On("/hold", func(w http.ResponseWriter, r *harness.Arrival) {
		if r.Header.Get("X-Api-Key") == "mallory" {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	})
	if got := p.Call(harness.With(p.d.Issue(ect.Claims{Action: "plan", Input: ect.Sum([]byte(harness.TripPlan))}), harness.Request{
		Method: http.MethodPut, Path: "/.well-known/cascade/workflows/nightly", Body: harness.TripPlan, Header: map[string]string{"Content-Type": harness.PlanType},
	})); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	call := func(who, path string) harness.Reply {
		return p.Call(harness.Request{Path: path, Header: map[string]string{"X-Api-Key": who, "Workflow-Id": "nightly"}})
	}
	held := func(who, state string) {
		t.Helper()
		got := call(who, "/pay")
		if got.Problem(t, http.StatusConflict, "dependency-not-done"); !strings.Contains(got.Body, `"node":"hold","state":"`+state+`"`) {
			t.Errorf("%s: %s", who, got.Body)
		}
	}
	page := func(who, accept string) harness.Reply {
		return p.Call(harness.Request{Method: http.MethodGet, Path: "/.well-known/cascade/workflows/nightly", Header: map[string]string{"X-Api-Key": who, "Accept": accept}})
	}
	nodes := func(who string) string {
		return fmt.Sprint(harness.Document[struct{ Plan shownPlan }](t, page(who, "")).Plan.Nodes)
	}
	if got := call("eve", "/hold"); got.Status >= 300 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	held("ada", "pending")
	call("mallory", "/hold")
	held("mallory", "failed")
	held("ada", "pending")
	if got := call("ada", "/hold"); got.Status >= 300 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	if got := call("eve", "/mail-1"); got.Status != http.StatusUnprocessableEntity {
		t.Errorf("who uses the name is bound: %d %s", got.Status, got.Body)
	}
	if got := call("ada", "/pay"); got.Status >= 300 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	for who, want := range map[string]string{
		"ada": "[{hold done} {mail-1 pending} {mail-2 pending} {pay done}]", "eve": "[{hold done} {mail-1 pending} {mail-2 pending} {pay pending}]",
		"mallory": "[{hold failed} {mail-1 pending} {mail-2 pending} {pay pending}]",
	} {
		if got := nodes(who); got != want {
			t.Errorf("%s sees %s, want %s", who, got, want)
		}
		if got := page(who, harness.PlanType); got.Status != http.StatusOK || !strings.Contains(got.Body, "hold_budget") {
			t.Errorf("%s: %d %s", who, got.Status, got.Body)
		}
	}
	if got := page("nobody", harness.PlanType); got.Status != http.StatusNotFound {
		t.Errorf("%d %s", got.Status, got.Body)
	}
}

// P3: agents that tokens link are in one plan, whoever made which call; one that only names the workflow is not. It is
// bound where a coordinator has put the plan, and not where an agent has, and none of its calls counts for others.
func TestPartsOfAPlannedWorkflow(t *testing.T) {
	p := newPlannedGateway(t, "")
	act := func(by *harness.Agent, wid, action string, after ...string) (*ect.Token, harness.Reply) {
		token := by.Issue(ect.Claims{Workflow: wid, Action: action, Parents: after})
		return token, p.Call(harness.With(token, harness.Request{Path: "/x"}))
	}
	held := func(_ *ect.Token, got harness.Reply) {
		t.Helper()
		if got.Problem(t, http.StatusConflict, "dependency-not-done"); !strings.Contains(got.Body, `"node":"hold","state":"pending"`) {
			t.Error(got.Body)
		}
	}
	ran := func(token *ect.Token, got harness.Reply) *ect.Token {
		t.Helper()
		if got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		return token
	}
	for _, by := range []*harness.Agent{p.a, p.c} { // a's own plan, and a coordinator's
		wid := uuid.NewString()
		if got := p.put(by, wid, harness.TripPlan, nil); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		if by == p.c { // the stranger comes first, which changes nothing
			ran(act(p.b, wid, "hold_budget"))
		}
		held(act(p.a, wid, "pay"))
		start := ran(act(p.a, wid, "mail-1"))
		if by == p.a {
			ran(act(p.b, wid, "other"))
			ran(act(p.b, wid, "hold_budget"))
		}
		if _, got := act(p.b, wid, "nothing"); (got.Status == http.StatusCreated) != (by == p.a) {
			t.Errorf("b: %d %s", got.Status, got.Body)
		}
		held(act(p.a, wid, "pay", start.ID()))
		held(act(p.d, wid, "pay", start.ID()))
		hold := ran(act(p.d, wid, "hold_budget", start.ID()))
		ran(act(p.a, wid, "pay"))
		if got := fmt.Sprint(p.shown(wid).Nodes); got != "[{hold done} {mail-1 done} {mail-2 pending} {pay done}]" {
			t.Error(got)
		}
		// Who joins is in the same plan, and its calls count.
		if _, got := act(p.b, wid, "nothing", hold.ID()); got.Status != http.StatusUnprocessableEntity {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
}
