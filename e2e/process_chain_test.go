//go:build unix

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// newChain starts three gateways in a row: A before B before C before the restLab. Each knows its
// neighbours, and the agent knows the names that it issues its tokens for, besides that of A.
func newChain(t *testing.T, names ...string) *star {
	t.Helper()
	c := layStar(t)
	c.a.also = names
	for i := range c.sites[1:] {
		c.sites[i+1].app += "rollback {\n coordinators " + starIdentity(i) + "\n }"
		c.before(i, c.behind(i+1, "/*"))
	}
	return c.begin()
}

// Cascade 4.3.2 over a chain: a call goes from A over B to C, and a rollback at A undoes it at C,
// which only B asks. Each gateway gets the tokens that are for it, and no other, whether the agent
// knows of those behind the first or not.
func TestProcessChain(t *testing.T) {
	t.Parallel() // its gateways are processes
	for name, names := range map[string][]string{
		"the agent knows the first":     nil,
		"the agent knows the first two": {starIdentity(1)},
		"the agent knows all":           {starIdentity(1), starIdentity(2)},
	} {
		t.Run(name, func(t *testing.T) {
			c := newChain(t, names...)
			s := c.saga
			c.lab.write("/docs/x", `{"n":1}`)
			root := s.do(charge(1))
			s.do(put("/docs/x", `{"n":2}`), root.checkpoint)
			asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
			first := s.prepare(asked, http.StatusOK)
			if first.Status != "prepared" || len(first.Steps) != 2 {
				t.Errorf("%+v", first)
			}
			c.lab.arrived("POST /refunds", 0)
			document[rollbackDoc](t, s.g.call(s.executing(asked, first.PlanHash))).want(t, "completed")
			c.lab.wantCharge(root.id(t), "refunded")
			c.lab.wantDoc("/docs/x", `{"n":1}`)
			c.lab.wantEffects("charged "+root.id(t), "changed /docs/x", "changed /docs/x", "refunded "+root.id(t))
			for i := range c.sites[1:] {
				parts := c.parts(i + 1)
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
	s := c.saga
	mail := s.do(request{path: "/mail"})
	doc := s.prepare(rollbackBody{ID: rollbackID(1), Checkpoint: mail.checkpoint, Scope: "sub_dag"}, http.StatusConflict)
	if doc.Status != "cannot_prepare" || len(doc.Agents) != 1 || doc.Agents[0].Reason != "irreversible" {
		t.Errorf("%+v", doc)
	}
	s.back(rollbackBody{ID: rollbackID(2), Checkpoint: mail.checkpoint, Scope: "sub_dag"}).want(t, "escalated", "irreversible")
}

// The middle of a chain dies while the last one undoes: it goes on when it is back, and nothing is
// undone twice.
func TestProcessChainCrash(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := newChain(t)
	s := c.saga
	root := s.do(charge(1))
	hold := newGate(t)
	c.lab.on("POST /refunds", 1, restWaits(hold))
	asked := rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
	s.begun(asked)
	wait(t, hold.arrived, "the refund")
	c.running[1].kill()
	hold.open()
	c.start(1)
	s.finished(asked.ID).want(t, "completed")
	c.lab.wantCharge(root.id(t), "refunded")
	c.lab.arrived("POST /refunds", 1)
}

// releasedAt waits until a gateway has been told that what it has reserved is released: b can be prepared there.
func (c *star) releasedAt(i int, b rollbackBody) {
	c.t.Helper()
	at := *c.saga
	at.g = c.sites[i].gateway(c.t)
	eventuallyEvery(c.t, time.Second, procBound, "the release arrives", func() bool {
		r := at.asking(b)
		r.path += "/prepare"
		return at.g.call(r).status == http.StatusOK
	})
	b.Phase = "release"
	at.prepare(b, http.StatusOK)
}

// Cascade 4.3.4, the diamond: the first gateway and the second both ask the third for one checkpoint of one rollback. It
// is one rollback there, undone once; each of the two gets a result that is about its own request. Somebody who may not
// ask for the checkpoint does not get it, whatever id he brings (P3).
func TestProcessDiamond(t *testing.T) {
	t.Parallel() // its gateways are processes
	c := layStar(t)
	c.a.also = []string{starIdentity(1), starIdentity(2)}
	for i, site := range c.sites[:2] {
		site.app += "rollback {\n coordinators " + starIdentity(0) + "\n"
		for j := i + 1; j < len(c.sites); j++ {
			site.app += fmt.Sprintf(" participants http://%s/.well-known/cascade/rollback %s\n", c.sites[j].addr, starIdentity(j))
		}
		site.app += "}"
	}
	c.sites[2].app += "rollback {\n coordinators " + starIdentity(0) + " " + starIdentity(1) + "\n }"
	s := c.begin().saga
	second := *s
	second.g = c.sites[1].gateway(t)
	for i, prepares := range []bool{true, false} {
		root := s.do(charge(1))
		below := c.direct(1, charge(2), root.checkpoint)
		last := c.direct(2, charge(3), below.checkpoint)
		for _, phase := range []string{"", "release"} { // so that the second one learns of the last call
			second.prepare(rollbackBody{ID: rollbackID(i + 8), Checkpoint: below.checkpoint, Phase: phase, Scope: "sub_dag"}, http.StatusOK)
		}
		c.releasedAt(2, rollbackBody{ID: rollbackID(i + 20), Checkpoint: last.checkpoint, Scope: "sub_dag"})
		asked := rollbackBody{ID: rollbackID(i + 1), Checkpoint: root.checkpoint, Scope: "sub_dag"}
		var done rollbackDoc
		if prepares {
			doc := s.prepare(asked, http.StatusOK)
			done = document[rollbackDoc](t, s.g.call(s.executing(asked, doc.PlanHash)))
		} else {
			done = s.back(asked)
		}
		done.want(t, "completed")
		if len(done.Steps) != 3 || done.Steps[0].Via != starIdentity(2) || done.Steps[1].Via != starIdentity(1) {
			t.Errorf("%+v", done.Steps)
		}
		for _, charged := range []sagaStep{root, below, last} {
			c.lab.wantCharge(charged.id(t), "refunded")
		}
		c.lab.arrived("POST /refunds", 3*(i+1))
		if part := c.parts(1)[0]; len(part.Steps) != 2 || part.Steps[0].Checkpoint != last.checkpoint || part.Steps[0].Via != starIdentity(2) {
			t.Errorf("%+v", part)
		}
		parts := c.parts(2)
		if len(parts) != i+1 || parts[0].Status != "completed" || parts[0].Checkpoint != last.checkpoint || len(parts[0].Steps) != 1 {
			t.Errorf("%+v", parts)
		}
		askers := map[string]int{}
		c.sites[2].exported(t, func(token *ect.Unverified) {
			if token.Action() == "rollback_request" && slices.Contains(token.Parents(), last.checkpoint) {
				askers[token.Issuer()]++
			}
		})
		if askers[starIdentity(0)] == 0 || askers[starIdentity(1)] == 0 {
			t.Errorf("asked by %v", askers)
		}
		stranger := *s
		stranger.g, stranger.wid = c.sites[2].gateway(t), uuid.NewString()
		got := stranger.ask(rollbackBody{ID: parts[0].ID, Checkpoint: parts[0].Checkpoint, Scope: "sub_dag", Reason: "rollback"})
		got.problem(t, http.StatusForbidden, "not-in-workflow")
	}
}
