package e2e

import (
	"net/http"
	"testing"
)

// retried are the actions of a gateway that runs calls in doubt again.
const retried = `
	action charge {
		match path /charges
		on_unknown retry
		compensate POST /refunds {
			json charge {request.json./id}
		}
	}
	action doc {
		match path /docs/* /plain/*
		on_unknown retry
		restore
	}`

// retried makes a call twice under one id: the first time its upstream does it and answers 504.
func (s *saga) retried(lab *restLab, r request, second func(*restCall)) (first, last sagaStep) {
	s.t.Helper()
	r.id = "one-" + s.wid
	pattern := r.method + " " + r.path
	if r.method == "" {
		pattern = "POST " + r.path
	}
	lab.on(pattern, 1, restDoes(http.StatusGatewayTimeout, ""))
	lab.on(pattern, 1, second)
	r = s.calling(r)
	step := func() sagaStep {
		got := s.g.call(r)
		return sagaStep{got.header.Get("Execution-Checkpoint"), got}
	}
	first, last = step(), step()
	if first.checkpoint == "" || last.checkpoint == "" || first.checkpoint == last.checkpoint {
		s.t.Fatalf("%d %v, then %d %v", first.status, first.header, last.status, last.header)
	}
	return first, last
}

const oneCharge = `{"id":"ch_1","amount":7}`

// P1: the attempts of one execution are one call, and are undone once, in whatever way
// and however often it is asked for.
func TestRollbackOfARetriedCall(t *testing.T) {
	a := newAgent(t, "a")
	for name, ask := range map[string]func(s *saga, first, last string){
		"the whole workflow": func(s *saga, first, _ string) {
			s.back(rollbackBody{Checkpoint: first, Scope: "full_workflow"}).want(s.t, "completed")
		},
		"the first": func(s *saga, first, _ string) {
			s.back(rollbackBody{Checkpoint: first}).want(s.t, "completed")
		},
		"the last": func(s *saga, _, last string) {
			s.back(rollbackBody{Checkpoint: last}).want(s.t, "completed")
		},
		"the last, then the first": func(s *saga, first, last string) {
			s.back(rollbackBody{Checkpoint: last}).want(s.t, "completed")
			s.back(rollbackBody{Checkpoint: first}).want(s.t, "completed")
		},
		"both at once": func(s *saga, first, last string) {
			s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: last})
			s.begun(rollbackBody{ID: rollbackID(2), Checkpoint: first})
			s.finished(rollbackID(1)).want(s.t, "completed")
			s.finished(rollbackID(2)).want(s.t, "completed")
		},
		"the first, then the last": func(s *saga, first, last string) {
			s.back(rollbackBody{Checkpoint: first}).want(s.t, "completed")
			s.back(rollbackBody{Checkpoint: last}).want(s.t, "completed")
		},
	} {
		t.Run(name, func(t *testing.T) {
			lab, g := launchLab(t, retried, a)
			defer stop(t)
			s := g.saga(a)
			s.t = t
			// The upstream knows the call again.
			first, last := s.retried(lab, request{path: "/charges", body: oneCharge}, restSays(http.StatusOK, oneCharge))
			if last.status != http.StatusOK {
				t.Fatalf("%d %s", last.status, last.body)
			}
			lab.on("POST /refunds", 10, restDoes(http.StatusOK, ""))
			ask(s, first.checkpoint, last.checkpoint)
			lab.wantEffects("charged ch_1", "refunded ch_1")
			lab.arrived("POST /refunds", 1)
		})
	}
}

// P6: a refusal says nothing of an attempt before it.
func TestRollbackOfARefusedRetry(t *testing.T) {
	a := newAgent(t, "a")
	for _, of := range []string{"first", "last"} {
		t.Run(of, func(t *testing.T) {
			lab, g := launchLab(t, retried, a)
			defer stop(t)
			s := g.saga(a)
			s.t = t
			first, last := s.retried(lab, request{path: "/charges", body: oneCharge}, restSays(http.StatusBadRequest, `{"error":"charged already"}`))
			id := map[string]string{"first": first.checkpoint, "last": last.checkpoint}[of]
			s.back(rollbackBody{Checkpoint: id}).want(t, "completed")
			lab.wantEffects("charged ch_1", "refunded ch_1")
		})
	}
}

// What stood there before the first attempt is put back, whichever of them is named.
func TestRollbackOfARetriedChange(t *testing.T) {
	a := newAgent(t, "a")
	for _, of := range []string{"first", "last", "full_workflow"} {
		t.Run(of, func(t *testing.T) {
			lab, g := launchLab(t, retried, a)
			defer stop(t)
			lab.write("/docs/x", "v0")
			s := g.saga(a)
			s.t = t
			first, last := s.retried(lab, put("/docs/x", "v1"), restSays(http.StatusOK, "v1"))
			b := rollbackBody{Checkpoint: first.checkpoint}
			switch of {
			case "last":
				b.Checkpoint = last.checkpoint
			case "full_workflow":
				b.Scope = of
			}
			s.back(b).want(t, "completed")
			lab.wantDoc("/docs/x", "v0")
			lab.arrived("PUT /docs/x", 3)
		})
	}
}

// P6: what another call has written between the attempts is not undone with the last one.
func TestRollbackOfARetryAfterAnother(t *testing.T) {
	a := newAgent(t, "a")
	for name, c := range map[string]struct {
		first, again  func(*restCall)
		between       string
		doubts        int // further attempts that are lost
		status, after string
	}{
		"applied, and known again":   {restDoes(504, ""), restSays(200, "A"), "B", 0, "escalated", "B"},
		"not applied":                {restSays(504, ""), (*restCall).usual, "B", 0, "escalated", "A"},
		"applied in the second":      {restSays(504, ""), restSays(200, "A"), "B", 1, "escalated", "A"},
		"nobody, not applied":        {restSays(504, ""), (*restCall).usual, "", 0, "completed", "v0"},
		"nobody, applied":            {restDoes(504, ""), restSays(200, "A"), "", 0, "completed", "v0"},
		"the same by somebody else":  {restDoes(504, ""), restSays(200, "A"), "A", 0, "completed", "v0"},
		"what was there once before": {restSays(504, ""), (*restCall).usual, "v0", 0, "completed", "v0"},
	} {
		t.Run(name, func(t *testing.T) {
			lab, g := launchLab(t, retried, a)
			defer stop(t)
			lab.write("/plain/x", "v0")
			s := g.saga(a)
			s.t = t
			r := put("/plain/x", "A")
			r.id = "one-" + s.wid
			r = s.calling(r)
			lab.on("PUT /plain/x", 1, c.first)
			g.call(r)
			if c.between != "" {
				g.saga(a).do(put("/plain/x", c.between))
			}
			for range c.doubts {
				lab.on("PUT /plain/x", 1, restDoes(504, ""))
				g.call(r)
			}
			lab.on("PUT /plain/x", 1, c.again)
			got := g.call(r)
			if got.status != http.StatusOK {
				t.Fatalf("%d %s", got.status, got.body)
			}
			step := sagaStep{got.header.Get("Execution-Checkpoint"), got}
			if c.status == "escalated" {
				s.wantDisturbed(lab, step, "/plain/x", c.after)
				return
			}
			s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, c.status)
			lab.wantDoc("/plain/x", c.after)
		})
	}
}
