package guard

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/execution"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/plan"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
	"github.com/agent-guard/caddy-agent-guard/guard/seal"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Engine is the state shared by all calls over one store. Set its fields before the first call;
// it must not be copied. OpenEngine sets the required ones.
type Engine struct {
	Store       store.Store
	Executions  *execution.Guard
	Checkpoints *checkpoint.Store
	// Coordinator returns the coordinator of rollbacks, or nil. It may be nil itself.
	Coordinator func() *rollback.Coordinator
	// Escalations are the questions to people, which keep calls from beginning. OpenEngine reads
	// them, so that each process over a store asks the same.
	Escalations *hitl.Store
	// Plans are the plans of workflows. OpenEngine reads which workflows have one.
	Plans *plan.Store
	// Circuits records in workflows what breakers refuse; nil without breakers.
	Circuits Circuits
	// Uncut ends when running executions are cut off, Waits when callers no longer wait for
	// outcomes.
	Uncut, Waits context.Context
	// Stopping reports that nothing new may begin. It may be nil.
	Stopping func() bool
	// Emit emits an event of a call; false means that the host has to. It may be nil.
	Emit func(Event) bool
	// Logger takes what operators should know.
	Logger *slog.Logger

	// Writes tracks concurrent writes of guarded calls; see WriteTracker.Follow.
	Writes WriteTracker

	running     runningCalls
	clients     clients
	elsewhere   elsewhere
	readers     slowReaders
	constraints constraints
	rejections  rejections
}

// Circuits is the part of the circuit breakers' recorder that calls use.
type Circuits interface {
	// Name is the public name of an upstream.
	Name(upstream string) string
	// Busy reports that too many rejections wait to be recorded.
	Busy() bool
	// RecordRejection records in the background, in a workflow, that a breaker refused a call.
	// parents are ids that may be recorded.
	RecordRejection(policy *TokenPolicy, open *breaker.OpenError, workflow string, parents []string)
	// Unrecorded reports that an event of a breaker could not be recorded.
	Unrecorded(key breaker.Key, err error)
}

// OpenEngine opens an engine over a store, with the keys of ring. Executions that an earlier
// process left open become in doubt (P6), and are returned. The caller closes the store after the last call. A nil log is none.
func OpenEngine(
	ctx context.Context, st store.Store, ring *seal.Ring, log *slog.Logger,
) (_ *Engine, recovered execution.Recovery, _ error) {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	executions, recovered, err := execution.Open(ctx, st, ring)
	if err != nil {
		return nil, recovered, err
	}
	if recovered != (execution.Recovery{}) {
		log.Warn("executions were open when the last process ended", "in_doubt", recovered.InDoubt, "unrecorded", recovered.Unrecorded)
	}
	e := &Engine{
		Store: st, Executions: executions, Checkpoints: checkpoint.New(st, ring), Escalations: hitl.NewStore(st, ring),
		Plans: plan.NewStore(st, ring), Uncut: context.Background(), Waits: context.Background(), Logger: log,
	}
	unreadable, err := e.Escalations.Load(ctx)
	if err == nil && unreadable > 0 {
		log.Error("some escalations cannot be read; calls of the workflows that they hold are refused", "unreadable", unreadable)
	}
	if err == nil {
		unreadable, err = e.Plans.Load(ctx)
	}
	if err == nil && unreadable > 0 {
		log.Error("plans of workflows cannot be read; calls of those workflows are refused", "unreadable", unreadable)
	}
	if err != nil {
		return nil, recovered, err
	}
	e.Writes.Follow(st, ring, executions)
	return e, recovered, nil
}

// Open is Config.Open for an engine that outlives its handlers.
func (e *Engine) Open() (_ *Engine, release func(), _ error) { return e, func() {}, nil }

// callErrorTime is how long the opening of a breaker waits for the call that caused it. A longer
// call, such as a stream, would fail for another reason.
const callErrorTime = 2 * time.Second

// AwaitCall waits for the end of the call with this checkpoint, if it runs: for at most 2 s, and
// no longer than ctx.
func (e *Engine) AwaitCall(ctx context.Context, checkpoint string) {
	e.running.wait(ctx, time.Now().Add(callErrorTime), checkpoint)
}

// AwaitReaders waits until all clients have read the answers of settled calls, or ctx ends.
func (e *Engine) AwaitReaders(ctx context.Context) { e.readers.wait(ctx) }

// detach starts the clock of an execution: a context with the request's values but not its end
// (P7). It ends at the deadline, or when a shutdown can wait no longer.
func (e *Engine) detach(c *clock, request context.Context, deadline time.Duration) {
	c.start(context.WithoutCancel(request), deadline)
	c.uncut = context.AfterFunc(e.Uncut, c.stop)
}

// slowReaders counts the owners of settled executions that are still reading.
type slowReaders struct {
	mu   sync.Mutex
	n    int
	none chan struct{} // closed when n falls to 0; nil while nobody waits
}

func (s *slowReaders) enter() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
}

func (s *slowReaders) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n--
	if s.n == 0 && s.none != nil {
		close(s.none)
		s.none = nil
	}
}

func (s *slowReaders) wait(ctx context.Context) {
	s.mu.Lock()
	if s.n == 0 {
		s.mu.Unlock()
		return
	}
	if s.none == nil {
		s.none = make(chan struct{})
	}
	none := s.none
	s.mu.Unlock()
	select {
	case <-none:
	case <-ctx.Done():
	}
}

// runningCalls are the calls whose outcome is not recorded yet, by checkpoint, and the doubts whose answer on a GET
// stream is being recorded, by the key of the execution. A breaker opens just before its call records an error, if the
// call records one at all; a client may have read an answer before it is recorded.
type runningCalls struct{ ends sync.Map } // id -> chan struct{}, which is closed at the end

// begin notes that a call runs, or an answer is being recorded; without an id nothing is noted.
func (r *runningCalls) begin(id string) {
	if id != "" {
		r.ends.LoadOrStore(id, make(chan struct{}))
	}
}

func (r *runningCalls) end(id string) {
	if end, ok := r.ends.LoadAndDelete(id); ok {
		close(end.(chan struct{}))
	}
}

// wait waits for the end of what runs, until ctx or the time is over.
func (r *runningCalls) wait(ctx context.Context, until time.Time, id string) {
	end, ok := r.ends.Load(id)
	if !ok {
		return
	}
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	select {
	case <-end.(chan struct{}):
	case <-ctx.Done():
	}
}

// KeepCircuitTokens is how long the ledger keeps the events of breakers.
const KeepCircuitTokens = 24 * time.Hour

// ErrKeys says that the store needs other keys.
var ErrKeys = errors.New("agent_guard: keys")
