package caddymodule

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/proxy"
	"github.com/agent-guard/caddy-agent-guard/ect"
	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/evidence"
	"github.com/agent-guard/caddy-agent-guard/guard/problem"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// circuitPatience is how long the call that changed a breaker's state waits for the store.
const circuitPatience = 5 * time.Second

// circuitStart is how long a request waits at startup for the states of the breakers.
const circuitStart = 10 * time.Second

// opening is one attempt to open the store, for all who wait for it.
type opening struct {
	done chan struct{}
	err  error // set before done is closed
}

// circuitHook receives the events of the breakers while an engine is open, for each breaker
// in order, so that the newest state is stored last.
type circuitHook struct{ e *engine }

// Transition implements breaker.Hook. The call that changed the state waits for the commit,
// so that a crash does not revert a change that others have seen.
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
	if err := h.e.breakers.Transition(ctx, ev); err != nil && !errors.Is(err, store.ErrClosed) {
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

// Probe implements proxy.Hook.
func (h circuitHook) Probe(ctx context.Context, key breaker.Key, lasts time.Duration) (release func(), until time.Time, ok bool) {
	return h.e.breakers.Probe(ctx, key, lasts)
}

// Slow implements proxy.Hook.
func (h circuitHook) Slow(upstream string, is bool) { h.e.cascades.Slow(upstream, is) }

// Dropped implements proxy.Hook. It deletes the stored states too, including modes set by
// operators: otherwise the upstream could come back much later in a forgotten state. The
// end of the last configuration drops nothing.
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
		// Keep stores the current state: by now there may be a new breaker.
		if err := h.e.breakers.Keep(ctx, s.Key, true); err != nil && !errors.Is(err, store.ErrClosed) {
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
	// maxCircuits bounds the references to openings that are kept in memory.
	maxCircuits = 1024
	// maxCircuitEvents is the largest number of changes that wait to be recorded.
	maxCircuitEvents = 256
)

// circuitRecorder records the changes of breakers in the ledger, in order. Changes that wait when it ends are not
// recorded there; the states themselves are stored.
type circuitRecorder struct {
	job
	waiting chan func(context.Context)
	// opened is the id of the last recorded opening of each breaker that is not closed.
	// Only the goroutine uses it.
	opened map[breaker.Key]string
}

func (e *engine) startCircuitRecorder() {
	t := &e.recorder
	t.opened = map[breaker.Key]string{}
	t.waiting = make(chan func(context.Context), maxCircuitEvents)
	t.job = startJob(func(ctx context.Context) { // changes before the ledger is open wait for it
		for {
			select {
			case record := <-t.waiting:
				record(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
}

// changed queues a change for recording; false says that the queue is full.
func (e *engine) changed(ev breaker.Event) bool {
	return e.recorder.later(func(ctx context.Context) { e.recordCircuit(ctx, ev) })
}

// later queues a recording; false says that the queue is full.
func (t *circuitRecorder) later(record func(context.Context)) bool {
	select { // never blocks, because calls wait for it
	case t.waiting <- record:
		return true
	default:
		return false
	}
}

// recordCircuit records one change (cascade 3.2.4). The parent of an opening is the error
// that caused it; the parent of later changes is the opening.
func (e *engine) recordCircuit(ctx context.Context, ev breaker.Event) {
	id, workflow := "", ""
	defer func() { e.cascades.Circuit(ev, id, workflow) }()
	policy := e.latestPolicy()
	if policy == nil {
		return
	}
	if ev.To == breaker.Open {
		e.calls.AwaitCall(ctx, guard.ParseEvidence(ev.Evidence).Checkpoint)
	}
	now, err := e.calls.Store.Now(ctx)
	if err != nil {
		return // the store is closed
	}
	c := evidence.Circuit{
		Event: circuitEvents[ev.To], Downstream: e.circuits.Downstream(ev.Key.Upstream),
		ErrorRate: ev.ErrorRate, Window: ev.Window, Cooldown: ev.Cooldown, TotalCooldown: ev.TotalCooldown, Reason: string(ev.Reason),
	}
	last := e.recorder.opened[ev.Key] // newer than the event's, which was taken at the change
	if last == "" {
		last = ev.Reference
	}
	if ev.To != breaker.Open || ev.Reason == breaker.PeerFailed { // the error is of another node's probe
		if ev.To == breaker.Closed {
			delete(e.recorder.opened, ev.Key)
		}
		if last != "" {
			c.Parents = []string{last}
			c.Workflow, _ = policy.Evidence.WorkflowOf(ctx, last) // without it if it cannot be read
		}
		if _, err := e.recordDraft(ctx, policy.TokenPolicy, now, &c); err != nil {
			e.circuitUnrecorded(ev.Key, ev.To, err)
		}
		return
	}
	opening, err := e.recordOpening(ctx, policy, now, &c, ev, last)
	if err != nil {
		e.circuitUnrecorded(ev.Key, ev.To, err)
		return
	}
	id, workflow = opening, c.Workflow
	if len(e.recorder.opened) >= maxCircuits {
		clear(e.recorder.opened) // drops those of forgotten breakers; the others have their references
	}
	e.recorder.opened[ev.Key] = id
	e.circuits.Keep(ev, id)
	if err := e.breakers.Keep(ctx, ev.Key, false); err != nil { // with the new reference
		e.circuitUnrecorded(ev.Key, ev.To, err)
	}
}

// recordOpening records an opening in the workflow of the call whose failure caused it, and
// returns its id. The previous opening is a parent too if it is in the same workflow.
func (e *engine) recordOpening(ctx context.Context, policy *tokenPolicy, now time.Time, c *evidence.Circuit, ev breaker.Event, last string) (string, error) {
	if ev.Reason == breaker.ByOperator || ev.Reason == breaker.ByCascade {
		return e.recordDraft(ctx, policy.TokenPolicy, now, c) // no call failed
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

// recordDraft records a change after its parents, and returns its id.
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

// describeCircuit describes a breaker, with the recorded error of its last failure.
func describeCircuit(ctx context.Context, circuits *proxy.Member, policy *tokenPolicy, s *breaker.Status) proxy.Circuit {
	c := circuits.Describe(s)
	c.LastFailure = policy.lastFailure(ctx, s)
	return c
}

// describeCircuits describes the breakers of this process, and with fleet those of the other nodes of the
// store too.
func (e *engine) describeCircuits(ctx context.Context, policy *tokenPolicy, fleet bool) ([]proxy.Circuit, error) {
	all := []proxy.Circuit{}
	var keys []breaker.Key
	for _, s := range e.circuits.Status() {
		c := describeCircuit(ctx, e.circuits, policy, &s)
		if fleet {
			c.Node = e.breakers.Node
		}
		all, keys = append(all, c), append(keys, s.Key)
	}
	if !fleet {
		return all, nil
	}
	others, err := e.breakers.Others(ctx, keys)
	if err != nil {
		return nil, err
	}
	for i := range others {
		o := &others[i]
		c := describeCircuit(ctx, e.circuits, policy, &o.Status)
		c.Node, c.Age = o.Node, int64(o.Age/time.Second)
		all = append(all, c)
	}
	return all, nil
}

// rejectionRecorder records rejections for package guard.
type rejectionRecorder struct{ e *engine }

func (r rejectionRecorder) Name(upstream string) string { return r.e.circuits.Downstream(upstream) }

// Busy implements guard.Circuits. Half of the queue stays free for changes of breakers.
func (r rejectionRecorder) Busy() bool { return len(r.e.recorder.waiting) >= maxCircuitEvents/2 }

func (r rejectionRecorder) RecordRejection(policy *guard.TokenPolicy, open *breaker.OpenError, workflow string, parents []string) {
	r.e.recorder.later(func(ctx context.Context) { recordRejected(ctx, r.e, policy, open, workflow, parents) })
}

func (r rejectionRecorder) Unrecorded(key breaker.Key, err error) {
	r.e.circuitUnrecorded(key, breaker.Open, err)
}

// recordRejected records a rejection. Its parents are those of ids that are recorded: the
// tokens of a call that was not claimed are not.
func recordRejected(ctx context.Context, e *engine, policy *guard.TokenPolicy, open *breaker.OpenError, workflow string, ids []string) {
	now, err := e.calls.Store.Now(ctx)
	if err != nil {
		return // the store is closed
	}
	c := evidence.Circuit{
		Event: ect.EventCircuitOpen, Downstream: e.circuits.Downstream(open.Key.Upstream), Workflow: workflow, Reason: rejectedReason,
		ErrorType: problem.CircuitOpen.ErrorType,
	}
	for _, s := range e.circuits.Status() {
		if s.Key == open.Key {
			c.ErrorRate, c.Window, c.Cooldown = s.ErrorRate, s.Window, s.Cooldown
			ids = append(ids, s.Reference) // ignored if it is of another workflow
		}
	}
	if c.Parents, err = policy.Evidence.Known(ctx, workflow, ids); err == nil {
		_, err = e.recordDraft(ctx, policy, now, &c)
	}
	if err != nil {
		e.circuitUnrecorded(open.Key, breaker.Open, err)
	}
}

// rejectedReason tells a rejection from an opening.
const rejectedReason = "rejected"
