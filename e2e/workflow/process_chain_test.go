//go:build unix

package workflow

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// newChain starts three gateways in a row: A before B before C before the RestLab. Each knows its
// neighbours, and the agent knows the names that it issues its tokens for, besides that of A.
func newChain(t *testing.T, names ...string) *harness.Star {
	t.Helper()
	c := harness.LayStar(t)
	c.A.Also = names
	for i := range c.Sites[1:] {
		c.Sites[i+1].App += "rollback {\n coordinators " + harness.StarIdentity(i) + "\n }"
		c.Before(i, c.Behind(i+1, "/*"))
	}
	return c.Begin()
}

// Cascade 4.3.2 over a chain: a call goes from A over B to C, and a rollback at A undoes it at C,
// which only B asks. Each gateway gets the tokens that are for it, and no other, whether the agent
// knows of those behind the first or not.
func TestProcessChain(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, names := range map[string][]string{
		"the agent knows the first":     nil,
		"the agent knows the first two": {harness.StarIdentity(1)},
		"the agent knows all":           {harness.StarIdentity(1), harness.StarIdentity(2)},
	} {
		t.Run(name, func(t *testing.T) {
			c := newChain(t, names...)
			s := c.Saga
			c.Lab.Write("/docs/x", `{"n":1}`)
			root := s.Do(harness.Charge(1))
			s.Do(harness.Put("/docs/x", `{"n":2}`), root.Checkpoint)
			asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
			first := s.Prepare(asked, http.StatusOK)
			if first.Status != "prepared" || len(first.Steps) != 2 {
				t.Errorf("%+v", first)
			}
			c.Lab.Arrived("POST /refunds", 0)
			harness.Document[harness.RollbackDoc](t, s.G.Call(s.Executing(asked, first.PlanHash))).Want(t, "completed")
			c.Lab.WantCharge(root.Id(t), "refunded")
			c.Lab.WantDoc("/docs/x", `{"n":1}`)
			c.Lab.WantEffects("charged "+root.Id(t), "changed /docs/x", "changed /docs/x", "refunded "+root.Id(t))
			for i := range c.Sites[1:] {
				parts := c.Parts(i + 1)
				if len(parts) != 2 {
					t.Errorf("gateway %d: %+v", i+1, parts)
				}
				for _, part := range parts {
					if part.Status != "completed" {
						t.Errorf("gateway %d: %+v", i+1, part)
					}
				}
			}
		})
	}
}

// C-4.3.2-e: what the last of a chain cannot undo, no one before it calls prepared, and nothing is
// undone.
func TestProcessChainCannotPrepare(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newChain(t)
	s := c.Saga
	mail := s.Do(harness.Request{Path: "/mail"})
	doc := s.Prepare(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: mail.Checkpoint, Scope: "sub_dag"}, http.StatusConflict)
	if doc.Status != "cannot_prepare" || len(doc.Agents) != 1 || doc.Agents[0].Reason != "irreversible" {
		t.Errorf("%+v", doc)
	}
	s.Back(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: mail.Checkpoint, Scope: "sub_dag"}).Want(t, "escalated", "irreversible")
}

// The middle of a chain dies while the last one undoes: it goes on when it is back, and nothing is
// undone twice.
func TestProcessChainCrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newChain(t)
	s := c.Saga
	root := s.Do(harness.Charge(1))
	hold := harness.NewGate(t)
	c.Lab.On("POST /refunds", 1, harness.RestWaits(hold))
	asked := harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
	s.Begun(asked)
	harness.Wait(t, hold.Arrived, "the refund")
	c.Running[1].Kill()
	hold.Open()
	c.Start(1)
	s.Finished(asked.ID).Want(t, "completed")
	c.Lab.WantCharge(root.Id(t), "refunded")
	c.Lab.Arrived("POST /refunds", 1)
}

// Cascade 4.3.4, the diamond: the first gateway and the second both ask the third for one checkpoint of one rollback. It
// is one rollback there, undone once; each of the two gets a result that is about its own request. Somebody who may not
// ask for the checkpoint does not get it, whatever id he brings (P3).
func TestProcessDiamond(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := harness.LayStar(t)
	c.A.Also = []string{harness.StarIdentity(1), harness.StarIdentity(2)}
	for i, site := range c.Sites[:2] {
		site.App += "rollback {\n coordinators " + harness.StarIdentity(0) + "\n"
		for j := i + 1; j < len(c.Sites); j++ {
			site.App += fmt.Sprintf(" participants http://%s/.well-known/cascade/rollback %s\n", c.Sites[j].Addr, harness.StarIdentity(j))
		}
		site.App += "}"
	}
	c.Sites[2].App += "rollback {\n coordinators " + harness.StarIdentity(0) + " " + harness.StarIdentity(1) + "\n }"
	s := c.Begin().Saga
	second := *s
	second.G = c.Sites[1].Gateway(t)
	for i, prepares := range []bool{true, false} {
		root := s.Do(harness.Charge(1))
		below := c.Direct(1, harness.Charge(2), root.Checkpoint)
		last := c.Direct(2, harness.Charge(3), below.Checkpoint)
		for _, phase := range []string{"", "release"} { // so that the second one learns of the last call
			second.Prepare(harness.RollbackBody{ID: harness.RollbackID(i + 8), Checkpoint: below.Checkpoint, Phase: phase, Scope: "sub_dag"}, http.StatusOK)
		}
		c.ReleasedAt(2, harness.RollbackBody{ID: harness.RollbackID(i + 20), Checkpoint: last.Checkpoint, Scope: "sub_dag"})
		asked := harness.RollbackBody{ID: harness.RollbackID(i + 1), Checkpoint: root.Checkpoint, Scope: "sub_dag"}
		var done harness.RollbackDoc
		if prepares {
			doc := s.Prepare(asked, http.StatusOK)
			done = harness.Document[harness.RollbackDoc](t, s.G.Call(s.Executing(asked, doc.PlanHash)))
		} else {
			done = s.Back(asked)
		}
		done.Want(t, "completed")
		if len(done.Steps) != 3 || done.Steps[0].Via != harness.StarIdentity(2) || done.Steps[1].Via != harness.StarIdentity(1) {
			t.Errorf("%+v", done.Steps)
		}
		for _, charged := range []harness.SagaStep{root, below, last} {
			c.Lab.WantCharge(charged.Id(t), "refunded")
		}
		c.Lab.Arrived("POST /refunds", 3*(i+1))
		if part := c.Parts(1)[0]; len(part.Steps) != 2 || part.Steps[0].Checkpoint != last.Checkpoint || part.Steps[0].Via != harness.StarIdentity(2) {
			t.Errorf("%+v", part)
		}
		parts := c.Parts(2)
		if len(parts) != i+1 || parts[0].Status != "completed" || parts[0].Checkpoint != last.Checkpoint || len(parts[0].Steps) != 1 {
			t.Errorf("%+v", parts)
		}
		askers := map[string]int{}
		c.Sites[2].Exported(t, func(token *ect.Unverified) {
			if token.Action() == "rollback_request" && slices.Contains(token.Parents(), last.Checkpoint) {
				askers[token.Issuer()]++
			}
		})
		if askers[harness.StarIdentity(0)] == 0 || askers[harness.StarIdentity(1)] == 0 {
			t.Errorf("asked by %v", askers)
		}
		stranger := *s
		stranger.G, stranger.Wid = c.Sites[2].Gateway(t), uuid.NewString()
		got := stranger.Ask(harness.RollbackBody{ID: parts[0].ID, Checkpoint: parts[0].Checkpoint, Scope: "sub_dag", Reason: "rollback"})
		got.Problem(t, http.StatusForbidden, "not-in-workflow")
	}
}
