package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// begins makes a call of an agent, which may be refused.
func (f *flow) begins(a *agent, path string, parents ...string) reply {
	f.t.Helper()
	token := a.issue(ect.Claims{Workflow: f.wid, Action: "do", Parents: parents})
	return f.call(with(token, request{method: "PUT", path: path, body: "later", header: headers{"Content-Type": "text/plain"}}))
}

// Facts 7.4, "Joining after rollback began: refused": what follows from what is being undone
// does not begin, and burns no key; what is recorded is answered, and the rest goes on.
func TestJoiningAfterRollbackBegan(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	g := launch(t, setup{app: trusting(t, a), site: lab.site(), badger: true})
	f := g.workflow()
	root, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	hold := newGate(t)
	lab.on("* /docs/a", -1, restWaits(hold))
	id := uuid.NewString()
	asking := a.issue(f.request(checkpoint, `, "cascade": true`))
	body := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "cascade": true}`, id, checkpoint)
	if got := g.call(with(asking, request{path: api.RollbackPath, body: body, header: headers{"Prefer": "respond-async"}})); got.status != http.StatusAccepted {
		t.Fatalf("%d %s", got.status, got.body)
	}
	wait(t, hold.arrived, "the undo")

	// A token of a request that wrote nothing stands between.
	read := a.issue(ect.Claims{Workflow: f.wid, Action: "read", Parents: []string{root.ID()}})
	if got := f.call(with(read, request{method: "GET", path: "/docs/b"})); got.status != http.StatusNotFound {
		t.Fatalf("%d %s", got.status, got.body)
	}
	for _, parent := range []string{root.ID(), checkpoint, read.ID()} {
		got := f.begins(a, "/docs/b", parent)
		got.is(t, http.StatusConflict, "workflow-paused")
		got.retryable(t, http.StatusConflict, "workflow-paused")
	}
	late := with(a.issue(ect.Claims{Workflow: f.wid, Action: "do", Parents: []string{checkpoint}}),
		request{method: "PUT", path: "/docs/c", body: "late", header: headers{"Content-Type": "text/plain"}})
	g.call(late).is(t, http.StatusConflict, "workflow-paused")
	if got := f.begins(a, "/docs/b"); got.status != 201 {
		t.Errorf("what follows from nothing: %d %s", got.status, got.body)
	}
	if got := g.workflow().begins(a, "/docs/b"); got.status/100 != 2 {
		t.Errorf("another workflow: %d %s", got.status, got.body)
	}
	lab.wantDoc("/docs/c", "")

	hold.open()
	g.call(with(asking, request{path: api.RollbackPath, body: body, header: headers{"Prefer": "wait=20"}})).undone(t, rollback.Completed)
	if got := g.call(late); got.status != 201 || got.header.Get("Execution-Status") != "executed" {
		t.Errorf("the same call afterwards: %d %s", got.status, got.body)
	}
	lab.wantDoc("/docs/c", "late")
}

// Cascade 4.1.3: a rollback of the whole workflow terminates it, over a restart too, and
// the ledger is told (ATD "Workflow Boundary ECTs"). What was recorded is answered.
func TestCascade413FullWorkflowStops(t *testing.T) {
	lab, a := newRestLab(t), newAgent(t, "a")
	app := trusting(t, a) + undoesParts
	g := launch(t, setup{app: app, site: lab.site()})
	f := g.workflow()
	_, checkpoint := f.does(a, "PUT", "/docs/a", "1")
	mail := with(a.issue(ect.Claims{Workflow: f.wid, Action: "mail"}), request{path: "/mail", body: "hello"})
	sent := g.call(mail)
	if sent.status != 200 {
		t.Fatalf("%d %s", sent.status, sent.body)
	}
	f.asks(a, uuid.NewString(), checkpoint, `, "scope": "full_workflow"`).undone(t, rollback.Partial)
	for _, again := range []bool{false, true} {
		if again {
			stop(t)
			g = launch(t, setup{app: app, site: lab.site(), store: g.store})
			f.gateway = g
		}
		got := f.begins(a, "/docs/b")
		got.is(t, http.StatusForbidden, "workflow-stopped")
		got.terminal(t, http.StatusForbidden, "workflow-stopped")
		// Another port is another host, and so another call.
		if got := g.call(mail); !again && (got.status != 200 || got.header.Get("Execution-Status") != "replayed") {
			t.Errorf("what is recorded: %d %s", got.status, got.body)
		}
		if got := g.workflow().begins(a, "/docs/c"); got.status/100 != 2 {
			t.Errorf("another workflow, again %v: %d %s", again, got.status, got.body)
		}
	}
	lab.wantDoc("/docs/b", "")

	var view struct {
		Stated string `json:"stated_status"`
		Nodes  []struct {
			Action string `json:"exec_act"`
		} `json:"nodes"`
	}
	got := f.call(with(a.issue(ect.Claims{Workflow: f.wid}), request{method: "GET", path: "/.well-known/cascade/workflows/" + f.wid}))
	if err := json.Unmarshal([]byte(got.body), &view); err != nil {
		t.Fatal(err)
	}
	ends := 0
	for _, n := range view.Nodes {
		if n.Action == "workflow_complete" {
			ends++
		}
	}
	if ends != 1 || view.Stated != "partial" {
		t.Errorf("%d ends, %q: %s", ends, view.Stated, got.body)
	}
}
