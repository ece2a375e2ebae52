package e2e

import (
	"net/http"
	"testing"
)

// DESIGN "Checkpoints and rollback", restore: what stood there is put back, whatever the
// call did to it.
func TestRollbackRestores(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	for _, place := range []string{"/docs/", "/plain/"} {
		for name, c := range map[string]struct {
			before string
			call   request
			during string
		}{
			"changed": {`{"peer":"old"}`, request{method: "PUT", body: `{"peer":"new"}`}, `{"peer":"new"}`},
			"created": {"", request{method: "PUT", body: `{"peer":"new"}`}, `{"peer":"new"}`},
			"patched": {`{"as":1,"peer":"old"}`, request{method: "PATCH", body: `{"peer":"new"}`}, `{"as":1,"peer":"new"}`},
			"deleted": {`{"peer":"old"}`, request{method: "DELETE"}, ""},
		} {
			t.Run(place+name, func(t *testing.T) {
				path := place + name
				lab.write(path, c.before)
				c.call.path = path
				s := g.saga(a)
				s.t = t
				step := s.do(c.call)
				lab.wantDoc(path, c.during)
				s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
				lab.wantDoc(path, c.before)
			})
		}
	}
}

// What somebody else has changed since is not overwritten: a person decides.
func TestRollbackChangedSince(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	for _, path := range []string{"/docs/x", "/plain/x"} {
		lab.write(path, `{"n":1}`)
		s := g.saga(a)
		step := s.do(put(path, `{"n":2}`))
		lab.write(path, `{"n":3}`)
		doc := s.back(rollbackBody{Checkpoint: step.checkpoint})
		doc.want(t, "escalated", "changed-since")
		lab.wantDoc(path, `{"n":3}`)
	}
}

// Changed between the look and the restoring request: the condition of the request fails.
func TestRollbackChangedMeanwhile(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	step := s.do(put("/docs/x", `{"n":2}`))
	lab.on("PUT /docs/x", 1, func(c *restCall) {
		lab.write("/docs/x", `{"n":3}`)
		c.usual()
	})
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "escalated", "changed-since")
	lab.wantDoc("/docs/x", `{"n":3}`)
	if got := lab.all("PUT /docs/x", ""); len(got) != 2 || got[1].header.Get("If-Match") != restTag(`{"n":2}`) {
		t.Errorf("the restoring request came with %v", got)
	}
}

// `on_changed overwrite` is explicit.
func TestRollbackOverwrites(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, "action doc {\n match path /docs/*\n restore {\n on_changed overwrite\n }\n }", a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	step := s.do(put("/docs/x", `{"n":2}`))
	lab.write("/docs/x", `{"n":3}`)
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
	lab.wantDoc("/docs/x", `{"n":1}`)
}

// A pre-image that cannot be had: nothing is forwarded, and the key is free.
func TestRollbackNeedsAPreImage(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.on("GET /docs/x", 1, restSays(http.StatusInternalServerError, ""))
	s := g.saga(a)
	if got := s.try(put("/docs/x", `{"n":2}`)); got.status < 400 {
		t.Errorf("%d %s", got.status, got.body)
	}
	lab.arrived("PUT /docs/x", 0)
	s.do(put("/docs/x", `{"n":2}`))
	lab.arrived("PUT /docs/x", 1)
}
