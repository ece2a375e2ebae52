package e2e

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

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
)

const (
	planType = "application/atd-workflow+json"
	tripPlan = `{"wf_id": "the flow", "nodes": [{"id": "hold", "label": "hold_budget", "reversible": true}, {"id": "mail-1", "label": "mail"}, {"id": "mail-2", "label": "mail"}, {"id": "pay"}],
		"edges": [{"from": "hold", "to": "pay"}]}`
)

// plannedGateway is a gateway with the agents a, who begins workflows, b, who is a stranger, and c, a coordinator.
type plannedGateway struct {
	*gateway
	t        *testing.T
	upstream *upstream
	a, b, c  *agent
	d        *agent // an operator
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
	p := &plannedGateway{t: t, upstream: newUpstream(t), a: newAgent(t, "a"), b: newAgent(t, "b"), c: newAgent(t, "c"), d: newAgent(t, "d")}
	p.gateway = launch(t, setup{
		app:  trusting(t, p.a, p.b, p.c, p.d) + "\nrollback {\n coordinators spiffe://example.com/agent/c\n}\n" + options,
		site: "agent_proxy " + p.upstream.addr + plannedSite, badger: true,
	})
	return p
}

// put sends a plan, with a token that is bound to it.
func (p *plannedGateway) put(by *agent, wid, text string, header map[string]string) reply {
	p.t.Helper()
	r := request{method: http.MethodPut, path: "/.well-known/cascade/workflows/" + wid, body: text, header: map[string]string{"Content-Type": planType}}
	for name, value := range header {
		r.header[name] = value
	}
	if by != nil {
		r = with(by.issue(ect.Claims{Workflow: wid, Action: "plan", Input: ect.Sum([]byte(text))}), r)
	}
	return p.call(r)
}

// plan reads the plan of a workflow.
func (p *plannedGateway) plan(by *agent, wid, query string) reply {
	p.t.Helper()
	return p.call(with(by.issue(ect.Claims{Action: "look"}), request{
		method: http.MethodGet, path: "/.well-known/cascade/workflows/" + wid + query, header: map[string]string{"Accept": planType},
	}))
}

// act makes a call in a workflow.
func (p *plannedGateway) act(by *agent, wid, action, path string, header map[string]string) reply {
	p.t.Helper()
	r := request{path: path, header: map[string]string{}}
	for name, value := range header {
		r.header[name] = value
	}
	return p.call(with(by.issue(ect.Claims{Workflow: wid, Action: action}), r))
}

// shownPlan is a plan in the page of a workflow.
type shownPlan struct {
	Version string
	Nodes   []struct{ ID, State string }
	Others  []string
}

func (p *plannedGateway) shown(wid string) shownPlan {
	p.t.Helper()
	return document[struct{ Plan shownPlan }](p.t, p.get(p.a, "workflows/"+wid)).Plan
}

// A-optional-a, A-optional-c, A-media-type-a, A-topological-order-f: a plan is put and read, with its
// version as its ETag; what is wrong with one is said whole, and changes nothing.
func TestPlanIsPut(t *testing.T) {
	p := newPlannedGateway(t, "")
	wid := uuid.NewString()
	if got := p.put(nil, wid, tripPlan, nil); got.status != http.StatusUnauthorized {
		t.Errorf("nobody: %d %s", got.status, got.body)
	}
	got := p.put(p.a, wid, tripPlan, map[string]string{"Content-Type": "text/plain"})
	if got.problem(t, http.StatusUnsupportedMediaType, "media-type-unsupported"); !strings.Contains(got.header.Get("Accept"), planType) {
		t.Errorf("Accept: %q", got.header.Get("Accept"))
	}
	wrong := document422(t, p.put(p.a, wid, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b", "hitl_required": "yes"}], "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}, {"from": "a", "to": "a"}, {"from": "a", "to": "x"}]}`, nil))
	if text := fmt.Sprint(wrong); !strings.Contains(text, "{b hitl_required ") || !strings.Contains(text, "edges[3]") {
		t.Errorf("%v", wrong)
	}
	wrong = document422(t, p.put(p.a, wid, `{"wf_id": "w", "nodes": [{"id": "a"}, {"id": "b"}], "edges": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]}`, nil))
	if len(wrong) != 1 || fmt.Sprint(wrong[0].Cycle) != "[a b]" {
		t.Errorf("a cycle: %v", wrong)
	}
	r := request{method: http.MethodPut, path: "/.well-known/cascade/workflows/" + wid, body: tripPlan, header: map[string]string{"Content-Type": planType}}
	p.call(with(p.a.issue(ect.Claims{Workflow: wid, Input: ect.Sum([]byte("another"))}), r)).refusedFor(t, http.StatusForbidden, "inp_hash")
	p.call(with(p.a.issue(ect.Claims{Workflow: uuid.NewString(), Input: ect.Sum([]byte(tripPlan))}), r)).refusedFor(t, http.StatusForbidden, "wid")
	p.put(p.c, wid, strings.Repeat(" ", 8<<20+1), nil).problem(t, http.StatusRequestEntityTooLarge, "body-too-large")
	if got := p.plan(p.a, wid, ""); got.status != http.StatusNotFound {
		t.Errorf("nothing was put yet: %d %s", got.status, got.body)
	}

	got = p.put(p.c, wid, tripPlan, map[string]string{"Content-Type": "application/json; charset=utf-8"})
	first := got.header.Get("ETag")
	doc := document[struct {
		Version  string
		InForce  bool `json:"in_force"`
		Warnings []struct{ Node, Problem string }
	}](t, got)
	// mail is shared by two nodes, and nothing undoes hold_budget (A-optional-e).
	if got.status != http.StatusCreated || first != `"`+doc.Version+`"` || !doc.InForce || len(doc.Warnings) != 2 || doc.Warnings[1].Node != "hold" {
		t.Errorf("%d %s %s", got.status, first, got.body)
	}
	if got := p.put(p.c, wid, tripPlan, nil); got.status != http.StatusOK || got.header.Get("ETag") != first {
		t.Errorf("the same once more: %d %s", got.status, got.body)
	}
	other := strings.Replace(tripPlan, `"reversible": true`, `"reversible": false`, 1)
	p.put(p.c, wid, other, nil).problem(t, http.StatusPreconditionRequired, "plan-exists")
	p.put(p.c, wid, other, map[string]string{"If-Match": `"another"`}).problem(t, http.StatusPreconditionFailed, "plan-replaced")
	p.put(p.c, wid, other, map[string]string{"If-None-Match": "*"}).problem(t, http.StatusPreconditionFailed, "plan-replaced")
	got = p.put(p.c, wid, other, map[string]string{"If-Match": `"another", ` + first})
	second := got.header.Get("ETag")
	if got.status != http.StatusOK || second == first {
		t.Errorf("%d %s", got.status, got.body)
	}
	now, before := p.plan(p.c, wid, ""), p.plan(p.c, wid, "?version="+strings.Trim(first, `"`))
	if now.status != 200 || now.header.Get("ETag") != second || now.header.Get("Content-Type") != planType || !strings.Contains(now.body, `"reversible":false`) ||
		before.status != 200 || before.header.Get("ETag") != first || strings.Contains(before.body, `"reversible":false`) {
		t.Errorf("%d %v %s\n%d %v %s", now.status, now.header, now.body, before.status, before.header, before.body)
	}
	same := p.call(with(p.c.issue(ect.Claims{Action: "look"}), request{method: http.MethodGet, path: "/.well-known/cascade/workflows/" + wid,
		header: map[string]string{"Accept": planType, "If-None-Match": second}}))
	if same.status != http.StatusNotModified || same.header.Get("ETag") != second || same.body != "" {
		t.Errorf("%d %v %s", same.status, same.header, same.body)
	}
	// P3: for a stranger it is as if there were none.
	none, foreign := p.plan(p.b, uuid.NewString(), ""), p.plan(p.b, wid, "")
	if none.status != http.StatusNotFound || foreign.status != none.status || foreign.body != none.body {
		t.Errorf("%d %s, %d %s", none.status, none.body, foreign.status, foreign.body)
	}
	schema := p.call(request{method: http.MethodGet, path: "/.well-known/cascade/atd-workflow.schema.json"})
	if schema.status != 200 || schema.header.Get("Content-Type") != "application/schema+json" || !strings.Contains(schema.body, "hitl_required") {
		t.Errorf("%d %s", schema.status, schema.body)
	}
}

type planProblem struct {
	Node, Member, Problem string
	Cycle                 []string
}

func document422(t *testing.T, r reply) []planProblem {
	t.Helper()
	r.problem(t, http.StatusUnprocessableEntity, "plan-invalid")
	r.status = http.StatusOK
	return document[struct{ Problems []planProblem }](t, r).Problems
}

// A-optional-b: a call is the node that its token names, or else its header, or else what it does. One
// that is none, or could be several, is not forwarded, and its key stays free.
func TestWhichNodeACallIs(t *testing.T) {
	p := newPlannedGateway(t, "")
	wid := uuid.NewString()
	if got := p.put(p.c, wid, tripPlan, nil); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	key := func(id string, header map[string]string) map[string]string {
		all := map[string]string{"Idempotency-Key": id}
		for name, value := range header {
			all[name] = value
		}
		return all
	}
	p.act(p.a, wid, "other", "/other", key("k1", nil)).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	p.act(p.a, wid, "hold_budget", "/hold", key("k1", map[string]string{"Workflow-Node": "gone"})).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	p.act(p.a, wid, "mail", "/mail", key("k1", nil)).problem(t, http.StatusUnprocessableEntity, "node-ambiguous")
	p.act(p.a, wid, "hold_budget", "/hold", key("k1", map[string]string{"Workflow-Node": "no node"})).problem(t, http.StatusBadRequest, "workflow-id-invalid")
	if n := p.upstream.total(); n != 0 {
		t.Errorf("%d calls were forwarded", n)
	}
	mail := key("k1", map[string]string{"Workflow-Node": "mail-2"})
	first := p.act(p.a, wid, "mail", "/mail", mail)
	if first.status != http.StatusCreated || first.header.Get("Execution-Status") != "executed" {
		t.Fatalf("the key is not free: %d %s", first.status, first.body)
	}
	if sent := p.upstream.last("/mail").Header.Get("Workflow-Node"); sent != "mail-2" {
		t.Errorf("the next gateway is told %q", sent)
	}
	// A retry is the same node; under the same key another node is another call (P1).
	if again := p.act(p.a, wid, "mail", "/mail", mail); again.header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %v", again.status, again.header)
	}
	p.act(p.a, wid, "mail", "/mail", key("k1", map[string]string{"Workflow-Node": "mail-1"})).problem(t, http.StatusUnprocessableEntity, "fingerprint-mismatch")
	// Without a key, a call for another node is no retry of the first, though nothing else differs.
	for _, node := range []string{"mail-1", "mail-2"} {
		if got := p.act(p.a, wid, "mail", "/mail", map[string]string{"Workflow-Node": node}); got.header.Get("Execution-Status") != "executed" {
			t.Errorf("%s: %d %v", node, got.status, got.header)
		}
	}
	token := p.a.issue(ect.Claims{Workflow: wid, Action: "mail", Ext: new(ect.ExtBuilder).Text("atd.node", "hold")})
	if got := p.call(with(token, request{path: "/mail", header: map[string]string{"Workflow-Node": "pay"}})); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := fmt.Sprint(p.shown(wid).Nodes); got != "[{hold done} {mail-1 done} {mail-2 done} {pay pending}]" {
		t.Error(got)
	}
	// Who sees all of the workflow sees its plan, too; who has no part in it sees none (P3).
	if got := p.plan(p.a, wid, ""); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := p.plan(p.b, wid, ""); got.status != http.StatusNotFound {
		t.Errorf("%d %s", got.status, got.body)
	}
	// The workflow stays with the plan that it has begun with.
	p.put(p.c, wid, strings.Replace(tripPlan, "mail-2", "mail-3", 1), map[string]string{"If-Match": "*"}).problem(t, http.StatusConflict, "plan-in-force")
}

// Calls without tokens are the node that Workflow-Node names, or that is called like their action, and the
// gateway's own tokens say which: also while they run.
func TestNodesOfCallsWithoutTokens(t *testing.T) {
	p := newPlannedGateway(t, "")
	begun, done := make(chan struct{}), make(chan struct{})
	p.upstream.on("/pay", func(w http.ResponseWriter, _ *arrival) {
		close(begun)
		<-done
		w.WriteHeader(http.StatusCreated)
	})
	// Without a wid of its own a coordinator's token is good for the workflows of callers without tokens.
	got := p.call(with(p.c.issue(ect.Claims{Action: "plan", Input: ect.Sum([]byte(tripPlan))}), request{
		method: http.MethodPut, path: "/.well-known/cascade/workflows/nightly", body: tripPlan, header: map[string]string{"Content-Type": planType},
	}))
	wid := document[struct{ Wid string }](t, got).Wid
	call := func(path, node string) reply {
		return p.call(request{path: path, header: map[string]string{"X-Api-Key": "ada", "Workflow-Id": "nightly", "Workflow-Node": node}})
	}
	if got := call("/hold", ""); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := call("/mail", "mail-2"); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	call("/mail", "").problem(t, http.StatusUnprocessableEntity, "node-ambiguous")
	// A retry without a key is recognised as one for its own node only.
	for node, want := range map[string]string{"mail-2": "replayed", "mail-1": "executed"} {
		if got := p.call(request{path: "/mail", header: map[string]string{
			"X-Api-Key": "ada", "Workflow-Id": "nightly", "Workflow-Node": node, "X-Stainless-Retry-Count": "1",
		}}); got.header.Get("Execution-Status") != want {
			t.Errorf("a retry of %s: %d %v", node, got.status, got.header)
		}
	}
	running := make(chan reply)
	go func() { running <- call("/pay", "") }()
	<-begun
	page := func() string {
		r := request{method: http.MethodGet, path: "/.well-known/cascade/workflows/nightly", header: map[string]string{"X-Api-Key": "ada"}}
		return fmt.Sprint(document[struct{ Plan shownPlan }](t, p.call(r)).Plan.Nodes)
	}
	if got := page(); got != "[{hold done} {mail-1 done} {mail-2 done} {pay running}]" {
		t.Errorf("%s: %s", wid, got)
	}
	close(done)
	if got := <-running; got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
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
	if got := p.put(p.a, mine, tripPlan, nil); got.status != http.StatusCreated || !strings.Contains(got.body, `"in_force": false`) {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if got := p.plan(p.a, mine, ""); got.status != http.StatusOK {
		t.Errorf("%d %s", got.status, got.body)
	}
	// b begins another workflow; a offers a plan for it, and for one that nobody has.
	if got := p.act(p.b, theirs, "other", "/other", nil); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	used, free := p.put(p.a, theirs, tripPlan, nil), p.put(p.a, uuid.NewString(), tripPlan, nil)
	if used.status != free.status || used.status != http.StatusCreated {
		t.Errorf("a sees that the workflow is there: %d %s, %d %s", used.status, used.body, free.status, free.body)
	}
	if got := p.act(p.b, theirs, "other", "/other", nil); got.status != http.StatusCreated {
		t.Errorf("a's plan binds b: %d %s", got.status, got.body)
	}
	// It binds a's own calls alone, and none where a joins in later.
	p.act(p.a, theirs, "else", "/else", nil).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	joined := p.b.issue(ect.Claims{Workflow: theirs, Action: "other"})
	for _, token := range []*ect.Token{joined, p.a.issue(ect.Claims{Workflow: theirs, Action: "else", Parents: []string{joined.ID()}})} {
		if got := p.call(with(token, request{path: "/other"})); got.status != http.StatusCreated {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	if got := p.act(p.b, theirs, "other", "/other", nil); got.status != http.StatusCreated {
		t.Errorf("a's plan binds b: %d %s", got.status, got.body)
	}
	p.put(p.b, theirs, tripPlan, nil).problem(t, http.StatusForbidden, "plan-refused")

	// a's own is in force from its first call on, for who takes part in that.
	p.act(p.a, mine, "other", "/other", nil).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	first := p.a.issue(ect.Claims{Workflow: mine, Action: "hold_budget"})
	if got := p.call(with(first, request{path: "/hold"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	p.call(with(p.b.issue(ect.Claims{Workflow: mine, Action: "other", Parents: []string{first.ID()}}), request{path: "/other"})).problem(t, http.StatusUnprocessableEntity, "node-unknown")

	// An operator of the site may as well, at once.
	elsewhere := uuid.NewString()
	if got := p.put(p.d, elsewhere, tripPlan, nil); got.status != http.StatusCreated || !strings.Contains(got.body, `"in_force": true`) {
		t.Errorf("%d %s", got.status, got.body)
	}

	// A plan that comes late says what it does not fit, and holds for what comes. Retries of calls of
	// before are answered as ever (P1).
	before := map[string]string{"Idempotency-Key": "before"}
	if got := p.act(p.b, theirs, "other", "/other", before); got.header.Get("Execution-Status") != "executed" {
		t.Errorf("%d %s", got.status, got.body)
	}
	got := p.put(p.c, theirs, tripPlan, nil)
	doc := document[struct {
		Misfits []struct{ Task, Problem string }
	}](t, got)
	if got.status != http.StatusCreated || len(doc.Misfits) != 6 {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := p.act(p.b, theirs, "other", "/other", before); got.header.Get("Execution-Status") != "replayed" {
		t.Errorf("%d %s", got.status, got.body)
	}
	p.act(p.b, theirs, "other", "/other", nil).problem(t, http.StatusUnprocessableEntity, "node-unknown")

	// It holds for calls, too, that are being prepared while it is put.
	busy := uuid.NewString()
	p.upstream.on("/docs/x", func(w http.ResponseWriter, a *arrival) {
		if a.Method == http.MethodGet { // the gateway keeps what it is to restore
			if got := p.put(p.c, busy, tripPlan, nil); got.status != http.StatusCreated {
				t.Errorf("%d %s", got.status, got.body)
			}
		}
	})
	p.call(with(p.b.issue(ect.Claims{Workflow: busy, Action: "other"}), request{method: http.MethodPut, path: "/docs/x", body: "1"})).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	p.upstream.arrived("/docs/x", 1)

	// Nor does it fit what was done in another order.
	late := uuid.NewString()
	p.act(p.b, late, "pay", "/pay", nil)
	p.act(p.b, late, "hold_budget", "/hold", nil)
	if got := p.put(p.c, late, tripPlan, nil); !strings.Contains(got.body, "it began before hold was done, which comes before it") {
		t.Errorf("%d %s", got.status, got.body)
	}
	// That is the order of the ledger, whatever an agent's clock says.
	ordered := uuid.NewString()
	p.act(p.b, ordered, "hold_budget", "/hold", nil)
	early, err := p.b.issuer.Issue(time.Now().Add(-10*time.Second), ect.Claims{Audience: []string{gatewayIdentity}, Workflow: ordered, Action: "pay"})
	if err != nil {
		t.Fatal(err)
	}
	p.call(with(early, request{path: "/pay"}))
	if got := p.put(p.c, ordered, tripPlan, nil); got.status != http.StatusCreated || strings.Contains(got.body, "misfits") {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// A-node-states-a: who has put a plan sees its page and follows it before the first call; others see no such workflow
// (P3). To a coordinator that sees none of the calls it shows no states (P6).
func TestPlanHasAPageBeforeItsFirstCall(t *testing.T) {
	p := newPlannedGateway(t, "")
	for name, by := range map[string]*agent{"initiator": p.a, "coordinator": p.c} {
		wid := uuid.NewString()
		if got := p.put(by, wid, tripPlan, nil); got.status != http.StatusCreated {
			t.Fatalf("%s: %d %s", name, got.status, got.body)
		}
		page := document[api.Workflow](t, p.get(by, "workflows/"+wid))
		if page.ID != wid || page.Plan == nil || len(page.Plan.Nodes) != 4 || page.Plan.Nodes[0].State != "pending" || len(page.Nodes) != 0 || page.Truncated {
			t.Errorf("%s: %+v", name, page)
		}
		look := with(by.issue(ect.Claims{Action: "look"}), request{path: "/.well-known/cascade/workflows/" + wid})
		s := p.follow(look, "text/event-stream", "")
		if event, _, doc := s.next(); event != "workflow" || doc.Plan == nil {
			t.Fatalf("%s: %s %+v", name, event, doc)
		}
		p.get(p.b, "workflows/"+wid).problem(t, http.StatusNotFound, "workflow-unknown")
		if got := p.act(p.a, wid, "hold_budget", "/hold", nil); got.status != http.StatusCreated {
			t.Fatalf("%s: %d %s", name, got.status, got.body)
		}
		event, _, doc := s.next()
		for event == "" {
			event, _, doc = s.next()
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
	begin := func(by *agent, c ect.Claims) net.Conn {
		conn, token := p.dial(), ""
		if by != nil {
			token = ect.FieldName + ": " + by.issue(c).Raw() + "\r\n"
		}
		if _, err := io.WriteString(conn, "PUT /.well-known/cascade/workflows/slow HTTP/1.1\r\nHost: "+p.addr+"\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"+token+"\r\n"); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	bound := ect.Sum([]byte("a plan"))
	for name, c := range map[string]struct {
		by     *agent
		claims ect.Claims
		want   string
	}{
		"nobody":            {nil, ect.Claims{}, "401"},
		"a token without":   {p.b, ect.Claims{Action: "plan", Input: bound}, "403"},
		"of another":        {p.b, ect.Claims{Action: "plan", Workflow: uuid.NewString(), Input: bound}, "403"},
		"bound to no body":  {p.c, ect.Claims{Action: "plan"}, "403"},
		"nobody with names": {newAgent(t, "e"), ect.Claims{Action: "plan", Input: bound}, "403"},
	} {
		conn := begin(c.by, c.claims)
		_ = conn.SetReadDeadline(time.Now().Add(patience))
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
	eventually(t, "all places of c are taken", func() bool {
		if p.put(p.c, wid, tripPlan, nil).status == http.StatusTooManyRequests {
			return true
		}
		senders = append(senders, begin(p.c, ect.Claims{Action: "plan", Input: bound})) // this may have had the place of one of them
		return false
	})
	for _, by := range []*agent{p.a, p.d} { // which keeps nobody else from it
		if got := p.put(by, uuid.NewString(), tripPlan, nil); got.status != http.StatusCreated {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	for _, conn := range senders {
		_ = conn.Close()
	}
	eventually(t, "there is a place again", func() bool { return p.put(p.c, wid, tripPlan, nil).status < 300 })
}

// A plan of the configuration holds for a workflow whose first call comes with a start that names it: also
// after a reload without it. plan_mode observed forwards what is no node.
func TestPlanOfTheConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(file, []byte(tripPlan), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlannedGateway(t, "plan "+file)
	wid, other := uuid.NewString(), uuid.NewString()
	begin := func(wid, action string, after ...string) reply {
		start := p.a.issue(eventOf("workflow_start", ect.Cascade, wid, nil))
		r := with(p.a.issue(ect.Claims{Workflow: wid, Action: action, Parents: append(after, start.ID())}), request{path: "/x"})
		r.header[ect.FieldName] = start.Raw() + ", " + r.header[ect.FieldName]
		return p.call(r)
	}
	begin(wid, "other").problem(t, http.StatusUnprocessableEntity, "node-unknown")
	if got := begin(wid, "hold_budget"); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	p.act(p.a, wid, "other", "/other", nil).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	// A start that comes later than the first call is another agent's word about what is under way. Where nothing
	// links the two, it begins something of its own.
	first := p.b.issue(ect.Claims{Workflow: other, Action: "other"})
	if got := p.call(with(first, request{path: "/other"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	begin(other, "else").problem(t, http.StatusUnprocessableEntity, "node-unknown")
	if got := begin(other, "else", first.ID()); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}

	version := p.shown(wid).Version
	reload := func(options string) {
		t.Helper()
		if err := loadConfig(strings.Replace(p.config("agent_proxy "+p.upstream.addr+plannedSite), "plan "+file, options, 1)); err != nil {
			t.Fatal(err)
		}
		replaced(t)
	}
	reload("")
	p.act(p.a, wid, "other", "/other", nil).problem(t, http.StatusUnprocessableEntity, "node-unknown")
	reload("plan_mode observed")
	if got := p.act(p.a, wid, "other", "/other", nil); got.status != http.StatusCreated {
		t.Errorf("%d %s", got.status, got.body)
	}
	if shown := p.shown(wid); shown.Version != version || len(shown.Others) != 1 || shown.Nodes[0].State != "done" {
		t.Errorf("%+v", shown)
	}
}

// A change of a plan and the workflow's first call race: the call runs under the plan of before, which then
// stays, or not at all, since it is no node of the new one. Then many first calls at once run under one plan.
func TestPlansAndFirstCallsRace(t *testing.T) {
	p := newPlannedGateway(t, "")
	renamed := strings.Replace(strings.ReplaceAll(tripPlan, `"hold"`, `"keep"`), "hold_budget", "keep_budget", 1)
	calls := 0
	for range 12 {
		wid := uuid.NewString()
		if got := p.put(p.c, wid, tripPlan, nil); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		changed := make(chan reply, 1)
		go func() { changed <- p.put(p.c, wid, renamed, map[string]string{"If-Match": "*"}) }()
		called := p.act(p.a, wid, "hold_budget", "/hold", nil)
		change := <-changed
		switch {
		case called.status == http.StatusCreated && change.status == http.StatusConflict:
			calls++
			p.act(p.a, wid, "keep_budget", "/hold", nil).problem(t, http.StatusUnprocessableEntity, "node-unknown")
		case called.status == http.StatusUnprocessableEntity && change.status == http.StatusOK:
			if got := p.act(p.a, wid, "keep_budget", "/hold", nil); got.status != http.StatusCreated {
				t.Errorf("%d %s", got.status, got.body)
			} else {
				calls++
			}
		default:
			t.Fatalf("%d %s and %d %s", called.status, called.body, change.status, change.body)
		}
	}
	p.upstream.arrived("/hold", calls)

	wid := uuid.NewString()
	if got := p.put(p.c, wid, tripPlan, nil); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	answers := make(chan reply)
	for range 20 {
		r := with(p.a.issue(ect.Claims{Workflow: wid, Action: "hold_budget"}), request{path: "/hold"})
		go func() { answers <- p.call(r) }()
	}
	for range 20 {
		if got := <-answers; got.status != http.StatusCreated {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
	p.upstream.arrived("/hold", calls+20)
}

// At level L3 a start can be in the ledger before the first call, which does not bring it again, and which another
// agent can make.
func TestPlanOfARecordedStart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(file, []byte(tripPlan), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlannedGateway(t, "plan "+file+level3)
	wid := uuid.NewString()
	start := p.a.issue(eventOf("workflow_start", ect.Cascade, wid, nil))
	if got := p.call(with(start, request{method: http.MethodGet, path: "/look"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	call := func(by *agent, action string, after ...string) reply {
		return p.call(with(by.issue(ect.Claims{Workflow: wid, Action: action, Parents: after}), request{path: "/x"}))
	}
	if got := call(p.c, "other"); got.status != http.StatusCreated { // nothing links it to the start
		t.Errorf("%d %s", got.status, got.body)
	}
	between := p.b.issue(ect.Claims{Workflow: wid, Action: "think", Parents: []string{start.ID()}})
	if got := p.call(with(between, request{method: http.MethodGet, path: "/look"})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	for _, after := range []string{start.ID(), between.ID()} {
		call(p.a, "other", after).problem(t, http.StatusUnprocessableEntity, "node-unknown")
		call(p.b, "other", after).problem(t, http.StatusUnprocessableEntity, "node-unknown")
		if got := call(p.b, "hold_budget", after); got.status != http.StatusCreated {
			t.Errorf("%d %s", got.status, got.body)
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
	p.upstream.on("/hold", func(w http.ResponseWriter, r *arrival) {
		if r.Header.Get("X-Api-Key") == "mallory" {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	})
	if got := p.call(with(p.d.issue(ect.Claims{Action: "plan", Input: ect.Sum([]byte(tripPlan))}), request{
		method: http.MethodPut, path: "/.well-known/cascade/workflows/nightly", body: tripPlan, header: map[string]string{"Content-Type": planType},
	})); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	call := func(who, path string) reply {
		return p.call(request{path: path, header: map[string]string{"X-Api-Key": who, "Workflow-Id": "nightly"}})
	}
	held := func(who, state string) {
		t.Helper()
		got := call(who, "/pay")
		if got.problem(t, http.StatusConflict, "dependency-not-done"); !strings.Contains(got.body, `"node":"hold","state":"`+state+`"`) {
			t.Errorf("%s: %s", who, got.body)
		}
	}
	page := func(who, accept string) reply {
		return p.call(request{method: http.MethodGet, path: "/.well-known/cascade/workflows/nightly", header: map[string]string{"X-Api-Key": who, "Accept": accept}})
	}
	nodes := func(who string) string {
		return fmt.Sprint(document[struct{ Plan shownPlan }](t, page(who, "")).Plan.Nodes)
	}
	if got := call("eve", "/hold"); got.status >= 300 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	held("ada", "pending")
	call("mallory", "/hold")
	held("mallory", "failed")
	held("ada", "pending")
	if got := call("ada", "/hold"); got.status >= 300 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if got := call("eve", "/mail-1"); got.status != http.StatusUnprocessableEntity {
		t.Errorf("who uses the name is bound: %d %s", got.status, got.body)
	}
	if got := call("ada", "/pay"); got.status >= 300 {
		t.Errorf("%d %s", got.status, got.body)
	}
	for who, want := range map[string]string{
		"ada": "[{hold done} {mail-1 pending} {mail-2 pending} {pay done}]", "eve": "[{hold done} {mail-1 pending} {mail-2 pending} {pay pending}]",
		"mallory": "[{hold failed} {mail-1 pending} {mail-2 pending} {pay pending}]",
	} {
		if got := nodes(who); got != want {
			t.Errorf("%s sees %s, want %s", who, got, want)
		}
		if got := page(who, planType); got.status != http.StatusOK || !strings.Contains(got.body, "hold_budget") {
			t.Errorf("%s: %d %s", who, got.status, got.body)
		}
	}
	if got := page("nobody", planType); got.status != http.StatusNotFound {
		t.Errorf("%d %s", got.status, got.body)
	}
}

// P3: agents that tokens link are in one plan, whoever made which call; one that only names the workflow is not. It is
// bound where a coordinator has put the plan, and not where an agent has, and none of its calls counts for others.
func TestPartsOfAPlannedWorkflow(t *testing.T) {
	p := newPlannedGateway(t, "")
	act := func(by *agent, wid, action string, after ...string) (*ect.Token, reply) {
		token := by.issue(ect.Claims{Workflow: wid, Action: action, Parents: after})
		return token, p.call(with(token, request{path: "/x"}))
	}
	held := func(_ *ect.Token, got reply) {
		t.Helper()
		if got.problem(t, http.StatusConflict, "dependency-not-done"); !strings.Contains(got.body, `"node":"hold","state":"pending"`) {
			t.Error(got.body)
		}
	}
	ran := func(token *ect.Token, got reply) *ect.Token {
		t.Helper()
		if got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		return token
	}
	for _, by := range []*agent{p.a, p.c} { // a's own plan, and a coordinator's
		wid := uuid.NewString()
		if got := p.put(by, wid, tripPlan, nil); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
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
		if _, got := act(p.b, wid, "nothing"); (got.status == http.StatusCreated) != (by == p.a) {
			t.Errorf("b: %d %s", got.status, got.body)
		}
		held(act(p.a, wid, "pay", start.ID()))
		held(act(p.d, wid, "pay", start.ID()))
		hold := ran(act(p.d, wid, "hold_budget", start.ID()))
		ran(act(p.a, wid, "pay"))
		if got := fmt.Sprint(p.shown(wid).Nodes); got != "[{hold done} {mail-1 done} {mail-2 pending} {pay done}]" {
			t.Error(got)
		}
		// Who joins is in the same plan, and its calls count.
		if _, got := act(p.b, wid, "nothing", hold.ID()); got.status != http.StatusUnprocessableEntity {
			t.Errorf("%d %s", got.status, got.body)
		}
	}
}
