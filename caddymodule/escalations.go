package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// escalating is the engine's desk, where what needs a person is recorded, and the courier
// that tells of it. Both live as long as the engine, over reloads: one courier tells of
// each escalation, to whom the latest configuration says.
type escalating struct {
	desk  *hitl.Desk
	begin func() // lets the courier begin
	stop  context.CancelFunc
	ended chan struct{}
}

// escalationAttempt is how long one attempt to tell may take: longer than a webhook may.
const escalationAttempt = 65 * time.Second

func (e *engine) startEscalations() {
	x := &e.escalations
	x.desk = hitl.NewDesk(e.store, e.ring, 0)
	x.desk.Hear(e.escalated)
	courier := hitl.NewCourier(x.desk, hitl.NotifierFunc(e.notify), hitl.CourierOptions{
		Attempt: escalationAttempt, Attempted: e.attempted, Troubled: e.troubled,
	})
	var ctx context.Context
	ctx, x.stop = context.WithCancel(context.Background())
	x.ended = make(chan struct{})
	begun := make(chan struct{})
	x.begin = sync.OnceFunc(func() { close(begun) })
	go func() {
		defer close(x.ended)
		select { // whom to tell is said by the first configuration
		case <-begun:
			courier.Run(ctx)
		case <-ctx.Done():
		}
	}()
}

// adopt takes the options of the latest configuration over.
func (x *escalating) adopt(o *HITL) {
	keep := time.Duration(0)
	if o != nil {
		keep = time.Duration(o.Keep)
	}
	x.desk.SetKeep(keep)
	x.begin()
}

// end stops the courier and waits until it has let go of the store. What is not told is
// told by the next life.
func (x *escalating) end() {
	x.stop()
	<-x.ended
}

// notify implements hitl.Notifier, by the latest configuration.
func (e *engine) notify(ctx context.Context, esc hitl.Escalation) error {
	a := e.audience.latest()
	switch {
	case a == nil:
		return errNotOpen // it is tried again, with the next configuration
	case a.HITL != nil && a.HITL.webhook != nil:
		return a.HITL.webhook.Notify(ctx, esc)
	}
	level := zapcore.WarnLevel
	if esc.Level == hitl.Stop {
		level = zapcore.ErrorLevel
	}
	e.logger.Log(level, "escalation: "+esc.Summary, escalationFields(&esc)...)
	return nil
}

// escalated hears of an escalation that was opened.
func (e *engine) escalated(esc hitl.Escalation) {
	e.emit(eventEscalated, map[string]any{
		"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "upstream": esc.Links.Upstream,
	})
}

// attempted hears of an attempt to tell of an escalation.
func (e *engine) attempted(esc hitl.Escalation, err error) {
	e.counts.EscalationTold(err == nil)
	switch {
	case esc.State == hitl.Undeliverable:
		e.logger.Error("nobody can be told of an escalation: the receiver does not take it",
			append(escalationFields(&esc), zap.Error(err))...)
		e.emit(eventUndeliverable, map[string]any{
			"escalation": esc.ID, "level": esc.Level.String(), "cause": string(esc.Cause), "upstream": esc.Links.Upstream,
		})
	case err != nil:
		e.logger.Warn("the receiver has not taken an escalation; it is tried again",
			append(escalationFields(&esc), zap.Time("next", esc.Delivery.Next), zap.Error(err))...)
	}
}

func (e *engine) troubled(err error) {
	e.logger.Error("telling of escalations is held up", zap.Error(err))
}

// escalationFields name an escalation in the log: by ids, which hold nothing secret (P8).
func escalationFields(esc *hitl.Escalation) []zap.Field {
	fields := []zap.Field{
		zap.String("escalation", esc.ID), zap.Stringer("level", esc.Level), zap.String("cause", string(esc.Cause)),
		zap.Int("attempts", esc.Delivery.Attempts),
	}
	for name, id := range map[string]string{
		"workflow": esc.Workflow, "checkpoint": esc.Links.Checkpoint, "rollback": esc.Links.Rollback,
		"error_token": esc.Links.Error, "execution": esc.Links.Execution, "upstream": esc.Links.Upstream,
	} {
		if id != "" {
			fields = append(fields, zap.String(name, id))
		}
	}
	return fields
}

// escalateCircuit opens the escalation of an upstream that does not come back (ATD, HITL
// case 4). The breaker says so once an outage, and the time of that names it: generations
// begin anew with a breaker that was forgotten.
func (e *engine) escalateCircuit(ev breaker.Event) {
	ctx, cancel := context.WithTimeout(context.Background(), circuitPatience)
	defer cancel()
	name := ev.Key.Upstream
	if ev.Key.Class != "" {
		name += " (" + ev.Key.Class + " calls)"
	}
	_, err := e.escalations.desk.Open(ctx, hitl.Opening{
		Key:   "breaker " + ev.Key.Upstream + " " + ev.Key.Class + " " + strconv.FormatInt(ev.Time.UnixNano(), 10),
		Level: hitl.Approval, Cause: hitl.CauseBreakerOpen,
		Summary: fmt.Sprintf("The upstream %s does not come back: %d probes in a row have failed, the last one with: %s.",
			name, ev.FailedProbes, ev.Cause),
		Links: hitl.Links{Upstream: ev.Key.Upstream, Checkpoint: circuits.ParseEvidence(ev.Evidence).Checkpoint},
	})
	if err != nil && !errors.Is(err, store.ErrClosed) {
		e.logger.Error("an escalation cannot be recorded: an upstream does not come back", append(circuitFields(ev), zap.Error(err))...)
	}
}

// resealEscalations seals them anew. Those that do not open with any key of the ring are
// lost already, and keep no other value from being moved.
func (e *engine) resealEscalations(ctx context.Context) error {
	_, err := e.escalations.desk.Reseal(ctx)
	if errors.Is(err, hitl.ErrUnreadable) {
		e.logger.Error("some escalations are damaged, and are left as they are", zap.Error(err))
		return nil
	}
	return err
}

// countEscalations is how many there are, for metrics; nil where that is not known.
func (e *engine) countEscalations() []metrics.EscalationReport {
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	counts, err := e.escalations.desk.Count(ctx)
	if err != nil {
		return nil
	}
	var all []metrics.EscalationReport
	for l := hitl.Pause; l <= hitl.Stop; l++ {
		for _, s := range hitl.States() {
			all = append(all, metrics.EscalationReport{Level: l.String(), State: s.String(), N: counts[l][s]})
		}
	}
	return all
}
