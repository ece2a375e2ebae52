package evidence_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// A checkpoint that never gets its place, because its event is damaged, does not keep
// the gateway from starting.
func TestDeathBehindADamagedEvent(t *testing.T) {
	b := newBench(t)
	workflow := uuid.NewString()
	checkpoint, err := b.witness.Checkpoint(time.Now(), call(workflow))
	if err != nil {
		t.Fatal(err)
	}
	told, err := b.told.Tell(time.Now(), nil, checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	writes := told.Writes()
	event := writes[1].Value
	event[len(event)-1] ^= 1
	if _, err := b.store.Commit(t.Context(), writes...); err != nil {
		t.Fatal(err)
	}
	b.close(t)
	b.open(t)
	record := guard.Record{
		State: guard.StateInDoubt, Cause: guard.CauseDied, Checkpoint: checkpoint.ID(), Workflow: workflow, Action: "charge", KeepResult: time.Hour,
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := b.told.TellDeath(ctx, b.witness, guard.Key{1}, &record); err != nil {
		t.Fatal(err)
	}
	node := b.entry(t, workflow, b.told.NodeID(checkpoint.ID()))
	if outcome, _ := node.Ext().Text(evidence.MemberOutcome); outcome != guard.InDoubt.String() {
		t.Errorf("%s", node.Payload())
	}
}
