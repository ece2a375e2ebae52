package e2e

import (
	"net/http"
	"testing"
)

// wantDisturbed checks that a call is left to a person, because somebody else has changed
// its target while it ran, and that its rollback touches nothing.
func (s *saga) wantDisturbed(lab *restLab, step sagaStep, path, stands string) {
	s.t.Helper()
	if v := s.g.checkpointOf(s.a, step.reply); v.Reversible || v.Reason != "changed-meanwhile" {
		s.t.Errorf("%+v", v)
	}
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(s.t, "escalated", "changed-since")
	lab.wantDoc(path, stands)
}

// late makes a call that goes on once the gate is open.
func (s *saga) late(r request, hold *gate) (ended func() sagaStep) {
	s.t.Helper()
	pending := s.g.begin(s.calling(r))
	<-hold.arrived
	return func() sagaStep {
		s.t.Helper()
		hold.open()
		got := pending.answer()
		return sagaStep{got.header.Get("Execution-Checkpoint"), got}
	}
}

// P6: the write of another call is not undone with one that ran at the same time.
func TestRollbackOfCallsSideBySide(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	for _, path := range []string{"/docs/x", "/plain/x"} {
		t.Run("late answer "+path, func(t *testing.T) {
			lab.write(path, "v0")
			s, hold := g.saga(a), newGate(t)
			s.t = t
			lab.on("PUT "+path, 1, func(c *restCall) {
				answer := c.act()
				hold.pass()
				c.say(answer)
			})
			ended := s.late(put(path, "A"), hold)
			s.do(put(path, "B"))
			s.wantDisturbed(lab, ended(), path, "B")
		})
		t.Run("late look "+path, func(t *testing.T) {
			lab.write(path, "v0")
			s, hold := g.saga(a), newGate(t)
			s.t = t
			lab.on("GET "+path, 1, func(c *restCall) {
				answer := c.act()
				hold.pass()
				c.say(answer)
			})
			ended := s.late(put(path, "A"), hold)
			other := s.do(put(path, "B"))
			step := ended()
			s.wantDisturbed(lab, step, path, "A")
			s.back(rollbackBody{Checkpoint: other.checkpoint}).want(t, "escalated", "changed-since")
			lab.wantDoc(path, "A")
		})
	}
}

// Calls to other documents, and those that come one after the other, are none of it.
func TestRollbackOfCallsApart(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", "v0")
	s, hold := g.saga(a), newGate(t)
	lab.on("PUT /docs/x", 1, restWaits(hold))
	ended := s.late(put("/docs/x", "A"), hold)
	other := s.do(put("/docs/y", "B"))
	step := ended()
	s.back(rollbackBody{Checkpoint: other.checkpoint}).want(t, "completed")
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
	lab.wantDoc("/docs/x", "v0")
	lab.wantDoc("/docs/y", "")
}

// Whoever writes past the gateway is found by the entity tag of the answer.
func TestRollbackOfAnotherTag(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", "v0")
	lab.on("PUT /docs/x", 1, func(c *restCall) {
		answer := c.act()
		lab.write("/docs/x", "B")
		c.say(answer)
	})
	s := g.saga(a)
	s.wantDisturbed(lab, s.do(put("/docs/x", "A")), "/docs/x", "B")
}

// A rollback that restores a document is another writer too.
func TestRollbackBesideACall(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/plain/x", "v0")
	s, hold := g.saga(a), newGate(t)
	first := s.do(put("/plain/x", "v1"))
	lab.on("GET /plain/x", 1, func(c *restCall) {
		answer := c.act()
		hold.pass()
		c.say(answer)
	})
	ended := g.saga(a).late(put("/plain/x", "v2"), hold)
	s.back(rollbackBody{Checkpoint: first.checkpoint}).want(t, "completed")
	lab.wantDoc("/plain/x", "v0")
	if got := ended(); got.status != http.StatusOK {
		t.Fatalf("%d %s", got.status, got.body)
	} else if v := g.checkpointOf(a, got.reply); v.Reason != "changed-meanwhile" {
		t.Errorf("%+v", v)
	}
}

// P6: an undo destroys no call that came between its look and its write, nor says that all
// is well where one came beside its write; also where nothing has entity tags.
func TestRollbackDisturbed(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	for _, path := range []string{"/docs/x", "/plain/x"} {
		begin := func(t *testing.T, script string, hold func(*gate) func(*restCall)) (s *saga, at *gate) {
			lab.write(path, "v0")
			s, at = g.saga(a), newGate(t)
			s.t = t
			step := s.do(put(path, "A"))
			lab.on(script+" "+path, 1, hold(at))
			s.begun(rollbackBody{ID: "urn:uuid:" + s.wid, Checkpoint: step.checkpoint})
			<-at.arrived
			return s, at
		}
		end := func(s *saga, effect, stands string) {
			s.t.Helper()
			doc := s.finished("urn:uuid:" + s.wid)
			doc.want(s.t, "escalated", "changed-since")
			if doc.Effect != effect {
				s.t.Errorf("the effect is %q, want %q", doc.Effect, effect)
			}
			lab.wantDoc(path, stands)
		}
		t.Run("late look "+path, func(t *testing.T) {
			s, at := begin(t, "GET", func(at *gate) func(*restCall) {
				return func(c *restCall) {
					answer := c.act()
					at.pass()
					c.say(answer)
				}
			})
			g.saga(a).do(put(path, "B"))
			at.open()
			end(s, "", "B")
		})
		t.Run("late write "+path, func(t *testing.T) {
			s, at := begin(t, "PUT", restWaits)
			g.saga(a).do(put(path, "B"))
			at.open()
			if path == "/docs/x" { // If-Match keeps it from being written
				end(s, "", "B")
				return
			}
			end(s, "unknown", "v0")
		})
		t.Run("call under way "+path, func(t *testing.T) {
			lab.write(path, "v0")
			s, hold := g.saga(a), newGate(t)
			s.t = t
			step := s.do(put(path, "A"))
			lab.on("PUT "+path, 1, restWaits(hold))
			ended := g.saga(a).late(put(path, "B"), hold)
			s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "escalated", "changed-since")
			lab.wantDoc(path, "A")
			ended()
			lab.wantDoc(path, "B")
		})
		t.Run("refused call "+path, func(t *testing.T) {
			s, at := begin(t, "GET", func(at *gate) func(*restCall) {
				return func(c *restCall) {
					answer := c.act()
					at.pass()
					c.say(answer)
				}
			})
			lab.on("PUT "+path, 1, restSays(http.StatusForbidden, ""))
			g.saga(a).try(put(path, "B"))
			at.open()
			s.finished("urn:uuid:"+s.wid).want(t, "completed")
			lab.wantDoc(path, "v0")
		})
	}
}
