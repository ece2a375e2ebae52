package caddymodule

import (
	"context"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"
)

// At exit Caddy stops its apps in no particular order, and http's Stop closes the
// listeners and waits for as long as any request runs. New calls can be refused
// with an answer, and slow ones bounded by `drain`, only before any app stops: at
// the event that Caddy emits then. Executions that outlived a reload which took the
// guard out of the configuration have nobody to hear it for them; they are awaited
// last.
func init() {
	caddy.OnExit(func(context.Context) { engines.exit() })
}

// exitEvent is the event before the apps of a configuration are stopped.
const exitEvent = "stopping"

// exitWatch hears it.
type exitWatch struct{}

// Handle waits for running executions if the process is about to exit. On a reload
// they go on: each holds its engine open by itself.
func (exitWatch) Handle(context.Context, caddy.Event) error {
	if caddy.Exiting() {
		engines.exit()
	}
	return nil
}

// cutGrace is how long the recording of what was cut may take.
const cutGrace = 5 * time.Second

// exit ends all engines' executions.
func (p *enginePool) exit() {
	var all sync.WaitGroup
	p.pool.Range(func(_, value any) bool {
		all.Go(value.(*engine).exit)
		return true
	})
	all.Wait()
}

// exit starts no new executions and waits for the running ones. What outlasts the
// drain is cut, and recorded as in doubt, so that it does not keep the process.
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
		if left == 0 {
			return
		}
		e.logger.Warn("executions outlast the drain; they are in doubt",
			zap.Int("running", left), zap.Duration("drain", drain))
		e.cut()
		e.await(cutGrace)
	})
}

// await reports how many executions are still running after bound.
func (e *engine) await(bound time.Duration) int {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	return e.guard.Drain(ctx)
}

// detach returns the context of an execution: what the request knows, but not its
// end (P7). It is over at the deadline, or when an exit can wait no longer.
func (e *engine) detach(request context.Context, deadline time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(request), deadline)
	stop := context.AfterFunc(e.uncut, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

var _ caddyevents.Handler = exitWatch{}
