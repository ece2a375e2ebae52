package undo

import (
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"strconv"

	"github.com/agent-guard/caddy-agent-guard/guard"
)

// find says how far the guarded request of the undo has come, when nothing of it runs any
// more. It is found running only where that takes longer than the task may.
func (j *job) find(ctx context.Context) (guard.Finding, error) {
	for {
		found, err := j.o.Guard.Find(ctx, j.key, guard.Fingerprint{})
		if err != nil {
			return found, err
		}
		switch found.Standing {
		case guard.Doubtful:
			j.doubt, j.attempts, j.status = true, max(j.attempts, 1), found.Record.Status
			recorded, err := j.catchUp(ctx, found)
			if err != nil || !recorded {
				return found, err
			}
		case guard.RunningHere, guard.RunningElsewhere:
			if j.overdue() {
				j.doubt, j.attempts = true, max(j.attempts, 1)
				return found, nil
			}
			if err := j.await(ctx); err != nil {
				return found, err
			}
		case guard.Free:
			// Nothing was sent, or an operator knows that it was not applied.
			j.unkept.Delete(j.key)
			j.doubt = j.owed
			if j.task.Forgotten && !j.owed {
				j.doubt, err = j.unsettled(ctx)
				if j.doubt {
					j.attempts = max(j.attempts, 1)
				}
			}
			return found, err
		default:
			j.unkept.Delete(j.key) // it was recorded, and only that was not told
			return found, nil
		}
	}
}

// unsettled reports that no operator has decided about what an earlier rollback has left,
// whose key is free (P6).
func (j *job) unsettled(ctx context.Context) (bool, error) {
	said, err := j.o.Guard.Resolutions(ctx, j.key)
	return len(said) == 0 || said[len(said)-1].Applied, err
}

// catchUp records an answer that came while the store took nothing, before anything is sent
// again. One that is still not recorded when the task is due is known all the same: it
// is j.answer then.
func (j *job) catchUp(ctx context.Context, found guard.Finding) (recorded bool, err error) {
	kept, ok := j.unkept.Load(j.key)
	if !ok {
		return false, nil
	}
	n := kept.(note)
	j.attempts, j.before = max(j.attempts, n.attempts), n.before
	switch err = j.applied(ctx, found, n); {
	case err == nil:
		j.unkept.Delete(j.key)
		return true, nil
	case !j.overdue():
		return false, err
	}
	j.unkept.Delete(j.key)
	j.answer = &n
	return false, nil
}

func (j *job) await(ctx context.Context) error {
	within := ctx
	if !j.task.Due.IsZero() {
		var cancel context.CancelFunc
		within, cancel = context.WithDeadline(ctx, j.task.Due)
		defer cancel()
	}
	err := j.o.Guard.Await(within, j.key)
	if within.Err() != nil && ctx.Err() == nil {
		return nil // it is the task that is overdue
	}
	return err
}

// attempt sends the undo once, as a guarded execution over what was found. What is
// returned is on disk (P2, P6): an error says that it is not.
func (j *job) attempt(ctx context.Context, found guard.Finding, out *Outgoing, read func(*Answer) note) (note, error) {
	e, err := j.o.Guard.Claim(ctx, j.guarded(), found)
	if errors.Is(err, guard.ErrTaken) {
		return note{reading: taken}, nil
	}
	if err != nil {
		return note{}, err
	}
	before := j.doubt
	n, cause := note{reading: lost}, guard.CauseInterrupted
	settled := false
	settle := func() error {
		settled = true
		outcome := guard.Outcome{Verdict: guard.InDoubt, Cause: cause, Status: n.status}
		switch {
		case n.reading.final():
			n.attempts, n.before, n.unknown = j.attempts, j.before, n.unknown || before && n.reading != done
			e.Recording().Start(n.status, n.header())
			outcome.Verdict, outcome.Whole = guard.Completed, true
		case found.Standing != guard.Doubtful && !n.reading.doubtful():
			// A key that was in doubt before is so still: that one was not sent.
			outcome.Verdict = guard.Released
		}
		return e.Settle(context.WithoutCancel(ctx), outcome)
	}
	defer func() {
		if !settled { // the sender has panicked
			j.doubt = true
			_ = settle()
		}
	}()
	sent, sentCause := j.send(ctx, out, read)
	n, cause = sent, sentCause
	if n.reading != unsent {
		j.attempts++
	}
	if n.status != 0 {
		j.status = n.status
	}
	j.doubt = j.doubt || n.reading.doubtful()
	if err := settle(); err != nil {
		if n.reading.final() {
			j.unkept.Store(j.key, n)
		}
		return n, err
	}
	if !n.reading.final() && ctx.Err() != nil {
		return n, ctx.Err()
	}
	return n, nil
}

// send sends a request, and reads what comes back.
func (j *job) send(ctx context.Context, out *Outgoing, read func(*Answer) note) (note, guard.Cause) {
	within, cancel := context.WithTimeout(ctx, j.o.Timeout)
	defer cancel()
	a, err := j.o.Sender.Send(within, out)
	if err == nil && a != nil {
		n := read(a)
		n.status, n.after, n.fresh = a.Status, retryAfter(a.Header), true
		if n.reading == accepted {
			// Told from what is pending by its cause (settled).
			return n, guard.CauseNoAnswer
		}
		return n, guard.CauseStatus
	}
	var why *SendError
	switch {
	case errors.As(err, &why) && (why.NotSent || why.Reason != ""):
		return note{reading: unsent, reason: why.Reason}, guard.CauseNotSent
	case ctx.Err() != nil:
		return note{reading: lost}, guard.CauseInterrupted
	case within.Err() != nil:
		return note{reading: lost}, guard.CauseDeadline
	}
	return note{reading: lost}, guard.CauseLost
}

// The fields of a recorded answer. Its body is not kept: what it says is in the reading.
const (
	fieldLocation = "Location"
	fieldReading  = "Undo-Reading"
	fieldAttempts = "Undo-Attempts"
	fieldUnknown  = "Undo-Unknown"
	fieldBefore   = "Undo-Before"
)

// header is how a final note is recorded.
func (n *note) header() map[string][]string {
	h := map[string][]string{
		fieldReading:  {string(n.reading)},
		fieldAttempts: {strconv.Itoa(n.attempts)},
	}
	if n.location != "" {
		h[fieldLocation] = []string{n.location}
	}
	if n.unknown {
		h[fieldUnknown] = []string{"1"}
	}
	if n.before != [32]byte{} {
		h[fieldBefore] = []string{hex.EncodeToString(n.before[:])}
	}
	return h
}

// read takes what header has recorded; false where it has not.
func (n *note) read(h map[string][]string) bool {
	first := func(name string) string { return append(h[name][:len(h[name]):len(h[name])], "")[0] }
	word := reading(first(fieldReading))
	if !word.final() {
		return false
	}
	n.reading, n.location, n.unknown = word, first(fieldLocation), first(fieldUnknown) != ""
	if attempts, err := strconv.Atoi(first(fieldAttempts)); err == nil {
		n.attempts = attempts
	}
	if before, err := hex.DecodeString(first(fieldBefore)); err == nil && len(before) == len(n.before) {
		n.before = [32]byte(before)
	}
	return true
}

// settled is the note of a request that was settled before. read reads an answer that is
// nothing but its status.
func (j *job) settled(ctx context.Context, found guard.Finding, read func(*Answer) note) (note, error) {
	if found.Record == nil || found.Standing == guard.Mismatch || found.Standing == guard.RolledBack {
		return note{reading: unexpected, unknown: true}, nil // not by us
	}
	n := note{reading: done, status: found.Record.Status, attempts: 1}
	if found.Standing == guard.Replayable {
		result, err := j.o.Guard.Result(ctx, j.key, found)
		switch {
		case err == nil && n.read(result.Head.Header):
			n.status = result.Head.Status
			return n, nil
		case err == nil:
			n.status = result.Head.Status
		case !errors.Is(err, guard.ErrResultUnavailable):
			return note{}, err
		}
	}
	// An operator has settled a doubt: with an answer, or with the word alone that it was
	// applied, which leaves a status that decides nothing.
	if r := read(&Answer{Status: n.status}).reading; r.final() && n.status != 0 {
		n.reading = r
	} else if n.status == http.StatusAccepted && found.Record.Cause == guard.CauseStatus {
		n.reading = pending // ours, whose Location the store had no room for
	}
	return n, nil
}

// take makes what is known what the result tells.
func (j *job) take(n note) {
	j.doubt, j.status = n.unknown, n.status
	j.attempts = max(j.attempts, n.attempts)
	if n.before != [32]byte{} {
		j.before = n.before
	}
}

// applied settles a doubt with what was found out since.
func (j *job) applied(ctx context.Context, found guard.Finding, n note) error {
	if found.Standing != guard.Doubtful {
		return nil // it is the doubt of an earlier rollback, whose answer stands
	}
	n.attempts, n.before = j.attempts, j.before
	head := &guard.Head{Status: n.status, Header: n.header()}
	err := j.o.Guard.Applied(context.WithoutCancel(ctx), j.key, found, head, nil)
	if errors.Is(err, guard.ErrTaken) {
		return nil // by another one who found it out; what is known stays so
	}
	return err
}
