package caddymodule

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

const (
	// maxCircuits is how many breakers are remembered beside themselves.
	maxCircuits = 1024
	// maxCircuitEvents is how many changes of breakers wait to be told of at most.
	maxCircuitEvents = 256
	// circuitPlaceTime is how long an opening may take to its place in the ledger.
	circuitPlaceTime = 5 * time.Second
	// keepCircuitTokens is how long the ledger keeps what it is told of breakers.
	keepCircuitTokens = 24 * time.Hour
)

// circuitTeller tells the ledger of the changes of breakers, in their order and off the
// way of the calls that have caused them.
type circuitTeller struct {
	waiting chan func(context.Context)
	begin   func() // lets the telling begin
	stop    context.CancelFunc
	ended   chan struct{}
	// opened is the last opening that was told of each breaker that is not closed. Only
	// who tells uses it.
	opened map[breaker.Key]string
	// rejections are the workflows that were told that a breaker rejects them.
	rejections rejections
}

func (e *engine) startCircuitTeller() {
	t := &e.teller
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
			case tell := <-t.waiting:
				tell(ctx)
			case <-ctx.Done():
				return
			}
		}
	}()
}

// end stops telling. What waits is told of by no one: the state itself is recorded.
func (t *circuitTeller) end() {
	t.stop()
	<-t.ended
}

// changed has a change told; false says that too many wait.
func (e *engine) changed(ev breaker.Event) bool {
	return e.teller.later(func(ctx context.Context) { e.tellCircuit(ctx, ev) })
}

// opens remembers what was told of an opening.
func (t *circuitTeller) opens(key breaker.Key, id string) {
	if len(t.opened) >= maxCircuits {
		clear(t.opened) // breakers that were dropped; the others know themselves
	}
	t.opened[key] = id
}

// later has something told in its turn; false says that too much waits.
func (t *circuitTeller) later(tell func(context.Context)) bool {
	select { // never waits: calls do
	case t.waiting <- tell:
		return true
	default:
		return false
	}
}

// tellCircuit tells of one change (cascade 3.2.4): an opening follows from the error that
// caused it, and what comes after follows from the opening.
func (e *engine) tellCircuit(ctx context.Context, ev breaker.Event) {
	way := e.latestWay()
	if way == nil {
		return
	}
	if ev.To == breaker.Open {
		e.awaitCall(ctx, ev)
	}
	now, err := e.store.Now(ctx)
	if err != nil {
		return // nothing can be recorded then
	}
	c := evidence.Circuit{
		Event: circuitEvents[ev.To], Downstream: e.circuits.Downstream(ev.Key.Upstream),
		ErrorRate: ev.ErrorRate, Window: ev.Window, Cooldown: ev.Cooldown, TotalCooldown: ev.TotalCooldown, Reason: string(ev.Reason),
	}
	last := e.teller.opened[ev.Key] // newer than the event's, which is of the moment of the change
	if last == "" {
		last = ev.Reference
	}
	if ev.To != breaker.Open {
		if ev.To == breaker.Closed {
			delete(e.teller.opened, ev.Key)
		}
		if last != "" {
			c.Parents = []string{last}
			c.Workflow, _ = e.workflowOf(ctx, way, last) // none where the opening is pruned
		}
		if _, err := e.tellDraft(ctx, way, now, &c); err != nil {
			e.untold(ev.Key, ev.To, err)
		}
		return
	}
	id, err := e.tellOpening(ctx, way, now, &c, ev, last)
	if err != nil {
		e.untold(ev.Key, ev.To, err)
		return
	}
	e.teller.opens(ev.Key, id)
	e.circuits.Keep(ev, id)
	if err := e.keepCircuit(ctx, ev.Key); err != nil { // with the reference
		e.untold(ev.Key, ev.To, err)
	}
}

// tellOpening tells of an opening in the workflow of the call whose failure caused it,
// and returns its id. It follows from the opening before it too, if that is of the same
// workflow.
func (e *engine) tellOpening(ctx context.Context, way *testimony, now time.Time, c *evidence.Circuit, ev breaker.Event, last string) (string, error) {
	if ev.Reason == breaker.ByOperator {
		return e.tellDraft(ctx, way, now, c) // nothing has failed
	}
	failure, drafts, err := e.failureOf(ctx, way, now, c, ev)
	if err != nil {
		return "", err
	}
	before, err := way.evidence.Known(ctx, c.Workflow, []string{last})
	if err != nil {
		return "", err
	}
	c.Parents = append([]string{failure}, before...)
	return e.tellDraft(ctx, way, now, c, drafts...)
}

// tellDraft records a change, behind what it follows from, and returns its id.
func (e *engine) tellDraft(ctx context.Context, way *testimony, now time.Time, c *evidence.Circuit, before ...*ect.Draft) (string, error) {
	draft, err := way.witness.Circuit(now, c)
	if err != nil {
		return "", err
	}
	return draft.ID(), way.evidence.Append(ctx, now.Add(keepCircuitTokens), nil, append(before, draft)...)
}

// workflowOf waits for what was told a moment ago.
func (e *engine) workflowOf(ctx context.Context, way *testimony, id string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, circuitPlaceTime)
	defer cancel()
	return way.evidence.WorkflowOf(ctx, id)
}

// circuitEvents are the events of changes, by the new state.
var circuitEvents = map[breaker.State]ect.Event{
	breaker.Open: ect.EventCircuitOpen, breaker.HalfOpen: ect.EventCircuitHalfOpen, breaker.Closed: ect.EventCircuitClose,
}

func (e *engine) untold(key breaker.Key, to breaker.State, err error) {
	e.logger.Error("the ledger cannot be told of a circuit breaker", zap.Stringer("upstream", key), zap.Stringer("to", to), zap.Error(err))
}

// latestWay is how the latest configuration tells; nil without an identity.
func (e *engine) latestWay() *testimony {
	a := e.audience.latest()
	if a == nil {
		return nil
	}
	return a.way.Load()
}

// circuitReport is how the breakers are, for metrics.
func (e *engine) circuitReport() (all []metrics.CircuitReport) {
	for _, s := range e.circuits.Status() {
		r := metrics.CircuitReport{Upstream: s.Key.Upstream, Class: s.Key.Class, ErrorRate: s.ErrorRate, Openings: s.Openings, Rejected: s.Rejected}
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
