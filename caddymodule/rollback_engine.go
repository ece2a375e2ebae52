package caddymodule

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/rollbackapi"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// undone are the rollbacks of an engine, from the first configuration on that has an
// identity: what cannot be told is not undone. They go on over reloads.
type undone struct {
	mu   sync.Mutex // held while they are opened
	open atomic.Pointer[rollback.Coordinator]
	keep time.Duration // how long a finished one is kept; set before open
	// limit bounds who asks, over all configurations.
	limit rollbackapi.Limit
	book  rollbackBook
	// trials are the undos that are tried again.
	trials undoTrials
}

// coordinator carries them out; nil before there is one.
func (u *undone) coordinator() *rollback.Coordinator { return u.open.Load() }

// openRollbacks makes the coordinator, unless there is one. Nothing runs yet.
func (e *engine) openRollbacks(keep time.Duration) error {
	u := &e.rollbacks
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.open.Load() != nil {
		return nil
	}
	u.keep = keep
	c, err := rollback.Open(rollback.Options{
		Store: e.store, Sealer: e.ring, Guard: e.guard, Vault: e.vault, Desk: e.escalations.desk,
		Ledger: &observedLedger{Ledger: e.rollbackLedger(keep), e: e},
		Undoer: undo.New(undo.Options{Guard: e.guard, Vault: e.vault, Sender: newUndoSender(e), Keep: keep}),
		Keep:   keep, Logger: slog.New(zapslog.NewHandler(e.logger.Named("rollback").Core())),
	})
	if err != nil {
		return fmt.Errorf("agent_guard: rollback: %w", err)
	}
	if err := c.Load(context.Background()); err != nil { // before any call comes
		return fmt.Errorf("agent_guard: rollback: %w", err)
	}
	u.open.Store(c)
	return nil
}

// rollbackRetain is how long finished rollbacks are kept: never shorter than the keys of
// their calls, or a late duplicate could run once more (P1).
func (a *App) rollbackRetain() time.Duration {
	keep := time.Duration(a.rollbackOptions().Retain)
	a.guards.mu.Lock()
	defer a.guards.mu.Unlock()
	for _, h := range a.guards.all {
		for _, action := range h.actions {
			keep = max(keep, time.Duration(action.RetainKey))
		}
	}
	return keep
}

// startRollbacks goes on with what an earlier life has not finished. It comes once the
// configuration has started, since undos go by its routes.
func (e *engine) startRollbacks(ctx context.Context) {
	c := e.rollbacks.coordinator()
	if c == nil {
		return
	}
	if err := c.Start(ctx); err != nil {
		// New ones and the others are none the worse; the next start goes on.
		e.logger.Error("rollbacks that are not finished cannot be taken up again", zap.Error(err))
	}
	e.rollbacks.book.find(ctx, c)
}

// stopRollbacks begins no new ones and waits for the steps that are under way until ctx
// ends. What is left goes on in the next life.
func (e *engine) stopRollbacks(ctx context.Context) {
	c := e.rollbacks.coordinator()
	if c == nil {
		return
	}
	if err := c.Stop(ctx); err != nil {
		e.logger.Warn("rollbacks are not finished; the next start goes on", zap.Error(err))
	}
}

// rollbackGrace is how long rollbacks may take to come to a stop when the store closes.
const rollbackGrace = 10 * time.Second

// endRollbacks is stopRollbacks for a store that closes.
func (e *engine) endRollbacks() {
	ctx, cancel := context.WithTimeout(context.Background(), rollbackGrace)
	defer cancel()
	e.stopRollbacks(ctx)
}

// resealRollbacks seals anew what older keys have sealed of rollbacks.
func (e *engine) resealRollbacks(ctx context.Context) error {
	c := e.rollbacks.coordinator()
	if c == nil {
		return nil
	}
	_, err := c.Reseal(ctx)
	return err
}
