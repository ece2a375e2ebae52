package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/store"
)

// Undoing names a call that was undone, or that must not run any more. All but Key and
// Checkpoint are recorded where the key is free, and not looked at elsewhere.
type Undoing struct {
	Key Key
	// Checkpoint is the id of the token that announced the call. A key that was released
	// and claimed again belongs to another one, and is left alone.
	Checkpoint string
	// Fingerprint may be zero where it is not known: whatever comes is then refused.
	Fingerprint Fingerprint
	Caller      CallerHash
	// ID is the execution id, by which the caller asks for it; empty where it is not known.
	ID                                          string
	Guard, Action, Host, Method, Path, Workflow string
}

// Errors of Undone.
var (
	// ErrRunning: the execution runs. Await its end, and look again what became of it.
	ErrRunning = errors.New("guard: the execution is under way")
	// ErrOtherCall: another call owns the key, with a checkpoint of its own. It is not
	// the one that was undone, and is not blocked.
	ErrOtherCall = errors.New("guard: the key belongs to another call")
)

// Undone records that what ran under a key was undone: a late duplicate is refused for
// ever. Where the key is free, it records that the call must not run any more: this is
// cancellation (architecture brief). The commit carries riders of other packages, also
// where the record says so already; where a rider's condition does not hold the error is
// its *store.Conflict, and nothing is recorded.
//
// ErrTaken says that the execution changed meanwhile: call it again. With ErrRunning and
// ErrOtherCall nothing was recorded either.
func (g *Guard) Undone(ctx context.Context, u Undoing, riders ...store.Write) error {
	now, err := g.store.Now(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStore, err)
	}
	found, err := g.Look(ctx, u.Key)
	switch {
	case errors.Is(err, ErrUnknown):
		return g.block(ctx, &u, now, riders)
	case err != nil:
		return err
	case !found.Record.Announced(u.Checkpoint):
		return ErrOtherCall
	case found.Standing == RunningHere || found.Standing == RunningElsewhere:
		return ErrRunning
	}
	next := *found.Record
	if next.State != StateCompleted {
		next.Settled = now
	}
	if found.Standing == RolledBack {
		next.Settled = found.Record.Settled
	}
	next.State = StateRolledBack
	return g.undo(ctx, u.Key, &found.Finding, &next, riders)
}

// block records that the call of a free key must not run any more.
func (g *Guard) block(ctx context.Context, u *Undoing, now time.Time, riders []store.Write) error {
	tomb := Record{
		State: StateRolledBack, Claim: newClaim(), Fingerprint: u.Fingerprint, Caller: u.Caller,
		ID: shorten(u.ID, maxRecordedID), Guard: shorten(u.Guard, maxRecordedText), Action: shorten(u.Action, maxRecordedText),
		Host: shorten(u.Host, maxRecordedText), Method: shorten(u.Method, maxRecordedText), Path: shorten(u.Path, maxRecordedText),
		Workflow: shorten(u.Workflow, maxRecordedText), Checkpoint: shorten(u.Checkpoint, maxRecordedText),
		Node: g.node, Boot: g.boot, Created: now, Settled: now,
	}
	return g.undo(ctx, u.Key, &Finding{Standing: Free}, &tomb, riders)
}

func (g *Guard) undo(ctx context.Context, key Key, found *Finding, next *Record, riders []store.Write) error {
	defer g.writers.enter().leave()
	condition := store.Absent()
	if found.Record != nil {
		condition = store.VersionIs(found.version)
	}
	_, err := g.store.Commit(ctx, append(g.put(key, found.Record, next, condition), riders...)...)
	var lost *store.Conflict
	switch {
	case err == nil:
		g.counted(found, next)
		return nil
	case !errors.As(err, &lost):
		return fmt.Errorf("%w: %w", ErrStore, err)
	case lost.Index == 0:
		return ErrTaken
	}
	return lost
}

// counted counts what became of a caller's execution that was undone.
func (g *Guard) counted(found *Finding, next *Record) {
	if found.Standing == Doubtful {
		g.resolved(found.Record, next)
		return
	}
	u := g.usages.known(next.Caller)
	if u == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.counted {
		return
	}
	size := int64(next.size())
	if found.Record != nil {
		u.drop(int64(found.Record.size()), found.Record.expires())
	}
	u.keep(size, next.Settled, time.Time{}) // the answer beside it stays and is counted
}

// drop forgets bytes that would have expired at the given time, with mu held.
func (u *usage) drop(bytes int64, expires time.Time) {
	u.bytes = max(u.bytes-bytes, 0)
	if expires.IsZero() {
		return
	}
	// Which window they are in depends on when they were counted. It ends after they
	// expire, and is one of few.
	at := expires.UnixNano()
	for window := int64(leastWindow); window > 0 && window <= at; window *= 2 {
		end := at - at%window + window
		if u.expiry[end] >= bytes {
			u.expiry[end] -= bytes
			return
		}
	}
}
