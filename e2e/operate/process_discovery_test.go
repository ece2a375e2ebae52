//go:build unix

package operate

import (
	"net/http"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// C-4.3.1-e: a participant is asked for what it has of the workflow, and what follows from the target
// there is undone in its place in the order, though nobody has told the coordinator of it; what does
// not follow stays, until the whole workflow is rolled back. The plan is in the journal: a coordinator
// that is killed goes on with it.
func TestProcessDiscovery(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewAskingStar(t)
	s := c.Saga
	c.Lab.Write("/docs/x", `{"n":1}`)
	root := s.Do(harness.Charge(1))
	unseen := c.Direct(2, harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	leaf := c.Direct(1, harness.Charge(2), unseen.Checkpoint)
	apart := c.Direct(1, harness.Charge(3))
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	doc := s.Prepare(asked, http.StatusOK)
	place := func(checkpoint string) int {
		return slices.IndexFunc(doc.Steps, func(step harness.RollbackStep) bool { return step.Checkpoint == checkpoint })
	}
	if len(doc.Steps) != 3 || place(leaf.Checkpoint) != 0 || place(unseen.Checkpoint) != 1 || place(root.Checkpoint) != 2 {
		t.Fatalf("%s, %s, %s: %+v", leaf.Checkpoint, unseen.Checkpoint, root.Checkpoint, doc.Steps)
	}
	c.Lab.Arrived("POST /refunds", 0)
	hold := harness.NewGate(t)
	c.Lab.On("POST /refunds", 1, harness.RestWaits(hold))
	r := s.Executing(asked, doc.PlanHash)
	r.Header["Prefer"] = "wait=0"
	if got := s.G.Call(r); got.Status != http.StatusAccepted {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	harness.Wait(t, hold.Arrived, "the refund")
	c.Running[0].Kill()
	hold.Open()
	c.Start(0)
	s.Finished(asked.ID).Want(t, "completed")
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantCharge(leaf.Id(t), "refunded")
	c.Lab.WantCharge(apart.Id(t), "open")
	c.Lab.WantDoc("/docs/x", `{"n":1}`)
	c.Lab.Arrived("POST /refunds", 2)

	s.Back(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: root.Checkpoint, Scope: "full_workflow"}).Want(t, "completed")
	c.Lab.WantCharge(apart.Id(t), "refunded")
	c.Lab.Arrived("POST /refunds", 3)
}

// A participant that does not answer may have more to undo: the rollback cannot be prepared whole, and
// is never completed (P6). Its workflow is paused there when it is back. Asked again, the rest is undone.
func TestProcessDiscoveryUnreachable(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewAskingStar(t)
	s := c.Saga
	root := s.Do(harness.Charge(1))
	c.Lab.Write("/docs/x", `{"n":1}`)
	c.Direct(2, harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
	c.Running[2].Kill()
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	doc := s.Prepare(asked, http.StatusConflict)
	if len(doc.Agents) != 2 || doc.Agents[0].Reason != "unreachable" || doc.Agents[0].Agent != harness.StarIdentity(2) {
		t.Errorf("%+v", doc.Agents)
	}
	c.Lab.Arrived("POST /refunds", 0)
	done := s.Back(asked)
	if done.Status != "partial" || done.Effect != "unknown" || !slices.Contains(done.Failed, harness.StarIdentity(2)) || len(done.Escalations) == 0 {
		t.Errorf("%+v", done)
	}
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.WantDoc("/docs/x", `{"n":2}`)
	c.Start(2)
	harness.Eventually(t, "it is paused there, too", func() bool { return c.Tried(2, s.Wid).Status == http.StatusConflict })
	asked.ID = harness.RollbackID(2)
	harness.Eventually(t, "it is asked again", func() bool {
		r := s.Asking(asked)
		r.Path += "/prepare"
		return s.G.Call(r).Status == http.StatusOK
	})
	s.Back(asked).Want(t, "completed")
	c.Lab.WantDoc("/docs/x", `{"n":1}`)
}

// P3: only the coordinators that a gateway names read the tokens of its workflows; everybody else gets
// what is got for a workflow that does not exist.
func TestProcessTokensAreForCoordinators(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.NewAskingStar(t)
	root := c.Saga.Do(harness.Charge(1))
	_ = root
	at := c.Sites[1].Gateway(t)
	for _, wid := range []string{c.Saga.Wid, harness.RollbackID(7)[len("urn:uuid:"):]} {
		for range 2 {
			raw := c.A.Issue(ect.Claims{Workflow: wid}).Raw()
			at.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + wid + "/tokens", Header: harness.Headers{ect.FieldName: raw}}).Problem(t, http.StatusForbidden, "not-in-workflow")
		}
		at.Call(harness.Request{Method: "GET", Path: "/.well-known/cascade/workflows/" + wid + "/tokens"}).Problem(t, http.StatusUnauthorized, "authentication-required")
	}
}
