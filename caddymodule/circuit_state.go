package caddymodule

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/api"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// spaceCircuit begins the store's keys of breakers:
//
//	b name    the state of a breaker, sealed
const spaceCircuit = 'b'

const (
	// circuitPatience is how long the call that has changed a breaker's state waits
	// for the store.
	circuitPatience = 5 * time.Second
	// circuitMemory is how long a closed breaker is remembered. It is more than the
	// time in which the next cooldown begins where the last one was.
	circuitMemory = time.Hour
)

// startCircuits brings the breakers to where the last process has left them, and hears
// of them from now on.
func (e *engine) startCircuits(ctx context.Context) {
	e.circuits = proxy.Join()
	e.startCircuitRecorder()
	e.circuits.Listen(circuitHook{e})
	var gone []store.Write
	for entry, err := range e.store.Scan(ctx, store.Prefix([]byte{spaceCircuit})) {
		var kept bool
		if err == nil {
			kept, err = e.restoreCircuit(entry)
		}
		switch {
		case err != nil:
			// It may be an operator's mode, under a key that comes back or in the form of
			// a newer version. The error names the upstream if it is known.
			e.logger.Warn("the state of a circuit breaker cannot be read; it is left as it is until the breaker changes its state",
				zap.Error(err))
		case !kept:
			gone = append(gone, store.Write{Key: entry.Key, Delete: true})
		}
	}
	for len(gone) > 0 {
		n := min(len(gone), store.MaxBatch)
		if _, err := e.store.Commit(ctx, gone[:n]...); err != nil {
			e.logger.Warn("the states of circuit breakers that are gone cannot be deleted", zap.Error(err))
			break
		}
		gone = gone[n:]
	}
	// What opened before this store did is in it from now on.
	if err := e.keepCircuits(ctx); err != nil {
		e.logger.Warn("the states of circuit breakers cannot be recorded", zap.Error(err))
	}
}

// circuitStart is how long a request waits at the start until the states of the breakers
// are read.
const circuitStart = 10 * time.Second

// opening is one attempt to open the store, for all who wait for it.
type opening struct {
	done chan struct{}
	err  error // once done is closed
}

// restoreCircuit reports false where nothing of the configuration leads to the upstream.
func (e *engine) restoreCircuit(entry store.Entry) (bool, error) {
	plain, err := e.ring.Open(nil, entry.Value, entry.Key)
	if err != nil {
		return false, err
	}
	s, err := breaker.DecodeSnapshot(plain)
	if err != nil {
		return false, err
	}
	kept, err := e.circuits.Restore(s)
	if kept && s.State != breaker.Closed {
		e.logger.Warn("a circuit breaker was not closed when the last process ended",
			zap.String("upstream", s.Upstream), zap.String("class", s.Class), zap.Stringer("state", s.State),
			zap.Time("until", s.Until), zap.String("cause", s.Cause))
	}
	return kept, err
}

// keepCircuit records the state of a breaker. A new breaker's is not recorded.
func (e *engine) keepCircuit(ctx context.Context, key breaker.Key) error {
	name := e.ring.Index("circuit", key.Upstream, key.Class)
	// What is recorded last has to be the newest.
	turn := &e.keeping[int(name[0])%len(e.keeping)]
	turn.Lock()
	defer turn.Unlock()
	w := store.Write{Key: append([]byte{spaceCircuit}, name[:16]...), Delete: true}
	if s, ok := e.circuits.Snapshot(key); ok {
		plain, err := s.Encode()
		if err != nil {
			return err
		}
		w.Delete, w.Value = false, e.ring.Seal(nil, plain, w.Key)
		if s.State == breaker.Closed && s.Mode == breaker.Auto {
			w.Expires = s.At.Add(circuitMemory)
		}
	}
	_, err := e.store.Commit(ctx, w)
	return err
}

// keepCircuits records the states of all breakers, sealed with the newest key. Where a
// state changes meanwhile, it is recorded once more: this commit may have come after
// that of the change.
func (e *engine) keepCircuits(ctx context.Context) error {
	before := map[breaker.Key]uint64{}
	for settled := false; !settled; {
		settled = true
		for _, s := range e.circuits.Status() {
			if before[s.Key] == s.Generation {
				continue
			}
			before[s.Key], settled = s.Generation, false
			// A new breaker has nothing recorded, unless it is what could not be read.
			if _, known := e.circuits.Snapshot(s.Key); !known && s.State == breaker.Closed && s.Mode == breaker.Auto {
				continue
			}
			if err := e.keepCircuit(ctx, s.Key); err != nil {
				return err
			}
		}
	}
	return nil
}

// circuitHook hears what becomes of the breakers while an engine is open. It is called
// for each breaker in order, so that the state that is recorded last is the newest.
type circuitHook struct{ e *engine }

// Transition implements breaker.Hook. The call that has changed the state waits for the
// commit, so that a crash does not undo what others have seen.
func (h circuitHook) Transition(ev breaker.Event) {
	level := zap.InfoLevel
	if ev.To == breaker.Open {
		level = zap.WarnLevel
	}
	h.e.logger.Log(level, "a circuit breaker is "+ev.To.String(), circuitFields(ev)...)
	h.e.emit(eventCircuit, circuitData(ev))

	if !h.e.changed(ev) {
		h.e.logger.Warn("too many changes of circuit breakers wait for the ledger; one is not recorded", circuitFields(ev)...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), circuitPatience)
	defer cancel()
	if err := h.e.keepCircuit(ctx, ev.Key); err != nil && !errors.Is(err, store.ErrClosed) {
		h.e.logger.Warn("the state of a circuit breaker cannot be recorded; a restart will forget it",
			zap.Stringer("upstream", ev.Key), zap.Error(err))
	}
}

// PermanentlyOpen implements breaker.Hook (ATD, HITL case 4).
func (h circuitHook) PermanentlyOpen(ev breaker.Event) {
	h.e.logger.Error("an upstream does not come back", circuitFields(ev)...)
	h.e.emit(eventCircuitGivesUp, circuitData(ev))
	h.e.escalateCircuit(ev)
}

// Dropped implements circuits.Hook. What is recorded of them goes too, an operator's mode
// included: the upstream would else come back, after any time, in a state that nobody saw
// in between. A configuration that ends, and leaves none behind, drops nothing for good.
func (h circuitHook) Dropped(gone []breaker.Status) {
	if !h.e.activeConfigs.lives() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), circuitPatience)
	defer cancel()
	for _, s := range gone {
		level := zap.InfoLevel
		if s.State != breaker.Closed || s.Mode != breaker.Auto {
			level = zap.WarnLevel
		}
		h.e.logger.Log(level, "a circuit breaker is forgotten: no configuration leads to its upstream any more",
			zap.String("upstream", s.Key.Upstream), zap.String("class", s.Key.Class), zap.Stringer("state", s.State), zap.Stringer("mode", s.Mode))
		// It records what there is: by now that may be a new one.
		if err := h.e.keepCircuit(ctx, s.Key); err != nil && !errors.Is(err, store.ErrClosed) {
			h.e.logger.Warn("the state of a circuit breaker that is gone cannot be deleted; the next opening of the store does it",
				zap.Stringer("upstream", s.Key), zap.Error(err))
		}
	}
}

func circuitFields(ev breaker.Event) []zap.Field {
	return []zap.Field{
		zap.String("upstream", ev.Key.Upstream), zap.String("class", ev.Key.Class),
		zap.Stringer("from", ev.From), zap.String("reason", string(ev.Reason)), zap.String("cause", ev.Cause),
		zap.Uint64("generation", ev.Generation), zap.Float64("error_rate", ev.ErrorRate),
		zap.Int("calls", ev.Calls), zap.Int("failures", ev.Failures),
		zap.Duration("cooldown", ev.Cooldown), zap.Int("failed_probes", ev.FailedProbes),
	}
}

func circuitData(ev breaker.Event) map[string]any {
	return map[string]any{
		"upstream": ev.Key.Upstream, "class": ev.Key.Class, "from": ev.From.String(), "to": ev.To.String(),
		"reason": string(ev.Reason), "cause": ev.Cause, "generation": ev.Generation,
		"cooldown": ev.Cooldown.String(), "failed_probes": ev.FailedProbes,
	}
}

var _ proxy.Hook = circuitHook{}

const (
	// maxCircuits is how many breakers are remembered beside themselves.
	maxCircuits = 1024
	// maxCircuitEvents is how many changes of breakers wait to be recorded at most.
	maxCircuitEvents = 256
	// circuitPlaceTime is how long an opening may take to its place in the ledger.
	circuitPlaceTime = 5 * time.Second
)

// circuitRecorder records the changes of breakers in the ledger: in their order, on a
// goroutine of its own.
type circuitRecorder struct {
	waiting chan func(context.Context)
	begin   func() // lets the recording begin
	stop    context.CancelFunc
	ended   chan struct{}
	// opened is the last recorded opening of each breaker that is not closed. Only the
	// goroutine uses it.
	opened map[breaker.Key]string
}

func (e *engine) startCircuitRecorder() {
	t := &e.recorder
	t.opened = map[breaker.Key]string{}
	t.waiting, t.ended = make(chan func(context.Context), maxCircuitEvents), make(chan struct{})
	var ctx context.Context
	ctx, t.stop = context.WithCancel(context.Background())
	begun := make(chan struct{})
	t.begin = sync.OnceFunc(func() { close(begun) })
	go func() {
		defer close(t.ended)
		select { // what comes before the ledger is open waits for it
		case <-begun:
		case <-ctx.Done():
		}
		for {
			select {
			case record := <-t.waiting:
				record(ctx)
			case <-ctx.Done():
				return
			}
		}
	}()
}

// end stops recording. What waits is lost to the ledger; the state itself is stored.
func (t *circuitRecorder) end() {
	t.stop()
	<-t.ended
}

// changed has a change recorded; false says that too many wait.
func (e *engine) changed(ev breaker.Event) bool {
	return e.recorder.later(func(ctx context.Context) { e.recordCircuit(ctx, ev) })
}

// later runs a recording in its turn; false says that too many wait.
func (t *circuitRecorder) later(record func(context.Context)) bool {
	select { // never waits: calls do
	case t.waiting <- record:
		return true
	default:
		return false
	}
}

// recordCircuit records one change (cascade 3.2.4): an opening follows from the error that
// caused it, and what comes after follows from the opening.
func (e *engine) recordCircuit(ctx context.Context, ev breaker.Event) {
	policy := e.latestPolicy()
	if policy == nil {
		return
	}
	if ev.To == breaker.Open {
		e.forCalls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return // nothing can be recorded then
	}
	c := evidence.Circuit{
		Event: circuitEvents[ev.To], Downstream: e.circuits.Downstream(ev.Key.Upstream),
		ErrorRate: ev.ErrorRate, Window: ev.Window, Cooldown: ev.Cooldown, TotalCooldown: ev.TotalCooldown, Reason: string(ev.Reason),
	}
	last := e.recorder.opened[ev.Key] // newer than the event's, which is of the moment of the change
	if last == "" {
		last = ev.Reference
	}
	if ev.To != breaker.Open {
		if ev.To == breaker.Closed {
			delete(e.recorder.opened, ev.Key)
		}
		if last != "" {
			c.Parents = []string{last}
			placed, cancel := context.WithTimeout(ctx, circuitPlaceTime) // it may have been recorded a moment ago
			c.Workflow, _ = policy.Evidence.WorkflowOf(placed, last)     // none where the opening is pruned
			cancel()
		}
		if _, err := e.recordDraft(ctx, policy.TokenPolicy, now, &c); err != nil {
			e.circuitUnrecorded(ev.Key, ev.To, err)
		}
		return
	}
	id, err := e.recordOpening(ctx, policy, now, &c, ev, last)
	if err != nil {
		e.circuitUnrecorded(ev.Key, ev.To, err)
		return
	}
	if len(e.recorder.opened) >= maxCircuits {
		clear(e.recorder.opened) // breakers that were dropped; the others know themselves
	}
	e.recorder.opened[ev.Key] = id
	e.circuits.Keep(ev, id)
	if err := e.keepCircuit(ctx, ev.Key); err != nil { // with the reference
		e.circuitUnrecorded(ev.Key, ev.To, err)
	}
}

// recordOpening records an opening in the workflow of the call whose failure caused it,
// and returns its id. It follows from the opening before it too, if that is of the same
// workflow.
func (e *engine) recordOpening(ctx context.Context, policy *tokenPolicy, now time.Time, c *evidence.Circuit, ev breaker.Event, last string) (string, error) {
	if ev.Reason == breaker.ByOperator {
		return e.recordDraft(ctx, policy.TokenPolicy, now, c) // nothing has failed
	}
	failure, drafts, err := policy.failureOf(ctx, now, c, ev)
	if err != nil {
		return "", err
	}
	before, err := policy.Evidence.Known(ctx, c.Workflow, []string{last})
	if err != nil {
		return "", err
	}
	c.Parents = append([]string{failure}, before...)
	return e.recordDraft(ctx, policy.TokenPolicy, now, c, drafts...)
}

// recordDraft records a change, behind what it follows from, and returns its id.
func (e *engine) recordDraft(ctx context.Context, policy *guard.TokenPolicy, now time.Time, c *evidence.Circuit, before ...*ect.Draft) (string, error) {
	draft, err := policy.Events.Circuit(now, c)
	if err != nil {
		return "", err
	}
	return draft.ID(), policy.Evidence.Append(ctx, now.Add(guard.KeepCircuitTokens), nil, append(before, draft)...)
}

// circuitEvents are the events of changes, by the new state.
var circuitEvents = map[breaker.State]ect.Event{
	breaker.Open: ect.EventCircuitOpen, breaker.HalfOpen: ect.EventCircuitHalfOpen, breaker.Closed: ect.EventCircuitClose,
}

func (e *engine) circuitUnrecorded(key breaker.Key, to breaker.State, err error) {
	e.logger.Error("a change of a circuit breaker cannot be recorded in the ledger", zap.Stringer("upstream", key), zap.Stringer("to", to), zap.Error(err))
}

// latestPolicy is the token policy of the latest configuration; nil without an identity.
func (e *engine) latestPolicy() *tokenPolicy {
	a := e.activeConfigs.latest()
	if a == nil {
		return nil
	}
	return a.policy.Load()
}

// circuitReport is how the breakers are, for metrics.
func (e *engine) circuitReport() (all []circuitReport) {
	for _, s := range e.circuits.Status() {
		r := circuitReport{Upstream: s.Key.Upstream, Class: s.Key.Class, ErrorRate: s.ErrorRate, Openings: s.Openings, Rejected: s.Rejected}
		switch s.State {
		case breaker.HalfOpen:
			r.State = 1
		case breaker.Open:
			r.State = 2
		}
		all = append(all, r)
	}
	return all
}

// describeCircuit describes a breaker, with the recorded error of its last failure.
func describeCircuit(ctx context.Context, circuits *proxy.Member, policy *tokenPolicy, s *breaker.Status) proxy.Circuit {
	c := circuits.Describe(s)
	c.LastFailure = policy.lastFailure(ctx, s)
	return c
}

// rejectionRecorder is the recorder of an engine's breakers for the way of a call.
type rejectionRecorder struct{ e *engine }

func (r rejectionRecorder) Name(upstream string) string { return r.e.circuits.Downstream(upstream) }

// Busy implements guard.Circuits. Changes of breakers always find room.
func (r rejectionRecorder) Busy() bool { return len(r.e.recorder.waiting) >= maxCircuitEvents/2 }

func (r rejectionRecorder) RecordRejection(policy *guard.TokenPolicy, open *breaker.OpenError, workflow string, parents []string) {
	r.e.recorder.later(func(ctx context.Context) { recordRejected(ctx, r.e, policy, open, workflow, parents) })
}

func (r rejectionRecorder) Unrecorded(key breaker.Key, err error) {
	r.e.circuitUnrecorded(key, breaker.Open, err)
}

// recordRejected records a rejection, with those of ids as parents that are recorded: the tokens
// of a call that was not claimed are not.
func recordRejected(ctx context.Context, e *engine, policy *guard.TokenPolicy, open *breaker.OpenError, workflow string, ids []string) {
	now, err := e.store.Now(ctx)
	if err != nil {
		return // nothing can be recorded then
	}
	c := evidence.Circuit{
		Event: ect.EventCircuitOpen, Downstream: e.circuits.Downstream(open.Key.Upstream), Workflow: workflow, Reason: rejectedReason,
		ErrorType: api.CircuitOpen.ErrorType,
	}
	for _, s := range e.circuits.Status() {
		if s.Key == open.Key {
			c.ErrorRate, c.Window, c.Cooldown = s.ErrorRate, s.Window, s.Cooldown
			ids = append(ids, s.Reference) // left out if it is of another workflow
		}
	}
	if c.Parents, err = policy.Evidence.Known(ctx, workflow, ids); err == nil {
		_, err = e.recordDraft(ctx, policy, now, &c)
	}
	if err != nil {
		e.circuitUnrecorded(open.Key, breaker.Open, err)
	}
}

// rejectedReason distinguishes a rejection from an opening.
const rejectedReason = "rejected"
