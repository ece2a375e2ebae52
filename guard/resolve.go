package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Applied settles a doubtful execution with the evidence that it was executed. With
// an answer, that becomes the result; without one the result is unavailable. The
// answer's body is at most 256 KiB; a larger one is not kept. The commit carries riders
// of other packages.
//
// ErrTaken says that the execution is not in doubt any more: look it up again.
func (g *Guard) Applied(ctx context.Context, key Key, found Finding, answer *Head, body []byte, riders ...store.Write) error {
	record, tail, err := g.applied(ctx, found, answer, body)
	if err != nil {
		return err
	}
	err = g.apply(ctx, key, found, record, tail, riders...)
	if tail != nil && errors.Is(err, ErrStore) {
		// The answer did not fit; that the call was executed is what must be kept.
		record.Result = StoredResult{}
		err = g.apply(ctx, key, found, record, nil, riders...)
	}
	return err
}

// applied is the completed record of a doubtful execution, and the part of its answer
// that is stored beside it.
func (g *Guard) applied(ctx context.Context, found Finding, answer *Head, body []byte) (*Record, []byte, error) {
	now, err := g.store.Now(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrStore, err)
	}
	record := *found.Record
	record.State, record.Settled = StateCompleted, now
	// Pieces are named by their claim: these are not the lost execution's own.
	record.Claim = newClaim()
	if answer == nil || len(body) > pieceSize {
		return &record, nil, nil
	}
	recording := newRecording(pieceSize)
	defer recording.drop()
	recording.Start(answer.Status, answer.Header)
	recording.Write(body)
	var none pieces
	tail, err := none.rest(nil, recording, &record)
	if err == nil {
		record.Status = answer.Status
		record.Result.Expires = now.Add(record.KeepResult)
	}
	return &record, tail, nil
}

func (g *Guard) apply(ctx context.Context, key Key, found Finding, record *Record, tail []byte, riders ...store.Write) error {
	defer g.writers.enter().leave()
	batch := g.put(key, found.Record, record, store.VersionIs(found.version))
	if tail != nil {
		batch = append(batch, g.tail(key, record, tail))
	}
	if _, err := g.store.Commit(ctx, append(batch, riders...)...); err != nil {
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			return ErrTaken
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	g.resolved(found.Record, record)
	return nil
}

// Resolution is what an operator has found out about an execution in doubt.
type Resolution struct {
	// At is when it was recorded; Resolve sets it.
	At time.Time
	// Applied says whether the call was executed. If not, its key is free again.
	Applied bool
	// Operator and Reason say who decided, and on what evidence. Both are required;
	// 256 and 1,024 bytes at most.
	Operator, Reason string
	// Cause is why the execution was in doubt, Action what it was; Resolve sets them.
	Cause  Cause
	Action string
}

// Longest members of a Resolution, in bytes.
const (
	maxOperator = 256
	maxReason   = 1024
)

// keepResolutions is how long resolutions are kept, also of keys that are free again.
const keepResolutions = 400 * 24 * time.Hour

// Errors of Resolve.
var (
	// ErrNotInDoubt: there is nothing to resolve.
	ErrNotInDoubt = errors.New("guard: the execution is not in doubt")
	// ErrResolution: the resolution is not complete.
	ErrResolution = errors.New("guard: a resolution needs an operator and a reason")
	// ErrAnswerTooLarge: the given answer cannot be kept.
	ErrAnswerTooLarge = errors.New("guard: the given answer's body is larger than 256 KiB")
)

// Resolve settles a doubtful execution as an operator decides (P1). Where it was
// applied, a given answer is replayed from now on; without one a retry is told that
// the call was executed and its result is not available. The decision, who made it
// and why are recorded in the same commit, which carries riders of other packages.
//
// ErrTaken says that the execution changed since it was looked up.
func (g *Guard) Resolve(ctx context.Context, found Recorded, r Resolution, answer *Head, body []byte, riders ...store.Write) error {
	switch {
	case found.Standing != Doubtful:
		return ErrNotInDoubt
	case r.Operator == "" || r.Reason == "" || len(r.Operator) > maxOperator || len(r.Reason) > maxReason:
		return fmt.Errorf("%w, of at most %d and %d bytes", ErrResolution, maxOperator, maxReason)
	case len(body) > pieceSize:
		return ErrAnswerTooLarge
	}
	record, tail, err := g.applied(ctx, found.Finding, answer, body)
	if err != nil {
		return err
	}
	if answer != nil && !record.Result.Kept {
		return ErrAnswerTooLarge
	}
	defer g.writers.enter().leave()
	r.At, r.Cause, r.Action = record.Settled, found.Record.Cause, found.Record.Action
	name := resolvedKey(found.Key, r.At)
	noted := store.Write{Key: name, Value: g.sealer.Seal(nil, r.encode(nil), name), Expires: r.At.Add(keepResolutions)}
	if !r.Applied {
		record, tail = nil, nil
	}
	return g.apply(ctx, found.Key, found.Finding, record, tail, append(riders, noted)...)
}

// Resolutions lists what operators have decided about the execution key, the oldest
// first.
func (g *Guard) Resolutions(ctx context.Context, key Key) ([]Resolution, error) {
	var all []Resolution
	for entry, err := range g.store.Scan(ctx, store.Prefix(append([]byte{spaceResolved}, key[:]...))) {
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		plain, err := g.sealer.Open(nil, entry.Value, entry.Key)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		r, err := decodeResolution(plain)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrStore, err)
		}
		all = append(all, r)
	}
	return all, nil
}

func resolvedKey(key Key, at time.Time) []byte {
	b := append(make([]byte, 0, 1+keySize+8), spaceResolved)
	return appendTime(append(b, key[:]...), at)
}

// The tags of a resolution's fields, under the rules of a record's.
const (
	tagResolvedAt = 1 + iota
	tagResolvedApplied
	tagResolvedOperator
	tagResolvedReason
	tagResolvedCause
	tagResolvedAction
)

func (r *Resolution) encode(dst []byte) []byte {
	e := encoder{dst}
	e.time(tagResolvedAt, r.At)
	e.bool(tagResolvedApplied, r.Applied)
	e.string(tagResolvedOperator, r.Operator)
	e.string(tagResolvedReason, r.Reason)
	e.string(tagResolvedCause, string(r.Cause))
	e.string(tagResolvedAction, r.Action)
	return e.b
}

func decodeResolution(b []byte) (r Resolution, err error) {
	d := decoder{b: b}
	for d.next() {
		switch d.tag {
		case tagResolvedAt:
			r.At = d.time()
		case tagResolvedApplied:
			r.Applied = d.int() != 0
		case tagResolvedOperator:
			r.Operator = d.string()
		case tagResolvedReason:
			r.Reason = d.string()
		case tagResolvedCause:
			r.Cause = Cause(d.string())
		case tagResolvedAction:
			r.Action = d.string()
		}
	}
	return r, d.err
}
