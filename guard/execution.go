package guard

import (
	"context"
	"errors"
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Execution is a call that this process owns. It is settled once.
type Execution struct {
	g       *Guard
	flight  *Flight
	record  Record
	version store.Version
	usage   *usage // nil where its caller has no quota
	keeper  *keeper
}

// Recording takes the answer as it comes.
func (e *Execution) Recording() *Recording { return e.flight.recording }

// Record is what the claim recorded.
func (e *Execution) Record() Record { return e.record }

// Write records the next bytes of the answer's body and stores full pieces on the
// way, so that settling waits for the last one only (P7).
func (e *Execution) Write(p []byte) {
	e.flight.recording.Write(p)
	if e.keeper == nil && e.flight.recording.Size() >= pieceSize {
		e.keeper = newKeeper(e)
	}
	if e.keeper != nil {
		e.keeper.grown()
	}
}

// Outcome is what came of an execution.
type Outcome struct {
	Verdict Verdict
	Cause   Cause
	// Status is that of the upstream's answer, 0 without one.
	Status int
	// Whole says that the recorded answer is whole. Those that follow get it to
	// the end, also where the key is released or in doubt.
	Whole bool
}

// Settle records what came of the execution and wakes those that follow it. The
// commit carries riders of other packages. It is called once.
//
// ErrUnrecorded says that the record did not land: the execution is in doubt, and
// must be reported so.
func (e *Execution) Settle(ctx context.Context, o Outcome, riders ...store.Write) error {
	err := e.settle(ctx, o, riders)
	ending := EndedInDoubt
	switch {
	case err != nil:
		err = fmt.Errorf("%w: %w", ErrUnrecorded, err)
		orphan := e.record
		orphan.State = StateInDoubt // as the next life of this node will record it
		e.usage.settled(&orphan)
	case o.Whole:
		ending = EndedAnswered
	case o.Verdict == Released:
		ending = EndedUnsent
	}
	e.g.leave(e.usage) // before those who follow wake, of whom one may claim
	e.g.flights.end(e.flight, ending)
	e.g.running.leave()
	return err
}

func (e *Execution) settle(ctx context.Context, o Outcome, riders []store.Write) error {
	g := e.g
	defer g.writers.enter().leave()
	var tail []byte
	var pieces pieces
	if e.keeper != nil {
		pieces = e.keeper.finish()
	}
	if o.Verdict == Released {
		return e.commit(ctx, g.put(e.flight.key, &e.record, nil, store.VersionIs(e.version)), riders)
	}
	now, err := g.store.Now(ctx)
	if err != nil {
		return err
	}
	record := e.record
	record.Settled, record.Cause, record.Status = now, o.Cause, o.Status
	if o.Verdict == InDoubt {
		record.State = StateInDoubt
		return e.keep(ctx, &record, nil, riders)
	}
	record.State = StateCompleted
	buf := scratch.Get().(*[]byte)
	defer freeScratch(buf)
	if tail, err = pieces.rest((*buf)[:0], e.flight.recording, &record); err == nil {
		record.Result.Expires = now.Add(record.KeepResult)
	}
	if tail != nil {
		*buf = tail
	}
	err = e.keep(ctx, &record, tail, riders)
	if err == nil || tail == nil || errors.Is(err, store.ErrUnknown) {
		return err
	}
	if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
		return err
	}
	// The answer did not fit; the key must be kept all the same (P1).
	record.Result = StoredResult{}
	return e.keep(ctx, &record, nil, riders)
}

// keep records the settled execution, with its answer where tail is not nil.
func (e *Execution) keep(ctx context.Context, record *Record, tail []byte, riders []store.Write) error {
	batch := e.g.put(e.flight.key, &e.record, record, store.VersionIs(e.version))
	if tail != nil {
		batch = append(batch, e.g.tail(e.flight.key, record, tail))
	}
	err := e.commit(ctx, batch, riders)
	if err == nil {
		e.usage.settled(record)
	}
	return err
}

func (e *Execution) commit(ctx context.Context, batch, riders []store.Write) error {
	_, err := e.g.store.Commit(ctx, append(batch, riders...)...)
	return err
}
