package caddymodule

import (
	"context"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/memory"
)

// filling is a member of a store that can be full.
type filling struct {
	storeModule
	*memory.Member
	full atomic.Bool
}

func (f *filling) OpenStore(*zap.Logger) (store.Store, error) { return f, nil }

func (f *filling) Commit(ctx context.Context, batch ...store.Write) (store.Version, error) {
	if f.full.Load() {
		return 0, store.ErrFull
	}
	return f.Member.Commit(ctx, batch...)
}

// lateOwner has nothing to say of its outcome.
type lateOwner struct{}

func (lateOwner) Size() int64                          { return 0 }
func (lateOwner) Again(context.Context) []*store.Batch { return nil }

// ADR 0147: the ledger does not say of a call that it is in doubt while its outcome waits for the store: then the outcome
// could not be recorded there.
func TestDoubtIsNotRecordedWhileAnOutcomeWaits(t *testing.T) {
	dir := t.TempDir()
	app := validApp(t, dir, withIdentity(filepath.Join(dir, "identity"), ""))
	st := &filling{Member: memory.New(memory.Options{}).Join("a")}
	app.spec.opener = st
	t.Cleanup(func() { cleanUp(t, app) })
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	g, ev := app.held.calls.Executions, app.held.ledger.open.Load()
	c := recordedCall(g, "late")
	c.Workflow, c.Checkpoint, c.Action = "work", uuid.NewString(), "charge"
	e, err := g.Claim(t.Context(), c, execution.Finding{})
	if err != nil {
		t.Fatal(err)
	}
	st.full.Store(true)
	if err := e.SettleWith(t.Context(), execution.Outcome{Verdict: execution.Completed, Status: 201}, lateOwner{}); !errors.Is(err, execution.ErrUnrecorded) {
		t.Fatal(err)
	}
	st.full.Store(false)
	app.held.ledger.recordLeft() // another member has left
	if _, err := ev.Log().Lookup(t.Context(), evidence.WorkflowID(c.Workflow), ev.NodeID(c.Checkpoint)); !errors.Is(err, ledger.ErrNotFound) {
		t.Errorf("its doubt is in the ledger: %v", err)
	}
}
