package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/cascades"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/circuits"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// engine is an open store with the guard over it. All configurations and requests that name the
// store share it; it is closed when the last of them is gone.
type engine struct {
	path        string
	store       store.Store
	executions  *execution.Guard
	checkpoints *checkpoint.Store
	ring        *seal.Ring

	keying     sync.Mutex // held while the ring changes
	resealing  resealing
	ledger     ledgerHandle
	nodes      nodes
	rollbacks  rollbackService
	circuits   *proxy.Member
	breakers   *circuits.Keeper // their states in the store
	cascades   *cascades.Watch
	boundaries *boundaryWatch
	followers  api.Followers
	recorder   circuitRecorder // records changes of breakers
	forCalls   guard.Engine    // the engine in the form that package guard needs
	giveBack   func()          // release, for calls
	places     places          // upstreams of undos

	escalations escalating
	plans       *plan.Store // of workflows

	opener        StoreOpener  // opened the store
	counts        *storeCounts // held until the engine is closed
	activeConfigs activeConfigs
	watch         watch
	warned        sync.Map // names of guards, by warnAnonymous

	logger   *zap.Logger
	drain    atomic.Int64 // nanoseconds, from the latest configuration
	draining atomic.Bool  // no new executions
	exiting  sync.Once
	uncut    context.Context // parent of all executions; cancelled by cut
	cut      context.CancelFunc
	lost     atomic.Bool     // another gateway has removed this one from the store
	waits    context.Context // ends the waiting of callers for outcomes; cancelled after the drain of an exit
	endWaits context.CancelFunc
}

// engineSpec says how to open an engine.
type engineSpec struct {
	opener       StoreOpener
	path         string
	pooled       any // path, as the pool takes it: a conversion allocates, with each call
	key, keyFile string
	drain        time.Duration // how long an exit waits for executions
	ledger       bool          // the configuration has an identity, and opens one
	logger       *zap.Logger
}

// enginePool is the process's pool of open engines, by path.
type enginePool struct {
	// mu is held over opening and closing too: UsagePool.Delete unlocks before it
	// destructs, so that a reload could open a directory that is still closing.
	mu   sync.Mutex
	pool *caddy.UsagePool

	fencing sync.Mutex
	fenced  map[string][]execution.Fenced // outcomes that the last engine of a path could not record
}

// fence keeps what the engine of a path, which ends, could not record.
func (p *enginePool) fence(path string, more []execution.Fenced) {
	p.fencing.Lock()
	defer p.fencing.Unlock()
	if len(more) > 0 {
		p.fenced[path] = append(p.fenced[path], more...)
	}
}

// takeFenced returns what is kept for a path, once.
func (p *enginePool) takeFenced(path string) []execution.Fenced {
	p.fencing.Lock()
	defer p.fencing.Unlock()
	defer delete(p.fenced, path)
	return p.fenced[path]
}

// settleFenced settles the doubts about calls that this gateway has run before it was removed from the store. What
// fails is tried again.
func (e *engine) settleFenced() {
	left := engines.takeFenced(e.path)
	if len(left) == 0 {
		return
	}
	end := fleet.Job{Do: func(ctx context.Context, _ bool) (time.Duration, error) {
		policy := e.latestPolicy()
		for ; len(left) > 0; left = left[1:] {
			f := &left[0]
			err := e.executions.SettleFenced(ctx, f, func(r *execution.Record, how *execution.Resolution) *store.Batch {
				if r.Method == rollback.Method { // an undo: its rollback reports the outcome
					return nil
				}
				return policy.forCalls().SettledBy(ctx, f.Key, r, how.Applied, how.By)
			})
			if errors.Is(err, execution.ErrStore) && !errors.Is(err, execution.ErrUnreadable) {
				return 0, err
			}
			if err != nil {
				e.logger.Error("a call that this gateway has run stays in doubt", zap.Stringer("key", f.Key), zap.Error(err))
			}
		}
		return 0, nil
	}}.Start()
	e.watch.ends = append(e.watch.ends, func() {
		end()
		engines.fence(e.path, left) // for the next engine
	})
}

var engines = enginePool{pool: caddy.NewUsagePool(), fenced: map[string][]execution.Fenced{}}

// acquire returns the engine of spec with one more reference. If the engine is open already, it
// adopts the keys of a configuration whose keys were not accepted before.
func (p *enginePool) acquire(spec engineSpec, accepted bool) (*engine, error) {
	e, opened, err := p.hold(spec)
	if err != nil || opened || accepted {
		return e, err
	}
	// Without p.mu: it may wait for a rotation, which waits for the store.
	if err := e.adoptKeys(context.Background(), spec); err != nil {
		_ = e.release() // closing the store logs its own errors
		return nil, fmt.Errorf("%w: %w", errKeys, err)
	}
	return e, nil
}

// hold returns the engine of spec with one more reference. opened says that this call
// opened it.
func (p *enginePool) hold(spec engineSpec) (_ *engine, opened bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	value, loaded, err := p.pool.LoadOrNew(spec.pooled, func() (caddy.Destructor, error) {
		return openEngine(spec)
	})
	if err != nil {
		return nil, false, err
	}
	e := value.(*engine)
	if e.lost.Load() {
		_, _ = p.pool.Delete(spec.pooled) // closing the store logs its own errors
		return nil, false, errLost
	}
	if !loaded {
		p.warnOfOthers(spec)
	}
	return e, !loaded, nil
}

// errLost is why the store of a lost engine is not there. It is opened again when the last call of that
// engine has ended.
var errLost = fmt.Errorf("agent_guard: another gateway has removed this one from the store, since it did not respond; it opens it again: %w", store.ErrUnavailable)

// awaitLoss gives the engine up when another gateway has removed this one from its store: nothing that it remembers
// holds any more. Its executions end as at an exit, and its configurations open another engine.
func (e *engine) awaitLoss(lost <-chan struct{}) {
	select {
	case <-lost:
	case <-e.watch.stop:
		return
	}
	e.lost.Store(true)
	apps := e.activeConfigs.all()
	for _, a := range apps {
		a.mu.Lock()
		if a.held == e { // else it has ended
			why := errLost
			a.unreached.Store(&why)
		}
		a.mu.Unlock()
	}
	e.exit()
	for _, a := range apps {
		a.openAnew(e)
	}
}

// warnOfOthers warns if a configuration has another store than the previous one: the calls
// recorded there are unknown to it.
func (p *enginePool) warnOfOthers(spec engineSpec) {
	p.pool.Range(func(path, _ any) bool {
		if path != spec.path {
			spec.logger.Warn("another store is open as well; retries of calls that it has recorded run again where this one is used",
				zap.String("store", spec.path), zap.Any("other", path))
		}
		return true
	})
}

var errNotOpen = errors.New("agent_guard: the store is not open")

// peek returns the engine of the store at path with one more reference; nil if it is not
// open.
func (p *enginePool) peek(path string) *engine {
	p.mu.Lock()
	defer p.mu.Unlock()
	value, _, err := p.pool.LoadOrNew(path, func() (caddy.Destructor, error) { return nil, errNotOpen })
	if err != nil {
		return nil
	}
	return value.(*engine)
}

// release releases one reference.
func (e *engine) release() error {
	engines.mu.Lock()
	defer engines.mu.Unlock()
	_, err := engines.pool.Delete(e.path)
	return err
}

// Destruct closes the store. The pool calls it after the last release.
func (e *engine) Destruct() error {
	e.executions.DropPending() // they carry what the ledger and the rollbacks have of them
	stopping, cancel := context.WithTimeout(context.Background(), rollbackGrace)
	e.stopRollbacks(stopping) // first: rollbacks use everything below
	cancel()
	e.cascades.Close() // it opens escalations, too
	e.boundaries.end()
	e.escalations.end() // after the rollbacks, which open escalations
	e.cut()
	e.circuits.Leave()
	e.breakers.Close()
	e.recorder.end()
	e.resealing.end()
	e.endWaits()
	close(e.watch.stop)
	for _, end := range e.watch.ends {
		end()
	}
	e.ledger.close()
	defer releaseCounts(e.path)
	defer func() { engines.fence(e.path, e.executions.Fenced()) }()
	if err := e.executions.Close(context.Background()); err != nil {
		e.logger.Warn("which clients were not answered could not be noted; equal calls without an id count as retries", zap.Error(err))
	}
	return e.store.Close()
}

func openEngine(spec engineSpec) (_ *engine, err error) {
	counts := acquireCounts(spec.path)
	defer func() {
		if err != nil {
			releaseCounts(spec.path)
		}
	}()
	if opener, ok := spec.opener.(ObservedOpener); ok {
		opener.ObserveStore(counts)
	}
	st, err := spec.opener.OpenStore(spec.logger)
	if err != nil {
		return nil, &wrong{"store", fmt.Errorf("agent_guard: opening the store %s: %w", spec.path, err)}
	}
	defer func() {
		if err != nil {
			_ = st.Close() // the first error is returned
		}
	}()
	ctx := context.Background()
	ring, err := loadRing(ctx, st, spec)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errKeys, err)
	}
	g, recovered, err := execution.Open(ctx, st, ring)
	if err != nil {
		return nil, fmt.Errorf("agent_guard: store %s: %w", spec.path, err)
	}
	if recovered != (execution.Recovery{}) {
		spec.logger.Warn("executions were open when the last process ended",
			zap.Int("in_doubt", recovered.InDoubt), zap.Int("unrecorded", recovered.Unrecorded))
	}
	spec.logger.Info("store open", zap.String("path", spec.path))
	e := &engine{
		path: spec.path, store: st, executions: g, checkpoints: checkpoint.New(st, ring), ring: ring,
		opener: spec.opener, counts: counts, logger: spec.logger,
	}
	e.ledger.coming.Store(spec.ledger)
	e.drain.Store(int64(spec.drain))
	if err := e.start(ctx, recovered); err != nil {
		return nil, fmt.Errorf("agent_guard: store %s: %w", spec.path, err)
	}
	return e, nil
}

// start starts what runs over an open store. recovered are the executions that its last process has left open.
func (e *engine) start(ctx context.Context, recovered execution.Recovery) error {
	e.ledger.engine, e.nodes.engine = e, e
	e.counts.add(recoveredCount, execution.InDoubt.String(), recovered.InDoubt)
	e.startWatch(recovered)
	e.uncut, e.cut = context.WithCancel(context.Background())
	e.waits, e.endWaits = context.WithCancel(context.Background())
	e.executions.OnRecovery(e.reportRecovery)
	if err := e.startEscalations(ctx); err != nil { // before anything that may open escalations
		return err
	}
	e.plans = plan.NewStore(e.store, e.ring)
	unreadable, err := e.plans.Load(ctx)
	if err != nil {
		return err
	}
	if unreadable > 0 {
		e.logger.Error("plans of workflows cannot be read; calls of those workflows are refused", zap.Int("unreadable", unreadable))
	}
	e.forCalls = guard.Engine{
		Store: e.store, Executions: e.executions, Checkpoints: e.checkpoints, Escalations: e.escalations.store, Plans: e.plans,
		Coordinator: e.rollbacks.coordinator, Circuits: rejectionRecorder{e}, Uncut: e.uncut, Waits: e.waits,
		Stopping: e.draining.Load, Emit: e.emitCall, Logger: slogOf(e.logger),
	}
	e.forCalls.Writes.Follow(e.store, e.ring, e.executions)
	e.giveBack = func() { _ = e.release() } // closing the store logs its own errors
	e.circuits = proxy.Join()
	if err := e.startCascades(ctx); err != nil { // before breakers report to it
		e.circuits.Leave()
		return err
	}
	startBoundaries(e)
	e.startCircuitRecorder()
	e.breakers = circuits.New(circuits.Options{
		Store: e.store, Sealer: e.ring, Log: slogOf(e.logger), Elsewhere: e.cascades.CircuitAt,
		Breakers: circuits.Breakers{Snapshot: e.circuits.Snapshot, Restore: e.circuits.Restore, Status: e.circuits.Status, Follow: e.circuits.Follow},
	})
	e.circuits.Listen(circuitHook{e}) // before they are restored, so that no change is missed
	e.breakers.Restore(ctx)
	e.breakers.Follow()
	e.startResealing(ctx)
	e.nodes.start()
	e.executions.Keys().OnSeal(e.keyChanged)
	if st, ok := e.store.(interface{ Lost() <-chan struct{} }); ok {
		go e.awaitLoss(st.Lost())
	}
	return nil
}

// reportRecovery reports executions that are in doubt since another gateway has left the store, or since this one could
// not record their outcomes.
func (e *engine) reportRecovery(left execution.Recovery) {
	why := "executions were open when another gateway left the store"
	if left.Own { // which were counted as in doubt when they ended
		why = "calls are recorded as in doubt, since what became of them could not be recorded in time"
	} else {
		e.counts.add(recoveredCount, execution.InDoubt.String(), left.InDoubt)
		e.emit(eventRecovered, map[string]any{"in_doubt": left.InDoubt})
	}
	e.logger.Warn(why, zap.Int("in_doubt", left.InDoubt), zap.Int("unrecorded", left.Unrecorded))
	go e.ledger.recordLeft()
}

// At an exit Caddy stops its apps in no particular order, and the http app closes its
// listeners and waits for all requests. Refusing new calls with an answer, and limiting
// slow ones to `drain`, is possible only before that: at exitEvent. OnExit comes last, for
// executions that outlived the last configuration with a guard.
func init() {
	caddy.OnExit(func(context.Context) { engines.exit() })
}

// exitEvent is Caddy's event before it stops the apps of a configuration.
const exitEvent = "stopping"

// exitWatch handles it.
type exitWatch struct{}

// Handle waits for running executions if the process exits. On a reload they go on: each has a
// reference to its engine.
func (exitWatch) Handle(context.Context, caddy.Event) error {
	if caddy.Exiting() {
		engines.exit()
	}
	return nil
}

// cutGrace is how long cancelled executions may take to be recorded.
const cutGrace = 5 * time.Second

func (p *enginePool) exit() {
	var all sync.WaitGroup
	p.pool.Range(func(_, value any) bool {
		all.Go(value.(*engine).exit)
		return true
	})
	all.Wait()
}

// exit refuses new executions and waits for running ones. After the drain it cancels them;
// they are recorded as in doubt.
func (e *engine) exit() {
	e.exiting.Do(func() {
		defer e.endWaits()
		e.draining.Store(true)
		defer e.flushEvents()
		drain := time.Duration(e.drain.Load())
		stopping, cancel := context.WithTimeout(context.Background(), drain)
		defer cancel()
		var rollbacks sync.WaitGroup
		rollbacks.Go(func() { e.stopRollbacks(stopping) })
		left := e.await(drain)
		rollbacks.Wait()
		e.forCalls.AwaitReaders(stopping)
		if left == 0 {
			return
		}
		e.logger.Warn("executions outlast the drain; they are in doubt",
			zap.Int("running", left), zap.Duration("drain", drain))
		e.cut()
		e.await(cutGrace)
	})
}

// await waits for running executions for at most bound, and returns how many are left.
func (e *engine) await(bound time.Duration) int {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	return e.executions.Drain(ctx)
}

var _ caddyevents.Handler = exitWatch{}

const (
	watchEvery  = time.Second     // how often the state is checked for changes
	countEvery  = 5 * time.Second // how often doubts and escalations are counted, at most
	stateWithin = 5 * time.Second // how long reading the state may take
)

// watch is the state of an engine over time.
type watch struct {
	opened    time.Time
	recovered execution.Recovery // zero once it was reported
	stop      chan struct{}
	ends      []func() // stop the jobs that watch

	mu          sync.Mutex
	counted     time.Time
	doubts      *doubtReport       // nil if they could not be counted
	escalations []escalationReport // counted with doubts, as unconfirmed is
	waiting     map[string]time.Duration
	unconfirmed map[string]int // nil if they could not be counted
	counting    chan struct{}  // closed when the current count ends; nil without one
}

// snapshot returns the state of the engine. Its doubts may be some seconds old, since
// counting them reads the store.
func (e *engine) snapshot() *storeSnapshot {
	now := &storeSnapshot{Opened: e.watch.opened, Healthy: e.healthy(), Doubts: e.doubts(), BodyMemory: e.executions.BodyMemory().Used()}
	e.watch.mu.Lock()
	now.Escalations, now.Waiting, now.Unconfirmed = e.watch.escalations, e.watch.waiting, e.watch.unconfirmed
	e.watch.mu.Unlock()
	now.Report, now.Ledger, now.Circuits, now.Rollbacks = e.report(), e.ledger.head(), e.circuits.Status(), e.rollbackReport()
	now.Cascades, now.Nodes = e.cascadeReport(), e.nodes.last.Load()
	return now
}

// report describes the store; nil if its opener does not.
func (e *engine) report() *StoreReport {
	if reporter, ok := e.opener.(StoreReporter); ok {
		return reporter.ReportStore(e.store)
	}
	return nil
}

func (e *engine) healthy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), stateWithin)
	defer cancel()
	_, err := e.store.Now(ctx)
	return err == nil
}

// doubts counts the executions in doubt; nil if that fails. Only one goroutine at a time
// counts, and a scrape does not wait long for a store that hangs.
func (e *engine) doubts() *doubtReport {
	w := &e.watch
	w.mu.Lock()
	if w.doubts != nil && time.Since(w.counted) < countEvery {
		defer w.mu.Unlock()
		return w.doubts
	}
	done := w.counting
	if done == nil {
		done = make(chan struct{})
		w.counting = done
		go func() {
			defer close(done)
			found := e.countDoubts()
			escalations, waiting := e.countEscalations()
			within, cancel := context.WithTimeout(context.Background(), stateWithin)
			defer cancel()
			unconfirmed, err := e.escalations.store.Unconfirmed(within)
			if err != nil {
				unconfirmed = nil // they could not be counted
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			w.doubts, w.escalations, w.unconfirmed, w.counted, w.counting = found, escalations, unconfirmed, time.Now(), nil
			w.waiting = waiting
		}()
	}
	w.mu.Unlock()
	late := time.NewTimer(stateWithin)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.doubts
}

func (e *engine) countDoubts() *doubtReport {
	ctx, cancel := context.WithTimeout(context.Background(), stateWithin)
	defer cancel()
	n, oldest, err := e.executions.Doubts(ctx)
	if err != nil {
		return nil
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return nil
	}
	found := &doubtReport{N: n}
	if n > 0 {
		found.OldestAge = max(0, now.Sub(oldest))
	}
	return found
}

// reportRecovered emits once how many executions the last process left open. No handler is
// listening yet when the store is opened.
func (e *engine) reportRecovered() {
	e.watch.mu.Lock()
	found := e.watch.recovered
	e.watch.recovered = execution.Recovery{}
	e.watch.mu.Unlock()
	if found != (execution.Recovery{}) {
		e.emit(eventRecovered, map[string]any{"in_doubt": found.InDoubt})
	}
}

// startWatch begins to check the state for changes.
func (e *engine) startWatch(found execution.Recovery) {
	e.watch.opened, e.watch.recovered, e.watch.stop = time.Now(), found, make(chan struct{})
	was := storeState{healthy: true}
	reports := fleet.Every(watchEvery, func(context.Context) { was = e.reportChanges(was) })
	e.watch.ends = append(e.watch.ends, reports.Start())
}

// storeState is the state whose changes are emitted as events.
type storeState struct {
	healthy   bool
	watermark int // see admin.Disk.Watermark
}

// reportChanges emits the changes since was, and returns the new state.
func (e *engine) reportChanges(was storeState) storeState {
	is := storeState{healthy: e.healthy()}
	if was.healthy && !is.healthy {
		e.emit(eventStoreUnhealthy, nil)
	}
	report := e.report()
	if report == nil || report.Disk == nil {
		is.watermark = was.watermark
		return is
	}
	disk := report.Disk
	is.watermark = disk.Watermark()
	switch {
	case is.watermark > was.watermark:
		e.emit(eventDiskLow, map[string]any{"free_bytes": disk.Free, "watermark": is.watermark})
	case is.watermark == 0 && was.watermark != 0:
		e.emit(eventDiskRecovered, map[string]any{"free_bytes": disk.Free})
	}
	return is
}

// resealRetry is the time until the next pass after a failed one, for example because of a
// full disk.
const resealRetry = time.Minute

// resealing is the background job that encrypts values anew with the newest key.
type resealing struct {
	job
	wake chan struct{} // requests a pass
	last atomic.Pointer[admin.Resealing]
}

// startResealing starts the job. At the start, and when another gateway has left the store, it makes a pass if records
// have an older key: one may have ended in the middle of its pass.
func (e *engine) startResealing(ctx context.Context) {
	e.resealing.wake = make(chan struct{}, 1)
	older := func(ctx context.Context) bool { // also where that is not known
		uses, err := e.executions.Keys().InUse(ctx)
		return err != nil || slices.ContainsFunc(uses, func(use execution.KeyUse) bool {
			return use.ID < e.sealingKey() && use.Until.IsZero()
		})
	}
	if older(ctx) { // before the first rotation, which requests a pass of its own
		e.reseal()
	}
	first := true
	pass := func(ctx context.Context, left bool) (time.Duration, error) {
		begins := first
		if first = false; left && (begins || !older(ctx)) {
			return 0, nil
		}
		if !e.resealOnce(ctx) {
			return resealRetry, nil
		}
		return 0, nil
	}
	e.resealing.job = startJob(fleet.Job{Fleet: fleet.Of(e.store), Wake: e.resealing.wake, Do: pass}.Run)
	e.resealing.begin()
}

// job is work on a goroutine of its own. It waits for the first configuration, whose options it goes by.
type job struct {
	begin func() // the first configuration is there
	end   func() // stops the work, and waits until it has stopped
}

func startJob(work func(ctx context.Context)) job {
	ctx, stop := context.WithCancel(context.Background())
	begun, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-begun:
			work(ctx)
		case <-ctx.Done():
		}
	}()
	return job{
		begin: sync.OnceFunc(func() { close(begun) }),
		end: func() {
			stop()
			<-ended
		},
	}
}

// sealingKey is the id of the key that seals.
func (e *engine) sealingKey() uint32 {
	ids := e.ring.KeyIDs()
	return ids[len(ids)-1]
}

// keyChanged waits for what is sealed with older keys, once the gateways on a store have agreed that another
// one seals.
func (e *engine) keyChanged(ctx context.Context, id uint32) error {
	e.logger.Info("all gateways on the store have the sealing key, and seal with it", zap.Uint32("key", id))
	if err := e.checkpoints.AwaitWriters(ctx); err != nil {
		return err
	}
	if c := e.rollbacks.coordinator(); c != nil {
		if err := c.AwaitWriters(ctx); err != nil {
			return err
		}
	}
	e.nodes.describe()
	e.reseal()
	return nil
}

// reseal requests a pass; it follows the running one.
func (e *engine) reseal() {
	select {
	case e.resealing.wake <- struct{}{}:
	default:
	}
}

// resealOnce makes one pass. It returns false if a retry may succeed. Of several gateways on a store one makes it,
// once all of them seal with the key.
func (e *engine) resealOnce(ctx context.Context) bool {
	key := e.sealingKey()
	stopped := func(what string, err error) bool {
		if ctx.Err() != nil {
			return true
		}
		e.logger.Warn(what, zap.Error(err))
		e.resealing.last.Store(&admin.Resealing{
			ResealProgress: execution.ResealProgress{Key: key, Left: []execution.KeyLeft{}, Started: time.Now()}, Error: err.Error(),
		})
		return errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrUnhealthy)
	}
	if err := e.executions.Keys().Await(ctx, key); err != nil {
		return stopped("what seals at the other gateways on the store is not known, and nothing is sealed anew", err)
	}
	mine, err := e.executions.Keys().Reseals(ctx)
	if err != nil {
		return stopped("re-sealing cannot begin", err)
	}
	if !mine {
		return true
	}
	e.logger.Info("re-sealing started", zap.Uint32("key", key))
	err = e.ledger.reseal(ctx)
	if errors.Is(err, errSealedLedger) && e.activeConfigs.latest() == nil {
		e.ledger.unsealed.Store(true) // the configuration that opens the ledger requests it again
		return true
	}
	if err == nil { // even without an identity: an earlier configuration may have made checkpoints
		_, err = e.checkpoints.Reseal(ctx)
	}
	if c := e.rollbacks.coordinator(); err == nil && c != nil {
		_, err = c.Reseal(ctx)
	}
	if err == nil {
		if err = e.plans.Reseal(ctx); errors.Is(err, plan.ErrUnreadable) { // they are lost already
			e.logger.Error("some plans of workflows are damaged, and are left as they are", zap.Error(err))
			err = nil
		}
	}
	if err != nil {
		return stopped("re-sealing the ledger, the checkpoints, the rollbacks and the plans of workflows failed", err)
	}
	if err := e.breakers.Reseal(ctx); err != nil && ctx.Err() == nil {
		e.logger.Warn("the states of the circuit breakers stay under an older key", zap.Error(err))
	}
	if err := e.cascades.Reseal(ctx); err != nil && ctx.Err() == nil {
		e.logger.Warn("what is stored of cascades stays under an older key", zap.Error(err))
	}
	if err := e.resealEscalations(ctx); err != nil {
		return stopped("the escalations stay under an older key", err)
	}
	p, err := e.executions.Reseal(ctx, key, func(p execution.ResealProgress) {
		e.resealing.last.Store(&admin.Resealing{ResealProgress: p})
	})
	status := &admin.Resealing{ResealProgress: p}
	fields := []zap.Field{
		zap.Uint32("key", p.Key), zap.Int("seen", p.Seen), zap.Int("resealed", p.Resealed), zap.Int("damaged", p.Damaged),
	}
	if len(status.Left) > 0 {
		fields = append(fields, zap.Any("left", status.Left))
	}
	if err == nil {
		status.Done = true
		e.resealing.last.Store(status)
		e.logger.Info("re-sealing finished", append(fields, zap.Duration("took", p.Finished.Sub(p.Started)))...)
		return true
	}
	status.Error = err.Error()
	e.resealing.last.Store(status)
	if ctx.Err() != nil {
		return true
	}
	e.logger.Warn("re-sealing failed", append(fields, zap.Error(err))...)
	return errors.Is(err, store.ErrClosed) || errors.Is(err, store.ErrUnhealthy)
}

// emit emits an event of the engine or an execution to the latest configuration.
func (e *engine) emit(name string, data map[string]any) {
	if a := e.activeConfigs.latest(); a != nil {
		a.emit(name, data)
	}
}

// flushEvents waits for the handlers of events.
func (e *engine) flushEvents() {
	if a := e.activeConfigs.latest(); a != nil {
		a.pending.flush(a.ctx)
	}
}

// executionStatus returns the state of an execution and the status of its answer; empty
// without a record.
func (e *engine) executionStatus(ctx context.Context, key execution.Key) (state string, status int, err error) {
	found, err := e.executions.Get(ctx, key)
	if errors.Is(err, execution.ErrUnknown) {
		return "", 0, nil
	}
	if err != nil {
		return "", 0, err
	}
	return found.State().String(), found.Record.Status, nil
}

// errKeyGiven: the key is a value in the configuration, so a new one cannot be written.
var errKeyGiven = errors.New("the key is given as a value, which the gateway cannot change: " +
	"put the ring with another sealing key there, and load the configuration again")

// slogOf returns a slog.Logger with the logger's name and, like Caddy's own, without stack
// traces.
func slogOf(logger *zap.Logger) *slog.Logger {
	return slog.New(zapslog.NewHandler(logger.Core(), zapslog.WithName(logger.Name()), zapslog.AddStacktraceAt(slog.Level(127))))
}

// errKeys: the store needs other keys than the configuration has.
var errKeys = guard.ErrKeys

// readRing reads the key ring of spec.
func readRing(spec engineSpec) (*seal.Ring, error) {
	if spec.key != "" {
		return seal.Parse([]byte(spec.key))
	}
	ring, err := seal.Load(spec.keyFile)
	if info, statErr := os.Stat(spec.keyFile); statErr == nil && info.Mode().Perm()&0o077 != 0 {
		spec.logger.Warn("others than the owner may use the key file; give it the mode 0600",
			zap.String("file", spec.keyFile), zap.Stringer("mode", info.Mode()))
	}
	return ring, err
}

// checkKeyFile returns why an existing key file cannot be read. A missing file may be
// created later.
func checkKeyFile(file string) error {
	info, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return fmt.Errorf("%s is a directory; name the file with the keys in it", file)
	}
	if err := mayRead(file); err != nil {
		return fmt.Errorf("this process may not read the file %s (%w); give the user that runs Caddy the right to", file, err)
	}
	return nil
}

// loadRing reads the key ring. It creates one only for a store that was never used: a lost
// key must not look like an empty store.
func loadRing(ctx context.Context, st store.Store, spec engineSpec) (*seal.Ring, error) {
	ring, err := readRing(spec)
	if !errors.Is(err, fs.ErrNotExist) {
		return ring, err
	}
	fresh, err := execution.Fresh(ctx, st)
	if err != nil {
		return nil, err
	}
	if fresh {
		if ring, err = seal.Create(spec.keyFile); !errors.Is(err, fs.ErrExist) {
			return ring, err
		}
	}
	// Another gateway of a new fleet may have made the file since it was read, and have used the store.
	if ring, err = readRing(spec); fresh || !errors.Is(err, fs.ErrNotExist) {
		return ring, err
	}
	return nil, fmt.Errorf("the key file %s is missing, and the store %s holds executions that were sealed with it: "+
		"put the file back from your backup, or correct its path; if it is lost for good, move the store away to begin anew, "+
		"knowing that retries of earlier calls will then run again", spec.keyFile, spec.path)
}

// adoptKeys adopts the sealing keys of a configuration. It refuses a ring that lacks a key
// of the store's values: they could not be read after the next start.
func (e *engine) adoptKeys(ctx context.Context, spec engineSpec) error {
	e.keying.Lock() // before the file is read: a rotation may be writing it
	defer e.keying.Unlock()
	other, err := readRing(spec)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the key file %s is missing: put it back, since the store %s cannot be opened again without it",
			spec.keyFile, spec.path)
	}
	if err != nil {
		return err
	}
	needed, err := e.neededBeside(ctx, other)
	if err != nil {
		return err
	}
	changed, err := e.ring.Adopt(other, needed, func(uint32) error { return e.holdKeys(ctx, other.KeyIDs()...) })
	var missing *seal.MissingError
	switch {
	case errors.As(err, &missing):
		return fmt.Errorf("%w in the store %s: put it back into %s", err, e.path, spec.keySource())
	case errors.Is(err, seal.ErrIndex):
		return fmt.Errorf("%s: %w: the store %s is open, and keeps the index key that it was made with", spec.keySource(), err, e.path)
	case err != nil:
		return fmt.Errorf("%s: %w", spec.keySource(), err)
	}
	if changed {
		e.logger.Info("sealing keys taken over from the configuration", zap.Uint32s("keys", e.ring.KeyIDs()))
		e.nodes.describe()
		e.settleKeys(ctx)
	}
	return nil
}

// settleKeys seals with the newest key that all gateways on the store have, and requests a pass of re-sealing: in a
// shared store keyChanged does.
func (e *engine) settleKeys(ctx context.Context) {
	if _, shared := e.store.(store.Shared); !shared {
		e.reseal()
		return
	}
	_, err := e.executions.Keys().Settle(ctx)
	if err == nil {
		var waiting []execution.KeyWait
		waiting, err = e.executions.Keys().Waiting(ctx)
		for _, w := range waiting {
			e.logger.Warn("a sealing key does not seal yet: other gateways on the store lack it", zap.Uint32("key", w.ID), zap.Strings("nodes", w.Lacking))
		}
	}
	if err != nil { // it is tried again
		e.logger.Warn("whether all gateways on the store have the newest sealing key is not known yet", zap.Error(err))
	}
}

// keyFile returns the key ring's file, which rotations write: that of the latest configuration. It is empty if the
// key is a value, or without a configuration.
func (e *engine) keyFile() string {
	if a := e.activeConfigs.latest(); a != nil {
		return a.spec.keyFile
	}
	return ""
}

// keySource describes where the ring comes from, without any of its content.
func (s *engineSpec) keySource() string {
	if s.keyFile == "" {
		return "the value"
	}
	return "the file " + s.keyFile
}

// neededBeside returns the keys of the engine's ring that other lacks although the store
// needs them.
func (e *engine) neededBeside(ctx context.Context, other *seal.Ring) ([]uint32, error) {
	have := other.KeyIDs()
	lacks := slices.DeleteFunc(e.ring.KeyIDs(), func(id uint32) bool { return slices.Contains(have, id) })
	if len(lacks) == 0 {
		return nil, nil // avoids reading a store that may not respond
	}
	uses, err := e.executions.Keys().InUse(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(lacks, func(id uint32) bool {
		return !slices.ContainsFunc(uses, func(use execution.KeyUse) bool { return use.ID == id })
	}), nil
}

// holdKeys records in the store which keys the ring has, before it does.
func (e *engine) holdKeys(ctx context.Context, ids ...uint32) error {
	err := e.executions.Keys().Hold(ctx, ids...)
	if errors.Is(err, execution.ErrMissingKey) || errors.Is(err, execution.ErrOtherKey) {
		err = fmt.Errorf("%w: %w", seal.ErrRefused, err)
	}
	return err
}

// rotateKeys adds a sealing key to the key file, uses it once all gateways on the store have it, and requests a
// pass of re-sealing. While an earlier one waits for that it makes none, and returns 0. The caller holds a reference
// to the engine. The error is errKeyGiven if there is no key file.
func (e *engine) rotateKeys(ctx context.Context) (uint32, error) {
	e.keying.Lock()
	defer e.keying.Unlock()
	keys := e.executions.Keys()
	if waiting, err := keys.Waiting(ctx); err != nil || len(waiting) > 0 {
		return 0, err
	}
	file := e.keyFile()
	if file == "" {
		return 0, errKeyGiven
	}
	if err := keys.BeginRotation(ctx); err != nil {
		return 0, err
	}
	before := e.ring.KeyIDs()
	id, err := e.ring.Rotate(file, func(id uint32) error { return e.holdKeys(ctx, append(before, id)...) })
	if err != nil {
		if _, shared := e.store.(store.Shared); shared {
			_ = e.holdKeys(context.WithoutCancel(ctx), before...) // else others make no key until this gateway does, or is gone
		}
		return 0, err
	}
	e.logger.Info("sealing key rotated", zap.Uint32("key", id))
	e.emit(eventKeysRotated, nil)
	e.nodes.describe()
	e.settleKeys(ctx)
	return id, nil
}

// keyStatus returns the keys and the progress of re-sealing.
func (e *engine) keyStatus(ctx context.Context) (*admin.KeyStatus, error) {
	// Read before the keys: if the pass is reported as done, the keys must show its result.
	resealing := e.resealing.last.Load()
	uses, err := e.executions.Keys().InUse(ctx)
	if err != nil {
		return nil, err
	}
	waiting, err := e.executions.Keys().Waiting(ctx)
	if err != nil {
		return nil, err
	}
	file := e.keyFile()
	status := &admin.KeyStatus{Source: "file", File: file, Keys: []admin.Key{}, Resealing: resealing}
	if file == "" {
		status.Source = "value"
	}
	for _, key := range e.ring.Keys() {
		row := admin.Key{ID: key.ID, Created: key.Created, Newest: key.Seals}
		if i := slices.IndexFunc(waiting, func(w execution.KeyWait) bool { return w.ID == key.ID }); i >= 0 {
			row.Lacking = waiting[i].Lacking
		}
		if i := slices.IndexFunc(uses, func(use execution.KeyUse) bool { return use.ID == key.ID }); i >= 0 {
			row.InUse, row.Until = true, uses[i].Until
		}
		status.Keys = append(status.Keys, row)
	}
	return status, nil
}
