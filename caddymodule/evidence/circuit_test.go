package evidence_test

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// cascade 3.2.4, Figures 4 and 5: the tokens of a breaker's changes have what the drafts
// ask, and an opening follows from the error that caused it.
func TestTokensOfCircuits(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	told := b.tell(t, call(workflow), evidence.Outcome{Verdict: guard.InDoubt, Cause: guard.CauseLost})
	failure := told[2]
	if failure.ID() != b.told.ErrorID(told[0].ID()) {
		t.Errorf("the error is %s, and was expected as %s", failure.ID(), b.told.ErrorID(told[0].ID()))
	}
	parent := failure.ID()
	for _, event := range []ect.Event{ect.EventCircuitOpen, ect.EventCircuitHalfOpen, ect.EventCircuitClose} {
		d, err := b.witness.Circuit(time.Now(), &evidence.Circuit{
			Event: event, Downstream: "spiffe://example.com/agent/b", Workflow: workflow, Parents: []string{parent},
			ErrorRate: 0.75, Window: time.Minute, Cooldown: 30 * time.Second, TotalCooldown: 90 * time.Second, Reason: "error_rate",
		})
		if err != nil {
			t.Fatal(err)
		}
		if d.Event() != event || len(d.Lacks()) > 0 || len(d.Parents()) != 1 || d.Parents()[0] != parent || d.Workflow() != workflow {
			t.Errorf("%s lacks %v", d.Payload(), d.Lacks())
		}
		if d.Action() != string(event) {
			t.Errorf("%q is not the cascade vocabulary's name", d.Action())
		}
		rate, hasRate := d.Ext().Number(ect.MemberErrorRate)
		total, hasTotal := d.Ext().Number(ect.MemberTotalCooldown)
		if closed := event == ect.EventCircuitClose; closed == hasRate || closed != hasTotal || hasRate && rate != 0.75 || hasTotal && total != 90 {
			t.Errorf("%s", d.Payload())
		}
		parent = d.ID()
	}
	rejected, err := b.witness.Circuit(time.Now(), &evidence.Circuit{
		Event: ect.EventCircuitOpen, Downstream: "10.0.0.7:9001", Workflow: workflow, Reason: "rejected", ErrorType: "circuit_open",
	})
	if err != nil {
		t.Fatal(err)
	}
	if kind, _ := rejected.Ext().Text(ect.MemberErrorType); kind != "circuit_open" {
		t.Errorf("%s", rejected.Payload())
	}
	unguarded, err := b.witness.Attempt(time.Now(), &evidence.Attempt{Downstream: "10.0.0.7:9001", Cause: "connection refused"})
	if err != nil || len(unguarded.Lacks()) > 0 || len(unguarded.Parents()) > 0 {
		t.Errorf("%v %v", err, unguarded.Lacks())
	}
	checkpoint := told[0].ID()
	rescued, err := b.witness.Attempt(time.Now(), &evidence.Attempt{
		Downstream: "10.0.0.7:9001", Cause: "connection refused", Checkpoint: checkpoint, Workflow: workflow,
		ID: b.told.AttemptID(checkpoint, "10.0.0.7:9001"),
	})
	if err != nil || len(rescued.Lacks()) > 0 || len(rescued.Parents()) != 1 || rescued.Parents()[0] != checkpoint ||
		rescued.Workflow() != workflow || rescued.ID() == failure.ID() {
		t.Errorf("%v %s", err, rescued.Payload())
	}
}
