package caddymodule

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// The latest configuration records rollbacks; one without an identity records none.
func TestRollbackLedgerOfTheLatestConfiguration(t *testing.T) {
	r := &rollback.Rollback{ID: uuid.NewString(), Checkpoint: uuid.NewString(), Workflow: uuid.NewString(), Scope: rollback.Single}
	mute := started(t, t.TempDir(), "").held.rollbackLedger(time.Hour)
	if _, err := mute.Started(t.Context(), r, nil); err == nil || !strings.Contains(err.Error(), "without `identity`") {
		t.Errorf("without an identity: %v", err)
	}
	dir := t.TempDir()
	e := started(t, dir, withIdentity(filepath.Join(dir, "identity"), "")).held
	ledger := e.rollbackLedger(time.Hour)
	started, err := ledger.Started(t.Context(), r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := started.Commit(t.Context(), e.calls.Store); err != nil {
		t.Fatal(err)
	}
	view, err := ledger.Graph(t.Context(), rollback.Query{Workflow: r.Workflow})
	if err != nil || view.Graph.Len() != 1 {
		t.Fatal(err)
	}
	if n := view.Graph.At(0); n.ID != started.ID || n.IsTask() || n.IsCheckpoint() || n.By != e.latestPolicy().Events.Identity() {
		t.Errorf("%+v", n)
	}
	entry, err := e.latestPolicy().Evidence.Log().Lookup(t.Context(), r.Workflow, started.ID)
	if err != nil || entry.KeepUntil.Before(time.Now().Add(50*time.Minute)) {
		t.Errorf("kept until %v, %v", entry.KeepUntil, err)
	}
}
