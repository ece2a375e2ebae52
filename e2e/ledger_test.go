package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// get asks below /.well-known/cascade/ with a fresh token of the agent.
func (g *gateway) get(a *agent, path string) reply {
	g.t.Helper()
	r := request{method: "GET", path: "/.well-known/cascade/" + path}
	if a == nil {
		return g.call(r)
	}
	return g.call(with(a.issue(ect.Claims{Action: "look"}), r))
}

// document reads the JSON of an answer.
func document[T any](t *testing.T, r reply) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.body), &v); err != nil || r.status >= 300 {
		t.Fatalf("%d %s: %v", r.status, r.body, err)
	}
	return v
}

// workflowView is what a workflow's page tells.
type workflowView struct {
	Nodes []workflowNode
	Edges []struct{ From, To, Kind string }
}

type workflowNode struct {
	JTI      string `json:"jti"`
	ExecAct  string `json:"exec_act"`
	Event    string
	State    string
	Detail   string
	Outcome  string
	Severity string
	Iss      string
}

// begins reports whether it is the start of the workflow that the gateway has written.
func (n workflowNode) begins() bool { return n.Event == "workflow_start" && n.Iss == gatewayIdentity }

func (v workflowView) state(id string) string {
	for _, n := range v.Nodes {
		if n.JTI == id {
			return n.State
		}
	}
	return "none"
}

func (v workflowView) follows(id, parent string) bool {
	return slices.ContainsFunc(v.Edges, func(e struct{ From, To, Kind string }) bool { return e.From == parent && e.To == id })
}

// settledView is the view of a workflow once so many nodes are in the ledger, without escalations: those
// of failed calls come in their own time. Nor does it count the start of the gateway, which is there where no
// agent has sent one.
func (g *gateway) settledView(a *agent, wid string, nodes int) (v workflowView) {
	g.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		// Before anything is in the tree there is no workflow.
		if got := g.get(a, "workflows/"+wid); got.status != http.StatusNotFound {
			v = document[workflowView](g.t, got)
			v.Nodes = slices.DeleteFunc(v.Nodes, func(n workflowNode) bool { return n.Event == "escalation" || n.begins() })
			if len(v.Nodes) >= nodes {
				return v
			}
		}
		if time.Now().After(deadline) {
			g.t.Fatalf("%d nodes, want %d: %+v", len(v.Nodes), nodes, v)
		}
	}
}

// ATD "Node States": what became of a task is derived from tokens alone.
func TestWorkflowStates(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	upstream.on("/fails", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(http.StatusUnprocessableEntity) })
	upstream.on("/lost", func(http.ResponseWriter, *arrival) { panic(http.ErrAbortHandler) })
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + upstream.addr, badger: true})
	wid := uuid.NewString()
	tokens := map[string]*ect.Token{}
	for _, path := range []string{"/works", "/fails", "/lost"} {
		tokens[path] = a.issue(ect.Claims{Workflow: wid})
		g.call(with(tokens[path], request{path: path}))
	}
	// Token, checkpoint and node of each, and an error of two.
	view := g.settledView(a, wid, 11)
	for path, want := range map[string]string{"/works": "done", "/fails": "failed", "/lost": "failed"} {
		if got := view.state(tokens[path].ID()); got != want {
			t.Errorf("%s: %s, want %s; %+v", path, got, want, view)
		}
	}
	events := map[string]int{}
	for _, n := range view.Nodes {
		events[n.Event+n.Outcome]++
	}
	if fmt.Sprint(events) != fmt.Sprint(map[string]int{"": 3, "checkpoint": 3, "error": 2, "completed": 2, "in_doubt": 1}) {
		t.Errorf("%v", events)
	}
}

// A-node-states-b, A-topological-order-d: a plan of the configuration is shown in the page of a workflow
// whose start names it. Where plans are observed, a call before its turn is forwarded as ever.
func TestPlanIsShown(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	file := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(file, []byte(`{"wf_id": "the flow", "nodes": [{"id": "hold"}, {"id": "book", "label": "book_flight"}, {"id": "pay"}, {"id": "mail"}],
		"edges": [{"from": "hold", "to": "book"}, {"from": "book", "to": "pay"}, {"from": "pay", "to": "mail"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	g := launch(t, setup{app: trusting(t, a) + "\nplan_mode observed\nplan " + file, site: "agent_proxy " + upstream.addr, badger: true})
	wid := uuid.NewString()
	start := a.issue(eventOf("workflow_start", ect.Cascade, wid, nil))
	first := with(a.issue(ect.Claims{Workflow: wid, Action: "reserve", Ext: new(ect.ExtBuilder).Text("atd.node", "hold")}), request{path: "/hold"})
	first.header[ect.FieldName] = start.Raw() + ", " + first.header[ect.FieldName]
	for _, r := range []request{first, with(a.issue(ect.Claims{Workflow: wid, Action: "pay"}), request{path: "/pay"})} {
		if got := g.call(r); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
	}
	g.settledView(a, wid, 7)
	shown := document[struct {
		Plan struct {
			WFID  string `json:"wf_id"`
			Nodes []struct {
				ID, State string
				Ready     bool
				Holds     []struct{ Node, State string }
			}
		}
	}](t, g.get(a, "workflows/"+wid)).Plan
	if got := fmt.Sprint(shown); got != "{the flow [{hold done false []} {book pending true []} {pay done false []} {mail pending true []}]}" {
		t.Error(got)
	}
}

// P3: who has no part in a workflow cannot tell it from none, and nobody without a
// credential is told anything but the public keys.
func TestP3Ledger(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr, badger: true})
	wid := uuid.NewString()
	first := g.call(with(a.issue(ect.Claims{Workflow: wid}), request{path: "/pay"}))
	checkpoint := first.header.Get("Execution-Checkpoint")
	g.settledView(a, wid, 3)
	for _, path := range []string{"workflows/%s", "ledger/entries?jti=%s"} {
		id, none := wid, uuid.NewString()
		if path != "workflows/%s" {
			id = checkpoint
		}
		foreign, unknown := g.get(b, fmt.Sprintf(path, id)), g.get(b, fmt.Sprintf(path, none))
		if foreign.status != http.StatusNotFound || unknown.status != http.StatusNotFound || foreign.body != unknown.body {
			t.Errorf("%s: %d %s and %d %s", path, foreign.status, foreign.body, unknown.status, unknown.body)
		}
		if got := g.get(nil, fmt.Sprintf(path, id)); got.status != http.StatusUnauthorized {
			t.Errorf("%s without a credential: %d", path, got.status)
		}
		if got := g.get(a, fmt.Sprintf(path, id)); got.status != http.StatusOK {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
	if got := g.get(b, "ledger/head"); got.status != http.StatusOK {
		t.Errorf("the head: %d %s", got.status, got.body)
	}
	if got := g.get(nil, "jwks"); got.status != http.StatusOK || got.header.Get("Cache-Control") == "" {
		t.Errorf("the keys: %d %s", got.status, got.body)
	}
}

// Callers without tokens who use one name for their workflows see their own calls, and
// what is linked to them.
func TestP3NamedWorkflows(t *testing.T) {
	upstream := newUpstream(t)
	g := launch(t, setup{app: "identity " + gatewayIdentity, site: "agent_proxy " + upstream.addr, badger: true})
	call := func(key, id, parent string) string {
		t.Helper()
		return g.call(request{path: "/pay", id: id, header: map[string]string{
			"X-Api-Key": key, "Workflow-Id": "nightly", "Execution-Parent": parent,
		}}).header.Get("Execution-Checkpoint")
	}
	look := func(key string) workflowView {
		t.Helper()
		r := request{method: "GET", path: "/.well-known/cascade/workflows/nightly", header: map[string]string{"X-Api-Key": key}}
		deadline := time.Now().Add(patience)
		for {
			got := g.call(r)
			if got.status == http.StatusOK {
				v := document[workflowView](t, got)
				v.Nodes = slices.DeleteFunc(v.Nodes, workflowNode.begins) // the first caller's alone
				if len(v.Nodes)%2 == 0 {
					return v
				}
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d %s", got.status, got.body)
			}
		}
	}
	mine, nested, theirs := call("ada", "order-7", ""), call("tool", "", "order-7"), call("eve", "order-8", "")
	var view workflowView
	for len(view.Nodes) < 4 {
		view = look("ada")
	}
	if len(view.Nodes) != 4 || view.state(mine) == "none" || view.state(nested) == "none" || view.state(theirs) != "none" {
		t.Errorf("ada sees %+v", view)
	}
	if view = look("eve"); len(view.Nodes) != 2 || view.state(theirs) == "none" {
		t.Errorf("eve sees %+v", view)
	}
}

// cascade 6.2: errors of agents are recorded where they name parents in their own
// workflow, once, and are good for nothing else.
func TestErrorsOfAgents(t *testing.T) {
	upstream, a, b := newUpstream(t), newAgent(t, "a"), newAgent(t, "b")
	g := launch(t, setup{app: trusting(t, a, b), site: "agent_proxy " + upstream.addr, badger: true})
	wid := uuid.NewString()
	token := a.issue(ect.Claims{Workflow: wid})
	g.call(with(token, request{path: "/pay"}))
	report := func(who *agent, workflow string, parents ...string) *ect.Token {
		return who.issue(ect.Claims{
			Workflow: workflow, Action: string(ect.EventError), Parents: parents,
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "action_failed").
				Text(ect.MemberCheckpointID, "").Text(ect.MemberDescription, "wrong amount"),
		})
	}
	post := func(token *ect.Token) reply {
		return g.call(request{path: "/.well-known/cascade/errors", reader: nothing{}, header: map[string]string{ect.FieldName: token.Raw()}})
	}
	good := report(a, wid, token.ID())
	if got := post(good); got.status != http.StatusCreated {
		t.Fatalf("%d %s", got.status, got.body)
	}
	if got := post(good); got.status != http.StatusOK && got.status != http.StatusCreated {
		t.Errorf("again: %d %s", got.status, got.body)
	}
	post(report(a, wid, uuid.NewString())).refusedFor(t, 403, "parent-unknown")
	post(report(a, uuid.NewString(), token.ID())).refusedFor(t, 403, "parent-unknown")
	// Nobody calls a workflow failed that it has no part in, whatever ids it knows.
	post(report(b, wid, token.ID())).refusedFor(t, 403, "parent-unknown")
	// It was told, and is no token for a call.
	g.call(with(good, request{path: "/pay"})).refusedFor(t, 403, "replayed")
	// A token of a call is no error to tell.
	if got := post(token); got.status < 400 {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := g.settledView(a, wid, 4).state(token.ID()); got != "failed" {
		t.Errorf("the state is %s", got)
	}
}

// nothing is a body of no bytes.
type nothing struct{}

func (nothing) Read([]byte) (int, error) { return 0, io.EOF }

// A call that was refused without being executed runs again with the same token, under
// a checkpoint of its own.
func TestTokenAfterARefusal(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	upstream.on("/pay", func(w http.ResponseWriter, in *arrival) {
		if in.n == 1 {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
	g := launch(t, setup{app: trusting(t, a), site: "agent_proxy " + upstream.addr, badger: true})
	token := a.issue(ect.Claims{Workflow: uuid.NewString()})
	first := g.call(with(token, request{path: "/pay"}))
	second := g.call(with(token, request{path: "/pay"}))
	if first.status != 429 || second.status != 201 || second.header.Get("Execution-Status") != "executed" ||
		first.header.Get("Execution-Checkpoint") == second.header.Get("Execution-Checkpoint") {
		t.Errorf("%d %v, %d %v", first.status, first.header, second.status, second.header)
	}
	// Token; checkpoint, node and error; checkpoint and node.
	view := g.settledView(a, token.Workflow(), 6)
	if got := view.state(token.ID()); got != "done" {
		t.Errorf("it ran in the end, and is %s: %+v", got, view)
	}
}

// How a doubt was settled is told too.
func TestSettledDoubtsAreTold(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	upstream.on("/pay", func(http.ResponseWriter, *arrival) { panic(http.ErrAbortHandler) })
	upstream.on("/status", func(w http.ResponseWriter, _ *arrival) { w.WriteHeader(http.StatusOK) })
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + upstream.addr +
		" {\n on_unknown probe GET /status?by={http.agent_guard.execution_id} {\n applied 200\n }\n }"})
	token := a.issue(ect.Claims{Workflow: uuid.NewString()})
	g.call(with(token, request{path: "/pay"}))
	if view := g.settledView(a, token.Workflow(), 4); view.state(token.ID()) != "failed" {
		t.Errorf("in doubt: %+v", view)
	}
	if got := g.call(with(token, request{path: "/pay"})); got.status != http.StatusConflict {
		t.Errorf("%d %s", got.status, got.body)
	}
	view := g.settledView(a, token.Workflow(), 5)
	settled := 0
	for _, n := range view.Nodes {
		if n.Outcome == "completed" {
			settled++
		}
	}
	if settled != 1 {
		t.Errorf("%+v", view)
	}
}

// A workflow shows a call as soon as its caller has the answer.
func TestWorkflowShowsWhatWasAnswered(t *testing.T) {
	upstream, a := newUpstream(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), badger: true, site: "agent_proxy " + upstream.addr})
	for range 20 {
		token := a.issue(ect.Claims{Workflow: uuid.NewString()})
		if got := g.call(with(token, request{path: "/pay"})); got.status != http.StatusCreated {
			t.Fatalf("%d %s", got.status, got.body)
		}
		if v := document[workflowView](t, g.get(a, "workflows/"+token.Workflow())); v.state(token.ID()) != "done" || len(v.Nodes) != 4 {
			t.Fatalf("%+v", v)
		}
	}
}
