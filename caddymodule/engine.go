package caddymodule

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// StoreOpener is what a module in the namespace agent_guard.stores implements.
type StoreOpener interface {
	// StorePath is the one name of what is opened: the same for the same store
	// whatever the other options say. For files it is the absolute path with
	// symbolic links resolved.
	StorePath() (string, error)
	// OpenStore opens the store. It may log to logger for as long as it is open.
	OpenStore(logger *zap.Logger) (store.Store, error)
}

// StoreAdjuster is a StoreOpener with options that may change while the store is open.
type StoreAdjuster interface {
	// AdjustStore gives such options to the open store, once for each configuration.
	AdjustStore(st store.Store)
}

// engine is an open store with the guard over it. It is shared by all
// configurations and requests that name the same store, and closed when the last
// of them is gone.
type engine struct {
	path  string
	store store.Store
	guard *guard.Guard
	vault *checkpoint.Vault
	ring  *seal.Ring

	keying    sync.Mutex    // held while the ring changes; guards configs
	configs   []*engineSpec // that hold the engine, the latest last
	resealing resealing
	archive   archive
	rollbacks undone
	circuits  *circuits.Member
	teller    circuitTeller  // of what becomes of them
	keeping   [16]sync.Mutex // for recording each of them
	running   runningCalls
	targets   targets // that guarded calls are at

	escalations escalating

	constraints constraints // what askers want of breakers

	opener   StoreOpener  // by which the store was opened
	counts   *metrics.Set // held until the engine is closed
	audience audience
	watch    watch

	logger   *zap.Logger
	drain    atomic.Int64 // nanoseconds, as the latest configuration says
	draining atomic.Bool  // nothing new begins
	exiting  sync.Once
	uncut    context.Context // of all executions; ended by cut
	cut      context.CancelFunc
	// waits ends the waits of callers who ask what becomes of executions: an exit does,
	// after its drain.
	waits    context.Context
	endWaits context.CancelFunc
}

// engineSpec says how to open an engine.
type engineSpec struct {
	opener       StoreOpener
	path         string
	key, keyFile string
	drain        time.Duration // how long an exit waits for executions
	logger       *zap.Logger
}

// enginePool is the process's pool of open engines, by path.
type enginePool struct {
	// mu is held over opening and closing too: UsagePool.Delete unlocks before it
	// destructs, so that a reload could open a directory that is still closing.
	mu   sync.Mutex
	pool *caddy.UsagePool
}

var engines = enginePool{pool: caddy.NewUsagePool()}

// acquire returns the engine of spec with one more reference. A configuration whose
// keys were not accepted yet brings them to an engine that is open already.
func (p *enginePool) acquire(spec engineSpec, accepted bool) (*engine, error) {
	e, opened, err := p.hold(spec)
	if err != nil || opened || accepted {
		return e, err
	}
	// Not under p.mu: it may wait for a rotation, and that for the store.
	if err := e.adoptKeys(context.Background(), spec); err != nil {
		_ = e.release() // closing the store logs its own errors
		return nil, fmt.Errorf("%w: %w", errKeys, err)
	}
	return e, nil
}

// hold returns the engine of spec with one more reference, and whether it had to be
// opened.
func (p *enginePool) hold(spec engineSpec) (_ *engine, opened bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	value, loaded, err := p.pool.LoadOrNew(spec.path, func() (caddy.Destructor, error) {
		return openEngine(spec)
	})
	if err != nil {
		return nil, false, err
	}
	if !loaded {
		p.warnOfOthers(spec)
	}
	return value.(*engine), !loaded, nil
}

// warnOfOthers tells of a configuration that takes another store than the one before:
// what that has recorded is unknown to it.
func (p *enginePool) warnOfOthers(spec engineSpec) {
	p.pool.Range(func(path, _ any) bool {
		if path != spec.path {
			spec.logger.Warn("another store is open as well; retries of calls that it has recorded run again where this one is used",
				zap.String("store", spec.path), zap.Any("other", path))
		}
		return true
	})
}

// release gives one reference back.
func (e *engine) release() error {
	engines.mu.Lock()
	defer engines.mu.Unlock()
	_, err := engines.pool.Delete(e.path)
	return err
}

// Destruct closes the store. It is called by the pool, once nobody uses it.
func (e *engine) Destruct() error {
	e.endRollbacks()    // while all that they need is there
	e.escalations.end() // of what these have escalated it tells as long as it can
	e.cut()
	e.circuits.Leave()
	e.teller.end()
	e.resealing.end()
	e.endWaits()
	e.stopWatch()
	e.closeArchive()
	defer releaseCounts(e.path)
	return e.store.Close()
}

func openEngine(spec engineSpec) (_ *engine, err error) {
	counts := acquireCounts(spec.path)
	defer func() {
		if err != nil {
			releaseCounts(spec.path)
		}
	}()
	if observed, ok := spec.opener.(ObservedOpener); ok {
		observed.ObserveStore(counts)
	}
	st, err := spec.opener.OpenStore(spec.logger)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: opening the store %s: %w", spec.path, err)
	}
	defer func() {
		if err != nil {
			_ = st.Close() // the first error is the one to tell
		}
	}()
	ctx := context.Background()
	ring, err := loadRing(ctx, st, spec)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errKeys, err)
	}
	g, recovered, err := guard.Open(ctx, st, ring)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: store %s: %w", spec.path, err)
	}
	if recovered != (guard.Recovery{}) {
		spec.logger.Warn("executions were open when the last process ended",
			zap.Int("in_doubt", recovered.InDoubt), zap.Int("released", recovered.Released),
			zap.Int("unrecorded", recovered.Unrecorded))
	}
	spec.logger.Info("store open", zap.String("path", spec.path))
	e := &engine{
		path: spec.path, store: st, guard: g, vault: checkpoint.New(st, ring), ring: ring,
		opener: spec.opener, counts: counts, logger: spec.logger,
	}
	counts.Recovered(recovered)
	e.startWatch(recovered)
	e.drain.Store(int64(spec.drain))
	e.uncut, e.cut = context.WithCancel(context.Background())
	e.startEscalations() // before what may escalate
	e.startCircuits(ctx)
	e.startResealing(ctx)
	e.waits, e.endWaits = context.WithCancel(context.Background())
	return e, nil
}
