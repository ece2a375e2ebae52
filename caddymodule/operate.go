package caddymodule

import (
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/cli"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
	"github.com/agent-guard/caddy-agent-guard/guard/store/badger"
)

func init() {
	caddy.RegisterModule(AdminAPI{})
	caddycmd.RegisterCommand(cli.Command())
}

// AdminAPI adds the routes below `/agent_guard/` to Caddy's admin endpoint, by which
// operators see executions, settle what is in doubt, and look at the store. The
// command `caddy agent-guard` uses them. It has no options.
type AdminAPI struct{}

// CaddyModule returns the Caddy module information.
func (AdminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.agent_guard", New: func() caddy.Module { return new(AdminAPI) }}
}

// Routes implements caddy.AdminRouter. Which stores are open is asked with each
// request: this module is made before any app, and is never cleaned up.
func (AdminAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: admin.Prefix, Handler: admin.New(&engines)}}
}

// Paths lists the open engines.
func (p *enginePool) Paths() (all []string) {
	p.pool.Range(func(path, _ any) bool {
		all = append(all, path.(string))
		return true
	})
	return all
}

// Borrow returns the open engine at path with a reference of its own.
func (p *enginePool) Borrow(path string) (admin.Store, bool) {
	e := p.peek(path)
	return borrowed{e}, e != nil
}

// borrowed is an engine as the admin API sees it.
type borrowed struct{ e *engine }

// Path implements admin.Store.
func (b borrowed) Path() string { return b.e.path }

// Guard implements admin.Store.
func (b borrowed) Guard() *guard.Guard { return b.e.guard }

// Now implements admin.Store.
func (b borrowed) Now(ctx context.Context) (time.Time, error) { return b.e.store.Now(ctx) }

// Release implements admin.Store. A store that nobody else uses any more is closed,
// and logs by itself what goes wrong then.
func (b borrowed) Release() { _ = b.e.release() }

// Testify implements admin.Store.
func (b borrowed) Testify(ctx context.Context, key guard.Key, found *guard.Record, d guard.Resolution) ([]store.Write, func(error) error) {
	var way *testimony
	if a := b.e.audience.latest(); a != nil {
		way = a.way.Load()
	}
	told := way.settledBy(ctx, b.e, key, found, d.Applied, "operator")
	return told.Writes(), told.Done
}

// Resolved implements admin.Store.
func (b borrowed) Resolved(key guard.Key, found *guard.Record, decision guard.Resolution) {
	b.e.logger.Info("an operator has settled an execution that was in doubt",
		zap.Stringer("key", key), zap.String("guard", found.Guard), zap.String("action", found.Action),
		zap.String("cause", string(found.Cause)), zap.Bool("applied", decision.Applied),
		zap.String("operator", decision.Operator), zap.String("reason", decision.Reason))
	outcome := guard.Released
	if decision.Applied {
		outcome = guard.Completed
	}
	b.e.emit(eventResolved, map[string]any{
		"guard": found.Guard, "action": found.Action, "key": key.String(), "caller": hex.EncodeToString(found.Caller[:]),
		"outcome": outcome.String(), "by": "operator",
	})
}

// Quota implements admin.Store. It is that of the latest configuration.
func (b borrowed) Quota() *admin.Quota {
	a := b.e.audience.latest()
	if a == nil || a.Quota == (Quota{}) {
		return nil
	}
	return &admin.Quota{OpenExecutions: a.Quota.OpenExecutions, StoredBytes: a.Quota.StoredBytes}
}

// Keys implements admin.Store.
func (b borrowed) Keys(ctx context.Context) (*admin.KeyStatus, error) {
	is, err := b.e.keyStatus(ctx)
	if err != nil {
		return nil, err
	}
	status := &admin.KeyStatus{Source: is.Source, File: is.File, Keys: make([]admin.Key, 0, len(is.Keys))}
	for _, key := range is.Keys {
		status.Keys = append(status.Keys, admin.Key(key))
	}
	if pass := is.Resealing; pass != nil {
		status.Resealing = &admin.Resealing{
			Key: pass.Key, Seen: pass.Seen, Resealed: pass.Resealed, Damaged: pass.Damaged, Left: []admin.KeyLeft{},
			Started: pass.Started, Finished: pass.Finished, Done: pass.Done, Error: pass.Err,
		}
		for _, left := range pass.Left {
			status.Resealing.Left = append(status.Resealing.Left, admin.KeyLeft(left))
		}
	}
	return status, nil
}

// Ledger implements admin.Store.
func (b borrowed) Ledger() *admin.Ledger {
	told := b.e.archive.open.Load()
	if told == nil {
		return nil
	}
	return &admin.Ledger{Log: told.Log(), Key: told.HeadKey()}
}

// Rollbacks implements admin.Store.
func (b borrowed) Rollbacks() admin.Rollbacks {
	if c := b.e.rollbacks.coordinator(); c != nil {
		return c
	}
	return nil
}

// Vault implements admin.Store.
func (b borrowed) Vault() *checkpoint.Vault { return b.e.vault }

// Trial implements admin.Store.
func (b borrowed) Trial(checkpoint string) (admin.Trial, bool) {
	return b.e.rollbacks.trials.of(checkpoint)
}

// RotateKeys implements admin.Store.
func (b borrowed) RotateKeys(ctx context.Context) error {
	_, err := b.e.rotateKeys(ctx)
	if errors.Is(err, errKeyGiven) {
		return caddy.APIError{HTTPStatus: http.StatusConflict, Err: err}
	}
	return err
}

// Identity implements admin.Store.
func (b borrowed) Identity() *admin.Identity { return b.e.identityStatus() }

// RotateIdentity implements admin.Store.
func (b borrowed) RotateIdentity(stolen bool) error {
	err := b.e.rotateIdentity(stolen)
	if errors.Is(err, errKeyElsewhere) || errors.Is(err, ect.ErrBusy) {
		return caddy.APIError{HTTPStatus: http.StatusConflict, Err: err}
	}
	return err
}

// Desk implements admin.Store.
func (b borrowed) Desk() *hitl.Desk { return b.e.escalations.desk }

// Circuits implements admin.Store.
func (b borrowed) Circuits() []circuits.Circuit {
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	way := b.e.latestWay()
	all := []circuits.Circuit{}
	for _, s := range b.e.circuits.Status() {
		all = append(all, b.e.describeCircuit(ctx, way, &s))
	}
	return all
}

// SetCircuitMode implements admin.Store.
func (b borrowed) SetCircuitMode(ctx context.Context, key breaker.Key, mode breaker.Mode) (bool, error) {
	if !b.e.circuits.SetMode(key, mode) {
		return false, nil
	}
	b.e.logger.Warn("an operator has set the mode of a circuit breaker", zap.Stringer("upstream", key), zap.Stringer("mode", mode))
	return true, b.e.keepCircuit(ctx, key) // not every mode changes the state
}

// counting is what a store implements that counts what it does.
type counting interface{ Stats() badger.Stats }

// Report implements admin.Store.
func (b borrowed) Report() *admin.Report {
	st, ok := b.e.store.(counting)
	if !ok {
		return nil
	}
	s := st.Stats()
	r := &admin.Report{
		Commits: s.Commits, Batches: s.Batches, Writes: s.Writes, Conflicts: s.Conflicts,
		Bytes: s.Bytes, BodyBytes: s.BulkBytes, BodySyncs: s.BulkSyncs, Dropped: s.Dropped, Refused: s.Full,
		Dead: s.Space.Dead, Reclaimed: s.ReclaimedBytes, MaxSize: s.MaxSize, Verifying: s.Verifying,
	}
	if s.Commits > 0 {
		r.RecordsPerSync = float64(s.Batches) / float64(s.Commits)
	}
	reporter, ok := b.e.opener.(StoreReporter)
	if !ok {
		return r
	}
	r.Size = reporter.ReportStore(b.e.store).Bytes
	if disk := reporter.ReportDisk(b.e.store); disk != nil {
		r.Disk = &admin.Disk{Free: disk.Free, MinFree: s.MinFree, Takes: takes(disk.Watermark)}
	}
	return r
}

// takes says what a store still takes, in the words of the admin API.
func takes(w metrics.Watermark) string {
	switch w {
	case metrics.DiskEnough:
		return admin.TakesEverything
	case metrics.DiskLow:
		return admin.TakesOutcomes
	default:
		return admin.TakesNothing
	}
}

var (
	_ caddy.AdminRouter = AdminAPI{}
	_ admin.Stores      = (*enginePool)(nil)
	_ admin.Store       = borrowed{}
)
