package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// ATD "Basic Rollback": all stands in the token, and the answer has the result's token.
func TestATDRollback(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	next := s.do(charge(2), root.checkpoint)
	ext := new(ect.ExtBuilder).Text(ect.MemberReason, "wrong order").Bool(ect.MemberCascade, true)
	asked := with(a.issue(ect.Claims{
		Workflow: s.wid, Action: "rollback_request", Vocabulary: ect.ATD, Parents: []string{root.checkpoint}, Ext: ext,
	}), request{path: "/.well-known/atd/rollback", body: "{}"})
	first := g.call(asked)
	s.wantResult(first, "atd:rollback_result", ect.MemberStatus, "completed")
	if again := g.call(asked); again.status != http.StatusOK {
		t.Errorf("P5: %d %s", again.status, again.body)
	}
	lab.wantCharge(root.id(t), "refunded")
	lab.wantCharge(next.id(t), "refunded")
	lab.arrived("POST /refunds", 2)
}

// AERR "Rollback Protocol": the request names the error that caused it.
func TestAERRRollback(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	root := s.do(charge(1))
	g.settledView(a, s.wid, 3)
	cause := a.issue(ect.Claims{Workflow: s.wid, Action: "error", Vocabulary: ect.AERR, Parents: []string{root.checkpoint}, Ext: new(ect.ExtBuilder).
		Text(ect.MemberSeverity, "critical").Text(ect.MemberErrorType, "action_failed").Text(ect.MemberCheckpointID, "").
		Text(ect.MemberDescription, "it went wrong")})
	if got := g.call(with(cause, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status >= 300 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	body := `{"rollback_id":"` + rollbackID(1) + `","checkpoint_id":"` + root.checkpoint + `","cascade":true,"reason":"it went wrong","urgency":"high"}`
	got := g.call(with(a.issue(ect.Claims{
		Workflow: s.wid, Action: "rollback_request", Vocabulary: ect.AERR, Parents: []string{cause.ID()},
	}), request{path: "/aerr/rollback", body: body}))
	s.wantResult(got, "aerr:rollback_complete", ect.MemberStatus, "completed")
	lab.wantCharge(root.id(t), "refunded")

	// The audit trail begins with the error (cascade 4.4.2).
	var start string
	eventually(t, "the start stands in the ledger", func() bool {
		v := s.view()
		for _, n := range v.Nodes {
			if n.Event == "rollback_start" {
				start = n.JTI
			}
		}
		return start != ""
	})
	if v := s.view(); !v.follows(start, cause.ID()) {
		t.Errorf("cascade 4.4.1: the start does not follow from the error: %+v", v.Edges)
	}
}

// wantResult checks the token with which an older draft is answered.
func (s *saga) wantResult(got reply, action string, member ect.Member, value string) {
	s.t.Helper()
	doc := document[struct {
		Action string `json:"exec_act"`
		ECT    string
	}](s.t, got)
	token, err := ect.ParseInsecure(doc.ECT)
	if err != nil || doc.Action != action || token.Action() != action {
		s.t.Fatalf("%v: %s", err, got.body)
	}
	if text, _ := token.Ext().Text(member); text != value {
		s.t.Errorf("%s is %q, want %q", member, text, value)
	}
}

// Cascade Figure 10 and C-6.1-a: the draft does not say what its <rollback-ect> is, so that
// every token that it lets an agent derive asks, if it is bound to the target: in par, which
// has the checkpoint, its action or its error, in the members of Figure 11, or by inp_hash.
func TestCascadeFigure10Tokens(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	for name, c := range map[string]struct {
		action string
		// of makes the token's claims of the call and of the body.
		of func(s *saga, call *ect.Token, step sagaStep, body string) ect.Claims
	}{
		"a start like Figure 11": {"rollback_start", func(s *saga, call *ect.Token, step sagaStep, _ string) ect.Claims {
			g.settledView(a, s.wid, 3)
			failed := a.issue(ect.Claims{Workflow: s.wid, Action: "error", Parents: []string{call.ID()}})
			if got := g.call(with(failed, request{path: "/.well-known/cascade/errors", reader: nothing{}})); got.status >= 300 {
				t.Fatalf("an error in the words of cascade alone: %d %s", got.status, got.body)
			}
			return ect.Claims{Parents: []string{failed.ID()}, Ext: new(ect.ExtBuilder).
				Text(ect.MemberRollbackID, rollbackID(1)).Text(ect.MemberCheckpointID, step.checkpoint).
				Text(ect.MemberScope, "sub_dag").Text(ect.MemberReason, "Upstream cascading failure")}
		}},
		"a start with the checkpoint": {"rollback_start", func(_ *saga, _ *ect.Token, step sagaStep, _ string) ect.Claims {
			return ect.Claims{Parents: []string{step.checkpoint}}
		}},
		"a request with the checkpoint": {"rollback_request", func(_ *saga, _ *ect.Token, step sagaStep, _ string) ect.Claims {
			return ect.Claims{Parents: []string{step.checkpoint}}
		}},
		"a request with the action": {"rollback_request", func(_ *saga, call *ect.Token, _ sagaStep, _ string) ect.Claims {
			return ect.Claims{Parents: []string{call.ID()}}
		}},
		"a start with the action's node": {"rollback_start", func(s *saga, call *ect.Token, step sagaStep, _ string) ect.Claims {
			for _, n := range g.settledView(a, s.wid, 3).Nodes {
				if n.JTI != call.ID() && n.JTI != step.checkpoint {
					return ect.Claims{Parents: []string{n.JTI}}
				}
			}
			t.Fatal("the workflow has no node of the action")
			return ect.Claims{}
		}},
		"a start with the hash of the body": {"rollback_start", func(_ *saga, _ *ect.Token, _ sagaStep, body string) ect.Claims {
			return ect.Claims{Input: ect.Sum([]byte(body))}
		}},
		"a request with the hash of the body": {"rollback_request", func(_ *saga, _ *ect.Token, _ sagaStep, body string) ect.Claims {
			return ect.Claims{Input: ect.Sum([]byte(body))}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := g.saga(a)
			call := a.issue(ect.Claims{Workflow: s.wid})
			got := g.call(with(call, charge(1)))
			step := sagaStep{got.header.Get("Execution-Checkpoint"), got}
			id := "urn:uuid:" + uuid.NewString()
			if strings.Contains(name, "Figure 11") {
				id = rollbackID(1)
			}
			body := fmt.Sprintf(`{"rollback_id": %q, "checkpoint_id": %q, "phase": "execute"}`, id, step.checkpoint)
			claims := c.of(s, call, step, body)
			claims.Workflow, claims.Action = s.wid, c.action
			asked := with(a.issue(claims), request{path: "/.well-known/cascade/rollback", body: body})
			for range 2 { // P5: the same request is the same rollback
				document[rollbackDoc](t, g.call(asked)).want(t, "completed")
			}
			lab.wantCharge(step.id(t), "refunded")
		})
	}
	lab.arrived("POST /refunds", 7)
}

// C-6.1-a: what asks is bound to its target, so that a token that somebody has got hold of
// undoes nothing else, and that of an ordinary call undoes nothing at all.
func TestCascadeFigure10TokenUndoesNothingElse(t *testing.T) {
	a, b := newAgent(t, "a"), newAgent(t, "b")
	lab, g := launchLab(t, sagaActions, a, b)
	s := g.saga(a)
	one, call := s.do(charge(1)), a.issue(ect.Claims{Workflow: s.wid})
	g.call(with(call, charge(2)))
	three := s.do(charge(3), one.checkpoint)
	g.settledView(a, s.wid, 9)
	body := func(more string) string {
		return fmt.Sprintf(`{"rollback_id": %q, "checkpoint_id": %q, "phase": "execute"%s}`, rollbackID(1), one.checkpoint, more)
	}
	ask := func(by *agent, action, more string, c ect.Claims) reply {
		c.Workflow, c.Action = s.wid, action
		return g.call(with(by.issue(c), request{path: "/.well-known/cascade/rollback", body: body(more)}))
	}
	for _, action := range []string{"rollback_start", "rollback_request"} {
		for what, c := range map[string]struct {
			reason, more string
			claims       ect.Claims
		}{
			"bound to nothing":      {"par", "", ect.Claims{}},
			"another checkpoint":    {"par", "", ect.Claims{Parents: []string{three.checkpoint}}},
			"another action":        {"par", "", ect.Claims{Parents: []string{call.ID()}}},
			"another body":          {"inp_hash", "", ect.Claims{Input: ect.Sum([]byte("another"))}},
			"a whole workflow":      {"ext", `, "scope": "full_workflow"`, ect.Claims{Parents: []string{one.checkpoint}}},
			"another scope":         {"ext", `, "scope": "sub_dag"`, ect.Claims{Parents: []string{one.checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberScope, "single")}},
			"another reason":        {"ext", `, "reason": "b"`, ect.Claims{Parents: []string{one.checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberReason, "a")}},
			"cascade of no boolean": {"ext", "", ect.Claims{Parents: []string{one.checkpoint}, Ext: new(ect.ExtBuilder).Text(ect.MemberCascade, "true")}},
		} {
			t.Run(action+" "+what, func(t *testing.T) { ask(a, action, c.more, c.claims).refusedFor(t, 403, c.reason) })
		}
		// A checkpoint that follows from the target names the target no more than a stranger may.
		ask(b, action, "", ect.Claims{Parents: []string{one.checkpoint}}).problem(t, 403, "not-in-workflow")
	}
	for _, action := range []string{"call", "error", "rollback_complete", "compensate"} {
		ext := new(ect.ExtBuilder).Text(ect.MemberStatus, "completed").Text(ect.MemberSeverity, "error").Text(ect.MemberErrorType, "unknown").
			Text(ect.MemberCheckpointID, one.checkpoint)
		ask(a, action, "", ect.Claims{Parents: []string{one.checkpoint}, Ext: ext}).refusedFor(t, 403, "exec_act")
	}
	lab.arrived("POST /refunds", 0)

	// The gateway's own rollback_start, which participants can read, asks for nothing; nor does
	// a token that has asked once.
	first := s.asking(rollbackBody{ID: rollbackID(2), Checkpoint: three.checkpoint})
	done := document[rollbackDoc](t, g.call(first))
	done.want(t, "completed")
	entry := document[struct{ Token string }](t, g.get(a, "ledger/entries?jti="+done.Tokens.Start+"&wid="+s.wid))
	for raw, want := range map[string]int{entry.Token: http.StatusUnauthorized, first.header[ect.FieldName]: http.StatusForbidden} {
		got := g.call(request{path: "/.well-known/cascade/rollback", body: body(""), header: headers{ect.FieldName: raw}})
		if got.status != want { // the gateway's is known, and nobody's
			t.Errorf("%d, want %d: %s", got.status, want, got.body)
		}
	}
	lab.arrived("POST /refunds", 1)
	lab.wantCharge(one.id(t), "open")
}
