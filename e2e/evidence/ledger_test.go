package evidence

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Node States": what became of a task is derived from tokens alone.
func TestWorkflowStates(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	upstream.On("/fails", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(http.StatusUnprocessableEntity) })
	upstream.On("/lost", func(http.ResponseWriter, *harness.Arrival) { panic(http.ErrAbortHandler) })
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + upstream.Addr, Badger: true})
	wid := uuid.NewString()
	tokens := map[string]*ect.Token{}
	for _, path := range []string{"/works", "/fails", "/lost"} {
		tokens[path] = a.Issue(ect.Claims{Workflow: wid})
		g.Call(harness.With(tokens[path], harness.Request{Path: path}))
	}
	// Token, checkpoint and node of each, and an error of two.
	view := g.SettledView(a, wid, 11)
	for path, want := range map[string]string{"/works": "done", "/fails": "failed", "/lost": "failed"} {
		if got := view.State(tokens[path].ID()); got != want {
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
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	file := filepath.Join(t.TempDir(), "plan.json")
	if err := os.WriteFile(file, []byte(`{"wf_id": "the flow", "nodes": [{"id": "hold"}, {"id": "book", "label": "book_flight"}, {"id": "pay"}, {"id": "mail"}],
		"edges": [{"from": "hold", "to": "book"}, {"from": "book", "to": "pay"}, {"from": "pay", "to": "mail"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a) + "\nplan_mode observed\nplan " + file, Site: "agent_proxy " + upstream.Addr, Badger: true})
	wid := uuid.NewString()
	start := a.Issue(harness.EventOf("workflow_start", ect.Cascade, wid, nil))
	first := harness.With(a.Issue(ect.Claims{Workflow: wid, Action: "reserve", Ext: new(ect.ExtBuilder).Text("atd.node", "hold")}), harness.Request{Path: "/hold"})
	first.Header[ect.FieldName] = start.Raw() + ", " + first.Header[ect.FieldName]
	for _, r := range []harness.Request{first, harness.With(a.Issue(ect.Claims{Workflow: wid, Action: "pay"}), harness.Request{Path: "/pay"})} {
		if got := g.Call(r); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
	}
	g.SettledView(a, wid, 7)
	shown := harness.Document[struct {
		Plan struct {
			WFID  string `json:"wf_id"`
			Nodes []struct {
				ID, State string
				Ready     bool
				Holds     []struct{ Node, State string }
			}
		}
	}](t, g.Get(a, "workflows/"+wid)).Plan
	if got := fmt.Sprint(shown); got != "{the flow [{hold done false []} {book pending true []} {pay done false []} {mail pending true []}]}" {
		t.Error(got)
	}
}

// P3: who has no part in a workflow cannot tell it from none, and nobody without a
// credential is told anything but the public keys.
func TestP3Ledger(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr, Badger: true})
	wid := uuid.NewString()
	first := g.Call(harness.With(a.Issue(ect.Claims{Workflow: wid}), harness.Request{Path: "/pay"}))
	checkpoint := first.Header.Get("Execution-Checkpoint")
	g.SettledView(a, wid, 3)
	for _, path := range []string{"workflows/%s", "ledger/entries?jti=%s"} {
		id, none := wid, uuid.NewString()
		if path != "workflows/%s" {
			id = checkpoint
		}
		foreign, unknown := g.Get(b, fmt.Sprintf(path, id)), g.Get(b, fmt.Sprintf(path, none))
		if foreign.Status != http.StatusNotFound || unknown.Status != http.StatusNotFound || foreign.Body != unknown.Body {
			t.Errorf("%s: %d %s and %d %s", path, foreign.Status, foreign.Body, unknown.Status, unknown.Body)
		}
		if got := g.Get(nil, fmt.Sprintf(path, id)); got.Status != http.StatusUnauthorized {
			t.Errorf("%s without a credential: %d", path, got.Status)
		}
		if got := g.Get(a, fmt.Sprintf(path, id)); got.Status != http.StatusOK {
			t.Errorf("%s: %d %s", path, got.Status, got.Body)
		}
	}
	if got := g.Get(b, "ledger/head"); got.Status != http.StatusOK {
		t.Errorf("the head: %d %s", got.Status, got.Body)
	}
	if got := g.Get(nil, "jwks"); got.Status != http.StatusOK || got.Header.Get("Cache-Control") == "" {
		t.Errorf("the keys: %d %s", got.Status, got.Body)
	}
}

// Callers without tokens who use one name for their workflows see their own calls, and
// what is linked to them.
func TestP3NamedWorkflows(t *testing.T) {
	upstream := harness.NewUpstream(t)
	g := harness.Launch(t, harness.Setup{App: "identity " + harness.GatewayIdentity, Site: "agent_proxy " + upstream.Addr, Badger: true})
	call := func(key, id, parent string) string {
		t.Helper()
		return g.Call(harness.Request{Path: "/pay", Id: id, Header: map[string]string{
			"X-Api-Key": key, "Workflow-Id": "nightly", "Execution-Parent": parent,
		}}).Header.Get("Execution-Checkpoint")
	}
	look := func(key string) harness.WorkflowView {
		t.Helper()
		r := harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/nightly", Header: map[string]string{"X-Api-Key": key}}
		deadline := time.Now().Add(harness.Patience)
		for {
			got := g.Call(r)
			if got.Status == http.StatusOK {
				v := harness.Document[harness.WorkflowView](t, got)
				v.Nodes = slices.DeleteFunc(v.Nodes, harness.WorkflowNode.Begins) // the first caller's alone
				if len(v.Nodes)%2 == 0 {
					return v
				}
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d %s", got.Status, got.Body)
			}
		}
	}
	mine, nested, theirs := call("ada", "order-7", ""), call("tool", "", "order-7"), call("eve", "order-8", "")
	var view harness.WorkflowView
	for len(view.Nodes) < 4 {
		view = look("ada")
	}
	if len(view.Nodes) != 4 || view.State(mine) == "none" || view.State(nested) == "none" || view.State(theirs) != "none" {
		t.Errorf("ada sees %+v", view)
	}
	if view = look("eve"); len(view.Nodes) != 2 || view.State(theirs) == "none" {
		t.Errorf("eve sees %+v", view)
	}
}

// cascade 6.2: errors of agents are recorded where they name parents in their own
// workflow, once, and are good for nothing else.
func TestErrorsOfAgents(t *testing.T) {
	upstream, a, b := harness.NewUpstream(t), harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a, b), Site: "agent_proxy " + upstream.Addr, Badger: true})
	wid := uuid.NewString()
	token := a.Issue(ect.Claims{Workflow: wid})
	g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	report := func(who *harness.Agent, workflow string, parents ...string) *ect.Token {
		return who.Issue(ect.Claims{
			Workflow: workflow, Action: string(ect.EventError), Parents: parents,
			Ext: new(ect.ExtBuilder).Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "action_failed").
				Text(ect.MemberCheckpointID, "").Text(ect.MemberDescription, "wrong amount"),
		})
	}
	post := func(token *ect.Token) harness.Reply {
		return g.Call(harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}, Header: map[string]string{ect.FieldName: token.Raw()}})
	}
	good := report(a, wid, token.ID())
	if got := post(good); got.Status != http.StatusCreated {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	if got := post(good); got.Status != http.StatusOK && got.Status != http.StatusCreated {
		t.Errorf("again: %d %s", got.Status, got.Body)
	}
	post(report(a, wid, uuid.NewString())).RefusedFor(t, 403, "parent-unknown")
	post(report(a, uuid.NewString(), token.ID())).RefusedFor(t, 403, "parent-unknown")
	// Nobody calls a workflow failed that it has no part in, whatever ids it knows.
	post(report(b, wid, token.ID())).RefusedFor(t, 403, "parent-unknown")
	// It was told, and is no token for a call.
	g.Call(harness.With(good, harness.Request{Path: "/pay"})).RefusedFor(t, 403, "replayed")
	// A token of a call is no error to tell.
	if got := post(token); got.Status < 400 {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if got := g.SettledView(a, wid, 4).State(token.ID()); got != "failed" {
		t.Errorf("the state is %s", got)
	}
}

// A call that was refused without being executed runs again with the same token, under
// a checkpoint of its own.
func TestTokenAfterARefusal(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	upstream.On("/pay", func(w http.ResponseWriter, in *harness.Arrival) {
		if in.N == 1 {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: "agent_proxy " + upstream.Addr, Badger: true})
	token := a.Issue(ect.Claims{Workflow: uuid.NewString()})
	first := g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	second := g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	if first.Status != 429 || second.Status != 201 || second.Header.Get("Execution-Status") != "executed" ||
		first.Header.Get("Execution-Checkpoint") == second.Header.Get("Execution-Checkpoint") {
		t.Errorf("%d %v, %d %v", first.Status, first.Header, second.Status, second.Header)
	}
	// Token; checkpoint, node and error; checkpoint and node.
	view := g.SettledView(a, token.Workflow(), 6)
	if got := view.State(token.ID()); got != "done" {
		t.Errorf("it ran in the end, and is %s: %+v", got, view)
	}
}

// How a doubt was settled is told too.
func TestSettledDoubtsAreTold(t *testing.T) {
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	upstream.On("/pay", func(http.ResponseWriter, *harness.Arrival) { panic(http.ErrAbortHandler) })
	upstream.On("/status", func(w http.ResponseWriter, _ *harness.Arrival) { w.WriteHeader(http.StatusOK) })
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + upstream.Addr +
		" {\n on_unknown probe GET /status?by={http.agent_guard.execution_id} {\n applied 200\n }\n }"})
	token := a.Issue(ect.Claims{Workflow: uuid.NewString()})
	g.Call(harness.With(token, harness.Request{Path: "/pay"}))
	if view := g.SettledView(a, token.Workflow(), 4); view.State(token.ID()) != "failed" {
		t.Errorf("in doubt: %+v", view)
	}
	if got := g.Call(harness.With(token, harness.Request{Path: "/pay"})); got.Status != http.StatusConflict {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	view := g.SettledView(a, token.Workflow(), 5)
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
	upstream, a := harness.NewUpstream(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Badger: true, Site: "agent_proxy " + upstream.Addr})
	for range 20 {
		token := a.Issue(ect.Claims{Workflow: uuid.NewString()})
		if got := g.Call(harness.With(token, harness.Request{Path: "/pay"})); got.Status != http.StatusCreated {
			t.Fatalf("%d %s", got.Status, got.Body)
		}
		if v := harness.Document[harness.WorkflowView](t, g.Get(a, "workflows/"+token.Workflow())); v.State(token.ID()) != "done" || len(v.Nodes) != 4 {
			t.Fatalf("%+v", v)
		}
	}
}
