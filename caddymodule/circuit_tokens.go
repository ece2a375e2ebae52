package caddymodule

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/evidence"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/ect"
)

const (
	// maxCircuitEvents is how many changes of breakers wait to be told of at most.
	maxCircuitEvents = 256
	// circuitErrorTime is how long the error that opened a breaker may take to its
	// place in the ledger: it is told with the outcome of its call, a moment later.
	circuitErrorTime = 5 * time.Second
	// keepCircuitTokens is how long the ledger keeps what it is told of breakers.
	keepCircuitTokens = 24 * time.Hour
)

// circuitTeller tells the ledger of the changes of breakers, in their order and off the
// way of the calls that have caused them.
type circuitTeller struct {
	events chan breaker.Event
	stop   context.CancelFunc
	ended  chan struct{}
	// openings counts the openings of each breaker: breaker.Key -> *atomic.Uint64.
	openings sync.Map
}

func (e *engine) startCircuitTeller() {
	t := &e.teller
	t.events, t.ended = make(chan breaker.Event, maxCircuitEvents), make(chan struct{})
	var ctx context.Context
	ctx, t.stop = context.WithCancel(context.Background())
	go func() {
		defer close(t.ended)
		for {
			select {
			case ev := <-t.events:
				e.tellCircuit(ctx, ev)
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

// tell takes a change that is to be told of.
func (t *circuitTeller) tell(ev breaker.Event) bool {
	if ev.To == breaker.Open {
		n, _ := t.openings.LoadOrStore(ev.Key, new(atomic.Uint64))
		n.(*atomic.Uint64).Add(1)
	}
	select {
	case t.events <- ev:
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
	now, err := e.store.Now(ctx)
	if err != nil {
		return // nothing can be recorded then
	}
	c := evidence.Circuit{
		Event: circuitEvents[ev.To], Downstream: e.circuits.Downstream(ev.Key.Upstream), Parent: ev.Reference,
		ErrorRate: ev.ErrorRate, Window: ev.Window, Cooldown: ev.Cooldown, TotalCooldown: ev.TotalCooldown, Reason: string(ev.Reason),
	}
	var drafts []*ect.Draft
	switch {
	case ev.Reference != "":
		c.Workflow, _ = way.evidence.WorkflowOf(ctx, ev.Reference)
	case ev.Evidence != "":
		c.Parent = way.evidence.ErrorID(ev.Evidence)
		waits, cancel := context.WithTimeout(ctx, circuitErrorTime)
		c.Workflow, err = way.evidence.WorkflowOf(waits, c.Parent)
		cancel()
	}
	if err != nil || c.Parent == "" {
		// Of a call that is not guarded nobody else tells.
		failure, err := way.witness.UpstreamFailure(now, c.Downstream, ev.Cause)
		if err != nil {
			e.untold(ev, err)
			return
		}
		drafts, c.Parent, c.Workflow = append(drafts, failure), failure.ID(), ""
	}
	draft, err := way.witness.Circuit(now, &c)
	if err == nil {
		err = way.evidence.Append(ctx, now.Add(keepCircuitTokens), nil, append(drafts, draft)...)
	}
	if err != nil {
		e.untold(ev, err)
		return
	}
	if ev.To != breaker.Open {
		return
	}
	e.circuits.Keep(ev, draft.ID())
	if err := e.keepCircuit(ctx, ev.Key); err != nil { // with the reference
		e.untold(ev, err)
	}
}

// circuitEvents are the events of changes, by the new state.
var circuitEvents = map[breaker.State]ect.Event{
	breaker.Open: ect.EventCircuitOpen, breaker.HalfOpen: ect.EventCircuitHalfOpen, breaker.Closed: ect.EventCircuitClose,
}

func (e *engine) untold(ev breaker.Event, err error) {
	e.logger.Error("the ledger cannot be told of a circuit breaker", zap.Stringer("upstream", ev.Key), zap.Stringer("to", ev.To), zap.Error(err))
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
		openings, _ := e.teller.openings.Load(s.Key)
		n, _ := openings.(*atomic.Uint64)
		r := metrics.CircuitReport{Upstream: s.Key.Upstream, Class: s.Key.Class, ErrorRate: s.ErrorRate, Rejected: s.Rejected}
		if n != nil {
			r.Openings = n.Load()
		}
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
