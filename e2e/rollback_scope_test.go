package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
)

// Cascade 4.1.1 and 4.1.3: a sub-DAG is undone in reverse topological order; what does not
// follow from the checkpoint stays.
func TestCascade411Order(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	before := s.do(charge(1))
	root := s.do(put("/docs/x", `{"n":2}`))
	middle := s.do(charge(2), root.checkpoint)
	leaf := s.do(put("/docs/y", `{"n":2}`), middle.checkpoint)
	last := s.do(charge(3), leaf.checkpoint)
	s.back(rollbackBody{Checkpoint: root.checkpoint, Scope: "sub_dag"}).want(t, "completed")
	lab.wantEffects("charged ch_1", "changed /docs/x", "charged ch_2", "created /docs/y", "charged ch_3",
		"refunded "+last.id(t), "deleted /docs/y", "refunded "+middle.id(t), "changed /docs/x")
	lab.wantDoc("/docs/x", `{"n":1}`)
	lab.wantCharge(before.id(t), "open")
}

// Scope single, the default: consequences stay, where the request says so. Else completed ones
// keep it from beginning (ATD, "Partial Rollback and Blast Radius Containment").
func TestCascade413Single(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	next := s.do(charge(2), root.checkpoint)
	beside := s.do(charge(3))
	dependedOn := func(got reply) {
		t.Helper()
		doc := got.terminal(t, http.StatusConflict, "depended-on")
		if len(doc.Dependants) == 0 || !strings.Contains(doc.Detail, "cascade true") || !strings.Contains(doc.Detail, "keep_dependants true") {
			t.Errorf("%s", got.body)
		}
		for _, id := range doc.Dependants {
			if v := s.view(); !v.follows(id, next.checkpoint) && !v.follows(next.checkpoint, id) {
				t.Errorf("%s is no dependant: %s", id, got.body)
			}
		}
	}
	dependedOn(s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint}))
	dependedOn(s.ask(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Scope: "single"}))
	lab.arrived("POST /refunds", 0)
	s.back(rollbackBody{Checkpoint: beside.checkpoint}).want(t, "completed") // nothing depends on it
	asked := rollbackBody{ID: rollbackID(2), Checkpoint: root.checkpoint, Keep: true}
	for range 2 {
		if doc := s.back(asked); doc.Status != "completed" || len(doc.Dependants) == 0 {
			t.Errorf("%+v", doc)
		}
	}
	lab.wantCharge(root.id(t), "refunded")
	lab.wantCharge(next.id(t), "open")
	// The same id asks for the same: to keep dependants is a part of it.
	asked.Keep = false
	s.ask(asked).terminal(t, http.StatusUnprocessableEntity, "rollback-mismatch")
	// `cascade` asks for the rest too; what is undone stays undone.
	s.back(rollbackBody{Checkpoint: root.checkpoint, Cascade: true}).want(t, "completed")
	lab.wantCharge(next.id(t), "refunded")
	lab.arrived("POST /refunds", 3)
}

// The older drafts have no word for it: the token says that dependants are kept, on every path.
// The body must not say otherwise than the token.
func TestDependantsInOlderDialects(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	ask := func(v ect.Vocabulary, path, body string, keep *bool, parents ...string) reply {
		ext := new(ect.ExtBuilder).Text(ect.MemberReason, "wrong order").Bool(ect.MemberCascade, false)
		if keep != nil {
			ext.Bool(evidence.MemberKeepDependants, *keep)
		}
		return g.call(with(a.issue(ect.Claims{Workflow: s.wid, Action: "rollback_request", Vocabulary: v, Parents: parents, Ext: ext}),
			request{path: path, body: body}))
	}
	yes, no := true, false
	for n, c := range []struct {
		vocabulary ect.Vocabulary
		path       string
	}{{ect.Cascade, "/.well-known/cascade/rollback"}, {ect.ATD, "/.well-known/atd/rollback"}, {ect.AERR, "/aerr/rollback"}} {
		root := s.do(charge(1))
		next := s.do(charge(2), root.checkpoint)
		from, body := root.checkpoint, ""
		switch c.vocabulary {
		case ect.ATD:
			body = "{}"
		case ect.AERR:
			cause := a.issue(ect.Claims{Workflow: s.wid, Action: "error", Vocabulary: ect.AERR, Parents: []string{root.checkpoint}, Ext: new(ect.ExtBuilder).
				Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, root.checkpoint)})
			if got := g.call(with(cause, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status >= 300 {
				t.Fatalf("%d %s", got.status, got.body)
			}
			from = cause.ID()
		}
		say := func(n int, more string) string {
			if body != "" {
				return body
			}
			return fmt.Sprintf(`{"rollback_id": %q, "checkpoint_id": %q%s}`, rollbackID(n), root.checkpoint, more)
		}
		ask(c.vocabulary, c.path, say(10*n+1, ""), nil, from).terminal(t, http.StatusConflict, "depended-on")
		ask(c.vocabulary, c.path, say(10*n+2, ""), &no, from).terminal(t, http.StatusConflict, "depended-on")
		if body == "" {
			ask(c.vocabulary, c.path, say(10*n+3, `, "keep_dependants": true`), &no, from).refusedFor(t, http.StatusForbidden, "ext")
			ask(c.vocabulary, c.path, say(10*n+4, `, "keep_dependants": "yes"`), nil, from).problem(t, http.StatusBadRequest, "parameter-invalid")
		}
		lab.wantCharge(root.id(t), "open")
		if got := ask(c.vocabulary, c.path, say(10*n+5, ""), &yes, from); got.status != http.StatusOK {
			t.Errorf("%s: %d %s", c.path, got.status, got.body)
		}
		lab.wantCharge(root.id(t), "refunded")
		lab.wantCharge(next.id(t), "open")
	}
}

// A barrier stands between levels: what comes before is not undone while what follows from
// it is being undone.
func TestCascade411Barrier(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	s.do(charge(2), root.checkpoint)
	hold := newGate(t)
	lab.on("POST /refunds", 1, restWaits(hold))
	s.begun(rollbackBody{ID: rollbackID(1), Checkpoint: root.checkpoint, Cascade: true})
	wait(t, hold.arrived, "the first refund")
	lab.wantCharge(root.id(t), "open")
	lab.arrived("POST /refunds", 1)
	hold.open()
	s.finished(rollbackID(1)).want(t, "completed")
	lab.wantCharge(root.id(t), "refunded")
}

// Cascade 4.2.1: an irreversible action is escalated and recorded, never skipped, and the
// others are undone.
func TestCascade421Irreversible(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchParts(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	mail := s.do(request{path: "/mail"}, root.checkpoint)
	doc := s.back(rollbackBody{Checkpoint: mail.checkpoint})
	doc.want(t, "escalated", "irreversible")
	if len(doc.Escalations) == 0 {
		t.Errorf("%+v", doc)
	}
	lab.arrived("POST /mail", 1)
	doc = s.back(rollbackBody{Checkpoint: root.checkpoint, Cascade: true})
	if doc.Status == "completed" {
		t.Errorf("P6: %+v", doc)
	}
}

// Facts 7.4, empty and hanging: the undo of a call that never ran succeeds and blocks the
// late call. This is cancellation, not rollback (architecture brief).
func TestRollbackOfACallThatNeverRan(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	lab.down()
	r := s.calling(charge(1))
	refused := g.call(r)
	checkpoint := refused.header.Get("Execution-Checkpoint")
	if refused.status != http.StatusBadGateway || checkpoint == "" {
		t.Fatalf("%d %v %s", refused.status, refused.header, refused.body)
	}
	doc := s.back(rollbackBody{Checkpoint: checkpoint})
	doc.want(t, "completed")
	lab.up()
	g.call(r).terminal(t, http.StatusConflict, "rolled-back")
	lab.wantEffects()
}

// A late duplicate of what was undone is refused, also under another token.
func TestRollbackRefusesLateDuplicates(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	r := s.calling(charge(1))
	r.id = "order-7"
	first := g.call(r)
	s.back(rollbackBody{Checkpoint: first.header.Get("Execution-Checkpoint")}).want(t, "completed")
	g.call(r).terminal(t, http.StatusConflict, "rolled-back")
	again := s.calling(charge(1))
	again.id = "order-7"
	g.call(again).terminal(t, http.StatusConflict, "rolled-back")
	lab.wantEffects("charged ch_1", "refunded ch_1")
}

// Undo traffic passes open breakers.
func TestRollbackPassesAnOpenBreaker(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	root := s.do(put("/docs/x", `{"n":2}`))
	s.do(charge(1), root.checkpoint)
	force(t, lab.addr, breaker.ForcedOpen)
	t.Cleanup(func() { force(t, lab.addr, breaker.ForcedClosed) })
	s.try(charge(2)).problem(t, http.StatusServiceUnavailable, "circuit-open")
	s.back(rollbackBody{Checkpoint: root.checkpoint, Cascade: true}).want(t, "completed")
	lab.wantDoc("/docs/x", `{"n":1}`)
	lab.wantCharge("ch_1", "refunded")
}

// What a call has left is read also where the breaker has opened meanwhile: else a call
// that has run could not be undone.
func TestRollbackOfACallDuringWhichTheBreakerOpened(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	lab.write("/docs/x", `{"n":1}`)
	s := g.saga(a)
	hold := newGate(t)
	lab.on("PUT /docs/x", 1, restWaits(hold))
	late := g.begin(s.calling(put("/docs/x", `{"n":2}`)))
	wait(t, hold.arrived, "the call")
	force(t, lab.addr, breaker.ForcedOpen)
	t.Cleanup(func() { force(t, lab.addr, breaker.ForcedClosed) })
	hold.open()
	got := late.answer()
	s.back(rollbackBody{Checkpoint: got.header.Get("Execution-Checkpoint")}).want(t, "completed")
	lab.wantDoc("/docs/x", `{"n":1}`)
}
