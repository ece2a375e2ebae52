package rollback

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// Cascade 4.1.1 and 4.1.3: a sub-DAG is undone in reverse topological order; what does not
// follow from the checkpoint stays.
func TestCascade411Order(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	lab.Write("/docs/x", `{"n":1}`)
	s := g.Saga(a)
	before := s.Do(harness.Charge(1))
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	middle := s.Do(harness.Charge(2), root.Checkpoint)
	leaf := s.Do(harness.Put("/docs/y", `{"n":2}`), middle.Checkpoint)
	last := s.Do(harness.Charge(3), leaf.Checkpoint)
	s.Back(harness.RollbackBody{Checkpoint: root.Checkpoint, Scope: "sub_dag"}).Want(t, "completed")
	lab.WantEffects("charged ch_1", "changed /docs/x", "charged ch_2", "created /docs/y", "charged ch_3",
		"refunded "+last.Id(t), "deleted /docs/y", "refunded "+middle.Id(t), "changed /docs/x")
	lab.WantDoc("/docs/x", `{"n":1}`)
	lab.WantCharge(before.Id(t), "open")
}

// Scope single, the default: consequences stay, where the request says so. Else completed ones
// keep it from beginning (ATD, "Partial Rollback and Blast Radius Containment").
func TestCascade413Single(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	next := s.Do(harness.Charge(2), root.Checkpoint)
	beside := s.Do(harness.Charge(3))
	dependedOn := func(got harness.Reply) {
		t.Helper()
		doc := got.Terminal(t, http.StatusConflict, "depended-on")
		if len(doc.Dependants) == 0 || !strings.Contains(doc.Detail, "cascade true") || !strings.Contains(doc.Detail, "keep_dependants true") {
			t.Errorf("%s", got.Body)
		}
		for _, id := range doc.Dependants {
			if v := s.View(); !v.Follows(id, next.Checkpoint) && !v.Follows(next.Checkpoint, id) {
				t.Errorf("%s is no dependant: %s", id, got.Body)
			}
		}
	}
	dependedOn(s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint}))
	dependedOn(s.Ask(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Scope: "single"}))
	lab.Arrived("POST /refunds", 0)
	s.Back(harness.RollbackBody{Checkpoint: beside.Checkpoint}).Want(t, "completed") // nothing depends on it
	asked := harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: root.Checkpoint, Keep: true}
	for range 2 {
		if doc := s.Back(asked); doc.Status != "completed" || len(doc.Dependants) == 0 {
			t.Errorf("%+v", doc)
		}
	}
	lab.WantCharge(root.Id(t), "refunded")
	lab.WantCharge(next.Id(t), "open")
	// The same id asks for the same: to keep dependants is a part of it.
	asked.Keep = false
	s.Ask(asked).Terminal(t, http.StatusUnprocessableEntity, "rollback-mismatch")
	// `cascade` asks for the rest too; what is undone stays undone.
	s.Back(harness.RollbackBody{Checkpoint: root.Checkpoint, Cascade: true}).Want(t, "completed")
	lab.WantCharge(next.Id(t), "refunded")
	lab.Arrived("POST /refunds", 3)
}

// The older drafts have no word for it: the token says that dependants are kept, on every path.
// The body must not say otherwise than the token.
func TestDependantsInOlderDialects(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	ask := func(v ect.Vocabulary, path, body string, keep *bool, parents ...string) harness.Reply {
		ext := new(ect.ExtBuilder).Text(ect.MemberReason, "wrong order").Bool(ect.MemberCascade, false)
		if keep != nil {
			ext.Bool(rollback.MemberKeepDependants, *keep)
		}
		return g.Call(harness.With(a.Issue(ect.Claims{Workflow: s.Wid, Action: "rollback_request", Vocabulary: v, Parents: parents, Ext: ext}),
			harness.Request{Path: path, Body: body}))
	}
	yes, no := true, false
	for n, c := range []struct {
		vocabulary ect.Vocabulary
		path       string
	}{{ect.Cascade, "/.well-known/cascade/rollback"}, {ect.ATD, "/.well-known/atd/rollback"}, {ect.AERR, "/aerr/rollback"}} {
		root := s.Do(harness.Charge(1))
		next := s.Do(harness.Charge(2), root.Checkpoint)
		from, body := root.Checkpoint, ""
		switch c.vocabulary {
		case ect.ATD:
			body = "{}"
		case ect.AERR:
			cause := a.Issue(ect.Claims{Workflow: s.Wid, Action: "error", Vocabulary: ect.AERR, Parents: []string{root.Checkpoint}, Ext: new(ect.ExtBuilder).
				Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, root.Checkpoint)})
			if got := g.Call(harness.With(cause, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status >= 300 {
				t.Fatalf("%d %s", got.Status, got.Body)
			}
			from = cause.ID()
		}
		say := func(n int, more string) string {
			if body != "" {
				return body
			}
			return fmt.Sprintf(`{"rollback_id": %q, "checkpoint_id": %q%s}`, harness.RollbackID(n), root.Checkpoint, more)
		}
		ask(c.vocabulary, c.path, say(10*n+1, ""), nil, from).Terminal(t, http.StatusConflict, "depended-on")
		ask(c.vocabulary, c.path, say(10*n+2, ""), &no, from).Terminal(t, http.StatusConflict, "depended-on")
		if body == "" {
			ask(c.vocabulary, c.path, say(10*n+3, `, "keep_dependants": true`), &no, from).RefusedFor(t, http.StatusForbidden, "ext")
			ask(c.vocabulary, c.path, say(10*n+4, `, "keep_dependants": "yes"`), nil, from).Problem(t, http.StatusBadRequest, "parameter-invalid")
		}
		lab.WantCharge(root.Id(t), "open")
		if got := ask(c.vocabulary, c.path, say(10*n+5, ""), &yes, from); got.Status != http.StatusOK {
			t.Errorf("%s: %d %s", c.path, got.Status, got.Body)
		}
		lab.WantCharge(root.Id(t), "refunded")
		lab.WantCharge(next.Id(t), "open")
	}
}

// A barrier stands between levels: what comes before is not undone while what follows from
// it is being undone.
func TestCascade411Barrier(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	s.Do(harness.Charge(2), root.Checkpoint)
	hold := harness.NewGate(t)
	lab.On("POST /refunds", 1, harness.RestWaits(hold))
	s.Begun(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: root.Checkpoint, Cascade: true})
	harness.Wait(t, hold.Arrived, "the first refund")
	lab.WantCharge(root.Id(t), "open")
	lab.Arrived("POST /refunds", 1)
	hold.Open()
	s.Finished(harness.RollbackID(1)).Want(t, "completed")
	lab.WantCharge(root.Id(t), "refunded")
}

// Cascade 4.2.1: an irreversible action is escalated and recorded, never skipped, and the
// others are undone.
func TestCascade421Irreversible(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchParts(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	mail := s.Do(harness.Request{Path: "/mail"}, root.Checkpoint)
	doc := s.Back(harness.RollbackBody{Checkpoint: mail.Checkpoint})
	doc.Want(t, "escalated", "irreversible")
	if len(doc.Escalations) == 0 {
		t.Errorf("%+v", doc)
	}
	lab.Arrived("POST /mail", 1)
	doc = s.Back(harness.RollbackBody{Checkpoint: root.Checkpoint, Cascade: true})
	if doc.Status == "completed" {
		t.Errorf("P6: %+v", doc)
	}
}

// Facts 7.4, empty and hanging: the undo of a call that never ran succeeds and blocks the
// late call. This is cancellation, not rollback (architecture brief).
func TestRollbackOfACallThatNeverRan(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	lab.Down()
	r := s.Calling(harness.Charge(1))
	refused := g.Call(r)
	checkpoint := refused.Header.Get("Execution-Checkpoint")
	if refused.Status != http.StatusBadGateway || checkpoint == "" {
		t.Fatalf("%d %v %s", refused.Status, refused.Header, refused.Body)
	}
	doc := s.Back(harness.RollbackBody{Checkpoint: checkpoint})
	doc.Want(t, "completed")
	lab.Up()
	g.Call(r).Terminal(t, http.StatusConflict, "rolled-back")
	lab.WantEffects()
}

// A late duplicate of what was undone is refused, also under another token.
func TestRollbackRefusesLateDuplicates(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	r := s.Calling(harness.Charge(1))
	r.Id = "order-7"
	first := g.Call(r)
	s.Back(harness.RollbackBody{Checkpoint: first.Header.Get("Execution-Checkpoint")}).Want(t, "completed")
	g.Call(r).Terminal(t, http.StatusConflict, "rolled-back")
	again := s.Calling(harness.Charge(1))
	again.Id = "order-7"
	g.Call(again).Terminal(t, http.StatusConflict, "rolled-back")
	lab.WantEffects("charged ch_1", "refunded ch_1")
}

// Undo traffic passes open breakers.
func TestRollbackPassesAnOpenBreaker(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	lab.Write("/docs/x", `{"n":1}`)
	s := g.Saga(a)
	root := s.Do(harness.Put("/docs/x", `{"n":2}`))
	s.Do(harness.Charge(1), root.Checkpoint)
	harness.Force(t, lab.Addr, breaker.ForcedOpen)
	t.Cleanup(func() { harness.Force(t, lab.Addr, breaker.ForcedClosed) })
	s.Try(harness.Charge(2)).Problem(t, http.StatusServiceUnavailable, "circuit-open")
	s.Back(harness.RollbackBody{Checkpoint: root.Checkpoint, Cascade: true}).Want(t, "completed")
	lab.WantDoc("/docs/x", `{"n":1}`)
	lab.WantCharge("ch_1", "refunded")
}

// What a call has left is read also where the breaker has opened meanwhile: else a call
// that has run could not be undone.
func TestRollbackOfACallDuringWhichTheBreakerOpened(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	lab.Write("/docs/x", `{"n":1}`)
	s := g.Saga(a)
	hold := harness.NewGate(t)
	lab.On("PUT /docs/x", 1, harness.RestWaits(hold))
	late := g.Begin(s.Calling(harness.Put("/docs/x", `{"n":2}`)))
	harness.Wait(t, hold.Arrived, "the call")
	harness.Force(t, lab.Addr, breaker.ForcedOpen)
	t.Cleanup(func() { harness.Force(t, lab.Addr, breaker.ForcedClosed) })
	hold.Open()
	got := late.Answer()
	s.Back(harness.RollbackBody{Checkpoint: got.Header.Get("Execution-Checkpoint")}).Want(t, "completed")
	lab.WantDoc("/docs/x", `{"n":1}`)
}
