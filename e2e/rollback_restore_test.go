package e2e

import (
	"net/http"
	"sync"
	"testing"
)

// What stood there is put back, whatever the
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

// P6: the type of what stands there, and the other fields of its image, are part of it.
func TestRollbackRestoresTheType(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	for _, field := range []string{"Content-Type", "Content-Language"} {
		t.Run(field, func(t *testing.T) {
			path := "/docs/" + field
			var mu sync.Mutex
			stands := "x/old"
			lab.on("PUT "+path, -1, func(c *restCall) {
				mu.Lock()
				stands = c.header.Get(field)
				mu.Unlock()
				c.say(restAnswer{status: http.StatusNoContent})
			})
			lab.on("GET "+path, -1, func(c *restCall) {
				mu.Lock()
				defer mu.Unlock()
				c.say(restAnswer{status: http.StatusOK, header: http.Header{field: {stands}}, body: "same"})
			})
			s := g.saga(a)
			s.t = t
			step := s.do(request{method: "PUT", path: path, body: "same", header: headers{field: "x/new"}})
			s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
			if stands != "x/old" {
				t.Errorf("%s is %q", field, stands)
			}
		})
	}
}

// RFC 9110, section 9.3.4: a PUT that creates something is answered 201. Where a look says
// that nothing was there, and the answer does not say that it was made, it is not deleted.
func TestRollbackDeletesWhatWasCreated(t *testing.T) {
	a := newAgent(t, "a")
	for name, c := range map[string]struct {
		header headers
		answer int
		reason string
	}{
		"201":           {nil, http.StatusCreated, ""},
		"200":           {nil, http.StatusOK, "not-created"},
		"204":           {nil, http.StatusNoContent, "not-created"},
		"200, if none":  {headers{"If-None-Match": "*"}, http.StatusOK, ""},
		"200, if other": {headers{"If-None-Match": `"v7"`}, http.StatusOK, "not-created"},
	} {
		t.Run(name, func(t *testing.T) {
			lab, g := launchLab(t, sagaActions, a)
			defer stop(t)
			if c.header == nil && c.answer != http.StatusCreated {
				lab.write("/docs/x", "v0") // and a replica that lags
				lab.on("GET /docs/x", 1, restSays(http.StatusNotFound, ""))
			}
			lab.on("PUT /docs/x", 1, restDoes(c.answer, ""))
			s := g.saga(a)
			s.t = t
			step := s.do(request{method: "PUT", path: "/docs/x", body: "v1", header: c.header})
			if v := g.checkpointOf(a, step.reply); v.Reason != c.reason {
				t.Errorf("%+v", v)
			}
			doc := s.back(rollbackBody{Checkpoint: step.checkpoint})
			if c.reason != "" {
				doc.want(t, "escalated", "irreversible")
				lab.wantDoc("/docs/x", "v1")
				return
			}
			doc.want(t, "completed")
			lab.wantDoc("/docs/x", "")
		})
	}
}

// Of several changes of one document the last is undone first, also where none of them
// follows from another.
func TestRollbackOfSeveralChanges(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	paths := []string{"/docs/x", "/plain/y", "/docs/z"}
	s := g.saga(a)
	var step sagaStep
	for _, path := range paths {
		lab.write(path, "v0")
	}
	for _, text := range []string{"v1", "v2", "v3", "v4"} {
		for _, path := range paths {
			step = s.do(put(path, text))
		}
	}
	s.back(rollbackBody{Checkpoint: step.checkpoint, Scope: "full_workflow"}).want(t, "completed")
	for _, path := range paths {
		lab.wantDoc(path, "v0")
	}
}
