package caddymodule

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/agent-guard/caddy-agent-guard/breaker"
	"github.com/agent-guard/caddy-agent-guard/caddymodule/circuits"
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
	e.circuits = circuits.Join()
	e.startCircuitTeller()
	e.circuits.Hear(circuitHook{e})
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
		h.e.logger.Warn("too many changes of circuit breakers wait for the ledger; one is not told", circuitFields(ev)...)
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
	if !h.e.audience.lives() {
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

var _ circuits.Hook = circuitHook{}
