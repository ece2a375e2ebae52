package e2e

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A request made of the call's answer, by
// the guard and not by who asks.
func TestRollbackCompensates(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	step := s.do(charge(7))
	other := s.do(charge(8))
	s.back(rollbackBody{Checkpoint: step.checkpoint}).want(t, "completed")
	lab.wantEffects("charged "+step.id(t), "charged "+other.id(t), "refunded "+step.id(t))
	refund := lab.all("POST /refunds", "")[0]
	if refund.body != `{"charge":"`+step.id(t)+`"}` || refund.header.Get("Idempotency-Key") == "" {
		t.Errorf("%+v", refund)
	}
	for _, name := range []string{"Authorization", "Execution-Context", "Cookie"} {
		if got := refund.header.Values(name); len(got) != 0 {
			t.Errorf("%s of the requester reached the upstream: %q", name, got)
		}
	}
}

// P6: a charge of which nobody knows whether it was made, and whose refund needs its answer, is
// left to a person, and its checkpoint does not promise anything else.
func TestRollbackOfACallInDoubt(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	lab.on("POST /charges", 1, restLoses)
	got := s.try(charge(7))
	if got.checkpoint == "" {
		t.Fatalf("no checkpoint: %v %s", got.header, got.body)
	}
	lost := got.checkpoint
	eventually(t, "the checkpoint is known", func() bool { return s.checkpoint(lost).status == 200 })
	if doc := document[checkpointDoc](t, s.checkpoint(lost)); doc.Reversible || doc.Way != "compensate" {
		t.Errorf("the checkpoint says %+v", doc)
	}
	doc := s.back(rollbackBody{Checkpoint: lost})
	doc.want(t, "escalated", "template")
	if doc.Effect != "unknown" || len(doc.Escalations) == 0 {
		t.Errorf("%+v", doc)
	}
	lab.arrived("POST /refunds", 0)
}

// Facts 7.4, lost answer: where a status can be asked for nothing is sent again.
func TestRollbackAsksForTheStatus(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, `action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
			status GET /refunds/{response.json./id}
		}
	}`, a)
	s := g.saga(a)
	lost, dropped := s.do(charge(7)), s.do(charge(8))
	lab.on("POST /refunds", 1, restLoses)
	s.back(rollbackBody{Checkpoint: lost.checkpoint}).want(t, "completed")
	lab.arrived("POST /refunds", 1)
	lab.on("POST /refunds", 1, restDrops)
	doc := s.back(rollbackBody{Checkpoint: dropped.checkpoint})
	doc.want(t, "completed")
	lab.wantCharge(dropped.id(t), "refunded")

	// Cascade Figure 12: what it shows before and after is the state that is hashed.
	token, err := ect.ParseInsecure(doc.ECT)
	if err != nil {
		t.Fatal(err)
	}
	before, _ := token.Ext().Text(ect.MemberStateBefore)
	after, _ := token.Ext().Text(ect.MemberStateAfter)
	if before == "" || after == "" || before == after || before != doc.Before || after != doc.After || token.OutputHash().Prefixed() != after {
		t.Errorf("%s\n%+v", token.Payload(), doc)
	}
}

// Cascade Figure 12: what is compensated because it could not be read before the call has the
// hashes of its target all the same, where that can be read when it is undone.
func TestCascadeFigure12BesideARestore(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, `action doc {
		match path /docs/*
		restore
		compensate DELETE /docs/{request.path.1}
	}`, a)
	s := g.saga(a)
	lab.on("GET /docs/1", 1, restSays(500, ""))
	step := s.do(put("/docs/1", `{"n":1}`))
	if v := g.checkpointOf(a, step.reply); v.Way != "compensate" {
		t.Fatalf("%+v", v)
	}
	doc := s.back(rollbackBody{Checkpoint: step.checkpoint})
	doc.want(t, "completed")
	token, err := ect.ParseInsecure(doc.ECT)
	if err != nil {
		t.Fatal(err)
	}
	before, _ := token.Ext().Text(ect.MemberStateBefore)
	after, _ := token.Ext().Text(ect.MemberStateAfter)
	if before == "" || after == "" || before == after || before != doc.Before || after != doc.After || token.OutputHash().Prefixed() != after {
		t.Errorf("%s\n%+v", token.Payload(), doc)
	}
	// Where it cannot be read, it is undone all the same.
	lab.on("GET /docs/2", -1, restSays(500, ""))
	step = s.do(put("/docs/2", `{"n":1}`))
	doc = s.back(rollbackBody{Checkpoint: step.checkpoint})
	if doc.want(t, "completed"); doc.Before != "" || doc.After != "" {
		t.Errorf("%+v", doc)
	}
}

// `on_lost escalate`: where the upstream is not idempotent, nobody guesses.
func TestRollbackLostEscalates(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, `action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
		}
		on_lost escalate
	}`, a)
	s := g.saga(a)
	step := s.do(charge(7))
	lab.on("POST /refunds", 1, restLoses)
	doc := s.back(rollbackBody{Checkpoint: step.checkpoint})
	doc.want(t, "escalated", "answer-lost")
	if doc.Effect != "unknown" || len(doc.Escalations) != 1 {
		t.Errorf("P6: %+v", doc)
	}
	lab.arrived("POST /refunds", 1)
}

// ATD "Rollback Timeout and Escalation": what is not done after half of the ttl is
// escalated, with an error of the type timeout, and never called done (P6).
func TestRollbackTimesOut(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, "checkpoint_ttl 12s"+sagaActions, a)
	s := g.saga(a)
	step := s.do(charge(7))
	lab.on("POST /refunds", -1, restSays(500, ""))
	doc := s.back(rollbackBody{ID: rollbackID(1), Checkpoint: step.checkpoint})
	if doc.Status == "completed" || !doc.TimedOut || doc.Effect != "unknown" || len(doc.Escalations) == 0 {
		t.Errorf("P6: %+v", doc)
	}
	eventually(t, "an error token", func() bool {
		return slices.ContainsFunc(s.view().Nodes, func(n workflowNode) bool { return n.Event == "error" })
	})
	lab.wantCharge(step.id(t), "open")
}

// ATD "Interaction with HITL": an escalation of level 2 is about one step. It holds nothing of the
// workflow, and says so to nobody.
func TestEscalationOfAStepHoldsNothing(t *testing.T) {
	a := newAgent(t, "a")
	lab, g := launchLab(t, sagaActions, a)
	s := g.saga(a)
	mail := s.do(request{path: "/mail"})
	got := s.ask(rollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: mail.checkpoint})
	doc := document[struct {
		Status      string
		Escalations []string
		FollowUp    []string `json:"follow_up"`
	}](t, got)
	text := strings.Join(doc.FollowUp, " ")
	if doc.Status != "escalated" || len(doc.Escalations) == 0 || !strings.Contains(text, "Escalation ") {
		t.Errorf("%s", got.body)
	}
	s.do(charge(8)) // in the same workflow
	lab.arrived("POST /refunds", 0)
}
