package evidence_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// P5: however often and from how many sides at once an agent is asked for the same, it is
// asked with one token, which the ledger has; for another rollback with another.
func TestP5RequestIsOneToken(t *testing.T) {
	b := newBench(t)
	workflow, checkpoint := uuid.NewString(), uuid.NewString()
	ask := func(rollback string) string {
		raw, err := b.witness.Request(t.Context(), &evidence.Request{
			Rollback: rollback, Checkpoint: checkpoint, Workflow: workflow, Audience: "https://agent.example.com",
			Reason: "the wrong list",
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
	id, _ := token.Ext().Text(ect.MemberRollbackID)
	reason, _ := token.Ext().Text(ect.MemberReason)
	if token.Event() != ect.EventRollbackRequest || len(token.Lacks()) > 0 || !cascade || token.Workflow() != workflow ||
		token.ID() != b.told.RequestID("r1", checkpoint, token.IssuedAt()) || token.Expires().Sub(token.IssuedAt()) != ect.MaxAge ||
		id != "urn:uuid:r1" || reason != "the wrong list" {
		t.Errorf("%s", token.Payload())
	}
}

// fast is a store whose clock is ahead.
type fast struct {
	store.Store
	by atomic.Int64 // a time.Duration
}

func (f *fast) Now(ctx context.Context) (time.Time, error) {
	now, err := f.Store.Now(ctx)
	return now.Truncate(time.Hour).Add(time.Duration(f.by.Load())), err
}

// P5: verifiers refuse a token that is older than 15 minutes, and a rollback goes on for
// hours: an agent is always asked with one that it would take, and with the same one as
// long as it would.
func TestP5RequestIsAlwaysFresh(t *testing.T) {
	b := newBench(t)
	b.close(t)
	clock := &fast{Store: b.store}
	b.store = clock
	b.open(t)
	r := &evidence.Request{Rollback: "r1", Checkpoint: uuid.NewString(), Workflow: uuid.NewString(), Audience: "https://agent.example.com"}
	seen := map[string]string{}
	for by := time.Duration(0); by < 2*time.Hour; by += time.Minute {
		clock.by.Store(int64(by))
		raw, err := b.witness.Request(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		token, err := ect.ParseInsecure(raw)
		if err != nil {
			t.Fatal(err)
		}
		now, _ := clock.Now(t.Context())
		if age := now.Sub(token.IssuedAt()); age > ect.MaxAge-ect.Skew || !now.Before(token.Expires()) {
			t.Errorf("after %v it is %v old", by, age)
		}
		if before, known := seen[token.ID()]; known && before != raw {
			t.Error("two tokens have one id")
		}
		seen[token.ID()] = raw
	}
	if len(seen) != 12 {
		t.Errorf("%d tokens in two hours", len(seen))
	}
}
