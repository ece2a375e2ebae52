package execution

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/body"
	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Evidence settles a doubt: whoever has it gives a Resolution, and SettleDoubt is the one way to record it (P1).

// Who may settle a doubt. Each may say that the call was executed, and give its answer.
const (
	// ByOperator may also say that the call was not executed. An answer that does not fit is refused.
	ByOperator = "operator"
	// ByProbe is a question to the upstream. Where it says that the call was not executed, the call is claimed anew.
	ByProbe = "probe"
	// ByAnswer is the answer to the call, on another connection than its own. It may also say that the call was not
	// executed.
	ByAnswer = "answer"
	// byOwner is the gateway that ran the call, and was removed from the store before it could record its outcome
	// (SettleFenced). It may also say that the call was not executed.
	byOwner = "owner"
)

// Resolution says what has become of a call in doubt. That of an operator is recorded.
type Resolution struct {
	By string `json:"-"` // one of the constants above
	// Answer and Body are the answer, which is replayed from then on; nil where it is not known. At most 256 KiB of body
	// are kept, and as much as the workflow's quota has room for. Without an answer, retries learn that the call was
	// executed and its result is not available.
	Answer *Head  `json:"-"`
	Body   []byte `json:"-"`
	// At is when an operator's was recorded, Cause why the execution was in doubt, Action what it was; SettleDoubt sets
	// them.
	At time.Time `json:"at"`
	// Applied says that the call was executed. If not, its key is free again.
	Applied bool `json:"applied"`
	// Operator and Reason say which operator decided, on what evidence: required of one, 256 and 1,024 bytes at most.
	Operator string `json:"operator"`
	Reason   string `json:"reason"`           // see Operator
	Cause    Cause  `json:"cause,omitempty"`  // see At
	Action   string `json:"action,omitempty"` // see At
}

func (t *Resolution) check(found *Finding) error {
	operator := t.By == ByOperator
	switch {
	case found.Status != Doubtful:
		return ErrNotInDoubt
	case t.By == ByProbe && !t.Applied:
		return fmt.Errorf("%w: after a probe that says so, the call is claimed", ErrResolution)
	case operator && (t.Operator == "" || t.Reason == "" || len(t.Operator) > maxOperator || len(t.Reason) > maxReason):
		return fmt.Errorf("%w, of at most %d and %d bytes", ErrResolution, maxOperator, maxReason)
	case operator && len(t.Body) > pieceSize:
		return ErrAnswerTooLarge
	}
	return nil
}

// SettleDoubt settles an execution in doubt. An operator's resolution is recorded with it. The commit carries the
// batches of other packages and always ends them.
//
// ErrTaken means that the execution changed since it was looked up. A QuotaError says to an operator that the workflow
// has no room for the answer; others are recorded without it then.
func (g *Guard) SettleDoubt(ctx context.Context, found Recorded, t Resolution, batches ...*store.Batch) error {
	return done(g.settleDoubt(ctx, &found, &t, batches), batches)
}

func (g *Guard) settleDoubt(ctx context.Context, found *Recorded, t *Resolution, batches []*store.Batch) error {
	if err := t.check(&found.Finding); err != nil {
		return err
	}
	record, tail, err := g.appliedRecord(ctx, found.Finding, t.Answer, t.Body)
	if err != nil {
		return err
	}
	defer g.writers.Enter()()
	if t.By == ByOperator {
		if t.Answer != nil && !record.Result.Kept {
			return ErrAnswerTooLarge
		}
		batches = append(slices.Clip(batches), g.resolution(found, t, record.Settled))
	}
	if !t.Applied {
		record, tail = nil, nil
	}
	err = g.commitApplied(ctx, found.Key, found.Finding, record, tail, batches)
	full := errors.As(err, new(*QuotaError)) || tail != nil && errors.Is(err, ErrStore) && !away(err)
	if full && t.By != ByOperator {
		// The answer did not fit; that the call was executed must be kept.
		record.Result = storedResult{}
		err = g.commitApplied(ctx, found.Key, found.Finding, record, nil, batches)
	}
	return err
}

// resolution records an operator's resolution.
func (g *Guard) resolution(found *Recorded, t *Resolution, at time.Time) *store.Batch {
	t.At, t.Cause, t.Action = at, found.Record.Cause, found.Record.Action
	resolutions := table[Resolution](g, spaceResolved)
	key := resolutions.Key(found.Key[:], appendTime(nil, at))
	return store.NewBatch(resolutions.Put(key, t, store.Condition{}, at.Add(keepResolutions)))
}

// appliedRecord returns the completed record of a doubtful execution, and the part of its
// answer that is stored beside it.
func (g *Guard) appliedRecord(ctx context.Context, found Finding, answer *Head, body []byte) (*Record, []byte, error) {
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
	recording := new(Recording)
	recording.begin(pieceSize, nil)
	defer recording.drop()
	recording.Start(answer.Status, answer.Header)
	recording.add(body, false)
	var none pieces
	tail := none.rest(nil, recording, &record, now.Add(record.KeepResult))
	if record.Result.Kept {
		record.Status = answer.Status
	}
	return &record, tail, nil
}

// holdSettled is hold for a record that replaces a settled one, without a running call.
func (g *Guard) holdSettled(ctx context.Context, old, next *Record, force bool) (holding, error) {
	now, err := g.store.Now(ctx)
	if err != nil {
		return holding{}, fmt.Errorf("%w: %w", ErrStore, err)
	}
	return g.quotas.hold(ctx, old, next, 0, force, now)
}

// commitApplied settles a doubt. A QuotaError says that the workflow has no room for the answer in record.
func (g *Guard) commitApplied(ctx context.Context, key Key, found Finding, record *Record, tail []byte, batches []*store.Batch) (err error) {
	defer g.writers.Enter()()
	if record != nil {
		countHere(g, record)
	}
	held, err := g.holdSettled(ctx, found.Record, record, record == nil || !record.Result.Kept)
	if err != nil {
		return err
	}
	defer func() { held.replaced(err, key, record) }()
	room := new(room)
	g.putIn(room, key, found.Record, record, store.VersionIs(found.version), batches...)
	g.putTail(room, key, record, tail)
	if _, err := g.store.Commit(ctx, room.writes...); err != nil {
		if conflict := (*store.Conflict)(nil); errors.As(err, &conflict) {
			return ErrTaken
		}
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	g.groups.resolved(key, found.Record, record)
	g.quotas.replaced(found.Record.Caller, key, record)
	return nil
}

// Longest members of a Resolution, in bytes.
const (
	maxOperator = 256
	maxReason   = 1024
)

// keepResolutions is how long resolutions are kept, also of keys that are free again.
const keepResolutions = 400 * 24 * time.Hour

// Errors of SettleDoubt.
var (
	// ErrNotInDoubt: there is nothing to settle.
	ErrNotInDoubt = errors.New("guard: the execution is not in doubt")
	// ErrResolution: an operator's resolution is not complete, or a probe says what only a claim records.
	ErrResolution = errors.New("guard: a resolution needs an operator and a reason")
	// ErrAnswerTooLarge: the given answer cannot be kept.
	ErrAnswerTooLarge = errors.New("guard: the given answer's body is larger than 256 KiB")
)

// Resolutions lists what operators have said of the execution key, the oldest first.
func (g *Guard) Resolutions(ctx context.Context, key Key) ([]Resolution, error) {
	var all []Resolution
	for row, err := range table[Resolution](g, spaceResolved).All(ctx, key[:]) {
		if err != nil {
			return nil, err
		}
		row.Record.By = ByOperator
		all = append(all, *row.Record)
	}
	return all, nil
}

// Undoing names a call that was undone, or that must not run any more. All but Key and Checkpoint
// are only recorded where the key is free.
type Undoing struct {
	Key Key
	// Checkpoint is the id of the token that announced the call. A key that was released and
	// claimed again belongs to another call, and is left alone.
	Checkpoint string
	// Fingerprint may be zero if unknown: then every call is refused.
	Fingerprint body.Fingerprint
	Caller      CallerHash
	// ID is the execution id, by which the caller asks for it; empty if unknown.
	ID                                          string
	Guard, Action, Host, Method, Path, Workflow string
}

// Errors of Undone.
var (
	// errRunning: the execution runs. Await its end, then look it up again.
	errRunning = errors.New("guard: the execution is under way")
	// ErrOtherCall: another call owns the key, with its own checkpoint. It was not undone, and is
	// not blocked.
	ErrOtherCall = errors.New("guard: the key belongs to another call")
)

// Undone records that the execution under a key was undone: a late duplicate is refused forever.
// If the key is free, it records that the call must not run any more: this is cancellation
// (architecture brief). The commit carries extra writes of other packages, also if the record
// says so already; they are no batch, since the caller may have to try again. If an extra write's
// condition fails, the error is its *store.Conflict and nothing is recorded.
//
// ErrTaken means that the execution changed meanwhile: call it again. With errRunning and
// ErrOtherCall nothing was recorded either.
func (g *Guard) Undone(ctx context.Context, u Undoing, extra ...store.Write) error {
	now, err := g.store.Now(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	found, err := g.Get(ctx, u.Key)
	switch {
	case errors.Is(err, ErrUnknown):
		return g.block(ctx, &u, now, extra)
	case err != nil:
		return err
	case !found.Record.Announced(u.Checkpoint):
		return ErrOtherCall
	case found.Status == RunningHere || found.Status == RunningElsewhere:
		return errRunning
	}
	next := *found.Record
	if next.State != StateCompleted {
		next.Settled = now
	}
	if found.Status == RolledBack {
		next.Settled = found.Record.Settled
	}
	next.State = StateRolledBack
	return g.commitUndone(ctx, u.Key, &found.Finding, &next, extra)
}

// block records that the call of a free key must not run any more.
func (g *Guard) block(ctx context.Context, u *Undoing, now time.Time, extra []store.Write) error {
	tomb := Record{
		State: StateRolledBack, Claim: newClaim(), Fingerprint: u.Fingerprint, Caller: u.Caller,
		ID: shorten(u.ID, maxRecordedID), Guard: shortText(u.Guard), Action: shortText(u.Action), Host: shortText(u.Host),
		Method: shortText(u.Method), Path: shortText(u.Path), Workflow: shortText(u.Workflow), Checkpoint: shortText(u.Checkpoint),
		Node: g.node, Boot: g.boot, Created: now, Settled: now,
	}
	return g.commitUndone(ctx, u.Key, &Finding{Status: Free}, &tomb, extra)
}

func (g *Guard) commitUndone(ctx context.Context, key Key, found *Finding, next *Record, extra []store.Write) (err error) {
	defer g.writers.Enter()()
	condition := store.Absent()
	if found.Record != nil {
		condition = store.VersionIs(found.version)
	}
	countHere(g, next)
	held, err := g.holdSettled(ctx, found.Record, next, true)
	if err != nil {
		return err
	}
	defer func() { held.replaced(err, key, next) }()
	_, err = g.store.Commit(ctx, append(g.put(key, found.Record, next, condition), extra...)...)
	var lost *store.Conflict
	switch {
	case err == nil:
		if found.Status == Doubtful {
			g.groups.resolved(key, found.Record, next)
		}
		g.quotas.replaced(next.Caller, key, next)
		return nil
	case !errors.As(err, &lost):
		return fmt.Errorf("%w: %w", ErrStore, err)
	case lost.Index == 0:
		return ErrTaken
	}
	return lost
}
