package e2e

import (
	"net/http"
	"testing"

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
