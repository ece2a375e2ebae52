package rollback

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Basic Rollback": all stands in the token, and the answer has the result's token.
func TestATDRollback(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	next := s.Do(harness.Charge(2), root.Checkpoint)
	ext := new(ect.ExtBuilder).Text(ect.MemberReason, "wrong order").Bool(ect.MemberCascade, true)
	asked := harness.With(a.Issue(ect.Claims{
		Workflow: s.Wid, Action: "rollback_request", Vocabulary: ect.ATD, Parents: []string{root.Checkpoint}, Ext: ext,
	}), harness.Request{Path: "/.well-known/atd/rollback", Body: "{}"})
	first := g.Call(asked)
	s.WantResult(first, "atd:rollback_result", ect.MemberStatus, "completed")
	if again := g.Call(asked); again.Status != http.StatusOK {
		t.Errorf("P5: %d %s", again.Status, again.Body)
	}
	lab.WantCharge(root.Id(t), "refunded")
	lab.WantCharge(next.Id(t), "refunded")
	lab.Arrived("POST /refunds", 2)
}

// AERR "Rollback Protocol": the request names the error that caused it.
func TestAERRRollback(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	root := s.Do(harness.Charge(1))
	g.SettledView(a, s.Wid, 3)
	cause := a.Issue(ect.Claims{Workflow: s.Wid, Action: "error", Vocabulary: ect.AERR, Parents: []string{root.Checkpoint}, Ext: new(ect.ExtBuilder).
		Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, "").
		Text(ect.MemberDescription, "it went wrong")})
	if got := g.Call(harness.With(cause, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status >= 300 {
		t.Fatalf("%d %s", got.Status, got.Body)
	}
	body := `{"rollback_id":"` + harness.RollbackID(1) + `","checkpoint_id":"` + root.Checkpoint + `","cascade":true,"reason":"it went wrong","urgency":"high"}`
	got := g.Call(harness.With(a.Issue(ect.Claims{
		Workflow: s.Wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: []string{cause.ID()},
	}), harness.Request{Path: "/aerr/rollback", Body: body}))
	s.WantResult(got, "aerr:rollback_complete", ect.MemberStatus, "completed")
	lab.WantCharge(root.Id(t), "refunded")

	// The audit trail begins with the error (cascade 4.4.2).
	var start string
	harness.Eventually(t, "the start stands in the ledger", func() bool {
		v := s.View()
		for _, n := range v.Nodes {
			if n.Event == "rollback_start" {
				start = n.JTI
			}
		}
		return start != ""
	})
	if v := s.View(); !v.Follows(start, cause.ID()) {
		t.Errorf("cascade 4.4.1: the start does not follow from the error: %+v", v.Edges)
	}
}

// Cascade Figure 10 and C-6.1-a: the draft does not say what its <rollback-ect> is, so that
// every token that it lets an agent derive asks, if it is bound to the target: in par, which
// has the checkpoint, its action or its error, in the members of Figure 11, or by inp_hash.
func TestCascadeFigure10Tokens(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	for name, c := range map[string]struct {
		action string
		// of makes the token's claims of the call and of the body.
		of func(s *harness.Saga, call *ect.Token, step harness.SagaStep, body string) ect.Claims
	}{
		"a start like Figure 11": {"rollback_start", func(s *harness.Saga, call *ect.Token, step harness.SagaStep, _ string) ect.Claims {
			g.SettledView(a, s.Wid, 3)
			failed := a.Issue(ect.Claims{Workflow: s.Wid, Action: "error", Parents: []string{call.ID()}})
			if got := g.Call(harness.With(failed, harness.Request{Path: "/.well-known/cascade/errors", Reader: harness.Nothing{}})); got.Status >= 300 {
				t.Fatalf("an error in the words of cascade alone: %d %s", got.Status, got.Body)
			}
			return ect.Claims{Parents: []string{failed.ID()}, Ext: new(ect.ExtBuilder).
				Text(ect.MemberRollbackID, harness.RollbackID(1)).Text(ect.MemberCheckpointID, step.Checkpoint).
				Text(ect.MemberScope, "sub_dag").Text(ect.MemberReason, "Upstream cascading failure")}
		}},
		"a start with the checkpoint": {"rollback_start", func(_ *harness.Saga, _ *ect.Token, step harness.SagaStep, _ string) ect.Claims {
			return ect.Claims{Parents: []string{step.Checkpoint}}
		}},
		"a request with the checkpoint": {"rollback_request", func(_ *harness.Saga, _ *ect.Token, step harness.SagaStep, _ string) ect.Claims {
			return ect.Claims{Parents: []string{step.Checkpoint}}
		}},
		"a request with the action": {"rollback_request", func(_ *harness.Saga, call *ect.Token, _ harness.SagaStep, _ string) ect.Claims {
			return ect.Claims{Parents: []string{call.ID()}}
		}},
		"a start with the action's node": {"rollback_start", func(s *harness.Saga, call *ect.Token, step harness.SagaStep, _ string) ect.Claims {
			for _, n := range g.SettledView(a, s.Wid, 3).Nodes {
				if n.JTI != call.ID() && n.JTI != step.Checkpoint {
					return ect.Claims{Parents: []string{n.JTI}}
				}
			}
			t.Fatal("the workflow has no node of the action")
			return ect.Claims{}
		}},
		"a start with the hash of the body": {"rollback_start", func(_ *harness.Saga, _ *ect.Token, _ harness.SagaStep, body string) ect.Claims {
			return ect.Claims{Input: ect.Sum([]byte(body))}
		}},
		"a request with the hash of the body": {"rollback_request", func(_ *harness.Saga, _ *ect.Token, _ harness.SagaStep, body string) ect.Claims {
			return ect.Claims{Input: ect.Sum([]byte(body))}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := g.Saga(a)
			call := a.Issue(ect.Claims{Workflow: s.Wid})
			got := g.Call(harness.With(call, harness.Charge(1)))
			step := harness.SagaStep{Checkpoint: got.Header.Get("Execution-Checkpoint"), Reply: got}
			id := "urn:uuid:" + uuid.NewString()
			if strings.Contains(name, "Figure 11") {
				id = harness.RollbackID(1)
			}
			body := fmt.Sprintf(`{"rollback_id": %q, "checkpoint_id": %q, "phase": "execute"}`, id, step.Checkpoint)
			claims := c.of(s, call, step, body)
			claims.Workflow, claims.Action = s.Wid, c.action
			asked := harness.With(a.Issue(claims), harness.Request{Path: "/.well-known/cascade/rollback", Body: body})
			for range 2 { // P5: the same request is the same rollback
				harness.Document[harness.RollbackDoc](t, g.Call(asked)).Want(t, "completed")
			}
			lab.WantCharge(step.Id(t), "refunded")
		})
	}
	lab.Arrived("POST /refunds", 7)
}

// C-6.1-a: what asks is bound to its target, so that a token that somebody has got hold of
// undoes nothing else, and that of an ordinary call undoes nothing at all.
func TestCascadeFigure10TokenUndoesNothingElse(t *testing.T) {
	a, b := harness.NewAgent(t, "a"), harness.NewAgent(t, "b")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a, b)
	s := g.Saga(a)
	one, call := s.Do(harness.Charge(1)), a.Issue(ect.Claims{Workflow: s.Wid})
	g.Call(harness.With(call, harness.Charge(2)))
	three := s.Do(harness.Charge(3), one.Checkpoint)
	g.SettledView(a, s.Wid, 9)
	body := func(more string) string {
		return fmt.Sprintf(`{"rollback_id": %q, "checkpoint_id": %q, "phase": "execute"%s}`, harness.RollbackID(1), one.Checkpoint, more)
	}
	ask := func(by *harness.Agent, action, more string, c ect.Claims) harness.Reply {
		c.Workflow, c.Action = s.Wid, action
		return g.Call(harness.With(by.Issue(c), harness.Request{Path: "/.well-known/cascade/rollback", Body: body(more)}))
	}
	for _, action := range []string{"rollback_start", "rollback_request"} {
		for what, c := range map[string]struct {
			reason, more string
			claims       ect.Claims
		}{
			"bound to nothing":      {"par", "", ect.Claims{}},
			"another checkpoint":    {"par", "", ect.Claims{Parents: []string{three.Checkpoint}}},
			"another action":        {"par", "", ect.Claims{Parents: []string{call.ID()}}},
			"another body":          {"inp_hash", "", ect.Claims{Input: ect.Sum([]byte("another"))}},
			"a whole workflow":      {"ext", `, "scope": "full_workflow"`, ect.Claims{Parents: []string{one.Checkpoint}}},
			"another scope":         {"ext", `, "scope": "sub_dag"`, ect.Claims{Parents: []string{one.Checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberScope, "single")}},
			"another reason":        {"ext", `, "reason": "b"`, ect.Claims{Parents: []string{one.Checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "a")}},
			"cascade of no boolean": {"ext", "", ect.Claims{Parents: []string{one.Checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberCascade, "true")}},
		} {
			t.Run(action+" "+what, func(t *testing.T) { ask(a, action, c.more, c.claims).RefusedFor(t, 403, c.reason) })
		}
		// A checkpoint that follows from the target names the target no more than a stranger may.
		ask(b, action, "", ect.Claims{Parents: []string{one.Checkpoint}}).Problem(t, 403, "not-in-workflow")
	}
	for _, action := range []string{"call", "error", "rollback_complete", "compensate"} {
		ext := new(ect.ExtBuilder).Text(ect.MemberStatus, "completed").Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "unknown").
			Text(ect.MemberCheckpointID, one.Checkpoint)
		ask(a, action, "", ect.Claims{Parents: []string{one.Checkpoint}, Ext: ext}).RefusedFor(t, 403, "exec_act")
	}
	lab.Arrived("POST /refunds", 0)

	// The gateway's own rollback_start, which participants can read, asks for nothing; nor does
	// a token that has asked once.
	first := s.Asking(harness.RollbackBody{ID: harness.RollbackID(2), Checkpoint: three.Checkpoint})
	done := harness.Document[harness.RollbackDoc](t, g.Call(first))
	done.Want(t, "completed")
	entry := harness.Document[struct{ Token string }](t, g.Get(a, "ledger/entries?jti="+done.Tokens.Start+"&wid="+s.Wid))
	for raw, want := range map[string]int{entry.Token: http.StatusUnauthorized, first.Header[ect.FieldName]: http.StatusForbidden} {
		got := g.Call(harness.Request{Path: "/.well-known/cascade/rollback", Body: body(""), Header: harness.Headers{ect.FieldName: raw}})
		if got.Status != want { // the gateway's is known, and nobody's
			t.Errorf("%d, want %d: %s", got.Status, want, got.Body)
		}
	}
	lab.Arrived("POST /refunds", 1)
	lab.WantCharge(one.Id(t), "open")
}
