package caddymodule

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbacks"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/plan"
)

// Rollbacks are told of by the latest configuration; one without an identity tells nothing.
func TestRollbackLedgerOfTheLatestConfiguration(t *testing.T) {
	r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: uuid.NewString(), Workflow: uuid.NewString(), Scope: plan.Single}
	mute := started(t, t.TempDir(), "").held.rollbackLedger(time.Hour)
	if _, err := mute.Started(t.Context(), r, nil); !errors.Is(err, rollbacks.ErrNoIdentity) {
		t.Errorf("without an identity: %v", err)
	}
	dir := t.TempDir()
	e := started(t, dir, withIdentity(filepath.Join(dir, "identity"), "")).held
	ledger := e.rollbackLedger(time.Hour)
	told, err := ledger.Started(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.store.Commit(t.Context(), told.Writes()...)
	if err := told.Done(err); err != nil {
		t.Fatal(err)
	}
	nodes, err := ledger.Nodes(t.Context(), r.Workflow, "")
	if err != nil || len(nodes) != 1 || nodes[0].ID != told.ID() || nodes[0].Kind != plan.Event || nodes[0].By != e.latestWay().witness.Identity() {
		t.Errorf("%+v %v", nodes, err)
	}
	entry, err := e.latestWay().evidence.Log().Lookup(t.Context(), r.Workflow, told.ID())
	if err != nil || entry.KeepUntil.Before(time.Now().Add(50*time.Minute)) {
		t.Errorf("kept until %v, %v", entry.KeepUntil, err)
	}
}
