package operate

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Facts 7.4, "Joining after rollback began: refused": what follows from what is being undone
// does not begin, and burns no key; what is recorded is answered, and the rest goes on.
func TestJoiningAfterRollbackBegan(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	g := harness.Launch(t, harness.Setup{App: harness.Trusting(t, a), Site: lab.Site(), Badger: true})
	f := g.Workflow()
	root, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	hold := harness.NewGate(t)
	lab.On("DELETE /docs/a", -1, harness.RestWaits(hold)) // not what is read of it before
	id := uuid.NewString()
	asking := a.Issue(f.Request(checkpoint, `, "cascade": true`))
	body := fmt.Sprintf(`{"rollback_id": "urn:uuid:%s", "checkpoint_id": %q, "cascade": true}`, id, checkpoint)
	if got := g.Call(harness.With(asking, harness.Request{Path: rollback.Path, Body: body, Header: harness.Headers{"Prefer": "respond-async"}})); got.Status != http.StatusAccepted {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	harness.Wait(t, hold.Arrived, "the undo")

	// A token of a request that wrote nothing stands between.
	read := a.Issue(ect.Claims{Workflow: f.Wid, Action: "read", Parents: []string{root.ID()}})
	if got := f.Call(harness.With(read, harness.Request{Method: "GET", Path: "/docs/b"})); got.Status != http.StatusNotFound {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	for _, parent := range []string{root.ID(), checkpoint, read.ID()} {
		got := f.Begins(a, "/docs/b", parent)
		got.Is(t, http.StatusConflict, "workflow-paused")
		got.Retryable(t, http.StatusConflict, "workflow-paused")
	}
	late := harness.With(a.Issue(ect.Claims{Workflow: f.Wid, Action: "do", Parents: []string{checkpoint}}),
		harness.Request{Method: "PUT", Path: "/docs/c", Body: "late", Header: harness.Headers{"Content-Type": "text/plain"}})
	g.Call(late).Is(t, http.StatusConflict, "workflow-paused")
	if got := f.Begins(a, "/docs/b"); got.Status != 201 {
		t.Errorf("what follows from nothing: %d %s", got.Status, got.Body)
	}
	if got := g.Workflow().Begins(a, "/docs/b"); got.Status/100 != 2 {
		t.Errorf("another workflow: %d %s", got.Status, got.Body)
	}
	lab.WantDoc("/docs/c", "")

	hold.Open()
	g.Call(harness.With(asking, harness.Request{Path: rollback.Path, Body: body, Header: harness.Headers{"Prefer": "wait=20"}})).Undone(t, rollback.Completed)
	if got := g.Call(late); got.Status != 201 || got.Header.Get("Execution-Status") != "executed" {
		t.Errorf("the same call afterwards: %d %s", got.Status, got.Body)
	}
	lab.WantDoc("/docs/c", "late")
}

// Cascade 4.1.3: a rollback of the whole workflow terminates it, over a restart too, and
// the ledger is told (ATD "Workflow Boundary ECTs"). What was recorded is answered.
func TestCascade413FullWorkflowStops(t *testing.T) {
	lab, a := harness.NewRestLab(t), harness.NewAgent(t, "a")
	app := harness.Trusting(t, a) + harness.UndoesParts
	g := harness.Launch(t, harness.Setup{App: app, Site: lab.Site()})
	f := g.Workflow()
	_, checkpoint := f.Does(a, "PUT", "/docs/a", "1")
	mail := harness.With(a.Issue(ect.Claims{Workflow: f.Wid, Action: "mail"}), harness.Request{Path: "/mail", Body: "hello"})
	sent := g.Call(mail)
	if sent.Status != 200 {
		t.Fatalf("%d %s", sent.Status, sent.Body)
	}
	f.Asks(a, uuid.NewString(), checkpoint, `, "scope": "full_workflow"`).Undone(t, rollback.Partial)
	for _, again := range []bool{false, true} {
		if again {
			harness.Stop(t)
			g = harness.Launch(t, harness.Setup{App: app, Site: lab.Site(), Store: g.Store})
			f.Gateway = g
		}
		got := f.Begins(a, "/docs/b")
		got.Is(t, http.StatusForbidden, "workflow-stopped")
		got.Terminal(t, http.StatusForbidden, "workflow-stopped")
		// Another port is another host, and so another call.
		if got := g.Call(mail); !again && (got.Status != 200 || got.Header.Get("Execution-Status") != "replayed") {
			t.Errorf("what is recorded: %d %s", got.Status, got.Body)
		}
		if got := g.Workflow().Begins(a, "/docs/c"); got.Status/100 != 2 {
			t.Errorf("another workflow, again %v: %d %s", again, got.Status, got.Body)
		}
	}
	lab.WantDoc("/docs/b", "")

	var view struct {
		Stated string `json:"stated_status"`
		Nodes  []struct {
			Action string `json:"exec_act"`
		} `json:"nodes"`
	}
	got := f.Call(harness.With(a.Issue(ect.Claims{Workflow: f.Wid}), harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + f.Wid}))
	if err := json.Unmarshal([]byte(got.Body), &view); err != nil {
		t.Fatal(err)
	}
	ends := 0
	for _, n := range view.Nodes {
		if n.Action == "workflow_complete" {
			ends++
		}
	}
	if ends != 1 || view.Stated != "partial" {
		t.Errorf("%d ends, %q: %s", ends, view.Stated, got.Body)
	}
}
