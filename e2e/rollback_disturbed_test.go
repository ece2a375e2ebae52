package e2e

import (
	"net/http"
	"testing"
)

// P6: guarded calls and the requests of undos know of each other's writes, also where nothing has
// entity tags. All that follows from it is tested in guard.
func TestRollbackDisturbed(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	late := func(at *gate) func(*restCall) {
		return func(c *restCall) {
			answer := c.act()
			at.pass()
			c.say(answer)
		}
	}
	lab.write("/plain/x", "v0")
	s, at := g.saga(a), newGate(t)
	step := s.do(put("/plain/x", "A"))
	lab.on("GET /plain/x", 1, (*restCall).usual) // of the first phase
	lab.on("GET /plain/x", 1, late(at))          // of the undo
	s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint})
	<-at.arrived
	o := g.saga(a)
	other := o.do(put("/plain/x", "B"))
	at.open()
	s.finished(rollbackID(1)).want(t, "escalated", "changed-since")
	lab.wantDoc("/plain/x", "B")

	at = newGate(t)
	lab.on("GET /plain/x", 1, late(at)) // of a call
	pending := s.g.begin(s.calling(put("/plain/x", "C")))
	<-at.arrived
	o.back(rollbackBody{Checkpoint: other.checkpoint}).want(t, "completed")
	lab.wantDoc("/plain/x", "A")
	at.open()
	if got := pending.answer(); got.status != http.StatusOK {
		t.Fatalf("%d %s", got.status, got.body)
	} else if v := g.checkpointOf(a, got); v.Reason != "changed-meanwhile" {
		t.Errorf("%+v", v)
	}
}
