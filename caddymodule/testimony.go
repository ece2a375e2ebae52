package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/ect/ledger"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// archive is the engine's ledger, from the first configuration on that has an identity.
// It stays open with the engine: a reload that takes the identity away tells nothing
// more, and what waits is still moved into the tree.
type archive struct {
	mu         sync.Mutex  // held while it is opened, and while its keys change; guards identities
	identities []*Identity // of the configurations that hold it, the latest last
	open       atomic.Pointer[evidence.Evidence]
	retain     atomic.Int64 // nanoseconds, as the latest configuration says
	stop       context.CancelFunc
	ended      chan struct{}
	// unsealed: it could not be sealed anew, because no configuration held the engine.
	unsealed atomic.Bool
}

// testimony is how one configuration tells of calls, and whom it believes.
type testimony struct {
	constraints *constraints // what the engine's askers want of breakers

	evidence *evidence.Evidence
	witness  *evidence.Witness
	verifier *ect.Verifier // nil without trust
	itself   *ect.Verifier // of the gateway's own tokens
	// ledgerFirst: tokens stand in the ledger before anybody relies on them (level L3).
	ledgerFirst bool
	rollback    string // where a rollback is asked for
}

// testify opens the ledger for a configuration.
func (e *engine) testify(ctx context.Context, i *Identity, t *Trust, logger *slog.Logger) (_ *testimony, err error) {
	told, err := e.tell(ctx, i, logger)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	defer func() {
		if err != nil {
			e.leaveArchive(i)
		}
	}()
	witness, err := told.Witness(i.Name, i.spelling, time.Duration(i.Life))
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	way := &testimony{constraints: &e.constraints, evidence: told, witness: witness, rollback: i.rollbackURI()}
	itself, err := witness.Source()
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	way.itself, err = ect.NewVerifier(ect.Policy{
		Audience: witness.Names(), Sources: []ect.Source{itself}, Algorithms: ect.Algorithms(), AllowPartial: true,
	})
	if err != nil {
		return nil, fmt.Errorf("agent_guard: identity: %w", err)
	}
	if t == nil {
		return way, nil
	}
	// What the gateway has told itself comes back as a parent.
	sources := append([]ect.Source{itself}, t.sources...)
	own := []string{i.Algorithm}
	for _, k := range told.Ring().List() { // a key that was given may be for another
		own = append(own, k.Algorithm.String())
	}
	if way.verifier, err = t.verifier(i.Name, witness.Names()[1:], own, sources...); err != nil {
		return nil, fmt.Errorf("agent_guard: trust: %w", err)
	}
	if t.minLevel() == ect.L1 {
		told.AcceptUnsigned()
	}
	way.ledgerFirst = t.minLevel() == ect.L3
	return way, nil
}

// tell returns the open ledger, opening it for the first configuration with an identity.
// A later one brings its keys.
func (e *engine) tell(ctx context.Context, i *Identity, logger *slog.Logger) (*evidence.Evidence, error) {
	a := &e.archive
	a.mu.Lock()
	defer a.mu.Unlock()
	if told := a.open.Load(); told != nil {
		ring, err := i.loadRing(false, logger)
		if err != nil {
			return nil, err
		}
		if err := i.named(ctx, told, ring, logger); err != nil {
			return nil, err
		}
		told.Ring().Reload(ring)
		a.join(i)
		return told, nil
	}
	begun, err := evidence.Begun(ctx, e.store)
	if err != nil {
		return nil, err
	}
	ring, err := i.loadRing(!begun, logger)
	if err != nil {
		return nil, err
	}
	told, err := evidence.Open(ctx, evidence.Options{
		Store: e.store, Sealer: e.ring, Node: e.guard.Node(), Ring: ring, HeadFile: i.KeyFile + ".head", Logger: logger,
	})
	if err != nil {
		return nil, e.altered(err, i)
	}
	if err := i.named(ctx, told, ring, logger); err != nil {
		_ = told.Close(ctx) // nothing waits yet
		return nil, err
	}
	e.tellDeaths(ctx, told, i)
	e.logger.Info("ledger open", zap.String("log", told.Log().Origin()), zap.String("key", told.HeadKey()),
		zap.Int64("entries", told.Log().Head().Size))
	a.open.Store(told)
	a.join(i)
	var pruning context.Context
	pruning, a.stop = context.WithCancel(context.Background())
	a.ended = make(chan struct{})
	go e.keepPruned(pruning, told)
	return told, nil
}

// report tells how the ledger is; nil where there is none.
func (a *archive) report() *metrics.LedgerReport {
	told := a.open.Load()
	if told == nil {
		return nil
	}
	s := told.Log().Stats()
	return &metrics.LedgerReport{
		Entries: s.Size, Backlog: s.Backlog.Entries, Age: s.Backlog.Age, Unsigned: s.Refused, Retries: s.Retries,
	}
}

// altered says what to do about a ledger that was altered.
func (e *engine) altered(err error, i *Identity) error {
	if !errors.Is(err, ledger.ErrTampered) {
		return err
	}
	return fmt.Errorf("%w: %s holds a ledger that is not as it was written, or an older copy of it; "+
		"if you have put a backup back, move %s away, the newest head that was seen: what it covers beyond the backup is lost; "+
		"else keep the store for examination, and start without `identity`, or with another store", err, e.path, i.KeyFile+".head")
}

// closeArchive ends the ledger. It is called once nobody uses the engine any more.
func (e *engine) closeArchive() {
	a := &e.archive
	told := a.open.Load()
	if told == nil {
		return
	}
	a.stop()
	<-a.ended
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	if !e.healthy() {
		cancel() // nothing can be moved any more
	}
	if err := told.Close(ctx); err != nil {
		e.logger.Warn("not all of the evidence has its place in the ledger yet; the next start goes on", zap.Error(err))
	}
}

const (
	// closeGrace is how long the sequencer may take to finish when the store closes.
	closeGrace = 10 * time.Second
	// pruneEvery is how often old entries are pruned.
	pruneEvery = time.Hour
	// headEvery is how often the newest head is kept beside the store.
	headEvery = 10 * time.Second
)

func (e *engine) keepPruned(ctx context.Context, told *evidence.Evidence) {
	defer close(e.archive.ended)
	tick, heads := time.NewTicker(pruneEvery), time.NewTicker(headEvery)
	defer tick.Stop()
	defer heads.Stop()
	failed := false // to keep the head, and that was told
	for {
		select {
		case <-heads.C:
			err := told.KeepHead()
			if err != nil && !failed {
				e.logger.Warn("the head of the ledger cannot be kept beside the store", zap.Error(err))
			}
			failed = err != nil
			continue
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		n, err := told.Prune(ctx, time.Duration(e.archive.retain.Load()))
		switch {
		case err != nil && ctx.Err() == nil:
			e.logger.Warn("the ledger could not be pruned", zap.Error(err))
		case n > 0:
			e.logger.Info("the ledger was pruned", zap.Int("entries", n))
		}
	}
}

// tellDeaths tells of the executions that an earlier life of the gateway has left in
// doubt: it died before it could. What was told already is not told again. What cannot be
// told, such as while the disk is full, is told by a later life: it must not keep this one
// from answering.
func (e *engine) tellDeaths(ctx context.Context, told *evidence.Evidence, i *Identity) {
	ctx, cancel := context.WithTimeout(ctx, deathsTime)
	defer cancel()
	if err := e.tellEachDeath(ctx, told, i); err != nil {
		e.logger.Error("the ledger cannot be told of all executions that the last process has left in doubt; the next start goes on",
			zap.Error(err))
	}
}

// deathsTime is how long a start may take to tell of deaths.
const deathsTime = 30 * time.Second

func (e *engine) tellEachDeath(ctx context.Context, told *evidence.Evidence, i *Identity) error {
	witness, err := told.Witness(i.Name, i.spelling, time.Duration(i.Life))
	if err != nil {
		return err
	}
	filter := guard.Filter{States: []guard.State{guard.StateInDoubt}}
	for after := ""; ; {
		page, err := e.guard.List(ctx, filter, after, guard.MaxPage)
		if err != nil {
			return err
		}
		for n := range page.Executions {
			found := &page.Executions[n]
			if found.Record == nil || found.Record.Checkpoint == "" {
				continue
			}
			if err := told.TellDeath(ctx, witness, found.Key, found.Record); err != nil {
				return err
			}
		}
		if after = page.Next; after == "" {
			return nil
		}
	}
}

// settledBy makes the evidence of how a doubt about a recorded execution was settled,
// for the commit of that decision; nil where there is none.
func (t *testimony) settledBy(ctx context.Context, e *engine, key guard.Key, r *guard.Record, applied bool, by string) *evidence.Telling {
	if t == nil || r.Checkpoint == "" {
		return nil
	}
	now, drafts, err := t.settlement(ctx, e, key, r, applied, by)
	if err == nil {
		var told *evidence.Telling
		if told, err = t.evidence.Tell(now.Add(r.KeepResult), nil, drafts...); err == nil {
			return told
		}
	}
	e.logger.Error("the ledger cannot be told how a doubt was settled", zap.Stringer("key", key), zap.Error(err))
	return nil
}

// settlement drafts the node that tells how a doubt was settled.
func (t *testimony) settlement(ctx context.Context, e *engine, key guard.Key, r *guard.Record, applied bool, by string) (time.Time, []*ect.Draft, error) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return now, nil, err
	}
	came := evidence.Outcome{Checkpoint: r.Checkpoint, Verdict: guard.Released, Cause: r.Cause, By: by}
	if applied {
		came.Verdict = guard.Completed
	}
	call := t.evidence.CallOf(ctx, key, r)
	drafts, err := t.witness.Outcome(now, &call, &came)
	return now, drafts, err
}

// resealArchive seals anew what the ledger holds under older keys. It comes before the
// guard notes which keys are still needed.
func (e *engine) resealArchive(ctx context.Context) error {
	told := e.archive.open.Load()
	if told == nil {
		begun, err := evidence.Begun(ctx, e.store)
		if err == nil && begun {
			err = errSealedLedger
		}
		return err
	}
	return told.Reseal(ctx)
}

var errSealedLedger = errors.New("the store holds a ledger, which is sealed anew only while `identity` is configured; " +
	"until then the older keys are needed")

// testimony is how the configuration tells of calls; nil without an identity.
func (a *App) testimony() (*testimony, error) {
	if a.Identity == nil {
		return nil, nil
	}
	if way := a.way.Load(); way != nil {
		return way, nil
	}
	if _, err := a.engine(); err != nil {
		return nil, err
	}
	return a.way.Load(), nil
}

// keysFresh is for how long others may keep the gateway's public keys, in seconds.
const keysFresh = "max-age=300"

// serveKeys answers GET /.well-known/cascade/jwks with the keys that the gateway's
// tokens can be verified with. They are public.
func (a *App) serveKeys(w http.ResponseWriter, r *http.Request) {
	if !allowRead(w, r) {
		return
	}
	way, err := a.testimony()
	if err != nil {
		var p *problem.Problem
		errors.As(storeClosed(err), &p)
		p.Write(w)
		return
	}
	if way == nil {
		http.Error(w, "This gateway has no identity: it issues no tokens.", http.StatusNotFound)
		return
	}
	set, err := way.evidence.Ring().PublicSet(time.Now(), way.witness.Identity(), way.witness.Former()...)
	if err != nil {
		a.logger.Error("the public keys cannot be shown", zap.Error(err))
		http.Error(w, "The keys cannot be shown.", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/jwk-set+json")
	w.Header().Set("Cache-Control", "public, "+keysFresh)
	_, _ = w.Write(set) // only the client's leaving can fail here
}
