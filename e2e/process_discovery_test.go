//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// asksAll makes the first gateway of a star ask the others for what they have.
func asksAll(sites ...*procSite) string {
	text := "rollback {\n partial allow\n prepare_timeout 3s\n"
	for i, site := range sites {
		if i > 0 {
			text += fmt.Sprintf(" participants http://%s/.well-known/cascade/rollback %s\n", site.addr, starIdentity(i))
		}
	}
	return text + "}"
}

// newAskingStar is a star whose first gateway names the others as participants.
func newAskingStar(t *testing.T) *star {
	t.Helper()
	return layAskingStar(t).begin()
}

func layAskingStar(t *testing.T) *star {
	t.Helper()
	c := layStar(t)
	for i := 1; i < len(c.sites); i++ {
		c.a.also = append(c.a.also, starIdentity(i))
		c.sites[i].app += "rollback {\n coordinators " + gatewayIdentity + "\n }"
	}
	c.sites[0].app += asksAll(c.sites...)
	c.before(0, c.behind(1, "/charges /mail"), c.behind(2, "/docs/*"))
	return c
}

// direct makes a call at the gateway at a place, which the first one does not see: the agent's token
// is for that gateway alone.
func (c *star) direct(n int, r request, after ...string) sagaStep {
	c.t.Helper()
	s := *c.saga
	s.g = c.sites[n].gateway(c.t)
	got := s.g.call(with(s.a.issue(ect.Claims{Audience: []string{starIdentity(n)}, Workflow: s.wid, Parents: after}), r))
	step := sagaStep{got.header.Get("Execution-Checkpoint"), got}
	if step.status >= 300 || step.checkpoint == "" {
		c.t.Fatalf("%d %s %v", step.status, step.body, step.header)
	}
	return step
}

// C-4.3.1-e: a participant is asked for what it has of the workflow, and what follows from the target
// there is undone in its place in the order, though nobody has told the coordinator of it; what does
// not follow stays, until the whole workflow is rolled back. The plan is in the journal: a coordinator
// that is killed goes on with it.
func TestProcessDiscovery(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newAskingStar(t)
	s := c.saga
	c.lab.write("/docs/x", `{"n":1}`)
	root := s.do(charge(1))
	unseen := c.direct(2, put("/docs/x", `{"n":2}`), root.checkpoint)
	leaf := c.direct(1, charge(2), unseen.checkpoint)
	apart := c.direct(1, charge(3))
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	doc := s.prepare(asked, http.StatusOK)
	place := func(checkpoint string) int {
		return slices.IndexFunc(doc.Steps, func(step rollbackStep) bool { return step.Checkpoint == checkpoint })
	}
	if len(doc.Steps) != 3 || place(leaf.checkpoint) != 0 || place(unseen.checkpoint) != 1 || place(root.checkpoint) != 2 {
		t.Fatalf("%s, %s, %s: %+v", leaf.checkpoint, unseen.checkpoint, root.checkpoint, doc.Steps)
	}
	c.lab.arrived("POST /refunds", 0)
	hold := newGate(t)
	c.lab.on("POST /refunds", 1, restWaits(hold))
	r := s.executing(asked, doc.PlanHash)
	r.header["Prefer"] = "wait=0"
	if got := s.g.call(r); got.status != http.StatusAccepted {
		t.Fatalf("%d %s", got.status, got.body)
	}
	wait(t, hold.arrived, "the refund")
	c.running[0].kill()
	hold.open()
	c.start(0)
	s.finished(asked.ID).want(t, "completed")
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantCharge(leaf.id(t), "refunded")
	c.lab.wantCharge(apart.id(t), "open")
	c.lab.wantDoc("/docs/x", `{"n":1}`)
	c.lab.arrived("POST /refunds", 2)

	s.back(rollbackBody{ID: rollbackID(2), Checkpoint: root.checkpoint, Scope: "full_workflow"}).want(t, "completed")
	c.lab.wantCharge(apart.id(t), "refunded")
	c.lab.arrived("POST /refunds", 3)
}

// A participant that does not answer may have more to undo: the rollback cannot be prepared whole, and
// is never completed (P6). Its workflow is paused there when it is back. Asked again, the rest is undone.
func TestProcessDiscoveryUnreachable(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newAskingStar(t)
	s := c.saga
	root := s.do(charge(1))
	c.lab.write("/docs/x", `{"n":1}`)
	c.direct(2, put("/docs/x", `{"n":2}`), root.checkpoint)
	c.running[2].kill()
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	doc := s.prepare(asked, http.StatusConflict)
	if len(doc.Agents) != 2 || doc.Agents[0].Reason != "unreachable" || doc.Agents[0].Agent != starIdentity(2) {
		t.Errorf("%+v", doc.Agents)
	}
	c.lab.arrived("POST /refunds", 0)
	done := s.back(asked)
	if done.Status != "partial" || done.Effect != "unknown" || !slices.Contains(done.Failed, starIdentity(2)) || len(done.Escalations) == 0 {
		t.Errorf("%+v", done)
	}
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.wantDoc("/docs/x", `{"n":2}`)
	c.start(2)
	eventually(t, "it is paused there, too", func() bool { return c.tried(2, s.wid).status == http.StatusConflict })
	asked.ID = rollbackID(2)
	eventually(t, "it is asked again", func() bool {
		r := s.asking(asked)
		r.path += "/prepare"
		return s.g.call(r).status == http.StatusOK
	})
	s.back(asked).want(t, "completed")
	c.lab.wantDoc("/docs/x", `{"n":1}`)
}

// P3: only the coordinators that a gateway names read the tokens of its workflows; everybody else gets
// what is got for a workflow that does not exist.
func TestProcessTokensAreForCoordinators(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newAskingStar(t)
	root := c.saga.do(charge(1))
	_ = root
	at := c.sites[1].gateway(t)
	for _, wid := range []string{c.saga.wid, rollbackID(7)[len("urn:uuid:"):]} {
		for range 2 {
			raw := c.a.issue(ect.Claims{Workflow: wid}).Raw()
			at.call(request{method: "GET", path: "/.well-known/cascade/workflows/" + wid + "/tokens", header: headers{ect.FieldName: raw}}).problem(t, http.StatusForbidden, "not-in-workflow")
		}
		at.call(request{method: "GET", path: "/.well-known/cascade/workflows/" + wid + "/tokens"}).problem(t, http.StatusUnauthorized, "authentication-required")
	}
}
