package evidence_test

import (
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

// P5: however often and from how many sides at once an agent is asked for the same, it is
// asked with one token, which the ledger has; for another rollback with another.
func TestP5RequestIsOneToken(t *testing.T) {
	b := newBench(t)
	workflow, checkpoint := uuid.NewString(), uuid.NewString()
	ask := func(rollback string) string {
		raw, err := b.witness.Request(t.Context(), &evidence.Request{
			Rollback: rollback, Checkpoint: checkpoint, Workflow: workflow, Audience: "https://agent.example.com",
		})
		if err != nil {
			t.Error(err)
		}
		return raw
	}
	var all sync.WaitGroup
	got := make([]string, 8)
	for i := range got {
		all.Go(func() { got[i] = ask("r1") })
	}
	all.Wait()
	for _, raw := range got {
		if raw == "" || raw != got[0] {
			t.Fatalf("asked with several tokens: %q", got)
		}
	}
	if ask("r2") == got[0] {
		t.Error("another rollback asks with the same token")
	}
	token, err := ect.ParseInsecure(got[0])
	if err != nil {
		t.Fatal(err)
	}
	cascade, _ := token.Ext().Bool(ect.MemberCascade)
	if token.Event() != ect.EventRollbackRequest || len(token.Lacks()) > 0 || !cascade || token.Workflow() != workflow ||
		token.ID() != b.told.RequestID("r1", checkpoint) || token.Expires().Sub(token.IssuedAt()) != ect.MaxLife {
		t.Errorf("%s", token.Payload())
	}
}
