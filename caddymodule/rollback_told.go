package caddymodule

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/metrics"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback"
)

// observedLedger tells metrics, events and the log what the ledger is told of rollbacks,
// once it stands.
type observedLedger struct {
	rollback.Ledger
	e *engine
}

// observed is evidence whose commit is heard of.
type observed struct {
	rollback.Telling
	landed func()
}

// Done implements rollback.Telling.
func (o observed) Done(err error) error {
	if err = o.Telling.Done(err); err == nil {
		o.landed()
	}
	return err
}

func observe(t rollback.Telling, err error, landed func()) (rollback.Telling, error) {
	if err != nil || t == nil {
		return t, err
	}
	return observed{t, landed}, nil
}

// Started implements rollback.Ledger.
func (l *observedLedger) Started(ctx context.Context, r *rollback.Rollback, parents []string) (rollback.Telling, error) {
	seen := *r
	t, err := l.Ledger.Started(ctx, r, parents)
	return observe(t, err, func() { l.e.rollbackStarted(&seen) })
}

// Stepped implements rollback.Ledger.
func (l *observedLedger) Stepped(ctx context.Context, r *rollback.Rollback, s *rollback.Step, way checkpoint.Way) (rollback.Telling, error) {
	status := string(s.Status)
	if s.Cancelled {
		status = metrics.StepCancelled
	}
	t, err := l.Ledger.Stepped(ctx, r, s, way)
	checkpoint := s.Checkpoint
	return observe(t, err, func() {
		l.e.counts.RollbackStep(status)
		l.e.rollbacks.trials.ended(checkpoint)
	})
}

// Completed implements rollback.Ledger.
func (l *observedLedger) Completed(ctx context.Context, r *rollback.Rollback) (rollback.Telling, error) {
	seen := *r
	t, err := l.Ledger.Completed(ctx, r)
	return observe(t, err, func() { l.e.rollbackFinished(&seen) })
}

// by says what kind of requester has asked.
func by(r *rollback.Rollback) string {
	if r.Operator != "" {
		return "operator"
	}
	return "agent"
}

func (e *engine) rollbackStarted(r *rollback.Rollback) {
	e.rollbacks.book.begun(r.ID, r.Asked)
	e.logger.Info("a rollback has begun", zap.String("rollback", r.ID), zap.String("checkpoint", r.Checkpoint),
		zap.String("workflow", r.Workflow), zap.String("scope", string(r.Scope)), zap.Int("steps", len(r.Steps)),
		zap.String("requester", r.Requester), zap.String("operator", r.Operator), zap.String("reason", r.Reason))
	e.emit(eventRollbackStarted, map[string]any{"scope": string(r.Scope), "by": by(r), "steps": len(r.Steps)})
}

func (e *engine) rollbackFinished(r *rollback.Rollback) {
	e.rollbacks.book.ended(r.ID)
	e.counts.Rollback(string(r.Status))
	log := e.logger.Warn // a person has to look
	if r.Status == rollback.Completed {
		log = e.logger.Info
	}
	log("a rollback is finished", zap.String("rollback", r.ID), zap.String("status", string(r.Status)),
		zap.String("workflow", r.Workflow), zap.Bool("unknown", r.Unknown), zap.Bool("mixed", r.Mixed),
		zap.Bool("timed_out", r.TimedOut), zap.Strings("escalations", r.Escalations))
	e.emit(eventRollbackFinished, map[string]any{
		"scope": string(r.Scope), "by": by(r), "status": string(r.Status), "unknown": r.Unknown, "mixed": r.Mixed,
		"timed_out": r.TimedOut, "steps": len(r.Steps), "escalations": len(r.Escalations),
	})
}

// rollbackBook knows which rollbacks are not finished.
type rollbackBook struct {
	mu   sync.Mutex
	asks map[string]time.Time // when they were asked for, by id
}

func (b *rollbackBook) begun(id string, asked time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.asks == nil {
		b.asks = map[string]time.Time{}
	}
	b.asks[id] = asked
}

func (b *rollbackBook) ended(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.asks, id)
}

// bookPage is how many rollbacks are looked at together, and maxBookPages how often: of
// those that an earlier life has left the newest are found.
const (
	bookPage     = 100
	maxBookPages = 100
)

// find takes over what an earlier life has left unfinished.
func (b *rollbackBook) find(ctx context.Context, c *rollback.Coordinator) {
	after := ""
	for range maxBookPages {
		page, err := c.List(ctx, after, bookPage)
		if err != nil {
			return // metrics lack it, and nothing else
		}
		for _, r := range page.Rollbacks {
			if r.State == rollback.Executing {
				b.begun(r.ID, r.Asked)
			}
		}
		if after = page.Next; after == "" {
			return
		}
	}
}

// report counts those that are not finished. One that ended with a wider one is found out
// here.
func (b *rollbackBook) report(ctx context.Context, c *rollback.Coordinator, now time.Time) *metrics.RollbackReport {
	if c == nil {
		return nil
	}
	b.mu.Lock()
	ids := make([]string, 0, len(b.asks))
	for id := range b.asks {
		ids = append(ids, id)
	}
	b.mu.Unlock()
	for _, id := range ids {
		r, err := c.Get(ctx, id)
		if errors.Is(err, rollback.ErrUnknown) || err == nil && r.State == rollback.Finished {
			b.ended(id)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	report := &metrics.RollbackReport{Running: len(b.asks)}
	for _, asked := range b.asks {
		report.OldestAge = max(report.OldestAge, now.Sub(asked))
	}
	return report
}

// rollbackReport is how the rollbacks are; nil where there are none to be had.
func (e *engine) rollbackReport() *metrics.RollbackReport {
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	return e.rollbacks.book.report(ctx, e.rollbacks.coordinator(), time.Now())
}
