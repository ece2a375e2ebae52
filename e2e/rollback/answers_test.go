package rollback

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/e2e/harness"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// A request made of the call's answer, by
// the guard and not by who asks.
func TestRollbackCompensates(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(7))
	other := s.Do(harness.Charge(8))
	s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint}).Want(t, "completed")
	lab.WantEffects("charged "+step.Id(t), "charged "+other.Id(t), "refunded "+step.Id(t))
	refund := lab.All("POST /refunds", "")[0]
	if refund.Body != `{"charge":"`+step.Id(t)+`"}` || refund.Header.Get("Idempotency-Key") == "" {
		t.Errorf("%+v", refund)
	}
	for _, name := range []string{"Authorization", "Execution-Context", "Cookie"} {
		if got := refund.Header.Values(name); len(got) != 0 {
			t.Errorf("%s of the requester reached the upstream: %q", name, got)
		}
	}
}

// P6: a charge of which nobody knows whether it was made, and whose refund needs its answer, is
// left to a person, and its checkpoint does not promise anything else.
func TestRollbackOfACallInDoubt(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	lab.On("POST /charges", 1, harness.RestLoses)
	got := s.Try(harness.Charge(7))
	if got.Checkpoint == "" {
		t.Fatalf("no checkpoint: %v %s", got.Header, got.Body)
	}
	lost := got.Checkpoint
	harness.Eventually(t, "the checkpoint is known", func() bool { return s.Checkpoint(lost).Status == 200 })
	if doc := harness.Document[harness.CheckpointDoc](t, s.Checkpoint(lost)); doc.Reversible || doc.Way != "compensate" {
		t.Errorf("the checkpoint says %+v", doc)
	}
	doc := s.Back(harness.RollbackBody{Checkpoint: lost})
	doc.Want(t, "escalated", "template")
	if doc.Effect != "unknown" || len(doc.Escalations) == 0 {
		t.Errorf("%+v", doc)
	}
	lab.Arrived("POST /refunds", 0)
}

// Facts 7.4, lost answer: where a status can be asked for nothing is sent again.
func TestRollbackAsksForTheStatus(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, `action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
			status GET /refunds/{response.json./id}
		}
	}`, a)
	s := g.Saga(a)
	lost, dropped := s.Do(harness.Charge(7)), s.Do(harness.Charge(8))
	lab.On("POST /refunds", 1, harness.RestLoses)
	s.Back(harness.RollbackBody{Checkpoint: lost.Checkpoint}).Want(t, "completed")
	lab.Arrived("POST /refunds", 1)
	lab.On("POST /refunds", 1, harness.RestDrops)
	doc := s.Back(harness.RollbackBody{Checkpoint: dropped.Checkpoint})
	doc.Want(t, "completed")
	lab.WantCharge(dropped.Id(t), "refunded")

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
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, `action doc {
		match path /docs/*
		restore
		compensate DELETE /docs/{request.path.1}
	}`, a)
	s := g.Saga(a)
	lab.On("GET /docs/1", 1, harness.RestSays(500, ""))
	step := s.Do(harness.Put("/docs/1", `{"n":1}`))
	if v := g.CheckpointOf(a, step.Reply); v.Way != "compensate" {
		t.Fatalf("%+v", v)
	}
	doc := s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint})
	doc.Want(t, "completed")
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
	lab.On("GET /docs/2", -1, harness.RestSays(500, ""))
	step = s.Do(harness.Put("/docs/2", `{"n":1}`))
	doc = s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint})
	if doc.Want(t, "completed"); doc.Before != "" || doc.After != "" {
		t.Errorf("%+v", doc)
	}
}

// `on_lost escalate`: where the upstream is not idempotent, nobody guesses.
func TestRollbackLostEscalates(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, `action charge {
		match path /charges
		compensate POST /refunds {
			json charge {response.json./id}
		}
		on_lost escalate
	}`, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(7))
	lab.On("POST /refunds", 1, harness.RestLoses)
	doc := s.Back(harness.RollbackBody{Checkpoint: step.Checkpoint})
	doc.Want(t, "escalated", "answer-lost")
	if doc.Effect != "unknown" || len(doc.Escalations) != 1 {
		t.Errorf("P6: %+v", doc)
	}
	lab.Arrived("POST /refunds", 1)
}

// ATD "Rollback Timeout and Escalation": what is not done after half of the ttl is
// escalated, with an error of the type timeout, and never called done (P6).
func TestRollbackTimesOut(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, "checkpoint_ttl 6s"+harness.SagaActions, a)
	s := g.Saga(a)
	step := s.Do(harness.Charge(7))
	lab.On("POST /refunds", -1, harness.RestSays(500, ""))
	doc := s.Back(harness.RollbackBody{ID: harness.RollbackID(1), Checkpoint: step.Checkpoint})
	if doc.Status == "completed" || !doc.TimedOut || doc.Effect != "unknown" || len(doc.Escalations) == 0 {
		t.Errorf("P6: %+v", doc)
	}
	harness.Eventually(t, "an error token", func() bool {
		return slices.ContainsFunc(s.View().Nodes, func(n harness.WorkflowNode) bool { return n.Event == "error" })
	})
	lab.WantCharge(step.Id(t), "open")
}

// ATD "Interaction with HITL": an escalation of level 2 is about one step. It holds nothing of the
// workflow, and says so to nobody.
func TestEscalationOfAStepHoldsNothing(t *testing.T) {
	a := harness.NewAgent(t, "a")
	lab, g := harness.LaunchLab(t, harness.SagaActions, a)
	s := g.Saga(a)
	mail := s.Do(harness.Request{Path: "/mail"})
	got := s.Ask(harness.RollbackBody{ID: "urn:uuid:" + uuid.NewString(), Checkpoint: mail.Checkpoint})
	doc := harness.Document[struct {
		Status      string
		Escalations []string
		FollowUp    []string `json:"follow_up"`
	}](t, got)
	text := strings.Join(doc.FollowUp, " ")
	if doc.Status != "escalated" || len(doc.Escalations) == 0 || !strings.Contains(text, "Escalation ") {
		t.Errorf("%s", got.Body)
	}
	s.Do(harness.Charge(8)) // in the same workflow
	lab.Arrived("POST /refunds", 0)
}
