package rollback

import (
	"net/http"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
)

// P6: guarded calls and the requests of undos know of each other's writes, also where nothing has
// entity tags. All that follows from it is tested in guard.
func TestRollbackDisturbed(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	late := func(at *harness.Gate) func(*harness.RestCall) {
		return func(c *harness.RestCall) {
			answer := c.Act()
			at.Pass()
			c.Say(answer)
		}
	}
	lab.Write("/plain/x", "v0")
	s, at := g.Saga(a), harness.NewGate(t)
	step := s.Do(harness.Put("/plain/x", "A"))
	lab.On("GET /plain/x", 1, (*harness.RestCall).Usual) // of the first phase
	lab.On("GET /plain/x", 1, late(at))                  // of the undo
	s.Begun(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint})
	<-at.Arrived
	o := g.Saga(a)
	other := o.Do(harness.Put("/plain/x", "B"))
	at.Open()
	s.Finished(harness.RollbackID(1)).Want(t, "escalated", "changed-since")
	lab.WantDoc("/plain/x", "B")

	at = harness.NewGate(t)
	lab.On("GET /plain/x", 1, late(at)) // of a call
	pending := s.G.Begin(s.Calling(harness.Put("/plain/x", "C")))
	<-at.Arrived
	o.Back(harness.RollbackBody{Checkpoint: other.Checkpoint}).Want(t, "completed")
	lab.WantDoc("/plain/x", "A")
	at.Open()
	if got := pending.Answer(); got.Status != http.StatusOK {
		t.Fatalf("%d %s", got.Status, got.Body)
	} else if v := g.CheckpointOf(a, got); v.Reason != "changed-meanwhile" {
		t.Errorf("%+v", v)
	}
}
