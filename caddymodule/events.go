package caddymodule

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

// The events that the app emits. Their data name guards, actions, states, hashes and
// upstreams, never an id of a caller's, a path or a
// caller (P8). docs/observability.md lists them.
const (
	eventInDoubt        = "agent_guard.execution_in_doubt"
	eventResolved       = "agent_guard.execution_resolved"
	eventRecovered      = "agent_guard.executions_recovered"
	eventMismatch       = "agent_guard.fingerprint_mismatch"
	eventFailOpen       = "agent_guard.fail_open"
	eventStoreUnhealthy = "agent_guard.store_unhealthy"
	eventDiskLow        = "agent_guard.disk_low"
	eventDiskRecovered  = "agent_guard.disk_recovered"
	eventKeysRotated    = "agent_guard.keys_rotated"

	eventIdentityRotated = "agent_guard.identity_rotated"
	eventCircuit         = "agent_guard.circuit_changed"
	eventCircuitGivesUp  = "agent_guard.circuit_permanently_open"

	eventRollbackStarted  = "agent_guard.rollback_started"
	eventRollbackFinished = "agent_guard.rollback_finished"
	eventEscalated        = "agent_guard.escalation_opened"
	eventUndeliverable    = "agent_guard.escalation_undeliverable"
)

// maxEvents is how many events wait for handlers at most.
const maxEvents = 256

// flushPatience is how long an exit waits for the handlers of events.
const flushPatience = 5 * time.Second

// emit tells the handlers of an event, and the debug log. It never waits: handlers
// are called one event after the other in the background. Where they are too slow,
// events are dropped and counted.
func (a *App) emit(name string, data map[string]any) {
	if !a.events.ShouldEmit(name) {
		return
	}
	if !a.pending.put(pendingEvent{name, data}, a.tell) {
		a.counts.EventDropped()
	}
}

// tell calls the handlers. What they do wrong is theirs.
func (a *App) tell(e pendingEvent) {
	defer func() {
		if p := recover(); p != nil {
			a.logger.Error("a handler of an event panicked", zap.String("event", e.name), zap.String("panic", fmt.Sprint(p)))
		}
	}()
	if a.ctx.Err() == nil { // else its handlers are gone
		a.events.Emit(a.ctx, e.name, e.data)
	}
}

type pendingEvent struct {
	name string
	data map[string]any
}

// pendingEvents wait for their handlers. The goroutine that serves them lives for as
// long as any waits.
type pendingEvents struct {
	mu    sync.Mutex
	queue []pendingEvent
	idle  chan struct{} // closed when the queue is empty; nil while it is
}

// put queues e for serve, or reports that too many wait.
func (p *pendingEvents) put(e pendingEvent, serve func(pendingEvent)) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) >= maxEvents {
		return false
	}
	p.queue = append(p.queue, e)
	if p.idle == nil {
		p.idle = make(chan struct{})
		go p.run(serve)
	}
	return true
}

func (p *pendingEvents) run(serve func(pendingEvent)) {
	for {
		p.mu.Lock()
		if len(p.queue) == 0 {
			close(p.idle)
			p.queue, p.idle = nil, nil
			p.mu.Unlock()
			return
		}
		e := p.queue[0]
		p.queue = p.queue[1:]
		p.mu.Unlock()
		serve(e)
	}
}

// flush waits until no event waits, but not for long.
func (p *pendingEvents) flush() {
	p.mu.Lock()
	idle := p.idle
	p.mu.Unlock()
	if idle == nil {
		return
	}
	late := time.NewTimer(flushPatience)
	defer late.Stop()
	select {
	case <-idle:
	case <-late.C:
	}
}

// audience is who hears of an engine's events: the configurations that use it. The
// latest speaks for all, so that an execution that has outlived its configuration is
// told of to the handlers of today.
type audience struct {
	mu   sync.Mutex
	apps []*App
}

func (u *audience) join(a *App) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.apps = append(u.apps, a)
}

func (u *audience) leave(a *App) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for i := range u.apps {
		if u.apps[i] == a {
			u.apps = append(u.apps[:i:i], u.apps[i+1:]...)
			return
		}
	}
}

// latest is the configuration that was loaded last, or nil.
func (u *audience) latest() *App {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.apps) == 0 {
		return nil
	}
	return u.apps[len(u.apps)-1]
}

// lives reports whether any configuration goes on: on a reload the new one does, while
// what the old one held is given up.
func (u *audience) lives() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.ContainsFunc(u.apps, func(a *App) bool { return a.ctx.Err() == nil })
}

// emit tells of something that happened to the engine or an execution in it.
func (e *engine) emit(name string, data map[string]any) {
	if a := e.audience.latest(); a != nil {
		a.emit(name, data)
	}
}

// flushEvents lets the handlers hear what happened before the process is gone.
func (e *engine) flushEvents() {
	if a := e.audience.latest(); a != nil {
		a.pending.flush()
	}
}

// emit tells of something that happened to this call.
func (x *exchange) emit(name string, more map[string]any) {
	a := x.h.app
	if x.engine != nil {
		if latest := x.engine.audience.latest(); latest != nil {
			a = latest
		}
	}
	if !a.events.ShouldEmit(name) {
		return
	}
	data := map[string]any{"guard": x.h.Name, "action": x.action.Name}
	if x.identified() {
		data["key"], data["caller"] = x.call.Key.String(), x.callerHash()
	}
	for k, v := range more {
		data[k] = v
	}
	a.emit(name, data)
}
