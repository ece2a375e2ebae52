package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
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
	"github.com/agent-guard/caddy-agent-guard/guard/cascades"
	"github.com/agent-guard/caddy-agent-guard/guard/circuits"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/fleet"
	"github.com/agent-guard/caddy-agent-guard/guard/gateway"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// engine is an open store with the guard over it. All configurations and requests that name the
// store share it; it is closed when the last of them is gone.
type engine struct {
	path       string
	calls      *guard.Engine // the store and its records, as calls use them
	keys       *gateway.Keys
	ledger     ledgerHandle
	nodes      nodes
	rollbacks  rollbackService
	circuits   *proxy.Member
	breakers   *circuits.Keeper // their states in the store
	cascades   *cascades.Watch
	boundaries *boundaryWatch
	followers  evidence.Followers
	recorder   circuitRecorder // records changes of breakers
	giveBack   func()          // release, for calls
	places     places          // upstreams of undos

	escalations job // sends them

	opener        StoreOpener  // opened the store
	counts        *storeCounts // held until the engine is closed
	activeConfigs activeConfigs
	watch         watch
	warned        sync.Map // names of guards, by warnAnonymous

	logger   *zap.Logger
	drain    atomic.Int64 // nanoseconds, from the latest configuration
	draining atomic.Bool  // no new executions
	exiting  sync.Once
	cut      context.CancelFunc
	lost     atomic.Bool        // another gateway has removed this one from the store
	endWaits context.CancelFunc // after the drain of an exit
}

// engineSpec says how to open an engine.
type engineSpec struct {
	opener StoreOpener
	path   string
	pooled any // path, as the pool takes it: a conversion allocates, with each call
	keys   gateway.KeySource
	drain  time.Duration // how long an exit waits for executions
	ledger bool          // the configuration has an identity, and opens one
	logger *zap.Logger
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
			err := e.calls.Executions.SettleFenced(ctx, f, func(r *execution.Record, how *execution.Resolution) *store.Batch {
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
	if err := e.keys.Adopt(context.Background(), spec.keys); err != nil {
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
	e.calls.Executions.DropPending() // they carry what the ledger and the rollbacks have of them
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
	e.keys.Stop()
	e.endWaits()
	close(e.watch.stop)
	for _, end := range e.watch.ends {
		end()
	}
	e.ledger.close()
	defer releaseCounts(e.path)
	defer func() { engines.fence(e.path, e.calls.Executions.Fenced()) }()
	if err := e.calls.Executions.Close(context.Background()); err != nil {
		e.logger.Warn("which clients were not answered could not be noted; equal calls without an id count as retries", zap.Error(err))
	}
	return e.calls.Store.Close()
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
		return nil, &invalid{[]string{"store"}, fmt.Errorf("agent_guard: opening the store %s: %w", spec.path, err)}
	}
	defer func() {
		if err != nil {
			_ = st.Close() // the first error is returned
		}
	}()
	ctx := context.Background()
	keys, recovered, err := gateway.Open(ctx, st, spec.keys, spec.path, slogOf(spec.logger))
	if err != nil {
		return nil, err
	}
	e := &engine{path: spec.path, opener: spec.opener, counts: counts, logger: spec.logger, calls: keys.Engine, keys: keys}
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
	e.calls.Uncut, e.cut = context.WithCancel(context.Background())
	e.calls.Waits, e.endWaits = context.WithCancel(context.Background())
	e.calls.Executions.OnRecovery(e.reportRecovery)
	e.startEscalations() // before anything that may open escalations
	e.calls.Coordinator, e.calls.Circuits = e.rollbacks.coordinator, rejectionRecorder{e}
	e.calls.Stopping, e.calls.Emit = e.draining.Load, e.emitCall
	e.giveBack = func() { _ = e.release() } // closing the store logs its own errors
	e.circuits = proxy.Join()
	if err := e.startCascades(ctx); err != nil { // before breakers report to it
		e.circuits.Leave()
		return err
	}
	startBoundaries(e)
	e.startCircuitRecorder()
	e.breakers = circuits.New(circuits.Options{
		Store: e.calls.Store, Sealer: e.keys.Ring, Log: slogOf(e.logger), Elsewhere: e.cascades.CircuitAt,
		Breakers: circuits.Breakers{Snapshot: e.circuits.Snapshot, Restore: e.circuits.Restore, Status: e.circuits.Status, Follow: e.circuits.Follow},
	})
	e.circuits.Listen(circuitHook{e}) // before they are restored, so that no change is missed
	e.breakers.Restore(ctx)
	e.breakers.Follow()
	e.nodes.start()
	e.startKeys(ctx)
	if st, ok := e.calls.Store.(interface{ Lost() <-chan struct{} }); ok {
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
		e.calls.AwaitReaders(stopping)
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
	return e.calls.Executions.Drain(ctx)
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
	now := &storeSnapshot{Opened: e.watch.opened, Healthy: e.healthy(), Doubts: e.doubts(), BodyMemory: e.calls.Executions.BodyMemory().Used()}
	e.watch.mu.Lock()
	now.Escalations, now.Waiting, now.Unconfirmed = e.watch.escalations, e.watch.waiting, e.watch.unconfirmed
	e.watch.mu.Unlock()
	now.Report, now.Ledger, now.Circuits, now.Rollbacks = e.report(), e.ledger.head(), e.circuits.Status(), e.rollbackReport()
	now.Cascades, now.Nodes = e.cascadeReport(), e.nodes.last.Load()
	return now
}

// report describes the store; nil if its opener does not.
func (e *engine) report() *admin.Report {
	if reporter, ok := e.opener.(StoreReporter); ok {
		return reporter.ReportStore(e.calls.Store)
	}
	return nil
}

func (e *engine) healthy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), stateWithin)
	defer cancel()
	_, err := e.calls.Store.Now(ctx)
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
			unconfirmed, err := e.calls.Escalations.Unconfirmed(within)
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
	n, oldest, err := e.calls.Executions.Doubts(ctx)
	if err != nil {
		return nil
	}
	now, err := e.calls.Store.Now(ctx)
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

// startKeys starts to seal anew with the newest key.
func (e *engine) startKeys(ctx context.Context) {
	e.keys.Changed = e.nodes.describe
	e.keys.Source = func() gateway.KeySource {
		if a := e.activeConfigs.latest(); a != nil {
			return a.spec.keys
		}
		return gateway.KeySource{}
	}
	e.keys.Parts = []gateway.Sealed{
		{Name: "the ledger", Reseal: e.ledger.reseal},
		// Even without an identity: an earlier configuration may have made checkpoints.
		{Name: "the checkpoints", Reseal: func(ctx context.Context) error {
			_, err := e.calls.Checkpoints.Reseal(ctx)
			return err
		}, Await: e.calls.Checkpoints.AwaitWriters},
		{Name: "the rollbacks", Reseal: func(ctx context.Context) (err error) {
			if c := e.rollbacks.coordinator(); c != nil {
				_, err = c.Reseal(ctx)
			}
			return err
		}, Await: func(ctx context.Context) error {
			if c := e.rollbacks.coordinator(); c != nil {
				return c.AwaitWriters(ctx)
			}
			return nil
		}},
		{Name: "the plans of workflows", Reseal: e.calls.Plans.Reseal, Damaged: plan.ErrUnreadable},
		{Name: "the states of the circuit breakers", Reseal: e.breakers.Reseal, Spare: true},
		{Name: "the cascades", Reseal: e.cascades.Reseal, Spare: true},
		{Name: "the escalations", Reseal: func(ctx context.Context) error {
			_, err := e.calls.Escalations.Reseal(ctx)
			return err
		}, Damaged: hitl.ErrUnreadable},
	}
	e.keys.Start(ctx)
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
	found, err := e.calls.Executions.Get(ctx, key)
	if errors.Is(err, execution.ErrUnknown) {
		return "", 0, nil
	}
	if err != nil {
		return "", 0, err
	}
	return found.State().String(), found.Record.Status, nil
}

// slogOf returns a slog.Logger with the logger's name and, like Caddy's own, without stack
// traces.
func slogOf(logger *zap.Logger) *slog.Logger {
	return slog.New(zapslog.NewHandler(logger.Core(), zapslog.WithName(logger.Name()), zapslog.AddStacktraceAt(slog.Level(127))))
}

// errKeys: the store needs other keys than the configuration has.
var errKeys = guard.ErrKeys

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
