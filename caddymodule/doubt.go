package caddymodule

import (
	"context"
	"errors"
	"sync"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/answer"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/problem"
	"github.com/agent-guard/caddy-agent-guard/guard"
)

// inDoubt refuses a call that may have been executed.
func (x *exchange) inDoubt(cause guard.Cause) error {
	return x.problem(problem.InDoubt, "Cause: "+string(cause)+".", guard.StateInDoubt)
}

// doubt settles a call in doubt as its action says.
func (x *exchange) doubt(found guard.Finding) (step, error) {
	switch x.action.OnUnknown {
	case onUnknownRetry:
		return stepClaim, nil
	case onUnknownProbe:
		return x.probe(found)
	}
	return stepDone, x.inDoubt(found.Record.Cause)
}

// mayHaveRun reports that the call runs although nobody knows whether it did before: its
// action says so, and no probe has denied it.
func (x *exchange) mayHaveRun() bool { return x.earlier != "" }

// stillInDoubt is the outcome of an attempt that was not executed, where an earlier one may
// have been: what is proven of this one says nothing of that (P6).
func (x *exchange) stillInDoubt(o guard.Outcome) guard.Outcome {
	if o.Verdict == guard.Released && x.mayHaveRun() {
		o.Verdict, o.Cause = guard.InDoubt, x.earlier
	}
	return o
}

// refusedInDoubt says with a refusal of the call that it may have been executed before.
func (x *exchange) refusedInDoubt(err error) error {
	if p := (*problem.Problem)(nil); errors.As(err, &p) && x.mayHaveRun() {
		p.Doubtful, p.State = true, guard.StateInDoubt.String()
	}
	return err
}

// followedInVain goes on with a call that got nothing from the execution that it
// followed. Released unsent, one of those that wait may run. In doubt, none: on_unknown
// is for calls that come afterwards; applied here, each would run in its turn.
func (x *exchange) followedInVain(flight *guard.Flight) (step, error) {
	select {
	case <-flight.Done():
	default:
		return stepFind, nil
	}
	if flight.Ending() != guard.EndedInDoubt {
		return stepFind, nil
	}
	found, err := x.find()
	if err != nil {
		return stepDone, err
	}
	cause := guard.CauseUnrecorded
	if found.Standing == guard.Doubtful {
		cause = found.Record.Cause
	}
	return stepDone, x.inDoubt(cause)
}

// prober lets one probe run for a key at a time; the others wait for what it finds.
type prober struct {
	mu      sync.Mutex
	running map[guard.Key]*probing
}

// probing is a probe that runs.
type probing struct {
	over chan struct{}
	// doubt says, once over is closed, that the call stays in doubt.
	doubt bool
}

// enter returns the probe of key, and whether the caller is to make it. Who makes it
// must call leave.
func (p *prober) enter(key guard.Key) (probe *probing, first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if probe, ok := p.running[key]; ok {
		return probe, false
	}
	if p.running == nil {
		p.running = map[guard.Key]*probing{}
	}
	probe = &probing{over: make(chan struct{})}
	p.running[key] = probe
	return probe, true
}

func (p *prober) leave(key guard.Key, probe *probing) {
	p.mu.Lock()
	delete(p.running, key)
	p.mu.Unlock()
	close(probe.over)
}

// probe settles a call in doubt by asking the upstream about it. Of many retries one
// asks; the others do what its answer allows.
func (x *exchange) probe(found guard.Finding) (step, error) {
	probe, first := x.h.probes.enter(x.call.Key)
	if !first {
		select {
		case <-probe.over:
		case <-x.r.Context().Done():
			return stepDone, x.gone()
		}
		if probe.doubt {
			return stepDone, x.inDoubt(found.Record.Cause)
		}
		return stepFind, nil
	}
	x.probing = probe
	// It may have been settled since it was found.
	found, err := x.find()
	if err != nil || found.Standing != guard.Doubtful {
		x.probed()
		return stepFind, err
	}
	next, err := x.settleDoubt(found)
	if next == stepDone && err == nil {
		probe.doubt = true
		err = x.inDoubt(found.Record.Cause)
	}
	if next != stepClaim { // those who wait must find the claim
		x.probed()
	}
	return next, err
}

// probed lets those go who wait for the probe of this call.
func (x *exchange) probed() {
	if x.probing != nil {
		x.h.probes.leave(x.call.Key, x.probing)
		x.probing = nil
	}
}

// settleDoubt asks, and records that the call was applied. stepDone says that it stays
// in doubt.
func (x *exchange) settleDoubt(found guard.Finding) (step, error) {
	p := x.action.Probe
	a, err := p.ask(x)
	if err != nil {
		x.action.counts.Probed(metrics.Unknown)
		x.h.logger.Warn("the status probe gave no answer; the call stays in doubt",
			zap.Stringer("key", x.call.Key), zap.Error(err))
		return stepDone, nil
	}
	switch {
	case p.Applied.matches(a):
		x.action.counts.Probed(metrics.Applied)
		var head *guard.Head
		if p.UseAnswer {
			head = &guard.Head{Status: a.status, Header: answer.Replayable(a.header)}
		}
		// Others wait for this, whether or not the caller does.
		ctx := context.WithoutCancel(x.r.Context())
		told := x.story.way.settledBy(ctx, x.engine, x.call.Key, found.Record, true, "probe")
		err := told.Done(x.guard.Applied(ctx, x.call.Key, found, head, a.body, told.Writes()...))
		if err != nil && !errors.Is(err, guard.ErrTaken) {
			return stepFind, x.storeFailed(err)
		}
		if err == nil {
			x.resolved(guard.Completed)
		}
		return stepFind, nil
	case p.NotApplied.matches(a):
		x.action.counts.Probed(metrics.NotApplied)
		return stepClaim, nil
	}
	x.action.counts.Probed(metrics.Unknown)
	return stepDone, nil
}

// resolved tells that a probe has settled the doubt about this call.
func (x *exchange) resolved(v guard.Verdict) {
	x.emit(eventResolved, map[string]any{"outcome": v.String(), "by": "probe"})
}
